//! Items of few rows: decode, drafts, short prompts. Keys and values are read once, where they lie, for all rows.
//!
//! Tokens are taken a strip at a time, and within a strip the KV heads one after another: blocks are read in the order
//! in which they lie in memory, while the next head is asked for.

use std::cell::RefCell;
use std::ops::Range;

use pagedkv_core::split_kv::{Tile, WorkItem};

use super::buffer::Buffer;
use super::call::{Call, Row};
use super::hidden::{WeightLayout, add_visible};
use super::plan::Sequence;
use super::rows;
use super::tokens::{StripRows, TokenRows, Visibility, first_read, head_offset, is_finite, visible_bits};
use crate::kernels::{Ahead, Group, Groups, RowsAhead, STRIP_TOKENS, Scores, State, Strip};
use crate::view::View;

/// Buffers of one thread, kept between calls.
#[derive(Default)]
struct Scratch {
    row: Buffer,
    q: Buffer,
    acc: Buffer,
    scores: Buffer,
    max: Buffer,
    sum: Buffer,
    shrink: Buffer,
    slopes: Buffer,
    bits: Vec<u64>,
    bits_of_rows: Vec<u64>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The item that a thread works on. What belongs to a KV head lies behind what belongs to those before it.
struct Item<'a> {
    call: &'a Call<'a>,
    work: &'a WorkItem,
    /// Rows per KV head, and as many as buffers have room for.
    num_rows: usize,
    padded_rows: usize,
    num_groups: usize,
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
        padded_rows: Groups::padded(num_rows),
        num_groups: Groups::count(num_rows),
        acc_len: call.few.acc_len,
        lanes: call.few.kernels.lanes,
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

    /// Packs the queries and empties the softmax of every row.
    fn start(&self, scratch: &mut Scratch) {
        let num_heads = self.tile().kv_heads.len();
        let state_len = num_heads * self.num_groups * self.lanes;
        scratch.max.floats(state_len).fill(f32::NEG_INFINITY);
        scratch.sum.floats(state_len).fill(0.0);
        scratch.shrink.floats(state_len);
        scratch.acc.floats(num_heads * self.padded_rows * self.acc_len).fill(0.0);
        scratch.scores.floats(self.padded_rows * STRIP_TOKENS);
        let head_len = self.padded_rows * self.call.few.q_len;
        let q = scratch.q.floats(num_heads * head_len);
        q.fill(0.0);
        for (kv_head, q) in self.tile().kv_heads.clone().zip(q.chunks_exact_mut(head_len)) {
            self.pack_queries(kv_head, scratch.row.floats(self.call.few.q_len), q);
        }
    }

    /// Lays out the queries of a KV head: per group `[vector][row]`, or `[cell][row]` for packed keys.
    fn pack_queries(&self, kv_head: usize, row: &mut [f32], q: &mut [f32]) {
        let width = self.call.few.kernels.keys.query_cells;
        for group in Groups::of(self.num_rows) {
            let q = &mut q[group.first * self.call.few.q_len..];
            for i in 0..group.used {
                self.call.pack_query(&self.call.few, self.tile(), [kv_head, group.first + i], row);
                let to = &mut q[i * width..];
                // SAFETY: the kernels are those of this processor.
                unsafe { rows::spread(self.call.few.isa, row, width, group.rows * width, to) };
            }
        }
    }

    fn fold_keys(&self, scratch: &mut Scratch) {
        let keys = &self.work.keys;
        let (plan, operands, sequence) = (self.call.plan, self.call.operands, self.sequence());
        let caches = [&operands.k_cache, &operands.v_cache];
        // Strips start at multiples of their length, so that windows do not move the borders of later ones.
        let strip = |start: usize| start..keys.end.min((start / STRIP_TOKENS + 1) * STRIP_TOKENS);
        let (mut now, mut next) = (&mut StripRows::new(), &mut StripRows::new());
        if !keys.is_empty() {
            next.find(plan, sequence, caches, strip(first_read(caches[0], keys.start)));
        }
        while now.rows.tokens.end < keys.end {
            std::mem::swap(&mut now, &mut next);
            let end = now.rows.tokens.end;
            if end < keys.end {
                next.find(plan, sequence, caches, strip(end));
            }
            self.fold_strip(scratch, &now.rows, [&now.ahead, if end < keys.end { &next.ahead } else { &now.ahead }]);
        }
    }

