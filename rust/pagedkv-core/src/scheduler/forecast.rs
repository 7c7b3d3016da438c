//! The next pass, walked through by counts alone, up to one request.

use super::Scheduler;
use super::explain::Reason;
use super::pass::{Head, Want};
use super::policy::Order;
use super::request::Stage;
use super::swap::Readmission;
use crate::ids::BlockId;
use crate::kv_cache_manager::ComputedBlocks;

/// What is left for those that come later in the pass.
#[derive(Debug)]
struct Forecast {
    budget: u32,
    available: u32,
    reserved: u32,
    claimed: u32,
    num_partial_prefills: u32,
    num_free_seats: u32,
    /// The first waiting request where it comes before some that run, and the blocks that are kept for it.
    head: Option<(Head, u32)>,
    claimed_behind: u32,
    /// The waiting request that was let in last.
    admitted: Option<u32>,
    /// A request that waits for room, or takes it from others: what comes behind it is not foreseen.
    in_the_way: Option<u32>,
    /// Blocks that were copied, once for each copy.
    copied: Vec<BlockId>,
    hits: ComputedBlocks,
}

impl Forecast {
    /// The first waiting request, if it is let in before a running one grows: asked for once.
    fn take_head_before(&mut self, order: Order) -> Option<(Order, u32)> {
        let (head, slot) = self.head.as_mut().filter(|(head, _)| order > head.order)?;
        std::mem::take(&mut head.may_start).then_some((head.order, *slot))
    }

    fn admit(&mut self, slot: u32) {
        self.admitted = Some(slot);
        self.head = self.head.filter(|&(_, head)| head != slot);
    }

    /// Blocks that running prefills which come before a waiting request still need.
    fn claimed_before(&self, slot: u32) -> u32 {
        let is_head = self.head.is_some_and(|(_, head)| head == slot);
        self.claimed + if is_head { 0 } else { self.claimed_behind }
    }
}

impl Scheduler {
    /// What becomes of a request that runs or waits, and is not held, in the next pass.
    pub(super) fn forecast(&mut self, slot: u32) -> Reason {
        let mut forecast = Forecast {
            budget: self.limits.max_num_batched_tokens,
            available: self.manager.pool().num_available(),
            reserved: 0,
            claimed: 0,
            num_partial_prefills: 0,
            num_free_seats: self.seats.num_free(),
            head: None,
            claimed_behind: 0,
            admitted: None,
            in_the_way: None,
            copied: Vec::new(),
            hits: ComputedBlocks::default(),
        };
        if let Some(head) = self.forecast_head(&mut forecast) {
            // It takes seats or blocks from those that run: they are not foreseen.
            return if head == slot {
                Reason::Ready { num_tokens: self.first_chunk(slot, &mut forecast) }
            } else {
                Reason::Behind { request: self.request(head).handle }
            };
        }
        for at in 0..self.running.len() {
            let other = self.running[at];
            if let Some((order, head)) = forecast.take_head_before(self.request(other).order) {
                let num_behind = self.num_partial_prefills_behind(order);
                forecast.num_partial_prefills += num_behind;
                let reason = self.forecast_waiting(head, &mut forecast);
                forecast.num_partial_prefills -= num_behind;
                if head == slot && matches!(reason, Reason::Ready { .. }) {
                    return reason;
                }
            }
            if self.request(other).is_held {
                continue;
            }
            let reason = self.forecast_running(other, &mut forecast);
            if other == slot {
                return reason;
            }
        }
        let is_out = |other: &u32| forecast.admitted != Some(*other);
        let waiting: Vec<u32> = self.waiting.values().copied().filter(is_out).collect();
        for other in waiting {
            let reason = match forecast.in_the_way {
                Some(first) => Reason::Behind { request: self.request(first).handle },
                None => self.forecast_waiting(other, &mut forecast),
            };
            if other == slot {
                return reason;
            }
            if !matches!(reason, Reason::Ready { .. }) && forecast.in_the_way.is_none() {
                forecast.in_the_way = Some(other);
            }
        }
        unreachable!("a request that is not held runs or waits")
    }

