//! What the scheduler counts as it goes: every figure costs O(1) per request or per step, none per token.
//!
//! Names are those of vLLM's metrics. Times are what callers gave as `now`; an event takes place at the time of the
//! `schedule` or `commit` in which it happens, or of the last one before it.

use std::collections::HashMap;

use super::Scheduler;
use super::in_flight::Entry;
use super::request::{FinishReason, Request, Stage};
use crate::error::{Error, Result, invalid};
use crate::ids::Handle;
use crate::residency::ResidencyStats;
use crate::stats::{
    Histogram, INTER_TOKEN_LATENCY_BUCKETS, PrefixCacheStats, REQUEST_LATENCY_BUCKETS, REQUEST_NUM_PREEMPTIONS_BUCKETS,
    REQUEST_NUM_TOKENS_BUCKETS, TIME_TO_FIRST_TOKEN_BUCKETS,
};

/// Tenants that have a line of their own; those that come later share one.
pub const MAX_TENANT_STATS: usize = 1024;

/// The state of a scheduler in figures. See [`Scheduler::stats`].
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerStats {
    /// Requests with seats.
    pub num_requests_running: u64,
    /// Requests that wait for seats.
    pub num_requests_waiting: u64,
    /// Share of the usable blocks that are not available, from 0 to 1.
    pub kv_cache_usage: f64,
    /// Blocks that hold nothing.
    pub num_free_blocks: u32,
    /// Blocks that nobody holds and that can be hit.
    pub num_cached_blocks: u32,
    /// Blocks with a holder.
    pub num_held_blocks: u32,
    /// Blocks that wait for a plan to end.
    pub num_fenced_blocks: u32,
    /// Cached blocks that were reused for something else.
    pub num_evictions: u64,
    /// Where sampling is on, how long blocks hold what they hold.
    pub residency: Option<ResidencyStats>,
    /// Counts over all requests.
    pub totals: RequestTotals,
    /// The same per tenant, in the order in which they were first seen; requests without one have none. The last line is
    /// that of all tenants after the first [`MAX_TENANT_STATS`].
    pub tenants: Vec<(TenantName, RequestTotals)>,
    /// Tokens for samples that had ended before.
    pub num_ignored_tokens: u64,
    /// Seconds from arrival to the first token, of requests that have one.
    pub time_to_first_token_seconds: Histogram,
    /// Seconds from arrival to the first admission, of requests that ended.
    pub request_queue_time_seconds: Histogram,
    /// Seconds from the first admission to the first token.
    pub request_prefill_time_seconds: Histogram,
    /// Seconds from the first token to the end.
    pub request_decode_time_seconds: Histogram,
    /// Seconds from arrival to the end.
    pub e2e_request_latency_seconds: Histogram,
    /// Seconds per token after the first, of each request.
    pub request_time_per_output_token_seconds: Histogram,
    /// Preemptions of each request.
    pub request_num_preemptions: Histogram,
    /// Tokens of the prompt of each request that ended after its first token.
    pub request_prompt_tokens: Histogram,
    /// Tokens that each of these requests got, all samples together.
    pub request_generation_tokens: Histogram,
}

/// Whose figures these are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantName {
    /// Requests that name no tenant.
    Unnamed,
    /// Requests of this tenant.
    Named(String),
    /// Requests of all tenants that came after the table was full.
    Others,
}

/// Counts over requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestTotals {
    /// Requests that were taken up; each turn of a session is one.
    pub num_requests: u64,
    /// Requests that ended.
    pub num_finished: u64,
    /// Samples that ended, by [`FinishReason`]: stop, length, abort, dropped.
    pub finished_by_reason: [u64; 4],
    /// Prompt tokens of requests whose prompt is computed.
    pub prompt_tokens: u64,
    /// Of these, tokens that came from the prefix cache.
    pub prompt_tokens_cached: u64,
    /// Prompt tokens that loads from outside brought.
    pub prompt_tokens_loaded: u64,
    /// Tokens sampled and taken.
    pub generation_tokens: u64,
    /// Lookups in the prefix cache at admission.
    pub prefix_cache: PrefixCacheStats,
    /// Preemptions.
    pub num_preemptions: u64,
    /// Seconds that admitted requests had waited, first admissions and later ones together.
    pub queue_time_seconds: f64,
}

