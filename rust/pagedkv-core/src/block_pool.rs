//! The blocks: who holds them, which are free, which can be hit, and what must wait for a plan to end.
//!
//! ```text
//!         allocate               commit of a full block           last holder releases
//!  FREE ───────────▶ HELD ───────────────────────────▶ HELD+CACHED ───────────▶ CACHED (evictable)
//!   ▲                 │ released, not cached                                       │   ▲
//!   │◀────────────────┘                                   hit: touch ──────────────┘   │ reuse = evict: the block
//!   └───────────────────────────────────────────────────────────────────────────────────┘ leaves its node at once
//!  Released while a plan in flight names it, or a transfer reads or writes it: FENCED until the last of them ended,
//!  then FREE or CACHED.
//! ```
//!
//! Free blocks are handed out most recently freed first; when there are none, the cached block that `eviction` names
//! is. A sequence releases its blocks last one first, so a prefix outlives what continues it.
//!
//! Cost: allocate, release, touch and evict are O(1) and allocate nothing; a block's record is one cache line.

use std::collections::VecDeque;

use smallvec::SmallVec;

use crate::block_list::{Block, BlockList, BlockState, FreeBlocks};
use crate::cache_layout::TableSpec;
use crate::chain_hash::LoraName;
use crate::config::{CacheConfig, Retention};
use crate::error::{Error, Result, invalid, reserve};
use crate::events::{EventLog, KVCacheSnapshot, KVEventBatch};
use crate::eviction::Evictable;
use crate::identity::RootKey;
use crate::ids::{BlockId, NO_NODE, NULL_BLOCK, NodeId, PlanId};
use crate::invariants::BrokenLaw;
use crate::prefix_cache::PrefixCache;
use crate::residency::{Residency, ResidencyStats};

/// A pool of blocks with reference counts and a prefix cache. See the module's page.
#[derive(Debug)]
pub struct BlockPool {
    pub(crate) blocks: Vec<Block>,
    pub(crate) free: FreeBlocks,
    pub(crate) cached: Evictable,
    /// Plans in flight, oldest first, each with the blocks that wait for its end in the order of their release.
    pub(crate) fenced: VecDeque<(PlanId, BlockList)>,
    /// Blocks that wait for transfers alone, in the order of their release.
    pub(crate) transferring: BlockList,
    /// Blocks that transfers read or write, once for each.
    pub(crate) num_transfers: u32,
    pub(crate) prefixes: PrefixCache,
    num_held: u32,
    newest_plan: PlanId,
    /// Counts every change that can make a lookup stale.
    pub(crate) stamp: u64,
    num_evictions: u64,
    /// By cache group: how many nodes of the prefix tree a block spans, where a prefix outlives what continues it; 0 for
    /// windows, whose blocks go in the order of their release.
    spans: SmallVec<[u32; 1]>,
    now: f64,
    residency: Option<Box<Residency>>,
    pub(crate) events: Option<Box<EventLog>>,
}

impl BlockPool {
    /// A pool with every block free, handed out in ascending order at first.
    ///
    /// # Errors
    /// Those of [`CacheConfig::validate`].
    ///
    /// # Complexity
    /// O(`num_blocks`), 64 bytes each; the prefix tree reserves as much again and touches it only as it fills.
    pub fn new(config: &CacheConfig) -> Result<Self> {
        let layout = config.layout()?;
        let span = |table: &TableSpec| match table.sliding_window {
            Some(_) => 0,
            None => table.block_size / config.block_size,
        };
        let mut blocks = reserve("the blocks of the pool", config.num_blocks as usize)?;
        blocks.resize(config.num_blocks as usize, Block::new(BlockState::Free));
        blocks[0].state = BlockState::Null;
        let mut free = FreeBlocks::with_capacity(config.num_blocks as usize - 1)?;
        for id in (1..config.num_blocks).rev() {
            free.push(&mut blocks, BlockId::new(id));
        }
        let mut prefixes = PrefixCache::new(config.block_size, config.hash_seed, config.num_blocks)?;
        let events = config.events.as_ref().map(|events| Box::new(EventLog::new(events, layout.tables())));
        if events.is_some() {
            prefixes.remember_births();
        }
        Ok(Self {
            blocks,
            free,
            cached: Evictable::new(config.eviction_policy, config.num_blocks)?,
            fenced: VecDeque::new(),
            transferring: BlockList::default(),
            num_transfers: 0,
            prefixes,
            num_held: 0,
            newest_plan: PlanId::new(0),
            stamp: 0,
            num_evictions: 0,
            spans: layout.tables().iter().map(span).collect(),
            now: 0.0,
            residency: (config.residency_sampling > 0)
                .then(|| Box::new(Residency::new(config.residency_sampling, config.num_blocks))),
            events,
        })
    }

