//! Configuration, as frozen value objects whose defaults are the core's.

use std::collections::BTreeMap;

use pagedkv_core::EventConfig;
use pagedkv_core::chain_hash::DEFAULT_CHAIN_SEED;
use pagedkv_core::config as core;
use pagedkv_core::events::DEFAULT_MAX_PENDING_EVENTS;
use pagedkv_core::{CacheConfig as CoreCache, CacheLayout, GroupSpec as CoreGroup, SchedulerConfig as CoreLimits};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::args::{elements, number, objects};
use crate::errors::{invalid, to_py_err};

/// Layers of one shape that share a block table.
///
/// Parameters
/// ----------
/// layers : int or sequence of int
///     The model's layers in the group, ascending; a number stands for that many layers from the first on.
/// num_kv_heads, head_dim : int
///     Shape of the cache of each layer.
/// dtype : str
///     Element type by its torch name.
/// sliding_window : int, optional
///     Tokens that a query sees, itself included; all by default.
/// block_size : int, optional
///     Tokens per block. `CacheConfig` finds it so that blocks of all groups have equal bytes, and refuses another.
#[pyclass(frozen, eq, from_py_object, module = "pagedkv._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct GroupSpec(CoreGroup);

enum Layers {
    Count(u32),
    Indices(Vec<u32>),
}

fn layers(object: &Bound<'_, PyAny>) -> PyResult<Layers> {
    match elements("layers", object)? {
        Some(indices) => Ok(Layers::Indices(indices)),
        None => number("layers", object).map(Layers::Count),
    }
}

fn groups(object: &Bound<'_, PyAny>) -> PyResult<Vec<GroupSpec>> {
    objects("groups", "a GroupSpec", object)
}

/// What a pickle calls the class with: its positional arguments, and the rest by name.
type NewArguments<'py> = (Bound<'py, PyTuple>, Bound<'py, PyDict>);

fn new_arguments<'py>(object: &Bound<'py, PyAny>, positional: &[&str], named: &[&str]) -> PyResult<NewArguments<'py>> {
    let values = positional.iter().map(|name| object.getattr(*name)).collect::<PyResult<Vec<_>>>()?;
    let rest = PyDict::new(object.py());
    named.iter().try_for_each(|name| rest.set_item(name, object.getattr(*name)?))?;
    Ok((PyTuple::new(object.py(), values)?, rest))
}

#[pymethods]
impl GroupSpec {
    #[new]
    #[pyo3(signature = (layers, num_kv_heads, head_dim, dtype="float32", *, sliding_window=None, block_size=None))]
    fn new(
        #[pyo3(from_py_with = layers)] layers: Layers,
        #[pyo3(from_py_with = crate::args::u32s::num_kv_heads)] num_kv_heads: u32,
        #[pyo3(from_py_with = crate::args::u32s::head_dim)] head_dim: u32,
        dtype: &str,
        #[pyo3(from_py_with = crate::args::optional_u32s::sliding_window)] sliding_window: Option<u32>,
        #[pyo3(from_py_with = crate::args::optional_u32s::block_size)] block_size: Option<u32>,
    ) -> PyResult<Self> {
        let layers = match layers {
            Layers::Count(count) if count >= 1 << 30 => {
                return Err(invalid("layers", "less than 2^30 layers", &count.to_string()));
            }
            Layers::Count(count) => (0..count).collect(),
            Layers::Indices(layers) => layers,
        };
        let dtype = dtype.to_owned();
        let group = CoreGroup { layers, num_kv_heads, head_dim, dtype, sliding_window, block_size };
        group.validate().map_err(to_py_err)?;
        Ok(Self(group))
    }

    /// The model's layers in the group, ascending.
    #[getter]
    fn layers(&self) -> Vec<u32> {
        self.0.layers.clone()
    }

