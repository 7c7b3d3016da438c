//! What is written comes back, copies are whole, and refused calls write nothing.

mod contiguous;

use std::ffi::c_void;

use contiguous::view;
use pagedkv_cpu::{DType, Error, Scales, View, append_kv, copy_blocks, gather_kv, swap_blocks, update_block_table};

const BLOCKS: usize = 6;
const HEADS: usize = 2;
const BLOCK_SIZE: usize = 3;
const HEAD_DIM: usize = 4;
const LAYER: [usize; 4] = [BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM];

struct Layer {
    k: Vec<f32>,
    v: Vec<u16>,
}

impl Layer {
    /// Float32 keys, float16 values, all zero.
    fn new() -> Self {
        let elements = LAYER.iter().product();
        Self { k: vec![0.0; elements], v: vec![0; elements] }
    }

    fn append(&mut self, tokens: &mut [f32], slots: &[i64]) -> Result<(), Error> {
        let tokens = view(tokens, DType::F32, [slots.len(), HEADS, HEAD_DIM]);
        let (k, v) = (view(&mut self.k, DType::F32, LAYER), view(&mut self.v, DType::F16, LAYER));
        append_kv(&tokens, &tokens, &k, &v, slots, &Scales::default(), 1)
    }

    fn gather(&mut self, table: &mut [i32], len: i32) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let shape = [len as usize, HEADS, HEAD_DIM];
        let (mut k, mut v) = (vec![0.0; shape.iter().product()], vec![0.0; shape.iter().product()]);
        let columns = table.len();
        gather_kv(
            &view(&mut self.k, DType::F32, LAYER),
            &view(&mut self.v, DType::F16, LAYER),
            &view(table, DType::I32, [1, columns]),
            None,
            &[len],
            &view(&mut k, DType::F32, shape),
            &view(&mut v, DType::F32, shape),
            &Scales::default(),
            1,
        )?;
        Ok((k, v))
    }
}

/// Small whole numbers, which every type holds exactly.
fn tokens(count: usize) -> Vec<f32> {
    (0..count * HEADS * HEAD_DIM).map(|i| f32::from(i as u16)).collect()
}

#[test]
fn gather_returns_what_append_wrote_when_types_differ() {
    let mut layer = Layer::new();
    let mut written = tokens(5);
    layer.append(&mut written, &[12, 13, 14, 3, 4]).unwrap();
    let (k, v) = layer.gather(&mut [4, 1], 5).unwrap();
    assert_eq!(k, written);
    assert_eq!(v, written);
}

#[test]
fn append_writes_nothing_when_a_slot_is_outside() {
    let mut layer = Layer::new();
    let error = layer.append(&mut tokens(2), &[0, 18]).unwrap_err();
    assert_eq!(error.to_string(), "slot_mapping[1]: expected -1 or a slot below 18, found 18");
    assert!(layer.k.iter().all(|k| *k == 0.0));
}

#[test]
fn gather_names_the_entry_when_a_block_does_not_exist() {
    let error = Layer::new().gather(&mut [5, 6], 4).unwrap_err();
    assert_eq!(error.to_string(), "block_table[0, 1]: expected a block below 6, found 6");
}

#[test]
fn copy_moves_whole_blocks_when_the_pool_has_any_rank() {
    let mut pool: Vec<i64> = (0..12).collect();
    copy_blocks(&view(&mut pool, DType::I64, [4, 3]), &[[3, 0], [3, 1]], 1).unwrap();
    assert_eq!(pool, [9, 10, 11, 9, 10, 11, 6, 7, 8, 9, 10, 11]);
}

#[test]
fn copy_refuses_when_a_destination_is_also_a_source() {
    let mut pool: Vec<i64> = (0..4).collect();
    let error = copy_blocks(&view(&mut pool, DType::I64, [4, 1]), &[[0, 1], [1, 2]], 1).unwrap_err();
    assert_eq!(error.to_string(), "pairs[1, 0]: expected a source that is no destination, found 1");
    assert_eq!(pool, [0, 1, 2, 3]);
}

#[test]
fn table_stays_as_it_was_when_one_update_is_outside() {
    let mut table = vec![0; 6];
    let view = view(&mut table, DType::I32, [1, 2, 3]);
    assert!(update_block_table(&view, &[[0, 0, 0, 7], [0, 2, 0, 7]], 9).is_err());
    assert!(update_block_table(&view, &[[0, 0, 0, 7], [0, 1, 0, 9]], 9).is_err());
    update_block_table(&view, &[[0, 1, 2, 8]], 9).unwrap();
    assert_eq!(table, [0, 0, 0, 0, 0, 8]);
}

#[test]
fn swap_copies_whole_blocks_between_pools_of_different_strides() {
    let mut device: Vec<i64> = (0..12).collect();
    let mut host = vec![-1_i64; 6];
    // SAFETY: the vector covers the shape and outlives the view.
    let layers_first = unsafe { View::new(device.as_mut_ptr().cast::<c_void>(), DType::I64, [4, 3], [1, 4]) };
    swap_blocks(&layers_first, &view(&mut host, DType::I64, [2, 3]), &[[3, 0], [1, 1]], 1).unwrap();
    assert_eq!(host, [3, 7, 11, 1, 5, 9]);
}

#[test]
fn swap_copies_nothing_when_a_destination_comes_twice() {
    let (mut source, mut destination) = (vec![1_i64; 4], vec![0_i64; 4]);
    let (from, to) = (view(&mut source, DType::I64, [4, 1]), view(&mut destination, DType::I64, [4, 1]));
    let error = swap_blocks(&from, &to, &[[0, 1], [2, 1]], 1).unwrap_err();
    assert_eq!(error.to_string(), "pairs[1, 1]: expected each destination once, found 1");
    assert_eq!(destination, [0; 4]);
}

#[test]
fn swap_refuses_pools_that_share_memory() {
    let mut pool = vec![0_i64; 4];
    let one = view(&mut pool, DType::I64, [4, 1]);
    let error = swap_blocks(&one, &one, &[[0, 1]], 1).unwrap_err();
    assert_eq!(error.to_string(), "destination: expected memory of its own, found an overlap with source");
}
