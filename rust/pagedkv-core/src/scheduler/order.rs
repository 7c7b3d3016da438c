//! Keeping requests in order: arrival, ageing, and keys that change while a request waits.

use super::Scheduler;
use super::policy::{Order, RequestView};
use super::request::Request;
use crate::config::Policy;
use crate::ids::Handle;

impl Scheduler {
    /// Gives a request that comes in its key, its place, and the time when it is due.
    pub(super) fn arrive(&mut self, request: &mut Request, num_tokens: u32) {
        request.key = self.policy.arrival_key(&request.view(num_tokens, 0));
        request.turn = self.num_arrivals;
        self.num_arrivals += 1;
        request.order = Order::new(request.key, false, request.turn);
        // Under first come, first served nobody is overtaken.
        if let Some(ageing) = self.limits.ageing.filter(|_| self.limits.policy != Policy::Fcfs) {
            request.due_at = self.num_admissions + self.waiting.len() as u64 + u64::from(ageing);
        }
    }

    /// Puts requests that are due before all others, and asks the policy again where its keys change.
    pub(super) fn refresh_order(&mut self) {
        let num_running_due = self.make_due();
        if num_running_due > 0 {
            let mut running = std::mem::take(&mut self.running);
            running.sort_by_key(|&slot| self.request(slot).order);
            self.running = running;
        }
        if self.policy.is_dynamic() {
            self.ask_again();
        }
    }

    /// Answers how many running requests became due.
    fn make_due(&mut self) -> usize {
        let mut num_running = 0;
        while let Some((&(due_at, _), &slot)) = self.ageing.first_key_value() {
            if due_at > self.num_admissions {
                break;
            }
            self.ageing.pop_first();
            let is_waiting = self.leave_queue(slot);
            let request = self.request_mut(slot);
            request.due_at = u64::MAX;
            request.order = Order::new(0.0, true, request.turn);
            if is_waiting {
                self.queue(slot);
            } else {
                num_running += 1;
            }
        }
        num_running
    }

    fn ask_again(&mut self) {
        let slots: Vec<u32> = self.waiting.values().copied().collect();
        let mut has_changed = false;
        for &slot in &slots {
            let num_hit_tokens = if self.policy.wants_hits() { self.num_hit_tokens(slot) } else { 0 };
            let request = &mut self.requests[slot];
            let view = request.view(request.prompt_len(), num_hit_tokens);
            let key = self.policy.waiting_key(&view, request.key);
            if key.to_bits() != request.key.to_bits() && !request.order.is_due() {
                request.key = key;
                request.order = Order::new(key, false, request.turn);
                has_changed = true;
            }
        }
        if has_changed {
            self.waiting = slots.into_iter().map(|slot| (self.request(slot).order, slot)).collect();
        }
    }

    /// Shows every waiting request, in the present order, with the tokens that are known of it.
    ///
    /// # Complexity
    /// O(waiting requests).
    pub fn for_each_waiting(&mut self, mut show: impl FnMut(&RequestView<'_>)) {
        self.drain_inbox();
        for &slot in self.waiting.values() {
            let request = self.request(slot);
            show(&request.view(self.num_known_tokens(request), 0));
        }
    }

    /// Tokens that are known of the sample that leads a live request.
    pub(super) fn num_known_tokens(&self, request: &Request) -> u32 {
        let sequence = request.samples[request.leader()].sequence;
        self.manager.sequences.get(sequence as usize).map_or(request.prompt_len(), |found| found.tokens.len())
    }

    /// Keys from outside for waiting requests; handles that do not wait, or are due, are passed over.
    pub(super) fn set_keys(&mut self, handles: &[i64], keys: &[f64]) {
        for (&handle, &key) in handles.iter().zip(keys) {
            let handle = Handle::new(handle);
            let Some(&slot) = self.by_handle.get(&handle) else { continue };
            let order = self.request(slot).order;
            if order.is_due() || self.waiting.remove(&order).is_none() {
                continue;
            }
            let request = self.request_mut(slot);
            request.key = key;
            request.order = Order::new(key, false, request.turn);
            let order = request.order;
            self.waiting.insert(order, slot);
        }
    }

    /// A resident request keeps its place before those that wait where keys only say who is admitted next.
    pub(super) fn keep_place(&mut self, slot: u32) {
        let only_admits = self.policy.is_dynamic() || self.limits.policy == Policy::External;
        let request = self.request_mut(slot);
        if only_admits && !request.order.is_due() {
            request.key = f64::NEG_INFINITY;
            request.order = Order::new(request.key, false, request.turn);
        }
    }

    /// Tokens of a waiting request's prompt that the cache holds. While nothing changes in the cache the last answer holds.
    fn num_hit_tokens(&mut self, slot: u32) -> u32 {
        let stamp = self.manager.pool().stamp;
        let request = self.request(slot);
        if request.is_keeper {
            // What it has from before it need not find.
            let index = self.ensure_sequence(slot, request.leader());
            return self.manager.sequence(index).num_scheduled;
        }
        if request.matched.0 != stamp {
            let (leader, found) = (request.leader(), request.matched.1);
            let index = self.ensure_sequence(slot, leader);
            let found = self.manager.match_again(index, found);
            self.request_mut(slot).matched = (stamp, found);
        }
        self.request(slot).matched.1.num_tokens
    }
}
