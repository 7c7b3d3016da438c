//! A scheduler and its model, side by side. The property tests, the fuzzer and the soak run all drive this one.

use std::sync::Arc;

use pagedkv_core::{
    CacheConfig, Error, EventConfig, FinishReason, Handle, Identity, ImageSpan, NewRequest, PlanId, Policy,
    PreemptionMode, Reason, RootKey, Scheduler, SchedulerConfig, StepResult,
};

use crate::model::memory::{Group, Groups, cache_config};
use crate::model::mirror::{Mirror, Mirrors};
use crate::model::random::{Random, two_tokens};
use crate::model::scheduler::{Limits, Outcome, Request, SchedulerModel};

const MOST_REQUESTS: usize = 6;
const MOST_RESTING: usize = 2;
const MAX_MODEL_LEN: usize = 14;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Command {
    Add {
        prompt: u8,
        output: u8,
        kind: u8,
    },
    Schedule {
        tokens: u8,
    },
    RunPlan,
    Draft {
        request: u8,
        sample: u8,
        tokens: u8,
    },
    TransfersDone {
        which: u8,
        outcome: u8,
    },
    Commit {
        outcome: u8,
    },
    Rollback {
        plan: u8,
    },
    Abort {
        request: u8,
        sample: u8,
    },
    Finish {
        request: u8,
        sample: u8,
    },
    ResetPrefixCache,
    Append {
        request: u8,
        sample: u8,
        tokens: u8,
    },
    Free {
        request: u8,
        sample: u8,
    },
    Hold {
        request: u8,
    },
    Release {
        request: u8,
    },
    Fork {
        request: u8,
        sample: u8,
        kind: u8,
    },
    /// A call that must be refused.
    Mistake {
        which: u8,
        target: u8,
    },
}

impl Command {
    pub(crate) fn decode([kind, a, b, c]: [u8; 4]) -> Self {
        match kind % 120 {
            0..16 => Self::Add { prompt: a, output: b, kind: c },
            16..47 => Self::Schedule { tokens: a },
            47..52 => Self::RunPlan,
            52..56 => Self::Draft { request: a, sample: b, tokens: c },
            56..61 => Self::TransfersDone { which: a, outcome: b },
            61..87 => Self::Commit { outcome: a },
            87..92 => Self::Rollback { plan: a },
            92..94 => Self::Abort { request: a, sample: b },
            94 => Self::Finish { request: a, sample: b },
            95 if a < 128 => Self::ResetPrefixCache,
            100..107 => Self::Append { request: a, sample: b, tokens: c },
            107 => Self::Free { request: a, sample: b },
            108..111 => Self::Hold { request: a },
            111..116 => Self::Release { request: a },
            116..120 => Self::Fork { request: a, sample: b, kind: c },
            _ => Self::Mistake { which: a, target: b },
        }
    }
}

/// Cache groups of worlds: multiples of the smallest block size, and windows in tokens.
const GROUPS: [&[(usize, Option<usize>)]; 8] = [
    &[(1, None)],
    &[(1, None)],
    &[(1, None)],
    &[(1, Some(3))],
    &[(1, Some(4)), (1, None)],
    &[(1, None), (2, Some(3)), (1, Some(5))],
    &[(2, None), (1, Some(2))],
    &[(1, Some(1)), (3, Some(6))],
];

pub(crate) struct World {
    pub(crate) scheduler: Scheduler,
    pub(crate) model: SchedulerModel,
    num_added: usize,
    ended_plans: Vec<PlanId>,
    ended_transfers: Vec<i64>,
    /// Those who see nothing but events, where there are some.
    mirrors: Option<Mirrors>,
}

impl World {
    /// A world by number: half of them first come, first served.
    pub(crate) fn numbered(number: u64) -> Self {
        Self::made(number, false)
    }

    /// A world by number in which much is preempted, and goes to the host tier.
    #[allow(dead_code, reason = "the fuzzer and the soak run draw from all worlds")]
    pub(crate) fn swapping(number: u64) -> Self {
        Self::made(number, true)
    }

