//! The manager's verbs over arrays of sequences: one call each, all of it or nothing of it.
//!
//! A batch does what the same calls do one after another. It checks everything before it changes anything, and an error
//! says which element it is about. A sequence is listed once, except to be forked.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::sequence::Table;
use super::{ComputedBlocks, KVCacheManager, Tail, check_identity, check_tokens};
use crate::error::{Error, Result, invalid, invalid_element};
use crate::identity::Identity;
use crate::ids::{BlockId, NO_NODE, SequenceId};
use crate::table_export::TableExport;

/// What a batch of growths asks for; the arrays have an entry per sequence.
#[derive(Clone, Copy, Debug, Default)]
pub struct Growths<'a> {
    /// The sequences.
    pub sequences: &'a [SequenceId],
    /// Tokens that the plan computes of each.
    pub num_new_tokens: &'a [u32],
    /// Guesses behind them; empty for none.
    pub num_draft_tokens: &'a [u32],
    /// What a lookup found for each; empty for nothing.
    pub computed: &'a [ComputedBlocks],
}

/// Slots for the tokens of a batch, in the order of its sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchSlots {
    /// Where each token's key and value go, group after group.
    pub slot_mapping: Vec<i64>,
    /// Where each sequence's tokens start, and their number in all.
    pub query_start_loc: Vec<i32>,
    /// Lengths of the sequences with these tokens.
    pub seq_lens: Vec<i32>,
    /// Source and target of blocks to copy before anything is written.
    pub copies: Vec<[i32; 2]>,
    /// Group, which sequence of the batch, column, block: what was added to the block tables. What left a window is not
    /// told; nobody reads it.
    pub table_updates: Vec<[i32; 4]>,
}

impl Growths<'_> {
    fn num_slots(&self, i: usize) -> u32 {
        self.num_new_tokens[i] + self.num_drafts(i)
    }

    fn num_drafts(&self, i: usize) -> u32 {
        self.num_draft_tokens.get(i).copied().unwrap_or(0)
    }
}

impl KVCacheManager {
    /// Sequences of the prompts that the bounds cut from `tokens`, all with the same extra keys.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for bounds or images out of order, [`Error::InvalidElement`] for a prompt without tokens
    /// or a negative token.
    pub fn create_batch(
        &mut self,
        tokens: &[i32],
        start_loc: &[i32],
        identity: &Arc<Identity>,
        uses_cache: bool,
    ) -> Result<Vec<SequenceId>> {
        let prompts = spans(start_loc, start_loc.len().saturating_sub(1), tokens.len())?;
        check_identity(identity)?;
        check_tokens("prompt_token_ids", tokens)?;
        if let Some(i) = prompts.iter().position(Range::is_empty) {
            return invalid_element("start_loc", i + 1, "a prompt of at least one token", "none");
        }
        let create = |prompt: Range<usize>| self.create(tokens[prompt].into(), identity.clone(), uses_cache);
        prompts.into_iter().map(create).collect()
    }

    /// Ends sequences and releases their blocks.
    ///
    /// # Errors
    /// [`Error::InBatch`] for a sequence that is not live, [`Error::InvalidElement`] for one that is listed twice.
    pub fn free_batch(&mut self, sequences: &[SequenceId]) -> Result<()> {
        let indices = self.find_each(sequences)?;
        indices.into_iter().for_each(|index| self.remove(index));
        Ok(())
    }

    /// A fork of each sequence; one that is listed several times is forked as often.
    ///
    /// # Errors
    /// [`Error::InBatch`] for a sequence that is not live, or in a plan in flight.
    pub fn fork_batch(&mut self, sequences: &[SequenceId]) -> Result<Vec<SequenceId>> {
        let idle = |(i, &id)| self.find_idle(id).map_err(|error| in_batch(i, error));
        let indices = sequences.iter().enumerate().map(idle).collect::<Result<Vec<_>>>()?;
        Ok(indices.into_iter().map(|index| self.fork_at(index)).collect())
    }

