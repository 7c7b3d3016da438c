//! Block tables of a plan in the forms that other people's kernels read.

use super::Scheduler;
use super::pass::Entry;
use crate::error::{Error, Result, invalid};
use crate::ids::{BlockId, PlanId};

impl Scheduler {
    /// Writes the block tables of a plan's sequences in a cache group, row by row, the rest of each row as null blocks.
    ///
    /// # Errors
    /// [`Error::PlanNotInFlight`]; [`Error::InvalidArgument`] for a group that the pool has not, or where `out` is no multiple of `columns` or too small.
    pub fn write_block_table(&self, plan: PlanId, group: usize, columns: usize, out: &mut [i32]) -> Result<()> {
        let tables = self.tables_of(plan, group)?;
        let widest = tables.iter().map(|(table, _)| table.len()).max().unwrap_or(0);
        if columns < widest || out.len() != columns * tables.len() {
            let expected = format!("{} rows of at least {widest} columns", tables.len());
            return invalid("out", expected, format!("{} entries, {columns} columns", out.len()));
        }
        for ((table, _), row) in tables.iter().zip(out.chunks_exact_mut(columns.max(1))) {
            row.fill(0);
            row.iter_mut().zip(*table).for_each(|(entry, block)| *entry = block.get() as i32);
        }
        Ok(())
    }

    /// Writes the block tables of a plan's sequences in a cache group end to end: where each starts, its blocks, and the tokens in its
    /// last one. Answers how many blocks there are; `indices` may be longer.
    ///
    /// # Errors
    /// [`Error::PlanNotInFlight`]; [`Error::InvalidArgument`] for a group that the pool has not, or an array of the wrong
    /// length.
    pub fn write_csr(
        &self,
        plan: PlanId,
        group: usize,
        indptr: &mut [i32],
        indices: &mut [i32],
        last_page_len: &mut [i32],
    ) -> Result<usize> {
        let tables = self.tables_of(plan, group)?;
        let block_size = self.manager.groups[group].block_size;
        let total = tables.iter().map(|(table, _)| table.len()).sum();
        for (argument, len, least, most) in [
            ("indptr", indptr.len(), tables.len() + 1, tables.len() + 1),
            ("last_page_len", last_page_len.len(), tables.len(), tables.len()),
            ("indices", indices.len(), total, usize::MAX),
        ] {
            if !(least..=most).contains(&len) {
                return invalid(argument, format!("{least} entries"), len);
            }
        }
        let mut at = 0;
        indptr[0] = 0;
        for (i, (table, seq_len)) in tables.into_iter().enumerate() {
            indices[at..].iter_mut().zip(table).for_each(|(out, block)| *out = block.get() as i32);
            at += table.len();
            indptr[i + 1] = at as i32;
            last_page_len[i] = seq_len.checked_sub(1).map_or(0, |last| (last % block_size + 1) as i32);
        }
        Ok(total)
    }

    /// Tables and lengths of a plan's sequences; empty for those that lost their blocks since.
    fn tables_of(&self, plan: PlanId, group: usize) -> Result<Vec<(&[BlockId], u32)>> {
        self.manager.check_group(group)?;
        let block_size = self.manager.groups[group].block_size;
        let record = self.plans.iter().find(|record| record.id == plan).ok_or(Error::PlanNotInFlight(plan))?;
        let table = |entry: &Entry| {
            let Some(sequence) = self.manager.resident(entry.sequence as usize, entry.epoch) else {
                return (&[][..], 0);
            };
            (&sequence.tables[group].blocks[..entry.end.div_ceil(block_size) as usize], entry.end)
        };
        Ok(record.entries.iter().map(table).collect())
    }
}
