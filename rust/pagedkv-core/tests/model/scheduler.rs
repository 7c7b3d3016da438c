//! The naive `Scheduler`: it does not choose what to run, but knows what every choice must keep to and what follows from
//! it, and it runs each plan on a device that knows only the plan's arrays.

use std::collections::VecDeque;
use std::sync::Arc;

use pagedkv_core::step_plan::Field;
use pagedkv_core::{
    FinishReason, FinishedRequest, Fork, Handle, NewRequest, PlanId, Policy, Scheduler, StepPlan, StepResult,
};

use super::device::{Device, Expected};
use super::memory::Histories;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) policy: Policy,
    /// Whether chunks end before the budget does.
    pub(crate) cuts_chunks: bool,
    pub(crate) watermark_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) usable_blocks: usize,
    pub(crate) max_num_seqs: usize,
    pub(crate) max_num_batched_tokens: usize,
    pub(crate) max_model_len: usize,
    pub(crate) max_plans_in_flight: usize,
}

/// A token that a plan in flight samples.
#[derive(Clone, Copy, Debug)]
struct Pending {
    plan: PlanId,
    index: usize,
    token: i32,
}

#[derive(Clone, Debug, Default)]
struct Sample {
    outputs: Vec<i32>,
    pending: Vec<Pending>,
    is_over: bool,
    num_scheduled: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) handle: Handle,
    asked: Arc<NewRequest>,
    samples: Vec<Sample>,
    is_resident: bool,
    /// Rises whenever the request loses its blocks.
    residence: u32,
    /// Whether each sample is a sequence; before, one computes the prompt for all.
    has_parted: bool,
    num_prompt_scheduled: usize,
    num_preemptions: u32,
    num_cached_tokens: usize,
}

impl Request {
    fn live(&self) -> impl Iterator<Item = usize> {
        (0..self.samples.len()).filter(|&sample| !self.samples[sample].is_over)
    }

    pub(crate) fn num_samples(&self) -> usize {
        self.samples.len()
    }

    pub(crate) fn request_id(&self) -> &str {
        &self.asked.request_id
    }

    /// Tokens that all samples can come to.
    pub(crate) fn most_tokens(&self) -> usize {
        self.samples.len() * (self.prompt_len() + self.asked.max_tokens as usize)
    }

    fn prompt_len(&self) -> usize {
        self.asked.prompt_token_ids.len()
    }

    /// The prompt, what was sampled, and what plans in flight sample.
    fn tokens(&self, sample: usize) -> Vec<i32> {
        let Sample { outputs, pending, .. } = &self.samples[sample];
        let pending = pending.iter().map(|pending| pending.token);
        self.asked.prompt_token_ids.iter().chain(outputs).copied().chain(pending).collect()
    }

    fn num_scheduled(&self, sample: usize) -> usize {
        if self.has_parted { self.samples[sample].num_scheduled } else { self.num_prompt_scheduled }
    }

    fn set_num_scheduled(&mut self, sample: usize, num_tokens: usize) {
        if self.has_parted {
            self.samples[sample].num_scheduled = num_tokens;
        } else {
            self.num_prompt_scheduled = num_tokens;
        }
    }

    /// Tokens of the sample that can be computed now.
    fn limit(&self, sample: usize) -> usize {
        if self.has_parted {
            let longest = self.prompt_len() + self.asked.max_tokens as usize - 1;
            self.tokens(sample).len().min(longest)
        } else {
            self.prompt_len()
        }
    }

    /// The samples whose sequences can be planned.
    fn sequences(&self) -> Vec<usize> {
        if self.has_parted { self.live().collect() } else { self.live().take(1).collect() }
    }

    fn leave(&mut self) {
        self.is_resident = false;
        self.residence += 1;
        self.has_parted = false;
        self.num_prompt_scheduled = 0;
        self.samples.iter_mut().for_each(|sample| sample.num_scheduled = 0);
    }
}

