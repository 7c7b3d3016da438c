//! Sessions, holds and forks, one behaviour a test.

#[path = "scene/steps.rs"]
mod steps;

use pagedkv_core::step_plan::Field;
use pagedkv_core::{Change, Error, NewRequest, Policy, Scheduler, SchedulerConfig, StepResult};
use steps::{commit, counting_request, default_scheduler, num_blocks, scheduler, step, steps_to_the_end};

fn session(id: &str, prompt_len: i32, max_tokens: u32) -> NewRequest {
    NewRequest { session: true, ..NewRequest::new(id, (0..prompt_len).collect(), max_tokens) }
}

/// Runs to the end of what there is to do.
fn run(scheduler: &mut Scheduler) -> Vec<StepResult> {
    steps_to_the_end(scheduler, 1000).into_iter().map(|(_, result)| result).collect()
}

fn num_finished(results: &[StepResult]) -> usize {
    results.iter().map(|result| result.finished.len()).sum()
}

// --- sessions

#[test]
fn finished_session_keeps_the_blocks_of_its_computed_tokens_and_no_seat() {
    let limits = SchedulerConfig { max_num_seqs: 1, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    assert_eq!(num_blocks(&scheduler, handle, 0), 2, "8 tokens are computed, the ninth is not");
    scheduler.add_request(counting_request("r", 50, 4, 1)).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!(plan.changes().finished, [Change { row: 0, request_id: "s".into(), sample: 0 }]);
    assert_eq!(plan.i32s(Field::Rows), [0]);
}

#[test]
fn session_at_rest_is_not_unfinished() {
    let mut scheduler = default_scheduler(8);
    scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    assert_eq!((scheduler.num_unfinished_requests(), scheduler.num_requests()), (0, (0, 0)));
}

#[test]
fn appended_tokens_run_behind_the_last_token_and_nothing_is_computed_twice() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    scheduler.append_tokens(handle, 0, &[90, 91], Some(2)).unwrap();
    let (plan, result) = step(&mut scheduler);
    assert_eq!(plan.i32s(Field::Positions), [8, 9, 10]);
    assert_eq!(plan.i32s(Field::TokenIds), [7, 90, 91]);
    assert_eq!(plan.changes().new.len(), 1);
    assert_eq!((result.num_new_tokens.as_slice(), result.finished.len()), (&[1][..], 0));
}

#[test]
fn second_turn_counts_its_tokens_anew_and_reports_its_end_again() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    assert_eq!(num_finished(&run(&mut scheduler)), 1);
    scheduler.append_tokens(handle, 0, &[9], None).unwrap();
    let results = run(&mut scheduler);
    assert_eq!((results.len(), num_finished(&results)), (3, 1));
    assert_eq!(results[2].finished[0].request_id, "s");
}

#[test]
fn turn_without_new_tokens_goes_on_from_the_last_one() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    scheduler.append_tokens(handle, 0, &[], Some(1)).unwrap();
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [8]);
}

#[test]
fn freed_session_gives_its_blocks_back_and_is_unknown() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    scheduler.free(handle, None).unwrap();
    assert!(scheduler.manager().usage().abs() < 1e-9);
    assert_eq!(scheduler.append_tokens(handle, 0, &[1], None), Err(Error::UnknownHandle(handle)));
}

#[test]
fn aborted_session_gives_its_blocks_back_with_the_next_step() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    scheduler.abort(handle, None).unwrap();
    step(&mut scheduler);
    assert!(scheduler.manager().usage().abs() < 1e-9);
    assert_eq!(scheduler.num_unfinished_requests(), 0);
}

#[test]
fn request_id_of_a_session_at_rest_is_taken() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    assert_eq!(scheduler.add_request(counting_request("s", 0, 1, 1)), Err(Error::DuplicateRequest("s".into())));
    scheduler.free(handle, None).unwrap();
    assert!(scheduler.add_request(counting_request("s", 0, 1, 1)).is_ok());
}

