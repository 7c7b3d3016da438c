//! When a block can be found, and when no more.

use pagedkv_core::{BlockId, CacheConfig, EvictionPolicy, Identity, KVCacheManager, NewRequest, SchedulerConfig};

use crate::scene::{cache, compute, create, create_as, grow, manager, num_hit_tokens, table};
use crate::steps::{
    BLOCK_SIZE, add, assert_empty, commit, default_scheduler, handles, num_tokens, plan, request, run_to_the_end,
    scheduler, step, with_plans_in_flight,
};

fn hits(manager: &mut KVCacheManager, tokens: &[i32]) -> u32 {
    let sequence = create(manager, tokens);
    let found = num_hit_tokens(manager, sequence);
    manager.free(sequence).unwrap();
    found
}

#[test]
fn fault_26_a_prompt_whose_step_was_rolled_back_is_computed_anew() {
    let mut scheduler = default_scheduler(8);
    add(&mut scheduler, "computes", 1, 9, 1);
    let undone = plan(&mut scheduler);
    scheduler.rollback(undone.id()).unwrap();
    add(&mut scheduler, "asks", 1, 9, 1);
    let again = plan(&mut scheduler);
    assert_eq!(num_tokens(&again), 9 + 1, "the first computes anew, the second takes what this very plan fills");
}

#[test]
fn fault_26_a_failed_step_leaves_nothing_to_find() {
    let mut manager = manager(2, 8);
    let sequence = create(&mut manager, &[0; 5]);
    let failed = manager.begin_plan();
    grow(&mut manager, sequence, 5).unwrap();
    manager.rollback(failed).unwrap();
    manager.free(sequence).unwrap();
    assert_eq!(hits(&mut manager, &[0; 5]), 0);
}

#[test]
fn fault_26_an_aborted_writer_leaves_nothing_to_find_before_its_step_commits() {
    let mut manager = manager(2, 8);
    let writer = create(&mut manager, &[0; 5]);
    let running = manager.begin_plan();
    grow(&mut manager, writer, 5).unwrap();
    manager.free(writer).unwrap();
    assert_eq!(hits(&mut manager, &[0; 5]), 0);
    manager.commit(running).unwrap();
    assert_eq!(hits(&mut manager, &[0; 5]), 4, "the tokens were computed, whatever became of the writer");
}

/// Tokens that the second of two equal prompts of this length computes after the first has ended.
fn computed_of_a_cached_prompt(prompt_len: usize) -> u32 {
    let mut scheduler = default_scheduler(16);
    add(&mut scheduler, "first", 1, prompt_len, 1);
    step(&mut scheduler);
    add(&mut scheduler, "second", 1, prompt_len, 1);
    let (plan, result) = step(&mut scheduler);
    assert_eq!((result.finished.len(), plan.sizes().num_samples), (1, 1), "a token is sampled");
    assert_empty(&scheduler);
    num_tokens(&plan)
}

#[test]
fn fault_27_a_prompt_that_is_cached_whole_has_a_token_left_to_compute() {
    for prompt_len in 1..=4 * BLOCK_SIZE {
        let cached = (prompt_len - 1) / BLOCK_SIZE * BLOCK_SIZE;
        assert_eq!(computed_of_a_cached_prompt(prompt_len as usize), prompt_len - cached, "{prompt_len} tokens");
    }
}

#[test]
fn fault_28_lengths_around_every_block_border_run_to_their_end() {
    for block_size in [1, 2, 3, 4, 16] {
        for prompt_len in [1, block_size - 1, block_size, block_size + 1, 3 * block_size - 1, 3 * block_size + 1] {
            for max_tokens in [1, block_size as u32, block_size as u32 + 1] {
                if prompt_len == 0 {
                    continue;
                }
                let cache = CacheConfig { block_size: block_size as u32, ..CacheConfig::new(20) };
                let mut scheduler = pagedkv_core::Scheduler::new(&cache, &SchedulerConfig::default()).unwrap();
                let handle = add(&mut scheduler, "r", 1, prompt_len, max_tokens);
                for num_outputs in 0..max_tokens as usize {
                    let plan = plan(&mut scheduler);
                    let held = scheduler.block_table(handle, 0).unwrap().map_or(0, <[_]>::len);
                    assert_eq!(held, (prompt_len + num_outputs).div_ceil(block_size));
                    commit(&mut scheduler, &plan);
                }
                assert_empty(&scheduler);
            }
        }
    }
}

#[test]
fn fault_29_hits_that_nobody_holds_count_as_taken() {
    let mut manager = manager(2, 4);
    let cached = cache(&mut manager, &[0; 5]);
    let sequence = create(&mut manager, &[0; 9]);
    manager.begin_plan();
    // Two of the four available blocks are the hits themselves: there is room for four more tokens, not for five.
    assert_eq!(grow(&mut manager, sequence, 5), None);
    grow(&mut manager, sequence, 4).expect("there is room");
    assert_eq!(table(&manager, sequence)[..2], cached[..2], "the hit blocks were not handed out as new ones");
    assert_eq!(manager.check_integrity(), Ok(()));
}

