//! The naive `KVCacheManager`: every rule by its definition, by scanning everything.
//!
//! Which physical block is handed out is the manager's choice; the model follows it and asks whether it was allowed.
//! Everything else (lookups, copies, whether there is room, counts) the model predicts.

mod growth;
mod laws;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use pagedkv_core::{
    BlockHash, BlockId, BlockState, ChainHasher, HashAlgorithm, Identity, KVCacheManager, PlanId, SequenceId,
};

use super::events::Events;
use super::memory::{Group, Histories, History, Memory, Place};
use super::mirror::Known;

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
    /// By group; 0 where the window needs no block.
    pub(crate) tables: Vec<Vec<usize>>,
    pub(crate) num_computed: usize,
    pub(crate) num_scheduled: usize,
    /// The last scheduled tokens that are guesses of which nobody said whether they hold.
    pub(crate) num_drafts: usize,
    /// Full runs of the smallest block size that the cache knows.
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
    num_drafts: usize,
    histories: Vec<History>,
    tables: Vec<Vec<usize>>,
    /// Group, source and target.
    copies: Vec<(usize, usize, usize)>,
    /// The first position that is computed.
    start: usize,
    writes: Vec<(Place, History)>,
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
    group: usize,
    history: History,
    generation: u32,
    /// The plan that will have computed it; `None` once it has.
    filling: Option<PlanId>,
}