#[test]
fn append_to_a_finished_request_that_is_no_session_names_an_unknown_handle() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(counting_request("r", 0, 6, 1)).unwrap();
    run(&mut scheduler);
    assert_eq!(scheduler.append_tokens(handle, 0, &[1], None), Err(Error::UnknownHandle(handle)));
}

#[test]
fn append_to_a_running_session_is_refused() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    step(&mut scheduler);
    let refused = scheduler.append_tokens(handle, 0, &[1], None);
    assert_eq!(refused, Err(Error::NotFinished { handle, sample: 0 }));
}

#[test]
fn append_to_a_session_that_a_plan_in_flight_names_is_refused() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.finish(handle, 0).unwrap();
    assert_eq!(scheduler.append_tokens(handle, 0, &[1], None), Err(Error::RequestInFlight(handle)));
    commit(&mut scheduler, &plan);
    assert_eq!(scheduler.append_tokens(handle, 0, &[1], None), Ok(()));
}

#[test]
fn append_that_can_never_fit_is_refused_and_changes_nothing() {
    let mut scheduler = default_scheduler(4);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    let refused = scheduler.append_tokens(handle, 0, &[1; 4], Some(5));
    assert_eq!(refused, Err(Error::NeverFits { needed: 5, usable: 4 }));
    assert_eq!(scheduler.append_tokens(handle, 0, &[1; 4], Some(4)), Ok(()));
    assert_eq!(num_finished(&run(&mut scheduler)), 1);
}

#[test]
fn append_beyond_the_longest_sequence_is_refused() {
    let limits = SchedulerConfig { max_model_len: 12, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    let refused = scheduler.append_tokens(handle, 0, &[1], Some(3));
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "max_tokens", .. })), "{refused:?}");
}

#[test]
fn each_sample_of_a_session_goes_on_by_itself() {
    let mut scheduler = default_scheduler(16);
    let handle = scheduler.add_request(NewRequest { n: 2, ..session("s", 6, 3) }).unwrap();
    run(&mut scheduler);
    scheduler.append_tokens(handle, 1, &[50], Some(1)).unwrap();
    let (plan, result) = step(&mut scheduler);
    assert_eq!((plan.i32s(Field::Sequence), plan.i32s(Field::Positions)), (&[1][..], &[8, 9][..]));
    assert_eq!(result.finished.len(), 1);
    assert_eq!((num_blocks(&scheduler, handle, 0), num_blocks(&scheduler, handle, 1)), (2, 3));
}

#[test]
fn samples_that_get_tokens_before_the_next_plan_go_on_together() {
    let mut scheduler = default_scheduler(16);
    let handle = scheduler.add_request(NewRequest { n: 2, ..session("s", 6, 3) }).unwrap();
    run(&mut scheduler);
    scheduler.append_tokens(handle, 1, &[50], Some(2)).unwrap();
    scheduler.append_tokens(handle, 0, &[60, 61], Some(2)).unwrap();
    let results = run(&mut scheduler);
    assert_eq!(num_finished(&results), 1);
    let num_tokens: usize = results.iter().map(|result| result.handles.len()).sum();
    assert_eq!(num_tokens, 4);
}

#[test]
fn one_sample_is_freed_and_the_other_kept() {
    let mut scheduler = default_scheduler(16);
    let handle = scheduler.add_request(NewRequest { n: 2, ..session("s", 6, 3) }).unwrap();
    run(&mut scheduler);
    scheduler.free(handle, Some(0)).unwrap();
    let refused = scheduler.append_tokens(handle, 0, &[1], None);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "sequence", .. })), "{refused:?}");
    assert_eq!(scheduler.append_tokens(handle, 1, &[1], None), Ok(()));
}

