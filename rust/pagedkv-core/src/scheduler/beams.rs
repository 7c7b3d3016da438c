//! Beams: samples that take each other's places, step by step, and are planned together or not at all.

use super::commit::StepResult;
use super::in_flight::{Entry, InFlight};
use super::pass::Pass;
use super::request::{FinishReason, Request, Stage};
use super::{Fork, Scheduler};
use crate::error::{Result, invalid};
use crate::ids::{Handle, PlanId};

/// A sample that a plan drew, by its place among the plan's samples.
#[derive(Clone, Copy, Debug)]
struct Drawn {
    slot: u32,
    handle: Handle,
    sample: usize,
    index: usize,
}

/// State of a pass before a gang grew.
#[derive(Clone, Copy, Debug)]
struct Mark {
    entries: usize,
    cells: usize,
    copies: usize,
    claimed: (u32, u32),
    reserved: u32,
    num_partial_prefills: u32,
}

impl Scheduler {
    /// Ends the oldest plan with tokens that continue chosen samples: token `i` continues the sample `parents[i]` of the
    /// plan, as it was before this step's token.
    ///
    /// Samples without a token end first. Of the tokens of a parent that go on, the first keeps its sequence and row, the
    /// others take the request's lowest free numbers and their rows, in order. A token that ends its sample, by stop token
    /// or length, needs no seat. In the result the tokens come in their order, with sequence -1 for those that ended
    /// without a sequence of their own, and then the samples that were dropped.
    ///
    /// # Errors
    /// As [`Self::commit`]; [`crate::Error::InvalidArgument`] also for a parent outside the plan's samples, for more than
    /// n tokens of a request that go on, and for a request that is in another plan in flight and whose samples do not get
    /// one token each: those need `needs_commit`.
    ///
    /// # Complexity
    /// As [`Self::commit`], and O(blocks) for each beam that forks.
    pub fn commit_beams(&mut self, plan: PlanId, tokens: &[i32], parents: &[i32]) -> Result<StepResult> {
        self.check_beams(plan, tokens, parents)?;
        self.drain_inbox();
        self.manager.end_plan(plan).expect("the plan is the oldest in flight");
        let mut record = self.plans.pop_front().expect("the plan is the oldest in flight");
        let mut result = StepResult::default();
        let mut drawn = self.settle_entries(&record, &mut result);
        drawn.retain(|drawn| self.is_alive(drawn));
        let mut children = vec![Vec::new(); record.samples.len()];
        parents.iter().enumerate().for_each(|(i, &parent)| children[parent as usize].push(i));
        let mut outcome = vec![None; tokens.len()];
        for family in drawn.chunk_by(|one, other| one.slot == other.slot) {
            self.continue_family(family, &children, tokens, &mut outcome, &mut result);
        }
        report(parents, &drawn, &children, &outcome, &mut result);
        self.announce_departures();
        self.recorder.ignored(result.num_ignored);
        self.seats.plans_ended(self.plans.front().map(|record| record.id));
        record.clear();
        self.spare_plans.push(record);
        Ok(result)
    }

    fn check_beams(&self, plan: PlanId, tokens: &[i32], parents: &[i32]) -> Result<()> {
        let record = self.oldest(plan)?;
        if record.entries.iter().any(|entry| entry.num_drafts > 0) {
            return invalid("parents", "no draft tokens in the same plan", "a plan that checks some");
        }
        if tokens.len() != parents.len() {
            return invalid("tokens", format!("{}, one per parent", parents.len()), tokens.len());
        }
        if let Some(negative) = tokens.iter().find(|&&token| token < 0) {
            return invalid("tokens", "token ids of at least 0", negative);
        }
        let num_samples = record.samples.len();
        if let Some(wrong) = parents.iter().find(|&&parent| parent < 0 || parent as usize >= num_samples) {
            return invalid("parents", format!("samples of the plan, below {num_samples}"), wrong);
        }
        let mut num_tokens = vec![(0_u32, 0_u32); num_samples];
        let entry_of = Self::entries_of(record);
        for (&token, &parent) in tokens.iter().zip(parents) {
            let (all, going_on) = &mut num_tokens[parent as usize];
            *all += 1;
            let (entry, sample) = entry_of[parent as usize];
            *going_on += u32::from(self.live(entry).is_some_and(|request| request.reason_for(sample, token).is_none()));
        }
        let by_request = |one: &usize, other: &usize| entry_of[*one].0.slot == entry_of[*other].0.slot;
        let all: Vec<usize> = (0..num_samples).collect();
        for family in all.chunk_by(by_request) {
            if let Some(request) = self.live(entry_of[family[0]].0) {
                let num_tokens: Vec<_> = family.iter().map(|&sample| num_tokens[sample]).collect();
                check_family(record, request, &num_tokens)?;
            }
        }
        Ok(())
    }

