//! What of a sequence is in the cache already: the lookup, and what it found. `group_lookup` goes on where there
//! are several cache groups, or windows.

use smallvec::SmallVec;

use super::{KVCacheManager, Sequence};
use crate::error::Result;
use crate::ids::{BlockId, NULL_BLOCK, NodeId, SequenceId};

/// What a lookup found for a sequence. See [`KVCacheManager::get_computed_blocks`].
#[derive(Clone, Debug, Default)]
pub struct ComputedBlocks {
    pub(super) sequence: Option<SequenceId>,
    /// By cache group; the null block where a window needs none.
    pub(super) tables: SmallVec<[Vec<BlockId>; 1]>,
    pub(super) node: NodeId,
    pub(super) num_tokens: u32,
    pub(super) stamp: u64,
}

impl ComputedBlocks {
    /// The blocks of the first cache group, in the order of the tokens that they hold.
    pub fn blocks(&self) -> &[BlockId] {
        self.group_blocks(0)
    }

    /// The blocks of a cache group, in the order of the tokens that they hold; the null block where the group's window
    /// needs none.
    pub fn group_blocks(&self, group: usize) -> &[BlockId] {
        self.tables.get(group).map_or(&[], Vec::as_slice)
    }

    /// The blocks of all groups.
    pub(crate) fn held(&self) -> impl Iterator<Item = BlockId> {
        self.tables.iter().flatten().copied().filter(|&block| block != NULL_BLOCK)
    }

    pub(crate) fn clear(&mut self) {
        self.tables.iter_mut().for_each(Vec::clear);
        self.num_tokens = 0;
    }

    /// Tokens that need not be computed.
    pub const fn num_tokens(&self) -> u32 {
        self.num_tokens
    }
}

impl KVCacheManager {
    /// The longest prefix of the sequence's tokens, from where it stands, that cached blocks hold. Nothing is changed.
    ///
    /// A sequence stands on a block border or finds nothing; at least one of its tokens is left to compute.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`](crate::Error::UnknownSequence).
    ///
    /// # Complexity
    /// O(tokens found): each is compared once; a block is hashed only where prefixes branch.
    pub fn get_computed_blocks(&self, sequence: SequenceId) -> Result<ComputedBlocks> {
        let index = self.find(sequence)?;
        let mut found = ComputedBlocks::default();
        self.lookup(index, self.sequences[index].tokens.len(), &mut found);
        Ok(found)
    }

    /// The lookup behind [`Self::get_computed_blocks`], among the first `limit` tokens, into a buffer of the caller's.
    pub(crate) fn lookup(&self, index: usize, limit: u32, found: &mut ComputedBlocks) {
        let sequence = &self.sequences[index];
        found.clear();
        found.tables.resize_with(self.groups.len(), Vec::new);
        found.sequence = Some(SequenceId { index: index as u32, generation: sequence.generation });
        found.stamp = self.pool.stamp;
        let Some(node) = self.path_in_the_cache(sequence) else { return };
        found.node = node;
        if !sequence.uses_cache || sequence.path_len * self.block_size != sequence.num_scheduled {
            return;
        }
        if !self.is_plain() {
            return self.lookup_groups(index, limit, found);
        }
        // What is computed must not be reachable through a block alone that may never be: a rollback takes that one.
        let mut is_pending =
            sequence.path_len > 0 && !self.is_computed(sequence.tables[0].blocks[sequence.path_len as usize - 1]);
        self.walk(sequence, node, sequence.num_scheduled, limit, |node, end| {
            let usable = self.pool.prefixes.usable_block(&self.pool.blocks, node);
            let Some((block, is_computed)) = usable.filter(|&(_, is_computed)| !(is_pending && is_computed)) else {
                return false;
            };
            is_pending = !is_computed;
            found.tables[0].push(block);
            (found.node, found.num_tokens) = (node, end - sequence.num_scheduled);
            true
        });
    }

    /// Follows a sequence's tokens through the tree, from `start` on and behind `node`, while nodes end before `limit` and
    /// `takes` takes them, with their ends.
    #[inline]
    pub(super) fn walk(
        &self,
        sequence: &Sequence,
        mut node: NodeId,
        mut start: u32,
        limit: u32,
        mut takes: impl FnMut(NodeId, u32) -> bool,
    ) {
        let prefixes = &self.pool.prefixes;
        let (mut scratch, mut key) = (Vec::new(), Vec::new());
        while start + self.block_size < limit {
            let end = start + self.block_size;
            key.clear();
            sequence.identity.encode_block(start, end, &mut key);
            let child = prefixes.find_extra(&key).and_then(|extra| {
                sequence.tokens.with_range(start, end, &mut scratch, |tokens| prefixes.child(node, tokens, extra))
            });
            let Some(child) = child.filter(|&child| takes(child, end)) else { return };
            (node, start) = (child, end);
        }
    }

    pub(super) fn is_computed(&self, block: BlockId) -> bool {
        self.pool.blocks[block.index()].committed
    }

    /// The node where a lookup for the sequence starts; `None` if the cache was reset after the sequence's first block.
    pub(super) fn path_in_the_cache(&self, sequence: &Sequence) -> Option<NodeId> {
        let prefixes = &self.pool.prefixes;
        if prefixes.is_current(sequence.path) {
            Some(sequence.path)
        } else if sequence.num_scheduled == 0 {
            prefixes.find_root(&sequence.identity.root)
        } else {
            None
        }
    }
}
