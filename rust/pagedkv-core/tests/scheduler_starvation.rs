//! Requests that waited for ever, or behind an empty plan, each named after what kept them: seen failing first.

#[path = "scene/steps.rs"]
mod steps;

use pagedkv_core::step_plan::Field;
use pagedkv_core::{
    CacheConfig, Handle, LimitsUpdate, NewRequest, Policy, PreemptionMode, Scheduler, SchedulerConfig, StepPlan,
};
use steps::{BLOCK_SIZE, add, counting_request, default_scheduler, handles, num_blocks, request, run_to_the_end, step};

/// Steps have four tokens, and chunks end on multiples of four.
fn in_fours(usable_blocks: u32) -> Scheduler {
    let limits = SchedulerConfig {
        policy: Policy::Priority,
        max_num_batched_tokens: 4,
        prefill_chunk_multiple: 4,
        ..SchedulerConfig::default()
    };
    steps::scheduler(usable_blocks, &limits)
}

fn swapping(usable_blocks: u32, max_num_batched_tokens: u32) -> Scheduler {
    let cache = CacheConfig { block_size: BLOCK_SIZE, num_host_blocks: 8, ..CacheConfig::new(usable_blocks + 1) };
    let preemption_mode = PreemptionMode::Swap;
    let limits = SchedulerConfig { preemption_mode, max_num_batched_tokens, ..SchedulerConfig::default() };
    Scheduler::new(&cache, &limits).expect("a valid configuration")
}

fn with_priority(request: NewRequest, priority: i32) -> NewRequest {
    NewRequest { priority, ..request }
}

/// Tokens that the plan computes of a request.
fn tokens_of(plan: &StepPlan, handle: Handle) -> i32 {
    let lengths = plan.i32s(Field::QueryStartLoc).windows(2).map(|pair| pair[1] - pair[0]);
    let of_it = handles(plan).into_iter().zip(lengths).filter(|&(other, _)| other == handle.get());
    of_it.map(|(_, length)| length).sum()
}

fn session(id: &str) -> NewRequest {
    NewRequest { session: true, ..counting_request(id, 0, 6, 3) }
}

#[test]
fn first_request_whose_chunk_needs_all_tokens_of_the_step_waited_while_one_behind_it_took_some() {
    let mut scheduler = in_fours(8);
    let patient = scheduler.add_request(with_priority(request("patient", 1, 3, 9), 1)).unwrap();
    step(&mut scheduler);
    let urgent = scheduler.add_request(with_priority(request("urgent", 2, 8, 1), 0)).unwrap();
    assert_eq!(handles(&step(&mut scheduler).0), [urgent.get()]);
    assert_eq!(handles(&step(&mut scheduler).0), [urgent.get()]);
    assert_eq!(handles(&step(&mut scheduler).0), [patient.get()]);
}

#[test]
fn first_request_waited_because_one_behind_it_reused_the_cached_block_that_it_counted_on() {
    let mut scheduler = in_fours(4);
    add(&mut scheduler, "cached first", 2, 5, 1);
    run_to_the_end(&mut scheduler, 9);
    add(&mut scheduler, "cached then", 3, 9, 1);
    run_to_the_end(&mut scheduler, 9);
    let patient = scheduler.add_request(with_priority(request("patient", 1, 4, 8), 1)).unwrap();
    step(&mut scheduler);
    let urgent = scheduler.add_request(with_priority(request("urgent", 2, 6, 1), 0)).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!(
        (tokens_of(&plan, urgent), tokens_of(&plan, patient)),
        (2, 1),
        "four tokens of the urgent one are cached"
    );
}

#[test]
fn first_request_that_only_had_to_come_back_waited_while_those_behind_it_used_the_tokens_of_the_step() {
    let mut scheduler = swapping(6, 64);
    let [old, other, young] = [("old", 1, 5), ("other", 2, 5), ("young", 3, 8)]
        .map(|(id, first, len)| add(&mut scheduler, id, first, len, 8));
    step(&mut scheduler);
    scheduler.hold(old).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!(plan.i64s(Field::SwapOutIds), [1, 1], "the scene is another");
    scheduler.transfers_done(&[1], true).unwrap();
    step(&mut scheduler);
    scheduler.abort(other, None).unwrap();
    scheduler.update_limits(LimitsUpdate { max_num_batched_tokens: Some(1), ..LimitsUpdate::default() }).unwrap();
    scheduler.release(old).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((handles(&plan), plan.i64s(Field::SwapInIds).is_empty()), (vec![young.get()], false));
}

