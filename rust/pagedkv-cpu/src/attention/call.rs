//! One attention call, ready to run items: operands, options and kernels, and how finished rows are written.

use pagedkv_core::split_kv::{MergeItem, Tile, WorkItem};

use super::cells::Cells;
use super::plan::Plan;
use super::rows::{self, Normaliser, Stored};
use super::{AttentionOptions, MAX_HEAD_DIM, Operands};
use crate::convert::{load, store};
use crate::isa::Isa;
use crate::kernels::{Kernels, ScoreRule};
use crate::view::View;

/// Rows that wait to be merged: the largest score, the sum of weights, and the weighted sum of values of each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Workspace {
    pub(super) rows: *mut f32,
}

// SAFETY: every row is written by one item, and read only after all items have ended.
unsafe impl Send for Workspace {}
// SAFETY: as for `Send`.
unsafe impl Sync for Workspace {}

/// The unfinished softmax of one row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    /// Largest score, as a power of two.
    pub(super) max: f32,
    /// Sum of the weights.
    pub(super) sum: f32,
    /// Weighted sum of the values, in the order of the kernels.
    pub(super) acc: &'a [f32],
}

/// Kernels, and the orders in which they want queries and make results.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) kernels: Kernels,
    pub(super) isa: Isa,
    /// How the cells of a packed float32 query lie.
    key_cells: Cells,
    /// How the cells of an accumulator lie.
    pub(super) value_cells: Cells,
    /// Cells of a packed query.
    pub(super) q_len: usize,
    /// Cells of an accumulator.
    pub(super) acc_len: usize,
}

impl Path {
    pub(super) fn new(isa: Isa, kernels: Kernels, head_dim: usize) -> Self {
        let lanes = kernels.lanes;
        let [key_unit, value_unit] = [kernels.keys.unit(lanes), kernels.values.unit(lanes)];
        let q_len = head_dim.next_multiple_of(key_unit);
        Self {
            kernels,
            isa,
            key_cells: Cells::of(key_unit, |cell| kernels.keys.element(lanes, cell)),
            value_cells: Cells::of(value_unit, |cell| kernels.values.element(lanes, cell)),
            q_len: if kernels.keys.is_paired { q_len / 2 } else { q_len },
            acc_len: head_dim.next_multiple_of(value_unit),
        }
    }

    /// Floats of a row that waits to be merged.
    pub(super) fn row_len(&self) -> usize {
        self.acc_len + 2
    }
}

/// The operands and options of one call.
pub(super) struct Call<'a> {
    pub(super) operands: &'a Operands,
    pub(super) plan: &'a Plan,
    /// For items of few rows, which alone may wait to be merged.
    pub(super) few: Path,
    /// For items of many rows.
    pub(super) many: Path,
    /// The slope of each query head; empty without `ALiBi`.
    pub(super) slopes: Vec<f32>,
    softmax_scale: f32,
    soft_cap: Option<f32>,
    /// The sink of each query head; empty without sinks.
    sinks: Vec<f32>,
    /// One for all KV heads or one each.
    k_scales: Vec<f32>,
    v_scales: Vec<f32>,
    workspace: Workspace,
}

impl<'a> Call<'a> {
    pub(super) fn new(
        operands: &'a Operands,
        options: &AttentionOptions,
        plan: &'a Plan,
        [few, many]: [Path; 2],
        workspace: Workspace,
    ) -> Self {
        let default_scale = 1.0 / f64::from(plan.cut.head_dim as u32).sqrt();
        Self {
            operands,
            plan,
            few,
            many,
            slopes: loaded(operands.alibi_slopes.as_ref()),
            softmax_scale: options.softmax_scale.unwrap_or(default_scale as f32),
            soft_cap: options.soft_cap,
            sinks: loaded(operands.sinks.as_ref()),
            k_scales: loaded(operands.k_scale.as_ref()),
            v_scales: loaded(operands.v_scale.as_ref()),
            workspace,
        }
    }

    /// How products with the keys of a KV head become scores.
    pub(super) fn rule(&self, path: &Path, kv_head: usize) -> ScoreRule {
        let scale = self.softmax_scale * path.kernels.keys.scale * of_head(&self.k_scales, kv_head);
        ScoreRule { scale, soft_cap: self.soft_cap }
    }

