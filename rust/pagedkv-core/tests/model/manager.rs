//! The naive `KVCacheManager`: every rule by its definition, by scanning everything.
//!
//! Which physical block is handed out is the manager's choice; the model follows it and asks whether it was allowed.
//! Everything else (lookups, copies, whether there is room, counts) the model predicts.

use std::collections::VecDeque;
use std::sync::Arc;

use pagedkv_core::{AllocatedSlots, BlockCopy, BlockId, BlockState, Identity, KVCacheManager, PlanId, SequenceId};

use super::memory::{Histories, History, Memory};

#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    identity: Arc<Identity>,
    uses_cache: bool,
    /// Times that the cache had been reset when the sequence last started without blocks.
    generation: u32,
    pub(crate) tokens: Vec<i32>,
    /// What the device finds out for scheduled positions whose tokens nobody knows yet.
    coming: Vec<i32>,
    /// Of the tokens, known and coming.
    histories: Vec<History>,
    pub(crate) table: Vec<usize>,
    pub(crate) num_computed: usize,
    pub(crate) num_scheduled: usize,
    /// Full blocks that the cache knows.
    num_registered: usize,
    /// Whether its last block may hold more than it kept: it was cut, or is the fork of one that was.
    is_cut: bool,
}

/// One growth in a plan, as the device will see it, whatever becomes of the sequence.
#[derive(Clone, Debug)]
struct Growth {
    sequence: SequenceId,
    before: usize,
    was_cut: bool,
    after: usize,
    histories: Vec<History>,
    table: Vec<usize>,
    copy: Option<(usize, usize)>,
    writes: Vec<(usize, History)>,
}

#[derive(Debug)]
struct Plan {
    id: PlanId,
    growths: Vec<Growth>,
    ran: bool,
}

/// What the cache says of a block: it holds the last tokens of this history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    history: History,
    generation: u32,
    /// The plan that will have computed it; `None` once it has.
    filling: Option<PlanId>,
}

/// What happened, for tests that ask whether they met everything worth meeting.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Events {
    pub(crate) hit_blocks: u64,
    pub(crate) hits_in_flight: u64,
    pub(crate) hits_on_fenced: u64,
    pub(crate) copies: u64,
    pub(crate) copies_for_the_cache: u64,
    pub(crate) refusals: u64,
    pub(crate) evictions: u64,
    pub(crate) undone_growths: u64,
    pub(crate) undone_after_running: u64,
    pub(crate) fenced_blocks: u64,
}

#[derive(Debug)]
pub(crate) struct ManagerModel {
    pub(crate) block_size: usize,
    caching: bool,
    generation: u32,
    pub(crate) sequences: Vec<Sequence>,
    plans: VecDeque<Plan>,
    entries: Vec<Option<Entry>>,
    /// Whether a plan in flight, or one that was rolled back with an older one still in flight, ever named the block.
    recently_named: Vec<bool>,
    histories: Histories,
    memory: Memory,
    pub(crate) events: Events,
}

fn index(block: BlockId) -> usize {
    block.get() as usize
}

/// Where every block was before a call.
pub(crate) fn states(manager: &KVCacheManager) -> Vec<BlockState> {
    let blocks = 1..manager.pool().num_blocks();
    let state = |block| manager.pool().state(BlockId::new(block)).expect("a block of the pool");
    std::iter::once(BlockState::Null).chain(blocks.map(state)).collect()
}

impl ManagerModel {
    pub(crate) fn new(num_blocks: usize, block_size: usize, caching: bool) -> Self {
        Self {
            block_size,
            caching,
            generation: 0,
            sequences: Vec::new(),
            plans: VecDeque::new(),
            entries: vec![None; num_blocks],
            recently_named: vec![false; num_blocks],
            histories: Histories::default(),
            memory: Memory::new(num_blocks, block_size),
            events: Events::default(),
        }
    }

    pub(crate) fn find(&self, id: SequenceId) -> &Sequence {
        let found = self.sequences.iter().find(|sequence| sequence.id == id);
        found.expect("a live sequence")
    }

    fn position(&self, id: SequenceId) -> Option<usize> {
        self.sequences.iter().position(|sequence| sequence.id == id)
    }

    fn find_mut(&mut self, id: SequenceId) -> &mut Sequence {
        let position = self.position(id).expect("a live sequence");
        &mut self.sequences[position]
    }

    pub(crate) fn in_flight(&self) -> impl Iterator<Item = PlanId> {
        self.plans.iter().map(|plan| plan.id)
    }

