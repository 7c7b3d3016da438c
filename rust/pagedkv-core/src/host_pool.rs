//! The blocks of the host tier: swap space of preempted requests.
//!
//! A host block is free, or belongs to one record of a preempted request, or to a transfer whose request ended. Nothing
//! is looked up here: it is no cache. Every call is O(1) per block and allocates nothing.

use crate::error::{Result, reserve};

/// A block of the host tier, by its index in the host's memory. There is no null block among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct HostBlockId(u32);

impl HostBlockId {
    pub(crate) const fn get(self) -> u32 {
        self.0
    }
}

#[derive(Debug)]
pub(crate) struct HostPool {
    num_blocks: u32,
    /// The block that is taken next is last.
    free: Vec<HostBlockId>,
}

impl HostPool {
    pub(crate) fn new(num_blocks: u32) -> Result<Self> {
        let mut free = reserve("the blocks of the host tier", num_blocks as usize)?;
        free.extend((0..num_blocks).rev().map(HostBlockId));
        Ok(Self { num_blocks, free })
    }

    pub(crate) const fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    pub(crate) fn num_free(&self) -> u32 {
        self.free.len() as u32
    }

    /// A free block. The caller has counted them.
    pub(crate) fn allocate(&mut self) -> HostBlockId {
        self.free.pop().expect("the caller counted the free host blocks")
    }

    pub(crate) fn release(&mut self, block: HostBlockId) {
        assert!(self.free.len() < self.num_blocks as usize, "law 1 is broken: host block {} is free twice", block.0);
        self.free.push(block);
    }

    pub(crate) fn free(&self) -> impl Iterator<Item = HostBlockId> {
        self.free.iter().copied()
    }
}
