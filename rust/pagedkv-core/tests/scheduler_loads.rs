//! Prefixes of prompts that are loaded from outside, one behaviour a test.

#[path = "scene/steps.rs"]
mod steps;

use pagedkv_core::scheduler::Reason;
use pagedkv_core::step_plan::Field;
use pagedkv_core::{
    CacheConfig, Error, GroupSpec, Handle, NewRequest, Policy, PreemptionMode, Scheduler, SchedulerConfig, StepPlan,
};
use steps::{BLOCK_SIZE, counting_request, default_scheduler, scheduler};

/// A prompt of ten tokens that differs from those of other first tokens, the first `num_external_tokens` of it outside.
fn request(first: i32, num_external_tokens: u32) -> NewRequest {
    NewRequest { num_external_tokens, ..counting_request(&format!("r{first}"), first, 10, 4) }
}

fn step(scheduler: &mut Scheduler) -> StepPlan {
    steps::step(scheduler).0
}

/// Group, column and block of each load.
fn loads(plan: &StepPlan) -> Vec<[i32; 3]> {
    plan.i32s(Field::Loads).chunks(3).map(|load| [load[0], load[1], load[2]]).collect()
}

fn columns(plan: &StepPlan) -> Vec<i32> {
    loads(plan).iter().map(|load| load[1]).collect()
}

fn positions(plan: &StepPlan) -> &[i32] {
    plan.i32s(Field::Positions)
}

/// A scheduler with one request, of whose ten prompt tokens the first `num_external_tokens` are on their way.
fn loading(num_external_tokens: u32) -> (Scheduler, Handle, StepPlan) {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(request(0, num_external_tokens)).unwrap();
    let plan = step(&mut scheduler);
    (scheduler, handle, plan)
}

#[test]
fn plan_that_admits_a_request_names_the_blocks_to_load_and_computes_nothing_of_it() {
    let (scheduler, handle, plan) = loading(8);
    let table = scheduler.block_table(handle, 0).unwrap().expect("it has its blocks");
    let block = |column: usize| table[column].get() as i32;
    assert_eq!(loads(&plan), [[0, 0, block(0)], [0, 1, block(1)]]);
    assert_eq!(plan.i64s(Field::LoadIds), [1, 1]);
    assert_eq!(plan.i64s(Field::LoadHandles), [handle.get(); 2]);
    assert_eq!(plan.changes().new.len(), 1, "it has its seat");
    assert!(positions(&plan).is_empty() && plan.waits_for_transfers());
}

#[test]
fn request_whose_load_ended_computes_the_rest() {
    let (mut scheduler, ..) = loading(8);
    assert!(positions(&step(&mut scheduler)).is_empty(), "it waits");
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(positions(&step(&mut scheduler)), [8, 9]);
}

#[test]
fn last_token_of_a_prompt_that_is_all_outside_is_computed() {
    let (mut scheduler, _, plan) = loading(10);
    assert_eq!(columns(&plan), [0, 1, 2]);
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(positions(&step(&mut scheduler)), [9]);
}

#[test]
fn load_may_end_within_a_block() {
    let (mut scheduler, _, plan) = loading(6);
    assert_eq!(columns(&plan), [0, 1]);
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(positions(&step(&mut scheduler)), [6, 7, 8, 9]);
}