    /// Blocks of the pool, the null block included.
    pub fn num_blocks(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Blocks that can be handed out now: free ones and evictable ones.
    pub fn num_available(&self) -> u32 {
        self.free.len() + self.cached.len()
    }

    /// Blocks that nobody holds and that hold nothing.
    pub fn num_free(&self) -> u32 {
        self.free.len()
    }

    /// Blocks that nobody holds and that can be hit.
    pub fn num_cached(&self) -> u32 {
        self.cached.len()
    }

    /// Blocks with a holder.
    pub fn num_held(&self) -> u32 {
        self.num_held
    }

    /// Blocks that wait for a plan, or a transfer, to end.
    pub fn num_fenced(&self) -> u32 {
        self.num_blocks() - 1 - self.num_available() - self.num_held
    }

    /// Cached blocks that were reused for something else, since the pool was made.
    pub fn num_evictions(&self) -> u64 {
        self.num_evictions
    }

    /// How long blocks held what they held, where [`CacheConfig::residency_sampling`] is on.
    pub fn residency(&self) -> Option<&ResidencyStats> {
        self.residency.as_ref().map(|residency| &residency.stats)
    }

    pub(crate) fn take_events(&mut self) -> Result<KVEventBatch> {
        let events = self.events.as_mut().ok_or_else(no_events)?;
        Ok(events.take(&self.prefixes, &self.blocks))
    }

    pub(crate) fn event_snapshot(&mut self) -> Result<KVCacheSnapshot> {
        let events = self.events.as_mut().ok_or_else(no_events)?;
        Ok(events.snapshot(&self.prefixes, &self.blocks))
    }

    pub(crate) fn name_lora(&mut self, lora_id: i64, name: LoraName) -> Result<()> {
        let events = self.events.as_mut().ok_or_else(no_events)?;
        if self.prefixes.knows_lora(lora_id) {
            return invalid("lora_id", "an adapter of which nothing is cached or in use", lora_id);
        }
        events.name_lora(lora_id, name);
        Ok(())
    }

    /// Holders of a block.
    ///
    /// # Errors
    /// [`Error::UnknownBlock`] for an id outside the pool.
    pub fn ref_count(&self, block: BlockId) -> Result<u32> {
        self.check(block).map(|()| self.blocks[block.index()].ref_count)
    }

    /// Where a block is in its life.
    ///
    /// # Errors
    /// [`Error::UnknownBlock`] for an id outside the pool.
    pub fn state(&self, block: BlockId) -> Result<BlockState> {
        self.check(block).map(|()| self.blocks[block.index()].state)
    }

    /// State and holders of every block, the null block included, in the order of their ids.
    ///
    /// # Complexity
    /// O(blocks).
    pub fn block_map(&self) -> impl ExactSizeIterator<Item = (BlockState, u32)> {
        self.blocks.iter().map(|block| (block.state, block.ref_count))
    }

    /// Fills `out` with blocks that the caller then holds; `None`, and nothing changed, if there are not enough.
    ///
    /// # Complexity
    /// O(blocks asked for); it allocates no memory.
    pub fn allocate(&mut self, out: &mut [BlockId]) -> Option<()> {
        if out.len() > self.num_available() as usize {
            return None;
        }
        out.fill_with(|| self.allocate_one());
        Some(())
    }

    /// Takes one more hold on each block. A block that is listed twice gets two.
    ///
    /// # Errors
    /// [`Error::UnknownBlock`], or [`Error::NotHeld`] for a block that is free.
    ///
    /// # Complexity
    /// O(blocks listed).
    pub fn touch(&mut self, blocks: &[BlockId]) -> Result<()> {
        for &block in blocks {
            self.check(block)?;
            if self.blocks[block.index()].state == BlockState::Free {
                return Err(Error::NotHeld(block));
            }
        }
        blocks.iter().for_each(|&block| self.hold(block));
        Ok(())
    }

    /// Gives up one hold on each block, in the order given. A block that is listed twice loses two.
    ///
    /// # Errors
    /// [`Error::UnknownBlock`], or [`Error::NotHeld`] for a block that has fewer holders than the call gives up.
    ///
    /// # Complexity
    /// O(blocks listed).
    pub fn free(&mut self, blocks: &[BlockId]) -> Result<()> {
        let mut have_other_holders = false;
        for (i, &block) in blocks.iter().enumerate() {
            match self.blocks.get_mut(block.index()) {
                Some(record) if record.ref_count > 0 => {
                    record.ref_count -= 1;
                    have_other_holders |= record.ref_count > 0;
                }
                _ => {
                    self.hold_again(&blocks[..i]);
                    return Err(self.check(block).err().unwrap_or(Error::NotHeld(block)));
                }
            }
        }
        if have_other_holders {
            self.hold_again(blocks);
            blocks.iter().for_each(|&block| self.release(block, None));
        } else {
            self.retire_all(blocks);
        }
        Ok(())
    }

    fn hold_again(&mut self, blocks: &[BlockId]) {
        blocks.iter().for_each(|block| self.blocks[block.index()].ref_count += 1);
    }

    /// The last holder of each of these blocks is gone. Most hold no prefix and are named by no plan: they are free.
    fn retire_all(&mut self, blocks: &[BlockId]) {
        self.stamp += 1;
        let is_idle = self.fenced.is_empty() && self.num_transfers == 0;
        for &block in blocks {
            if is_idle && self.blocks[block.index()].node == NO_NODE {
                self.num_held -= 1;
                self.free.push(&mut self.blocks, block);
            } else {
                self.retire(block);
            }
        }
    }

    /// Drops a cached block's contents: it becomes free at once. Answers whether it did: a block that is held, fenced or
    /// free stays as it is, and so does one whose prefix others continue.
    ///
    /// # Errors
    /// [`Error::UnknownBlock`] for an id outside the pool.
    ///
    /// # Complexity
    /// O(1), and O(1) for each prefix that only this block kept.
    pub fn evict(&mut self, block: BlockId) -> Result<bool> {
        self.check(block)?;
        let record = &self.blocks[block.index()];
        let evictable = record.state == BlockState::Cached && self.prefixes.node(record.node).num_children == 0;
        if evictable {
            self.cached.remove(&mut self.blocks, block);
            self.forget(block);
            self.count_eviction(block);
            self.free.push(&mut self.blocks, block);
        }
        Ok(evictable)
    }

    /// Checks every law that speaks of blocks alone; who holds them is not known here.
    ///
    /// # Errors
    /// The first [`BrokenLaw`].
    ///
    /// # Complexity
    /// O(blocks).
    pub fn check_integrity(&self) -> std::result::Result<(), BrokenLaw> {
        self.check_places()
    }

    /// Makes the bookkeeping wrong, for tests of what follows from that: held blocks lose their holders.
    #[doc(hidden)]
    pub fn break_a_law(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.ref_count = 0);
        self.num_held += 1;
    }

