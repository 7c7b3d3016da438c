//! Discrete-event simulation around the `pagedkv-core` scheduler.
