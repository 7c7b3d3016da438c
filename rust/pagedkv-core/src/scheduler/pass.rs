//! One pass over the running requests: each grows by what the token budget and the pool allow.

use super::Scheduler;
use super::in_flight::{Cell, Entry, InFlight};
use super::policy::Order;
use super::request::{NONE, Sample, Stage};
use crate::config::Policy;
use crate::error::{Error, Result, invalid};
use crate::ids::PlanId;
use crate::kv_cache_manager::ComputedBlocks;
use crate::step_plan::StepPlan;

/// What a pass has left and what it found.
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) record: InFlight,
    pub(super) budget: u32,
    /// Tokens of the budget that guesses leave to others.
    pub(super) kept: u32,
    /// Whether samples of the gang that grows compute what they lost: then nobody draws.
    pub(super) is_lagging: bool,
    pub(super) copies: Vec<[i32; 2]>,
    /// Blocks that requests which wait for a fence count on.
    pub(super) reserved: u32,
    /// Blocks that running prefills still need for the tokens they know.
    pub(super) claimed: u32,
    /// The plan before this one, if it is in flight.
    pub(super) previous: Option<PlanId>,
    /// A waiting request that comes before some running ones, and the blocks that it needs.
    pub(super) head: Option<Head>,
    /// Blocks that running prefills behind that request still need.
    pub(super) claimed_behind: u32,
    /// Requests in the middle of their prompt when the pass is over.
    pub(super) num_partial_prefills: u32,
    /// A request that was just admitted grows: nobody who runs gives way to it now.
    pub(super) is_admitting: bool,
}

/// The first waiting request, where it comes before some that run: what those must leave to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) order: Order,
    pub(super) num_blocks: u32,
    /// Whether it is let in before those behind it grow; otherwise it waits for seats or blocks.
    pub(super) may_start: bool,
}

/// How a sequence may grow now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    /// Tokens up to which it can be computed.
    pub(super) target: u32,
    /// Of these, tokens that are known.
    pub(super) known: u32,
    /// Guesses that may run behind the target.
    pub(super) num_drafts: u32,
}

impl Scheduler {
    /// Makes the next plan.
    ///
    /// # Errors
    /// [`Error::TooManyPlans`].
    ///
    /// # Complexity
    /// O(sequences + tokens + changed table entries); nothing depends on the length of a running context.
    pub fn schedule(&mut self) -> Result<StepPlan> {
        self.check_may_plan()?;
        self.drain_inbox();
        let previous = self.plans.back().map(|record| record.id);
        let mut record = self.spare_plans.pop().unwrap_or_else(InFlight::empty);
        record.id = self.manager.begin_plan();
        let mut pass = Pass {
            record,
            budget: self.limits.max_num_batched_tokens,
            kept: 0,
            is_lagging: false,
            copies: Vec::new(),
            reserved: 0,
            claimed: 0,
            previous,
            head: None,
            claimed_behind: 0,
            num_partial_prefills: 0,
            is_admitting: false,
        };
        self.refresh_order();
        self.make_way(&mut pass);
        self.grow_running(&mut pass);
        self.admit_waiting(&mut pass);
        Ok(self.build(pass))
    }

    /// Makes the next plan by keys of the caller's for waiting requests, where the policy is [`Policy::External`].
    ///
    /// Keys are taken with the handles that they are for, so an answer to an older question does no harm: handles that
    /// do not wait any more are passed over, and requests without a key come last.
    ///
    /// # Errors
    /// [`Error::TooManyPlans`]; [`Error::InvalidArgument`] where there are not as many keys as handles, one of them is
    /// NaN, or the policy has keys of its own.
    ///
    /// # Complexity
    /// As [`Self::schedule`], and O(log waiting requests) for each key that changed.
    pub fn schedule_by(&mut self, handles: &[i64], keys: &[f64]) -> Result<StepPlan> {
        if self.limits.policy != Policy::External {
            return invalid("policy", "\"external\"", self.limits.policy.name());
        }
        if handles.len() != keys.len() {
            return invalid("keys", format!("{}, one per handle", handles.len()), keys.len());
        }
        if let Some(place) = keys.iter().position(|key| key.is_nan()) {
            return invalid("keys", "numbers that can be ordered", format!("NaN for handle {}", handles[place]));
        }
        self.check_may_plan()?;
        self.drain_inbox();
        self.set_keys(handles, keys);
        self.schedule()
    }

    fn check_may_plan(&self) -> Result<()> {
        if self.plans.len() >= self.limits.max_plans_in_flight as usize {
            return Err(Error::TooManyPlans(self.limits.max_plans_in_flight));
        }
        Ok(())
    }

    fn grow_running(&mut self, pass: &mut Pass) {
        let mut at = 0;
        while at < self.running.len() && pass.budget > 0 {
            let slot = self.running[at];
            if let Some(head) = self.head_before(pass, slot).filter(|head| head.may_start) {
                self.admit_head(pass, head);
                at = self.running.partition_point(|&other| self.request(other).order <= head.order);
                continue;
            }
            if self.manager.has_moves() && !self.request(slot).is_held {
                self.place_moves(slot);
            }
            self.grow_request(pass, slot);
            // Held requests before it may have lost their places to it.
            while self.running.get(at) != Some(&slot) {
                at -= 1;
            }
            at += 1;
        }
    }

