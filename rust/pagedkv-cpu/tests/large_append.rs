//! What is too large for the caches is written past them, by several threads.

mod contiguous;

use contiguous::view;
use pagedkv_cpu::{DType, Scales, append_kv};

const HEADS: usize = 4;
const BLOCK_SIZE: usize = 16;

/// Words that tell where they come from.
fn words(count: usize, first: usize) -> Vec<u32> {
    (first..first + count).map(|i| i as u32).collect()
}

#[test]
fn rows_arrive_whole_when_they_are_no_whole_lines() {
    for head_dim in [64, 72] {
        let num_tokens = (1 << 22) / (HEADS * head_dim * 4) + 5;
        let num_blocks = num_tokens.div_ceil(BLOCK_SIZE) + 1;
        let len = num_tokens * HEADS * head_dim;
        let slots: Vec<i64> = (0..num_tokens as i64).map(|i| if i % 7 == 3 { -1 } else { i + 9 }).collect();
        let (mut k, mut v) = (words(len, 1), words(len, 1 << 30));
        let cache = num_blocks * BLOCK_SIZE * HEADS * head_dim;
        let (mut k_cache, mut v_cache) = (vec![0_u32; cache], vec![0_u32; cache]);
        let (rows, shape) = ([num_tokens, HEADS, head_dim], [num_blocks, HEADS, BLOCK_SIZE, head_dim]);
        append_kv(
            &view(&mut k, DType::F32, rows),
            &view(&mut v, DType::F32, rows),
            &view(&mut k_cache, DType::F32, shape),
            &view(&mut v_cache, DType::F32, shape),
            &slots,
            &Scales::default(),
            3,
        )
        .unwrap();
        for (rows, cache) in [(&k, &k_cache), (&v, &v_cache)] {
            let mut wanted = vec![0_u32; cache.len()];
            for (token, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                let (block, offset) = (*slot as usize / BLOCK_SIZE, *slot as usize % BLOCK_SIZE);
                for head in 0..HEADS {
                    let to = ((block * HEADS + head) * BLOCK_SIZE + offset) * head_dim;
                    let from = (token * HEADS + head) * head_dim;
                    wanted[to..to + head_dim].copy_from_slice(&rows[from..from + head_dim]);
                }
            }
            assert!(*cache == wanted, "head_dim {head_dim}");
        }
    }
}

#[test]
fn values_win_on_any_number_of_threads_when_both_caches_are_the_same_memory() {
    let num_tokens = 4096;
    let rows = [num_tokens, HEADS, 16];
    let len = rows.iter().product();
    let (mut k, mut v) = (words(len, 0), words(len, len));
    let slots: Vec<i64> = (0..num_tokens as i64).rev().collect();
    for threads in 1..4 {
        let mut cache = vec![0_u32; len];
        let shape = [num_tokens / BLOCK_SIZE, HEADS, BLOCK_SIZE, 16];
        let both = view(&mut cache, DType::F32, shape);
        let [k, v] = [&mut k, &mut v].map(|rows_of| view(rows_of, DType::F32, rows));
        append_kv(&k, &v, &both, &both, &slots, &Scales::default(), threads).unwrap();
        assert!(cache.iter().all(|word| *word as usize >= len), "{threads} threads");
    }
}
