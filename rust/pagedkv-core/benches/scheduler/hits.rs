//! A long prefix hit, per block, against the least that any lookup by hash must do.

use std::hint::black_box;
use std::time::Instant;

use hashbrown::HashTable;
use pagedkv_core::{CacheConfig, KVCacheManager};
use xxhash_rust::xxh3::xxh3_128;

use crate::blocks::{create, grow};
use crate::samples::{Line, Random, micros_each};

const BLOCK_SIZE: usize = 16;
/// Blocks of one hit.
const HIT_BLOCKS: usize = 1024;
const KEY_BYTES: usize = 16 + 4 * BLOCK_SIZE;

/// `block_hit_4k` and `block_hit_100k`: every prompt in a full cache is looked up in turn. The blocks of each, and their
/// entries in the bare loop, lie in shuffled order.
pub(crate) fn block_hit(what: &'static str, num_blocks: usize) -> Line {
    let mut random = Random(0);
    let num_prompts = (num_blocks - 1) / HIT_BLOCKS;
    let prompts: Vec<_> = (0..num_prompts).map(|_| random.tokens(HIT_BLOCKS * BLOCK_SIZE + 1)).collect();
    let mut manager = KVCacheManager::new(&CacheConfig::new(num_blocks as u32)).expect("a valid config");
    fill_shuffled(&mut manager, num_blocks - 1, &mut random);
    for prompt in &prompts {
        let sequence = create(&mut manager, &prompt[..HIT_BLOCKS * BLOCK_SIZE], true);
        grow(&mut manager, &[sequence], (HIT_BLOCKS * BLOCK_SIZE) as u32);
        manager.free(sequence).expect("the sequence lives");
    }
    let probes: Vec<_> = prompts.iter().map(|prompt| create(&mut manager, prompt, true)).collect();
    let bare = BareLoop::new(&prompts, &mut random);
    let num_hit = num_prompts * HIT_BLOCKS;
    let (mut ours, mut limit) = (Vec::new(), Vec::new());
    for _ in 0..(20_000_000 / num_hit) {
        let start = Instant::now();
        for &probe in &probes {
            let found = manager.get_computed_blocks(probe).expect("the sequence lives");
            assert_eq!(black_box(found.blocks()).len(), HIT_BLOCKS);
        }
        ours.push(micros_each(start, num_hit));
        let start = Instant::now();
        for prompt in &prompts {
            assert_eq!(black_box(bare.look_up(prompt)).len(), HIT_BLOCKS);
        }
        limit.push(micros_each(start, num_hit));
    }
    Line::new(what, ours).limit(limit)
}

/// Lets every block of the pool be cached once and go stale in a random order, so that it is reused in that order.
fn fill_shuffled(manager: &mut KVCacheManager, num_blocks: usize, random: &mut Random) {
    let block = |id: usize| [&[200_000 + id as i32][..], &[0; BLOCK_SIZE - 1]].concat();
    let mut sequences: Vec<_> = (0..num_blocks).map(|id| create(manager, &block(id), true)).collect();
    grow(manager, &sequences, BLOCK_SIZE as u32);
    random.shuffle(&mut sequences);
    sequences.into_iter().for_each(|sequence| manager.free(sequence).expect("the sequence lives"));
}

/// A table from chained hashes to blocks, and the blocks' tokens to compare.
struct BareLoop {
    table: HashTable<(u128, u32)>,
    tokens: Vec<[i32; BLOCK_SIZE]>,
}

impl BareLoop {
    fn new(prompts: &[Vec<i32>], random: &mut Random) -> Self {
        let num_blocks = prompts.len() * HIT_BLOCKS;
        let mut ids: Vec<_> = (0..num_blocks).collect();
        random.shuffle(&mut ids);
        let mut tokens = vec![[0; BLOCK_SIZE]; num_blocks];
        let mut table = HashTable::with_capacity(num_blocks);
        for (blocks, ids) in prompts.iter().zip(ids.chunks(HIT_BLOCKS)) {
            let mut hash = 0;
            for (block, &id) in blocks.as_chunks().0.iter().zip(ids) {
                hash = chain(hash, block);
                tokens[id] = *block;
                table.insert_unique(hash as u64, (hash, id as u32), |&(hash, _)| hash as u64);
            }
        }
        Self { table, tokens }
    }

    fn look_up(&self, prompt: &[i32]) -> Vec<u32> {
        let mut found = Vec::new();
        let mut hash = 0;
        for block in prompt.as_chunks().0 {
            hash = chain(hash, block);
            match self.table.find(hash as u64, |&(other, _)| other == hash) {
                Some(&(_, id)) if self.tokens[id as usize] == *block => found.push(id),
                _ => break,
            }
        }
        found
    }
}

/// The hash of 80 bytes: that of all tokens before the block, and the block's own.
fn chain(before: u128, block: &[i32; BLOCK_SIZE]) -> u128 {
    let mut key = [0; KEY_BYTES];
    key[..16].copy_from_slice(&before.to_le_bytes());
    key[16..].copy_from_slice(bytemuck::cast_slice(block));
    xxh3_128(&key)
}
