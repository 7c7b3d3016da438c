//! In what order requests get seats, blocks and tokens.

use pagedkv_core::scheduler::{OrderPolicy, RequestView};
use pagedkv_core::{CacheConfig, Error, NewRequest, Policy, Scheduler, SchedulerConfig, StepPlan, step_plan::Field};

fn limits(policy: Policy) -> SchedulerConfig {
    SchedulerConfig { policy, max_num_seqs: 1, max_model_len: 256, ..SchedulerConfig::default() }
}

fn cache(num_blocks: u32) -> CacheConfig {
    CacheConfig { block_size: 4, ..CacheConfig::new(num_blocks) }
}

fn request(id: &str, first_token: i32, priority: i32) -> NewRequest {
    NewRequest { priority, ..NewRequest::new(id, (first_token..first_token + 8).collect(), 4) }
}

fn tenant(id: &str, tenant: &str) -> NewRequest {
    NewRequest { tenant: Some(tenant.into()), ..NewRequest::new(id, vec![1; 8], 1) }
}

fn step(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &vec![7; plan.sizes().num_samples as usize]).unwrap();
    scheduler.check_integrity().unwrap();
    plan
}

/// Ids of requests in the order in which they first got a seat.
fn order_of_admission(scheduler: &mut Scheduler) -> Vec<String> {
    let mut seen = Vec::new();
    for _ in 0..1000 {
        if scheduler.num_unfinished_requests() == 0 {
            break;
        }
        for change in step(scheduler).changes().new {
            if !seen.contains(&change.request_id) {
                seen.push(change.request_id);
            }
        }
    }
    assert_eq!(scheduler.num_unfinished_requests(), 0);
    seen
}

#[test]
fn priority_admits_the_most_urgent_first() {
    let mut scheduler = Scheduler::new(&cache(32), &limits(Policy::Priority)).unwrap();
    for (id, priority) in [("c", 3), ("a", -1), ("b", 2), ("a2", -1)] {
        scheduler.add_request(request(id, 0, priority)).unwrap();
    }
    assert_eq!(order_of_admission(&mut scheduler), ["a", "a2", "b", "c"]);
}

#[test]
fn priority_takes_the_seat_of_a_less_urgent_request() {
    let mut scheduler = Scheduler::new(&cache(32), &limits(Policy::Priority)).unwrap();
    scheduler.add_request(request("low", 0, 5)).unwrap();
    step(&mut scheduler);
    let high = scheduler.add_request(request("high", 100, 1)).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!(plan.i64s(Field::Handles), [high.get()]);
    assert_eq!(plan.changes().preempted[0].request_id, "low");
}

#[test]
fn priority_takes_the_blocks_of_a_less_urgent_request() {
    let limits = SchedulerConfig { max_num_seqs: 4, ..limits(Policy::Priority) };
    let mut scheduler = Scheduler::new(&cache(5), &limits).unwrap();
    scheduler.add_request(request("low", 0, 5)).unwrap();
    step(&mut scheduler);
    step(&mut scheduler);
    let high = scheduler.add_request(request("high", 100, 1)).unwrap();
    assert_eq!(step(&mut scheduler).i64s(Field::Handles), [high.get()]);
}

#[test]
fn priority_leaves_equally_urgent_requests_alone() {
    let mut scheduler = Scheduler::new(&cache(32), &limits(Policy::Priority)).unwrap();
    let first = scheduler.add_request(request("first", 0, 1)).unwrap();
    step(&mut scheduler);
    scheduler.add_request(request("second", 100, 1)).unwrap();
    assert_eq!(step(&mut scheduler).i64s(Field::Handles), [first.get()]);
}

/// One urgent request after another, each before the last has ended; answers after how many the patient one has ended.
fn urgent_before_patient(ageing: Option<u32>) -> Option<usize> {
    let limits = SchedulerConfig { ageing, ..limits(Policy::Priority) };
    let mut scheduler = Scheduler::new(&cache(32), &limits).unwrap();
    let patient = scheduler.add_request(request("patient", 0, 9)).unwrap();
    for i in 0..200 {
        scheduler.add_request(request(&i.to_string(), 100, 0)).unwrap();
        for _ in 0..4 {
            step(&mut scheduler);
        }
        if scheduler.block_table(patient, 0).is_err() {
            return Some(i);
        }
    }
    None
}

#[test]
fn ageing_lets_a_request_through_after_a_bounded_number_of_others() {
    let ended = urgent_before_patient(Some(5)).unwrap();
    assert!((5..10).contains(&ended), "{ended}");
}

#[test]
fn a_strict_policy_may_starve() {
    assert_eq!(urgent_before_patient(None), None);
}

#[test]
fn longest_prefix_match_admits_the_request_with_the_longest_cached_prefix() {
    let mut scheduler = Scheduler::new(&cache(64), &limits(Policy::LongestPrefixMatch)).unwrap();
    scheduler.add_request(NewRequest::new("seed", (0..20).collect(), 1)).unwrap();
    step(&mut scheduler);
    for (id, shared) in [("none", 0), ("short", 8), ("long", 16), ("middle", 12)] {
        let prompt = (0..shared).chain(1000 + shared..1024).collect();
        scheduler.add_request(NewRequest::new(id, prompt, 1)).unwrap();
    }
    assert_eq!(order_of_admission(&mut scheduler), ["long", "middle", "short", "none"]);
}

