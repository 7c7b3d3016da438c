//! Configuration, as frozen value objects whose defaults are the core's.

use std::collections::BTreeMap;

use pagedkv_core::config as core;
use pagedkv_core::{CacheConfig as CoreCache, GroupSpec as CoreGroup, SchedulerConfig as CoreLimits};
use pyo3::prelude::*;

use crate::errors::to_py_err;

/// The layers that share one block table.
///
/// Parameters
/// ----------
/// num_layers, num_kv_heads, head_dim : int
///     Shape of the cache.
/// dtype : str
///     Element type by its torch name.
/// sliding_window : int, optional
///     Refused by name: every block is kept.
#[pyclass(frozen, eq, from_py_object, module = "pagedkv._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct GroupSpec(CoreGroup);

#[pymethods]
impl GroupSpec {
    #[new]
    #[pyo3(signature = (num_layers, num_kv_heads, head_dim, dtype="float32", *, sliding_window=None))]
    fn new(num_layers: u32, num_kv_heads: u32, head_dim: u32, dtype: &str, sliding_window: Option<u32>) -> Self {
        Self(CoreGroup { num_layers, num_kv_heads, head_dim, dtype: dtype.to_owned(), sliding_window })
    }

    #[getter]
    fn num_layers(&self) -> u32 {
        self.0.num_layers
    }

    #[getter]
    fn num_kv_heads(&self) -> u32 {
        self.0.num_kv_heads
    }

    #[getter]
    fn head_dim(&self) -> u32 {
        self.0.head_dim
    }

    #[getter]
    fn dtype(&self) -> &str {
        &self.0.dtype
    }

    #[getter]
    fn sliding_window(&self) -> Option<u32> {
        self.0.sliding_window
    }

    fn __repr__(&self) -> String {
        let CoreGroup { num_layers, num_kv_heads, head_dim, dtype, .. } = &self.0;
        format!("GroupSpec(num_layers={num_layers}, num_kv_heads={num_kv_heads}, head_dim={head_dim}, dtype={dtype:?})")
    }
}

/// The pool and how prefixes are told apart in it.
///
/// Parameters
/// ----------
/// num_blocks : int
///     Blocks of the pool, the null block included.
/// block_size : int
///     Tokens per block.
/// hash_seed : int
///     Seed of the prefix hashes.
/// enable_prefix_caching : bool
///     Whether prefixes are cached at all.
/// groups : sequence of GroupSpec
///     Cache groups; none for bookkeeping alone, one otherwise.
#[pyclass(frozen, eq, from_py_object, module = "pagedkv._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct CacheConfig(pub(crate) CoreCache);

#[pymethods]
impl CacheConfig {
    #[new]
    #[pyo3(signature = (
        num_blocks, block_size=core::DEFAULT_BLOCK_SIZE, *, hash_seed=0, enable_prefix_caching=true, groups=Vec::new(),
    ))]
    fn new(
        num_blocks: u32,
        block_size: u32,
        hash_seed: u64,
        enable_prefix_caching: bool,
        groups: Vec<GroupSpec>,
    ) -> PyResult<Self> {
        let groups = groups.into_iter().map(|group| group.0).collect();
        let config = CoreCache { num_blocks, block_size, hash_seed, enable_prefix_caching, groups };
        config.validate().map_err(to_py_err)?;
        Ok(Self(config))
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.0.num_blocks
    }

    #[getter]
    fn block_size(&self) -> u32 {
        self.0.block_size
    }

    #[getter]
    fn hash_seed(&self) -> u64 {
        self.0.hash_seed
    }

    #[getter]
    fn enable_prefix_caching(&self) -> bool {
        self.0.enable_prefix_caching
    }

    #[getter]
    fn groups(&self) -> Vec<GroupSpec> {
        self.0.groups.iter().cloned().map(GroupSpec).collect()
    }

    fn __repr__(&self) -> String {
        let CoreCache { num_blocks, block_size, hash_seed, .. } = self.0;
        format!("CacheConfig(num_blocks={num_blocks}, block_size={block_size}, hash_seed={hash_seed})")
    }
}

