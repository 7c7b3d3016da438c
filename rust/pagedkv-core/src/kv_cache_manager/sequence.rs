//! One sequence of a manager.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::config::Retention;
use crate::identity::{Identity, Tokens};
use crate::ids::{BlockId, NodeId, PlanId};
use crate::prefix_cache::PrefixCache;

/// What the block into which a sequence writes next may be besides its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Tail {
    /// Nobody else's, and not cached.
    #[default]
    Own,
    /// Held by others, or cached.
    Shared,
    /// Held by others, or cached; and what lies behind the sequence's end may still be needed by those who let go of it
    /// in a plan in flight: the plan reads it, or its rollback gives it back.
    Cut,
}

/// One sequence: its tokens, its block table, and how far it is computed.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) table: Vec<BlockId>,
    pub(crate) tokens: Tokens,
    /// Tokens computed by plans that committed.
    pub(crate) num_computed: u32,
    /// Tokens computed when every plan in flight has committed.
    pub(crate) num_scheduled: u32,
    /// Plans in flight that name the sequence, oldest first, with the computed length after each.
    pub(crate) in_flight: SmallVec<[(PlanId, u32); 2]>,
    /// The last scheduled tokens are so many guesses of the newest plan, of which nobody has said whether they hold.
    pub(crate) num_drafts: u32,
    /// The plan of the latest guesses, and their growth in it. The sequence grows no more there, or two tokens of the plan
    /// would share a slot.
    pub(super) drafts_at: (PlanId, u32),
    /// Where the sequence's prefixes start; held while the sequence lives.
    pub(crate) root: NodeId,
    /// The node of the first `path_len` blocks; the root at 0.
    pub(crate) path: NodeId,
    pub(crate) path_len: u32,
    /// What the block that is written next may be besides the sequence's own.
    pub(super) tail: Tail,
    /// Whether the sequence reads and feeds the prefix cache.
    pub(super) uses_cache: bool,
    pub(super) identity: Arc<Identity>,
    /// How its blocks are to be kept in the cache.
    pub(crate) retention: Option<Retention>,
    /// Rises whenever the sequence loses all its blocks, so that a plan's record of earlier ones is void.
    pub(crate) epoch: u32,
    pub(super) generation: u32,
    pub(crate) is_live: bool,
    /// A session holds it: it is in no block table that a kernel reads.
    pub(crate) is_kept: bool,
}

impl Sequence {
    /// Takes the path back to its first `len` blocks, if it goes further.
    pub(super) fn rewind(&mut self, prefixes: &PrefixCache, len: u32) {
        while self.path_len > len {
            self.path = prefixes.node(self.path).parent;
            self.path_len -= 1;
        }
    }
}
