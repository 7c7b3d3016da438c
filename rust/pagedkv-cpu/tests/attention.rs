//! Attention against a naive float64 softmax, and what it refuses.

mod contiguous;

use contiguous::view;
use pagedkv_cpu::{AttentionOptions, Batch, DType, Error, Operands, paged_attention};

const NUM_BLOCKS: usize = 900;
const BLOCK_SIZE: usize = 3;
const KV_HEADS: usize = 2;
const GROUP: usize = 3;
const HEAD_DIM: usize = 16;

/// A repeatable value between -1 and 1.
fn noise(seed: usize) -> f32 {
    let mixed = (seed as u32).wrapping_mul(2_654_435_761) ^ 0x9e37_79b9;
    let bits = (mixed.wrapping_mul(mixed >> 7 | 1) >> 16) as u16;
    f32::from(bits) / 32_768.0 - 1.0
}

struct World {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
    sinks: Option<Vec<f32>>,
    table: Vec<i32>,
    seq_lens: Vec<i32>,
    query_start_loc: Vec<i32>,
}

impl World {
    /// Sequences given as (length, queries), in blocks dealt out backwards; unused slots hold NaN, unused table
    /// entries a block that does not exist.
    fn new(sequences: &[(usize, usize)]) -> Self {
        let num_tokens: usize = sequences.iter().map(|s| s.1).sum();
        let cache = NUM_BLOCKS * KV_HEADS * BLOCK_SIZE * HEAD_DIM;
        let mut world = Self {
            q: (0..num_tokens * KV_HEADS * GROUP * HEAD_DIM).map(noise).collect(),
            k: vec![f32::NAN; cache],
            v: vec![f32::NAN; cache],
            out: vec![f32::NAN; num_tokens * KV_HEADS * GROUP * HEAD_DIM],
            lse: vec![f32::NAN; num_tokens * KV_HEADS * GROUP],
            sinks: None,
            table: vec![i32::MAX; sequences.len() * NUM_BLOCKS],
            seq_lens: sequences.iter().map(|s| s.0 as i32).collect(),
            query_start_loc: vec![0],
        };
        let mut free = (0..NUM_BLOCKS).rev();
        for (s, (len, queries)) in sequences.iter().enumerate() {
            for column in 0..len.div_ceil(BLOCK_SIZE) {
                world.table[s * NUM_BLOCKS + column] = free.next().unwrap() as i32;
            }
            for position in 0..*len {
                for head in 0..KV_HEADS {
                    let at = world.slot(s, position, head);
                    for d in 0..HEAD_DIM {
                        world.k[at + d] = 2.0 * noise(at + d);
                        world.v[at + d] = noise(3 * (at + d));
                    }
                }
            }
            let end = world.query_start_loc[s] + *queries as i32;
            world.query_start_loc.push(end);
        }
        world
    }