#[test]
fn request_that_took_the_tail_from_a_fork_still_waited_for_the_block_of_a_copy() {
    let mut scheduler = default_scheduler(2);
    let parent = scheduler.add_request(counting_request("parent", 0, 6, 3)).unwrap();
    step(&mut scheduler);
    scheduler.fork(parent, 0, NewRequest::new("fork", vec![], 2)).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((handles(&plan), plan.i32s(Field::Copies)), (vec![parent.get()], &[][..]));
    run_to_the_end(&mut scheduler, 20);
}

/// A session keeps two of four blocks, and its next turn is held.
fn held_turn() -> (Scheduler, Handle) {
    let mut scheduler = default_scheduler(4);
    let session = scheduler.add_request(session("session")).unwrap();
    run_to_the_end(&mut scheduler, 9);
    scheduler.hold(session).unwrap();
    scheduler.append_tokens(session, 0, &[1], None).unwrap();
    (scheduler, session)
}

#[test]
fn held_request_that_kept_blocks_while_it_waited_kept_a_waiting_one_out() {
    let (mut scheduler, session) = held_turn();
    let waiting = add(&mut scheduler, "waiting", 50, 10, 1);
    assert_eq!(handles(&step(&mut scheduler).0), [waiting.get()]);
    assert_eq!(num_blocks(&scheduler, session, 0), 0);
    scheduler.release(session).unwrap();
    run_to_the_end(&mut scheduler, 9);
}

#[test]
fn held_request_that_kept_blocks_while_it_waited_kept_a_running_one_from_growing() {
    let (mut scheduler, session) = held_turn();
    let running = add(&mut scheduler, "running", 50, 8, 4);
    step(&mut scheduler);
    assert_eq!(handles(&step(&mut scheduler).0), [running.get()]);
    assert_eq!(num_blocks(&scheduler, session, 0), 0);
}

#[test]
fn request_that_took_back_all_it_had_and_found_no_room_for_its_chunk_made_the_plan_an_empty_one() {
    let mut scheduler = swapping(5, 8);
    let session = scheduler.add_request(session("session")).unwrap();
    run_to_the_end(&mut scheduler, 9);
    // Half of the prompt is computed, then another one takes its blocks, and leaves before it uses them.
    let back = add(&mut scheduler, "back", 50, 16, 1);
    step(&mut scheduler);
    scheduler.hold(back).unwrap();
    let taker = add(&mut scheduler, "taker", 60, 4, 4);
    step(&mut scheduler);
    let (plan, _) = step(&mut scheduler);
    assert_eq!(plan.i64s(Field::SwapOutIds), [1, 1], "the scene is another");
    scheduler.transfers_done(&[1], true).unwrap();
    scheduler.abort(taker, None).unwrap();
    // The session's next turn comes behind, and waits with two of the five blocks.
    scheduler.append_tokens(session, 0, &[1], None).unwrap();
    scheduler.release(back).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((tokens_of(&plan, back), plan.i64s(Field::SwapInIds)), (8, &[][..]));
    run_to_the_end(&mut scheduler, 20);
}

#[test]
fn request_that_came_back_left_blocks_to_one_that_had_come_back_before_it() {
    let cache = CacheConfig { block_size: BLOCK_SIZE, num_host_blocks: 8, ..CacheConfig::new(1 + 8) };
    let preemption_mode = PreemptionMode::Swap;
    let limits = SchedulerConfig { preemption_mode, max_num_seqs: 3, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(&cache, &limits).expect("a valid configuration");
    let taker = scheduler.add_request(NewRequest { n: 2, ..request("taker", 5, 1, 2) }).unwrap();
    scheduler.hold(taker).unwrap();
    let held = add(&mut scheduler, "held", 6, 1, 2);
    let full = 2 * BLOCK_SIZE as usize;
    let [one, other] = [("one", 7), ("other", 8)].map(|(id, first)| add(&mut scheduler, id, first, full, 3));
    step(&mut scheduler);
    scheduler.hold(held).unwrap();
    scheduler.release(taker).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!(
        (handles(&plan), plan.i64s(Field::SwapOutIds)),
        (vec![taker.get()], &[1, 1, 2, 2][..]),
        "it needs their seats"
    );
    scheduler.abort(taker, None).unwrap();
    scheduler.transfers_done(&[1, 2], true).unwrap();
    assert_eq!(handles(&step(&mut scheduler).0), [one.get(), other.get()], "three blocks are free, and each wants one");
}
