//! What a lookup must find, and what a growth may take, copy and write.

use pagedkv_core::{AllocatedSlots, BlockCopy, BlockState, ComputedBlocks, SequenceId};

use super::{Entry, Growth, ManagerModel, Sequence, index, named};
use crate::model::memory::History;

impl ManagerModel {
    /// How many tokens a lookup for the sequence must find: the most on which all groups agree.
    pub(crate) fn num_hit_tokens(&self, id: SequenceId) -> usize {
        let sequence = self.find(id);
        let start = sequence.num_scheduled;
        let stale = sequence.generation != self.generation;
        let is_whole = |end: usize| self.groups.iter().all(|group| end.is_multiple_of(group.block_size));
        if !sequence.uses_cache || stale || !is_whole(start) {
            return 0;
        }
        let ends = (start + 1..sequence.tokens.len()).rev().filter(|&end| is_whole(end));
        let mut hits = ends.filter(|&end| {
            let has_all = |group: usize| match self.groups[group].window {
                None => self.is_covered(sequence, group, end),
                Some(_) => self.has_window(sequence, group, end),
            };
            self.is_known(sequence, end) && (0..self.groups.len()).all(has_all)
        });
        hits.next().map_or(0, |end| end - start)
    }

    /// Whether a group with full attention has blocks from where the sequence stands to `end`.
    fn is_covered(&self, sequence: &Sequence, group: usize, end: usize) -> bool {
        let block_size = self.groups[group].block_size;
        let first = sequence.num_scheduled / block_size;
        let own = sequence.tables[group].last();
        // What is computed must not be reachable through a block alone that may never be.
        let mut is_pending = own.is_some_and(|&own| !self.is_computed(own));
        (first..end / block_size).all(|column| {
            let found: Vec<_> = self.hits_at(sequence, group, column).collect();
            let is_computed = found.iter().any(|&block| self.is_computed(block));
            let is_reachable = !(found.is_empty() || is_pending && is_computed);
            is_pending = !is_computed;
            is_reachable
        })
    }

    /// Whether a window group has what a query at `end` sees of the hit.
    fn has_window(&self, sequence: &Sequence, group: usize, end: usize) -> bool {
        let mut needed = self.groups[group].columns_needed(sequence.num_scheduled, end);
        needed.all(|column| self.hits_at(sequence, group, column).next().is_some())
    }

    fn hits_at(&self, sequence: &Sequence, group: usize, column: usize) -> impl Iterator<Item = usize> {
        let history = sequence.histories[(column + 1) * self.groups[group].block_size - 1];
        (1..self.entries.len()).filter(move |&block| self.is_hit(block, group, history))
    }

    /// Whether the cache knows the prefix at all: a block holds its last tokens or what continues it, or a sequence does.
    fn is_known(&self, sequence: &Sequence, end: usize) -> bool {
        let history = sequence.histories[end - 1];
        let holds = |other: History| other == history || self.histories.continues(other, history);
        let mut entries = self.entries.iter().flatten().filter(|entry| entry.generation == self.generation);
        entries.any(|entry| holds(entry.history)) || self.paths(self.generation).any(holds)
    }

    /// The last histories of what sequences computed and told the cache.
    fn paths(&self, generation: u32) -> impl Iterator<Item = History> {
        let told = self.sequences.iter().filter(move |sequence| sequence.generation == generation);
        told.filter(|sequence| sequence.num_registered > 0)
            .map(|sequence| sequence.histories[sequence.num_registered * self.block_size - 1])
    }

    /// Whether a lookup may answer with these blocks for the sequence.
    pub(crate) fn check_hits(&self, id: SequenceId, computed: &ComputedBlocks) {
        let sequence = self.find(id);
        let (start, end) = (sequence.num_scheduled, sequence.num_scheduled + computed.num_tokens() as usize);
        assert!(end < sequence.tokens.len() || computed.num_tokens() == 0, "nothing is left to compute");
        for (number, group) in self.groups.iter().enumerate() {
            let blocks = computed.group_blocks(number);
            assert_eq!(blocks.len(), computed.num_tokens() as usize / group.block_size, "group {number}");
            let needed = group.columns_needed(start, end);
            for (column, &block) in (start / group.block_size..).zip(blocks) {
                if !needed.contains(&column) {
                    assert_eq!(index(block), 0, "column {column} of group {number} is a hit that nobody needs");
                    continue;
                }
                let history = sequence.histories[(column + 1) * group.block_size - 1];
                let is_hit = self.is_hit(index(block), number, history);
                assert!(is_hit, "block {block:?} is a hit, and does not hold the sequence's tokens");
            }
        }
    }