    /// Finds the blocks that are kept for the first waiting request. Answers it where it must take something first.
    fn forecast_head(&mut self, forecast: &mut Forecast) -> Option<u32> {
        let (&order, &slot) = self.waiting.first_key_value()?;
        if self.gives_way(order).is_none() || self.is_under_way(slot) {
            return None;
        }
        let (needed, is_partial) = self.admission_needs(slot, forecast.budget);
        let pool = self.manager.pool();
        let may_start = !is_partial || self.num_partial_prefills() < self.limits.max_num_partial_prefills;
        let has_seats = self.request(slot).num_seats() <= self.seats.num_coming();
        let has_room = needed <= pool.num_available() + pool.num_fenced();
        let starts =
            may_start && self.request(slot).num_seats() <= forecast.num_free_seats && needed <= forecast.available;
        forecast.head = Some((Head { order, num_blocks: needed, may_start: starts }, slot));
        (!(may_start && has_seats && has_room)).then_some(slot)
    }

    fn first_chunk(&mut self, slot: u32, forecast: &mut Forecast) -> u32 {
        let (want, index) = self.known(slot);
        self.find_hits(index, want, &mut forecast.hits);
        let start = self.manager.sequence(index).num_scheduled + forecast.hits.num_tokens();
        self.chunk(start, want.target, forecast.budget)
    }

    fn forecast_running(&mut self, slot: u32, forecast: &mut Forecast) -> Reason {
        if let Some(first) = forecast.in_the_way.filter(|_| forecast.reserved == 0) {
            return Reason::Behind { request: self.request(first).handle };
        }
        let request = self.request(slot);
        if let Some(transfer) = request.transfer {
            let claimed = self.num_columns_for_later(slot);
            *self.forecast_claims(slot, forecast) += claimed;
            return Reason::Transfer { transfer };
        }
        if request.needs_commit && request.num_in_flight > 0 {
            return Reason::InFlight { plan: request.last_plan };
        }
        let samples: Vec<usize> = match request.stage {
            Stage::Prompt => vec![request.leader()],
            _ => (0..request.samples.len()).filter(|&sample| request.samples[sample].finish.is_none()).collect(),
        };
        let together = request.is_gang() && request.stage == Stage::Apart && !self.waits_for_others(request);
        if together && request.num_live > forecast.budget {
            self.forecast_claim(slot, forecast);
            return Reason::TokenBudget { budget: self.limits.max_num_batched_tokens, left: forecast.budget };
        }
        let before = (forecast.budget, forecast.available);
        let (reserved, num_copied) = (forecast.reserved, forecast.copied.len());
        let claimed = (forecast.claimed, forecast.claimed_behind);
        let (mut num_tokens, mut reason) = (0, None);
        for sample in samples {
            match self.forecast_growth(slot, sample, forecast) {
                Ok(num_new) => num_tokens += num_new,
                Err(_) if reason.is_some() => {}
                Err(found) => reason = Some(found),
            }
            if together && reason.is_some() {
                break;
            }
        }
        match reason {
            Some(reason) if num_tokens == 0 || together => {
                if forecast.reserved > reserved {
                    // It needs again what it had got.
                    forecast.reserved += before.1 - forecast.available;
                }
                (forecast.budget, forecast.available) = before;
                forecast.copied.truncate(num_copied);
                if together {
                    (forecast.claimed, forecast.claimed_behind) = claimed;
                    self.forecast_claim(slot, forecast);
                }
                reason
            }
            _ => Reason::Ready { num_tokens },
        }
    }

    /// Counts the blocks that a gang which does not run needs for what it knows.
    fn forecast_claim(&self, slot: u32, forecast: &mut Forecast) {
        let request = self.request(slot);
        let live = request.samples.iter().filter(|sample| sample.finish.is_none());
        let to_come = live.map(|sample| {
            let index = sample.sequence as usize;
            self.blocks_to_come(index, self.manager.sequence(index).tokens.len())
        });
        *self.forecast_claims(slot, forecast) += to_come.sum::<u32>();
    }

