//! Events of the prefix cache: what a router, or an index of several caches, must know to say what can be hit here.
//!
//! - *stored*: the first block of a prefix in a cache group became public, at a commit;
//! - *removed*: the last one is gone, at the `schedule` that reuses it, as a rule;
//! - *cleared*: everything is gone, at a reset of the cache.
//!
//! Whoever applies the events in order knows at every moment exactly which (chained hash, group) can be hit. Field names
//! are those of vLLM's `vllm.distributed.kv_events` (0.32). Swapped blocks are not a tier that can be hit: no events.
//!
//! Events have numbers without gaps. They wait for [`crate::KVCacheManager::take_events`], up to a bound; beyond it they
//! are dropped, the next batch starts with *cleared* and the whole present state, and its number shows the gap. A
//! snapshot gives the same to who joins late.
//!
//! Law: for each (hash, group), the nodes of the present tree that have it and a public block of the group are counted,
//! and exactly those that are counted were told. Cost: one chained hash per node that becomes public, O(1) per event and
//! O(copies of the node) to see that a block is its first or last; nothing at all where events are off.

mod chain;

use std::collections::{HashMap, HashSet};

use crate::block_list::Block;
use crate::cache_layout::TableSpec;
use crate::chain_hash::{BlockHash, ChainHasher, DEFAULT_CHAIN_SEED, ExtraKey, HashAlgorithm, LoraName};
use crate::ids::{BlockId, NodeId};
use crate::prefix_cache::PrefixCache;
use chain::Chain;

/// Medium of the blocks of the pool, as vLLM names it.
pub const MEDIUM_GPU: &str = "GPU";
/// Blocks in events that wait to be taken where nothing else is said.
pub const DEFAULT_MAX_PENDING_EVENTS: u32 = 100_000;

/// Which events are made, and how prefixes are named in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventConfig {
    /// Function of the chained hashes.
    pub algorithm: HashAlgorithm,
    /// Seed of the chained hashes.
    pub seed: String,
    /// Blocks that events which wait to be taken may speak of; beyond, they are dropped.
    pub max_pending: u32,
}

impl Default for EventConfig {
    fn default() -> Self {
        Self {
            algorithm: HashAlgorithm::default(),
            seed: DEFAULT_CHAIN_SEED.into(),
            max_pending: DEFAULT_MAX_PENDING_EVENTS,
        }
    }
}

/// Something that changed in what can be hit.
#[derive(Clone, Debug, PartialEq)]
pub enum KVCacheEvent {
    /// Blocks can be hit.
    BlockStored(BlockStored),
    /// Blocks cannot be hit any more.
    BlockRemoved(BlockRemoved),
    /// No block can be hit any more.
    AllBlocksCleared,
}

/// Blocks that can be hit: each continues the one before.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockStored {
    /// Their chained hashes.
    pub block_hashes: Vec<BlockHash>,
    /// That of the block before the first of them; `None` at the start of a prefix.
    pub parent_block_hash: Option<BlockHash>,
    /// Their tokens, `block_size` each.
    pub token_ids: Vec<i32>,
    /// Tokens per block of the group.
    pub block_size: u32,
    /// The adapter by number.
    pub lora_id: Option<i64>,
    /// The adapter by name, where it has one.
    pub lora_name: Option<String>,
    /// What went into each hash besides tokens.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// The cache group.
    pub group_idx: u32,
    /// Tokens that a query of the group sees; `None` for all.
    pub sliding_window: Option<u32>,
}

/// Blocks that cannot be hit any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockRemoved {
    /// Their chained hashes.
    pub block_hashes: Vec<BlockHash>,
    /// The cache group.
    pub group_idx: u32,
}

/// Events in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KVEventBatch {
    /// Number of the first event; the others follow.
    pub sequence_number: u64,
    /// The events.
    pub events: Vec<KVCacheEvent>,
    /// Events right before the first that were dropped because nobody took them. Where there are any, the batch starts
    /// with [`KVCacheEvent::AllBlocksCleared`] and tells everything that can be hit.
    pub num_lost: u64,
}

/// What can be hit, for who joins late.
#[derive(Clone, Debug, PartialEq)]
pub struct KVCacheSnapshot {
    /// Events that build the present state from nothing. They have no numbers.
    pub events: Vec<KVCacheEvent>,
    /// Number of the first event that is not in it: go on with that one.
    pub next_sequence_number: u64,
}

