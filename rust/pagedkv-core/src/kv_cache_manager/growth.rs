//! Growth of a sequence in the newest plan: what room it takes, the blocks that it gets, and what is noted of it.

use smallvec::SmallVec;

use super::{BlockCopy, ComputedBlocks, KVCacheManager, Sequence, Tail};
use crate::block_pool::BlockPool;
use crate::error::Result;
use crate::ids::{BlockId, NULL_BLOCK, SequenceId};

/// Slots for the tokens of one growth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedSlots {
    /// Where each new token's key and value go, group after group: `block * block_size + offset`.
    pub slot_mapping: SmallVec<[i64; 2]>,
    /// Blocks to copy before anything is written, at most one per group.
    pub copies: Vec<BlockCopy>,
}

impl KVCacheManager {
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
        let record = self.plans.back_mut().expect("a plan is open");
        record.grew(index, sequence, (before, start), tail, num_copies);
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
        sequence.num_scheduled = before + 1;
        let record = self.plans.back_mut().expect("a plan is open");
        record.grew(index, sequence, (before, before), Tail::Own, 0);
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
        let tail = sequence.tail;
        record.grew(index, sequence, (from, from), tail, 0);
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
}

/// A block for a table of the group.
pub(super) fn take_block(pool: &mut BlockPool, group: usize) -> BlockId {
    let block = pool.allocate_one();
    pool.blocks[block.index()].group = group as u8;
    block
}