    /// Where to count what a running request still needs.
    fn forecast_claims<'a>(&self, slot: u32, forecast: &'a mut Forecast) -> &'a mut u32 {
        let is_behind = forecast.head.is_some_and(|(head, _)| self.request(slot).order > head.order);
        if is_behind { &mut forecast.claimed_behind } else { &mut forecast.claimed }
    }

    fn forecast_growth(&self, slot: u32, sample: usize, forecast: &mut Forecast) -> Result<u32, Reason> {
        let request = self.request(slot);
        let index = request.samples[sample].sequence as usize;
        let sequence = self.manager.sequence(index);
        let len = sequence.tokens.len();
        let is_apart = request.is_gang() && request.stage == Stage::Apart;
        let previous = self.plans.back().map(|record| record.id);
        let Some(want) = self.want(slot, sample, previous, is_apart && self.waits_for_others(request)) else {
            // A gang counts what all its samples know.
            let claimed = if is_apart { self.blocks_to_come(index, len) } else { 0 };
            *self.forecast_claims(slot, forecast) += claimed;
            return Err(Reason::InFlight { plan: request.last_plan });
        };
        let known =
            if request.stage == Stage::Prompt { request.prompt_len() } else { request.prompt_len().max(len - 1) };
        let target = if is_apart { len } else { want.target };
        let grown = self.forecast_room(slot, sample, want, forecast);
        let (end, claimed) = match grown {
            Ok((end, _)) => (end, self.blocks_behind(index, &forecast.hits, end, target)),
            Err(_) => (sequence.num_scheduled, self.blocks_to_come(index, target)),
        };
        forecast.num_partial_prefills += u32::from(end < known);
        *self.forecast_claims(slot, forecast) += claimed;
        grown.map(|(_, num_new)| num_new)
    }

    /// Where a sequence stands after the pass, and the tokens that it computes.
    fn forecast_room(
        &self,
        slot: u32,
        sample: usize,
        want: Want,
        forecast: &mut Forecast,
    ) -> Result<(u32, u32), Reason> {
        let request = self.request(slot);
        let head = forecast.head.filter(|(head, _)| request.order > head.order);
        let (num_blocks, budget) = (head.map_or(0, |(head, _)| head.num_blocks), forecast.budget);
        let index = request.samples[sample].sequence as usize;
        self.find_hits(index, want, &mut forecast.hits);
        let mut start = self.manager.sequence(index).num_scheduled + forecast.hits.num_tokens();
        let mut num_new = self.chunk(start, want.target, budget);
        if num_new == 0 {
            return Err(Reason::TokenBudget { budget: self.limits.max_num_batched_tokens, left: budget });
        }
        let free = forecast.available.saturating_sub(forecast.reserved);
        let room = free.saturating_sub(num_blocks);
        let with_hits = self.manager.blocks_needed(index, num_new, &forecast.hits);
        if with_hits > room && self.needs_less_anew(index, want, budget, with_hits, &forecast.hits) {
            forecast.hits.clear();
            start = self.manager.sequence(index).num_scheduled;
            num_new = self.chunk(start, want.target, budget);
        }
        let (copies, spared) = self.copies_of_tails(index, forecast);
        let needs = |num_tokens| self.manager.blocks_needed(index, num_tokens, &forecast.hits) - spared;
        let needed = needs(num_new);
        if needed > room && needed > 0 {
            if let Some((_, first)) = head.filter(|_| needed <= free) {
                return Err(Reason::Reserved { request: self.request(first).handle, num_blocks });
            }
            let fenced = self.manager.pool().num_fenced();
            let finds_none = forecast.reserved == 0 && needed + num_blocks > forecast.available + fenced;
            if finds_none && self.last_behind(request.order).or_else(|| self.last_held(slot)).is_some() {
                forecast.in_the_way = Some(slot);
                return Ok((start + num_new, num_new));
            }
            if forecast.reserved == 0 && num_blocks == 0 {
                forecast.reserved = needed;
                forecast.in_the_way.get_or_insert(slot);
            }
            return Err(self.no_blocks(needed, room));
        }
        let num_drafts = want.num_drafts.min(budget - num_new);
        let with_drafts = needs(num_new + num_drafts);
        let (num_drafts, needed) =
            if num_drafts > 0 && with_drafts <= room { (num_drafts, with_drafts) } else { (0, needed) };
        forecast.budget -= num_new + num_drafts;
        forecast.available -= needed;
        forecast.copied.extend(copies);
        Ok((start + num_new + num_drafts, num_new + num_drafts))
    }

    fn forecast_waiting(&mut self, slot: u32, forecast: &mut Forecast) -> Reason {
        let budget = self.limits.max_num_batched_tokens;
        let request = self.request(slot);
        if let Some(transfer) = request.transfer {
            return Reason::Transfer { transfer };
        }
        if request.num_in_flight > 0 {
            return Reason::InFlight { plan: request.last_plan };
        }
        let needed = request.num_seats();
        if forecast.budget > 0 && needed > forecast.num_free_seats {
            return Reason::Seats { needed, free: forecast.num_free_seats, fenced: self.seats.num_fenced() };
        }
        let num_seats = needed;
        if let Some(back) = self.find_way_back(slot) {
            return self.forecast_return(slot, &back, forecast);
        }
        let num_new = self.first_chunk(slot, forecast);
        if forecast.budget == 0 || num_new == 0 {
            return Reason::TokenBudget { budget, left: forecast.budget };
        }
        let (want, index) = self.known(slot);
        let start = self.manager.sequence(index).num_scheduled + forecast.hits.num_tokens();
        let is_partial = start + num_new < want.target;
        if is_partial && forecast.num_partial_prefills >= self.limits.max_num_partial_prefills {
            return Reason::PartialPrefills { limit: self.limits.max_num_partial_prefills };
        }
        let others = self.others_need(slot);
        let (copies, spared) = self.copies_of_tails(index, forecast);
        let takes = self.manager.blocks_needed(index, num_new, &forecast.hits) - spared;
        let needed = if self.is_first(slot) && forecast.admitted.is_none() {
            takes
        } else {
            let all = self.blocks_to_admit(index, want.target, &forecast.hits) - spared;
            all + others + forecast.claimed_before(slot) + self.watermark_blocks
        };
        if needed > forecast.available {
            if self.forecast_giver(slot, needed, forecast).is_some() {
                forecast.in_the_way = Some(slot);
                return Reason::Ready { num_tokens: num_new };
            }
            return self.no_blocks(needed, forecast.available);
        }
        forecast.admit(slot);
        forecast.copied.extend(copies);
        forecast.budget -= num_new;
        forecast.available -= takes;
        forecast.num_free_seats -= num_seats;
        forecast.claimed += others + self.blocks_behind(index, &forecast.hits, start + num_new, want.target);
        forecast.num_partial_prefills += u32::from(is_partial);
        Reason::Ready { num_tokens: num_new }
    }

    /// A request that comes back from the host tier; it computes nothing yet where blocks have to be copied.
    fn forecast_return(&mut self, slot: u32, back: &Readmission, forecast: &mut Forecast) -> Reason {
        let budget = self.limits.max_num_batched_tokens;
        if forecast.budget == 0 {
            return Reason::TokenBudget { budget, left: 0 };
        }
        if back.is_partial() && forecast.num_partial_prefills >= self.limits.max_num_partial_prefills {
            return Reason::PartialPrefills { limit: self.limits.max_num_partial_prefills };
        }
        let needed = if self.is_first(slot) && forecast.admitted.is_none() {
            back.num_needed
        } else {
            back.num_needed_for_all + forecast.claimed_before(slot) + self.watermark_blocks
        };
        if needed > forecast.available {
            if self.forecast_giver(slot, needed, forecast).is_some() {
                forecast.in_the_way = Some(slot);
                return Reason::Ready { num_tokens: 0 };
            }
            return self.no_blocks(needed, forecast.available);
        }
        forecast.admit(slot);
        forecast.available -= back.num_needed;
        forecast.num_free_seats -= self.request(slot).num_seats();
        forecast.claimed += back.num_needed_for_all - back.num_needed;
        forecast.num_partial_prefills += u32::from(back.is_partial());
        let num_tokens = if back.waits() { 0 } else { back.num_missing().min(forecast.budget) };
        forecast.budget -= num_tokens;
        Reason::Ready { num_tokens }
    }

    /// Whoever gives blocks to a waiting request that needs so many.
    fn forecast_giver(&self, slot: u32, needed: u32, forecast: &Forecast) -> Option<u32> {
        if needed <= forecast.available + self.manager.pool().num_fenced() {
            return None;
        }
        let keeper = self.last_keeper_behind(self.request(slot).order);
        keeper.or_else(|| self.gives_blocks(slot).filter(|_| forecast.admitted.is_none()))
    }

    /// The blocks that a sequence must copy before it writes, and how many copies it is spared because others copied first.
    fn copies_of_tails(&self, index: usize, forecast: &Forecast) -> (Vec<BlockId>, u32) {
        let released = |block| forecast.copied.iter().filter(|&&copied| copied == block).count() as u32;
        let (mut copies, mut spared) = (Vec::new(), 0);
        for group in 0..self.manager.groups.len() {
            let copy = self.manager.tail_to_copy_after(index, group, released);
            spared += u32::from(copy.is_none() && self.manager.tail_to_copy(index, group).is_some());
            copies.extend(copy);
        }
        (copies, spared)
    }

    fn no_blocks(&self, needed: u32, available: u32) -> Reason {
        let fenced = self.manager.pool().num_fenced();
        Reason::Blocks { needed, available, fenced, in_sessions: self.manager.num_blocks_of_sessions() }
    }
}
