//! The tree of cached prefixes: interned nodes, apart from the blocks that hold their tokens.
//!
//! A *node* is the identity of one full block of tokens after everything before it: (parent node, tokens, extra key).
//! Nodes are interned, so two sequences with equal prefixes meet at the same node whatever blocks they hold, and a
//! lookup that walks from the root proves equality of the whole prefix by induction: tokens are compared at every step,
//! a hash alone never decides. Extra keys of a whole sequence (adapter, salt) choose the root.
//!
//! A node lives while it has a block, a child, or (for roots) a sequence that starts from it. Its index entry goes only
//! with it. `reset` starts a new generation by forgetting the roots, and each adapter has a generation of its own, which
//! ends when it is loaded anew: what was computed before can no longer be reached from a root, and its blocks are not
//! cached again when they are released.
//!
//! Cost: a lookup follows the child that last continued the node and compares `block_size` tokens; only where that fails
//! is a keyed 128-bit xxh3 hash of (node, extra key, tokens) computed and one hash-table probe made. A node enters the
//! index when another one takes its place as the child that last continued its parent, so a prefix that nobody leaves is
//! never hashed. The index takes 5 bytes a slot, at a load of 7/16 to 7/8: 5.7 to 11.4 bytes per block in it. A node is
//! half a cache line and knows whether its first block can be taken, so a hit on 16 tokens reads two lines.

mod node_blocks;

use std::collections::{HashMap, HashSet};

use hashbrown::HashTable;
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_secret};

use crate::error::{Result, reserve};
use crate::extra_keys::ExtraKeys;
use crate::identity::RootKey;
use crate::ids::{NO_NODE, NULL_BLOCK, NodeId};
use crate::prefix_node::Node;

/// Bytes of the secret that keys the hashes.
const SECRET_BYTES: usize = 192;

/// Tokens of nodes lie in whole cache lines.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct TokenLine([i32; TOKENS_PER_LINE]);

const TOKENS_PER_LINE: usize = 16;

#[derive(Debug)]
pub(crate) struct PrefixCache {
    block_size: usize,
    secret: Box<[u8; SECRET_BYTES]>,
    /// Counts resets and adapters that came or were loaded anew.
    newest_generation: u32,
    /// That of roots without an adapter.
    generation: u32,
    /// That of each adapter's roots since the last reset.
    lora_generations: HashMap<i64, u32>,
    /// Those of adapters that were loaded anew since the last reset.
    stale_generations: HashSet<u32>,
    nodes: Vec<Node>,
    /// `block_size` tokens per node.
    tokens: Vec<TokenLine>,
    /// Which of the nodes that an id named in turn it names now; kept where [`Self::remember_births`] asked for it.
    births: Option<Vec<u32>>,
    free_nodes: Vec<NodeId>,
    index: HashTable<NodeId>,
    roots: HashMap<RootKey, NodeId>,
    root_keys: HashMap<u32, RootKey>,
    extras: ExtraKeys,
    scratch: Vec<i32>,
    /// Sequences whose path ends at each node, where blocks alone may not keep it; they count as its children too.
    path_holds: Vec<u32>,
    /// Every key hashes to the same number.
    #[cfg(test)]
    collides: bool,
}

impl PrefixCache {
    pub(crate) fn new(block_size: u32, hash_seed: u64, num_blocks: u32) -> Result<Self> {
        let block_size = block_size as usize;
        let mut nodes = reserve("the nodes of the prefix cache", num_blocks as usize + 1)?;
        nodes.push(Node::default());
        let num_tokens = (num_blocks as usize + 1).saturating_mul(block_size);
        let tokens = reserve("the tokens of the prefix cache", num_tokens.div_ceil(TOKENS_PER_LINE))?;
        Ok(Self {
            block_size,
            secret: derive_secret(hash_seed),
            newest_generation: 0,
            generation: 0,
            lora_generations: HashMap::new(),
            stale_generations: HashSet::new(),
            nodes,
            tokens,
            births: None,
            free_nodes: Vec::new(),
            index: HashTable::new(),
            roots: HashMap::new(),
            root_keys: HashMap::new(),
            extras: ExtraKeys::default(),
            scratch: Vec::new(),
            path_holds: Vec::new(),
            #[cfg(test)]
            collides: false,
        })
    }

