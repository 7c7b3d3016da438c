//! Faults of the scheduler that were found, each named after what went wrong, each seen failing first.

use pagedkv_core::step_plan::Field;
use pagedkv_core::{
    CacheConfig, Change, Error, Handle, NewRequest, Policy, PreemptionMode, Scheduler, SchedulerConfig, StepPlan,
};

fn scheduler(num_blocks: u32, max_plans_in_flight: u32) -> Scheduler {
    let cache = CacheConfig { block_size: 1, ..CacheConfig::new(num_blocks) };
    let limits = SchedulerConfig { max_plans_in_flight, ..SchedulerConfig::default() };
    Scheduler::new(&cache, &limits).expect("a valid configuration")
}

fn add(scheduler: &mut Scheduler, request_id: &str, prompt: &[i32], max_tokens: u32, n: u32) -> Handle {
    let request = NewRequest { n, ..NewRequest::new(request_id, prompt.to_vec(), max_tokens) };
    scheduler.add_request(request).expect("a request that fits")
}

fn commit(scheduler: &mut Scheduler, plan: &StepPlan) {
    let tokens = vec![0; plan.sizes().num_samples as usize];
    scheduler.commit(plan.id(), &tokens).expect("the oldest plan");
}

#[test]
fn abort_of_a_request_whose_last_sample_had_ended_before_the_others_panicked() {
    let mut scheduler = scheduler(16, 1);
    let handle = add(&mut scheduler, "r", &[0], 4, 2);
    scheduler.abort(handle, Some(1)).unwrap();
    scheduler.abort(handle, None).unwrap();
    scheduler.schedule().unwrap();
    assert_eq!(scheduler.num_unfinished_requests(), 0);
}

/// Two requests in a pool that holds one of them to its end: the second is preempted by the second plan, while its last
/// token is on its way in the first.
fn preempted_with_its_last_token_on_its_way() -> (Scheduler, StepPlan, StepPlan) {
    let mut scheduler = scheduler(1 + 3, 2);
    add(&mut scheduler, "old", &[0, 0], 2, 1);
    add(&mut scheduler, "young", &[1], 1, 1);
    let first = scheduler.schedule().unwrap();
    let second = scheduler.schedule().unwrap();
    (scheduler, first, second)
}

#[test]
fn request_that_ended_after_a_plan_had_preempted_it_was_never_said_to_have_left_when_the_plan_was_undone() {
    let (mut scheduler, first, second) = preempted_with_its_last_token_on_its_way();
    let young = Change { row: 1, request_id: "young".into(), sample: 0 };
    assert_eq!(second.changes().preempted, std::slice::from_ref(&young), "the scene is another");
    commit(&mut scheduler, &first);
    scheduler.rollback(second.id()).unwrap();
    assert_eq!(scheduler.schedule().unwrap().changes().finished, [young]);
}

#[test]
fn request_that_ended_after_the_plan_that_preempted_it_was_undone_was_said_to_come_back() {
    let (mut scheduler, first, second) = preempted_with_its_last_token_on_its_way();
    scheduler.rollback(second.id()).unwrap();
    commit(&mut scheduler, &first);
    assert_eq!(scheduler.schedule().unwrap().changes().preempted, []);
}

/// A patient request of so many tokens that runs, and an urgent one that came later and waits.
fn urgent_behind_patient(max_tokens: u32, num_blocks: u32, limits: SchedulerConfig) -> Scheduler {
    let cache = CacheConfig { block_size: 1, ..CacheConfig::new(num_blocks) };
    let limits = SchedulerConfig { policy: Policy::Priority, ..limits };
    let mut scheduler = Scheduler::new(&cache, &limits).expect("a valid configuration");
    let request =
        |request_id: &str, priority| NewRequest { priority, ..NewRequest::new(request_id, vec![priority; 2], 1) };
    scheduler.add_request(NewRequest { max_tokens, ..request("patient", 1) }).expect("a request that fits");
    let plan = scheduler.schedule().unwrap();
    commit(&mut scheduler, &plan);
    scheduler.add_request(request("urgent", 0)).expect("a request that fits");
    scheduler
}

