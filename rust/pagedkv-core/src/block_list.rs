//! Blocks, the intrusive lists that run through them, and the stack of free ones.
//!
//! A block's whole record is one 64-byte cache line; every list operation is O(1) and allocates nothing.

use crate::error::{Result, reserve};
use crate::ids::{BlockId, NO_NODE, NULL_BLOCK, NodeId, PlanId};

/// Where a block is in its life. The null block is never in any of these and stays `Null`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// The null block.
    Null,
    /// Nobody holds it and it holds nothing.
    Free,
    /// At least one table entry or typed holder names it.
    Held,
    /// Nobody holds it; it can be hit, or be reused when the free list is empty.
    Cached,
    /// Nobody holds it, and a plan in flight or a transfer may still read or write it.
    Fenced,
}

#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct Block {
    pub(crate) ref_count: u32,
    pub(crate) state: BlockState,
    /// The tokens of `node` are in the block, not merely on their way.
    pub(crate) committed: bool,
    /// A request took it from the cache since it was filled.
    pub(crate) was_hit: bool,
    /// Among the evictable blocks: higher levels go later.
    pub(crate) level: u8,
    /// What requests asked for its contents, from 0 to 100.
    pub(crate) priority: Option<u8>,
    /// The cache group whose tokens the block holds, while it is held or cached.
    pub(crate) group: u8,
    prev: BlockId,
    next: BlockId,
    /// Where a free block lies in the stack.
    position: u32,
    /// The prefix whose last tokens the block holds.
    pub(crate) node: NodeId,
    /// Neighbours among the blocks of the same node.
    pub(crate) twin_prev: BlockId,
    pub(crate) twin_next: BlockId,
    /// The newest plan that named the block when a holder let go of it.
    pub(crate) fence: PlanId,
    /// Counts allocations, and takeovers by a sequence that writes where others have read: while it stays, what the
    /// block held is still there.
    pub(crate) epoch: u32,
    /// Transfers that read or write the block.
    pub(crate) num_transfers: u32,
}

const _: () = assert!(size_of::<Block>() == 64);

impl Block {
    pub(crate) const fn new(state: BlockState) -> Self {
        Self {
            ref_count: 0,
            state,
            committed: false,
            was_hit: false,
            level: 0,
            priority: None,
            group: 0,
            prev: NULL_BLOCK,
            next: NULL_BLOCK,
            position: 0,
            node: NO_NODE,
            twin_prev: NULL_BLOCK,
            twin_next: NULL_BLOCK,
            fence: PlanId::new(0),
            epoch: 0,
            num_transfers: 0,
        }
    }
}

/// A doubly linked list through the blocks of one pool; a block is in at most one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BlockList {
    head: BlockId,
    tail: BlockId,
    len: u32,
}

impl BlockList {
    pub(crate) const fn len(&self) -> u32 {
        self.len
    }

    /// The block at the front; the null block if the list is empty.
    pub(crate) const fn first(&self) -> BlockId {
        self.head
    }

    pub(crate) fn push_front(&mut self, blocks: &mut [Block], id: BlockId) {
        let old = self.head;
        blocks[id.index()].prev = NULL_BLOCK;
        blocks[id.index()].next = old;
        if old == NULL_BLOCK {
            self.tail = id;
        } else {
            blocks[old.index()].prev = id;
        }
        self.head = id;
        self.len += 1;
    }

    pub(crate) fn push_back(&mut self, blocks: &mut [Block], id: BlockId) {
        let old = self.tail;
        blocks[id.index()].prev = old;
        blocks[id.index()].next = NULL_BLOCK;
        if old == NULL_BLOCK {
            self.head = id;
        } else {
            blocks[old.index()].next = id;
        }
        self.tail = id;
        self.len += 1;
    }

    pub(crate) fn pop_front(&mut self, blocks: &mut [Block]) -> Option<BlockId> {
        let id = self.head;
        if id == NULL_BLOCK {
            return None;
        }
        self.remove(blocks, id);
        Some(id)
    }

    /// `id` must be in this list.
    pub(crate) fn remove(&mut self, blocks: &mut [Block], id: BlockId) {
        let Block { prev, next, .. } = blocks[id.index()];
        if prev == NULL_BLOCK {
            self.head = next;
        } else {
            blocks[prev.index()].next = next;
        }
        if next == NULL_BLOCK {
            self.tail = prev;
        } else {
            blocks[next.index()].prev = prev;
        }
        self.len -= 1;
    }

    pub(crate) fn iter<'a>(&self, blocks: &'a [Block]) -> impl Iterator<Item = BlockId> + use<'a> {
        std::iter::successors(Some(self.head), |id| Some(blocks[id.index()].next)).take_while(|&id| id != NULL_BLOCK)
    }
}

/// The free blocks of one pool; the one that was freed last is taken first.
#[derive(Debug)]
pub(crate) struct FreeBlocks(Vec<BlockId>);

impl FreeBlocks {
    /// An empty stack with room for `len` blocks.
    pub(crate) fn with_capacity(len: usize) -> Result<Self> {
        reserve("the free blocks of the pool", len).map(Self)
    }

    pub(crate) fn len(&self) -> u32 {
        self.0.len() as u32
    }

    pub(crate) fn push(&mut self, blocks: &mut [Block], id: BlockId) {
        let record = &mut blocks[id.index()];
        record.state = BlockState::Free;
        record.position = self.0.len() as u32;
        self.0.push(id);
    }

    pub(crate) fn pop(&mut self) -> Option<BlockId> {
        self.0.pop()
    }

    /// `id` must be free. The block on top takes its place.
    pub(crate) fn remove(&mut self, blocks: &mut [Block], id: BlockId) {
        let position = blocks[id.index()].position;
        self.0.swap_remove(position as usize);
        if let Some(moved) = self.0.get(position as usize) {
            blocks[moved.index()].position = position;
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> {
        self.0.iter().copied()
    }

    /// Whether every block knows its place, for the integrity check.
    pub(crate) fn is_in_place(&self, blocks: &[Block]) -> bool {
        self.0.iter().zip(0..).all(|(id, position)| blocks[id.index()].position == position)
    }
}
