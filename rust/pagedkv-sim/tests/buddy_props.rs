//! The buddy allocator against one that is obviously right: a list of chunks, searched and merged by hand.

use pagedkv_sim::buddy::{BuddyAllocator, Chunk};
use proptest::prelude::*;

/// Free chunks in the order in which they became free; the last of a size is taken first.
struct Naive {
    free: Vec<Chunk>,
    largest: u32,
}

impl Naive {
    fn new(num_units: u32, largest: u32) -> Self {
        let mut free = Vec::new();
        let (mut start, mut size) = (0, largest);
        while size > 0 {
            while num_units - start >= size {
                free.push(Chunk { start, size });
                start += size;
            }
            size /= 2;
        }
        Self { free, largest }
    }

    fn allocate(&mut self, units: u32) -> Option<Chunk> {
        let mut size = 1;
        while size < units {
            size *= 2;
        }
        let smallest = self.free.iter().map(|chunk| chunk.size).filter(|&found| found >= size).min()?;
        let at = self.free.iter().rposition(|chunk| chunk.size == smallest)?;
        let mut chunk = self.free.remove(at);
        while chunk.size > size {
            chunk.size /= 2;
            self.free.push(Chunk { start: chunk.start + chunk.size, size: chunk.size });
        }
        Some(chunk)
    }

    fn free(&mut self, mut chunk: Chunk) {
        while chunk.size < self.largest {
            let buddy = Chunk { start: chunk.start ^ chunk.size, size: chunk.size };
            let Some(at) = self.free.iter().position(|free| *free == buddy) else { break };
            self.free.remove(at);
            chunk = Chunk { start: chunk.start.min(buddy.start), size: 2 * chunk.size };
        }
        self.free.push(chunk);
    }
}

fn sorted(chunks: impl Iterator<Item = Chunk>) -> Vec<(u32, u32)> {
    let mut found: Vec<_> = chunks.map(|chunk| (chunk.start, chunk.size)).collect();
    found.sort_unstable();
    found
}

proptest! {
    #[test]
    fn allocator_does_what_the_naive_one_does(
        num_units in 1_u32..200,
        log in 0_u32..7,
        commands in prop::collection::vec((any::<bool>(), 1_u32..100, any::<prop::sample::Index>()), 1..200),
    ) {
        let mut allocator = BuddyAllocator::new(num_units, 1 << log).unwrap();
        let mut naive = Naive::new(num_units, 1 << log);
        let mut held: Vec<Chunk> = Vec::new();
        for (allocates, units, which) in commands {
            if allocates || held.is_empty() {
                let found = allocator.allocate(units);
                prop_assert_eq!(found, naive.allocate(units));
                held.extend(found);
            } else {
                let chunk = held.swap_remove(which.index(held.len()));
                allocator.free(chunk);
                naive.free(chunk);
            }
            prop_assert_eq!(sorted(allocator.free_chunks()), sorted(naive.free.iter().copied()));
            let num_held: u32 = held.iter().map(|chunk| chunk.size).sum();
            prop_assert_eq!(allocator.num_free() + num_held, num_units);
        }
        held.into_iter().for_each(|chunk| allocator.free(chunk));
        let whole = BuddyAllocator::new(num_units, 1 << log).unwrap();
        prop_assert_eq!(sorted(allocator.free_chunks()), sorted(whole.free_chunks()));
    }
}
