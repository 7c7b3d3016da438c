//! What plans the steps: the scheduler of this package and those that the paper compares.

mod beams;
mod orca;
mod paged;
mod paper;
mod static_batch;

pub use orca::{Estimate, Orca};
pub use paged::Paged;
pub use paper::{Paper, PaperPreemption};
pub use static_batch::StaticBatch;

use crate::cost::Work;
use crate::error::{Result, invalid};

/// A request that ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ended {
    /// Its place in the workload.
    pub index: u32,
    /// When its first token was there.
    pub first_token: f64,
    /// Prompt tokens that came from a cache.
    pub cached_tokens: u32,
}

/// What memory holds during a step, in slots for one token each unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Holdings {
    /// Running requests.
    pub num_requests: u32,
    /// Their sequences.
    pub num_seqs: u32,
    /// Tokens of sequences, each sequence counted on its own.
    pub tokens: u64,
    /// Slots kept for tokens that will come.
    pub reserved: u64,
    /// Slots kept for tokens that will never come, or behind the last token of a block.
    pub internal: u64,
    /// Slots of the pool.
    pub total: u64,
    /// Blocks in the tables of sequences, each table counted on its own; 0 for systems without blocks.
    pub logical_blocks: u64,
    /// Blocks that hold them.
    pub physical_blocks: u64,
}

/// Requests that lost their memory on the way, counted each time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preemptions {
    /// To be computed again.
    pub recomputed: u64,
    /// To come back from the host.
    pub swapped: u64,
}

/// A system that serves requests step by step.
pub trait System {
    /// Takes up a request of the workload, which arrived just now or before.
    ///
    /// # Errors
    /// What the system refuses.
    fn add(&mut self, index: u32) -> Result<()>;

    /// Requests that were added and have not ended.
    fn num_unfinished(&self) -> usize;

    /// Plans a step at `now` and says what it does.
    ///
    /// # Errors
    /// A mistake in the configuration that shows only now.
    fn begin_step(&mut self, now: f64) -> Result<Work>;

    /// Ends the step at `now`, every sequence with a token more, and lists the requests that ended.
    ///
    /// # Errors
    /// As [`Self::begin_step`].
    fn end_step(&mut self, now: f64, ended: &mut Vec<Ended>) -> Result<()>;

    /// What memory holds between the two.
    fn holdings(&self) -> Holdings;

    /// What was preempted so far.
    fn preemptions(&self) -> Preemptions;
}

/// Sizes that the systems of the paper have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Blocks of the pool.
    pub num_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Sequences that may run at once.
    pub max_num_seqs: u32,
    /// Tokens of a step.
    pub max_num_batched_tokens: u32,
    /// Longest sequence.
    pub max_model_len: u32,
}

impl Limits {
    /// The paper's: OPT-13B on an A100 with 40 GB, whose cache has 15,728 slots.
    pub const OPT_13B_A100: Self =
        Self { num_blocks: 983, block_size: 16, max_num_seqs: 256, max_num_batched_tokens: 2560, max_model_len: 2048 };

    /// # Errors
    /// [`crate::SimError::InvalidArgument`] for a limit of 0, or a block size that is larger than the pool's.
    pub fn validate(&self) -> Result<()> {
        for (argument, value) in [
            ("num_blocks", self.num_blocks),
            ("block_size", self.block_size),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_model_len", self.max_model_len),
        ] {
            if value == 0 {
                return invalid(argument, "at least 1", value);
            }
        }
        if self.num_blocks.checked_mul(self.block_size).is_none_or(|slots| slots > i32::MAX.cast_unsigned()) {
            return invalid("num_blocks", "num_blocks x block_size below 2^31", self.num_blocks);
        }
        Ok(())
    }
}
