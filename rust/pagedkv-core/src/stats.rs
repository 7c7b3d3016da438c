//! Counts and distributions, under the names that vLLM's metrics have.
//!
//! Bucket bounds are those of vLLM 0.32 (`v1/metrics/buckets.py`), so that dashboards drawn for it read ours.

/// Bounds for seconds to a first token.
pub const TIME_TO_FIRST_TOKEN_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Bounds for seconds that a request spends in one phase of its life, or in all.
pub const REQUEST_LATENCY_BUCKETS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
/// Bounds for seconds per token.
pub const INTER_TOKEN_LATENCY_BUCKETS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// Bounds for seconds that a block holds a prefix, or lies idle.
pub const KV_CACHE_RESIDENCY_BUCKETS: &[f64] = &[
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
];
/// Bounds for preemptions of one request.
pub const REQUEST_NUM_PREEMPTIONS_BUCKETS: &[f64] = &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];

/// Bounds for tokens of one request: 1, 2 and 5 times powers of ten, to beyond the longest contexts that models have.
pub const REQUEST_NUM_TOKENS_BUCKETS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6];

/// A distribution: how many values lie at or below each bound, and above the last.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    /// An empty one over ascending bounds.
    pub fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    /// Counts a value.
    ///
    /// # Complexity
    /// O(log bounds).
    pub fn observe(&mut self, value: f64) {
        self.counts[self.bounds.partition_point(|&bound| bound < value)] += 1;
        self.sum += value;
    }

    /// Upper bounds of the buckets but the last, which has none.
    pub fn bounds(&self) -> &'static [f64] {
        self.bounds
    }

    /// Values in each bucket, not summed up; one more than there are bounds.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Values counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of the values.
    pub fn sum(&self) -> f64 {
        self.sum
    }
}

/// Tokens looked for in the prefix cache and found there, of requests that are admitted for the first time and of those
/// that come back after a preemption.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCacheStats {
    /// First admissions that looked.
    pub requests: u64,
    /// Tokens that they looked for.
    pub queries: u64,
    /// Tokens that they found.
    pub hits: u64,
    /// Admissions after a preemption that looked.
    pub preempted_requests: u64,
    /// Tokens that they looked for.
    pub preempted_queries: u64,
    /// Tokens that they found.
    pub preempted_hits: u64,
}

impl PrefixCacheStats {
    pub(crate) fn add(&mut self, is_first: bool, requests: u64, queries: u64, hits: u64) {
        let (all, asked, found) = self.of(is_first);
        (*all, *asked, *found) = (*all + requests, *asked + queries, *found + hits);
    }

    pub(crate) fn take_back(&mut self, is_first: bool, requests: u64, queries: u64, hits: u64) {
        let (all, asked, found) = self.of(is_first);
        (*all, *asked, *found) = (*all - requests, *asked - queries, *found - hits);
    }

    fn of(&mut self, is_first: bool) -> (&mut u64, &mut u64, &mut u64) {
        if is_first {
            (&mut self.requests, &mut self.queries, &mut self.hits)
        } else {
            (&mut self.preempted_requests, &mut self.preempted_queries, &mut self.preempted_hits)
        }
    }
}