    pub(crate) fn oldest_plan(&self) -> Option<PlanId> {
        self.in_flight().next()
    }

    pub(crate) fn is_idle(&self, id: SequenceId) -> bool {
        let mut growths = self.plans.iter().flat_map(|plan| &plan.growths);
        growths.all(|growth| growth.sequence != id)
    }

    // --- commands

    pub(crate) fn create(&mut self, id: SequenceId, tokens: &[i32], identity: &Arc<Identity>, uses_cache: bool) {
        self.sequences.push(Sequence {
            id,
            identity: identity.clone(),
            uses_cache: uses_cache && self.caching,
            generation: self.generation,
            tokens: tokens.to_vec(),
            coming: Vec::new(),
            histories: Vec::new(),
            table: Vec::new(),
            num_computed: 0,
            num_scheduled: 0,
            num_registered: 0,
            is_cut: false,
        });
        self.remember(id);
    }

    /// The tokens that a caller may append: those that the device will have found out come first.
    pub(crate) fn next_tokens(&self, id: SequenceId, wanted: &[i32]) -> Vec<i32> {
        let coming = &self.find(id).coming;
        let free = wanted.iter().skip(coming.len());
        coming.iter().chain(free).take(wanted.len()).copied().collect()
    }

    pub(crate) fn append_tokens(&mut self, id: SequenceId, tokens: &[i32]) {
        let sequence = self.find_mut(id);
        sequence.tokens.extend(tokens);
        let known = tokens.len().min(sequence.coming.len());
        sequence.coming.drain(..known);
        self.remember(id);
        self.register(id);
    }

    pub(crate) fn fork(&mut self, parent: SequenceId, child: SequenceId) {
        let forked = Sequence { id: child, ..self.find(parent).clone() };
        self.sequences.push(forked);
        // What the device found out for the parent is the parent's own.
        let known = self.find(child).tokens.len();
        self.cut(child, known);
    }

    pub(crate) fn truncate(&mut self, id: SequenceId, num_tokens: usize) {
        self.find_mut(id).tokens.truncate(num_tokens);
        self.cut(id, num_tokens);
    }

    fn cut(&mut self, id: SequenceId, num_tokens: usize) {
        let sequence = self.find_mut(id);
        sequence.is_cut |= num_tokens < sequence.num_scheduled;
        self.shrink(id, num_tokens);
    }

    pub(crate) fn free(&mut self, id: SequenceId) {
        self.shrink(id, 0);
        self.sequences.retain(|sequence| sequence.id != id);
    }

    pub(crate) fn reset_prefix_cache(&mut self) {
        self.generation += 1;
        for sequence in &mut self.sequences {
            if sequence.num_scheduled == 0 {
                sequence.generation = self.generation;
            }
        }
    }

    pub(crate) fn begin_plan(&mut self, id: PlanId) {
        self.plans.push_back(Plan { id, growths: Vec::new(), ran: false });
    }

