//! Sequences that go out to the host tier and come back, or that come from outside.

use super::growth::take_block;
use super::swap_record::{
    ABSENT, Arrival, Arriving, Elsewhere, Return, Returning, Source, SwapRecord, SwappedBlock, SwappedSequence,
};
use super::{KVCacheManager, Sequence, Tail};
use crate::ids::{BlockId, NO_NODE, NULL_BLOCK, NodeId};

impl KVCacheManager {
    /// What sequences hold, each distinct block once. They are given as (sample, index, guesses that are being checked).
    ///
    /// # Complexity
    /// O(blocks), with a probe each for all sequences but the first.
    pub(crate) fn record_of(&self, sequences: impl Iterator<Item = (u32, usize, u32)>) -> SwapRecord {
        let mut record = SwapRecord::default();
        let mut places = std::collections::HashMap::new();
        for (number, (sample, index, num_drafts)) in sequences.enumerate() {
            let Sequence { tables, epoch, num_scheduled, .. } = &self.sequences[index];
            let generation = self.generation_of(index);
            // Accepted guesses may lie elsewhere than they belong, and the moves that would mend that are dropped.
            let moved = self.sequences[index].first_moved();
            let len = (num_scheduled - num_drafts).min(moved.unwrap_or(u32::MAX));
            let mut columns = Vec::with_capacity(tables.len());
            for (group, table) in tables.iter().enumerate() {
                let mut add = |block: BlockId| {
                    let (epoch, group) = (self.pool.epoch(block), group as u8);
                    record.blocks.push(SwappedBlock { device: block, epoch, group, elsewhere: None });
                    record.blocks.len() as u32 - 1
                };
                let place = |block: &BlockId| match (*block, number) {
                    (NULL_BLOCK, _) => ABSENT,
                    (block, 0) => add(block),
                    (block, _) => *places.entry(block).or_insert_with(|| add(block)),
                };
                columns.push(table.blocks.iter().map(place).collect());
            }
            if number == 0 {
                places.extend(record.blocks.iter().map(|block| block.device).zip(0..));
            }
            let (sequence, epoch) = (index as u32, *epoch);
            record.sequences.push(SwappedSequence { sample, sequence, epoch, generation, len, columns });
        }
        record
    }

    /// What the first `len` tokens of a sample that has nothing take, all of it outside: as it was noted `before`, unless
    /// the cache was reset since.
    ///
    /// # Complexity
    /// O(blocks).
    pub(crate) fn record_of_outside(
        &mut self,
        before: Option<SwapRecord>,
        sample: u32,
        index: usize,
        len: u32,
    ) -> SwapRecord {
        self.renew_root(index);
        if let Some(before) = before.filter(|before| before.sequences[0].generation == self.generation_of(index)) {
            return before;
        }
        let mut record = SwapRecord::default();
        let mut columns = Vec::with_capacity(self.groups.len());
        for (group, spec) in (0..).zip(&self.groups) {
            let first = record.blocks.len() as u32;
            let num_columns = len.div_ceil(spec.block_size);
            record.blocks.extend((0..num_columns).map(|column| {
                let elsewhere = Some(Elsewhere::Outside { column });
                SwappedBlock { device: NULL_BLOCK, epoch: 0, group, elsewhere }
            }));
            columns.push((first..first + num_columns).collect());
        }
        let (sequence, epoch) = (index as u32, self.sequences[index].epoch);
        let generation = self.generation_of(index);
        record.sequences.push(SwappedSequence { sample, sequence, epoch, generation, len, columns });
        record
    }

    /// Whether a sequence that has nothing can go on with what went out of another one: nobody may find in the cache what
    /// was computed before its reset.
    pub(crate) fn can_take_over(&mut self, record: &SwapRecord, back: Returning) -> bool {
        let generation = record.sequences[back.entry].generation;
        self.generation_of(back.index) == generation || {
            self.renew_root(back.index);
            self.generation_of(back.index) == generation
        }
    }

    /// The generation of the cache, or of its adapter, that a sequence computes in.
    fn generation_of(&self, index: usize) -> u32 {
        self.pool.prefixes.generation_at(self.sequences[index].root)
    }

