//! Several cache groups in one pool: windows that blocks leave, hits on which all groups agree, tables per group.

#[path = "scene/groups.rs"]
mod groups;
mod scene;

use groups::config;
use pagedkv_core::step_plan::Field;
use pagedkv_core::{
    BlockState, CacheConfig, ComputedBlocks, Error, KVCacheManager, NULL_BLOCK, NewRequest, Scheduler, SchedulerConfig,
    SequenceId, StepPlan,
};
use scene::{compute, create, grow, grow_anew};

fn manager(block_size: u32, usable_blocks: u32, groups: &[(u32, Option<u32>)]) -> KVCacheManager {
    KVCacheManager::new(&config(block_size, usable_blocks, groups)).expect("a valid configuration")
}

/// Which columns of a sequence's table in a group hold a block.
fn held(manager: &KVCacheManager, sequence: SequenceId, group: usize) -> Vec<bool> {
    let table = manager.group_table(sequence, group).expect("a live sequence");
    table.iter().map(|&block| block != NULL_BLOCK).collect()
}

fn tokens(len: i32) -> Vec<i32> {
    (0..len).collect()
}

#[test]
fn blocks_leave_a_window_when_the_plan_commits_and_not_before() {
    let mut manager = manager(2, 16, &[(1, None), (1, Some(3))]);
    let sequence = create(&mut manager, &tokens(9));
    let plan = manager.begin_plan();
    grow(&mut manager, sequence, 8).unwrap();
    assert_eq!(held(&manager, sequence, 1), [true; 4]);
    manager.commit(plan).unwrap();
    // The query at 8 sees the positions 6 and 7.
    assert_eq!(held(&manager, sequence, 1), [false, false, false, true]);
    assert_eq!(held(&manager, sequence, 0), [true; 4]);
    manager.check_integrity().unwrap();
}

#[test]
fn block_that_left_a_window_waits_for_the_plan_in_flight_that_names_it() {
    let mut manager = manager(2, 8, &[(1, Some(3))]);
    let sequence = create(&mut manager, &tokens(9));
    let first = manager.begin_plan();
    grow(&mut manager, sequence, 6).unwrap();
    let leaving = manager.group_table(sequence, 0).unwrap()[0];
    let second = manager.begin_plan();
    grow_anew(&mut manager, sequence, 2).unwrap();
    manager.commit(first).unwrap();
    assert_eq!(manager.pool().state(leaving), Ok(BlockState::Fenced));
    manager.commit(second).unwrap();
    assert_eq!(manager.pool().state(leaving), Ok(BlockState::Cached));
}

#[test]
fn rollback_needs_no_block_that_left_a_window() {
    let mut manager = manager(2, 16, &[(1, Some(3))]);
    let sequence = create(&mut manager, &tokens(20));
    let first = manager.begin_plan();
    grow(&mut manager, sequence, 6).unwrap();
    let second = manager.begin_plan();
    grow_anew(&mut manager, sequence, 8).unwrap();
    manager.commit(first).unwrap();
    manager.rollback(second).unwrap();
    assert_eq!(held(&manager, sequence, 0), [false, false, true]);
    assert_eq!(manager.num_computed_tokens(sequence), Ok(6));
    manager.check_integrity().unwrap();
}

#[test]
fn hit_needs_only_what_the_window_holds() {
    let mut manager = manager(2, 32, &[(1, Some(3)), (1, None)]);
    let first = create(&mut manager, &tokens(13));
    compute(&mut manager, first, 12);
    let second = create(&mut manager, &tokens(14));
    let computed = manager.get_computed_blocks(second).unwrap();
    assert_eq!(computed.num_tokens(), 12);
    let null: Vec<_> = computed.group_blocks(0).iter().map(|&block| block == NULL_BLOCK).collect();
    assert_eq!(null, [true, true, true, true, true, false]);
    assert!(computed.group_blocks(1).iter().all(|&block| block != NULL_BLOCK));
    let num_held = manager.pool().num_held();
    manager.begin_plan();
    manager.allocate_slots(second, 1, &computed).unwrap().unwrap();
    assert_eq!(manager.pool().num_held(), num_held + 2, "one new block per group, and no other");
}

