//! Plans in flight, and the blocks without a holder that wait until none of those that name them is left.

use super::BlockPool;
use crate::block_list::{BlockList, BlockState};
use crate::ids::{BlockId, NO_NODE, PlanId};

impl BlockPool {
    pub(crate) fn begin_plan(&mut self) -> PlanId {
        self.newest_plan = self.newest_plan.next();
        self.fenced.push_back((self.newest_plan, BlockList::default()));
        self.newest_plan
    }

    /// Ends the oldest plan in flight: what waited for it is free, or cached, in the order of its release.
    pub(crate) fn end_oldest_plan(&mut self) {
        let (_, mut waiting) = self.fenced.pop_front().expect("a plan is in flight");
        while let Some(block) = waiting.pop_front(&mut self.blocks) {
            self.await_transfers_or_settle(block);
        }
    }

    /// Ends the newest plan in flight, which never ran. What waited for it may be named by an older one as well.
    pub(crate) fn cancel_newest_plan(&mut self) {
        let (_, mut waiting) = self.fenced.pop_back().expect("a plan is in flight");
        while let Some(block) = waiting.pop_front(&mut self.blocks) {
            self.fence_or_settle(block);
        }
    }

    pub(crate) fn is_in_flight(&self, plan: PlanId) -> bool {
        self.fenced.iter().any(|&(in_flight, _)| in_flight == plan)
    }

    /// The oldest plan in flight for whose end blocks wait.
    pub(crate) fn first_fencing_plan(&self) -> Option<PlanId> {
        self.fenced.iter().find(|(_, waiting)| waiting.len() > 0).map(|&(plan, _)| plan)
    }

    /// Whether a plan in flight may name the block through a holder that let go of it.
    pub(crate) fn has_fence(&self, block: BlockId) -> bool {
        self.list_of(self.blocks[block.index()].fence).is_some()
    }

    /// The list of the newest plan in flight up to `fence`: a block's fence may be a plan that was cancelled, while an
    /// older one that names the block as well still runs.
    pub(crate) fn list_of(&self, fence: PlanId) -> Option<usize> {
        self.fenced.iter().rposition(|&(plan, _)| plan <= fence)
    }

    /// The last holder is gone.
    pub(super) fn retire(&mut self, block: BlockId) {
        self.num_held -= 1;
        self.fence_or_settle(block);
    }

    fn fence_or_settle(&mut self, block: BlockId) {
        let Some(list) = self.list_of(self.blocks[block.index()].fence) else {
            return self.await_transfers_or_settle(block);
        };
        self.stamp += 1;
        self.blocks[block.index()].state = BlockState::Fenced;
        self.fenced[list].1.push_back(&mut self.blocks, block);
    }

    /// Nobody holds the block and no plan in flight names it.
    fn await_transfers_or_settle(&mut self, block: BlockId) {
        if self.blocks[block.index()].num_transfers == 0 {
            return self.settle(block);
        }
        self.stamp += 1;
        self.blocks[block.index()].state = BlockState::Fenced;
        self.transferring.push_back(&mut self.blocks, block);
    }

    /// Nobody holds the block, no plan in flight names it and no transfer touches it.
    pub(crate) fn settle(&mut self, block: BlockId) {
        self.stamp += 1;
        let node = self.blocks[block.index()].node;
        if node != NO_NODE && self.blocks[block.index()].committed && self.prefixes.is_current(node) {
            self.blocks[block.index()].state = BlockState::Cached;
            self.cached.push(&mut self.blocks, block);
            let group = self.blocks[block.index()].group;
            if let Some(parent) = self.before_in_group(node, group) {
                self.keep_behind(parent, block);
            }
        } else {
            self.forget(block);
            self.free.push(&mut self.blocks, block);
        }
    }
}
