//! What the scheduler's figures must be, from what happened.

use pagedkv_core::{FinishReason, Handle, RequestStats, RequestTotals, Scheduler};

use super::{Entry, Request, SchedulerModel};

/// What happened to a request, and when.
#[derive(Clone, Debug, Default)]
pub(super) struct Times {
    arrival: f64,
    waiting_since: f64,
    /// Admissions that were not undone: since when the request had waited, and when it was admitted.
    admissions: Vec<(f64, f64)>,
    first_token: Option<f64>,
    /// Tokens of the prompt, or those that a session's turn brought along.
    pub(super) num_prompt: u64,
    num_generated: u64,
    pub(super) num_loaded: u64,
}

impl Times {
    pub(super) fn arriving(now: f64, num_prompt: usize) -> Self {
        Self { arrival: now, waiting_since: now, num_prompt: num_prompt as u64, ..Self::default() }
    }
}

fn wait(&(since, at): &(f64, f64)) -> f64 {
    at - since
}

impl SchedulerModel {
    pub(super) fn note_taken_up(&mut self) {
        self.totals.num_requests = self.num_finished + self.requests.len() as u64;
    }

    /// A sequence was planned; what of it came from the cache.
    pub(super) fn note_entry(&mut self, entry: &mut Entry) {
        let (now, caching) = (self.now, self.limits.caching);
        let request = self.find_mut(entry.handle).expect("planned requests live");
        let is_first = request.num_preemptions == 0;
        let asks = entry.is_admission && caching && request.asked.use_prefix_cache;
        let queries = if asks { (request.limit(entry.sample) - entry.before) as u64 } else { 0 };
        entry.num_queried = queries;
        if entry.is_admission {
            let admission = (request.times.waiting_since, now);
            request.times.admissions.push(admission);
            self.totals.queue_time_seconds += wait(&admission);
        }
        self.count_lookup(is_first, u64::from(asks), queries, entry.num_hit_tokens as u64);
    }

    /// A request came back from the host tier.
    pub(super) fn note_return(&mut self, handle: Handle) {
        let now = self.now;
        let request = self.find_mut(handle).expect("who comes back lives");
        let admission = (request.times.waiting_since, now);
        request.times.admissions.push(admission);
        self.totals.queue_time_seconds += wait(&admission);
    }

    /// A load from outside brought tokens.
    pub(super) fn note_loaded(&mut self, handle: Handle, num_tokens: usize) {
        self.find_mut(handle).expect("who waited for a load lives").times.num_loaded += num_tokens as u64;
        self.totals.prompt_tokens_loaded += num_tokens as u64;
        self.events.note("loaded tokens", num_tokens as u64);
    }

    /// The plan of a sequence that is still as the plan left it was undone.
    pub(super) fn note_undone(&mut self, entry: &Entry, num_queried: u64) {
        let request = self.find_mut(entry.handle).expect("an entry of a live request");
        let is_first = request.num_preemptions == 0;
        if entry.is_admission {
            let admission = request.times.admissions.pop().expect("it was admitted");
            self.totals.queue_time_seconds -= wait(&admission);
        }
        let minus = |count: u64| count.wrapping_neg();
        let lookups = minus(u64::from(num_queried > 0));
        self.count_lookup(is_first, lookups, minus(num_queried), minus(entry.num_hit_tokens as u64));
    }

    pub(super) fn count_lookup(&mut self, is_first: bool, lookups: u64, queries: u64, hits: u64) {
        let cache = &mut self.totals.prefix_cache;
        let (all, asked, found) = if is_first {
            (&mut cache.requests, &mut cache.queries, &mut cache.hits)
        } else {
            (&mut cache.preempted_requests, &mut cache.preempted_queries, &mut cache.preempted_hits)
        };
        *all = all.wrapping_add(lookups);
        *asked = asked.wrapping_add(queries);
        *found = found.wrapping_add(hits);
    }

    pub(super) fn note_preemption(&mut self, handle: Handle) {
        let now = self.now;
        let times = &mut self.find_mut(handle).expect("victims live").times;
        // One that only kept blocks waits since it came.
        if !times.admissions.is_empty() {
            times.waiting_since = now;
        }
        self.totals.num_preemptions += 1;
    }

    pub(super) fn note_tokens(&mut self, handle: Handle, num_tokens: usize) {
        if num_tokens == 0 {
            return;
        }
        let now = self.now;
        let request = self.find_mut(handle).expect("it gets a token");
        request.times.num_generated += num_tokens as u64;
        let is_first = request.times.first_token.replace(request.times.first_token.unwrap_or(now)).is_none();
        let (prompt, cached) = (request.times.num_prompt, request.num_cached_tokens as u64);
        if is_first {
            self.totals.prompt_tokens += prompt;
            self.totals.prompt_tokens_cached += cached;
        }
        self.totals.generation_tokens += num_tokens as u64;
    }

    /// A sample ends for a reason; answers whether its request is over.
    pub(crate) fn end_for(&mut self, handle: Handle, sample: usize, reason: FinishReason) -> bool {
        let live = self.requests.iter().find(|request| request.handle == handle);
        if live.is_some_and(|request| !request.samples[sample].is_over) {
            self.totals.finished_by_reason[reason as usize - 1] += 1;
        }
        let keeps = matches!(reason, FinishReason::Stop | FinishReason::Length);
        let is_over = self.finish(handle, sample, keeps);
        self.num_finished += u64::from(is_over);
        self.totals.num_finished = self.num_finished;
        is_over
    }

    pub(super) fn stats_of(&self, request: &Request) -> RequestStats {
        let times = &request.times;
        RequestStats {
            arrival_time: times.arrival,
            queue_time: times.admissions.first().map(|&(_, at)| at - times.arrival),
            requeue_time: times.admissions.iter().skip(1).map(wait).sum(),
            time_to_first_token: times.first_token.map(|at| at - times.arrival),
            time_in_system: self.now - times.arrival,
            num_prompt_tokens: times.num_prompt as u32,
            num_cached_tokens: request.num_cached_tokens as u32,
            num_loaded_tokens: times.num_loaded as u32,
            num_generation_tokens: times.num_generated,
            num_preemptions: request.num_preemptions,
        }
    }

    pub(super) fn check_stats(&self, scheduler: &Scheduler) {
        let stats = scheduler.stats();
        assert_eq!(stats.totals, self.totals);
        let mut sum = RequestTotals::default();
        for (_, tenant) in &stats.tenants {
            sum.num_finished += tenant.num_finished;
            sum.generation_tokens += tenant.generation_tokens;
            sum.prefix_cache.hits += tenant.prefix_cache.hits;
            sum.num_preemptions += tenant.num_preemptions;
        }
        let totals = &stats.totals;
        assert_eq!(
            (sum.num_finished, sum.generation_tokens, sum.prefix_cache.hits, sum.num_preemptions),
            (totals.num_finished, totals.generation_tokens, totals.prefix_cache.hits, totals.num_preemptions),
            "tenants do not add up"
        );
        assert!(totals.prefix_cache.hits <= totals.prefix_cache.queries);
        let num_blocks = stats.num_free_blocks + stats.num_cached_blocks + stats.num_held_blocks;
        assert_eq!((num_blocks + stats.num_fenced_blocks) as usize, self.limits.usable_blocks);
        for request in &self.requests {
            let known = scheduler.request_stats(request.handle);
            assert!(known.is_err() || known == Ok(self.stats_of(request)), "{known:?}, {:?}", self.stats_of(request));
        }
    }
}