/// A sequence in a plan.
#[derive(Clone, Debug)]
struct Entry {
    handle: Handle,
    sample: usize,
    row: i32,
    residence: u32,
    before: usize,
    end: usize,
    num_hit_tokens: usize,
    is_admission: bool,
    completes_prompt: bool,
    /// The samples that get a token.
    drawn: Vec<usize>,
    expected: Expected,
}

#[derive(Debug)]
struct Plan {
    arrays: StepPlan,
    entries: Vec<Entry>,
    /// What the model samples.
    tokens: Vec<i32>,
    /// What the plan before samples.
    tokens_before: Vec<i32>,
    /// The host's view of the tables.
    tables: Vec<Vec<i32>>,
    has_run: bool,
}

/// What happened, for tests that ask whether they met everything worth meeting.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Events {
    pub(crate) tokens: u64,
    pub(crate) hit_tokens: u64,
    pub(crate) copies: u64,
    pub(crate) forks: u64,
    pub(crate) inputs_from_the_plan_before: u64,
    pub(crate) preemptions: u64,
    pub(crate) undone_plans: u64,
    pub(crate) undone_plans_that_had_run: u64,
    pub(crate) undone_admissions: u64,
    pub(crate) blocked_plans: u64,
    pub(crate) ignored_tokens: u64,
    pub(crate) finished_requests: u64,
}

#[derive(Debug)]
pub(crate) struct SchedulerModel {
    pub(crate) limits: Limits,
    pub(crate) requests: Vec<Request>,
    aborts: Vec<(Handle, Option<usize>)>,
    plans: VecDeque<Plan>,
    device: Device,
    histories: Histories,
    /// Blocks that were available, or fenced, before the plan was made.
    num_blocks_before: usize,
    pub(crate) events: Events,
}

impl SchedulerModel {
    pub(crate) fn new(limits: Limits) -> Self {
        let num_columns = limits.max_model_len.div_ceil(limits.block_size);
        Self {
            limits,
            requests: Vec::new(),
            aborts: Vec::new(),
            plans: VecDeque::new(),
            device: Device::new(limits.usable_blocks + 1, limits.block_size, limits.max_num_seqs, num_columns),
            histories: Histories::default(),
            num_blocks_before: 0,
            events: Events::default(),
        }
    }

    pub(crate) fn in_flight(&self) -> Vec<PlanId> {
        self.plans.iter().map(|plan| plan.arrays.id()).collect()
    }

    pub(crate) fn tokens_of_the_oldest_plan(&self) -> Option<(PlanId, Vec<i32>)> {
        self.plans.front().map(|plan| (plan.arrays.id(), plan.tokens.clone()))
    }

    fn position(&self, handle: Handle) -> Option<usize> {
        self.requests.iter().position(|request| request.handle == handle)
    }

    fn find_mut(&mut self, handle: Handle) -> Option<&mut Request> {
        self.requests.iter_mut().find(|request| request.handle == handle)
    }

    // --- commands

    /// Blocks that the request needs at its longest.
    pub(crate) fn num_blocks_needed(&self, request: &NewRequest) -> usize {
        let block_size = self.limits.block_size;
        let prompt_len = request.prompt_token_ids.len();
        let longest = prompt_len + request.max_tokens as usize - 1;
        let shared = prompt_len / block_size;
        shared + request.n as usize * (longest.div_ceil(block_size) - shared)
    }

    pub(crate) fn add_request(&mut self, handle: Handle, request: &Arc<NewRequest>) {
        assert!(self.requests.iter().all(|other| other.handle < handle), "handles rise");
        self.requests.push(Request {
            handle,
            asked: request.clone(),
            samples: vec![Sample::default(); request.n as usize],
            is_resident: false,
            residence: 0,
            has_parted: false,
            num_prompt_scheduled: 0,
            num_preemptions: 0,
            num_cached_tokens: 0,
        });
    }

    pub(crate) fn abort(&mut self, handle: Handle, sample: Option<usize>) {
        self.aborts.push((handle, sample));
    }

