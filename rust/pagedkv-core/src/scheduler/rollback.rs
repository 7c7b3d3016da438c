//! Undoing plans that never ran, or whose results are void.

use super::Scheduler;
use super::in_flight::InFlight;
use super::request::{NONE, Sample, Stage};
use crate::error::{Error, Result};
use crate::ids::PlanId;

impl Scheduler {
    /// Undoes a plan and cancels every plan behind it: computed tokens, queue places, admissions, holds on hit blocks,
    /// new blocks and copies. Evictions, preemptions, aborts and finishes stay. The next plan repeats what these plans
    /// announced, as far as it still holds.
    ///
    /// # Errors
    /// [`Error::PlanNotInFlight`].
    ///
    /// # Complexity
    /// O(sequences of the plans undone + blocks that they took).
    pub fn rollback(&mut self, plan: PlanId) -> Result<()> {
        let keep = self.plans.iter().position(|record| record.id == plan).ok_or(Error::PlanNotInFlight(plan))?;
        self.drain_inbox();
        self.manager.rollback(plan)?;
        self.undo_swapped();
        let mut undone = self.plans.split_off(keep);
        while let Some(mut record) = undone.pop_back() {
            self.undo_entries(&record);
            self.repeat_announcements(&mut record);
            record.clear();
            self.spare_plans.push(record);
        }
        self.seats.plans_ended(self.plans.front().map(|record| record.id));
        Ok(())
    }

    fn undo_entries(&mut self, record: &InFlight) {
        for entry in record.entries.iter().rev() {
            let Some(request) = self.entry_request(entry) else {
                continue;
            };
            request.num_in_flight -= 1;
            let num_drawn = if entry.num_drafts > 0 { 1 } else { entry.num_samples };
            for &sample in &record.samples[entry.first_sample as usize..][..num_drawn as usize] {
                let sample = &mut request.samples[sample as usize];
                sample.num_pending -= 1;
                sample.is_drafting = false;
                sample.drawn = entry.drawn_before;
            }
            if request.stage == Stage::Resting {
                // The turn is over, and was reported.
                continue;
            }
            if request.num_preemptions == 0 {
                request.num_cached_tokens -= entry.num_hit_tokens;
            }
            let request = &mut self.requests[entry.slot];
            self.recorder.hit_undone(request, entry);
            // One that lost its seats since, or rests, stays where it is.
            if entry.is_admission && matches!(request.stage, Stage::Prompt | Stage::Apart) {
                self.recorder.admission_undone(request, entry);
                self.withdraw_admission(entry.slot);
            }
        }
    }

    /// Puts a request back into the queue, at the place that its handle gives it.
    fn withdraw_admission(&mut self, slot: u32) {
        for sample in 0..self.request(slot).samples.len() {
            self.depart(slot, sample);
            let Sample { sequence, is_kept, .. } = self.request(slot).samples[sample];
            if sequence == NONE || is_kept {
                continue;
            }
            if self.manager.sequence(sequence as usize).num_scheduled > 0 {
                // It had blocks before it was admitted, and has them again.
                self.manager.end_residence(sequence as usize);
                self.set_keeper(slot, true);
            } else {
                // Its path may start at a root of before a reset of the cache.
                self.manager.release_all(sequence as usize);
            }
        }
        self.request_mut(slot).stage = Stage::Waiting;
        self.leave_running(slot);
        self.queue(slot);
    }

    fn repeat_announcements(&mut self, record: &mut InFlight) {
        let announced = &mut record.announced;
        for &(sequence, epoch) in &announced.new {
            if self.manager.resident(sequence as usize, epoch).is_some() {
                self.seats.set_announced(sequence as usize, false);
                self.announcements.new.push((sequence, epoch));
            }
        }
        self.announcements.repeated.append(&mut record.cells);
        self.announcements.preempted.append(&mut announced.preempted);
        self.announcements.finished.append(&mut announced.finished);
        self.announcements.transfers.append(&mut announced.transfers);
    }
}