    /// Loads a query row in the order of the kernels, zeros behind its end; two bfloat16 take a cell where they are
    /// multiplied in pairs.
    pub(super) fn pack_query(&self, path: &Path, tile: &Tile, [kv_head, row]: [usize; 2], cells: &mut [f32]) {
        let [token, head] = self.token_and_head(tile, kv_head, row);
        let q = &self.operands.q;
        let from = q.at([token, head, 0]);
        if path.kernels.keys.is_paired {
            cells.fill(0.0);
            let bytes = self.plan.cut.head_dim * q.dtype().size_bytes();
            // SAFETY: the row lies inside `q`, whose rows are contiguous bfloat16, and is no longer than the cells.
            unsafe { cells.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from.cast(), bytes) };
            return;
        }
        let row = Stored { data: from, dtype: q.dtype(), len: self.plan.cut.head_dim };
        // SAFETY: the row lies inside `q`, whose rows are contiguous, and the kernels are those of this processor.
        unsafe { rows::pack(path.isa, row, path.key_cells, cells) };
    }

    fn token_and_head(&self, tile: &Tile, kv_head: usize, row: usize) -> [usize; 2] {
        let group = self.plan.cut.group;
        let token = self.plan.sequences[tile.sequence].token(tile.queries.start + row / group);
        [token, kv_head * group + row % group]
    }

    /// Takes a row of an item: it is finished, or waits for the others of its tile.
    pub(super) fn deliver(&self, path: &Path, item: &WorkItem, [kv_head, row]: [usize; 2], result: &Row<'_>) {
        let Some(first) = item.partial_row else {
            self.finish(path, &item.tile, [kv_head, row], result);
            return;
        };
        let rows_per_head = item.tile.queries.len() * self.plan.cut.group;
        let index = first + (kv_head - item.tile.kv_heads.start) * rows_per_head + row;
        let len = result.acc.len();
        // SAFETY: the workspace has room for all partial rows of the plan, and this one belongs to this item alone.
        unsafe {
            let to = self.workspace.rows.add(index * path.row_len());
            to.write(result.max);
            to.add(1).write(result.sum);
            to.add(2).copy_from_nonoverlapping(result.acc.as_ptr(), len);
        }
    }

    /// Joins the pieces of a tile in the order of their keys and finishes its rows.
    pub(super) fn merge(&self, merge: &MergeItem) {
        let group = self.plan.cut.group;
        let rows_per_head = merge.tile.queries.len() * group;
        let num_rows = merge.tile.num_rows(group);
        let mut acc = vec![0_f32; self.few.acc_len];
        for index in 0..num_rows {
            let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
            acc.fill(0.0);
            for piece in 0..merge.num_pieces {
                let row = self.partial(merge.partial_row + piece * num_rows + index);
                (max, sum) = join((max, sum, &mut acc), &row);
            }
            let kv_head = merge.tile.kv_heads.start + index / rows_per_head;
            let row = Row { max, sum, acc: &acc };
            self.finish(&self.few, &merge.tile, [kv_head, index % rows_per_head], &row);
        }
    }

    fn partial(&self, index: usize) -> Row<'_> {
        let len = self.few.row_len();
        // SAFETY: all items have ended, and each wrote its rows.
        let row = unsafe { std::slice::from_raw_parts(self.workspace.rows.add(index * len), len) };
        Row { max: row[0], sum: row[1], acc: &row[2..] }
    }

    fn finish(&self, path: &Path, tile: &Tile, [kv_head, row]: [usize; 2], result: &Row<'_>) {
        let [token, head] = self.token_and_head(tile, kv_head, row);
        if result.sum == 0.0 {
            self.clear(token, head);
            return;
        }
        let (shrink, sum, max) = self.normaliser(head, result.max, result.sum);
        let factor = shrink * path.kernels.values.scale * of_head(&self.v_scales, kv_head);
        let out = &self.operands.out;
        let row = Stored { data: out.at([token, head, 0]), dtype: out.dtype(), len: self.plan.cut.head_dim };
        // SAFETY: the row lies inside `out`, whose rows are contiguous; every (token, head) is in one tile. The kernels
        // are those of this processor.
        unsafe { rows::finish(path.isa, result.acc, path.value_cells, Normaliser { factor, sum }, row) };
        if self.operands.lse.is_some() {
            self.write_lse(token, head, max + sum.ln());
        }
    }

    /// What a weighted sum must be multiplied by and divided by, and the largest score; the head's sink counts.
    fn normaliser(&self, head: usize, max: f32, sum: f32) -> (f32, f32, f32) {
        let max = max * std::f32::consts::LN_2;
        let Some(sink) = self.sinks.get(head) else {
            return (1.0, sum, max);
        };
        let all = max.max(*sink);
        let shrink = (max - all).exp();
        let sum = sum * shrink + (sink - all).exp();
        (shrink, sum, all)
    }

    /// Gives tokens that belong to no sequence the result of seeing no key.
    pub(super) fn clear_tokens(&self, tokens: std::ops::Range<usize>) {
        for token in tokens {
            for head in 0..self.plan.cut.num_kv_heads * self.plan.cut.group {
                self.clear(token, head);
            }
        }
    }

    fn clear(&self, token: usize, head: usize) {
        let out = &self.operands.out;
        let zeros = &[0.0; MAX_HEAD_DIM][..self.plan.cut.head_dim];
        // SAFETY: as in `finish`.
        unsafe { store(out.dtype(), zeros, out.at([token, head, 0])) };
        self.write_lse(token, head, f32::NEG_INFINITY);
    }

    fn write_lse(&self, token: usize, head: usize, lse: f32) {
        if let Some(view) = &self.operands.lse {
            // SAFETY: as for the elements; `lse` is float32.
            unsafe { view.at([token, head]).cast::<f32>().write(lse) };
        }
    }
}

/// Adds a piece to the rows before it; answers their maximum and sum.
fn join((max, sum, acc): (f32, f32, &mut [f32]), piece: &Row<'_>) -> (f32, f32) {
    if piece.max == f32::NEG_INFINITY {
        // No score, or none but NaN, which must stay visible.
        return (max, sum + piece.sum);
    }
    let new = max.max(piece.max);
    let (mine, theirs) = ((max - new).exp2(), (piece.max - new).exp2());
    for (a, b) in acc.iter_mut().zip(piece.acc) {
        *a = *a * mine + b * theirs;
    }
    (new, sum * mine + piece.sum * theirs)
}

fn of_head(scales: &[f32], kv_head: usize) -> f32 {
    match scales {
        [] => 1.0,
        [one] => *one,
        each => each[kv_head],
    }
}

fn loaded(values: Option<&View<1>>) -> Vec<f32> {
    let Some(values) = values else { return Vec::new() };
    let mut loaded = vec![0_f32; values.shape()[0]];
    for (index, value) in loaded.iter_mut().enumerate() {
        // SAFETY: the element lies inside the view.
        unsafe { load(values.dtype(), values.at([index]), std::slice::from_mut(value)) };
    }
    loaded
}