    /// Puts the moves that samples of a running request await into the plan. From here on it is nobody's victim in this
    /// pass, so that its blocks are not fenced by the very plan for which they are taken.
    fn place_moves(&mut self, slot: u32) {
        let request = &self.requests[slot];
        for sample in request.samples.iter().filter(|sample| sample.sequence != NONE) {
            self.manager.place_moves(sample.sequence as usize);
        }
    }

    /// Grows what a running request can have computed now.
    pub(super) fn grow_request(&mut self, pass: &mut Pass, slot: u32) {
        let request = self.request(slot);
        if request.transfer.is_some() {
            return self.claim_for_later(pass, slot);
        }
        if request.is_held || request.needs_commit && request.num_in_flight > 0 {
            return;
        }
        match request.stage {
            Stage::Prompt => {
                self.grow(pass, slot, request.leader());
            }
            _ if request.is_gang() => self.grow_gang(pass, slot),
            _ => self.grow_samples(pass, slot),
        }
    }

    fn grow_samples(&mut self, pass: &mut Pass, slot: u32) {
        for sample in 0..self.request(slot).samples.len() {
            let is_live = self.request(slot).samples[sample].finish.is_none();
            if is_live && pass.budget > 0 && !self.decode(pass, slot, sample) {
                self.grow(pass, slot, sample);
            }
        }
    }

    /// Grows one sample of a running request, if it has tokens to compute and room is found. Answers whether it did.
    pub(super) fn grow(&mut self, pass: &mut Pass, slot: u32, sample: usize) -> bool {
        let Some(want) = self.want(slot, sample, pass.previous, pass.is_lagging) else {
            return false;
        };
        let index = self.request(slot).samples[sample].sequence as usize;
        let mut hits = std::mem::take(&mut self.hits);
        let grown = self.find_room(pass, slot, index, want, &mut hits);
        if let Some((num_new, num_drafts)) = grown {
            self.extend(pass, slot, sample, num_new, Want { num_drafts, ..want }, &hits);
        }
        self.hits = hits;
        pass.num_partial_prefills += u32::from(self.is_partial(index, slot));
        let claimed = self.blocks_to_come(index, want.target);
        *self.claims(pass, slot) += claimed;
        grown.is_some()
    }

    /// How many tokens and guesses of a running sequence there is room for behind its hits, or room is made for.
    fn find_room(
        &mut self,
        pass: &mut Pass,
        slot: u32,
        index: usize,
        want: Want,
        hits: &mut ComputedBlocks,
    ) -> Option<(u32, u32)> {
        let mut may_hit = true;
        loop {
            if may_hit {
                self.find_hits(index, want, hits);
            } else {
                hits.clear();
            }
            let start = self.manager.sequence(index).num_scheduled + hits.num_tokens();
            let budget = pass.budget;
            let num_new = self.chunk(start, want.target, budget);
            if num_new == 0 {
                return None;
            }
            let reserved = pass.reserved + self.reserved_for_head(pass, slot);
            let has_room = |needed| needed == 0 || needed + reserved <= self.manager.pool().num_available();
            let num_drafts = want.num_drafts.min((budget - num_new).saturating_sub(pass.kept));
            if num_drafts > 0 && has_room(self.manager.blocks_needed(index, num_new + num_drafts, hits)) {
                return Some((num_new, num_drafts));
            }
            let needed = self.manager.blocks_needed(index, num_new, hits);
            if has_room(needed) {
                return Some((num_new, 0));
            }
            if self.needs_less_anew(index, want, budget, needed, hits) {
                may_hit = false;
            } else if !self.make_room(slot, needed, pass) {
                return None;
            }
        }
    }

    /// Tokens of the next chunk that starts at `start`: within the budget and the limit on long prefills, and ending on a
    /// multiple of the configured size unless it ends what can be computed.
    pub(super) fn chunk(&self, start: u32, target: u32, budget: u32) -> u32 {
        let limit = match self.limits.long_prefill_token_threshold {
            0 => budget,
            threshold => budget.min(threshold),
        };
        if target - start <= limit {
            return target - start;
        }
        let end = start + limit;
        (end - end % self.limits.prefill_chunk_multiple).saturating_sub(start)
    }

