//! Plans in flight: how they begin and end, and the record of each, by which it is published or undone.

use super::{BlockCopy, KVCacheManager, Sequence, Tail};
use crate::error::{Error, Result};
use crate::ids::{BlockId, PlanId};

/// One growth of one sequence in a plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    pub(super) sequence: u32,
    epoch: u32,
    /// Computed length before, where writing starts (hits lie between), and after.
    before: u32,
    start: u32,
    pub(super) after: u32,
    /// The last copies of the record at the time; those by which the tail became the sequence's own go back.
    pub(super) num_copies: u32,
    /// What the tail was before.
    tail: Tail,
    /// Whether its last tokens were guesses.
    pub(super) has_drafts: bool,
}

impl Growth {
    /// The growth's sequence and the positions that it writes, unless the sequence lost its blocks meanwhile.
    pub(crate) fn written(&self, sequences: &[Sequence]) -> Option<(usize, std::ops::Range<u32>)> {
        self.is_of(sequences).then_some((self.sequence as usize, self.start..self.after))
    }

    /// Whether the sequence still has the blocks that the growth speaks of.
    pub(super) fn is_of(&self, sequences: &[Sequence]) -> bool {
        sequences[self.sequence as usize].epoch == self.epoch
    }
}

/// Where a plan stood.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    growths: usize,
    fills: usize,
    copies: usize,
}

/// What a plan did, so that it can be published or undone.
#[derive(Debug)]
pub(crate) struct PlanRecord {
    pub(crate) id: PlanId,
    pub(crate) growths: Vec<Growth>,
    /// Blocks that the plan fills with known tokens.
    pub(crate) fills: Vec<BlockId>,
    /// Copies of all growths, in their order.
    pub(crate) copies: Vec<BlockCopy>,
    /// Group, source slot, destination slot of what it moves first.
    pub(crate) moves: Vec<[i64; 3]>,
}

impl PlanRecord {
    fn new(id: PlanId) -> Self {
        Self { id, growths: Vec::new(), fills: Vec::new(), copies: Vec::new(), moves: Vec::new() }
    }

    /// Notes that a sequence has grown from `before` to what is scheduled of it, and writes from `start` on. The plan names
    /// it from now on.
    #[inline]
    pub(super) fn grew(
        &mut self,
        index: usize,
        sequence: &mut Sequence,
        (before, start): (u32, u32),
        tail: Tail,
        num_copies: u32,
    ) {
        let after = sequence.num_scheduled;
        match sequence.in_flight.last_mut() {
            Some(last) if last.0 == self.id => last.1 = after,
            _ => sequence.in_flight.push((self.id, after)),
        }
        self.growths.push(Growth {
            sequence: index as u32,
            epoch: sequence.epoch,
            before,
            start,
            after,
            num_copies,
            tail,
            has_drafts: false,
        });
    }

    fn clear(&mut self) {
        self.growths.clear();
        self.fills.clear();
        self.copies.clear();
        self.moves.clear();
    }
}

impl KVCacheManager {
    /// Opens a plan. Growth goes to the newest plan.
    ///
    /// # Complexity
    /// O(1).
    pub fn begin_plan(&mut self) -> PlanId {
        let id = self.pool.begin_plan();
        let mut record = self.spare_records.pop().unwrap_or(PlanRecord::new(id));
        record.id = id;
        self.plans.push_back(record);
        id
    }

    /// Ends the oldest plan: its tokens are computed and the blocks that they filled are public. Tokens that nobody told
    /// by now, and draft tokens that nobody accepted, do not count: their slots are taken back.
    ///
    /// # Errors
    /// [`Error::PlanOutOfOrder`], [`Error::PlanNotInFlight`]; [`Error::UntoldTokens`] where a later plan stands on tokens
    /// that nobody told.
    ///
    /// # Complexity
    /// O(growths of the plan + blocks that it fills + blocks that waited for it).
    pub fn commit(&mut self, plan: PlanId) -> Result<()> {
        self.check_oldest(plan)?;
        self.check_told()?;
        self.end_oldest(true);
        Ok(())
    }

    /// Ends the oldest plan for a scheduler, which tells its tokens, and rejects its drafts, right afterwards.
    ///
    /// # Errors
    /// [`Error::PlanOutOfOrder`], [`Error::PlanNotInFlight`].
    pub(crate) fn end_plan(&mut self, plan: PlanId) -> Result<()> {
        self.check_oldest(plan)?;
        self.end_oldest(false);
        Ok(())
    }