    fn fold_strip(&self, scratch: &mut Scratch, now: &TokenRows<STRIP_TOKENS>, ahead: [&RowsAhead; 2]) {
        let (call, tile) = (self.call, self.tile());
        let visibility = self.find_visible(scratch, &now.tokens);
        let is_whole = visibility == Visibility::All && now.tokens.len().is_multiple_of(self.lanes);
        let bits = if is_whole { std::ptr::null() } else { scratch.bits_of_rows.as_ptr() };
        let head_dim = call.plan.cut.head_dim;
        let (k_cache, v_cache) = (&call.operands.k_cache, &call.operands.v_cache);
        for (index, kv_head) in tile.kv_heads.clone().enumerate() {
            let (rows, head) =
                if kv_head + 1 < tile.kv_heads.end { (ahead[0], kv_head + 1) } else { (ahead[1], tile.kv_heads.start) };
            let ahead = Ahead { rows, offsets: [head_offset(k_cache, head), head_offset(v_cache, head)] };
            let strip = |cache: &View<4>, rows: *const *const u8| Strip {
                rows,
                len: now.tokens.len(),
                offset: head_offset(cache, kv_head),
                row_bytes: head_dim * cache.dtype().size_bytes(),
                ahead,
            };
            let keys = strip(k_cache, now.keys.as_ptr());
            let values = strip(v_cache, now.values.as_ptr());
            let q = scratch.q.start().wrapping_add(index * self.padded_rows * self.call.few.q_len);
            let scores = scratch.scores.start();
            // SAFETY: the kernels are those of this processor; `start` made room for all rows, and the blocks of the
            // strip were checked.
            unsafe { (call.few.kernels.keys.score)(q.cast(), self.num_rows, &keys, scores) };
            self.soften(scratch, index, kv_head, &now.tokens, bits);
            self.weigh(scratch, index, &values, visibility);
        }
    }

    /// Writes which tokens each row sees.
    fn find_visible(&self, scratch: &mut Scratch, tokens: &Range<usize>) -> Visibility {
        let queries = &self.tile().queries;
        let group = self.call.plan.cut.group;
        scratch.bits.resize(queries.len(), 0);
        let visibility = visible_bits(self.sequence(), queries, tokens, 1, &mut scratch.bits);
        scratch.bits_of_rows.clear();
        scratch.bits_of_rows.extend(scratch.bits.iter().flat_map(|bits| std::iter::repeat_n(*bits, group)));
        scratch.bits_of_rows.resize(self.padded_rows, 0);
        visibility
    }

    fn soften(&self, scratch: &mut Scratch, index: usize, kv_head: usize, tokens: &Range<usize>, bits: *const u64) {
        let rule = self.call.rule(&self.call.few, kv_head);
        for group in Groups::of(self.num_rows) {
            let tokens_per_step = self.lanes / group.rows;
            let has_slopes = self.fill_slopes(scratch, kv_head, &group, tokens);
            let slopes = scratch.slopes.start().cast_const();
            let at = (index * self.num_groups + group.index) * self.lanes;
            let scores = Scores {
                values: scratch.scores.start().wrapping_add(group.first * STRIP_TOKENS),
                num_steps: tokens.len().div_ceil(tokens_per_step),
                rows: group.rows,
                rule: &rule,
                slopes: if has_slopes { slopes } else { std::ptr::null() },
                distances: slopes.wrapping_add(self.lanes),
                has_all_distances: self.sequence().has_tree_keys(tokens),
                visible: if bits.is_null() { bits } else { bits.wrapping_add(group.first) },
                words: 1,
            };
            let state = State {
                max: scratch.max.start().wrapping_add(at),
                sum: scratch.sum.start().wrapping_add(at),
                shrink: scratch.shrink.start().wrapping_add(at),
            };
            // SAFETY: the kernels are those of this processor, and `start` made room for the state of every group.
            unsafe { (self.call.few.kernels.values.soften)(&scores, &state) };
        }
    }

