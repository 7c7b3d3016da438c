//! Which cached prefix goes when room is needed, and which stay: policies, pins, adapters that are loaded anew.

use std::sync::Arc;

use pagedkv_core::{
    BlockState, CacheConfig, ComputedBlocks, Error, EvictionPolicy, Identity, KVCacheManager, PinId, Retention,
    RootKey, SequenceId,
};

const FOREVER: f64 = f64::INFINITY;

fn manager(policy: EvictionPolicy, usable: u32) -> KVCacheManager {
    let config = CacheConfig { block_size: 1, eviction_policy: policy, ..CacheConfig::new(usable + 1) };
    KVCacheManager::new(&config).unwrap()
}

/// Computes a prompt, with what the cache holds of it; answers how many tokens that was.
fn compute(manager: &mut KVCacheManager, prompt: &[i32], retention: Option<Retention>) -> (SequenceId, u32) {
    let sequence = manager.create(prompt.into(), Arc::default(), true).unwrap();
    if let Some(retention) = retention {
        manager.retain(sequence, retention).unwrap();
    }
    let plan = manager.begin_plan();
    let hits = manager.get_computed_blocks(sequence).unwrap();
    let num_new = prompt.len() as u32 - hits.num_tokens();
    manager.allocate_slots(sequence, num_new, &hits).unwrap().expect("there is room");
    manager.commit(plan).unwrap();
    manager.check_integrity().unwrap();
    (sequence, hits.num_tokens())
}

fn visit(manager: &mut KVCacheManager, prompt: &[i32], retention: Option<Retention>) -> u32 {
    let (sequence, num_hit) = compute(manager, prompt, retention);
    manager.free(sequence).unwrap();
    manager.check_integrity().unwrap();
    num_hit
}

/// Tokens of the prompt that the cache holds.
fn cached(manager: &mut KVCacheManager, prompt: &[i32]) -> u32 {
    let longer = [prompt, &[0]].concat();
    let sequence = manager.create(longer.into(), Arc::default(), true).unwrap();
    let found = manager.get_computed_blocks(sequence).unwrap().num_tokens();
    manager.free(sequence).unwrap();
    found
}

fn keep(priority: u8, seconds: f64) -> Retention {
    Retention { priority, seconds }
}

#[test]
fn lru_reuses_the_prefix_that_was_released_first() {
    let mut manager = manager(EvictionPolicy::Lru, 4);
    visit(&mut manager, &[1, 2], None);
    visit(&mut manager, &[3, 4], None);
    visit(&mut manager, &[5], None);
    assert_eq!([cached(&mut manager, &[1, 2]), cached(&mut manager, &[3, 4])], [1, 2]);
}

#[test]
fn segmented_lru_lets_prefixes_that_were_never_hit_go_first() {
    let mut manager = manager(EvictionPolicy::SegmentedLru, 6);
    visit(&mut manager, &[1, 2, 9], None);
    visit(&mut manager, &[1, 2, 8], None);
    for once in 20..40 {
        visit(&mut manager, &[once], None);
    }
    assert_eq!(cached(&mut manager, &[1, 2]), 2);
}

#[test]
fn segmented_lru_gives_proven_prefixes_four_fifths_of_the_pool_at_most() {
    let mut manager = manager(EvictionPolicy::SegmentedLru, 9);
    for proven in 1..=9 {
        visit(&mut manager, &[proven, 0], None);
        visit(&mut manager, &[proven, 0], None);
    }
    let num_kept = (1..=9).filter(|&proven| cached(&mut manager, &[proven]) == 1).count();
    for once in 20..40 {
        visit(&mut manager, &[once], None);
    }
    let num_left = (1..=9).filter(|&proven| cached(&mut manager, &[proven]) == 1).count();
    assert!(num_kept > 0 && num_left <= 8, "{num_kept} kept, {num_left} left of ten blocks");
    assert!(num_left > 0);
}

#[test]
fn lowest_priority_goes_first() {
    let mut manager = manager(EvictionPolicy::Priority, 3);
    visit(&mut manager, &[1], Some(keep(80, FOREVER)));
    visit(&mut manager, &[2], Some(keep(10, FOREVER)));
    visit(&mut manager, &[3], None);
    visit(&mut manager, &[4], None);
    assert_eq!([1, 2, 3].map(|prompt| cached(&mut manager, &[prompt])), [1, 0, 1]);
    visit(&mut manager, &[5], None);
    assert_eq!([1, 3, 4].map(|prompt| cached(&mut manager, &[prompt])), [1, 0, 1]);
}

#[test]
fn priority_falls_when_its_time_is_over() {
    let mut manager = manager(EvictionPolicy::Priority, 2);
    manager.advance(100.0).unwrap();
    visit(&mut manager, &[1], Some(keep(80, 10.0)));
    visit(&mut manager, &[2], Some(keep(50, FOREVER)));
    manager.advance(109.0).unwrap();
    visit(&mut manager, &[3], Some(keep(60, FOREVER)));
    assert_eq!([1, 2].map(|prompt| cached(&mut manager, &[prompt])), [1, 0]);
    manager.advance(110.0).unwrap();
    visit(&mut manager, &[4], None);
    assert_eq!([1, 3].map(|prompt| cached(&mut manager, &[prompt])), [0, 1]);
}