    /// The entry and the sample number behind each sample of a plan.
    fn entries_of(record: &InFlight) -> Vec<(&Entry, usize)> {
        let mut entries: Vec<_> = record.entries.iter().filter(|entry| entry.num_samples > 0).collect();
        entries.sort_by_key(|entry| entry.first_sample);
        let mut found = Vec::with_capacity(record.samples.len());
        for entry in entries {
            let drawn = &record.samples[entry.first_sample as usize..][..entry.num_samples as usize];
            found.extend(drawn.iter().map(|&sample| (entry, sample as usize)));
        }
        found
    }

    fn live(&self, entry: &Entry) -> Option<&Request> {
        self.requests.find(entry.slot, entry.handle)
    }

    /// Parts prompts that are computed, and lists the samples drawn whose requests live, in the order of the plan.
    fn settle_entries(&mut self, record: &InFlight, result: &mut StepResult) -> Vec<Drawn> {
        for entry in &record.entries {
            let Some(request) = self.entry_request(entry) else { continue };
            request.num_in_flight -= 1;
            if entry.completes_prompt {
                self.part_samples(entry, result);
            }
        }
        let mut drawn = Vec::with_capacity(record.samples.len());
        for (index, (entry, sample)) in Self::entries_of(record).into_iter().enumerate() {
            if let Some(request) = self.entry_request(entry) {
                request.samples[sample].num_pending -= 1;
                request.samples[sample].drafts.clear();
                drawn.push(Drawn { slot: entry.slot, handle: entry.handle, sample, index });
            }
        }
        drawn
    }

    /// Ends the samples of a request that no token continues, forks for tokens beyond the first, then adds the tokens.
    fn continue_family(
        &mut self,
        family: &[Drawn],
        children: &[Vec<usize>],
        tokens: &[i32],
        outcome: &mut [Option<(i32, i8)>],
        result: &mut StepResult,
    ) {
        let mut places = Vec::new();
        let mut ended = Vec::new();
        for parent in family {
            let request = self.request(parent.slot);
            let (going_on, ending): (Vec<usize>, Vec<usize>) = children[parent.index]
                .iter()
                .partition(|&&token| request.reason_for(parent.sample, tokens[token]).is_none());
            let num_tokens = children[parent.index].len();
            for (nth, &token) in ending.iter().enumerate() {
                let reason = request.reason_for(parent.sample, tokens[token]).expect("the token ends its sample");
                let own = if nth == 0 && going_on.is_empty() { parent.sample as i32 } else { -1 };
                outcome[token] = Some((own, reason as i8));
            }
            let request = &mut self.requests[parent.slot];
            self.recorder.generated(request, num_tokens);
            if going_on.is_empty() {
                ended.push((*parent, ending.first().copied()));
            }
            places.extend(going_on.into_iter().enumerate().map(|(nth, token)| (token, *parent, nth == 0)));
        }
        places.sort_unstable_by_key(|&(token, ..)| token);
        for (parent, token) in ended {
            self.end_beam(parent, token.map(|token| tokens[token]), result);
        }
        // Forks come from their parents as they were before this step's tokens.
        let seats: Vec<_> =
            places.iter().map(|&(token, parent, keeps)| (token, parent, self.place(parent, keeps, result))).collect();
        for (token, parent, sample) in seats {
            let index = self.ensure_sequence(parent.slot, sample);
            self.manager.append_token(index, tokens[token]);
            self.request_mut(parent.slot).samples[sample].num_outputs += 1;
            outcome[token] = Some((sample as i32, 0));
        }
    }

