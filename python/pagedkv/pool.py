"""Bookkeeping without a scheduler: blocks, sequences that hold them, chained hashes, and events of the prefix cache."""

from pagedkv._core import (
    AllBlocksCleared,
    AllocatedSlots,
    BatchSlots,
    BlockPool,
    BlockRemoved,
    BlockStored,
    ComputedBlocks,
    ComputedBlocksBatch,
    KVCacheManager,
    KVCacheSnapshot,
    KVEventBatch,
    chain_hashes,
)

__all__ = [
    "AllBlocksCleared",
    "AllocatedSlots",
    "BatchSlots",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "ComputedBlocks",
    "ComputedBlocksBatch",
    "KVCacheManager",
    "KVCacheSnapshot",
    "KVEventBatch",
    "chain_hashes",
]
