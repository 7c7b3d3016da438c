//! Growth inside plans, and what is kept to undo it.

use super::{ComputedBlocks, KVCacheManager, Sequence, Tail};
use crate::error::{Error, Result};
use crate::ids::{BlockId, NO_NODE, PlanId, SequenceId};

/// A block that was copied because the sequence had to write into one that others need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Entry of the block table that changed.
    pub column: u32,
    /// The block that was there, and whose contents are needed.
    pub source: BlockId,
    /// The block that is there now.
    pub target: BlockId,
}

/// One growth of one sequence in a plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    pub(super) sequence: u32,
    epoch: u32,
    /// Computed length before, where writing starts (hits lie between), and after.
    before: u32,
    start: u32,
    pub(super) after: u32,
    copy: Option<BlockCopy>,
    /// What the tail was before; a copy by which it became the sequence's own goes back, and so do those of others.
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

/// What a plan did, so that it can be published or undone.
#[derive(Debug)]
pub(crate) struct PlanRecord {
    pub(crate) id: PlanId,
    pub(crate) growths: Vec<Growth>,
    /// Blocks that the plan fills with known tokens.
    pub(crate) fills: Vec<BlockId>,
}

/// What a growth did to a sequence's block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extension {
    pub(crate) copy: Option<BlockCopy>,
    /// Table entries before the growth; those from here on are new.
    pub(crate) first_new_column: u32,
}

/// Slots for the tokens of one growth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedSlots {
    /// Where each new token's key and value go: `block * block_size + offset`.
    pub slot_mapping: Vec<i64>,
    /// A block to copy before anything is written.
    pub copy: Option<BlockCopy>,
}

impl KVCacheManager {
    /// Opens a plan. Growth goes to the newest plan.
    pub fn begin_plan(&mut self) -> PlanId {
        let id = self.pool.begin_plan();
        let mut record = self.spare_records.pop().unwrap_or(PlanRecord { id, growths: Vec::new(), fills: Vec::new() });
        record.id = id;
        self.plans.push_back(record);
        id
    }

    /// Gives a sequence slots for its next `num_new_tokens` tokens in the newest plan, after the blocks of `computed`.
    /// See [`Self::allocate_slots_with_drafts`].
    ///
    /// # Errors
    /// Those of [`Self::allocate_slots_with_drafts`].
    ///
    /// # Complexity
    /// O(new tokens + hit blocks).
    pub fn allocate_slots(
        &mut self,
        sequence: SequenceId,
        num_new_tokens: u32,
        computed: &ComputedBlocks,
    ) -> Result<Option<AllocatedSlots>> {
        self.allocate_slots_with_drafts(sequence, num_new_tokens, 0, computed)
    }

    /// Ends the oldest plan: its tokens are computed and the blocks that they filled are public. Tokens that nobody told
    /// by now, and draft tokens that nobody accepted, do not count: their slots are taken back.
    ///
    /// # Errors
    /// [`Error::PlanOutOfOrder`], [`Error::PlanNotInFlight`]; [`Error::UntoldTokens`] where a later plan stands on tokens
    /// that nobody told.
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
        for growth in record.growths.drain(..) {
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
        self.spare_records.push(record);
    }

    /// Undoes a plan in flight and every plan behind it: growth, copies, and holds on hit blocks. Evictions stay.
    ///
    /// # Errors
    /// [`Error::PlanNotInFlight`].
    pub fn rollback(&mut self, plan: PlanId) -> Result<()> {
        let keep = self.plans.iter().position(|record| record.id == plan).ok_or(Error::PlanNotInFlight(plan))?;
        while self.plans.len() > keep {
            let mut record = self.plans.pop_back().expect("there are more plans than are kept");
            self.undo(&mut record);
            self.spare_records.push(record);
            self.pool.cancel_newest_plan();
        }
        Ok(())
    }

