//! Which cached block is reused next.
//!
//! Blocks that can be evicted lie in levels, and within a level in the order of their release: the front of the lowest
//! level that is not empty goes first. The policy chooses a block's level when it comes in:
//!
//! | policy | levels |
//! |---|---|
//! | [`EvictionPolicy::Lru`] | one |
//! | [`EvictionPolicy::SegmentedLru`] | two: blocks that were never hit go before those that were; the second level keeps four fifths of the pool at most, its oldest blocks fall back to the first |
//! | [`EvictionPolicy::Priority`] | 101: the priority that a request gave its prefix, for as long as it said |
//!
//! What is continued by other cached blocks outlives them: it is put behind them, on their level or its own, whichever
//! is higher, and where it lies before them all the same it is passed over when its turn comes. Every operation is O(1),
//! O(log n) for blocks whose priority expires, and allocates nothing but for those.

use crate::block_list::{Block, BlockList};
use crate::config::{EvictionPolicy, Retention};
use crate::error::Result;
use crate::expiry::Expiry;
use crate::ids::BlockId;

/// Level of a block under [`EvictionPolicy::SegmentedLru`] that was hit.
const PROTECTED: u8 = 1;

/// The level on which a block comes in.
fn level_of(policy: EvictionPolicy, record: &Block) -> u8 {
    match policy {
        EvictionPolicy::Lru => 0,
        EvictionPolicy::SegmentedLru => {
            if record.was_hit {
                PROTECTED
            } else {
                0
            }
        }
        EvictionPolicy::Priority => record.priority.unwrap_or(Retention::DEFAULT_PRIORITY),
    }
}

#[derive(Debug)]
pub(crate) struct Evictable {
    policy: EvictionPolicy,
    levels: Vec<BlockList>,
    /// One bit for each level that is not empty.
    occupied: u128,
    len: u32,
    max_protected: u32,
    /// Under [`EvictionPolicy::Priority`].
    expiry: Option<Expiry>,
    now: f64,
}

impl Evictable {
    pub(crate) fn new(policy: EvictionPolicy, num_blocks: u32) -> Result<Self> {
        let num_levels = match policy {
            EvictionPolicy::Lru => 1,
            EvictionPolicy::SegmentedLru => 2,
            EvictionPolicy::Priority => usize::from(Retention::MAX_PRIORITY) + 1,
        };
        let has_times = policy == EvictionPolicy::Priority;
        Ok(Self {
            policy,
            levels: vec![BlockList::default(); num_levels],
            occupied: 0,
            len: 0,
            max_protected: (u64::from(num_blocks) * 4 / 5) as u32,
            expiry: has_times.then(|| Expiry::new(num_blocks as usize)).transpose()?,
            now: 0.0,
        })
    }

    pub(crate) const fn policy(&self) -> EvictionPolicy {
        self.policy
    }

    /// Whether what continues a block always lies before it. With levels, the block may be on a lower one: it is passed
    /// over when its turn comes.
    pub(crate) fn is_in_order(&self) -> bool {
        self.policy == EvictionPolicy::Lru
    }

    pub(crate) const fn len(&self) -> u32 {
        self.len
    }

    /// Takes in a block that nobody holds any more.
    pub(crate) fn push(&mut self, blocks: &mut [Block], id: BlockId) {
        let record = &mut blocks[id.index()];
        record.level = level_of(self.policy, record);
        if let Some(expiry) = &mut self.expiry {
            expiry.start(id, self.now);
        }
        self.append(blocks, id);
        self.demote(blocks);
    }

    /// Puts a block that others continue behind all of `level`, or of its own if that is higher.
    pub(crate) fn keep_behind(&mut self, blocks: &mut [Block], id: BlockId, continued_by: BlockId) {
        let level = blocks[continued_by.index()].level;
        self.unlink(blocks, id);
        let record = &mut blocks[id.index()];
        record.level = record.level.max(level);
        self.append(blocks, id);
        self.demote(blocks);
    }

    /// Puts the block that was to go next behind all of the next level that has blocks, or of its own if none has. Answers
    /// whether one had.
    pub(crate) fn spare(&mut self, blocks: &mut [Block], id: BlockId) -> bool {
        let level = blocks[id.index()].level;
        self.unlink(blocks, id);
        let higher = self.occupied & !(u128::MAX >> (127 - level));
        if higher != 0 {
            blocks[id.index()].level = higher.trailing_zeros() as u8;
        }
        self.append(blocks, id);
        higher != 0
    }

