//! Block tables in the forms that other people's kernels read: rows of one width, or end to end.

use crate::error::{Result, invalid};
use crate::ids::BlockId;

/// Block tables of sequences in one cache group.
pub(crate) struct TableExport<'a> {
    /// Blocks and length in tokens of each sequence.
    pub(crate) tables: Vec<(&'a [BlockId], u32)>,
    pub(crate) block_size: u32,
}

impl TableExport<'_> {
    /// Writes the tables row by row, the rest of each row as null blocks.
    pub(crate) fn write_rows(&self, columns: usize, out: &mut [i32]) -> Result<()> {
        let tables = &self.tables;
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

    /// Writes the tables end to end: where each starts, its blocks, and the tokens in its last one. Answers how many
    /// blocks there are; `indices` may be longer.
    pub(crate) fn write_csr(
        &self,
        indptr: &mut [i32],
        indices: &mut [i32],
        last_page_len: &mut [i32],
    ) -> Result<usize> {
        let tables = &self.tables;
        let total = tables.iter().map(|(table, _)| table.len()).sum();
        for (argument, len, expected) in
            [("indptr", indptr.len(), tables.len() + 1), ("last_page_len", last_page_len.len(), tables.len())]
        {
            if len != expected {
                return invalid(argument, format!("{expected} entries"), len);
            }
        }
        if indices.len() < total {
            return invalid("indices", format!("at least {total} entries"), indices.len());
        }
        let mut at = 0;
        indptr[0] = 0;
        for (i, &(table, seq_len)) in tables.iter().enumerate() {
            indices[at..].iter_mut().zip(table).for_each(|(out, block)| *out = block.get() as i32);
            at += table.len();
            indptr[i + 1] = at as i32;
            last_page_len[i] = seq_len.checked_sub(1).map_or(0, |last| (last % self.block_size + 1) as i32);
        }
        Ok(total)
    }
}