    /// The aborts take effect.
    pub(crate) fn drain_aborts(&mut self) {
        for (handle, sample) in std::mem::take(&mut self.aborts) {
            let n = self.find_mut(handle).map_or(0, |request| request.samples.len());
            for number in (0..n).filter(|&number| sample.is_none_or(|only| only == number)) {
                self.finish(handle, number);
            }
        }
    }

    /// Ends a sample, and the request with the last one; answers whether it was the last one.
    pub(crate) fn finish(&mut self, handle: Handle, sample: usize) -> bool {
        let Some(position) = self.position(handle) else {
            return false;
        };
        self.requests[position].samples[sample].is_over = true;
        let is_over = self.requests[position].live().next().is_none();
        if is_over {
            self.requests.remove(position);
        }
        is_over
    }

    /// Judges a plan that `schedule` made; `token` gives the tokens that will be sampled.
    pub(crate) fn schedule(&mut self, scheduler: &Scheduler, plan: StepPlan, mut token: impl FnMut() -> i32) {
        let sizes = plan.sizes();
        let residents_before: Vec<Handle> = self.residents().map(|request| request.handle).collect();
        self.follow_preemptions(scheduler, &plan);
        let tokens: Vec<i32> = (0..sizes.num_samples).map(|_| token()).collect();
        let mut entries: Vec<Entry> = Vec::new();
        let mut drawn = 0;
        for s in 0..sizes.num_sequences as usize {
            let entry = self.enter(&plan, s, &entries);
            drawn += entry.drawn.len();
            entries.push(entry);
        }
        assert_eq!(drawn, tokens.len(), "one token per sample");
        self.check_rows(&entries);
        self.check_admissions(scheduler, &entries, &residents_before);
        self.check_blocked(&plan, &entries);
        self.check_progress(scheduler, &plan, &entries);
        let mut index = 0;
        for entry in &entries {
            let request = self.find_mut(entry.handle).expect("planned requests live");
            for &sample in &entry.drawn {
                request.samples[sample].pending.push(Pending { plan: plan.id(), index, token: tokens[index] });
                index += 1;
            }
        }
        self.check_limits(&plan, &entries);
        let tables = self.tables(scheduler, &plan);
        let tokens_before = self.plans.back().map_or(Vec::new(), |before| before.tokens.clone());
        self.events.tokens += u64::from(sizes.num_tokens);
        self.events.copies += plan.i32s(Field::Copies).len() as u64 / 2;
        self.plans.push_back(Plan { arrays: plan, entries, tokens, tokens_before, tables, has_run: false });
    }

    fn residents(&self) -> impl Iterator<Item = &Request> {
        self.requests.iter().filter(|request| request.is_resident)
    }

    pub(crate) fn before_schedule(&mut self, scheduler: &Scheduler) {
        let pool = scheduler.manager().pool();
        self.num_blocks_before = (pool.num_available() + pool.num_fenced()) as usize;
    }

    fn follow_preemptions(&mut self, scheduler: &Scheduler, plan: &StepPlan) {
        let num_victims = (scheduler.num_preemptions() - self.events.preemptions) as usize;
        let victims = if self.limits.policy == Policy::Fcfs {
            self.youngest(num_victims)
        } else {
            self.find_victims(scheduler, plan, num_victims)
        };
        for &handle in &victims {
            let victim = self.find_mut(handle).expect("victims live");
            victim.leave();
            victim.num_preemptions += 1;
            self.events.preemptions += 1;
        }
        for change in plan.changes().preempted {
            let request = self.requests.iter().find(|request| request.asked.request_id == change.request_id);
            let holds = request.is_some_and(|request| !request.is_resident && request.num_preemptions > 0);
            assert!(holds, "{change:?} was not preempted");
        }
    }

