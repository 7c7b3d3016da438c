//! The naive `Scheduler`: it does not choose what to run, but knows what every choice must keep to and what follows from
//! it, and it runs each plan on a device that knows only the plan's arrays.

mod beams;
mod bypass;
mod commit;
mod gangs;
mod laws;
mod loads;
mod preemption;
mod request;
mod schedule;
mod sessions;
mod stats;
mod transfers;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use pagedkv_core::{FinishReason, Handle, NewRequest, PlanId, Policy, RequestTotals, Scheduler, StepPlan};

use super::device::{Device, Expected};
use super::events::Events;
use super::memory::{Group, Groups, Histories};
pub(crate) use commit::Outcome;
use request::Sample;
pub(crate) use request::{Node, Request};
use stats::Times;
use transfers::Transfer;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) policy: Policy,
    /// Whether chunks end before the budget does.
    pub(crate) cuts_chunks: bool,
    pub(crate) watermark_blocks: usize,
    /// The smallest of the groups.
    pub(crate) block_size: usize,
    pub(crate) groups: Groups,
    pub(crate) caching: bool,
    pub(crate) usable_blocks: usize,
    pub(crate) max_num_seqs: usize,
    pub(crate) max_num_batched_tokens: usize,
    pub(crate) max_model_len: usize,
    pub(crate) max_plans_in_flight: usize,
    pub(crate) lookahead: usize,
    /// 0: preemption is by recompute.
    pub(crate) num_host_blocks: usize,
    /// Overtakings that make a request due.
    pub(crate) ageing: usize,
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
    num_queried: u64,
    is_admission: bool,
    completes_prompt: bool,
    /// The samples that get a token, or the accepted ones of `drafts` and one more.
    drawn: Vec<usize>,
    /// Guesses that run behind the last known token.
    drafts: Vec<Node>,
    expected: Expected,
}

impl Limits {
    /// Columns of the block table.
    pub(crate) fn num_columns(&self) -> usize {
        (self.max_model_len + self.lookahead).div_ceil(self.block_size)
    }

    /// Most blocks of a group that one sequence holds, with plans in flight.
    pub(crate) fn most_blocks(&self, group: &Group) -> usize {
        let ahead = self.max_plans_in_flight * self.max_num_batched_tokens + self.lookahead;
        group.window.map_or(usize::MAX, |window| (window - 1 + ahead).div_ceil(group.block_size) + 1)
    }
}

#[derive(Debug)]
struct Plan {
    arrays: StepPlan,
    entries: Vec<Entry>,
    /// What the model samples.
    tokens: Vec<i32>,
    /// What the plan before samples.
    tokens_before: Vec<i32>,
    /// Whose accepted guesses the plan moves into place, by request, sample and residence, and from which position on.
    moved: Vec<(Handle, usize, u32, usize)>,
    /// The host's view of the tables, by group.
    tables: Vec<Vec<Vec<i32>>>,
    has_run: bool,
}

#[derive(Debug)]
pub(crate) struct SchedulerModel {
    pub(crate) limits: Limits,
    /// Those that run or wait, in the order of their arrival.
    pub(crate) requests: Vec<Request>,
    /// Sessions at rest.
    pub(crate) resting: Vec<Request>,
    aborts: Vec<(Handle, Option<usize>)>,
    plans: VecDeque<Plan>,
    device: Device,
    histories: Histories,
    /// Blocks that were available, or fenced, before the plan was made.
    num_blocks_before: usize,
    /// What every request held before the plan was made.
    blocks_before: Vec<(Handle, BTreeSet<usize>)>,
    /// Transfers that were told and have not ended.
    transfers: Vec<Transfer>,
    /// Of these, those whose plan was undone since.
    to_repeat: BTreeSet<i64>,
    num_preemptions: u64,
    /// The time of the calls to come.
    pub(crate) now: f64,
    totals: RequestTotals,
    num_finished: u64,
    pub(crate) events: Events,
}

