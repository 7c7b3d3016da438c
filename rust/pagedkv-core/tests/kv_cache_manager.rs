//! What the manager does for sequences, one behaviour a test.

mod scene;

use pagedkv_core::{ComputedBlocks, Error, Identity, PlanId};
use scene::{cache, compute, create, create_as, grow, grow_anew, manager, num_hit_tokens, table};

// --- growth

#[test]
fn kv_cache_manager_gives_each_token_the_next_slot_of_its_blocks() {
    let mut manager = manager(4, 8);
    let sequence = create(&mut manager, &[0; 6]);
    manager.begin_plan();
    let slots = grow(&mut manager, sequence, 6).unwrap().slot_mapping;
    let blocks = table(&manager, sequence);
    let slot = |position: usize| i64::from(blocks[position / 4].get()) * 4 + position as i64 % 4;
    assert_eq!(slots.as_slice(), [0, 1, 2, 3, 4, 5].map(slot));
}

#[test]
fn kv_cache_manager_takes_no_block_while_the_last_one_has_slots() {
    let mut manager = manager(4, 8);
    let sequence = create(&mut manager, &[0; 4]);
    compute(&mut manager, sequence, 3);
    compute(&mut manager, sequence, 1);
    assert_eq!(table(&manager, sequence).len(), 1);
}

#[test]
fn kv_cache_manager_answers_none_and_changes_nothing_when_there_is_no_room() {
    let mut manager = manager(2, 2);
    let sequence = create(&mut manager, &[0; 5]);
    manager.begin_plan();
    let before = format!("{manager:?}");
    assert_eq!(grow(&mut manager, sequence, 5), None);
    assert_eq!(format!("{manager:?}"), before);
}

#[test]
fn kv_cache_manager_counts_cached_blocks_that_it_hits_as_taken() {
    let mut manager = manager(1, 3);
    cache(&mut manager, &[0, 0, 0]);
    let sequence = create(&mut manager, &[0; 4]);
    manager.begin_plan();
    assert_eq!(grow(&mut manager, sequence, 1), None, "three hits leave no block for the fourth token");
}

#[test]
fn kv_cache_manager_restores_the_whole_pool_when_everything_is_freed() {
    let mut manager = manager(2, 8);
    let parent = create(&mut manager, &[0; 6]);
    compute(&mut manager, parent, 5);
    let child = manager.fork(parent).unwrap();
    compute(&mut manager, child, 1);
    manager.free(parent).unwrap();
    manager.free(child).unwrap();
    assert_eq!((manager.pool().num_available(), manager.usage()), (8, 0.0));
}

#[test]
fn kv_cache_manager_refuses_growth_without_a_plan() {
    let mut manager = manager(2, 8);
    let sequence = create(&mut manager, &[0]);
    assert_eq!(manager.allocate_slots(sequence, 1, &ComputedBlocks::default()), Err(Error::NoPlan));
}

// --- stale ids

#[test]
fn kv_cache_manager_refuses_to_free_a_sequence_twice() {
    let mut manager = manager(2, 8);
    let sequence = create(&mut manager, &[0]);
    manager.free(sequence).unwrap();
    assert_eq!(manager.free(sequence), Err(Error::UnknownSequence(sequence.to_bits())));
}

#[test]
fn kv_cache_manager_does_not_take_a_stale_id_for_a_newer_sequence() {
    let mut manager = manager(2, 8);
    let stale = create(&mut manager, &[0]);
    manager.free(stale).unwrap();
    create(&mut manager, &[0]);
    assert_eq!(manager.free(stale), Err(Error::UnknownSequence(stale.to_bits())));
}

// --- forks

#[test]
fn fork_takes_no_block_even_when_there_is_none_left() {
    let mut manager = manager(2, 1);
    let parent = create(&mut manager, &[0]);
    compute(&mut manager, parent, 1);
    let child = manager.fork(parent).unwrap();
    assert_eq!(table(&manager, child), table(&manager, parent));
}

#[test]
fn fork_of_a_sequence_in_flight_is_refused() {
    let mut manager = manager(2, 8);
    let parent = create(&mut manager, &[0]);
    manager.begin_plan();
    grow(&mut manager, parent, 1).unwrap();
    assert_eq!(manager.fork(parent), Err(Error::SequenceInFlight(parent.to_bits())));
}

