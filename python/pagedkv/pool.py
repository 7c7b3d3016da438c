"""Bookkeeping without a scheduler: blocks with reference counts, and sequences that hold them."""

from pagedkv._core import AllocatedSlots, BlockPool, ComputedBlocks, KVCacheManager, chain_hashes

__all__ = ["AllocatedSlots", "BlockPool", "ComputedBlocks", "KVCacheManager", "chain_hashes"]
