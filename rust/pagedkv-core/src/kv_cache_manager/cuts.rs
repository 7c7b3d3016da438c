//! Cutting sequences: the blocks behind the cut go, last one first, and the path in the prefix tree goes back.

use super::{KVCacheManager, Sequence, Table, Tail};
use crate::cache_layout::TableSpec;
use crate::error::{Result, invalid};
use crate::ids::{NodeId, SequenceId};

impl KVCacheManager {
    /// Cuts a sequence to its first `num_tokens` tokens and releases the blocks behind them.
    ///
    /// Where a block that a window needs before the cut has left it, nothing of the sequence counts as computed any more,
    /// and all its blocks are released; what the prefix cache still holds is found by the next lookup.
    ///
    /// # Errors
    /// As [`Self::fork`]; [`Error::InvalidArgument`](crate::Error::InvalidArgument) for more tokens than there are.
    ///
    /// # Complexity
    /// O(blocks released).
    pub fn truncate(&mut self, sequence: SequenceId, num_tokens: u32) -> Result<()> {
        let index = self.find_idle(sequence)?;
        let sequence = &mut self.sequences[index];
        let len = sequence.tokens.len();
        if !(1..=len).contains(&num_tokens) {
            return invalid("num_tokens", format!("1 to {len}"), num_tokens);
        }
        sequence.tokens.truncate(num_tokens);
        if num_tokens < sequence.num_scheduled {
            sequence.tail = Tail::Cut;
        }
        let kept = sequence.num_computed.min(num_tokens);
        let kept = if self.has_all_that_is_needed_at(index, kept) { kept } else { 0 };
        self.sequences[index].num_computed = kept;
        self.shrink(index, kept);
        Ok(())
    }

    /// Takes all blocks from a sequence and starts it over. Returns how many of them nobody holds any more.
    pub(crate) fn release_all(&mut self, index: usize) -> u32 {
        let before = self.pool.num_held();
        self.shrink(index, 0);
        let sequence = &mut self.sequences[index];
        sequence.num_computed = 0;
        sequence.in_flight.clear();
        sequence.num_drafts = 0;
        sequence.epoch += 1;
        sequence.tail = Tail::Own;
        before - self.pool.num_held()
    }

    /// Cuts a sequence's blocks to those of its first `num_tokens` tokens, releasing the last one first.
    pub(super) fn shrink(&mut self, index: usize, num_tokens: u32) {
        self.pool.stamp += 1;
        self.rewind(index, num_tokens / self.block_size);
        let sequence = &mut self.sequences[index];
        sequence.moves = None;
        let named_by = sequence.in_flight.last().map(|&(plan, _)| plan);
        if let [table] = sequence.tables.as_mut_slice() {
            let keep = num_tokens.div_ceil(self.groups[0].block_size);
            while table.len() > keep {
                if let Some(block) = table.pop() {
                    self.pool.release(block, named_by);
                }
            }
        } else {
            // What ends last goes first, whatever its group: a hit needs all groups.
            loop {
                let goes_on =
                    |(table, spec): &(&mut Table, &TableSpec)| table.len() > num_tokens.div_ceil(spec.block_size);
                let tables = sequence.tables.iter_mut().zip(&self.groups).filter(goes_on);
                let Some((table, _)) = tables.max_by_key(|(table, spec)| table.len() * spec.block_size) else { break };
                if let Some(block) = table.pop() {
                    self.pool.release(block, named_by);
                }
            }
        }
        sequence.num_scheduled = num_tokens;
    }

    /// Takes a sequence's path back to its first `len` nodes, if it goes further.
    pub(super) fn rewind(&mut self, index: usize, len: u32) {
        let Sequence { mut path, path_len, .. } = self.sequences[index];
        if path_len <= len {
            return;
        }
        for _ in len..path_len {
            path = self.pool.prefixes.node(path).parent;
        }
        self.sequences[index].path_len = len;
        self.set_path(index, path);
    }

    /// Moves the end of a sequence's path, and the hold on it where blocks alone may not keep it.
    pub(super) fn set_path(&mut self, index: usize, node: NodeId) {
        let before = std::mem::replace(&mut self.sequences[index].path, node);
        if self.holds_paths {
            self.pool.prefixes.hold_path(node);
            self.pool.prefixes.release_path(before);
        }
    }

    /// Lets a sequence without blocks start from the root of the present cache.
    pub(crate) fn renew_root(&mut self, index: usize) {
        let sequence = &mut self.sequences[index];
        if self.pool.prefixes.is_current(sequence.root) {
            return;
        }
        let root = self.pool.hold_root(&sequence.identity.root);
        self.pool.prefixes.release_root(std::mem::replace(&mut sequence.root, root));
        self.set_path(index, root);
    }
}