    pub(crate) fn is_in_flight(&self, plan: PlanId) -> bool {
        self.fenced.iter().any(|&(in_flight, _)| in_flight == plan)
    }

    /// The oldest plan in flight for whose end blocks wait.
    pub(crate) fn first_fencing_plan(&self) -> Option<PlanId> {
        self.fenced.iter().find(|(_, waiting)| waiting.len() > 0).map(|&(plan, _)| plan)
    }

    pub(crate) fn begin_plan(&mut self) -> PlanId {
        self.newest_plan = self.newest_plan.next();
        self.fenced.push_back((self.newest_plan, BlockList::default()));
        self.newest_plan
    }

    /// Ends the oldest plan in flight: what waited for it is free, or cached, in the order of its release.
    pub(crate) fn end_oldest_plan(&mut self) {
        let (_, mut waiting) = self.fenced.pop_front().expect("a plan is in flight");
        while let Some(block) = waiting.pop_front(&mut self.blocks) {
            self.await_transfers_or_settle(block);
        }
    }

    /// Ends the newest plan in flight, which never ran. What waited for it may be named by an older one as well.
    pub(crate) fn cancel_newest_plan(&mut self) {
        let (_, mut waiting) = self.fenced.pop_back().expect("a plan is in flight");
        while let Some(block) = waiting.pop_front(&mut self.blocks) {
            self.fence_or_settle(block);
        }
    }

