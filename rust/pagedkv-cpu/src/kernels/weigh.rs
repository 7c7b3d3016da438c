//! Weighted sums of the values of a strip, read where they lie, for a few rows at a time.

use std::marker::PhantomData;

use super::ahead::{Asker, LINE_BYTES, PLACES};
use super::{Groups, STRIP_TOKENS, Strip};
use crate::simd::{Bf16Dot, Element, Vector};

/// How values meet their weights.
///
/// # Safety
///
/// As for [`Vector`].
pub(crate) trait ValueForm<V: Vector> {
    /// Vectors that a unit becomes.
    const PARTS: usize;
    /// Tokens that one operation takes.
    const TOKENS: usize;
    const WEIGHT_BYTES: usize;
    type Operand: Copy;

    /// Vector `part` of the unit at byte `at` of the rows from `rows` on; `part_bytes` of it, or all with 0.
    unsafe fn values(rows: *const *const u8, at: isize, part_bytes: usize, part: usize) -> Self::Operand;
    /// The weight at that address, in every lane.
    unsafe fn weight(from: *const u8) -> Self::Operand;
    unsafe fn add(sum: V, values: Self::Operand, weight: Self::Operand) -> V;
}

#[inline(always)]
unsafe fn load<V: Vector>(row: *const u8, at: isize, part_bytes: usize) -> V::Unit {
    // SAFETY: the caller's promise.
    unsafe { if part_bytes == 0 { V::load_unit(row.offset(at)) } else { V::load_part(row.offset(at), part_bytes) } }
}

/// Values that are widened to float32, with weights in float32.
pub(crate) struct Widened<E>(PhantomData<E>);

impl<V: Vector, E: Element> ValueForm<V> for Widened<E> {
    const PARTS: usize = E::PARTS;
    const TOKENS: usize = 1;
    const WEIGHT_BYTES: usize = 4;
    type Operand = V;

    #[inline(always)]
    unsafe fn values(rows: *const *const u8, at: isize, part_bytes: usize, part: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { E::widen(load::<V>(rows.read(), at, part_bytes), part) }
    }

    #[inline(always)]
    unsafe fn weight(from: *const u8) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::splat(from.cast::<f32>().read()) }
    }

    #[inline(always)]
    unsafe fn add(sum: V, values: V, weight: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { values.mul_add(weight, sum) }
    }
}

/// Bfloat16 values of two tokens at a time, with weights rounded to bfloat16.
pub(crate) struct Pairs;

impl<V: Bf16Dot> ValueForm<V> for Pairs {
    const PARTS: usize = 2;
    const TOKENS: usize = 2;
    const WEIGHT_BYTES: usize = 2;
    type Operand = V::Unit;

    #[inline(always)]
    unsafe fn values(rows: *const *const u8, at: isize, part_bytes: usize, part: usize) -> V::Unit {
        // SAFETY: the caller's promise; behind the last token of a strip its address is repeated.
        unsafe {
            let (a, b) = (load::<V>(rows.read(), at, part_bytes), load::<V>(rows.add(1).read(), at, part_bytes));
            if part == 0 { V::pair_up::<0>(a, b) } else { V::pair_up::<1>(a, b) }
        }
    }

    #[inline(always)]
    unsafe fn weight(from: *const u8) -> V::Unit {
        // SAFETY: the caller's promise.
        unsafe { V::splat_pair(from) }
    }

    #[inline(always)]
    unsafe fn add(sum: V, values: V::Unit, weight: V::Unit) -> V {
        // SAFETY: the caller's promise.
        unsafe { sum.dot_pairs(values, weight) }
    }
}

/// The accumulators and weights of one group.
#[derive(Clone, Copy)]
struct Sums {
    acc: *mut f32,
    stride: usize,
    weights: *const u8,
    shrink: *const f32,
}

/// See [`super::WeighFn`].
///
/// # Safety
///
/// As there.
#[inline(always)]
pub(super) unsafe fn weigh<V: Vector, F: ValueForm<V>>(
    acc: *mut f32,
    stride: usize,
    num_rows: usize,
    weights: *const u8,
    shrink: *const f32,
    strip: &Strip,
) {
    // SAFETY: the caller's promise; what belongs to a group lies behind what belongs to the rows before it.
    unsafe {
        let mut asker = Asker::new::<1>(strip.ahead, strip.row_bytes, Groups::count(num_rows));
        for group in Groups::of(num_rows) {
            let sums = Sums {
                acc: acc.add(group.first * stride),
                stride,
                weights: weights.add(group.first * STRIP_TOKENS * 4),
                shrink: shrink.add(group.index * V::LANES),
            };
            // As many accumulators as registers allow: half of them.
            match (group.rows, V::LANES) {
                (4, 16) => weigh_group::<V, F, 4, 4, 4>(&sums, strip, &mut asker),
                (2, 16) => weigh_group::<V, F, 2, 8, 8>(&sums, strip, &mut asker),
                (_, 16) => weigh_group::<V, F, 1, 16, 8>(&sums, strip, &mut asker),
                (4, _) => weigh_group::<V, F, 4, 2, 2>(&sums, strip, &mut asker),
                (2, _) => weigh_group::<V, F, 2, 4, 4>(&sums, strip, &mut asker),
                _ => weigh_group::<V, F, 1, 8, 8>(&sums, strip, &mut asker),
            }
        }
    }
}

