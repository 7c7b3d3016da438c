//! Who holds a block, and how often.

use pagedkv_core::{
    BlockId, BlockPool, BlockState, CacheConfig, Error, KVCacheManager, NULL_BLOCK, NewRequest, SchedulerConfig,
};

use crate::scene::{self, compute, create, grow, table};
use crate::steps::{
    BLOCK_SIZE, SAMPLED, add, assert_empty, check, commit, default_scheduler, handles, plan, preempted, request,
    run_to_the_end, scheduler, step, with_plans_in_flight,
};

fn pool(usable_blocks: u32) -> BlockPool {
    BlockPool::new(&CacheConfig::new(usable_blocks + 1)).expect("a valid configuration")
}

fn allocate<const N: usize>(pool: &mut BlockPool) -> [BlockId; N] {
    let mut blocks = [NULL_BLOCK; N];
    pool.allocate(&mut blocks).expect("there are enough blocks");
    blocks
}

#[test]
fn fault_01_a_block_freed_twice_is_refused() {
    let mut pool = pool(3);
    let [block, other] = allocate(&mut pool);
    pool.free(&[block]).unwrap();
    let before = format!("{pool:?}");
    assert_eq!(pool.free(&[block]), Err(Error::NotHeld(block)));
    assert_eq!(format!("{pool:?}"), before);
    let mut all = [allocate::<2>(&mut pool).to_vec(), vec![other]].concat();
    all.sort();
    assert_eq!(all, [1, 2, 3].map(BlockId::new), "nobody shares a block");
}

#[test]
fn fault_01_a_sequence_freed_twice_is_refused() {
    let mut manager = scene::manager(2, 8);
    let sequence = create(&mut manager, &[0; 3]);
    compute(&mut manager, sequence, 3);
    manager.free(sequence).unwrap();
    assert_eq!(manager.free(sequence), Err(Error::UnknownSequence(sequence.to_bits())));
    assert_eq!((manager.usage(), manager.check_integrity()), (0.0, Ok(())));
}

#[test]
fn fault_02_a_block_listed_twice_in_one_call_counts_twice_and_is_freed_once() {
    let mut pool = pool(4);
    let [block] = allocate(&mut pool);
    assert_eq!(pool.free(&[block, block]), Err(Error::NotHeld(block)), "it has one holder");
    pool.touch(&[block, block]).unwrap();
    pool.free(&[block, block, block]).unwrap();
    assert_eq!((pool.num_free(), pool.num_held()), (4, 0));
    let mut blocks = allocate::<4>(&mut pool);
    blocks.sort();
    assert_eq!(blocks, [1, 2, 3, 4].map(BlockId::new), "no block is in the list twice");
}

#[test]
fn fault_04_blocks_of_an_aborted_request_wait_for_the_step_that_still_writes_them() {
    let mut scheduler = with_plans_in_flight(3, 2);
    let first = add(&mut scheduler, "first", 1, 5, 4);
    let running = plan(&mut scheduler);
    let written = scheduler.block_table(first, 0).unwrap().expect("it is resident").to_vec();
    scheduler.abort(first, None).unwrap();
    add(&mut scheduler, "second", 2, 5, 4);
    let behind = plan(&mut scheduler);
    assert_eq!((handles(&behind), behind.blocked_on()), (vec![], Some(running.id())), "two of three blocks are fenced");
    let states = written.iter().map(|&block| scheduler.manager().pool().state(block).unwrap());
    assert!(states.into_iter().all(|state| state == BlockState::Fenced));
    commit(&mut scheduler, &running);
    commit(&mut scheduler, &behind);
    assert_eq!(handles(&step(&mut scheduler).0), [1]);
}