#[test]
fn fair_share_lets_tenants_take_turns_however_many_requests_each_brings() {
    let mut scheduler = Scheduler::new(&cache(64), &limits(Policy::FairShare)).unwrap();
    for i in 0..4 {
        scheduler.add_request(tenant(&format!("a{i}"), "a")).unwrap();
    }
    for i in 0..2 {
        scheduler.add_request(tenant(&format!("b{i}"), "b")).unwrap();
    }
    assert_eq!(order_of_admission(&mut scheduler), ["a0", "b0", "a1", "b1", "a2", "a3"]);
}

#[test]
fn fair_share_gives_a_tenant_its_weight() {
    let limits = SchedulerConfig { tenant_weights: vec![("gold".into(), 2.0)], ..limits(Policy::FairShare) };
    let mut scheduler = Scheduler::new(&cache(64), &limits).unwrap();
    for i in 0..4 {
        scheduler.add_request(tenant(&format!("plain{i}"), "plain")).unwrap();
        scheduler.add_request(tenant(&format!("gold{i}"), "gold")).unwrap();
    }
    let order = order_of_admission(&mut scheduler);
    assert_eq!(order[..6].iter().filter(|id| id.starts_with("gold")).count(), 4, "{order:?}");
}

#[test]
fn keys_from_outside_decide_and_stale_handles_do_no_harm() {
    let mut scheduler = Scheduler::new(&cache(64), &limits(Policy::External)).unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|id| scheduler.add_request(request(id, 0, 0)).unwrap());
    let plan = scheduler.schedule_by(&[99, c.get(), a.get(), b.get()], &[0.0, 1.0, 3.0, f64::INFINITY]).unwrap();
    assert_eq!(plan.i64s(Field::Handles), [c.get()]);
    scheduler.commit(plan.id(), &[1]).unwrap();
    assert_eq!(order_of_admission(&mut scheduler), ["a", "b"]);
}

#[test]
fn keys_from_outside_that_are_no_numbers_are_refused() {
    let mut scheduler = Scheduler::new(&cache(64), &limits(Policy::External)).unwrap();
    let handle = scheduler.add_request(request("r", 0, 0)).unwrap();
    let refused = scheduler.schedule_by(&[handle.get()], &[f64::NAN]);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "keys", .. })), "{refused:?}");
}

#[derive(Debug)]
struct ShortestFirst;

impl OrderPolicy for ShortestFirst {
    fn arrival_key(&mut self, request: &RequestView<'_>) -> f64 {
        f64::from(request.num_tokens)
    }
}

#[test]
fn a_policy_of_the_callers_decides() {
    let mut scheduler = Scheduler::with_policy(&cache(64), &limits(Policy::Fcfs), Box::new(ShortestFirst)).unwrap();
    for (id, len) in [("long", 20), ("short", 3), ("middle", 9)] {
        scheduler.add_request(NewRequest::new(id, vec![1; len], 1)).unwrap();
    }
    assert_eq!(order_of_admission(&mut scheduler), ["short", "middle", "long"]);
}

fn chunks(limits: &SchedulerConfig, prompts: &[usize]) -> Vec<Vec<i32>> {
    let mut scheduler = Scheduler::new(&cache(256), limits).unwrap();
    for (i, &len) in prompts.iter().enumerate() {
        scheduler.add_request(NewRequest::new(i.to_string(), vec![i as i32; len], 1)).unwrap();
    }
    let mut steps = Vec::new();
    while scheduler.num_unfinished_requests() > 0 {
        let plan = step(&mut scheduler);
        steps.push(plan.i32s(Field::QueryStartLoc).windows(2).map(|pair| pair[1] - pair[0]).collect());
    }
    steps
}

#[test]
fn a_long_prefill_takes_no_more_than_its_limit_from_a_step() {
    let limits = SchedulerConfig { max_num_seqs: 8, long_prefill_token_threshold: 10, ..SchedulerConfig::default() };
    assert_eq!(chunks(&limits, &[25, 4]), [vec![10, 4], vec![10], vec![5]]);
}

#[test]
fn chunks_end_on_the_configured_multiple_unless_they_end_the_prompt() {
    let limits =
        SchedulerConfig { max_num_batched_tokens: 14, prefill_chunk_multiple: 4, ..SchedulerConfig::default() };
    assert_eq!(chunks(&limits, &[29]), [vec![12], vec![12], vec![5]]);
}

#[test]
fn no_more_requests_than_configured_are_in_the_middle_of_their_prompt() {
    let limits =
        SchedulerConfig { long_prefill_token_threshold: 4, max_num_partial_prefills: 1, ..SchedulerConfig::default() };
    assert_eq!(chunks(&limits, &[10, 9]), [vec![4], vec![4], vec![2, 4], vec![4], vec![1]]);
}

#[test]
fn priority_is_refused_where_the_policy_does_not_look_at_it() {
    let mut scheduler = Scheduler::new(&cache(32), &limits(Policy::Fcfs)).unwrap();
    assert!(scheduler.add_request(request("r", 0, 1)).is_err());
}
