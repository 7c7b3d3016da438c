//! Attention over arrays that end where they must, in every form of every kernel: for sanitizers to watch.
//!
//! Each sequence has a cache of its own in which the last block is the last one, and slots that hold no token hold
//! nothing.

mod exact;
mod numbers;

use exact::Exact;
use numbers::numbers;
use pagedkv_cpu::{
    AttentionOptions, AttentionPlan, AttentionShape, Batch, DType, Isa, Operands, Scales, State, TreeMask, append_kv,
    merge_states, paged_attention,
};

const KV_HEADS: usize = 2;
const CACHED: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];
/// Whole vectors of every type and instruction set, parts of them, and both.
const HEAD_DIMS: [usize; 10] = [8, 16, 24, 40, 64, 72, 104, 128, 264, 512];

#[derive(Clone, Copy, PartialEq)]
enum Keys {
    Natural,
    Packed,
}

#[derive(Clone, Copy)]
struct Case {
    q: DType,
    cache: DType,
    group: usize,
    head_dim: usize,
    block_size: usize,
    len: usize,
    queries: usize,
    window: Option<usize>,
    soft_cap: Option<f32>,
    has_tree: bool,
    /// Sinks and slopes, or scales beside FP8.
    has_numbers_of_heads: bool,
    /// Whether the value of the last token is NaN.
    ends_in_nan: bool,
    keys: Keys,
    threads: usize,
}

impl Case {
    /// One query per KV head and token of a sequence that fills its blocks.
    const fn new(cache: DType, head_dim: usize, len: usize, queries: usize) -> Self {
        let q = if cache.is_fp8() { DType::BF16 } else { cache };
        let (window, soft_cap) = (None, None);
        let (has_tree, has_numbers_of_heads, ends_in_nan, keys) = (false, false, false, Keys::Natural);
        let (group, block_size, threads) = (1, if len.is_multiple_of(16) { 16 } else { 1 }, 1);
        Self {
            q,
            cache,
            group,
            head_dim,
            block_size,
            len,
            queries,
            window,
            soft_cap,
            has_tree,
            has_numbers_of_heads,
            ends_in_nan,
            keys,
            threads,
        }
    }

    fn num_blocks(&self) -> usize {
        self.len.div_ceil(self.block_size)
    }

    /// The blocks from the last but one to the first, and then the last.
    fn table(&self) -> Vec<i32> {
        let last = self.num_blocks() as i32 - 1;
        (0..last).rev().chain([last]).collect()
    }

    /// Keys or values of the tokens there are.
    fn layer(&self, seed: u32, last: Option<u8>) -> Exact<4> {
        let mut layer = Exact::new(self.cache, [self.num_blocks(), KV_HEADS, self.block_size, self.head_dim]);
        let row_bytes = self.head_dim * self.cache.size_bytes();
        let rows = numbers(self.cache, self.len * KV_HEADS * self.head_dim, seed);
        let table = self.table();
        for (i, row) in rows.chunks_exact(row_bytes).enumerate() {
            let (token, head) = (i / KV_HEADS, i % KV_HEADS);
            let at = [table[token / self.block_size] as usize, head, token % self.block_size, 0];
            match last {
                Some(byte) if token + 1 == self.len => layer.write(at, &vec![byte; row_bytes]),
                _ => layer.write(at, row),
            }
        }
        layer
    }

    /// The same keys, packed.
    fn packed_keys(&self, seed: u32) -> Exact<4> {
        let shape = [self.num_blocks(), KV_HEADS, self.block_size, self.head_dim];
        let (mut keys, mut values) = (Exact::new(self.cache, shape), Exact::new(self.cache, shape));
        let rows = [self.len, KV_HEADS, self.head_dim];
        let mut tokens = Exact::of(self.cache, rows, &numbers(self.cache, rows.iter().product(), seed));
        let table = self.table();
        let slot = |token| i64::from(table[token / self.block_size]) * self.block_size as i64;
        let slots: Vec<i64> = (0..self.len).map(|token| slot(token) + (token % self.block_size) as i64).collect();
        let (tokens, cache) = (tokens.view(), keys.view().packed());
        append_kv(&tokens, &tokens, &cache, &values.view(), &slots, &Scales::default(), 1).unwrap();
        keys
    }

    /// A binary tree: each query sees itself and the queries above it.
    fn tree(&self) -> Vec<u8> {
        let row_bytes = self.queries.div_ceil(64) * 8;
        let mut bits = vec![0; self.queries * row_bytes];
        for query in 0..self.queries {
            let mut node = query + 1;
            while node > 0 {
                bits[query * row_bytes + (node - 1) / 8] |= 1 << ((node - 1) % 8);
                node /= 2;
            }
        }
        bits
    }

