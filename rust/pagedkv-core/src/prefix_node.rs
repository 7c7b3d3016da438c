//! A node of the prefix tree: half a cache line.

use crate::ids::{BlockId, NO_NODE, NULL_BLOCK, NodeId};

/// A bit of [`Node::hash`] that the index looks at neither for the slot nor for the tag.
const FIRST_IS_COMMITTED: u64 = 1 << 48;

#[derive(Clone, Debug, Default)]
#[repr(align(32))]
pub(crate) struct Node {
    pub(crate) parent: NodeId,
    /// The child that last continued this node.
    pub(crate) last_child: NodeId,
    /// Children, and for roots also the sequences that start here.
    pub(crate) num_children: u32,
    pub(crate) first_block: BlockId,
    /// Interned extra key of the block's span; 0 for plain text.
    pub(crate) extra: u32,
    pub(crate) generation: u32,
    /// What the index knows the node by, 0 while it does not; in one bit, whether the first block is committed.
    hash: u64,
}

const _: () = assert!(size_of::<Node>() == 32);

impl Node {
    /// The key under which the index may keep a node with this hash.
    pub(crate) const fn key_of(hash: u64) -> u64 {
        let key = hash & !FIRST_IS_COMMITTED;
        if key == 0 { 1 } else { key }
    }

    pub(crate) const fn new(parent: NodeId, extra: u32, generation: u32) -> Self {
        Self { parent, last_child: NO_NODE, num_children: 0, first_block: NULL_BLOCK, extra, generation, hash: 0 }
    }

    /// What the index knows the node by; 0 while it does not.
    pub(crate) const fn key(&self) -> u64 {
        self.hash & !FIRST_IS_COMMITTED
    }

    pub(crate) fn set_first_is_committed(&mut self, is_committed: bool) {
        self.hash = self.key() | if is_committed { FIRST_IS_COMMITTED } else { 0 };
    }

    pub(crate) const fn first_is_committed(&self) -> bool {
        self.hash & FIRST_IS_COMMITTED != 0
    }

    pub(crate) const fn set_key(&mut self, key: u64) {
        self.hash = key | (self.hash & FIRST_IS_COMMITTED);
    }
}
