//! Weighted sums of the values of a strip, read where they lie, for a few rows at a time.

use std::marker::PhantomData;

use super::ahead::{Asker, LINE_BYTES, PLACES};
use super::{Groups, STRIP_TOKENS, Strip};
use crate::simd::{Bf16Dot, ByteElement, ByteLookup, Element, Vector, widen_pairs};

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

    /// Vector `part` of the unit that lies in the rows at `piece`.
    unsafe fn values(rows: *const *const u8, piece: Piece, part: usize) -> Self::Operand;
    /// The weight at that address, in every lane.
    unsafe fn weight(from: *const u8) -> Self::Operand;
    unsafe fn add(sum: V, values: Self::Operand, weight: Self::Operand) -> V;
}

/// Where a unit lies in the rows of the tokens that one operation takes.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    at: isize,
    /// Bytes of it, or 0 for all.
    part_bytes: usize,
    /// Whether there is only one token left, for an operation that takes two.
    is_single: bool,
}

impl Piece {
    #[inline(always)]
    unsafe fn load<V: Vector>(self, rows: *const *const u8) -> V::Unit {
        // SAFETY: the caller's promise.
        unsafe {
            let from = rows.read().offset(self.at);
            if self.part_bytes == 0 { V::load_unit(from) } else { V::load_part(from, self.part_bytes) }
        }
    }

    /// Zeros take the place of a token that is not there: its weight of 0 would make NaN of anything infinite.
    #[inline(always)]
    unsafe fn load_two<V: Vector>(self, rows: *const *const u8) -> [V::Unit; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let b = if self.is_single { V::load_part(rows.read(), 0) } else { self.load::<V>(rows.add(1)) };
            [self.load::<V>(rows), b]
        }
    }
}

/// Values that are widened to float32, with weights in float32.
pub(crate) struct Widened<E>(PhantomData<E>);

impl<V: Vector, E: Element> ValueForm<V> for Widened<E> {
    const PARTS: usize = E::PARTS;
    const TOKENS: usize = 1;
    const WEIGHT_BYTES: usize = 4;
    type Operand = V;

    #[inline(always)]
    unsafe fn values(rows: *const *const u8, piece: Piece, part: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { E::widen(piece.load::<V>(rows), part) }
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
    unsafe fn values(rows: *const *const u8, piece: Piece, part: usize) -> V::Unit {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b] = piece.load_two::<V>(rows);
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

/// Values of one byte that become bfloat16, of two tokens at a time.
pub(crate) struct BytePairs<E>(PhantomData<E>);

impl<V: ByteLookup, E: ByteElement> ValueForm<V> for BytePairs<E> {
    const PARTS: usize = 4;
    const TOKENS: usize = 2;
    const WEIGHT_BYTES: usize = 2;
    type Operand = V::Unit;

    #[inline(always)]
    unsafe fn values(rows: *const *const u8, piece: Piece, part: usize) -> V::Unit {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b] = piece.load_two::<V>(rows);
            widen_pairs::<V, E>(a, b, part)
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
            match (group.used, V::LANES) {
                (4, 16) => weigh_group::<V, F, 4, 4, 4>(&sums, strip, &mut asker),
                (3, 16) => weigh_group::<V, F, 3, 4, 4>(&sums, strip, &mut asker),
                (2, 16) => weigh_group::<V, F, 2, 8, 8>(&sums, strip, &mut asker),
                (_, 16) => weigh_group::<V, F, 1, 16, 8>(&sums, strip, &mut asker),
                (4, _) => weigh_group::<V, F, 4, 2, 2>(&sums, strip, &mut asker),
                (3, _) => weigh_group::<V, F, 3, 2, 2>(&sums, strip, &mut asker),
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
        let piece = Piece { at: strip.offset + (unit * V::UNIT_BYTES) as isize, part_bytes, is_single: false };
        for step in 0..strip.len / STEP {
            let weights = sums.weights.add(step * V::LANES * F::WEIGHT_BYTES);
            for i in 0..STEP / F::TOKENS {
                let token = step * STEP + i * F::TOKENS;
                if token.is_multiple_of(PLACES) && lines > 0 && asker.is_due() {
                    asker.ask::<V>(lines);
                }
                let weights = weights.add(i * F::TOKENS * F::WEIGHT_BYTES);
                add_tokens::<V, F, ROWS, STEP, WIDTH, FIRST>(&mut total, strip.rows.add(token), piece, weights);
            }
        }
        let whole = strip.len / STEP * STEP;
        let weights = sums.weights.add(whole / STEP * V::LANES * F::WEIGHT_BYTES);
        for i in 0..(strip.len - whole).div_ceil(F::TOKENS) {
            let token = whole + i * F::TOKENS;
            let piece = Piece { is_single: token + 1 == strip.len, ..piece };
            let weights = weights.add(i * F::TOKENS * F::WEIGHT_BYTES);
            add_tokens::<V, F, ROWS, STEP, WIDTH, FIRST>(&mut total, strip.rows.add(token), piece, weights);
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
    rows: *const *const u8,
    piece: Piece,
    weights: *const u8,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut values = [F::values(rows, piece, FIRST); WIDTH];
        for (x, values) in values.iter_mut().enumerate().skip(1) {
            let piece = Piece { at: piece.at + (x / F::PARTS * V::UNIT_BYTES) as isize, ..piece };
            *values = F::values(rows, piece, FIRST + x % F::PARTS);
        }
        for (row, total) in total.iter_mut().enumerate() {
            let weight = F::weight(weights.add(row * STEP * F::WEIGHT_BYTES));
            for (total, values) in total.iter_mut().zip(values) {
                *total = F::add(*total, values, weight);
            }
        }
    }
}
