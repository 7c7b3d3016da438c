//! The online softmax of one group: scores become weights, and the running maximum and sum go on.
//!
//! Maxima are kept as powers of two: `2^(x log2(e))` is `e^x`. The factor is applied while the maximum is subtracted, in
//! one rounding of a small number, so that scores in the thousands lose nothing. A maximum of minus infinity means that no
//! key was seen yet; weights are then taken against 0, so that nothing is subtracted from infinity. NaN never becomes a
//! maximum and stays in the sum.

use std::f32::consts::LOG2_E;

use crate::simd::math::{exp2, tanh};
use crate::simd::{Bf16Dot, Vector};

/// How a product `q . k` becomes a score.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreRule {
    /// Factor on the product.
    pub(crate) scale: f32,
    /// Scores `s` become `cap * tanh(s / cap)`.
    pub(crate) soft_cap: Option<f32>,
}

/// The scores of one group, `[step][row][token of the step]`.
pub(crate) struct Scores<'a> {
    /// One vector per step. Weights take their place: float32, or bfloat16 in the first half of the memory.
    pub(crate) values: *mut f32,
    pub(crate) num_steps: usize,
    /// Rows of the group: 1, 2 or 4.
    pub(crate) rows: usize,
    /// One vector each: the largest score so far in all lanes of a row, the sum of weights spread over them, and what
    /// earlier weights must be multiplied by.
    pub(crate) max: *mut f32,
    pub(crate) sum: *mut f32,
    pub(crate) shrink: *mut f32,
    pub(crate) rule: &'a ScoreRule,
    /// One vector, or null: slopes of `ALiBi`.
    pub(crate) slopes: *const f32,
    /// The distances from each lane's query to its key, of the first step, or with `has_all_distances` of each.
    pub(crate) distances: *const f32,
    pub(crate) has_all_distances: bool,
    /// Which tokens each row sees, bit by bit, `words` words a row, or null where every row sees all.
    pub(crate) visible: *const u64,
    pub(crate) words: usize,
}

/// What weights are stored as.
pub(crate) trait WeightForm<V: Vector> {
    unsafe fn store(weights: V, scores: *mut f32, step: usize);
}

pub(crate) struct Float;

impl<V: Vector> WeightForm<V> for Float {
    #[inline(always)]
    unsafe fn store(weights: V, scores: *mut f32, step: usize) {
        // SAFETY: the caller's promise.
        unsafe { weights.store(scores.add(step * V::LANES)) }
    }
}

pub(crate) struct Rounded;

impl<V: Bf16Dot> WeightForm<V> for Rounded {
    #[inline(always)]
    unsafe fn store(weights: V, scores: *mut f32, step: usize) {
        // SAFETY: the caller's promise; what is overwritten was read in an earlier step or this one.
        unsafe { weights.store_bf16(scores.cast::<u8>().add(step * V::UNIT_BYTES / 2)) }
    }
}

/// See [`super::SoftenFn`].
///
/// # Safety
///
/// As there.
#[inline(always)]
pub(super) unsafe fn soften<V: Vector, W: WeightForm<V>>(group: &Scores<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match (group.rows, V::LANES) {
            (4, 16) | (2, 8) => soften_group::<V, W, 4>(group),
            (2, 16) | (1, 8) => soften_group::<V, W, 8>(group),
            (1, _) => soften_group::<V, W, 16>(group),
            _ => soften_group::<V, W, 2>(group),
        }
    }
}

#[inline(always)]
unsafe fn soften_group<V: Vector, W: WeightForm<V>, const TOKENS: usize>(group: &Scores<'_>) {
    let is_plain = group.rule.soft_cap.is_none() && group.slopes.is_null() && group.rule.scale > 0.0;
    let factor = if is_plain { group.rule.scale * LOG2_E } else { LOG2_E };
    // SAFETY: the caller's promise: one vector each, and `num_steps` vectors of scores.
    unsafe {
        let factor = V::splat(factor);
        let largest = finish_scores::<V, TOKENS>(group, is_plain).max_of_spans::<TOKENS>().mul(factor);
        let old = V::load(group.max);
        let max = largest.max(old);
        let lowest = V::splat(f32::NEG_INFINITY);
        let shift = max.select(lowest.less(max), V::splat(0.0));
        let shrink = exp2(old.sub(shift));
        let minus_shift = V::splat(0.0).sub(shift);
        let mut sum = V::load(group.sum).mul(shrink);
        for step in 0..group.num_steps {
            let weights = exp2(V::load(group.values.add(step * V::LANES)).fused_mul_add(factor, minus_shift));
            sum = sum.add(weights);
            W::store(weights, group.values, step);
        }
        max.store(group.max);
        sum.store(group.sum);
        shrink.store(group.shrink);
    }
}

/// Caps, biases and masks in place where that is asked for; answers the largest score of each lane.
#[inline(always)]
unsafe fn finish_scores<V: Vector, const TOKENS: usize>(group: &Scores<'_>, is_plain: bool) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let mut largest = V::splat(f32::NEG_INFINITY);
        for step in 0..group.num_steps {
            let at = group.values.add(step * V::LANES);
            let mut x = V::load(at);
            if !is_plain {
                x = bend::<V, TOKENS>(x, group, step);
            }
            if !group.visible.is_null() {
                x = x.select(visible_lanes::<TOKENS>(group, step), V::splat(f32::NEG_INFINITY));
            }
            if !is_plain || !group.visible.is_null() {
                x.store(at);
            }
            largest = x.max(largest);
        }
        largest
    }
}

/// The scores of one step, scaled, capped and biased.
#[inline(always)]
unsafe fn bend<V: Vector, const TOKENS: usize>(x: V, group: &Scores<'_>, step: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let mut x = x.mul(V::splat(group.rule.scale));
        if let Some(cap) = group.rule.soft_cap {
            x = tanh(x.div(V::splat(cap))).mul(V::splat(cap));
        }
        if !group.slopes.is_null() {
            let distance = if group.has_all_distances {
                V::load(group.distances.add(step * V::LANES))
            } else {
                V::load(group.distances).add(V::splat((step * TOKENS) as f32))
            };
            x = V::load(group.slopes).mul_add(distance, x);
        }
        x
    }
}

/// The lanes of a step whose tokens their rows see.
#[inline(always)]
unsafe fn visible_lanes<const TOKENS: usize>(group: &Scores<'_>, step: usize) -> u32 {
    let first = step * TOKENS;
    (0..group.rows).fold(0, |lanes, row| {
        // SAFETY: the caller's promise.
        let word = unsafe { group.visible.add(row * group.words + first / 64).read() };
        let of_step = (word >> (first % 64)) as u32 & ((1 << TOKENS) - 1);
        lanes | of_step << (row * TOKENS)
    })
}
