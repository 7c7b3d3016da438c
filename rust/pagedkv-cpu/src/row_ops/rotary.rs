//! Rotary positions: pairs of elements half a head apart are turned by an angle.

use std::ops::Range;

use super::{RowWork, Stored, for_rows};
use crate::dims::{Dims, HEADS, ROTARY, check_apart, check_computed, check_distinct, check_dtype, check_rows};
use crate::error::{Error, Result};
use crate::isa::Isa;
use crate::simd::Vector;
use crate::view::{DType, View};

/// Pairs that are turned at a time: as many as the widest vectors have lanes.
const LANES: usize = 16;

/// Turns the first `num_turned_heads` heads of each token and copies the others, from `x` to `out`.
///
/// Elements `i` and `i + head_dim / 2` are a pair; its angle's cosine and sine are elements `i` and `i + head_dim / 2` of
/// the token's row of `cos_sin`, float32. A pair is turned in float32 and rounded once.
///
/// # Errors
///
/// Shapes or element types that disagree, element types that are not computed with, rows that are not contiguous, heads
/// of an odd number of elements, more turned heads than there are, an `out` that overlaps itself or an input, and an
/// `isa` that this processor lacks; nothing is written then.
///
/// # Complexity
///
/// One pass.
pub fn rotary_embedding(
    x: &View<3>,
    cos_sin: &View<2>,
    out: &View<3>,
    num_turned_heads: usize,
    isa: Option<Isa>,
    threads: usize,
) -> Result<()> {
    let mut dims = Dims::default();
    dims.bind("x", x, HEADS)?;
    dims.bind("cos_sin", cos_sin, ROTARY)?;
    dims.bind("out", out, HEADS)?;
    check_computed("x", x)?;
    check_dtype("cos_sin", cos_sin, DType::F32)?;
    check_dtype("out", out, x.dtype())?;
    check_rows("x", x)?;
    check_rows("cos_sin", cos_sin)?;
    check_rows("out", out)?;
    check_distinct("out", out)?;
    check_apart(("out", out), ("x", x))?;
    check_apart(("out", out), ("cos_sin", cos_sin))?;
    let [num_tokens, num_heads, head_dim] = x.shape();
    if !head_dim.is_multiple_of(2) {
        let expected = "an even number".to_owned();
        return Err(Error::Value { argument: "head_dim", expected, found: head_dim.to_string() });
    }
    if num_turned_heads > num_heads {
        let (expected, found) = (format!("at most num_heads={num_heads}"), num_turned_heads.to_string());
        return Err(Error::Value { argument: "num_turned_heads", expected, found });
    }
    let turn = Turn { x: *x, cos_sin: *cos_sin, out: *out, num_turned_heads };
    for_rows(&turn, x.dtype(), num_tokens, num_heads * head_dim, isa, threads)
}

struct Turn {
    x: View<3>,
    cos_sin: View<2>,
    out: View<3>,
    num_turned_heads: usize,
}

impl RowWork for Turn {
    #[inline(always)]
    unsafe fn run<V: Vector, E: Stored>(&self, tokens: Range<usize>) {
        let [_, num_heads, head_dim] = self.x.shape();
        if num_heads == 0 || head_dim == 0 {
            return;
        }
        for token in tokens {
            let angles = self.cos_sin.at([token, 0]).cast::<f32>();
            let (x, out) = (self.x.at([token, 0, 0]).cast::<E>(), self.out.at([token, 0, 0]).cast::<E>());
            for head in 0..num_heads {
                let at = |view: &View<3>| head as isize * view.strides()[1] as isize;
                let (from, to) = (x.wrapping_offset(at(&self.x)), out.wrapping_offset(at(&self.out)));
                // SAFETY: rows are contiguous and inside their views, the output apart from both inputs; the type is
                // the caller's promise.
                unsafe {
                    if head < self.num_turned_heads {
                        turn_head(from, angles, to, head_dim / 2);
                    } else {
                        to.copy_from_nonoverlapping(from, head_dim);
                    }
                }
            }
        }
    }
}

/// Turns all pairs of a head.
///
/// # Safety
///
/// `from`, `angles` and `to` have twice `half` elements.
#[inline(always)]
unsafe fn turn_head<E: Stored>(from: *const E, angles: *const f32, to: *mut E, half: usize) {
    let whole = half / LANES * LANES;
    for i in (0..whole).step_by(LANES) {
        // SAFETY: the caller's promise.
        unsafe { turn::<E, LANES>(from.add(i), angles.add(i), to.add(i), half) };
    }
    for i in whole..half {
        // SAFETY: the caller's promise.
        unsafe { turn::<E, 1>(from.add(i), angles.add(i), to.add(i), half) };
    }
}

/// Turns `N` pairs, read before any is written: the compiler need not ask whether inputs and output overlap.
///
/// # Safety
///
/// There are `N` elements at each pointer, and as many `half` elements on.
#[inline(always)]
unsafe fn turn<E: Stored, const N: usize>(from: *const E, angles: *const f32, to: *mut E, half: usize) {
    // SAFETY: the caller's promise.
    let (mut low, mut high) = unsafe { (from.cast::<[E; N]>().read(), from.add(half).cast::<[E; N]>().read()) };
    // SAFETY: the caller's promise.
    let (cos, sin) = unsafe { (angles.cast::<[f32; N]>().read(), angles.add(half).cast::<[f32; N]>().read()) };
    for i in 0..N {
        let (a, b) = (low[i].widen(), high[i].widen());
        low[i] = E::narrow(a * cos[i] - b * sin[i]);
        high[i] = E::narrow(b * cos[i] + a * sin[i]);
    }
    // SAFETY: the caller's promise.
    unsafe {
        to.cast::<[E; N]>().write(low);
        to.add(half).cast::<[E; N]>().write(high);
    }
}
