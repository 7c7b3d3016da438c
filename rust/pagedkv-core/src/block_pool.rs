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

mod fences;
mod publication;
mod reuse;
mod transfer_fences;

use std::collections::VecDeque;

use smallvec::SmallVec;

use crate::block_list::{Block, BlockList, BlockState, FreeBlocks};
use crate::cache_layout::TableSpec;
use crate::config::CacheConfig;
use crate::error::{Error, Result, reserve};
use crate::events::EventLog;
use crate::eviction::Evictable;
use crate::ids::{BlockId, NO_NODE, PlanId};
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

    pub(crate) fn check(&self, block: BlockId) -> Result<()> {
        let last = self.num_blocks() - 1;
        if (1..=last).contains(&block.get()) { Ok(()) } else { Err(Error::UnknownBlock { block, last }) }
    }
}
