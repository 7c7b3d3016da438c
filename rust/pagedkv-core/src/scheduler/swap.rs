//! Preemption by swap: a request's blocks go to the host tier, and it goes on from there when it is admitted again.

use smallvec::SmallVec;

use super::Scheduler;
use super::in_flight::{Departure, Entry};
use super::pass::Pass;
use super::request::{NONE, Request, Sample, Stage};
use super::transfers::{Direction, Swapped, TransferredBlock};
use crate::config::PreemptionMode;
use crate::kv_cache_manager::{Elsewhere, Return, Returning};
use crate::step_plan::Change;

/// What it takes to bring a request back.
#[derive(Debug)]
pub(super) struct Readmission {
    stage: Stage,
    returning: Vec<Returning>,
    found: Return,
    /// Blocks for what it is given back and to go on, and those for all the tokens that are known of it.
    pub(super) num_needed: u32,
    pub(super) num_needed_for_all: u32,
    /// Tokens that it will have, and that are known; those of the sample that is furthest behind.
    len: u32,
    known: u32,
}

impl Readmission {
    /// Whether it has more to compute than the token that was sampled last.
    pub(super) fn is_partial(&self) -> bool {
        self.len + 1 < self.known
    }

    /// Tokens that it has to compute before it draws the next.
    pub(super) const fn num_missing(&self) -> u32 {
        self.known - self.len
    }

    /// Whether blocks have to be copied before it goes on.
    pub(super) fn waits(&self) -> bool {
        self.found.has_copies()
    }
}

impl Scheduler {
    /// Sends out what a running request holds, which is about to lose it: each distinct block once. The copies are made
    /// after everything that plans in flight compute, so that goes out as well.
    ///
    /// A request is computed again where it has not filled a block, or the host tier has no room for all of its blocks; and
    /// so is one that waits, with blocks from before.
    pub(super) fn swap_out(&mut self, slot: u32) {
        let request = &mut self.requests[slot];
        // What is on its way in stays in the host tier until it is there.
        request.arrivals.clear();
        if self.limits.preemption_mode != PreemptionMode::Swap || request.swapped.is_some() {
            return;
        }
        let only = if request.stage == Stage::Prompt { Some(request.leader()) } else { None };
        let is_held = |&(number, sample): &(usize, &Sample)| {
            sample.sequence != NONE && sample.finish.is_none() && only.is_none_or(|only| only == number)
        };
        let samples = request.samples.iter().enumerate().filter(is_held);
        let held: SmallVec<[_; 4]> = samples
            .map(|(number, sample)| {
                let index = sample.sequence as usize;
                let epoch = self.manager.sequence(index).epoch;
                let is_it = |entry: &&Entry| (entry.sequence, entry.epoch) == (sample.sequence, epoch);
                let entries = self.plans.iter().rev().flat_map(|plan| &plan.entries).filter(is_it);
                let num_drafts = entries.map(|entry| entry.num_drafts).next().filter(|_| sample.is_drafting);
                (number as u32, index, num_drafts.unwrap_or(0))
            })
            .collect();
        let plans = held.iter().filter_map(|&(_, index, _)| self.manager.sequence(index).in_flight.last());
        let named_by = plans.map(|&(plan, _)| plan).max();
        let mut record = self.manager.record_of(held.iter().copied());
        let longest = record.sequences.iter().map(|sequence| sequence.len).max().unwrap_or(0);
        if longest < self.manager.block_size || record.blocks.len() > self.host.num_free() as usize {
            return;
        }
        let blocks = record.blocks.iter_mut().zip(0..).map(|(block, place)| {
            let host = self.host.allocate();
            let elsewhere = Elsewhere::Host(host);
            block.elsewhere = Some(elsewhere);
            self.manager.pool.begin_transfer(block.device);
            TransferredBlock { device: block.device, elsewhere, group: block.group, place }
        });
        let blocks = blocks.collect();
        request.swapped = Some(Box::new(Swapped { record, stage: request.stage, named_by }));
        self.begin_transfer(slot, Direction::Out, blocks);
        self.num_swaps += 1;
    }

