//! Every instruction set against plain Rust, and every number of threads against one, on what the element types can hold.

mod contiguous;
mod numbers;

use contiguous::view;
use numbers::numbers;
use pagedkv_cpu::{AttentionOptions, Batch, DType, Isa, Operands, paged_attention};

const BLOCK_SIZE: usize = 16;
const KV_HEADS: usize = 2;
const NUM_BLOCKS: usize = 180;
/// (length, queries) of each sequence: decode, drafts, prefill, split keys.
const SEQUENCES: [(usize, usize); 5] = [(1100, 1), (33, 1), (70, 5), (60, 60), (1030, 3)];

struct Case {
    q: DType,
    cache: DType,
    group: usize,
    head_dim: usize,
    is_packed: bool,
}

/// The results as float32.
fn attend(case: &Case, isa: Isa, threads: usize) -> Vec<f32> {
    let num_tokens: usize = SEQUENCES.iter().map(|s| s.1).sum();
    let cache = [NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, case.head_dim];
    let queries = [num_tokens, KV_HEADS * case.group, case.head_dim];
    let mut k = numbers(case.cache, cache.iter().product(), 1);
    let mut v = numbers(case.cache, cache.iter().product(), 2);
    let mut q = numbers(case.q, queries.iter().product(), 3);
    let mut out = vec![f32::NAN; queries.iter().product()];
    let columns = 80;
    let mut table: Vec<i32> = Vec::new();
    for s in 0..SEQUENCES.len() {
        table.extend((0..columns).map(|c| ((c * 7 + s * 31) % NUM_BLOCKS) as i32));
    }
    let lens = SEQUENCES.map(|s| s.0 as i32);
    let mut starts = vec![0_i32];
    starts.extend(SEQUENCES.iter().scan(0, |end, s| {
        *end += s.1 as i32;
        Some(*end)
    }));
    let keys = view(&mut k, case.cache, cache);
    let operands = Operands::new(
        view(&mut q, case.q, queries),
        if case.is_packed { keys.packed() } else { keys },
        view(&mut v, case.cache, cache),
        view(&mut out, DType::F32, queries),
    );
    let batch = Batch {
        block_table: view(&mut table, DType::I32, [SEQUENCES.len(), columns]),
        rows: None,
        seq_lens: &lens,
        query_start_loc: &starts,
        tree_mask: None,
    };
    let options = AttentionOptions { isa: Some(isa), sliding_window: Some(900), ..Default::default() };
    paged_attention(&operands, &batch, &options, threads).unwrap();
    out
}

fn assert_isas_agree(case: &Case, tolerance: f32) {
    for is_packed in [false, true] {
        assert_isas_agree_on(&Case { is_packed, ..*case }, tolerance);
    }
}

fn assert_isas_agree_on(case: &Case, tolerance: f32) {
    let plain = attend(case, Isa::Scalar, 1);
    assert!(plain.iter().all(|x| x.is_finite()));
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let out = attend(case, isa, 1);
        let worst = plain.iter().zip(&out).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= tolerance, "{} is off by {worst}", isa.name());
        for threads in 2..5 {
            let same = attend(case, isa, threads).iter().zip(&out).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{} gives other bits on {threads} threads", isa.name());
        }
    }
}

#[test]
fn isas_agree_in_float32() {
    assert_isas_agree(&Case { q: DType::F32, cache: DType::F32, group: 4, head_dim: 64, is_packed: false }, 2e-6);
}

#[test]
fn isas_agree_in_float16() {
    assert_isas_agree(&Case { q: DType::F16, cache: DType::F16, group: 3, head_dim: 72, is_packed: false }, 2e-6);
}

#[test]
fn isas_agree_in_bfloat16_up_to_the_rounding_of_weights() {
    assert_isas_agree(&Case { q: DType::BF16, cache: DType::BF16, group: 4, head_dim: 128, is_packed: false }, 8e-3);
    assert_isas_agree(&Case { q: DType::BF16, cache: DType::BF16, group: 7, head_dim: 40, is_packed: false }, 8e-3);
}

#[test]
fn isas_agree_in_fp8_up_to_the_rounding_of_weights_for_bfloat16() {
    for cache in [DType::F8E4M3, DType::F8E5M2] {
        assert_isas_agree(&Case { q: DType::BF16, cache, group: 2, head_dim: 104, is_packed: false }, 8e-3);
        assert_isas_agree(&Case { q: DType::F16, cache, group: 2, head_dim: 104, is_packed: false }, 2e-6);
    }
}

#[test]
fn an_isa_that_is_not_there_is_refused() {
    let Some(isa) = Isa::ALL.into_iter().find(|isa| !isa.is_available()) else { return };
    let mut rows = [[0_f32; 8]; 4];
    let mut table = [0_i32];
    let [q, k, v, out] = &mut rows;
    let cache = [1, 1, 1, 8];
    let operands = Operands::new(
        view(q, DType::F32, [1, 1, 8]),
        view(k, DType::F32, cache),
        view(v, DType::F32, cache),
        view(out, DType::F32, [1, 1, 8]),
    );
    let block_table = view(&mut table, DType::I32, [1, 1]);
    let batch = Batch { block_table, rows: None, seq_lens: &[1], query_start_loc: &[0, 1], tree_mask: None };
    let options = AttentionOptions { isa: Some(isa), ..Default::default() };
    assert!(paged_attention(&operands, &batch, &options, 1).is_err());
}