/// One request in figures.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestStats {
    /// When it arrived.
    pub arrival_time: f64,
    /// Seconds from arrival to its first admission; `None` before.
    pub queue_time: Option<f64>,
    /// Seconds that it waited after preemptions.
    pub requeue_time: f64,
    /// Seconds from arrival to its first token; `None` before.
    pub time_to_first_token: Option<f64>,
    /// Seconds since arrival; to its end, of one that ended.
    pub time_in_system: f64,
    /// Tokens of the prompt; in a later turn of a session those that it had to compute.
    pub num_prompt_tokens: u32,
    /// Prompt tokens that the first residence took from the prefix cache.
    pub num_cached_tokens: u32,
    /// Prompt tokens that a load from outside brought.
    pub num_loaded_tokens: u32,
    /// Tokens sampled and taken, all samples together.
    pub num_generation_tokens: u64,
    /// How often it lost its blocks.
    pub num_preemptions: u32,
}

/// What is kept of one request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RequestRecord {
    tenant: u32,
    num_prompt_tokens: u32,
    num_loaded_tokens: u32,
    scheduled_at: Option<f64>,
    first_token_at: Option<f64>,
    /// The newest admission, and since when the request had waited for it.
    admitted_at: f64,
    waiting_since: f64,
    requeue_time: f64,
    num_generation_tokens: u64,
    /// Admissions that were not undone.
    num_admissions: u32,
}

/// What is kept of all requests.
#[derive(Debug)]
pub(super) struct Recorder {
    pub(super) now: f64,
    num_ignored_tokens: u64,
    totals: RequestTotals,
    tenants: Vec<(TenantName, RequestTotals)>,
    by_tenant: HashMap<Option<String>, u32>,
    time_to_first_token: Histogram,
    queue_time: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
    e2e_latency: Histogram,
    time_per_output_token: Histogram,
    num_preemptions: Histogram,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
}

impl Recorder {
    pub(super) fn new() -> Self {
        let latency = || Histogram::new(REQUEST_LATENCY_BUCKETS);
        let tokens = || Histogram::new(REQUEST_NUM_TOKENS_BUCKETS);
        Self {
            now: 0.0,
            num_ignored_tokens: 0,
            totals: RequestTotals::default(),
            tenants: Vec::new(),
            by_tenant: HashMap::new(),
            time_to_first_token: Histogram::new(TIME_TO_FIRST_TOKEN_BUCKETS),
            queue_time: latency(),
            prefill_time: latency(),
            decode_time: latency(),
            e2e_latency: latency(),
            time_per_output_token: Histogram::new(INTER_TOKEN_LATENCY_BUCKETS),
            num_preemptions: Histogram::new(REQUEST_NUM_PREEMPTIONS_BUCKETS),
            prompt_tokens: tokens(),
            generation_tokens: tokens(),
        }
    }

    fn tenant(&mut self, tenant: Option<&String>) -> u32 {
        if let Some(&found) = self.by_tenant.get(&tenant.cloned()) {
            return found;
        }
        if self.by_tenant.len() == MAX_TENANT_STATS {
            if self.tenants.len() == MAX_TENANT_STATS {
                self.tenants.push((TenantName::Others, RequestTotals::default()));
            }
            return MAX_TENANT_STATS as u32;
        }
        let index = self.tenants.len() as u32;
        let name = tenant.map_or(TenantName::Unnamed, |name| TenantName::Named(name.clone()));
        self.tenants.push((name, RequestTotals::default()));
        self.by_tenant.insert(tenant.cloned(), index);
        index
    }

    /// Changes the counts of all requests, and those of one tenant.
    fn count(&mut self, tenant: u32, mut change: impl FnMut(&mut RequestTotals)) {
        change(&mut self.totals);
        change(&mut self.tenants[tenant as usize].1);
    }

    pub(super) fn arrived(&mut self, request: &mut Request) {
        request.record.tenant = self.tenant(request.tenant.as_ref());
        request.record.num_prompt_tokens = request.prompt_len();
        self.count(request.record.tenant, |totals| totals.num_requests += 1);
    }

    /// The next turn of a session is a request for itself, whose prompt is what it has to compute.
    pub(super) fn arrived_again(&mut self, request: &mut Request) {
        request.arrival = self.now;
        request.record = RequestRecord { tenant: request.record.tenant, ..RequestRecord::default() };
        self.count(request.record.tenant, |totals| totals.num_requests += 1);
    }

    /// More tokens of the prompt are known.
    pub(super) fn prompt_grew(request: &mut Request, num_tokens: u32) {
        request.record.num_prompt_tokens += num_tokens;
    }