    /// Finds where the blocks of returning sequences are: still on the device, on the device because others computed the
    /// same prefix, or elsewhere. What is nowhere any more shortens its sequence.
    pub(crate) fn find_swapped(&self, record: &SwapRecord, returning: &mut [Returning], found: &mut Return) {
        found.sources.clear();
        found.sources.resize(record.blocks.len(), Source::Unknown);
        found.num_needed = 0;
        for returning in returning {
            let nodes = self.nodes_of(returning.index, returning.len);
            for group in 0..self.groups.len() {
                let spec = self.groups[group];
                let columns = &record.sequences[returning.entry].columns[group];
                let first = spec.columns_before_window(returning.len);
                for column in first..returning.len.div_ceil(spec.block_size) {
                    let place = columns[column as usize];
                    let end = (column + 1) * spec.block_size;
                    let node =
                        nodes.get((end / self.block_size) as usize - 1).copied().filter(|_| end <= returning.len);
                    let source = if place == ABSENT {
                        None
                    } else if found.sources[place as usize] == Source::Unknown {
                        self.source_of(record.blocks[place as usize], node)
                    } else {
                        continue;
                    };
                    let Some(source) = source else {
                        // With several groups, or windows, the shorter length may need what is not there.
                        let is_plain = self.groups.len() == 1 && !self.has_windows;
                        returning.len = if is_plain { column * spec.block_size } else { 0 };
                        break;
                    };
                    found.num_needed += match source {
                        Source::Device(block, _) => u32::from(self.pool.is_available(block)),
                        _ => 1,
                    };
                    found.sources[place as usize] = source;
                }
            }
        }
    }

    /// Blocks that a returning sequence takes for its next token: a new one, or a copy of one in which others go on or
    /// from which the cache does. Where all go on together, one of those that share a block takes it as it is.
    pub(crate) fn num_needed_to_go_on(
        &self,
        record: &SwapRecord,
        returning: &[Returning],
        back: Returning,
        found: &Return,
        together: bool,
    ) -> u32 {
        (0..self.groups.len()).map(|group| self.needed_in(group, record, returning, back, found, together)).sum()
    }

    fn needed_in(
        &self,
        group: usize,
        record: &SwapRecord,
        returning: &[Returning],
        back: Returning,
        found: &Return,
        together: bool,
    ) -> u32 {
        let block_size = self.groups[group].block_size;
        if back.len.is_multiple_of(block_size) {
            return 1;
        }
        let column = (back.len / block_size) as usize;
        let place_of = |back: &Returning| record.sequences[back.entry].columns[group].get(column).copied();
        let place = place_of(&back);
        let shares = |other: &&Returning| {
            other.index != back.index && other.len > back.len - back.len % block_size && place_of(other) == place
        };
        let is_other = |other: &&Returning| !together || other.index != back.index;
        let is_shared = returning.iter().take_while(is_other).any(|other| shares(&other));
        let is_needed = match place.map(|place| found.sources[place as usize]) {
            Some(Source::Device(block, node)) => {
                let record = &self.pool.blocks[block.index()];
                record.ref_count > 0
                    || record.num_transfers > 0
                    || node != NO_NODE && self.pool.carries_descendants(block)
            }
            _ => false,
        };
        u32::from(is_shared || is_needed)
    }

    /// Blocks of all groups that hold a sequence's tokens between two lengths, and one more per group where it goes on in a
    /// block that it may share.
    pub(crate) fn num_columns_between(&self, len: u32, known: u32) -> u32 {
        let between = self.groups.iter().map(|spec| {
            let new = known.div_ceil(spec.block_size) - len.div_ceil(spec.block_size);
            new + u32::from(!len.is_multiple_of(spec.block_size))
        });
        between.sum()
    }

    /// The nodes of a sequence's first `len` tokens, block by block, as far as the cache has them.
    fn nodes_of(&self, index: usize, len: u32) -> Vec<NodeId> {
        let Some(root) = self.root_of(index) else { return Vec::new() };
        let mut nodes = Vec::new();
        self.walk(&self.sequences[index], root, 0, len + 1, |node, _| {
            nodes.push(node);
            true
        });
        nodes
    }

    /// The node where a sequence's prefixes start, if it looks for any. What was computed before the cache, or the adapter,
    /// was reset has nothing in common with what was computed since.
    fn root_of(&self, index: usize) -> Option<NodeId> {
        let sequence = &self.sequences[index];
        Some(sequence.root).filter(|&root| sequence.uses_cache && self.pool.prefixes.is_current(root))
    }