    fn made(number: u64, swaps: bool) -> Self {
        let mut random = Random::new(number);
        let mut below = |end| random.below(end);
        let policy = [Policy::Priority, Policy::LongestPrefixMatch, Policy::FairShare];
        let policy = if below(2) == 0 { Policy::Fcfs } else { policy[below(3)] };
        let cuts_chunks = below(4) == 0;
        let watermark = if below(4) == 0 { 0.3 } else { 0.0 };
        let lookahead = [0, 0, 0, 2, 3, 4, 5, 6][below(8)];
        let usable_blocks = (8 - below(8) * below(2)).max(2) + lookahead;
        let mut limits = Limits {
            policy,
            cuts_chunks,
            block_size: 1 + below(3),
            groups: Groups::new(&[Group { block_size: 1, window: None }]),
            usable_blocks,
            watermark_blocks: 0,
            max_num_batched_tokens: 1 + below(8),
            max_num_seqs: 1 + below(4),
            max_model_len: MAX_MODEL_LEN,
            max_plans_in_flight: 1 + below(3),
            lookahead,
            caching: below(4) > 0,
            num_host_blocks: 0,
            ageing: below(3),
        };
        let mut config = SchedulerConfig {
            max_num_seqs: limits.max_num_seqs as u32,
            max_num_batched_tokens: limits.max_num_batched_tokens as u32,
            max_model_len: MAX_MODEL_LEN as u32,
            watermark,
            max_plans_in_flight: limits.max_plans_in_flight as u32,
            lookahead: limits.lookahead as u32,
            policy,
            ageing: Some(limits.ageing as u32),
            ..SchedulerConfig::default()
        };
        if cuts_chunks {
            config.long_prefill_token_threshold = 1 + below(4) as u32;
            config.max_num_partial_prefills = 1 + below(2) as u32;
            let longest = config.long_prefill_token_threshold.min(config.max_num_batched_tokens);
            config.prefill_chunk_multiple = 1 + below(longest as usize) as u32;
        }
        let groups = GROUPS[below(GROUPS.len())];
        let group = |&(multiple, window)| Group { block_size: multiple * limits.block_size, window };
        limits.groups = Groups::new(&groups.iter().map(group).collect::<Vec<_>>());
        limits.usable_blocks = usable_blocks * (1 + groups.len()) / 2;
        limits.watermark_blocks = (watermark * limits.usable_blocks as f64).ceil() as usize;
        let tells = number.is_multiple_of(4);
        let mut cache = CacheConfig {
            enable_prefix_caching: limits.caching,
            events: tells.then(|| EventConfig { max_pending: 20, ..EventConfig::default() }),
            ..cache_config(&limits.groups, limits.usable_blocks + 1)
        };
        // Drawn last, so that the worlds are otherwise those of the same number without a host tier.
        if swaps {
            limits.usable_blocks = (5 + below(3)) * (1 + groups.len()) / 2;
            limits.watermark_blocks = (watermark * limits.usable_blocks as f64).ceil() as usize;
            cache.num_blocks = limits.usable_blocks as u32 + 1;
            limits.policy = if below(3) == 0 { Policy::Fcfs } else { Policy::Priority };
            config.policy = limits.policy;
            limits.max_num_seqs = 2 + below(3);
            config.max_num_seqs = limits.max_num_seqs as u32;
        }
        if swaps || below(2) == 0 {
            limits.num_host_blocks = 1 + below(12 * groups.len());
            cache.num_host_blocks = limits.num_host_blocks as u32;
            config.preemption_mode = PreemptionMode::Swap;
        }
        Self {
            scheduler: Scheduler::new(&cache, &config).expect("a valid configuration"),
            model: SchedulerModel::new(limits),
            num_added: 0,
            ended_plans: Vec::new(),
            mirrors: tells.then(Mirrors::default),
            ended_transfers: Vec::new(),
        }
    }

    fn handle(&self, number: u8) -> Option<Handle> {
        let len = self.model.requests.len();
        (len > 0).then(|| self.model.requests[usize::from(number) % len].handle)
    }