/// The blocks of one window are gone at one length and those of another at another: the hit is where both are there.
#[test]
fn hit_is_the_greatest_length_on_which_all_groups_agree() {
    let mut manager = manager(1, 64, &[(1, None), (1, Some(3)), (2, Some(3))]);
    let first = create(&mut manager, &tokens(12));
    for _ in 0..3 {
        compute(&mut manager, first, 4);
    }
    manager.free(first).unwrap();
    let second = create(&mut manager, &tokens(20));
    assert_eq!(manager.get_computed_blocks(second).unwrap().num_tokens(), 12);
    // Other tokens take all that is free, and then the blocks that were released first.
    let mut found = Vec::new();
    for i in 0.. {
        let other = create(&mut manager, &[100 + i, 100 + i]);
        let plan = manager.begin_plan();
        if grow_anew(&mut manager, other, 2).is_none() {
            manager.rollback(plan).unwrap();
            break;
        }
        manager.commit(plan).unwrap();
        let num_tokens = manager.get_computed_blocks(second).unwrap().num_tokens();
        assert!(num_tokens.is_multiple_of(2), "every group has whole blocks");
        found.push(num_tokens);
        manager.check_integrity().unwrap();
    }
    assert!(found.is_sorted_by(|one, other| one >= other), "{found:?}");
    assert_eq!((found[0], found.last()), (12, Some(&0)));
}

#[test]
fn truncation_keeps_what_is_computed_where_the_window_is_whole() {
    let mut manager = manager(2, 16, &[(1, Some(3)), (1, None)]);
    let sequence = create(&mut manager, &tokens(13));
    compute(&mut manager, sequence, 12);
    manager.truncate(sequence, 12).unwrap();
    assert_eq!(manager.num_computed_tokens(sequence), Ok(12));
    manager.truncate(sequence, 11).unwrap();
    assert_eq!(manager.num_computed_tokens(sequence), Ok(0), "position 9 has left the window");
    assert!(held(&manager, sequence, 1).is_empty());
    // What the cache still holds is a hit.
    assert_eq!(manager.get_computed_blocks(sequence).unwrap().num_tokens(), 10);
    manager.check_integrity().unwrap();
}

#[test]
fn writers_of_a_shared_block_copy_it_in_every_group_that_it_does_not_end_in() {
    let mut manager = manager(2, 16, &[(1, None), (2, Some(8))]);
    let parent = create(&mut manager, &tokens(8));
    compute(&mut manager, parent, 2);
    let child = manager.fork(parent).unwrap();
    manager.begin_plan();
    let slots = grow_anew(&mut manager, child, 1).unwrap();
    let groups: Vec<_> = slots.copies.iter().map(|copy| copy.group).collect();
    assert_eq!(groups, [1], "two tokens are a whole block of group 0 and half a block of group 1");
    assert_eq!(slots.slot_mapping.len(), 2, "one row per group");
}

#[test]
fn lookup_of_another_sequence_is_stale_in_every_group() {
    let mut manager = manager(1, 16, &[(1, None), (1, Some(2))]);
    let first = create(&mut manager, &tokens(5));
    compute(&mut manager, first, 4);
    let [one, other] = [0, 1].map(|_| create(&mut manager, &tokens(5)));
    let computed = manager.get_computed_blocks(one).unwrap();
    manager.begin_plan();
    assert_eq!(manager.allocate_slots(other, 1, &computed), Err(Error::StaleComputedBlocks));
    assert!(manager.allocate_slots(other, 1, &ComputedBlocks::default()).unwrap().is_some());
}

fn scheduler(cache: &CacheConfig, limits: SchedulerConfig) -> Scheduler {
    let limits = SchedulerConfig { max_num_seqs: 4, max_model_len: 64, ..limits };
    Scheduler::new(cache, &limits).expect("a valid configuration")
}

fn updates(plan: &StepPlan) -> Vec<[i32; 4]> {
    plan.i32s(Field::TableUpdates).chunks(4).map(|update| update.try_into().expect("four numbers")).collect()
}

#[test]
fn plan_tells_of_what_left_a_window_and_repeats_it_after_a_rollback() {
    let mut scheduler = scheduler(&config(2, 32, &[(1, Some(3)), (1, None)]), SchedulerConfig::default());
    scheduler.add_request(NewRequest::new("r", tokens(6), 9)).unwrap();
    let prefill = scheduler.schedule().unwrap();
    assert_eq!(updates(&prefill).len(), 6, "a new row comes whole, in every group");
    scheduler.commit(prefill.id(), &[7]).unwrap();
    let decode = scheduler.schedule().unwrap();
    let left = [[0, 0, 0, 0], [0, 0, 1, 0]];
    assert!(left.iter().all(|update| updates(&decode).contains(update)), "{:?}", updates(&decode));
    scheduler.rollback(decode.id()).unwrap();
    let again = scheduler.schedule().unwrap();
    assert!(left.iter().all(|update| updates(&again).contains(update)), "{:?}", updates(&again));
    scheduler.commit(again.id(), &[7]).unwrap();
    let next = scheduler.schedule().unwrap();
    assert!(!updates(&next).contains(&left[0]), "what was told is not told again");
}

