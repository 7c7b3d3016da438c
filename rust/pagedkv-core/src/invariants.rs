//! The laws of the bookkeeping, one function each. A law that does not hold is a bug of this crate.

use crate::block_list::BlockState;
use crate::block_pool::BlockPool;
use crate::ids::{BlockId, NO_NODE, NULL_BLOCK};
use crate::kv_cache_manager::{KVCacheManager, Sequence, Table};

/// A law that does not hold, by its number in the design, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("law {law} is broken: {what}")]
pub struct BrokenLaw {
    /// Number of the law.
    pub law: u8,
    /// What was found.
    pub what: String,
}

type Check = Result<(), BrokenLaw>;

fn require(holds: bool, law: u8, what: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(BrokenLaw { law, what: what() }) }
}

impl BlockPool {
    /// Law 1: every block is in exactly one of free, held, cached, fenced; block 0 is in none.
    pub(crate) fn check_places(&self) -> Check {
        let mut place = vec![None; self.blocks.len()];
        let mut put = |block: BlockId, state| {
            let twice = place[block.index()].replace(state).is_some();
            require(!twice && block != NULL_BLOCK, 1, || format!("block {} is in two lists", block.get()))
        };
        self.free.iter().try_for_each(|block| put(block, BlockState::Free))?;
        require(self.cached.is_counted(), 1, || "the evictable blocks are counted wrong".into())?;
        require(self.free.is_in_place(&self.blocks), 1, || "a free block is not where it was put".into())?;
        self.cached.iter(&self.blocks).try_for_each(|block| put(block, BlockState::Cached))?;
        for (_, waiting) in &self.fenced {
            waiting.iter(&self.blocks).try_for_each(|block| put(block, BlockState::Fenced))?;
        }
        self.transferring.iter(&self.blocks).try_for_each(|block| put(block, BlockState::Fenced))?;
        for block in self.transferring.iter(&self.blocks) {
            let waits = self.is_transferred(block) && !self.has_fence(block);
            require(waits, 1, || format!("block {} waits for a transfer that ended", block.get()))?;
        }
        for (index, record) in self.blocks.iter().enumerate().filter(|(_, record)| record.num_transfers > 0) {
            let is_kept = matches!(record.state, BlockState::Held | BlockState::Fenced);
            require(is_kept, 1, || format!("block {index} is {:?} during a transfer", record.state))?;
        }
        let mut held = 0;
        for (index, (record, place)) in self.blocks.iter().zip(&place).enumerate().skip(1) {
            let state = place.unwrap_or(BlockState::Held);
            require(record.state == state, 1, || {
                format!("block {index} is {:?} in a place of {state:?}", record.state)
            })?;
            let is_held = state == BlockState::Held;
            require(is_held == (record.ref_count > 0), 2, || {
                format!("block {index} is {state:?} with {} holders", record.ref_count)
            })?;
            held += u32::from(is_held);
        }
        require(held == self.num_held(), 1, || format!("{held} blocks are held, {} are counted", self.num_held()))?;
        require(self.blocks[0].state == BlockState::Null, 1, || "the null block was handed out".into())
    }
}

impl KVCacheManager {
    /// Checks every law over the whole state.
    ///
    /// # Errors
    /// The first [`BrokenLaw`].
    ///
    /// # Complexity
    /// O(blocks + nodes x tokens per block + table entries).
    pub fn check_integrity(&self) -> Check {
        self.pool.check_places()?;
        self.ref_counts_are_holders()?;
        self.nodes_hold_committed_tokens()?;
        self.sequences_follow_their_path()?;
        self.tables_are_as_long_as_needed()?;
        self.moves_are_awaited_by_idle_sequences()?;
        self.written_blocks_are_the_writers_own()?;
        self.prefixes_outlive_what_continues_them()?;
        self.sessions_hold_what_is_computed()?;
        self.tree_is_consistent()?;
        self.events_told_the_truth()
    }

    /// Law 8: what the events told can be hit, and nothing else can.
    fn events_told_the_truth(&self) -> Check {
        let pool = &self.pool;
        let untruth = pool.events.as_ref().and_then(|events| events.find_untruth(&pool.prefixes, &pool.blocks));
        untruth.map_or(Ok(()), |what| require(false, 8, || what))
    }

