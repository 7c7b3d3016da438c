//! The growth and the commit of a sequence that decodes: by the one token that was sampled last. Nearly all that steps do is
//! this, so it has paths of its own, which do what the general ones do for it.

use super::Scheduler;
use super::commit::StepResult;
use super::in_flight::{Cell, Entry};
use super::pass::Pass;

impl Scheduler {
    /// Grows a sample of a running request by one token, if that is all it can grow by, without guesses, hits or copies, and
    /// there is room. Answers whether it did.
    pub(super) fn decode(&mut self, pass: &mut Pass, slot: u32, number: usize) -> bool {
        let request = self.request(slot);
        let sample = &request.samples[number];
        let index = sample.sequence as usize;
        let sequence = self.manager.sequence(index);
        let (start, len) = (sequence.num_scheduled, sequence.tokens.len());
        let coming = if Some(sample.drawn.0) == pass.previous { sample.num_pending } else { 0 };
        let target = (len + coming).min(sample.most_computed());
        if target != start + 1 || sample.is_drafting || !sample.drafts.is_empty() {
            return false;
        }
        let Some(takes_block) = self.manager.decodes(index) else { return false };
        if takes_block {
            let reserved = pass.reserved + self.reserved_for_head(pass, slot);
            if 1 + reserved > self.manager.pool().num_available() {
                return false;
            }
        }
        let (epoch, num_columns) = self.manager.extend_by_one(index, takes_block);
        let seat = self.seats.seat(index);
        if takes_block && seat.is_announced {
            pass.record.cells.push(Cell { sequence: index as u32, epoch, group: 0, column: num_columns - 1 });
        }
        let request = &mut self.requests[slot];
        request.num_in_flight += 1;
        request.last_plan = pass.record.id;
        let sample = &request.samples[number];
        pass.budget -= 1;
        pass.record.entries.push(Entry {
            sample: number as u32,
            num_samples: u32::from(target == len + sample.num_pending),
            drawn_before: sample.drawn,
            num_preemptions: request.num_preemptions,
            ..Entry::new(request.handle, slot, index as u32, epoch, seat.row, start..target)
        });
        true
    }

    /// Gives the sample that an entry draws its token, unless something else is to be done. Answers whether it did.
    pub(super) fn commit_one(&mut self, entry: &Entry, token: i32, result: &mut StepResult) -> bool {
        let (slot, number) = (entry.slot, entry.sample as usize);
        let Some(request) = self.entry_request(entry) else { return false };
        let sample = &mut request.samples[number];
        if sample.finish.is_some() || sample.sequence != entry.sequence {
            return false;
        }
        request.num_in_flight -= 1;
        sample.num_pending -= 1;
        sample.num_outputs += 1;
        sample.drafts.clear();
        let reason = request.reason_at(number, request.samples[number].num_outputs, token);
        let request = &mut self.requests[slot];
        self.recorder.generated(request, 1);
        self.manager.append_token(entry.sequence as usize, token);
        result.push(entry.handle, number as i32, 1, reason.map_or(0, |reason| reason as i8));
        if let Some(reason) = reason {
            self.end(slot, number, reason, result);
        }
        true
    }
}
