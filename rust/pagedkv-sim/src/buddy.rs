//! The buddy allocator under the paper's Orca baselines: chunks of a power of two of units, contiguous and aligned.
//!
//! Rules (`orca/cacheflow/master/block_manager.py` of the paper's artifact): the pool is cut from address 0 on into as
//! many of the largest chunks as fit, its tail into ever smaller ones. An allocation is rounded up to a power of two and
//! takes the smallest chunk that is large enough, of one size the one freed last, and gives what it does not need back as
//! free upper halves. A freed chunk is merged with its buddy, the one at its address XOR its size, while that is free.

use crate::error::{Result, invalid};

/// A span of units that somebody holds, or that is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// First unit.
    pub start: u32,
    /// Units, a power of two.
    pub size: u32,
}

/// The allocator.
#[derive(Clone, Debug)]
pub struct BuddyAllocator {
    /// Starts of free chunks, by the logarithm of their size; the one freed last comes last.
    free: Vec<Vec<u32>>,
    num_units: u32,
    num_free: u32,
}

impl BuddyAllocator {
    /// A pool of `num_units` units in chunks of at most `largest`.
    ///
    /// # Errors
    /// [`crate::SimError::InvalidArgument`] for a largest chunk that is no power of two.
    pub fn new(num_units: u32, largest: u32) -> Result<Self> {
        if !largest.is_power_of_two() {
            return invalid("largest", "a power of two", largest);
        }
        let mut free = vec![Vec::new(); largest.ilog2() as usize + 1];
        let mut start = 0;
        for (log, starts) in free.iter_mut().enumerate().rev() {
            while num_units - start >= 1 << log {
                starts.push(start);
                start += 1 << log;
            }
        }
        Ok(Self { free, num_units, num_free: num_units })
    }

    /// Units of the pool.
    pub const fn num_units(&self) -> u32 {
        self.num_units
    }

    /// Units that nobody holds.
    pub const fn num_free(&self) -> u32 {
        self.num_free
    }

    /// Takes a chunk of at least `units`; `None`, and nothing changed, if no free chunk is large enough.
    ///
    /// # Complexity
    /// O(sizes).
    pub fn allocate(&mut self, units: u32) -> Option<Chunk> {
        let wanted = units.max(1).checked_next_power_of_two()?.ilog2() as usize;
        let found = (wanted..self.free.len()).find(|&log| !self.free[log].is_empty())?;
        let start = self.free[found].pop()?;
        for log in (wanted..found).rev() {
            self.free[log].push(start + (1 << log));
        }
        self.num_free -= 1 << wanted;
        Some(Chunk { start, size: 1 << wanted })
    }

    /// Gives back a chunk that [`Self::allocate`] gave.
    ///
    /// # Complexity
    /// O(free chunks).
    pub fn free(&mut self, chunk: Chunk) {
        self.num_free += chunk.size;
        let (mut start, mut log) = (chunk.start, chunk.size.ilog2() as usize);
        while log + 1 < self.free.len() {
            let buddy = start ^ (1 << log);
            let Some(at) = self.free[log].iter().position(|&free| free == buddy) else { break };
            self.free[log].remove(at);
            start = start.min(buddy);
            log += 1;
        }
        self.free[log].push(start);
    }

    /// Every free chunk.
    pub fn free_chunks(&self) -> impl Iterator<Item = Chunk> {
        let of_size = |(log, starts): (usize, &Vec<u32>)| {
            starts.iter().map(move |&start| Chunk { start, size: 1 << log }).collect::<Vec<_>>()
        };
        self.free.iter().enumerate().flat_map(of_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_cut_into_the_largest_chunks_and_its_tail_into_smaller_ones() {
        let allocator = BuddyAllocator::new(983, 128).unwrap();
        let mut sizes: Vec<_> = allocator.free_chunks().map(|chunk| chunk.size).collect();
        sizes.sort_unstable();
        assert_eq!(sizes, [1, 2, 4, 16, 64, 128, 128, 128, 128, 128, 128, 128]);
    }

    #[test]
    fn an_allocation_is_rounded_up_and_leaves_the_upper_halves_free() {
        let mut allocator = BuddyAllocator::new(16, 16).unwrap();
        assert_eq!(allocator.allocate(3), Some(Chunk { start: 0, size: 4 }));
        let mut free: Vec<_> = allocator.free_chunks().map(|chunk| (chunk.start, chunk.size)).collect();
        free.sort_unstable();
        assert_eq!(free, [(4, 4), (8, 8)]);
    }

    #[test]
    fn a_freed_chunk_is_merged_with_its_buddies() {
        let mut allocator = BuddyAllocator::new(16, 16).unwrap();
        let chunks: Vec<_> = (0..4).map(|_| allocator.allocate(4).unwrap()).collect();
        assert_eq!(allocator.allocate(1), None);
        chunks.into_iter().for_each(|chunk| allocator.free(chunk));
        assert_eq!(allocator.free_chunks().collect::<Vec<_>>(), [Chunk { start: 0, size: 16 }]);
    }

    #[test]
    fn more_than_the_largest_chunk_is_never_given() {
        assert_eq!(BuddyAllocator::new(64, 16).unwrap().allocate(17), None);
    }
}
