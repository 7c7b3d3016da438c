//! The guarantees of the step contract's section 9, one property each, under every built-in policy.
//!
//! That abort and finish are legal in every state is what the random worlds of `scheduler_props` do all the time.

#[path = "scene/steps.rs"]
mod steps;

use std::collections::BTreeMap;

use pagedkv_core::scheduler::{RequestSnapshot, RequestState};
use pagedkv_core::step_plan::Field;
use pagedkv_core::{
    CacheConfig, Error, Handle, NewRequest, Policy, PreemptionMode, Scheduler, SchedulerConfig, StepPlan,
};
use proptest::prelude::*;

const BLOCK_SIZE: u32 = 2;
/// Tokens of a request with two samples at its longest.
const MOST_TOKENS: usize = 2 * (8 + 6);
const NUM_HOST_BLOCKS: u32 = 9;
const POLICIES: [Policy; 4] = [Policy::Fcfs, Policy::Priority, Policy::LongestPrefixMatch, Policy::FairShare];

#[derive(Clone, Debug)]
struct Asked {
    prompt_len: usize,
    first_token: i32,
    max_tokens: u32,
    n: u32,
    priority: i32,
    tenant: bool,
    /// Steps before the next one comes.
    pause: usize,
}

#[derive(Clone, Debug)]
struct Setting {
    policy: Policy,
    ageing: u32,
    usable_blocks: u32,
    max_num_seqs: u32,
    max_num_batched_tokens: u32,
    /// Whether victims go to a host tier instead of being computed again.
    swaps: bool,
}

fn asked() -> impl Strategy<Value = Asked> {
    (1_usize..8, 0..2_i32, 1..6_u32, 1..3_u32, 0..3_i32, any::<bool>(), 0_usize..3).prop_map(
        |(prompt_len, first_token, max_tokens, n, priority, tenant, pause)| Asked {
            prompt_len,
            first_token,
            max_tokens,
            n,
            priority,
            tenant,
            pause,
        },
    )
}

fn setting() -> impl Strategy<Value = Setting> {
    (0..4_usize, 0..4_u32, 6..14_u32, 2..5_u32, 2..9_u32, any::<bool>()).prop_map(
        |(policy, ageing, usable_blocks, max_num_seqs, max_num_batched_tokens, swaps)| Setting {
            policy: POLICIES[policy],
            ageing,
            usable_blocks,
            max_num_seqs,
            max_num_batched_tokens,
            swaps,
        },
    )
}

/// A scheduler, and what has happened to each request.
struct Run {
    scheduler: Scheduler,
    setting: Setting,
    num_added: usize,
    /// Steps so far.
    now: usize,
    /// For each request that has not been admitted: how many waited when it came, and who came later and went first.
    waiting: BTreeMap<Handle, (usize, usize)>,
    /// Step of arrival.
    arrival: BTreeMap<Handle, usize>,
}

impl Run {
    fn new(setting: &Setting) -> Self {
        let (preemption_mode, num_host_blocks) =
            if setting.swaps { (PreemptionMode::Swap, NUM_HOST_BLOCKS) } else { (PreemptionMode::Recompute, 0) };
        let cache =
            CacheConfig { block_size: BLOCK_SIZE, num_host_blocks, ..CacheConfig::new(setting.usable_blocks + 1) };
        let limits = SchedulerConfig {
            preemption_mode,
            policy: setting.policy,
            ageing: Some(setting.ageing),
            max_num_seqs: setting.max_num_seqs,
            max_num_batched_tokens: setting.max_num_batched_tokens,
            max_model_len: 64,
            ..SchedulerConfig::default()
        };
        Self {
            scheduler: Scheduler::new(&cache, &limits).expect("a valid configuration"),
            setting: setting.clone(),
            num_added: 0,
            now: 0,
            waiting: BTreeMap::new(),
            arrival: BTreeMap::new(),
        }
    }

    /// Adds a request. One that can never fit, and only such a one, is refused at once.
    fn add(&mut self, asked: &Asked) {
        let request = NewRequest {
            n: asked.n,
            priority: if self.setting.policy == Policy::Priority { asked.priority } else { 0 },
            tenant: Some(if asked.tenant { "a" } else { "b" }.into()),
            ..NewRequest::new(self.num_added.to_string(), vec![asked.first_token; asked.prompt_len], asked.max_tokens)
        };
        let (prompt, block_size) = (asked.prompt_len as u32, BLOCK_SIZE);
        let shared = prompt / block_size;
        let needed = shared + asked.n * ((prompt + asked.max_tokens - 1).div_ceil(block_size) - shared);
        let added = self.scheduler.add_request(request);
        if needed > self.setting.usable_blocks {
            let (needed, usable) = (u64::from(needed), u64::from(self.setting.usable_blocks));
            assert_eq!(added, Err(Error::NeverFits { needed, usable }));
            return;
        }
        let handle = added.expect("a request that fits");
        self.num_added += 1;
        self.waiting.insert(handle, (self.waiting.len(), 0));
        self.arrival.insert(handle, self.now);
    }

