//! Blocks that a sequence writes into while others need them: it gets a copy first.

use smallvec::SmallVec;

use super::growth::take_block;
use super::{KVCacheManager, Tail};
use crate::ids::{BlockId, NO_NODE, PlanId};

/// A block that was copied because the sequence had to write into one that others need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Cache group of the block table.
    pub group: u32,
    /// Entry of the block table that changed.
    pub column: u32,
    /// The block that was there, and whose contents are needed.
    pub source: BlockId,
    /// The block that is there now.
    pub target: BlockId,
}

impl KVCacheManager {
    /// The block of a group into which the next token goes, if it must be copied first.
    pub(crate) fn tail_to_copy(&self, index: usize, group: usize) -> Option<BlockId> {
        self.tail_to_copy_after(index, group, |_| 0)
    }

    /// The same, when others have let go of blocks before: so many holders of each.
    pub(crate) fn tail_to_copy_after(
        &self,
        index: usize,
        group: usize,
        num_released: impl FnOnce(BlockId) -> u32,
    ) -> Option<BlockId> {
        let sequence = &self.sequences[index];
        let block_size = self.groups[group].block_size;
        if sequence.tail == Tail::Own || sequence.num_scheduled.is_multiple_of(block_size) {
            return None;
        }
        let tail = sequence.tables[group].blocks[(sequence.num_scheduled / block_size) as usize];
        let record = &self.pool.blocks[tail.index()];
        let num_released = num_released(tail);
        let is_needed = record.ref_count > 1 + num_released
            || record.num_transfers > 0
            || record.node != NO_NODE && self.pool.carries_descendants(tail)
            || sequence.tail == Tail::Cut && (num_released > 0 || self.pool.has_fence(tail));
        is_needed.then_some(tail)
    }

    /// Whether a transfer reads a block into which the next token goes.
    pub(super) fn tail_is_in_transfer(&self, index: usize) -> bool {
        let sequence = &self.sequences[index];
        sequence.tables.iter().zip(&self.groups).any(|(table, group)| {
            let (column, offset) =
                (sequence.num_scheduled / group.block_size, sequence.num_scheduled % group.block_size);
            offset > 0 && self.pool.blocks[table.blocks[column as usize].index()].num_transfers > 0
        })
    }

    /// Makes the blocks into which the next token goes the sequence's own: by a copy if others hold one, or the cache or a
    /// plan in flight needs it, else by taking it out of the cache. Answers how many were copied.
    pub(super) fn unshare_tail(&mut self, index: usize, plan: PlanId) -> u32 {
        if self.sequences[index].tail == Tail::Own {
            return 0;
        }
        // All are chosen before the first is copied: that may evict what continues another.
        let sources: SmallVec<[_; 4]> = (0..self.groups.len()).map(|group| self.tail_to_copy(index, group)).collect();
        let sequence = &mut self.sequences[index];
        sequence.tail = Tail::Own;
        let mut num_copies = 0;
        for (group, source) in sources.into_iter().enumerate() {
            let column = sequence.num_scheduled / self.groups[group].block_size;
            if sequence.num_scheduled.is_multiple_of(self.groups[group].block_size) {
                continue;
            }
            let entry = &mut sequence.tables[group].blocks[column as usize];
            let Some(source) = source else {
                self.pool.take_over(*entry);
                continue;
            };
            let target = take_block(&mut self.pool, group);
            *entry = target;
            self.pool.release(source, Some(plan));
            let copy = BlockCopy { group: group as u32, column, source, target };
            self.plans.back_mut().expect("a plan is open").copies.push(copy);
            num_copies += 1;
        }
        num_copies
    }
}
