//! Attention on the CPU as functions: import the arrays, let go of the interpreter, call.

use pagedkv_cpu::{AttentionOptions, Isa, LSE, QUERIES, State};
use pyo3::prelude::*;

use crate::attention_arrays::{IndexArrays, LayerArrays};
use crate::cpu_ops::{array, threads, to_py_err};

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
    let layer = LayerArrays::read([q, k_cache, v_cache, out], lse, [sinks, alibi_slopes], [k_scale, v_scale])?;
    let tree_mask = [tree_mask, tree_mask_start_loc];
    let index_arrays = IndexArrays::read(block_table, seq_lens, query_start_loc, rows, tree_mask)?;
    let (operands, batch, threads) = (layer.operands()?, index_arrays.batch()?, threads(py, num_threads)?);
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