    /// How far a sample's sequence can be computed now, or `None` if it waits for a commit or has nothing to compute.
    pub(super) fn want(&self, slot: u32, sample: usize, previous: Option<PlanId>, is_lagging: bool) -> Option<Want> {
        let request = self.request(slot);
        let sample = &request.samples[sample];
        let sequence = self.manager.sequence(sample.sequence as usize);
        let len = sequence.tokens.len();
        if sample.is_drafting {
            return None;
        }
        let (target, known) = if request.stage == Stage::Prompt {
            (request.prompt_len(), request.prompt_len())
        } else {
            // The last token that a sample may have needs no slot.
            let last = sample.most_computed();
            let coming = if Some(sample.drawn.0) == previous { sample.num_pending } else { 0 };
            let end = if is_lagging { len - 1 } else { len + coming };
            (end.min(last), end.min(len).min(last))
        };
        // Guesses run right behind the last token that is known, and no more of them than can still be accepted.
        let can_draft = !sample.drafts.is_empty() && target == len && sequence.num_scheduled + 1 == len;
        let most = (sample.max_tokens - 1).saturating_sub(sample.num_outputs);
        let num_drafts = if can_draft { sample.drafts.num_within(most) } else { 0 };
        (target > sequence.num_scheduled).then_some(Want { target, known, num_drafts })
    }

    /// Looks for cached blocks where a prefill stands on a block border.
    pub(super) fn find_hits(&self, index: usize, want: Want, hits: &mut ComputedBlocks) {
        if want.known > self.manager.sequence(index).num_scheduled + self.manager.block_size {
            self.manager.lookup(index, want.known, hits);
        } else {
            hits.clear();
        }
    }

    /// Whether a growth takes fewer blocks without its hits. It may where there are windows: the blocks that a hit needs
    /// come beside those that leave when the plan commits.
    pub(super) fn needs_less_anew(
        &self,
        index: usize,
        want: Want,
        budget: u32,
        needed: u32,
        hits: &ComputedBlocks,
    ) -> bool {
        if !self.manager.has_windows || hits.num_tokens() == 0 {
            return false;
        }
        let num_new = self.chunk(self.manager.sequence(index).num_scheduled, want.target, budget);
        num_new > 0 && self.manager.blocks_needed(index, num_new, &ComputedBlocks::default()) < needed
    }

    /// Puts a growth into the plan.
    pub(super) fn extend(
        &mut self,
        pass: &mut Pass,
        slot: u32,
        sample: usize,
        num_new: u32,
        want: Want,
        hits: &ComputedBlocks,
    ) {
        let request = self.request(slot);
        let index = request.samples[sample].sequence as usize;
        let start = self.manager.sequence(index).num_scheduled + hits.num_tokens();
        let end = start + num_new;
        let before = self.manager.sequence(index).num_scheduled;
        self.manager.extend(index, num_new + want.num_drafts, hits);
        let completes_prompt = self.request(slot).stage == Stage::Prompt && end == want.target;
        let num_samples = self.num_drawn(slot, sample, end, want);
        let request = &mut self.requests[slot];
        request.num_in_flight += 1;
        request.num_cached_tokens += if request.num_preemptions == 0 { hits.num_tokens() } else { 0 };
        request.last_plan = pass.record.id;
        self.recorder.hit(request, hits.num_tokens());
        let seat = self.seats.seat(index);
        let epoch = self.manager.sequence(index).epoch;
        pass.budget -= num_new + want.num_drafts;
        pass.record.entries.push(Entry {
            sample: sample as u32,
            num_samples,
            drawn_before: request.samples[sample].drawn,
            num_hit_tokens: hits.num_tokens(),
            num_preemptions: request.num_preemptions,
            num_drafts: want.num_drafts,
            completes_prompt,
            ..Entry::new(request.handle, slot, index as u32, epoch, seat.row, start..end + want.num_drafts)
        });
        self.note_changed_cells(pass, index, before);
    }

    /// Tokens that are drawn where a sample's sequence grows up to `end`, and by the guesses behind.
    fn num_drawn(&self, slot: u32, sample: usize, end: u32, want: Want) -> u32 {
        let request = self.request(slot);
        let sample = &request.samples[sample];
        match request.stage {
            Stage::Prompt if end == want.target => {
                let draws = |sample: &&Sample| request.draws_behind_the_prompt(sample, &self.manager);
                request.samples.iter().filter(draws).count() as u32
            }
            Stage::Prompt => 0,
            _ if want.num_drafts > 0 => want.num_drafts + 1,
            _ => {
                let len = self.manager.sequence(sample.sequence as usize).tokens.len();
                u32::from(end == len + sample.num_pending)
            }
        }
    }

    /// Notes the copies of the newest growth, which began at `before`, and the entries of its block tables that it changed.
    fn note_changed_cells(&self, pass: &mut Pass, index: usize, before: u32) {
        let sequence = self.manager.sequence(index);
        let is_announced = self.seats.seat(index).is_announced;
        let cell = |group, column| Cell { sequence: index as u32, epoch: sequence.epoch, group, column };
        for copy in self.manager.last_copies() {
            pass.copies.push([copy.source.get() as i32, copy.target.get() as i32]);
            if is_announced {
                pass.record.cells.push(cell(copy.group, copy.column));
            }
        }
        if is_announced {
            for (group, (table, spec)) in (0..).zip(sequence.tables.iter().zip(&self.manager.groups)) {
                let new = before.div_ceil(spec.block_size)..table.len();
                pass.record.cells.extend(new.map(|column| cell(group, column)));
            }
        }
    }
}