    /// Law 2: the reference count is the number of table entries, plus the sessions that hold the block; the evictable ones
    /// are cached, committed and unfenced.
    fn ref_counts_are_holders(&self) -> Check {
        let mut in_tables = vec![0; self.pool.blocks.len()];
        let mut in_sessions = in_tables.clone();
        for sequence in self.live() {
            let holders = if sequence.is_kept { &mut in_sessions } else { &mut in_tables };
            sequence.tables.iter().flat_map(Table::held).for_each(|block| holders[block.index()] += 1);
        }
        require(self.pins.is_counted(&self.sequences), 2, || "the pinned blocks are counted wrong".into())?;
        for (index, record) in self.pool.blocks.iter().enumerate().skip(1) {
            let (tables, sessions) = (in_tables[index], in_sessions[index]);
            let holders = tables + sessions;
            require(record.ref_count == holders, 2, || {
                format!("block {index} counts {} holders, not {tables} in tables and {sessions}", record.ref_count)
            })?;
            require((record.state == BlockState::Held) == (holders > 0), 2, || {
                format!("block {index} is {:?} with {holders} holders", record.state)
            })?;
            if record.state == BlockState::Cached {
                let hittable = record.committed && record.node != NO_NODE;
                require(hittable, 2, || format!("block {index} is cached and holds nothing"))?;
            }
        }
        Ok(())
    }

    /// Law 3: a node's blocks name it; one that is not committed is being filled by a plan in flight.
    fn nodes_hold_committed_tokens(&self) -> Check {
        let pool = &self.pool;
        let mut listed = vec![false; pool.blocks.len()];
        let mut is_filled = vec![false; pool.blocks.len()];
        self.plans.iter().flat_map(|plan| &plan.fills).for_each(|block| is_filled[block.index()] = true);
        for (node, record) in pool.prefixes.live_nodes() {
            let first = pool.prefixes.blocks_of(&pool.blocks, node).next();
            let is_committed = first.is_some_and(|block| pool.blocks[block.index()].committed);
            require(is_committed == record.first_is_committed(), 3, || {
                format!("node {} is wrong about its first block", node.0)
            })?;
            for block in pool.prefixes.blocks_of(&pool.blocks, node) {
                listed[block.index()] = true;
                let names_it = pool.blocks[block.index()].node == node;
                require(names_it, 3, || format!("block {} is listed by a node that it does not name", block.get()))?;
            }
        }
        for (index, record) in pool.blocks.iter().enumerate() {
            let on_node = record.node != NO_NODE;
            require(on_node == listed[index], 3, || format!("block {index} names a node that does not list it"))?;
            require(on_node || !record.committed, 3, || format!("block {index} is public without a node"))?;
            if on_node && !record.committed {
                require(is_filled[index], 3, || format!("block {index} waits for tokens that no plan computes"))?;
            }
        }
        Ok(())
    }

    /// Law 3, from the sequences' side: the blocks on a sequence's path hold exactly its tokens.
    fn sequences_follow_their_path(&self) -> Check {
        let prefixes = &self.pool.prefixes;
        for sequence in self.live() {
            let (mut node, mut scratch) = (sequence.path, Vec::new());
            for place in (0..sequence.path_len).rev() {
                let (start, end) = (place * self.block_size, (place + 1) * self.block_size);
                let same =
                    sequence.tokens.with_range(start, end, &mut scratch, |tokens| tokens == prefixes.tokens(node));
                require(same, 3, || format!("node {} does not hold its sequence's tokens", node.0))?;
                for (table, spec) in sequence.tables.iter().zip(&self.groups) {
                    if !end.is_multiple_of(spec.block_size) {
                        continue;
                    }
                    let block = table.blocks[(end / spec.block_size - 1) as usize];
                    let on_it = block == NULL_BLOCK || self.pool.blocks[block.index()].node == node;
                    require(on_it, 3, || format!("block {} is not what its sequence holds it for", block.get()))?;
                }
                node = prefixes.node(node).parent;
            }
            require(node == sequence.root, 3, || "a sequence's path does not start at its root".into())?;
        }
        Ok(())
    }

