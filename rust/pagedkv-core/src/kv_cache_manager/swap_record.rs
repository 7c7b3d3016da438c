//! What is known of sequences that went out, or are outside, and how they come back.

use crate::host_pool::HostBlockId;
use crate::ids::{BlockId, NodeId};

/// A column whose block had left the window.
pub(super) const ABSENT: u32 = u32::MAX;

/// Where a block's contents are besides the device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Elsewhere {
    /// In the host tier.
    Host(HostBlockId),
    /// With whoever said so when the request was added, as this column of its tables.
    Outside { column: u32 },
}

/// A block of sequences that went out: what it was on the device, and its copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SwappedBlock {
    /// The null block for one that was never there.
    pub(crate) device: BlockId,
    /// The device block's epoch: while it stays, the contents are still there.
    pub(crate) epoch: u32,
    /// The cache group that it belongs to.
    pub(crate) group: u8,
    /// `None` where the copy failed.
    pub(crate) elsewhere: Option<Elsewhere>,
}

impl SwappedBlock {
    /// Takes its block of the host tier, if it has one.
    pub(crate) fn take_host(&mut self) -> Option<HostBlockId> {
        let Some(Elsewhere::Host(block)) = self.elsewhere else { return None };
        self.elsewhere = None;
        Some(block)
    }
}

/// A sequence that went out, by its residence then.
#[derive(Clone, Debug)]
pub(crate) struct SwappedSequence {
    pub(crate) sample: u32,
    pub(crate) sequence: u32,
    pub(crate) epoch: u32,
    /// The generation of the cache, or of its adapter, that its tokens were computed in.
    pub(super) generation: u32,
    /// Tokens whose keys and values went out and are good.
    pub(crate) len: u32,
    /// By cache group, the block of each column by its place in the record; [`ABSENT`] where there is none.
    pub(super) columns: Vec<Vec<u32>>,
}

/// Sequences that went out together. Forks share blocks, and each block is in the record once.
#[derive(Clone, Debug, Default)]
pub(crate) struct SwapRecord {
    pub(crate) blocks: Vec<SwappedBlock>,
    pub(crate) sequences: Vec<SwappedSequence>,
}

impl SwapRecord {
    /// Whether it is of [`KVCacheManager::record_of_outside`].
    pub(crate) fn is_outside(&self) -> bool {
        self.blocks.first().is_some_and(|block| matches!(block.elsewhere, Some(Elsewhere::Outside { .. })))
    }

    /// A plan in which a residence computed tokens from `before` on was undone: what it wrote is void, and a block of which
    /// it made its own copy goes with it. `multiple` tokens are whole blocks in every group.
    pub(crate) fn undo(&mut self, sequence: u32, epoch: u32, before: u32, multiple: u32) {
        let is_it = |found: &&mut SwappedSequence| found.sequence == sequence && found.epoch == epoch;
        for found in self.sequences.iter_mut().filter(is_it) {
            found.len = found.len.min(before - before % multiple);
        }
    }
}

/// A sequence that comes back: which of a record's, into which of the manager's, and how much of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Returning {
    pub(crate) entry: usize,
    pub(crate) index: usize,
    pub(crate) len: u32,
}

/// Where the contents of a returning block are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Nobody asked.
    Unknown,
    /// In a block of the device, on this node of the cache if it is on any.
    Device(BlockId, NodeId),
    Elsewhere,
}

/// How a record's blocks come back.
#[derive(Debug, Default)]
pub(crate) struct Return {
    pub(super) sources: Vec<Source>,
    /// Blocks that it takes from those that are available.
    pub(crate) num_needed: u32,
}

impl Return {
    /// Whether some blocks come from elsewhere than the device.
    pub(crate) fn has_copies(&self) -> bool {
        self.sources.contains(&Source::Elsewhere)
    }
}

/// A growth that was undone after its sequence had lost its blocks: the sequence, its residence then, and the computed
/// length before.
pub(crate) type LostGrowth = (u32, u32, u32);

/// A sequence whose blocks are not all there yet: the tokens that are, and its residence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) sequence: u32,
    pub(crate) epoch: u32,
    pub(crate) num_there: u32,
}

/// A block that a transfer fills: on the device, and by its place in the record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arriving {
    pub(crate) device: BlockId,
    pub(crate) block: u32,
}