/// Limits of a step.
///
/// Parameters
/// ----------
/// max_num_seqs : int
///     Seats: sequences that may be resident at once.
/// max_num_batched_tokens : int
///     Tokens per step.
/// max_model_len : int
///     Longest sequence, prompt and output together.
/// watermark : float
///     Share of the usable blocks that an admission leaves free while other requests run.
/// lookahead : int
///     Most draft tokens per sequence.
/// max_plans_in_flight : int
///     Plans that may be made before the oldest is ended.
/// policy : {"fcfs", "priority", "lpm", "fair", "external"}
///     First come, first served; lower `priority` first, taking seats and blocks from higher ones; longest cached prefix
///     first; weighted fair share per `tenant`; by the keys that `Scheduler(policy=...)` returns.
/// ageing : int or None
///     Overtakings after which a request comes first whatever the policy says; None is strict and may starve.
/// tenant_weights : dict of str to float, optional
///     Weights of tenants under "fair"; 1 for those not named.
/// long_prefill_token_threshold : int
///     Most prompt tokens of one request per step; 0 for no limit but the budget.
/// max_num_partial_prefills : int, optional
///     Most requests that may be in the middle of their prompt.
/// prefill_chunk_multiple : int
///     A chunk that does not end a prefill ends on a multiple of this many tokens.
#[pyclass(frozen, eq, from_py_object, module = "pagedkv._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct SchedulerConfig(pub(crate) CoreLimits);

#[pymethods]
impl SchedulerConfig {
    #[new]
    #[pyo3(signature = (
        max_num_seqs=core::DEFAULT_MAX_NUM_SEQS,
        max_num_batched_tokens=core::DEFAULT_MAX_NUM_BATCHED_TOKENS,
        max_model_len=core::DEFAULT_MAX_MODEL_LEN,
        *,
        watermark=0.0,
        lookahead=0,
        max_plans_in_flight=core::DEFAULT_MAX_PLANS_IN_FLIGHT,
        policy="fcfs",
        ageing=Some(core::DEFAULT_AGEING),
        tenant_weights=None,
        long_prefill_token_threshold=0,
        max_num_partial_prefills=None,
        prefill_chunk_multiple=1,
    ))]
    #[expect(clippy::too_many_arguments, reason = "the fields of the configuration")]
    fn new(
        max_num_seqs: u32,
        max_num_batched_tokens: u32,
        max_model_len: u32,
        watermark: f64,
        lookahead: u32,
        max_plans_in_flight: u32,
        policy: &str,
        ageing: Option<u32>,
        tenant_weights: Option<BTreeMap<String, f64>>,
        long_prefill_token_threshold: u32,
        max_num_partial_prefills: Option<u32>,
        prefill_chunk_multiple: u32,
    ) -> PyResult<Self> {
        let policy = policy.parse().map_err(to_py_err)?;
        let defaults = CoreLimits::default();
        let limits = CoreLimits {
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            watermark,
            lookahead,
            max_plans_in_flight,
            policy,
            ageing,
            tenant_weights: tenant_weights.unwrap_or_default().into_iter().collect(),
            long_prefill_token_threshold,
            max_num_partial_prefills: max_num_partial_prefills.unwrap_or(defaults.max_num_partial_prefills),
            prefill_chunk_multiple,
        };
        limits.validate().map_err(to_py_err)?;
        Ok(Self(limits))
    }

    #[getter]
    fn max_num_seqs(&self) -> u32 {
        self.0.max_num_seqs
    }

    #[getter]
    fn max_num_batched_tokens(&self) -> u32 {
        self.0.max_num_batched_tokens
    }

    #[getter]
    fn max_model_len(&self) -> u32 {
        self.0.max_model_len
    }

    #[getter]
    fn watermark(&self) -> f64 {
        self.0.watermark
    }

    #[getter]
    fn lookahead(&self) -> u32 {
        self.0.lookahead
    }

    #[getter]
    fn max_plans_in_flight(&self) -> u32 {
        self.0.max_plans_in_flight
    }

    #[getter]
    fn ageing(&self) -> Option<u32> {
        self.0.ageing
    }

    #[getter]
    fn tenant_weights(&self) -> BTreeMap<String, f64> {
        self.0.tenant_weights.iter().cloned().collect()
    }

    #[getter]
    fn long_prefill_token_threshold(&self) -> u32 {
        self.0.long_prefill_token_threshold
    }

    #[getter]
    fn max_num_partial_prefills(&self) -> u32 {
        self.0.max_num_partial_prefills
    }

    #[getter]
    fn prefill_chunk_multiple(&self) -> u32 {
        self.0.prefill_chunk_multiple
    }

    #[getter]
    fn policy(&self) -> &'static str {
        self.0.policy.name()
    }

    fn __repr__(&self) -> String {
        let CoreLimits { max_num_seqs, max_num_batched_tokens, max_model_len, max_plans_in_flight, .. } = self.0;
        format!(
            "SchedulerConfig(max_num_seqs={max_num_seqs}, max_num_batched_tokens={max_num_batched_tokens}, \
             max_model_len={max_model_len}, max_plans_in_flight={max_plans_in_flight})"
        )
    }
}