#[test]
fn writers_of_a_shared_block_copy_it_but_for_the_last() {
    let mut manager = manager(4, 8);
    let first = create(&mut manager, &[0; 3]);
    compute(&mut manager, first, 2);
    let sharers = [first, manager.fork(first).unwrap(), manager.fork(first).unwrap()];
    manager.begin_plan();
    let copies = sharers.map(|sharer| !grow(&mut manager, sharer, 1).unwrap().copies.is_empty());
    assert_eq!(copies, [true, true, false]);
}

#[test]
fn sole_owner_of_a_block_writes_into_it_without_a_copy() {
    let mut manager = manager(4, 8);
    let parent = create(&mut manager, &[0; 3]);
    compute(&mut manager, parent, 2);
    let child = manager.fork(parent).unwrap();
    manager.free(parent).unwrap();
    manager.begin_plan();
    assert_eq!(grow(&mut manager, child, 1).unwrap().copies, []);
}

#[test]
fn forks_that_part_on_a_block_border_copy_nothing() {
    let mut manager = manager(2, 8);
    let parent = create(&mut manager, &[0; 3]);
    compute(&mut manager, parent, 2);
    let child = manager.fork(parent).unwrap();
    manager.begin_plan();
    let copies = [parent, child].map(|sharer| grow(&mut manager, sharer, 1).unwrap().copies.first().copied());
    assert_eq!(copies, [None, None]);
}

#[test]
fn growth_that_has_no_room_for_its_copy_answers_none() {
    let mut manager = manager(4, 1);
    let parent = create(&mut manager, &[0; 3]);
    compute(&mut manager, parent, 2);
    let child = manager.fork(parent).unwrap();
    manager.begin_plan();
    assert_eq!(grow(&mut manager, child, 1), None);
}

// --- cutting

#[test]
fn truncate_releases_the_blocks_behind_the_cut() {
    let mut manager = manager(2, 8);
    let sequence = create(&mut manager, &[0; 6]);
    compute(&mut manager, sequence, 6);
    manager.truncate(sequence, 3).unwrap();
    assert_eq!((table(&manager, sequence).len(), manager.num_computed_tokens(sequence)), (2, Ok(3)));
}

#[test]
fn truncate_at_every_length_keeps_the_blocks_that_it_needs() {
    for length in 1..=7 {
        let mut manager = manager(3, 8);
        let sequence = create(&mut manager, &[0; 7]);
        compute(&mut manager, sequence, 7);
        manager.truncate(sequence, length).unwrap();
        assert_eq!(table(&manager, sequence).len(), length.div_ceil(3) as usize, "length {length}");
    }
}

#[test]
fn cut_sequence_copies_a_block_whose_prefix_others_continue() {
    let mut manager = manager(2, 8);
    let sequence = create(&mut manager, &[0; 4]);
    compute(&mut manager, sequence, 4);
    manager.truncate(sequence, 1).unwrap();
    manager.append_tokens(sequence, &[1]).unwrap();
    manager.begin_plan();
    assert!(!grow(&mut manager, sequence, 1).unwrap().copies.is_empty());
}

#[test]
fn cut_sequence_takes_its_block_out_of_the_cache_when_it_writes_into_it() {
    let mut manager = manager(2, 8);
    let sequence = create(&mut manager, &[0; 2]);
    compute(&mut manager, sequence, 2);
    manager.truncate(sequence, 1).unwrap();
    manager.append_tokens(sequence, &[1]).unwrap();
    compute(&mut manager, sequence, 1);
    let other = create(&mut manager, &[0; 3]);
    assert_eq!(num_hit_tokens(&manager, other), 0);
}

// --- plans

#[test]
fn plans_end_in_the_order_in_which_they_were_made() {
    let mut manager = manager(2, 8);
    let (oldest, found) = (manager.begin_plan(), manager.begin_plan());
    assert_eq!(manager.commit(found), Err(Error::PlanOutOfOrder { found, oldest }));
}

#[test]
fn commit_of_a_plan_that_was_cancelled_with_an_earlier_one_is_refused() {
    let mut manager = manager(2, 8);
    let (first, second) = (manager.begin_plan(), manager.begin_plan());
    manager.rollback(first).unwrap();
    assert_eq!(manager.commit(second), Err(Error::PlanNotInFlight(second)));
}