#[test]
fn fault_30_equal_prompts_in_one_step_compute_their_prefix_once() {
    let mut scheduler = default_scheduler(40);
    for id in 0..8 {
        add(&mut scheduler, &format!("r{id}"), 1, 17, 2);
    }
    let (plan, _) = step(&mut scheduler);
    assert_eq!((plan.sizes().num_sequences, num_tokens(&plan)), (8, 17 + 7));
}

#[test]
fn fault_30_who_shared_with_a_step_that_failed_computes_again() {
    let mut scheduler = with_plans_in_flight(40, 2);
    add(&mut scheduler, "first", 1, 9, 2);
    let failed = plan(&mut scheduler);
    add(&mut scheduler, "second", 1, 9, 2);
    let behind = plan(&mut scheduler);
    assert_eq!(num_tokens(&behind), 1 + 1, "the second hits what the plan before fills");
    scheduler.rollback(failed.id()).unwrap();
    assert_eq!(num_tokens(&plan(&mut scheduler)), 9 + 1);
}

#[test]
fn fault_31_a_block_that_is_reused_is_found_no_more() {
    let mut manager = manager(2, 3);
    cache(&mut manager, &[0; 5]);
    assert_eq!(hits(&mut manager, &[0; 5]), 4);
    let taker = create(&mut manager, &[1; 6]);
    manager.begin_plan();
    grow(&mut manager, taker, 6).expect("every block is evictable");
    assert_eq!((hits(&mut manager, &[0; 5]), manager.check_integrity()), (0, Ok(())));
}

#[test]
fn fault_32_the_least_recently_released_prefix_goes_first() {
    let mut manager = manager(2, 6);
    for first in [1, 2, 3] {
        cache(&mut manager, &[first, 0, 0]);
    }
    assert_eq!(hits(&mut manager, &[1, 0, 0]), 2, "a lookup alone keeps nothing");
    let user = create(&mut manager, &[1, 0, 0]);
    compute(&mut manager, user, 1);
    manager.free(user).unwrap();
    let taker = create(&mut manager, &[9; 7]);
    compute(&mut manager, taker, 7);
    let found = [1, 2, 3].map(|first| hits(&mut manager, &[first, 0, 0]));
    assert_eq!(found, [2, 0, 2], "one block was missing, and the second prefix was used longest ago");
}

#[test]
fn fault_32_a_hit_takes_its_block_out_of_the_reusable_ones() {
    let mut manager = manager(2, 3);
    let cached = cache(&mut manager, &[0; 3])[0];
    let user = create(&mut manager, &[0; 3]);
    compute(&mut manager, user, 1);
    let taker = create(&mut manager, &[1; 4]);
    manager.begin_plan();
    assert_eq!(grow(&mut manager, taker, 4), None, "two of three blocks are held");
    assert_eq!(table(&manager, user)[0], cached);
}

#[test]
fn fault_32_a_duplicate_that_is_freed_leaves_the_other_copy_to_be_found() {
    let mut manager = manager(2, 8);
    let (one, other) = (create(&mut manager, &[0; 3]), create(&mut manager, &[0; 3]));
    for sequence in [one, other] {
        let plan = manager.begin_plan();
        crate::scene::grow_anew(&mut manager, sequence, 3).expect("there is room");
        manager.commit(plan).unwrap();
    }
    let copies = [table(&manager, one)[0], table(&manager, other)[0]];
    assert_ne!(copies[0], copies[1]);
    manager.free(other).unwrap();
    let taker = create(&mut manager, &[1; 12]);
    compute(&mut manager, taker, 12);
    assert_eq!(manager.pool().num_available(), 0, "the spare copy was reused");
    let third = create(&mut manager, &[0; 3]);
    let found = manager.get_computed_blocks(third).unwrap();
    assert_eq!((found.blocks(), manager.check_integrity()), (&[copies[0]][..], Ok(())));
}

#[test]
fn fault_33_what_a_preempted_request_finds_again_is_no_hit_of_its_prompt() {
    let mut scheduler = default_scheduler(5);
    add(&mut scheduler, "old", 1, 7, 6);
    add(&mut scheduler, "young", 2, 9, 8);
    let (mut finished, mut num_computed) = (Vec::new(), 0);
    for _ in 0..20 {
        let (plan, result) = step(&mut scheduler);
        num_computed += num_tokens(&plan);
        finished.extend(result.finished);
    }
    assert!(num_computed < 7 + 5 + 9 + 7 + 9, "the scene is another: nothing was found again");
    let young = finished.iter().find(|finished| finished.request_id == "young").expect("it ends");
    assert_eq!((young.num_preemptions, young.num_cached_tokens), (1, 0));
}

