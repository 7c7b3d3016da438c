//! The arrays of an attention call, held while it runs.

use pagedkv_cpu::{BLOCK_TABLE, Batch, CACHE, LSE, Operands, QUERIES, TreeMask};
use pyo3::prelude::*;

use crate::cpu_ops::{array, integers, optional, per_head};
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

/// The arrays of one layer.
pub(crate) struct LayerArrays {
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Option<Tensor>,
    sinks: Option<Tensor>,
    alibi_slopes: Option<Tensor>,
    k_scale: Option<Tensor>,
    v_scale: Option<Tensor>,
}

impl LayerArrays {
    pub(crate) fn read(
        [q, k_cache, v_cache, out]: [&Bound<'_, PyAny>; 4],
        lse: Option<&Bound<'_, PyAny>>,
        [sinks, alibi_slopes]: [Option<&Bound<'_, PyAny>>; 2],
        [k_scale, v_scale]: [Option<&Bound<'_, PyAny>>; 2],
    ) -> PyResult<Self> {
        Ok(Self {
            q: array("q", q)?,
            k_cache: array("k_cache", k_cache)?,
            v_cache: array("v_cache", v_cache)?,
            out: array("out", out)?,
            lse: optional("lse", lse)?,
            sinks: optional("sinks", sinks)?,
            alibi_slopes: optional("alibi_slopes", alibi_slopes)?,
            k_scale: optional("k_scale", k_scale)?,
            v_scale: optional("v_scale", v_scale)?,
        })
    }

    pub(crate) fn operands(&self) -> PyResult<Operands> {
        Ok(Operands {
            q: self.q.view("q", QUERIES)?,
            k_cache: self.k_cache.view("k_cache", CACHE)?,
            v_cache: self.v_cache.view("v_cache", CACHE)?,
            out: self.out.view_mut("out", QUERIES)?,
            lse: self.lse.as_ref().map(|lse| lse.view_mut("lse", LSE)).transpose()?,
            sinks: per_head("sinks", self.sinks.as_ref(), "num_q_heads")?,
            alibi_slopes: per_head("alibi_slopes", self.alibi_slopes.as_ref(), "num_q_heads")?,
            k_scale: per_head("k_scale", self.k_scale.as_ref(), "num_kv_heads")?,
            v_scale: per_head("v_scale", self.v_scale.as_ref(), "num_kv_heads")?,
        })
    }
}
