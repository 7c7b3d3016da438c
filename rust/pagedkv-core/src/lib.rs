//! The bookkeeping of a paged KV cache.

mod block_list;
pub mod block_pool;
pub mod config;
mod error;
mod identity;
mod ids;
mod invariants;
pub mod kv_cache_manager;
mod prefix_cache;

pub use block_list::BlockState;
pub use block_pool::BlockPool;
pub use config::{CacheConfig, GroupSpec, Policy, SchedulerConfig};
pub use error::{Error, Result};
pub use identity::{Identity, ImageSpan, RootKey};
pub use ids::{BlockId, Handle, NULL_BLOCK, PlanId, SequenceId};
pub use invariants::BrokenLaw;
pub use kv_cache_manager::{AllocatedSlots, BlockCopy, ComputedBlocks, KVCacheManager};
