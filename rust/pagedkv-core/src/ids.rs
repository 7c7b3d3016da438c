//! Names of things. Each is a number with a type of its own, so that a block cannot pass for a node.

/// A physical block of the pool. Block 0 is the null block and is never handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct BlockId(u32);

/// The block that stands for "no block": padding, and what left a sliding window.
pub const NULL_BLOCK: BlockId = BlockId(0);

impl BlockId {
    /// The block with this index in the pool.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Index in the pool, as kernels see it.
    pub const fn get(self) -> u32 {
        self.0
    }

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A prefix in the cache: see [`crate::prefix_cache`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeId(pub(crate) u32);

/// "No node": node 0 is never used.
pub(crate) const NO_NODE: NodeId = NodeId(0);

impl NodeId {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A step plan. Numbers rise by one and are never used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlanId(u64);

impl PlanId {
    /// The plan with this number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }

    pub(crate) const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// A request. Handles rise by one and are never used again, so a stale one cannot name a newer request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(i64);

impl Handle {
    /// The request with this number.
    pub const fn new(number: i64) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn get(self) -> i64 {
        self.0
    }
}

/// A sequence of a [`crate::KVCacheManager`]: an index, tagged with a generation that makes stale ids an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl SequenceId {
    /// One number for both halves, for callers that keep ids in plain integers.
    pub const fn to_bits(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    /// The inverse of [`Self::to_bits`].
    pub const fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}