#[test]
fn time_that_is_not_finite_is_refused_and_ends_no_priority() {
    let mut manager = manager(EvictionPolicy::Priority, 1);
    visit(&mut manager, &[1], Some(keep(80, 10.0)));
    for time in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let refused = manager.advance(time);
        assert!(matches!(refused, Err(Error::InvalidArgument { argument: "now", .. })), "{refused:?}");
    }
    manager.advance(9.0).unwrap();
    assert_eq!(cached(&mut manager, &[1]), 1);
}

#[test]
fn time_of_a_priority_starts_when_the_block_is_released() {
    let mut manager = manager(EvictionPolicy::Priority, 2);
    let (sequence, _) = compute(&mut manager, &[1], Some(keep(80, 10.0)));
    manager.advance(1000.0).unwrap();
    manager.free(sequence).unwrap();
    manager.advance(1009.0).unwrap();
    visit(&mut manager, &[2], Some(keep(50, FOREVER)));
    visit(&mut manager, &[3], None);
    assert_eq!([1, 2].map(|prompt| cached(&mut manager, &[prompt])), [1, 0]);
}

#[test]
fn prefix_takes_the_priority_of_what_continues_it() {
    let mut manager = manager(EvictionPolicy::Priority, 4);
    visit(&mut manager, &[1], Some(keep(5, FOREVER)));
    visit(&mut manager, &[1, 2], Some(keep(90, FOREVER)));
    visit(&mut manager, &[3], Some(keep(50, FOREVER)));
    visit(&mut manager, &[4], Some(keep(50, FOREVER)));
    visit(&mut manager, &[5], Some(keep(50, FOREVER)));
    assert_eq!(cached(&mut manager, &[1, 2]), 2);
}

#[test]
fn prefix_whose_priority_fell_still_outlives_what_continues_it() {
    let mut manager = manager(EvictionPolicy::Priority, 3);
    visit(&mut manager, &[1, 2], Some(keep(40, FOREVER)));
    visit(&mut manager, &[1], Some(keep(90, 5.0)));
    manager.advance(6.0).unwrap();
    visit(&mut manager, &[3], Some(keep(70, FOREVER)));
    visit(&mut manager, &[4], Some(keep(70, FOREVER)));
    assert_eq!(cached(&mut manager, &[1, 2]), 1, "the second block goes first");
    visit(&mut manager, &[5], Some(keep(70, FOREVER)));
    assert_eq!(cached(&mut manager, &[1]), 0);
}

#[test]
fn block_that_joins_a_prefix_takes_its_priority() {
    let mut manager = manager(EvictionPolicy::Priority, 4);
    let wanted = manager.create([1, 7].as_slice().into(), Arc::default(), true).unwrap();
    manager.retain(wanted, Retention { priority: 90, seconds: FOREVER }).unwrap();
    let twin = manager.create([1, 8].as_slice().into(), Arc::default(), true).unwrap();
    let plan = manager.begin_plan();
    for sequence in [wanted, twin] {
        manager.allocate_slots(sequence, 1, &ComputedBlocks::default()).unwrap().unwrap();
    }
    manager.commit(plan).unwrap();
    let block = manager.block_table(twin).unwrap()[0];
    manager.free(twin).unwrap();
    for other in 20..30 {
        visit(&mut manager, &[other], Some(keep(50, FOREVER)));
    }
    assert_eq!(manager.pool().state(block), Ok(BlockState::Cached));
}

#[test]
fn pinned_prefix_is_never_evicted_and_is_again_when_the_pin_goes() {
    let config = CacheConfig { block_size: 1, pin_quota_blocks: 2, ..CacheConfig::new(5) };
    let mut manager = KVCacheManager::new(&config).unwrap();
    visit(&mut manager, &[1, 2], None);
    let (pin, num_tokens) = manager.pin([1, 2].as_slice().into(), Arc::default()).unwrap().unwrap();
    assert_eq!((num_tokens, manager.num_pinned(), manager.num_sequences()), (2, (1, 2), 0));
    for other in 20..30 {
        visit(&mut manager, &[other, 0], None);
    }
    assert_eq!(cached(&mut manager, &[1, 2]), 2);
    manager.unpin(pin).unwrap();
    manager.check_integrity().unwrap();
    for other in 20..30 {
        visit(&mut manager, &[other, 0], None);
    }
    assert_eq!((cached(&mut manager, &[1, 2]), manager.num_pinned()), (0, (0, 0)));
    assert_eq!(manager.unpin(pin), Err(Error::UnknownPin(pin.get())));
}

