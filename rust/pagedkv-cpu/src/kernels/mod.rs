//! The inner loops of attention, compiled once per instruction set and chosen at run time.
//!
//! Rows (one query under one query head) are taken in *groups* of 4, 2 or 1 that share each key and value that is read.
//! A vector of scores belongs to one group: its lanes are `LANES / rows` tokens of the first row, then those of the
//! second, and so on. [`Groups`] deals rows out, and everything that is stored per group lies where it says.
#![expect(
    clippy::inline_always,
    reason = "a function that is not inlined into one that enables the instructions cannot use them"
)]
#![expect(
    clippy::cast_ptr_alignment,
    reason = "loads and stores of vectors are unaligned, and cells start where cells start"
)]

mod ahead;
#[cfg(target_arch = "x86_64")]
mod amx;
mod dispatch;
mod panels;
mod product;
mod score;
mod score_packed;
mod soften;
mod weigh;

pub(crate) use ahead::{Ahead, RowsAhead};
#[cfg(target_arch = "x86_64")]
pub(crate) use amx::is_available as is_amx_available;
pub(crate) use dispatch::{Kernels, Rows};
pub(crate) use panels::Panel;
pub(crate) use product::Product;
pub(crate) use soften::{RowScores, ScoreRule, Scores, State};

/// Tokens that few rows are scored against before their softmax is carried on; two blocks of the default size.
pub(crate) const STRIP_TOKENS: usize = 32;

/// Most rows of a group.
pub(crate) const GROUP_ROWS: usize = 4;

/// One KV head's keys or values of a strip of tokens.
pub(crate) struct Strip {
    /// Where each token's row, or its first cell in packed keys, lies under the first KV head: [`STRIP_TOKENS`] addresses,
    /// the last token's repeated where there are fewer.
    pub(crate) rows: *const *const u8,
    /// Tokens.
    pub(crate) len: usize,
    /// Bytes from the first KV head to this one.
    pub(crate) offset: isize,
    /// Bytes of a row.
    pub(crate) row_bytes: usize,
    /// What is asked for meanwhile.
    pub(crate) ahead: Ahead,
}

/// `q . k` for all rows and tokens of a strip: packed queries, number of rows, keys, scores.
///
/// # Safety
///
/// The processor has the instructions; `q` holds the rows packed for this kernel, `scores` has room for
/// [`STRIP_TOKENS`] scores per padded row, and the rows of the strip can be read.
pub(crate) type ScoreFn = unsafe fn(*const u8, usize, &Strip, *mut f32);

/// Carries on the softmax of one group: scores become weights.
///
/// # Safety
///
/// The processor has the instructions, and the pointers of [`Scores`] and [`State`] have room for what they say.
pub(crate) type SoftenFn = unsafe fn(&Scores<'_>, &State);

/// Carries on the softmax of many rows.
///
/// # Safety
///
/// As for [`SoftenFn`].
pub(crate) type SoftenRowsFn = unsafe fn(&RowScores<'_>);

/// `acc = acc * shrink + weights . v` for all rows: accumulators, their stride, number of rows, weights, one vector of
/// `shrink` per group, values.
///
/// # Safety
///
/// As for [`ScoreFn`]; `acc` has room for a stride per padded row.
pub(crate) type WeighFn = unsafe fn(*mut f32, usize, usize, *const u8, *const f32, &Strip);

/// Some rows that are handled together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// Which group it is.
    pub(crate) index: usize,
    /// Its first row.
    pub(crate) first: usize,
    /// Rows that there is room for: 1, 2 or 4.
    pub(crate) rows: usize,
    /// Rows that are there: as many, or 3.
    pub(crate) used: usize,
}

/// Deals rows out to groups: fours, and what is left over to one of 1, 2 or 4.
#[derive(Clone, Debug)]
pub(crate) struct Groups {
    num_rows: usize,
    next: usize,
}

impl Groups {
    #[inline(always)]
    pub(crate) fn of(num_rows: usize) -> Self {
        Self { num_rows, next: 0 }
    }

    /// Rows that buffers need room for.
    pub(crate) const fn padded(num_rows: usize) -> usize {
        num_rows.next_multiple_of(GROUP_ROWS)
    }

    pub(crate) const fn count(num_rows: usize) -> usize {
        num_rows.div_ceil(GROUP_ROWS)
    }
}

impl Iterator for Groups {
    type Item = Group;

    #[inline(always)]
    fn next(&mut self) -> Option<Group> {
        let first = self.next * GROUP_ROWS;
        let used = self.num_rows.saturating_sub(first).min(GROUP_ROWS);
        let rows = match used {
            0 => return None,
            1 => 1,
            2 => 2,
            _ => GROUP_ROWS,
        };
        self.next += 1;
        Some(Group { index: self.next - 1, first, rows, used })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_take_fours_and_pad_three() {
        let rows = |n: usize| Groups::of(n).map(|group| (group.first, group.rows, group.used)).collect::<Vec<_>>();
        assert_eq!(rows(0), []);
        assert_eq!(rows(1), [(0, 1, 1)]);
        assert_eq!(rows(7), [(0, 4, 4), (4, 4, 3)]);
        assert_eq!(rows(10), [(0, 4, 4), (4, 4, 4), (8, 2, 2)]);
    }
}