    /// Adds known tokens to sequences: to the i-th those between its bounds, of which the first `num_accepted[i]` are
    /// guesses that hold (none where the array is empty). See [`Self::append_accepted`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for bounds out of order or an array of another length; [`Error::InBatch`] and
    /// [`Error::InvalidElement`] as for [`Self::append_accepted`], or for a sequence that is listed twice.
    pub fn append_tokens_batch(
        &mut self,
        sequences: &[SequenceId],
        tokens: &[i32],
        start_loc: &[i32],
        num_accepted: &[u32],
    ) -> Result<()> {
        let indices = self.find_each(sequences)?;
        let spans = spans(start_loc, sequences.len(), tokens.len())?;
        check_len("num_accepted", num_accepted.len(), sequences.len(), true)?;
        check_tokens("token_ids", tokens)?;
        let accepted = |i: usize| num_accepted.get(i).copied().unwrap_or(0);
        for (i, (&index, span)) in indices.iter().zip(&spans).enumerate() {
            self.check_append(index, &tokens[span.clone()], accepted(i)).map_err(|error| in_batch(i, error))?;
        }
        for (i, (&index, span)) in indices.iter().zip(spans).enumerate() {
            self.append_checked(index, &tokens[span], accepted(i));
        }
        Ok(())
    }

    /// What a lookup finds for each sequence. It sees what earlier calls gave to plans in flight, and nothing of the
    /// batch that it is made for.
    ///
    /// # Errors
    /// [`Error::InBatch`] for a sequence that is not live.
    pub fn get_computed_blocks_batch(&self, sequences: &[SequenceId]) -> Result<Vec<ComputedBlocks>> {
        let look_up = |(i, &id)| self.get_computed_blocks(id).map_err(|error| in_batch(i, error));
        sequences.iter().enumerate().map(look_up).collect()
    }

    /// Slots in the newest plan for all of these tokens; `None`, and nothing changed, if there is no room for all.
    ///
    /// # Errors
    /// [`Error::NoPlan`]; [`Error::InvalidArgument`] for an array of another length; else [`Error::InBatch`] or
    /// [`Error::InvalidElement`], as for [`Self::allocate_slots_with_drafts`], or for a sequence that is listed twice.
    ///
    /// # Complexity
    /// O(sequences + new tokens + hit blocks).
    pub fn allocate_slots_batch(&mut self, growths: &Growths<'_>) -> Result<Option<BatchSlots>> {
        let indices = self.check_growths(growths)?;
        if self.num_with_room(&indices, growths) < indices.len() {
            return Ok(None);
        }
        // Nobody's growth takes what another one of the batch was told to be cached.
        let hits = || growths.computed.iter().flat_map(ComputedBlocks::held);
        hits().for_each(|block| self.pool.hold(block));
        let mut slots = BatchSlots::default();
        slots.query_start_loc.push(0);
        for (i, &index) in indices.iter().enumerate() {
            self.grow_in_batch(i, index, growths, &mut slots);
        }
        hits().for_each(|block| self.pool.release(block, None));
        slots.slot_mapping = self.slots_of(&indices, growths);
        Ok(Some(slots))
    }

    /// How many sequences from the first on [`Self::allocate_slots_batch`] has room for.
    ///
    /// # Errors
    /// Those of [`Self::allocate_slots_batch`].
    pub fn num_that_fit(&self, growths: &Growths<'_>) -> Result<usize> {
        let indices = self.check_growths(growths)?;
        Ok(self.num_with_room(&indices, growths))
    }

    /// Writes the block tables of sequences, row by row, the rest of each row as null blocks.
    ///
    /// # Errors
    /// [`Error::InBatch`] for a sequence that is not live; [`Error::InvalidArgument`] for a group that the pool has not, or
    /// where `out` has not a row of enough columns per sequence.
    pub fn write_block_table(
        &self,
        sequences: &[SequenceId],
        group: usize,
        columns: usize,
        out: &mut [i32],
    ) -> Result<()> {
        self.tables_of(sequences, group)?.write_rows(columns, out)
    }

