//! Requests that rest between two turns, are held, or begin where others stand.

use std::collections::BTreeSet;
use std::sync::Arc;

use pagedkv_core::scheduler::SequenceSnapshot;
use pagedkv_core::step_plan::Field;
use pagedkv_core::{Error, Handle, NewRequest, Scheduler};

use super::super::memory::Group;
use super::request::Sample;
use super::stats::Times;
use super::{Request, SchedulerModel};

/// The answer to a call that the model expects to be refused.
pub(crate) type Refusal = Option<Error>;

impl Request {
    /// A sample ends; a session keeps what plans that committed have computed of it, its last token left out.
    pub(super) fn end_sample(&mut self, sample: usize, keeps: bool) {
        let is_last = self.live().count() == 1;
        let num_computed = match (self.has_parted, is_last) {
            (true, _) => self.samples[sample].num_computed,
            // One computes the prompt for all, and another goes on with that.
            (false, true) if self.is_resident => self.num_prompt_computed,
            (false, _) => 0,
        };
        let num_kept = num_computed.min(self.num_known(sample) - 1);
        let is_kept = keeps && self.asked.session;
        let found = &mut self.samples[sample];
        (found.is_over, found.is_kept) = (true, is_kept);
        if is_kept {
            (found.num_scheduled, found.num_computed) = (num_kept, num_kept);
        }
    }

    pub(super) fn rest(&mut self) {
        self.is_resident = false;
        self.residence += 1;
        self.has_parted = true;
        self.swapped = None;
        self.num_external = 0;
        self.samples.iter_mut().for_each(|sample| sample.row = None);
    }

    /// Its admission is undone: what it had before stays its own.
    pub(super) fn withdraw(&mut self) {
        let first = self.live().next().expect("it has not ended");
        if !self.has_parted {
            let num_tokens = std::mem::take(&mut self.num_prompt_scheduled);
            self.num_prompt_computed = 0;
            (self.samples[first].num_scheduled, self.samples[first].num_computed) = (num_tokens, num_tokens);
        }
        self.is_resident = false;
        self.residence += 1;
        self.samples.iter_mut().for_each(|sample| sample.row = None);
        self.has_parted = self.is_keeper();
    }

    /// It gets its seats: its samples compute the prompt together unless some have blocks.
    pub(super) fn admit(&mut self) {
        let live: Vec<usize> = self.live().collect();
        let num_scheduled = |sample: &usize| self.samples[*sample].num_scheduled;
        let first = num_scheduled(&live[0]);
        let together = live.len() > 1
            && live[1..].iter().all(|sample| num_scheduled(sample) == 0)
            && (first == 0 || first < self.prompt_len());
        self.has_parted = !together;
        if together {
            (self.num_prompt_scheduled, self.num_prompt_computed) = (first, first);
        }
        self.is_resident = true;
    }

    /// Whether a session keeps the sample, or it may wait with blocks from before.
    fn has_blocks_of(&self, sample: &Sample) -> bool {
        sample.is_kept || !self.is_resident && !sample.is_over
    }

    /// Whether it waits with blocks from before.
    pub(super) fn is_keeper(&self) -> bool {
        !self.is_resident && self.live().any(|sample| self.samples[sample].num_scheduled > 0)
    }

    pub(crate) fn is_held(&self) -> bool {
        self.is_held
    }

    pub(crate) fn is_session(&self) -> bool {
        self.asked.session
    }

    /// Known tokens of a sample.
    pub(crate) fn known(&self, sample: usize) -> Vec<i32> {
        self.asked.prompt_token_ids.iter().chain(&self.samples[sample].outputs).copied().collect()
    }

    pub(crate) fn has_ended(&self, sample: usize) -> bool {
        self.samples[sample].is_over
    }
}

impl SchedulerModel {
    pub(super) fn find_any_mut(&mut self, handle: Handle) -> Option<&mut Request> {
        self.requests.iter_mut().chain(&mut self.resting).find(|request| request.handle == handle)
    }

    fn find_any(&self, handle: Handle) -> &Request {
        self.all().find(|request| request.handle == handle).expect("a handle of the model's")
    }

    /// Gives up what a session keeps of a sample.
    pub(crate) fn give_up(&mut self, handle: Handle, sample: usize) {
        let Some(request) = self.find_any_mut(handle) else { return };
        request.samples[sample].is_kept = false;
        if request.samples[sample].is_over {
            (request.samples[sample].num_scheduled, request.samples[sample].num_computed) = (0, 0);
        }
        self.resting.retain(|request| request.samples.iter().any(|sample| sample.is_kept));
    }