#[test]
fn plan_has_a_row_of_slots_per_group() {
    let mut scheduler = scheduler(&config(1, 32, &[(1, None), (3, Some(6))]), SchedulerConfig::default());
    let handle = scheduler.add_request(NewRequest::new("r", tokens(4), 2)).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!((plan.sizes().num_groups, plan.i64s(Field::SlotMapping).len()), (2, 8));
    for (group, block_size) in [(0, 1), (1, 3)] {
        let table = scheduler.group_table(handle, 0, group).unwrap().expect("it holds blocks");
        let slot = |position: usize| {
            i64::from(table[position / block_size].get()) * block_size as i64 + (position % block_size) as i64
        };
        assert_eq!(plan.i64s(Field::SlotMapping)[group * 4..][..4], [0, 1, 2, 3].map(slot));
    }
    let refused = scheduler.group_table(handle, 0, 2).unwrap_err();
    assert!(matches!(refused, Error::InvalidArgument { argument: "group", .. }));
}

#[test]
fn rejected_drafts_leave_what_the_window_needs() {
    let limits = SchedulerConfig { lookahead: 4, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(&config(1, 32, &[(1, Some(2))]), limits);
    let handle = scheduler.add_request(NewRequest::new("r", tokens(4), 9)).unwrap();
    let prefill = scheduler.schedule().unwrap();
    scheduler.commit(prefill.id(), &[4]).unwrap();
    scheduler.set_draft_tokens(&[0], &[0, 4], &[5, 6, 7, 8]).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit_drafts(plan.id(), &[9], 1).unwrap();
    // The query at 5 sees position 4.
    let table = scheduler.group_table(handle, 0, 0).unwrap().expect("it holds blocks");
    assert_eq!(table.iter().map(|&block| block != NULL_BLOCK).collect::<Vec<_>>(), [false, false, false, false, true]);
    scheduler.check_integrity().unwrap();
}

#[test]
fn request_longer_than_the_pool_runs_where_windows_hold_it() {
    let limits = SchedulerConfig { max_num_batched_tokens: 4, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(&config(2, 6, &[(1, Some(5))]), limits);
    let handle = scheduler.add_request(NewRequest::new("r", tokens(30), 30)).unwrap();
    let mut most = 0;
    while scheduler.num_unfinished_requests() > 0 {
        let plan = scheduler.schedule().unwrap();
        most = most.max(scheduler.manager().pool().num_held());
        scheduler.commit(plan.id(), &vec![1; plan.sizes().num_samples as usize]).unwrap();
    }
    assert!(most <= 5, "{most} blocks of two tokens for windows of five and steps of four");
    assert!(scheduler.group_table(handle, 0, 0).is_err());
}

#[test]
fn request_that_windows_could_not_hold_is_refused_with_what_it_needs() {
    let limits = SchedulerConfig { max_num_batched_tokens: 8, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(&config(2, 8, &[(1, Some(5)), (1, None)]), limits);
    // The window needs ceil((4 + 8) / 2) + 1 blocks, the other group 14.
    let refused = scheduler.add_request(NewRequest::new("r", tokens(8), 21)).unwrap_err();
    assert_eq!(refused, Error::NeverFits { needed: 7 + 14, usable: 8 });
}

#[test]
fn more_tokens_per_step_are_refused_when_a_window_could_not_hold_them() {
    let limits = SchedulerConfig { max_num_batched_tokens: 4, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(&config(2, 5, &[(1, Some(5))]), limits);
    scheduler.add_request(NewRequest::new("r", tokens(20), 4)).unwrap();
    let plan = scheduler.schedule().unwrap();
    let update = pagedkv_core::scheduler::LimitsUpdate { max_num_batched_tokens: Some(8), ..Default::default() };
    let refused = scheduler.update_limits(update).unwrap_err();
    assert!(matches!(refused, Error::InvalidArgument { argument: "max_num_batched_tokens", .. }), "{refused:?}");
    scheduler.commit(plan.id(), &[]).unwrap();
}

#[test]
fn no_prefix_of_a_window_group_is_common_to_all_queries() {
    let mut scheduler = scheduler(&config(1, 32, &[(1, None), (1, Some(9))]), SchedulerConfig::default());
    let mut request = NewRequest::new("r", tokens(4), 4);
    request.n = 2;
    scheduler.add_request(request).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[1, 2]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::NumCommonPrefixBlocks), [4, 0]);
}
