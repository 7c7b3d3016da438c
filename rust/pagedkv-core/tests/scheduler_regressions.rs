//! Faults of the scheduler that were found, each named after what went wrong, each seen failing first.

use pagedkv_core::{CacheConfig, Change, Error, Handle, NewRequest, Policy, Scheduler, SchedulerConfig, StepPlan};

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
