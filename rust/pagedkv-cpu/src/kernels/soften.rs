//! The online softmax of a group, or of many rows: scores become weights, and the running maximum and sum go on.
//!
//! Maxima are kept as powers of two: `2^(x log2(e))` is `e^x`. The factor is applied while the maximum is subtracted, in
//! one rounding of a small number, so that scores in the thousands lose nothing. A maximum of minus infinity means that no
//! key was seen yet; weights are then taken against 0, so that nothing is subtracted from infinity. NaN never becomes a
//! maximum and stays in the sum.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use crate::simd::math::{exp2, exp2_roughly, tanh};
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
#[derive(Clone, Copy)]
pub(crate) struct Scores<'a> {
    /// One vector per step. Weights take their place: float32, or bfloat16 in the first half of the memory.
    pub(crate) values: *mut f32,
    pub(crate) num_steps: usize,
    /// Rows of the group: 1, 2 or 4.
    pub(crate) rows: usize,
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

impl Scores<'_> {
    /// Whether scores are products times a factor and nothing else, and the factor that makes powers of two of them.
    #[inline(always)]
    fn factor(&self) -> (bool, f32) {
        let is_plain = self.rule.soft_cap.is_none() && self.slopes.is_null() && self.rule.scale > 0.0;
        (is_plain, if is_plain { self.rule.scale * LOG2_E } else { LOG2_E })
    }
}

/// How far the softmax of a group, or of many rows, has come.
pub(crate) struct State {
    /// The largest score so far: of a group one vector, the same in all lanes of a row; of many rows a number each, with
    /// room for a whole vector behind the last.
    pub(crate) max: *mut f32,
    /// The sum of weights; of a group spread over the lanes of each row.
    pub(crate) sum: *mut f32,
    /// What earlier weights must be multiplied by.
    pub(crate) shrink: *mut f32,
}

/// The scores of rows that lie one after another, each a group of its own.
///
/// Their maxima lag behind: one follows only a score that is 2^[`SLACK`] times as heavy, so that sums and accumulators are
/// seldom multiplied by anything. On the way they may be as many times larger than with maxima that follow at once.
pub(crate) struct RowScores<'a> {
    /// Of the first row; `visible` is that of the item's first query.
    pub(crate) first: Scores<'a>,
    /// Floats from the scores of a row to those of the next, and from its slopes and distances to the next.
    pub(crate) stride: usize,
    pub(crate) slope_stride: usize,
    /// Which rows of the item; the state of the first one lies at a whole vector.
    pub(crate) rows: Range<usize>,
    /// Rows of a query, which see the same.
    pub(crate) group: usize,
    /// Of the item's first row on.
    pub(crate) state: State,
}

/// How much larger than the maximum a score may be, as a power of two.
const SLACK: f32 = 4.0;

impl<'a> RowScores<'a> {
    /// The scores of row `i` of them.
    #[inline(always)]
    fn row(&self, i: usize) -> Scores<'a> {
        let first = &self.first;
        let bits = (self.rows.start + i) / self.group * first.words;
        Scores {
            values: first.values.wrapping_add(i * self.stride),
            slopes: if first.slopes.is_null() {
                first.slopes
            } else {
                first.slopes.wrapping_add(i * self.slope_stride)
            },
            distances: first.distances.wrapping_add(i * self.slope_stride),
            visible: if first.visible.is_null() { first.visible } else { first.visible.wrapping_add(bits) },
            ..*first
        }
    }
}

/// What weights are stored as.
pub(crate) trait WeightForm<V: Vector> {
    /// `2^x`, as exactly as weights are kept.
    unsafe fn power(x: V) -> V;
    unsafe fn store(weights: V, scores: *mut f32, step: usize);
}

pub(crate) struct Float;

impl<V: Vector> WeightForm<V> for Float {
    #[inline(always)]
    unsafe fn power(x: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { exp2(x) }
    }

    #[inline(always)]
    unsafe fn store(weights: V, scores: *mut f32, step: usize) {
        // SAFETY: the caller's promise.
        unsafe { weights.store(scores.add(step * V::LANES)) }
    }
}

pub(crate) struct Rounded;