    pub(crate) fn run(&mut self, command: Command) {
        match command {
            Command::Add { prompt, output, kind } => self.add(prompt, output, kind),
            Command::Schedule { tokens } => self.schedule(tokens),
            Command::RunPlan => self.model.run_next_plan(),
            Command::Draft { request, sample, tokens } => self.draft(request, sample, tokens),
            Command::TransfersDone { which, outcome } => self.end_transfers(which, !outcome.is_multiple_of(5)),
            Command::Commit { outcome } => self.commit(outcome),
            Command::Rollback { plan } => self.rollback(plan),
            Command::Abort { request, sample } => self.abort(request, sample),
            Command::Finish { request, sample } => self.finish(request, sample),
            Command::ResetPrefixCache => self.scheduler.reset_prefix_cache(),
            Command::Append { request, sample, tokens } => self.append(request, sample, tokens),
            Command::Free { request, sample } => self.free(request, sample),
            Command::Hold { request } => self.set_held(request, true),
            Command::Release { request } => self.set_held(request, false),
            Command::Fork { request, sample, kind } => self.fork(request, sample, kind),
            Command::Mistake { which, target } => self.mistake(which, target),
        }
        self.model.check(&self.scheduler);
        self.follow_events();
    }

    /// The mirrors must know what can be hit.
    fn follow_events(&mut self) {
        let Some(mirrors) = &mut self.mirrors else { return };
        let scheduler = std::cell::RefCell::new(&mut self.scheduler);
        let take = || scheduler.borrow_mut().take_events().expect("events are on");
        let snapshot = || scheduler.borrow_mut().event_snapshot().expect("events are on");
        if let Some(known) = mirrors.follow(take, snapshot, &mut self.model.events) {
            assert_eq!(*known, Mirror::joining(&snapshot()).known, "what the events told and what can be hit");
        }
    }

    fn request(&self, prompt: u8, output: u8, kind: u8) -> NewRequest {
        let longest = if kind.is_multiple_of(5) { 9 } else { 2 * self.model.limits.block_size };
        let tokens = two_tokens(1 + usize::from(prompt) % longest, prompt / 9);
        let len = tokens.len() as u32;
        let (lora_id, images) = match kind / 8 % 16 {
            0 => (Some(1), vec![]),
            1 if len > 2 => (None, vec![ImageSpan { start: 1, len: 2, digest: [7].into() }]),
            2 if len > 2 => (None, vec![ImageSpan { start: 1, len: 2, digest: [8].into() }]),
            _ => (None, vec![]),
        };
        let policy = self.model.limits.policy;
        let n = [1, 1, 1, 1, 2, 2, 2, 3][usize::from(kind % 8)];
        let needs_commit = (output / 9).is_multiple_of(4);
        NewRequest {
            session: prompt.is_multiple_of(3) && !(needs_commit && n > 1),
            priority: if policy == Policy::Priority { i32::from(output % 3) } else { 0 },
            tenant: (policy == Policy::FairShare).then(|| ["a", "b"][usize::from(output % 2)].into()),
            n,
            stop_token_ids: if output.is_multiple_of(3) { vec![2] } else { vec![] },
            min_tokens: u32::from(output / 3 % 3),
            arrival: self.model.now,
            needs_commit,
            use_prefix_cache: kind < 224,
            identity: Identity { root: RootKey { lora_id, cache_salt: None }, images },
            ..NewRequest::new(format!("r{}", self.num_added), tokens, 1 + u32::from(output / 36 % 6))
        }
    }

    fn add(&mut self, prompt: u8, output: u8, kind: u8) {
        if self.model.requests.len() >= MOST_REQUESTS {
            return self.commit(prompt);
        }
        if self.model.resting.len() >= MOST_RESTING {
            return self.free(1, 0);
        }
        let request = self.request(prompt, output, kind);
        self.submit(request);
    }

