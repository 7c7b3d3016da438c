//! What the prefix cache finds, keeps and forgets, one behaviour a test.

mod scene;

use pagedkv_core::{BlockState, Identity, ImageSpan, RootKey};
use scene::{cache, compute, create, create_as, grow, grow_anew, manager, num_hit_tokens, salted, table};

// --- when a block becomes visible

#[test]
fn block_is_a_hit_once_the_plan_that_filled_it_has_committed() {
    let mut manager = manager(2, 8);
    let first = create(&mut manager, &[0; 3]);
    compute(&mut manager, first, 3);
    let second = create(&mut manager, &[0; 3]);
    assert_eq!(manager.get_computed_blocks(second).unwrap().blocks(), &table(&manager, first)[..1]);
}

#[test]
fn block_that_a_plan_in_flight_fills_is_a_hit_for_that_plan_and_those_behind_it() {
    let mut manager = manager(2, 8);
    let (first, second) = (create(&mut manager, &[0; 3]), create(&mut manager, &[0; 3]));
    manager.begin_plan();
    grow(&mut manager, first, 3).unwrap();
    assert_eq!(num_hit_tokens(&manager, second), 2);
    manager.begin_plan();
    assert_eq!(num_hit_tokens(&manager, second), 2);
}

#[test]
fn block_of_a_plan_that_was_rolled_back_is_never_a_hit() {
    let mut manager = manager(2, 8);
    let first = create(&mut manager, &[0; 3]);
    let plan = manager.begin_plan();
    grow(&mut manager, first, 3).unwrap();
    manager.rollback(plan).unwrap();
    let second = create(&mut manager, &[0; 3]);
    assert_eq!(num_hit_tokens(&manager, second), 0);
}

#[test]
fn whoever_took_a_block_that_a_plan_in_flight_fills_falls_with_that_plan() {
    let mut manager = manager(2, 8);
    let (first, second) = (create(&mut manager, &[0; 3]), create(&mut manager, &[0; 3]));
    let plan = manager.begin_plan();
    grow(&mut manager, first, 3).unwrap();
    manager.begin_plan();
    grow(&mut manager, second, 1).unwrap();
    manager.rollback(plan).unwrap();
    assert_eq!(table(&manager, second), []);
}

#[test]
fn block_of_a_sequence_that_was_freed_in_flight_is_public_after_the_commit() {
    let mut manager = manager(2, 8);
    let first = create(&mut manager, &[0; 3]);
    let plan = manager.begin_plan();
    grow(&mut manager, first, 3).unwrap();
    manager.free(first).unwrap();
    let second = create(&mut manager, &[0; 3]);
    assert_eq!(num_hit_tokens(&manager, second), 0, "nobody holds it and it is not computed");
    manager.commit(plan).unwrap();
    assert_eq!(num_hit_tokens(&manager, second), 2);
}

#[test]
fn block_is_no_hit_before_it_is_full() {
    let mut manager = manager(4, 8);
    let first = create(&mut manager, &[0; 5]);
    compute(&mut manager, first, 3);
    let second = create(&mut manager, &[0; 5]);
    assert_eq!(num_hit_tokens(&manager, second), 0);
}

// --- how much is found

/// Tokens that are found of a prompt of this length, in blocks of 4, when all of it is cached.
fn num_hit_tokens_of_a_cached_prompt(length: usize) -> u32 {
    let mut manager = manager(4, 16);
    let tokens = vec![0; length];
    cache(&mut manager, &tokens);
    let again = create(&mut manager, &tokens);
    num_hit_tokens(&manager, again)
}

#[test]
fn lookup_leaves_a_token_to_compute_when_the_whole_prompt_is_cached() {
    let around_the_first_border = [1, 3, 4, 5].map(num_hit_tokens_of_a_cached_prompt);
    let around_the_third = [11, 12, 13].map(num_hit_tokens_of_a_cached_prompt);
    assert_eq!((around_the_first_border, around_the_third), ([0, 0, 0, 4], [8, 8, 12]));
}

