//! What a caller can do wrong. "No room now" is never an error but a `None`; a broken law is a panic.

use crate::ids::{BlockId, Handle, PlanId};

/// A refused call. Nothing was changed by it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument outside its range.
    #[error("{argument}: expected {expected}, found {found}")]
    InvalidArgument {
        /// Name of the argument.
        argument: &'static str,
        /// What it must be.
        expected: String,
        /// What came.
        found: String,
    },
    /// An element of an argument outside its range.
    #[error("{argument}[{index}]: expected {expected}, found {found}")]
    InvalidElement {
        /// Name of the argument.
        argument: &'static str,
        /// Which element.
        index: usize,
        /// What it must be.
        expected: String,
        /// What came.
        found: String,
    },
    /// What is wrong with a sequence of a batch.
    #[error("sequences[{index}]: {error}")]
    InBatch {
        /// Which sequence.
        index: usize,
        /// What is wrong.
        error: Box<Error>,
    },
    /// A request that no empty pool could hold.
    #[error("request needs {needed} blocks at its longest, the pool has {usable} usable ones")]
    NeverFits {
        /// Blocks at the longest, all samples together.
        needed: u64,
        /// Blocks of the pool that can be handed out.
        usable: u64,
    },
    /// A request id that a live request has.
    #[error("request_id {0:?} belongs to a request that is still live")]
    DuplicateRequest(String),
    /// A handle that was never given out, or whose request is gone.
    #[error("handle {} names no live request", .0.get())]
    UnknownHandle(Handle),
    /// A sequence id that was never given out, or whose sequence is gone.
    #[error("sequence {0} is not live")]
    UnknownSequence(u64),
    /// A block id outside the pool, or the null block.
    #[error("block {} is not one of the blocks 1 to {last}", .block.get().cast_signed())]
    UnknownBlock {
        /// The id that came.
        block: BlockId,
        /// The largest id of the pool.
        last: u32,
    },
    /// A block that has no holder (left) was freed or touched.
    #[error("block {} is not held", .0.get())]
    NotHeld(BlockId),
    /// A pin that was never given out, or was taken away.
    #[error("pin {0} keeps no prefix")]
    UnknownPin(u64),
    /// The sequence is part of a plan in flight.
    #[error("sequence {0} is in a plan in flight: end the plan first")]
    SequenceInFlight(u64),
    /// A request is part of a plan in flight.
    #[error("handle {} is in a plan in flight: end the plan first", .0.get())]
    RequestInFlight(Handle),
    /// Only samples of a session that have finished go on with more tokens, or are given up by `free`.
    #[error("sequence {sample} of handle {} has not finished", .handle.get())]
    NotFinished {
        /// The request.
        handle: Handle,
        /// Its sample.
        sample: u32,
    },
    /// A plan behind the one that was to end stands on tokens that nobody told.
    #[error("sequence {0} is in a later plan, behind tokens that this one computed: append them before the commit")]
    UntoldTokens(u64),
    /// Plans end in the order in which they were made.
    #[error("plan {} cannot end now: the oldest plan in flight is {}", .found.get(), .oldest.get())]
    PlanOutOfOrder {
        /// The plan that was to end.
        found: PlanId,
        /// The plan that must end first.
        oldest: PlanId,
    },
    /// The plan was ended before, by a commit, a rollback, or the rollback of an earlier plan.
    #[error("plan {} is not in flight: it was committed, rolled back, or cancelled with an earlier plan", .0.get())]
    PlanNotInFlight(PlanId),
    /// As many plans are in flight as the configuration allows.
    #[error("{0} plans are in flight already (max_plans_in_flight): commit or roll back the oldest first")]
    TooManyPlans(u32),
    /// No plan is open for the call.
    #[error("no plan is in flight: call begin_plan first")]
    NoPlan,
    /// A transfer that was never begun, or that ended before.
    #[error("transfer {0} is not outstanding: it was never begun, or it ended before")]
    UnknownTransfer(i64),
    /// Blocks from a lookup for another sequence, or from one that other calls have made stale.
    #[error("the computed blocks are stale or of another sequence: call get_computed_blocks after any other change")]
    StaleComputedBlocks,
    /// Sizes for which there is no memory.
    #[error("{what}: no memory for {bytes} bytes")]
    OutOfMemory {
        /// What the memory is for.
        what: &'static str,
        /// How much was asked for.
        bytes: usize,
    },
    /// A combination that this version does not have.
    #[error("not supported: {0}")]
    Unsupported(String),
}

/// The result of a call that can be refused.
pub type Result<T> = std::result::Result<T, Error>;

/// An empty vector with room for `len` elements, where there is memory for them.
pub(crate) fn reserve<T>(what: &'static str, len: usize) -> Result<Vec<T>> {
    let mut vector = Vec::new();
    let bytes = len.saturating_mul(size_of::<T>());
    vector.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { what, bytes })?;
    Ok(vector)
}

pub(crate) fn invalid_element<T>(
    argument: &'static str,
    index: usize,
    expected: impl Into<String>,
    found: impl std::fmt::Display,
) -> Result<T> {
    Err(Error::InvalidElement { argument, index, expected: expected.into(), found: format!("{found}") })
}

pub(crate) fn invalid<T>(
    argument: &'static str,
    expected: impl Into<String>,
    found: impl std::fmt::Display,
) -> Result<T> {
    Err(Error::InvalidArgument { argument, expected: expected.into(), found: format!("{found}") })
}