    /// Writes the block tables of sequences end to end: where each starts, its blocks, and the tokens in its last one.
    /// Answers how many blocks there are; `indices` may be longer.
    ///
    /// # Errors
    /// [`Error::InBatch`] for a sequence that is not live, [`Error::InvalidArgument`] for an array of the wrong length.
    pub fn write_csr(
        &self,
        sequences: &[SequenceId],
        group: usize,
        indptr: &mut [i32],
        indices: &mut [i32],
        last_page_len: &mut [i32],
    ) -> Result<usize> {
        self.tables_of(sequences, group)?.write_csr(indptr, indices, last_page_len)
    }

    fn tables_of(&self, sequences: &[SequenceId], group: usize) -> Result<TableExport<'_>> {
        self.check_group(group)?;
        let table = |(i, &id)| {
            let sequence = &self.sequences[self.find(id).map_err(|error| in_batch(i, error))?];
            Ok((sequence.tables[group].blocks.as_slice(), sequence.num_scheduled))
        };
        let tables = sequences.iter().enumerate().map(table).collect::<Result<_>>()?;
        Ok(TableExport { tables, block_size: self.groups[group].block_size })
    }

    /// The places of sequences that live, each listed once.
    fn find_each(&self, sequences: &[SequenceId]) -> Result<Vec<usize>> {
        let mut seen = vec![0_u64; self.sequences.len().div_ceil(64)];
        let find = |(i, &id): (usize, &SequenceId)| {
            let index = self.find(id).map_err(|error| in_batch(i, error))?;
            let (word, bit) = (&mut seen[index / 64], 1 << (index % 64));
            if *word & bit != 0 {
                return invalid_element(
                    "sequences",
                    i,
                    "each sequence once",
                    format!("sequence {} again", id.to_bits()),
                );
            }
            *word |= bit;
            Ok(index)
        };
        sequences.iter().enumerate().map(find).collect()
    }

    fn check_growths(&self, growths: &Growths<'_>) -> Result<Vec<usize>> {
        let indices = self.find_each(growths.sequences)?;
        check_len("num_new_tokens", growths.num_new_tokens.len(), indices.len(), false)?;
        check_len("num_draft_tokens", growths.num_draft_tokens.len(), indices.len(), true)?;
        check_len("computed", growths.computed.len(), indices.len(), true)?;
        let none = ComputedBlocks::default();
        for (i, &id) in growths.sequences.iter().enumerate() {
            let computed = growths.computed.get(i).unwrap_or(&none);
            let checked = self.check_growth(id, growths.num_new_tokens[i], growths.num_drafts(i), computed);
            checked.map_err(|error| in_batch(i, error))?;
        }
        Ok(indices)
    }

    /// Sequences from the first on for whose growth there is room. Blocks that several hit count once, and so do copies of
    /// a block that all its holders write but the last; where a sequence was cut inside a cached block, a copy counts
    /// even if it turns out to be spared.
    fn num_with_room(&self, indices: &[usize], growths: &Growths<'_>) -> usize {
        let nothing = ComputedBlocks::default();
        let mut hits: HashSet<BlockId> = HashSet::new();
        let mut tails: HashMap<BlockId, u32> = HashMap::new();
        let mut hit_by: HashMap<BlockId, u32> = HashMap::new();
        for block in growths.computed.iter().flat_map(ComputedBlocks::held) {
            *hit_by.entry(block).or_default() += 1;
        }
        let mut needed = 0;
        for (i, &index) in indices.iter().enumerate() {
            let sequence = &self.sequences[index];
            let found = growths.computed.get(i).unwrap_or(&nothing);
            let end = sequence.num_scheduled + found.num_tokens + growths.num_slots(i);
            for (group, (table, spec)) in sequence.tables.iter().zip(&self.groups).enumerate() {
                let have = table.len() + found.group_blocks(group).len() as u32;
                needed += end.div_ceil(spec.block_size).saturating_sub(have);
                if sequence.tail == Tail::Own || sequence.num_scheduled.is_multiple_of(spec.block_size) {
                    continue;
                }
                let tail = table.blocks[(sequence.num_scheduled / spec.block_size) as usize];
                let record = &self.pool.blocks[tail.index()];
                let copied = tails.entry(tail).or_default();
                let holders = record.ref_count + hit_by.get(&tail).copied().unwrap_or(0) - *copied;
                let is_fenced = *copied > 0 || self.pool.has_fence(tail);
                // Another growth of the batch may continue what the block holds.
                let continued = record.node != NO_NODE && (indices.len() > 1 || self.pool.carries_descendants(tail));
                if holders > 1 || continued || sequence.tail == Tail::Cut && is_fenced {
                    *copied += 1;
                    needed += 1;
                }
            }
            needed += found.held().filter(|&block| self.pool.is_evictable(block) && hits.insert(block)).count() as u32;
            if needed > self.pool.num_available() {
                return i;
            }
        }
        indices.len()
    }

    fn grow_in_batch(&mut self, i: usize, index: usize, growths: &Growths<'_>, slots: &mut BatchSlots) {
        let nothing = ComputedBlocks::default();
        let first_new: SmallVec<[u32; 4]> = self.sequences[index].tables.iter().map(Table::len).collect();
        self.extend(index, growths.num_slots(i), growths.computed.get(i).unwrap_or(&nothing));
        self.mark_drafts(index, growths.num_drafts(i));
        let sequence = &self.sequences[index];
        let mut update = |group: u32, column: u32| {
            let block = sequence.tables[group as usize].blocks[column as usize].get();
            slots.table_updates.push([group, i as u32, column, block].map(|number| number as i32));
        };
        for copy in self.last_copies() {
            slots.copies.push([copy.source.get() as i32, copy.target.get() as i32]);
            update(copy.group, copy.column);
        }
        for (group, &first) in (0..).zip(&first_new) {
            (first..sequence.tables[group as usize].len()).for_each(|column| update(group, column));
        }
        slots.seq_lens.push(sequence.num_scheduled as i32);
        let start = slots.query_start_loc.last().copied().unwrap_or(0);
        slots.query_start_loc.push(start + growths.num_slots(i) as i32);
    }

    /// Slots of what was just grown, group after group.
    fn slots_of(&self, indices: &[usize], growths: &Growths<'_>) -> Vec<i64> {
        let num_tokens: usize = (0..indices.len()).map(|i| growths.num_slots(i) as usize).sum();
        let mut slots = Vec::with_capacity(num_tokens * self.groups.len());
        for group in 0..self.groups.len() {
            for (i, &index) in indices.iter().enumerate() {
                let end = self.sequences[index].num_scheduled;
                slots.extend((end - growths.num_slots(i)..end).map(|position| self.slot(index, group, position)));
            }
        }
        slots
    }

    /// Cache groups of every block table.
    pub fn num_groups(&self) -> usize {
        self.groups.len()
    }
}

