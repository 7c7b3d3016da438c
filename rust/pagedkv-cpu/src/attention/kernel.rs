//! One item: queries against a range of keys, folded tile by tile into an online softmax.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::OnceLock;

use super::plan::{Item, Plan, Sequence, Tile};
use super::{AttentionOptions, Operands};
use crate::convert::{load, store};
use crate::math;
use crate::view::View;

/// Keys that are widened and folded together; borders fall at its multiples, whatever the block size.
const KEYS_PER_TILE: usize = 32;

/// The unfinished softmax of the rows of a tile: row `r` is query `r / group` under query head `r % group`.
#[derive(Clone, Debug, Default)]
pub(super) struct Partial {
    /// Largest score of each row.
    pub(super) max: Vec<f32>,
    /// Sum of `exp(score - max)` of each row.
    pub(super) sum: Vec<f32>,
    /// Sum of `exp(score - max) * value` of each row, `head_dim` elements a row.
    pub(super) acc: Vec<f32>,
}

impl Partial {
    fn reset(&mut self, rows: usize, head_dim: usize) {
        self.max.clear();
        self.max.resize(rows, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(rows, 0.0);
        self.acc.clear();
        self.acc.resize(rows * head_dim, 0.0);
    }
}

/// Buffers of one thread, kept between calls.
#[derive(Default)]
struct Scratch {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    state: Partial,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The operands and options of one call, ready to run items.
pub(super) struct Kernel<'a> {
    operands: &'a Operands,
    plan: &'a Plan,
    softmax_scale: f32,
    soft_cap: Option<f32>,
    /// The sink of each query head; empty without sinks.
    sinks: Vec<f32>,
}

impl<'a> Kernel<'a> {
    pub(super) fn new(operands: &'a Operands, options: &AttentionOptions, plan: &'a Plan) -> Self {
        let default_scale = 1.0 / f64::from(plan.cut.head_dim as u32).sqrt();
        Self {
            operands,
            plan,
            softmax_scale: options.softmax_scale.unwrap_or(default_scale as f32),
            soft_cap: options.soft_cap,
            sinks: operands.sinks.as_ref().map_or_else(Vec::new, load_sinks),
        }
    }

    /// Runs one item; its result goes to the output or waits in `partials`.
    pub(super) fn run(&self, item: &Item, partials: &[OnceLock<Partial>]) {
        SCRATCH.with_borrow_mut(|scratch| {
            self.load_queries(&item.tile, scratch);
            let first = item.keys.start / KEYS_PER_TILE * KEYS_PER_TILE;
            for start in (first..item.keys.end).step_by(KEYS_PER_TILE) {
                let keys = item.keys.start.max(start)..item.keys.end.min(start + KEYS_PER_TILE);
                self.fold(&item.tile, &keys, scratch);
            }
            match item.partial {
                None => self.finish(&item.tile, &scratch.state),
                Some(index) => {
                    let first = partials[index].set(scratch.state.clone()).is_ok();
                    debug_assert!(first, "broken law: partial {index} was made twice");
                }
            }
        });
    }

    fn load_queries(&self, tile: &Tile, scratch: &mut Scratch) {
        let cut = &self.plan.cut;
        let sequence = &self.plan.sequences[tile.sequence];
        let rows = tile.queries.len() * cut.group;
        scratch.state.reset(rows, cut.head_dim);
        scratch.q.resize(rows * cut.head_dim, 0.0);
        scratch.k.resize(KEYS_PER_TILE * cut.head_dim, 0.0);
        scratch.v.resize(KEYS_PER_TILE * cut.head_dim, 0.0);
        let q = &self.operands.q;
        for (r, row) in scratch.q.chunks_exact_mut(cut.head_dim).enumerate() {
            let token = sequence.token(tile.queries.start + r / cut.group);
            let from = q.at([token, tile.kv_head * cut.group + r % cut.group, 0]);
            // SAFETY: the row lies inside `q`, whose rows are contiguous.
            unsafe { load(q.dtype(), from, row) };
        }
        math::scale(&mut scratch.q, self.softmax_scale);
    }

    fn fold(&self, tile: &Tile, keys: &Range<usize>, scratch: &mut Scratch) {
        let cut = &self.plan.cut;
        let sequence = &self.plan.sequences[tile.sequence];
        let Scratch { q, k, v, state } = scratch;
        let block_size = cut.block_size;
        load_rows(&self.operands.k_cache, sequence, block_size, tile.kv_head, keys, k);
        load_rows(&self.operands.v_cache, sequence, block_size, tile.kv_head, keys, v);
        let mut scores = [0_f32; KEYS_PER_TILE];
        for (r, q) in q.chunks_exact(cut.head_dim).enumerate() {
            sequence.for_each_run(tile.queries.start + r / cut.group, keys, |seen| {
                let scores = &mut scores[..seen.len()];
                let first = (seen.start - keys.start) * cut.head_dim;
                let elements = first..first + seen.len() * cut.head_dim;
                math::dot_rows(q, &k[elements.clone()], scores);
                self.cap(scores);
                state.absorb(r, scores, &v[elements]);
            });
        }
    }

