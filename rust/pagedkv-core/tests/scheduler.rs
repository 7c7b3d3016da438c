//! What the scheduler does for requests, one behaviour a test.

#[path = "scene/steps.rs"]
mod steps;

use pagedkv_core::step_plan::Field;
use pagedkv_core::{Change, Error, FinishReason, Handle, NewRequest, Scheduler, SchedulerConfig, StepPlan};
use steps::{commit, scheduler, step};

fn plans_in_flight(max_plans_in_flight: u32) -> SchedulerConfig {
    SchedulerConfig { max_plans_in_flight, ..SchedulerConfig::default() }
}

fn add(scheduler: &mut Scheduler, request_id: &str, prompt_len: usize, max_tokens: u32) -> Handle {
    scheduler.add_request(NewRequest::new(request_id, vec![1; prompt_len], max_tokens)).expect("a request that fits")
}

fn add_samples(scheduler: &mut Scheduler, n: u32, prompt_len: usize, max_tokens: u32) -> Handle {
    let request = NewRequest { n, ..NewRequest::new("samples", vec![1; prompt_len], max_tokens) };
    scheduler.add_request(request).expect("a request that fits")
}

fn change(row: u32, request_id: &str) -> Change {
    Change { row, request_id: request_id.into(), sample: 0 }
}

// --- adding

#[test]
fn request_of_exactly_the_pools_capacity_runs_to_its_end() {
    let mut scheduler = scheduler(2, &SchedulerConfig::default());
    add(&mut scheduler, "r", 5, 4);
    let steps = (0..4).map(|_| step(&mut scheduler).1.finished.len());
    assert_eq!(steps.collect::<Vec<_>>(), [0, 0, 0, 1]);
}

#[test]
fn request_of_one_token_more_than_the_pool_holds_is_refused() {
    let mut scheduler = scheduler(2, &SchedulerConfig::default());
    let refused = scheduler.add_request(NewRequest::new("r", vec![1; 5], 5));
    assert_eq!(refused, Err(Error::NeverFits { needed: 3, usable: 2 }));
}

#[test]
fn request_id_of_a_live_request_is_refused() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add(&mut scheduler, "r", 1, 1);
    let refused = scheduler.add_request(NewRequest::new("r", vec![1], 1));
    assert_eq!(refused, Err(Error::DuplicateRequest("r".into())));
}

#[test]
fn request_id_of_a_request_that_ended_is_free_again() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add(&mut scheduler, "r", 1, 1);
    step(&mut scheduler);
    assert!(scheduler.add_request(NewRequest::new("r", vec![1], 1)).is_ok());
}

#[test]
fn request_id_of_a_request_whose_abort_was_left_is_free_at_once() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    let aborted = add(&mut scheduler, "r", 1, 2);
    step(&mut scheduler);
    scheduler.abort(aborted, None).unwrap();
    let again = add(&mut scheduler, "r", 1, 2);
    let (plan, _) = step(&mut scheduler);
    assert_eq!(plan.i64s(Field::Handles), [again.get()]);
    let refused = scheduler.add_request(NewRequest::new("r", vec![1], 1));
    assert_eq!(refused, Err(Error::DuplicateRequest("r".into())), "its end must not free what is another's now");
}

#[test]
fn request_with_more_samples_than_seats_is_refused() {
    let mut scheduler = scheduler(8, &SchedulerConfig { max_num_seqs: 2, ..SchedulerConfig::default() });
    let refused = scheduler.add_request(NewRequest { n: 3, ..NewRequest::new("r", vec![1], 1) });
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "n", .. })));
}

// --- steps

