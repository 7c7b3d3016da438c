//! From a pass to the plan's arrays.

use super::drafts::is_chain;
use super::pass::{Entry, Pass};
use super::request::{NONE, Stage};
use super::transfers::Direction;
use super::{Cell, Departure, InFlight, Scheduler};
use crate::ids::{BlockId, PlanId};
use crate::step_plan::{Change, Changes, Field, Header, StepPlan, encode_changes};

impl Scheduler {
    pub(super) fn build(&mut self, pass: Pass) -> StepPlan {
        let Pass { mut record, copies, .. } = pass;
        // Decodes first: kernels treat a run of one-token sequences as one batch.
        let is_prefill = |entry: &Entry| entry.end - entry.start > 1;
        if !record.entries.is_sorted_by_key(is_prefill) {
            record.entries.sort_by_key(is_prefill);
        }
        let num_samples = self.number_samples(&mut record);
        let (updates, changes) = self.announce(&mut record);
        let mut encoded = Vec::new();
        encode_changes(&changes, &mut encoded);
        self.manager.place_all_moves();
        let num_tree_mask_bytes: usize = record.entries.iter().map(Entry::tree_mask_bytes).sum();
        let blocked_on = if record.entries.is_empty() { self.blocking_plan() } else { None };
        let sizes = Header {
            plan_id: record.id.get(),
            blocked_on: blocked_on.map_or(0, PlanId::get),
            num_sequences: record.entries.len() as u32,
            num_tokens: record.entries.iter().map(|entry| entry.end - entry.start).sum(),
            num_samples,
            num_groups: self.manager.groups.len() as u32,
            num_table_updates: updates.len() as u32,
            num_copies: copies.len() as u32,
            num_slot_moves: self.manager.moves().len() as u32,
            num_tree_mask_bytes: num_tree_mask_bytes as u32,
            num_swap_in: self.num_transferred(&record, Direction::In),
            num_swap_out: self.num_transferred(&record, Direction::Out),
            num_change_bytes: encoded.len() as u32,
            waits_for_transfers: u32::from(record.entries.is_empty() && self.waits_for_transfers()),
            ..Header::default()
        };
        let mut plan = StepPlan::with_sizes(sizes, &self.buffers);
        Self::write_sequences(&record.entries, &mut plan);
        self.write_tokens(&record, &mut plan);
        record.write_tree_mask(&mut plan);
        plan.i64s_mut(Field::SlotMoves).copy_from_slice(self.manager.moves().as_flattened());
        for (group, out) in plan.i32s_mut(Field::NumCommonPrefixBlocks).iter_mut().enumerate() {
            *out = self.common_prefix(&record.entries, group);
        }
        plan.i32s_mut(Field::TableUpdates).copy_from_slice(updates.as_flattened());
        plan.i32s_mut(Field::Copies).copy_from_slice(copies.as_flattened());
        plan.bytes_of_mut(Field::Changes).copy_from_slice(&encoded);
        self.write_transfers(&record, &mut plan);
        self.plans.push_back(record);
        plan
    }

    /// Numbers the samples drawn, in the order of the sequences, and notes with each who drew it.
    fn number_samples(&mut self, record: &mut InFlight) -> u32 {
        let plan = record.id;
        for entry in record.entries.iter_mut().filter(|entry| entry.num_samples > 0) {
            entry.first_sample = record.samples.len() as u32;
            let request = self.requests[entry.slot as usize].as_mut().expect("a planned request lives");
            if entry.num_drafts > 0 {
                let sample = &mut request.samples[entry.sample as usize];
                entry.first_node = record.nodes.len() as u32;
                record.nodes.extend(sample.drafts.nodes(entry.num_drafts));
                entry.is_tree = !is_chain(&record.nodes[entry.first_node as usize..]);
                sample.num_pending += 1;
                sample.is_drafting = true;
                record.samples.extend(std::iter::repeat_n(entry.sample, entry.num_samples as usize));
                continue;
            }
            let shares = request.stage == Stage::Prompt;
            for (number, sample) in request.samples.iter_mut().enumerate() {
                if if shares { sample.finish.is_none() } else { number == entry.sample as usize } {
                    sample.num_pending += 1;
                    sample.drawn = (plan, record.samples.len() as u32);
                    record.samples.push(number as u32);
                }
            }
        }
        record.samples.len() as u32
    }