    fn submit(&mut self, request: NewRequest) {
        if let Some(refusal) = self.refuses(&request) {
            self.call(Some(refusal), |scheduler| scheduler.add_request(request));
            return;
        }
        let handle = self.scheduler.add_request(request.clone()).expect("a request that fits");
        self.model.add_request(handle, &Arc::new(request));
        self.num_added += 1;
    }

    /// Why a request is refused, if it is.
    fn refuses(&self, request: &NewRequest) -> Option<Error> {
        let needed = self.model.num_blocks_needed(request);
        let limits = self.model.limits;
        let invalid =
            |argument| Some(Error::InvalidArgument { argument, expected: String::new(), found: String::new() });
        let together = if request.needs_commit { limits.max_num_batched_tokens } else { usize::MAX };
        if request.n as usize > limits.max_num_seqs.min(together) {
            return invalid("n");
        }
        if request.prompt_token_ids.len() + request.max_tokens as usize > limits.max_model_len {
            return invalid("max_tokens");
        }
        let usable = limits.usable_blocks;
        (needed > usable).then_some(Error::NeverFits { needed: needed as u64, usable: usable as u64 })
    }

    fn schedule(&mut self, tokens: u8) {
        let limit = self.model.limits.max_plans_in_flight;
        if self.model.in_flight().len() == limit {
            let error = Error::TooManyPlans(limit as u32);
            self.refused(Scheduler::schedule, |refused| *refused == error);
            return self.commit(tokens);
        }
        self.tick();
        self.model.drain_aborts();
        if self.model.limits.lookahead > 0 && tokens % 2 == 1 {
            for (at, (handle, sample)) in (0..).zip(self.model.decoding()) {
                self.draft_for(handle, sample, tokens.wrapping_add(at));
            }
        }
        let reasons = self.explain();
        self.model.before_schedule(&self.scheduler);
        let before = (self.scheduler.num_preemptions(), self.scheduler.manager().pool().num_evictions());
        let plan = self.scheduler.schedule().expect("fewer plans in flight than allowed");
        let after = (self.scheduler.num_preemptions(), self.scheduler.manager().pool().num_evictions());
        if before == after {
            self.model.check_reasons(&plan, &reasons);
        }
        let counts = self.scheduler.snapshot().requests;
        let counts: Vec<_> = counts.iter().map(|request| (request.handle, request.num_preemptions)).collect();
        let mut random = Random::new(u64::from(tokens));
        // Mostly zeros, so that outputs are shared as well, and now and then a stop token.
        self.model.schedule(&self.scheduler, plan, &counts, || [0, 0, 0, 1, 0, 0, 0, 2][random.below(8)]);
    }

    /// What is said of each request before a plan is made.
    fn explain(&mut self) -> Vec<(Handle, Reason)> {
        let handles: Vec<_> = self.model.requests.iter().map(|request| request.handle).collect();
        let reason = |handle| (handle, self.scheduler.explain(handle).expect("a live request").reason);
        handles.into_iter().map(reason).collect()
    }

    fn draft(&mut self, number: u8, sample: u8, tokens: u8) {
        match self.handle(number) {
            Some(handle) => self.draft_for(handle, usize::from(sample), tokens),
            None => self.schedule(tokens),
        }
    }