    /// How many blocks a lookup for the sequence must find.
    pub(crate) fn num_hits(&self, id: SequenceId) -> usize {
        let sequence = self.find(id);
        let first = sequence.num_scheduled / self.block_size;
        let stale = sequence.generation != self.generation;
        if !sequence.uses_cache || stale || !sequence.num_scheduled.is_multiple_of(self.block_size) {
            return 0;
        }
        let mut hits = 0;
        while (first + hits + 1) * self.block_size < sequence.tokens.len() {
            let history = sequence.histories[(first + hits + 1) * self.block_size - 1];
            if !(1..self.entries.len()).any(|block| self.is_hit(block, history)) {
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

    /// Follows a call of `allocate_slots`, with the states of the blocks before it, and judges its answer.
    pub(crate) fn grow(
        &mut self,
        id: SequenceId,
        num_new_tokens: usize,
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
            self.events.refusals += 1;
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
            self.events.copies += 1;
            self.events.copies_for_the_cache += u64::from(self.num_holders(index(source)) == 1);
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
            self.events.hits_in_flight += u64::from(in_flight);
            self.events.hits_on_fenced += u64::from(states[index(hit)] == BlockState::Fenced);
        }
        self.events.hit_blocks += hits.len() as u64;
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
        self.events.evictions += evicted as u64;
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

    /// Runs the oldest plan that has not run, if there is one.
    pub(crate) fn run_next_plan(&mut self) {
        let Some(plan) = self.plans.iter_mut().find(|plan| !plan.ran) else {
            return;
        };
        plan.ran = true;
        let copies: Vec<_> = plan.growths.iter().filter_map(|growth| growth.copy).collect();
        let writes: Vec<_> = plan.growths.iter().flat_map(|growth| growth.writes.clone()).collect();
        self.memory.run(&copies, &writes);
        for growth in &plan.growths {
            for (position, &history) in growth.histories.iter().enumerate() {
                let read = self.memory.read(&growth.table, position);
                let own = read == Some(history);
                assert!(own, "{:?} reads another's token at {position}: {growth:?}", growth.sequence);
            }
        }
    }

    pub(crate) fn num_plans_to_run(&self) -> usize {
        self.plans.iter().filter(|plan| !plan.ran).count()
    }

    pub(crate) fn commit(&mut self) {
        if self.plans.front().is_some_and(|plan| !plan.ran) {
            self.run_next_plan();
        }
        let plan = self.plans.pop_front().expect("a plan is in flight");
        for growth in &plan.growths {
            if let Some(position) = self.position(growth.sequence) {
                self.sequences[position].num_computed = growth.after;
            }
        }
        for entry in self.entries.iter_mut().flatten() {
            if entry.filling == Some(plan.id) {
                entry.filling = None;
            }
        }
        self.forget_old_names();
    }

    /// Undoes the plan and all behind it.
    pub(crate) fn rollback(&mut self, id: PlanId) {
        while self.plans.back().is_some_and(|plan| plan.id >= id) {
            let plan = self.plans.pop_back().expect("there is one");
            for growth in plan.growths.iter().rev() {
                self.events.undone_growths += 1;
                self.events.undone_after_running += u64::from(plan.ran);
                if self.position(growth.sequence).is_none() {
                    continue;
                }
                self.shrink(growth.sequence, growth.before);
                self.find_mut(growth.sequence).is_cut = growth.was_cut;
                if let Some((source, _)) = growth.copy {
                    *self.find_mut(growth.sequence).table.last_mut().expect("a tail") = source;
                }
                self.remember(growth.sequence);
            }
            for entry in &mut self.entries {
                *entry = entry.filter(|entry| entry.filling != Some(plan.id));
            }
        }
        self.forget_old_names();
    }

    // --- helpers

    fn num_holders(&self, block: usize) -> usize {
        let held = self.sequences.iter().flat_map(|sequence| &sequence.table);
        held.filter(|&&held| held == block).count()
    }

    fn is_named(&self, block: usize) -> bool {
        let mut growths = self.plans.iter().flat_map(|plan| &plan.growths);
        growths.any(|growth| named(growth).any(|named| named == block))
    }

    fn forget_old_names(&mut self) {
        if self.plans.is_empty() {
            self.recently_named.fill(false);
        }
    }

    fn remember(&mut self, id: SequenceId) {
        let position = self.position(id).expect("a live sequence");
        let sequence = &mut self.sequences[position];
        let unknown = sequence.num_scheduled.saturating_sub(sequence.tokens.len());
        sequence.coming.truncate(unknown);
        let tokens = sequence.tokens.iter().chain(&sequence.coming).copied();
        sequence.histories = self.histories.of_tokens(&sequence.identity, tokens);
    }

    /// Tells the cache of every block that is, or is about to be, full of known tokens.
    fn register(&mut self, id: SequenceId) {
        let plans = &self.plans;
        let sequence = self.sequences.iter_mut().find(|sequence| sequence.id == id);
        let sequence = sequence.expect("a live sequence");
        if !sequence.uses_cache {
            return;
        }
        let full = sequence.num_scheduled.min(sequence.tokens.len()) / self.block_size;
        for column in sequence.num_registered..full {
            let end = (column + 1) * self.block_size;
            let mut growths = plans.iter().flat_map(|plan| plan.growths.iter().map(move |growth| (plan, growth)));
            let filling = growths.find(|(_, growth)| growth.sequence == id && end <= growth.after);
            self.entries[sequence.table[column]] = Some(Entry {
                history: sequence.histories[end - 1],
                generation: sequence.generation,
                filling: filling.filter(|_| end > sequence.num_computed).map(|(plan, _)| plan.id),
            });
        }
        sequence.num_registered = sequence.num_registered.max(full);
    }

    fn shrink(&mut self, id: SequenceId, num_tokens: usize) {
        let block_size = self.block_size;
        let generation = self.generation;
        let sequence = self.find_mut(id);
        sequence.num_scheduled = sequence.num_scheduled.min(num_tokens);
        sequence.num_computed = sequence.num_computed.min(num_tokens);
        sequence.table.truncate(sequence.num_scheduled.div_ceil(block_size));
        sequence.num_registered = sequence.num_registered.min(sequence.num_scheduled / block_size);
        if sequence.num_scheduled == 0 {
            sequence.generation = generation;
        }
        self.remember(id);
    }

    // --- laws

    /// Whether the manager's state is what the model says.
    pub(crate) fn check(&mut self, manager: &KVCacheManager) {
        manager.check_integrity().unwrap_or_else(|broken| panic!("{broken}"));
        assert_eq!(manager.num_sequences(), self.sequences.len());
        for sequence in &self.sequences {
            let table = manager.block_table(sequence.id).expect("a live sequence");
            assert!(
                table.iter().map(|&block| index(block)).eq(sequence.table.iter().copied()),
                "table {table:?} of {sequence:?}"
            );
            assert_eq!(manager.num_tokens(sequence.id), Ok(sequence.tokens.len() as u32));
            assert_eq!(manager.num_computed_tokens(sequence.id), Ok(sequence.num_computed as u32));
        }
        self.check_counts(manager);
        self.check_contents();
    }

    fn check_counts(&mut self, manager: &KVCacheManager) {
        let pool = manager.pool();
        let states = states(manager);
        for (block, &state) in states.iter().enumerate().skip(1) {
            let holders = self.num_holders(block);
            assert_eq!(pool.ref_count(BlockId::new(block as u32)), Ok(holders as u32), "block {block}");
            let is_cached =
                self.entries[block].is_some_and(|entry| entry.filling.is_none() && entry.generation == self.generation);
            let expected = if holders > 0 {
                BlockState::Held
            } else if self.is_named(block) {
                BlockState::Fenced
            } else if is_cached {
                BlockState::Cached
            } else {
                BlockState::Free
            };
            let waits = state == BlockState::Fenced && holders == 0 && self.recently_named[block];
            assert!(state == expected || waits, "block {block} is {state:?}, not {expected:?}");
            self.events.fenced_blocks += u64::from(state == BlockState::Fenced);
            if state == BlockState::Free {
                self.entries[block] = None;
            }
        }
        let count = |state| states.iter().filter(|&&found| found == state).count() as u32;
        let counts = [pool.num_held(), pool.num_free(), pool.num_cached(), pool.num_fenced()];
        let counted = [BlockState::Held, BlockState::Free, BlockState::Cached, BlockState::Fenced].map(count);
        assert_eq!(counts, counted, "held, free, cached, fenced");
        assert_eq!(pool.num_available(), pool.num_free() + pool.num_cached());
        let usage = 1.0 - f64::from(pool.num_available()) / f64::from(pool.num_blocks() - 1);
        assert!((manager.usage() - usage).abs() < 1e-9);
        assert_eq!(pool.num_evictions(), self.events.evictions, "evictions");
    }

    fn check_contents(&self) {
        for sequence in self.sequences.iter().filter(|sequence| self.is_idle(sequence.id)) {
            for position in 0..sequence.num_computed {
                let read = self.memory.read(&sequence.table, position);
                let own = read == Some(sequence.histories[position]);
                assert!(own, "another's token lies at {position} of {sequence:?}");
            }
        }
        for (block, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry.filter(|entry| entry.filling.is_none()) else {
                continue;
            };
            let expected = self.histories.back_from(entry.history, self.block_size);
            for (offset, history) in (0..self.block_size).rev().zip(expected) {
                let found = self.memory.slot(block * self.block_size + offset);
                assert!(found == Some(history), "block {block} is public and does not hold its tokens");
            }
        }
    }

    /// With all sequences freed and all plans ended, the whole pool is there again.
    pub(crate) fn check_empty(&self, manager: &KVCacheManager) {
        let pool = manager.pool();
        assert!(self.sequences.is_empty() && self.plans.is_empty());
        assert_eq!(pool.num_available(), pool.num_blocks() - 1, "blocks are lost");
        assert!(manager.usage().abs() < 1e-9);
    }
}

/// The blocks that a plan names by a growth.
fn named(growth: &Growth) -> impl Iterator<Item = usize> {
    let copied = growth.copy.into_iter().flat_map(|(source, target)| [source, target]);
    growth.table.iter().copied().chain(copied)
}