#[test]
fn request_that_waited_for_room_behind_an_urgent_one_kept_it_out_for_ever() {
    let mut scheduler = urgent_behind_patient(2, 1 + 4, SchedulerConfig::default());
    assert!(scheduler.schedule().unwrap().sizes().num_sequences > 0, "nothing runs");
}

#[test]
fn prefill_that_waited_for_room_behind_an_urgent_one_kept_it_out_for_ever() {
    let limits =
        SchedulerConfig { long_prefill_token_threshold: 1, max_num_partial_prefills: 1, ..SchedulerConfig::default() };
    let mut scheduler = urgent_behind_patient(1, 1 + 2, limits);
    assert!(scheduler.schedule().unwrap().sizes().num_sequences > 0, "nothing runs");
}

#[test]
fn block_table_of_a_request_that_was_just_added_named_an_unknown_handle() {
    let mut scheduler = scheduler(8, 1);
    let handle = add(&mut scheduler, "r", &[0; 2], 1, 2);
    assert_eq!(scheduler.block_table(handle, 1), Ok(None));
    assert!(matches!(scheduler.block_table(handle, 2), Err(Error::InvalidArgument { argument: "sequence", .. })));
    assert_eq!(scheduler.block_table(Handle::new(1), 0), Err(Error::UnknownHandle(Handle::new(1))));
}

fn session(request_id: &str, prompt: &[i32], max_tokens: u32, n: u32) -> NewRequest {
    NewRequest { session: true, n, ..NewRequest::new(request_id, prompt.to_vec(), max_tokens) }
}

fn step(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.schedule().unwrap();
    commit(scheduler, &plan);
    scheduler.check_integrity().unwrap();
    plan
}

#[test]
fn fork_that_lost_its_blocks_before_its_first_admission_was_counted_as_waiting_twice() {
    let mut scheduler = scheduler(1 + 3, 1);
    let parent = add(&mut scheduler, "parent", &[1, 1], 2, 1);
    step(&mut scheduler);
    scheduler.advance(1.0).unwrap();
    let fork = scheduler.fork(parent, 0, NewRequest { arrival: 1.0, ..NewRequest::new("fork", vec![], 1) }).unwrap();
    scheduler.hold(fork).unwrap();
    let other = add(&mut scheduler, "other", &[2, 2], 1, 1);
    scheduler.advance(2.0).unwrap();
    (0..2).for_each(|_| drop(step(&mut scheduler)));
    assert_eq!(scheduler.request_stats(fork).unwrap().num_preemptions, 1, "the scene is another");
    assert!(scheduler.request_stats(other).is_err(), "it has ended");
    scheduler.advance(5.0).unwrap();
    scheduler.release(fork).unwrap();
    scheduler.schedule().unwrap();
    let found = scheduler.request_stats(fork).unwrap();
    assert_eq!((found.queue_time, found.requeue_time), (Some(4.0), 0.0));
}

#[test]
fn rollback_took_hits_back_from_a_turn_that_was_over() {
    let mut scheduler = scheduler(16, 2);
    add(&mut scheduler, "cached", &[1, 2, 3], 1, 1);
    step(&mut scheduler);
    let handle = scheduler.add_request(session("session", &[1, 2, 3], 4, 1)).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.finish(handle, 0).unwrap();
    let reported = scheduler.stats().totals;
    scheduler.rollback(plan.id()).unwrap();
    assert_eq!(scheduler.request_stats(handle).unwrap().num_cached_tokens, 2);
    assert_eq!(scheduler.stats().totals, reported);
}