    fn source_of(&self, block: SwappedBlock, node: Option<NodeId>) -> Option<Source> {
        let node_of = |block: BlockId| self.pool.blocks[block.index()].node;
        if block.device != NULL_BLOCK && self.pool.is_unchanged(block.device, block.epoch) {
            return Some(Source::Device(block.device, node_of(block.device)));
        }
        let prefixes = &self.pool.prefixes;
        let hit = node.and_then(|node| prefixes.usable_group_block(&self.pool.blocks, node, block.group));
        // A block that a plan in flight fills may fall with that plan, and what came back does not.
        if let Some(hit) = hit.filter(|hit| self.pool.blocks[hit.index()].committed) {
            return Some(Source::Device(hit, node_of(hit)));
        }
        block.elsewhere.map(|_| Source::Elsewhere)
    }

    /// Gives returning sequences, which hold nothing, their blocks. The record then knows the blocks that they are in now.
    /// Answers which blocks a transfer has to fill, and appends which sequences wait for that.
    pub(crate) fn bring_back(
        &mut self,
        record: &mut SwapRecord,
        returning: &[Returning],
        found: &Return,
        arrivals: &mut Vec<Arrival>,
    ) -> Vec<Arriving> {
        let arriving = self.take_sources(record, found);
        let mut is_placed = vec![false; record.blocks.len()];
        // A root of before a reset stays the sequence's: nobody may find what it brings back.
        for &back in returning {
            let num_there = self.fill_tables(record, back, found, &mut is_placed);
            self.pool.stamp += 1;
            let Returning { index, len, .. } = back;
            let sequence = &mut self.sequences[index];
            (sequence.num_scheduled, sequence.num_computed) = (len, num_there);
            // Others may hold the block in which it ends, or the cache.
            sequence.tail = Tail::Shared;
            if num_there < len {
                arrivals.push(Arrival { sequence: index as u32, epoch: sequence.epoch, num_there });
            } else {
                self.register_filled(index);
                self.leave_windows(index);
            }
        }
        arriving
    }

    /// Takes those of a record's blocks that the device still has, and new ones for the others. Answers the new ones, which
    /// a transfer has to fill.
    fn take_sources(&mut self, record: &mut SwapRecord, found: &Return) -> Vec<Arriving> {
        // What is there is taken before anything is allocated, which might reuse it.
        for (source, block) in found.sources.iter().zip(&mut record.blocks) {
            if let &Source::Device(device, _) = source {
                self.pool.take_back(device);
                (block.device, block.epoch) = (device, self.pool.epoch(device));
            }
        }
        let mut arriving = Vec::new();
        for (place, source) in found.sources.iter().enumerate() {
            if *source == Source::Elsewhere {
                let device = take_block(&mut self.pool, record.blocks[place].group.into());
                self.pool.begin_transfer(device);
                arriving.push(Arriving { device, block: place as u32 });
                (record.blocks[place].device, record.blocks[place].epoch) = (device, self.pool.epoch(device));
            }
        }
        arriving
    }

    /// Puts the blocks of a returning sequence into its tables, with a hold for each that another one has got already.
    /// Answers how many tokens need not be waited for.
    fn fill_tables(
        &mut self,
        record: &SwapRecord,
        Returning { entry, index, len }: Returning,
        found: &Return,
        is_placed: &mut [bool],
    ) -> u32 {
        let mut num_there = len;
        let tables = self.sequences[index].tables.iter_mut().zip(&self.groups);
        for ((table, spec), columns) in tables.zip(&record.sequences[entry].columns) {
            let first = spec.columns_before_window(len);
            for column in 0..len.div_ceil(spec.block_size) {
                if column < first {
                    table.blocks.push(NULL_BLOCK);
                    table.num_null += 1;
                    continue;
                }
                let place = columns[column as usize] as usize;
                let block = record.blocks[place].device;
                if std::mem::replace(&mut is_placed[place], true) {
                    self.pool.hold(block);
                }
                table.blocks.push(block);
                if found.sources[place] == Source::Elsewhere {
                    num_there = num_there.min(column * spec.block_size);
                }
            }
        }
        // Where there are windows, or several groups, a shorter length may need what left the windows of the longer one.
        if num_there < len && !self.is_plain() { 0 } else { num_there }
    }

    /// The transfer that filled a sequence's blocks ended: what arrived is as good as computed, and public where it is
    /// full; of a failure, what was there before is left.
    pub(crate) fn arrive(&mut self, arrival: Arrival, ok: bool) {
        let index = arrival.sequence as usize;
        if self.resident(index, arrival.epoch).is_none() {
            return;
        }
        if !ok {
            self.shrink(index, arrival.num_there);
        }
        let sequence = &mut self.sequences[index];
        sequence.num_computed = sequence.num_scheduled;
        self.register_filled(index);
        self.leave_windows(index);
    }
}