    #[getter]
    fn num_layers(&self) -> usize {
        self.0.layers.len()
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

    #[getter]
    fn block_size(&self) -> Option<u32> {
        self.0.block_size
    }

    /// Bytes that a token's key and value take in each layer.
    #[getter]
    fn token_bytes(&self) -> PyResult<u64> {
        self.0.token_bytes().map_err(to_py_err)
    }

    fn __getnewargs_ex__<'py>(slf: &Bound<'py, Self>) -> PyResult<NewArguments<'py>> {
        let positional = ["layers", "num_kv_heads", "head_dim", "dtype"];
        new_arguments(slf.as_any(), &positional, &["sliding_window", "block_size"])
    }

    fn __repr__(&self) -> String {
        let CoreGroup { layers, num_kv_heads, head_dim, dtype, sliding_window, block_size } = &self.0;
        let optional =
            |name: &str, value: &Option<u32>| value.map_or(String::new(), |value| format!(", {name}={value}"));
        format!(
            "GroupSpec({layers:?}, num_kv_heads={num_kv_heads}, head_dim={head_dim}, dtype={dtype:?}{}{})",
            optional("sliding_window", sliding_window),
            optional("block_size", block_size)
        )
    }
}

/// The pool and how prefixes are told apart in it.
///
/// Blocks of all groups have the same number of layer slots and equal bytes, so that any block can serve any group: the
/// smallest layer count is the number of slots, larger groups are split, and where a token's bytes differ, so do the
/// tokens per block.
///
/// Parameters
/// ----------
/// num_blocks : int
///     Blocks of the pool, the null block included.
/// block_size : int
///     Tokens per block; in the group with the smallest blocks, where groups differ.
/// hash_seed : int
///     Seed of the prefix hashes.
/// enable_prefix_caching : bool
///     Whether prefixes are cached at all.
/// kv_cache_metrics_sample : float
///     Share of the blocks that are watched for the time that they hold what they hold; 0 for none.
/// enable_kv_cache_events : bool
///     Whether `take_events` tells what can be hit. Without, no chained hash is computed.
/// event_hash, event_hash_seed : str
///     Algorithm and seed of the chained hashes in events, as in `chain_hashes`.
/// max_pending_events : int
///     Blocks that events which nobody took may speak of; beyond, they are dropped and the next batch tells everything.
/// groups : sequence of GroupSpec
///     Cache groups, every layer in one of them; none for bookkeeping alone.
/// num_layer_slots : int, optional
///     Layers that each block has room for, in the place of the smallest layer count. More than 10 % of them without a
///     layer are refused.
/// eviction_policy : {"lru", "slru", "priority"}
///     Which cached block is reused when no block is free: the one released first; the same, but prefixes that were never
///     hit go first; the lowest `cache_priority` first.
/// pin_quota_bytes : int
///     Memory that pinned prefixes may keep, in whole blocks; it is kept from requests. Needs `groups`.
/// pin_quota_blocks : int
///     The same in blocks.
/// num_host_blocks : int
///     Blocks of the host tier, for requests that are preempted by swap.
#[pyclass(frozen, eq, from_py_object, module = "pagedkv._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct CacheConfig(pub(crate) CoreCache, CacheLayout);