    fn slot(&self, sequence: usize, position: usize, head: usize) -> usize {
        let block = self.table[sequence * NUM_BLOCKS + position / BLOCK_SIZE] as usize;
        ((block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    }

    fn run(&mut self, options: &AttentionOptions, threads: usize) -> Result<(), Error> {
        let num_tokens = self.q.len() / (KV_HEADS * GROUP * HEAD_DIM);
        let tokens = [num_tokens, KV_HEADS * GROUP, HEAD_DIM];
        let cache = [NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM];
        let table = [self.seq_lens.len(), NUM_BLOCKS];
        let (q, out) = (view(&mut self.q, DType::F32, tokens), view(&mut self.out, DType::F32, tokens));
        let (k, v) = (view(&mut self.k, DType::F32, cache), view(&mut self.v, DType::F32, cache));
        let mut operands = Operands::new(q, k, v, out);
        operands.lse = Some(view(&mut self.lse, DType::F32, [num_tokens, KV_HEADS * GROUP]));
        operands.sinks = self.sinks.as_deref_mut().map(|sinks| {
            let num_heads = sinks.len();
            view(sinks, DType::F32, [num_heads])
        });
        let batch = Batch {
            block_table: view(&mut self.table, DType::I32, table),
            rows: None,
            seq_lens: &self.seq_lens,
            query_start_loc: &self.query_start_loc,
            tree_mask: None,
        };
        paged_attention(&operands, &batch, options, threads)
    }

    /// The result for one query head, in float64, score by score.
    fn naive(&self, s: usize, query: usize, head: usize, options: &AttentionOptions) -> (Vec<f64>, f64) {
        let queries = (self.query_start_loc[s + 1] - self.query_start_loc[s]) as usize;
        let token = self.query_start_loc[s] as usize + query;
        let end = (self.seq_lens[s] as usize + query + 1).saturating_sub(queries);
        let start = options.sliding_window.map_or(0, |w| end.saturating_sub(w));
        let q = &self.q[(token * KV_HEADS * GROUP + head) * HEAD_DIM..][..HEAD_DIM];
        let (mut sum, mut out) = (0.0, vec![0.0; HEAD_DIM]);
        for position in start..end {
            let at = self.slot(s, position, head / GROUP);
            let pairs = q.iter().zip(&self.k[at..]);
            let mut score: f64 = pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            score *= options.softmax_scale.map_or(0.25, f64::from);
            if let Some(cap) = options.soft_cap.map(f64::from) {
                score = cap * (score / cap).tanh();
            }
            sum += score.exp();
            for (o, v) in out.iter_mut().zip(&self.v[at..]) {
                *o += score.exp() * f64::from(*v);
            }
        }
        if let Some(sinks) = &self.sinks
            && start < end
        {
            sum += f64::from(sinks[head]).exp();
        }
        for o in &mut out {
            *o = if sum == 0.0 { 0.0 } else { *o / sum };
        }
        (out, sum.ln())
    }

    fn assert_naive(&self, options: &AttentionOptions) {
        for s in 0..self.seq_lens.len() {
            for token in self.query_start_loc[s] as usize..self.query_start_loc[s + 1] as usize {
                for head in 0..KV_HEADS * GROUP {
                    let query = token - self.query_start_loc[s] as usize;
                    let (want, lse) = self.naive(s, query, head, options);
                    let row = token * KV_HEADS * GROUP + head;
                    for (got, want) in self.out[row * HEAD_DIM..].iter().zip(want) {
                        assert!((f64::from(*got) - want).abs() < 2e-6, "{got} is not {want}");
                    }
                    let got = f64::from(self.lse[row]);
                    let both_empty = got == f64::NEG_INFINITY && lse == f64::NEG_INFINITY;
                    assert!(both_empty || (got - lse).abs() < 4e-6, "lse {got} is not {lse}");
                }
            }
        }
    }
}

#[test]
fn attention_equals_the_naive_softmax_when_prefill_and_decode_are_mixed() {
    for options in [
        AttentionOptions::default(),
        AttentionOptions { sliding_window: Some(5), ..Default::default() },
        AttentionOptions { soft_cap: Some(0.7), softmax_scale: Some(0.9), ..Default::default() },
    ] {
        let mut world = World::new(&[(1, 1), (41, 1), (1100, 3), (7, 7), (60, 33), (0, 0), (0, 2), (3, 5)]);
        world.run(&options, 1).unwrap();
        world.assert_naive(&options);
    }
}

#[test]
fn attention_gives_sinks_their_share_of_the_weights() {
    for options in [AttentionOptions::default(), AttentionOptions { sliding_window: Some(5), ..Default::default() }] {
        let mut world = World::new(&[(1, 1), (41, 1), (1100, 3), (7, 7), (60, 33), (0, 2), (3, 5)]);
        // Far below all scores, beside them, and far above.
        world.sinks = Some(vec![-90.0, -1.0, 0.0, 1.0, 6.0, f32::NEG_INFINITY]);
        world.run(&options, 1).unwrap();
        world.assert_naive(&options);
    }
}

#[test]
fn attention_names_the_sinks_when_there_is_not_one_for_each_query_head() {
    let mut world = World::new(&[(7, 7)]);
    world.sinks = Some(vec![0.0; KV_HEADS]);
    let error = world.run(&AttentionOptions::default(), 1).unwrap_err();
    assert_eq!(error.to_string(), "sinks: expected shape (num_q_heads=6,), found (2,)");
}

#[test]
fn attention_is_bit_identical_when_the_number_of_threads_changes() {
    // Long enough to be cut along the keys and to leave the calling thread.
    let sequences = [(1600, 2), (700, 3), (60, 60)];
    let mut alone = World::new(&sequences);
    alone.run(&AttentionOptions::default(), 1).unwrap();
    for threads in 2..5 {
        let mut world = World::new(&sequences);
        world.run(&AttentionOptions::default(), threads).unwrap();
        assert!(alone.out.iter().zip(&world.out).all(|(a, b)| a.to_bits() == b.to_bits()));
        assert!(alone.lse.iter().zip(&world.lse).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn attention_leaves_the_output_alone_when_a_block_does_not_exist() {
    let mut world = World::new(&[(7, 7)]);
    world.table[2] = NUM_BLOCKS as i32;
    let error = world.run(&AttentionOptions::default(), 1).unwrap_err();
    assert_eq!(error.to_string(), "block_table[0, 2]: expected a block below 900, found 900");
    assert!(world.out.iter().all(|o| o.is_nan()));
}

#[test]
fn attention_names_the_sequence_when_it_is_longer_than_the_table() {
    let mut world = World::new(&[(7, 7)]);
    world.seq_lens[0] = 2701;
    let error = world.run(&AttentionOptions::default(), 1).unwrap_err();
    assert_eq!(error.to_string(), "seq_lens[0]: expected at most 2700 (900 blocks of 3), found 2701");
}
