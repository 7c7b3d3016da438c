//! Growth inside plans, and what is kept to undo it.

use smallvec::SmallVec;

use super::{ComputedBlocks, KVCacheManager, Sequence, Tail};
use crate::block_pool::BlockPool;
use crate::error::{Error, Result};
use crate::ids::{BlockId, NO_NODE, NULL_BLOCK, NodeId, PlanId, SequenceId};

/// A block that was copied because the sequence had to write into one that others need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Cache group of the block table.
    pub group: u32,
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
    /// The last copies of the record at the time; those by which the tail became the sequence's own go back.
    num_copies: u32,
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

    fn clear(&mut self) {
        self.growths.clear();
        self.fills.clear();
        self.copies.clear();
        self.moves.clear();
    }
}

/// Slots for the tokens of one growth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedSlots {
    /// Where each new token's key and value go, group after group: `block * block_size + offset`.
    pub slot_mapping: SmallVec<[i64; 2]>,
    /// Blocks to copy before anything is written, at most one per group.
    pub copies: Vec<BlockCopy>,
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

    /// Blocks that a growth takes from those that are available, hit blocks that nobody holds included.
    pub(crate) fn blocks_needed(&self, index: usize, num_new_tokens: u32, computed: &ComputedBlocks) -> u32 {
        let sequence = &self.sequences[index];
        let end = sequence.num_scheduled + computed.num_tokens + num_new_tokens;
        let mut needed = 0;
        for (group, (table, spec)) in sequence.tables.iter().zip(&self.groups).enumerate() {
            let hits = computed.group_blocks(group);
            let have = table.len() + hits.len() as u32;
            needed += end.div_ceil(spec.block_size).saturating_sub(have) + self.num_evictable(hits);
            needed += u32::from(self.tail_to_copy(index, group).is_some());
        }
        needed
    }

    /// Blocks that are available as long as nobody takes them.
    pub(crate) fn num_evictable(&self, blocks: &[BlockId]) -> u32 {
        blocks.iter().filter(|&&block| self.pool.is_evictable(block)).count() as u32
    }

    /// Grows a sequence in the newest plan. The caller has made sure of the room.
    pub(crate) fn extend(&mut self, index: usize, num_new_tokens: u32, computed: &ComputedBlocks) {
        let plan = self.plans.back().expect("a plan is open").id;
        if self.sequences[index].num_scheduled == 0 {
            self.renew_root(index);
        }
        let tail = self.sequences[index].tail;
        let num_copies = self.unshare_tail(index, plan);
        let before = self.sequences[index].num_scheduled;
        let start = before + computed.num_tokens;
        let after = start + num_new_tokens;
        if computed.num_tokens > 0 {
            self.take_hits(index, computed);
        }
        let sequence = &mut self.sequences[index];
        for (group, (table, spec)) in sequence.tables.iter_mut().zip(&self.groups).enumerate() {
            while table.len() < after.div_ceil(spec.block_size) {
                table.blocks.push(take_block(&mut self.pool, group));
            }
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
            num_copies,
            tail,
            has_drafts: false,
        };
        self.plans.back_mut().expect("a plan is open").growths.push(growth);
        self.register_filled(index);
    }

    /// Whether a sequence may grow by [`Self::extend_by_one`], and whether that takes a block.
    pub(crate) fn decodes(&self, index: usize) -> Option<bool> {
        let Sequence { tables, tail, moves, num_scheduled, .. } = &self.sequences[index];
        let [table] = tables.as_slice() else { return None };
        let is_plain = *tail == Tail::Own && moves.is_none() && *num_scheduled > 0;
        is_plain.then_some(table.len() * self.block_size == *num_scheduled)
    }

    /// Grows a sequence by one token in the newest plan, as [`Self::extend`] does; the caller has asked [`Self::decodes`].
    /// Answers the sequence's epoch and its columns.
    pub(crate) fn extend_by_one(&mut self, index: usize, takes_block: bool) -> (u32, u32) {
        let sequence = &mut self.sequences[index];
        if takes_block {
            sequence.tables[0].blocks.push(take_block(&mut self.pool, 0));
        }
        let (epoch, num_columns) = (sequence.epoch, sequence.tables[0].len());
        let before = sequence.num_scheduled;
        let after = before + 1;
        sequence.num_scheduled = after;
        let record = self.plans.back_mut().expect("a plan is open");
        match sequence.in_flight.last_mut() {
            Some(last) if last.0 == record.id => last.1 = after,
            _ => sequence.in_flight.push((record.id, after)),
        }
        record.growths.push(Growth {
            sequence: index as u32,
            epoch,
            before,
            start: before,
            after,
            num_copies: 0,
            tail: Tail::Own,
            has_drafts: false,
        });
        self.register_filled(index);
        (epoch, num_columns)
    }

    /// The copies of the newest growth.
    pub(crate) fn last_copies(&self) -> &[BlockCopy] {
        let record = self.plans.back().expect("a plan is open");
        let num_copies = record.growths.last().map_or(0, |growth| growth.num_copies as usize);
        &record.copies[record.copies.len() - num_copies..]
    }

    /// Gives a sequence the blocks that a lookup found for it. Holds come before anything is allocated.
    pub(super) fn take_hits(&mut self, index: usize, computed: &ComputedBlocks) {
        let sequence = &mut self.sequences[index];
        for (group, table) in sequence.tables.iter_mut().enumerate() {
            let blocks = computed.group_blocks(group);
            self.pool.hold_hits(blocks, sequence.retention);
            table.num_null += blocks.iter().filter(|&&block| block == NULL_BLOCK).count() as u32;
            table.blocks.extend_from_slice(blocks);
        }
        sequence.path_len += computed.num_tokens / self.block_size;
        self.set_path(index, computed.node);
    }

    /// Lets a sequence grow in the newest plan by tokens that it holds and that the plan moves to their places.
    pub(super) fn grow_by_moves(&mut self, index: usize, from: u32) {
        let record = self.plans.back_mut().expect("a plan is open");
        let sequence = &mut self.sequences[index];
        let (epoch, tail, after) = (sequence.epoch, sequence.tail, sequence.num_scheduled);
        sequence.in_flight.push((record.id, after));
        let growth = Growth {
            sequence: index as u32,
            epoch,
            before: from,
            start: from,
            after,
            num_copies: 0,
            tail,
            has_drafts: false,
        };
        record.growths.push(growth);
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
    #[inline]
    pub(super) fn register_filled(&mut self, index: usize) {
        let sequence = &self.sequences[index];
        if (sequence.path_len + 1) * self.block_size <= sequence.num_scheduled && sequence.uses_cache {
            self.register_up_to_now(index);
        }
    }

    #[inline(never)]
    fn register_up_to_now(&mut self, index: usize) {
        let block_size = self.block_size;
        let sequence = &self.sequences[index];
        let moved = sequence.moves.as_ref().map_or(u32::MAX, |moves| moves.from);
        let limit = sequence.num_scheduled.min(sequence.tokens.len()).min(moved);
        loop {
            let sequence = &self.sequences[index];
            let end = (sequence.path_len + 1) * block_size;
            if end > limit {
                return;
            }
            let mut key = Vec::new();
            sequence.identity.encode_block(end - block_size, end, &mut key);
            let prefixes = &mut self.pool.prefixes;
            let node = sequence.tokens.with_range(end - block_size, end, &mut self.scratch, |tokens| {
                prefixes.intern(sequence.path, tokens, &key)
            });
            self.sequences[index].path_len += 1;
            self.set_path(index, node);
            for group in 0..self.groups.len() {
                self.register(index, group, end, node);
            }
        }
    }

    /// Puts the block of a group that ends at `end`, if one does, on the node that ends there.
    fn register(&mut self, index: usize, group: usize, end: u32, node: NodeId) {
        let sequence = &self.sequences[index];
        let group_size = self.groups[group].block_size;
        if !end.is_multiple_of(group_size) {
            return;
        }
        let block = sequence.tables[group].blocks[(end / group_size - 1) as usize];
        if block == NULL_BLOCK {
            return;
        }
        if self.pool.blocks[block.index()].node == node {
            // It came back from where it waited for its sequence, and was never taken off.
            return;
        }
        self.pool.attach(block, node);
        if let Some(retention) = sequence.retention {
            self.pool.retain(block, retention);
        }
        match sequence.in_flight.iter().find(|&&(_, after)| end <= after) {
            Some(&(plan, _)) if end > sequence.num_computed => {
                let filling = self.plans.iter_mut().find(|record| record.id == plan);
                filling.expect("a plan that names the sequence is in flight").fills.push(block);
            }
            _ => self.pool.publish(block),
        }
    }

    /// The block of a group into which the next token goes, if it must be copied first.
    pub(crate) fn tail_to_copy(&self, index: usize, group: usize) -> Option<BlockId> {
        self.tail_to_copy_after(index, group, |_| 0)
    }

    /// The same, when others have let go of blocks before: so many holders of each.
    pub(crate) fn tail_to_copy_after(
        &self,
        index: usize,
        group: usize,
        num_released: impl FnOnce(BlockId) -> u32,
    ) -> Option<BlockId> {
        let sequence = &self.sequences[index];
        let block_size = self.groups[group].block_size;
        if sequence.tail == Tail::Own || sequence.num_scheduled.is_multiple_of(block_size) {
            return None;
        }
        let tail = sequence.tables[group].blocks[(sequence.num_scheduled / block_size) as usize];
        let record = &self.pool.blocks[tail.index()];
        let num_released = num_released(tail);
        let is_needed = record.ref_count > 1 + num_released
            || record.num_transfers > 0
            || record.node != NO_NODE && self.pool.carries_descendants(tail)
            || sequence.tail == Tail::Cut && (num_released > 0 || self.pool.has_fence(tail));
        is_needed.then_some(tail)
    }

    /// Makes the blocks into which the next token goes the sequence's own: by a copy if others hold one, or the cache or a
    /// plan in flight needs it, else by taking it out of the cache. Answers how many were copied.
    fn unshare_tail(&mut self, index: usize, plan: PlanId) -> u32 {
        if self.sequences[index].tail == Tail::Own {
            return 0;
        }
        // All are chosen before the first is copied: that may evict what continues another.
        let sources: SmallVec<[_; 4]> = (0..self.groups.len()).map(|group| self.tail_to_copy(index, group)).collect();
        let sequence = &mut self.sequences[index];
        sequence.tail = Tail::Own;
        let mut num_copies = 0;
        for (group, source) in sources.into_iter().enumerate() {
            let column = sequence.num_scheduled / self.groups[group].block_size;
            if sequence.num_scheduled.is_multiple_of(self.groups[group].block_size) {
                continue;
            }
            let entry = &mut sequence.tables[group].blocks[column as usize];
            let Some(source) = source else {
                self.pool.take_over(*entry);
                continue;
            };
            let target = take_block(&mut self.pool, group);
            *entry = target;
            self.pool.release(source, Some(plan));
            let copy = BlockCopy { group: group as u32, column, source, target };
            self.plans.back_mut().expect("a plan is open").copies.push(copy);
            num_copies += 1;
        }
        num_copies
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
            let sequence = &mut self.sequences[index];
            sequence.tail = growth.tail;
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

    /// The known or coming tokens of a sequence's growth, for the scheduler's arrays.
    pub(crate) fn sequence(&self, index: usize) -> &Sequence {
        &self.sequences[index]
    }
}

/// A block for a table of the group.
pub(super) fn take_block(pool: &mut BlockPool, group: usize) -> BlockId {
    let block = pool.allocate_one();
    pool.blocks[block.index()].group = group as u8;
    block
}