#[test]
fn request_whose_load_failed_computes_its_prompt_and_asks_no_more() {
    let (mut scheduler, ..) = loading(8);
    scheduler.transfers_done(&[1], false).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!(positions(&plan), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert!(loads(&plan).is_empty());
}

#[test]
fn blocks_are_hits_for_others_when_their_load_has_ended_and_not_before() {
    let (mut scheduler, ..) = loading(8);
    let early = NewRequest { request_id: "early".into(), ..request(0, 0) };
    scheduler.add_request(early).unwrap();
    assert_eq!(positions(&step(&mut scheduler)).len(), 10, "nothing of the load is good yet");
    let (mut scheduler, ..) = loading(8);
    scheduler.transfers_done(&[1], true).unwrap();
    let late = NewRequest { request_id: "late".into(), ..request(0, 0) };
    scheduler.add_request(late).unwrap();
    assert_eq!(positions(&step(&mut scheduler)), [8, 9, 8, 9]);
}

#[test]
fn what_the_prefix_cache_has_is_not_loaded() {
    let (mut scheduler, ..) = loading(4);
    scheduler.transfers_done(&[1], true).unwrap();
    step(&mut scheduler);
    let longer = NewRequest { request_id: "longer".into(), ..request(0, 10) };
    let longer = scheduler.add_request(longer).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!(columns(&plan), [2], "two blocks are in the cache");
    assert_eq!(plan.i64s(Field::LoadHandles), [longer.get()]);
    assert_eq!(scheduler.request_stats(longer).unwrap().num_cached_tokens, 8);
}

#[test]
fn request_whose_prefix_is_all_in_the_cache_is_admitted_as_any_other() {
    let (mut scheduler, ..) = loading(8);
    scheduler.transfers_done(&[1], true).unwrap();
    step(&mut scheduler);
    scheduler.add_request(NewRequest { request_id: "other".into(), ..request(0, 8) }).unwrap();
    let plan = step(&mut scheduler);
    assert!(loads(&plan).is_empty());
    assert_eq!(positions(&plan), [10, 8, 9]);
}

#[test]
fn load_whose_plan_is_undone_is_told_again_under_the_same_id() {
    let mut scheduler = default_scheduler(8);
    scheduler.add_request(request(0, 8)).unwrap();
    let undone = scheduler.schedule().unwrap();
    scheduler.rollback(undone.id()).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!((loads(&plan), plan.i64s(Field::LoadIds)), (loads(&undone), undone.i64s(Field::LoadIds)));
    assert!(loads(&step(&mut scheduler)).is_empty(), "it is told once");
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(positions(&step(&mut scheduler)), [8, 9]);
}

#[test]
fn blocks_of_a_request_that_is_aborted_during_its_load_are_nobodys_until_that_has_ended() {
    let (mut scheduler, handle, _) = loading(8);
    scheduler.abort(handle, None).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.num_unfinished_requests(), 0);
    assert_eq!(scheduler.manager().pool().num_available(), 6);
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(scheduler.manager().pool().num_available(), 8);
    assert_eq!(scheduler.manager().pool().num_cached(), 0, "nobody vouches for what came");
}

#[test]
fn samples_of_a_request_load_their_prompt_once() {
    let mut scheduler = default_scheduler(8);
    scheduler.add_request(NewRequest { n: 2, ..request(0, 8) }).unwrap();
    assert_eq!(columns(&step(&mut scheduler)), [0, 1]);
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(positions(&step(&mut scheduler)), [8, 9]);
    assert_eq!(positions(&step(&mut scheduler)), [10, 10]);
}

