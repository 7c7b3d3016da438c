//! Events of the prefix cache, in scenes where they can be said beforehand.

use std::sync::Arc;

use pagedkv_core::{
    BlockHash, BlockRemoved, BlockStored, CacheConfig, ChainHasher, ComputedBlocks, Error, EventConfig, ExtraKey,
    HashAlgorithm, Identity, ImageSpan, KVCacheEvent, KVCacheManager, KVEventBatch, LoraName, RootKey, SequenceId,
};

fn manager_with(num_blocks: u32, max_pending: u32) -> KVCacheManager {
    let events = Some(EventConfig { max_pending, ..EventConfig::default() });
    let config = CacheConfig { block_size: 2, events, ..CacheConfig::new(num_blocks) };
    KVCacheManager::new(&config).expect("a valid configuration")
}

fn manager() -> KVCacheManager {
    manager_with(16, 100)
}

fn create(manager: &mut KVCacheManager, tokens: &[i32], identity: &Identity) -> SequenceId {
    manager.create(tokens.into(), Arc::new(identity.clone()), true).expect("valid arguments")
}

/// Computes all tokens of a sequence in a plan that commits.
fn compute(manager: &mut KVCacheManager, tokens: &[i32], identity: &Identity) -> SequenceId {
    let sequence = create(manager, tokens, identity);
    let plan = manager.begin_plan();
    let none = ComputedBlocks::default();
    manager.allocate_slots(sequence, tokens.len() as u32, &none).expect("valid arguments").expect("room");
    manager.commit(plan).expect("the oldest plan");
    sequence
}

fn take(manager: &mut KVCacheManager) -> Vec<KVCacheEvent> {
    manager.take_events().expect("events are on").events
}

fn hashes(tokens: &[i32], identity: &Identity, lora: Option<&LoraName>) -> Vec<BlockHash> {
    let mut hasher = ChainHasher::new(HashAlgorithm::default(), &EventConfig::default().seed);
    hasher.chain_hashes(tokens, 2, identity, lora).expect("valid arguments")
}

fn plain(tokens: &[i32]) -> Vec<BlockHash> {
    hashes(tokens, &Identity::default(), None)
}

fn stored(events: &[KVCacheEvent]) -> &BlockStored {
    match events {
        [KVCacheEvent::BlockStored(stored)] => stored,
        other => panic!("{other:?} is not one stored event"),
    }
}

fn removed(block_hashes: Vec<BlockHash>) -> KVCacheEvent {
    KVCacheEvent::BlockRemoved(BlockRemoved { block_hashes, group_idx: 0 })
}

#[test]
fn blocks_are_stored_at_the_commit_of_the_plan_that_fills_them() {
    let mut manager = manager();
    let sequence = create(&mut manager, &[1, 2, 3, 4, 5], &Identity::default());
    let plan = manager.begin_plan();
    manager.allocate_slots(sequence, 5, &ComputedBlocks::default()).expect("valid arguments").expect("room");
    assert_eq!(take(&mut manager), []);
    manager.commit(plan).expect("the oldest plan");
    let events = take(&mut manager);
    let expected = BlockStored {
        block_hashes: plain(&[1, 2, 3, 4]),
        parent_block_hash: None,
        token_ids: vec![1, 2, 3, 4],
        block_size: 2,
        lora_id: None,
        lora_name: None,
        extra_keys: vec![vec![], vec![]],
        group_idx: 0,
        sliding_window: None,
    };
    assert_eq!(stored(&events), &expected);
}

#[test]
fn a_plan_that_is_rolled_back_tells_nothing() {
    let mut manager = manager();
    let sequence = create(&mut manager, &[1, 2, 3], &Identity::default());
    let plan = manager.begin_plan();
    manager.allocate_slots(sequence, 3, &ComputedBlocks::default()).expect("valid arguments").expect("room");
    manager.rollback(plan).expect("it is in flight");
    assert_eq!(take(&mut manager), []);
}

#[test]
fn what_continues_a_known_prefix_names_it_as_its_parent() {
    let mut manager = manager();
    compute(&mut manager, &[1, 2, 3], &Identity::default());
    take(&mut manager);
    compute(&mut manager, &[1, 2, 3, 4], &Identity::default());
    let events = take(&mut manager);
    let chain = plain(&[1, 2, 3, 4]);
    let stored = stored(&events);
    assert_eq!((stored.parent_block_hash, &stored.block_hashes[..]), (Some(chain[0]), &chain[1..]));
}

#[test]
fn a_second_copy_is_not_stored_again_and_only_the_last_one_is_removed() {
    let mut manager = manager_with(4, 100);
    let first = compute(&mut manager, &[1, 2], &Identity::default());
    let second = compute(&mut manager, &[1, 2], &Identity::default());
    assert_eq!(stored(&take(&mut manager)).block_hashes, plain(&[1, 2]));
    manager.free(first).expect("it is live");
    manager.free(second).expect("it is live");
    let other = create(&mut manager, &[7, 8, 9], &Identity::default());
    manager.begin_plan();
    let none = ComputedBlocks::default();
    manager.allocate_slots(other, 2, &none).expect("valid arguments").expect("room");
    manager.allocate_slots(other, 1, &none).expect("valid arguments").expect("room");
    assert_eq!(take(&mut manager), [], "one copy is left");
    let last = create(&mut manager, &[5], &Identity::default());
    manager.allocate_slots(last, 1, &none).expect("valid arguments").expect("room");
    assert_eq!(
        take(&mut manager),
        [removed(plain(&[1, 2]))],
        "removed when the last copy is reused, before the commit"
    );
}