    /// First come, first served: victims are the youngest, never the oldest, and none while all can have what they want.
    fn youngest(&self, num_victims: usize) -> Vec<Handle> {
        let youngest: Vec<_> = self.residents().map(|request| request.handle).collect();
        assert!(num_victims == 0 || num_victims < youngest.len(), "the oldest is preempted");
        let wanted: usize = self.residents().map(|request| self.most_blocks_wanted(request)).sum();
        let fits = wanted <= self.num_blocks_before;
        assert!(num_victims == 0 || !fits, "{num_victims} victims for {wanted} of {} blocks", self.num_blocks_before);
        youngest.into_iter().rev().take(num_victims).collect()
    }

    /// New blocks, and one for a copy, for each sequence that can run.
    fn most_blocks_wanted(&self, request: &Request) -> usize {
        let wanted = |sample| {
            let (held, limit) = (request.num_scheduled(sample), request.limit(sample));
            let new = limit.div_ceil(self.limits.block_size) - held.div_ceil(self.limits.block_size);
            new + usize::from(limit > held)
        };
        request.sequences().into_iter().map(wanted).sum()
    }

    /// Under other policies: who lost its blocks, or starts over, or is said to have been preempted.
    fn find_victims(&self, scheduler: &Scheduler, plan: &StepPlan, num_victims: usize) -> Vec<Handle> {
        let has_lost_all = |request: &&Request| {
            let table = |&sample: &usize| scheduler.block_table(request.handle, sample as u32).expect("it is live");
            request.live().all(|sample| table(&sample).is_none())
        };
        let starts_over = |request: &&Request| {
            let starts = plan.i32s(Field::QueryStartLoc);
            let mut entries = (0..plan.sizes().num_sequences as usize)
                .filter(|&s| plan.i64s(Field::Handles)[s] == request.handle.get());
            entries.any(|s| {
                let start = plan.i32s(Field::SeqLens)[s] - (starts[s + 1] - starts[s]);
                (start as usize) < request.num_scheduled(plan.i32s(Field::Sequence)[s] as usize)
            })
        };
        let preempted = plan.changes().preempted;
        let is_said = |request: &&Request| preempted.iter().any(|change| change.request_id == request.asked.request_id);
        let victims: Vec<_> = self
            .residents()
            .filter(|request| has_lost_all(request) || starts_over(request) || is_said(request))
            .map(|request| request.handle)
            .collect();
        assert_eq!(victims.len(), num_victims, "preemptions");
        victims
    }