    fn draft_for(&mut self, handle: Handle, sample: usize, tokens: u8) {
        // A refused call takes up the inbox all the same.
        self.model.drain_aborts();
        self.scheduler.for_each_waiting(|_| ());
        let mut random = Random::new(u64::from(tokens));
        let lookahead = self.model.limits.lookahead;
        let ids: Vec<i32> =
            (0..=random.below(lookahead + 1)).map(|_| [0, 0, 0, 1, 0, 0, 2, 3][random.below(8)]).collect();
        let start_loc = [0, ids.len() as i32];
        let is_tree = random.below(2) == 0;
        let parent = |i: usize| if is_tree { random.below(i + 1) as i32 - 1 } else { i as i32 - 1 };
        let parents: Vec<i32> = (0..ids.len()).map(parent).collect();
        let call = |scheduler: &mut Scheduler, row| {
            if is_tree {
                scheduler.set_draft_trees(&[row], &start_loc, &ids, &parents)
            } else {
                scheduler.set_draft_tokens(&[row], &start_loc, &ids)
            }
        };
        let invalid = |argument: &'static str| move |error: &Error| matches!(error, Error::InvalidArgument { argument: found, .. } if *found == argument);
        if ids.len() > lookahead {
            return self.refused(|scheduler| call(scheduler, 0), invalid("start_loc"));
        }
        match self.model.row(handle, sample) {
            None => (),
            Some((row, _)) if self.model.is_in_flight(handle) => {
                self.refused(|scheduler| call(scheduler, row), |error| matches!(error, Error::SequenceInFlight(_)));
            }
            Some((row, false)) => self.refused(|scheduler| call(scheduler, row), invalid("rows")),
            Some((row, true)) => {
                call(&mut self.scheduler, row).expect("a row on which a sequence decodes");
                self.model.set_drafts(row, &ids, &parents);
            }
        }
    }

    /// Time goes on.
    fn tick(&mut self) {
        self.model.now += 1.0;
        self.scheduler.advance(self.model.now).expect("a finite time");
    }

    fn commit(&mut self, outcome: u8) {
        let Some(plan) = self.model.oldest_plan() else {
            return self.schedule(outcome);
        };
        self.tick();
        let outcome = self.model.outcome(u64::from(outcome));
        let expected = self.model.commit(&outcome);
        let result = Self::end(&mut self.scheduler, plan, &outcome).expect("the oldest plan");
        assert_eq!(result, expected);
        self.follow_kept();
        self.ended_plans.push(plan);
    }

    fn end(scheduler: &mut Scheduler, plan: PlanId, outcome: &Outcome) -> pagedkv_core::Result<StepResult> {
        match outcome {
            Outcome::Tokens(tokens) => scheduler.commit(plan, tokens),
            Outcome::Rows { rows, width, has_trees: false, .. } => scheduler.commit_drafts(plan, rows, *width),
            Outcome::Rows { rows, accepted, width, .. } => scheduler.commit_trees(plan, rows, accepted, *width),
            Outcome::Beams { tokens, parents } => scheduler.commit_beams(plan, tokens, parents),
        }
    }

    /// Ends a transfer that was started, or all of them.
    fn end_transfers(&mut self, which: u8, ok: bool) {
        let started = self.model.started_transfers();
        if started.is_empty() {
            return self.model.run_next_plan();
        }
        let ids = if which < 128 { started } else { vec![started[usize::from(which) % started.len()]] };
        self.scheduler.transfers_done(&ids, ok).expect("transfers that are outstanding");
        self.model.end_transfers(&self.scheduler, &ids, ok);
        self.ended_transfers.extend(ids);
    }

    fn rollback(&mut self, number: u8) {
        let plans = self.model.in_flight();
        if plans.is_empty() {
            return self.schedule(number);
        }
        let first = usize::from(number) % plans.len();
        self.model.rollback(plans[first]);
        self.scheduler.rollback(plans[first]).expect("a plan in flight");
        self.follow_kept();
        self.ended_plans.extend(&plans[first..]);
    }

    fn abort(&mut self, number: u8, sample: u8) {
        let Some(handle) = self.handle(number) else {
            return self.schedule(sample);
        };
        let sample = (sample % 4).checked_sub(1);
        let request = self.model.requests.iter().find(|request| request.handle == handle);
        let n = request.map_or(usize::MAX, Request::num_samples);
        if let Some(missing) = sample.map(u32::from).filter(|&sample| sample as usize >= n) {
            let is_expected = |error: &Error| matches!(error, Error::InvalidArgument { argument: "sequence", .. });
            return self.refused(|scheduler| scheduler.abort(handle, Some(missing)), is_expected);
        }
        self.scheduler.abort(handle, sample.map(u32::from)).expect("a handle that was given out");
        self.model.abort(handle, sample.map(usize::from));
        if number.is_multiple_of(2) {
            // Aborts wait in the inbox for the next of these.
            self.commit(number);
        }
    }

