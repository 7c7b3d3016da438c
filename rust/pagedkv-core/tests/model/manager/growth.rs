//! What a lookup must find, and what a growth may take, copy and write.

use pagedkv_core::{AllocatedSlots, BlockCopy, BlockId, BlockState, SequenceId};

use super::{Entry, Growth, ManagerModel, index, named};
use crate::model::memory::History;

impl ManagerModel {
    /// How many blocks a lookup for the sequence must find.
    pub(crate) fn num_hits(&self, id: SequenceId) -> usize {
        let sequence = self.find(id);
        let first = sequence.num_scheduled / self.block_size;
        let stale = sequence.generation != self.generation;
        if !sequence.uses_cache || stale || !sequence.num_scheduled.is_multiple_of(self.block_size) {
            return 0;
        }
        // What is computed must not be reachable through a block alone that may never be.
        let is_pending = first > 0 && !self.is_computed(sequence.table[first - 1]);
        let mut hits = 0;
        while (first + hits + 1) * self.block_size < sequence.tokens.len() {
            let history = sequence.histories[(first + hits + 1) * self.block_size - 1];
            let mut found = (1..self.entries.len()).filter(|&block| self.is_hit(block, history)).peekable();
            if found.peek().is_none() || hits == 0 && is_pending && found.any(|block| self.is_computed(block)) {
                break;
            }
            hits += 1;
        }
        hits
    }

    /// Whether a lookup may answer with `blocks` for the sequence.
    pub(crate) fn check_hits(&self, id: SequenceId, blocks: &[BlockId]) {
        let sequence = self.find(id);
        let first = sequence.num_scheduled / self.block_size;
        for (i, &block) in blocks.iter().enumerate() {
            let end = (first + i + 1) * self.block_size;
            assert!(end < sequence.tokens.len(), "nothing is left to compute");
            let history = sequence.histories[end - 1];
            let is_hit = self.is_hit(index(block), history);
            assert!(is_hit, "block {block:?} is a hit, and does not hold the sequence's tokens");
        }
    }

    fn is_computed(&self, block: usize) -> bool {
        self.entries[block].is_some_and(|entry| entry.filling.is_none())
    }

    fn is_hit(&self, block: usize, history: History) -> bool {
        self.entries[block].is_some_and(|entry| {
            let usable = entry.filling.is_none() || self.num_holders(block) > 0;
            usable && entry.history == history && entry.generation == self.generation
        })
    }

    /// Whether the sequence must copy the block that it writes into next, and whether it may.
    fn copies(&self, id: SequenceId) -> (bool, bool) {
        let sequence = self.find(id);
        if sequence.num_scheduled.is_multiple_of(self.block_size) {
            return (false, false);
        }
        let tail = sequence.table[sequence.num_scheduled / self.block_size];
        // Who let go of a block in a plan in flight may still need what a cut sequence would write over: the plan reads
        // it, and its rollback gives it back.
        let is_needed = sequence.is_cut && self.is_named(tail);
        let must = self.num_holders(tail) > 1 || self.is_continued(tail) || is_needed;
        (must, must || sequence.is_cut && self.recently_named[tail])
    }

    /// Whether cached prefixes continue the one in the block.
    fn is_continued(&self, block: usize) -> bool {
        self.entries[block].is_some_and(|parent| {
            let mut entries = self.entries.iter().flatten();
            entries.any(|entry| {
                entry.generation == parent.generation && self.histories.continues(entry.history, parent.history)
            })
        })
    }