    pub(crate) fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node.index()]
    }

    pub(crate) fn tokens(&self, node: NodeId) -> &[i32] {
        &bytemuck::cast_slice(&self.tokens)[node.index() * self.block_size..][..self.block_size]
    }

    pub(crate) fn is_current(&self, node: NodeId) -> bool {
        let generation = self.generation_at(node);
        generation >= self.generation
            && (self.stale_generations.is_empty() || !self.stale_generations.contains(&generation))
    }

    /// The generation that a node is of.
    pub(crate) fn generation_at(&self, node: NodeId) -> u32 {
        self.nodes[node.index()].generation
    }

    /// Lets [`Self::birth`] tell a node from those that had its id before.
    pub(crate) fn remember_births(&mut self) {
        self.births = Some(vec![0; self.nodes.len()]);
    }

    /// Changes whenever the id names another node.
    pub(crate) fn birth(&self, node: NodeId) -> u32 {
        self.births.as_ref().map_or(0, |births| births[node.index()])
    }

    /// Ids that were given to nodes, those of removed ones included: every id is below.
    pub(crate) fn num_ids(&self) -> usize {
        self.nodes.len()
    }

    /// Nodes in use, roots included.
    pub(crate) fn num_nodes(&self) -> usize {
        self.nodes.len() - 1 - self.free_nodes.len()
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.block_size as u32
    }

    /// The key of a root of the present tree.
    pub(crate) fn root_key(&self, root: NodeId) -> &RootKey {
        self.root_keys.get(&root.0).expect("a root of the present tree has a key")
    }

    /// The extra key of a node's block; empty for plain text.
    pub(crate) fn extra_key(&self, node: NodeId) -> &[u8] {
        self.extras.key(self.node(node).extra)
    }

    /// Whether something of an adapter is cached, or a sequence of it lives.
    pub(crate) fn knows_lora(&self, lora_id: i64) -> bool {
        self.roots.keys().any(|key| key.lora_id == Some(lora_id))
    }

    /// The path from the root, which is left out, to `node`, as far as it is not marked; it is then.
    pub(crate) fn unvisited_path(&self, mut node: NodeId, is_visited: &mut [bool]) -> Vec<NodeId> {
        let mut path = Vec::new();
        while self.node(node).parent != NO_NODE && !std::mem::replace(&mut is_visited[node.index()], true) {
            path.push(node);
            node = self.node(node).parent;
        }
        path.reverse();
        path
    }

    /// The root for `key` in this generation, if something starts from it.
    pub(crate) fn find_root(&self, key: &RootKey) -> Option<NodeId> {
        self.roots.get(key).copied()
    }

    /// The root for `key` in this generation, held once more until [`Self::release_root`].
    pub(crate) fn hold_root(&mut self, key: &RootKey) -> NodeId {
        let root = if let Some(&root) = self.roots.get(key) {
            root
        } else {
            let generation = self.generation_of(key);
            let root = self.new_node(NO_NODE, 0, generation);
            self.roots.insert(key.clone(), root);
            self.root_keys.insert(root.0, key.clone());
            root
        };
        self.nodes[root.index()].num_children += 1;
        root
    }

    /// Holds a root that is held already once more.
    pub(crate) fn hold(&mut self, root: NodeId) {
        self.nodes[root.index()].num_children += 1;
    }

    pub(crate) fn release_root(&mut self, root: NodeId) {
        self.nodes[root.index()].num_children -= 1;
        self.collect(root);
    }

    /// Keeps a node for a sequence whose path ends there, until [`Self::release_path`].
    pub(crate) fn hold_path(&mut self, node: NodeId) {
        if self.path_holds.len() <= node.index() {
            self.path_holds.resize(self.nodes.len(), 0);
        }
        self.path_holds[node.index()] += 1;
        self.nodes[node.index()].num_children += 1;
    }

    pub(crate) fn release_path(&mut self, node: NodeId) {
        self.path_holds[node.index()] -= 1;
        self.nodes[node.index()].num_children -= 1;
        self.collect(node);
    }

    /// Whether interned prefixes continue the node.
    pub(crate) fn has_children(&self, node: NodeId) -> bool {
        let held = self.path_holds.get(node.index()).copied().unwrap_or(0);
        self.nodes[node.index()].num_children > held
    }

    /// The child of `parent` with these tokens and this extra key, if it is interned.
    pub(crate) fn child(&self, parent: NodeId, tokens: &[i32], extra: u32) -> Option<NodeId> {
        let last = self.nodes[parent.index()].last_child;
        if last != NO_NODE && self.is_child(last, parent, tokens, extra) {
            return Some(last);
        }
        let num_others = self.nodes[parent.index()].num_children - u32::from(last != NO_NODE);
        if num_others == 0 {
            return None;
        }
        let hash = self.hash(parent, tokens, extra, &mut Vec::new());
        self.index.find(hash, |&node| self.is_child(node, parent, tokens, extra)).copied()
    }

    /// The child of `parent` with these tokens, interned now if it was not, and remembered as the last to continue it.
    pub(crate) fn intern(&mut self, parent: NodeId, tokens: &[i32], extra: &[u8]) -> NodeId {
        let found = self.extras.find(extra).and_then(|extra| self.child(parent, tokens, extra));
        let node = found.unwrap_or_else(|| self.insert(parent, tokens, extra));
        let last = std::mem::replace(&mut self.nodes[parent.index()].last_child, node);
        if last != NO_NODE && last != node {
            self.index(last);
        }
        node
    }

    pub(crate) fn find_extra(&self, extra: &[u8]) -> Option<u32> {
        self.extras.find(extra)
    }

    /// Forgets the roots. Blocks of the old generation are the caller's to free.
    pub(crate) fn reset(&mut self) {
        self.newest_generation += 1;
        self.generation = self.newest_generation;
        self.lora_generations.clear();
        self.stale_generations.clear();
        self.roots.clear();
        self.root_keys.clear();
    }

    /// Forgets the roots of an adapter. Their blocks are the caller's to free.
    pub(crate) fn invalidate_lora(&mut self, lora_id: i64) {
        let Some(generation) = self.lora_generations.remove(&lora_id) else { return };
        self.stale_generations.insert(generation);
        self.roots.retain(|key, _| key.lora_id != Some(lora_id));
        self.root_keys.retain(|_, key| key.lora_id != Some(lora_id));
    }

    fn generation_of(&mut self, key: &RootKey) -> u32 {
        let Some(lora_id) = key.lora_id else { return self.generation };
        *self.lora_generations.entry(lora_id).or_insert_with(|| {
            self.newest_generation += 1;
            self.newest_generation
        })
    }

    /// Every node in use with its parent, for the integrity check.
    pub(crate) fn live_nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        let live = |node: &Node| node.num_children > 0 || node.first_block != NULL_BLOCK;
        (1..self.nodes.len() as u32).map(NodeId).map(|id| (id, self.node(id))).filter(move |(_, node)| live(node))
    }

    /// Whether a lookup finds `node` under its own key.
    pub(crate) fn is_found(&self, node: NodeId) -> bool {
        let record = self.node(node);
        if record.parent == NO_NODE {
            return true;
        }
        if record.key() == 0 {
            return self.node(record.parent).last_child == node;
        }
        let hash = self.hash(record.parent, self.tokens(node), record.extra, &mut Vec::new());
        hash == record.key() && self.index.find(hash, |&found| found == node).is_some()
    }

    fn is_child(&self, node: NodeId, parent: NodeId, tokens: &[i32], extra: u32) -> bool {
        let record = &self.nodes[node.index()];
        record.parent == parent && record.extra == extra && self.tokens(node) == tokens
    }

    fn insert(&mut self, parent: NodeId, tokens: &[i32], extra: &[u8]) -> NodeId {
        let extra = self.extras.intern(extra);
        let node = self.new_node(parent, extra, self.node(parent).generation);
        let (start, end) = (node.index() * self.block_size, (node.index() + 1) * self.block_size);
        let num_lines = end.div_ceil(TOKENS_PER_LINE).max(self.tokens.len());
        self.tokens.resize(num_lines, TokenLine([0; TOKENS_PER_LINE]));
        bytemuck::cast_slice_mut(&mut self.tokens)[start..end].copy_from_slice(tokens);
        self.nodes[parent.index()].num_children += 1;
        node
    }

    /// Lets the index find a node that is no longer the last to have continued its parent.
    fn index(&mut self, node: NodeId) {
        let Node { parent, extra, .. } = self.nodes[node.index()];
        if self.node(node).key() != 0 {
            return;
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let hash = self.hash(parent, self.tokens(node), extra, &mut scratch);
        self.scratch = scratch;
        self.nodes[node.index()].set_key(hash);
        let nodes = &self.nodes;
        self.index.insert_unique(hash, node, |other| nodes[other.index()].key());
    }

    fn new_node(&mut self, parent: NodeId, extra: u32, generation: u32) -> NodeId {
        let node = Node::new(parent, extra, generation);
        let id = self.free_nodes.pop().unwrap_or(NodeId(self.nodes.len() as u32));
        if id.index() == self.nodes.len() {
            self.nodes.push(node);
        } else {
            self.nodes[id.index()] = node;
        }
        if let Some(births) = &mut self.births {
            births.resize(self.nodes.len(), 0);
            births[id.index()] = births[id.index()].wrapping_add(1);
        }
        id
    }

    /// Removes `node`, then its parents, as far as nothing keeps them.
    fn collect(&mut self, mut node: NodeId) {
        while node != NO_NODE {
            let Node { parent, num_children, first_block, extra, .. } = self.nodes[node.index()];
            if num_children > 0 || first_block != NULL_BLOCK {
                return;
            }
            if parent == NO_NODE {
                if let Some(key) = self.root_keys.remove(&node.0) {
                    self.roots.remove(&key);
                }
            } else {
                let key = self.node(node).key();
                if key != 0 {
                    let entry = self.index.find_entry(key, |&found| found == node);
                    entry.expect("a node stays in the index while it lives").remove();
                }
                self.extras.release(extra);
                let parent = &mut self.nodes[parent.index()];
                parent.num_children -= 1;
                if parent.last_child == node {
                    parent.last_child = NO_NODE;
                }
            }
            self.nodes[node.index()] = Node::default();
            self.free_nodes.push(node);
            node = parent;
        }
    }

    fn hash(&self, parent: NodeId, tokens: &[i32], extra: u32, scratch: &mut Vec<i32>) -> u64 {
        const ON_STACK: usize = 66;
        let prefix = [parent.0 as i32, extra as i32];
        let len = tokens.len() + prefix.len();
        if len <= ON_STACK {
            let mut key = [0; ON_STACK];
            key[..2].copy_from_slice(&prefix);
            key[2..len].copy_from_slice(tokens);
            return self.hash_bytes(bytemuck::cast_slice(&key[..len]));
        }
        scratch.clear();
        scratch.extend_from_slice(&prefix);
        scratch.extend_from_slice(tokens);
        self.hash_bytes(bytemuck::cast_slice(scratch))
    }

    fn hash_bytes(&self, key: &[u8]) -> u64 {
        #[cfg(test)]
        if self.collides {
            return Node::key_of(0);
        }
        Node::key_of(xxh3_128_with_secret(key, &self.secret[..]) as u64)
    }
}

