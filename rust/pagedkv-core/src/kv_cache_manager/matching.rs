//! How much of a waiting sequence the cache holds, asked again and again.

use super::{ComputedBlocks, KVCacheManager};
use crate::ids::{NO_NODE, NodeId};

/// The end of a match that was found before: a node, which of those with its id, and the tokens up to its end.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Match {
    node: NodeId,
    birth: u32,
    pub(crate) num_tokens: u32,
}

impl KVCacheManager {
    /// Follows a match from where it ended. While its node lives, what leads to it need not be compared again.
    ///
    /// # Complexity
    /// O(blocks gained or lost since), O(blocks of the match) if its last block was reused.
    pub(crate) fn match_again(&self, index: usize, mut found: Match) -> Match {
        let sequence = &self.sequences[index];
        let prefixes = &self.pool.prefixes;
        if !sequence.uses_cache {
            return Match::default();
        }
        if !self.is_plain() {
            let mut hits = ComputedBlocks::default();
            self.lookup(index, sequence.tokens.len(), &mut hits);
            return Match { num_tokens: hits.num_tokens, ..Match::default() };
        }
        let lives = found.node != NO_NODE && prefixes.birth(found.node) == found.birth;
        if !lives || !prefixes.is_current(found.node) {
            let Some(root) = self.path_in_the_cache(sequence) else { return Match::default() };
            (found.node, found.num_tokens) = (root, 0);
        }
        while found.num_tokens > 0 && prefixes.usable_block(&self.pool.blocks, found.node).is_none() {
            found.node = prefixes.node(found.node).parent;
            found.num_tokens -= self.block_size;
        }
        let Match { node, num_tokens, .. } = found;
        self.walk(sequence, node, num_tokens, sequence.tokens.len(), |node, end| {
            let is_usable = prefixes.usable_block(&self.pool.blocks, node).is_some();
            if is_usable {
                (found.node, found.num_tokens) = (node, end);
            }
            is_usable
        });
        Match { birth: prefixes.birth(found.node), ..found }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::CacheConfig;

    /// Prompts of two kinds of blocks, in a pool that evicts: the same again and again in another order.
    #[test]
    fn a_match_that_goes_on_finds_what_a_lookup_from_the_root_finds() {
        let mut manager = KVCacheManager::new(&CacheConfig { block_size: 2, ..CacheConfig::new(9) }).unwrap();
        manager.pool.prefixes.remember_births();
        let prompt = |number: u32| (0..9).map(|i| (number >> (i / 2) & 1) as i32).collect::<Arc<[i32]>>();
        let waiting: Vec<_> = (0..16).map(|i| manager.create(prompt(i), Arc::default(), true).unwrap()).collect();
        let mut matches = vec![Match::default(); waiting.len()];
        let mut found = ComputedBlocks::default();
        for step in 0..400_u32 {
            let sequence = manager.create(prompt(step * 7 % 16), Arc::default(), true).unwrap();
            let plan = manager.begin_plan();
            let hits = manager.get_computed_blocks(sequence).unwrap();
            manager.allocate_slots(sequence, 8 - hits.num_tokens(), &hits).unwrap().unwrap();
            manager.commit(plan).unwrap();
            manager.free(sequence).unwrap();
            if step % 50 == 49 {
                manager.reset_prefix_cache();
            }
            for (sequence, at) in waiting.iter().zip(&mut matches).skip(step as usize % 3) {
                let index = sequence.index as usize;
                *at = manager.match_again(index, *at);
                manager.lookup(index, 9, &mut found);
                assert_eq!(at.num_tokens, found.num_tokens());
            }
        }
        assert!(manager.pool.num_evictions() > 100);
    }
}
