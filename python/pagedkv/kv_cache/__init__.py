"""The memory of a paged KV cache and the operations that move keys and values in it."""

from pagedkv.kv_cache.cache import KVCache
from pagedkv.kv_cache.ops import append_kv, copy_blocks, gather_kv

__all__ = ["KVCache", "append_kv", "copy_blocks", "gather_kv"]