    /// Blocks that a growth takes from those that are available, hit blocks that nobody holds included.
    pub(crate) fn blocks_needed(&self, index: usize, num_new_tokens: u32, computed: &ComputedBlocks) -> u32 {
        let sequence = &self.sequences[index];
        let end = sequence.num_scheduled + computed.num_tokens + num_new_tokens;
        let have = (sequence.table.len() + computed.blocks.len()) as u32;
        let new = end.div_ceil(self.block_size).saturating_sub(have);
        let evictable = computed.blocks.iter().filter(|&&block| self.pool.is_evictable(block)).count() as u32;
        new + evictable + u32::from(self.tail_to_copy(index).is_some())
    }

    /// Grows a sequence in the newest plan. The caller has made sure of the room.
    pub(crate) fn extend(&mut self, index: usize, num_new_tokens: u32, computed: &ComputedBlocks) -> Extension {
        let plan = self.plans.back().expect("a plan is open").id;
        if self.sequences[index].num_scheduled == 0 {
            self.renew_root(index);
        }
        let tail = self.sequences[index].tail;
        let copy = self.unshare_tail(index, plan);
        let sequence = &mut self.sequences[index];
        let before = sequence.num_scheduled;
        let first_new_column = sequence.table.len() as u32;
        let start = before + computed.num_tokens;
        let after = start + num_new_tokens;
        self.pool.hold_hits(&computed.blocks, sequence.retention);
        sequence.table.extend_from_slice(&computed.blocks);
        if !computed.blocks.is_empty() {
            sequence.path = computed.node;
            sequence.path_len += computed.blocks.len() as u32;
        }
        while (sequence.table.len() as u32) < after.div_ceil(self.block_size) {
            sequence.table.push(self.pool.allocate_one());
        }
        sequence.num_scheduled = after;
        match sequence.in_flight.last_mut() {
            Some(last) if last.0 == plan => last.1 = after,
            _ => sequence.in_flight.push((plan, after)),
        }
        let growth = Growth {
            sequence: index as u32,
            epoch: sequence.epoch,
            before,
            start,
            after,
            copy,
            tail,
            has_drafts: false,
        };
        self.plans.back_mut().expect("a plan is open").growths.push(growth);
        self.register_filled(index);
        Extension { copy, first_new_column }
    }

    /// Takes the last tokens that a sequence grew by in the newest plan out of it again. They are not known tokens.
    pub(crate) fn shorten(&mut self, index: usize, num_tokens: u32) {
        let record = self.plans.back_mut().expect("a plan is open");
        let growth = record.growths.iter_mut().rfind(|growth| growth.sequence as usize == index);
        let growth = growth.expect("the sequence grew in the plan");
        growth.after -= num_tokens;
        let named = (record.id, growth.after);
        // The plan is not out yet: what it does not keep is named by older ones only.
        let sequence = &mut self.sequences[index];
        sequence.in_flight.pop();
        self.shrink(index, named.1);
        self.sequences[index].in_flight.push(named);
    }

    /// Puts every block that is, or is about to be, full of known tokens on its node.
    pub(super) fn register_filled(&mut self, index: usize) {
        let block_size = self.block_size;
        let sequence = &mut self.sequences[index];
        if !sequence.uses_cache {
            return;
        }
        loop {
            let end = (sequence.path_len + 1) * block_size;
            if end > sequence.num_scheduled || end > sequence.tokens.len() {
                return;
            }
            let block = sequence.table[sequence.path_len as usize];
            let mut key = Vec::new();
            sequence.identity.encode_block(end - block_size, end, &mut key);
            let prefixes = &mut self.pool.prefixes;
            let node = sequence.tokens.with_range(end - block_size, end, &mut self.scratch, |tokens| {
                prefixes.intern(sequence.path, tokens, &key)
            });
            self.pool.attach(block, node);
            if let Some(retention) = sequence.retention {
                self.pool.retain(block, retention);
            }
            sequence.path = node;
            sequence.path_len += 1;
            match sequence.in_flight.iter().find(|&&(_, after)| end <= after) {
                Some(&(plan, _)) if end > sequence.num_computed => {
                    let filling = self.plans.iter_mut().find(|record| record.id == plan);
                    filling.expect("a plan that names the sequence is in flight").fills.push(block);
                }
                _ => self.pool.publish(block),
            }
        }
    }