    fn cap(&self, scores: &mut [f32]) {
        if let Some(cap) = self.soft_cap {
            for s in scores {
                *s = cap * (*s / cap).tanh();
            }
        }
    }

    /// Writes the finished rows of a tile.
    pub(super) fn finish(&self, tile: &Tile, state: &Partial) {
        let cut = &self.plan.cut;
        let sequence = &self.plan.sequences[tile.sequence];
        let mut row = vec![0_f32; cut.head_dim];
        for (r, acc) in state.acc.chunks_exact(cut.head_dim).enumerate() {
            let token = sequence.token(tile.queries.start + r / cut.group);
            let head = tile.kv_head * cut.group + r % cut.group;
            if state.sum[r] == 0.0 {
                row.fill(0.0);
                self.write(token, head, &row, f32::NEG_INFINITY);
                continue;
            }
            let Normaliser { shrink, sum, max } = self.normaliser(head, state.max[r], state.sum[r]);
            for (o, a) in row.iter_mut().zip(acc) {
                *o = a * shrink / sum;
            }
            self.write(token, head, &row, max + sum.ln());
        }
    }

    /// What makes weights of a row's exponentials, its head's sink counted.
    fn normaliser(&self, head: usize, max: f32, sum: f32) -> Normaliser {
        let Some(sink) = self.sinks.get(head) else {
            return Normaliser { shrink: 1.0, sum, max };
        };
        let all = max.max(*sink);
        let shrink = (max - all).exp();
        Normaliser { shrink, sum: sum * shrink + (sink - all).exp(), max: all }
    }

    /// Gives tokens that belong to no sequence the result of seeing no key.
    pub(super) fn clear_tokens(&self, tokens: Range<usize>) {
        let cut = &self.plan.cut;
        let zeros = vec![0_f32; cut.head_dim];
        for token in tokens {
            for head in 0..cut.num_kv_heads * cut.group {
                self.write(token, head, &zeros, f32::NEG_INFINITY);
            }
        }
    }

    fn write(&self, token: usize, head: usize, row: &[f32], lse: f32) {
        let out = &self.operands.out;
        // SAFETY: the row lies inside `out`, whose rows are contiguous; every (token, head) is in one tile.
        unsafe { store(out.dtype(), row, out.at([token, head, 0])) };
        if let Some(view) = &self.operands.lse {
            // SAFETY: as for the row; `lse` is float32.
            unsafe { view.at([token, head]).cast::<f32>().write(lse) };
        }
    }
}

/// `acc * shrink / sum` is the result of a row, `max + ln(sum)` its logarithm of the sum of exponentials.
struct Normaliser {
    shrink: f32,
    sum: f32,
    max: f32,
}

fn load_sinks(sinks: &View<1>) -> Vec<f32> {
    let mut loaded = vec![0_f32; sinks.shape()[0]];
    for (head, sink) in loaded.iter_mut().enumerate() {
        // SAFETY: the element lies inside the view.
        unsafe { load(sinks.dtype(), sinks.at([head]), std::slice::from_mut(sink)) };
    }
    loaded
}

impl Partial {
    /// Folds the scores of row `r` and the values they weigh into its softmax; `scores` is used up.
    fn absorb(&mut self, r: usize, scores: &mut [f32], values: &[f32]) {
        let max = self.max[r].max(math::max(scores));
        // Scores of minus infinity weigh nothing, also before a larger one has come.
        if max == f32::NEG_INFINITY && !scores.iter().any(|s| s.is_nan()) {
            return;
        }
        let head_dim = values.len() / scores.len();
        let acc = &mut self.acc[r * head_dim..(r + 1) * head_dim];
        if max > self.max[r] {
            let shrink = math::exp(self.max[r] - max);
            self.sum[r] *= shrink;
            math::scale(acc, shrink);
            self.max[r] = max;
        }
        self.sum[r] += math::exp_and_sum(scores, max);
        math::add_weighted_rows(acc, scores, values);
    }
}

/// Widens the rows of `keys` of one head, run by run of each block.
fn load_rows(
    cache: &View<4>,
    sequence: &Sequence,
    block_size: usize,
    head: usize,
    keys: &Range<usize>,
    dst: &mut [f32],
) {
    let head_dim = cache.shape()[3];
    let is_run = cache.strides()[2] == head_dim as i64;
    let mut key = keys.start;
    while key < keys.end {
        let offset = key % block_size;
        let len = (block_size - offset).min(keys.end - key);
        let first = (key - keys.start) * head_dim;
        let rows = &mut dst[first..first + len * head_dim];
        let block = sequence.block(key / block_size);
        let row_len = if is_run { len * head_dim } else { head_dim };
        for (i, rows) in rows.chunks_exact_mut(row_len).enumerate() {
            let from = cache.at([block, head, offset + i, 0]);
            // SAFETY: block ids were checked, and the slots of `len` keys lie in one block, one after another where
            // they are read in one go.
            unsafe { load(cache.dtype(), from, rows) };
        }
        key += len;
    }
}
