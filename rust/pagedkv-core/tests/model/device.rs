//! Whoever runs plans: a block table, memory and a list of who sits where, fed by the arrays of plans and by nothing else.

use std::collections::BTreeMap;

use pagedkv_core::StepPlan;
use pagedkv_core::step_plan::Field;

use super::memory::{Groups, History, Memory, Place, outside_place};

/// What a sequence of a plan is expected to be, by what the model knows.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(crate) request_id: String,
    pub(crate) sample: u32,
    /// What lies in each of its slots, in order: tokens by position, and behind them guesses.
    pub(crate) tokens: Vec<i32>,
    /// Of `tokens`.
    pub(crate) histories: Vec<History>,
    /// Of the step's tokens, the slots that each guess sees besides the known ones, itself last; empty without guesses.
    pub(crate) paths: Vec<Vec<usize>>,
    /// Whether the guesses are no chain.
    pub(crate) is_tree: bool,
}

impl Expected {
    /// The position of the token in a slot: guesses stand as far behind the last known token as they continue it.
    pub(crate) fn stands_at(&self, slot: usize) -> usize {
        let num_known = self.tokens.len() - self.paths.len();
        slot.checked_sub(num_known).map_or(slot, |guess| num_known - 1 + self.paths[guess].len())
    }
}

#[derive(Debug)]
pub(crate) struct Device {
    groups: Groups,
    /// By group, row and column.
    table: Vec<Vec<Vec<Option<usize>>>>,
    memory: Memory,
    /// Who sits in which row, by the change lists.
    seats: BTreeMap<u32, (String, u32)>,
}

/// A transfer: its id, whether it goes to the host, and its (device, host) blocks; [`outside_place`] where it comes from
/// outside.
pub(crate) type Told = (i64, bool, Vec<(usize, usize)>);

/// What a plan tells of transfers.
pub(crate) fn transfers_of(plan: &StepPlan) -> Vec<Told> {
    let mut found: Vec<Told> = Vec::new();
    let mut tell = |id: i64, is_out: bool, pair: (usize, usize)| match found.iter_mut().find(|told| told.0 == id) {
        Some((_, other, pairs)) => {
            assert_eq!(*other, is_out, "transfer {id} goes both ways");
            pairs.push(pair);
        }
        None => found.push((id, is_out, vec![pair])),
    };
    for (ids, pairs, is_out) in [(Field::SwapOutIds, Field::SwapOut, true), (Field::SwapInIds, Field::SwapIn, false)] {
        for (&id, pair) in plan.i64s(ids).iter().zip(plan.i32s(pairs).chunks(2)) {
            let (source, target) = (pair[0] as usize, pair[1] as usize);
            tell(id, is_out, if is_out { (source, target) } else { (target, source) });
        }
    }
    let loads = plan.i64s(Field::LoadIds).iter().zip(plan.i64s(Field::LoadHandles));
    for ((&id, &handle), load) in loads.zip(plan.i32s(Field::Loads).chunks(3)) {
        let (group, column, block) = (load[0] as usize, load[1] as usize, load[2] as usize);
        tell(id, false, (block, outside_place(handle, group, column)));
    }
    found
}

impl Device {
    pub(crate) fn new(num_blocks: usize, groups: &Groups, num_rows: usize, num_columns: usize) -> Self {
        Self {
            groups: *groups,
            table: vec![vec![vec![None; num_columns]; num_rows]; groups.len()],
            memory: Memory::new(num_blocks, groups),
            seats: BTreeMap::new(),
        }
    }

    pub(crate) fn add_host_blocks(&mut self, num_blocks: usize) {
        self.memory.add_host_blocks(num_blocks);
    }

    /// Transfers that were started and have not ended.
    pub(crate) fn started_transfers(&self) -> Vec<i64> {
        self.memory.started()
    }

    /// What a block outside has in its slots.
    pub(crate) fn put_outside(&mut self, place: usize, group: usize, slots: impl Iterator<Item = Option<History>>) {
        self.memory.put_outside(place, group, slots);
    }

