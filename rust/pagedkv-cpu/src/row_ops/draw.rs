//! One token of each row of scores, drawn by a given random number.

use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::slice::from_raw_parts;

use super::{RowWork, Stored, for_rows};
use crate::dims::{Dims, SCORES, check_apart, check_computed, check_dtype, check_rows};
use crate::error::{Error, Result};
use crate::isa::Isa;
use crate::simd::Vector;
use crate::simd::math::exp2;
use crate::view::{DType, View};

/// Scores whose weights are summed as one; their sums are added up in float64.
const CHUNK: usize = 256;

/// Vectors that a loop carries on side by side, so that one operation need not wait for another.
const SIDE_BY_SIDE: usize = 4;

/// Writes to `tokens[i]` a token drawn from the softmax of `scores[i] / temperature[i]`: the first one whose cumulative
/// weight exceeds the share `uniform[i]` of the row's whole weight.
///
/// Weights are float32, and their sums do not depend on the type of the scores. A token whose score is minus infinity is
/// never drawn, the first whose score is infinity always. Where a row has a NaN or nothing but minus infinity, which token
/// is drawn means nothing.
///
/// # Errors
///
/// Shapes that disagree, element types that are not computed with, rows that are not contiguous or empty, temperatures
/// that are not finite or not above 0, numbers outside `0..1`, and an `isa` that this processor lacks; nothing is written
/// then.
///
/// # Complexity
///
/// Two passes over a row, of which the second finds it in the second cache.
pub fn draw_tokens(
    scores: &View<2>,
    temperature: &[f32],
    uniform: &[f64],
    tokens: &View<1>,
    isa: Option<Isa>,
    threads: usize,
) -> Result<()> {
    let mut dims = Dims::default();
    dims.bind("scores", scores, SCORES)?;
    dims.bind("tokens", tokens, [SCORES[0]])?;
    check_computed("scores", scores)?;
    check_dtype("tokens", tokens, DType::I32)?;
    check_rows("scores", scores)?;
    check_rows("tokens", tokens)?;
    check_apart(("tokens", tokens), ("scores", scores))?;
    let [num_rows, vocab_size] = scores.shape();
    check_numbers("temperature", temperature, num_rows, "a finite number above 0", |x| *x > 0.0 && x.is_finite())?;
    check_numbers("uniform", uniform, num_rows, "a number from 0 to below 1", |x| (0.0..1.0).contains(x))?;
    if vocab_size == 0 && num_rows > 0 {
        let expected = "above 0".to_owned();
        return Err(Error::Value { argument: "vocab_size", expected, found: "0".to_owned() });
    }
    let draw = Draw { scores: *scores, temperature, uniform, tokens: *tokens };
    for_rows(&draw, scores.dtype(), num_rows, vocab_size, isa, threads)
}

/// Refuses numbers that are not one a row, or that are out of range.
fn check_numbers<T: std::fmt::Display>(
    argument: &'static str,
    numbers: &[T],
    num_rows: usize,
    expected: &str,
    is_good: impl Fn(&T) -> bool,
) -> Result<()> {
    if numbers.len() != num_rows {
        let (expected, found) = (format!("(num_rows={num_rows},)"), format!("({},)", numbers.len()));
        return Err(Error::Shape { argument, expected, found });
    }
    match numbers.iter().find(|number| !is_good(number)) {
        None => Ok(()),
        Some(bad) => Err(Error::Value { argument, expected: expected.to_owned(), found: bad.to_string() }),
    }
}

struct Draw<'a> {
    scores: View<2>,
    temperature: &'a [f32],
    uniform: &'a [f64],
    tokens: View<1>,
}

impl RowWork for Draw<'_> {
    #[inline(always)]
    unsafe fn run<V: Vector, E: Stored>(&self, rows: Range<usize>) {
        let vocab_size = self.scores.shape()[1];
        let mut up_to = vec![0_f64; vocab_size.div_ceil(CHUNK)];
        for row in rows {
            // SAFETY: rows are contiguous and inside their views; instructions and type are the caller's promise.
            unsafe {
                let scores = from_raw_parts(self.scores.at([row, 0]).cast::<E>(), vocab_size);
                let token = draw::<V, E>(scores, self.temperature[row], self.uniform[row], &mut up_to);
                self.tokens.at([row]).cast::<i32>().write(token as i32);
            }
        }
    }
}

