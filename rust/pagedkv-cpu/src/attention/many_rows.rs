//! Items of many rows: prefill. Keys and values of a tile are laid out once, and matrices are multiplied.

use std::cell::RefCell;
use std::ops::Range;

use pagedkv_core::split_kv::{Tile, WorkItem};

use super::buffer::Buffer;
use super::call::{Call, Row};
use super::hidden::{WeightLayout, add_visible};
use super::plan::Sequence;
use super::tokens::{TokenRows, Visibility, first_read, head_offset, is_finite, visible_bits};
use crate::kernels::{Panel, Product, Scores};
use crate::view::View;

/// Keys that are laid out together.
const TILE_TOKENS: usize = 128;

/// Words of bits per query and tile.
const WORDS: usize = TILE_TOKENS / 64;

/// Buffers of one thread, kept between calls.
#[derive(Default)]
struct Scratch {
    q: Buffer,
    keys: Buffer,
    values: Buffer,
    stage: Buffer,
    scores: Buffer,
    acc: Buffer,
    max: Buffer,
    sum: Buffer,
    shrink: Buffer,
    slopes: Buffer,
    bits: Vec<u64>,
    limits: Vec<usize>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The item that a thread works on: rows under one KV head.
struct Item<'a> {
    call: &'a Call<'a>,
    work: &'a WorkItem,
    num_rows: usize,
    /// Rows in whole blocks of registers.
    padded_rows: usize,
    acc_len: usize,
    lanes: usize,
}

/// Runs one item.
pub(super) fn run(call: &Call<'_>, work: &WorkItem) {
    let num_rows = work.tile.queries.len() * call.plan.cut.group;
    let item = Item {
        call,
        work,
        num_rows,
        padded_rows: num_rows.next_multiple_of(call.many.kernels.block_rows),
        acc_len: call.many.acc_len,
        lanes: call.many.kernels.lanes,
    };
    SCRATCH.with_borrow_mut(|scratch| {
        item.start(scratch);
        item.fold_keys(scratch);
        item.deliver(scratch);
    });
}

