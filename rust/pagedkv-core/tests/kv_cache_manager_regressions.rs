//! Faults of the manager that were found, each named after what went wrong, each seen failing first.

mod scene;

use pagedkv_core::{ComputedBlocks, Error};
use scene::{compute, create, grow, grow_anew, num_hit_tokens, table};

#[test]
fn sequence_of_before_a_reset_found_blocks_of_before_it() {
    let mut manager = scene::manager(2, 15);
    let running = create(&mut manager, &[0; 5]);
    compute(&mut manager, running, 5);
    let waiting = create(&mut manager, &[0; 5]);
    manager.reset_prefix_cache();
    assert_eq!(num_hit_tokens(&manager, waiting), 0);
}

#[test]
fn sequence_that_waited_through_a_reset_did_not_share_what_it_computed_after_it() {
    let mut manager = scene::manager(2, 15);
    let waiting = create(&mut manager, &[0; 5]);
    manager.reset_prefix_cache();
    compute(&mut manager, waiting, 5);
    let later = create(&mut manager, &[0; 5]);
    assert_eq!(num_hit_tokens(&manager, later), 4);
}

#[test]
fn fork_of_a_sequence_with_a_token_computed_and_not_told_broke_law_3() {
    let mut manager = scene::manager(2, 15);
    let parent = create(&mut manager, &[0]);
    let plan = manager.begin_plan();
    manager.allocate_slots_with_drafts(parent, 1, 1, &ComputedBlocks::default()).unwrap();
    manager.commit(plan).unwrap();
    let child = manager.fork(parent).unwrap();
    manager.append_tokens(parent, &[0]).unwrap();
    manager.append_tokens(child, &[1]).unwrap();
    assert_eq!(manager.num_computed_tokens(child), Ok(1));
    assert_eq!(manager.check_integrity(), Ok(()));
}

#[test]
fn growth_after_a_rollback_of_the_newest_plan_stayed_in_flight_for_ever() {
    let mut manager = scene::manager(2, 15);
    let sequence = create(&mut manager, &[0; 3]);
    let plan = manager.begin_plan();
    let cancelled = manager.begin_plan();
    manager.rollback(cancelled).unwrap();
    grow(&mut manager, sequence, 1).unwrap();
    manager.commit(plan).unwrap();
    assert!(manager.fork(sequence).is_ok());
}

#[test]
fn last_writer_of_a_shared_block_wrote_into_it_again_after_a_rollback_had_shared_it_again() {
    let mut manager = scene::manager(2, 15);
    let first = create(&mut manager, &[0; 3]);
    compute(&mut manager, first, 1);
    let last = manager.fork(first).unwrap();
    let plan = manager.begin_plan();
    grow(&mut manager, first, 1).unwrap();
    grow(&mut manager, last, 1).unwrap();
    manager.rollback(plan).unwrap();
    manager.begin_plan();
    assert!(!grow(&mut manager, last, 1).unwrap().copies.is_empty(), "the block is shared and was not copied");
}

#[test]
fn computed_blocks_of_one_sequence_were_taken_for_another() {
    let mut manager = scene::manager(2, 15);
    let first = create(&mut manager, &[0; 5]);
    compute(&mut manager, first, 5);
    let same = create(&mut manager, &[0; 5]);
    let other = create(&mut manager, &[1; 5]);
    manager.begin_plan();
    let computed = manager.get_computed_blocks(same).unwrap();
    assert_eq!(manager.allocate_slots(other, 1, &computed), Err(Error::StaleComputedBlocks));
}

#[test]
fn computed_blocks_were_taken_for_a_sequence_that_was_cut_shorter_than_they_are() {
    let mut manager = scene::manager(2, 15);
    let first = create(&mut manager, &[0; 5]);
    compute(&mut manager, first, 5);
    let same = create(&mut manager, &[0; 5]);
    manager.begin_plan();
    let computed = manager.get_computed_blocks(same).unwrap();
    manager.truncate(same, 1).unwrap();
    assert_eq!(manager.allocate_slots(same, 1, &computed), Err(Error::StaleComputedBlocks));
}