    /// Finds how a request that was swapped out can come back, or one that is outside can come in; `None`, and its record is
    /// gone, if nothing is left of it.
    pub(super) fn find_way_back(&mut self, slot: u32) -> Option<Readmission> {
        let request = self.request(slot);
        let is_outside = request.is_outside();
        if request.swapped.is_none() && !is_outside {
            return None;
        }
        // Whoever leads now may have had no sequence yet.
        let leader = self.request(slot).leader();
        self.ensure_sequence(slot, leader);
        if is_outside {
            self.look_outside(slot, leader);
        }
        let back = self.find_return(slot);
        if is_outside && !back.as_ref().is_some_and(Readmission::waits) {
            // The device has all of it: an admission like any other, which may find more.
            self.request_mut(slot).swapped = None;
            return None;
        }
        if back.is_none() && self.request(slot).is_outside() {
            // Nothing is left of what went out.
            return self.find_way_back(slot);
        }
        back
    }

    /// Notes what a request that has nothing can have from outside: all samples start with the prompt.
    fn look_outside(&mut self, slot: u32, leader: usize) {
        let request = &mut self.requests[slot];
        let (len, index) = (request.num_external_tokens, request.samples[leader].sequence as usize);
        let before = request.swapped.take().map(|swapped| swapped.record);
        let record = self.manager.record_of_outside(before, leader as u32, index, len);
        request.swapped = Some(Box::new(Swapped { record, stage: Stage::Prompt, named_by: None }));
    }

    fn find_return(&mut self, slot: u32) -> Option<Readmission> {
        let request = self.request(slot);
        let swapped = request.swapped.as_ref()?;
        let stage = if request.num_live > 1 { swapped.stage } else { Stage::Apart };
        let Some((returning, found)) = self.find_contents(slot, stage) else {
            self.forget_swapped(slot);
            return None;
        };
        let request = self.request(slot);
        let record = &request.swapped.as_ref()?.record;
        let (more, len, known) = self.still_missing(request, stage, &returning);
        let is_gang = request.is_gang();
        let to_go_on =
            returning.iter().map(|back| self.manager.num_needed_to_go_on(record, &returning, *back, &found, is_gang));
        // Samples that run together need all of it, the others one at a time.
        let to_go_on = if is_gang { to_go_on.sum() } else { to_go_on.min().unwrap_or(0) };
        let num_needed = found.num_needed + to_go_on;
        let num_needed_for_all = found.num_needed + more.max(to_go_on);
        Some(Readmission { stage, returning, found, num_needed, num_needed_for_all, len, known })
    }

    /// Which sequences of a request come back with what, and where that is; `None` if it is computed anew.
    fn find_contents(&mut self, slot: u32, stage: Stage) -> Option<(Vec<Returning>, Return)> {
        let request = &self.requests[slot];
        let swapped = request.swapped.as_ref()?;
        let mut returning = self.returning(request, swapped, stage);
        // Samples that come back have the prompt's blocks in common, or it is computed anew for all.
        let least = if stage == Stage::Apart && request.num_live > 1 {
            (request.prompt_len() / self.manager.block_size * self.manager.block_size).max(1)
        } else {
            1
        };
        let num_back = if stage == Stage::Prompt { 1 } else { request.num_live as usize };
        let manager = &mut self.manager;
        if !returning.iter().all(|&back| manager.can_take_over(&swapped.record, back)) {
            return None;
        }
        let mut found = Return::default();
        manager.find_swapped(&swapped.record, &mut returning, &mut found);
        let is_whole = returning.len() >= num_back && returning.iter().all(|back| back.len >= least);
        is_whole.then_some((returning, found))
    }

    /// What comes behind the tokens that return: the blocks of all samples for it, and of the sample that has most of it,
    /// how many tokens return and are known.
    fn still_missing(&self, request: &Request, stage: Stage, returning: &[Returning]) -> (u32, u32, u32) {
        let (mut more, mut behind) = (0, (0, 0));
        for sample in request.samples.iter().filter(|sample| sample.finish.is_none() && sample.sequence != NONE) {
            let known = if stage == Stage::Prompt {
                request.prompt_len()
            } else {
                self.manager.sequence(sample.sequence as usize).tokens.len().min(sample.most_computed())
            };
            let back = returning.iter().find(|returning| returning.index == sample.sequence as usize);
            if stage == Stage::Prompt && back.is_none() {
                continue;
            }
            let len = back.map_or(0, |back| back.len);
            // A block that it shares is copied before it goes on in it.
            more += self.manager.num_columns_between(len, known);
            if known - len >= behind.1 - behind.0 {
                behind = (len, known);
            }
        }
        (more, behind.0, behind.1)
    }