#[test]
fn fault_04_blocks_of_a_preempted_request_wait_for_the_step_that_still_writes_them() {
    let mut scheduler = with_plans_in_flight(3, 3);
    add(&mut scheduler, "old", 1, 8, 4);
    add(&mut scheduler, "young", 2, 4, 1);
    let running = plan(&mut scheduler);
    // The old one's ninth token takes a block that the running plan still fills for the young one.
    let second = plan(&mut scheduler);
    assert_eq!(preempted(&second), ["young"]);
    assert!(!handles(&second).contains(&0), "no block is to be had before the running plan ends");
    assert_eq!(scheduler.manager().pool().num_fenced(), 1);
    commit(&mut scheduler, &running);
    assert_eq!(handles(&plan(&mut scheduler)), [0]);
}

#[test]
fn fault_05_a_victim_whose_blocks_are_fenced_counts_as_gained() {
    let mut scheduler = with_plans_in_flight(5, 2);
    for (first, id) in (1..).zip(["old", "second", "third", "youngest"]) {
        add(&mut scheduler, id, first, if first == 1 { 8 } else { 3 }, 4);
    }
    let running = plan(&mut scheduler);
    assert_eq!(handles(&running), [0, 1, 2, 3]);
    // The old one's ninth token needs a block, and every block is named by the running plan.
    let second = plan(&mut scheduler);
    assert_eq!((preempted(&second), handles(&second)), (vec!["youngest".to_string()], vec![1, 2]));
    commit(&mut scheduler, &running);
    commit(&mut scheduler, &second);
    assert_eq!(scheduler.num_preemptions(), 1);
    run_to_the_end(&mut scheduler, 60);
}

#[test]
fn fault_06_a_lookup_that_leads_to_nothing_holds_nothing() {
    let mut manager = scene::manager(2, 8);
    scene::cache(&mut manager, &[0; 5]);
    let sequence = create(&mut manager, &[0; 5]);
    let before = format!("{manager:?}");
    let found = manager.get_computed_blocks(sequence).unwrap();
    assert_eq!(found.num_tokens(), 4);
    drop(found);
    assert_eq!(format!("{manager:?}"), before);
}