    fn step(&mut self) {
        // An explanation brings the order up to date, as the next plan does.
        self.arrival.keys().next().map(|&handle| self.scheduler.explain(handle));
        let before = self.scheduler.snapshot().requests;
        let first = self.first(&before);
        let plan = self.scheduler.schedule().expect("no plan is in flight");
        let handles = plan.i64s(Field::Handles);
        // Blocks that are on their way, its own or a victim's, are there in the next step.
        let waits_for_copies = self.scheduler.outstanding_transfers().next().is_some();
        if let Some(first) = first.filter(|_| !waits_for_copies) {
            assert!(handles.contains(&first.get()), "{first:?} is the first and does not run");
        }
        let may_be_empty = before.is_empty() || plan.waits_for_transfers();
        assert!(!handles.is_empty() || may_be_empty, "the plan is empty while there is work");
        self.follow_admissions(&plan, &before);
        for request in &before {
            let num_preemptions = request.num_preemptions as usize;
            assert!(
                num_preemptions <= self.most_preemptions(),
                "{:?} lost its blocks {num_preemptions} times",
                request.handle
            );
        }
        for ended in steps::commit(&mut self.scheduler, &plan).finished {
            let waited = self.now - self.arrival.remove(&ended.handle).expect("it was added");
            assert!(waited <= self.most_steps(), "{:?} took {waited} steps", ended.handle);
        }
        let transfers: Vec<i64> = self.scheduler.outstanding_transfers().collect();
        self.scheduler.transfers_done(&transfers, !self.now.is_multiple_of(5)).expect("outstanding ones");
        self.now += 1;
    }

    /// Requests that may come before another one, however many come behind it.
    fn most_ahead(&self) -> usize {
        12 + (self.setting.ageing + self.setting.max_num_seqs) as usize
    }

    /// A request gives way only to those before it, each time for a block that one of them takes.
    fn most_preemptions(&self) -> usize {
        self.most_ahead() * MOST_TOKENS.div_ceil(BLOCK_SIZE as usize)
    }

    /// The first request in policy order, as far as it is told from outside: due ones first, by arrival; then by priority,
    /// or those that run before those that wait.
    fn first(&self, requests: &[RequestSnapshot]) -> Option<Handle> {
        let place = |request: &RequestSnapshot| {
            let waits = request.state == RequestState::Waiting;
            match self.setting.policy {
                Policy::Fcfs => (false, 0, false),
                Policy::Priority => (!request.is_due, if request.is_due { 0 } else { request.priority }, false),
                _ => (!request.is_due, 0, !request.is_due && waits),
            }
        };
        // A snapshot has each queue in its order already; arrival decides between two of them.
        let firsts = [RequestState::Running, RequestState::Waiting]
            .map(|state| requests.iter().find(|request| request.state == state));
        let firsts = firsts.into_iter().flatten();
        firsts.min_by_key(|request| (place(request), request.handle)).map(|request| request.handle)
    }

    /// Nobody waits while more than a bounded number of later ones go first.
    fn follow_admissions(&mut self, plan: &StepPlan, before: &[RequestSnapshot]) {
        let waits = |handle: &Handle| {
            before.iter().any(|request| request.handle == *handle && request.state == RequestState::Waiting)
        };
        let mut admitted: Vec<_> = plan.i64s(Field::Handles).iter().map(|&handle| Handle::new(handle)).collect();
        admitted.retain(waits);
        admitted.sort_unstable();
        admitted.dedup();
        self.waiting.retain(|handle, _| !admitted.contains(handle));
        let most = (self.setting.ageing + self.setting.max_num_seqs) as usize;
        for (&handle, (num_before, num_overtaken)) in &mut self.waiting {
            *num_overtaken += admitted.iter().filter(|&&other| other > handle).count();
            let most = if self.setting.policy == Policy::Fcfs { 0 } else { *num_before + most };
            assert!(*num_overtaken <= most, "{handle:?} was overtaken {num_overtaken} times");
        }
    }

    /// Steps in which every request ends, whoever comes behind it: those that may come before it are counted, and each
    /// computes all of its tokens once more for each of them at the worst.
    fn most_steps(&self) -> usize {
        // What goes out and comes back takes a step each way.
        let ways = if self.setting.swaps { 3 } else { 1 };
        self.most_ahead() * self.most_ahead() * MOST_TOKENS * ways
    }

    fn drain(&mut self) {
        while self.scheduler.num_unfinished_requests() > 0 {
            self.step();
        }
        assert!(self.scheduler.manager().usage().abs() < 1e-9, "blocks are lost");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// What can never fit is refused at once; the first in policy order always progresses; if work fits, the plan is not
    /// empty; nobody is overtaken more often than ageing allows, and everybody ends.
    #[test]
    fn first_request_progresses_and_nobody_starves(setting in setting(), load in prop::collection::vec(asked(), 1..12)) {
        let mut run = Run::new(&setting);
        for asked in &load {
            run.add(asked);
            for _ in 0..asked.pause {
                run.step();
            }
        }
        run.drain();
    }

    /// More urgent requests, or such as match better, keep coming as long as the patient one has not ended.
    #[test]
    fn patient_request_ends_although_others_keep_coming(setting in setting(), urgent in asked(), patient in asked()) {
        let mut run = Run::new(&setting);
        run.add(&Asked { priority: 0, ..urgent.clone() });
        run.step();
        run.add(&Asked { priority: 9, tenant: true, first_token: 5, ..patient });
        let Some((&last, _)) = run.arrival.last_key_value() else { return Ok(()) };
        for _ in 0..600 {
            if !run.arrival.contains_key(&last) {
                break;
            }
            run.add(&Asked { priority: 0, tenant: true, ..urgent.clone() });
            run.step();
        }
        prop_assert!(!run.arrival.contains_key(&last), "the patient request starves");
    }
}