impl Item<'_> {
    fn tile(&self) -> &Tile {
        &self.work.tile
    }

    fn sequence(&self) -> &Sequence {
        &self.call.plan.sequences[self.tile().sequence]
    }

    fn kv_head(&self) -> usize {
        self.tile().kv_heads.start
    }

    /// Packs the queries, a row after the other, and empties the softmax of every row.
    fn start(&self, scratch: &mut Scratch) {
        let call = self.call;
        scratch.max.floats(self.padded_rows * self.lanes).fill(f32::NEG_INFINITY);
        scratch.sum.floats(self.padded_rows * self.lanes).fill(0.0);
        scratch.shrink.floats(self.padded_rows * self.lanes).fill(1.0);
        scratch.acc.floats(self.padded_rows * self.acc_len).fill(0.0);
        scratch.scores.floats(self.padded_rows * TILE_TOKENS);
        scratch.keys.floats(TILE_TOKENS * self.call.many.q_len);
        scratch.values.floats(TILE_TOKENS * self.acc_len);
        scratch.stage.floats(self.lanes * self.call.many.q_len).fill(0.0);
        let q = scratch.q.floats(self.padded_rows * self.call.many.q_len);
        q.fill(0.0);
        for (row, q) in q.chunks_exact_mut(call.many.q_len).take(self.num_rows).enumerate() {
            call.pack_query(&call.many, self.tile(), [self.kv_head(), row], q);
        }
    }

    fn fold_keys(&self, scratch: &mut Scratch) {
        let (plan, operands, sequence) = (self.call.plan, self.call.operands, self.sequence());
        let keys = &self.work.keys;
        let mut tokens = TokenRows::new();
        let mut start = first_read(&operands.k_cache, keys.start);
        while start < keys.end {
            let end = keys.end.min((start / TILE_TOKENS + 1) * TILE_TOKENS);
            tokens.find(plan, sequence, [&operands.k_cache, &operands.v_cache], start..end);
            self.fold_tile(scratch, &tokens);
            start = end;
        }
    }

    fn fold_tile(&self, scratch: &mut Scratch, tokens: &TokenRows<TILE_TOKENS>) {
        let queries = &self.tile().queries;
        scratch.bits.resize(queries.len() * WORDS, 0);
        let visibility = visible_bits(self.sequence(), queries, &tokens.tokens, WORDS, &mut scratch.bits);
        let is_whole = visibility == Visibility::All && tokens.tokens.len().is_multiple_of(self.block_tokens());
        let ends = self.block_ends(&scratch.bits);
        self.pack(scratch, tokens);
        self.multiply_keys(scratch, &ends, tokens.tokens.len());
        self.soften(scratch, &ends, &tokens.tokens, is_whole);
        // SAFETY: the blocks of the tile were checked.
        if visibility == Visibility::All || unsafe { self.is_tile_finite(tokens) } {
            self.multiply_values(scratch, &ends);
        } else {
            self.add_hidden(scratch, tokens);
        }
    }

    /// Behind the last token that some row of each block of rows sees.
    fn block_ends(&self, bits: &[u64]) -> Vec<usize> {
        let group = self.call.plan.cut.group;
        let end_of = |row: usize| {
            let words = &bits[row / group * WORDS..(row / group + 1) * WORDS];
            let last = words.iter().rposition(|word| *word != 0);
            last.map_or(0, |i| i * 64 + 64 - words[i].leading_zeros() as usize)
        };
        let block = |first: usize| {
            (first..(first + self.call.many.kernels.block_rows).min(self.num_rows)).map(end_of).max().unwrap_or(0)
        };
        (0..self.padded_rows).step_by(self.call.many.kernels.block_rows).map(block).collect()
    }

    fn pack(&self, scratch: &mut Scratch, tokens: &TokenRows<TILE_TOKENS>) {
        let Call { operands, plan, .. } = self.call;
        let kernels = &self.call.many.kernels;
        let panel = |cache: &View<4>, rows: &[*const u8], cells: *mut f32, steps: usize, stage: *mut f32| Panel {
            rows: rows.as_ptr(),
            len: tokens.tokens.len(),
            offset: head_offset(cache, self.kv_head()),
            row_bytes: plan.cut.head_dim * cache.dtype().size_bytes(),
            cells,
            steps,
            stage,
        };
        let stage = scratch.stage.start();
        let cells = scratch.keys.start();
        let keys = panel(&operands.k_cache, &tokens.keys, cells, self.call.many.q_len, stage);
        let cells = scratch.values.start();
        let values = panel(&operands.v_cache, &tokens.values, cells, self.value_steps(TILE_TOKENS), stage);
        // SAFETY: the kernels are those of this processor, `start` made room, and the blocks of the tile were checked.
        unsafe {
            (kernels.keys.pack)(&keys);
            (kernels.values.pack)(&values);
        }
        if !tokens.tokens.len().is_multiple_of(self.block_tokens()) {
            self.clear_values(scratch, tokens.tokens.len());
        }
    }

    /// Tokens that a product takes whole.
    fn block_tokens(&self) -> usize {
        self.call.many.kernels.block_tokens
    }

    /// Clears the values behind the last token that a product takes along.
    fn clear_values(&self, scratch: &mut Scratch, len: usize) {
        let steps = self.value_steps(len)..self.value_steps(len.next_multiple_of(self.block_tokens()));
        let cells = scratch.values.floats(TILE_TOKENS * self.acc_len);
        for column in cells.chunks_exact_mut(self.value_steps(TILE_TOKENS) * self.lanes).take(self.acc_len / self.lanes)
        {
            column[steps.start * self.lanes..steps.end * self.lanes].fill(0.0);
        }
    }

    /// Steps that so many tokens are in a product with values.
    fn value_steps(&self, tokens: usize) -> usize {
        if self.call.many.kernels.values.is_paired { tokens.div_ceil(2) } else { tokens }
    }

    fn multiply_keys(&self, scratch: &mut Scratch, ends: &[usize], len: usize) {
        scratch.limits.clear();
        scratch.limits.extend(ends.iter().map(|end| end.div_ceil(self.lanes)));
        let product = Product {
            a: scratch.q.start().cast(),
            a_stride: self.call.many.q_len * 4,
            num_rows: self.padded_rows,
            b: scratch.keys.start().cast_const(),
            b_steps: self.call.many.q_len,
            num_columns: len.div_ceil(self.lanes),
            c: scratch.scores.start(),
            c_stride: TILE_TOKENS,
            shrink: std::ptr::null(),
            limits: scratch.limits.as_ptr(),
        };
        // SAFETY: the kernels are those of this processor, and `start` made room.
        unsafe { (self.call.many.kernels.keys.product)(&product) };
    }

    fn soften(&self, scratch: &mut Scratch, ends: &[usize], tokens: &Range<usize>, is_whole: bool) {
        let group = self.call.plan.cut.group;
        let rule = self.call.rule(&self.call.many, self.kv_head());
        for row in 0..self.num_rows {
            let end = ends[row / self.call.many.kernels.block_rows];
            if end == 0 {
                continue;
            }
            let has_slopes = self.fill_slopes(scratch, row, tokens);
            let slopes = scratch.slopes.start().cast_const();
            let bits = scratch.bits.as_ptr().wrapping_add(row / group * WORDS);
            let scores = Scores {
                values: scratch.scores.start().wrapping_add(row * TILE_TOKENS),
                num_steps: end.next_multiple_of(self.block_tokens()) / self.lanes,
                rows: 1,
                max: scratch.max.start().wrapping_add(row * self.lanes),
                sum: scratch.sum.start().wrapping_add(row * self.lanes),
                shrink: scratch.shrink.start().wrapping_add(row * self.lanes),
                rule: &rule,
                slopes: if has_slopes { slopes } else { std::ptr::null() },
                distances: slopes.wrapping_add(self.lanes),
                has_all_distances: self.sequence().has_tree_keys(tokens),
                visible: if is_whole { std::ptr::null() } else { bits },
                words: WORDS,
            };
            // SAFETY: the kernels are those of this processor, and `start` made room for the state of every row.
            unsafe { (self.call.many.kernels.values.soften)(&scores) };
        }
    }

    /// Writes the slope of a row in each lane and the distances from its query to the keys, of one vector or, where keys
    /// of a tree are among them, of all; answers whether there are slopes.
    fn fill_slopes(&self, scratch: &mut Scratch, row: usize, tokens: &Range<usize>) -> bool {
        let (sequence, group) = (self.sequence(), self.call.plan.cut.group);
        let Some(slope) = self.call.slopes.get(self.kv_head() * group + row % group) else { return false };
        let position = sequence.position(self.tile().queries.start + row / group);
        let num_keys = if sequence.has_tree_keys(tokens) { TILE_TOKENS } else { self.lanes };
        let (slopes, distances) = scratch.slopes.floats(self.lanes + num_keys).split_at_mut(self.lanes);
        slopes.fill(*slope);
        for (key, distance) in (tokens.start..).zip(distances) {
            *distance = (sequence.key_position(key) - position) as f32;
        }
        true
    }

    fn multiply_values(&self, scratch: &mut Scratch, ends: &[usize]) {
        scratch.limits.clear();
        scratch.limits.extend(ends.iter().map(|end| self.value_steps(*end)));
        let product = Product {
            a: scratch.scores.start().cast(),
            a_stride: TILE_TOKENS * 4,
            num_rows: self.padded_rows,
            b: scratch.values.start().cast_const(),
            b_steps: self.value_steps(TILE_TOKENS),
            num_columns: self.acc_len / self.lanes,
            c: scratch.acc.start(),
            c_stride: self.acc_len,
            shrink: scratch.shrink.start().cast_const(),
            limits: scratch.limits.as_ptr(),
        };
        // SAFETY: the kernels are those of this processor, and `start` made room.
        unsafe { (self.call.many.kernels.values.product)(&product) };
    }

    /// As `multiply_values`, over the tokens that each row sees alone.
    fn add_hidden(&self, scratch: &mut Scratch, tokens: &TokenRows<TILE_TOKENS>) {
        let group = self.call.plan.cut.group;
        let offset = head_offset(&self.call.operands.v_cache, self.kv_head());
        let weights = scratch.scores.start().cast_const();
        let shrink = scratch.shrink.floats(self.padded_rows * self.lanes);
        let acc = scratch.acc.floats(self.padded_rows * self.acc_len);
        for (row, acc) in acc.chunks_exact_mut(self.acc_len).take(self.num_rows).enumerate() {
            let bits = &scratch.bits[row / group * WORDS..(row / group + 1) * WORDS];
            if bits.iter().all(|word| *word == 0) {
                continue;
            }
            let layout = WeightLayout {
                weights: weights.wrapping_add(row * TILE_TOKENS),
                is_paired: self.call.many.kernels.values.is_paired,
                lanes: self.lanes,
                tokens: self.lanes,
                row: 0,
            };
            // SAFETY: the weights of every token that the row sees were written, and the blocks of the tile were checked.
            unsafe {
                add_visible(
                    self.call,
                    &self.call.many,
                    acc,
                    shrink[row * self.lanes],
                    &layout,
                    bits,
                    (tokens.values.as_ptr(), offset),
                );
            }
        }
    }

    unsafe fn is_tile_finite(&self, tokens: &TokenRows<TILE_TOKENS>) -> bool {
        let cache = &self.call.operands.v_cache;
        let offset = head_offset(cache, self.kv_head());
        let rows = &tokens.values[..tokens.tokens.len()];
        // SAFETY: the caller's promise.
        rows.iter()
            .all(|row| unsafe { is_finite(cache.dtype(), row.offset(offset).cast(), self.call.plan.cut.head_dim) })
    }

    /// Hands over the rows.
    fn deliver(&self, scratch: &mut Scratch) {
        let max = scratch.max.floats(self.padded_rows * self.lanes);
        let sum = scratch.sum.floats(self.padded_rows * self.lanes);
        let acc = scratch.acc.floats(self.padded_rows * self.acc_len);
        for (row, acc) in acc.chunks_exact(self.acc_len).take(self.num_rows).enumerate() {
            let lanes = row * self.lanes..(row + 1) * self.lanes;
            let result = Row { max: max[lanes.start], sum: sum[lanes].iter().sum(), acc };
            self.call.deliver(&self.call.many, self.work, [self.kv_head(), row], &result);
        }
    }
}
