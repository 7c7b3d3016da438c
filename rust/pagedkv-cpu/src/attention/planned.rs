//! A batch that is cut once and attended to in many layers.

use super::check::{check_operands, check_sizes};
use super::plan::{Cut, Plan};
use super::{AttentionOptions, Batch, Operands, attend};
use crate::dims::shape_text;
use crate::error::{Error, Result};
use crate::isa::Isa;

/// What layers must have in common to share a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads, a multiple of the KV heads.
    pub num_q_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements per head, a multiple of 8 up to 512.
    pub head_dim: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Keys that a query sees, itself included.
    pub sliding_window: Option<usize>,
}

/// One step's batch, checked and cut into work items.
///
/// It knows no array of a layer, so every layer of that shape can run it, also in several threads at once. The index
/// arrays that it was made from may change or go afterwards.
///
/// ```
/// use pagedkv_cpu::{AttentionOptions, AttentionPlan, AttentionShape, Batch, DType, Operands, View};
///
/// let (mut cache, mut table) = (vec![1.0_f32; 4 * 16 * 8], [3_i32, 1]);
/// let (mut q, mut out) = (vec![1.0_f32; 8], vec![0.0_f32; 8]);
/// // SAFETY: the arrays outlive their uses below, cover the shapes, and are used by nobody else meanwhile.
/// let block_table = unsafe { View::new(table.as_mut_ptr().cast(), DType::I32, [1, 2], [2, 1]) };
/// let batch = Batch { block_table, rows: None, seq_lens: &[20], query_start_loc: &[0, 1], tree_mask: None };
/// let shape = AttentionShape { num_q_heads: 1, num_kv_heads: 1, head_dim: 8, block_size: 16, sliding_window: None };
/// let plan = AttentionPlan::new(&batch, &shape, 1)?;
/// // SAFETY: as above.
/// let operands = unsafe {
///     let layer = View::new(cache.as_mut_ptr().cast(), DType::F32, [4, 1, 16, 8], [128, 128, 8, 1]);
///     let row = |data: *mut f32| View::new(data.cast(), DType::F32, [1, 1, 8], [8, 8, 1]);
///     Operands::new(row(q.as_mut_ptr()), layer, layer, row(out.as_mut_ptr()))
/// };
/// plan.run(&operands, &AttentionOptions::default())?;
/// assert_eq!(out, [1.0; 8]);
/// # Ok::<(), pagedkv_cpu::Error>(())
/// ```
#[derive(Debug)]
pub struct AttentionPlan {
    pub(super) plan: Plan,
    /// Blocks that a cache must have: one more than the highest that is named.
    min_blocks: usize,
    isa: Isa,
}

impl AttentionPlan {
    /// Cuts a batch for layers of a shape and for so many threads.
    ///
    /// # Errors
    ///
    /// Sizes out of range, lengths beyond the table, negative block ids, and an instruction set in the environment that
    /// this processor does not have.
    ///
    /// # Complexity
    ///
    /// O(blocks + i log i) for i work items.
    pub fn new(batch: &Batch<'_>, shape: &AttentionShape, threads: usize) -> Result<Self> {
        let cut = cut(shape, threads)?;
        Self::of(Plan::new(batch, &cut)?)
    }

    pub(super) fn of(plan: Plan) -> Result<Self> {
        let highest = plan.sequences.iter().flat_map(|sequence| &sequence.blocks).max();
        let min_blocks = highest.map_or(0, |block| *block as usize + 1);
        Ok(Self { plan, min_blocks, isa: Isa::choose()? })
    }

    /// The shape that it was made for.
    pub fn shape(&self) -> AttentionShape {
        let Cut { num_kv_heads, group, head_dim, block_size, sliding_window, .. } = self.plan.cut;
        AttentionShape { num_q_heads: num_kv_heads * group, num_kv_heads, head_dim, block_size, sliding_window }
    }

    /// Query tokens of all sequences.
    pub fn num_tokens(&self) -> usize {
        self.plan.num_tokens
    }

    /// Computes the attention of one layer, as [`paged_attention`](crate::paged_attention) does; the window is the
    /// plan's, and so are the instructions unless `options` name some.
    ///
    /// # Errors
    ///
    /// As [`paged_attention`](crate::paged_attention), and arrays of another shape than the plan's, fewer query tokens
    /// than it has, or fewer blocks than it names. Nothing is written then.
    ///
    /// # Complexity
    ///
    /// `O(num_q_heads * head_dim)` per pair of a query and a key that it sees.
    pub fn run(&self, operands: &Operands, options: &AttentionOptions) -> Result<()> {
        let options = &AttentionOptions { sliding_window: self.plan.cut.sliding_window, ..*options };
        let isa = if options.isa.is_some() { Isa::asked_or_chosen(options.isa)? } else { self.isa };
        let threads = self.plan.cut.num_threads;
        self.check(operands, &check_operands(operands, options, threads)?)?;
        attend(operands, options, &self.plan, isa, threads);
        Ok(())
    }

    fn check(&self, operands: &Operands, found: &Cut) -> Result<()> {
        let cut = &self.plan.cut;
        let (q_heads, kv_heads) = (cut.num_kv_heads * cut.group, cut.num_kv_heads);
        let is_layer = [found.num_kv_heads, found.block_size] == [kv_heads, cut.block_size];
        if !is_layer || found.num_blocks < self.min_blocks {
            let expected = format!(
                "(at least num_blocks={}, {kv_heads}, {}, {}), as the plan says",
                self.min_blocks, cut.block_size, cut.head_dim
            );
            return Err(refusal("k_cache", expected, &operands.k_cache.shape()));
        }
        if [found.group, found.head_dim] != [cut.group, cut.head_dim] || found.num_tokens < self.plan.num_tokens {
            let num_tokens = self.plan.num_tokens;
            let expected = format!("(at least num_tokens={num_tokens}, {q_heads}, {}), as the plan says", cut.head_dim);
            return Err(refusal("q", expected, &operands.q.shape()));
        }
        Ok(())
    }
}

/// The sizes of a shape, for any number of tokens and blocks.
pub(super) fn cut(shape: &AttentionShape, threads: usize) -> Result<Cut> {
    let AttentionShape { num_q_heads, num_kv_heads, head_dim, block_size, sliding_window } = *shape;
    let queries = [usize::MAX, num_q_heads, head_dim];
    let cache = [1 << 31, num_kv_heads, block_size, head_dim];
    check_sizes(queries, cache, sliding_window, threads)
}

fn refusal(argument: &'static str, expected: String, found: &[usize]) -> Error {
    Error::Shape { argument, expected, found: shape_text(found) }
}
