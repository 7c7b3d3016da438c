//! Joins the results of two attentions of the same queries over different keys.

use super::MAX_HEAD_DIM;
use crate::convert::{load, store};
use crate::dims::{Dims, LSE, QUERIES, check_apart, check_computed, check_distinct, check_dtype, check_rows};
use crate::error::{Error, Result};
use crate::threads;
use crate::view::{DType, View};

/// A result and its natural logarithm of the sum of exponentials.
#[derive(Clone, Copy, Debug)]
pub struct State {
    /// `(num_tokens, num_q_heads, head_dim)`.
    pub out: View<3>,
    /// Float32 `(num_tokens, num_q_heads)`.
    pub lse: View<2>,
}

/// Writes to `merged` what attention over the keys of `a` and `b` together would have given.
///
/// A state that saw no key, its `lse` minus infinity, has no part in it; two of them give 0 and minus infinity.
///
/// # Errors
///
/// Shapes that disagree, element types that are not computed with, rows that are not contiguous, a `head_dim` above 512,
/// and a result that overlaps itself or a state; nothing is written then.
///
/// # Complexity
///
/// `O(head_dim)` per token and query head.
pub fn merge_states(a: &State, b: &State, merged: &State, threads: usize) -> Result<()> {
    let mut dims = Dims::default();
    let names = [(a, ["out_a", "lse_a"]), (b, ["out_b", "lse_b"]), (merged, ["out", "lse"])];
    for (state, [out, lse]) in names {
        dims.bind(out, &state.out, QUERIES)?;
        dims.bind(lse, &state.lse, LSE)?;
        check_computed(out, &state.out)?;
        check_rows(out, &state.out)?;
        check_dtype(lse, &state.lse, DType::F32)?;
    }
    check_distinct("out", &merged.out)?;
    check_distinct("lse", &merged.lse)?;
    check_apart(("out", &merged.out), ("lse", &merged.lse))?;
    for (state, [out, lse]) in &names[..2] {
        check_apart(("out", &merged.out), (out, &state.out))?;
        check_apart(("out", &merged.out), (lse, &state.lse))?;
        check_apart(("lse", &merged.lse), (out, &state.out))?;
        check_apart(("lse", &merged.lse), (lse, &state.lse))?;
    }
    let [num_tokens, num_q_heads, head_dim] = a.out.shape();
    if head_dim > MAX_HEAD_DIM {
        let (expected, found) = (format!("at most {MAX_HEAD_DIM}"), head_dim.to_string());
        return Err(Error::Value { argument: "head_dim", expected, found });
    }
    threads::for_each(threads, num_tokens * num_q_heads * head_dim, num_tokens, |token| {
        for head in 0..num_q_heads {
            merge_row(a, b, merged, [token, head]);
        }
    });
    Ok(())
}

fn merge_row(a: &State, b: &State, merged: &State, [token, head]: [usize; 2]) {
    let (mut of_a, mut of_b) = ([0_f32; MAX_HEAD_DIM], [0_f32; MAX_HEAD_DIM]);
    let head_dim = a.out.shape()[2];
    let (of_a, of_b) = (&mut of_a[..head_dim], &mut of_b[..head_dim]);
    // SAFETY: rows lie inside their views and are contiguous; the result is apart from both states, and every row of it is
    // written once.
    unsafe {
        load(a.out.dtype(), a.out.at([token, head, 0]), of_a);
        load(b.out.dtype(), b.out.at([token, head, 0]), of_b);
        let lse = |state: &State| state.lse.at([token, head]).cast::<f32>().read();
        let lse = merge(of_a, lse(a), of_b, lse(b));
        store(merged.out.dtype(), of_a, merged.out.at([token, head, 0]));
        merged.lse.at([token, head]).cast::<f32>().write(lse);
    }
}

/// Merges `b` into `a`; answers the logarithm of both sums.
fn merge(a: &mut [f32], lse_a: f32, b: &[f32], lse_b: f32) -> f32 {
    let max = lse_a.max(lse_b);
    if max == f32::NEG_INFINITY {
        a.fill(0.0);
        return max;
    }
    let (weight_a, weight_b) = ((lse_a - max).exp(), (lse_b - max).exp());
    let sum = weight_a + weight_b;
    for (a, b) in a.iter_mut().zip(b) {
        // What has no weight may hold anything.
        let part = |weight: f32, value: f32| if weight == 0.0 { 0.0 } else { weight * value };
        *a = (part(weight_a, *a) + part(weight_b, *b)) / sum;
    }
    max + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_equal_weight_are_averaged() {
        let mut a = [1.0, 3.0];
        let lse = merge(&mut a, 0.5, &[3.0, 5.0], 0.5);
        assert_eq!(a.map(f32::to_bits), [2.0_f32, 4.0].map(f32::to_bits));
        assert!((lse - (0.5 + 2.0_f32.ln())).abs() < 1e-6);
    }

    #[test]
    fn a_state_without_keys_has_no_part_even_when_it_holds_nan() {
        let mut a = [f32::NAN];
        assert_eq!(merge(&mut a, f32::NEG_INFINITY, &[7.0], 1.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(a[0].to_bits(), 7.0_f32.to_bits());
    }

    #[test]
    fn two_states_without_keys_stay_without() {
        let mut a = [f32::NAN];
        let lse = merge(&mut a, f32::NEG_INFINITY, &[1.0], f32::NEG_INFINITY);
        assert_eq!(lse.to_bits(), f32::NEG_INFINITY.to_bits());
        assert_eq!(a[0].to_bits(), 0);
    }
}
