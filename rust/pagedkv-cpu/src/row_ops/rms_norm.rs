//! Rows divided by their root mean square.

use std::ops::Range;
use std::slice::{from_raw_parts, from_raw_parts_mut};

use super::{RowWork, Stored, for_rows};
use crate::dims::{Dims, ROWS, check_apart, check_computed, check_distinct, check_dtype, check_rows};
use crate::error::{Error, Result};
use crate::isa::Isa;
use crate::simd::Vector;
use crate::view::View;

/// Partial sums of a row: two vectors of the widest kind, so that one addition need not wait for another.
const NUM_SUMS: usize = 32;

/// Writes `x / sqrt(mean(x^2) + eps)` of each row to `out`, computed in float32 and rounded once.
///
/// # Errors
///
/// Shapes or element types that disagree, element types that are not computed with, rows that are not contiguous, an
/// `out` that overlaps itself or `x`, an `eps` that is negative or not finite, and an `isa` that this processor lacks;
/// nothing is written then.
///
/// # Complexity
///
/// Two passes over a row, of which the second finds it in the first cache.
pub fn rms_norm(x: &View<2>, out: &View<2>, eps: f32, isa: Option<Isa>, threads: usize) -> Result<()> {
    let mut dims = Dims::default();
    dims.bind("x", x, ROWS)?;
    dims.bind("out", out, ROWS)?;
    check_computed("x", x)?;
    check_dtype("out", out, x.dtype())?;
    check_rows("x", x)?;
    check_rows("out", out)?;
    check_distinct("out", out)?;
    check_apart(("out", out), ("x", x))?;
    if !eps.is_finite() || eps < 0.0 {
        let expected = "a finite number, 0 or more".to_owned();
        return Err(Error::Value { argument: "eps", expected, found: eps.to_string() });
    }
    let [num_rows, size] = x.shape();
    for_rows(&Normalize { x: *x, out: *out, eps }, x.dtype(), num_rows, size, isa, threads)
}

struct Normalize {
    x: View<2>,
    out: View<2>,
    eps: f32,
}

impl RowWork for Normalize {
    #[inline(always)]
    unsafe fn run<V: Vector, E: Stored>(&self, rows: Range<usize>) {
        let size = self.x.shape()[1];
        for row in rows {
            if size == 0 {
                return;
            }
            // SAFETY: rows are contiguous and inside their views, which lie apart; the type is the caller's promise.
            let (x, out) = unsafe {
                let x = from_raw_parts(self.x.at([row, 0]).cast::<E>(), size);
                (x, from_raw_parts_mut(self.out.at([row, 0]).cast::<E>(), size))
            };
            let factor = 1.0 / (sum_of_squares(x) / size as f32 + self.eps).sqrt();
            for i in 0..size {
                out[i] = E::narrow(x[i].widen() * factor);
            }
        }
    }
}

#[inline(always)]
fn sum_of_squares<E: Stored>(x: &[E]) -> f32 {
    let mut sums = [0_f32; NUM_SUMS];
    for chunk in 0..x.len() / NUM_SUMS {
        let chunk = &x[chunk * NUM_SUMS..][..NUM_SUMS];
        for i in 0..NUM_SUMS {
            sums[i] += chunk[i].widen() * chunk[i].widen();
        }
    }
    for i in x.len() / NUM_SUMS * NUM_SUMS..x.len() {
        sums[i % NUM_SUMS] += x[i].widen() * x[i].widen();
    }
    let mut width = NUM_SUMS;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            sums[i] += sums[i + width];
        }
    }
    sums[0]
}
