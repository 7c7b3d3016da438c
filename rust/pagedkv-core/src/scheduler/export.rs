//! Block tables of a plan in the forms that other people's kernels read.

use super::Scheduler;
use super::in_flight::Entry;
use crate::error::{Error, Result};
use crate::ids::PlanId;
use crate::table_export::TableExport;

impl Scheduler {
    /// Writes the block tables of a plan's sequences in a cache group, row by row, the rest of each row as null blocks.
    ///
    /// # Errors
    /// [`Error::PlanNotInFlight`]; [`Error::InvalidArgument`] for a group that the pool has not, or where `out` is not one row
    /// of `columns` entries per sequence, or a table does not fit its row.
    ///
    /// # Complexity
    /// O(entries of `out`).
    pub fn write_block_table(&self, plan: PlanId, group: usize, columns: usize, out: &mut [i32]) -> Result<()> {
        self.tables_of(plan, group)?.write_rows(columns, out)
    }

    /// Writes the block tables of a plan's sequences in a cache group end to end: where each starts, its blocks, and the
    /// tokens in its last one. Answers how many blocks there are; `indices` may be longer.
    ///
    /// # Errors
    /// [`Error::PlanNotInFlight`]; [`Error::InvalidArgument`] for a group that the pool has not, or an array of the wrong
    /// length.
    ///
    /// # Complexity
    /// O(blocks of the plan's sequences).
    pub fn write_csr(
        &self,
        plan: PlanId,
        group: usize,
        indptr: &mut [i32],
        indices: &mut [i32],
        last_page_len: &mut [i32],
    ) -> Result<usize> {
        self.tables_of(plan, group)?.write_csr(indptr, indices, last_page_len)
    }

    /// Tables and lengths of a plan's sequences; empty for those that lost their blocks since.
    fn tables_of(&self, plan: PlanId, group: usize) -> Result<TableExport<'_>> {
        self.manager.check_group(group)?;
        let block_size = self.manager.groups[group].block_size;
        let record = self.plans.iter().find(|record| record.id == plan).ok_or(Error::PlanNotInFlight(plan))?;
        let table = |entry: &Entry| {
            let Some(sequence) = self.manager.resident(entry.sequence as usize, entry.epoch) else {
                return (&[][..], 0);
            };
            (&sequence.tables[group].blocks[..entry.end.div_ceil(block_size) as usize], entry.end)
        };
        Ok(TableExport { tables: record.entries.iter().map(table).collect(), block_size })
    }
}
