//! Operations on rows over arrays that end where they must, in every instruction set: for sanitizers to watch.

mod exact;
mod numbers;

use exact::Exact;
use numbers::numbers;
use pagedkv_cpu::{DType, Isa, draw_tokens, rms_norm, rotary_embedding};

const COMPUTED: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn rows<const N: usize>(dtype: DType, shape: [usize; N], seed: u32) -> Exact<N> {
    Exact::of(dtype, shape, &numbers(dtype, shape.iter().product(), seed))
}

/// Whether all elements are: no exponent is all ones.
fn is_finite(dtype: DType, bytes: &[u8]) -> bool {
    let exponent = if dtype == DType::F16 { 0x7c00 } else { 0x7f80 };
    let upper = |element: &[u8]| u16::from_le_bytes([element[element.len() - 2], element[element.len() - 1]]);
    bytes.chunks_exact(dtype.size_bytes()).all(|element| upper(element) & exponent != exponent)
}

/// Calls with each combination of an instruction set that this processor has and a type that is computed with.
fn for_each_kind(test: impl Fn(Isa, DType)) {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        COMPUTED.into_iter().for_each(|dtype| test(isa, dtype));
    }
}

#[test]
fn norms_stay_in_their_arrays_whatever_the_size() {
    for_each_kind(|isa, dtype| {
        for size in (1..70).chain([127, 128, 129, 576]) {
            let (mut x, mut out) = (rows(dtype, [3, size], 1), Exact::new(dtype, [3, size]));
            rms_norm(&x.view(), &out.view(), 1e-5, Some(isa), 2).unwrap();
            assert!(is_finite(dtype, out.bytes()), "{} {size}", isa.name());
        }
    });
}

#[test]
fn turned_heads_stay_in_their_arrays_whatever_the_size() {
    for_each_kind(|isa, dtype| {
        for head_dim in (2..70).step_by(2).chain([128, 130, 256]) {
            let (shape, mut angles) = ([3, 4, head_dim], rows(DType::F32, [3, head_dim], 2));
            let (mut x, mut out) = (rows(dtype, shape, 1), Exact::new(dtype, shape));
            rotary_embedding(&x.view(), &angles.view(), &out.view(), 3, Some(isa), 2).unwrap();
            assert!(is_finite(dtype, out.bytes()), "{} {head_dim}", isa.name());
            let head = head_dim * dtype.size_bytes();
            assert!(out.bytes()[3 * head..4 * head] == x.bytes()[3 * head..4 * head], "{} {head_dim}", isa.name());
        }
    });
}

#[test]
fn draws_stay_in_their_arrays_and_in_the_vocabulary() {
    for_each_kind(|isa, dtype| {
        for vocab_size in (1..20).chain([255, 256, 257, 511, 1000]) {
            let (mut scores, mut tokens) = (rows(dtype, [3, vocab_size], 1), Exact::new(DType::I32, [3]));
            let numbers = [0.0, 0.5, 1.0_f64.next_down()];
            draw_tokens(&scores.view(), &[0.7; 3], &numbers, &tokens.view(), Some(isa), 2).unwrap();
            let tokens = tokens.bytes().as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
            assert!(tokens.clone().all(|token| (0..vocab_size as i32).contains(&token)), "{} {vocab_size}", isa.name());
        }
    });
}