    /// Which of a request's sequences come back, and with how many tokens: one is left to compute.
    fn returning(&self, request: &Request, swapped: &Swapped, stage: Stage) -> Vec<Returning> {
        let sequences = &swapped.record.sequences;
        if swapped.stage == Stage::Prompt {
            // Whoever computes the prompt now goes on with it.
            let index = request.samples[request.leader()].sequence as usize;
            let known =
                if stage == Stage::Prompt { request.prompt_len() } else { self.manager.sequence(index).tokens.len() };
            return vec![Returning { entry: 0, index, len: sequences[0].len.min(known - 1) }];
        }
        let entries = sequences.iter().enumerate();
        let live = entries.filter(|(_, found)| request.samples[found.sample as usize].finish.is_none());
        let returning = live.map(|(entry, found)| {
            let index = request.samples[found.sample as usize].sequence as usize;
            Returning { entry, index, len: found.len.min(self.manager.sequence(index).tokens.len() - 1) }
        });
        returning.collect()
    }

    /// Admits a request that was swapped out: it takes back what the device still has and waits for the rest.
    pub(super) fn readmit(&mut self, pass: &mut Pass, slot: u32, back: &Readmission) -> bool {
        if back.is_partial() && pass.num_partial_prefills >= self.limits.max_num_partial_prefills {
            return false;
        }
        let is_first = self.is_first(slot);
        let needed = if is_first {
            back.num_needed
        } else {
            back.num_needed_for_all + self.claimed_before(pass, slot) + self.watermark_blocks
        };
        if needed > self.manager.pool().num_available() {
            let Some(giver) = self.gives_room(slot, needed) else { return false };
            self.preempt(giver);
            return self.find_way_back(slot).is_none_or(|back| self.readmit(pass, slot, &back));
        }
        self.enter(slot, back.known, back.len);
        let request = self.request_mut(slot);
        request.stage = back.stage;
        request.last_plan = pass.record.id;
        let leader = request.leader();
        self.take_seats(slot, leader, back.stage);
        let num_queried = self.num_looked_for(slot);
        self.recorder.admitted(&mut self.requests[slot], num_queried);
        self.bring_back(slot, back);
        if self.request(slot).transfer.is_some() {
            pass.claimed += back.num_needed_for_all - back.num_needed;
            pass.num_partial_prefills += u32::from(back.is_partial());
        } else {
            self.forget_swapped(slot);
            // What comes first goes on at the cost of all that runs.
            pass.is_admitting = !is_first;
            self.grow_request(pass, slot);
            pass.is_admitting = false;
        }
        true
    }

    /// Tokens that are looked for in the cache before others come from outside.
    fn num_looked_for(&mut self, slot: u32) -> u32 {
        let (want, index) = self.known(slot);
        let looks = self.request(slot).is_outside() && self.manager.sequence(index).uses_cache;
        if looks { want.target } else { 0 }
    }

    fn bring_back(&mut self, slot: u32, back: &Readmission) {
        let request = &mut self.requests[slot];
        let record = &mut request.swapped.as_mut().expect("it was swapped out").record;
        let arriving = self.manager.bring_back(record, &back.returning, &back.found, &mut request.arrivals);
        if arriving.is_empty() {
            return;
        }
        let blocks = arriving.into_iter().map(|arriving| {
            let block = record.blocks[arriving.block as usize];
            let elsewhere = block.elsewhere.expect("what arrives is elsewhere");
            TransferredBlock { device: arriving.device, elsewhere, group: block.group, place: arriving.block }
        });
        let blocks: Vec<_> = blocks.collect();
        let is_load = matches!(blocks[0].elsewhere, Elsewhere::Outside { .. });
        let request = &mut self.requests[slot];
        // It is looked for once; a load that is asked for again is what that found.
        if is_load && std::mem::take(&mut request.num_external_tokens) > 0 {
            let num_there = request.arrivals[0].num_there;
            request.num_cached_tokens += if request.num_preemptions == 0 { num_there } else { 0 };
            self.recorder.hit(request, num_there);
        }
        self.begin_transfer(slot, if is_load { Direction::Load } else { Direction::In }, blocks);
    }