/// All vectors of one group, `WIDTH` at a time as long as whole units last, then unit by unit.
#[inline(always)]
unsafe fn weigh_group<V: Vector, F: ValueForm<V>, const ROWS: usize, const STEP: usize, const WIDTH: usize>(
    sums: &Sums,
    strip: &Strip,
    asker: &mut Asker,
) {
    let (units, part) = (strip.row_bytes / V::UNIT_BYTES, strip.row_bytes % V::UNIT_BYTES);
    let mut unit = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while WIDTH > F::PARTS && (unit + WIDTH / F::PARTS) <= units {
            pass::<V, F, ROWS, STEP, WIDTH, 0>(sums, strip, unit, 0, asker);
            unit += WIDTH / F::PARTS;
        }
        while unit < units {
            one_unit::<V, F, ROWS, STEP, WIDTH>(sums, strip, unit, 0, asker);
            unit += 1;
        }
        if part > 0 {
            one_unit::<V, F, ROWS, STEP, WIDTH>(sums, strip, unit, part, asker);
        }
    }
}

/// One unit, in pieces of at most `WIDTH` vectors.
#[inline(always)]
unsafe fn one_unit<V: Vector, F: ValueForm<V>, const ROWS: usize, const STEP: usize, const WIDTH: usize>(
    sums: &Sums,
    strip: &Strip,
    unit: usize,
    part: usize,
    asker: &mut Asker,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match (F::PARTS, WIDTH) {
            (1, _) => pass::<V, F, ROWS, STEP, 1, 0>(sums, strip, unit, part, asker),
            (2, _) => pass::<V, F, ROWS, STEP, 2, 0>(sums, strip, unit, part, asker),
            (_, 2) => {
                pass::<V, F, ROWS, STEP, 2, 0>(sums, strip, unit, part, asker);
                pass::<V, F, ROWS, STEP, 2, 2>(sums, strip, unit, part, asker);
            }
            _ => pass::<V, F, ROWS, STEP, 4, 0>(sums, strip, unit, part, asker),
        }
    }
}

/// How many cache lines of a row start in `count` units from a unit on.
#[inline(always)]
fn first_lines<V: Vector>(unit: usize, count: usize) -> usize {
    ((unit + count) * V::UNIT_BYTES).div_ceil(LINE_BYTES) - (unit * V::UNIT_BYTES).div_ceil(LINE_BYTES)
}

/// Vectors `FIRST` to `FIRST + WIDTH` from a unit on, over all tokens; a step of weights is `STEP` tokens a row.
#[inline(always)]
unsafe fn pass<
    V: Vector,
    F: ValueForm<V>,
    const ROWS: usize,
    const STEP: usize,
    const WIDTH: usize,
    const FIRST: usize,
>(
    sums: &Sums,
    strip: &Strip,
    unit: usize,
    part_bytes: usize,
    asker: &mut Asker,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let acc = sums.acc.add((unit * F::PARTS + FIRST) * V::LANES);
        let mut total = [[V::splat(0.0); WIDTH]; ROWS];
        for (row, total) in total.iter_mut().enumerate() {
            let shrink = V::splat(sums.shrink.add(row * STEP).read());
            for (x, total) in total.iter_mut().enumerate() {
                *total = V::load(acc.add(row * sums.stride + x * V::LANES)).mul(shrink);
            }
        }
        let lines = if FIRST == 0 { first_lines::<V>(unit, WIDTH.div_ceil(F::PARTS)) } else { 0 };
        for step in 0..strip.len / STEP {
            let weights = sums.weights.add(step * V::LANES * F::WEIGHT_BYTES);
            for i in 0..STEP / F::TOKENS {
                let token = step * STEP + i * F::TOKENS;
                if token.is_multiple_of(PLACES) && lines > 0 && asker.is_due() {
                    asker.ask::<V>(lines);
                }
                add_tokens::<V, F, ROWS, STEP, WIDTH, FIRST>(
                    &mut total,
                    strip,
                    token,
                    unit,
                    part_bytes,
                    weights.add(i * F::TOKENS * F::WEIGHT_BYTES),
                );
            }
        }
        let whole = strip.len / STEP * STEP;
        let weights = sums.weights.add(whole / STEP * V::LANES * F::WEIGHT_BYTES);
        for i in 0..(strip.len - whole).div_ceil(F::TOKENS) {
            let token = whole + i * F::TOKENS;
            let weights = weights.add(i * F::TOKENS * F::WEIGHT_BYTES);
            add_tokens::<V, F, ROWS, STEP, WIDTH, FIRST>(&mut total, strip, token, unit, part_bytes, weights);
        }
        for (row, total) in total.iter().enumerate() {
            for (x, total) in total.iter().enumerate() {
                total.store(acc.add(row * sums.stride + x * V::LANES));
            }
        }
    }
}

/// The tokens of one operation.
#[inline(always)]
unsafe fn add_tokens<
    V: Vector,
    F: ValueForm<V>,
    const ROWS: usize,
    const STEP: usize,
    const WIDTH: usize,
    const FIRST: usize,
>(
    total: &mut [[V; WIDTH]; ROWS],
    strip: &Strip,
    token: usize,
    unit: usize,
    part_bytes: usize,
    weights: *const u8,
) {
    let at = strip.offset + (unit * V::UNIT_BYTES) as isize;
    // SAFETY: the caller's promise.
    unsafe {
        let rows = strip.rows.add(token);
        let mut values = [F::values(rows, at, part_bytes, FIRST); WIDTH];
        for (x, values) in values.iter_mut().enumerate().skip(1) {
            let at = at + (x / F::PARTS * V::UNIT_BYTES) as isize;
            *values = F::values(rows, at, part_bytes, FIRST + x % F::PARTS);
        }
        for (row, total) in total.iter_mut().enumerate() {
            let weight = F::weight(weights.add(row * STEP * F::WEIGHT_BYTES));
            for (total, values) in total.iter_mut().zip(values) {
                *total = F::add(*total, values, weight);
            }
        }
    }
}