#[test]
fn next_turn_waits_behind_requests_that_came_before_it() {
    let limits = SchedulerConfig { max_num_seqs: 1, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(16, &limits);
    let handle = scheduler.add_request(session("s", 6, 1)).unwrap();
    run(&mut scheduler);
    let other = scheduler.add_request(counting_request("r", 50, 4, 1)).unwrap();
    scheduler.append_tokens(handle, 0, &[1], None).unwrap();
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [other.get()]);
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [handle.get()]);
}

#[test]
fn blocks_of_resting_sessions_keep_a_request_out_until_they_are_freed() {
    let mut scheduler = default_scheduler(4);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    scheduler.add_request(counting_request("r", 50, 10, 3)).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((plan.sizes().num_sequences, plan.blocked_on()), (0, None));
    assert_eq!(scheduler.num_resting(), (1, 2));
    scheduler.free(handle, None).unwrap();
    assert_eq!(num_finished(&run(&mut scheduler)), 1);
}

#[test]
fn waiting_turn_gives_its_blocks_to_a_request_that_comes_before_it() {
    let mut scheduler = default_scheduler(4);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    let other = scheduler.add_request(counting_request("r", 50, 10, 3)).unwrap();
    scheduler.append_tokens(handle, 0, &[1], None).unwrap();
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [other.get()]);
    let results = run(&mut scheduler);
    assert_eq!(num_finished(&results), 2);
    assert_eq!(results.last().unwrap().finished[0].num_preemptions, 1);
}

#[test]
fn rolled_back_admission_of_a_turn_keeps_its_blocks() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(session("s", 6, 3)).unwrap();
    run(&mut scheduler);
    scheduler.append_tokens(handle, 0, &[1, 2], None).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.rollback(plan.id()).unwrap();
    scheduler.check_integrity().unwrap();
    assert_eq!(num_blocks(&scheduler, handle, 0), 2);
    let (plan, _) = step(&mut scheduler);
    assert_eq!(plan.i32s(Field::Positions), [8, 9, 10]);
    assert_eq!(plan.i32s(Field::TableUpdates).len() / 4, 3, "the whole row is told");
}

#[test]
fn sample_that_ends_while_a_plan_behind_is_in_flight_keeps_what_is_committed() {
    let limits = SchedulerConfig { max_plans_in_flight: 2, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    let handle = scheduler.add_request(NewRequest { stop_token_ids: vec![7], ..session("s", 7, 9) }).unwrap();
    let first = scheduler.schedule().unwrap();
    let second = scheduler.schedule().unwrap();
    assert_eq!(commit(&mut scheduler, &first).finished.len(), 1);
    assert_eq!(commit(&mut scheduler, &second).num_ignored, 1);
    scheduler.append_tokens(handle, 0, &[1], None).unwrap();
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [7, 8]);
}

#[test]
fn session_kept_a_copied_block_although_the_plan_of_the_copy_never_ran() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(NewRequest { n: 2, ..session("s", 5, 3) }).unwrap();
    step(&mut scheduler);
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::Copies).len(), 2, "of the block of the fifth token, for the first sample");
    (0..2).for_each(|sample| scheduler.finish(handle, sample).unwrap());
    scheduler.rollback(plan.id()).unwrap();
    scheduler.append_tokens(handle, 0, &[90], Some(1)).unwrap();
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [4, 5, 6]);
    scheduler.append_tokens(handle, 1, &[90], Some(1)).unwrap();
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [5, 6], "it wrote into the block itself");
}

#[test]
fn session_of_beams_is_refused() {
    let mut scheduler = default_scheduler(8);
    let refused = scheduler.add_request(NewRequest { n: 2, needs_commit: true, ..session("s", 6, 3) });
    assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
}

// --- hold and release

#[test]
fn held_request_is_passed_over_and_keeps_its_place() {
    let limits = SchedulerConfig { max_num_seqs: 1, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    let [a, b, c] = ["a", "b", "c"].map(|id| scheduler.add_request(counting_request(id, 0, 4, 1)).unwrap());
    scheduler.hold(a).unwrap();
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [b.get()]);
    scheduler.release(a).unwrap();
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [a.get()]);
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [c.get()]);
}

