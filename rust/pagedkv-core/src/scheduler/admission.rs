//! Seats and first blocks for waiting requests, in order, until one does not fit.

use super::Scheduler;
use super::pass::{Pass, Want};
use super::request::Stage;
use crate::kv_cache_manager::ComputedBlocks;

impl Scheduler {
    pub(super) fn admit_waiting(&mut self, pass: &mut Pass) {
        if pass.reserved > 0 {
            return;
        }
        while pass.budget > 0 {
            let Some((_, &slot)) = self.waiting.first_key_value() else {
                return;
            };
            let request = self.request(slot);
            // Its samples may be on their way, or its rows still be named by a plan in flight.
            if request.num_in_flight > 0 || request.num_live > self.seats.num_free() {
                return;
            }
            let mut hits = std::mem::take(&mut self.hits);
            let is_admitted = self.admit(pass, slot, &mut hits);
            self.hits = hits;
            if !is_admitted {
                return;
            }
        }
    }

    fn admit(&mut self, pass: &mut Pass, slot: u32, hits: &mut ComputedBlocks) -> bool {
        let request = self.request(slot);
        let (leader, num_live) = (request.leader(), request.num_live);
        let index = self.ensure_sequence(slot, leader);
        let request = self.request(slot);
        let stage = if num_live > 1 { Stage::Prompt } else { Stage::Apart };
        let target = match stage {
            Stage::Prompt => request.prompt_len(),
            _ => self.manager.sequence(index).tokens.len().min(request.prompt_len() + request.max_tokens - 1),
        };
        let want = Want { target, known: target };
        self.find_hits(index, want, hits);
        let to_compute = target - hits.num_tokens();
        let num_new = to_compute.min(pass.budget);
        if !self.has_room(pass, index, to_compute, num_new, hits) {
            return false;
        }
        self.waiting.pop_first();
        let handle = self.request(slot).handle;
        let at = self.running.partition_point(|&other| self.request(other).handle < handle);
        self.running.insert(at, slot);
        self.take_seats(slot, leader);
        self.request_mut(slot).stage = stage;
        self.extend(pass, slot, leader, num_new, want, hits);
        pass.record.entries.last_mut().expect("the admission was just added").is_admission = true;
        let columns = target.div_ceil(self.manager.block_size);
        pass.claimed += columns.saturating_sub(self.manager.sequence(index).table.len() as u32);
        true
    }

    /// Whether all known tokens fit beside what running prefills need and the watermark; alone, whether a start fits.
    fn has_room(&self, pass: &Pass, index: usize, to_compute: u32, num_new: u32, hits: &ComputedBlocks) -> bool {
        let available = self.manager.pool().num_available();
        if self.running.is_empty() {
            return self.manager.blocks_needed(index, num_new, hits) <= available;
        }
        let needed = self.manager.blocks_needed(index, to_compute, hits);
        needed + pass.claimed + self.watermark_blocks <= available
    }

    fn take_seats(&mut self, slot: u32, leader: usize) {
        for sample in 0..self.request(slot).samples.len() {
            if self.request(slot).samples[sample].finish.is_some() {
                continue;
            }
            let row = self.seats.take_row();
            self.request_mut(slot).samples[sample].row = row;
            if sample == leader {
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
