//! Which cached block is reused next, and the order that keeps a prefix longer than what continues it.

use super::BlockPool;
use crate::block_list::{Block, BlockState};
use crate::config::Retention;
use crate::error::Result;
use crate::ids::{BlockId, NO_NODE, NodeId};

impl BlockPool {
    /// Drops a cached block's contents: it becomes free at once. Answers whether it did: a block that is held, fenced or
    /// free stays as it is, and so does one whose prefix others continue.
    ///
    /// # Errors
    /// [`Error::UnknownBlock`](crate::Error::UnknownBlock) for an id outside the pool.
    ///
    /// # Complexity
    /// O(1), and O(1) for each prefix that only this block kept.
    pub fn evict(&mut self, block: BlockId) -> Result<bool> {
        self.check(block)?;
        let record = &self.blocks[block.index()];
        let evictable = record.state == BlockState::Cached && self.prefixes.node(record.node).num_children == 0;
        if evictable {
            self.cached.remove(&mut self.blocks, block);
            self.forget(block);
            self.count_eviction(block);
            self.free.push(&mut self.blocks, block);
        }
        Ok(evictable)
    }

    pub(crate) fn is_evictable(&self, block: BlockId) -> bool {
        self.blocks[block.index()].state == BlockState::Cached
    }

    /// Whether cached prefixes continue the one that the block holds.
    pub(crate) fn carries_descendants(&self, block: BlockId) -> bool {
        self.prefixes.has_children(self.blocks[block.index()].node)
    }

    /// The time of the calls that follow; priorities expire. Time that goes back is ignored.
    pub(crate) fn advance(&mut self, now: f64) {
        self.now = self.now.max(now);
        self.cached.advance(&mut self.blocks, now);
    }

    /// Keeps a block's contents as a request asks.
    pub(crate) fn retain(&mut self, block: BlockId, retention: Retention) {
        self.cached.retain(&mut self.blocks, block, retention);
    }

    /// The cached block that goes next, which no evictable one continues.
    pub(super) fn next_to_reuse(&mut self) -> BlockId {
        // Where all are continued, by what cannot be evicted now, the oldest goes.
        let mut oldest = None;
        loop {
            let block = self.cached.first().expect("the caller counted the available blocks");
            if self.cached.is_in_order() || !self.is_needed_by_descendants(block) {
                return block;
            }
            if oldest == Some(block) {
                return self.first_without_evictable_child();
            }
            if !self.cached.spare(&mut self.blocks, block) {
                oldest = oldest.or(Some(block));
            }
        }
    }

    /// The first evictable block that no evictable one of its group continues at once. Windows of other groups, which keep
    /// nodes in the tree, may hide that there is one.
    fn first_without_evictable_child(&self) -> BlockId {
        let parent = |block: BlockId| {
            let Block { node, group, .. } = self.blocks[block.index()];
            self.before_in_group(node, group).map(|node| (group, node.0))
        };
        let mut parents: Vec<_> = self.cached.iter(&self.blocks).filter_map(parent).collect();
        parents.sort_unstable();
        let is_free_to_go = |&block: &BlockId| {
            let Block { node, group, .. } = self.blocks[block.index()];
            parents.binary_search(&(group, node.0)).is_err()
        };
        self.cached.iter(&self.blocks).find(is_free_to_go).expect("the last of a prefix continues nothing")
    }

    /// Whether the block is its node's last and cached prefixes continue it.
    fn is_needed_by_descendants(&self, block: BlockId) -> bool {
        let Block { node, group, .. } = self.blocks[block.index()];
        // One that is being filled may be taken back.
        let is_twin = |other: BlockId| {
            let record = &self.blocks[other.index()];
            other != block && record.group == group && record.committed
        };
        let outlives = self.spans[usize::from(group)] > 0 && self.prefixes.has_children(node);
        outlives && !self.prefixes.blocks_of(&self.blocks, node).any(is_twin)
    }

    pub(super) fn count_eviction(&mut self, block: BlockId) {
        self.num_evictions += 1;
        if let Some(residency) = &mut self.residency {
            residency.evicted(block, self.now);
        }
    }

    /// The node of the block before that of `node` in a group where a prefix outlives what continues it.
    pub(crate) fn before_in_group(&self, node: NodeId, group: u8) -> Option<NodeId> {
        let span = self.spans[usize::from(group)];
        let before = (0..span).fold(node, |node, _| self.prefixes.node(node).parent);
        (span > 0 && before != NO_NODE).then_some(before)
    }

    /// Puts the last evictable block of `node` in the group, and of what it continues, behind all others: it outlives what
    /// continues it. A block that is held or fenced will get there by itself.
    pub(super) fn keep_behind(&mut self, mut node: NodeId, mut continued_by: BlockId) {
        let group = self.blocks[continued_by.index()].group;
        loop {
            let mut found = None;
            for block in self.prefixes.blocks_of(&self.blocks, node) {
                if self.blocks[block.index()].group != group {
                    continue;
                }
                if self.is_evictable(block) {
                    found = Some(block);
                } else if self.blocks[block.index()].committed {
                    return;
                }
            }
            let Some(block) = found else { return };
            self.cached.keep_behind(&mut self.blocks, block, continued_by);
            continued_by = block;
            let Some(before) = self.before_in_group(node, group) else { return };
            node = before;
        }
    }

    /// What continued a node is gone, or some of it.
    pub(super) fn let_stand_alone(&mut self, node: NodeId) {
        if node == NO_NODE || self.prefixes.node(node).num_children > 0 {
            return;
        }
        let blocks: Vec<_> = self.prefixes.blocks_of(&self.blocks, node).collect();
        for block in blocks.into_iter().filter(|&block| self.is_evictable(block)).collect::<Vec<_>>() {
            self.cached.stand_alone(&mut self.blocks, block);
        }
    }
}