impl SchedulerModel {
    pub(crate) fn new(limits: Limits) -> Self {
        let num_columns = limits.num_columns();
        let mut device = Device::new(limits.usable_blocks + 1, &limits.groups, limits.max_num_seqs, num_columns);
        device.add_host_blocks(limits.num_host_blocks);
        Self {
            limits,
            requests: Vec::new(),
            resting: Vec::new(),
            aborts: Vec::new(),
            plans: VecDeque::new(),
            device,
            histories: Histories::default(),
            num_blocks_before: 0,
            blocks_before: Vec::new(),
            transfers: Vec::new(),
            to_repeat: BTreeSet::new(),
            num_preemptions: 0,
            now: 0.0,
            totals: RequestTotals::default(),
            num_finished: 0,
            events: Events::default(),
        }
    }

    pub(crate) fn in_flight(&self) -> Vec<PlanId> {
        self.plans.iter().map(|plan| plan.arrays.id()).collect()
    }

    pub(crate) fn oldest_plan(&self) -> Option<PlanId> {
        self.plans.front().map(|plan| plan.arrays.id())
    }

    fn position(&self, handle: Handle) -> Option<usize> {
        self.requests.iter().position(|request| request.handle == handle)
    }

    fn find_mut(&mut self, handle: Handle) -> Option<&mut Request> {
        self.requests.iter_mut().find(|request| request.handle == handle)
    }

    /// Blocks that the request needs at its longest.
    pub(crate) fn num_blocks_needed(&self, request: &NewRequest) -> usize {
        let prompt_len = request.prompt_token_ids.len();
        let longest = prompt_len + request.max_tokens as usize - 1 + self.limits.lookahead;
        let n = request.n as usize;
        let in_group = |group: &Group| {
            let shared = if request.session && n > 1 { 0 } else { prompt_len / group.block_size };
            let all = shared + n * (longest.div_ceil(group.block_size) - shared);
            all.min(n.saturating_mul(self.limits.most_blocks(group)))
        };
        self.limits.groups.iter().map(in_group).sum()
    }

    /// Blocks that a sample's sequence takes on the way to its first `end` tokens, beyond those that it holds.
    fn blocks_to_come(&self, scheduler: &Scheduler, request: &Request, sample: usize, end: usize) -> usize {
        let in_group = |(number, group): (usize, &Group)| {
            let table = scheduler.group_table(request.handle, sample as u32, number).expect("a live sample");
            let table = table.unwrap_or_default();
            let held = table.iter().filter(|block| block.get() > 0).count();
            let new = end.div_ceil(group.block_size).saturating_sub(table.len());
            new.min(self.limits.most_blocks(group).saturating_sub(held))
        };
        self.limits.groups.iter().enumerate().map(in_group).sum()
    }

    pub(crate) fn add_request(&mut self, handle: Handle, request: &Arc<NewRequest>) {
        assert!(self.requests.iter().all(|other| other.handle < handle), "handles rise");
        let turn_start = request.prompt_token_ids.len();
        let sample = Sample { turn_start, max_tokens: request.max_tokens as usize, ..Sample::default() };
        let most_overtakings = self.most_overtakings();
        self.requests.push(Request {
            handle,
            asked: request.clone(),
            samples: vec![sample; request.n as usize],
            is_resident: false,
            is_held: false,
            residence: 0,
            has_parted: false,
            num_prompt_scheduled: 0,
            num_prompt_computed: 0,
            num_preemptions: 0,
            num_cached_tokens: 0,
            times: Times::arriving(request.arrival, turn_start),
            swapped: None,
            num_external: request.num_external_tokens as usize,
            transfer: None,
            num_overtakings: 0,
            most_overtakings,
        });
    }

    pub(crate) fn abort(&mut self, handle: Handle, sample: Option<usize>) {
        self.aborts.push((handle, sample));
    }

    /// Whether no request has this id but such as were aborted as a whole.
    pub(crate) fn is_id_free(&self, request_id: &str) -> bool {
        let mut named =
            self.requests.iter().chain(&self.resting).filter(|request| request.asked.request_id == request_id);
        named.all(|request| {
            let is_whole = |sample: Option<usize>| sample.is_none() || request.samples.len() == 1;
            self.aborts.iter().any(|&(handle, sample)| handle == request.handle && is_whole(sample))
        })
    }

