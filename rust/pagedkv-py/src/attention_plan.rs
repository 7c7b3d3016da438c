//! A step's batch on the CPU: cut once, run layer by layer.

use numpy::PyArray1;
use pagedkv_cpu::{AttentionOptions, AttentionShape, CACHE, QUERIES};
use pyo3::prelude::*;

use crate::arrays;
use crate::attention_arrays::{IndexArrays, LayerArrays};
use crate::cpu_ops::{array, integers, threads, to_py_err};

/// A batch that was checked and cut into work items; see `pagedkv_cpu::AttentionPlan`.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct AttentionPlan {
    plan: pagedkv_cpu::AttentionPlan,
}

#[pymethods]
impl AttentionPlan {
    #[new]
    #[pyo3(signature = (num_q_heads, num_kv_heads, head_dim, block_size, block_table, seq_lens, query_start_loc, *,
                        rows=None, sliding_window=None, tree_mask=None, tree_mask_start_loc=None, num_threads=None))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of the operation in every language")]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = crate::args::usizes::num_q_heads)] num_q_heads: usize,
        #[pyo3(from_py_with = crate::args::usizes::num_kv_heads)] num_kv_heads: usize,
        #[pyo3(from_py_with = crate::args::usizes::head_dim)] head_dim: usize,
        #[pyo3(from_py_with = crate::args::usizes::block_size)] block_size: usize,
        block_table: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        query_start_loc: &Bound<'_, PyAny>,
        rows: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::optional_usizes::sliding_window)] sliding_window: Option<usize>,
        tree_mask: Option<&Bound<'_, PyAny>>,
        tree_mask_start_loc: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::optional_usizes::num_threads)] num_threads: Option<usize>,
    ) -> PyResult<Self> {
        let shape = AttentionShape { num_q_heads, num_kv_heads, head_dim, block_size, sliding_window };
        let tree_mask = [tree_mask, tree_mask_start_loc];
        let arrays = IndexArrays::read(block_table, seq_lens, query_start_loc, rows, tree_mask)?;
        let (batch, threads) = (arrays.batch()?, threads(py, num_threads)?);
        let plan = py.detach(|| pagedkv_cpu::AttentionPlan::new(&batch, &shape, threads)).map_err(to_py_err)?;
        Ok(Self { plan })
    }

    /// The plan that `pack` gave, for such queries and such a layer.
    #[staticmethod]
    #[pyo3(signature = (plan, q, k_cache, *, num_threads=None))]
    fn unpack(
        py: Python<'_>,
        plan: &Bound<'_, PyAny>,
        q: &Bound<'_, PyAny>,
        k_cache: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = crate::args::optional_usizes::num_threads)] num_threads: Option<usize>,
    ) -> PyResult<Self> {
        let words: Vec<i32> = integers("plan", plan)?;
        let (q, k_cache) = (array("q", q)?, array("k_cache", k_cache)?);
        let (q, k_cache, threads) = (q.view("q", QUERIES)?, k_cache.view("k_cache", CACHE)?, threads(py, num_threads)?);
        let plan = pagedkv_cpu::AttentionPlan::from_words(&words, &q, &k_cache, threads).map_err(to_py_err)?;
        Ok(Self { plan })
    }

    /// The plan as an array, for `unpack`.
    fn pack<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        arrays::array(py, self.plan.to_words())
    }

    /// Query tokens of all sequences.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.plan.num_tokens()
    }

    /// Attention of one layer; see `pagedkv_cpu::AttentionPlan::run`.
    #[pyo3(signature = (q, k_cache, v_cache, out, lse=None, softmax_scale=None, soft_cap=None, alibi_slopes=None,
                        sinks=None, k_scale=None, v_scale=None))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of the operation in every language")]
    fn run(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k_cache: &Bound<'_, PyAny>,
        v_cache: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        lse: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::optional_f32s::softmax_scale)] softmax_scale: Option<f32>,
        #[pyo3(from_py_with = crate::args::optional_f32s::soft_cap)] soft_cap: Option<f32>,
        alibi_slopes: Option<&Bound<'_, PyAny>>,
        sinks: Option<&Bound<'_, PyAny>>,
        k_scale: Option<&Bound<'_, PyAny>>,
        v_scale: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let arrays = LayerArrays::read([q, k_cache, v_cache, out], lse, [sinks, alibi_slopes], [k_scale, v_scale])?;
        let operands = arrays.operands()?;
        let options = AttentionOptions { softmax_scale, soft_cap, ..AttentionOptions::default() };
        py.detach(|| self.plan.run(&operands, &options)).map_err(to_py_err)
    }
}