#[test]
fn prompt_longer_than_the_budget_runs_in_chunks() {
    let limits = SchedulerConfig { max_num_batched_tokens: 4, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    add(&mut scheduler, "r", 10, 1);
    let lengths = (0..3).map(|_| step(&mut scheduler).0.i32s(Field::SeqLens)[0]);
    assert_eq!(lengths.collect::<Vec<_>>(), [4, 8, 10]);
}

#[test]
fn only_the_last_chunk_of_a_prompt_is_sampled() {
    let limits = SchedulerConfig { max_num_batched_tokens: 4, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    add(&mut scheduler, "r", 6, 1);
    let samples = (0..2).map(|_| step(&mut scheduler).0.sizes().num_samples);
    assert_eq!(samples.collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn decodes_come_before_prefills() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add(&mut scheduler, "old", 3, 4);
    step(&mut scheduler);
    add(&mut scheduler, "new", 3, 4);
    let (plan, _) = step(&mut scheduler);
    assert_eq!(plan.i32s(Field::QueryStartLoc), [0, 1, 4]);
}

#[test]
fn prompt_that_an_earlier_request_of_the_same_plan_fills_is_shared() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add(&mut scheduler, "first", 6, 1);
    add(&mut scheduler, "second", 6, 1);
    let (plan, _) = step(&mut scheduler);
    assert_eq!(plan.i32s(Field::QueryStartLoc), [0, 6, 8]);
}

#[test]
fn prompt_that_is_cached_whole_still_runs_its_last_token() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add(&mut scheduler, "first", 5, 1);
    step(&mut scheduler);
    add(&mut scheduler, "second", 5, 1);
    let (plan, result) = step(&mut scheduler);
    assert_eq!((plan.i32s(Field::Positions), result.finished[0].num_cached_tokens), (&[4][..], 4));
}

#[test]
fn cached_blocks_are_looked_for_again_before_every_chunk_of_a_prompt() {
    let limits = SchedulerConfig { long_prefill_token_threshold: 4, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    add(&mut scheduler, "first", 13, 1);
    add(&mut scheduler, "second", 13, 1);
    assert_eq!(step(&mut scheduler).0.i32s(Field::SeqLens), [4, 8]);
    // The first finds what the second filled, and the second what the first fills in this step.
    assert_eq!(step(&mut scheduler).0.i32s(Field::SeqLens), [13, 12]);
}

#[test]
fn request_ends_with_its_last_token() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add(&mut scheduler, "r", 3, 2);
    let reasons = (0..2).map(|_| step(&mut scheduler).1.finish_reason[0]);
    assert_eq!(reasons.collect::<Vec<_>>(), [0, FinishReason::Length as i8]);
}

#[test]
fn stop_token_ends_a_sample_once_it_has_its_least_tokens() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    let request = NewRequest { stop_token_ids: vec![7], min_tokens: 2, ..NewRequest::new("r", vec![1], 8) };
    scheduler.add_request(request).unwrap();
    let reasons = (0..2).map(|_| step(&mut scheduler).1.finish_reason[0]);
    assert_eq!(reasons.collect::<Vec<_>>(), [0, FinishReason::Stop as i8]);
}

#[test]
fn everything_is_given_back_when_all_requests_have_ended() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add_samples(&mut scheduler, 3, 6, 4);
    for _ in 0..4 {
        step(&mut scheduler);
    }
    assert_eq!((scheduler.num_unfinished_requests(), scheduler.manager().usage()), (0, 0.0));
}

// --- samples

#[test]
fn samples_fork_when_their_prompt_is_computed() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add_samples(&mut scheduler, 3, 6, 4);
    let (plan, result) = step(&mut scheduler);
    assert_eq!((plan.sizes().num_samples, result.forked.len()), (3, 2));
}

#[test]
fn samples_copy_the_block_in_which_their_prompt_ends_but_for_the_last() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add_samples(&mut scheduler, 3, 6, 4);
    step(&mut scheduler);
    let (plan, _) = step(&mut scheduler);
    assert_eq!(plan.sizes().num_sequences, 3);
    assert_eq!(plan.i32s(Field::Copies).len() / 2, 2);
}

#[test]
fn samples_copy_nothing_when_their_prompt_ends_on_a_block_border() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add_samples(&mut scheduler, 3, 8, 2);
    step(&mut scheduler);
    let (plan, _) = step(&mut scheduler);
    assert_eq!((plan.sizes().num_sequences, plan.i32s(Field::Copies).len()), (3, 0));
}

#[test]
fn sample_that_is_aborted_leaves_the_others_running() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    let handle = add_samples(&mut scheduler, 3, 6, 4);
    step(&mut scheduler);
    scheduler.abort(handle, Some(1)).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!(plan.i32s(Field::Sequence), [0, 2]);
}

#[test]
fn sample_that_computes_the_prompt_for_the_others_hands_it_over_when_it_is_aborted() {
    let limits = SchedulerConfig { max_num_batched_tokens: 4, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    let handle = add_samples(&mut scheduler, 2, 6, 4);
    step(&mut scheduler);
    scheduler.abort(handle, Some(0)).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((plan.i32s(Field::Sequence), plan.i32s(Field::Positions)), (&[1][..], &[4, 5][..]));
}

// --- plans in flight

#[test]
fn second_plan_takes_its_input_from_the_first_ones_sample() {
    let mut scheduler = scheduler(8, &plans_in_flight(2));
    add(&mut scheduler, "r", 3, 4);
    scheduler.schedule().unwrap();
    let second = scheduler.schedule().unwrap();
    assert_eq!((second.i32s(Field::InputFrom), second.i32s(Field::Positions)), (&[0][..], &[3][..]));
}

#[test]
fn request_that_needs_its_commit_is_not_planned_before_it() {
    let mut scheduler = scheduler(8, &plans_in_flight(2));
    scheduler.add_request(NewRequest { needs_commit: true, ..NewRequest::new("r", vec![1; 3], 4) }).unwrap();
    let first = scheduler.schedule().unwrap();
    let second = scheduler.schedule().unwrap();
    assert_eq!((second.sizes().num_sequences, second.blocked_on()), (0, Some(first.id())));
}

#[test]
fn more_plans_than_configured_are_refused() {
    let mut scheduler = scheduler(8, &plans_in_flight(1));
    scheduler.schedule().unwrap();
    assert_eq!(scheduler.schedule().err(), Some(Error::TooManyPlans(1)));
}

#[test]
fn tokens_of_a_request_that_was_aborted_in_flight_are_ignored_and_counted() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    let handle = add(&mut scheduler, "r", 3, 4);
    let plan = scheduler.schedule().unwrap();
    scheduler.abort(handle, None).unwrap();
    let result = commit(&mut scheduler, &plan);
    assert_eq!((result.num_ignored, result.handles.len()), (1, 0));
}