    /// Results and logarithms, both as float32.
    fn attend(&self, isa: Isa) -> Vec<f32> {
        let heads = KV_HEADS * self.group;
        let queries = [self.queries, heads, self.head_dim];
        let mut q = Exact::of(self.q, queries, &numbers(self.q, queries.iter().product(), 3));
        let mut layers = [self.layer(1, None), self.layer(2, self.ends_in_nan.then_some(0xff))];
        let (mut out, mut lse) = (Exact::new(DType::F32, queries), Exact::new(DType::F32, [self.queries, heads]));
        let table: Vec<u8> = self.table().iter().flat_map(|block| block.to_le_bytes()).collect();
        let mut table = Exact::of(DType::I32, [1, self.num_blocks()], &table);
        let mut of_heads = [3, 4].map(|seed| Exact::of(DType::F32, [heads], &numbers(DType::F32, heads, seed)));
        let mut scales = [1, KV_HEADS].map(|n| Exact::of(DType::F32, [n], &numbers(DType::F32, n, 5)));
        let [k_cache, v_cache] = &mut layers;
        let mut packed = (self.keys == Keys::Packed).then(|| self.packed_keys(1));
        let keys = packed.as_mut().map_or_else(|| k_cache.view(), |keys| keys.view().packed());
        let mut operands = Operands::new(q.view(), keys, v_cache.view(), out.view());
        operands.lse = Some(lse.view());
        if self.has_numbers_of_heads {
            operands.sinks = Some(of_heads[0].view());
            operands.alibi_slopes = Some(of_heads[1].view());
        }
        if self.has_numbers_of_heads && self.cache.is_fp8() {
            operands.k_scale = Some(scales[0].view());
            operands.v_scale = Some(scales[1].view());
        }
        let bits = if self.has_tree { self.tree().into_boxed_slice() } else { Box::default() };
        let (seq_lens, query_start_loc) = ([self.len as i32], [0, self.queries as i32]);
        let starts = [0, bits.len() as i32];
        let batch = Batch {
            block_table: table.view(),
            rows: None,
            seq_lens: &seq_lens,
            query_start_loc: &query_start_loc,
            tree_mask: self.has_tree.then_some(TreeMask { bits: &bits, start_loc: &starts }),
        };
        let (sliding_window, soft_cap) = (self.window, self.soft_cap);
        let options = AttentionOptions { sliding_window, soft_cap, isa: Some(isa), ..Default::default() };
        paged_attention(&operands, &batch, &options, self.threads).unwrap();
        [floats(&out), floats(&lse)].concat()
    }

    /// Every number is used here, and every instruction set runs.
    fn check(&self) {
        let plain = Self { keys: Keys::Natural, ..*self }.attend(Isa::Scalar);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (a, b) in plain.iter().zip(self.attend(isa)) {
                assert!((a - b).abs() < 3e-2 || a.is_nan() && b.is_nan(), "{b} of {} is not {a}", isa.name());
            }
        }
    }
}

