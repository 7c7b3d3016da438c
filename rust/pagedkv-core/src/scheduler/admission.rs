//! Seats and first blocks for waiting requests, in order, until one does not fit.

use super::Scheduler;
use super::pass::{Head, Pass, Want};
use super::policy::Order;
use super::request::{Sample, Stage};
use crate::kv_cache_manager::ComputedBlocks;

impl Scheduler {
    pub(super) fn admit_waiting(&mut self, pass: &mut Pass) {
        while self.admit_first(pass) {}
    }

    /// Lets the first waiting request in before running ones behind it grow, which could take what it counts on: tokens of
    /// the budget, blocks, hits.
    pub(super) fn admit_head(&mut self, pass: &mut Pass, head: Head) {
        pass.head = Some(Head { may_start: false, ..head });
        let num_behind = self.num_partial_prefills_behind(head.order);
        pass.num_partial_prefills += num_behind;
        self.admit_first(pass);
        pass.num_partial_prefills -= num_behind;
    }

    fn admit_first(&mut self, pass: &mut Pass) -> bool {
        let Some((&order, &slot)) = self.waiting.first_key_value() else { return false };
        // Its samples may be on their way, or its blocks, or its rows still be named by a plan in flight.
        let must_wait = self.is_under_way(slot) || self.request(slot).num_seats() > self.seats.num_free();
        if must_wait || pass.reserved > 0 || pass.budget == 0 {
            return false;
        }
        let is_admitted = if let Some(back) = self.find_way_back(slot) {
            self.readmit(pass, slot, &back)
        } else {
            let mut hits = std::mem::take(&mut self.hits);
            let is_admitted = self.admit(pass, slot, &mut hits);
            self.hits = hits;
            is_admitted
        };
        // Nothing is kept any more for one that is in.
        pass.head = pass.head.filter(|head| !is_admitted || head.order != order);
        is_admitted
    }

    fn admit(&mut self, pass: &mut Pass, slot: u32, hits: &mut ComputedBlocks) -> bool {
        let (want, index) = self.known(slot);
        self.find_hits(index, want, hits);
        let start = self.manager.sequence(index).num_scheduled + hits.num_tokens();
        let num_new = self.chunk(start, want.target, pass.budget);
        if num_new == 0
            || start + num_new < want.target && pass.num_partial_prefills >= self.limits.max_num_partial_prefills
        {
            return false;
        }
        let others = self.others_need(slot);
        let claimed = self.claimed_before(pass, slot);
        let needed = if self.is_first(slot) {
            self.manager.blocks_needed(index, num_new, hits)
        } else {
            self.blocks_to_admit(index, want.target, hits) + others + claimed + self.watermark_blocks
        };
        if needed > self.manager.pool().num_available() {
            let Some(giver) = self.gives_room(slot, needed) else { return false };
            self.preempt(giver);
            return self.admit(pass, slot, hits);
        }
        let stage = self.first_stage(slot);
        self.enter(slot, want.target, hits.num_tokens());
        let leader = self.request(slot).leader();
        self.take_seats(slot, leader, stage);
        self.request_mut(slot).stage = stage;
        let sequence = self.manager.sequence(index);
        let num_queried = if sequence.uses_cache { want.target - sequence.num_scheduled } else { 0 };
        self.extend(pass, slot, leader, num_new, want, hits);
        let entry = pass.record.entries.last_mut().expect("the admission was just added");
        (entry.is_admission, entry.num_queried) = (true, num_queried);
        let request = &mut self.requests[slot];
        self.recorder.admitted(request, num_queried);
        pass.claimed += others + self.blocks_to_come(index, want.target);
        pass.num_partial_prefills += u32::from(start + num_new < want.target);
        true
    }

    /// Blocks that running prefills which come before a waiting request still need.
    pub(super) fn claimed_before(&self, pass: &Pass, slot: u32) -> u32 {
        let is_head = pass.head.is_some_and(|head| head.order == self.request(slot).order);
        pass.claimed + if is_head { 0 } else { pass.claimed_behind }
    }

    /// Takes the first waiting request from the queue and puts it among the running ones.
    pub(super) fn enter(&mut self, slot: u32, num_tokens: u32, num_hit_tokens: u32) {
        self.waiting.pop_first();
        self.num_admissions += 1;
        let request = &self.requests[slot];
        let view = request.view(num_tokens, num_hit_tokens);
        self.policy.admitted(&view, request.key);
        self.set_keeper(slot, false);
        self.keep_place(slot);
        let order = self.request(slot).order;
        let at = self.running.partition_point(|&other| self.request(other).order < order);
        self.running.insert(at, slot);
    }

    /// What of a waiting request is known and will be computed first, and the sequence that does it.
    pub(super) fn known(&mut self, slot: u32) -> (Want, usize) {
        let leader = self.request(slot).leader();
        let index = self.ensure_sequence(slot, leader);
        let request = self.request(slot);
        let len = self.manager.sequence(index).tokens.len();
        let known = if self.first_stage(slot) == Stage::Prompt { request.prompt_len() } else { len };
        // The last token that a sample may have needs no slot.
        let target = known.min(request.samples[leader].most_computed());
        (Want { target, known: target, num_drafts: 0 }, index)
    }

