//! The next pass, walked through by counts alone, up to one request.

use super::Scheduler;
use super::explain::Reason;
use super::policy::Order;
use super::request::Stage;
use super::swap::Readmission;
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
    head: Option<(Order, u32, u32)>,
    /// Whether a waiting request was let in.
    has_admitted: bool,
    /// A request that waits for room, or takes it from others: what comes behind it is not foreseen.
    in_the_way: Option<u32>,
    hits: ComputedBlocks,
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
            has_admitted: false,
            in_the_way: None,
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
            if self.request(other).is_held {
                continue;
            }
            let reason = self.forecast_running(other, &mut forecast);
            if other == slot {
                return reason;
            }
        }
        let waiting: Vec<u32> = self.waiting.values().copied().collect();
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
        forecast.head = Some((order, needed, slot));
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
            return Reason::Transfer { transfer };
        }
        if request.needs_commit && request.num_in_flight > 0 {
            return Reason::InFlight { plan: request.last_plan };
        }
        let samples: Vec<usize> = match request.stage {
            Stage::Prompt => vec![request.leader()],
            _ => (0..request.samples.len()).filter(|&sample| request.samples[sample].finish.is_none()).collect(),
        };
        let together = request.is_gang() && !self.waits_for_others(request);
        if together && request.num_live > forecast.budget {
            return Reason::TokenBudget { budget: self.limits.max_num_batched_tokens, left: forecast.budget };
        }
        let (mut num_tokens, mut reason) = (0, None);
        for sample in samples {
            match self.forecast_growth(slot, sample, forecast) {
                Ok(num_new) => num_tokens += num_new,
                Err(_) if reason.is_some() => {}
                Err(found) => reason = Some(found),
            }
        }
        match reason {
            Some(reason) if num_tokens == 0 || together => reason,
            _ => Reason::Ready { num_tokens },
        }
    }

    fn forecast_growth(&self, slot: u32, sample: usize, forecast: &mut Forecast) -> Result<u32, Reason> {
        let request = self.request(slot);
        let in_flight = Reason::InFlight { plan: request.last_plan };
        let is_lagging = self.waits_for_others(self.request(slot));
        let previous = self.plans.back().map(|record| record.id);
        let want = self.want(slot, sample, previous, is_lagging).ok_or(in_flight)?;
        let no_tokens = Reason::TokenBudget { budget: self.limits.max_num_batched_tokens, left: forecast.budget };
        if forecast.budget == 0 {
            return Err(no_tokens);
        }
        let index = request.samples[sample].sequence as usize;
        self.find_hits(index, want, &mut forecast.hits);
        let mut start = self.manager.sequence(index).num_scheduled + forecast.hits.num_tokens();
        let mut num_new = self.chunk(start, want.target, forecast.budget);
        if num_new == 0 {
            return Err(no_tokens);
        }
        let head = forecast.head.filter(|&(order, ..)| request.order > order);
        let for_head = head.map_or(0, |(_, num_blocks, _)| num_blocks);
        let room = forecast.available.saturating_sub(forecast.reserved + for_head);
        let with_hits = self.manager.blocks_needed(index, num_new, &forecast.hits);
        if with_hits > room && self.needs_less_anew(index, want, forecast.budget, with_hits, &forecast.hits) {
            forecast.hits.clear();
            start = self.manager.sequence(index).num_scheduled;
            num_new = self.chunk(start, want.target, forecast.budget);
        }
        let needs = |num_tokens| self.manager.blocks_needed(index, num_tokens, &forecast.hits);
        let needed = needs(num_new);
        if needed > room && needed > 0 {
            if let Some((_, num_blocks, first)) =
                head.filter(|_| needed <= forecast.available.saturating_sub(forecast.reserved))
            {
                forecast.claimed += self.blocks_behind(index, &forecast.hits, start, want.target);
                return Err(Reason::Reserved { request: self.request(first).handle, num_blocks });
            }
            let fenced = self.manager.pool().num_fenced();
            if forecast.reserved == 0 && needed + for_head > forecast.available + fenced && self.can_take(slot) {
                forecast.in_the_way = Some(slot);
                return Ok(num_new);
            }
            if forecast.reserved == 0 && for_head == 0 {
                forecast.reserved = needed;
                forecast.in_the_way.get_or_insert(slot);
            }
            return Err(self.no_blocks(needed, room));
        }
        let num_drafts = want.num_drafts.min(forecast.budget - num_new);
        let with_drafts = needs(num_new + num_drafts);
        let (num_drafts, needed) =
            if num_drafts > 0 && with_drafts <= room { (num_drafts, with_drafts) } else { (0, needed) };
        forecast.budget -= num_new + num_drafts;
        forecast.available -= needed;
        let reached = start + num_new + num_drafts;
        forecast.claimed += self.blocks_behind(index, &forecast.hits, reached, want.target);
        let known = if request.stage == Stage::Prompt { request.prompt_len() } else { want.known };
        forecast.num_partial_prefills += u32::from(start + num_new < known);
        Ok(num_new + num_drafts)
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
        let takes = self.manager.blocks_needed(index, num_new, &forecast.hits);
        let needed = if self.is_first(slot) && !forecast.has_admitted {
            takes
        } else {
            let all = self.blocks_to_admit(index, want.target, &forecast.hits);
            all + others + forecast.claimed + self.watermark_blocks
        };
        if needed > forecast.available {
            if self.last_keeper_behind(self.request(slot).order).is_some() {
                forecast.in_the_way = Some(slot);
                return Reason::Ready { num_tokens: num_new };
            }
            return self.no_blocks(needed, forecast.available);
        }
        forecast.has_admitted = true;
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
        let needed = if self.is_first(slot) && !forecast.has_admitted {
            back.num_needed
        } else {
            back.num_needed_for_all + forecast.claimed + self.watermark_blocks
        };
        if needed > forecast.available {
            if self.last_keeper_behind(self.request(slot).order).is_some() {
                forecast.in_the_way = Some(slot);
                return Reason::Ready { num_tokens: 0 };
            }
            return self.no_blocks(needed, forecast.available);
        }
        forecast.has_admitted = true;
        forecast.available -= back.num_needed;
        forecast.num_free_seats -= self.request(slot).num_seats();
        forecast.claimed += back.num_needed_for_all - back.num_needed;
        forecast.num_partial_prefills += u32::from(back.is_partial());
        let num_tokens = if back.waits() { 0 } else { back.num_missing().min(forecast.budget) };
        forecast.budget -= num_tokens;
        Reason::Ready { num_tokens }
    }

    /// Whether somebody has blocks that a running request may take.
    fn can_take(&self, slot: u32) -> bool {
        self.last_behind(self.request(slot).order).or_else(|| self.last_held(slot)).is_some()
    }

    fn no_blocks(&self, needed: u32, available: u32) -> Reason {
        let fenced = self.manager.pool().num_fenced();
        Reason::Blocks { needed, available, fenced, in_sessions: self.manager.num_blocks_of_sessions() }
    }
}