#[test]
fn commit_of_a_plan_that_was_never_made_is_refused() {
    let mut manager = manager(2, 8);
    let never = PlanId::new(7);
    assert_eq!(manager.commit(never), Err(Error::PlanNotInFlight(never)));
}

#[test]
fn rollback_gives_back_new_blocks_and_computed_lengths() {
    let mut manager = manager(2, 8);
    let sequence = create(&mut manager, &[0; 5]);
    compute(&mut manager, sequence, 1);
    let before = table(&manager, sequence);
    let plan = manager.begin_plan();
    grow(&mut manager, sequence, 4).unwrap();
    manager.rollback(plan).unwrap();
    assert_eq!((table(&manager, sequence), manager.num_computed_tokens(sequence)), (before, Ok(1)));
}

#[test]
fn rollback_lets_a_copied_entry_name_its_source_again() {
    let mut manager = manager(2, 8);
    let parent = create(&mut manager, &[0; 2]);
    compute(&mut manager, parent, 1);
    let child = manager.fork(parent).unwrap();
    let plan = manager.begin_plan();
    grow(&mut manager, child, 1).unwrap();
    manager.rollback(plan).unwrap();
    assert_eq!(table(&manager, child), table(&manager, parent));
}

#[test]
fn rollback_undoes_the_plans_behind_it_as_well() {
    let mut manager = manager(1, 8);
    let sequence = create(&mut manager, &[0; 2]);
    let first = manager.begin_plan();
    grow(&mut manager, sequence, 1).unwrap();
    manager.begin_plan();
    grow(&mut manager, sequence, 1).unwrap();
    manager.rollback(first).unwrap();
    assert_eq!(table(&manager, sequence), []);
}

#[test]
fn block_released_while_a_plan_in_flight_names_it_waits_for_that_plan() {
    let mut manager = manager(2, 8);
    let sequence = create(&mut manager, &[0]);
    let plan = manager.begin_plan();
    grow(&mut manager, sequence, 1).unwrap();
    manager.free(sequence).unwrap();
    assert_eq!((manager.pool().num_fenced(), manager.pool().num_available()), (1, 7));
    manager.commit(plan).unwrap();
    assert_eq!((manager.pool().num_fenced(), manager.pool().num_available()), (0, 8));
}

#[test]
fn source_of_a_copy_waits_for_the_plan_that_reads_it() {
    let mut manager = manager(4, 8);
    let parent = create(&mut manager, &[0; 3]);
    compute(&mut manager, parent, 2);
    let child = manager.fork(parent).unwrap();
    manager.begin_plan();
    grow(&mut manager, child, 1).unwrap();
    manager.free(parent).unwrap();
    assert_eq!(manager.pool().num_fenced(), 1);
}

// --- identities

#[test]
fn images_that_overlap_are_refused() {
    let mut manager = manager(2, 8);
    let image = |start| pagedkv_core::ImageSpan { start, len: 2, digest: [1].into() };
    let identity = Identity { images: vec![image(0), image(1)], ..Identity::default() };
    let refused = manager.create([0; 4].into(), identity.into(), true);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "image_spans", .. })));
}

#[test]
fn sequence_that_does_not_use_the_cache_neither_reads_nor_feeds_it() {
    let mut manager = manager(2, 8);
    let apart = manager.create([0; 5].into(), Identity::default().into(), false).unwrap();
    compute(&mut manager, apart, 5);
    let fed = create(&mut manager, &[0; 5]);
    assert_eq!(num_hit_tokens(&manager, fed), 0);
    compute(&mut manager, fed, 5);
    assert_eq!(num_hit_tokens(&manager, apart), 0);
}

#[test]
fn growth_of_a_sequence_of_another_identity_shares_no_block() {
    let mut manager = manager(2, 8);
    let plain = create(&mut manager, &[0; 4]);
    compute(&mut manager, plain, 4);
    let salted = create_as(&mut manager, &[0; 4], scene::salted(b"s"));
    manager.begin_plan();
    grow_anew(&mut manager, salted, 4).unwrap();
    let shared = table(&manager, plain).iter().any(|block| table(&manager, salted).contains(block));
    assert!(!shared);
}
