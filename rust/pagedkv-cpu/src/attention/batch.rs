//! What a batch says about its sequences: lengths, queries, blocks.

use std::ops::Range;

use crate::dims::check_dtype;
use crate::error::{Error, Result};
use crate::view::{DType, View};

/// The sequences of one attention call.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Block ids, int32 `(num_rows, max_blocks_per_seq)`; entries beyond a sequence's length are never read.
    pub block_table: View<2>,
    /// The table's row of each sequence; row `s` for sequence `s` by default.
    pub rows: Option<&'a [i32]>,
    /// Tokens of each sequence, those of this step included.
    pub seq_lens: &'a [i32],
    /// Where each sequence's queries start, one more entry than sequences.
    pub query_start_loc: &'a [i32],
    /// What queries of draft trees see of their own step.
    pub tree_mask: Option<TreeMask<'a>>,
}

/// Packed bits that say which of their step's tokens the queries of some sequences see.
///
/// A sequence of `n` queries has either no bytes or `n` rows of as many whole 64-bit words as `n` bits take. Bit `k` of
/// row `i`, counted from the lowest bit of the first byte on, says whether query `i` sees the key of query `k`; the keys
/// before the step it sees as ever. Seen keys of the step stand at successive positions, itself at the last one.
#[derive(Clone, Copy, Debug)]
pub struct TreeMask<'a> {
    /// The rows of all sequences.
    pub bits: &'a [u8],
    /// Where those of each sequence start, in bytes, one more entry than sequences.
    pub start_loc: &'a [i32],
}

impl<'a> TreeMask<'a> {
    /// The rows of a sequence with `num_queries`; none for one that is causal.
    pub(crate) fn rows(&self, sequence: usize, num_queries: usize) -> Result<&'a [u8]> {
        let bounds = [self.start_loc[sequence], self.start_loc[sequence + 1]];
        let expected = num_queries * Self::row_bytes(num_queries);
        let rows = usize::try_from(bounds[0])
            .ok()
            .zip(usize::try_from(bounds[1]).ok())
            .and_then(|(start, end)| self.bits.get(start..end))
            .filter(|rows| rows.is_empty() || rows.len() == expected);
        rows.ok_or_else(|| Error::Element {
            argument: "tree_mask_start_loc",
            index: (sequence + 1).to_string(),
            expected: format!("{} or {expected} more, within tree_mask", bounds[0]),
            found: i64::from(bounds[1]),
        })
    }

    pub(crate) const fn row_bytes(num_queries: usize) -> usize {
        num_queries.div_ceil(64) * 8
    }

    pub(crate) fn check(&self, num_seqs: usize) -> Result<()> {
        if self.start_loc.len() == num_seqs + 1 {
            return Ok(());
        }
        Err(Error::Shape {
            argument: "tree_mask_start_loc",
            expected: format!("(num_seqs + 1={},)", num_seqs + 1),
            found: format!("({},)", self.start_loc.len()),
        })
    }
}

impl Batch<'_> {
    /// The query tokens of each sequence.
    pub(crate) fn queries(&self, num_tokens: usize) -> Result<Vec<Range<usize>>> {
        let starts = self.query_start_loc;
        let argument = "query_start_loc";
        if starts.len() != self.seq_lens.len() + 1 {
            return Err(Error::Shape {
                argument,
                expected: format!("(num_seqs + 1={},)", self.seq_lens.len() + 1),
                found: format!("({},)", starts.len()),
            });
        }
        let refuse = |index: usize, expected: String| Error::Element {
            argument,
            index: index.to_string(),
            expected,
            found: i64::from(starts[index]),
        };
        if starts[0] != 0 {
            return Err(refuse(0, "0".to_owned()));
        }
        if let Some(index) = starts.windows(2).position(|pair| pair[1] < pair[0]) {
            return Err(refuse(index + 1, format!("at least {}, the entry before it", starts[index])));
        }
        let last = starts.len() - 1;
        if starts[last] as usize > num_tokens {
            return Err(refuse(last, format!("at most num_tokens={num_tokens}")));
        }
        Ok(starts.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect())
    }
}

/// Lengths as sizes, or the first negative one.
pub(crate) fn check_seq_lens(seq_lens: &[i32]) -> Result<Vec<usize>> {
    let check = |(index, len): (usize, &i32)| {
        usize::try_from(*len).map_err(|_| Error::Element {
            argument: "seq_lens",
            index: index.to_string(),
            expected: "a length".to_owned(),
            found: i64::from(*len),
        })
    };
    seq_lens.iter().enumerate().map(check).collect()
}

/// A block table whose entries are checked as they are read.
pub(crate) struct BlockTable<'a> {
    table: &'a View<2>,
    rows: Option<&'a [i32]>,
    num_blocks: usize,
    block_size: usize,
}

impl<'a> BlockTable<'a> {
    pub(crate) fn new(
        table: &'a View<2>,
        rows: Option<&'a [i32]>,
        num_seqs: usize,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self> {
        check_dtype("block_table", table, DType::I32)?;
        let num_rows = table.shape()[0];
        let Some(rows) = rows else {
            if num_rows < num_seqs {
                return Err(Error::Shape {
                    argument: "block_table",
                    expected: format!("(at least num_seqs={num_seqs}, max_blocks_per_seq)"),
                    found: crate::dims::shape_text(&table.shape()),
                });
            }
            return Ok(Self { table, rows: None, num_blocks, block_size });
        };
        if rows.len() != num_seqs {
            return Err(Error::Shape {
                argument: "rows",
                expected: format!("(num_seqs={num_seqs},)"),
                found: format!("({},)", rows.len()),
            });
        }
        let outside = |row: &i32| usize::try_from(*row).is_ok_and(|row| row < num_rows);
        if let Some(index) = rows.iter().position(|row| !outside(row)) {
            return Err(Error::Element {
                argument: "rows",
                index: index.to_string(),
                expected: format!("a row below {num_rows}"),
                found: i64::from(rows[index]),
            });
        }
        Ok(Self { table, rows: Some(rows), num_blocks, block_size })
    }

    /// The blocks that hold `tokens` of a sequence, in order.
    pub(crate) fn blocks(&self, sequence: usize, tokens: Range<usize>) -> Result<Vec<u32>> {
        let row = self.rows.map_or(sequence, |rows| rows[sequence] as usize);
        let columns = tokens.start / self.block_size..tokens.end.div_ceil(self.block_size);
        if tokens.is_empty() {
            return Ok(Vec::new());
        }
        let max_blocks = self.table.shape()[1];
        if columns.end > max_blocks {
            return Err(Error::Element {
                argument: "seq_lens",
                index: sequence.to_string(),
                expected: format!(
                    "at most {} ({max_blocks} blocks of {})",
                    max_blocks * self.block_size,
                    self.block_size
                ),
                found: tokens.end as i64,
            });
        }
        columns.map(|column| self.block(row, column)).collect()
    }

    fn block(&self, row: usize, column: usize) -> Result<u32> {
        let block: i32 = self.table.get([row, column]);
        match u32::try_from(block) {
            Ok(id) if (id as usize) < self.num_blocks => Ok(id),
            _ => Err(Error::Element {
                argument: "block_table",
                index: format!("{row}, {column}"),
                expected: format!("a block below {}", self.num_blocks),
                found: i64::from(block),
            }),
        }
    }
}
