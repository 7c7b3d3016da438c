//! Prefixes that stay in the cache until their pin is taken away, within a quota.

use std::collections::HashMap;
use std::sync::Arc;

use super::{ComputedBlocks, KVCacheManager, Sequence, Table};
use crate::cache_layout::TableSpec;
use crate::error::{Error, Result, invalid};
use crate::identity::Identity;
use crate::ids::{BlockId, NULL_BLOCK, SequenceId};

/// A pinned prefix. Numbers rise by one and are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PinId(u64);

impl PinId {
    /// The pin with this number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The pins of a manager. Each is a sequence that holds what was cached of its prefix and never runs.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    quota: u32,
    newest: u64,
    /// In the order of their numbers.
    kept: Vec<(PinId, SequenceId)>,
    /// Pins on each pinned block.
    counts: HashMap<BlockId, u32>,
}

impl Pins {
    pub(super) fn new(quota: u32) -> Self {
        Self { quota, ..Self::default() }
    }

    pub(super) const fn len(&self) -> usize {
        self.kept.len()
    }

    /// Whether the quota holds and each pinned block is counted, for the integrity check.
    pub(crate) fn is_counted(&self, sequences: &[Sequence]) -> bool {
        let mut counts = HashMap::new();
        let tables = self.kept.iter().flat_map(|(_, sequence)| &sequences[sequence.index as usize].tables);
        tables.flat_map(Table::held).for_each(|block| *counts.entry(block).or_insert(0) += 1);
        counts == self.counts && counts.len() <= self.quota as usize
    }
}

impl KVCacheManager {
    /// Keeps what the cache holds of a prefix, whole blocks only, until [`Self::unpin`]. Answers the pin and how many tokens
    /// it keeps, which is 0 for a prefix that is not cached. `None`, and nothing changed, if that takes more blocks than
    /// the quota has left; a block counts once however many pins hold it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] as [`Self::create`], or where the configuration has no quota.
    ///
    /// # Complexity
    /// O(tokens of the prefix).
    pub fn pin(&mut self, tokens: Arc<[i32]>, identity: Arc<Identity>) -> Result<Option<(PinId, u32)>> {
        if self.pins.quota == 0 {
            return invalid("pin_quota_blocks", "a quota of at least one block to pin prefixes", 0);
        }
        let len = tokens.len() as u32;
        let sequence = self.create(tokens, identity, true)?;
        let index = sequence.index as usize;
        let mut found = ComputedBlocks::default();
        self.lookup_computed(index, len + 1, &mut found);
        let counts = &self.pins.counts;
        let num_new = found.held().filter(|block| !counts.contains_key(block)).count();
        if counts.len() + num_new > self.pins.quota as usize {
            self.remove(index);
            return Ok(None);
        }
        if found.num_tokens > 0 {
            self.take_hits(index, &found);
        }
        let pinned = &mut self.sequences[index];
        (pinned.num_computed, pinned.num_scheduled) = (found.num_tokens, found.num_tokens);
        for block in found.held() {
            *self.pins.counts.entry(block).or_default() += 1;
        }
        self.pins.newest += 1;
        let pin = PinId(self.pins.newest);
        self.pins.kept.push((pin, sequence));
        Ok(Some((pin, found.num_tokens)))
    }

    /// Takes a pin away: its blocks are cached like others.
    ///
    /// # Errors
    /// [`Error::UnknownPin`].
    ///
    /// # Complexity
    /// O(blocks of the pin).
    pub fn unpin(&mut self, pin: PinId) -> Result<()> {
        let at =
            self.pins.kept.binary_search_by_key(&pin, |&(pin, _)| pin).map_err(|_| Error::UnknownPin(pin.get()))?;
        let (_, sequence) = self.pins.kept.remove(at);
        let index = sequence.index as usize;
        for block in self.sequences[index].tables.iter().flat_map(Table::held) {
            let count = self.pins.counts.get_mut(&block).expect("a pin's blocks are counted");
            *count -= 1;
            if *count == 0 {
                self.pins.counts.remove(&block);
            }
        }
        self.remove(index);
        Ok(())
    }

    /// Pinned prefixes, and the distinct blocks that they hold.
    pub fn num_pinned(&self) -> (usize, u32) {
        (self.pins.kept.len(), self.pins.counts.len() as u32)
    }

    /// Takes away the pins whose prefix can no longer be hit.
    pub(super) fn drop_stale_pins(&mut self) {
        let is_stale = |&(_, sequence): &(PinId, SequenceId)| {
            !self.pool.prefixes.is_current(self.sequences[sequence.index as usize].root)
        };
        let stale: Vec<_> = self.pins.kept.iter().filter(|pin| is_stale(pin)).map(|&(pin, _)| pin).collect();
        stale.into_iter().for_each(|pin| self.unpin(pin).expect("the pin was just found"));
    }

    /// A lookup from the start that finds only blocks whose tokens were computed.
    fn lookup_computed(&self, index: usize, limit: u32, found: &mut ComputedBlocks) {
        self.lookup(index, limit, found);
        // What windows need of a shorter prefix is other blocks.
        while let Some(start) = self.first_pending(found) {
            self.lookup(index, start + 1, found);
        }
    }

    /// Where the first block starts that is still to be computed.
    fn first_pending(&self, found: &ComputedBlocks) -> Option<u32> {
        let is_pending = |&block: &BlockId| block != NULL_BLOCK && !self.pool.blocks[block.index()].committed;
        let first = |(group, spec): (usize, &TableSpec)| {
            let column = found.group_blocks(group).iter().position(is_pending)?;
            Some(column as u32 * spec.block_size)
        };
        self.groups.iter().enumerate().filter_map(first).min()
    }
}
