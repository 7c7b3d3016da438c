//! Blocks that are full of known tokens get their place in the prefix tree, and their plan publishes them.

use super::KVCacheManager;
use crate::ids::{NULL_BLOCK, NodeId};

impl KVCacheManager {
    /// Puts every block that is, or is about to be, full of known tokens on its node.
    #[inline]
    pub(super) fn register_filled(&mut self, index: usize) {
        let sequence = &self.sequences[index];
        if (sequence.path_len + 1) * self.block_size <= sequence.num_scheduled && sequence.uses_cache {
            self.register_up_to_now(index);
        }
    }

    /// [`Self::register_filled`], where there is something to register: out of line, as a decode comes here once in a block.
    #[inline(never)]
    fn register_up_to_now(&mut self, index: usize) {
        let block_size = self.block_size;
        let sequence = &self.sequences[index];
        let moved = sequence.moves.as_ref().map_or(u32::MAX, |moves| moves.from);
        let limit = sequence.num_scheduled.min(sequence.tokens.len()).min(moved);
        loop {
            let sequence = &self.sequences[index];
            let end = (sequence.path_len + 1) * block_size;
            if end > limit {
                return;
            }
            let mut key = Vec::new();
            sequence.identity.encode_block(end - block_size, end, &mut key);
            let prefixes = &mut self.pool.prefixes;
            let node = sequence.tokens.with_range(end - block_size, end, &mut self.scratch, |tokens| {
                prefixes.intern(sequence.path, tokens, &key)
            });
            self.sequences[index].path_len += 1;
            self.set_path(index, node);
            for group in 0..self.groups.len() {
                self.register(index, group, end, node);
            }
        }
    }

    /// Puts the block of a group that ends at `end`, if one does, on the node that ends there.
    fn register(&mut self, index: usize, group: usize, end: u32, node: NodeId) {
        let sequence = &self.sequences[index];
        let group_size = self.groups[group].block_size;
        if !end.is_multiple_of(group_size) {
            return;
        }
        let block = sequence.tables[group].blocks[(end / group_size - 1) as usize];
        if block == NULL_BLOCK {
            return;
        }
        if self.pool.blocks[block.index()].node == node {
            // It came back from where it waited for its sequence, and was never taken off.
            return;
        }
        self.pool.attach(block, node);
        if let Some(retention) = sequence.retention {
            self.pool.retain(block, retention);
        }
        match sequence.in_flight.iter().find(|&&(_, after)| end <= after) {
            Some(&(plan, _)) if end > sequence.num_computed => {
                let filling = self.plans.iter_mut().find(|record| record.id == plan);
                filling.expect("a plan that names the sequence is in flight").fills.push(block);
            }
            _ => self.pool.publish(block),
        }
    }
}