    /// Follows one sequence of a plan into it.
    fn enter(&mut self, plan: &StepPlan, s: usize, entries: &[Entry]) -> Entry {
        let handle = Handle::new(plan.i64s(Field::Handles)[s]);
        let sample = plan.i32s(Field::Sequence)[s] as usize;
        let starts = plan.i32s(Field::QueryStartLoc);
        let end = plan.i32s(Field::SeqLens)[s] as usize;
        let num_tokens = (starts[s + 1] - starts[s]) as usize;
        let planned_twice = entries.iter().any(|entry| entry.handle == handle && entry.sample == sample);
        assert!(num_tokens > 0 && !planned_twice, "{handle:?} {sample} is planned twice or for nothing");
        let waits = self.plans.iter().flat_map(|plan| &plan.entries).any(|entry| entry.handle == handle);
        let block_size = self.limits.block_size;
        let previous = self.plans.back().map(|plan| plan.arrays.id());
        let request = self.requests.iter_mut().find(|request| request.handle == handle);
        let request = request.expect("only live requests are planned");
        assert!(!(request.asked.needs_commit && waits), "{handle:?} is planned before the commit that it waits for");
        let is_admission = !request.is_resident;
        if is_admission {
            assert!(!waits, "{handle:?} is admitted while a plan in flight is about it");
            request.is_resident = true;
            request.has_parted = request.live().count() == 1;
        }
        assert!(request.sequences().contains(&sample), "{handle:?} {sample} has no sequence to plan");
        let before = request.num_scheduled(sample);
        let start = end - num_tokens;
        let num_hit_tokens = start.checked_sub(before).expect("nothing is computed twice");
        let is_hit = before.is_multiple_of(block_size) && start.is_multiple_of(block_size);
        assert!(
            num_hit_tokens == 0 || is_hit && request.asked.use_prefix_cache,
            "{num_hit_tokens} tokens from the cache"
        );
        assert!(end <= request.limit(sample), "{handle:?} {sample} runs to {end} of {}", request.limit(sample));
        request.set_num_scheduled(sample, end);
        if request.num_preemptions == 0 {
            request.num_cached_tokens += num_hit_tokens;
        }
        let positions = &plan.i32s(Field::Positions)[starts[s] as usize..starts[s + 1] as usize];
        assert!(positions.iter().map(|&position| position as usize).eq(start..end), "positions {positions:?}");
        Self::check_inputs(plan, s, request, sample, previous);

        let completes_prompt = !request.has_parted && end == request.prompt_len();
        let tokens = request.tokens(sample);
        let drawn: Vec<usize> = if request.has_parted {
            if end == tokens.len() { vec![sample] } else { vec![] }
        } else if completes_prompt && request.samples[sample].outputs.is_empty() {
            request.live().collect()
        } else {
            vec![]
        };
        let sample_starts = &plan.i32s(Field::SampleStartLoc)[s..s + 2];
        assert_eq!((sample_starts[1] - sample_starts[0]) as usize, drawn.len(), "samples of {handle:?} {sample}");
        for &row in &plan.i32s(Field::SampleRows)[sample_starts[0] as usize..sample_starts[1] as usize] {
            assert_eq!(row, starts[s + 1] - 1, "samples are drawn from the last token");
        }
        let request = request.clone();
        self.events.hit_tokens += num_hit_tokens as u64;
        let histories = self.histories.of_tokens(&request.asked.identity, tokens.iter().copied());
        Entry {
            handle,
            sample,
            row: plan.i32s(Field::Rows)[s],
            residence: request.residence,
            before,
            end,
            num_hit_tokens,
            is_admission,
            completes_prompt,
            drawn,
            expected: Expected {
                request_id: request.asked.request_id.clone(),
                sample: sample as u32,
                tokens,
                histories,
            },
        }
    }

    /// A token that nobody knows yet comes from the plan before, by the number of its sample.
    fn check_inputs(plan: &StepPlan, s: usize, request: &Request, sample: usize, previous: Option<PlanId>) {
        let starts = plan.i32s(Field::QueryStartLoc);
        let num_known = request.prompt_len() + request.samples[sample].outputs.len();
        for t in starts[s] as usize..starts[s + 1] as usize {
            let position = plan.i32s(Field::Positions)[t] as usize;
            let from = plan.i32s(Field::InputFrom)[t];
            if position < num_known {
                assert_eq!(from, -1, "the token at {position} is known");
            } else {
                let pending = request.samples[sample].pending[position - num_known];
                assert_eq!(Some(pending.plan), previous, "the token at {position} comes from an older plan");
                assert_eq!(from as usize, pending.index, "the token at {position} comes from another sample");
            }
        }
    }

    /// A row has one owner in a plan, and the same one in all plans in flight.
    fn check_rows(&mut self, entries: &[Entry]) {
        for (i, entry) in entries.iter().enumerate() {
            assert!((entry.row as usize) < self.limits.max_num_seqs, "row {}", entry.row);
            assert!(entries[i + 1..].iter().all(|other| other.row != entry.row), "row {} has two owners", entry.row);
            for other in self.plans.iter().flat_map(|plan| &plan.entries) {
                let same = other.row != entry.row || other.handle == entry.handle;
                assert!(same, "row {} changed hands while a plan in flight names it", entry.row);
            }
        }
    }