/// Makes the events and keeps them until they are taken.
#[derive(Debug)]
pub(crate) struct EventLog {
    chain: Chain,
    groups: Vec<TableSpec>,
    /// Nodes in the present tree with this hash and a public block of this group.
    known: HashMap<(BlockHash, u8), u32>,
    pending: Vec<KVCacheEvent>,
    num_pending_blocks: usize,
    max_pending: usize,
    /// Number of the first event that was not taken.
    first: u64,
    num_lost: u64,
    /// Whether the newest event may grow.
    is_open: bool,
}

impl EventLog {
    pub(crate) fn new(config: &EventConfig, groups: &[TableSpec]) -> Self {
        Self {
            chain: Chain::new(ChainHasher::new(config.algorithm, &config.seed)),
            groups: groups.to_vec(),
            known: HashMap::new(),
            pending: Vec::new(),
            num_pending_blocks: 0,
            max_pending: config.max_pending as usize,
            first: 0,
            num_lost: 0,
            is_open: false,
        }
    }

    pub(crate) fn name_lora(&mut self, lora_id: i64, name: LoraName) {
        self.chain.names.insert(lora_id, name);
    }

    /// A block of the tree became public.
    pub(crate) fn published(&mut self, prefixes: &PrefixCache, blocks: &[Block], block: BlockId) {
        let record = &blocks[block.index()];
        if prefixes.is_current(record.node) && is_only_one(prefixes, blocks, block) {
            self.add(prefixes, record.node, record.group);
        }
    }

    /// A public block is about to leave the tree.
    pub(crate) fn withdrawn(&mut self, prefixes: &PrefixCache, blocks: &[Block], block: BlockId) {
        let record = &blocks[block.index()];
        if prefixes.is_current(record.node) && is_only_one(prefixes, blocks, block) {
            self.take_away(prefixes, record.node, record.group);
        }
    }

    /// The prefixes of an adapter are about to be forgotten.
    pub(crate) fn adapter_forgotten(&mut self, prefixes: &PrefixCache, blocks: &[Block], lora_id: i64) {
        for (node, group) in public(prefixes, blocks) {
            if self.chain.adapter_of(prefixes, node) == Some(lora_id) {
                self.take_away(prefixes, node, group);
            }
        }
    }

    /// All prefixes were forgotten.
    pub(crate) fn cleared(&mut self) {
        self.known.clear();
        self.push(KVCacheEvent::AllBlocksCleared, 1);
    }

    /// The events since the last call, and no more of them here.
    pub(crate) fn take(&mut self, prefixes: &PrefixCache, blocks: &[Block]) -> KVEventBatch {
        self.is_open = false;
        self.num_pending_blocks = 0;
        let num_lost = std::mem::take(&mut self.num_lost);
        let mut events = std::mem::take(&mut self.pending);
        if num_lost > 0 {
            events = vec![KVCacheEvent::AllBlocksCleared];
            self.restate(prefixes, blocks, &mut events);
        }
        let sequence_number = self.first + num_lost;
        self.first = sequence_number + events.len() as u64;
        KVEventBatch { sequence_number, events, num_lost }
    }

    /// Everything that can be hit now.
    pub(crate) fn snapshot(&mut self, prefixes: &PrefixCache, blocks: &[Block]) -> KVCacheSnapshot {
        self.is_open = false;
        let mut events = Vec::new();
        self.restate(prefixes, blocks, &mut events);
        KVCacheSnapshot { events, next_sequence_number: self.first + self.num_lost + self.pending.len() as u64 }
    }

    /// What was told of the present tree and is not so, for the integrity check.
    pub(crate) fn find_untruth(&self, prefixes: &PrefixCache, blocks: &[Block]) -> Option<String> {
        let (mut chain, mut counted) = (self.chain.clone(), HashMap::<_, u32>::new());
        for (node, group) in public(prefixes, blocks) {
            *counted.entry((chain.hash_of(prefixes, node), group)).or_default() += 1;
        }
        (counted != self.known)
            .then(|| format!("{} prefixes are public, {} were told", counted.len(), self.known.len()))
    }

    fn add(&mut self, prefixes: &PrefixCache, node: NodeId, group: u8) {
        let hash = self.chain.hash_of(prefixes, node);
        let count = self.known.entry((hash, group)).or_default();
        *count += 1;
        if *count == 1 {
            if self.num_lost > 0 {
                self.num_lost += 1;
            } else {
                self.store(prefixes, node, group);
            }
        }
    }