    /// Writes the slope of each lane of a group and the distances from its query to its key, in one step or, where keys
    /// of a tree are among them, in all; answers whether there are slopes.
    fn fill_slopes(&self, scratch: &mut Scratch, kv_head: usize, rows: &Group, tokens: &Range<usize>) -> bool {
        let call = self.call;
        if call.slopes.is_empty() {
            return false;
        }
        let (sequence, group) = (self.sequence(), call.plan.cut.group);
        let per_step = self.lanes / rows.rows;
        let num_steps = if sequence.has_tree_keys(tokens) { tokens.len().div_ceil(per_step) } else { 1 };
        let (slopes, distances) = scratch.slopes.floats((1 + num_steps) * self.lanes).split_at_mut(self.lanes);
        for (lane, slope) in slopes.iter_mut().enumerate() {
            let row = (rows.first + lane / per_step).min(self.num_rows - 1);
            let position = sequence.position(self.tile().queries.start + row / group);
            *slope = call.slopes[kv_head * group + row % group];
            for (step, distances) in distances.chunks_exact_mut(self.lanes).enumerate() {
                let key = tokens.start + step * per_step + lane % per_step;
                distances[lane] = (sequence.key_position(key) - position) as f32;
            }
        }
        true
    }

    fn weigh(&self, scratch: &mut Scratch, index: usize, values: &Strip, visibility: Visibility) {
        let call = self.call;
        let acc = scratch.acc.start().wrapping_add(index * self.padded_rows * self.acc_len);
        let shrink = scratch.shrink.start().wrapping_add(index * self.num_groups * self.lanes);
        let weights = scratch.scores.start().cast_const();
        // SAFETY: the rows of the strip can be read.
        if visibility == Visibility::All || unsafe { self.is_strip_finite(values) } {
            // SAFETY: as for the scores in `fold_strip`.
            unsafe {
                (call.few.kernels.values.weigh)(acc, self.acc_len, self.num_rows, weights.cast(), shrink, values);
            };
            return;
        }
        for group in Groups::of(self.num_rows) {
            let tokens = self.lanes / group.rows;
            for i in 0..group.used {
                let row = group.first + i;
                let layout = WeightLayout {
                    weights: weights.wrapping_add(group.first * STRIP_TOKENS),
                    is_paired: call.few.kernels.values.is_paired,
                    lanes: self.lanes,
                    tokens,
                    row: i,
                };
                let bits = &scratch.bits_of_rows[row..=row];
                // SAFETY: `start` made room for every row and group, and the rows of the strip can be read.
                unsafe {
                    let acc = std::slice::from_raw_parts_mut(acc.add(row * self.acc_len), self.acc_len);
                    let shrink = shrink.add(group.index * self.lanes + i * tokens).read();
                    add_visible(call, &call.few, acc, shrink, &layout, bits, (values.rows, values.offset));
                }
            }
        }
    }

    unsafe fn is_strip_finite(&self, values: &Strip) -> bool {
        let cut = &self.call.plan.cut;
        let dtype = self.call.operands.v_cache.dtype();
        // SAFETY: the caller's promise.
        (0..values.len)
            .all(|i| unsafe { is_finite(dtype, values.rows.add(i).read().offset(values.offset).cast(), cut.head_dim) })
    }

    /// Hands over the rows.
    fn deliver(&self, scratch: &mut Scratch) {
        let num_heads = self.tile().kv_heads.len();
        let state_len = num_heads * self.num_groups * self.lanes;
        let (max, sum) = (scratch.max.floats(state_len), scratch.sum.floats(state_len));
        let acc = scratch.acc.floats(num_heads * self.padded_rows * self.acc_len);
        for (index, kv_head) in self.tile().kv_heads.clone().enumerate() {
            for group in Groups::of(self.num_rows) {
                let tokens = self.lanes / group.rows;
                for i in 0..group.used {
                    let lane = (index * self.num_groups + group.index) * self.lanes + i * tokens;
                    let row = group.first + i;
                    let at = (index * self.padded_rows + row) * self.acc_len;
                    let sum = sum[lane..lane + tokens].iter().sum();
                    let result = Row { max: max[lane], sum, acc: &acc[at..at + self.acc_len] };
                    self.call.deliver(&self.call.few, self.work, [kv_head, row], &result);
                }
            }
        }
    }
}
