//! The bookkeeping of a paged KV cache.
