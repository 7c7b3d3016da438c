//! Writes new keys into the slots of a packed cache: a few rows are laid side by side, and go out cell by cell.

use super::append::Rows;
use crate::packed_keys::{GROUP_TOKENS, PackedKeys};

impl Rows<'_> {
    /// Writes `len` tokens from `token` on to the slots from `slot` on, which lie in one block; `rows` is room for a few.
    pub(super) fn pack_run(&self, token: usize, slot: usize, len: usize, rows: &mut Vec<u32>) {
        let [_, num_heads, head_dim] = self.src.shape();
        let block_size = self.cache.shape()[2];
        let keys = PackedKeys::new(self.cache.dtype(), head_dim);
        // Words, so that rows of every type are aligned.
        rows.resize(GROUP_TOKENS * keys.row_bytes() / 4, 0);
        let mut done = 0;
        while done < len {
            let offset = slot % block_size + done;
            let count = PackedKeys::run_len(offset, len - done);
            for head in 0..num_heads {
                for (i, row) in rows.chunks_exact_mut(keys.row_bytes() / 4).take(count).enumerate() {
                    self.read_row(token + done + i, head, row);
                }
                let to = self.cache.at([slot / block_size, head, 0, 0]).cast::<u8>().wrapping_add(keys.offset(offset));
                // SAFETY: slots were checked, and these are in one group.
                unsafe { keys.pack(rows.as_ptr().cast(), count, to) };
            }
            done += count;
        }
    }

    /// Reads a row in the element type of the cache.
    fn read_row(&self, token: usize, head: usize, row: &mut [u32]) {
        let from = self.src.at([token, head, 0]);
        if self.src.dtype() != self.cache.dtype() {
            // SAFETY: the row lies inside its view, and has as many elements as the buffer.
            unsafe { self.convert(from, row.as_mut_ptr().cast(), head) };
            return;
        }
        // SAFETY: the row lies inside its view, and has the bytes of the buffer.
        unsafe { row.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from.cast(), size_of_val(row)) };
    }
}