    fn check_limits(&mut self, plan: &StepPlan, entries: &[Entry]) {
        let num_tokens = plan.sizes().num_tokens as usize;
        assert!(num_tokens <= self.limits.max_num_batched_tokens, "{num_tokens} tokens");
        let num_seats: usize = self.residents().map(|request| request.live().count()).sum();
        assert!(num_seats <= self.limits.max_num_seqs, "{num_seats} seats");
        let lengths = plan.i32s(Field::QueryStartLoc).windows(2).map(|pair| pair[1] - pair[0]);
        assert!(lengths.is_sorted_by_key(|length| length > 1), "decodes come first");
        let from_before = plan.i32s(Field::InputFrom).iter().filter(|&&from| from >= 0).count();
        self.events.inputs_from_the_plan_before += from_before as u64;
        if entries.is_empty() {
            assert!(
                plan.sizes().num_samples == 0 && plan.i32s(Field::Copies).is_empty(),
                "an empty plan does something"
            );
        }
    }

    /// An admission beside running requests leaves room for all that they and it know, and the watermark; and first come,
    /// first served, it leaves nobody waiting who came before.
    fn check_admissions(&self, scheduler: &Scheduler, entries: &[Entry], residents_before: &[Handle]) {
        let Some(last) = entries.iter().filter(|entry| entry.is_admission).map(|entry| entry.handle).max() else {
            return;
        };
        if self.limits.policy != Policy::Fcfs {
            return;
        }
        let passed_over = self.requests.iter().find(|other| other.handle < last && !other.is_resident);
        assert!(passed_over.is_none(), "{last:?} is admitted before {passed_over:?}");
        let first = self.residents().next().expect("the admitted one is resident");
        if residents_before.is_empty() || first.handle == last {
            return;
        }
        let block_size = self.limits.block_size;
        let still_needed = |request: &Request| -> usize {
            let of_sequence = |sample| {
                let num_scheduled = request.num_scheduled(sample);
                let end = num_scheduled + self.num_wanted(request, sample);
                end.div_ceil(block_size) - num_scheduled.div_ceil(block_size)
            };
            request.sequences().into_iter().map(of_sequence).sum()
        };
        let needed: usize = self.residents().map(still_needed).sum();
        let available = scheduler.manager().pool().num_available() as usize;
        let left = available.checked_sub(self.limits.watermark_blocks);
        assert!(left >= Some(needed), "{last:?} is admitted, {needed} blocks are needed and {available} available");
    }

    /// If work fits it is planned.
    fn check_blocked(&mut self, plan: &StepPlan, entries: &[Entry]) {
        if entries.is_empty() && !self.requests.is_empty() {
            let blocked_on = plan.blocked_on().expect("an empty plan while there is work, and nothing to wait for");
            assert!(self.in_flight().contains(&blocked_on), "{blocked_on:?} is not in flight");
            self.events.blocked_plans += 1;
        } else {
            assert_eq!(plan.blocked_on(), None);
        }
    }

    /// First come, first served, the oldest always progresses, and whoever comes next runs if it fits.
    fn check_progress(&self, scheduler: &Scheduler, plan: &StepPlan, entries: &[Entry]) {
        if self.limits.policy != Policy::Fcfs {
            return;
        }
        if let (Some(oldest), true) = (self.requests.first(), self.plans.is_empty()) {
            let progresses = entries.iter().any(|entry| entry.handle == oldest.handle);
            assert!(progresses, "the oldest request waits, and no plan is in flight");
        }
        let budget_left = self.limits.max_num_batched_tokens - plan.sizes().num_tokens as usize;
        if budget_left > 0 && !self.limits.cuts_chunks && scheduler.manager().pool().num_available() > 0 {
            // One token takes one block at the most, so whoever is the first that does not run wants more than that.
            let runs = |request: &Request, sample| {
                entries.iter().any(|entry| entry.handle == request.handle && entry.sample == sample)
            };
            let mut sequences = self.residents().flat_map(|request| {
                request.sequences().into_iter().map(move |sample| (request, sample, self.num_wanted(request, sample)))
            });
            let waits = sequences.find(|&(request, sample, wanted)| wanted > 0 && !runs(request, sample));
            assert!(waits.is_none_or(|(_, _, wanted)| wanted > 1), "{waits:?} could run");
        }
    }

