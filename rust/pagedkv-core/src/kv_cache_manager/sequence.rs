//! One sequence of a manager.

use std::sync::Arc;

use smallvec::SmallVec;

use super::moves::Moves;
use crate::config::Retention;
use crate::identity::{Identity, Tokens};
use crate::ids::{BlockId, NULL_BLOCK, NodeId, PlanId};

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

/// The blocks of a sequence in one cache group, by column.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) blocks: Vec<BlockId>,
    /// Columns that hold the null block: what left the window, and what a hit never needed.
    pub(crate) num_null: u32,
    /// The first columns, which left the window for good.
    pub(crate) num_left: u32,
}

impl Table {
    pub(crate) const fn len(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Columns with a block.
    pub(crate) const fn num_held(&self) -> u32 {
        self.len() - self.num_null
    }

    pub(crate) fn held(&self) -> impl DoubleEndedIterator<Item = BlockId> {
        self.blocks.iter().copied().filter(|&block| block != NULL_BLOCK)
    }

    /// Takes the last column away; answers its block, if it has one.
    pub(super) fn pop(&mut self) -> Option<BlockId> {
        let block = self.blocks.pop().expect("the caller counted the columns");
        self.num_left = self.num_left.min(self.len());
        self.num_null -= u32::from(block == NULL_BLOCK);
        (block != NULL_BLOCK).then_some(block)
    }
}

impl Sequence {
    /// The first position whose keys and values wait for a move, if there is one.
    pub(crate) fn first_moved(&self) -> Option<u32> {
        self.moves.as_ref().map(|moves| moves.from)
    }

    /// Whether no plan in flight names the sequence.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// The length that nothing takes back, short of a truncation: computed by plans that committed, and at least one token
    /// less than is known. Guesses that were computed may yet be rejected, and a session computes its last token again.
    pub(crate) fn committed_len(&self) -> u32 {
        self.num_computed.min(self.tokens.len().saturating_sub(1))
    }
}

/// One sequence: its tokens, its block tables, and how far it is computed.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// One per cache group.
    pub(crate) tables: SmallVec<[Table; 1]>,
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
    /// Accepted guesses that the next plan moves to their places.
    pub(super) moves: Option<Box<Moves>>,
    /// Whether the sequence reads and feeds the prefix cache.
    pub(crate) uses_cache: bool,
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
