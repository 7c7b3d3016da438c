//! Weighted sums where a token that some row must not see holds a value that is not finite: 0 times infinity is NaN, so
//! the kernels, which multiply every token with every row, cannot be used. It happens after an overflow, and never fast.

use half::bf16;

use super::MAX_HEAD_DIM;
use super::call::{Call, Path};
use crate::convert::load;

/// Where the weights of a row lie.
pub(super) struct WeightLayout {
    pub(super) weights: *const f32,
    /// Whether they are bfloat16 instead, in the first half of the same memory.
    pub(super) is_paired: bool,
    /// Weights per step, those of a row among them, and which row it is.
    pub(super) lanes: usize,
    pub(super) tokens: usize,
    pub(super) row: usize,
}

impl WeightLayout {
    /// The weight of a token.
    ///
    /// # Safety
    ///
    /// It was written.
    unsafe fn weight(&self, token: usize) -> f32 {
        let index = token / self.tokens * self.lanes + self.row * self.tokens + token % self.tokens;
        // SAFETY: the caller's promise.
        unsafe {
            if self.is_paired {
                bf16::from_bits(self.weights.cast::<u16>().add(index).read()).to_f32()
            } else {
                self.weights.add(index).read()
            }
        }
    }
}

/// `acc = acc * shrink + weights . values` over the tokens whose bit is set; `values` are where each token's row lies
/// under the first KV head, and the bytes from there to the one that is meant.
///
/// # Safety
///
/// The weights were written and the rows can be read, for all tokens whose bit is set.
pub(super) unsafe fn add_visible(
    call: &Call<'_>,
    path: &Path,
    acc: &mut [f32],
    shrink: f32,
    layout: &WeightLayout,
    bits: &[u64],
    values: (*const *const u8, isize),
) {
    let dtype = call.operands.v_cache.dtype();
    let mut row = [0_f32; MAX_HEAD_DIM];
    let row = &mut row[..call.plan.cut.head_dim];
    for a in acc.iter_mut() {
        *a *= shrink;
    }
    for token in (0..bits.len() * 64).filter(|token| bits[token / 64] >> (token % 64) & 1 == 1) {
        // SAFETY: the caller's promise.
        let weight = unsafe {
            load(dtype, values.0.add(token).read().offset(values.1).cast(), row);
            layout.weight(token) / path.kernels.values.scale
        };
        for (cell, a) in acc.iter_mut().enumerate() {
            if let Some(value) = row.get(path.value_cells.element(cell)) {
                *a += weight * value;
            }
        }
    }
}