    fn end_oldest(&mut self, drops_untold: bool) {
        let mut record = self.plans.pop_front().expect("the plan is in flight");
        for growth in &record.growths {
            let sequence = &mut self.sequences[growth.sequence as usize];
            if sequence.epoch == growth.epoch {
                sequence.num_computed = growth.after;
                if sequence.in_flight.first().is_some_and(|&(named_by, _)| named_by == record.id) {
                    sequence.in_flight.remove(0);
                }
                if drops_untold {
                    self.drop_untold(growth.sequence as usize);
                }
            }
        }
        for block in record.fills.drain(..) {
            self.pool.publish(block);
        }
        self.pool.end_oldest_plan();
        if self.has_windows {
            // What leaves now is public already, and outlives its sequence in the cache.
            for growth in &record.growths {
                if growth.is_of(&self.sequences) {
                    self.leave_windows(growth.sequence as usize);
                }
            }
        }
        record.clear();
        self.spare_records.push(record);
    }

    /// Undoes a plan in flight and every plan behind it: growth, copies, and holds on hit blocks. Evictions stay.
    ///
    /// # Errors
    /// [`Error::PlanNotInFlight`].
    ///
    /// # Complexity
    /// O(growths of the plans undone + blocks that they took).
    pub fn rollback(&mut self, plan: PlanId) -> Result<()> {
        let keep = self.plans.iter().position(|record| record.id == plan).ok_or(Error::PlanNotInFlight(plan))?;
        while self.plans.len() > keep {
            let mut record = self.plans.pop_back().expect("there are more plans than are kept");
            self.undo(&mut record);
            record.clear();
            self.spare_records.push(record);
            self.pool.cancel_newest_plan();
        }
        Ok(())
    }

    /// Where the newest plan stands, for [`Self::undo_to`].
    pub(crate) fn mark(&self) -> Mark {
        let record = self.plans.back().expect("a plan is open");
        Mark { growths: record.growths.len(), fills: record.fills.len(), copies: record.copies.len() }
    }

    /// Undoes what was done in the newest plan since the mark.
    pub(crate) fn undo_to(&mut self, mark: Mark) {
        let record = self.plans.back_mut().expect("a plan is open");
        let mut since = PlanRecord {
            id: record.id,
            growths: record.growths.split_off(mark.growths),
            fills: record.fills.split_off(mark.fills),
            copies: record.copies.split_off(mark.copies),
            moves: Vec::new(),
        };
        self.undo(&mut since);
    }

    /// Undoes what a record holds of a plan that does not run: what it took is named by older plans only.
    fn undo(&mut self, record: &mut PlanRecord) {
        for growth in record.growths.iter().rev() {
            if growth.is_of(&self.sequences) {
                self.rewind(growth.sequence as usize, growth.before / self.block_size);
            }
        }
        // What was never computed leaves the tree before blocks that were are released, which keeps those in order.
        for block in record.fills.drain(..) {
            self.pool.withdraw(block);
        }
        for growth in record.growths.drain(..).rev() {
            let copies = record.copies.split_off(record.copies.len() - growth.num_copies as usize);
            if !growth.is_of(&self.sequences) {
                if let Some(lost) = &mut self.lost_growths {
                    lost.push((growth.sequence, growth.epoch, growth.before));
                }
                continue;
            }
            let index = growth.sequence as usize;
            let in_flight = &mut self.sequences[index].in_flight;
            if in_flight.last().is_some_and(|&(plan, _)| plan == record.id) {
                in_flight.pop();
            }
            let named_by = in_flight.last().map(|&(plan, _)| plan);
            self.shrink(index, growth.before);
            // What others found in it may be on its way out since.
            let others = if self.tail_is_in_transfer(index) { Tail::Shared } else { Tail::Own };
            self.sequences[index].tail = growth.tail.max(others);
            if growth.has_drafts {
                self.forget_drafts(index);
            }
            let sequence = &mut self.sequences[index];
            for BlockCopy { group, column, source, target } in copies {
                sequence.tables[group as usize].blocks[column as usize] = source;
                self.pool.hold(source);
                self.pool.release(target, named_by);
            }
        }
    }

    fn check_oldest(&self, plan: PlanId) -> Result<()> {
        match self.plans.front() {
            Some(record) if record.id == plan => Ok(()),
            Some(record) if self.pool.is_in_flight(plan) => {
                Err(Error::PlanOutOfOrder { found: plan, oldest: record.id })
            }
            _ => Err(Error::PlanNotInFlight(plan)),
        }
    }
}
