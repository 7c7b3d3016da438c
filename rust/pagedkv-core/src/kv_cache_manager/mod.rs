//! Sequences and the blocks that they hold: growth, forks, prefix hits, and the plans in which they change.
//!
//! Sequences grow inside a *plan*: [`KVCacheManager::begin_plan`] opens one, [`KVCacheManager::allocate_slots`] adds
//! tokens of a sequence to the newest, and [`KVCacheManager::commit`] or [`KVCacheManager::rollback`] ends it. A block
//! becomes public in the prefix cache when the plan that fills it commits; until then only sequences of that plan and
//! of plans behind it may take it. What is released while a plan in flight names it is reused after that plan only.

mod batch;
mod coming;
mod copy_on_write;
mod cuts;
mod group_lookup;
mod growth;
mod lifecycle;
mod lookup;
mod matching;
mod moves;
mod pins;
mod plan;
mod registration;
mod sequence;
mod sessions;
mod swap;
mod swap_record;
mod windows;

use smallvec::SmallVec;

use crate::block_pool::BlockPool;
use crate::cache_layout::TableSpec;
use crate::chain_hash::LoraName;
use crate::config::{CacheConfig, EvictionPolicy, Retention};
use crate::error::{Error, Result, invalid};
use crate::events::{KVCacheSnapshot, KVEventBatch};
use crate::ids::{BlockId, SequenceId};
pub use batch::{BatchSlots, Growths};
pub use copy_on_write::BlockCopy;
pub use growth::AllocatedSlots;
pub(crate) use lifecycle::{check_identity, check_tokens};
pub use lookup::ComputedBlocks;
pub(crate) use matching::Match;
pub use pins::PinId;
pub(crate) use pins::Pins;
pub(crate) use plan::PlanRecord;
pub(crate) use sequence::{Sequence, Table, Tail};
pub(crate) use swap_record::{Arrival, Elsewhere, LostGrowth, Return, Returning, SwapRecord, SwappedBlock};
pub(crate) use windows::DepartedColumn;

/// The bookkeeping of a paged KV cache. See the module's page.
#[derive(Debug)]
pub struct KVCacheManager {
    pub(crate) pool: BlockPool,
    pub(crate) sequences: Vec<Sequence>,
    vacant: Vec<u32>,
    /// Tokens per node of the prefix tree: the smallest block size of a group.
    pub(crate) block_size: u32,
    /// What each cache group's tables are like.
    pub(crate) groups: SmallVec<[TableSpec; 1]>,
    /// Prefixes are hit in multiples of this: whole blocks in every group.
    pub(crate) hit_multiple: u32,
    /// Growths of sequences that lost their blocks, which were undone since; `None` where nobody asks.
    pub(crate) lost_growths: Option<Vec<LostGrowth>>,
    pub(crate) has_windows: bool,
    /// Whether a sequence's blocks may leave nodes of its path without one, so that the path is held.
    pub(crate) holds_paths: bool,
    /// Columns that left a window since somebody took the list, where anybody does.
    pub(crate) departed: Option<Vec<DepartedColumn>>,
    caching: bool,
    pub(crate) plans: std::collections::VecDeque<PlanRecord>,
    spare_records: Vec<PlanRecord>,
    /// Sequences that may await moves.
    awaiting: Vec<u32>,
    pub(crate) pins: Pins,
    scratch: Vec<i32>,
}

impl KVCacheManager {
    /// A manager over a pool of its own.
    ///
    /// # Errors
    /// Those of [`CacheConfig::validate`].
    pub fn new(config: &CacheConfig) -> Result<Self> {
        let layout = config.layout()?;
        let groups: SmallVec<[TableSpec; 1]> = layout.tables().iter().copied().collect();
        let anchors = |table: &TableSpec| table.sliding_window.is_none() && table.block_size == config.block_size;
        Ok(Self {
            pool: BlockPool::new(config)?,
            sequences: Vec::new(),
            vacant: Vec::new(),
            block_size: config.block_size,
            hit_multiple: hit_multiple(&groups)?,
            lost_growths: None,
            has_windows: groups.iter().any(|table| table.sliding_window.is_some()),
            holds_paths: !groups.iter().any(anchors),
            groups,
            departed: None,
            caching: config.enable_prefix_caching,
            plans: std::collections::VecDeque::new(),
            spare_records: Vec::new(),
            awaiting: Vec::new(),
            pins: Pins::new(config.pin_quota_blocks),
            scratch: Vec::new(),
        })
    }

    /// Asks that the blocks which a sequence fills or hits from now on are kept in the cache in a certain way.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::InvalidArgument`] as [`Retention::validate`]; [`Error::Unsupported`] where the
    /// eviction policy knows no priorities.
    pub fn retain(&mut self, sequence: SequenceId, retention: Retention) -> Result<()> {
        let index = self.find(sequence)?;
        retention.validate()?;
        if self.pool.cached.policy() != EvictionPolicy::Priority {
            return Err(Error::Unsupported("cache_priority: the eviction policy is not \"priority\"".into()));
        }
        self.sequences[index].retention = Some(retention);
        Ok(())
    }