    pub(crate) fn set_held(&mut self, handle: Handle, is_held: bool) {
        self.find_any_mut(handle).expect("a handle of the model's").is_held = is_held;
        self.events.note(if is_held { "holds" } else { "releases" }, 1);
    }

    /// Why tokens can't be appended, if they can't.
    pub(crate) fn refuses_turn(
        &self,
        scheduler: &Scheduler,
        handle: Handle,
        sample: usize,
        num_ids: usize,
        max_tokens: usize,
    ) -> Refusal {
        let request = self.find_any(handle);
        let found = &request.samples[sample];
        let invalid =
            |argument| Some(Error::InvalidArgument { argument, expected: String::new(), found: String::new() });
        if !found.is_over || request.is_resident {
            return Some(Error::NotFinished { handle, sample: sample as u32 });
        }
        if self.is_in_flight(handle) {
            return Some(Error::RequestInFlight(handle));
        }
        if !found.is_kept {
            return invalid("sequence");
        }
        let longest = request.num_known(sample) + num_ids + max_tokens;
        if longest > self.limits.max_model_len {
            return invalid("max_tokens");
        }
        if request.live().count() + 1 > self.limits.max_num_seqs {
            return invalid("sequence");
        }
        let others = request.live().map(|other| request.samples[other].turn_start + request.samples[other].max_tokens);
        let lengths: Vec<usize> = others.chain([longest]).map(|longest| longest - 1 + self.limits.lookahead).collect();
        let in_group = |group: &Group| {
            let all: usize = lengths.iter().map(|length| length.div_ceil(group.block_size)).sum();
            all.min(lengths.len().saturating_mul(self.limits.most_blocks(group)))
        };
        let mut kept: BTreeSet<pagedkv_core::BlockId> = BTreeSet::new();
        for other in (0..request.samples.len()).filter(|&other| other != sample && request.samples[other].is_kept) {
            for group in 0..self.limits.groups.len() {
                let table = scheduler.group_table(handle, other as u32, group).expect("a session");
                kept.extend(table.unwrap_or_default().iter().filter(|block| block.get() > 0));
            }
        }
        let needed = self.limits.groups.iter().map(in_group).sum::<usize>() + kept.len();
        let usable = self.limits.usable_blocks;
        (needed > usable).then_some(Error::NeverFits { needed: needed as u64, usable: usable as u64 })
    }

    /// A sample of a session goes on; its request arrives now.
    pub(crate) fn begin_turn(&mut self, handle: Handle, sample: usize, ids: &[i32], max_tokens: usize) {
        let resting = self.resting.iter().position(|request| request.handle == handle);
        let mut request = if let Some(position) = resting {
            let mut request = self.resting.remove(position);
            (request.num_preemptions, request.num_cached_tokens) = (0, 0);
            request.times = Times::arriving(self.now, 0);
            request
        } else {
            let position = self.position(handle).expect("a handle of the model's");
            self.requests.remove(position)
        };
        let found = &mut request.samples[sample];
        found.outputs.extend(ids);
        *found = Sample {
            max_tokens,
            is_over: false,
            is_kept: false,
            pending: Vec::new(),
            drafts: Vec::new(),
            drafting: None,
            awaiting: None,
            row: None,
            turn_start: request.asked.prompt_token_ids.len() + found.outputs.len(),
            ..found.clone()
        };
        let num_new = request.samples[sample].turn_start - request.samples[sample].num_scheduled;
        request.times.num_prompt += num_new as u64;
        (request.num_overtakings, request.most_overtakings) = (0, self.most_overtakings());
        request.has_parted = request.is_keeper();
        // Nothing of what was out is a part of this turn, or can be told from what the others keep.
        if request.has_parted {
            request.swapped = None;
        }
        self.requests.push(request);
        self.note_taken_up();
        self.events.note("turns", 1);
    }

