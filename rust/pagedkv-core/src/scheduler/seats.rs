//! Rows of the block table: who sits where, and which rows must wait for a plan to end.

use super::request::NONE;
use crate::ids::PlanId;
use crate::invariants::BrokenLaw;

/// Where a sequence sits, by its index in the manager.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    pub(super) row: u32,
    /// The request's slot and the sample's number.
    pub(super) slot: u32,
    pub(super) sample: u32,
    /// Whether a plan has told the row's whole contents.
    pub(super) is_announced: bool,
}

const EMPTY: Seat = Seat { row: NONE, slot: NONE, sample: 0, is_announced: false };

#[derive(Debug)]
pub(super) struct Seats {
    num_rows: u32,
    /// Rows that may be taken.
    limit: u32,
    /// The row that is taken next is last.
    free: Vec<u32>,
    /// Rows that plans in flight name.
    fenced: Vec<(PlanId, u32)>,
    by_sequence: Vec<Seat>,
    by_row: Vec<u32>,
}

impl Seats {
    pub(super) fn new(num_rows: u32) -> Self {
        Self {
            num_rows,
            limit: num_rows,
            free: (0..num_rows).rev().collect(),
            fenced: Vec::new(),
            by_sequence: Vec::new(),
            by_row: vec![NONE; num_rows as usize],
        }
    }

    pub(super) fn num_rows(&self) -> u32 {
        self.num_rows
    }

    /// Changes how many rows may be taken; those that are taken stay so.
    pub(super) fn set_limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    pub(super) fn num_free(&self) -> u32 {
        (self.limit + self.free.len() as u32).saturating_sub(self.num_rows)
    }

    /// Rows that may be taken when the plans in flight have ended.
    pub(super) fn num_coming(&self) -> u32 {
        (self.limit + self.free.len() as u32 + self.num_fenced()).saturating_sub(self.num_rows)
    }

    pub(super) fn num_fenced(&self) -> u32 {
        self.fenced.len() as u32
    }

    pub(super) fn take_row(&mut self) -> u32 {
        self.free.pop().expect("the caller counted the free rows")
    }

    /// Gives a row back, once `fence` has ended if that plan is in flight.
    pub(super) fn release_row(&mut self, row: u32, fence: Option<PlanId>) {
        match fence {
            Some(plan) => self.fenced.push((plan, row)),
            None => self.free.push(row),
        }
    }

    /// Frees the rows that no plan in flight, from `oldest` on, can name.
    pub(super) fn plans_ended(&mut self, oldest: Option<PlanId>) {
        let free = &mut self.free;
        self.fenced.retain(|&(plan, row)| {
            let waits = oldest.is_some_and(|oldest| oldest <= plan);
            if !waits {
                free.push(row);
            }
            waits
        });
    }

    /// The sequence that sits on a row.
    pub(super) fn sequence_at(&self, row: u32) -> Option<usize> {
        self.by_row.get(row as usize).copied().filter(|&sequence| sequence != NONE).map(|sequence| sequence as usize)
    }

    pub(super) fn seat(&self, sequence: usize) -> Seat {
        self.by_sequence.get(sequence).copied().unwrap_or(EMPTY)
    }

    /// Sequences that sit, with the slots of their requests.
    pub(super) fn seated(&self) -> impl Iterator<Item = (usize, u32)> {
        let seats = self.by_sequence.iter().enumerate().filter(|(_, seat)| seat.row != NONE);
        seats.map(|(sequence, seat)| (sequence, seat.slot))
    }

    pub(super) fn sit(&mut self, sequence: usize, row: u32, slot: u32, sample: u32) {
        if self.by_sequence.len() <= sequence {
            self.by_sequence.resize(sequence + 1, EMPTY);
        }
        self.by_row[row as usize] = sequence as u32;
        self.by_sequence[sequence] = Seat { row, slot, sample, is_announced: false };
    }

    pub(super) fn leave(&mut self, sequence: usize) {
        if let Some(seat) = self.by_sequence.get_mut(sequence) {
            if let Some(row) = self.by_row.get_mut(seat.row as usize) {
                *row = NONE;
            }
            *seat = EMPTY;
        }
    }

    pub(super) fn set_announced(&mut self, sequence: usize, is_announced: bool) {
        self.by_sequence[sequence].is_announced = is_announced;
    }

    /// No row is given out twice.
    pub(super) fn check(&self) -> Result<(), BrokenLaw> {
        let mut seen = vec![false; self.num_rows as usize];
        let rows = self.free.iter().copied().chain(self.fenced.iter().map(|&(_, row)| row));
        let seated = self.by_sequence.iter().map(|seat| seat.row).filter(|&row| row != NONE);
        for row in rows.chain(seated) {
            if std::mem::replace(&mut seen[row as usize], true) {
                return Err(BrokenLaw { law: 6, what: format!("row {row} has two owners") });
            }
        }
        Ok(())
    }
}