/// The token whose cumulative weight exceeds a share of the whole.
///
/// # Safety
///
/// The processor has the instructions.
#[inline(always)]
unsafe fn draw<V: Vector, E: Stored>(scores: &[E], temperature: f32, uniform: f64, up_to: &mut [f64]) -> usize {
    // A temperature next to 0 must not make infinity of what 0 is multiplied by.
    let factor = (LOG2_E / temperature).min(f32::MAX);
    let mut weights = [0_f32; CHUNK];
    // SAFETY: the caller's promise.
    let largest = unsafe { largest::<V, E>(scores, &mut weights) };
    if largest > f32::MAX {
        return scores.iter().position(|score| score.widen() > f32::MAX).expect("the largest score is one of them");
    }
    let mut total = 0_f64;
    for (chunk, sum) in up_to.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        total += unsafe { weigh::<V, E>(chunk_of(scores, chunk), largest, factor, &mut weights) };
        *sum = total;
    }
    let target = total * uniform;
    let chunk = first_above(up_to, target);
    let target = target - if chunk == 0 { 0.0 } else { up_to[chunk - 1] };
    let scores = chunk_of(scores, chunk);
    // SAFETY: the caller's promise.
    unsafe { weigh::<V, E>(scores, largest, factor, &mut weights) };
    let mut cumulative = [0_f64; CHUNK];
    let mut total = 0_f64;
    for i in 0..scores.len() {
        total += f64::from(weights[i]);
        cumulative[i] = total;
    }
    chunk * CHUNK + first_above(&cumulative[..scores.len()], target)
}

#[inline(always)]
fn chunk_of<E>(scores: &[E], chunk: usize) -> &[E] {
    let first = chunk * CHUNK;
    &scores[first..scores.len().min(first + CHUNK)]
}

/// The first place above a target; where rounding leaves nothing above it, the last that adds to the sum.
fn first_above(cumulative: &[f64], target: f64) -> usize {
    let last = cumulative[cumulative.len() - 1];
    let above = cumulative.partition_point(|sum| *sum <= target);
    above.min(cumulative.partition_point(|sum| *sum < last)).min(cumulative.len() - 1)
}

/// The largest score; `room` is overwritten.
///
/// # Safety
///
/// The processor has the instructions.
#[inline(always)]
unsafe fn largest<V: Vector, E: Stored>(scores: &[E], room: &mut [f32; CHUNK]) -> f32 {
    room.fill(f32::NEG_INFINITY);
    // SAFETY: the caller's promise, and vectors inside the array.
    unsafe {
        let mut found = [V::splat(f32::NEG_INFINITY); SIDE_BY_SIDE];
        // The last chunk first: where it is short, what lies behind it is still minus infinity.
        for chunk in (0..scores.len().div_ceil(CHUNK)).rev() {
            let chunk = chunk_of(scores, chunk);
            E::widen_all(chunk, &mut room[..chunk.len()]);
            for i in 0..CHUNK / V::LANES {
                found[i % SIDE_BY_SIDE] = V::load(room.as_ptr().add(i * V::LANES)).max(found[i % SIDE_BY_SIDE]);
            }
        }
        let most = found[0].max(found[1]).max(found[2].max(found[3]));
        most.store(room.as_mut_ptr());
    }
    let mut most = f32::NEG_INFINITY;
    for score in &room[..V::LANES] {
        most = most.max(*score);
    }
    most
}

/// Writes the weights of up to a chunk of scores, zeros behind them, and answers their sum.
///
/// # Safety
///
/// The processor has the instructions.
#[inline(always)]
unsafe fn weigh<V: Vector, E: Stored>(scores: &[E], largest: f32, factor: f32, weights: &mut [f32; CHUNK]) -> f64 {
    E::widen_all(scores, &mut weights[..scores.len()]);
    weights[scores.len()..].fill(f32::NEG_INFINITY);
    let mut lanes = [0_f32; CHUNK];
    // SAFETY: the caller's promise, and vectors inside the arrays.
    unsafe {
        let (largest, factor) = (V::splat(largest), V::splat(factor));
        let mut sums = [V::splat(0.0); SIDE_BY_SIDE];
        for i in 0..CHUNK / V::LANES {
            let at = weights.as_mut_ptr().add(i * V::LANES);
            let weight = exp2(V::load(at).sub(largest).mul(factor));
            weight.store(at);
            sums[i % SIDE_BY_SIDE] = sums[i % SIDE_BY_SIDE].add(weight);
        }
        sums[0].add(sums[1]).add(sums[2].add(sums[3])).store(lanes.as_mut_ptr());
    }
    let mut total = 0_f64;
    for sum in &lanes[..V::LANES] {
        total += f64::from(*sum);
    }
    total
}
