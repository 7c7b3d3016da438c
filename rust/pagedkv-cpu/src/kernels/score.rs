//! Dot products of a few query rows with the keys of a strip, read where they lie.
//!
//! As many products as a vector has lanes run side by side, and one tree of additions turns their vectors of partial
//! sums into one vector of scores: no horizontal sum per token.

use std::marker::PhantomData;

use super::ahead::{Asker, LINE_BYTES, PLACES};
use super::{Groups, STRIP_TOKENS, Strip};
use crate::simd::{Bf16Dot, ByteElement, ByteLookup, Element, Vector, widen_half};

/// How one unit of keys meets the queries.
///
/// # Safety
///
/// As for [`Vector`].
pub(crate) trait KeyForm<V: Vector> {
    /// Vectors of packed queries per unit of keys and row.
    const QUERY_VECTORS: usize;

    /// Adds the products of `TOKENS` units of keys with `ROWS` queries, packed among `N / TOKENS`, to sums `[row][token]`.
    unsafe fn add<const ROWS: usize, const TOKENS: usize, const N: usize>(
        sums: &mut [V; N],
        q: *const u8,
        keys: [V::Unit; TOKENS],
    );
}

/// Keys that are widened to float32; queries are float32.
pub(crate) struct Widened<E>(PhantomData<E>);

impl<V: Vector, E: Element> KeyForm<V> for Widened<E> {
    const QUERY_VECTORS: usize = E::PARTS;

    #[inline(always)]
    unsafe fn add<const ROWS: usize, const TOKENS: usize, const N: usize>(
        sums: &mut [V; N],
        q: *const u8,
        keys: [V::Unit; TOKENS],
    ) {
        for part in 0..E::PARTS {
            // SAFETY: the caller's promise; queries lie `[part][row]` within a unit.
            unsafe {
                let mut wide = [V::splat(0.0); TOKENS];
                for (wide, unit) in wide.iter_mut().zip(keys) {
                    *wide = E::widen(unit, part);
                }
                for row in 0..ROWS {
                    let q = V::load(q.add((part * (N / TOKENS) + row) * V::UNIT_BYTES).cast());
                    for (token, wide) in wide.iter().enumerate() {
                        sums[row * TOKENS + token] = wide.mul_add(q, sums[row * TOKENS + token]);
                    }
                }
            }
        }
    }
}

/// Bfloat16 keys as they are; queries are bfloat16.
pub(crate) struct Pairs;

impl<V: Bf16Dot> KeyForm<V> for Pairs {
    const QUERY_VECTORS: usize = 1;

    #[inline(always)]
    unsafe fn add<const ROWS: usize, const TOKENS: usize, const N: usize>(
        sums: &mut [V; N],
        q: *const u8,
        keys: [V::Unit; TOKENS],
    ) {
        for row in 0..ROWS {
            // SAFETY: the caller's promise.
            unsafe {
                let q = V::load_unit(q.add(row * V::UNIT_BYTES));
                for (token, unit) in keys.into_iter().enumerate() {
                    sums[row * TOKENS + token] = sums[row * TOKENS + token].dot_pairs(unit, q);
                }
            }
        }
    }
}

/// Keys of one byte that become bfloat16; queries are bfloat16.
pub(crate) struct BytePairs<E>(PhantomData<E>);

impl<V: ByteLookup, E: ByteElement> KeyForm<V> for BytePairs<E> {
    const QUERY_VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn add<const ROWS: usize, const TOKENS: usize, const N: usize>(
        sums: &mut [V; N],
        q: *const u8,
        keys: [V::Unit; TOKENS],
    ) {
        for part in 0..2 {
            // SAFETY: the caller's promise; queries lie `[part][row]` within a unit.
            unsafe {
                let mut wide = keys;
                for wide in &mut wide {
                    *wide = widen_half::<V, E>(*wide, part);
                }
                Pairs::add::<ROWS, TOKENS, N>(sums, q.add(part * (N / TOKENS) * V::UNIT_BYTES), wide);
            }
        }
    }
}