    /// `num_queried` tokens were looked for at the admission of a request, 0 if it does not use the cache.
    pub(super) fn admitted(&mut self, request: &mut Request, num_queried: u32) {
        request.record.admitted_at = self.now;
        request.record.num_admissions += 1;
        if request.record.scheduled_at.is_none() {
            request.record.scheduled_at = Some(self.now);
            request.record.waiting_since = request.arrival;
        }
        self.count_admission(request, num_queried, 1.0);
    }

    /// The plan of the request's admission was undone.
    pub(super) fn admission_undone(&mut self, request: &mut Request, entry: &Entry) {
        if entry.num_preemptions != request.num_preemptions {
            return;
        }
        self.count_admission(request, entry.num_queried, -1.0);
        request.record.num_admissions -= 1;
        if request.record.num_admissions == 0 {
            request.record.scheduled_at = None;
        }
    }

    fn count_admission(&mut self, request: &mut Request, num_queried: u32, sign: f64) {
        let is_first = request.num_preemptions == 0;
        let waited = sign * (request.record.admitted_at - request.record.waiting_since).max(0.0);
        // A request may lose blocks before its first admission: a fork, or a session's next turn.
        request.record.requeue_time += if request.record.num_admissions == 1 { 0.0 } else { waited };
        let (lookups, queries) = (u64::from(num_queried > 0), u64::from(num_queried));
        self.count(request.record.tenant, |totals| {
            totals.queue_time_seconds += waited;
            if sign > 0.0 {
                totals.prefix_cache.add(is_first, lookups, queries, 0);
            } else {
                totals.prefix_cache.take_back(is_first, lookups, queries, 0);
            }
        });
    }

    /// A growth of the request took tokens from the prefix cache.
    pub(super) fn hit(&mut self, request: &Request, num_hits: u32) {
        if num_hits > 0 {
            let (is_first, hits) = (request.num_preemptions == 0, u64::from(num_hits));
            self.count(request.record.tenant, |totals| totals.prefix_cache.add(is_first, 0, 0, hits));
        }
    }

    /// A load from outside brought tokens of the request's prompt.
    pub(super) fn loaded(&mut self, request: &mut Request, num_tokens: u32) {
        request.record.num_loaded_tokens += num_tokens;
        self.count(request.record.tenant, |totals| totals.prompt_tokens_loaded += u64::from(num_tokens));
    }

    pub(super) fn preempted(&mut self, request: &mut Request) {
        request.record.waiting_since = self.now;
        self.count(request.record.tenant, |totals| totals.num_preemptions += 1);
    }

    /// The request got tokens.
    pub(super) fn generated(&mut self, request: &mut Request, num_tokens: usize) {
        request.record.num_generation_tokens += num_tokens as u64;
        if request.record.first_token_at.is_none() && num_tokens > 0 {
            self.got_first_token(request);
        }
    }

    fn got_first_token(&mut self, request: &mut Request) {
        request.record.first_token_at = Some(self.now);
        self.time_to_first_token.observe((self.now - request.arrival).max(0.0));
        let (prompt, cached) = (u64::from(request.record.num_prompt_tokens), u64::from(request.num_cached_tokens));
        self.count(request.record.tenant, |totals| {
            totals.prompt_tokens += prompt;
            totals.prompt_tokens_cached += cached;
        });
    }

    pub(super) fn sample_finished(&mut self, request: &Request, reason: FinishReason) {
        self.count(request.record.tenant, |totals| totals.finished_by_reason[reason as usize - 1] += 1);
    }

    pub(super) fn finished(&mut self, request: &Request) {
        let record = request.record;
        let (now, arrival, num_tokens) = (self.now, request.arrival, record.num_generation_tokens);
        self.count(record.tenant, |totals| {
            totals.num_finished += 1;
            totals.generation_tokens += num_tokens;
        });
        let observe = |histogram: &mut Histogram, from: f64, to: f64| histogram.observe((to - from).max(0.0));
        observe(&mut self.e2e_latency, arrival, now);
        self.num_preemptions.observe(f64::from(request.num_preemptions));
        let Some(scheduled) = record.scheduled_at else { return };
        observe(&mut self.queue_time, arrival, scheduled);
        let Some(first) = record.first_token_at else { return };
        observe(&mut self.prefill_time, scheduled, first);
        observe(&mut self.decode_time, first, now);
        self.prompt_tokens.observe(f64::from(record.num_prompt_tokens));
        self.generation_tokens.observe(num_tokens as f64);
        if num_tokens > 1 {
            let per_token = (now - first).max(0.0) / (num_tokens - 1) as f64;
            self.time_per_output_token.observe(per_token);
        }
    }

