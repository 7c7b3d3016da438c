//! Prefixes whose hashes are all the same.

use super::*;
use crate::block_list::{Block, BlockState};
use crate::ids::BlockId;

/// Prefixes of three blocks over two tokens, all of one hash: a block each. Answers their nodes.
fn interned_under_one_hash(cache: &mut PrefixCache, blocks: &mut Vec<Block>, root: NodeId) -> Vec<(u32, [NodeId; 3])> {
    cache.collides = true;
    let mut found = Vec::new();
    for number in 0..8 {
        let mut node = root;
        let path = [0, 1, 2].map(|depth| {
            node = cache.intern(node, &[number as i32 >> depth & 1; 2], &[]);
            let block = BlockId::new(blocks.len() as u32);
            blocks.push(Block::new(BlockState::Held));
            cache.attach(blocks, block, node);
            node
        });
        found.push((number, path));
    }
    found
}

#[test]
fn fault_20_prefixes_of_one_hash_are_told_apart_by_their_tokens() {
    let mut cache = PrefixCache::new(2, 7, 32).unwrap();
    let root = cache.hold_root(&RootKey::default());
    let mut blocks = vec![Block::new(BlockState::Free)];
    let paths = interned_under_one_hash(&mut cache, &mut blocks, root);
    assert_eq!(cache.num_nodes(), 1 + 2 + 4 + 8, "each prefix is a node of its own");
    for (number, path) in paths {
        let mut node = root;
        for (depth, expected) in path.into_iter().enumerate() {
            node = cache.child(node, &[number as i32 >> depth & 1; 2], 0).expect("it is interned");
            assert_eq!(node, expected, "prefix {number}, block {depth}");
        }
        assert_eq!(cache.child(node, &[2, 2], 0), None);
    }
}

#[test]
fn fault_25_prefixes_of_one_hash_leave_the_index_one_by_one_and_nothing_panics() {
    let mut cache = PrefixCache::new(2, 7, 32).unwrap();
    let root = cache.hold_root(&RootKey::default());
    let mut blocks = vec![Block::new(BlockState::Free)];
    let paths = interned_under_one_hash(&mut cache, &mut blocks, root);
    for block in (1..blocks.len() as u32).map(BlockId::new) {
        cache.detach(&mut blocks, block);
        let is_found = |node| cache.live_nodes().all(|(live, _)| live != node) || cache.is_found(node);
        assert!(paths.iter().flat_map(|(_, path)| path).all(|&node| is_found(node)));
    }
    cache.release_root(root);
    assert_eq!((cache.num_nodes(), cache.index.len()), (0, 0));
}
