//! Who waits for a commit, what a commit publishes, and what comes back after a preemption.

#[path = "scene/steps.rs"]
mod steps;

use pagedkv_core::step_plan::Field;
use pagedkv_core::{CacheConfig, NewRequest, PreemptionMode, Scheduler, SchedulerConfig};
use steps::{
    add, assert_empty, commit, handles, num_tokens, plan, preempted, request, scheduler, step, with_plans_in_flight,
};

#[test]
fn sequence_is_not_planned_while_its_input_comes_from_a_plan_older_than_the_previous_one() {
    let limits = SchedulerConfig { max_num_batched_tokens: 4, max_plans_in_flight: 3, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(16, &limits);
    let late = add(&mut scheduler, "late", 1, 3, 4);
    let first = plan(&mut scheduler);
    scheduler.hold(late).unwrap();
    let other = add(&mut scheduler, "other", 5, 3, 4);
    let second = plan(&mut scheduler);
    scheduler.release(late).unwrap();
    let third = plan(&mut scheduler);
    assert_eq!((handles(&first), handles(&second)), (vec![late.get()], vec![other.get()]));
    assert_eq!(handles(&third), [other.get()], "the first plan's tokens are not at hand on the device any more");
    commit(&mut scheduler, &first);
    assert!(handles(&plan(&mut scheduler)).contains(&late.get()));
}

#[test]
fn samples_are_not_planned_before_the_commit_that_forks_them() {
    let mut scheduler = with_plans_in_flight(16, 2);
    scheduler.add_request(NewRequest { n: 2, ..request("r", 1, 5, 4) }).unwrap();
    let first = plan(&mut scheduler);
    let second = plan(&mut scheduler);
    assert_eq!((handles(&second), second.blocked_on()), (vec![], Some(first.id())));
    commit(&mut scheduler, &first);
    commit(&mut scheduler, &second);
    assert_eq!(plan(&mut scheduler).i32s(Field::Sequence), [0, 1]);
}

#[test]
fn full_blocks_are_hits_after_the_commit_although_their_writer_was_aborted() {
    let mut scheduler = with_plans_in_flight(16, 1);
    let writer = add(&mut scheduler, "writer", 1, 9, 4);
    let written = plan(&mut scheduler);
    scheduler.abort(writer, None).unwrap();
    assert_eq!(commit(&mut scheduler, &written).num_ignored, 1);
    add(&mut scheduler, "reader", 1, 9, 1);
    assert_eq!(num_tokens(&plan(&mut scheduler)), 1, "two full blocks of four are there");
}

#[test]
fn token_of_a_request_that_was_preempted_meanwhile_is_appended_and_may_finish_it() {
    let mut scheduler = with_plans_in_flight(4, 2);
    add(&mut scheduler, "old", 1, 8, 8);
    add(&mut scheduler, "young", 5, 7, 1);
    let samples = plan(&mut scheduler);
    let preempts = plan(&mut scheduler);
    assert_eq!(preempted(&preempts), ["young"], "the older one needs a block");
    let finished = commit(&mut scheduler, &samples).finished;
    assert_eq!(finished.iter().map(|request| &*request.request_id).collect::<Vec<_>>(), ["young"]);
    commit(&mut scheduler, &preempts);
    steps::run_to_the_end(&mut scheduler, 10);
    assert_empty(&scheduler);
}

#[test]
fn token_of_a_request_that_was_preempted_meanwhile_is_not_drawn_again() {
    let mut scheduler = with_plans_in_flight(4, 2);
    add(&mut scheduler, "old", 1, 8, 4);
    let young = add(&mut scheduler, "young", 5, 7, 2);
    let samples = plan(&mut scheduler);
    let preempts = plan(&mut scheduler);
    assert_eq!(preempted(&preempts), ["young"]);
    commit(&mut scheduler, &samples);
    commit(&mut scheduler, &preempts);
    assert_eq!(scheduler.progress(young, 0).unwrap().num_tokens, 8);
    let plans = steps::run_to_the_end(&mut scheduler, 10);
    let last = plans.iter().rev().find(|plan| num_tokens(plan) > 0).expect("something ran");
    assert_eq!((last.i32s(Field::SeqLens), last.sizes().num_samples), (&[8][..], 1), "its second and last token");
    assert_empty(&scheduler);
}

#[test]
fn samples_that_come_back_compute_their_prompt_once_and_each_its_own_tail() {
    let mut scheduler = with_plans_in_flight(7, 1);
    add(&mut scheduler, "old", 1, 8, 16);
    let samples = NewRequest { n: 2, use_prefix_cache: false, ..request("samples", 5, 5, 8) };
    let samples = scheduler.add_request(samples).unwrap();
    let first = plan(&mut scheduler);
    scheduler.commit(first.id(), &[7, 8, 9]).unwrap();
    while scheduler.num_preemptions() == 0 {
        step(&mut scheduler);
    }
    let tails: Vec<u32> = (0..2).map(|sample| scheduler.progress(samples, sample).unwrap().num_tokens).collect();
    assert!(tails.iter().all(|&tail| tail > 5), "both have tokens of their own: {tails:?}");
    let back = loop {
        let (back, _) = step(&mut scheduler);
        if handles(&back).contains(&samples.get()) {
            break back;
        }
    };
    assert_eq!((handles(&back), num_tokens(&back)), (vec![samples.get()], 5), "the prompt runs once");
    let (tail, _) = step(&mut scheduler);
    assert_eq!(tail.i32s(Field::Sequence), [0, 1]);
    assert_eq!(tail.i32s(Field::SeqLens), [tails[0] as i32, tails[1] as i32]);
    let first_of = |s: usize| tail.i32s(Field::TokenIds)[tail.i32s(Field::QueryStartLoc)[s] as usize];
    assert_eq!([first_of(0), first_of(1)], [8, 9], "each goes on with its own first token");
}

#[test]
fn block_that_goes_out_is_not_written_by_one_that_had_filled_it_in_a_plan_that_never_ran() {
    let cache = CacheConfig { block_size: 4, num_host_blocks: 8, ..CacheConfig::new(1 + 8) };
    let limits = SchedulerConfig {
        preemption_mode: PreemptionMode::Swap,
        max_num_seqs: 2,
        max_num_batched_tokens: 3,
        max_plans_in_flight: 2,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(&cache, &limits).unwrap();
    let first = scheduler.add_request(NewRequest::new("first", vec![9], 1)).unwrap();
    scheduler.hold(first).unwrap();
    scheduler.add_request(NewRequest::new("writer", vec![1, 2, 3, 4], 4)).unwrap();
    scheduler.add_request(NewRequest::new("reader", vec![1, 2, 3, 4, 5, 6], 4)).unwrap();
    steps::step(&mut scheduler);
    let filling = scheduler.schedule().unwrap();
    assert_eq!(filling.i32s(Field::Positions), [3, 4, 5], "the reader finds the block that the writer fills");
    scheduler.release(first).unwrap();
    let taking = scheduler.schedule().unwrap();
    let going_out: Vec<i32> = taking.i32s(Field::SwapOut).chunks(2).map(|pair| pair[0]).collect();
    assert_eq!(going_out.len(), 2, "the first request takes the reader's seat");
    scheduler.rollback(filling.id()).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i64s(Field::SwapOutIds), taking.i64s(Field::SwapOutIds), "transfers are never undone");
    let written: Vec<i32> = plan.i64s(Field::SlotMapping).iter().map(|slot| (slot / 4) as i32).collect();
    assert!(written.len() == 2 && !written.iter().any(|block| going_out.contains(block)), "{written:?}, {going_out:?}");
}
