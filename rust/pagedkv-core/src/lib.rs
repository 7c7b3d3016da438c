//! The bookkeeping of a paged KV cache: which block of the cache holds which tokens, who shares it, what can be hit,
//! and which tokens run in the next step. No keys, no values, no device: plain arrays for whoever owns those.
//!
//! Three levels, each usable without the ones above it:
//!
//! - [`BlockPool`]: blocks with reference counts and the tree of cached prefixes;
//! - [`KVCacheManager`]: sequences that grow, fork and are cut, in plans that are committed or rolled back;
//! - [`Scheduler`]: continuous batching of requests, one [`StepPlan`] of flat arrays per step.
//!
//! ```
//! use pagedkv_core::{CacheConfig, NewRequest, Scheduler, SchedulerConfig};
//!
//! let mut scheduler = Scheduler::new(&CacheConfig::new(64), &SchedulerConfig::default())?;
//! scheduler.add_request(NewRequest::new("r1", (0..40).collect(), 3))?;
//! let mut sampled = 0;
//! while scheduler.num_unfinished_requests() > 0 {
//!     let plan = scheduler.schedule()?;
//!     let tokens = vec![7; plan.sizes().num_samples as usize]; // what a model would sample
//!     sampled += scheduler.commit(plan.id(), &tokens)?.handles.len();
//! }
//! assert_eq!(sampled, 3);
//! assert_eq!(scheduler.manager().usage(), 0.0);
//! # Ok::<(), pagedkv_core::Error>(())
//! ```
//!
//! # Embedding
//!
//! Whoever owns the memory keeps one block table and does, for each plan, what its arrays say: write
//! [`TableUpdates`](step_plan::Field::TableUpdates), copy [`Copies`](step_plan::Field::Copies), run the model on
//! [`TokenIds`](step_plan::Field::TokenIds), whose keys and values go to
//! [`SlotMapping`](step_plan::Field::SlotMapping), and give [`Scheduler::commit`] one token per row of
//! [`SampleRows`](step_plan::Field::SampleRows). A plan that did not run goes to [`Scheduler::rollback`]. One thread
//! steps; others leave requests and aborts in an [`Inbox`] and never wait for it. `examples/serve_loop.rs` is a whole
//! server of 200 lines: clients on threads, streaming, a stop string. Whoever has a scheduler already takes
//! [`KVCacheManager`] alone, and whoever has block tables too takes [`BlockPool`].
//!
//! Laws: what the bookkeeping promises is written once, as functions in `invariants.rs`, and
//! [`Scheduler::check_integrity`] runs them all. "No room now" is a `None`, a caller's mistake is an [`Error`] that
//! changed nothing, and a broken law is a panic. The crate has no `unsafe`, no clock and no randomness: the same calls
//! give the same plans.

#![forbid(unsafe_code)]

mod block_list;
pub mod block_pool;
mod cache_layout;
pub mod chain_hash;
pub mod config;
pub mod device_work;
mod error;
pub mod events;
mod eviction;
mod expiry;
mod extra_keys;
mod host_pool;
mod identity;
mod ids;
mod invariants;
pub mod kv_cache_manager;
mod prefix_cache;
mod prefix_node;
mod residency;
pub mod scheduler;
pub mod split_kv;
pub mod stats;
pub mod step_plan;
mod table_export;

pub use block_list::BlockState;
pub use block_pool::BlockPool;
pub use cache_layout::{CacheLayout, TableSpec, choose_layer_slots};
pub use chain_hash::{BlockHash, ChainHasher, ExtraKey, HashAlgorithm, LoraName};
pub use config::{CacheConfig, EvictionPolicy, GroupSpec, Policy, PreemptionMode, Retention, SchedulerConfig};
pub use error::{Error, Result};
pub use events::{BlockRemoved, BlockStored, EventConfig, KVCacheEvent, KVCacheSnapshot, KVEventBatch};
pub use identity::{Identity, ImageSpan, RootKey};
pub use ids::{BlockId, Handle, NULL_BLOCK, PlanId, SequenceId};
pub use invariants::BrokenLaw;
pub use kv_cache_manager::{AllocatedSlots, BatchSlots, BlockCopy, ComputedBlocks, Growths, KVCacheManager, PinId};
pub use residency::ResidencyStats;
pub use scheduler::{
    Explanation, FinishReason, FinishedRequest, Fork, Inbox, LimitsUpdate, NewRequest, Progress, Reason, RequestStats,
    RequestTotals, Scheduler, SchedulerStats, Snapshot, StepResult, TenantName,
};
pub use stats::{Histogram, PrefixCacheStats};
pub use step_plan::{Change, Changes, StepPlan};
