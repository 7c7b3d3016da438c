//! Attention on the CPU as functions: import the arrays, let go of the interpreter, call.

use pagedkv_cpu::{AttentionOptions, BLOCK_TABLE, Batch, CACHE, Isa, LSE, Operands, QUERIES, State, TreeMask};
use pyo3::prelude::*;

use crate::cpu_ops::{array, integers, optional, per_head, threads, to_py_err};
use crate::errors::invalid;

/// Causal attention of a ragged batch over cached keys and values; see `pagedkv_cpu::paged_attention`.
#[pyfunction]
#[pyo3(signature = (q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, *, rows=None, lse=None,
                    softmax_scale=None, sliding_window=None, soft_cap=None, alibi_slopes=None, sinks=None,
                    k_scale=None, v_scale=None, tree_mask=None, tree_mask_start_loc=None, num_threads=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the operation in every language")]
pub(crate) fn paged_attention(
    py: Python<'_>,
    q: &Bound<'_, PyAny>,
    k_cache: &Bound<'_, PyAny>,
    v_cache: &Bound<'_, PyAny>,
    block_table: &Bound<'_, PyAny>,
    seq_lens: &Bound<'_, PyAny>,
    query_start_loc: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    rows: Option<&Bound<'_, PyAny>>,
    lse: Option<&Bound<'_, PyAny>>,
    #[pyo3(from_py_with = crate::args::optional_f32s::softmax_scale)] softmax_scale: Option<f32>,
    #[pyo3(from_py_with = crate::args::optional_usizes::sliding_window)] sliding_window: Option<usize>,
    #[pyo3(from_py_with = crate::args::optional_f32s::soft_cap)] soft_cap: Option<f32>,
    alibi_slopes: Option<&Bound<'_, PyAny>>,
    sinks: Option<&Bound<'_, PyAny>>,
    k_scale: Option<&Bound<'_, PyAny>>,
    v_scale: Option<&Bound<'_, PyAny>>,
    tree_mask: Option<&Bound<'_, PyAny>>,
    tree_mask_start_loc: Option<&Bound<'_, PyAny>>,
    #[pyo3(from_py_with = crate::args::optional_usizes::num_threads)] num_threads: Option<usize>,
) -> PyResult<()> {
    let (q, out) = (array("q", q)?, array("out", out)?);
    let (k_cache, v_cache) = (array("k_cache", k_cache)?, array("v_cache", v_cache)?);
    let block_table = array("block_table", block_table)?;
    let lse = optional("lse", lse)?;
    let (sinks, alibi_slopes) = (optional("sinks", sinks)?, optional("alibi_slopes", alibi_slopes)?);
    let (k_scale, v_scale) = (optional("k_scale", k_scale)?, optional("v_scale", v_scale)?);
    let seq_lens: Vec<i32> = integers("seq_lens", seq_lens)?;
    let query_start_loc: Vec<i32> = integers("query_start_loc", query_start_loc)?;
    let rows: Option<Vec<i32>> = rows.map(|rows| integers("rows", rows)).transpose()?;
    let mask_bits: Option<Vec<u8>> = tree_mask.map(|mask| integers("tree_mask", mask)).transpose()?;
    let mask_starts = tree_mask_start_loc.map(|starts| integers("tree_mask_start_loc", starts)).transpose()?;
    let mask_starts: Option<Vec<i32>> = mask_starts;
    let threads = threads(py, num_threads)?;
    let (q, out) = (q.view("q", QUERIES)?, out.view_mut("out", QUERIES)?);
    let mut operands = Operands::new(q, k_cache.view("k_cache", CACHE)?, v_cache.view("v_cache", CACHE)?, out);
    operands.lse = lse.as_ref().map(|lse| lse.view_mut("lse", LSE)).transpose()?;
    operands.sinks = per_head("sinks", sinks.as_ref(), "num_q_heads")?;
    operands.alibi_slopes = per_head("alibi_slopes", alibi_slopes.as_ref(), "num_q_heads")?;
    operands.k_scale = per_head("k_scale", k_scale.as_ref(), "num_kv_heads")?;
    operands.v_scale = per_head("v_scale", v_scale.as_ref(), "num_kv_heads")?;
    let batch = Batch {
        block_table: block_table.view("block_table", BLOCK_TABLE)?,
        rows: rows.as_deref(),
        seq_lens: &seq_lens,
        query_start_loc: &query_start_loc,
        tree_mask: match (&mask_bits, &mask_starts) {
            (Some(bits), Some(start_loc)) => Some(TreeMask { bits, start_loc }),
            (None, None) => None,
            _ => return Err(invalid("tree_mask", "tree_mask and tree_mask_start_loc together", "one of the two")),
        },
    };
    let options = AttentionOptions { softmax_scale, sliding_window, soft_cap, isa: None };
    py.detach(|| pagedkv_cpu::paged_attention(&operands, &batch, &options, threads)).map_err(to_py_err)
}

/// Joins the results of two attentions over different keys; see `pagedkv_cpu::merge_states`.
#[pyfunction]
#[pyo3(signature = (out_a, lse_a, out_b, lse_b, out, lse, *, num_threads=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the operation in every language")]
pub(crate) fn merge_states(
    py: Python<'_>,
    out_a: &Bound<'_, PyAny>,
    lse_a: &Bound<'_, PyAny>,
    out_b: &Bound<'_, PyAny>,
    lse_b: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = crate::args::optional_usizes::num_threads)] num_threads: Option<usize>,
) -> PyResult<()> {
    let (out_a, lse_a) = (array("out_a", out_a)?, array("lse_a", lse_a)?);
    let (out_b, lse_b) = (array("out_b", out_b)?, array("lse_b", lse_b)?);
    let (out, lse) = (array("out", out)?, array("lse", lse)?);
    let threads = threads(py, num_threads)?;
    let a = State { out: out_a.view("out_a", QUERIES)?, lse: lse_a.view("lse_a", LSE)? };
    let b = State { out: out_b.view("out_b", QUERIES)?, lse: lse_b.view("lse_b", LSE)? };
    let merged = State { out: out.view_mut("out", QUERIES)?, lse: lse.view_mut("lse", LSE)? };
    py.detach(|| pagedkv_cpu::merge_states(&a, &b, &merged, threads)).map_err(to_py_err)
}

/// Names of the instruction sets that this processor has, the best one last.
#[pyfunction]
pub(crate) fn instruction_sets() -> Vec<&'static str> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect()
}
