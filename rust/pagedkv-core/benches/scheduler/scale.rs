//! What the size of the pool costs: in cache, and out of it.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use pagedkv_core::{BlockPool, CacheConfig, ComputedBlocks, KVCacheManager, NULL_BLOCK, SequenceId};

use crate::blocks::{BATCH, cycle, free_shuffled, grow};
use crate::samples::{Line, Random, micros_each, quantile};

const SMALL: u32 = 10_000;
const LARGE: u32 = 10_000_000;
const BLOCK_SIZE: u32 = 16;
const NUM_TURNS: usize = 10;
/// Cycles in a row, so that all but the first find their blocks where the one before left them.
const NUM_CYCLES: usize = 50;
const OPERATIONS: [&str; 3] = ["allocate", "free", "decode_slot"];
/// Steps of the decode that marches through the large pool, 1,024 slots each.
const NUM_COLD_STEPS: u32 = 16_384;
const NUM_CHASED: usize = 4_000_000;

/// `pool_scale`: the worst of three operations in a pool of 10^7 blocks against one of 10^4, on the 1,024 blocks that were
/// freed last, after the whole pool was freed in shuffled order. The two pools take turns.
pub(crate) fn pool_scale() -> Line {
    let mut pools = [SMALL, LARGE].map(shuffled_pool);
    let mut managers = [SMALL, LARGE].map(shuffled_manager);
    let mut micros: [[Vec<f64>; 2]; 3] = Default::default();
    for size in [0, 1].repeat(NUM_TURNS) {
        for _ in 0..NUM_CYCLES {
            let (allocated, freed) = cycle(&mut pools[size]);
            micros[0][size].push(allocated);
            micros[1][size].push(freed);
        }
        for _ in 0..NUM_CYCLES {
            micros[2][size].push(decode_cycle(&mut managers[size]));
        }
    }
    let factors = micros.map(|[mut small, mut large]| quantile(&mut large, 0.5) / quantile(&mut small, 0.5));
    let worst = factors.iter().copied().fold(0.0, f64::max);
    OPERATIONS
        .into_iter()
        .zip(factors)
        .fold(Line::new("pool_scale", vec![worst]), |line, (name, factor)| line.size(name, factor))
}

/// `pool_scale_cold`: the worst of the same operations, in microseconds, where each works through a whole pool of 10^7
/// blocks in shuffled order; the limit is two dependent random loads from as many bytes.
pub(crate) fn pool_scale_cold() -> Line {
    let mut blocks = vec![NULL_BLOCK; LARGE as usize - 1];
    let mut pool = shuffled_pool(LARGE);
    let allocate = |batch: &mut [_]| {
        let start = Instant::now();
        pool.allocate(batch).expect("the whole pool is free");
        micros_each(start, batch.len())
    };
    let allocated = blocks.chunks_mut(BATCH).map(allocate).collect();
    let freed = free_shuffled(&mut pool, &mut blocks);
    drop((pool, blocks));
    let decoded = decode_through(&mut shuffled_manager(LARGE));
    let medians = [allocated, freed, decoded].map(|mut samples: Vec<f64>| quantile(&mut samples, 0.5));
    let worst = medians.iter().copied().fold(0.0, f64::max);
    let line = Line::new("pool_scale_cold", vec![worst]).limit(vec![2.0 * random_load()]);
    OPERATIONS.into_iter().zip(medians).fold(line, |line, (name, micros)| line.size(name, micros))
}

/// A pool that was wholly held and then freed in shuffled order.
fn shuffled_pool(num_blocks: u32) -> BlockPool {
    let mut pool = BlockPool::new(&CacheConfig::new(num_blocks)).expect("a valid config");
    let mut blocks = vec![NULL_BLOCK; num_blocks as usize - 1];
    pool.allocate(&mut blocks).expect("the whole pool is free");
    free_shuffled(&mut pool, &mut blocks);
    pool
}

/// A manager whose whole pool was held by sequences and then freed in shuffled order.
///
/// The blocks are dealt to sequences at random, which are freed one after another, twice: a radix sort by random keys of
/// two digits.
fn shuffled_manager(num_blocks: u32) -> KVCacheManager {
    const NUM_SEQUENCES: usize = 4096;
    let mut manager = KVCacheManager::new(&CacheConfig::new(num_blocks)).expect("a valid config");
    let mut random = Random(2);
    let nothing = ComputedBlocks::default();
    // No sequence gets twice its share of the blocks and 64 more.
    let longest = (2 * num_blocks as usize / NUM_SEQUENCES + 64) * BLOCK_SIZE as usize;
    for _ in 0..2 {
        let sequences = create_all(&mut manager, NUM_SEQUENCES, longest);
        let mut is_full = false;
        while !is_full {
            let plan = manager.begin_plan();
            for _ in 0..NUM_SEQUENCES {
                let sequence = sequences[random.below(NUM_SEQUENCES)];
                let slots = manager.allocate_slots(sequence, BLOCK_SIZE, &nothing).expect("the sequence lives");
                is_full |= slots.is_none();
            }
            manager.commit(plan).expect("the plan is the oldest");
        }
        sequences.into_iter().for_each(|sequence| manager.free(sequence).expect("the sequence lives"));
    }
    manager
}

/// One block's worth of decode slots for 1,024 sequences, whose blocks then return to where they came from.
fn decode_cycle(manager: &mut KVCacheManager) -> f64 {
    let sequences = create_all(manager, BATCH, BLOCK_SIZE as usize);
    let micros: f64 = (0..BLOCK_SIZE).map(|_| grow(manager, &sequences, 1)).sum();
    sequences.into_iter().rev().for_each(|sequence| manager.free(sequence).expect("the sequence lives"));
    micros / f64::from(BLOCK_SIZE)
}

/// Decode slots for 1,024 sequences that grow through the pool. A sample is the mean over the steps of a block.
fn decode_through(manager: &mut KVCacheManager) -> Vec<f64> {
    let sequences = create_all(manager, BATCH, NUM_COLD_STEPS as usize);
    let mut decode_block =
        |_| (0..BLOCK_SIZE).map(|_| grow(manager, &sequences, 1)).sum::<f64>() / f64::from(BLOCK_SIZE);
    (0..NUM_COLD_STEPS / BLOCK_SIZE).map(&mut decode_block).collect()
}

/// Sequences of one and the same prompt outside the prefix cache: what they free is free at once.
fn create_all(manager: &mut KVCacheManager, count: usize, num_tokens: usize) -> Vec<SequenceId> {
    let prompt: Arc<[i32]> = vec![0; num_tokens].into();
    (0..count).map(|_| manager.create(prompt.clone(), Arc::default(), false).expect("a prompt has tokens")).collect()
}

/// Microseconds of a load whose address the load before it told, from one line of 64 bytes per block of the large pool.
fn random_load() -> f64 {
    #[derive(Clone)]
    #[repr(align(64))]
    struct Line(u32);
    let mut order: Vec<u32> = (0..LARGE).collect();
    Random(3).shuffle(&mut order);
    let mut next = vec![Line(0); LARGE as usize];
    for (i, &from) in order.iter().enumerate() {
        next[from as usize] = Line(order[(i + 1) % order.len()]);
    }
    let mut at = order[0];
    let start = Instant::now();
    for _ in 0..NUM_CHASED {
        at = next[at as usize].0;
    }
    black_box(at);
    micros_each(start, NUM_CHASED)
}