#[test]
fn a_reset_clears_and_nothing_of_before_is_removed_later() {
    let mut manager = manager_with(4, 100);
    let sequence = compute(&mut manager, &[1, 2, 3, 4], &Identity::default());
    take(&mut manager);
    manager.reset_prefix_cache();
    assert_eq!(take(&mut manager), [KVCacheEvent::AllBlocksCleared]);
    manager.free(sequence).expect("it is live");
    assert_eq!(take(&mut manager), []);
    compute(&mut manager, &[1, 2], &Identity::default());
    assert_eq!(stored(&take(&mut manager)).block_hashes, plain(&[1, 2]));
}

#[test]
fn an_adapter_that_is_loaded_anew_loses_its_blocks_alone() {
    let mut manager = manager();
    let adapter = Identity { root: RootKey { lora_id: Some(3), ..RootKey::default() }, ..Identity::default() };
    compute(&mut manager, &[1, 2], &adapter);
    compute(&mut manager, &[1, 2], &Identity::default());
    take(&mut manager);
    manager.invalidate_lora(3);
    assert_eq!(take(&mut manager), [removed(hashes(&[1, 2], &adapter, None))]);
}

#[test]
fn extra_keys_are_those_that_went_into_the_hash() {
    let mut manager = manager();
    let lora = LoraName { name: "sql".into(), path: "/adapters/sql".into() };
    manager.name_lora(3, lora.clone()).expect("nothing of it is cached");
    let identity = Identity {
        root: RootKey { lora_id: Some(3), cache_salt: Some(b"s".as_slice().into()) },
        images: vec![ImageSpan { start: 1, len: 2, digest: b"cat".as_slice().into() }],
    };
    compute(&mut manager, &[1, 2, 3, 4], &identity);
    let events = take(&mut manager);
    let stored = stored(&events);
    let image = |offset| ExtraKey::Image { digest: b"cat".as_slice().into(), offset };
    let named = ExtraKey::Lora(lora.clone());
    let first = vec![named.clone(), image(1), ExtraKey::CacheSalt(b"s".as_slice().into())];
    assert_eq!(stored.extra_keys, [first, vec![named, image(-1)]]);
    assert_eq!(stored.block_hashes, hashes(&[1, 2, 3, 4], &identity, Some(&lora)));
    assert_eq!((stored.lora_id, stored.lora_name.as_deref()), (Some(3), Some("sql")));
    let refused = manager.name_lora(3, lora);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "lora_id", .. })), "{refused:?}");
}

#[test]
fn numbers_have_no_gap_between_batches() {
    let mut manager = manager();
    let mut next = 0;
    for number in 0..4 {
        compute(&mut manager, &[number, number], &Identity::default());
        if number == 2 {
            manager.reset_prefix_cache();
        }
        let batch = manager.take_events().expect("events are on");
        assert_eq!((batch.sequence_number, batch.num_lost), (next, 0));
        next += batch.events.len() as u64;
    }
    assert_eq!(next, 5);
}

#[test]
fn events_that_nobody_takes_are_dropped_and_the_state_is_told_anew() {
    let mut manager = manager_with(16, 2);
    for number in 1..5 {
        compute(&mut manager, &[number, number], &Identity::default());
    }
    let batch = manager.take_events().expect("events are on");
    assert_eq!((batch.num_lost, batch.sequence_number), (4, 4));
    let told: usize = batch.events.iter().map(num_stored).sum();
    assert_eq!((&batch.events[0], told), (&KVCacheEvent::AllBlocksCleared, 4));
    let after = manager.take_events().expect("events are on");
    let next = batch.sequence_number + batch.events.len() as u64;
    assert_eq!(after, KVEventBatch { sequence_number: next, ..KVEventBatch::default() });
}

fn num_stored(event: &KVCacheEvent) -> usize {
    if let KVCacheEvent::BlockStored(stored) = event { stored.block_hashes.len() } else { 0 }
}

#[test]
fn a_snapshot_tells_the_present_state_and_where_to_go_on() {
    let mut manager = manager();
    compute(&mut manager, &[1, 2, 3, 4], &Identity::default());
    compute(&mut manager, &[1, 2, 7, 8], &Identity::default());
    let snapshot = manager.event_snapshot().expect("events are on");
    assert_eq!(snapshot.events.iter().map(num_stored).sum::<usize>(), 3);
    compute(&mut manager, &[1, 2, 3, 4, 5, 6], &Identity::default());
    let batch = manager.take_events().expect("events are on");
    let news: Vec<_> = (batch.sequence_number..)
        .zip(batch.events)
        .filter(|&(number, _)| number >= snapshot.next_sequence_number)
        .map(|(_, event)| event)
        .collect();
    assert_eq!(stored(&news).block_hashes, plain(&[1, 2, 3, 4, 5, 6])[2..]);
}

#[test]
fn events_are_refused_by_name_where_they_are_off() {
    let mut manager = KVCacheManager::new(&CacheConfig::new(4)).expect("a valid configuration");
    assert!(matches!(manager.take_events(), Err(Error::Unsupported(_))));
    assert!(matches!(manager.event_snapshot(), Err(Error::Unsupported(_))));
}