#[pymethods]
impl CacheConfig {
    #[new]
    #[pyo3(signature = (
        num_blocks, block_size=core::DEFAULT_BLOCK_SIZE, *, hash_seed=0, enable_prefix_caching=true,
        kv_cache_metrics_sample=0.0, groups=Vec::new(), num_layer_slots=None, eviction_policy="lru", pin_quota_bytes=0,
        pin_quota_blocks=0, enable_kv_cache_events=false, event_hash="sha256_cbor", event_hash_seed=DEFAULT_CHAIN_SEED,
        max_pending_events=DEFAULT_MAX_PENDING_EVENTS, num_host_blocks=0,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        #[pyo3(from_py_with = crate::args::u32s::num_blocks)] num_blocks: u32,
        #[pyo3(from_py_with = crate::args::u32s::block_size)] block_size: u32,
        #[pyo3(from_py_with = crate::args::u64s::hash_seed)] hash_seed: u64,
        enable_prefix_caching: bool,
        #[pyo3(from_py_with = crate::args::f64s::kv_cache_metrics_sample)] kv_cache_metrics_sample: f64,
        #[pyo3(from_py_with = groups)] groups: Vec<GroupSpec>,
        #[pyo3(from_py_with = crate::args::optional_u32s::num_layer_slots)] num_layer_slots: Option<u32>,
        eviction_policy: &str,
        #[pyo3(from_py_with = crate::args::u64s::pin_quota_bytes)] pin_quota_bytes: u64,
        #[pyo3(from_py_with = crate::args::u32s::pin_quota_blocks)] pin_quota_blocks: u32,
        enable_kv_cache_events: bool,
        event_hash: &str,
        event_hash_seed: &str,
        #[pyo3(from_py_with = crate::args::u32s::max_pending_events)] max_pending_events: u32,
        #[pyo3(from_py_with = crate::args::u32s::num_host_blocks)] num_host_blocks: u32,
    ) -> PyResult<Self> {
        let events = EventConfig {
            algorithm: event_hash.parse().map_err(to_py_err)?,
            seed: event_hash_seed.to_owned(),
            max_pending: max_pending_events,
        };
        let mut config = CoreCache {
            num_blocks,
            block_size,
            hash_seed,
            enable_prefix_caching,
            groups: groups.into_iter().map(|group| group.0).collect(),
            num_layer_slots,
            eviction_policy: eviction_policy.parse().map_err(to_py_err)?,
            pin_quota_blocks,
            num_host_blocks,
            residency_sampling: every(kv_cache_metrics_sample)?,
            events: enable_kv_cache_events.then_some(events),
        };
        if pin_quota_bytes > 0 {
            let block_bytes = config.layout().map_err(to_py_err)?.block_bytes();
            if block_bytes == 0 || pin_quota_blocks > 0 {
                let expected = "0, or the only quota, with groups that say how large a block is";
                return Err(invalid("pin_quota_bytes", expected, &pin_quota_bytes.to_string()));
            }
            config.pin_quota_blocks = u32::try_from(pin_quota_bytes / block_bytes).unwrap_or(u32::MAX);
        }
        let layout = config.layout().map_err(to_py_err)?;
        Ok(Self(config, layout))
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
    fn eviction_policy(&self) -> &'static str {
        self.0.eviction_policy.name()
    }

    /// Blocks that pinned prefixes may keep.
    #[getter]
    fn pin_quota_blocks(&self) -> u32 {
        self.0.pin_quota_blocks
    }

    #[getter]
    fn enable_kv_cache_events(&self) -> bool {
        self.0.events.is_some()
    }

    #[getter]
    fn kv_cache_metrics_sample(&self) -> f64 {
        if self.0.residency_sampling == 0 { 0.0 } else { 1.0 / f64::from(self.0.residency_sampling) }
    }

    /// Blocks of the host tier.
    #[getter]
    fn num_host_blocks(&self) -> u32 {
        self.0.num_host_blocks
    }

    /// The groups in the order of the plan's group axis: split to equal numbers of layer slots, with their block sizes.
    #[getter]
    fn groups(&self) -> Vec<GroupSpec> {
        self.1.groups().iter().cloned().map(GroupSpec).collect()
    }

    /// G, the length of the plan's group axis; 1 for bookkeeping alone.
    #[getter]
    fn num_groups(&self) -> usize {
        self.1.tables().len()
    }

    /// Layers of all groups.
    #[getter]
    fn num_layers(&self) -> u32 {
        self.1.num_layers()
    }

    /// Layers that each block has room for; 0 for bookkeeping alone.
    #[getter]
    fn num_layer_slots(&self) -> u32 {
        self.1.num_layer_slots()
    }

    /// Bytes of keys and values of one block, padding included; 0 for bookkeeping alone.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.1.block_bytes()
    }

    /// Share of the layer slots that hold no layer, from 0 to 0.1.
    #[getter]
    fn padding(&self) -> f64 {
        self.1.padding()
    }

    /// The group of a layer, and its slot in the group's blocks.
    fn layer(&self, #[pyo3(from_py_with = crate::args::u32s::layer)] layer: u32) -> PyResult<(u32, u32)> {
        self.1.layer(layer).map_err(to_py_err)
    }

    fn __getnewargs_ex__<'py>(slf: &Bound<'py, Self>) -> PyResult<NewArguments<'py>> {
        let names = [
            "hash_seed",
            "enable_prefix_caching",
            "eviction_policy",
            "pin_quota_blocks",
            "num_host_blocks",
            "enable_kv_cache_events",
            "kv_cache_metrics_sample",
        ];
        let (positional, keywords) = new_arguments(slf.as_any(), &["num_blocks", "block_size"], &names)?;
        keywords.set_item("num_layer_slots", slf.get().0.num_layer_slots)?;
        // As they were given: the getter has the block sizes that were chosen for them.
        let groups = slf.get().0.groups.iter().cloned().map(GroupSpec);
        keywords.set_item("groups", groups.collect::<Vec<_>>())?;
        if let Some(events) = &slf.get().0.events {
            keywords.set_item("event_hash", events.algorithm.name())?;
            keywords.set_item("event_hash_seed", &events.seed)?;
            keywords.set_item("max_pending_events", events.max_pending)?;
        }
        Ok((positional, keywords))
    }

    fn __repr__(&self) -> String {
        let CoreCache { num_blocks, block_size, hash_seed, .. } = self.0;
        let groups: Vec<String> = self.groups().iter().map(GroupSpec::__repr__).collect();
        let groups = if groups.is_empty() { String::new() } else { format!(", groups=[{}]", groups.join(", ")) };
        format!("CacheConfig(num_blocks={num_blocks}, block_size={block_size}, hash_seed={hash_seed}{groups})")
    }
}

