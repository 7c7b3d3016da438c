//! Paged attention and cache operations on the CPU, over raw strided views.
//!
//! The only home of `unsafe` arithmetic in the workspace. A [`View`] is made once, unsafely, by whoever knows that the
//! memory is alive; every operation that takes views is then a safe function. It checks all of its arguments, the block
//! ids and slots included, before it writes anything.
//!
//! Results never depend on the number of threads: work is cut by the lengths of the batch alone, and partial results
//! are merged in a fixed order.
//!
//! ```
//! use pagedkv_cpu::{AttentionOptions, Batch, DType, Operands, View, paged_attention};
//!
//! let mut cache = vec![1.0_f32; 4 * 16 * 8]; // 4 blocks, 1 KV head, 16 slots, 8 elements
//! let (mut q, mut out) = (vec![1.0_f32; 8], vec![0.0_f32; 8]);
//! let mut table = [3_i32, 1];
//! // SAFETY: the vectors outlive the call, cover the shapes, and are used by nobody else meanwhile.
//! let operands = unsafe {
//!     let k_cache = View::new(cache.as_mut_ptr().cast(), DType::F32, [4, 1, 16, 8], [128, 128, 8, 1]);
//!     let row = |data: *mut f32| View::new(data.cast(), DType::F32, [1, 1, 8], [8, 8, 1]);
//!     let (q, out) = (row(q.as_mut_ptr()), row(out.as_mut_ptr()));
//!     Operands::new(q, k_cache, k_cache, out)
//! };
//! // SAFETY: as above.
//! let block_table = unsafe { View::new(table.as_mut_ptr().cast(), DType::I32, [1, 2], [2, 1]) };
//! let batch = Batch { block_table, rows: None, seq_lens: &[20], query_start_loc: &[0, 1], tree_mask: None };
//! paged_attention(&operands, &batch, &AttentionOptions::default(), 1)?;
//! assert_eq!(out, [1.0; 8]);
//! # Ok::<(), pagedkv_cpu::Error>(())
//! ```

mod attention;
mod cache;
mod convert;
mod dims;
mod error;
mod fp8;
mod isa;
mod kernels;
mod openmp;
mod packed_keys;
mod row_ops;
mod simd;
mod threads;
mod view;

pub use attention::{
    AttentionOptions, AttentionPlan, AttentionShape, Batch, HEAD_DIM_STEP, Operands, State, TreeMask, merge_states,
    paged_attention,
};
pub use cache::{
    Scales, append_kv, copy_blocks, gather_kv, move_kv, num_gathered_tokens, swap_blocks, update_block_table,
};
pub use dims::{
    BLOCK_TABLE, CACHE, GROUPED_BLOCK_TABLE, HEADS, KEYS, LSE, POOL, QUERIES, ROTARY, ROWS, SCORES, SINKS, VALUES_OUT,
    shape_text,
};
pub use error::{Error, Result};
pub use isa::{ISA_VARIABLE, Isa};
pub use openmp::note_process;
pub use packed_keys::GROUP_TOKENS as PACKED_TOKENS;
pub use row_ops::{draw_tokens, rms_norm, rotary_embedding};
pub use view::{DType, Integer, View, are_distinct, extent};
