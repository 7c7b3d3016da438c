//! Dot products of a few query rows with packed keys: a vector is one element of as many tokens as it has lanes, so sums
//! of lanes are never needed.

use super::ahead::{Asker, LINE_BYTES, PLACES};
use super::score::{BytePairs, Pairs, Widened};
use super::{Groups, Panel, STRIP_TOKENS, Strip};
use crate::packed_keys::GROUP_TOKENS;
use crate::simd::{Bf16Dot, ByteElement, ByteLookup, Element, Vector, packed_source, widen_half};

/// Vectors of tokens that are scored side by side, for sums enough to hide how long one takes.
const VECTORS: usize = 2;

/// How a line of packed keys meets the queries.
///
/// # Safety
///
/// As for [`Vector`].
pub(crate) trait PackedForm<V: Vector> {
    /// Products per line and row.
    const STEPS: usize;
    type Operand: Copy;

    /// The 32-bit cell of a packed query, in every lane.
    unsafe fn query(cell: *const f32) -> Self::Operand;
    /// What step `step` of a line multiplies for the tokens of vector `vector`.
    unsafe fn keys(units: [V::Unit; VECTORS], step: usize, vector: usize) -> Self::Operand;
    unsafe fn add(sum: V, keys: Self::Operand, query: Self::Operand) -> V;
    unsafe fn store(keys: Self::Operand, to: *mut f32);
}

const fn sources<V: Vector, E: Element>() -> [[(usize, usize); VECTORS]; 4] {
    let mut sources = [[(0, 0); VECTORS]; 4];
    let mut element = 0;
    while element < E::PARTS {
        // With sixteen lanes a line is one vector of tokens; that of the other group has the same parts.
        sources[element] = if V::LANES == GROUP_TOKENS {
            let (_, part) = packed_source(E::DTYPE, V::LANES, element, 0);
            [(0, part), (1, part)]
        } else {
            [packed_source(E::DTYPE, V::LANES, element, 0), packed_source(E::DTYPE, V::LANES, element, 1)]
        };
        element += 1;
    }
    sources
}

struct Sources<V, E>(std::marker::PhantomData<(V, E)>);

impl<V: Vector, E: Element> Sources<V, E> {
    const OF: [[(usize, usize); VECTORS]; 4] = sources::<V, E>();
}

impl<V: Vector, E: Element> PackedForm<V> for Widened<E> {
    const STEPS: usize = E::PARTS;
    type Operand = V;

    #[inline(always)]
    unsafe fn query(cell: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::splat(cell.read()) }
    }

    #[inline(always)]
    unsafe fn keys(units: [V::Unit; VECTORS], step: usize, vector: usize) -> V {
        let (unit, part) = Sources::<V, E>::OF[step][vector];
        // SAFETY: the caller's promise.
        unsafe { E::widen(units[unit], part) }
    }

    #[inline(always)]
    unsafe fn add(sum: V, keys: V, query: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { keys.mul_add(query, sum) }
    }

    #[inline(always)]
    unsafe fn store(keys: V, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { keys.store(to) }
    }
}

impl<V: Bf16Dot> PackedForm<V> for Pairs {
    const STEPS: usize = 1;
    type Operand = V::Unit;

    #[inline(always)]
    unsafe fn query(cell: *const f32) -> V::Unit {
        // SAFETY: the caller's promise.
        unsafe { V::splat_pair(cell.cast()) }
    }

    #[inline(always)]
    unsafe fn keys(units: [V::Unit; VECTORS], _: usize, vector: usize) -> V::Unit {
        units[vector]
    }

    #[inline(always)]
    unsafe fn add(sum: V, keys: V::Unit, query: V::Unit) -> V {
        // SAFETY: the caller's promise.
        unsafe { sum.dot_pairs(keys, query) }
    }

    #[inline(always)]
    unsafe fn store(keys: V::Unit, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { V::store_unit(keys, to.cast()) }
    }
}

impl<V: ByteLookup, E: ByteElement> PackedForm<V> for BytePairs<E> {
    const STEPS: usize = 2;
    type Operand = V::Unit;

    #[inline(always)]
    unsafe fn query(cell: *const f32) -> V::Unit {
        // SAFETY: the caller's promise.
        unsafe { V::splat_pair(cell.cast()) }
    }

    #[inline(always)]
    unsafe fn keys(units: [V::Unit; VECTORS], step: usize, vector: usize) -> V::Unit {
        // SAFETY: the caller's promise. Half a line is a cell of each token.
        unsafe { widen_half::<V, E>(units[vector], step) }
    }

    #[inline(always)]
    unsafe fn add(sum: V, keys: V::Unit, query: V::Unit) -> V {
        // SAFETY: the caller's promise.
        unsafe { sum.dot_pairs(keys, query) }
    }

    #[inline(always)]
    unsafe fn store(keys: V::Unit, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { V::store_unit(keys, to.cast()) }
    }
}

/// See [`super::ScoreFn`]; the strip starts where a group of packed tokens does.
///
/// # Safety
///
/// As there.
#[inline(always)]
pub(super) unsafe fn score<V: Vector, F: PackedForm<V>>(
    q: *const u8,
    num_rows: usize,
    strip: &Strip,
    scores: *mut f32,
) {
    let q_len = strip.row_bytes.div_ceil(V::UNIT_BYTES) * F::STEPS * V::LANES;
    // SAFETY: the caller's promise; queries and scores of a group lie behind those of the rows before it.
    unsafe {
        let mut asker = Asker::new::<0>(strip.ahead, strip.row_bytes, Groups::count(num_rows));
        for group in Groups::of(num_rows) {
            let q = q.cast::<f32>().add(group.first * q_len);
            let scores = scores.add(group.first * STRIP_TOKENS);
            // Eight sums in any case.
            match group.rows {
                4 => score_group::<V, F, 4, 1>(q, strip, scores, &mut asker),
                2 => score_group::<V, F, 2, 2>(q, strip, scores, &mut asker),
                _ => score_group::<V, F, 1, 4>(q, strip, scores, &mut asker),
            }
        }
    }
}