    fn is_alive(&self, drawn: &Drawn) -> bool {
        self.requests
            .find(drawn.slot, drawn.handle)
            .is_some_and(|request| request.samples[drawn.sample].finish.is_none())
    }

    fn end_beam(&mut self, parent: Drawn, token: Option<i32>, result: &mut StepResult) {
        let reason = token.and_then(|token| self.request(parent.slot).reason_for(parent.sample, token));
        if let Some(token) = token.filter(|_| self.request(parent.slot).is_session) {
            let index = self.ensure_sequence(parent.slot, parent.sample);
            self.manager.append_token(index, token);
        }
        self.request_mut(parent.slot).samples[parent.sample].num_outputs += u32::from(token.is_some());
        let reason = reason.unwrap_or(FinishReason::Dropped);
        self.end(parent.slot, parent.sample, reason, result);
    }

    /// The sample that a token which goes on belongs to: its parent, or a fork of it on the lowest free number.
    fn place(&mut self, parent: Drawn, keeps: bool, result: &mut StepResult) -> usize {
        if keeps {
            return parent.sample;
        }
        let from = self.ensure_sequence(parent.slot, parent.sample);
        let fork = self.manager.fork_at(from).index;
        let request = self.request_mut(parent.slot);
        let is_free = |sample: &super::request::Sample| sample.finish.is_some();
        let child = request.samples.iter().position(is_free).expect("no more tokens go on than there are samples");
        let num_outputs = request.samples[parent.sample].num_outputs;
        let sample = &mut request.samples[child];
        (sample.sequence, sample.num_outputs, sample.finish) = (fork, num_outputs, None);
        sample.drafts.clear();
        request.num_live += 1;
        request.branch_swapped_sample(parent.sample, child);
        if request.stage != Stage::Waiting {
            self.sit(parent.slot, child);
        }
        result.forked.push(Fork { handle: parent.handle, parent: parent.sample as u32, child: child as u32 });
        child
    }

    /// Grows every live sample of a gang, or none. While some still compute what they lost to a preemption, the others
    /// wait for them.
    pub(super) fn grow_gang(&mut self, pass: &mut Pass, slot: u32) {
        let request = self.request(slot);
        let is_ready = !self.waits_for_others(request);
        let num_tokens = request.num_live;
        if is_ready && !self.revoke_drafts_for(pass, num_tokens) {
            self.claim(pass, slot);
            return;
        }
        let mark = Mark {
            entries: pass.record.entries.len(),
            cells: pass.record.cells.len(),
            copies: pass.copies.len(),
            claimed: (pass.claimed, pass.claimed_behind),
            reserved: pass.reserved,
            num_partial_prefills: pass.num_partial_prefills,
        };
        let undo_to = self.manager.mark();
        pass.is_lagging = !is_ready;
        let mut num_to_come = self.request(slot).num_live;
        for sample in 0..self.request(slot).samples.len() {
            if self.request(slot).samples[sample].finish.is_some() || pass.budget == 0 {
                continue;
            }
            num_to_come -= 1;
            pass.kept = if is_ready { num_to_come } else { 0 };
            if !self.grow(pass, slot, sample) && is_ready {
                let before = self.manager.pool().num_available();
                self.manager.undo_to(undo_to);
                self.forget_entries(pass, mark);
                if pass.reserved > mark.reserved {
                    // It needs again what it had got.
                    pass.reserved += self.manager.pool().num_available() - before;
                }
                break;
            }
        }
        (pass.kept, pass.is_lagging) = (0, false);
        (pass.claimed, pass.claimed_behind) = mark.claimed;
        self.claim(pass, slot);
    }

    /// Counts the blocks that a gang still needs for the tokens that it knows.
    fn claim(&self, pass: &mut Pass, slot: u32) {
        for sample in self.request(slot).samples.iter().filter(|sample| sample.finish.is_none()) {
            let index = sample.sequence as usize;
            let claimed = self.blocks_to_come(index, self.manager.sequence(index).tokens.len());
            *self.claims(pass, slot) += claimed;
        }
    }