    fn finish(&mut self, number: u8, sample: u8) {
        let Some(handle) = self.handle(number) else {
            return self.schedule(sample);
        };
        self.model.drain_aborts();
        let request = self.model.requests.iter().find(|request| request.handle == handle);
        let Some(n) = request.map(Request::num_samples) else {
            assert_eq!(self.scheduler.finish(handle, 0), Ok(()));
            return;
        };
        let sample = usize::from(sample) % n;
        assert_eq!(self.scheduler.finish(handle, sample as u32), Ok(()));
        self.model.end_for(handle, sample, FinishReason::Stop);
        self.follow_kept();
    }

    fn refused<T: std::fmt::Debug>(
        &mut self,
        call: impl FnOnce(&mut Scheduler) -> pagedkv_core::Result<T>,
        is_expected: impl FnOnce(&Error) -> bool,
    ) {
        let before = format!("{:?}", self.scheduler);
        let error = call(&mut self.scheduler).expect_err("a call that must be refused");
        assert!(is_expected(&error), "{error:?}");
        assert_eq!(format!("{:?}", self.scheduler), before, "a refused call changed something");
        self.model.events.note("refused calls", 1);
    }

    /// A request that runs, waits or rests; more often one that rests.
    fn any_handle(&self, number: u8) -> Option<Handle> {
        let resting: Vec<_> = self.model.resting.iter().map(|request| request.handle).collect();
        let handles = if resting.is_empty() || number.is_multiple_of(4) {
            self.model.all().map(|request| request.handle).collect()
        } else {
            resting
        };
        (!handles.is_empty()).then(|| handles[usize::from(number / 4) % handles.len()])
    }

    /// A call with the outcome that the model expects; errors are compared by what they are about.
    fn call<T: std::fmt::Debug>(
        &mut self,
        refusal: Option<Error>,
        call: impl FnOnce(&mut Scheduler) -> pagedkv_core::Result<T>,
    ) -> Option<T> {
        let Some(refusal) = refusal else {
            return Some(call(&mut self.scheduler).expect("a call that the model allows"));
        };
        let is_expected = |error: &Error| match (&refusal, error) {
            (Error::InvalidArgument { argument, .. }, Error::InvalidArgument { argument: found, .. }) => {
                argument == found
            }
            _ => refusal == *error,
        };
        self.refused(call, is_expected);
        None
    }

    fn follow_kept(&mut self) {
        let sequences = self.scheduler.snapshot().sequences;
        self.model.follow_kept(&sequences);
    }

    /// The model and the scheduler take up what was left in the inbox.
    fn take_up(&mut self) {
        self.model.drain_aborts();
        self.scheduler.for_each_waiting(|_| ());
    }

    fn append(&mut self, number: u8, sample: u8, tokens: u8) {
        self.take_up();
        let Some(handle) = self.any_handle(number).filter(|_| self.model.requests.len() < MOST_REQUESTS) else {
            return self.schedule(tokens);
        };
        let request = self.model.all().find(|request| request.handle == handle).expect("it has a handle");
        let sample = usize::from(sample) % request.num_samples();
        let ids = two_tokens(usize::from(tokens % 4), tokens);
        let max_tokens = 1 + usize::from(tokens / 4 % 4);
        let refusal = self.model.refuses_turn(&self.scheduler, handle, sample, ids.len(), max_tokens);
        let appended = self
            .call(refusal, |scheduler| scheduler.append_tokens(handle, sample as u32, &ids, Some(max_tokens as u32)));
        if appended.is_some() {
            self.model.begin_turn(handle, sample, &ids, max_tokens);
        }
    }

