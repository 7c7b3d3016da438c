//! Taking blocks and seats back: preemption, and the end of a sample or a request.

use std::collections::BTreeMap;

use super::Scheduler;
use super::in_flight::Departure;
use super::pass::{Head, Pass};
use super::policy::Order;
use super::request::{FinishReason, NONE, Sample, Stage};
use crate::ids::PlanId;
use crate::step_plan::Change;

impl Scheduler {
    /// Takes blocks from guesses, then from those that come last in the order, until `needed` are available to a running
    /// request, or will be when plans in flight and transfers end. Answers whether to try again; if not, the blocks are
    /// reserved for the request that needs them.
    pub(super) fn make_room(&mut self, slot: u32, needed: u32, pass: &mut Pass) -> bool {
        if pass.reserved > 0 {
            return false;
        }
        let own = needed;
        let order = self.request(slot).order;
        loop {
            let for_head = self.reserved_for_head(pass, slot);
            let needed = own + for_head;
            let pool = self.manager.pool();
            if needed <= pool.num_available() {
                return true;
            }
            if self.revoke_drafts(pass) {
                continue;
            }
            let pool = self.manager.pool();
            let will_have_room = needed <= pool.num_available() + pool.num_fenced();
            let victim = if pass.is_admitting {
                self.gives_blocks(slot)
            } else {
                self.last_behind(order).or_else(|| self.last_held(slot))
            };
            let Some(victim) = victim.filter(|_| !will_have_room) else {
                if pass.is_admitting {
                    return false;
                }
                // Whoever waits behind a request that is still to be admitted must not keep it out.
                pass.reserved += if for_head > 0 { 0 } else { needed };
                return false;
            };
            self.preempt(victim);
            self.renew_head(pass);
            // What the two shared is its own now, and need not be copied.
            return true;
        }
    }

    /// Blocks that a preemption takes may be such as the first waiting request would have shared with others.
    fn renew_head(&mut self, pass: &mut Pass) {
        let first = self.waiting.first_key_value().map(|(&order, &slot)| (order, slot));
        if let (Some(head), Some((order, slot))) = (pass.head, first)
            && head.order == order
        {
            let (num_blocks, _) = self.admission_needs(slot, self.limits.max_num_batched_tokens);
            pass.head = Some(Head { num_blocks, ..head });
        }
    }

    /// Preempts running requests that come after the first waiting one until it may start a prefill, and has seats and
    /// room, or will have when plans in flight end. What it needs is kept from running requests behind it. Where nobody
    /// but held requests runs, those give way as well.
    pub(super) fn make_way(&mut self, pass: &mut Pass) {
        let Some((&order, &slot)) = self.waiting.first_key_value() else { return };
        if self.gives_way(order).is_none() || self.is_under_way(slot) {
            return;
        }
        let num_seats = self.request(slot).num_seats();
        loop {
            let (needed, is_partial) = self.admission_needs(slot, pass.budget);
            let pool = self.manager.pool();
            let may_start = !is_partial || self.num_partial_prefills() < self.limits.max_num_partial_prefills;
            let will_have_seats = num_seats <= self.seats.num_coming();
            let will_have_room = needed <= pool.num_available() + pool.num_fenced();
            let victim = match (may_start && will_have_seats, will_have_room) {
                (true, true) => None,
                (true, false) => {
                    self.last_keeper_behind(order).or_else(|| self.gives_way(order)).or_else(|| self.gives_blocks(slot))
                }
                (false, _) => self.gives_way(order),
            };
            let Some(victim) = victim else {
                let may_start =
                    may_start && num_seats <= self.seats.num_free() && needed <= self.manager.pool().num_available();
                pass.head = Some(Head { order, num_blocks: needed, may_start });
                return;
            };
            self.preempt(victim);
        }
    }

    /// The running request that gives way first to a waiting one.
    pub(super) fn gives_way(&self, order: Order) -> Option<u32> {
        let &last = self.running.last()?;
        if self.request(last).order > order {
            return Some(last);
        }
        Some(last).filter(|_| self.running.iter().all(|&slot| self.request(slot).is_held))
    }

    /// Whoever comes last in the order and behind `order` of those that have blocks.
    pub(super) fn last_behind(&self, order: Order) -> Option<u32> {
        let running = self.running.last().copied().filter(|&last| self.request(last).order > order);
        let keeper = self.last_keeper_behind(order);
        [running, keeper].into_iter().flatten().max_by_key(|&slot| self.request(slot).order)
    }

