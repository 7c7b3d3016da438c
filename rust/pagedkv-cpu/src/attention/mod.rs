//! Attention over blocks: decode, prefill, and both in one batch.
//!
//! A [`plan`] cuts the batch into items of (sequence, KV head, query tile, key range). Each item keeps all query heads
//! of its KV head, widens every tile of keys and values to float32 once for all of them, and folds it into an online
//! softmax ([`kernel`]). Long sequences with few queries are cut along the keys as well, and the pieces are merged in
//! order ([`merge`]). Cuts fall at fixed positions, so a result depends neither on the number of threads nor on the
//! rest of the batch.

mod batch;
mod kernel;
mod merge;
mod plan;

pub use batch::{Batch, TreeMask};
pub(crate) use batch::{BlockTable, check_seq_lens};

use std::sync::OnceLock;

use crate::dims::{
    CACHE, Dims, LSE, QUERIES, SINKS, check_apart, check_computed, check_distinct, check_dtype, check_rows,
};
use crate::error::{Error, Result};
use crate::threads;
use crate::view::{DType, View};
use kernel::{Kernel, Partial};
use plan::{Cut, Plan};

/// `head_dim` is a multiple of this.
const HEAD_DIM_STEP: usize = crate::math::LANES;
const MAX_HEAD_DIM: usize = 512;

/// The arrays of one attention call.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// Queries, `(num_tokens, num_q_heads, head_dim)`.
    pub q: View<3>,
    /// Keys of one layer, `(num_blocks, num_kv_heads, block_size, head_dim)`.
    pub k_cache: View<4>,
    /// Values of one layer, of the same shape.
    pub v_cache: View<4>,
    /// The result, of the shape of `q`.
    pub out: View<3>,
    /// Natural logarithm of the sum of exponentials, float32 `(num_tokens, num_q_heads)`.
    pub lse: Option<View<2>>,
    /// A further score of each query head, `(num_q_heads,)`, that takes a share of the weights and has no value.
    pub sinks: Option<View<1>>,
}

/// How scores become weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionOptions {
    /// Factor on `q . k`; `1 / sqrt(head_dim)` by default.
    pub softmax_scale: Option<f32>,
    /// Keys that a query sees, itself included: those at positions above `position - sliding_window`.
    pub sliding_window: Option<usize>,
    /// Scores `s` become `soft_cap * tanh(s / soft_cap)`, after the scale.
    pub soft_cap: Option<f32>,
}

/// Causal attention of the queries in `operands.q` over the cached keys and values that `batch` names.
///
/// Query `i` of a sequence with `n` queries and length `L` sits at position `L - n + i` and sees the keys up to itself.
/// A query that sees no key gives 0 and an `lse` of minus infinity; so does a token that belongs to no sequence.
/// A sink is neither scaled nor capped, and counts in the `lse` of a query that sees a key.
/// Slots that no query sees are never read into the result, whatever they hold.
///
/// # Errors
///
/// Shapes that disagree, element types that are not computed with, rows that are not contiguous, outputs that overlap
/// themselves or an input, options out of range, lengths beyond the table and block ids outside the cache. Nothing is
/// written then.
///
/// # Complexity
///
/// `O(num_q_heads * head_dim)` per pair of a query and a key that it sees, `O(blocks)` to check the table.
pub fn paged_attention(
    operands: &Operands,
    batch: &Batch<'_>,
    options: &AttentionOptions,
    threads: usize,
) -> Result<()> {
    let cut = check_operands(operands, options)?;
    let plan = Plan::new(batch, &cut)?;
    let kernel = Kernel::new(operands, options, &plan);
    let partials: Vec<OnceLock<Partial>> = (0..plan.num_partials).map(|_| OnceLock::new()).collect();
    threads::for_each(threads, plan.work, plan.items.len(), |index| {
        kernel.run(&plan.items[index], &partials);
    });
    threads::for_each(threads, plan.merge_work, plan.merges.len(), |index| {
        merge::run(&kernel, &plan.merges[index], &partials);
    });
    kernel.clear_tokens(plan.num_tokens..cut.num_tokens);
    Ok(())
}

fn check_operands(operands: &Operands, options: &AttentionOptions) -> Result<Cut> {
    let Operands { q, k_cache, v_cache, out, lse, sinks } = operands;
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
        check_computed(name, cache)?;
        check_rows(name, cache)?;
        check_apart(("out", out), (name, cache))?;
    }
    if let Some(lse) = lse {
        check_lse(&mut dims, operands, lse)?;
    }
    if let Some(sinks) = sinks {
        dims.bind("sinks", sinks, SINKS)?;
        check_computed("sinks", sinks)?;
        check_apart(("out", out), ("sinks", sinks))?;
    }
    check_options(options)?;
    check_sizes(operands, options)
}

fn check_lse(dims: &mut Dims, operands: &Operands, lse: &View<2>) -> Result<()> {
    dims.bind("lse", lse, LSE)?;
    check_dtype("lse", lse, DType::F32)?;
    check_distinct("lse", lse)?;
    check_apart(("lse", lse), ("q", &operands.q))?;
    check_apart(("lse", lse), ("out", &operands.out))?;
    if let Some(sinks) = &operands.sinks {
        check_apart(("lse", lse), ("sinks", sinks))?;
    }
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
    if options.sliding_window == Some(0) {
        return refuse("sliding_window", "at least 1 (a token sees itself)", "0".to_owned());
    }
    if let Some(cap) = options.soft_cap
        && !(cap.is_finite() && cap > 0.0)
    {
        return refuse("soft_cap", "a finite number above 0", cap.to_string());
    }
    Ok(())
}

fn check_sizes(operands: &Operands, options: &AttentionOptions) -> Result<Cut> {
    let [num_tokens, num_q_heads, head_dim] = operands.q.shape();
    let [num_blocks, num_kv_heads, block_size, _] = operands.k_cache.shape();
    let refuse =
        |argument, expected: String, found: usize| Err(Error::Value { argument, expected, found: found.to_string() });
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
        sliding_window: options.sliding_window,
    })
}