#[test]
fn held_running_request_keeps_its_blocks_and_is_not_planned() {
    let mut scheduler = default_scheduler(8);
    let [a, b] = [0, 50].map(|first| scheduler.add_request(counting_request(&first.to_string(), first, 5, 9)).unwrap());
    step(&mut scheduler);
    scheduler.hold(a).unwrap();
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [b.get()]);
    assert_eq!(num_blocks(&scheduler, a, 0), 2);
    scheduler.release(a).unwrap();
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [a.get(), b.get()]);
}

#[test]
fn held_request_gives_blocks_to_one_behind_it_that_finds_none() {
    let mut scheduler = default_scheduler(4);
    let [a, b] = [0, 50].map(|first| scheduler.add_request(counting_request(&first.to_string(), first, 7, 6)).unwrap());
    step(&mut scheduler);
    scheduler.hold(a).unwrap();
    step(&mut scheduler);
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [b.get()]);
    assert_eq!((num_blocks(&scheduler, a, 0), scheduler.num_preemptions()), (0, 1));
    scheduler.release(a).unwrap();
    assert_eq!(num_finished(&run(&mut scheduler)), 2);
}

#[test]
fn held_requests_give_seats_to_one_that_waits_where_nobody_else_runs() {
    let limits = SchedulerConfig { max_num_seqs: 1, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    let [a, b] = [0, 50].map(|first| scheduler.add_request(counting_request(&first.to_string(), first, 5, 2)).unwrap());
    step(&mut scheduler);
    scheduler.hold(a).unwrap();
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [b.get()]);
}

#[test]
fn plan_is_empty_and_blocked_on_nothing_when_every_request_is_held() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(counting_request("r", 0, 4, 1)).unwrap();
    scheduler.hold(handle).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((plan.sizes().num_sequences, plan.blocked_on()), (0, None));
}

#[test]
fn held_request_may_be_aborted() {
    let mut scheduler = default_scheduler(8);
    let handles =
        [0, 50].map(|first| scheduler.add_request(counting_request(&first.to_string(), first, 5, 2)).unwrap());
    scheduler.hold(handles[1]).unwrap();
    step(&mut scheduler);
    scheduler.hold(handles[0]).unwrap();
    handles.iter().for_each(|&handle| scheduler.abort(handle, None).unwrap());
    step(&mut scheduler);
    assert_eq!(scheduler.num_unfinished_requests(), 0);
}

#[test]
fn tokens_for_a_held_session_wait_for_its_release() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(session("s", 6, 1)).unwrap();
    run(&mut scheduler);
    scheduler.hold(handle).unwrap();
    scheduler.append_tokens(handle, 0, &[1], None).unwrap();
    assert_eq!(step(&mut scheduler).0.sizes().num_sequences, 0);
    scheduler.release(handle).unwrap();
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [6, 7]);
}

#[test]
fn hold_of_a_request_that_ended_names_an_unknown_handle() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(counting_request("r", 0, 4, 1)).unwrap();
    run(&mut scheduler);
    assert_eq!(scheduler.hold(handle), Err(Error::UnknownHandle(handle)));
}

#[test]
fn held_request_that_is_more_urgent_does_not_keep_others_waiting() {
    let limits = SchedulerConfig { max_num_seqs: 1, policy: Policy::Priority, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    let low = scheduler.add_request(NewRequest { priority: 2, ..counting_request("low", 0, 4, 3) }).unwrap();
    step(&mut scheduler);
    let high = scheduler.add_request(NewRequest { priority: 1, ..counting_request("high", 50, 4, 3) }).unwrap();
    scheduler.hold(high).unwrap();
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [low.get()]);
    scheduler.release(high).unwrap();
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [high.get()]);
}