#[test]
fn cut_sequence_wrote_over_tokens_that_a_rollback_gave_back() {
    let mut manager = scene::manager(3, 15);
    let cut = create(&mut manager, &[0; 4]);
    compute(&mut manager, cut, 2);
    let whole = manager.fork(cut).unwrap();
    manager.truncate(cut, 1).unwrap();
    manager.append_tokens(cut, &[1]).unwrap();
    manager.begin_plan();
    grow(&mut manager, whole, 1).unwrap();
    assert!(
        !grow(&mut manager, cut, 1).unwrap().copies.is_empty(),
        "a rollback gives the block back to the other sequence"
    );
}

#[test]
fn cut_sequence_wrote_over_tokens_that_the_same_plan_read_for_a_freed_one() {
    let mut manager = scene::manager(3, 15);
    let whole = create(&mut manager, &[0; 4]);
    compute(&mut manager, whole, 3);
    let cut = manager.fork(whole).unwrap();
    manager.truncate(cut, 1).unwrap();
    manager.append_tokens(cut, &[1]).unwrap();
    manager.begin_plan();
    grow(&mut manager, whole, 1).unwrap();
    manager.free(whole).unwrap();
    assert!(!grow(&mut manager, cut, 1).unwrap().copies.is_empty(), "the plan still reads the block");
}

#[test]
fn prefix_went_before_what_continues_it_when_a_rollback_took_its_newer_copy() {
    let mut manager = scene::manager(1, 15);
    let first = create(&mut manager, &[0, 0, 0]);
    compute(&mut manager, first, 2);
    manager.free(first).unwrap();
    let second = create(&mut manager, &[0, 0, 1]);
    let plan = manager.begin_plan();
    grow_anew(&mut manager, second, 1).unwrap();
    grow(&mut manager, second, 1).unwrap();
    manager.rollback(plan).unwrap();
    assert_eq!(manager.check_integrity(), Ok(()));
}

#[test]
fn lookup_took_a_block_that_a_plan_in_flight_fills_where_a_computed_one_was() {
    let mut manager = scene::manager(1, 15);
    let first = create(&mut manager, &[0, 0]);
    compute(&mut manager, first, 1);
    let computed = table(&manager, first);
    let second = create(&mut manager, &[0, 0]);
    manager.begin_plan();
    grow_anew(&mut manager, second, 1).unwrap();
    let third = create(&mut manager, &[0, 0]);
    assert_eq!(manager.get_computed_blocks(third).unwrap().blocks(), computed);
}

#[test]
fn rollback_left_computed_blocks_behind_that_nobody_could_find() {
    let mut manager = scene::manager(1, 5);
    scene::cache(&mut manager, &[0, 1]);
    let other = create(&mut manager, &[0, 1, 2]);
    let plan = manager.begin_plan();
    grow_anew(&mut manager, other, 1).unwrap();
    grow(&mut manager, other, 1).unwrap();
    // Of the cached blocks the second is held, and the first one is evicted.
    let large = create(&mut manager, &[5, 6]);
    grow(&mut manager, large, 2).unwrap();
    manager.rollback(plan).unwrap();
    assert_eq!(manager.check_integrity(), Ok(()));
}

#[test]
fn slots_beyond_the_known_tokens_counted_as_computed_for_tokens_that_came_later() {
    let mut manager = scene::manager(2, 15);
    let sequence = create(&mut manager, &[0]);
    let plan = manager.begin_plan();
    let _ = manager.allocate_slots(sequence, 2, &ComputedBlocks::default());
    manager.commit(plan).unwrap();
    manager.append_tokens(sequence, &[1]).unwrap();
    let later = create(&mut manager, &[0, 1, 2]);
    assert_eq!(num_hit_tokens(&manager, later), 0, "nobody computed token 1");
}

#[test]
fn negative_token_ids_were_taken_and_shared() {
    let mut manager = scene::manager(2, 15);
    let refused = manager.create([0, -1].into(), pagedkv_core::Identity::default().into(), true);
    assert!(refused.is_err(), "-1 stands for no token");
    let sequence = create(&mut manager, &[0]);
    assert!(manager.append_tokens(sequence, &[1, -7]).is_err());
    assert_eq!(manager.num_tokens(sequence), Ok(1));
}