    /// Law 5: a sequence has exactly the blocks that its scheduled tokens need, and none that left its windows.
    fn tables_are_as_long_as_needed(&self) -> Check {
        for sequence in self.live() {
            for (group, (table, spec)) in sequence.tables.iter().zip(&self.groups).enumerate() {
                let needed = sequence.num_scheduled.div_ceil(spec.block_size);
                require(table.len() == needed, 5, || {
                    format!("{} columns of group {group} for {} tokens", table.len(), sequence.num_scheduled)
                })?;
                self.only_what_no_query_sees_is_null(sequence, group)?;
                let is_its = |block: BlockId| usize::from(self.pool.blocks[block.index()].group) == group;
                require(table.held().all(is_its), 5, || format!("a block of another group is in a table of {group}"))?;
            }
            let order = sequence.num_computed <= sequence.num_scheduled;
            require(order, 5, || format!("{} tokens computed, fewer scheduled", sequence.num_computed))?;
            let open = sequence.num_scheduled - sequence.num_computed;
            require(sequence.num_drafts <= open, 5, || format!("{} guesses, {open} tokens open", sequence.num_drafts))?;
        }
        Ok(())
    }

    /// Law 5 for windows: exactly what lies before them by what is committed has left, and what a plan in flight reads, or
    /// the next one will, is there.
    fn only_what_no_query_sees_is_null(&self, sequence: &Sequence, group: usize) -> Check {
        let (table, spec) = (&sequence.tables[group], &self.groups[group]);
        let is_null = |&column: &u32| table.blocks[column as usize] == NULL_BLOCK;
        let counted = (0..table.len()).filter(is_null).count() as u32;
        require(counted == table.num_null, 5, || format!("{counted} null columns, {} are counted", table.num_null))?;
        let left = spec.columns_before_window(sequence.committed_len());
        require((0..left).all(|column| is_null(&column)), 5, || format!("group {group} holds what left its window"))?;
        let seen = spec.columns_before_window(sequence.num_computed);
        require(table.num_left <= seen, 5, || format!("{} columns left group {group} for good", table.num_left))?;
        let reads = self.reads_of(sequence);
        let missing = reads.into_iter().find_map(|(position, end)| {
            (spec.columns_before_window(position)..end.div_ceil(spec.block_size)).find(is_null)
        });
        require(missing.is_none(), 5, || format!("group {group} lacks column {missing:?}, which a query sees"))
    }

    /// Where the queries of plans in flight start and end, and where the next ones do.
    fn reads_of(&self, sequence: &Sequence) -> Vec<(u32, u32)> {
        let growths = self.plans.iter().flat_map(|plan| &plan.growths);
        let written = growths.filter_map(|growth| growth.written(&self.sequences));
        let own = written.filter(|&(index, _)| std::ptr::eq(&raw const self.sequences[index], sequence));
        let reads = own.map(|(_, written)| (written.start, written.end));
        reads.chain([(sequence.num_scheduled, sequence.num_scheduled)]).collect()
    }

    /// Law 5: what awaits moves is not computed, is on no path, and is in no plan in flight.
    fn moves_are_awaited_by_idle_sequences(&self) -> Check {
        for sequence in self.live() {
            let Some(from) = sequence.first_moved() else { continue };
            let is_open = sequence.num_computed == from && sequence.path_len * self.block_size <= from;
            require(is_open && from < sequence.num_scheduled, 5, || {
                format!("moves from {from} on, {} tokens computed", sequence.num_computed)
            })?;
            require(sequence.is_idle(), 5, || "a sequence in a plan in flight awaits moves".into())?;
        }
        Ok(())
    }