    /// Table updates and change lists: whole rows of new residences, changed entries of the others, and again whatever
    /// a plan that never ran had announced.
    fn announce(&mut self, record: &mut InFlight) -> (Vec<[i32; 4]>, Changes) {
        let mut announced = std::mem::take(&mut self.announcements);
        let (mut updates, mut changes) = (Vec::new(), Changes::default());
        announced.new.retain(|&(sequence, epoch)| self.manager.resident(sequence as usize, epoch).is_some());
        announced.new.sort_unstable();
        announced.new.dedup();
        for &(sequence, _) in &announced.new {
            let seat = self.seats.seat(sequence as usize);
            self.seats.set_announced(sequence as usize, true);
            let request_id = self.request(seat.slot).id.to_string();
            changes.new.push(Change { row: seat.row, request_id, sample: seat.sample });
            for (group, table) in (0..).zip(&self.manager.sequence(sequence as usize).tables) {
                let row = |(column, block): (i32, &BlockId)| [group, seat.row as i32, column, block.get() as i32];
                updates.extend((0..).zip(&table.blocks).map(row));
            }
        }
        if !announced.repeated.is_empty() {
            record.cells.append(&mut announced.repeated);
            record.cells.sort_unstable();
            record.cells.dedup();
        }
        record.cells.retain(|&cell| {
            let update =
                self.cell_update(cell).filter(|_| announced.new.binary_search(&(cell.sequence, cell.epoch)).is_err());
            updates.extend(update);
            update.is_some()
        });
        // Whoever a plan that never ran had preempted may have ended since, with tokens that were on their way.
        let ended: Vec<_> = announced.preempted.extract_if(.., |departure| !self.is_live(departure)).collect();
        announced.finished.extend(ended);
        changes.preempted.extend(announced.preempted.iter().map(|departure| departure.change.clone()));
        changes.finished.extend(announced.finished.iter().map(|departure| departure.change.clone()));
        if !announced.transfers.is_empty() {
            announced.transfers.retain(|&id| self.transfers.find(id).is_some());
            announced.transfers.sort_unstable();
        }
        record.announced = announced;
        (updates, changes)
    }

    fn is_live(&self, departure: &Departure) -> bool {
        let slot = self.by_handle.get(&departure.handle);
        slot.is_some_and(|&slot| self.request(slot).samples[departure.sample as usize].finish.is_none())
    }

    /// A cell's present value, if it is still in use.
    fn cell_update(&self, cell: Cell) -> Option<[i32; 4]> {
        let sequence = self.manager.resident(cell.sequence as usize, cell.epoch)?;
        let block = sequence.tables[cell.group as usize].blocks.get(cell.column as usize)?;
        let row = self.seats.seat(cell.sequence as usize).row;
        Some([cell.group as i32, row as i32, cell.column as i32, block.get() as i32]).filter(|_| row != NONE)
    }

    fn write_sequences(entries: &[Entry], plan: &mut StepPlan) {
        let per_sequence = |plan: &mut StepPlan, field, value: fn(&Entry) -> u32| {
            plan.i32s_mut(field).iter_mut().zip(entries).for_each(|(out, entry)| *out = value(entry) as i32);
        };
        plan.i64s_mut(Field::Handles).iter_mut().zip(entries).for_each(|(out, entry)| *out = entry.handle.get());
        per_sequence(plan, Field::Sequence, |entry| entry.sample);
        per_sequence(plan, Field::Rows, |entry| entry.row);
        per_sequence(plan, Field::SeqLens, |entry| entry.end);
        let running_sum = |plan: &mut StepPlan, field, count: fn(&Entry) -> u32| {
            let mut sum = 0;
            plan.i32s_mut(field)[1..].iter_mut().zip(entries).for_each(|(out, entry)| {
                sum += count(entry) as i32;
                *out = sum;
            });
        };
        running_sum(plan, Field::QueryStartLoc, |entry| entry.end - entry.start);
        running_sum(plan, Field::SampleStartLoc, |entry| entry.num_samples);
        let mut end = 0;
        let rows = plan.i32s_mut(Field::SampleRows);
        for entry in entries {
            end += (entry.end - entry.start) as i32;
            let rows = &mut rows[entry.first_sample as usize..][..entry.num_samples as usize];
            // A token after each guess and after the last known token; else every sample from the last row.
            let first = end - 1 - entry.num_drafts as i32;
            let step = i32::from(entry.num_drafts > 0);
            rows.iter_mut().zip(0..).for_each(|(row, number)| *row = first + step * number);
        }
    }