/// One group against the whole strip, [`VECTORS`] vectors of tokens at a time; successive steps go to `SPLIT` sums.
#[inline(always)]
unsafe fn score_group<V: Vector, F: PackedForm<V>, const ROWS: usize, const SPLIT: usize>(
    q: *const f32,
    strip: &Strip,
    scores: *mut f32,
    asker: &mut Asker,
) {
    let lines_at_once = SPLIT.div_ceil(F::STEPS);
    for first in (0..strip.len).step_by(VECTORS * V::LANES) {
        // SAFETY: the caller's promise; a group is read whole, as far as it lies in the block of its first token.
        unsafe {
            let keys = lines_of::<V>(strip, first);
            let mut sums = [[[V::splat(0.0); VECTORS]; ROWS]; SPLIT];
            for line in (0..strip.row_bytes / 4).step_by(lines_at_once) {
                for i in 0..lines_at_once {
                    let at = (line + i) * LINE_BYTES;
                    // As many lines as are read meanwhile.
                    if (line + i).is_multiple_of(PLACES * GROUP_TOKENS / (VECTORS * V::LANES)) && asker.is_due() {
                        asker.ask::<V>(1);
                    }
                    let units = [V::load_unit(keys[0].wrapping_add(at)), V::load_unit(keys[1].wrapping_add(at))];
                    let q = q.add((line + i) * F::STEPS * ROWS);
                    for step in 0..F::STEPS {
                        let sums = &mut sums[(i * F::STEPS + step) % SPLIT];
                        add_step::<V, F, ROWS>(sums, units, q.add(step * ROWS), step);
                    }
                }
            }
            store_sums(&sums, first, scores);
        }
    }
}

/// Where the units of the tokens from `first` on start: two groups, or two halves of one.
#[inline(always)]
unsafe fn lines_of<V: Vector>(strip: &Strip, first: usize) -> [*const u8; VECTORS] {
    // SAFETY: the caller's promise.
    unsafe {
        let start = strip.rows.add(first).read().wrapping_offset(strip.offset);
        if V::LANES < GROUP_TOKENS {
            return [start, start.wrapping_add(V::UNIT_BYTES)];
        }
        // Behind the last token, addresses are no starts of groups.
        let second = if first + GROUP_TOKENS < strip.len { first + GROUP_TOKENS } else { first };
        [start, strip.rows.add(second).read().wrapping_offset(strip.offset)]
    }
}

#[inline(always)]
unsafe fn add_step<V: Vector, F: PackedForm<V>, const ROWS: usize>(
    sums: &mut [[V; VECTORS]; ROWS],
    units: [V::Unit; VECTORS],
    q: *const f32,
    step: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let keys = [F::keys(units, step, 0), F::keys(units, step, 1)];
        for (row, sums) in sums.iter_mut().enumerate() {
            let q = F::query(q.add(row));
            for (sum, keys) in sums.iter_mut().zip(keys) {
                *sum = F::add(*sum, keys, q);
            }
        }
    }
}

/// Writes sums, of which a vector is the tokens of one row, as steps, of which a vector is a few tokens of each row.
#[inline(always)]
unsafe fn store_sums<V: Vector, const ROWS: usize, const SPLIT: usize>(
    sums: &[[[V; VECTORS]; ROWS]; SPLIT],
    first: usize,
    scores: *mut f32,
) {
    let tokens = V::LANES / ROWS;
    for vector in 0..VECTORS {
        for row in 0..ROWS {
            // SAFETY: the caller's promise: there is room for a strip, and `first` and what lies behind it are within.
            unsafe {
                let mut sum = sums[0][row][vector];
                for others in &sums[1..] {
                    sum = sum.add(others[row][vector]);
                }
                let mut flat = [0_f32; GROUP_TOKENS];
                sum.store(flat.as_mut_ptr());
                let to = scores.add((first + vector * V::LANES) * ROWS + row * tokens);
                for part in 0..ROWS {
                    to.add(part * V::LANES).copy_from_nonoverlapping(flat.as_ptr().add(part * tokens), tokens);
                }
            }
        }
    }
}

/// Lays out keys for the matrix product: lines become steps.
///
/// # Safety
///
/// As for [`super::panels::PackFn`]; the tokens start where a group of packed ones does.
#[inline(always)]
pub(super) unsafe fn pack_keys<V: Vector, F: PackedForm<V>>(panel: &Panel) {
    let columns = GROUP_TOKENS / V::LANES;
    let num_lines = panel.row_bytes / 4;
    for group in 0..panel.len.div_ceil(GROUP_TOKENS) {
        // SAFETY: the caller's promise.
        unsafe {
            let start = panel.rows.add(group * GROUP_TOKENS).read().offset(panel.offset);
            for column in 0..columns {
                let cells = panel.cells.add((group * columns + column) * panel.steps * V::LANES);
                for line in 0..num_lines {
                    let at = start.add(line * LINE_BYTES);
                    let other = if columns == 1 { at } else { at.add(V::UNIT_BYTES) };
                    let units = [V::load_unit(at), V::load_unit(other)];
                    for step in 0..F::STEPS {
                        F::store(F::keys(units, step, column), cells.add((line * F::STEPS + step) * V::LANES));
                    }
                }
                // A query is 0 there, which a key that is not finite would not bear.
                let used = num_lines * F::STEPS;
                cells.add(used * V::LANES).write_bytes(0, (panel.steps - used) * V::LANES);
            }
        }
    }
}