    pub(crate) fn allocate_one(&mut self) -> BlockId {
        self.stamp += 1;
        let block = self.free.pop().unwrap_or_else(|| {
            let block = self.next_to_reuse();
            self.cached.remove(&mut self.blocks, block);
            self.forget(block);
            self.count_eviction(block);
            block
        });
        if let Some(residency) = &mut self.residency {
            residency.allocated(block, self.now);
        }
        let record = &mut self.blocks[block.index()];
        record.state = BlockState::Held;
        record.ref_count = 1;
        record.epoch = record.epoch.wrapping_add(1);
        self.num_held += 1;
        block
    }

    /// The cached block that goes next, which no evictable one continues.
    fn next_to_reuse(&mut self) -> BlockId {
        // Where all are continued, by what cannot be evicted now, the oldest goes.
        let mut oldest = None;
        loop {
            let block = self.cached.first().expect("the caller counted the available blocks");
            if self.cached.is_in_order() || !self.is_needed_by_descendants(block) {
                return block;
            }
            if oldest == Some(block) {
                return self.first_without_evictable_child();
            }
            if !self.cached.spare(&mut self.blocks, block) {
                oldest = oldest.or(Some(block));
            }
        }
    }

    /// The first evictable block that no evictable one of its group continues at once. Windows of other groups, which keep
    /// nodes in the tree, may hide that there is one.
    fn first_without_evictable_child(&self) -> BlockId {
        let parent = |block: BlockId| {
            let Block { node, group, .. } = self.blocks[block.index()];
            self.before_in_group(node, group).map(|node| (group, node.0))
        };
        let mut parents: Vec<_> = self.cached.iter(&self.blocks).filter_map(parent).collect();
        parents.sort_unstable();
        let is_free_to_go = |&block: &BlockId| {
            let Block { node, group, .. } = self.blocks[block.index()];
            parents.binary_search(&(group, node.0)).is_err()
        };
        self.cached.iter(&self.blocks).find(is_free_to_go).expect("the last of a prefix continues nothing")
    }

    /// Whether the block is its node's last and cached prefixes continue it.
    fn is_needed_by_descendants(&self, block: BlockId) -> bool {
        let Block { node, group, .. } = self.blocks[block.index()];
        // One that is being filled may be taken back.
        let is_twin = |other: BlockId| {
            let record = &self.blocks[other.index()];
            other != block && record.group == group && record.committed
        };
        let outlives = self.spans[usize::from(group)] > 0 && self.prefixes.has_children(node);
        outlives && !self.prefixes.blocks_of(&self.blocks, node).any(is_twin)
    }

    /// Takes one more hold on each block that a lookup found, and keeps them as the sequence that takes them asks.
    pub(crate) fn hold_hits(&mut self, blocks: &[BlockId], retention: Option<Retention>) {
        for &block in blocks.iter().filter(|&&block| block != NULL_BLOCK) {
            self.hold(block);
            self.blocks[block.index()].was_hit = true;
            if let Some(retention) = retention {
                self.retain(block, retention);
            }
        }
    }

    /// Keeps a block's contents as a request asks.
    pub(crate) fn retain(&mut self, block: BlockId, retention: Retention) {
        self.cached.retain(&mut self.blocks, block, retention);
    }

    /// The time of the calls that follow; priorities expire. Time that goes back is ignored.
    pub(crate) fn advance(&mut self, now: f64) {
        self.now = self.now.max(now);
        self.cached.advance(&mut self.blocks, now);
    }

    fn count_eviction(&mut self, block: BlockId) {
        self.num_evictions += 1;
        if let Some(residency) = &mut self.residency {
            residency.evicted(block, self.now);
        }
    }

    /// Takes one more hold on a block that holds something.
    pub(crate) fn hold(&mut self, block: BlockId) {
        if let Some(residency) = &mut self.residency {
            residency.accessed(block, self.now);
        }
        let record = &mut self.blocks[block.index()];
        record.ref_count += 1;
        let (state, fence) = (record.state, record.fence);
        record.state = BlockState::Held;
        match state {
            BlockState::Held => return,
            BlockState::Cached => self.cached.remove(&mut self.blocks, block),
            BlockState::Fenced => match self.list_of(fence) {
                Some(list) => self.fenced[list].1.remove(&mut self.blocks, block),
                None => self.transferring.remove(&mut self.blocks, block),
            },
            BlockState::Free | BlockState::Null => unreachable!("law 1 is broken: block {} holds nothing", block.get()),
        }
        self.num_held += 1;
        self.stamp += 1;
    }