    /// The time of the calls that follow, in the caller's seconds: priorities of cached blocks that were to hold until then
    /// fall. Time that goes back is ignored.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a time that is not finite.
    ///
    /// # Complexity
    /// O(log blocks) per priority that falls.
    pub fn advance(&mut self, now: f64) -> Result<()> {
        if !now.is_finite() {
            return invalid("now", "a finite time in seconds", now);
        }
        self.pool.advance(now);
        Ok(())
    }

    /// Forgets every cached prefix. What running sequences computed before stays theirs and is never hit again.
    /// Pins go with it.
    ///
    /// # Complexity
    /// O(evictable blocks).
    pub fn reset_prefix_cache(&mut self) {
        self.pool.reset_prefixes();
        self.drop_stale_pins();
    }

    /// Forgets every cached prefix of an adapter, whose weights are no longer those that computed it; its pins go with it.
    /// What running sequences of the adapter computed stays theirs and is never hit again.
    ///
    /// # Complexity
    /// O(evictable blocks).
    pub fn invalidate_lora(&mut self, lora_id: i64) {
        self.pool.invalidate_lora(lora_id);
        self.drop_stale_pins();
    }

    /// Share of the usable blocks that are not available, from 0 to 1.
    pub fn usage(&self) -> f64 {
        1.0 - f64::from(self.pool.num_available()) / f64::from(self.pool.num_blocks() - 1)
    }

    /// The pool behind the sequences.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The block table of a sequence in the first cache group.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn block_table(&self, sequence: SequenceId) -> Result<&[BlockId]> {
        self.group_table(sequence, 0)
    }

    /// The block table of a sequence in a cache group; the null block stands where a window needs none.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::InvalidArgument`] for a group that the pool has not.
    pub fn group_table(&self, sequence: SequenceId, group: usize) -> Result<&[BlockId]> {
        let index = self.find(sequence)?;
        self.check_group(group)?;
        Ok(&self.sequences[index].tables[group].blocks)
    }

    /// Whether there is one cache group, with full attention.
    pub(crate) fn is_plain(&self) -> bool {
        self.groups.len() == 1 && !self.has_windows
    }

    pub(crate) fn check_group(&self, group: usize) -> Result<()> {
        let last = self.groups.len() - 1;
        if group <= last { Ok(()) } else { invalid("group", format!("0 to {last}"), group) }
    }

    /// Known tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn num_tokens(&self, sequence: SequenceId) -> Result<u32> {
        self.find(sequence).map(|index| self.sequences[index].tokens.len())
    }

    /// Tokens of a sequence whose keys and values are in its blocks, by plans that committed.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn num_computed_tokens(&self, sequence: SequenceId) -> Result<u32> {
        self.find(sequence).map(|index| self.sequences[index].num_computed)
    }

    /// Takes the events of the prefix cache since the last call. See [`crate::events`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] where [`CacheConfig::events`] is off.
    pub fn take_events(&mut self) -> Result<KVEventBatch> {
        self.pool.take_events()
    }

    /// Everything that can be hit, as events, for who joins late.
    ///
    /// # Errors
    /// As [`Self::take_events`].
    ///
    /// # Complexity
    /// O(blocks).
    pub fn event_snapshot(&mut self) -> Result<KVCacheSnapshot> {
        self.pool.event_snapshot()
    }

    /// Says what an adapter is called in events and in their hashes.
    ///
    /// # Errors
    /// As [`Self::take_events`]; [`Error::InvalidArgument`] for an adapter of which something is cached or in use.
    pub fn name_lora(&mut self, lora_id: i64, name: LoraName) -> Result<()> {
        self.pool.name_lora(lora_id, name)
    }

    /// Makes the bookkeeping wrong, for tests of what follows from that.
    #[doc(hidden)]
    pub fn break_a_law(&mut self) {
        self.pool.break_a_law();
    }

    /// Sequences that live; pins are not among them.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len() - self.vacant.len() - self.pins.len()
    }

    pub(crate) fn sequence(&self, index: usize) -> &Sequence {
        &self.sequences[index]
    }

    /// The sequence at `index`, if the record with this epoch still speaks of the blocks that it holds.
    pub(crate) fn resident(&self, index: usize, epoch: u32) -> Option<&Sequence> {
        Some(&self.sequences[index]).filter(|sequence| sequence.epoch == epoch)
    }
}

/// The least common multiple of the groups' block sizes.
fn hit_multiple(groups: &[TableSpec]) -> Result<u32> {
    let gcd = |mut one: u64, mut other: u64| {
        while other > 0 {
            (one, other) = (other, one % other);
        }
        one
    };
    let multiple = groups.iter().fold(1_u64, |multiple, table| {
        let size = u64::from(table.block_size);
        (multiple / gcd(multiple, size)).saturating_mul(size)
    });
    match u32::try_from(multiple) {
        Ok(multiple) if multiple < 1 << 30 => Ok(multiple),
        _ => invalid("groups", "block sizes with a common multiple below 2^30", multiple),
    }
}