    pub(super) fn ignored(&mut self, num_tokens: u32) {
        self.num_ignored_tokens += u64::from(num_tokens);
    }

    /// Tokens that a request took from the prefix cache were taken back, unless a preemption did so before.
    pub(super) fn hit_undone(&mut self, request: &Request, entry: &Entry) {
        if entry.num_hit_tokens > 0 && entry.num_preemptions == request.num_preemptions {
            let (is_first, hits) = (request.num_preemptions == 0, u64::from(entry.num_hit_tokens));
            self.count(request.record.tenant, |totals| totals.prefix_cache.take_back(is_first, 0, 0, hits));
        }
    }
}

impl Scheduler {
    /// The time of the calls that follow, in seconds of the caller's clock, for statistics and for cached blocks whose
    /// priority holds for a time. Time that goes back is ignored.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a time that is not finite.
    pub fn advance(&mut self, now: f64) -> Result<()> {
        if !now.is_finite() {
            return invalid("now", "a finite time in seconds", now);
        }
        self.recorder.now = self.recorder.now.max(now);
        self.manager.advance(self.recorder.now)
    }

    /// The present state and everything counted since the scheduler was made.
    ///
    /// # Complexity
    /// O(live requests + tenants).
    pub fn stats(&self) -> SchedulerStats {
        let (recorder, pool) = (&self.recorder, self.manager.pool());
        let (mut totals, mut tenants) = (recorder.totals, recorder.tenants.clone());
        // The tokens of a turn that is over are in the totals already.
        for (_, request) in self.requests.iter().filter(|(_, request)| request.stage != Stage::Resting) {
            let num_tokens = request.record.num_generation_tokens;
            totals.generation_tokens += num_tokens;
            tenants[request.record.tenant as usize].1.generation_tokens += num_tokens;
        }
        SchedulerStats {
            num_requests_running: self.num_requests().0 as u64,
            num_requests_waiting: self.num_requests().1 as u64,
            kv_cache_usage: self.manager.usage(),
            num_free_blocks: pool.num_free(),
            num_cached_blocks: pool.num_cached(),
            num_held_blocks: pool.num_held(),
            num_fenced_blocks: pool.num_fenced(),
            num_evictions: pool.num_evictions(),
            residency: pool.residency().cloned(),
            totals,
            tenants,
            num_ignored_tokens: recorder.num_ignored_tokens,
            time_to_first_token_seconds: recorder.time_to_first_token.clone(),
            request_queue_time_seconds: recorder.queue_time.clone(),
            request_prefill_time_seconds: recorder.prefill_time.clone(),
            request_decode_time_seconds: recorder.decode_time.clone(),
            e2e_request_latency_seconds: recorder.e2e_latency.clone(),
            request_time_per_output_token_seconds: recorder.time_per_output_token.clone(),
            request_num_preemptions: recorder.num_preemptions.clone(),
            request_prompt_tokens: recorder.prompt_tokens.clone(),
            request_generation_tokens: recorder.generation_tokens.clone(),
        }
    }

    /// One live request in figures.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a request that is not live, or that no `schedule` or `commit` has taken up yet.
    pub fn request_stats(&self, handle: Handle) -> Result<RequestStats> {
        let slot = *self.by_handle.get(&handle).ok_or(Error::UnknownHandle(handle))?;
        Ok(self.stats_of(self.request(slot)))
    }

    pub(super) fn stats_of(&self, request: &Request) -> RequestStats {
        let (record, arrival_time) = (&request.record, request.arrival);
        let since_arrival = |time: f64| (time - arrival_time).max(0.0);
        RequestStats {
            arrival_time,
            queue_time: record.scheduled_at.map(since_arrival),
            requeue_time: record.requeue_time,
            time_to_first_token: record.first_token_at.map(since_arrival),
            time_in_system: since_arrival(self.recorder.now),
            num_prompt_tokens: record.num_prompt_tokens,
            num_cached_tokens: request.num_cached_tokens,
            num_loaded_tokens: record.num_loaded_tokens,
            num_generation_tokens: record.num_generation_tokens,
            num_preemptions: request.num_preemptions,
        }
    }
}
