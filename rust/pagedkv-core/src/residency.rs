//! How long blocks hold what they hold: every n-th block of the pool is watched from its allocation to its eviction.
//!
//! Definitions are those of vLLM's `KVCacheMetricsCollector` (0.32), which draws the blocks that it watches at random;
//! here the block's number decides, so that the same calls give the same figures.

use crate::ids::BlockId;
use crate::stats::{Histogram, KV_CACHE_RESIDENCY_BUCKETS};

/// Accesses of a block that are remembered, as in vLLM.
const NUM_ACCESSES: usize = 4;

/// What was seen of the blocks that were evicted.
#[derive(Clone, Debug, PartialEq)]
pub struct ResidencyStats {
    /// Seconds from allocation to eviction.
    pub kv_block_lifetime_seconds: Histogram,
    /// Seconds from the last hit, or from allocation, to eviction.
    pub kv_block_idle_before_evict_seconds: Histogram,
    /// Seconds between the last hits of a block.
    pub kv_block_reuse_gap_seconds: Histogram,
}

#[derive(Clone, Copy, Debug, Default)]
struct Life {
    is_watched: bool,
    born: f64,
    last_access: f64,
    /// The newest accesses, in a ring.
    accesses: [f64; NUM_ACCESSES],
    num_accesses: u32,
}

/// The lives of the watched blocks.
#[derive(Debug)]
pub(crate) struct Residency {
    every: u32,
    lives: Vec<Life>,
    pub(crate) stats: ResidencyStats,
}

impl Residency {
    pub(crate) fn new(every: u32, num_blocks: u32) -> Self {
        let histogram = || Histogram::new(KV_CACHE_RESIDENCY_BUCKETS);
        Self {
            every,
            lives: vec![Life::default(); num_blocks.div_ceil(every) as usize],
            stats: ResidencyStats {
                kv_block_lifetime_seconds: histogram(),
                kv_block_idle_before_evict_seconds: histogram(),
                kv_block_reuse_gap_seconds: histogram(),
            },
        }
    }

    pub(crate) fn allocated(&mut self, block: BlockId, now: f64) {
        if let Some(life) = self.life(block) {
            *life = Life { is_watched: true, born: now, last_access: now, ..Life::default() };
        }
    }

    pub(crate) fn accessed(&mut self, block: BlockId, now: f64) {
        if let Some(life) = self.life(block) {
            life.last_access = now;
            life.accesses[life.num_accesses as usize % NUM_ACCESSES] = now;
            life.num_accesses += 1;
        }
    }

    pub(crate) fn evicted(&mut self, block: BlockId, now: f64) {
        let Some(life) = self.life(block).map(std::mem::take).filter(|life| life.is_watched) else { return };
        self.stats.kv_block_lifetime_seconds.observe(now - life.born);
        self.stats.kv_block_idle_before_evict_seconds.observe(now - life.last_access);
        let end = life.num_accesses as usize;
        for later in end.saturating_sub(NUM_ACCESSES - 1).max(1)..end {
            let gap = life.accesses[later % NUM_ACCESSES] - life.accesses[(later - 1) % NUM_ACCESSES];
            self.stats.kv_block_reuse_gap_seconds.observe(gap);
        }
    }

    fn life(&mut self, block: BlockId) -> Option<&mut Life> {
        let number = block.get();
        number.is_multiple_of(self.every).then(|| &mut self.lives[(number / self.every) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gaps_between_the_last_four_accesses_are_counted() {
        let mut residency = Residency::new(2, 5);
        let block = BlockId::new(4);
        residency.allocated(block, 1.0);
        for access in [2.0, 4.0, 7.0, 11.0, 16.0] {
            residency.accessed(block, access);
        }
        residency.evicted(block, 26.0);
        let ResidencyStats { kv_block_lifetime_seconds: lifetime, kv_block_reuse_gap_seconds: gaps, .. } =
            &residency.stats;
        assert_eq!((lifetime.count(), lifetime.sum()), (1, 25.0));
        assert_eq!((gaps.count(), gaps.sum()), (3, 12.0));
        let idle = &residency.stats.kv_block_idle_before_evict_seconds;
        assert_eq!((idle.count(), idle.sum()), (1, 10.0));
    }

    #[test]
    fn only_every_nth_block_is_watched_and_an_eviction_ends_the_watch() {
        let mut residency = Residency::new(2, 5);
        for block in 1..5 {
            residency.allocated(BlockId::new(block), 0.0);
            residency.evicted(BlockId::new(block), 1.0);
            residency.evicted(BlockId::new(block), 2.0);
        }
        assert_eq!(residency.stats.kv_block_lifetime_seconds.count(), 2);
    }
}
