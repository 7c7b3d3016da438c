//! The pool and its groups.

use pagedkv_core::chain_hash::DEFAULT_CHAIN_SEED;
use pagedkv_core::config as core;
use pagedkv_core::events::DEFAULT_MAX_PENDING_EVENTS;
use pagedkv_core::{CacheConfig as CoreCache, CacheLayout, EventConfig};
use pyo3::prelude::*;

use super::{GroupSpec, NewArguments, new_arguments};
use crate::args::objects;
use crate::errors::{invalid, to_py_err};
use crate::getters::getters;

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

fn groups(object: &Bound<'_, PyAny>) -> PyResult<Vec<GroupSpec>> {
    objects("groups", "a GroupSpec", object)
}

getters!(CacheConfig.0 {
    num_blocks: u32;
    block_size: u32;
    hash_seed: u64;
    enable_prefix_caching: bool;
    eviction_policy: &'static str = |config| config.eviction_policy.name();
    /// Blocks that pinned prefixes may keep.
    pin_quota_blocks: u32;
    enable_kv_cache_events: bool = |config| config.events.is_some();
    kv_cache_metrics_sample: f64 = |config| share(config.residency_sampling);
    /// Blocks of the host tier.
    num_host_blocks: u32;
});

getters!(CacheConfig.1 {
    /// The groups in the order of the plan's group axis: split to equal numbers of layer slots, with their block sizes.
    groups: Vec<GroupSpec> = |layout| layout.groups().iter().cloned().map(GroupSpec).collect();
    /// G, the length of the plan's group axis; 1 for bookkeeping alone.
    num_groups: usize = |layout| layout.tables().len();
    /// Layers of all groups.
    num_layers: u32 = |layout| layout.num_layers();
    /// Layers that each block has room for; 0 for bookkeeping alone.
    num_layer_slots: u32 = |layout| layout.num_layer_slots();
    /// Bytes of keys and values of one block, padding included; 0 for bookkeeping alone.
    block_bytes: u64 = |layout| layout.block_bytes();
    /// Share of the layer slots that hold no layer, from 0 to 0.1.
    padding: f64 = |layout| layout.padding();
});

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

/// The share of all that every so-many-eth block makes up.
fn share(every: u32) -> f64 {
    if every == 0 { 0.0 } else { 1.0 / f64::from(every) }
}

/// Say how many layers a block should have room for.
///
/// Parameters
/// ----------
/// groups : sequence of GroupSpec
///     The groups of a model.
///
/// Returns
/// -------
/// int
///     The layers of the smallest group if that leaves few slots without a layer, else the number that makes the fewest
///     groups.
#[pyfunction]
pub(crate) fn choose_layer_slots(#[pyo3(from_py_with = groups)] groups: Vec<GroupSpec>) -> u32 {
    let groups: Vec<_> = groups.into_iter().map(|group| group.0).collect();
    pagedkv_core::choose_layer_slots(&groups)
}
