"""What every kernel must compute, in NumPy and float64: slow, and meant to be obviously right.

Names and arguments are those of the operations. Nothing here is shared with the code it checks.
"""

from pagedkv.reference.attention import (
    attention_tolerance,
    merge_states,
    paged_attention,
    paged_attention_same_precision,
)
from pagedkv.reference.cache import append_kv, copy_blocks, gather_kv, move_kv, swap_blocks

__all__ = [
    "append_kv",
    "attention_tolerance",
    "copy_blocks",
    "gather_kv",
    "merge_states",
    "move_kv",
    "paged_attention",
    "paged_attention_same_precision",
    "swap_blocks",
]