    /// The block into which the next token goes, if it must be copied first.
    fn tail_to_copy(&self, index: usize) -> Option<BlockId> {
        let sequence = &self.sequences[index];
        if sequence.tail == Tail::Own || sequence.num_scheduled.is_multiple_of(self.block_size) {
            return None;
        }
        let tail = sequence.table[(sequence.num_scheduled / self.block_size) as usize];
        let record = &self.pool.blocks[tail.index()];
        let is_needed = record.ref_count > 1
            || record.node != NO_NODE && self.pool.carries_descendants(tail)
            || sequence.tail == Tail::Cut && self.pool.has_fence(tail);
        is_needed.then_some(tail)
    }

    /// Makes the block into which the next token goes the sequence's own: by a copy if others hold it, or the cache or a
    /// plan in flight needs it, else by taking it out of the cache.
    fn unshare_tail(&mut self, index: usize, plan: PlanId) -> Option<BlockCopy> {
        let source = self.tail_to_copy(index);
        let sequence = &mut self.sequences[index];
        let offset = sequence.num_scheduled % self.block_size;
        let column = sequence.num_scheduled / self.block_size;
        if std::mem::take(&mut sequence.tail) == Tail::Own || offset == 0 {
            return None;
        }
        let Some(source) = source else {
            self.pool.forget(sequence.table[column as usize]);
            return None;
        };
        let target = self.pool.allocate_one();
        sequence.table[column as usize] = target;
        self.pool.release(source, Some(plan));
        Some(BlockCopy { column, source, target })
    }

    /// Where the newest plan stands, for [`Self::undo_to`].
    pub(crate) fn mark(&self) -> (usize, usize) {
        let record = self.plans.back().expect("a plan is open");
        (record.growths.len(), record.fills.len())
    }

    /// Undoes what was done in the newest plan since the mark.
    pub(crate) fn undo_to(&mut self, (growths, fills): (usize, usize)) {
        let record = self.plans.back_mut().expect("a plan is open");
        let (growths, fills) = (record.growths.split_off(growths), record.fills.split_off(fills));
        let mut since = PlanRecord { id: record.id, growths, fills };
        self.undo(&mut since);
    }

    /// Undoes what a record holds of a plan that does not run: what it took is named by older plans only.
    fn undo(&mut self, record: &mut PlanRecord) {
        for growth in record.growths.iter().rev() {
            if growth.is_of(&self.sequences) {
                self.sequences[growth.sequence as usize].rewind(&self.pool.prefixes, growth.before / self.block_size);
            }
        }
        // What was never computed leaves the tree before blocks that were are released, which keeps those in order.
        for block in record.fills.drain(..) {
            self.pool.withdraw(block);
        }
        for growth in record.growths.drain(..).rev() {
            if !growth.is_of(&self.sequences) {
                continue;
            }
            let index = growth.sequence as usize;
            let in_flight = &mut self.sequences[index].in_flight;
            if in_flight.last().is_some_and(|&(plan, _)| plan == record.id) {
                in_flight.pop();
            }
            let named_by = in_flight.last().map(|&(plan, _)| plan);
            self.shrink(index, growth.before);
            let sequence = &mut self.sequences[index];
            sequence.tail = growth.tail;
            if growth.has_drafts {
                self.forget_drafts(index);
            }
            let sequence = &mut self.sequences[index];
            if let Some(BlockCopy { column, source, target }) = growth.copy {
                sequence.table[column as usize] = source;
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

    /// The known or coming tokens of a sequence's growth, for the scheduler's arrays.
    pub(crate) fn sequence(&self, index: usize) -> &Sequence {
        &self.sequences[index]
    }
}
