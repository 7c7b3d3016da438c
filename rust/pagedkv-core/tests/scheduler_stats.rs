//! What the scheduler counts, in scenes where it can be said beforehand.

use pagedkv_core::{CacheConfig, Error, Handle, NewRequest, Scheduler, SchedulerConfig, StepResult, TenantName};

fn scheduler(num_blocks: u32, block_size: u32) -> Scheduler {
    let cache = CacheConfig { block_size, residency_sampling: 1, ..CacheConfig::new(num_blocks) };
    Scheduler::new(&cache, &SchedulerConfig::default()).expect("a valid configuration")
}

fn add(scheduler: &mut Scheduler, id: &str, len: i32, max_tokens: u32, arrival: f64) -> Handle {
    let request = NewRequest { arrival, ..NewRequest::new(id, (0..len).collect(), max_tokens) };
    scheduler.add_request(request).expect("a request that fits")
}

fn step(scheduler: &mut Scheduler, planned: f64, ended: f64) -> StepResult {
    scheduler.advance(planned).expect("a finite time");
    let plan = scheduler.schedule().expect("no plan is in flight");
    scheduler.advance(ended).expect("a finite time");
    let tokens = vec![7; plan.sizes().num_samples as usize];
    scheduler.commit(plan.id(), &tokens).expect("the oldest plan")
}

#[test]
fn phases_of_a_request_add_up_to_its_life() {
    let mut scheduler = scheduler(8, 4);
    add(&mut scheduler, "a", 5, 3, 1.0);
    step(&mut scheduler, 3.0, 4.0);
    step(&mut scheduler, 5.0, 6.0);
    let finished = step(&mut scheduler, 7.0, 8.0).finished.remove(0).stats;
    assert_eq!(
        (finished.queue_time, finished.time_to_first_token, finished.time_in_system),
        (Some(2.0), Some(3.0), 7.0)
    );
    let stats = scheduler.stats();
    let phases = [
        &stats.request_queue_time_seconds,
        &stats.request_prefill_time_seconds,
        &stats.request_decode_time_seconds,
        &stats.e2e_request_latency_seconds,
        &stats.request_time_per_output_token_seconds,
    ];
    assert_eq!(phases.map(|phase| (phase.count(), phase.sum())), [(1, 2.0), (1, 1.0), (1, 4.0), (1, 7.0), (1, 2.0)]);
}

#[test]
fn tokens_are_told_of_requests_that_ended_after_their_first() {
    let mut scheduler = scheduler(8, 4);
    add(&mut scheduler, "a", 5, 3, 0.0);
    step(&mut scheduler, 0.0, 1.0);
    let refused = add(&mut scheduler, "b", 9, 3, 1.0);
    scheduler.abort(refused, None).expect("it is live");
    step(&mut scheduler, 1.0, 2.0);
    let before = scheduler.stats();
    assert_eq!((before.request_prompt_tokens.count(), before.request_generation_tokens.count()), (0, 0));
    step(&mut scheduler, 2.0, 3.0);
    let stats = scheduler.stats();
    assert_eq!((stats.request_prompt_tokens.count(), stats.request_prompt_tokens.sum()), (1, 5.0));
    assert_eq!((stats.request_generation_tokens.count(), stats.request_generation_tokens.sum()), (1, 3.0));
}

#[test]
fn an_undone_admission_is_as_if_it_had_never_been() {
    let mut scheduler = scheduler(8, 4);
    let handle = add(&mut scheduler, "a", 5, 3, 0.0);
    let before = scheduler.stats();
    scheduler.advance(1.0).expect("a finite time");
    let plan = scheduler.schedule().expect("no plan is in flight");
    assert_eq!(scheduler.request_stats(handle).expect("it is live").queue_time, Some(1.0));
    scheduler.rollback(plan.id()).expect("it is in flight");
    assert_eq!(scheduler.request_stats(handle).expect("it is live").queue_time, None);
    let mut totals = scheduler.stats().totals;
    totals.num_requests = 0;
    assert_eq!(totals, before.totals);
}

#[test]
fn tokens_of_running_requests_are_counted_before_they_end() {
    let mut scheduler = scheduler(8, 4);
    add(&mut scheduler, "a", 5, 3, 0.0);
    step(&mut scheduler, 1.0, 1.0);
    step(&mut scheduler, 2.0, 2.0);
    let stats = scheduler.stats();
    assert_eq!((stats.totals.generation_tokens, stats.totals.num_finished), (2, 0));
    assert_eq!(stats.tenants[0].0, TenantName::Unnamed);
    assert_eq!(stats.tenants[0].1, stats.totals);
}

#[test]
fn time_never_goes_back() {
    let mut scheduler = scheduler(8, 4);
    let handle = add(&mut scheduler, "a", 5, 3, 2.0);
    step(&mut scheduler, 5.0, 3.0);
    assert_eq!(scheduler.request_stats(handle).expect("it is live").time_to_first_token, Some(3.0));
    let refused = scheduler.advance(f64::NAN);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "now", .. })), "{refused:?}");
}

#[test]
fn an_arrival_after_the_present_time_has_waited_for_nothing() {
    let mut scheduler = scheduler(8, 4);
    let handle = add(&mut scheduler, "a", 5, 3, 9.0);
    step(&mut scheduler, 1.0, 2.0);
    assert_eq!(scheduler.request_stats(handle).expect("it is live").queue_time, Some(0.0));
}

#[test]
fn hits_and_evictions_of_blocks_are_timed() {
    let mut scheduler = scheduler(4, 2);
    for (id, at) in [("a", 1.0), ("b", 3.0), ("c", 6.0)] {
        add(&mut scheduler, id, 5, 1, at);
        step(&mut scheduler, at, at);
    }
    let other = NewRequest { arrival: 11.0, ..NewRequest::new("d", vec![9; 6], 1) };
    scheduler.add_request(other).expect("a request that fits");
    step(&mut scheduler, 11.0, 11.0);
    let residency = scheduler.stats().residency.expect("it is sampled");
    let lifetime = residency.kv_block_lifetime_seconds;
    assert_eq!((lifetime.count(), lifetime.sum()), (2, 20.0));
    let (idle, gaps) = (residency.kv_block_idle_before_evict_seconds, residency.kv_block_reuse_gap_seconds);
    assert_eq!((idle.sum(), gaps.sum()), (10.0, 6.0));
}

#[test]
fn check_integrity_finds_what_was_broken() {
    let mut scheduler = scheduler(8, 4);
    add(&mut scheduler, "a", 5, 3, 0.0);
    step(&mut scheduler, 1.0, 1.0);
    assert_eq!(scheduler.check_integrity(), Ok(()));
    scheduler.break_a_law();
    assert_eq!(scheduler.check_integrity().expect_err("a block lost its holders").law, 2);
}

#[test]
fn a_block_that_samples_share_counts_for_each_resident_one() {
    let mut scheduler = scheduler(16, 4);
    let request = NewRequest { n: 3, ..NewRequest::new("a", (0..6).collect(), 4) };
    scheduler.add_request(request).expect("a request that fits");
    assert_eq!(scheduler.num_resident_blocks(), 0);
    step(&mut scheduler, 0.0, 0.0);
    // Two blocks of the prompt for each of three samples, which hold two between them.
    assert_eq!((scheduler.num_resident_blocks(), scheduler.manager().pool().num_held()), (6, 2));
    step(&mut scheduler, 0.0, 0.0);
    assert_eq!((scheduler.num_resident_blocks(), scheduler.manager().pool().num_held()), (6, 4));
}