/// See [`super::ScoreFn`].
///
/// # Safety
///
/// As there.
#[inline(always)]
pub(super) unsafe fn score<V: Vector, K: KeyForm<V>>(q: *const u8, num_rows: usize, strip: &Strip, scores: *mut f32) {
    let query_bytes = strip.row_bytes.div_ceil(V::UNIT_BYTES) * K::QUERY_VECTORS * V::UNIT_BYTES;
    // SAFETY: the caller's promise; queries and scores of a group lie behind those of the rows before it.
    unsafe {
        let mut asker = Asker::new::<0>(strip.ahead, strip.row_bytes, Groups::count(num_rows));
        for group in Groups::of(num_rows) {
            let q = q.add(group.first * query_bytes);
            let scores = scores.add(group.first * STRIP_TOKENS);
            match (group.used, V::LANES) {
                (4, 16) => score_group::<V, K, 4, 4, 16>(q, strip, scores, &mut asker),
                (3, 16) => score_group::<V, K, 3, 4, 16>(q, strip, scores, &mut asker),
                (2, 16) => score_group::<V, K, 2, 8, 16>(q, strip, scores, &mut asker),
                (_, 16) => score_group::<V, K, 1, 16, 16>(q, strip, scores, &mut asker),
                (4, _) => score_group::<V, K, 4, 2, 8>(q, strip, scores, &mut asker),
                (3, _) => score_group::<V, K, 3, 2, 8>(q, strip, scores, &mut asker),
                (2, _) => score_group::<V, K, 2, 4, 8>(q, strip, scores, &mut asker),
                _ => score_group::<V, K, 1, 8, 8>(q, strip, scores, &mut asker),
            }
        }
    }
}

/// One group against the whole strip, `TOKENS` keys at a time. `N` is the number of lanes; of the `N / TOKENS` rows that it
/// has room for, `ROWS` are there.
#[inline(always)]
unsafe fn score_group<V: Vector, K: KeyForm<V>, const ROWS: usize, const TOKENS: usize, const N: usize>(
    q: *const u8,
    strip: &Strip,
    scores: *mut f32,
    asker: &mut Asker,
) {
    let (units, part) = (strip.row_bytes / V::UNIT_BYTES, strip.row_bytes % V::UNIT_BYTES);
    let query_bytes = N / TOKENS * K::QUERY_VECTORS * V::UNIT_BYTES;
    for step in 0..strip.len.div_ceil(TOKENS) {
        // SAFETY: the caller's promise; a strip has STRIP_TOKENS addresses, a multiple of TOKENS.
        unsafe {
            let mut rows = [std::ptr::null::<u8>(); TOKENS];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = strip.rows.add(step * TOKENS + i).read().offset(strip.offset);
            }
            let asks = (step * TOKENS).is_multiple_of(PLACES) && asker.is_due();
            let mut sums = [V::splat(0.0); N];
            for unit in 0..units {
                let at = unit * V::UNIT_BYTES;
                if asks && at.is_multiple_of(LINE_BYTES) {
                    asker.ask::<V>(TOKENS.div_ceil(PLACES));
                }
                let mut keys = [V::load_unit(rows[0].add(at)); TOKENS];
                for i in 1..TOKENS {
                    keys[i] = V::load_unit(rows[i].add(at));
                }
                K::add::<ROWS, TOKENS, N>(&mut sums, q.add(unit * query_bytes), keys);
            }
            if part > 0 {
                let at = units * V::UNIT_BYTES;
                if asks && at.is_multiple_of(LINE_BYTES) {
                    asker.ask::<V>(TOKENS.div_ceil(PLACES));
                }
                let mut keys = [V::load_part(rows[0].add(at), part); TOKENS];
                for i in 1..TOKENS {
                    keys[i] = V::load_part(rows[i].add(at), part);
                }
                K::add::<ROWS, TOKENS, N>(&mut sums, q.add(units * query_bytes), keys);
            }
            V::sum_rows(sums).store(scores.add(step * N));
        }
    }
}
