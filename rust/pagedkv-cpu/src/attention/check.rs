//! What an attention call refuses, by the name of the argument.

use super::plan::Cut;
use super::{AttentionOptions, HEAD_DIM_STEP, MAX_HEAD_DIM, Operands};
use crate::dims::{
    CACHE, Dims, LSE, QUERIES, SINKS, check_apart, check_cached, check_computed, check_distinct, check_dtype,
    check_keys, check_rows, check_scale,
};
use crate::error::{Error, Result};
use crate::view::{DType, View};

/// Checks everything but the batch.
pub(super) fn check_operands(operands: &Operands, options: &AttentionOptions, threads: usize) -> Result<Cut> {
    let Operands { q, k_cache, v_cache, out, lse, .. } = operands;
    let mut dims = Dims::default();
    dims.bind("q", q, QUERIES)?;
    dims.bind("k_cache", k_cache, CACHE)?;
    dims.bind("v_cache", v_cache, CACHE)?;
    dims.bind("out", out, QUERIES)?;
    check_computed("q", q)?;
    check_rows("q", q)?;
    check_computed("out", out)?;
    check_rows("out", out)?;
    check_distinct("out", out)?;
    check_apart(("out", out), ("q", q))?;
    for (name, cache) in [("k_cache", k_cache), ("v_cache", v_cache)] {
        check_cached(name, cache)?;
        check_apart(("out", out), (name, cache))?;
    }
    check_keys("k_cache", k_cache)?;
    check_rows("v_cache", v_cache)?;
    if let Some(lse) = lse {
        check_lse(&mut dims, operands, lse)?;
    }
    check_per_head(&mut dims, operands)?;
    check_options(options)?;
    check_sizes(q.shape(), k_cache.shape(), options.sliding_window, threads)
}

/// The numbers of each head.
fn check_per_head(dims: &mut Dims, operands: &Operands) -> Result<()> {
    let Operands { out, lse, k_cache, v_cache, .. } = operands;
    let of_q_heads = [("sinks", operands.sinks), ("alibi_slopes", operands.alibi_slopes)];
    let scales = [("k_scale", operands.k_scale, k_cache), ("v_scale", operands.v_scale, v_cache)];
    for (name, values) in of_q_heads {
        let Some(values) = values else { continue };
        dims.bind(name, &values, SINKS)?;
        check_computed(name, &values)?;
    }
    for (name, scale, cache) in scales {
        let Some(scale) = scale else { continue };
        check_scale(name, &scale, cache)?;
    }
    let all = of_q_heads.into_iter().chain(scales.map(|(name, scale, _)| (name, scale)));
    for (name, values) in all.filter_map(|(name, values)| Some((name, values?))) {
        check_apart(("out", out), (name, &values))?;
        if let Some(lse) = lse {
            check_apart(("lse", lse), (name, &values))?;
        }
    }
    Ok(())
}

fn check_lse(dims: &mut Dims, operands: &Operands, lse: &View<2>) -> Result<()> {
    dims.bind("lse", lse, LSE)?;
    check_dtype("lse", lse, DType::F32)?;
    check_distinct("lse", lse)?;
    check_apart(("lse", lse), ("q", &operands.q))?;
    check_apart(("lse", lse), ("out", &operands.out))?;
    check_apart(("lse", lse), ("k_cache", &operands.k_cache))?;
    check_apart(("lse", lse), ("v_cache", &operands.v_cache))
}

fn check_options(options: &AttentionOptions) -> Result<()> {
    let refuse =
        |argument, expected: &str, found: String| Err(Error::Value { argument, expected: expected.to_owned(), found });
    if let Some(scale) = options.softmax_scale
        && !scale.is_finite()
    {
        return refuse("softmax_scale", "a finite number", scale.to_string());
    }
    if let Some(cap) = options.soft_cap
        && !(cap.is_finite() && cap > 0.0)
    {
        return refuse("soft_cap", "a finite number above 0", cap.to_string());
    }
    Ok(())
}

/// Checks the shapes of queries and cache and the window.
pub(super) fn check_sizes(
    [num_tokens, num_q_heads, head_dim]: [usize; 3],
    [num_blocks, num_kv_heads, block_size, _]: [usize; 4],
    sliding_window: Option<usize>,
    threads: usize,
) -> Result<Cut> {
    let refuse =
        |argument, expected: String, found: usize| Err(Error::Value { argument, expected, found: found.to_string() });
    if sliding_window == Some(0) {
        return refuse("sliding_window", "at least 1 (a token sees itself)".to_owned(), 0);
    }
    if !head_dim.is_multiple_of(HEAD_DIM_STEP) || !(1..=MAX_HEAD_DIM).contains(&head_dim) {
        let expected = format!("a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}");
        return refuse("head_dim", expected, head_dim);
    }
    if block_size == 0 {
        return refuse("block_size", "at least 1".to_owned(), block_size);
    }
    if num_kv_heads == 0 {
        return refuse("num_kv_heads", "at least 1".to_owned(), num_kv_heads);
    }
    if num_q_heads == 0 || !num_q_heads.is_multiple_of(num_kv_heads) {
        let expected = format!("a multiple of num_kv_heads={num_kv_heads}");
        return refuse("num_q_heads", expected, num_q_heads);
    }
    Ok(Cut {
        num_tokens,
        num_blocks,
        block_size,
        num_kv_heads,
        group: num_q_heads / num_kv_heads,
        head_dim,
        sliding_window,
        num_threads: threads.max(1),
    })
}