#[test]
fn lookup_changes_nothing() {
    let mut manager = manager(2, 8);
    cache(&mut manager, &[0; 5]);
    let sequence = create(&mut manager, &[0; 5]);
    let before = format!("{manager:?}");
    manager.get_computed_blocks(sequence).unwrap();
    assert_eq!(format!("{manager:?}"), before);
}

#[test]
fn lookup_goes_on_from_a_block_border_in_the_middle_of_a_prompt() {
    let mut manager = manager(2, 8);
    cache(&mut manager, &[0; 5]);
    let sequence = create(&mut manager, &[0; 7]);
    let plan = manager.begin_plan();
    grow_anew(&mut manager, sequence, 2).unwrap();
    manager.commit(plan).unwrap();
    assert_eq!(num_hit_tokens(&manager, sequence), 2);
}

#[test]
fn lookup_stops_where_the_tokens_differ() {
    let mut manager = manager(2, 8);
    cache(&mut manager, &[0, 0, 0, 0, 0]);
    let sequence = create(&mut manager, &[0, 0, 0, 1, 0]);
    assert_eq!(num_hit_tokens(&manager, sequence), 2);
}

#[test]
fn lookup_finds_each_of_many_continuations_of_one_prefix() {
    let mut manager = manager(1, 64);
    for token in 0..32 {
        cache(&mut manager, &[7, token]);
    }
    for token in 0..32 {
        let sequence = create(&mut manager, &[7, token, 0]);
        assert_eq!(num_hit_tokens(&manager, sequence), 2, "token {token}");
    }
}

#[test]
fn same_block_after_another_prefix_is_no_hit() {
    let mut manager = manager(2, 8);
    cache(&mut manager, &[0, 0, 5, 5]);
    cache(&mut manager, &[1, 1, 6, 6]);
    let sequence = create(&mut manager, &[1, 1, 5, 5, 0]);
    assert_eq!(num_hit_tokens(&manager, sequence), 2);
}

// --- identities

#[test]
fn salt_isolates_every_block_of_a_prefix() {
    let mut manager = manager(2, 8);
    cache(&mut manager, &[0; 5]);
    let sequence = create_as(&mut manager, &[0; 5], salted(b"mine"));
    assert_eq!(num_hit_tokens(&manager, sequence), 0);
}

#[test]
fn salt_that_reads_like_an_adapter_is_not_taken_for_it() {
    let mut manager = manager(2, 8);
    let lora = Identity { root: RootKey { lora_id: Some(1), cache_salt: None }, images: Vec::new() };
    let first = create_as(&mut manager, &[0; 5], lora);
    compute(&mut manager, first, 5);
    let second = create_as(&mut manager, &[0; 5], salted(&1_i64.to_le_bytes()));
    assert_eq!(num_hit_tokens(&manager, second), 0);
}

fn with_image(start: u32, digest: u8) -> Identity {
    Identity { images: vec![ImageSpan { start, len: 2, digest: [digest].into() }], ..Identity::default() }
}

fn num_hits_after(first: Identity, second: Identity) -> u32 {
    let mut manager = manager(2, 8);
    let sequence = create_as(&mut manager, &[0; 7], first);
    compute(&mut manager, sequence, 7);
    let again = create_as(&mut manager, &[0; 7], second);
    num_hit_tokens(&manager, again)
}

#[test]
fn equal_images_at_equal_places_are_hits() {
    assert_eq!(num_hits_after(with_image(2, 1), with_image(2, 1)), 6);
}

#[test]
fn another_image_under_the_same_placeholder_tokens_is_no_hit() {
    assert_eq!(num_hits_after(with_image(2, 1), with_image(2, 2)), 2);
}

#[test]
fn same_image_at_another_offset_within_the_block_is_no_hit() {
    assert_eq!(num_hits_after(with_image(2, 1), with_image(3, 1)), 2);
}

// --- reuse

#[test]
fn prefix_is_evicted_after_what_continues_it() {
    let mut manager = manager(1, 3);
    let blocks = cache(&mut manager, &[0, 1, 2]);
    let other = create(&mut manager, &[9]);
    compute(&mut manager, other, 1);
    assert_eq!(table(&manager, other), [blocks[2]]);
}