#[test]
fn fault_06_a_request_that_was_matched_and_not_admitted_holds_nothing() {
    let limits = SchedulerConfig { max_num_seqs: 1, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    add(&mut scheduler, "cached", 1, 9, 1);
    step(&mut scheduler);
    add(&mut scheduler, "running", 2, 4, 4);
    step(&mut scheduler);
    let waiting = add(&mut scheduler, "waiting", 1, 9, 1);
    step(&mut scheduler);
    assert_eq!(scheduler.manager().pool().num_cached(), 2);
    scheduler.abort(waiting, None).unwrap();
    run_to_the_end(&mut scheduler, 8);
    assert_empty(&scheduler);
}

#[test]
fn fault_07_a_stale_sequence_id_does_not_free_the_newer_sequence_in_its_place() {
    let mut manager = scene::manager(2, 8);
    let old = create(&mut manager, &[0; 3]);
    manager.free(old).unwrap();
    let new = create(&mut manager, &[1; 3]);
    compute(&mut manager, new, 3);
    assert_eq!(manager.free(old), Err(Error::UnknownSequence(old.to_bits())));
    assert_eq!(table(&manager, new).len(), 2);
}

#[test]
fn fault_07_a_stale_handle_does_not_abort_the_newer_request_in_its_place() {
    let mut scheduler = default_scheduler(8);
    let old = add(&mut scheduler, "r", 1, 3, 1);
    step(&mut scheduler);
    let new = add(&mut scheduler, "r", 1, 3, 4);
    assert_ne!(old, new);
    scheduler.abort(old, None).unwrap();
    assert_eq!(handles(&step(&mut scheduler).0), [new.get()]);
}

#[test]
fn fault_08_a_cached_block_that_two_took_and_gave_back_is_evictable_once() {
    let mut manager = scene::manager(2, 8);
    scene::cache(&mut manager, &[0; 5]);
    let (one, other) = (create(&mut manager, &[0; 5]), create(&mut manager, &[0; 5]));
    compute(&mut manager, one, 1);
    compute(&mut manager, other, 1);
    let sum = |manager: &KVCacheManager| {
        let pool = manager.pool();
        assert_eq!(pool.num_available(), pool.num_free() + pool.num_cached());
        pool.num_free() + pool.num_cached() + pool.num_held() + pool.num_fenced()
    };
    assert_eq!((sum(&manager), manager.pool().num_held()), (8, 4));
    manager.free(one).unwrap();
    assert_eq!((sum(&manager), manager.pool().num_cached()), (8, 0));
    manager.free(other).unwrap();
    assert_eq!((sum(&manager), manager.pool().num_cached(), manager.check_integrity()), (8, 2, Ok(())));
}

/// Blocks that a sequence holds after a prompt, and after a step in which so many of the drafts were accepted.
fn blocks_after_drafts(prompt_len: usize, num_drafts: usize, num_accepted: usize) -> (usize, usize) {
    let limits = SchedulerConfig { lookahead: 16, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(16, &limits);
    let handle = add(&mut scheduler, "r", 1, prompt_len, 24);
    let first = plan(&mut scheduler);
    let row = first.i32s(pagedkv_core::step_plan::Field::Rows)[0];
    commit(&mut scheduler, &first);
    let drafts: Vec<i32> = (100..).take(num_drafts).collect();
    scheduler.set_draft_tokens(&[row], &[0, num_drafts as i32], &drafts).unwrap();
    let second = plan(&mut scheduler);
    assert_eq!(second.sizes().num_tokens as usize, 1 + num_drafts);
    let accepted = [&drafts[..num_accepted], &[SAMPLED]].concat();
    scheduler.commit_drafts(second.id(), &accepted, accepted.len()).unwrap();
    check(&scheduler);
    let held = scheduler.block_table(handle, 0).unwrap().map_or(0, <[_]>::len);
    scheduler.abort(handle, None).unwrap();
    step(&mut scheduler);
    (held, scheduler.manager().pool().num_held() as usize)
}

#[test]
fn fault_09_rejected_drafts_leave_no_block_behind_at_any_offset() {
    let block_size = BLOCK_SIZE as usize;
    for prompt_len in 1..=2 * block_size {
        for num_drafts in 1..=2 * block_size {
            for num_accepted in 0..=num_drafts {
                let expected = ((prompt_len + 1 + num_accepted).div_ceil(block_size), 0);
                let found = blocks_after_drafts(prompt_len, num_drafts, num_accepted);
                assert_eq!(found, expected, "prompt {prompt_len}, {num_accepted} of {num_drafts} drafts");
            }
        }
    }
}

#[test]
fn fault_10_an_allocation_without_room_takes_nothing() {
    let mut manager = scene::manager(2, 3);
    scene::cache(&mut manager, &[0; 3]);
    let sequence = create(&mut manager, &[0; 9]);
    let computed = manager.get_computed_blocks(sequence).unwrap();
    manager.begin_plan();
    let before = format!("{manager:?}");
    assert_eq!(manager.allocate_slots(sequence, 7, &computed), Ok(None), "five blocks of three");
    assert_eq!(format!("{manager:?}"), before);
}

#[test]
fn fault_10_beams_that_do_not_all_fit_leave_no_block_with_some_of_them() {
    let mut scheduler = default_scheduler(4);
    let other = add(&mut scheduler, "other", 2, 7, 3);
    let beams = NewRequest { n: 2, needs_commit: true, ..request("beams", 1, 4, 5) };
    let beams = scheduler.add_request(beams).unwrap();
    step(&mut scheduler);
    // Each beam needs a block for its next token, and there is one.
    let (plan, _) = step(&mut scheduler);
    assert_eq!((handles(&plan), scheduler.manager().pool().num_available()), (vec![other.get()], 1));
    let table = |sample| scheduler.block_table(beams, sample).unwrap().map_or(0, <[_]>::len);
    assert_eq!((table(0), table(1)), (1, 1));
    run_to_the_end(&mut scheduler, 12);
    assert_empty(&scheduler);
}

#[test]
fn fault_11_a_branch_in_the_middle_of_a_held_prefix_drops_no_hold() {
    let mut manager = scene::manager(2, 16);
    let long = create(&mut manager, &[0; 9]);
    compute(&mut manager, long, 9);
    let before = table(&manager, long);
    let branch = create(&mut manager, &[0, 0, 0, 0, 1, 1, 1]);
    compute(&mut manager, branch, 3);
    let counts = |manager: &KVCacheManager| -> Vec<u32> {
        before.iter().map(|&block| manager.pool().ref_count(block).unwrap()).collect()
    };
    assert_eq!(counts(&manager), [2, 2, 1, 1, 1]);
    manager.free(branch).unwrap();
    assert_eq!((counts(&manager), table(&manager, long)), (vec![1; 5], before.clone()));
    assert_eq!(manager.check_integrity(), Ok(()));
}

#[test]
fn fault_13_a_fork_needs_no_block_and_so_cannot_fail_half_way() {
    let mut manager = scene::manager(2, 2);
    let parent = create(&mut manager, &[0; 3]);
    compute(&mut manager, parent, 3);
    assert_eq!(manager.pool().num_available(), 0);
    let children = [manager.fork(parent).unwrap(), manager.fork(parent).unwrap()];
    assert!(children.iter().all(|&child| table(&manager, child) == table(&manager, parent)));
    assert_eq!(manager.check_integrity(), Ok(()));
}

#[test]
fn fault_14_a_sole_owner_writes_into_its_last_block_without_a_copy() {
    let mut manager = scene::manager(4, 8);
    let parent = create(&mut manager, &[0; 3]);
    compute(&mut manager, parent, 2);
    let child = manager.fork(parent).unwrap();
    manager.free(parent).unwrap();
    let before = table(&manager, child);
    manager.begin_plan();
    let slots = grow(&mut manager, child, 1).expect("there is room");
    assert_eq!((slots.copies.len(), table(&manager, child)), (0, before));
}

#[test]
fn fault_15_a_request_that_comes_back_holds_only_new_blocks() {
    let mut scheduler = default_scheduler(3);
    add(&mut scheduler, "old", 1, 3, 8);
    let young = add(&mut scheduler, "young", 2, 5, 4);
    while scheduler.num_preemptions() == 0 {
        step(&mut scheduler);
    }
    assert_eq!(scheduler.block_table(young, 0), Ok(None), "a preempted request holds nothing");
    while scheduler.block_table(young, 0) == Ok(None) {
        step(&mut scheduler);
    }
    let table = scheduler.block_table(young, 0).unwrap().expect("it came back").to_vec();
    let counts = table.iter().map(|&block| scheduler.manager().pool().ref_count(block).unwrap());
    assert!(counts.into_iter().all(|count| count == 1));
    check(&scheduler);
}

#[test]
fn fault_16_a_request_that_is_cancelled_in_any_state_gives_every_block_back() {
    for steps_before in 0..9 {
        for cancels_in_flight in [false, true] {
            let limits = SchedulerConfig { max_num_batched_tokens: 4, ..SchedulerConfig::default() };
            let mut scheduler = scheduler(6, &limits);
            let samples = NewRequest { n: 2, ..request("samples", 1, 7, 5) };
            let samples = scheduler.add_request(samples).unwrap();
            let crowded_out = add(&mut scheduler, "crowded out", 2, 6, 6);
            (0..steps_before).for_each(|_| drop(step(&mut scheduler)));
            let in_flight = cancels_in_flight.then(|| plan(&mut scheduler));
            scheduler.abort(samples, None).unwrap();
            scheduler.abort(crowded_out, None).unwrap();
            match in_flight {
                Some(plan) => drop(commit(&mut scheduler, &plan)),
                None => drop(step(&mut scheduler)),
            }
            assert_empty(&scheduler);
        }
    }
}
