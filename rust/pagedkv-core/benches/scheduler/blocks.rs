//! Blocks one batch at a time, and one decode slot for each of many sequences.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use pagedkv_core::{BlockId, BlockPool, CacheConfig, ComputedBlocks, KVCacheManager, NULL_BLOCK, SequenceId};

use crate::samples::{Line, Random, float, micros_each};

/// Blocks that are allocated and freed together, and sequences that decode together.
pub(crate) const BATCH: usize = 1024;
const NUM_CYCLES: usize = 3000;
const BLOCK_SIZE: usize = 16;
const NUM_DECODED_BLOCKS: usize = 32;
const PROMPT_LEN: usize = 32;

/// `block_allocate` and `block_free`: 1,024 blocks at a time, the most recently freed ones again and again.
pub(crate) fn allocate_and_free() -> [Line; 2] {
    let mut pool = BlockPool::new(&CacheConfig::new(100_000)).expect("a valid config");
    let (allocated, freed) = (0..NUM_CYCLES).map(|_| cycle(&mut pool)).unzip();
    [Line::new("block_allocate", allocated), Line::new("block_free", freed)]
}

/// Microseconds per block to take a batch, and to give it back, last one first.
pub(crate) fn cycle(pool: &mut BlockPool) -> (f64, f64) {
    let mut blocks = [NULL_BLOCK; BATCH];
    let start = Instant::now();
    pool.allocate(black_box(&mut blocks)).expect("a batch of the pool is available");
    let allocated = micros_each(start, BATCH);
    let start = Instant::now();
    blocks.reverse();
    pool.free(black_box(&blocks)).expect("the blocks are held");
    (allocated, micros_each(start, BATCH))
}

/// Gives back blocks that are held, in a random order.
pub(crate) fn free_shuffled(pool: &mut BlockPool, blocks: &mut [BlockId]) -> Vec<f64> {
    Random(1).shuffle(blocks);
    let free = |batch: &[BlockId]| {
        let start = Instant::now();
        pool.free(batch).expect("the blocks are held");
        micros_each(start, batch.len())
    };
    blocks.chunks(BATCH).map(free).collect()
}

/// `decode_slot`: one token for each of 1,024 sequences, prefix cache on. A sample is the mean over the steps of a block,
/// for one step in sixteen takes new blocks.
pub(crate) fn decode_slot() -> Line {
    let mut manager = KVCacheManager::new(&CacheConfig::new((BATCH * 48 + 64) as u32)).expect("a valid config");
    let mut random = Random(0);
    let sequences: Vec<_> = (0..BATCH).map(|_| create(&mut manager, &random.tokens(PROMPT_LEN), true)).collect();
    grow(&mut manager, &sequences, PROMPT_LEN as u32);
    let mut decode = |_| {
        for &sequence in &sequences {
            manager.append_tokens(sequence, &[7]).expect("the sequence lives");
        }
        grow(&mut manager, &sequences, 1)
    };
    let mut decode_block = |_| (0..BLOCK_SIZE).map(&mut decode).sum::<f64>() / float(BLOCK_SIZE);
    Line::new("decode_slot", (0..NUM_DECODED_BLOCKS).map(&mut decode_block).collect())
}

pub(crate) fn create(manager: &mut KVCacheManager, tokens: &[i32], uses_cache: bool) -> SequenceId {
    manager.create(tokens.into(), Arc::default(), uses_cache).expect("a prompt has tokens")
}

/// Runs a plan in which every sequence grows; microseconds per sequence for the slots alone.
pub(crate) fn grow(manager: &mut KVCacheManager, sequences: &[SequenceId], num_tokens: u32) -> f64 {
    let nothing = ComputedBlocks::default();
    let plan = manager.begin_plan();
    let start = Instant::now();
    for &sequence in sequences {
        let slots = manager.allocate_slots(sequence, num_tokens, &nothing).expect("the sequence lives");
        black_box(slots.expect("there is room"));
    }
    let micros = micros_each(start, sequences.len());
    manager.commit(plan).expect("the plan is the oldest");
    micros
}