#[test]
fn draft_tokens_of_a_turn_that_was_over_were_checked_in_the_next_one() {
    let cache = CacheConfig { block_size: 1, ..CacheConfig::new(32) };
    let limits = SchedulerConfig { lookahead: 2, long_prefill_token_threshold: 2, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(&cache, &limits).expect("a valid configuration");
    let handle = scheduler.add_request(session("session", &[1, 2], 8, 1)).unwrap();
    step(&mut scheduler);
    scheduler.set_draft_tokens(&[0], &[0, 2], &[5, 6]).unwrap();
    scheduler.finish(handle, 0).unwrap();
    // Two chunks, of which the second has the one token that guesses could follow.
    scheduler.append_tokens(handle, 0, &[8, 9], None).unwrap();
    assert_eq!([(); 2].map(|()| step(&mut scheduler).sizes().num_tokens), [2, 1]);
}

/// Both samples of a session have ended. One goes on, waits, and loses its blocks to another request; then the other one
/// gets tokens, and waits with it.
fn turn_of_which_one_sample_has_blocks() -> (Scheduler, Handle) {
    let mut scheduler = scheduler(1 + 13, 1);
    let handle = scheduler.add_request(session("session", &[1, 1], 3, 2)).unwrap();
    (0..3).for_each(|_| drop(step(&mut scheduler)));
    let before = add(&mut scheduler, "before", &[2; 7], 3, 1);
    step(&mut scheduler);
    scheduler.append_tokens(handle, 1, &[5], Some(2)).unwrap();
    scheduler.hold(handle).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.request_stats(handle).unwrap().num_preemptions, 1, "the scene is another");
    scheduler.append_tokens(handle, 0, &[6], Some(1)).unwrap();
    scheduler.abort(before, None).unwrap();
    scheduler.check_integrity().unwrap();
    (scheduler, handle)
}

#[test]
fn waiting_request_whose_only_sample_with_blocks_ended_was_still_taken_for_one_that_can_give_some() {
    let (mut scheduler, handle) = turn_of_which_one_sample_has_blocks();
    scheduler.finish(handle, 0).unwrap();
    scheduler.check_integrity().unwrap();
    let num_preemptions = scheduler.num_preemptions();
    add(&mut scheduler, "after", &[3; 8], 1, 1);
    step(&mut scheduler);
    assert_eq!(scheduler.num_preemptions(), num_preemptions);
}

