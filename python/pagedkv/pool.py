"""Bookkeeping without a scheduler: blocks, sequences that hold them, chained hashes, and events of the prefix cache."""

from pagedkv._core import (
    AllBlocksCleared,
    AllocatedSlots,
    BlockPool,
    BlockRemoved,
    BlockStored,
    ComputedBlocks,
    KVCacheManager,
    KVCacheSnapshot,
    KVEventBatch,
    chain_hashes,
)

__all__ = [
    "AllBlocksCleared",
    "AllocatedSlots",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "ComputedBlocks",
    "KVCacheManager",
    "KVCacheSnapshot",
    "KVEventBatch",
    "chain_hashes",
]