    pub(crate) fn end_transfer(&mut self, id: i64, ok: bool) {
        self.memory.end_transfer(id, ok);
    }

    fn start_transfers(&mut self, plan: &StepPlan) {
        for (id, is_out, pairs) in transfers_of(plan) {
            self.memory.start_transfer(id, is_out, pairs);
        }
        transfers_of(plan).into_iter().for_each(|(id, ..)| self.memory.note_started(id));
    }

    pub(crate) fn num_seats(&self) -> usize {
        self.seats.len()
    }

    /// Applies the plan, writes every token and lets every sequence read all of itself. `sampled` are the tokens that the
    /// plan before sampled; `sequences` what each sequence has to find.
    pub(crate) fn run(&mut self, plan: &StepPlan, sampled: &[i32], sequences: &[Expected]) {
        self.update_seats(plan);
        self.update_table(plan);
        let copies: Vec<_> = plan.i32s(Field::Copies).chunks(2).map(|c| (c[0] as usize, c[1] as usize)).collect();
        let moves = plan.i64s(Field::SlotMoves).chunks(3).map(|slots| {
            let group = slots[0] as usize;
            let size = self.groups[group].block_size;
            let place = |slot: i64| Place { group, block: slot as usize / size, offset: slot as usize % size };
            (place(slots[1]), place(slots[2]))
        });
        let moves: Vec<_> = moves.collect();
        let starts = plan.i32s(Field::QueryStartLoc);
        let mut writes = Vec::new();
        let num_tokens = plan.sizes().num_tokens as usize;
        for (s, sequence) in sequences.iter().enumerate() {
            let first = (plan.i32s(Field::SeqLens)[s] - (starts[s + 1] - starts[s])) as usize;
            for (t, position) in (starts[s] as usize..starts[s + 1] as usize).zip(first..) {
                assert_eq!(plan.i32s(Field::Positions)[t] as usize, sequence.stands_at(position), "{sequence:?}");
                let from = plan.i32s(Field::InputFrom)[t];
                let token =
                    if from < 0 { plan.i32s(Field::TokenIds)[t] } else { sampled[usize::try_from(from).unwrap()] };
                assert_eq!(token, sequence.tokens[position], "the input at position {position} of {sequence:?}");
                for (number, group) in self.groups.iter().enumerate() {
                    let slot = plan.i64s(Field::SlotMapping)[number * num_tokens + t] as usize;
                    let place = self.place(plan, number, s, position);
                    let expected = place.block * group.block_size + place.offset;
                    assert_eq!(slot, expected, "the slot of position {position} in group {number} of {sequence:?}");
                    writes.push((place, sequence.histories[position]));
                }
            }
        }
        self.memory.move_slots(&moves);
        self.start_transfers(plan);
        self.memory.run(&copies, &writes);
        for (s, expected) in sequences.iter().enumerate() {
            let seat = (expected.request_id.clone(), expected.sample);
            let row = plan.i32s(Field::Rows)[s] as u32;
            assert_eq!(self.seats.get(&row), Some(&seat), "who sits in row {row}");
            let end = plan.i32s(Field::SeqLens)[s] as usize;
            let start = end - (starts[s + 1] - starts[s]) as usize;
            for (number, group) in self.groups.iter().enumerate() {
                for position in group.first_seen(start)..end {
                    let read = self.memory.read(self.place(plan, number, s, position));
                    let own = read == Some(expected.histories[position]);
                    assert!(own, "another's token lies at {position} in group {number} of {expected:?}");
                }
            }
            Self::check_mask(plan, s, expected);
        }
        self.check_common_prefix(plan);
    }