fn floats<const N: usize>(array: &Exact<N>) -> Vec<f32> {
    array.bytes().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn decode_stays_in_its_arrays_whatever_the_head_dim() {
    for cache in CACHED {
        for head_dim in (8..=512).step_by(8) {
            Case::new(cache, head_dim, 33, 1).check();
        }
    }
}

#[test]
fn decode_stays_in_its_arrays_whatever_the_group() {
    for cache in CACHED {
        for group in 1..10 {
            Case { group, ..Case::new(cache, 72, 48, 1) }.check();
        }
    }
}

#[test]
fn decode_stays_in_its_arrays_whatever_the_length() {
    for cache in CACHED {
        for len in 1..36 {
            Case { block_size: 16, ..Case::new(cache, 40, len, 1) }.check();
            Case { block_size: len, ..Case::new(cache, 40, len, 1) }.check();
        }
    }
}

#[test]
fn prefill_stays_in_its_arrays_whatever_the_head_dim() {
    for cache in CACHED {
        for head_dim in HEAD_DIMS {
            Case::new(cache, head_dim, 48, 48).check();
        }
    }
}

#[test]
fn prefill_stays_in_its_arrays_whatever_the_length() {
    for cache in CACHED {
        for len in [33, 63, 64, 127, 128, 129, 144] {
            Case { group: 3, ..Case::new(cache, 24, len, 33) }.check();
            Case { block_size: 48, ..Case::new(cache, 24, len, 33) }.check();
        }
    }
}

#[test]
fn pieces_of_long_contexts_stay_in_their_arrays() {
    for cache in CACHED {
        for threads in [1, 2] {
            Case { threads, group: 2, ..Case::new(cache, 24, 2064, 3) }.check();
        }
    }
}

#[test]
fn windows_read_no_token_before_them() {
    for cache in CACHED {
        for window in [1, 5, 32, 47] {
            Case { window: Some(window), ..Case::new(cache, 24, 112, 5) }.check();
            Case { window: Some(window), ..Case::new(cache, 24, 112, 60) }.check();
        }
    }
}

#[test]
fn trees_read_only_what_their_masks_have() {
    for cache in CACHED {
        for queries in [1, 7, 33, 64, 70] {
            let case = Case { has_tree: true, ..Case::new(cache, 24, 96, queries) };
            case.check();
            Case { has_numbers_of_heads: true, ..case }.check();
        }
    }
}

#[test]
fn caps_and_numbers_of_heads_stay_in_their_arrays() {
    for cache in CACHED {
        for queries in [1, 5, 40] {
            let case = Case { group: 3, soft_cap: Some(3.0), ..Case::new(cache, 24, 48, queries) };
            Case { has_numbers_of_heads: true, ..case }.check();
        }
    }
}

#[test]
fn hidden_values_that_are_no_numbers_stay_hidden() {
    for cache in CACHED {
        for queries in [5, 40] {
            Case { ends_in_nan: true, group: 2, ..Case::new(cache, 24, 48, queries) }.check();
        }
    }
}

#[test]
fn float32_queries_read_every_type_of_cache() {
    for cache in CACHED {
        for queries in [2, 40] {
            Case { q: DType::F32, ..Case::new(cache, 40, 48, queries) }.check();
        }
    }
}

#[test]
fn packed_keys_are_read_as_far_as_their_groups_go() {
    for cache in CACHED {
        for head_dim in HEAD_DIMS {
            for (len, queries) in [(33, 1), (48, 5), (70, 3), (144, 48)] {
                let sizes =
                    Case { keys: Keys::Packed, group: 3, block_size: 16, ..Case::new(cache, head_dim, len, queries) };
                sizes.check();
                Case { block_size: 48, window: Some(21), ..sizes }.check();
            }
        }
    }
}

#[test]
fn a_plan_of_words_reads_only_what_it_has() {
    let case = Case { has_tree: true, ..Case::new(DType::F32, 8, 20, 3) };
    let bits = case.tree().into_boxed_slice();
    let (mut table, starts) = (case.table(), [0, bits.len() as i32]);
    let bytes: Vec<u8> = table.drain(..).flat_map(i32::to_le_bytes).collect();
    let mut table = Exact::of(DType::I32, [1, case.num_blocks()], &bytes);
    let tree_mask = Some(TreeMask { bits: &bits, start_loc: &starts });
    let block_table = table.view();
    let batch = Batch { block_table, rows: None, seq_lens: &[20], query_start_loc: &[0, 3], tree_mask };
    let shape = AttentionShape { num_q_heads: 2, num_kv_heads: 2, head_dim: 8, block_size: 1, sliding_window: None };
    let words = AttentionPlan::new(&batch, &shape, 1).unwrap().to_words().into_boxed_slice();
    let (mut q, mut layer) = (Exact::new(DType::F32, [3, 2, 8]), case.layer(1, None));
    for len in 0..words.len() {
        let part: Box<[i32]> = words[..len].into();
        assert!(AttentionPlan::from_words(&part, &q.view(), &layer.view(), 1).is_err());
    }
    let plan = AttentionPlan::from_words(&words, &q.view(), &layer.view(), 1).unwrap();
    assert_eq!(plan.to_words(), *words);
}

#[test]
fn merged_states_stay_in_their_arrays() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for head_dim in HEAD_DIMS {
            let shape = [3, 2, head_dim];
            let array = |seed| Exact::of(dtype, shape, &numbers(dtype, shape.iter().product(), seed));
            let lse = |seed| Exact::of(DType::F32, [3, 2], &numbers(DType::F32, 6, seed));
            let (mut outs, mut lses) = ([array(1), array(2)], [lse(3), lse(4)]);
            let (mut out, mut both) = (Exact::new(DType::F32, shape), Exact::new(DType::F32, [3, 2]));
            let [a, b] = [0, 1].map(|i| State { out: outs[i].view(), lse: lses[i].view() });
            merge_states(&a, &b, &State { out: out.view(), lse: both.view() }, 1).unwrap();
            assert!(floats(&out).iter().chain(&floats(&both)).all(|x| x.abs() < 4.0));
        }
    }
}