    /// Follows a call of `allocate_slots` for new tokens, the last `num_drafts` of them guesses, with the states of the blocks before it, and judges its answer.
    pub(crate) fn grow(
        &mut self,
        id: SequenceId,
        num_new_tokens: usize,
        num_drafts: usize,
        hits: &[BlockId],
        states: &[BlockState],
        answer: Option<&AllocatedSlots>,
    ) {
        let sequence = self.find(id).clone();
        let (must_copy, may_copy) = self.copies(id);
        let start = sequence.num_scheduled + hits.len() * self.block_size;
        let after = start + num_new_tokens;
        let first_new = sequence.table.len() + hits.len();
        let num_new = after.div_ceil(self.block_size).saturating_sub(first_new);
        let is_available = |state: &BlockState| matches!(state, BlockState::Free | BlockState::Cached);
        let available = states.iter().filter(|state| is_available(state)).count();
        let taken = hits.iter().filter(|&&hit| is_available(&states[index(hit)])).count();
        let fits = |copies| num_new + taken + usize::from(copies) <= available;
        let expected = [fits(must_copy), fits(may_copy)];
        assert!(expected.contains(&answer.is_some()), "{num_new} + {taken} of {available} blocks");
        let Some(AllocatedSlots { slot_mapping, copy }) = answer else {
            self.events.note("refusals", 1);
            return;
        };
        self.count_hits(hits, states);

        let mut table = sequence.table.clone();
        table.extend(hits.iter().map(|&hit| index(hit)));
        let mut new_blocks = Vec::new();
        assert!([must_copy, may_copy].contains(&copy.is_some()), "copy {copy:?}");
        if let Some(BlockCopy { column, source, target }) = *copy {
            let written = sequence.num_scheduled / self.block_size;
            assert_eq!((column as usize, index(source)), (written, table[written]), "the copy");
            table[written] = index(target);
            new_blocks.push(index(target));
            self.events.note("copies", 1);
            self.events.note("copies for the cache", u64::from(self.num_holders(index(source)) == 1));
        } else if !start.is_multiple_of(self.block_size) {
            self.entries[table[start / self.block_size]] = None;
        }
        assert_eq!(slot_mapping.len(), num_new_tokens);
        for (position, &slot) in (start..).zip(slot_mapping) {
            let slot = slot as usize;
            if position / self.block_size == table.len() {
                table.push(slot / self.block_size);
                new_blocks.push(slot / self.block_size);
            }
            let expected = table[position / self.block_size] * self.block_size + position % self.block_size;
            assert_eq!(slot, expected, "the slot of position {position}");
        }
        self.take(&new_blocks, states);

        let unknown = after.saturating_sub(sequence.tokens.len());
        let grown = self.find_mut(id);
        // Any tokens would do; these differ between sequences, so that their blocks do.
        grown.coming.resize(unknown, (id.to_bits() % 3) as i32);
        grown.num_scheduled = after;
        grown.num_drafts = num_drafts;
        grown.table.clone_from(&table);
        grown.num_registered += hits.len();
        grown.is_cut = false;
        self.remember(id);
        let histories = self.find(id).histories[..after].to_vec();
        let slots = slot_mapping.iter().map(|&slot| slot as usize);
        let growth = Growth {
            sequence: id,
            before: sequence.num_scheduled,
            was_cut: sequence.is_cut,
            after,
            num_drafts,
            writes: slots.zip(histories[start..].iter().copied()).collect(),
            histories,
            table,
            copy: copy.map(|copy| (index(copy.source), index(copy.target))),
        };
        for block in named(&growth) {
            self.recently_named[block] = true;
        }
        let plan = self.plans.back_mut().expect("a plan is in flight");
        assert!(!plan.ran, "a plan grows after it ran");
        plan.growths.push(growth);
        self.register(id);
    }

    fn count_hits(&mut self, hits: &[BlockId], states: &[BlockState]) {
        for &hit in hits {
            let in_flight = self.entries[index(hit)].is_some_and(|entry| entry.filling.is_some());
            self.events.note("hits in flight", u64::from(in_flight));
            self.events.note("hits on fenced", u64::from(states[index(hit)] == BlockState::Fenced));
        }
        self.events.note("hit blocks", hits.len() as u64);
    }

    /// New blocks were nobody's, were not needed by a plan in flight, and cached ones were taken only for want of free ones.
    fn take(&mut self, new_blocks: &[usize], states: &[BlockState]) {
        let free = states.iter().filter(|&&state| state == BlockState::Free).count();
        let mut evicted = 0;
        for (i, &block) in new_blocks.iter().enumerate() {
            assert!(!new_blocks[..i].contains(&block), "block {block} was handed out twice");
            assert_eq!(self.num_holders(block), 0, "block {block} was handed out and is held");
            let needed = self.is_named(block);
            assert!(!needed, "block {block} was handed out and a plan in flight names it");
            evicted += match states[block] {
                BlockState::Free => 0,
                BlockState::Cached => 1,
                state => panic!("block {block} was handed out and was {state:?}"),
            };
            let entry = self.entries[block].take();
            if let (BlockState::Cached, Some(evicted)) = (states[block], entry) {
                self.check_nothing_is_left_behind(evicted);
            }
        }
        let wanting = new_blocks.len().saturating_sub(free);
        assert_eq!(evicted, wanting, "evictions for {} blocks with {free} free", new_blocks.len());
        self.num_evictions += evicted as u64;
        self.events.note("evictions", evicted as u64);
    }

    /// No block continues a prefix of which the last block was evicted: nobody could find it.
    fn check_nothing_is_left_behind(&self, evicted: Entry) {
        let mut entries = self.entries.iter().flatten().filter(|entry| entry.generation == evicted.generation);
        let mut others = entries.clone();
        let parent = |entry: &Entry| self.histories.back_from(entry.history, self.block_size + 1).nth(self.block_size);
        let left_behind = others.find(|&entry| parent(entry) == Some(evicted.history));
        let is_found = entries.any(|entry| entry.history == evicted.history);
        assert!(left_behind.is_none() || is_found, "{evicted:?} was evicted before {left_behind:?}");
    }
}