    fn forget_entries(&mut self, pass: &mut Pass, mark: Mark) {
        for entry in pass.record.entries.drain(mark.entries..) {
            let request = self.entry_request(&entry).expect("a request that is being planned lives");
            request.num_in_flight -= 1;
            request.num_cached_tokens -= if request.num_preemptions == 0 { entry.num_hit_tokens } else { 0 };
            pass.budget += entry.end - entry.start;
            let request = &self.requests[entry.slot];
            self.recorder.hit_undone(request, &entry);
        }
        pass.record.cells.truncate(mark.cells);
        pass.copies.truncate(mark.copies);
        pass.num_partial_prefills = mark.num_partial_prefills;
    }

    /// Whether a gang has samples that must compute more than their last token before all can go on together.
    pub(super) fn waits_for_others(&self, request: &Request) -> bool {
        request.is_gang()
            && request.samples.iter().filter(|sample| sample.finish.is_none()).any(|sample| {
                let sequence = self.manager.sequence(sample.sequence as usize);
                sequence.num_scheduled + 1 < sequence.tokens.len()
            })
    }
}

/// Writes what became of each token, in order, and which samples were dropped.
fn report(
    parents: &[i32],
    drawn: &[Drawn],
    children: &[Vec<usize>],
    outcome: &[Option<(i32, i8)>],
    result: &mut StepResult,
) {
    for (&parent, outcome) in parents.iter().zip(outcome) {
        let found = drawn.binary_search_by_key(&(parent as usize), |drawn| drawn.index);
        match (outcome, found) {
            (&Some((sequence, reason)), Ok(found)) => result.push(drawn[found].handle, sequence, 1, reason),
            _ => result.num_ignored += 1,
        }
    }
    let dropped = drawn.iter().filter(|drawn| children[drawn.index].is_empty());
    dropped.for_each(|drawn| result.push(drawn.handle, drawn.sample as i32, 0, FinishReason::Dropped as i8));
}

impl StepResult {
    pub(super) fn with_capacity(num_samples: usize) -> Self {
        Self {
            handles: Vec::with_capacity(num_samples),
            sequence: Vec::with_capacity(num_samples),
            num_new_tokens: Vec::with_capacity(num_samples),
            finish_reason: Vec::with_capacity(num_samples),
            ..Self::default()
        }
    }

    pub(super) fn push(&mut self, handle: Handle, sequence: i32, num_new_tokens: i32, finish_reason: i8) {
        self.handles.push(handle.get());
        self.sequence.push(sequence);
        self.num_new_tokens.push(num_new_tokens);
        self.finish_reason.push(finish_reason);
    }
}

/// Checks the numbers of tokens for each sample of a request that a plan drew: all, and those that go on.
fn check_family(record: &InFlight, request: &Request, num_tokens: &[(u32, u32)]) -> Result<()> {
    let going_on: u32 = num_tokens.iter().map(|&(_, going_on)| going_on).sum();
    if going_on > request.samples.len() as u32 {
        let expected = format!("at most {} tokens that go on for request {:?}", request.samples.len(), request.id);
        return invalid("parents", expected, going_on);
    }
    let may_branch = |count: u32| count == 1 || request.is_gang() || request.needs_commit && count == 0;
    if num_tokens.iter().any(|&(all, _)| !may_branch(all)) {
        let expected =
            format!("one token per sample of request {:?}, which has not needs_commit and n > 1", request.id);
        return invalid("parents", expected, "another number");
    }
    let num_entries = record.entries.iter().filter(|entry| entry.handle == request.handle).count() as u32;
    let is_elsewhere = request.num_in_flight > num_entries;
    if is_elsewhere && num_tokens.iter().any(|&(all, _)| all != 1) {
        let expected = format!("one token per sample of request {:?}, which is in another plan", request.id);
        return invalid("parents", expected, "another number");
    }
    Ok(())
}
