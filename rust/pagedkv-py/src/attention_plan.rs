//! A step's batch on the CPU: cut once, run layer by layer.

use numpy::PyArray1;
use pagedkv_cpu::{AttentionOptions, AttentionShape, BLOCK_TABLE, Batch, CACHE, LSE, Operands, QUERIES, TreeMask};
use pyo3::prelude::*;

use crate::arrays;
use crate::cpu_ops::{array, integers, optional, per_head, threads, to_py_err};
use crate::dlpack::Tensor;
use crate::errors::invalid;

/// The index arrays of a batch, copied: checked values must not change under a running operation.
pub(crate) struct IndexArrays {
    block_table: Tensor,
    seq_lens: Vec<i32>,
    query_start_loc: Vec<i32>,
    rows: Option<Vec<i32>>,
    tree_mask: Option<(Vec<u8>, Vec<i32>)>,
}

impl IndexArrays {
    pub(crate) fn read(
        block_table: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        query_start_loc: &Bound<'_, PyAny>,
        rows: Option<&Bound<'_, PyAny>>,
        tree_mask: [Option<&Bound<'_, PyAny>>; 2],
    ) -> PyResult<Self> {
        Ok(Self {
            block_table: array("block_table", block_table)?,
            seq_lens: integers("seq_lens", seq_lens)?,
            query_start_loc: integers("query_start_loc", query_start_loc)?,
            rows: rows.map(|rows| integers("rows", rows)).transpose()?,
            tree_mask: match tree_mask {
                [Some(bits), Some(starts)] => {
                    Some((integers("tree_mask", bits)?, integers("tree_mask_start_loc", starts)?))
                }
                [None, None] => None,
                _ => return Err(invalid("tree_mask", "tree_mask and tree_mask_start_loc together", "one of the two")),
            },
        })
    }

    pub(crate) fn batch(&self) -> PyResult<Batch<'_>> {
        Ok(Batch {
            block_table: self.block_table.view("block_table", BLOCK_TABLE)?,
            rows: self.rows.as_deref(),
            seq_lens: &self.seq_lens,
            query_start_loc: &self.query_start_loc,
            tree_mask: self.tree_mask.as_ref().map(|(bits, start_loc)| TreeMask { bits, start_loc }),
        })
    }
}

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
    #[pyo3(signature = (q, k_cache, v_cache, out, *, lse=None, softmax_scale=None, soft_cap=None, alibi_slopes=None,
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
        let (q, out) = (array("q", q)?, array("out", out)?);
        let (k_cache, v_cache) = (array("k_cache", k_cache)?, array("v_cache", v_cache)?);
        let (lse, sinks) = (optional("lse", lse)?, optional("sinks", sinks)?);
        let (slopes, k_scale) = (optional("alibi_slopes", alibi_slopes)?, optional("k_scale", k_scale)?);
        let v_scale = optional("v_scale", v_scale)?;
        let (q, out) = (q.view("q", QUERIES)?, out.view_mut("out", QUERIES)?);
        let mut operands = Operands::new(q, k_cache.view("k_cache", CACHE)?, v_cache.view("v_cache", CACHE)?, out);
        operands.lse = lse.as_ref().map(|lse| lse.view_mut("lse", LSE)).transpose()?;
        operands.sinks = per_head("sinks", sinks.as_ref(), "num_q_heads")?;
        operands.alibi_slopes = per_head("alibi_slopes", slopes.as_ref(), "num_q_heads")?;
        operands.k_scale = per_head("k_scale", k_scale.as_ref(), "num_kv_heads")?;
        operands.v_scale = per_head("v_scale", v_scale.as_ref(), "num_kv_heads")?;
        let options = AttentionOptions { softmax_scale, soft_cap, ..AttentionOptions::default() };
        py.detach(|| self.plan.run(&operands, &options)).map_err(to_py_err)
    }
}
