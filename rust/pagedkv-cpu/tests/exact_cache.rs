//! Cache operations over arrays that end where they must: for sanitizers to watch.

mod exact;
mod numbers;

use exact::Exact;
use numbers::numbers;
use pagedkv_cpu::{DType, Scales, append_kv, copy_blocks, gather_kv, move_kv, swap_blocks, update_block_table};

const HEADS: usize = 2;
const COMPUTED: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const CACHED: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];

fn rows(dtype: DType, shape: [usize; 3], seed: u32) -> Exact<3> {
    Exact::of(dtype, shape, &numbers(dtype, shape.iter().product(), seed))
}

/// A pool whose blocks hold their own number.
fn pool(shape: [usize; 6]) -> Exact<6> {
    let block: usize = shape[1..].iter().product();
    let bytes: Vec<u8> = (0..shape[0]).flat_map(|b| vec![b as u8 + 1; 2 * block]).collect();
    Exact::of(DType::BF16, shape, &bytes)
}

/// The number that each block holds everywhere.
fn held(pool: &Exact<6>, num_blocks: usize) -> Vec<u8> {
    let blocks = pool.bytes().chunks_exact(pool.bytes().len() / num_blocks);
    blocks.map(|block| if block.iter().all(|byte| *byte == block[0]) { block[0] } else { 0 }).collect()
}

/// Fills three blocks of three slots, two of which are skipped, and takes them out again.
fn append_and_gather(token: DType, cache: DType, head_dim: usize) {
    let slots = [6, 7, 8, -1, 3, 4, 5, 0, -1, 1, 2];
    let layer = [3, HEADS, 3, head_dim];
    let mut tokens = [1, 2].map(|seed| rows(token, [slots.len(), HEADS, head_dim], seed));
    let mut layers = [Exact::new(cache, layer), Exact::new(cache, layer)];
    let mut scale = [1, HEADS].map(|n| Exact::of(DType::F32, [n], &numbers(DType::F32, n, 7)));
    let [k_scale, v_scale] = &mut scale;
    let scales = if cache.is_fp8() && !token.is_fp8() {
        Scales { k: Some(k_scale.view()), v: Some(v_scale.view()) }
    } else {
        Scales::default()
    };
    let ([k, v], [k_cache, v_cache]) = (&mut tokens, &mut layers);
    append_kv(&k.view(), &v.view(), &k_cache.view(), &v_cache.view(), &slots, &scales, 2).unwrap();
    assert!(k_cache.bytes().iter().chain(v_cache.bytes()).any(|byte| *byte != 0));
    let table: Vec<u8> = [2_i32, 1, 0].iter().flat_map(|block| block.to_le_bytes()).collect();
    let mut table = Exact::of(DType::I32, [1, 3], &table);
    let shape = [9, HEADS, head_dim];
    let (mut k_out, mut v_out) = (Exact::new(DType::F32, shape), Exact::new(DType::F32, shape));
    let (k_to, v_to) = (k_out.view(), v_out.view());
    gather_kv(&k_cache.view(), &v_cache.view(), &table.view(), None, &[9], &k_to, &v_to, &scales, 2).unwrap();
    let gathered = [k_out.bytes(), v_out.bytes()].concat();
    assert!(gathered.as_chunks::<4>().0.iter().all(|bytes| f32::from_le_bytes(*bytes).abs() < 2.5));
    let (mut k_out, mut v_out) = (Exact::new(cache, shape), Exact::new(cache, shape));
    let (k_to, v_to, none) = (k_out.view(), v_out.view(), Scales::default());
    gather_kv(&k_cache.view(), &v_cache.view(), &table.view(), None, &[9], &k_to, &v_to, &none, 2).unwrap();
    assert!(k_out.bytes().iter().chain(v_out.bytes()).any(|byte| *byte != 0));
}

#[test]
fn append_and_gather_stay_in_their_arrays_whatever_the_head_dim() {
    for head_dim in (1..70).chain([127, 128, 129, 200, 255, 256, 257, 512]) {
        for cache in CACHED {
            append_and_gather(DType::BF16, cache, head_dim);
        }
    }
}

#[test]
fn append_and_gather_stay_in_their_arrays_whatever_the_types() {
    for cache in CACHED {
        for token in COMPUTED {
            append_and_gather(token, cache, 40);
        }
        append_and_gather(cache, cache, 40);
    }
}

/// The last size is copied past the caches, and a block of it starts at no line.
const BLOCKS: [[usize; 6]; 3] = [[5, 1, 2, 1, 1, 1], [5, 3, 2, 2, 3, 7], [5, 3, 2, 2, 120, 125]];

#[test]
fn copies_stay_in_their_pool() {
    for shape in BLOCKS {
        let mut pool = pool(shape);
        copy_blocks(&pool.view(), &[[4, 0], [1, 3]], 2).unwrap();
        assert_eq!(held(&pool, 5), [5, 2, 3, 2, 5]);
    }
}

#[test]
fn swaps_stay_in_their_pools() {
    for shape in BLOCKS {
        let (mut from, mut to) = (pool(shape), Exact::new(DType::BF16, shape));
        let pairs = [[4, 0], [0, 4], [1, 2], [2, 1], [3, 3]];
        swap_blocks(&from.view(), &to.view(), &pairs, 2).unwrap();
        assert_eq!(held(&to, 5), [5, 3, 2, 4, 1]);
    }
}

#[test]
fn moves_stay_in_their_pool() {
    let mut pool = pool([3, 2, 2, 2, 2, 9]);
    move_kv(&pool.view(), &[[0, 0, 4], [0, 1, 5], [0, 4, 0], [0, 5, 1], [1, 99, 99]], 0, 2).unwrap();
    assert_eq!(held(&pool, 3), [3, 2, 1]);
}

#[test]
fn table_updates_stay_in_the_table() {
    let mut table = Exact::new(DType::I32, [2, 2, 3]);
    let cells: Vec<[i32; 4]> = (0..12).map(|i| [i / 6, i / 3 % 2, i % 3, i]).collect();
    update_block_table(&table.view(), &cells, 12).unwrap();
    let wanted: Vec<u8> = (0..12).flat_map(i32::to_le_bytes).collect();
    assert_eq!(table.bytes(), wanted);
}