    /// Law 6: a block that the newest plans write is held by its writer, and besides only by sequences whose path it is on.
    fn written_blocks_are_the_writers_own(&self) -> Check {
        let mut writer = vec![usize::MAX; self.pool.blocks.len()];
        for plan in &self.plans {
            for (index, written) in plan.growths.iter().filter_map(|growth| growth.written(&self.sequences)) {
                for (table, spec) in self.sequences[index].tables.iter().zip(&self.groups) {
                    let columns = written.start / spec.block_size..written.end.div_ceil(spec.block_size);
                    for &block in &table.blocks[columns.start as usize..columns.end as usize] {
                        require(block != NULL_BLOCK, 6, || format!("sequence {index} writes the null block"))?;
                        let other = std::mem::replace(&mut writer[block.index()], index);
                        let alone = other == usize::MAX || other == index;
                        require(alone, 6, || format!("two sequences write block {}", block.get()))?;
                    }
                }
            }
        }
        for (index, sequence) in self.sequences.iter().enumerate().filter(|(_, sequence)| sequence.is_live) {
            for (table, spec) in sequence.tables.iter().zip(&self.groups) {
                let on_path = sequence.path_len * self.block_size / spec.block_size;
                for (column, &block) in table.blocks.iter().enumerate() {
                    let writer = writer[block.index()];
                    let allowed = writer == usize::MAX || writer == index || (column as u32) < on_path;
                    require(allowed, 6, || format!("block {} is written under another holder", block.get()))?;
                }
            }
        }
        Ok(())
    }

    /// Law 7: in a group with full attention a node's last block goes after every evictable block of its descendants, also
    /// where a rollback takes it.
    fn prefixes_outlive_what_continues_them(&self) -> Check {
        let pool = &self.pool;
        if !pool.cached.is_in_order() {
            return Ok(()); // The order is made when a block is taken.
        }
        let mut position = vec![usize::MAX; pool.blocks.len()];
        pool.cached.iter(&pool.blocks).enumerate().for_each(|(at, block)| position[block.index()] = at);
        for group in 0..self.groups.len() as u8 {
            // Of each node, the places of its last block and of its last evictable one, counted from 1.
            let mut goes_last = vec![(0, 0); pool.prefixes.num_ids()];
            let on_node = pool.blocks.iter().zip(&position).filter(|(record, _)| record.node != NO_NODE);
            for (record, &at) in on_node.filter(|(record, _)| record.group == group) {
                let (last, last_evictable) = &mut goes_last[record.node.index()];
                *last = at.saturating_add(1).max(*last);
                *last_evictable = if at == usize::MAX { *last_evictable } else { (at + 1).max(*last_evictable) };
            }
            for (node, _) in pool.prefixes.live_nodes() {
                let Some(parent) = pool.before_in_group(node, group) else { continue };
                let last = goes_last[node.index()].1;
                let is_first = pool.prefixes.node(parent).parent == NO_NODE;
                let kept = is_first || last == 0 || goes_last[parent.index()].0 > last;
                require(kept, 7, || format!("the parent of node {} is evicted before it", node.0))?;
            }
        }
        Ok(())
    }

    /// Every node is found under its own key, and children are counted right.
    fn tree_is_consistent(&self) -> Check {
        let prefixes = &self.pool.prefixes;
        let mut children = vec![0; prefixes.num_ids()];
        for sequence in self.live() {
            children[sequence.root.index()] += 1;
            if self.holds_paths {
                children[sequence.path.index()] += 1;
            }
        }
        let mut count = 0;
        for (node, record) in prefixes.live_nodes() {
            count += 1;
            if record.parent != NO_NODE {
                children[record.parent.index()] += 1;
            }
            require(prefixes.is_found(node), 3, || format!("node {} cannot be found", node.0))?;
        }
        require(count == prefixes.num_nodes(), 3, || format!("{count} nodes live, {} are kept", prefixes.num_nodes()))?;
        for (node, record) in prefixes.live_nodes() {
            let counted = children[node.index()];
            require(record.num_children == counted, 3, || {
                format!("node {} counts {} children of {counted}", node.0, record.num_children)
            })?;
        }
        Ok(())
    }

    /// Law 7: a session holds the whole path of what it computed, no more than that, and no plan names it.
    fn sessions_hold_what_is_computed(&self) -> Check {
        for sequence in self.live().filter(|sequence| sequence.is_kept) {
            let is_idle = sequence.in_flight.is_empty() && sequence.num_computed == sequence.num_scheduled;
            require(is_idle, 7, || "a session holds what a plan in flight computes".into())?;
            let leaves_one = sequence.num_computed < sequence.tokens.len();
            require(leaves_one, 7, || "a session holds its last token's slot".into())?;
        }
        Ok(())
    }

    fn live(&self) -> impl Iterator<Item = &Sequence> {
        self.sequences.iter().filter(|sequence| sequence.is_live)
    }
}
