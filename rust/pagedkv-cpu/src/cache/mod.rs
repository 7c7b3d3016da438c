//! Operations that move keys and values without computing with them.

mod append;
mod append_packed;
mod copy;
mod gather;
mod move_kv;
mod pairs;
mod stream;
mod swap;
mod table;

pub use append::{Scales, append_kv};
pub use copy::copy_blocks;
pub use gather::{gather_kv, num_gathered_tokens};
pub use move_kv::move_kv;
pub use swap::swap_blocks;
pub use table::update_block_table;