    /// The last held request that has blocks, another one than `slot`.
    pub(super) fn last_held(&self, slot: u32) -> Option<u32> {
        let running = self.running.iter().rev().copied().find(|&other| other != slot && self.request(other).is_held);
        let keeper = self.held.values().rev().copied().find(|&other| self.request(other).is_keeper);
        [running, keeper].into_iter().flatten().max_by_key(|&slot| self.request(slot).order)
    }

    /// Whoever gives blocks to the first waiting request, or to one that is just let in: those behind it that wait with
    /// some, and held ones where nobody else runs.
    pub(super) fn gives_blocks(&self, slot: u32) -> Option<u32> {
        let runs = || self.running.iter().any(|&other| other != slot && !self.request(other).is_held);
        let keeper = self.last_keeper_behind(self.request(slot).order);
        keeper.or_else(|| if runs() { None } else { self.last_held(slot) })
    }

    /// Whoever gives blocks to a waiting request that needs so many, unless it will have them when plans in flight and
    /// transfers end.
    pub(super) fn gives_room(&self, slot: u32, needed: u32) -> Option<u32> {
        let pool = self.manager.pool();
        let will_have_room = needed <= pool.num_available() + pool.num_fenced();
        self.gives_blocks(slot).filter(|_| !will_have_room)
    }

    /// The last of the waiting requests behind `order` that have blocks from before.
    pub(super) fn last_keeper_behind(&self, order: Order) -> Option<u32> {
        if self.num_keepers == 0 {
            return None;
        }
        let behind = (std::ops::Bound::Excluded(order), std::ops::Bound::Unbounded);
        let last = |queue: &BTreeMap<Order, u32>| {
            queue.range(behind).rev().map(|(_, &slot)| slot).find(|&slot| self.request(slot).is_keeper)
        };
        let keepers = [last(&self.waiting), last(&self.held)];
        keepers.into_iter().flatten().max_by_key(|&slot| self.request(slot).order)
    }

    /// Blocks that a running request must leave to a waiting one that comes before it.
    pub(super) fn reserved_for_head(&self, pass: &Pass, slot: u32) -> u32 {
        self.head_before(pass, slot).map_or(0, |head| head.num_blocks)
    }