    /// A token of a draft tree sees of its own step what it continues; without a tree there is no mask.
    fn check_mask(plan: &StepPlan, s: usize, expected: &Expected) {
        let starts = plan.i32s(Field::TreeMaskStartLoc);
        let mask = &plan.bytes(Field::TreeMask)[starts[s] as usize..starts[s + 1] as usize];
        if !expected.is_tree {
            assert!(mask.is_empty(), "{expected:?} has a mask");
            return;
        }
        let num_tokens = expected.paths.len() + 1;
        let row_len = mask.len() / num_tokens;
        assert!(mask.len() == row_len * num_tokens && row_len.is_multiple_of(8), "{} bytes", mask.len());
        let first = expected.tokens.len() - num_tokens;
        for (row, bits) in mask.chunks(row_len).enumerate() {
            let seen: Vec<usize> = (0..row_len * 8).filter(|bit| bits[bit / 8] >> (bit % 8) & 1 == 1).collect();
            let own = row.checked_sub(1).map_or(&[][..], |guess| &expected.paths[guess]);
            let own = own.iter().map(|slot| slot - first);
            assert!(seen.into_iter().eq([0].into_iter().chain(own)), "what token {row} of {expected:?} sees");
        }
    }

    /// A plan that ran was rolled back: whom it seated sits nowhere until a later plan says so again.
    pub(crate) fn undo_seats(&mut self, plan: &StepPlan) {
        for change in plan.changes().new {
            if self.seats.get(&change.row) == Some(&(change.request_id, change.sample)) {
                self.seats.remove(&change.row);
            }
        }
    }

    /// Where the kernel of a group looks for a position of the plan's sequence `s`.
    fn place(&self, plan: &StepPlan, group: usize, s: usize, position: usize) -> Place {
        let row = plan.i32s(Field::Rows)[s] as usize;
        let block_size = self.groups[group].block_size;
        let block = self.table[group][row][position / block_size];
        let block = block.unwrap_or_else(|| panic!("nothing was ever written at row {row} for position {position}"));
        Place { group, block, offset: position % block_size }
    }

    /// The cells that the kernel of a group has for the plan's sequence `s`.
    pub(crate) fn row(&self, plan: &StepPlan, group: usize, s: usize) -> Vec<i32> {
        let row = plan.i32s(Field::Rows)[s] as usize;
        let columns = (plan.i32s(Field::SeqLens)[s] as usize).div_ceil(self.groups[group].block_size);
        self.table[group][row][..columns].iter().map(|cell| cell.map_or(-1, |block| block as i32)).collect()
    }

    fn update_seats(&mut self, plan: &StepPlan) {
        let changes = plan.changes();
        for change in changes.preempted.into_iter().chain(changes.finished) {
            let left = (change.request_id, change.sample);
            if self.seats.get(&change.row) == Some(&left) {
                self.seats.remove(&change.row);
            }
        }
        for change in changes.new {
            self.seats.insert(change.row, (change.request_id, change.sample));
        }
    }

    fn update_table(&mut self, plan: &StepPlan) {
        let updates: Vec<_> = plan.i32s(Field::TableUpdates).chunks(4).collect();
        for (i, update) in updates.iter().enumerate() {
            let &[group, row, column, block] = *update else { unreachable!("four numbers") };
            let has_window = self.groups[group as usize].window.is_some();
            assert!(block > 0 || block == 0 && has_window, "a table update names group {group} and block {block}");
            let once = updates[i + 1..].iter().all(|other| other[..3] != update[..3]);
            assert!(once, "row {row} and column {column} are updated twice");
            self.table[group as usize][row as usize][column as usize] = Some(block as usize);
        }
    }

    /// The blocks that the plan calls common are, and hold only tokens of earlier steps.
    fn check_common_prefix(&self, plan: &StepPlan) {
        for (number, group) in self.groups.iter().enumerate() {
            let common = plan.i32s(Field::NumCommonPrefixBlocks)[number] as usize;
            assert!(common == 0 || group.window.is_none(), "not every query of group {number} sees its first blocks");
            let rows = plan.i32s(Field::Rows);
            for (s, &row) in rows.iter().enumerate() {
                let table = &self.table[number];
                let (first, row) = (&table[rows[0] as usize], &table[row as usize]);
                assert_eq!(first[..common], row[..common], "the common prefix");
                let starts = plan.i32s(Field::QueryStartLoc);
                let start = plan.i32s(Field::SeqLens)[s] - (starts[s + 1] - starts[s]);
                assert!(common * group.block_size <= start as usize, "the common prefix is written in this step");
            }
        }
    }
}
