//! What the behaviour tests of the manager arrange with.
#![allow(dead_code, reason = "every test crate includes all of it and uses its part")]

use std::sync::Arc;

use pagedkv_core::{
    AllocatedSlots, BlockId, CacheConfig, ComputedBlocks, Identity, KVCacheManager, RootKey, SequenceId,
};

/// A manager of so many blocks that can be handed out.
pub(crate) fn manager(block_size: u32, usable_blocks: u32) -> KVCacheManager {
    let config = CacheConfig { block_size, ..CacheConfig::new(usable_blocks + 1) };
    KVCacheManager::new(&config).expect("a valid configuration")
}

/// A sequence of plain text that uses the prefix cache.
pub(crate) fn create(manager: &mut KVCacheManager, tokens: &[i32]) -> SequenceId {
    create_as(manager, tokens, Identity::default())
}

pub(crate) fn create_as(manager: &mut KVCacheManager, tokens: &[i32], identity: Identity) -> SequenceId {
    manager.create(tokens.into(), Arc::new(identity), true).expect("valid arguments")
}

pub(crate) fn salted(salt: &[u8]) -> Identity {
    Identity { root: RootKey { lora_id: None, cache_salt: Some(salt.into()) }, images: Vec::new() }
}

/// Tokens of a sequence that a lookup finds in the cache.
pub(crate) fn num_hit_tokens(manager: &KVCacheManager, sequence: SequenceId) -> u32 {
    manager.get_computed_blocks(sequence).expect("a live sequence").num_tokens()
}

/// Grows in the newest plan, without a lookup.
pub(crate) fn grow_anew(manager: &mut KVCacheManager, sequence: SequenceId, num_tokens: u32) -> Option<AllocatedSlots> {
    manager.allocate_slots(sequence, num_tokens, &ComputedBlocks::default()).expect("a valid call")
}

/// Grows in the newest plan after a lookup.
pub(crate) fn grow(manager: &mut KVCacheManager, sequence: SequenceId, num_tokens: u32) -> Option<AllocatedSlots> {
    let computed = manager.get_computed_blocks(sequence).expect("a live sequence");
    manager.allocate_slots(sequence, num_tokens, &computed).expect("a valid call")
}

/// Grows in a plan of its own, which commits.
pub(crate) fn compute(manager: &mut KVCacheManager, sequence: SequenceId, num_tokens: u32) {
    let plan = manager.begin_plan();
    grow(manager, sequence, num_tokens).expect("there is room");
    manager.commit(plan).expect("the plan is the oldest");
}

/// Computes these tokens in a sequence of its own, which ends: their full blocks are cached.
pub(crate) fn cache(manager: &mut KVCacheManager, tokens: &[i32]) -> Vec<BlockId> {
    let sequence = create(manager, tokens);
    let num_hits = num_hit_tokens(manager, sequence);
    compute(manager, sequence, tokens.len() as u32 - num_hits);
    let blocks = table(manager, sequence);
    manager.free(sequence).expect("a live sequence");
    blocks
}

pub(crate) fn table(manager: &KVCacheManager, sequence: SequenceId) -> Vec<BlockId> {
    manager.block_table(sequence).expect("a live sequence").to_vec()
}