    /// Why a sample can't be forked, if it can't; what the new request asks for is not looked at.
    pub(crate) fn refuses_fork(&self, handle: Handle, sample: usize) -> Refusal {
        let request = self.find_any(handle);
        let found = &request.samples[sample];
        if found.is_over && !found.is_kept {
            let (expected, found) = (String::new(), String::new());
            return Some(Error::InvalidArgument { argument: "sequence", expected, found });
        }
        // A plan in flight may move accepted guesses of a request that it does not run, as that is held.
        let moves = |&(moved, number, residence, _): &(Handle, usize, u32, usize)| {
            (moved, number, residence) == (handle, sample, request.residence)
        };
        let is_moved = !found.is_over && self.plans.iter().flat_map(|plan| &plan.moved).any(moves);
        let is_under_way = self.is_in_flight(handle) || request.transfer.is_some() || is_moved;
        is_under_way.then_some(Error::RequestInFlight(handle))
    }

    /// A request that begins where a sample of another one stands.
    pub(crate) fn fork(&mut self, handle: Handle, sample: usize, forked: Handle, request: &Arc<NewRequest>) {
        let parent = self.find_any(handle);
        let is_shared = parent.is_resident && !parent.has_parted;
        let num_computed = if is_shared { parent.num_prompt_scheduled } else { parent.samples[sample].num_scheduled };
        let num_computed = num_computed.min(request.prompt_token_ids.len() - 1);
        self.add_request(forked, request);
        let child = self.requests.last_mut().expect("it was just added");
        (child.samples[0].num_scheduled, child.samples[0].num_computed) = (num_computed, num_computed);
        child.has_parted = num_computed > 0;
        self.note_taken_up();
        self.events.note("forks of requests", 1);
    }

    /// What is asked for by a fork: everything of the sample, and more.
    pub(crate) fn fork_request(&self, handle: Handle, sample: usize, asked: &NewRequest) -> NewRequest {
        let parent = self.find_any(handle);
        let mut prompt_token_ids = parent.known(sample);
        prompt_token_ids.extend(&asked.prompt_token_ids);
        NewRequest {
            prompt_token_ids,
            identity: parent.asked.identity.clone(),
            use_prefix_cache: parent.asked.use_prefix_cache,
            ..asked.clone()
        }
    }

    /// Whether samples that have ended keep blocks, which nobody may take.
    pub(super) fn sessions_keep_blocks(&self) -> bool {
        let mut samples = self.all().flat_map(|request| &request.samples);
        samples.any(|sample| sample.is_kept && sample.num_scheduled > 0)
    }

    /// Blocks of waiting requests and of sessions are where the model has them.
    pub(super) fn check_kept(&self, scheduler: &Scheduler) {
        for request in self.all() {
            for (number, sample) in
                request.samples.iter().enumerate().filter(|(_, sample)| request.has_blocks_of(sample))
            {
                for (index, group) in self.limits.groups.iter().enumerate() {
                    // One that was just added is not known yet.
                    let table = scheduler.group_table(request.handle, number as u32, index).unwrap_or_default();
                    let num_blocks = table.map_or(0, <[_]>::len);
                    let expected = sample.num_scheduled.div_ceil(group.block_size);
                    assert_eq!(num_blocks, expected, "blocks of {:?} {number} in group {index}", request.handle);
                }
            }
        }
    }

    /// Learns how much of what was kept is left. That is all that plans which committed have computed, up to the last
    /// token; less where a window was cut, accepted guesses await their moves, blocks are on their way in, or a plan in
    /// flight copies one.
    pub(crate) fn follow_kept(&mut self, sequences: &[SequenceSnapshot]) {
        let has_windows = self.limits.groups.iter().any(|group| group.window.is_some());
        let has_copies = self.plans.iter().any(|plan| !plan.arrays.i32s(Field::Copies).is_empty());
        let is_still = self.limits.num_host_blocks == 0 && self.transfers.is_empty();
        let is_exact = self.limits.lookahead == 0 && is_still && !has_windows && !has_copies;
        for request in self.requests.iter_mut().chain(&mut self.resting) {
            let handle = request.handle;
            for number in 0..request.samples.len() {
                if !request.has_blocks_of(&request.samples[number]) {
                    continue;
                }
                let mine = |found: &&SequenceSnapshot| found.handle == handle && found.sample as usize == number;
                let left = sequences.iter().find(mine).map_or(0, |found| found.num_scheduled_tokens as usize);
                let known = request.num_known(number);
                let sample = &mut request.samples[number];
                assert!(
                    left < known && (!is_exact || left == sample.num_scheduled),
                    "{left} tokens of {handle:?} {number}"
                );
                (sample.num_scheduled, sample.num_computed) = (left, left);
            }
            if !request.is_resident && request.live().next().is_some() {
                request.has_parted = request.is_keeper();
            }
        }
    }
}
