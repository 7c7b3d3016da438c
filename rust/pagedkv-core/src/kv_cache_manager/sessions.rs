//! Sequences that nobody plans: what a session keeps between two turns.

use std::sync::Arc;

use super::{KVCacheManager, Table, Tail};
use crate::identity::Tokens;

impl KVCacheManager {
    /// Moves what a sequence has computed by plans that committed, its last token left out, to a sequence that a session
    /// holds. What plans in flight know of the old one is void. Answers the new index.
    ///
    /// # Complexity
    /// O(blocks + tokens of the sequence + copies of plans in flight).
    pub(crate) fn keep_for_a_session(&mut self, index: usize) -> usize {
        let sequence = &self.sequences[index];
        let num_computed = sequence.num_computed.min(sequence.tokens.len() - 1).min(self.num_before_copies(index));
        let kept = self.fork_at(index).index as usize;
        self.sequences[kept].is_kept = true;
        self.cut_computed(kept, num_computed);
        self.remove(index);
        kept
    }

    /// Tokens of a sequence before the first block that a plan in flight copies for it: if that plan never runs, nothing lies
    /// there.
    fn num_before_copies(&self, index: usize) -> u32 {
        let tables = &self.sequences[index].tables;
        let copies = self.plans.iter().flat_map(|record| &record.copies);
        let own =
            copies.filter(|copy| tables[copy.group as usize].blocks.get(copy.column as usize) == Some(&copy.target));
        own.map(|copy| copy.column * self.groups[copy.group as usize].block_size).min().unwrap_or(u32::MAX)
    }

    /// Lets no more than `most` tokens of a sequence that no plan names count as computed.
    pub(crate) fn cut_computed(&mut self, index: usize, most: u32) {
        let sequence = &mut self.sequences[index];
        if sequence.num_scheduled > most {
            sequence.tail = Tail::Cut;
            let kept = if self.has_all_that_is_needed_at(index, most) { most } else { 0 };
            self.sequences[index].num_computed = kept;
            self.shrink(index, kept);
        }
    }

    /// Gives a sequence other tokens, which begin with all that it has computed.
    pub(crate) fn set_tokens(&mut self, index: usize, tokens: Arc<Vec<i32>>) {
        self.sequences[index].tokens = Tokens::new(tokens);
    }

    /// The sequence goes on: its blocks are those of a block table again.
    pub(crate) fn leave_session(&mut self, index: usize) {
        self.sequences[index].is_kept = false;
    }

    /// A sequence keeps its blocks and loses its row: what was announced of it is void.
    pub(crate) fn end_residence(&mut self, index: usize) {
        self.sequences[index].epoch += 1;
    }

    /// Blocks that sequences hold between them, each counted once.
    pub(crate) fn num_distinct_blocks(&self, sequences: impl Iterator<Item = u32>) -> u32 {
        let mut blocks: Vec<_> =
            sequences.flat_map(|index| &self.sequences[index as usize].tables).flat_map(Table::held).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.len() as u32
    }

    /// Blocks that sessions keep and no other sequence holds.
    pub(crate) fn num_blocks_of_sessions(&self) -> u32 {
        let kept = self.sequences.iter().filter(|sequence| sequence.is_live && sequence.is_kept);
        let mut blocks: Vec<_> = kept.flat_map(|sequence| &sequence.tables).flat_map(Table::held).collect();
        blocks.sort_unstable();
        let by_block = blocks.chunk_by(|one, other| one == other);
        by_block.filter(|same| same.len() as u32 == self.pool.blocks[same[0].index()].ref_count).count() as u32
    }
}