/// Every how-many-eth block makes up a share of all.
fn every(share: f64) -> PyResult<u32> {
    if share == 0.0 {
        Ok(0)
    } else if (1e-9..=1.0).contains(&share) {
        Ok((1.0 / share).round() as u32)
    } else {
        Err(invalid("kv_cache_metrics_sample", "a share from 0 to 1", &share.to_string()))
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
/// preemption_mode : {"recompute", "swap"}
///     What becomes of the blocks of a request that is preempted: they are dropped, but for what the prefix cache keeps,
///     and computed again; or they go to the host tier and come back. A request that has not filled a block, or for which
///     the host tier has no room, is computed again.
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
        preemption_mode="recompute",
        policy="fcfs",
        ageing=Some(core::DEFAULT_AGEING),
        tenant_weights=None,
        long_prefill_token_threshold=0,
        max_num_partial_prefills=None,
        prefill_chunk_multiple=1,
    ))]
    #[expect(clippy::too_many_arguments, reason = "the fields of the configuration")]
    fn new(
        #[pyo3(from_py_with = crate::args::u32s::max_num_seqs)] max_num_seqs: u32,
        #[pyo3(from_py_with = crate::args::u32s::max_num_batched_tokens)] max_num_batched_tokens: u32,
        #[pyo3(from_py_with = crate::args::u32s::max_model_len)] max_model_len: u32,
        #[pyo3(from_py_with = crate::args::f64s::watermark)] watermark: f64,
        #[pyo3(from_py_with = crate::args::u32s::lookahead)] lookahead: u32,
        #[pyo3(from_py_with = crate::args::u32s::max_plans_in_flight)] max_plans_in_flight: u32,
        preemption_mode: &str,
        policy: &str,
        #[pyo3(from_py_with = crate::args::optional_u32s::ageing)] ageing: Option<u32>,
        tenant_weights: Option<BTreeMap<String, f64>>,
        #[pyo3(from_py_with = crate::args::u32s::long_prefill_token_threshold)] long_prefill_token_threshold: u32,
        #[pyo3(from_py_with = crate::args::optional_u32s::max_num_partial_prefills)] max_num_partial_prefills: Option<
            u32,
        >,
        #[pyo3(from_py_with = crate::args::u32s::prefill_chunk_multiple)] prefill_chunk_multiple: u32,
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
            preemption_mode: preemption_mode.parse().map_err(to_py_err)?,
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
    fn preemption_mode(&self) -> &'static str {
        self.0.preemption_mode.name()
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

    fn __getnewargs_ex__<'py>(slf: &Bound<'py, Self>) -> PyResult<NewArguments<'py>> {
        let positional = ["max_num_seqs", "max_num_batched_tokens", "max_model_len"];
        let names = [
            "watermark",
            "lookahead",
            "max_plans_in_flight",
            "preemption_mode",
            "policy",
            "ageing",
            "tenant_weights",
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "prefill_chunk_multiple",
        ];
        new_arguments(slf.as_any(), &positional, &names)
    }

    fn __repr__(&self) -> String {
        let CoreLimits { max_num_seqs, max_num_batched_tokens, max_model_len, max_plans_in_flight, .. } = self.0;
        format!(
            "SchedulerConfig(max_num_seqs={max_num_seqs}, max_num_batched_tokens={max_num_batched_tokens}, \
             max_model_len={max_model_len}, max_plans_in_flight={max_plans_in_flight})"
        )
    }
}
