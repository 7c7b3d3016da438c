//! Attention over blocks: decode, prefill, and both in one batch.
//!
//! The planner of `pagedkv-core` cuts the batch into items of (sequence, queries, KV heads, keys). Items of few rows read
//! keys and values once, where they lie ([`few_rows`]); items of many rows lay them out and multiply matrices
//! ([`many_rows`]). Long sequences with few queries are cut along the keys as well, and the pieces are merged in order
//! ([`call`]). Cuts fall at fixed positions, so a result depends neither on the number of threads nor on the rest of the
//! batch.

mod batch;
mod buffer;
mod call;
mod cells;
mod check;
mod few_rows;
mod hidden;
mod many_rows;
mod merge_states;
mod packed;
mod plan;
mod planned;
mod rows;
mod tokens;

pub use batch::{Batch, TreeMask};
pub(crate) use batch::{BlockTable, check_seq_lens};
pub use merge_states::{State, merge_states};
pub use planned::{AttentionPlan, AttentionShape};

use std::cell::RefCell;

use crate::error::Result;
use crate::isa::Isa;
use crate::kernels::{Kernels, Rows};
use crate::threads;
use crate::view::View;
use buffer::Buffer;
use call::{Call, Path, Workspace};
use plan::Plan;

/// `head_dim` is a multiple of this.
pub const HEAD_DIM_STEP: usize = 8;
const MAX_HEAD_DIM: usize = 512;

/// The arrays of one attention call.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// Queries, `(num_tokens, num_q_heads, head_dim)`.
    pub q: View<3>,
    /// Keys of one layer, `(num_blocks, num_kv_heads, block_size, head_dim)`, FP8 included.
    pub k_cache: View<4>,
    /// Values of one layer, of the same shape.
    pub v_cache: View<4>,
    /// The result, of the shape of `q`.
    pub out: View<3>,
    /// Natural logarithm of the sum of exponentials, float32 `(num_tokens, num_q_heads)`.
    pub lse: Option<View<2>>,
    /// A further score of each query head, `(num_q_heads,)`, that takes a share of the weights and has no value.
    pub sinks: Option<View<1>>,
    /// The slope of each query head, `(num_q_heads,)`: `slope * (key position - query position)` is added to the score.
    /// A token of a draft tree stands as far behind the context as it sees other tokens of the tree.
    pub alibi_slopes: Option<View<1>>,
    /// What stored FP8 keys must be multiplied by, float32 `(1,)` or `(num_kv_heads,)`; 1 by default.
    pub k_scale: Option<View<1>>,
    /// The same for values.
    pub v_scale: Option<View<1>>,
}

impl Operands {
    /// Those that every call needs.
    pub const fn new(q: View<3>, k_cache: View<4>, v_cache: View<4>, out: View<3>) -> Self {
        let (lse, sinks, alibi_slopes, k_scale, v_scale) = (None, None, None, None, None);
        Self { q, k_cache, v_cache, out, lse, sinks, alibi_slopes, k_scale, v_scale }
    }
}

/// How scores become weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionOptions {
    /// Factor on `q . k`; `1 / sqrt(head_dim)` by default.
    pub softmax_scale: Option<f32>,
    /// Keys that a query sees, itself included: those at positions above `position - sliding_window`.
    pub sliding_window: Option<usize>,
    /// Scores `s` become `soft_cap * tanh(s / soft_cap)`, after the scale.
    pub soft_cap: Option<f32>,
    /// The instructions to use; by default those that [`Isa::choose`] finds.
    pub isa: Option<Isa>,
}

thread_local! {
    /// Rows that wait to be merged, of the last call that this thread made.
    static WORKSPACE: RefCell<Buffer> = RefCell::default();
}

/// Causal attention of the queries in `operands.q` over the cached keys and values that `batch` names.
///
/// Query `i` of a sequence with `n` queries and length `L` sits at position `L - n + i` and sees the keys up to itself.
/// A query that sees no key gives 0 and an `lse` of minus infinity; so does a token that belongs to no sequence.
/// A sink is neither scaled nor capped, and counts in the `lse` of a query that sees a key.
/// Slots that no query sees are never read into the result, whatever they hold.
///
/// # Errors
///
/// Shapes that disagree, element types that are not computed with, rows that are not contiguous, outputs that overlap
/// themselves or an input, options out of range, lengths beyond the table and block ids outside the cache. Nothing is
/// written then.
///
/// # Complexity
///
/// `O(num_q_heads * head_dim)` per pair of a query and a key that it sees, `O(blocks)` to check the table.
pub fn paged_attention(
    operands: &Operands,
    batch: &Batch<'_>,
    options: &AttentionOptions,
    threads: usize,
) -> Result<()> {
    let isa = Isa::asked_or_chosen(options.isa)?;
    let cut = check::check_operands(operands, options, threads)?;
    let plan = Plan::new(batch, &cut)?;
    attend(operands, options, &plan, isa, threads);
    Ok(())
}

/// Computes what was checked.
fn attend(operands: &Operands, options: &AttentionOptions, plan: &Plan, isa: Isa, threads: usize) {
    let is_packed = operands.k_cache.is_packed();
    let dtypes = [operands.q.dtype(), operands.k_cache.dtype(), operands.v_cache.dtype()];
    let path = |rows| Path::new(isa, Kernels::new(isa, rows, dtypes, is_packed), plan.cut.head_dim);
    let paths = [Rows::Few, Rows::Many].map(path);
    WORKSPACE.with_borrow_mut(|workspace| {
        let rows = workspace.floats(plan.split.num_partial_rows * paths[0].row_len()).as_mut_ptr();
        run(&Call::new(operands, options, plan, paths, Workspace { rows }), threads);
    });
}

fn run(call: &Call<'_>, threads: usize) {
    let (plan, cut) = (call.plan, &call.plan.cut);
    let split = &plan.split;
    threads::for_each(threads, split.num_scores * cut.head_dim, split.items.len(), |index| {
        let item = &split.items[index];
        if plan.sequences[item.tile.sequence].is_split {
            few_rows::run(call, item);
        } else {
            many_rows::run(call, item);
        }
    });
    threads::for_each(threads, split.num_partial_rows * cut.head_dim, split.merges.len(), |index| {
        call.merge(&split.merges[index]);
    });
    call.clear_tokens(plan.num_tokens..call.operands.out.shape()[0]);
}