#[test]
fn fault_34_a_reset_forgets_every_prefix_those_in_use_included() {
    let mut manager = manager(2, 16);
    let running = create(&mut manager, &[0; 5]);
    compute(&mut manager, running, 5);
    cache(&mut manager, &[1; 5]);
    manager.reset_prefix_cache();
    assert_eq!((hits(&mut manager, &[0; 5]), hits(&mut manager, &[1; 5])), (0, 0));
    manager.free(running).unwrap();
    assert_eq!((hits(&mut manager, &[0; 5]), manager.pool().num_cached()), (0, 0), "nor do they come back later");
}

/// The blocks in the order in which they are reused.
fn order_of_reuse(manager: &mut KVCacheManager, count: u32) -> Vec<BlockId> {
    let taker = create_as(manager, &vec![9; 2 * count as usize], Identity::default());
    manager.begin_plan();
    crate::scene::grow_anew(manager, taker, 2 * count).expect("they are available");
    table(manager, taker)
}

#[test]
fn fault_37_blocks_that_waited_for_a_step_are_reused_tail_first() {
    let mut waited = manager(2, 4);
    let sequence = create(&mut waited, &[0; 8]);
    let running = waited.begin_plan();
    grow(&mut waited, sequence, 8).unwrap();
    waited.free(sequence).unwrap();
    assert_eq!(waited.pool().num_fenced(), 4);
    waited.commit(running).unwrap();
    let mut direct = manager(2, 4);
    cache(&mut direct, &[0; 8]);
    assert_eq!(order_of_reuse(&mut waited, 4), order_of_reuse(&mut direct, 4));
}

#[test]
fn fault_37_prefixes_that_waited_for_the_same_step_are_reused_in_the_order_of_their_release() {
    let mut manager = manager(2, 4);
    let sequences = [1, 2].map(|first| create(&mut manager, &[first; 4]));
    let running = manager.begin_plan();
    sequences.iter().for_each(|&sequence| drop(grow(&mut manager, sequence, 4).expect("there is room")));
    sequences.iter().for_each(|&sequence| manager.free(sequence).unwrap());
    manager.commit(running).unwrap();
    order_of_reuse(&mut manager, 2);
    assert_eq!([1, 2].map(|first| hits(&mut manager, &[first; 5])), [0, 4]);
}

#[test]
fn fault_37_a_prefix_that_waited_for_a_step_loses_its_end_first() {
    let mut manager = manager(2, 4);
    let sequence = create(&mut manager, &[0; 8]);
    let running = manager.begin_plan();
    grow(&mut manager, sequence, 8).unwrap();
    manager.free(sequence).unwrap();
    manager.commit(running).unwrap();
    order_of_reuse(&mut manager, 2);
    assert_eq!(hits(&mut manager, &[0; 9]), 4);
}

#[test]
fn fault_38_prefixes_that_are_used_once_do_not_push_out_a_proven_one() {
    let proven_after = |eviction_policy| {
        let config = CacheConfig { block_size: 2, eviction_policy, ..CacheConfig::new(9) };
        let mut manager = KVCacheManager::new(&config).unwrap();
        cache(&mut manager, &[0; 5]);
        let user = create(&mut manager, &[0; 5]);
        compute(&mut manager, user, 1);
        manager.free(user).unwrap();
        (1..20).for_each(|first| drop(cache(&mut manager, &[first; 5])));
        hits(&mut manager, &[0; 5])
    };
    assert_eq!(proven_after(EvictionPolicy::SegmentedLru), 4);
    assert_eq!(proven_after(EvictionPolicy::Lru), 0, "the scene is another");
}

#[test]
fn fault_40_beams_of_exactly_the_pools_capacity_run_to_their_end() {
    // A prompt of 4 tokens fills one block, and 5 more take two blocks for each of three beams, less the shared one.
    let mut scheduler = scheduler(1 + 3 * 2, &SchedulerConfig::default());
    let beams = NewRequest { n: 3, needs_commit: true, ..request("beams", 1, 4, 9) };
    let handle = scheduler.add_request(beams.clone()).unwrap();
    run_to_the_end(&mut scheduler, 12);
    let too_long = NewRequest { max_tokens: 10, ..beams };
    let refused = scheduler.add_request(too_long);
    assert_eq!(refused, Err(pagedkv_core::Error::NeverFits { needed: 10, usable: 7 }), "{handle:?}");
    assert_empty(&scheduler);
}

#[test]
fn fault_40_the_first_step_of_beams_needs_no_block_for_each() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    scheduler.add_request(NewRequest { n: 4, needs_commit: true, ..request("beams", 1, 4, 2) }).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((handles(&plan).len(), plan.sizes().num_samples), (1, 4));
}
