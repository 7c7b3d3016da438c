//! Blocks that transfers read or write, and blocks that come back to whom they belonged.

use super::BlockPool;
use crate::block_list::BlockState;
use crate::ids::{BlockId, NO_NODE};

impl BlockPool {
    /// A transfer begins to read or write the block: nobody else gets it before that transfer ends.
    pub(crate) fn begin_transfer(&mut self, block: BlockId) {
        self.blocks[block.index()].num_transfers += 1;
        self.num_transfers += 1;
    }

    pub(crate) fn end_transfer(&mut self, block: BlockId) {
        let record = &mut self.blocks[block.index()];
        assert!(record.num_transfers > 0, "law 1 is broken: no transfer touches block {}", block.get());
        record.num_transfers -= 1;
        self.num_transfers -= 1;
        let (state, fence, left) = (record.state, record.fence, record.num_transfers);
        if left == 0 && state == BlockState::Fenced && self.list_of(fence).is_none() {
            self.transferring.remove(&mut self.blocks, block);
            self.settle(block);
        }
    }

    pub(crate) fn is_transferred(&self, block: BlockId) -> bool {
        self.blocks[block.index()].num_transfers > 0
    }

    pub(crate) fn epoch(&self, block: BlockId) -> u32 {
        self.blocks[block.index()].epoch
    }

    /// A sequence goes on writing where others may have read: whoever remembers the block must not take it back.
    pub(crate) fn take_over(&mut self, block: BlockId) {
        self.forget(block);
        let record = &mut self.blocks[block.index()];
        record.epoch = record.epoch.wrapping_add(1);
    }

    /// Whether the block still holds what it held when its epoch was this. One that is left over from before a reset of
    /// the cache does not count: its prefix is not to be hit again.
    pub(crate) fn is_unchanged(&self, block: BlockId, epoch: u32) -> bool {
        let record = &self.blocks[block.index()];
        record.epoch == epoch && (record.node == NO_NODE || record.committed && self.prefixes.is_current(record.node))
    }

    /// Whether a hold on the block takes it from those that are available.
    pub(crate) fn is_available(&self, block: BlockId) -> bool {
        matches!(self.blocks[block.index()].state, BlockState::Free | BlockState::Cached)
    }

    /// Takes a hold on a block whose contents are still those that its taker knows, even if it is free.
    pub(crate) fn take_back(&mut self, block: BlockId) {
        if self.blocks[block.index()].state != BlockState::Free {
            return self.hold(block);
        }
        self.free.remove(&mut self.blocks, block);
        let record = &mut self.blocks[block.index()];
        record.state = BlockState::Held;
        record.ref_count = 1;
        self.mark_held();
    }
}