    /// A block that was free has a holder.
    pub(crate) fn mark_held(&mut self) {
        self.num_held += 1;
        self.stamp += 1;
    }

    /// Gives up one hold. `named_by` is the newest plan in flight that names the block through this holder.
    pub(crate) fn release(&mut self, block: BlockId, named_by: Option<PlanId>) {
        let record = &mut self.blocks[block.index()];
        assert!(record.ref_count > 0, "law 2 is broken: block {} has no holder to release it", block.get());
        record.ref_count -= 1;
        record.fence = record.fence.max(named_by.unwrap_or_default());
        if record.ref_count == 0 {
            self.retire(block);
        }
    }

    pub(crate) fn attach(&mut self, block: BlockId, node: NodeId) {
        self.stamp += 1;
        self.prefixes.attach(&mut self.blocks, block, node);
        let twin = self.blocks[block.index()].twin_next;
        if let Some(retention) = self.cached.retention(&self.blocks, twin) {
            self.retain(block, retention);
        }
    }

    /// Makes the block public: the tokens of its node were computed. A block that left its node meanwhile stays private.
    pub(crate) fn publish(&mut self, block: BlockId) {
        let record = &mut self.blocks[block.index()];
        record.committed = record.node != NO_NODE;
        if record.committed {
            self.prefixes.published(block, record.node);
            if let Some(events) = &mut self.events {
                events.published(&self.prefixes, &self.blocks, block);
            }
        }
    }

    /// Takes the block off its node if the tokens on their way to it were never computed.
    pub(crate) fn withdraw(&mut self, block: BlockId) {
        let record = &self.blocks[block.index()];
        if record.node != NO_NODE && !record.committed {
            self.forget(block);
        }
    }