/// A request that was preempted while it loaded, for one that needs the whole pool and waits for the load to end.
fn preempted_while_loading() -> (Scheduler, Handle) {
    let limits = SchedulerConfig { policy: Policy::Priority, ageing: None, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(5, &limits);
    let handle = scheduler.add_request(NewRequest { priority: 1, ..request(0, 8) }).unwrap();
    step(&mut scheduler);
    let urgent = scheduler.add_request(NewRequest::new("urgent", vec![7; 20], 1)).unwrap();
    step(&mut scheduler);
    assert!(scheduler.block_table(handle, 0).unwrap().is_none(), "the urgent one takes its blocks");
    (scheduler, urgent)
}

#[test]
fn request_that_lost_its_blocks_during_a_load_asks_again() {
    let (mut scheduler, _) = preempted_while_loading();
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(positions(&step(&mut scheduler)).len(), 20);
    let plan = step(&mut scheduler);
    assert_eq!((columns(&plan), plan.i64s(Field::LoadIds)), (vec![0, 1], &[2, 2][..]));
    scheduler.transfers_done(&[2], true).unwrap();
    assert_eq!(positions(&step(&mut scheduler)), [8, 9]);
}

#[test]
fn request_that_lost_its_blocks_during_a_load_takes_back_those_that_nobody_used() {
    let (mut scheduler, urgent) = preempted_while_loading();
    scheduler.transfers_done(&[1], true).unwrap();
    scheduler.abort(urgent, None).unwrap();
    let plan = step(&mut scheduler);
    assert!(loads(&plan).is_empty());
    assert_eq!(positions(&plan), [8, 9]);
}

#[test]
fn request_that_lost_its_blocks_during_a_load_that_failed_asks_no_more() {
    let (mut scheduler, urgent) = preempted_while_loading();
    scheduler.transfers_done(&[1], false).unwrap();
    scheduler.abort(urgent, None).unwrap();
    let plan = step(&mut scheduler);
    assert!(loads(&plan).is_empty());
    assert_eq!(positions(&plan).len(), 10);
}

#[test]
fn of_a_group_with_a_window_only_the_window_is_loaded() {
    let windowed = GroupSpec { sliding_window: Some(5), ..GroupSpec::new(1, 1, 16, "float16") };
    let groups = vec![GroupSpec::new(0, 1, 16, "float16"), windowed];
    let groups = groups.into_iter().enumerate().map(|(layer, group)| GroupSpec { layers: vec![layer as u32], ..group });
    let cache = CacheConfig { block_size: BLOCK_SIZE, groups: groups.collect(), ..CacheConfig::new(1 + 16) };
    let mut scheduler = Scheduler::new(&cache, &SchedulerConfig::default()).unwrap();
    let prompt: Vec<i32> = (0..30).collect();
    scheduler.add_request(NewRequest { num_external_tokens: 24, ..NewRequest::new("r", prompt, 2) }).unwrap();
    let plan = step(&mut scheduler);
    let of_group = |group| loads(&plan).iter().filter(|load| load[0] == group).map(|load| load[1]).collect::<Vec<_>>();
    assert_eq!(of_group(0), [0, 1, 2, 3, 4, 5]);
    assert_eq!(of_group(1), [5], "position 24 sees back to position 20");
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(positions(&step(&mut scheduler)), [24, 25, 26, 27, 28, 29]);
}

#[test]
fn explanation_of_a_request_that_is_loaded_names_the_transfer() {
    let (mut scheduler, handle, _) = loading(8);
    let explanation = scheduler.explain(handle).unwrap();
    assert!(matches!(explanation.reason, Reason::Transfer { transfer: 1 }), "{explanation:?}");
}

#[test]
fn loaded_tokens_are_counted_when_they_are_there() {
    let (mut scheduler, handle, _) = loading(8);
    let loaded = |scheduler: &Scheduler| {
        let of_request = scheduler.request_stats(handle).unwrap().num_loaded_tokens;
        (u64::from(of_request), scheduler.stats().totals.prompt_tokens_loaded)
    };
    assert_eq!(loaded(&scheduler), (0, 0));
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(loaded(&scheduler), (8, 8));
}

#[test]
fn next_turn_of_a_session_loads_nothing() {
    let (mut scheduler, handle, _) = loading(0);
    scheduler.abort(handle, None).unwrap();
    let session = NewRequest { session: true, max_tokens: 1, ..request(50, 8) };
    let session = scheduler.add_request(session).unwrap();
    let finish_during_the_load = |scheduler: &mut Scheduler| {
        step(scheduler);
        scheduler.finish(session, 0).unwrap();
        scheduler.transfers_done(&[1], true).unwrap();
    };
    finish_during_the_load(&mut scheduler);
    scheduler.append_tokens(session, 0, &[1, 2], Some(1)).unwrap();
    let plan = step(&mut scheduler);
    assert!(loads(&plan).is_empty());
    assert_eq!(positions(&plan).len(), 12, "the first turn ended with nothing");
}

#[test]
fn more_tokens_outside_than_the_prompt_has_are_refused() {
    let mut scheduler = default_scheduler(8);
    let refused = scheduler.add_request(request(0, 11)).unwrap_err();
    assert!(matches!(refused, Error::InvalidArgument { argument: "num_external_tokens", .. }), "{refused}");
    assert_eq!(scheduler.num_unfinished_requests(), 0);
}

#[test]
fn fork_with_tokens_outside_is_refused() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(request(0, 0)).unwrap();
    step(&mut scheduler);
    let refused = scheduler.fork(handle, 0, request(20, 1)).unwrap_err();
    assert!(matches!(refused, Error::InvalidArgument { argument: "num_external_tokens", .. }), "{refused}");
}

#[test]
fn request_that_did_not_ask_may_do_so_when_nothing_is_left_of_what_went_out() {
    let cache = CacheConfig { block_size: BLOCK_SIZE, num_host_blocks: 4, ..CacheConfig::new(1 + 6) };
    let limits = SchedulerConfig {
        policy: Policy::Priority,
        ageing: None,
        preemption_mode: PreemptionMode::Swap,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(&cache, &limits).unwrap();
    scheduler.add_request(NewRequest { max_tokens: 1, ..request(0, 0) }).unwrap();
    step(&mut scheduler);
    let hits = NewRequest { request_id: "hits".into(), priority: 1, ..request(0, 8) };
    let hits = scheduler.add_request(hits).unwrap();
    assert!(loads(&step(&mut scheduler)).is_empty(), "the cache has its prefix");
    scheduler.hold(hits).unwrap();
    scheduler.add_request(NewRequest::new("urgent", vec![7; 24], 1)).unwrap();
    step(&mut scheduler);
    scheduler.transfers_done(&[1], false).unwrap();
    assert_eq!(positions(&step(&mut scheduler)).len(), 24, "all blocks are used for something else");
    scheduler.release(hits).unwrap();
    assert_eq!(columns(&step(&mut scheduler)), [0, 1]);
}
