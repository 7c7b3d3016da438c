//! Figures of a scheduler.

use std::collections::BTreeMap;

use numpy::PyArray1;
use pagedkv_core as core;
use pyo3::prelude::*;

use crate::arrays::array;

/// A distribution of values over buckets.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct Histogram(core::Histogram);

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

    /// Values counted.
    #[getter]
    fn count(&self) -> u64 {
        self.0.count()
    }

    /// Sum of the values.
    #[getter]
    fn sum(&self) -> f64 {
        self.0.sum()
    }

    fn __repr__(&self) -> String {
        format!("Histogram(count={}, sum={})", self.0.count(), self.0.sum())
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

#[pymethods]
impl SchedulerStats {
    #[getter]
    fn num_requests_running(&self) -> u64 {
        self.0.num_requests_running
    }

    #[getter]
    fn num_requests_waiting(&self) -> u64 {
        self.0.num_requests_waiting
    }

    /// Share of the usable blocks that are not available, from 0 to 1.
    #[getter]
    fn kv_cache_usage(&self) -> f64 {
        self.0.kv_cache_usage
    }

    #[getter]
    fn num_free_blocks(&self) -> u32 {
        self.0.num_free_blocks
    }

    /// Blocks that nobody holds and that can be hit.
    #[getter]
    fn num_cached_blocks(&self) -> u32 {
        self.0.num_cached_blocks
    }

    #[getter]
    fn num_held_blocks(&self) -> u32 {
        self.0.num_held_blocks
    }

    /// Blocks that wait for a plan to end.
    #[getter]
    fn num_fenced_blocks(&self) -> u32 {
        self.0.num_fenced_blocks
    }

    /// Cached blocks that were reused for something else.
    #[getter]
    fn num_evictions(&self) -> u64 {
        self.0.num_evictions
    }

    /// Tokens for samples that had ended before.
    #[getter]
    fn num_ignored_tokens(&self) -> u64 {
        self.0.num_ignored_tokens
    }

    /// Counts over all requests.
    #[getter]
    fn totals(&self) -> RequestTotals {
        (&self.0.totals).into()
    }

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

    /// From arrival to the first token.
    #[getter]
    fn time_to_first_token_seconds(&self) -> Histogram {
        Histogram(self.0.time_to_first_token_seconds.clone())
    }

    /// From arrival to the first admission, of requests that ended.
    #[getter]
    fn request_queue_time_seconds(&self) -> Histogram {
        Histogram(self.0.request_queue_time_seconds.clone())
    }

    /// From the first admission to the first token.
    #[getter]
    fn request_prefill_time_seconds(&self) -> Histogram {
        Histogram(self.0.request_prefill_time_seconds.clone())
    }

    /// From the first token to the end.
    #[getter]
    fn request_decode_time_seconds(&self) -> Histogram {
        Histogram(self.0.request_decode_time_seconds.clone())
    }

    /// From arrival to the end.
    #[getter]
    fn e2e_request_latency_seconds(&self) -> Histogram {
        Histogram(self.0.e2e_request_latency_seconds.clone())
    }

    /// Per token after the first, of each request.
    #[getter]
    fn request_time_per_output_token_seconds(&self) -> Histogram {
        Histogram(self.0.request_time_per_output_token_seconds.clone())
    }

    /// Preemptions of each request that ended.
    #[getter]
    fn request_num_preemptions(&self) -> Histogram {
        Histogram(self.0.request_num_preemptions.clone())
    }

    /// From a block's allocation to its eviction; None without `CacheConfig(kv_cache_metrics_sample=...)`.
    #[getter]
    fn kv_block_lifetime_seconds(&self) -> Option<Histogram> {
        self.0.residency.as_ref().map(|residency| Histogram(residency.kv_block_lifetime_seconds.clone()))
    }

    /// From a block's last hit, or its allocation, to its eviction; None without `kv_cache_metrics_sample`.
    #[getter]
    fn kv_block_idle_before_evict_seconds(&self) -> Option<Histogram> {
        self.0.residency.as_ref().map(|residency| Histogram(residency.kv_block_idle_before_evict_seconds.clone()))
    }

    /// Between the last hits of a block; None without `kv_cache_metrics_sample`.
    #[getter]
    fn kv_block_reuse_gap_seconds(&self) -> Option<Histogram> {
        self.0.residency.as_ref().map(|residency| Histogram(residency.kv_block_reuse_gap_seconds.clone()))
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
            num_generation_tokens: stats.num_generation_tokens,
            num_preemptions: stats.num_preemptions,
        }
    }
}