    /// Blocks that the admission of a waiting request needs, and whether it starts with fewer tokens than it knows.
    pub(super) fn admission_needs(&mut self, slot: u32, budget: u32) -> (u32, bool) {
        if let Some(back) = self.find_way_back(slot) {
            let all = back.num_needed_for_all + self.watermark_blocks;
            let needed = if self.is_first(slot) { back.num_needed } else { all };
            return (needed, back.is_partial());
        }
        let (want, index) = self.known(slot);
        let mut hits = std::mem::take(&mut self.hits);
        self.find_hits(index, want, &mut hits);
        let start = self.manager.sequence(index).num_scheduled + hits.num_tokens();
        let num_new = self.chunk(start, want.target, budget);
        let needed = if self.is_first(slot) {
            self.manager.blocks_needed(index, num_new, &hits)
        } else {
            self.blocks_to_admit(index, want.target, &hits) + self.others_need(slot) + self.watermark_blocks
        };
        self.hits = hits;
        (needed, start + num_new < want.target)
    }

    /// Running sequences in the middle of a prefill.
    pub(super) fn num_partial_prefills(&self) -> u32 {
        self.partial_prefills().count() as u32
    }

    /// [`Self::num_partial_prefills`], of those that come behind.
    pub(super) fn num_partial_prefills_behind(&self, order: Order) -> u32 {
        self.partial_prefills().filter(|&slot| self.request(slot).order > order).count() as u32
    }

    fn partial_prefills(&self) -> impl Iterator<Item = u32> {
        let running = self.seats.seated().filter(|&(_, slot)| !self.request(slot).is_held);
        running.filter(|&(sequence, slot)| self.is_partial(sequence, slot)).map(|(_, slot)| slot)
    }

    /// Whether a running sequence has more to compute than the token that was sampled last.
    pub(super) fn is_partial(&self, sequence: usize, slot: u32) -> bool {
        let (sequence, request) = (self.manager.sequence(sequence), self.request(slot));
        let known = match request.stage {
            Stage::Prompt => request.prompt_len(),
            _ => request.prompt_len().max(sequence.tokens.len() - 1),
        };
        sequence.num_scheduled < known
    }

    /// Whether a waiting request comes before every running one: then a start must fit, nothing more.
    pub(super) fn is_first(&self, slot: u32) -> bool {
        self.running.first().is_none_or(|&first| self.request(first).order > self.request(slot).order)
    }

    /// How a waiting request goes on: its samples compute the prompt together unless some have blocks already.
    pub(super) fn first_stage(&self, slot: u32) -> Stage {
        let request = self.request(slot);
        if request.num_live == 1 {
            return Stage::Apart;
        }
        let leader = request.leader();
        let starts_together = |(number, sample): (usize, &Sample)| {
            let found = self.manager.sequences.get(sample.sequence as usize);
            let num_computed = found.map_or(0, |sequence| sequence.num_scheduled);
            sample.finish.is_some() || num_computed == 0 || number == leader && num_computed < request.prompt_len()
        };
        let together = !request.is_keeper || request.samples.iter().enumerate().all(starts_together);
        if together { Stage::Prompt } else { Stage::Apart }
    }

    /// Blocks that the other samples of a waiting request need for what they know, where each goes on by itself.
    pub(super) fn others_need(&mut self, slot: u32) -> u32 {
        let request = self.request(slot);
        if request.num_live == 1 || self.first_stage(slot) == Stage::Prompt {
            return 0;
        }
        let (leader, n) = (request.leader(), request.samples.len());
        let no_hits = ComputedBlocks::default();
        let mut needed = 0;
        for other in (0..n).filter(|&other| other != leader) {
            if self.request(slot).samples[other].finish.is_none() {
                let index = self.ensure_sequence(slot, other);
                needed += self.blocks_to_admit(index, self.manager.sequence(index).tokens.len(), &no_hits);
            }
        }
        needed
    }

    /// Takes a row for each sample, and lets those sit that have a sequence to sit with.
    pub(super) fn take_seats(&mut self, slot: u32, leader: usize, stage: Stage) {
        for sample in 0..self.request(slot).samples.len() {
            let request = self.request(slot);
            if request.samples[sample].finish.is_some() && !request.is_gang() {
                continue;
            }
            let is_live = request.samples[sample].finish.is_none();
            let row = self.seats.take_row();
            self.request_mut(slot).samples[sample].row = row;
            if sample == leader || stage == Stage::Apart && is_live {
                self.sit(slot, sample);
            }
        }
    }

    /// Lets a sample's sequence sit on the sample's row; the next plan announces the row.
    pub(super) fn sit(&mut self, slot: u32, sample: usize) {
        let found = &self.request(slot).samples[sample];
        let (sequence, row) = (found.sequence as usize, found.row);
        self.seats.sit(sequence, row, slot, sample as u32);
        let epoch = self.manager.sequence(sequence).epoch;
        self.announcements.new.push((sequence as u32, epoch));
    }
}