    /// The aborts take effect.
    pub(crate) fn drain_aborts(&mut self) {
        self.note_taken_up();
        for (handle, sample) in std::mem::take(&mut self.aborts) {
            let n = self.all().find(|request| request.handle == handle).map_or(0, |request| request.samples.len());
            for number in (0..n).filter(|&number| sample.is_none_or(|only| only == number)) {
                self.end_for(handle, number, FinishReason::Abort);
                self.give_up(handle, number);
            }
        }
    }

    /// Ends a sample, and the request with the last one; answers whether it was the last one. A session keeps it if it is
    /// one that finished.
    pub(crate) fn finish(&mut self, handle: Handle, sample: usize, keeps: bool) -> bool {
        let Some(position) = self.position(handle) else {
            return false;
        };
        let request = &mut self.requests[position];
        if request.samples[sample].is_over {
            return false;
        }
        request.end_sample(sample, keeps);
        if !request.has_parted {
            // Who computes the prompt after it takes its row.
            request.samples[sample].row = None;
        }
        let is_over = request.live().next().is_none();
        if is_over {
            let mut request = self.requests.remove(position);
            if request.samples.iter().any(|sample| sample.is_kept) {
                request.rest();
                self.resting.push(request);
                self.events.note("sessions at rest", 1);
            }
        }
        is_over
    }

    /// Every request that has a handle.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Request> {
        self.requests.iter().chain(&self.resting)
    }

    fn residents(&self) -> impl Iterator<Item = &Request> {
        self.requests.iter().filter(|request| request.is_resident)
    }

    /// Runs the oldest plan that has not run, if there is one.
    pub(crate) fn run_next_plan(&mut self) {
        let Some(plan) = self.plans.iter_mut().find(|plan| !plan.has_run) else {
            return;
        };
        plan.has_run = true;
        let sequences: Vec<_> = plan.entries.iter().map(|entry| entry.expected.clone()).collect();
        self.device.run(&plan.arrays, &plan.tokens_before, &sequences);
        for (group, tables) in plan.tables.iter().enumerate() {
            for (s, table) in tables.iter().enumerate() {
                let row = self.device.row(&plan.arrays, group, s);
                assert_eq!(&row, table, "the device's table and the host's in group {group}");
            }
        }
    }

    pub(crate) fn rollback(&mut self, id: PlanId) {
        self.drain_aborts();
        while self.plans.back().is_some_and(|plan| plan.arrays.id() >= id) {
            let plan = self.plans.pop_back().expect("there is one");
            self.events.note("undone plans", 1);
            if plan.has_run {
                self.events.note("undone plans that had run", 1);
                self.device.undo_seats(&plan.arrays);
            }
            self.undo_transfers(&plan.arrays);
            for entry in plan.entries.iter().rev() {
                self.undo_swapped(entry.handle, entry.sample, entry.residence, entry.before);
                let Some(request) = self.find_mut(entry.handle) else {
                    continue;
                };
                for sample in &mut request.samples {
                    sample.pending.retain(|pending| pending.plan != plan.arrays.id());
                    sample.drafting.take_if(|drafting| *drafting == plan.arrays.id());
                }
                if request.residence != entry.residence {
                    continue;
                }
                if !(request.has_parted && request.samples[entry.sample].is_over) {
                    request.set_num_scheduled(entry.sample, entry.before);
                }
                self.note_undone(entry, entry.num_queried);
                let request = self.find_mut(entry.handle).expect("an entry of a live request");
                if request.num_preemptions == 0 {
                    request.num_cached_tokens -= entry.num_hit_tokens;
                }
                if entry.is_admission {
                    request.withdraw();
                    self.events.note("undone admissions", 1);
                }
            }
            for &(handle, sample, residence, from) in &plan.moved {
                self.undo_swapped(handle, sample, residence, from);
                if let Some(request) = self.find_mut(handle).filter(|request| request.residence == residence) {
                    request.samples[sample].num_scheduled = from;
                    self.events.note("undone moves", 1);
                }
            }
        }
    }
}
