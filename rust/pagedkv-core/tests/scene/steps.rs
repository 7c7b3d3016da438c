//! What the behaviour tests of the scheduler arrange with: blocks of 4, and a model that samples the token 7.
#![allow(dead_code, reason = "every test crate includes all of it and uses its part")]

use pagedkv_core::step_plan::Field;
use pagedkv_core::{CacheConfig, Handle, NewRequest, Scheduler, SchedulerConfig, StepPlan, StepResult};

pub(crate) const BLOCK_SIZE: u32 = 4;
pub(crate) const SAMPLED: i32 = 7;

/// A scheduler over so many blocks that can be handed out.
pub(crate) fn scheduler(usable_blocks: u32, limits: &SchedulerConfig) -> Scheduler {
    let cache = CacheConfig { block_size: BLOCK_SIZE, ..CacheConfig::new(usable_blocks + 1) };
    Scheduler::new(&cache, limits).expect("a valid configuration")
}

pub(crate) fn default_scheduler(usable_blocks: u32) -> Scheduler {
    scheduler(usable_blocks, &SchedulerConfig::default())
}

/// A scheduler that may plan this far ahead.
pub(crate) fn with_plans_in_flight(usable_blocks: u32, max_plans_in_flight: u32) -> Scheduler {
    scheduler(usable_blocks, &SchedulerConfig { max_plans_in_flight, ..SchedulerConfig::default() })
}

/// A request of so many equal tokens; another first token makes another prefix.
pub(crate) fn request(id: &str, first: i32, prompt_len: usize, max_tokens: u32) -> NewRequest {
    let mut prompt = vec![1; prompt_len];
    prompt[0] = first;
    NewRequest::new(id, prompt, max_tokens)
}

/// A request whose prompt counts up from `first`.
pub(crate) fn counting_request(id: &str, first: i32, prompt_len: i32, max_tokens: u32) -> NewRequest {
    NewRequest::new(id, (first..first + prompt_len).collect(), max_tokens)
}

/// A request for a fork: what comes behind the tokens of the sample.
pub(crate) fn behind(id: &str, ids: &[i32], max_tokens: u32) -> NewRequest {
    NewRequest::new(id, ids.to_vec(), max_tokens)
}

pub(crate) fn add(scheduler: &mut Scheduler, id: &str, first: i32, prompt_len: usize, max_tokens: u32) -> Handle {
    scheduler.add_request(request(id, first, prompt_len, max_tokens)).expect("a request that fits")
}

pub(crate) fn plan(scheduler: &mut Scheduler) -> StepPlan {
    scheduler.schedule().expect("fewer plans in flight than allowed")
}

pub(crate) fn commit(scheduler: &mut Scheduler, plan: &StepPlan) -> StepResult {
    let tokens = vec![SAMPLED; plan.sizes().num_samples as usize];
    let result = scheduler.commit(plan.id(), &tokens).expect("the oldest plan");
    check(scheduler);
    result
}

pub(crate) fn step(scheduler: &mut Scheduler) -> (StepPlan, StepResult) {
    let plan = plan(scheduler);
    check(scheduler);
    let result = commit(scheduler, &plan);
    (plan, result)
}

pub(crate) fn check(scheduler: &Scheduler) {
    assert_eq!(scheduler.check_integrity(), Ok(()));
}

/// Steps until every request is over; panics after so many steps.
pub(crate) fn steps_to_the_end(scheduler: &mut Scheduler, most_steps: usize) -> Vec<(StepPlan, StepResult)> {
    let mut steps = Vec::new();
    while scheduler.num_unfinished_requests() > 0 {
        assert!(steps.len() < most_steps, "the requests are not over after {most_steps} steps");
        steps.push(step(scheduler));
    }
    steps
}

/// The plans of [`steps_to_the_end`].
pub(crate) fn run_to_the_end(scheduler: &mut Scheduler, most_steps: usize) -> Vec<StepPlan> {
    steps_to_the_end(scheduler, most_steps).into_iter().map(|(plan, _)| plan).collect()
}

pub(crate) fn handles(plan: &StepPlan) -> Vec<i64> {
    plan.i64s(Field::Handles).to_vec()
}

/// Blocks of a live request's sample.
pub(crate) fn num_blocks(scheduler: &Scheduler, handle: Handle, sample: u32) -> usize {
    scheduler.block_table(handle, sample).expect("a live request").map_or(0, <[_]>::len)
}

pub(crate) fn num_tokens(plan: &StepPlan) -> u32 {
    plan.sizes().num_tokens
}

pub(crate) fn preempted(plan: &StepPlan) -> Vec<String> {
    plan.changes().preempted.into_iter().map(|change| change.request_id).collect()
}

pub(crate) fn admitted(plan: &StepPlan) -> Vec<String> {
    plan.changes().new.into_iter().map(|change| change.request_id).collect()
}

pub(crate) fn assert_empty(scheduler: &Scheduler) {
    check(scheduler);
    let pool = scheduler.manager().pool();
    assert_eq!((scheduler.num_unfinished_requests(), pool.num_held(), pool.num_fenced()), (0, 0, 0));
    assert_eq!(scheduler.manager().num_sequences(), 0);
}