/// A session, one sample of which is at rest with blocks, while the other one is on its way to the host tier.
fn session_that_goes_out() -> (Scheduler, Handle) {
    let cache = CacheConfig { block_size: 1, num_host_blocks: 8, ..CacheConfig::new(1 + 13) };
    let limits = SchedulerConfig { preemption_mode: PreemptionMode::Swap, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(&cache, &limits).expect("a valid configuration");
    let handle = scheduler.add_request(session("session", &[1, 1], 3, 2)).unwrap();
    (0..3).for_each(|_| drop(step(&mut scheduler)));
    scheduler.append_tokens(handle, 1, &[5], Some(2)).unwrap();
    step(&mut scheduler);
    scheduler.hold(handle).unwrap();
    add(&mut scheduler, "taker", &[2; 6], 1, 1);
    step(&mut scheduler);
    assert!(scheduler.num_host_blocks().1 < 8, "the scene is another");
    (scheduler, handle)
}

#[test]
fn request_that_was_out_and_got_tokens_for_a_sample_with_blocks_kept_host_blocks_for_nothing() {
    let (mut scheduler, handle) = session_that_goes_out();
    scheduler.transfers_done(&[1], true).unwrap();
    scheduler.append_tokens(handle, 0, &[6], Some(1)).unwrap();
    assert_eq!(scheduler.num_host_blocks(), (8, 8));
    scheduler.check_integrity().unwrap();
    scheduler.release(handle).unwrap();
    (0..8).for_each(|_| drop(step(&mut scheduler)));
    assert_eq!(scheduler.num_unfinished_requests(), 0);
}

#[test]
fn request_that_got_tokens_for_a_sample_with_blocks_was_planned_while_it_went_out() {
    let (mut scheduler, handle) = session_that_goes_out();
    scheduler.append_tokens(handle, 0, &[6], Some(1)).unwrap();
    scheduler.release(handle).unwrap();
    assert!(!step(&mut scheduler).i64s(Field::Handles).contains(&handle.get()), "its transfer is outstanding");
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(scheduler.num_host_blocks(), (8, 8));
    (0..8).for_each(|_| drop(step(&mut scheduler)));
    assert_eq!(scheduler.num_unfinished_requests(), 0);
}

/// Both samples of a session end before the prompt is computed; then one of them goes on with two tokens more, and the
/// other one with the prompt alone.
///
/// Answers who draws a token in the first step of that turn; in the second, the two tokens are computed, and all is over.
fn first_to_draw_of_samples_of_different_lengths(longer: u32) -> Vec<i32> {
    let mut scheduler = scheduler(1 + 16, 1);
    let handle = scheduler.add_request(session("session", &[1, 2], 2, 2)).unwrap();
    let plan = scheduler.schedule().unwrap();
    (0..2).for_each(|sample| scheduler.finish(handle, sample).unwrap());
    commit(&mut scheduler, &plan);
    scheduler.append_tokens(handle, longer, &[8, 9], Some(1)).unwrap();
    scheduler.append_tokens(handle, 1 - longer, &[], Some(1)).unwrap();
    let plan = scheduler.schedule().unwrap();
    let drawn = scheduler.commit(plan.id(), &[7]).unwrap();
    assert_eq!(drawn.num_new_tokens, [1]);
    let plan = step(&mut scheduler);
    assert_eq!((plan.i64s(Field::Handles), plan.i32s(Field::Positions)), (&[handle.get()][..], &[2, 3][..]));
    assert_eq!(scheduler.num_unfinished_requests(), 0);
    drawn.sequence
}

#[test]
fn sample_that_had_the_prompt_alone_beside_a_longer_one_never_drew_a_token() {
    assert_eq!(first_to_draw_of_samples_of_different_lengths(0), [1]);
}

#[test]
fn sample_that_had_more_than_the_prompt_drew_a_token_behind_the_prompt() {
    assert_eq!(first_to_draw_of_samples_of_different_lengths(1), [0]);
}

/// A request of two samples, three blocks long, that went out while the first one computed the prompt for both, and whose
/// first sample was aborted then.
fn prompt_that_is_out_without_its_first_sample(parts_before: bool) -> (Scheduler, Handle) {
    let cache = CacheConfig { block_size: 4, num_host_blocks: 2, ..CacheConfig::new(1 + 5) };
    let limits = SchedulerConfig {
        policy: Policy::Priority,
        preemption_mode: PreemptionMode::Swap,
        max_num_batched_tokens: 8,
        ageing: None,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(&cache, &limits).expect("a valid configuration");
    let asked = NewRequest { n: 2, priority: 1, ..NewRequest::new("out", vec![1; 9], 4) };
    let handle = scheduler.add_request(asked).unwrap();
    let push_out = |scheduler: &mut Scheduler| {
        add(scheduler, "urgent", &[2; 16], 1, 1);
        (0..2).for_each(|_| drop(step(scheduler)));
        assert!(scheduler.block_table(handle, 0).unwrap().is_none(), "the scene is another");
    };
    if parts_before {
        // The host tier has too few blocks for two samples.
        (0..3).for_each(|_| drop(step(&mut scheduler)));
        push_out(&mut scheduler);
        scheduler.reset_prefix_cache();
    }
    step(&mut scheduler);
    push_out(&mut scheduler);
    scheduler.transfers_done(&[1], true).unwrap();
    scheduler.abort(handle, Some(0)).unwrap();
    step(&mut scheduler);
    (scheduler, handle)
}

#[test]
fn sample_whose_cache_had_been_reset_could_not_take_over_what_another_one_computed_since() {
    let (mut scheduler, handle) = prompt_that_is_out_without_its_first_sample(true);
    assert!(!step(&mut scheduler).i32s(Field::SwapIn).is_empty(), "the scene is another");
    let coming: Vec<_> = scheduler.outstanding_transfers().collect();
    scheduler.transfers_done(&coming, true).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!(plan.i64s(Field::Handles), [handle.get()]);
    assert_eq!(plan.i32s(Field::Positions)[0], 8, "two blocks came back");
    scheduler.check_integrity().unwrap();
}

#[test]
fn sample_that_took_over_what_was_computed_before_a_reset_of_the_cache_made_it_public() {
    let (mut scheduler, handle) = prompt_that_is_out_without_its_first_sample(false);
    scheduler.reset_prefix_cache();
    let plan = step(&mut scheduler);
    assert_eq!(plan.i64s(Field::Handles), [handle.get()]);
    assert_eq!(plan.i32s(Field::Positions), [0, 1, 2, 3, 4, 5, 6, 7], "it is computed anew");
}

#[test]
fn request_that_was_to_have_fenced_blocks_took_those_of_a_session() {
    let cache = CacheConfig { block_size: 4, ..CacheConfig::new(1 + 4) };
    let mut scheduler = Scheduler::new(&cache, &SchedulerConfig::default()).expect("a valid configuration");
    let kept = scheduler.add_request(session("session", &[1; 8], 1, 1)).unwrap();
    step(&mut scheduler);
    let loads = NewRequest { num_external_tokens: 8, ..NewRequest::new("aborted", vec![2; 8], 1) };
    let loads = scheduler.add_request(loads).unwrap();
    step(&mut scheduler);
    scheduler.abort(loads, None).unwrap();
    let first = add(&mut scheduler, "first", &[3; 8], 1, 1);
    scheduler.append_tokens(kept, 0, &[4], Some(1)).unwrap();
    assert!(step(&mut scheduler).i64s(Field::Handles).is_empty(), "it waits for two blocks");
    assert_eq!(scheduler.num_preemptions(), 0);
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(step(&mut scheduler).i64s(Field::Handles), [first.get()]);
}

#[test]
fn beams_were_passed_over_for_a_later_request_because_an_earlier_one_guessed() {
    let cache = CacheConfig { block_size: 4, ..CacheConfig::new(1 + 32) };
    let limits = SchedulerConfig { max_num_batched_tokens: 4, lookahead: 2, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(&cache, &limits).expect("a valid configuration");
    let guesser = add(&mut scheduler, "guesser", &[1], 8, 1);
    let beams = NewRequest { n: 2, needs_commit: true, ..NewRequest::new("beams", vec![2], 8) };
    let beams = scheduler.add_request(beams).unwrap();
    let later = add(&mut scheduler, "later", &[3], 8, 1);
    let plan = step(&mut scheduler);
    let row = plan.changes().new.iter().find(|change| change.request_id == "guesser").expect("it sits").row;
    scheduler.set_draft_tokens(&[row as i32], &[0, 2], &[5, 6]).unwrap();
    let plan = scheduler.schedule().unwrap();
    let [guesser, beams, later] = [guesser, beams, later].map(Handle::get);
    assert_eq!(plan.i64s(Field::Handles), [guesser, beams, beams, later]);
}

#[test]
fn request_that_came_back_first_found_no_room_for_a_chunk_and_nothing_was_planned() {
    let cache = CacheConfig { block_size: 4, num_host_blocks: 3, ..CacheConfig::new(1 + 6) };
    let limits = SchedulerConfig {
        preemption_mode: PreemptionMode::Swap,
        max_num_batched_tokens: 6,
        watermark: 0.5,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(&cache, &limits).expect("a valid configuration");
    let first = add(&mut scheduler, "first", &[1; 12], 4, 1);
    step(&mut scheduler);
    scheduler.hold(first).unwrap();
    let later = add(&mut scheduler, "later", &[2; 8], 12, 1);
    // It takes all that the other one's blocks, which are on their way out, leave.
    step(&mut scheduler);
    while scheduler.progress(later, 0).unwrap().num_computed < 16 {
        step(&mut scheduler);
    }
    scheduler.transfers_done(&[1], true).unwrap();
    scheduler.release(first).unwrap();
    let plan = step(&mut scheduler);
    assert!(plan.i32s(Field::SwapIn).is_empty(), "the scene is another");
    assert_eq!(plan.i64s(Field::Handles), [first.get()]);
    assert_eq!(plan.i32s(Field::Positions), [6, 7, 8, 9, 10, 11]);
}
