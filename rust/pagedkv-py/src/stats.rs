//! Figures of a scheduler.

use std::collections::BTreeMap;

use numpy::PyArray1;
use pagedkv_core as core;
use pyo3::prelude::*;

use crate::arrays::array;
use crate::getters::getters;

/// A distribution of values over buckets.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct Histogram(core::Histogram);

getters!(Histogram.0 {
    /// Values counted.
    count: u64 = |histogram| histogram.count();
    /// Sum of the values.
    sum: f64 = |histogram| histogram.sum();
});

#[pymethods]
impl Histogram {
    /// Upper bounds of the buckets but the last, which has none, float64 (n,).
    #[getter]
    fn bounds<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        array(py, self.0.bounds().to_vec())
    }

    /// Values in each bucket, not summed up, int64 (n + 1,).
    #[getter]
    fn counts<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        array(py, self.0.counts().iter().map(|&count| count as i64).collect())
    }

    fn __repr__(&self) -> String {
        format!("Histogram(count={}, sum={})", self.0.count(), self.0.sum())
    }
}

impl From<&core::Histogram> for Histogram {
    fn from(histogram: &core::Histogram) -> Self {
        Self(histogram.clone())
    }
}

/// Tokens looked for in the prefix cache and found there; of requests that come back after a preemption apart.
#[pyclass(frozen, get_all, module = "pagedkv._core")]
#[derive(Clone)]
pub(crate) struct PrefixCacheStats {
    requests: u64,
    queries: u64,
    hits: u64,
    preempted_requests: u64,
    preempted_queries: u64,
    preempted_hits: u64,
}

/// Counts over requests: all, or those of one tenant.
#[pyclass(frozen, get_all, module = "pagedkv._core")]
#[derive(Clone)]
pub(crate) struct RequestTotals {
    num_requests: u64,
    num_finished: u64,
    /// Samples that ended, by "stop", "length", "abort", "dropped".
    finished_by_reason: BTreeMap<&'static str, u64>,
    prompt_tokens: u64,
    prompt_tokens_cached: u64,
    prompt_tokens_loaded: u64,
    generation_tokens: u64,
    prefix_cache: PrefixCacheStats,
    num_preemptions: u64,
    queue_time_seconds: f64,
}

impl From<&core::RequestTotals> for RequestTotals {
    fn from(totals: &core::RequestTotals) -> Self {
        let cache = totals.prefix_cache;
        Self {
            num_requests: totals.num_requests,
            num_finished: totals.num_finished,
            finished_by_reason: ["stop", "length", "abort", "dropped"]
                .into_iter()
                .zip(totals.finished_by_reason)
                .collect(),
            prompt_tokens: totals.prompt_tokens,
            prompt_tokens_cached: totals.prompt_tokens_cached,
            prompt_tokens_loaded: totals.prompt_tokens_loaded,
            generation_tokens: totals.generation_tokens,
            prefix_cache: PrefixCacheStats {
                requests: cache.requests,
                queries: cache.queries,
                hits: cache.hits,
                preempted_requests: cache.preempted_requests,
                preempted_queries: cache.preempted_queries,
                preempted_hits: cache.preempted_hits,
            },
            num_preemptions: totals.num_preemptions,
            queue_time_seconds: totals.queue_time_seconds,
        }
    }
}

/// A scheduler in figures: its present state, and what was counted since it was made.
///
/// Names are those of vLLM's metrics. Times are in seconds of the clock that `now` came from.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct SchedulerStats(pub(crate) core::SchedulerStats);

