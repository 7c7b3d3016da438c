//! Paged attention and cache operations on the CPU, over raw strided views.
//!
//! The only home of `unsafe` arithmetic in the workspace. A [`View`] is made once, unsafely, by whoever knows that the
//! memory is alive; every operation that takes views is then a safe function. It checks all of its arguments, the block
//! ids and slots included, before it writes anything.
//!
//! Results never depend on the number of threads: work is cut by the lengths of the batch alone, and partial results
//! are merged in a fixed order.

mod attention;
mod cache;
mod convert;
mod dims;
mod error;
mod math;
mod threads;
mod view;

pub use attention::{AttentionOptions, Batch, Operands, paged_attention};
pub use cache::{append_kv, copy_blocks, gather_kv, update_block_table};
pub use dims::{BLOCK_TABLE, CACHE, GROUPED_BLOCK_TABLE, KEYS, LSE, POOL, QUERIES, VALUES_OUT, shape_text};
pub use error::{Error, Result};
pub use view::{DType, Integer, View};