    /// Takes the block off its node, if it has one.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let node = self.blocks[block.index()].node;
        if node == NO_NODE {
            return;
        }
        self.stamp += 1;
        if let Some(events) = &mut self.events
            && self.blocks[block.index()].committed
        {
            events.withdrawn(&self.prefixes, &self.blocks, block);
        }
        self.cached.reset(&mut self.blocks, block);
        let parent = self.prefixes.node(node).parent;
        self.prefixes.detach(&mut self.blocks, block);
        if !self.cached.is_in_order() {
            self.let_stand_alone(parent);
        }
    }

    /// What continued a node is gone, or some of it.
    fn let_stand_alone(&mut self, node: NodeId) {
        if node == NO_NODE || self.prefixes.node(node).num_children > 0 {
            return;
        }
        let blocks: Vec<_> = self.prefixes.blocks_of(&self.blocks, node).collect();
        for block in blocks.into_iter().filter(|&block| self.is_evictable(block)).collect::<Vec<_>>() {
            self.cached.stand_alone(&mut self.blocks, block);
        }
    }

    pub(crate) fn hold_root(&mut self, key: &RootKey) -> NodeId {
        self.prefixes.hold_root(key)
    }

    /// Forgets every prefix: evictable blocks become free now, held and fenced ones when they are released.
    pub(crate) fn reset_prefixes(&mut self) {
        self.stamp += 1;
        self.prefixes.reset();
        while let Some(block) = self.cached.first() {
            self.cached.remove(&mut self.blocks, block);
            self.forget(block);
            self.free.push(&mut self.blocks, block);
        }
        if let Some(events) = &mut self.events {
            events.cleared();
        }
    }

    /// Forgets the prefixes of an adapter: their evictable blocks become free now, held and fenced ones when they are
    /// released.
    pub(crate) fn invalidate_lora(&mut self, lora_id: i64) {
        self.stamp += 1;
        if let Some(events) = &mut self.events {
            events.adapter_forgotten(&self.prefixes, &self.blocks, lora_id);
        }
        self.prefixes.invalidate_lora(lora_id);
        let is_stale = |&block: &BlockId| !self.prefixes.is_current(self.blocks[block.index()].node);
        let stale: Vec<_> = self.cached.iter(&self.blocks).filter(is_stale).collect();
        for block in stale {
            self.cached.remove(&mut self.blocks, block);
            self.forget(block);
            self.free.push(&mut self.blocks, block);
        }
    }

    pub(crate) fn is_evictable(&self, block: BlockId) -> bool {
        self.blocks[block.index()].state == BlockState::Cached
    }

    /// Whether cached prefixes continue the one that the block holds.
    pub(crate) fn carries_descendants(&self, block: BlockId) -> bool {
        self.prefixes.has_children(self.blocks[block.index()].node)
    }

    /// Whether a plan in flight may name the block through a holder that let go of it.
    pub(crate) fn has_fence(&self, block: BlockId) -> bool {
        self.list_of(self.blocks[block.index()].fence).is_some()
    }

    pub(crate) fn check(&self, block: BlockId) -> Result<()> {
        let last = self.num_blocks() - 1;
        if (1..=last).contains(&block.get()) { Ok(()) } else { Err(Error::UnknownBlock { block, last }) }
    }

    /// The last holder is gone.
    fn retire(&mut self, block: BlockId) {
        self.num_held -= 1;
        self.fence_or_settle(block);
    }

    fn fence_or_settle(&mut self, block: BlockId) {
        let Some(list) = self.list_of(self.blocks[block.index()].fence) else {
            return self.await_transfers_or_settle(block);
        };
        self.stamp += 1;
        self.blocks[block.index()].state = BlockState::Fenced;
        self.fenced[list].1.push_back(&mut self.blocks, block);
    }

    /// The list of the newest plan in flight up to `fence`: a block's fence may be a plan that was cancelled, while an
    /// older one that names the block as well still runs.
    pub(crate) fn list_of(&self, fence: PlanId) -> Option<usize> {
        self.fenced.iter().rposition(|&(plan, _)| plan <= fence)
    }

    /// Nobody holds the block and no plan in flight names it.
    fn await_transfers_or_settle(&mut self, block: BlockId) {
        if self.blocks[block.index()].num_transfers == 0 {
            return self.settle(block);
        }
        self.stamp += 1;
        self.blocks[block.index()].state = BlockState::Fenced;
        self.transferring.push_back(&mut self.blocks, block);
    }

    /// Nobody holds the block, no plan in flight names it and no transfer touches it.
    pub(crate) fn settle(&mut self, block: BlockId) {
        self.stamp += 1;
        let node = self.blocks[block.index()].node;
        if node != NO_NODE && self.blocks[block.index()].committed && self.prefixes.is_current(node) {
            self.blocks[block.index()].state = BlockState::Cached;
            self.cached.push(&mut self.blocks, block);
            let group = self.blocks[block.index()].group;
            if let Some(parent) = self.before_in_group(node, group) {
                self.keep_behind(parent, block);
            }
        } else {
            self.forget(block);
            self.free.push(&mut self.blocks, block);
        }
    }

    /// The node of the block before that of `node` in a group where a prefix outlives what continues it.
    pub(crate) fn before_in_group(&self, node: NodeId, group: u8) -> Option<NodeId> {
        let span = self.spans[usize::from(group)];
        let before = (0..span).fold(node, |node, _| self.prefixes.node(node).parent);
        (span > 0 && before != NO_NODE).then_some(before)
    }

    /// Puts the last evictable block of `node` in the group, and of what it continues, behind all others: it outlives what
    /// continues it. A block that is held or fenced will get there by itself.
    fn keep_behind(&mut self, mut node: NodeId, mut continued_by: BlockId) {
        let group = self.blocks[continued_by.index()].group;
        loop {
            let mut found = None;
            for block in self.prefixes.blocks_of(&self.blocks, node) {
                if self.blocks[block.index()].group != group {
                    continue;
                }
                if self.is_evictable(block) {
                    found = Some(block);
                } else if self.blocks[block.index()].committed {
                    return;
                }
            }
            let Some(block) = found else { return };
            self.cached.keep_behind(&mut self.blocks, block, continued_by);
            continued_by = block;
            let Some(before) = self.before_in_group(node, group) else { return };
            node = before;
        }
    }
}

fn no_events() -> Error {
    Error::Unsupported("events: the cache was configured without them".into())
}