    fn free(&mut self, number: u8, sample: u8) {
        self.take_up();
        let Some(handle) = self.any_handle(number) else {
            return self.schedule(sample);
        };
        let request = self.model.all().find(|request| request.handle == handle).expect("it has a handle");
        let n = request.num_samples();
        let samples =
            if sample.is_multiple_of(2) { 0..n } else { usize::from(sample) % n..usize::from(sample) % n + 1 };
        let live = samples.clone().find(|&sample| !request.has_ended(sample));
        let refusal = if request.is_session() {
            live.map(|sample| Error::NotFinished { handle, sample: sample as u32 })
        } else {
            Some(Error::InvalidArgument { argument: "handle", expected: String::new(), found: String::new() })
        };
        let only = (!sample.is_multiple_of(2)).then_some(samples.start as u32);
        if self.call(refusal, |scheduler| scheduler.free(handle, only)).is_some() {
            samples.for_each(|sample| self.model.give_up(handle, sample));
        }
    }

    fn set_held(&mut self, number: u8, is_held: bool) {
        self.take_up();
        let Some(handle) = self.any_handle(number) else {
            return self.schedule(number);
        };
        let call = if is_held { Scheduler::hold } else { Scheduler::release };
        call(&mut self.scheduler, handle).expect("a handle that lives");
        self.model.set_held(handle, is_held);
    }

    fn fork(&mut self, number: u8, sample: u8, kind: u8) {
        self.take_up();
        let handle = self.any_handle(number).filter(|_| self.model.requests.len() < MOST_REQUESTS);
        let Some(handle) = handle else {
            return self.commit(kind);
        };
        let parent = self.model.all().find(|request| request.handle == handle).expect("it has a handle");
        let sample = usize::from(sample) % parent.num_samples();
        let asked = NewRequest {
            n: [1, 1, 2, 3][usize::from(kind % 4)],
            session: kind.is_multiple_of(5),
            arrival: self.model.now,
            ..NewRequest::new(
                format!("r{}", self.num_added),
                two_tokens(usize::from(kind / 4 % 3), kind),
                1 + u32::from(kind / 12 % 4),
            )
        };
        let whole = self.model.fork_request(handle, sample, &asked);
        let refusal = self.model.refuses_fork(handle, sample).or_else(|| self.refuses(&whole));
        if let Some(forked) = self.call(refusal, |scheduler| scheduler.fork(handle, sample as u32, asked)) {
            self.model.fork(handle, sample, forked, &Arc::new(whole));
            self.follow_kept();
            self.num_added += 1;
        }
    }

    /// Nothing is held back any more, and sessions give up what they keep.
    fn let_all_end(&mut self) {
        let held: Vec<_> =
            self.model.requests.iter().filter(|request| request.is_held()).map(|request| request.handle).collect();
        for handle in held {
            self.scheduler.release(handle).expect("it lives");
            self.model.set_held(handle, false);
        }
        let kept: Vec<_> = self
            .model
            .all()
            .filter(|request| request.is_session())
            .map(|request| (request.handle, request.num_samples()))
            .collect();
        for (handle, n) in kept {
            for sample in 0..n {
                let request = self.model.all().find(|request| request.handle == handle);
                if request.is_some_and(|request| request.has_ended(sample)) {
                    self.scheduler.free(handle, Some(sample as u32)).expect("it has ended");
                    self.model.give_up(handle, sample);
                }
            }
        }
    }

    fn mistake(&mut self, which: u8, target: u8) {
        let plans = self.model.in_flight();
        let never = Handle::new(self.num_added as i64 + i64::from(target));
        match which % 7 {
            0 => self.refused(|scheduler| scheduler.abort(never, None), |error| *error == Error::UnknownHandle(never)),
            1 => self.add_twice(target),
            2 if plans.len() > 1 => {
                let error = Error::PlanOutOfOrder { found: plans[1], oldest: plans[0] };
                self.refused(|scheduler| scheduler.commit(plans[1], &[]), |refused| *refused == error);
            }
            3 if !plans.is_empty() => {
                let mut outcome = self.model.outcome(u64::from(target));
                match &mut outcome {
                    Outcome::Tokens(tokens) | Outcome::Beams { tokens, .. } => tokens.push(0),
                    Outcome::Rows { rows, width, .. } => rows.extend(vec![0; *width]),
                }
                let is_expected = |error: &Error| matches!(error, Error::InvalidArgument { argument: "tokens", .. });
                self.refused(|scheduler| Self::end(scheduler, plans[0], &outcome), is_expected);
            }
            4 => self.end_wrong_transfers(i64::from(target)),
            _ if !self.ended_plans.is_empty() => {
                let ended = self.ended_plans[usize::from(target) % self.ended_plans.len()];
                let is_expected = |error: &Error| *error == Error::PlanNotInFlight(ended);
                self.refused(|scheduler| scheduler.commit(ended, &[]), is_expected);
                self.refused(|scheduler| scheduler.rollback(ended), is_expected);
            }
            _ => self.schedule(target),
        }
    }

