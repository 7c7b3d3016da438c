//! How packed keys lie: sixteen tokens side by side, so that a vector holds one element of each.
//!
//! The keys of a head in a block take the same bytes as ever. Tokens are in groups of [`GROUP_TOKENS`], and a group lies
//! `[head_dim / x][GROUP_TOKENS][x]`, where the `x` elements of a *cell* are those that one register widens without a
//! shuffle: two in bfloat16 and FP8, else one. The layout is the same on every processor, so blocks may travel.

use crate::view::DType;

/// Tokens that lie side by side in packed keys, of which blocks have whole groups.
pub const GROUP_TOKENS: usize = 16;

/// Elements of a token that lie together.
pub(crate) const fn cell_elements(dtype: DType) -> usize {
    match dtype {
        DType::BF16 | DType::F8E4M3 | DType::F8E5M2 => 2,
        _ => 1,
    }
}

/// The packed keys of a head in a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedKeys {
    cell_bytes: usize,
    num_cells: usize,
}

impl PackedKeys {
    pub(crate) const fn new(dtype: DType, head_dim: usize) -> Self {
        let cell = cell_elements(dtype);
        Self { cell_bytes: cell * dtype.size_bytes(), num_cells: head_dim / cell }
    }

    /// Bytes of a token.
    pub(crate) const fn row_bytes(&self) -> usize {
        self.num_cells * self.cell_bytes
    }

    /// Bytes from the first token's first cell to that of another one.
    pub(crate) const fn offset(&self, token: usize) -> usize {
        token / GROUP_TOKENS * GROUP_TOKENS * self.row_bytes() + token % GROUP_TOKENS * self.cell_bytes
    }

    /// Tokens from `token` on, `left` at most, that are in its group.
    pub(crate) fn run_len(token: usize, left: usize) -> usize {
        left.min(GROUP_TOKENS - token % GROUP_TOKENS)
    }

    /// Packs `count` rows that lie one behind the other, for neighbours of one group whose first cell is at `to`.
    ///
    /// # Safety
    ///
    /// The rows can be read and the cells written, and they share no memory.
    pub(crate) unsafe fn pack(&self, rows: *const u8, count: usize, to: *mut u8) {
        // SAFETY: the caller's promise; cells are copied as bytes.
        unsafe {
            match self.cell_bytes {
                2 => self.pack_cells::<2>(rows, count, to),
                _ => self.pack_cells::<4>(rows, count, to),
            }
        }
    }

    /// Takes `count` rows out again.
    ///
    /// # Safety
    ///
    /// As for [`pack`](Self::pack), the other way around.
    pub(crate) unsafe fn unpack(&self, from: *const u8, count: usize, rows: *mut u8) {
        // SAFETY: as there.
        unsafe {
            match self.cell_bytes {
                2 => self.unpack_cells::<2>(from, count, rows),
                _ => self.unpack_cells::<4>(from, count, rows),
            }
        }
    }

    unsafe fn pack_cells<const BYTES: usize>(&self, rows: *const u8, count: usize, to: *mut u8) {
        let (rows, to) = (rows.cast::<[u8; BYTES]>(), to.cast::<[u8; BYTES]>());
        for cell in 0..self.num_cells {
            for i in 0..count {
                // SAFETY: the caller's promise.
                unsafe { to.add(cell * GROUP_TOKENS + i).write(rows.add(i * self.num_cells + cell).read()) };
            }
        }
    }

    unsafe fn unpack_cells<const BYTES: usize>(&self, from: *const u8, count: usize, rows: *mut u8) {
        let (from, rows) = (from.cast::<[u8; BYTES]>(), rows.cast::<[u8; BYTES]>());
        for cell in 0..self.num_cells {
            for i in 0..count {
                // SAFETY: the caller's promise.
                unsafe { rows.add(i * self.num_cells + cell).write(from.add(cell * GROUP_TOKENS + i).read()) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_from_their_cells_and_fill_a_block() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E4M3] {
            let (head_dim, block_size) = (24, 48);
            let keys = PackedKeys::new(dtype, head_dim);
            let bytes = keys.row_bytes() * block_size;
            let rows: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
            let (mut packed, mut back) = (vec![0_u8; bytes], vec![0_u8; bytes]);
            let mut token = 0;
            for left in [1, 15, 7, 25] {
                let end = token + left;
                while token < end {
                    let len = PackedKeys::run_len(token, end - token);
                    // SAFETY: the tokens are in a group, and the vectors hold the whole block.
                    unsafe {
                        let cells = packed.as_mut_ptr().add(keys.offset(token));
                        keys.pack(rows.as_ptr().add(token * keys.row_bytes()), len, cells);
                        keys.unpack(cells, len, back.as_mut_ptr().add(token * keys.row_bytes()));
                    }
                    token += len;
                }
            }
            let sorted = |mut bytes: Vec<u8>| {
                bytes.sort_unstable();
                bytes
            };
            assert_eq!(back, rows);
            assert_eq!(sorted(packed), sorted(rows));
        }
    }

    #[test]
    fn sixteen_tokens_lie_side_by_side_as_the_layout_says() {
        let place = |dtype: DType, token: usize, element: usize| {
            let (keys, x) = (PackedKeys::new(dtype, 8), cell_elements(dtype));
            keys.offset(token) / dtype.size_bytes() + element / x * x * GROUP_TOKENS + element % x
        };
        assert_eq!((place(DType::F32, 3, 1), place(DType::F16, 3, 1)), (19, 19));
        assert_eq!((place(DType::BF16, 3, 1), place(DType::BF16, 3, 2)), (7, 38));
        assert_eq!((place(DType::F8E4M3, 3, 1), place(DType::F8E4M3, 19, 2)), (7, 166));
    }
}