getters!(SchedulerStats.0 {
    num_requests_running: u64;
    num_requests_waiting: u64;
    /// Share of the usable blocks that are not available, from 0 to 1.
    kv_cache_usage: f64;
    num_free_blocks: u32;
    /// Blocks that nobody holds and that can be hit.
    num_cached_blocks: u32;
    num_held_blocks: u32;
    /// Blocks that wait for a plan to end.
    num_fenced_blocks: u32;
    /// Cached blocks that were reused for something else.
    num_evictions: u64;
    /// Tokens for samples that had ended before.
    num_ignored_tokens: u64;
    /// Counts over all requests.
    totals: RequestTotals = |stats| (&stats.totals).into();
    /// From arrival to the first token.
    time_to_first_token_seconds: Histogram = |stats| (&stats.time_to_first_token_seconds).into();
    /// From arrival to the first admission, of requests that ended.
    request_queue_time_seconds: Histogram = |stats| (&stats.request_queue_time_seconds).into();
    /// From the first admission to the first token.
    request_prefill_time_seconds: Histogram = |stats| (&stats.request_prefill_time_seconds).into();
    /// From the first token to the end.
    request_decode_time_seconds: Histogram = |stats| (&stats.request_decode_time_seconds).into();
    /// From arrival to the end.
    e2e_request_latency_seconds: Histogram = |stats| (&stats.e2e_request_latency_seconds).into();
    /// Per token after the first, of each request.
    request_time_per_output_token_seconds: Histogram = |stats| (&stats.request_time_per_output_token_seconds).into();
    /// Preemptions of each request that ended.
    request_num_preemptions: Histogram = |stats| (&stats.request_num_preemptions).into();
    /// Tokens of the prompt of each request that ended after its first token.
    request_prompt_tokens: Histogram = |stats| (&stats.request_prompt_tokens).into();
    /// Tokens that each of these requests got, all samples together.
    request_generation_tokens: Histogram = |stats| (&stats.request_generation_tokens).into();
    /// From a block's allocation to its eviction; None without `CacheConfig(kv_cache_metrics_sample=...)`.
    kv_block_lifetime_seconds: Option<Histogram> = |stats| watched(stats, |times| &times.kv_block_lifetime_seconds);
    /// From a block's last hit, or its allocation, to its eviction; None without `kv_cache_metrics_sample`.
    kv_block_idle_before_evict_seconds: Option<Histogram> = |stats| watched(stats, |times| &times.kv_block_idle_before_evict_seconds);
    /// Between the last hits of a block; None without `kv_cache_metrics_sample`.
    kv_block_reuse_gap_seconds: Option<Histogram> = |stats| watched(stats, |times| &times.kv_block_reuse_gap_seconds);
});

/// A distribution over the blocks that are watched, where there are some.
fn watched(
    stats: &core::SchedulerStats,
    times: impl FnOnce(&core::ResidencyStats) -> &core::Histogram,
) -> Option<Histogram> {
    stats.residency.as_ref().map(|residency| times(residency).into())
}

#[pymethods]
impl SchedulerStats {
    /// Counts per tenant; under None those of requests that name no tenant.
    #[getter]
    fn tenants(&self) -> BTreeMap<Option<&str>, RequestTotals> {
        let named = self.0.tenants.iter().filter_map(|(name, totals)| match name {
            core::TenantName::Unnamed => Some((None, totals.into())),
            core::TenantName::Named(name) => Some((Some(name.as_str()), totals.into())),
            core::TenantName::Others => None,
        });
        named.collect()
    }

    /// Counts of all tenants that came after the first 1,024; None where there are none.
    #[getter]
    fn other_tenants(&self) -> Option<RequestTotals> {
        let (name, totals) = self.0.tenants.last()?;
        (*name == core::TenantName::Others).then(|| totals.into())
    }

    fn __repr__(&self) -> String {
        let stats = &self.0;
        format!(
            "SchedulerStats(num_requests_running={}, num_requests_waiting={}, kv_cache_usage={:.3})",
            stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage
        )
    }
}

/// One request in figures.
#[pyclass(frozen, get_all, module = "pagedkv._core")]
#[derive(Clone)]
pub(crate) struct RequestStats {
    arrival_time: f64,
    queue_time: Option<f64>,
    requeue_time: f64,
    time_to_first_token: Option<f64>,
    time_in_system: f64,
    num_prompt_tokens: u32,
    num_cached_tokens: u32,
    num_loaded_tokens: u32,
    num_generation_tokens: u64,
    num_preemptions: u32,
}

impl From<core::RequestStats> for RequestStats {
    fn from(stats: core::RequestStats) -> Self {
        Self {
            arrival_time: stats.arrival_time,
            queue_time: stats.queue_time,
            requeue_time: stats.requeue_time,
            time_to_first_token: stats.time_to_first_token,
            time_in_system: stats.time_in_system,
            num_prompt_tokens: stats.num_prompt_tokens,
            num_cached_tokens: stats.num_cached_tokens,
            num_loaded_tokens: stats.num_loaded_tokens,
            num_generation_tokens: stats.num_generation_tokens,
            num_preemptions: stats.num_preemptions,
        }
    }
}
