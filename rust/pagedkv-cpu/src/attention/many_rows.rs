//! Items of many rows: prefill. Keys and values of a tile are laid out once, and matrices are multiplied.

use std::cell::RefCell;
use std::ops::Range;

use pagedkv_core::split_kv::{Tile, WorkItem};

use super::buffer::Buffer;
use super::call::{Call, Row};
use super::hidden::{WeightLayout, add_visible};
use super::plan::Sequence;
use super::tokens::{TokenRows, Visibility, first_read, head_offset, is_finite, visible_bits};
use crate::kernels::{Panel, Product, RowScores, Scores, State};
use crate::view::View;

/// Keys that are laid out together.
const TILE_TOKENS: usize = 128;

/// Words of bits per query and tile.
const WORDS: usize = TILE_TOKENS / 64;

/// Passes whose scores are kept.
const PASSES: usize = 3;

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
    /// Of each block of rows: behind the last token that some row of it sees.
    ends: Vec<usize>,
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
    let kernels = &call.many.kernels;
    let num_rows = work.tile.queries.len() * call.plan.cut.group;
    let item = Item {
        call,
        work,
        num_rows,
        padded_rows: num_rows.next_multiple_of(kernels.block_rows),
        acc_len: call.many.acc_len,
        lanes: kernels.lanes,
    };
    SCRATCH.with_borrow_mut(|scratch| {
        // SAFETY: the kernels are those of this processor.
        unsafe { (kernels.begin)() };
        item.start(scratch);
        item.fold_keys(scratch);
        item.deliver(scratch);
        // SAFETY: as above, and what was begun ends.
        unsafe { (kernels.end)() };
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
        let states = self.padded_rows.next_multiple_of(self.lanes);
        scratch.max.floats(states).fill(f32::NEG_INFINITY);
        scratch.sum.floats(states).fill(0.0);
        scratch.shrink.floats(states).fill(1.0);
        scratch.acc.floats(self.padded_rows * self.acc_len).fill(0.0);
        scratch.scores.floats(PASSES * self.call.many.kernels.pass_rows * TILE_TOKENS);
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

    /// Folds a tile into all rows, so many at a time that their scores stay in the first cache.
    fn fold_tile(&self, scratch: &mut Scratch, tokens: &TokenRows<TILE_TOKENS>) {
        let queries = &self.tile().queries;
        scratch.bits.resize(queries.len() * WORDS, 0);
        let visibility = visible_bits(self.sequence(), queries, &tokens.tokens, WORDS, &mut scratch.bits);
        let is_whole = visibility == Visibility::All && tokens.tokens.len().is_multiple_of(self.block_tokens());
        self.find_ends(scratch);
        self.pack(scratch, tokens);
        // SAFETY: the blocks of the tile were checked.
        let is_product = visibility == Visibility::All || unsafe { self.is_tile_finite(tokens) };
        let passes = self.padded_rows.div_ceil(self.call.many.kernels.pass_rows);
        for step in 0..passes + 2 {
            // Three passes at once: what one of them writes, the next step reads.
            let [keys, weights, values] = [0, 1, 2].map(|lag| self.pass(step.checked_sub(lag)));
            // A product in the middle of the softmax: tiles of AMX that rest for some 1,500 cycles take 900 to wake.
            let middle = weights.start + weights.len().div_ceil(2).next_multiple_of(self.lanes).min(weights.len());
            self.multiply_keys(scratch, &keys, tokens.tokens.len());
            self.soften(scratch, weights.start..middle, &tokens.tokens, is_whole);
            if is_product {
                self.multiply_values(scratch, &values);
            } else {
                self.add_hidden(scratch, &values, tokens);
            }
            self.soften(scratch, middle..weights.end, &tokens.tokens, is_whole);
        }
    }

    /// The rows of a pass; none where there is no such pass.
    fn pass(&self, index: Option<usize>) -> Range<usize> {
        let Some(index) = index else { return 0..0 };
        let pass_rows = self.call.many.kernels.pass_rows;
        let start = (index * pass_rows).min(self.padded_rows);
        start..(start + pass_rows).min(self.padded_rows)
    }

    /// Where the scores of a row lie, as long as its pass is one of the last.
    fn scores_of(&self, scores: &mut Buffer, row: usize) -> *mut f32 {
        scores.start().wrapping_add(row % (PASSES * self.call.many.kernels.pass_rows) * TILE_TOKENS)
    }

    /// Rows of a block, which have an end in common.
    fn block_rows(&self) -> usize {
        self.call.many.kernels.block_rows
    }

    fn find_ends(&self, scratch: &mut Scratch) {
        let group = self.call.plan.cut.group;
        let end_of = |query: &[u64]| {
            let last = query.iter().rposition(|word| *word != 0);
            last.map_or(0, |i| i * 64 + 64 - query[i].leading_zeros() as usize)
        };
        let end_of_block = |first: usize| {
            let queries = first / group..(first + self.block_rows()).min(self.num_rows).div_ceil(group);
            let bits = &scratch.bits[queries.start * WORDS..queries.end * WORDS];
            bits.chunks_exact(WORDS).map(end_of).max().unwrap_or(0)
        };
        scratch.ends.clear();
        scratch.ends.extend((0..self.padded_rows).step_by(self.block_rows()).map(end_of_block));
    }

    /// The blocks that `rows` are made of.
    fn blocks(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start / self.block_rows()..rows.end / self.block_rows()
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

    fn multiply_keys(&self, scratch: &mut Scratch, rows: &Range<usize>, len: usize) {
        let Scratch { q, keys, scores, ends, limits, .. } = scratch;
        limits.clear();
        limits.extend(ends[self.blocks(rows)].iter().map(|end| end.div_ceil(self.lanes)));
        let product = Product {
            a: q.start().wrapping_add(rows.start * self.call.many.q_len).cast(),
            a_stride: self.call.many.q_len * 4,
            num_rows: rows.len(),
            b: keys.start().cast_const(),
            b_steps: self.call.many.q_len,
            num_columns: len.div_ceil(self.lanes),
            c: self.scores_of(scores, rows.start),
            c_stride: TILE_TOKENS,
            shrink: std::ptr::null(),
            limits: limits.as_ptr(),
        };
        // SAFETY: the kernels are those of this processor, and `start` made room.
        unsafe { (self.call.many.kernels.keys.product)(&product) };
    }

    /// Carries on the softmax of rows of one pass.
    fn soften(&self, scratch: &mut Scratch, rows: Range<usize>, tokens: &Range<usize>, is_whole: bool) {
        let rows = rows.start..rows.end.min(self.num_rows);
        let blocks = rows.start / self.block_rows()..rows.end.div_ceil(self.block_rows());
        let end = scratch.ends[blocks].iter().max().copied().unwrap_or(0);
        if rows.is_empty() || end == 0 {
            return;
        }
        let slope_stride = self.fill_slopes(scratch, rows.clone(), tokens);
        let slopes = scratch.slopes.start().cast_const();
        let first = Scores {
            values: self.scores_of(&mut scratch.scores, rows.start),
            num_steps: end.next_multiple_of(self.block_tokens()) / self.lanes,
            rows: 1,
            rule: &self.call.rule(&self.call.many, self.kv_head()),
            slopes: if slope_stride > 0 { slopes } else { std::ptr::null() },
            distances: slopes.wrapping_add(self.lanes),
            has_all_distances: self.sequence().has_tree_keys(tokens),
            visible: if is_whole { std::ptr::null() } else { scratch.bits.as_ptr() },
            words: WORDS,
        };
        let Scratch { max, sum, shrink, .. } = scratch;
        let scores = RowScores {
            first,
            stride: TILE_TOKENS,
            slope_stride,
            rows,
            group: self.call.plan.cut.group,
            state: State { max: max.start(), sum: sum.start(), shrink: shrink.start() },
        };
        // SAFETY: the kernels are those of this processor, and `start` made room for the state of every row.
        unsafe { (self.call.many.kernels.values.soften_rows)(&scores) };
    }

    /// Writes for each row its slope in each lane and the distances from its query to the keys, of one vector or, where
    /// keys of a tree are among them, of all; answers how many floats that are, or 0 where there are no slopes.
    fn fill_slopes(&self, scratch: &mut Scratch, rows: Range<usize>, tokens: &Range<usize>) -> usize {
        let (sequence, group) = (self.sequence(), self.call.plan.cut.group);
        if self.call.slopes.is_empty() {
            return 0;
        }
        let num_keys = if sequence.has_tree_keys(tokens) { TILE_TOKENS } else { self.lanes };
        let stride = self.lanes + num_keys;
        for (row, floats) in rows.clone().zip(scratch.slopes.floats(rows.len() * stride).chunks_exact_mut(stride)) {
            let (slopes, distances) = floats.split_at_mut(self.lanes);
            let position = sequence.position(self.tile().queries.start + row / group);
            slopes.fill(self.call.slopes[self.kv_head() * group + row % group]);
            for (key, distance) in (tokens.start..).zip(distances) {
                *distance = (sequence.key_position(key) - position) as f32;
            }
        }
        stride
    }

    fn multiply_values(&self, scratch: &mut Scratch, rows: &Range<usize>) {
        let Scratch { scores, values, acc, shrink, ends, limits, .. } = scratch;
        limits.clear();
        limits.extend(ends[self.blocks(rows)].iter().map(|end| self.value_steps(*end)));
        let product = Product {
            a: self.scores_of(scores, rows.start).cast_const().cast(),
            a_stride: TILE_TOKENS * 4,
            num_rows: rows.len(),
            b: values.start().cast_const(),
            b_steps: self.value_steps(TILE_TOKENS),
            num_columns: self.acc_len / self.lanes,
            c: acc.start().wrapping_add(rows.start * self.acc_len),
            c_stride: self.acc_len,
            shrink: shrink.start().wrapping_add(rows.start).cast_const(),
            limits: limits.as_ptr(),
        };
        // SAFETY: the kernels are those of this processor, and `start` made room.
        unsafe { (self.call.many.kernels.values.product)(&product) };
    }

    /// As `multiply_values`, over the tokens that each row sees alone.
    fn add_hidden(&self, scratch: &mut Scratch, rows: &Range<usize>, tokens: &TokenRows<TILE_TOKENS>) {
        let group = self.call.plan.cut.group;
        let offset = head_offset(&self.call.operands.v_cache, self.kv_head());
        let weights = self.scores_of(&mut scratch.scores, rows.start).cast_const();
        let shrink = scratch.shrink.floats(self.padded_rows);
        let acc = scratch.acc.floats(self.padded_rows * self.acc_len);
        for row in rows.start..rows.end.min(self.num_rows) {
            let acc = &mut acc[row * self.acc_len..(row + 1) * self.acc_len];
            let bits = &scratch.bits[row / group * WORDS..(row / group + 1) * WORDS];
            if bits.iter().all(|word| *word == 0) {
                continue;
            }
            let layout = WeightLayout {
                weights: weights.wrapping_add((row - rows.start) * TILE_TOKENS),
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
                    shrink[row],
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
        let max = scratch.max.floats(self.padded_rows);
        let sum = scratch.sum.floats(self.padded_rows);
        let acc = scratch.acc.floats(self.padded_rows * self.acc_len);
        for (row, acc) in acc.chunks_exact(self.acc_len).take(self.num_rows).enumerate() {
            let result = Row { max: max[row], sum: sum[row], acc };
            self.call.deliver(&self.call.many, self.work, [self.kv_head(), row], &result);
        }
    }
}