    /// Tokens of a sequence that could run in this plan: it does not wait for a commit, and what it draws from was drawn
    /// by the plan before.
    fn num_wanted(&self, request: &Request, sample: usize) -> usize {
        let previous = self.plans.back().map(|plan| plan.arrays.id());
        let mut in_flight = self.plans.iter().flat_map(|plan| &plan.entries);
        if request.asked.needs_commit && in_flight.any(|entry| entry.handle == request.handle) {
            return 0;
        }
        let pending = &request.samples[sample].pending;
        let unknown = if request.has_parted && pending.last().is_some_and(|last| Some(last.plan) != previous) {
            pending.len()
        } else {
            0
        };
        let limit = request.limit(sample).min(request.tokens(sample).len() - unknown);
        limit.saturating_sub(request.num_scheduled(sample))
    }

    /// The host's view of the plan's tables, in both forms.
    fn tables(&self, scheduler: &Scheduler, plan: &StepPlan) -> Vec<Vec<i32>> {
        let num_sequences = plan.sizes().num_sequences as usize;
        let columns = self.limits.max_model_len.div_ceil(self.limits.block_size);
        let mut padded = vec![-1; num_sequences * columns];
        scheduler.write_block_table(plan.id(), columns, &mut padded).expect("the plan is in flight");
        let len = |s: usize| (plan.i32s(Field::SeqLens)[s] as usize).div_ceil(self.limits.block_size);
        let tables: Vec<_> = padded.chunks(columns).enumerate().map(|(s, row)| row[..len(s)].to_vec()).collect();
        let (mut indptr, mut last) = (vec![-1; num_sequences + 1], vec![-1; num_sequences]);
        let mut indices = vec![-1; padded.len()];
        let total =
            scheduler.write_csr(plan.id(), &mut indptr, &mut indices, &mut last).expect("the plan is in flight");
        assert_eq!(indices[..total], tables.concat());
        for s in 0..num_sequences {
            assert_eq!((indptr[s + 1] - indptr[s]) as usize, len(s));
            let full = (len(s) - 1) * self.limits.block_size;
            assert_eq!(full + last[s] as usize, plan.i32s(Field::SeqLens)[s] as usize, "tokens in the last block");
        }
        tables
    }

    /// Runs the oldest plan that has not run, if there is one.
    pub(crate) fn run_next_plan(&mut self) {
        let Some(plan) = self.plans.iter_mut().find(|plan| !plan.has_run) else {
            return;
        };
        plan.has_run = true;
        let sequences: Vec<_> = plan.entries.iter().map(|entry| entry.expected.clone()).collect();
        self.device.run(&plan.arrays, &plan.tokens_before, &sequences);
        for (s, table) in plan.tables.iter().enumerate() {
            assert_eq!(&self.device.row(&plan.arrays, s), table, "the device's table and the host's");
        }
    }

    /// Ends the oldest plan; answers what the scheduler must answer.
    pub(crate) fn commit(&mut self) -> StepResult {
        if self.plans.front().is_some_and(|plan| !plan.has_run) {
            self.run_next_plan();
        }
        self.drain_aborts();
        let plan = self.plans.pop_front().expect("a plan is in flight");
        let mut result = StepResult::default();
        let mut tokens = plan.tokens.iter();
        for entry in &plan.entries {
            self.part(entry, &mut result);
            for (&sample, &token) in entry.drawn.iter().zip(&mut tokens) {
                self.take_token(plan.arrays.id(), entry.handle, sample, token, &mut result);
            }
        }
        self.events.ignored_tokens += u64::from(result.num_ignored);
        self.events.forks += result.forked.len() as u64;
        self.events.finished_requests += result.finished.len() as u64;
        result
    }

    fn part(&mut self, entry: &Entry, result: &mut StepResult) {
        let Some(request) = self.find_mut(entry.handle).filter(|request| request.residence == entry.residence) else {
            return;
        };
        if !entry.completes_prompt {
            return;
        }
        request.has_parted = true;
        let live: Vec<usize> = request.live().collect();
        for &sample in &live {
            request.samples[sample].num_scheduled = request.prompt_len();
        }
        let fork = |&child: &usize| Fork { handle: entry.handle, parent: live[0] as u32, child: child as u32 };
        result.forked.extend(live[1..].iter().map(fork));
    }

