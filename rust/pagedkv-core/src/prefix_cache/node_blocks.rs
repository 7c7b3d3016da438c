//! The blocks of a node: a list through the blocks' own records, of which the node knows the first.

use super::PrefixCache;
use crate::block_list::{Block, BlockState};
use crate::ids::{BlockId, NO_NODE, NULL_BLOCK, NodeId};

impl PrefixCache {
    /// Adds `block` to the blocks of `node`, not yet committed.
    pub(crate) fn attach(&mut self, blocks: &mut [Block], block: BlockId, node: NodeId) {
        let first = std::mem::replace(&mut self.nodes[node.index()].first_block, block);
        self.nodes[node.index()].set_first_is_committed(false);
        let record = &mut blocks[block.index()];
        assert!(record.node == NO_NODE, "law 3 is broken: block {} joins a second node", block.get());
        record.node = node;
        record.committed = false;
        record.twin_prev = NULL_BLOCK;
        record.twin_next = first;
        if first != NULL_BLOCK {
            blocks[first.index()].twin_prev = block;
        }
    }

    /// Takes `block` off its node, and the node out of the tree if nothing else keeps it.
    pub(crate) fn detach(&mut self, blocks: &mut [Block], block: BlockId) {
        let record = &mut blocks[block.index()];
        let node = std::mem::replace(&mut record.node, NO_NODE);
        record.committed = false;
        let (prev, next) = (record.twin_prev, record.twin_next);
        if prev == NULL_BLOCK {
            self.nodes[node.index()].first_block = next;
            let is_committed = next != NULL_BLOCK && blocks[next.index()].committed;
            self.nodes[node.index()].set_first_is_committed(is_committed);
        } else {
            blocks[prev.index()].twin_next = next;
        }
        if next != NULL_BLOCK {
            blocks[next.index()].twin_prev = prev;
        }
        self.collect(node);
    }

    /// The tokens of `block`, one of the node's, are computed.
    pub(crate) fn published(&mut self, block: BlockId, node: NodeId) {
        let record = &mut self.nodes[node.index()];
        if record.first_block == block {
            record.set_first_is_committed(true);
        }
    }

    /// A block of `node` that a sequence may take: one that is committed, else one that a plan in flight fills for a live
    /// holder; and whether it is committed.
    pub(crate) fn usable_block(&self, blocks: &[Block], node: NodeId) -> Option<(BlockId, bool)> {
        let record = self.node(node);
        if record.first_is_committed() {
            return Some((record.first_block, true));
        }
        let mut found = None;
        for block in self.blocks_of(blocks, node) {
            let record = &blocks[block.index()];
            if record.committed {
                return Some((block, true));
            }
            if record.state == BlockState::Held {
                found = Some((block, false));
            }
        }
        found
    }

    /// [`Self::usable_block`] among the blocks of one cache group.
    pub(crate) fn usable_group_block(&self, blocks: &[Block], node: NodeId, group: u8) -> Option<BlockId> {
        let mut found = None;
        for block in self.blocks_of(blocks, node) {
            let record = &blocks[block.index()];
            if record.group == group && record.committed {
                return Some(block);
            }
            if record.group == group && record.state == BlockState::Held {
                found = Some(block);
            }
        }
        found
    }

    pub(crate) fn blocks_of<'a>(&self, blocks: &'a [Block], node: NodeId) -> impl Iterator<Item = BlockId> + use<'a> {
        std::iter::successors(Some(self.nodes[node.index()].first_block), |id| Some(blocks[id.index()].twin_next))
            .take_while(|&id| id != NULL_BLOCK)
    }
}
