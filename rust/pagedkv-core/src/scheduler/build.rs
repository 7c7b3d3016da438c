//! From a pass to the plan's arrays.

use super::Scheduler;
use super::drafts::is_chain;
use super::in_flight::{Cell, Departure, Entry, InFlight};
use super::pass::Pass;
use super::request::{NONE, Stage};
use super::transfers::Direction;
use crate::ids::{BlockId, PlanId};
use crate::step_plan::{Arrays, Change, Changes, Field, Header, StepPlan, encode_changes};

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
        let sizes = Header {
            num_samples,
            num_table_updates: updates.len() as u32,
            num_copies: copies.len() as u32,
            num_change_bytes: encoded.len() as u32,
            ..self.header(&record)
        };
        let mut plan = StepPlan::with_sizes(sizes, &self.buffers);
        self.write_sequences(&record, &mut plan);
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

    /// The sizes of a plan that follow from its record.
    fn header(&self, record: &InFlight) -> Header {
        let num_tree_mask_bytes: usize = record.entries.iter().map(Entry::tree_mask_bytes).sum();
        let blocked_on = if record.entries.is_empty() { self.blocking_plan() } else { None };
        Header {
            plan_id: record.id.get(),
            blocked_on: blocked_on.map_or(0, PlanId::get),
            num_sequences: record.entries.len() as u32,
            num_tokens: record.entries.iter().map(|entry| entry.end - entry.start).sum(),
            num_groups: self.manager.groups.len() as u32,
            num_slot_moves: self.manager.moves().len() as u32,
            num_tree_mask_bytes: num_tree_mask_bytes as u32,
            num_swap_in: self.num_transferred(record, Direction::In),
            num_swap_out: self.num_transferred(record, Direction::Out),
            num_loads: self.num_transferred(record, Direction::Load),
            waits_for_transfers: u32::from(record.entries.is_empty() && self.waits_for_transfers()),
            ..Header::default()
        }
    }

    /// Numbers the samples drawn, in the order of the sequences, and notes with each who drew it.
    fn number_samples(&mut self, record: &mut InFlight) -> u32 {
        let plan = record.id;
        for entry in &mut record.entries {
            entry.first_sample = record.samples.len() as u32;
            if entry.num_samples == 0 {
                continue;
            }
            let request = &mut self.requests[entry.slot];
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
            let numbers = match request.stage {
                Stage::Prompt => 0..request.samples.len(),
                _ => entry.sample as usize..entry.sample as usize + 1,
            };
            for number in numbers {
                let is_prompt = request.stage == Stage::Prompt;
                let draws = !is_prompt || request.draws_behind_the_prompt(&request.samples[number], &self.manager);
                let sample = &mut request.samples[number];
                if draws {
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

    /// Writes what there is one of for each sequence, token and sample.
    fn write_sequences(&self, record: &InFlight, plan: &mut StepPlan) {
        let mut arrays = plan.arrays_mut();
        let mut at = 0;
        for (place, entry) in record.entries.iter().enumerate() {
            arrays.handles[place] = entry.handle.get();
            arrays.sequence[place] = entry.sample as i32;
            arrays.rows[place] = entry.row as i32;
            arrays.seq_lens[place] = entry.end as i32;
            if entry.draws_one() && entry.end - entry.start == 1 {
                self.write_token(entry, at, &mut arrays);
            } else {
                self.write_tokens(record, entry, at, &mut arrays);
            }
            at += (entry.end - entry.start) as usize;
            arrays.query_start_loc[place + 1] = at as i32;
            arrays.sample_start_loc[place + 1] = (entry.first_sample + entry.num_samples) as i32;
        }
    }

    /// Writes the one token of a decode.
    fn write_token(&self, entry: &Entry, at: usize, arrays: &mut Arrays<'_>) {
        let sequence = self.manager.sequence(entry.sequence as usize);
        // It is the last one that is known, or the one that the previous plan draws.
        match sequence.tokens.last_at(entry.start) {
            Some(token) => (arrays.token_ids[at], arrays.input_from[at]) = (token, -1),
            None => arrays.input_from[at] = entry.drawn_before.1 as i32,
        }
        arrays.positions[at] = entry.start as i32;
        arrays.sample_rows[entry.first_sample as usize] = at as i32;
        let num_tokens = arrays.token_ids.len();
        for (group, (table, spec)) in sequence.tables.iter().zip(&self.manager.groups).enumerate() {
            let block = i64::from(table.blocks[(entry.start / spec.block_size) as usize].get());
            let offset = i64::from(entry.start % spec.block_size);
            arrays.slot_mapping[group * num_tokens + at] = block * i64::from(spec.block_size) + offset;
        }
    }

    fn write_tokens(&self, record: &InFlight, entry: &Entry, at: usize, arrays: &mut Arrays<'_>) {
        let sequence = self.manager.sequence(entry.sequence as usize);
        let len = (entry.end - entry.start) as usize;
        let known = sequence.tokens.len().clamp(entry.start, entry.end);
        let ids = &mut arrays.token_ids[at..at + len];
        sequence.tokens.copy_to(entry.start, &mut ids[..(known - entry.start) as usize]);
        let positions = &mut arrays.positions[at..at + len];
        positions.iter_mut().zip(entry.start..).for_each(|(out, position)| *out = position as i32);
        arrays.input_from[at..at + len].fill(-1);
        if entry.num_drafts > 0 {
            let nodes = record.nodes_of(entry);
            ids[len - nodes.len()..].iter_mut().zip(nodes).for_each(|(id, node)| *id = node.token);
            if entry.is_tree {
                // The known token, and behind it each guess by its depth.
                (1..).zip(nodes).for_each(|(i, node)| positions[i] = positions[(node.parent + 1) as usize] + 1);
            }
        } else if known < entry.end {
            // Only the sample that the previous plan draws is unknown.
            arrays.input_from[at + len - 1] = entry.drawn_before.1 as i32;
        }
        let num_tokens = arrays.token_ids.len();
        for (group, (table, spec)) in sequence.tables.iter().zip(&self.manager.groups).enumerate() {
            let slots = &mut arrays.slot_mapping[group * num_tokens + at..][..len];
            write_slots(&table.blocks, spec.block_size, entry.start, slots);
        }
        // A token after each guess and after the last known token; else every sample from the last row.
        let first = (at + len) as i32 - 1 - entry.num_drafts as i32;
        let step = i32::from(entry.num_drafts > 0);
        let rows = &mut arrays.sample_rows[entry.first_sample as usize..][..entry.num_samples as usize];
        rows.iter_mut().zip(0..).for_each(|(row, number)| *row = first + step * number);
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