#[test]
fn pin_beyond_the_quota_changes_nothing_and_shared_blocks_count_once() {
    let config = CacheConfig { block_size: 1, pin_quota_blocks: 3, ..CacheConfig::new(9) };
    let mut manager = KVCacheManager::new(&config).unwrap();
    visit(&mut manager, &[1, 2, 3], None);
    visit(&mut manager, &[1, 2, 4, 5], None);
    manager.pin([1, 2].as_slice().into(), Arc::default()).unwrap().unwrap();
    assert_eq!(manager.pin([1, 2, 4, 5].as_slice().into(), Arc::default()), Ok(None));
    assert_eq!(manager.num_pinned(), (1, 2));
    let (pin, _) = manager.pin([1, 2, 3].as_slice().into(), Arc::default()).unwrap().unwrap();
    assert_eq!((pin, manager.num_pinned()), (PinId::new(2), (2, 3)));
    manager.check_integrity().unwrap();
}

#[test]
fn pin_keeps_what_is_cached_of_the_prefix() {
    let config = CacheConfig { block_size: 2, pin_quota_blocks: 3, ..CacheConfig::new(9) };
    let mut manager = KVCacheManager::new(&config).unwrap();
    visit(&mut manager, &[1, 2, 3, 4], None);
    let found = manager.pin([1, 2, 3, 4, 5, 6].as_slice().into(), Arc::default()).unwrap().unwrap();
    assert_eq!(found.1, 4);
    let nothing = manager.pin([7, 8].as_slice().into(), Arc::default()).unwrap().unwrap();
    assert_eq!(nothing.1, 0);
}

#[test]
fn reset_of_the_cache_takes_the_pins_with_it() {
    let config = CacheConfig { block_size: 1, pin_quota_blocks: 3, ..CacheConfig::new(9) };
    let mut manager = KVCacheManager::new(&config).unwrap();
    visit(&mut manager, &[1, 2], None);
    let (pin, _) = manager.pin([1, 2].as_slice().into(), Arc::default()).unwrap().unwrap();
    manager.reset_prefix_cache();
    manager.check_integrity().unwrap();
    assert_eq!((manager.unpin(pin), manager.pool().num_free()), (Err(Error::UnknownPin(pin.get())), 8));
}

#[test]
fn quota_of_pins_is_kept_from_requests() {
    let config = CacheConfig { pin_quota_blocks: 3, ..CacheConfig::new(9) };
    assert_eq!(config.usable_blocks(), 5);
    let none_left = CacheConfig { pin_quota_blocks: 8, ..CacheConfig::new(9) };
    assert!(matches!(none_left.validate(), Err(Error::InvalidArgument { argument: "pin_quota_blocks", .. })));
}

#[test]
fn pins_and_priorities_are_refused_where_the_configuration_has_none() {
    let mut manager = manager(EvictionPolicy::Lru, 4);
    let sequence = manager.create([1].as_slice().into(), Arc::default(), true).unwrap();
    let refused = manager.retain(sequence, Retention { priority: 1, seconds: 1.0 });
    assert!(matches!(refused, Err(Error::Unsupported(_))));
    let refused = manager.pin([1].as_slice().into(), Arc::default());
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "pin_quota_blocks", .. })));
    assert!(Retention { priority: 101, seconds: 1.0 }.validate().is_err());
    assert!(Retention { priority: 1, seconds: f64::NAN }.validate().is_err());
}

fn with_adapter(lora_id: i64) -> Arc<Identity> {
    Arc::new(Identity { root: RootKey { lora_id: Some(lora_id), cache_salt: None }, images: Vec::new() })
}

#[test]
fn adapter_that_is_loaded_anew_finds_nothing_of_its_old_weights() {
    let config = CacheConfig { block_size: 1, pin_quota_blocks: 2, ..CacheConfig::new(20) };
    let mut manager = KVCacheManager::new(&config).unwrap();
    let compute = |manager: &mut KVCacheManager, adapter| {
        let sequence = manager.create([1, 2, 3].as_slice().into(), with_adapter(adapter), true).unwrap();
        let plan = manager.begin_plan();
        let hits = manager.get_computed_blocks(sequence).unwrap();
        manager.allocate_slots(sequence, 3 - hits.num_tokens(), &hits).unwrap().unwrap();
        manager.commit(plan).unwrap();
        (sequence, hits.num_tokens())
    };
    for adapter in [1, 2] {
        let (sequence, _) = compute(&mut manager, adapter);
        manager.free(sequence).unwrap();
    }
    manager.pin([1, 2].as_slice().into(), with_adapter(1)).unwrap().unwrap();
    let (running, num_hit) = compute(&mut manager, 1);
    assert_eq!(num_hit, 2);
    let num_free = manager.pool().num_free();
    manager.invalidate_lora(1);
    manager.check_integrity().unwrap();
    // The block of the third token that nobody holds: the running sequence computed it again.
    assert_eq!((manager.num_pinned(), manager.pool().num_free()), ((0, 0), num_free + 1));
    assert_eq!([compute(&mut manager, 1).1, compute(&mut manager, 2).1], [0, 2]);
    manager.free(running).unwrap();
    manager.check_integrity().unwrap();
    assert_eq!(compute(&mut manager, 1).1, 2, "what the new weights computed is found");
    manager.reset_prefix_cache();
    assert_eq!([compute(&mut manager, 1).1, compute(&mut manager, 2).1], [0, 0]);
    manager.check_integrity().unwrap();
}