    /// A transfer that was never begun, one that ended before, and one that is told to have ended twice at once.
    fn end_wrong_transfers(&mut self, number: i64) {
        let started = self.model.started_transfers();
        let ended = self.ended_transfers.get(number as usize % self.ended_transfers.len().max(1)).copied();
        let unknown = ended.unwrap_or(number + 1_000_000);
        let ids: Vec<i64> = started.iter().copied().chain([unknown]).collect();
        let is_unknown = |error: &Error| *error == Error::UnknownTransfer(unknown);
        self.refused(|scheduler| scheduler.transfers_done(&ids, true), is_unknown);
        if let Some(&first) = started.first() {
            let is_expected = |error: &Error| matches!(error, Error::InvalidArgument { argument: "ids", .. });
            self.refused(|scheduler| scheduler.transfers_done(&[first, first], true), is_expected);
        }
    }

    fn add_twice(&mut self, number: u8) {
        let Some(handle) = self.handle(number) else {
            return self.schedule(number);
        };
        let request = self.model.requests.iter().find(|request| request.handle == handle).expect("it is live");
        let twice = NewRequest::new(request.request_id(), vec![0], 1);
        if self.model.is_id_free(&twice.request_id) {
            // Its abort was left, and waits to take effect.
            return self.submit(twice);
        }
        let error = Error::DuplicateRequest(twice.request_id.clone());
        self.refused(|scheduler| scheduler.add_request(twice), |refused| *refused == error);
    }

    /// Steps until every request is over: each step takes the oldest at least one token further.
    pub(crate) fn drain(&mut self) {
        while !self.model.in_flight().is_empty() {
            self.commit(0);
            self.model.check(&self.scheduler);
        }
        self.model.drain_aborts();
        self.end_transfers(0, true);
        self.let_all_end();
        let mut steps_left: usize = self.model.requests.iter().map(Request::most_tokens).sum();
        if self.model.limits.num_host_blocks > 0 {
            // Whoever waits for blocks that go out, or come in, does so for a step.
            steps_left *= 4;
        }
        if self.model.limits.policy != Policy::Fcfs {
            // The first in the order may change while requests overtake one another, until all are due.
            steps_left *= MOST_REQUESTS;
        }
        // The last plan has nothing to run, and says who left.
        loop {
            self.schedule(steps_left as u8);
            let is_over = self.model.requests.is_empty();
            self.commit(steps_left as u8);
            if !self.model.started_transfers().is_empty() {
                self.end_transfers(0, !steps_left.is_multiple_of(3));
            }
            self.let_all_end();
            self.model.check(&self.scheduler);
            if is_over {
                break;
            }
            steps_left = steps_left.checked_sub(1).expect("every step takes the oldest request further");
        }
        self.model.check_empty(&self.scheduler);
    }

    /// Runs the world and the commands that these bytes stand for, to the end.
    #[allow(dead_code, reason = "the soak run has no bytes to replay")]
    pub(crate) fn replay(bytes: &[u8]) {
        let (number, commands) = bytes.split_at(bytes.len().min(8));
        let number: [u8; 8] = std::array::from_fn(|at| number.get(at).copied().unwrap_or(0));
        let mut world = Self::numbered(u64::from_le_bytes(number));
        for command in commands.chunks_exact(4) {
            world.run(Command::decode([command[0], command[1], command[2], command[3]]));
        }
        world.drain();
    }
}
