//! Chained hashes of the nodes of the prefix tree, each made once, when it is first asked for.

use std::collections::HashMap;

use super::BlockStored;
use crate::cache_layout::TableSpec;
use crate::chain_hash::{BlockHash, ChainHasher, ExtraKey, LoraName};
use crate::identity::decode_block;
use crate::ids::{NO_NODE, NodeId};
use crate::prefix_cache::PrefixCache;

/// What is kept of a node.
#[derive(Clone, Copy, Debug)]
struct Link {
    /// Which of the nodes with this id it is.
    birth: u32,
    hash: BlockHash,
    root: NodeId,
    /// Blocks before it.
    depth: u32,
}

/// Hashes of nodes, by id.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    hasher: ChainHasher,
    links: Vec<Option<Link>>,
    pub(super) names: HashMap<i64, LoraName>,
}

impl Chain {
    pub(super) fn new(hasher: ChainHasher) -> Self {
        Self { hasher, links: Vec::new(), names: HashMap::new() }
    }

    pub(super) fn hash_of(&mut self, prefixes: &PrefixCache, node: NodeId) -> BlockHash {
        self.link(prefixes, node).hash
    }

    pub(super) fn adapter_of(&mut self, prefixes: &PrefixCache, node: NodeId) -> Option<i64> {
        let root = self.link(prefixes, node).root;
        prefixes.root_key(root).lora_id
    }

    /// All that an event says of the block of a group that ends at `node`.
    pub(super) fn describe(
        &mut self,
        prefixes: &PrefixCache,
        node: NodeId,
        group: u8,
        table: TableSpec,
    ) -> BlockStored {
        let Link { hash, root, depth, .. } = self.link(prefixes, node);
        let (path, parent) = Self::nodes_of_block(prefixes, node, table.block_size);
        let key = prefixes.root_key(root);
        let name = key.lora_id.and_then(|id| self.names.get(&id)).cloned();
        let mut token_ids = Vec::with_capacity(table.block_size as usize);
        path.iter().for_each(|&node| token_ids.extend_from_slice(prefixes.tokens(node)));
        let num_before = (depth + 1 - path.len() as u32) * prefixes.block_size();
        let mut extra_keys: Vec<ExtraKey> = key.lora_key(name.as_ref()).into_iter().collect();
        for (&node, start) in path.iter().zip((0..).step_by(prefixes.block_size() as usize)) {
            for image in decode_block(prefixes.extra_key(node), start) {
                // One that goes on from the node before is there already.
                if !extra_keys.contains(&image) {
                    extra_keys.push(image);
                }
            }
        }
        extra_keys.extend(key.salt_key(num_before));
        BlockStored {
            block_hashes: vec![hash],
            parent_block_hash: parent.map(|parent| self.hash_of(prefixes, parent)),
            token_ids,
            block_size: table.block_size,
            lora_id: key.lora_id,
            lora_name: name.map(|name| name.name),
            extra_keys: vec![extra_keys],
            group_idx: u32::from(group),
            sliding_window: table.sliding_window,
        }
    }

    /// The nodes of the block of `block_size` tokens that ends at `node`, and the node before them, if it is no root.
    fn nodes_of_block(prefixes: &PrefixCache, node: NodeId, block_size: u32) -> (Vec<NodeId>, Option<NodeId>) {
        let (mut path, mut before) = (Vec::new(), node);
        for _ in 0..block_size / prefixes.block_size() {
            path.push(before);
            before = prefixes.node(before).parent;
        }
        path.reverse();
        (path, Some(before).filter(|&before| prefixes.node(before).parent != NO_NODE))
    }

    fn link(&mut self, prefixes: &PrefixCache, node: NodeId) -> Link {
        let mut path = Vec::new();
        let mut at = node;
        let mut above = loop {
            if let Some(link) = self.known(prefixes, at) {
                break Some(link);
            }
            if prefixes.node(at).parent == NO_NODE {
                break None;
            }
            path.push(at);
            at = prefixes.node(at).parent;
        };
        while let Some(node) = path.pop() {
            let root = above.map_or(at, |above| above.root);
            let depth = above.map_or(0, |above| above.depth + 1);
            let hash = self.hash(prefixes, node, root, depth, above.map(|above| above.hash).as_ref());
            let link = Link { birth: prefixes.birth(node), hash, root, depth };
            if self.links.len() <= node.index() {
                self.links.resize(prefixes.num_ids(), None);
            }
            self.links[node.index()] = Some(link);
            above = Some(link);
        }
        above.expect("a root has no block")
    }

    fn known(&self, prefixes: &PrefixCache, node: NodeId) -> Option<Link> {
        let link = self.links.get(node.index()).copied().flatten();
        link.filter(|link| link.birth == prefixes.birth(node))
    }

    fn hash(
        &mut self,
        prefixes: &PrefixCache,
        node: NodeId,
        root: NodeId,
        depth: u32,
        parent: Option<&BlockHash>,
    ) -> BlockHash {
        let key = prefixes.root_key(root);
        let name = key.lora_id.and_then(|id| self.names.get(&id));
        let images = decode_block(prefixes.extra_key(node), 0);
        let salt = key.salt_key(depth);
        let keys: Vec<ExtraKey> = key.lora_key(name).into_iter().chain(images).chain(salt).collect();
        self.hasher.hash_block(parent, prefixes.tokens(node), &keys)
    }
}
