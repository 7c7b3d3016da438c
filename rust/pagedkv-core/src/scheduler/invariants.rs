//! The laws of the queues, the seats, and the sequences of requests.

use super::Scheduler;
use super::request::{NONE, Request, Stage};
use crate::invariants::BrokenLaw;

impl Scheduler {
    /// Checks the laws of the bookkeeping and those of the seats and queues.
    ///
    /// # Errors
    /// The first [`BrokenLaw`].
    ///
    /// # Complexity
    /// As [`KVCacheManager::check_integrity`](crate::KVCacheManager::check_integrity).
    pub fn check_integrity(&self) -> std::result::Result<(), BrokenLaw> {
        self.manager.check_integrity()?;
        let broken = |what: String| Err(BrokenLaw { law: 5, what });
        let mut is_running = vec![false; self.requests.num_slots()];
        self.running.iter().for_each(|&slot| is_running[slot as usize] = true);
        let mut sequences = 0;
        for (slot, request) in self.requests.iter() {
            self.check_request(slot, request, is_running[slot as usize])?;
            sequences += request.samples.iter().filter(|sample| sample.sequence != NONE).count();
        }
        let num_keepers = self.requests.iter().filter(|(_, request)| request.is_keeper).count();
        if num_keepers != self.num_keepers as usize {
            return broken(format!("{num_keepers} waiting requests have blocks, {} are counted", self.num_keepers));
        }
        if sequences != self.manager.num_sequences() {
            return broken(format!("{} sequences live, {sequences} belong to requests", self.manager.num_sequences()));
        }
        if !self.running.is_sorted_by_key(|&slot| self.request(slot).order) {
            return broken("the running requests are out of order".into());
        }
        self.check_transfers()?;
        self.seats.check()
    }

    /// A request is in exactly one place, and its samples have the seats and sequences that belong to it there.
    fn check_request(&self, slot: u32, request: &Request, is_running: bool) -> std::result::Result<(), BrokenLaw> {
        let broken = |what: String| Err(BrokenLaw { law: 5, what });
        let (waits, is_held) = (self.waiting.get(&request.order), self.held.get(&request.order));
        let (queue, other) = if request.is_held { (is_held, waits) } else { (waits, is_held) };
        let is_queued = queue == Some(&slot);
        let is_right = match request.stage {
            Stage::Waiting => is_queued && !is_running,
            Stage::Prompt | Stage::Apart => is_running && !is_queued,
            Stage::Resting => !is_running && !is_queued && request.num_live == 0,
        };
        if !is_right || other == Some(&slot) || (request.num_live == 0) != (request.stage == Stage::Resting) {
            return broken(format!("request {} is not in exactly one queue", request.id));
        }
        let mut has_blocks = false;
        for sample in &request.samples {
            let is_live = sample.finish.is_none();
            let has_seat = sample.row != NONE;
            if has_seat != (is_running && (is_live || request.is_gang())) {
                return broken(format!("a sample of request {} has no seat, or one too many", request.id));
            }
            let sequence = self.manager.sequences.get(sample.sequence as usize);
            let is_right = sequence.is_none_or(|sequence| {
                sequence.is_live && sequence.is_kept == sample.is_kept && (is_live || sample.is_kept)
            });
            if !is_right {
                return broken(format!("a sample of request {} has a sequence that is not its own", request.id));
            }
            has_blocks |= sequence.is_some_and(|sequence| is_live && sequence.num_scheduled > 0);
        }
        if request.is_keeper != (has_blocks && !is_running) {
            return broken(format!("it is not known whether request {} waits with blocks", request.id));
        }
        Ok(())
    }
}