#[test]
fn least_recently_released_prefix_is_evicted_first() {
    let mut manager = manager(1, 2);
    let old = cache(&mut manager, &[0]);
    let new = cache(&mut manager, &[1]);
    let other = create(&mut manager, &[9]);
    compute(&mut manager, other, 1);
    assert_eq!((table(&manager, other), manager.pool().state(new[0])), (old, Ok(BlockState::Cached)));
}

#[test]
fn hit_makes_a_prefix_the_most_recent_again() {
    let mut manager = manager(1, 3);
    let old = cache(&mut manager, &[0]);
    let new = cache(&mut manager, &[1]);
    let again = create(&mut manager, &[0, 5]);
    compute(&mut manager, again, 1);
    manager.free(again).unwrap();
    let others = create(&mut manager, &[9, 9]);
    compute(&mut manager, others, 2);
    assert!(table(&manager, others).contains(&new[0]) && !table(&manager, others).contains(&old[0]));
}

#[test]
fn free_block_is_taken_before_a_cached_one() {
    let mut manager = manager(1, 2);
    let cached = cache(&mut manager, &[0]);
    let other = create(&mut manager, &[9]);
    compute(&mut manager, other, 1);
    assert_eq!(manager.pool().state(cached[0]), Ok(BlockState::Cached));
}

#[test]
fn block_that_was_evicted_is_no_hit_any_more() {
    let mut manager = manager(1, 1);
    cache(&mut manager, &[0]);
    cache(&mut manager, &[1]);
    let sequence = create(&mut manager, &[0, 0]);
    assert_eq!((num_hit_tokens(&manager, sequence), manager.pool().num_evictions()), (0, 1));
}

#[test]
fn freeing_a_second_copy_of_a_prefix_leaves_the_first_to_be_found() {
    let mut manager = manager(1, 4);
    let (first, second) = (create(&mut manager, &[0, 0]), create(&mut manager, &[0, 0]));
    let plan = manager.begin_plan();
    grow_anew(&mut manager, first, 1).unwrap();
    grow_anew(&mut manager, second, 1).unwrap();
    manager.commit(plan).unwrap();
    manager.free(second).unwrap();
    let filler = create(&mut manager, &[9; 3]);
    compute(&mut manager, filler, 3);
    let third = create(&mut manager, &[0, 0]);
    assert_eq!(manager.get_computed_blocks(third).unwrap().blocks(), table(&manager, first));
}

#[test]
fn prefix_keeps_its_place_before_what_continues_it_through_a_fence() {
    let mut manager = manager(1, 3);
    let sequence = create(&mut manager, &[0, 1, 2]);
    let plan = manager.begin_plan();
    grow(&mut manager, sequence, 3).unwrap();
    let blocks = table(&manager, sequence);
    manager.free(sequence).unwrap();
    manager.commit(plan).unwrap();
    let other = create(&mut manager, &[9]);
    compute(&mut manager, other, 1);
    assert_eq!(table(&manager, other), [blocks[2]]);
}

// --- reset

#[test]
fn reset_makes_cached_blocks_free() {
    let mut manager = manager(2, 8);
    cache(&mut manager, &[0; 5]);
    manager.reset_prefix_cache();
    assert_eq!((manager.pool().num_cached(), manager.pool().num_free()), (0, 8));
}

#[test]
fn block_that_was_held_through_a_reset_is_free_when_it_is_released() {
    let mut manager = manager(2, 8);
    let sequence = create(&mut manager, &[0; 5]);
    compute(&mut manager, sequence, 5);
    manager.reset_prefix_cache();
    manager.free(sequence).unwrap();
    assert_eq!(manager.pool().num_cached(), 0);
}

#[test]
fn prefix_computed_after_a_reset_is_found_again() {
    let mut manager = manager(2, 8);
    cache(&mut manager, &[0; 5]);
    manager.reset_prefix_cache();
    cache(&mut manager, &[0; 5]);
    let sequence = create(&mut manager, &[0; 5]);
    assert_eq!(num_hit_tokens(&manager, sequence), 4);
}
