//! Lookups where there are several cache groups, or windows.
//!
//! A prefix is a hit if every full-attention group has all its blocks and every window group those that its last
//! `window - 1` tokens lie in. Each group alone has a greatest such length, below that of the others it may have to look
//! again: what is found here is the fixpoint, the greatest length at which all agree.

use super::{ComputedBlocks, KVCacheManager, Sequence};
use crate::ids::{BlockId, NULL_BLOCK, NodeId};

impl KVCacheManager {
    /// The lookup for a sequence that stands at `found.node`, among the first `limit` tokens.
    pub(super) fn lookup_groups(&self, index: usize, limit: u32, found: &mut ComputedBlocks) {
        let sequence = &self.sequences[index];
        let start = sequence.num_scheduled;
        if !start.is_multiple_of(self.hit_multiple) {
            return;
        }
        let nodes = self.follow_tokens(sequence, limit, found);
        let most = nodes.len() as u32 * self.block_size;
        // From the greatest length down: the first at which every group agrees is the fixpoint.
        let mut end = start + most / self.hit_multiple * self.hit_multiple;
        while end > start && !self.all_groups_have(start, end, found) {
            end -= self.hit_multiple;
        }
        found.num_tokens = end - start;
        if end > start {
            found.node = nodes[((end - start) / self.block_size) as usize - 1];
        }
        for (table, spec) in found.tables.iter_mut().zip(&self.groups) {
            table.truncate(((end - start) / spec.block_size) as usize);
            let before = spec.columns_before_window(end).saturating_sub(start / spec.block_size) as usize;
            let before = before.min(table.len());
            table[..before].fill(NULL_BLOCK);
        }
    }

    /// Follows the sequence's tokens through the tree as far as every full-attention group has blocks; answers the nodes.
    /// The tables of `found` get each group's blocks on the way, the null block where a window group has none.
    fn follow_tokens(&self, sequence: &Sequence, limit: u32, found: &mut ComputedBlocks) -> Vec<NodeId> {
        let mut nodes = Vec::new();
        self.walk(sequence, found.node, sequence.num_scheduled, limit, |node, end| {
            let has_all = self.find_blocks(sequence, node, end, found);
            nodes.extend(has_all.then_some(node));
            has_all
        });
        nodes
    }

    /// Adds the blocks that end at `node`, one per group whose blocks end there. Answers whether the full-attention groups
    /// have theirs; if not, some tables are one block ahead of others.
    fn find_blocks(&self, sequence: &Sequence, node: NodeId, end: u32, found: &mut ComputedBlocks) -> bool {
        let mut has_all = true;
        for (group, spec) in self.groups.iter().enumerate() {
            if !end.is_multiple_of(spec.block_size) {
                continue;
            }
            let block = self.pool.prefixes.usable_group_block(&self.pool.blocks, node, group as u8);
            if spec.sliding_window.is_none() {
                let before = found.tables[group].last().or_else(|| sequence.tables[group].blocks.last());
                // What is computed must not be reachable through a block alone that may never be: a rollback takes that.
                let is_reachable = |&block: &BlockId| {
                    before.is_none_or(|&before| self.is_computed(before)) || !self.is_computed(block)
                };
                has_all &= block.as_ref().is_some_and(is_reachable);
            }
            found.tables[group].push(block.unwrap_or(NULL_BLOCK));
        }
        has_all
    }

    /// Whether a prefix of `end` tokens is a hit for a sequence that has the first `start` already.
    fn all_groups_have(&self, start: u32, end: u32, found: &ComputedBlocks) -> bool {
        found.tables.iter().zip(&self.groups).all(|(table, spec)| {
            let first = spec.columns_before_window(end).saturating_sub(start / spec.block_size);
            let len = (end - start) / spec.block_size;
            table[first.min(len) as usize..len as usize].iter().all(|&block| block != NULL_BLOCK)
        })
    }
}