    fn is_computed(&self, block: usize) -> bool {
        self.entries[block].is_some_and(|entry| entry.filling.is_none())
    }

    fn is_hit(&self, block: usize, group: usize, history: History) -> bool {
        self.entries[block].is_some_and(|entry| {
            let usable = entry.filling.is_none() || self.num_holders(block) > 0;
            usable && entry.group == group && entry.history == history && entry.generation == self.generation
        })
    }

    /// Whether the sequence must copy the block of a group that it writes into next, and whether it may.
    fn copies(&self, id: SequenceId, group: usize) -> (bool, bool) {
        let sequence = self.find(id);
        let block_size = self.groups[group].block_size;
        if sequence.num_scheduled.is_multiple_of(block_size) {
            return (false, false);
        }
        let tail = sequence.tables[group][sequence.num_scheduled / block_size];
        // Who let go of a block in a plan in flight may still need what a cut sequence would write over: the plan reads
        // it, and its rollback gives it back.
        let is_needed = sequence.is_cut && self.is_named(tail);
        let must = self.num_holders(tail) > 1 || self.is_continued(tail) || is_needed;
        (must, must || sequence.is_cut && self.recently_named[tail])
    }

    /// Whether cached prefixes continue the one in the block.
    fn is_continued(&self, block: usize) -> bool {
        self.entries[block].is_some_and(|parent| {
            let entries = self.entries.iter().flatten().filter(|entry| entry.generation == parent.generation);
            let mut others = entries.map(|entry| entry.history).chain(self.paths(parent.generation));
            others.any(|other| self.histories.continues(other, parent.history))
        })
    }

    /// Follows a call of `allocate_slots` for new tokens, the last `num_drafts` of them guesses, with the states of the blocks before it, and judges its answer.
    pub(crate) fn grow(
        &mut self,
        id: SequenceId,
        num_new_tokens: usize,
        num_drafts: usize,
        computed: &ComputedBlocks,
        states: &[BlockState],
        answer: Option<&AllocatedSlots>,
    ) {
        let sequence = self.find(id).clone();
        let groups = self.groups.clone();
        let start = sequence.num_scheduled + computed.num_tokens() as usize;
        let after = start + num_new_tokens;
        let is_available = |state: &BlockState| matches!(state, BlockState::Free | BlockState::Cached);
        let available = states.iter().filter(|state| is_available(state)).count();
        let expected_copies: Vec<_> = (0..groups.len()).map(|group| self.copies(id, group)).collect();
        let (mut least, mut most) = (0, 0);
        for (number, group) in groups.iter().enumerate() {
            let hits = computed.group_blocks(number);
            let first_new = sequence.tables[number].len() + hits.len();
            let num_new = after.div_ceil(group.block_size).saturating_sub(first_new);
            let taken = hits.iter().filter(|&&hit| is_available(&states[index(hit)])).count();
            let (must_copy, may_copy) = expected_copies[number];
            least += num_new + taken + usize::from(must_copy);
            most += num_new + taken + usize::from(may_copy);
        }
        let may_fit = answer.is_some() && least <= available || answer.is_none() && most > available;
        assert!(may_fit, "{least} to {most} of {available} blocks");
        let Some(AllocatedSlots { slot_mapping, copies }) = answer else {
            self.events.note("refusals", 1);
            return;
        };
        self.count_hits(computed, states);

        let mut tables = sequence.tables.clone();
        let mut new_blocks = Vec::new();
        let mut writes = Vec::new();
        let mut copied = Vec::new();
        assert_eq!(slot_mapping.len(), groups.len() * num_new_tokens);
        for (number, group) in groups.iter().enumerate() {
            let (must_copy, may_copy) = expected_copies[number];
            let table = &mut tables[number];
            table.extend(computed.group_blocks(number).iter().map(|&hit| index(hit)));
            let copy = copies.iter().find(|copy| copy.group as usize == number);
            assert!([must_copy, may_copy].contains(&copy.is_some()), "copy {copy:?} in group {number}");
            if let Some(&BlockCopy { column, source, target, .. }) = copy {
                let written = sequence.num_scheduled / group.block_size;
                assert_eq!((column as usize, index(source)), (written, table[written]), "the copy");
                table[written] = index(target);
                copied.push((number, index(source), index(target)));
                self.events.note("copies", 1);
                self.events.note("copies for the cache", u64::from(self.num_holders(index(source)) == 1));
            } else if !start.is_multiple_of(group.block_size) {
                self.entries[table[start / group.block_size]] = None;
            }
            let slots = &slot_mapping[number * num_new_tokens..][..num_new_tokens];
            for (position, &slot) in (start..).zip(slots) {
                let slot = slot as usize;
                if position / group.block_size == table.len() {
                    table.push(slot / group.block_size);
                    new_blocks.push(slot / group.block_size);
                }
                let place = group.place(number, table, position);
                let expected = place.block * group.block_size + place.offset;
                assert_eq!(slot, expected, "the slot of position {position} in group {number}");
                writes.push((place, position));
            }
        }
        assert_eq!(copied.len(), copies.len(), "a group is copied twice");
        // Copies come first.
        let targets = copied.iter().map(|&(_, _, target)| target);
        self.take(&targets.chain(new_blocks).collect::<Vec<_>>(), states);

        let unknown = after.saturating_sub(sequence.tokens.len());
        let num_registered = computed.num_tokens() as usize / self.block_size;
        let grown = self.find_mut(id);
        // Any tokens would do; these differ between sequences, so that their blocks do.
        grown.coming.resize(unknown, (id.to_bits() % 3) as i32);
        grown.num_scheduled = after;
        grown.num_drafts = num_drafts;
        grown.tables.clone_from(&tables);
        grown.num_registered += num_registered;
        grown.is_cut = false;
        self.remember(id);
        let histories = self.find(id).histories[..after].to_vec();
        let growth = Growth {
            sequence: id,
            before: sequence.num_scheduled,
            was_cut: sequence.is_cut,
            start,
            after,
            num_drafts,
            writes: writes.into_iter().map(|(place, position)| (place, histories[position])).collect(),
            histories,
            tables,
            copies: copied,
        };
        for block in named(&growth) {
            self.recently_named[block] = true;
        }
        let plan = self.plans.back_mut().expect("a plan is in flight");
        assert!(!plan.ran, "a plan grows after it ran");
        plan.growths.push(growth);
        self.register(id);
    }