    fn take_away(&mut self, prefixes: &PrefixCache, node: NodeId, group: u8) {
        let hash = self.chain.hash_of(prefixes, node);
        let count = self.known.get_mut(&(hash, group)).expect("what is public was told");
        *count -= 1;
        if *count > 0 {
            return;
        }
        self.known.remove(&(hash, group));
        let group_idx = u32::from(group);
        match self.pending.last_mut() {
            Some(KVCacheEvent::BlockRemoved(last)) if self.is_open && last.group_idx == group_idx => {
                last.block_hashes.push(hash);
                self.count_pending(1);
            }
            _ => self.push(KVCacheEvent::BlockRemoved(BlockRemoved { block_hashes: vec![hash], group_idx }), 1),
        }
    }

    /// Tells of a block in a new event, or in the newest one if it goes on there.
    fn store(&mut self, prefixes: &PrefixCache, node: NodeId, group: u8) {
        let stored = self.chain.describe(prefixes, node, group, self.groups[usize::from(group)]);
        match self.pending.last_mut() {
            Some(KVCacheEvent::BlockStored(last)) if self.is_open && last.goes_on_with(&stored) => {
                last.append(stored);
                self.count_pending(1);
            }
            _ => self.push(KVCacheEvent::BlockStored(stored), 1),
        }
    }

    fn push(&mut self, event: KVCacheEvent, num_blocks: usize) {
        if self.num_lost > 0 {
            self.num_lost += 1;
            return;
        }
        self.pending.push(event);
        self.is_open = true;
        self.count_pending(num_blocks);
    }

    fn count_pending(&mut self, num_blocks: usize) {
        self.num_pending_blocks += num_blocks;
        if self.num_pending_blocks > self.max_pending {
            self.num_lost = self.pending.len() as u64;
            self.pending = Vec::new();
        }
    }

    /// Appends everything that can be hit, what a block continues before it.
    fn restate(&mut self, prefixes: &PrefixCache, blocks: &[Block], events: &mut Vec<KVCacheEvent>) {
        let mut groups_of: HashMap<u32, Vec<u8>> = HashMap::new();
        let mut nodes = Vec::new();
        for (node, group) in public(prefixes, blocks) {
            let groups = groups_of.entry(node.0).or_default();
            if groups.is_empty() {
                nodes.push(node);
            }
            groups.push(group);
        }
        let mut told = HashSet::new();
        let mut newest = HashMap::<u8, usize>::new();
        let mut is_visited = vec![false; prefixes.num_ids()];
        for node in nodes {
            for node in prefixes.unvisited_path(node, &mut is_visited) {
                for &group in groups_of.get(&node.0).into_iter().flatten() {
                    if !told.insert((self.chain.hash_of(prefixes, node), group)) {
                        continue;
                    }
                    let stored = self.chain.describe(prefixes, node, group, self.groups[usize::from(group)]);
                    match newest.get(&group).map(|&at| &mut events[at]) {
                        Some(KVCacheEvent::BlockStored(last)) if last.goes_on_with(&stored) => last.append(stored),
                        _ => {
                            newest.insert(group, events.len());
                            events.push(KVCacheEvent::BlockStored(stored));
                        }
                    }
                }
            }
        }
    }
}

impl BlockStored {
    fn goes_on_with(&self, next: &Self) -> bool {
        self.group_idx == next.group_idx
            && self.lora_id == next.lora_id
            && next.parent_block_hash.is_some()
            && next.parent_block_hash.as_ref() == self.block_hashes.last()
    }

    fn append(&mut self, mut next: Self) {
        self.block_hashes.append(&mut next.block_hashes);
        self.token_ids.append(&mut next.token_ids);
        self.extra_keys.append(&mut next.extra_keys);
    }
}

/// Whether the node of a public block has no other public block of the same group.
fn is_only_one(prefixes: &PrefixCache, blocks: &[Block], block: BlockId) -> bool {
    let record = &blocks[block.index()];
    let is_twin = |other: &Block| other.committed && other.group == record.group;
    !prefixes.blocks_of(blocks, record.node).any(|other| other != block && is_twin(&blocks[other.index()]))
}

/// Every node of the present tree with each group of which it has public blocks.
fn public(prefixes: &PrefixCache, blocks: &[Block]) -> Vec<(NodeId, u8)> {
    let mut found = Vec::new();
    for (node, _) in prefixes.live_nodes().filter(|&(node, _)| prefixes.is_current(node)) {
        let first = found.len();
        for block in prefixes.blocks_of(blocks, node) {
            let record = &blocks[block.index()];
            if record.committed && !found[first..].contains(&(node, record.group)) {
                found.push((node, record.group));
            }
        }
    }
    found
}