    fn take_token(&mut self, plan: PlanId, handle: Handle, sample: usize, token: i32, result: &mut StepResult) {
        let Some(request) = self.find_mut(handle).filter(|request| !request.samples[sample].is_over) else {
            result.num_ignored += 1;
            return;
        };
        let asked = request.asked.clone();
        let found = &mut request.samples[sample];
        let pending = found.pending.remove(0);
        assert_eq!((pending.plan, pending.token), (plan, token));
        found.outputs.push(token);
        let num_outputs = found.outputs.len();
        let stops = asked.stop_token_ids.contains(&token) && num_outputs >= asked.min_tokens as usize;
        let reason = if stops {
            Some(FinishReason::Stop)
        } else {
            (num_outputs == asked.max_tokens as usize).then_some(FinishReason::Length)
        };
        let finished = FinishedRequest {
            handle,
            request_id: asked.request_id.clone(),
            num_cached_tokens: request.num_cached_tokens as u32,
            num_preemptions: request.num_preemptions,
        };
        result.handles.push(handle.get());
        result.sequence.push(sample as i32);
        result.num_new_tokens.push(1);
        result.finish_reason.push(reason.map_or(0, |reason| reason as i8));
        if reason.is_some() && self.finish(handle, sample) {
            result.finished.push(finished);
        }
    }

    pub(crate) fn rollback(&mut self, id: PlanId) {
        self.drain_aborts();
        while self.plans.back().is_some_and(|plan| plan.arrays.id() >= id) {
            let plan = self.plans.pop_back().expect("there is one");
            self.events.undone_plans += 1;
            if plan.has_run {
                self.events.undone_plans_that_had_run += 1;
                self.device.undo_seats(&plan.arrays);
            }
            for entry in plan.entries.iter().rev() {
                let Some(request) = self.find_mut(entry.handle) else {
                    continue;
                };
                for sample in &mut request.samples {
                    sample.pending.retain(|pending| pending.plan != plan.arrays.id());
                }
                if request.residence != entry.residence {
                    continue;
                }
                request.set_num_scheduled(entry.sample, entry.before);
                if request.num_preemptions == 0 {
                    request.num_cached_tokens -= entry.num_hit_tokens;
                }
                if entry.is_admission {
                    request.leave();
                    self.events.undone_admissions += 1;
                }
            }
        }
    }

    // --- laws

    pub(crate) fn check(&self, scheduler: &Scheduler) {
        scheduler.check_integrity().unwrap_or_else(|broken| panic!("{broken}"));
        let num_resident = self.residents().count();
        assert_eq!(scheduler.num_unfinished_requests(), self.requests.len());
        assert_eq!(scheduler.num_requests(), (num_resident, self.requests.len() - num_resident));
        assert_eq!(scheduler.num_preemptions(), self.events.preemptions);
        let sequences = self.residents().flat_map(|request| {
            request.sequences().into_iter().map(|sample| (request.handle, sample, request.num_scheduled(sample)))
        });
        for (handle, sample, num_scheduled) in sequences {
            let table = scheduler.block_table(handle, sample as u32).expect("a live sample");
            let num_blocks = table.map_or(0, <[_]>::len);
            assert_eq!(num_blocks, num_scheduled.div_ceil(self.limits.block_size), "blocks of {handle:?} {sample}");
        }
    }

    /// With all requests over and all plans ended, the whole pool is there again and nobody sits anywhere.
    pub(crate) fn check_empty(&self, scheduler: &Scheduler) {
        assert!(self.requests.is_empty() && self.plans.is_empty());
        assert!(scheduler.manager().usage().abs() < 1e-9, "blocks are lost");
        assert_eq!(scheduler.manager().num_sequences(), 0);
        assert_eq!(self.device.num_seats(), 0, "somebody was never said to have left");
    }
}
