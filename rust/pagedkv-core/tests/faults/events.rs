//! What other processes are told of the cache.

use pagedkv_core::{CacheConfig, EventConfig, KVCacheEvent, KVCacheManager};

use crate::scene::{cache, compute, create, grow_anew};

fn telling(usable_blocks: u32, max_pending: u32) -> KVCacheManager {
    let events = Some(EventConfig { max_pending, ..EventConfig::default() });
    let config = CacheConfig { block_size: 2, events, ..CacheConfig::new(usable_blocks + 1) };
    KVCacheManager::new(&config).expect("a valid configuration")
}

/// Kinds of events, and how many blocks each is about.
fn take(manager: &mut KVCacheManager) -> Vec<(&'static str, usize)> {
    let kind = |event| match event {
        KVCacheEvent::BlockStored(stored) => ("stored", stored.block_hashes.len()),
        KVCacheEvent::BlockRemoved(removed) => ("removed", removed.block_hashes.len()),
        KVCacheEvent::AllBlocksCleared => ("cleared", 0),
    };
    manager.take_events().expect("events are on").events.into_iter().map(kind).collect()
}

#[test]
fn fault_34_a_reset_is_told() {
    let mut manager = telling(8, 100);
    cache(&mut manager, &[0; 5]);
    take(&mut manager);
    manager.reset_prefix_cache();
    assert_eq!(take(&mut manager), [("cleared", 0)]);
}

#[test]
fn fault_35_a_prefix_is_removed_when_its_last_copy_goes_and_not_before() {
    let mut manager = telling(4, 100);
    let sequences = [create(&mut manager, &[0; 2]), create(&mut manager, &[0; 2])];
    for sequence in sequences {
        let plan = manager.begin_plan();
        grow_anew(&mut manager, sequence, 2).expect("there is room");
        manager.commit(plan).unwrap();
    }
    assert_eq!(take(&mut manager), [("stored", 1)], "two copies are one thing to find");
    sequences.into_iter().for_each(|sequence| manager.free(sequence).unwrap());
    let taker = create(&mut manager, &[1; 8]);
    manager.begin_plan();
    grow_anew(&mut manager, taker, 6).expect("there is room");
    assert_eq!(take(&mut manager), [], "a copy is left");
    grow_anew(&mut manager, taker, 2).expect("there is room");
    assert_eq!(take(&mut manager), [("removed", 1)]);
}

#[test]
fn fault_36_a_reader_sees_by_the_numbers_that_it_missed_something_and_is_told_all_anew() {
    let mut manager = telling(16, 2);
    let mut next = 0;
    for first in 0..6 {
        cache(&mut manager, &[first; 3]);
        if first < 2 {
            let batch = manager.take_events().unwrap();
            assert_eq!((batch.sequence_number, batch.num_lost), (next, 0), "no gap");
            next += batch.events.len() as u64;
        }
    }
    let late = manager.take_events().unwrap();
    assert_eq!((late.sequence_number, late.num_lost > 0), (next + late.num_lost, true));
    assert!(matches!(late.events[0], KVCacheEvent::AllBlocksCleared));
}

#[test]
fn fault_36_a_reader_that_comes_late_gets_the_state_and_the_number_to_go_on_from() {
    let mut manager = telling(16, 100);
    let running = create(&mut manager, &[0; 5]);
    compute(&mut manager, running, 5);
    let snapshot = manager.event_snapshot().unwrap();
    let stored: usize = snapshot
        .events
        .iter()
        .map(|event| match event {
            KVCacheEvent::BlockStored(stored) => stored.block_hashes.len(),
            _ => 0,
        })
        .sum();
    assert_eq!(stored, 2);
    let batch = manager.take_events().unwrap();
    assert_eq!(batch.sequence_number + batch.events.len() as u64, snapshot.next_sequence_number);
}