    fn count_hits(&mut self, computed: &ComputedBlocks, states: &[BlockState]) {
        for hit in (0..self.groups.len()).flat_map(|group| computed.group_blocks(group)).map(|&block| index(block)) {
            let in_flight = self.entries[hit].is_some_and(|entry| entry.filling.is_some());
            self.events.note("hits in flight", u64::from(in_flight));
            self.events.note("hits on fenced", u64::from(states[hit] == BlockState::Fenced));
            self.events.note("hit blocks", u64::from(hit > 0));
            self.events.note("hits before a window", u64::from(hit == 0));
        }
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
                self.check_nothing_is_left_behind(evicted, states);
            }
        }
        let wanting = new_blocks.len().saturating_sub(free);
        assert_eq!(evicted, wanting, "evictions for {} blocks with {free} free", new_blocks.len());
        self.num_evictions += evicted as u64;
        self.events.note("evictions", evicted as u64);
    }

    /// No block continues a prefix of which the last block was evicted: nobody could find it. One that a plan in flight
    /// names cannot go first.
    fn check_nothing_is_left_behind(&self, evicted: Entry, states: &[BlockState]) {
        if self.groups[evicted.group].window.is_some() {
            return;
        }
        let block_size = self.groups[evicted.group].block_size;
        let same = |entry: &Entry| entry.generation == evicted.generation && entry.group == evicted.group;
        let is_found = self.entries.iter().flatten().any(|entry| same(entry) && entry.history == evicted.history);
        let parent = |entry: &Entry| self.histories.back_from(entry.history, block_size + 1).nth(block_size);
        let is_left = |(entry, state): &(&Option<Entry>, &BlockState)| {
            let continues = |entry: &Entry| same(entry) && parent(entry) == Some(evicted.history);
            **state != BlockState::Fenced && entry.as_ref().is_some_and(continues)
        };
        let left_behind = self.entries.iter().zip(states).find(is_left);
        assert!(left_behind.is_none() || is_found, "{evicted:?} was evicted before {left_behind:?}");
    }
}