impl<V: Bf16Dot> WeightForm<V> for Rounded {
    #[inline(always)]
    unsafe fn power(x: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { exp2_roughly(x) }
    }

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
pub(super) unsafe fn soften<V: Vector, W: WeightForm<V>>(group: &Scores<'_>, state: &State) {
    // SAFETY: the caller's promise.
    unsafe {
        match (group.rows, V::LANES) {
            (4, 16) | (2, 8) => soften_group::<V, W, 4>(group, state),
            (2, 16) | (1, 8) => soften_group::<V, W, 8>(group, state),
            (1, _) => soften_group::<V, W, 16>(group, state),
            _ => soften_group::<V, W, 2>(group, state),
        }
    }
}

/// See [`super::SoftenRowsFn`].
///
/// # Safety
///
/// As there.
#[inline(always)]
pub(super) unsafe fn soften_rows<V: Vector, W: WeightForm<V>>(rows: &RowScores<'_>) {
    for first in (0..rows.rows.len()).step_by(V::LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            match V::LANES {
                16 => soften_lanes::<V, W, 16>(rows, first),
                _ => soften_lanes::<V, W, 8>(rows, first),
            }
        }
    }
}

/// As many rows as a vector has lanes: their state goes on in one vector.
#[inline(always)]
unsafe fn soften_lanes<V: Vector, W: WeightForm<V>, const LANES: usize>(rows: &RowScores<'_>, first: usize) {
    let count = LANES.min(rows.rows.len() - first);
    let (is_plain, factor) = rows.first.factor();
    let at = rows.rows.start + first;
    let [max_at, sum_at, shrink_at] =
        [&rows.state.max, &rows.state.sum, &rows.state.shrink].map(|x| x.wrapping_add(at));
    // SAFETY: the caller's promise: a state per lane, and `num_steps` vectors of scores per row.
    unsafe {
        let factor = V::splat(factor);
        let mut largest = [[f32::NEG_INFINITY; LANES]; LANES];
        for (i, largest) in largest.iter_mut().enumerate().take(count) {
            let row = rows.row(first + i);
            finish_scores::<V, LANES>(&row, is_plain).store(largest.as_mut_ptr());
        }
        let largest = largest_of_rows::<V, LANES>(&largest).mul(factor);
        let old = V::load(max_at);
        let max = largest.select(old.add(V::splat(SLACK)).less(largest), old);
        let shift = max.select(V::splat(f32::NEG_INFINITY).less(max), V::splat(0.0));
        let shrink = exp2(old.sub(shift));
        let mut minus_shifts = [0.0; LANES];
        V::splat(0.0).sub(shift).store(minus_shifts.as_mut_ptr());
        let mut sums = [V::splat(0.0); LANES];
        for i in 0..count {
            let values = rows.first.values.add((first + i) * rows.stride);
            let minus_shift = V::splat(minus_shifts[i]);
            let mut sum = V::splat(0.0);
            for step in 0..rows.first.num_steps {
                let x = V::load(values.add(step * V::LANES)).fused_mul_add(factor, minus_shift);
                let weights = W::power(x);
                sum = sum.add(weights);
                W::store(weights, values, step);
            }
            sums[i] = sum;
        }
        max.store(max_at);
        shrink.store(shrink_at);
        V::load(sum_at).mul_add(shrink, V::sum_rows(sums)).store(sum_at);
    }
}

/// The largest value of each row, in the lane of its number.
#[inline(always)]
unsafe fn largest_of_rows<V: Vector, const LANES: usize>(rows: &[[f32; LANES]; LANES]) -> V {
    let mut starts = [rows[0].as_ptr(); LANES];
    for i in 1..LANES {
        starts[i] = rows[i].as_ptr();
    }
    let mut columns = [[0.0_f32; LANES]; LANES];
    // SAFETY: both are squares of as many floats as a vector has lanes.
    unsafe {
        V::transpose(starts.as_ptr(), columns.as_mut_ptr().cast(), LANES);
        let mut largest = V::load(columns[0].as_ptr());
        for column in &columns {
            largest = V::load(column.as_ptr()).max(largest);
        }
        largest
    }
}

#[inline(always)]
unsafe fn soften_group<V: Vector, W: WeightForm<V>, const TOKENS: usize>(group: &Scores<'_>, state: &State) {
    let (is_plain, factor) = group.factor();
    // SAFETY: the caller's promise: one vector each, and `num_steps` vectors of scores.
    unsafe {
        let factor = V::splat(factor);
        let largest = finish_scores::<V, TOKENS>(group, is_plain).max_of_spans::<TOKENS>().mul(factor);
        let old = V::load(state.max);
        let max = largest.max(old);
        let lowest = V::splat(f32::NEG_INFINITY);
        let shift = max.select(lowest.less(max), V::splat(0.0));
        let shrink = exp2(old.sub(shift));
        let minus_shift = V::splat(0.0).sub(shift);
        let mut sum = V::load(state.sum).mul(shrink);
        for step in 0..group.num_steps {
            let weights = W::power(V::load(group.values.add(step * V::LANES)).fused_mul_add(factor, minus_shift));
            sum = sum.add(weights);
            W::store(weights, group.values, step);
        }
        max.store(state.max);
        sum.store(state.sum);
        shrink.store(state.shrink);
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