#[derive(Debug)]
pub(crate) struct ManagerModel {
    pub(crate) groups: Vec<Group>,
    /// The smallest of the groups.
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
    num_evictions: u64,
    /// Names of full blocks.
    hashes: BTreeMap<History, BlockHash>,
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
    pub(crate) fn new(num_blocks: usize, groups: &[Group], caching: bool) -> Self {
        Self {
            groups: groups.to_vec(),
            block_size: groups.iter().map(|group| group.block_size).min().expect("at least one group"),
            caching,
            generation: 0,
            sequences: Vec::new(),
            plans: VecDeque::new(),
            entries: vec![None; num_blocks],
            recently_named: vec![false; num_blocks],
            histories: Histories::default(),
            memory: Memory::new(num_blocks, groups),
            num_evictions: 0,
            hashes: BTreeMap::new(),
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

    pub(crate) fn create(&mut self, id: SequenceId, tokens: &[i32], identity: &Arc<Identity>, uses_cache: bool) {
        self.sequences.push(Sequence {
            id,
            identity: identity.clone(),
            uses_cache: uses_cache && self.caching,
            generation: self.generation,
            tokens: tokens.to_vec(),
            coming: Vec::new(),
            histories: Vec::new(),
            tables: vec![Vec::new(); self.groups.len()],
            num_computed: 0,
            num_scheduled: 0,
            num_drafts: 0,
            num_registered: 0,
            is_cut: false,
        });
        self.remember(id);
    }

    /// The tokens that a caller may append: those that the device will have found out come first, and as many guesses as
    /// are accepted.
    pub(crate) fn next_tokens(&self, id: SequenceId, wanted: &[i32], num_accepted: usize) -> Vec<i32> {
        let sequence = self.find(id);
        let told = sequence.coming.len() - sequence.num_drafts + num_accepted;
        let free = wanted.iter().skip(told);
        sequence.coming[..told].iter().chain(free).take(wanted.len()).copied().collect()
    }

    /// Guesses at whose places the next `len` tokens lie.
    pub(crate) fn drafts_under(&self, id: SequenceId, len: usize) -> usize {
        let sequence = self.find(id);
        let first = sequence.num_scheduled - sequence.num_drafts;
        sequence.num_drafts.min((sequence.tokens.len() + len).saturating_sub(first))
    }

    /// Tokens that plans before the newest will find out, behind the known ones.
    pub(crate) fn num_coming(&self, id: SequenceId) -> usize {
        let (known, newest) = (self.find(id).tokens.len(), self.plans.len().saturating_sub(1));
        let mut older = self.plans.iter().take(newest);
        older.by_ref().filter(|plan| plan.growths.iter().any(|g| g.sequence == id && g.after >= known)).count()
    }

    /// Whether guesses keep the sequence from growing in the newest plan.
    pub(crate) fn is_drafting(&self, id: SequenceId) -> bool {
        let mut newest = self.plans.back().into_iter().flat_map(|plan| &plan.growths);
        self.find(id).num_drafts > 0 || newest.any(|growth| growth.sequence == id && growth.num_drafts > 0)
    }

    /// The sequence that the oldest plan left untold tokens of under a later plan, if there is one.
    pub(crate) fn untold(&self) -> Option<SequenceId> {
        let oldest = self.plans.front()?;
        let is_later = |id| self.plans.iter().skip(1).flat_map(|plan| &plan.growths).any(|g| g.sequence == id);
        let mut growths = oldest.growths.iter().filter(|growth| self.position(growth.sequence).is_some());
        let found = growths.find(|g| is_later(g.sequence) && g.after > self.find(g.sequence).tokens.len());
        found.map(|growth| growth.sequence)
    }

    pub(crate) fn append_tokens(&mut self, id: SequenceId, tokens: &[i32], num_accepted: usize) {
        if self.drafts_under(id, tokens.len()) > 0 {
            let sequence = self.find_mut(id);
            let end = sequence.num_scheduled - sequence.num_drafts + num_accepted;
            sequence.num_drafts = 0;
            self.shrink(id, end);
            let mut growths = self.plans.iter_mut().flat_map(|plan| &mut plan.growths).rev();
            growths.find(|growth| growth.sequence == id).expect("the guesses' growth").after = end;
            self.events.note("accepted guesses", num_accepted as u64);
        }
        let sequence = self.find_mut(id);
        sequence.tokens.extend(tokens);
        let known = tokens.len().min(sequence.coming.len());
        sequence.coming.drain(..known);
        self.remember(id);
        self.register(id);
        self.leave_windows();
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
        let kept = self.find(id).num_computed.min(num_tokens);
        let has_all = self.groups.iter().zip(&self.find(id).tables).all(|(group, table)| {
            let needed = group.columns_before(kept)..kept.div_ceil(group.block_size);
            table[needed].iter().all(|&block| block > 0)
        });
        self.find_mut(id).is_cut |= num_tokens < self.find(id).num_scheduled;
        self.events.note("cuts before a window", u64::from(!has_all));
        self.shrink(id, if has_all { kept } else { 0 });
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

    /// Runs the oldest plan that has not run, if there is one.
    pub(crate) fn run_next_plan(&mut self) {
        let Some(plan) = self.plans.iter_mut().find(|plan| !plan.ran) else {
            return;
        };
        plan.ran = true;
        let copies = plan.growths.iter().flat_map(|growth| &growth.copies);
        let copies: Vec<_> = copies.map(|&(_, source, target)| (source, target)).collect();
        let writes: Vec<_> = plan.growths.iter().flat_map(|growth| growth.writes.clone()).collect();
        self.memory.run(&copies, &writes);
        for growth in &plan.growths {
            for (number, (group, table)) in self.groups.iter().zip(&growth.tables).enumerate() {
                for position in group.first_seen(growth.start)..growth.after {
                    let read = self.memory.read(group.place(number, table, position));
                    let own = read == Some(growth.histories[position]);
                    assert!(own, "{:?} reads another's token at {position}: {growth:?}", growth.sequence);
                }
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
                let sequence = &mut self.sequences[position];
                sequence.num_computed = growth.after;
                let known = sequence.tokens.len();
                if self.is_idle(growth.sequence) {
                    self.sequences[position].num_drafts = 0;
                    self.events.note("untold tokens", (growth.after.saturating_sub(known)) as u64);
                    self.shrink(growth.sequence, known);
                }
            }
        }
        for entry in self.entries.iter_mut().flatten() {
            if entry.filling == Some(plan.id) {
                entry.filling = None;
            }
        }
        self.leave_windows();
        self.forget_old_names();
    }

    /// Blocks that lie before what the next query sees leave, by what is committed and is not the last known token.
    fn leave_windows(&mut self) {
        for sequence in &mut self.sequences {
            let committed = sequence.num_computed.min(sequence.tokens.len() - 1);
            for (group, table) in self.groups.iter().zip(&mut sequence.tables) {
                for block in &mut table[..group.columns_before(committed)] {
                    self.events.note("blocks that left a window", u64::from(*block > 0));
                    *block = 0;
                }
            }
        }
    }

    /// Undoes the plan and all behind it.
    pub(crate) fn rollback(&mut self, id: PlanId) {
        while self.plans.back().is_some_and(|plan| plan.id >= id) {
            let plan = self.plans.pop_back().expect("there is one");
            for growth in plan.growths.iter().rev() {
                self.events.note("undone growths", 1);
                self.events.note("undone after running", u64::from(plan.ran));
                if self.position(growth.sequence).is_none() {
                    continue;
                }
                self.shrink(growth.sequence, growth.before);
                let sequence = self.find_mut(growth.sequence);
                (sequence.is_cut, sequence.num_drafts) = (growth.was_cut, 0);
                for &(group, source, _) in &growth.copies {
                    let tables = &mut self.find_mut(growth.sequence).tables;
                    *tables[group].last_mut().expect("a tail") = source;
                }
                self.remember(growth.sequence);
            }
            for entry in &mut self.entries {
                *entry = entry.filter(|entry| entry.filling != Some(plan.id));
            }
        }
        self.forget_old_names();
    }

    fn num_holders(&self, block: usize) -> usize {
        let held = self.sequences.iter().flat_map(|sequence| sequence.tables.iter().flatten());
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
        for run in sequence.num_registered..full {
            let end = (run + 1) * self.block_size;
            let name = || {
                let mut hasher = ChainHasher::new(HashAlgorithm::Xxh3_128, "model");
                let (tokens, block_size) = (&sequence.tokens[..end], self.block_size as u32);
                let chain = hasher.chain_hashes(tokens, block_size, &sequence.identity, None);
                *chain.expect("valid arguments").last().expect("at least one full block")
            };
            self.hashes.entry(sequence.histories[end - 1]).or_insert_with(name);
            let mut growths = plans.iter().flat_map(|plan| plan.growths.iter().map(move |growth| (plan, growth)));
            let filling = growths.find(|(_, growth)| growth.sequence == id && end <= growth.after);
            let filling = filling.filter(|_| end > sequence.num_computed).map(|(plan, _)| plan.id);
            for (number, (group, table)) in self.groups.iter().zip(&sequence.tables).enumerate() {
                let history = sequence.histories[end - 1];
                if end.is_multiple_of(group.block_size) && table[end / group.block_size - 1] > 0 {
                    let entry = Entry { group: number, history, generation: sequence.generation, filling };
                    self.entries[table[end / group.block_size - 1]] = Some(entry);
                }
            }
        }
        sequence.num_registered = sequence.num_registered.max(full);
    }

    /// Names of the prefixes that others can hit.
    pub(crate) fn hittable(&self) -> Known {
        let present = self.entries.iter().flatten().filter(|entry| entry.generation == self.generation);
        let public = present.filter(|entry| entry.filling.is_none());
        public.map(|entry| (self.hashes[&entry.history], entry.group as u32)).collect()
    }

    fn shrink(&mut self, id: SequenceId, num_tokens: usize) {
        let (block_size, groups) = (self.block_size, self.groups.clone());
        let generation = self.generation;
        let sequence = self.find_mut(id);
        sequence.num_scheduled = sequence.num_scheduled.min(num_tokens);
        sequence.num_computed = sequence.num_computed.min(num_tokens);
        let num_scheduled = sequence.num_scheduled;
        let tables = sequence.tables.iter_mut().zip(&groups);
        tables.for_each(|(table, group)| table.truncate(num_scheduled.div_ceil(group.block_size)));
        sequence.num_registered = sequence.num_registered.min(sequence.num_scheduled / block_size);
        if sequence.num_scheduled == 0 {
            sequence.generation = generation;
        }
        self.remember(id);
    }
}

/// The blocks that a plan names by a growth.
fn named(growth: &Growth) -> impl Iterator<Item = usize> {
    let copied = growth.copies.iter().flat_map(|&(_, source, target)| [source, target]);
    growth.tables.iter().flatten().copied().chain(copied).filter(|&block| block > 0)
}
