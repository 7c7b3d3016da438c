"""The memory of a paged KV cache and the operations that move keys and values in it."""

from pagedkv._core import Tensor, from_dlpack
from pagedkv.kv_cache.cache import KVCache
from pagedkv.kv_cache.ops import append_kv, copy_blocks, gather_kv, move_kv, swap_blocks

__all__ = ["KVCache", "Tensor", "append_kv", "copy_blocks", "from_dlpack", "gather_kv", "move_kv", "swap_blocks"]