    fn write_tokens(&self, record: &InFlight, plan: &mut StepPlan) {
        let num_tokens = plan.sizes().num_tokens as usize;
        let mut at = 0;
        for entry in &record.entries {
            let sequence = self.manager.sequence(entry.sequence as usize);
            let len = (entry.end - entry.start) as usize;
            let known = sequence.tokens.len().clamp(entry.start, entry.end);
            sequence
                .tokens
                .copy_to(entry.start, &mut plan.i32s_mut(Field::TokenIds)[at..][..(known - entry.start) as usize]);
            let positions = &mut plan.i32s_mut(Field::Positions)[at..][..len];
            positions.iter_mut().zip(entry.start..).for_each(|(out, position)| *out = position as i32);
            plan.i32s_mut(Field::InputFrom)[at..][..len].fill(-1);
            if entry.num_drafts > 0 {
                let nodes = record.nodes_of(entry);
                let ids = &mut plan.i32s_mut(Field::TokenIds)[at + len - nodes.len()..at + len];
                ids.iter_mut().zip(nodes).for_each(|(id, node)| *id = node.token);
                if entry.is_tree {
                    // The known token, and behind it each guess by its depth.
                    let positions = &mut plan.i32s_mut(Field::Positions)[at..at + len];
                    (1..).zip(nodes).for_each(|(i, node)| positions[i] = positions[(node.parent + 1) as usize] + 1);
                }
            } else if known < entry.end {
                // Only the sample that the previous plan draws is unknown.
                plan.i32s_mut(Field::InputFrom)[at + len - 1] = entry.drawn_before.1 as i32;
            }
            for (group, (table, spec)) in sequence.tables.iter().zip(&self.manager.groups).enumerate() {
                let slots = &mut plan.i64s_mut(Field::SlotMapping)[group * num_tokens + at..][..len];
                write_slots(&table.blocks, spec.block_size, entry.start, slots);
            }
            at += len;
        }
    }

    /// Leading blocks of a group that every sequence of the plan shares and that hold only tokens of earlier steps. None
    /// where there is a window: not every query sees them.
    fn common_prefix(&self, entries: &[Entry], group: usize) -> i32 {
        let spec = self.manager.groups[group];
        let Some((first, others)) = entries.split_first().filter(|_| spec.sliding_window.is_none()) else {
            return 0;
        };
        let full = |entry: &Entry| (entry.start / spec.block_size) as usize;
        let table = |entry: &Entry| &self.manager.sequence(entry.sequence as usize).tables[group].blocks[..full(entry)];
        let first = table(first);
        let held_by_all = |&&block: &&BlockId| self.manager.pool().blocks[block.index()].ref_count as usize;
        let mut common = first.iter().take_while(|block| held_by_all(block) > others.len()).count();
        for entry in others {
            if common == 0 {
                break;
            }
            let table = table(entry);
            common = common.min(table.len());
            // As plain numbers: the compiler compares those in one call.
            if bytemuck::cast_slice::<_, u32>(&first[..common]) != bytemuck::cast_slice::<_, u32>(&table[..common]) {
                common = first.iter().zip(table).take_while(|(one, other)| one == other).count();
            }
        }
        common as i32
    }

    /// The plan whose end unfinished work waits for.
    fn blocking_plan(&self) -> Option<PlanId> {
        if !self.has_work() {
            return None;
        }
        let oldest = self.plans.front().map(|record| record.id);
        let fencing = self.manager.pool().first_fencing_plan();
        fencing.filter(|&plan| self.plans.iter().any(|record| record.id == plan)).or(oldest)
    }
}

/// Where the tokens from `start` on go in a block table.
fn write_slots(table: &[BlockId], block_size: u32, start: u32, mut slots: &mut [i64]) {
    let mut position = start;
    while !slots.is_empty() {
        let offset = position % block_size;
        let run = ((block_size - offset) as usize).min(slots.len());
        let block = table[(position / block_size) as usize];
        let first = i64::from(block.get()) * i64::from(block_size) + i64::from(offset);
        let (now, rest) = slots.split_at_mut(run);
        now.iter_mut().zip(first..).for_each(|(out, slot)| *out = slot);
        position += run as u32;
        slots = rest;
    }
}