    /// Counts the blocks that a request whose blocks are on their way still needs for the tokens that are known of it.
    pub(super) fn claim_for_later(&self, pass: &mut Pass, slot: u32) {
        *self.claims(pass, slot) += self.num_columns_for_later(slot);
    }

    /// Blocks that a request whose blocks are on their way still needs.
    pub(super) fn num_columns_for_later(&self, slot: u32) -> u32 {
        let samples = self.request(slot).samples.iter();
        let live = samples.filter(|sample| sample.finish.is_none() && sample.sequence != NONE);
        let columns = live.flat_map(|sample| {
            let sequence = self.manager.sequence(sample.sequence as usize);
            let tables = sequence.tables.iter().zip(&self.manager.groups).filter(|(table, _)| table.len() > 0);
            tables.map(|(table, spec)| sequence.tokens.len().div_ceil(spec.block_size).saturating_sub(table.len()))
        });
        columns.sum()
    }

    /// The samples of a running request lost what they had. They keep their rows while one computes the prompt for all.
    pub(super) fn start_over(&mut self, slot: u32) {
        let leader = self.request(slot).leader();
        for sample in 0..self.request(slot).samples.len() {
            let Sample { sequence, is_kept, .. } = self.request(slot).samples[sample];
            if sequence == NONE || is_kept {
                continue;
            }
            if self.leave_seat(sequence as usize) && sample != leader {
                let request = self.request(slot);
                let (row, request_id) = (request.samples[sample].row, request.id.to_string());
                let change = Change { row, request_id, sample: sample as u32 };
                let departure = Departure { handle: request.handle, sample: sample as u32, change };
                self.announcements.preempted.push(departure);
            }
            self.manager.release_all(sequence as usize);
        }
        self.request_mut(slot).stage = Stage::Prompt;
        self.sit(slot, leader);
    }

    /// Plans that computed tokens for requests which went out since are undone: that is void there too.
    pub(super) fn undo_swapped(&mut self) {
        let multiple = self.manager.hit_multiple;
        let Some(lost) = &mut self.manager.lost_growths else { return };
        for (sequence, epoch, before) in lost.drain(..) {
            for swapped in self.requests.iter_mut().filter_map(|request| request.swapped.as_mut()) {
                swapped.record.undo(sequence, epoch, before, multiple);
            }
        }
    }

    /// Whether a waiting request has to wait for plans or transfers that are about it, or about what it had: only when they
    /// have ended is it known what of that is good.
    pub(super) fn is_under_way(&self, slot: u32) -> bool {
        let request = self.request(slot);
        let named_by = request.swapped.as_ref().and_then(|swapped| swapped.named_by);
        request.is_under_way() || named_by.is_some_and(|plan| self.fence_of(plan).is_some())
    }
}

impl Request {
    pub(super) fn is_waiting(&self) -> bool {
        self.stage == Stage::Waiting
    }

    /// Whether a request that has nothing may still ask for a load from outside.
    fn is_outside(&self) -> bool {
        let has_other = |swapped: &Swapped| !swapped.record.is_outside();
        self.num_external_tokens > 0 && !self.is_keeper && !self.swapped.as_deref().is_some_and(has_other)
    }

    /// Whether a plan in flight is about the request, or a transfer: it is not admitted before they end.
    pub(super) fn is_under_way(&self) -> bool {
        self.num_in_flight > 0 || self.transfer.is_some()
    }

    /// A sample of a request that is out ended: nothing of it comes back.
    pub(super) fn forget_swapped_sample(&mut self, sample: usize) {
        if let Some(swapped) = self.swapped.as_mut().filter(|swapped| swapped.stage == Stage::Apart) {
            swapped.record.sequences.retain(|found| found.sample as usize != sample);
        }
    }

    /// A beam of a request that is out branched: what went out of the parent is the child's as well.
    pub(super) fn branch_swapped_sample(&mut self, parent: usize, child: usize) {
        let Some(swapped) = self.swapped.as_mut().filter(|swapped| swapped.stage == Stage::Apart) else { return };
        let sequences = &mut swapped.record.sequences;
        if let Some(mut found) = sequences.iter().find(|found| found.sample as usize == parent).cloned() {
            found.sample = child as u32;
            sequences.push(found);
        }
    }
}