/// Spreads the seed over the whole secret, so that each of its bytes depends on the seed.
fn derive_secret(seed: u64) -> Box<[u8; SECRET_BYTES]> {
    let mut secret = Box::new([0; SECRET_BYTES]);
    for (i, word) in secret.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&xxh3_64_with_seed(&(i as u64).to_le_bytes(), seed).to_le_bytes());
    }
    secret
}

#[cfg(test)]
mod collisions;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_list::{Block, BlockState};
    use crate::ids::BlockId;

    #[test]
    fn the_index_takes_at_most_twelve_bytes_per_cached_block() {
        let mut cache = PrefixCache::new(1, 7, 0).unwrap();
        let root = cache.hold_root(&RootKey::default());
        let mut blocks = vec![Block::new(BlockState::Free)];
        for token in 0..50_000 {
            let node = cache.intern(root, &[token], &[]);
            blocks.push(Block::new(BlockState::Held));
            cache.attach(&mut blocks, BlockId::new(token as u32 + 1), node);
            let num_bytes = cache.index.allocation_size();
            let few = token < 1000;
            assert!(few || num_bytes <= 12 * (token as usize + 1), "{num_bytes} bytes for {token} blocks");
        }
    }

    #[test]
    fn a_node_goes_with_its_last_block_and_its_parents_with_it() {
        let mut cache = PrefixCache::new(2, 7, 4).unwrap();
        let root = cache.hold_root(&RootKey::default());
        let mut blocks = vec![Block::new(BlockState::Held); 3];
        let parent = cache.intern(root, &[1, 2], b"image");
        let child = cache.intern(parent, &[3, 4], &[]);
        cache.attach(&mut blocks, BlockId::new(1), parent);
        cache.attach(&mut blocks, BlockId::new(2), child);
        cache.detach(&mut blocks, BlockId::new(1));
        assert_eq!(cache.num_nodes(), 3);
        cache.detach(&mut blocks, BlockId::new(2));
        cache.release_root(root);
        assert_eq!((cache.num_nodes(), cache.index.len(), cache.extras.find(b"image")), (0, 0, None));
    }

    #[test]
    fn a_prefix_that_nobody_leaves_is_never_hashed() {
        let mut cache = PrefixCache::new(2, 7, 8).unwrap();
        let root = cache.hold_root(&RootKey::default());
        let mut blocks = vec![Block::new(BlockState::Held); 5];
        let one = cache.intern(root, &[1, 2], &[]);
        let two = cache.intern(one, &[3, 4], &[]);
        for (block, node) in [(1, one), (2, two)] {
            cache.attach(&mut blocks, BlockId::new(block), node);
        }
        assert_eq!(cache.index.len(), 0);
        let other = cache.intern(one, &[5, 6], &[]);
        cache.attach(&mut blocks, BlockId::new(3), other);
        assert_eq!((cache.index.len(), cache.child(one, &[3, 4], 0)), (1, Some(two)));
        cache.detach(&mut blocks, BlockId::new(3));
        assert_eq!((cache.child(one, &[5, 6], 0), cache.child(one, &[3, 4], 0)), (None, Some(two)));
    }
}
