//! What is asked for while something else is computed, so that memory and arithmetic work at the same time.
//!
//! A core waits for few cache lines at once, so they are asked for evenly over all of the work, and of four places in turn:
//! the memory of each is then read line by line, which lets a processor's own prefetching help, and while one place begins
//! the others go on. One KV head ahead is far enough; farther ones cool down again.

use super::STRIP_TOKENS;
use crate::simd::Vector;

/// Lines that are asked for together, and as many tokens that are scored or weighed meanwhile.
pub(super) const PLACES: usize = 4;

/// Bytes of a cache line.
pub(super) const LINE_BYTES: usize = 64;

/// The rows of a strip as they are asked for: a key and a value of the first half, then of the second.
pub(crate) type RowsAhead = [[*const u8; PLACES]; STRIP_TOKENS / 2];

/// One KV head's keys and values of a strip that will be read soon.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    /// Under the first KV head.
    pub(crate) rows: *const RowsAhead,
    /// Bytes from the first KV head to this one, of keys and of values.
    pub(crate) offsets: [isize; 2],
}

/// How far asking has come.
pub(super) struct Asker {
    ahead: Ahead,
    row: usize,
    end: usize,
    row_bytes: usize,
    /// The lines that are next are so many bytes behind these.
    places: [*const u8; PLACES],
    at: usize,
    /// Asks in one of so many turns, and turns until it does.
    period: usize,
    wait: usize,
}

impl Asker {
    /// Asks for the first half of the rows, or with `HALF` 1 for the second, while so many groups take their turns.
    ///
    /// # Safety
    ///
    /// The rows are there as long as it is used; where they point to does not matter.
    #[inline(always)]
    pub(super) unsafe fn new<const HALF: usize>(ahead: Ahead, row_bytes: usize, num_groups: usize) -> Self {
        let num_rows = STRIP_TOKENS / 4;
        let row = HALF * num_rows;
        let (end, places) = (row + num_rows, [std::ptr::null(); PLACES]);
        let mut asker = Self { ahead, row, end, row_bytes, places, at: 0, period: num_groups, wait: 1 };
        // SAFETY: the caller's promise.
        unsafe { asker.find_places() };
        asker
    }

    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "iterators made all of the kernels slower, by a third")]
    unsafe fn find_places(&mut self) {
        // SAFETY: the promise of `new`.
        let rows = unsafe { self.ahead.rows.cast::<[*const u8; PLACES]>().add(self.row).read() };
        for i in 0..PLACES {
            self.places[i] = rows[i].wrapping_offset(self.ahead.offsets[i % 2]);
        }
    }

    /// Whether this turn asks, a turn being [`PLACES`] tokens of one group.
    #[inline(always)]
    pub(super) fn is_due(&mut self) -> bool {
        self.wait -= 1;
        let is_due = self.wait == 0;
        if is_due {
            self.wait = self.period;
        }
        is_due
    }

    /// Asks for the next lines of each place, so many.
    ///
    /// # Safety
    ///
    /// As for [`Vector`].
    #[inline(always)]
    pub(super) unsafe fn ask<V: Vector>(&mut self, count: usize) {
        for _ in 0..count {
            // SAFETY: the caller's promise, and that of `new`.
            unsafe {
                for i in 0..PLACES {
                    V::prefetch(self.places[i].wrapping_add(self.at));
                }
                self.go_on();
            }
        }
    }

    /// Turns to the lines behind; after the last row, which rounding may lead to, they are any lines.
    #[inline(always)]
    unsafe fn go_on(&mut self) {
        self.at += LINE_BYTES;
        if self.at >= self.row_bytes && self.row + 1 < self.end {
            (self.at, self.row) = (0, self.row + 1);
            // SAFETY: the promise of `new`.
            unsafe { self.find_places() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows at addresses that say what they are: 1,000 bytes a token, values behind all keys.
    fn rows() -> RowsAhead {
        let address = |token: usize, side: usize| std::ptr::without_provenance(1000 * token + 100_000 * side);
        std::array::from_fn(|i| [address(i, 0), address(i, 1), address(16 + i, 0), address(16 + i, 1)])
    }

    fn lines(asker: &mut Asker, count: usize) -> Vec<usize> {
        let mut lines = Vec::new();
        for _ in 0..count {
            lines.extend(asker.places.map(|place| place.addr() + asker.at));
            // SAFETY: the rows live in the test.
            unsafe { asker.go_on() };
        }
        lines
    }

    #[test]
    fn four_places_are_asked_for_in_turn_line_by_line() {
        let rows = rows();
        let ahead = Ahead { rows: &raw const rows, offsets: [7, 9] };
        // SAFETY: as in `lines`.
        let mut asker = unsafe { Asker::new::<0>(ahead, 100, 1) };
        let first = [7, 100_009, 16_007, 116_009];
        let second = first.map(|line| line + 64);
        let next_token = first.map(|line| line + 1000);
        assert_eq!(lines(&mut asker, 3), [first, second, next_token].concat());
    }

    #[test]
    fn both_halves_together_ask_for_each_line_once() {
        let rows = rows();
        let ahead = Ahead { rows: &raw const rows, offsets: [0, 0] };
        // SAFETY: as in `lines`.
        let mut asked = unsafe {
            let mut halves = (Asker::new::<0>(ahead, 128, 1), Asker::new::<1>(ahead, 128, 1));
            [lines(&mut halves.0, 16), lines(&mut halves.1, 16)].concat()
        };
        asked.sort_unstable();
        let all =
            [0, 100_000].into_iter().flat_map(|side| (0..32).flat_map(move |i| [0, 64].map(|at| side + 1000 * i + at)));
        assert_eq!(asked, all.collect::<Vec<_>>());
    }

    #[test]
    fn of_three_groups_one_turn_in_three_asks() {
        let rows = rows();
        // SAFETY: as in `lines`.
        let mut asker = unsafe { Asker::new::<0>(Ahead { rows: &raw const rows, offsets: [0, 0] }, 64, 3) };
        let due: Vec<bool> = (0..7).map(|_| asker.is_due()).collect();
        assert_eq!(due, [true, false, false, true, false, false, true]);
    }
}
