//! What must hold after every command.

use pagedkv_core::{BlockId, BlockState, KVCacheManager};

use super::{ManagerModel, index, states};
use crate::model::memory::Place;

impl ManagerModel {
    /// Whether the manager's state is what the model says.
    pub(crate) fn check(&mut self, manager: &KVCacheManager) {
        manager.check_integrity().unwrap_or_else(|broken| panic!("{broken}"));
        assert_eq!(manager.num_sequences(), self.sequences.len());
        for sequence in &self.sequences {
            for (group, expected) in sequence.tables.iter().enumerate() {
                let table = manager.group_table(sequence.id, group).expect("a live sequence");
                let same = table.iter().map(|&block| index(block)).eq(expected.iter().copied());
                assert!(same, "table {table:?} in group {group} of {sequence:?}");
            }
            assert_eq!(manager.num_tokens(sequence.id), Ok(sequence.tokens.len() as u32));
            assert_eq!(manager.num_computed_tokens(sequence.id), Ok(sequence.num_computed as u32));
        }
        self.check_counts(manager);
        self.check_contents();
    }

    fn check_counts(&mut self, manager: &KVCacheManager) {
        let pool = manager.pool();
        let states = states(manager);
        for (block, &state) in states.iter().enumerate().skip(1) {
            let holders = self.num_holders(block);
            assert_eq!(pool.ref_count(BlockId::new(block as u32)), Ok(holders as u32), "block {block}");
            let is_cached =
                self.entries[block].is_some_and(|entry| entry.filling.is_none() && entry.generation == self.generation);
            let expected = if holders > 0 {
                BlockState::Held
            } else if self.is_named(block) {
                BlockState::Fenced
            } else if is_cached {
                BlockState::Cached
            } else {
                BlockState::Free
            };
            let waits = state == BlockState::Fenced && holders == 0 && self.recently_named[block];
            assert!(state == expected || waits, "block {block} is {state:?}, not {expected:?}");
            self.events.note("fenced blocks", u64::from(state == BlockState::Fenced));
            if state == BlockState::Free {
                self.entries[block] = None;
            }
        }
        let count = |state| states.iter().filter(|&&found| found == state).count() as u32;
        let counts = [pool.num_held(), pool.num_free(), pool.num_cached(), pool.num_fenced()];
        let counted = [BlockState::Held, BlockState::Free, BlockState::Cached, BlockState::Fenced].map(count);
        assert_eq!(counts, counted, "held, free, cached, fenced");
        assert_eq!(pool.num_available(), pool.num_free() + pool.num_cached());
        let usage = 1.0 - f64::from(pool.num_available()) / f64::from(pool.num_blocks() - 1);
        assert!((manager.usage() - usage).abs() < 1e-9);
        assert_eq!(pool.num_evictions(), self.num_evictions, "evictions");
    }

    fn check_contents(&self) {
        for sequence in self.sequences.iter().filter(|sequence| self.is_idle(sequence.id)) {
            for (number, (group, table)) in self.groups.iter().zip(&sequence.tables).enumerate() {
                for position in group.first_seen(sequence.num_computed)..sequence.num_computed {
                    let read = self.memory.read(group.place(number, table, position));
                    let own = read == Some(sequence.histories[position]);
                    assert!(own, "another's token lies at {position} of {sequence:?}");
                }
            }
        }
        for (block, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry.filter(|entry| entry.filling.is_none()) else {
                continue;
            };
            let block_size = self.groups[entry.group].block_size;
            let expected = self.histories.back_from(entry.history, block_size);
            for (offset, history) in (0..block_size).rev().zip(expected) {
                let found = self.memory.read(Place { group: entry.group, block, offset });
                assert!(found == Some(history), "block {block} is public and does not hold its tokens");
            }
        }
    }

    /// With all sequences freed and all plans ended, the whole pool is there again.
    pub(crate) fn check_empty(&self, manager: &KVCacheManager) {
        let pool = manager.pool();
        assert!(self.sequences.is_empty() && self.plans.is_empty());
        assert_eq!(pool.num_available(), pool.num_blocks() - 1, "blocks are lost");
        assert!(manager.usage().abs() < 1e-9);
    }
}