    /// Where to count what a running request still needs.
    pub(super) fn claims<'a>(&self, pass: &'a mut Pass, slot: u32) -> &'a mut u32 {
        if self.head_before(pass, slot).is_some() { &mut pass.claimed_behind } else { &mut pass.claimed }
    }

    /// The first waiting request, if it comes before a running one.
    pub(super) fn head_before(&self, pass: &Pass, slot: u32) -> Option<Head> {
        pass.head.filter(|head| self.request(slot).order > head.order)
    }

    /// Takes every block and seat from a running request and puts it back into the queue, or the blocks from a waiting
    /// one that had them from before. Samples that a session keeps stay as they are.
    pub(super) fn preempt(&mut self, slot: u32) {
        let is_running = self.request(slot).stage != Stage::Waiting;
        if is_running {
            self.swap_out(slot);
        }
        for sample in 0..self.request(slot).samples.len() {
            if let Some(departure) = self.depart(slot, sample) {
                self.announcements.preempted.push(departure);
            }
            let Sample { sequence, is_kept, .. } = self.request(slot).samples[sample];
            if sequence != NONE && !is_kept {
                self.manager.release_all(sequence as usize);
            }
        }
        self.num_preemptions += 1;
        let request = self.request_mut(slot);
        request.samples.iter_mut().for_each(|sample| sample.drafts.clear());
        request.stage = Stage::Waiting;
        request.num_preemptions += 1;
        let request = &mut self.requests[slot];
        self.recorder.preempted(request);
        self.set_keeper(slot, false);
        if is_running {
            self.leave_running(slot);
            self.queue(slot);
        }
    }

    pub(super) fn leave_running(&mut self, slot: u32) {
        if self.running.last() == Some(&slot) {
            self.running.pop();
        } else {
            self.running.retain(|&other| other != slot);
        }
    }

    /// Takes the seat of a sample. Answers what to announce if a plan had announced the seat.
    pub(super) fn depart(&mut self, slot: u32, sample: usize) -> Option<Departure> {
        let fence = self.fence_of(self.request(slot).last_plan);
        let request = self.request_mut(slot);
        let (handle, sequence) = (request.handle, request.samples[sample].sequence as usize);
        let row = std::mem::replace(&mut request.samples[sample].row, NONE);
        if row == NONE {
            return None;
        }
        let request_id = request.id.to_string();
        self.seats.release_row(row, fence);
        let change = Change { row, request_id, sample: sample as u32 };
        self.leave_seat(sequence).then_some(Departure { handle, sample: sample as u32, change })
    }

    /// Answers whether a plan had announced the seat.
    pub(super) fn leave_seat(&mut self, sequence: usize) -> bool {
        let was_announced = self.seats.seat(sequence).is_announced;
        self.seats.leave(sequence);
        was_announced
    }

    /// A sample that ended leaves its sequence; its row stays with the request where that is a gang that goes on.
    fn depart_for_good(&mut self, slot: u32, sample: usize) {
        let request = self.request(slot);
        let departure = if request.is_gang() && request.num_live > 0 {
            let ended = &request.samples[sample];
            let change = Change { row: ended.row, request_id: request.id.to_string(), sample: sample as u32 };
            let departure = Departure { handle: request.handle, sample: sample as u32, change };
            let sequence = ended.sequence as usize;
            self.leave_seat(sequence).then_some(departure)
        } else {
            self.depart(slot, sample)
        };
        self.announcements.finished.extend(departure);
    }

    /// Ends a sample, and its request with the last one. One that has ended is left alone.
    pub(super) fn finish_sample(&mut self, slot: u32, sample: usize, reason: FinishReason) {
        let request = self.request_mut(slot);
        if request.samples[sample].finish.is_some() {
            return;
        }
        let leads_others = request.stage == Stage::Prompt && request.leader() == sample && request.num_live > 1;
        request.samples[sample].finish = Some(reason);
        request.forget_swapped_sample(sample);
        request.num_live -= 1;
        let request = &self.requests[slot];
        self.recorder.sample_finished(request, reason);
        if leads_others {
            self.hand_over(slot, sample);
        }
        self.depart_for_good(slot, sample);
        let request = self.request_mut(slot);
        let is_over = request.num_live == 0;
        let is_kept = request.is_session && matches!(reason, FinishReason::Stop | FinishReason::Length);
        request.samples[sample].is_kept = is_kept;
        let sequence = std::mem::replace(&mut request.samples[sample].sequence, NONE);
        if sequence != NONE && is_kept {
            let kept = self.manager.keep_for_a_session(sequence as usize);
            self.request_mut(slot).samples[sample].sequence = kept as u32;
        } else if sequence != NONE {
            self.manager.remove(sequence as usize);
        }
        if self.request(slot).is_keeper {
            self.note_keeper(slot);
        }
        if is_over {
            // What a gang kept for samples that ended before.
            (0..self.request(slot).samples.len()).for_each(|other| drop(self.depart(slot, other)));
            self.request_is_over(slot);
        }
    }

    /// The sample that computes the prompt ends before the fork: the next one takes over its sequence and its seat. No
    /// more than the prompt is computed, so an heir with outputs of its own only brings its tokens along.
    fn hand_over(&mut self, slot: u32, from: usize) {
        let request = &mut self.requests[slot];
        let to = request.leader();
        let (sequence, heirs) = (request.samples[from].sequence, request.samples[to].sequence);
        if heirs != NONE {
            self.manager.swap_tokens(sequence as usize, heirs as usize);
        }
        let (row, heirs_row) = (request.samples[from].row, request.samples[to].row);
        (request.samples[to].sequence, request.samples[to].row) = (sequence, row);
        (request.samples[from].sequence, request.samples[from].row) = (heirs, heirs_row);
        let (handle, id) = (request.handle, request.id.clone());
        if self.seats.seat(sequence as usize).is_announced {
            let change = Change { row, request_id: id.to_string(), sample: from as u32 };
            self.announcements.finished.push(Departure { handle, sample: from as u32, change });
        }
        self.sit(slot, to);
    }

    /// No sample of the request runs or waits any more: it rests if a session keeps some, else it is gone.
    fn request_is_over(&mut self, slot: u32) {
        let request = &self.requests[slot];
        self.recorder.finished(request);
        self.leave_queues(slot);
        self.close_turn(slot);
        self.forget_swapped(slot);
        if self.request(slot).samples.iter().any(|sample| sample.is_kept) {
            self.rest(slot);
        } else {
            self.remove_request(slot);
        }
    }

    /// A request with no sample left, which is in no queue.
    pub(super) fn remove_request(&mut self, slot: u32) {
        let request = self.requests.remove(slot);
        self.by_handle.remove(&request.handle);
        self.inbox.forget(request.handle);
    }

    /// `plan`, if it or an older one is in flight: what it names must wait.
    pub(super) fn fence_of(&self, plan: PlanId) -> Option<PlanId> {
        self.plans.front().filter(|oldest| oldest.id <= plan).map(|_| plan)
    }
}
