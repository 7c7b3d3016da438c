//! A pool, and a list and a table of counts beside it.

use std::collections::VecDeque;

use pagedkv_core::{BlockId, BlockPool, BlockState, CacheConfig, Error};

use crate::model::random::Random;

/// Free blocks in the order in which they will be handed out, and the holders of every block; number 0 is the null block.
struct NaivePool {
    free: VecDeque<u32>,
    holders: Vec<u32>,
}

impl NaivePool {
    fn new(num_blocks: u32) -> Self {
        Self { free: (1..num_blocks).collect(), holders: vec![0; num_blocks as usize] }
    }

    fn allocate(&mut self, count: usize) -> Option<Vec<u32>> {
        let taken: Vec<u32> = (count <= self.free.len()).then(|| self.free.drain(..count).collect())?;
        taken.iter().for_each(|&block| self.holders[block as usize] = 1);
        Some(taken)
    }

    fn touch(&mut self, blocks: &[u32]) -> Result<(), Error> {
        for &block in blocks {
            self.check(block)?;
            if self.holders[block as usize] == 0 {
                return Err(Error::NotHeld(BlockId::new(block)));
            }
        }
        blocks.iter().for_each(|&block| self.holders[block as usize] += 1);
        Ok(())
    }

    /// One after another, on a copy, which counts only if all went well.
    fn free(&mut self, blocks: &[u32]) -> Result<(), Error> {
        let mut holders = self.holders.clone();
        let mut free = self.free.clone();
        for &block in blocks {
            self.check(block)?;
            let count = &mut holders[block as usize];
            *count = count.checked_sub(1).ok_or(Error::NotHeld(BlockId::new(block)))?;
            if *count == 0 {
                free.push_front(block);
            }
        }
        (self.holders, self.free) = (holders, free);
        Ok(())
    }

    fn check(&self, block: u32) -> Result<(), Error> {
        let last = self.holders.len() as u32 - 1;
        let error = Error::UnknownBlock { block: BlockId::new(block), last };
        (1..=last).contains(&block).then_some(()).ok_or(error)
    }
}

fn ids(blocks: &[u32]) -> Vec<BlockId> {
    blocks.iter().copied().map(BlockId::new).collect()
}

fn check_equal(pool: &BlockPool, naive: &NaivePool) {
    for (block, &holders) in (0..).zip(&naive.holders).skip(1) {
        let state = if holders > 0 { BlockState::Held } else { BlockState::Free };
        assert_eq!(pool.ref_count(BlockId::new(block)), Ok(holders));
        assert_eq!(pool.state(BlockId::new(block)), Ok(state));
    }
    let num_free = naive.free.len() as u32;
    assert_eq!((pool.num_free(), pool.num_available()), (num_free, num_free));
    assert_eq!(pool.num_held(), pool.num_blocks() - 1 - num_free);
    assert_eq!((pool.num_cached(), pool.num_fenced(), pool.num_evictions()), (0, 0, 0));
}

/// Mostly blocks that are held, now and then any number.
fn some_blocks(random: &mut Random, naive: &NaivePool) -> Vec<u32> {
    let num_blocks = naive.holders.len();
    let held: Vec<u32> = (1..num_blocks as u32).filter(|&block| naive.holders[block as usize] > 0).collect();
    let mut pick = || match random.below(12) {
        0 => random.below(num_blocks + 2) as u32,
        _ if held.is_empty() => 1,
        _ => held[random.below(held.len())],
    };
    let count = 1 + pick() as usize % 4;
    (0..count).map(|_| pick()).collect()
}

/// A call, by four bytes: what is called, and which blocks it names.
pub(crate) type Command = [u8; 4];

pub(crate) struct World {
    pool: BlockPool,
    naive: NaivePool,
}

impl World {
    /// A pool of one of eight sizes, by number.
    pub(crate) fn numbered(number: u64) -> Self {
        let num_blocks = 2 + (number % 8) as u32;
        let pool = BlockPool::new(&CacheConfig::new(num_blocks)).expect("a valid configuration");
        Self { pool, naive: NaivePool::new(num_blocks) }
    }

    pub(crate) fn run(&mut self, [kind, choice @ ..]: Command) {
        let mut random = Random::new(choice.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte)));
        match kind % 4 {
            0 | 1 => {
                let mut out = vec![BlockId::new(0); random.below(4)];
                let expected = self.naive.allocate(out.len());
                assert_eq!(self.pool.allocate(&mut out).map(|()| out), expected.map(|blocks| ids(&blocks)));
            }
            2 => {
                let blocks = some_blocks(&mut random, &self.naive);
                assert_eq!(self.pool.touch(&ids(&blocks)), self.naive.touch(&blocks), "touch {blocks:?}");
            }
            _ => {
                let blocks = some_blocks(&mut random, &self.naive);
                assert_eq!(self.pool.free(&ids(&blocks)), self.naive.free(&blocks), "free {blocks:?}");
            }
        }
        check_equal(&self.pool, &self.naive);
    }

    /// Runs the world and the calls that these bytes stand for.
    #[allow(dead_code, reason = "the soak run has no bytes to replay")]
    pub(crate) fn replay(bytes: &[u8]) {
        let (number, calls) = bytes.split_at(bytes.len().min(1));
        let mut world = Self::numbered(u64::from(number.first().copied().unwrap_or(0)));
        calls.chunks_exact(4).for_each(|call| world.run([call[0], call[1], call[2], call[3]]));
    }
}