/// The spans that the bounds cut from `len` ids, one per sequence.
fn spans(start_loc: &[i32], num_spans: usize, len: usize) -> Result<Vec<Range<usize>>> {
    check_len("start_loc", start_loc.len(), num_spans + 1, false)?;
    if let Some(i) = start_loc.windows(2).position(|pair| pair[0] > pair[1]) {
        return invalid_element("start_loc", i + 1, format!("at least {}", start_loc[i]), start_loc[i + 1]);
    }
    if start_loc[0] != 0 {
        return invalid_element("start_loc", 0, "0", start_loc[0]);
    }
    if usize::try_from(start_loc[num_spans]) != Ok(len) {
        return invalid_element(
            "start_loc",
            num_spans,
            format!("{len}, the number of token ids"),
            start_loc[num_spans],
        );
    }
    Ok(start_loc.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect())
}

fn check_len(argument: &'static str, len: usize, expected: usize, may_be_empty: bool) -> Result<()> {
    if len == expected || may_be_empty && len == 0 {
        Ok(())
    } else {
        invalid(argument, format!("{expected} entries"), len)
    }
}

/// An error about an element of a batch.
fn in_batch(index: usize, error: Error) -> Error {
    match error {
        Error::NoPlan => error,
        Error::InvalidArgument { argument, expected, found } => {
            Error::InvalidElement { argument, index, expected, found }
        }
        error => Error::InBatch { index, error: Box::new(error) },
    }
}