#[test]
fn row_is_not_given_away_while_a_plan_in_flight_names_it() {
    let limits = SchedulerConfig { max_num_seqs: 1, ..plans_in_flight(2) };
    let mut scheduler = scheduler(8, &limits);
    let first = add(&mut scheduler, "first", 3, 4);
    let plan = scheduler.schedule().unwrap();
    scheduler.abort(first, None).unwrap();
    add(&mut scheduler, "second", 3, 4);
    assert_eq!(scheduler.schedule().unwrap().sizes().num_sequences, 0);
    commit(&mut scheduler, &plan);
    assert_eq!(scheduler.schedule().unwrap().i32s(Field::Rows), [0]);
}

// --- rollback

#[test]
fn rollback_puts_a_request_back_to_where_it_was() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add(&mut scheduler, "r", 3, 4);
    step(&mut scheduler);
    let undone = scheduler.schedule().unwrap();
    scheduler.rollback(undone.id()).unwrap();
    let (again, _) = step(&mut scheduler);
    let arrays = |plan: &StepPlan| (plan.i32s(Field::Positions).to_vec(), plan.i32s(Field::TokenIds).to_vec());
    assert_eq!(arrays(&again), arrays(&undone));
}

#[test]
fn plan_after_a_rollback_repeats_what_the_undone_one_announced() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add(&mut scheduler, "r", 3, 4);
    let undone = scheduler.schedule().unwrap();
    scheduler.rollback(undone.id()).unwrap();
    let (again, _) = step(&mut scheduler);
    assert_eq!(again.changes().new, [change(0, "r")]);
    assert!(!again.i32s(Field::TableUpdates).is_empty());
}

#[test]
fn plan_after_a_rollback_says_again_who_finished() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    add(&mut scheduler, "r", 3, 1);
    step(&mut scheduler);
    let undone = scheduler.schedule().unwrap();
    scheduler.rollback(undone.id()).unwrap();
    assert_eq!(step(&mut scheduler).0.changes().finished, [change(0, "r")]);
}

#[test]
fn rollback_never_revives_a_request_that_was_aborted() {
    let mut scheduler = scheduler(8, &SchedulerConfig::default());
    let handle = add(&mut scheduler, "r", 3, 4);
    let plan = scheduler.schedule().unwrap();
    scheduler.abort(handle, None).unwrap();
    scheduler.rollback(plan.id()).unwrap();
    assert_eq!(scheduler.num_unfinished_requests(), 0);
}

#[test]
fn commit_of_a_plan_that_a_rollback_cancelled_is_refused() {
    let mut scheduler = scheduler(8, &plans_in_flight(2));
    add(&mut scheduler, "r", 3, 4);
    let (first, second) = (scheduler.schedule().unwrap(), scheduler.schedule().unwrap());
    scheduler.rollback(first.id()).unwrap();
    assert_eq!(scheduler.commit(second.id(), &[7]), Err(Error::PlanNotInFlight(second.id())));
}

// --- preemption

/// Two requests that fit side by side at first, and not at their longest; the younger is preempted by the fourth step.
fn crowded() -> Scheduler {
    let mut scheduler = scheduler(3, &SchedulerConfig::default());
    add(&mut scheduler, "old", 3, 8);
    add(&mut scheduler, "young", 5, 4);
    scheduler
}

#[test]
fn youngest_request_is_preempted_when_there_is_no_room() {
    let mut scheduler = crowded();
    let preempted = (0..4).flat_map(|_| step(&mut scheduler).0.changes().preempted);
    assert_eq!(preempted.map(|change| change.request_id).collect::<Vec<_>>(), ["young"]);
}

#[test]
fn preempted_request_holds_no_block() {
    let mut scheduler = crowded();
    while scheduler.num_preemptions() == 0 {
        step(&mut scheduler);
    }
    assert_eq!(scheduler.block_table(Handle::new(1), 0), Ok(None));
}

#[test]
fn preempted_request_gets_all_its_tokens_in_the_end() {
    let mut scheduler = crowded();
    let mut num_tokens = 0;
    while scheduler.num_unfinished_requests() > 0 {
        let (_, result) = step(&mut scheduler);
        num_tokens += result.handles.iter().filter(|&&handle| handle == 1).count();
    }
    assert_eq!((num_tokens, scheduler.num_preemptions()), (4, 1));
}

#[test]
fn request_that_came_later_waits_while_a_preempted_one_does() {
    let mut scheduler = crowded();
    while scheduler.num_preemptions() == 0 {
        step(&mut scheduler);
    }
    add(&mut scheduler, "late", 1, 1);
    let (plan, _) = step(&mut scheduler);
    assert!(plan.i64s(Field::Handles).iter().all(|&handle| handle != 2));
}