    /// Nothing continues the block any more: it goes back to its own level, where it is the oldest.
    pub(crate) fn stand_alone(&mut self, blocks: &mut [Block], id: BlockId) {
        self.unlink(blocks, id);
        let level = level_of(self.policy, &blocks[id.index()]);
        blocks[id.index()].level = level;
        self.levels[usize::from(level)].push_front(blocks, id);
        self.occupied |= 1 << level;
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, blocks: &mut [Block], id: BlockId) {
        self.unlink(blocks, id);
        if let Some(expiry) = &mut self.expiry {
            expiry.stop(id);
        }
    }

    /// The block that goes next.
    pub(crate) fn first(&self) -> Option<BlockId> {
        (self.len > 0).then(|| self.levels[self.occupied.trailing_zeros() as usize].first())
    }

    /// Blocks in the order in which they go.
    pub(crate) fn iter<'a>(&'a self, blocks: &'a [Block]) -> impl Iterator<Item = BlockId> + use<'a> {
        self.levels.iter().flat_map(|list| list.iter(blocks))
    }

    /// Lets a block be kept as a request asks, beside what others asked: the higher priority counts, for the longer time.
    pub(crate) fn retain(&mut self, blocks: &mut [Block], id: BlockId, retention: Retention) {
        let record = &mut blocks[id.index()];
        if let Some(expiry) = &mut self.expiry {
            expiry.retain(id, record.priority.cmp(&Some(retention.priority)), retention.seconds);
        }
        record.priority = record.priority.max(Some(retention.priority));
    }

    /// What requests asked for the contents of a block.
    pub(crate) fn retention(&self, blocks: &[Block], id: BlockId) -> Option<Retention> {
        let priority = blocks[id.index()].priority?;
        let seconds = self.expiry.as_ref().map_or(f64::INFINITY, |expiry| expiry.seconds(id));
        Some(Retention { priority, seconds })
    }

    /// Forgets what was asked for a block: it holds something else from now on.
    pub(crate) fn reset(&mut self, blocks: &mut [Block], id: BlockId) {
        let record = &mut blocks[id.index()];
        record.was_hit = false;
        record.priority = None;
        if let Some(expiry) = &mut self.expiry {
            expiry.reset(id);
        }
    }

    /// Lets time pass: priorities that expire fall.
    pub(crate) fn advance(&mut self, blocks: &mut [Block], now: f64) {
        self.now = self.now.max(now);
        while let Some(block) = self.expiry.as_mut().and_then(|expiry| expiry.pop(self.now)) {
            self.unlink(blocks, block);
            let record = &mut blocks[block.index()];
            record.priority = None;
            record.level = level_of(self.policy, record);
            self.append(blocks, block);
        }
    }

    /// Whether the counts are those of the lists, for the integrity check.
    pub(crate) fn is_counted(&self) -> bool {
        let num_blocks: u32 = self.levels.iter().map(BlockList::len).sum();
        let marks =
            self.levels.iter().enumerate().all(|(level, list)| (self.occupied >> level & 1 == 1) == (list.len() > 0));
        num_blocks == self.len && marks
    }

    /// The second segment gives back what is beyond its share.
    fn demote(&mut self, blocks: &mut [Block]) {
        if self.policy != EvictionPolicy::SegmentedLru {
            return;
        }
        while self.levels[usize::from(PROTECTED)].len() > self.max_protected {
            let oldest = self.levels[usize::from(PROTECTED)].first();
            self.unlink(blocks, oldest);
            let record = &mut blocks[oldest.index()];
            (record.level, record.was_hit) = (0, false);
            self.append(blocks, oldest);
        }
    }

    fn append(&mut self, blocks: &mut [Block], id: BlockId) {
        let level = blocks[id.index()].level;
        self.levels[usize::from(level)].push_back(blocks, id);
        self.occupied |= 1 << level;
        self.len += 1;
    }

    fn unlink(&mut self, blocks: &mut [Block], id: BlockId) {
        let level = blocks[id.index()].level;
        let list = &mut self.levels[usize::from(level)];
        list.remove(blocks, id);
        self.occupied &= !(u128::from(list.len() == 0) << level);
        self.len -= 1;
    }
}
