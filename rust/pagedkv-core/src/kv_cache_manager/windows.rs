//! Sliding windows: blocks that no query will see again leave, and the null block takes their place.
//!
//! A query at position `p` of a group with window `w` sees the positions above `p - w`. A block leaves when all its
//! positions lie before what the next query sees, counted by *committed* length: tokens that plans in flight compute may
//! be rolled back, guesses may be rejected, and neither may need a block that is gone. Plans in flight still name the
//! block, so it is fenced by them.

use super::KVCacheManager;
use crate::cache_layout::TableSpec;
use crate::ids::NULL_BLOCK;

/// An entry of a sequence's block table that holds the null block now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DepartedColumn {
    pub(crate) sequence: u32,
    pub(crate) epoch: u32,
    pub(crate) group: u32,
    pub(crate) column: u32,
}

impl TableSpec {
    /// Columns that no query at `position` or behind it sees.
    pub(crate) const fn columns_before_window(&self, position: u32) -> u32 {
        match self.sliding_window {
            Some(window) => (position + 1).saturating_sub(window) / self.block_size,
            None => 0,
        }
    }

    /// Most blocks that a sequence holds at once, with its next `num_tokens` tokens computed before any leaves; `None`
    /// where none ever leaves.
    pub(crate) fn most_blocks(&self, num_tokens: u64) -> Option<u64> {
        let window = u64::from(self.sliding_window?);
        Some((window - 1 + num_tokens).div_ceil(u64::from(self.block_size)) + 1)
    }
}

impl KVCacheManager {
    /// Takes the blocks of a sequence that lie before its windows out of its tables, by what is committed.
    pub(super) fn leave_windows(&mut self, index: usize) {
        let sequence = &mut self.sequences[index];
        let len = sequence.committed_len();
        let named_by = sequence.in_flight.last().map(|&(plan, _)| plan);
        for (group, (table, spec)) in sequence.tables.iter_mut().zip(&self.groups).enumerate() {
            let end = spec.columns_before_window(len);
            for column in table.num_left..end {
                let block = std::mem::replace(&mut table.blocks[column as usize], NULL_BLOCK);
                if block == NULL_BLOCK {
                    continue;
                }
                table.num_null += 1;
                self.pool.release(block, named_by);
                if let Some(departed) = &mut self.departed {
                    let (sequence, epoch, group) = (index as u32, sequence.epoch, group as u32);
                    departed.push(DepartedColumn { sequence, epoch, group, column });
                }
            }
            table.num_left = table.num_left.max(end);
        }
    }

    /// Whether a sequence that no plan in flight names still has every block that a query at `position` sees.
    pub(super) fn has_all_that_is_needed_at(&self, index: usize, position: u32) -> bool {
        let mut tables = self.sequences[index].tables.iter().zip(&self.groups);
        tables.all(|(table, spec)| {
            let end = position.div_ceil(spec.block_size);
            table.num_left.min(end) <= spec.columns_before_window(position)
        })
    }
}
