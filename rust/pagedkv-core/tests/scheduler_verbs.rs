//! Forks of requests, limits that change, explanations and snapshots, one behaviour a test.

#[path = "scene/steps.rs"]
mod steps;

use pagedkv_core::scheduler::RequestState;
use pagedkv_core::step_plan::Field;
use pagedkv_core::{
    BlockState, CacheConfig, Error, EvictionPolicy, Handle, LimitsUpdate, NewRequest, Policy, Reason, Retention,
    Scheduler, SchedulerConfig,
};
use steps::{BLOCK_SIZE, behind, counting_request, default_scheduler, num_blocks, run_to_the_end, scheduler, step};

fn reason(scheduler: &mut Scheduler, handle: Handle) -> Reason {
    scheduler.explain(handle).expect("a live request").reason
}

// --- fork

#[test]
fn fork_shares_the_blocks_of_a_running_request_and_takes_none() {
    let mut scheduler = default_scheduler(8);
    let parent = scheduler.add_request(counting_request("r", 0, 6, 4)).unwrap();
    step(&mut scheduler);
    let before = scheduler.manager().pool().num_held();
    let fork = scheduler.fork(parent, 0, behind("fork", &[], 2)).unwrap();
    assert_eq!(scheduler.manager().pool().num_held(), before);
    assert_eq!(num_blocks(&scheduler, fork, 0), 2);
}

#[test]
fn fork_copies_the_last_block_that_is_not_full_before_it_writes() {
    let mut scheduler = default_scheduler(8);
    let parent = scheduler.add_request(counting_request("r", 0, 6, 4)).unwrap();
    step(&mut scheduler);
    let fork = scheduler.fork(parent, 0, behind("fork", &[90, 91], 2)).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!(plan.i64s(Field::Handles), [parent.get(), fork.get()]);
    assert_eq!(plan.i32s(Field::Positions), [6, 6, 7, 8]);
    assert_eq!(plan.i32s(Field::TokenIds), [7, 7, 90, 91]);
    assert_eq!(plan.i32s(Field::Copies).len() / 2, 1);
    run_to_the_end(&mut scheduler, 1000);
    assert!(scheduler.manager().usage().abs() < 1e-9);
}

#[test]
fn fork_of_a_finished_session_leaves_the_session_as_it_is() {
    let mut scheduler = default_scheduler(16);
    let parent = scheduler.add_request(NewRequest { session: true, ..counting_request("s", 0, 6, 3) }).unwrap();
    run_to_the_end(&mut scheduler, 1000);
    let fork = scheduler.fork(parent, 0, behind("fork", &[50], 2)).unwrap();
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [fork.get()]);
    run_to_the_end(&mut scheduler, 1000);
    scheduler.append_tokens(parent, 0, &[60], Some(1)).unwrap();
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [8, 9]);
}

#[test]
fn fork_of_a_request_that_has_not_begun_is_kept_in_the_cache_as_that_one_says() {
    let eviction_policy = EvictionPolicy::Priority;
    let cache = CacheConfig { block_size: BLOCK_SIZE, eviction_policy, ..CacheConfig::new(1 + 3) };
    let mut scheduler = Scheduler::new(&cache, &SchedulerConfig::default()).unwrap();
    let retention = Some(Retention { priority: 90, seconds: f64::INFINITY });
    let parent = scheduler.add_request(NewRequest { retention, ..counting_request("parent", 0, 4, 1) }).unwrap();
    scheduler.fork(parent, 0, behind("fork", &[50], 1)).unwrap();
    scheduler.abort(parent, None).unwrap();
    run_to_the_end(&mut scheduler, 9);
    for (id, first, len) in [("less wanted", 100, 5), ("takes two blocks", 200, 8)] {
        scheduler.add_request(counting_request(id, first, len, 1)).unwrap();
        run_to_the_end(&mut scheduler, 9);
    }
    scheduler.add_request(counting_request("same", 0, 5, 1)).unwrap();
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [4], "what the fork computed is still there");
}

#[test]
fn fork_outlives_its_parent() {
    let mut scheduler = default_scheduler(8);
    let parent = scheduler.add_request(counting_request("r", 0, 6, 4)).unwrap();
    step(&mut scheduler);
    scheduler.fork(parent, 0, behind("fork", &[], 2)).unwrap();
    scheduler.abort(parent, None).unwrap();
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [6], "nothing is computed again");
}

#[test]
fn fork_of_several_samples_computes_what_is_new_once() {
    let mut scheduler = default_scheduler(16);
    let parent = scheduler.add_request(counting_request("r", 0, 6, 9)).unwrap();
    step(&mut scheduler);
    scheduler.hold(parent).unwrap();
    scheduler.fork(parent, 0, NewRequest { n: 3, ..behind("fork", &[50, 51], 2) }).unwrap();
    let (plan, result) = step(&mut scheduler);
    assert_eq!(plan.i32s(Field::Positions), [6, 7, 8]);
    assert_eq!(result.forked.len(), 2);
}

#[test]
fn fork_of_a_request_in_flight_is_refused() {
    let mut scheduler = default_scheduler(8);
    let parent = scheduler.add_request(counting_request("r", 0, 6, 4)).unwrap();
    scheduler.schedule().unwrap();
    let refused = scheduler.fork(parent, 0, behind("fork", &[], 2));
    assert_eq!(refused, Err(Error::RequestInFlight(parent)));
}

#[test]
fn fork_that_can_never_fit_is_refused_and_its_id_stays_free() {
    let mut scheduler = default_scheduler(2);
    let parent = scheduler.add_request(counting_request("r", 0, 6, 3)).unwrap();
    step(&mut scheduler);
    let refused = scheduler.fork(parent, 0, behind("fork", &[], 3));
    assert_eq!(refused, Err(Error::NeverFits { needed: 3, usable: 2 }));
    assert!(scheduler.fork(parent, 0, behind("fork", &[], 2)).is_ok());
    run_to_the_end(&mut scheduler, 1000);
}

#[test]
fn fork_with_an_identity_of_its_own_is_refused() {
    let mut scheduler = default_scheduler(8);
    let parent = scheduler.add_request(counting_request("r", 0, 6, 4)).unwrap();
    let mut other = behind("fork", &[], 2);
    other.identity.root.lora_id = Some(1);
    let refused = scheduler.fork(parent, 0, other);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "identity", .. })), "{refused:?}");
}

// --- update_limits

#[test]
fn lower_token_budget_holds_from_the_next_step_on() {
    let mut scheduler = default_scheduler(8);
    scheduler.add_request(counting_request("r", 0, 10, 1)).unwrap();
    scheduler.update_limits(LimitsUpdate { max_num_batched_tokens: Some(4), ..LimitsUpdate::default() }).unwrap();
    assert_eq!(step(&mut scheduler).0.sizes().num_tokens, 4);
}

#[test]
fn fewer_seats_let_those_that_sit_stay_and_nobody_else_in() {
    let mut scheduler = default_scheduler(16);
    let [a, b, c] =
        [0, 50, 100].map(|first| scheduler.add_request(counting_request(&first.to_string(), first, 4, 2)).unwrap());
    scheduler.hold(c).unwrap();
    step(&mut scheduler);
    scheduler.release(c).unwrap();
    scheduler.update_limits(LimitsUpdate { max_num_seqs: Some(1), ..LimitsUpdate::default() }).unwrap();
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [a.get(), b.get()]);
    assert_eq!(step(&mut scheduler).0.i64s(Field::Handles), [c.get()]);
}

#[test]
fn limits_that_would_keep_a_request_from_its_end_are_refused_by_name() {
    let mut scheduler = default_scheduler(16);
    scheduler.add_request(NewRequest { n: 3, ..counting_request("three", 0, 4, 2) }).unwrap();
    let refused = scheduler.update_limits(LimitsUpdate { max_num_seqs: Some(2), ..LimitsUpdate::default() });
    assert_eq!(
        refused.unwrap_err().to_string(),
        "max_num_seqs: expected at least 3, the seats of request \"three\", found 2"
    );
    assert_eq!(scheduler.limits().max_num_seqs, SchedulerConfig::default().max_num_seqs);
}

#[test]
fn lookahead_returns_up_to_that_of_the_construction_if_every_request_still_fits() {
    let limits = SchedulerConfig { lookahead: 4, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(2, &limits);
    let lookahead = |lookahead| LimitsUpdate { lookahead: Some(lookahead), ..LimitsUpdate::default() };
    scheduler.update_limits(lookahead(0)).unwrap();
    let handle = scheduler.add_request(counting_request("r", 0, 7, 2)).unwrap();
    let refused = scheduler.update_limits(lookahead(1));
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "lookahead", .. })), "{refused:?}");
    scheduler.abort(handle, None).unwrap();
    assert_eq!(scheduler.update_limits(lookahead(4)), Ok(()));
    let refused = scheduler.update_limits(lookahead(5));
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "lookahead", .. })), "{refused:?}");
}

#[test]
fn requests_are_refused_by_the_new_limits() {
    let mut scheduler = default_scheduler(16);
    scheduler.update_limits(LimitsUpdate { max_num_seqs: Some(2), ..LimitsUpdate::default() }).unwrap();
    let refused = scheduler.add_request(NewRequest { n: 3, ..counting_request("r", 0, 4, 2) });
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "n", .. })), "{refused:?}");
}

#[test]
fn limits_are_checked_as_at_construction() {
    let mut scheduler = default_scheduler(16);
    let refused = scheduler.update_limits(LimitsUpdate { watermark: Some(1.0), ..LimitsUpdate::default() });
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "watermark", .. })), "{refused:?}");
}

// --- explain

#[test]
fn request_with_nothing_in_its_way_is_explained_by_what_it_gets() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(counting_request("r", 0, 6, 4)).unwrap();
    assert_eq!(reason(&mut scheduler, handle), Reason::Ready { num_tokens: 6 });
    step(&mut scheduler);
    let found = scheduler.explain(handle).unwrap();
    assert_eq!((found.state, &found.reason), (RequestState::Running, &Reason::Ready { num_tokens: 1 }));
    assert_eq!((found.num_tokens, found.num_scheduled_tokens, found.num_blocks, found.num_seats), (7, 6, 2, 1));
    assert_eq!(
        found.to_string(),
        "\"r\" is running with 0 before it, 6 of 7 tokens computed, 2 blocks and 1 seats; nothing is in its way: the next \
         plan computes 1 tokens"
    );
}

#[test]
fn request_without_a_seat_is_explained_by_seats() {
    let mut scheduler = scheduler(8, &SchedulerConfig { max_num_seqs: 1, ..SchedulerConfig::default() });
    scheduler.add_request(counting_request("a", 0, 4, 4)).unwrap();
    step(&mut scheduler);
    let handle = scheduler.add_request(counting_request("b", 50, 4, 4)).unwrap();
    assert_eq!(reason(&mut scheduler, handle), Reason::Seats { needed: 1, free: 0, fenced: 0 });
    let last = scheduler.add_request(counting_request("c", 50, 4, 4)).unwrap();
    assert_eq!(reason(&mut scheduler, last), Reason::Behind { request: handle });
    assert_eq!(scheduler.explain(last).unwrap().num_before, 1);
}

#[test]
fn request_without_room_is_explained_by_blocks() {
    let mut scheduler = default_scheduler(4);
    scheduler.add_request(counting_request("a", 0, 7, 9)).unwrap();
    step(&mut scheduler);
    let handle = scheduler.add_request(counting_request("b", 50, 12, 4)).unwrap();
    assert_eq!(reason(&mut scheduler, handle), Reason::Blocks { needed: 3, available: 2, fenced: 0, in_sessions: 0 });
}

#[test]
fn request_behind_resting_sessions_is_explained_by_their_blocks() {
    let mut scheduler = default_scheduler(4);
    scheduler.add_request(NewRequest { session: true, ..counting_request("s", 0, 6, 3) }).unwrap();
    run_to_the_end(&mut scheduler, 1000);
    let handle = scheduler.add_request(counting_request("r", 50, 12, 4)).unwrap();
    assert_eq!(reason(&mut scheduler, handle), Reason::Blocks { needed: 3, available: 2, fenced: 0, in_sessions: 2 });
}

#[test]
fn request_whose_blocks_wait_for_a_plan_is_explained_by_the_fenced_ones() {
    let mut scheduler = scheduler(4, &SchedulerConfig { max_plans_in_flight: 2, ..SchedulerConfig::default() });
    let aborted = scheduler.add_request(counting_request("a", 0, 7, 9)).unwrap();
    scheduler.schedule().unwrap();
    scheduler.abort(aborted, None).unwrap();
    let handle = scheduler.add_request(counting_request("b", 50, 12, 4)).unwrap();
    assert_eq!(reason(&mut scheduler, handle), Reason::Blocks { needed: 3, available: 2, fenced: 2, in_sessions: 0 });
}

#[test]
fn request_without_tokens_of_the_step_is_explained_by_the_budget() {
    let mut scheduler = scheduler(8, &SchedulerConfig { max_num_batched_tokens: 4, ..SchedulerConfig::default() });
    scheduler.add_request(counting_request("a", 0, 10, 4)).unwrap();
    let handle = scheduler.add_request(counting_request("b", 50, 4, 4)).unwrap();
    assert_eq!(reason(&mut scheduler, handle), Reason::TokenBudget { budget: 4, left: 0 });
}

#[test]
fn prefill_beyond_the_limit_is_explained_by_partial_prefills() {
    let limits =
        SchedulerConfig { long_prefill_token_threshold: 4, max_num_partial_prefills: 1, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(16, &limits);
    scheduler.add_request(counting_request("a", 0, 16, 4)).unwrap();
    step(&mut scheduler);
    let handle = scheduler.add_request(counting_request("b", 50, 9, 4)).unwrap();
    assert_eq!(reason(&mut scheduler, handle), Reason::PartialPrefills { limit: 1 });
}

#[test]
fn held_request_is_explained_by_the_hold() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(counting_request("r", 0, 6, 4)).unwrap();
    scheduler.hold(handle).unwrap();
    assert_eq!(reason(&mut scheduler, handle), Reason::Held);
}

#[test]
fn session_at_rest_is_explained_as_resting() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(NewRequest { session: true, ..counting_request("s", 0, 6, 1) }).unwrap();
    run_to_the_end(&mut scheduler, 1000);
    let found = scheduler.explain(handle).unwrap();
    assert_eq!((found.state, found.reason, found.num_blocks), (RequestState::Resting, Reason::Resting, 2));
}

#[test]
fn request_that_waits_for_its_commit_is_explained_by_the_plan() {
    let mut scheduler = scheduler(8, &SchedulerConfig { max_plans_in_flight: 2, ..SchedulerConfig::default() });
    let handle = scheduler.add_request(NewRequest { needs_commit: true, ..counting_request("r", 0, 6, 4) }).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(reason(&mut scheduler, handle), Reason::InFlight { plan: plan.id() });
}

#[test]
fn every_request_waits_where_as_many_plans_are_in_flight_as_may_be() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(counting_request("r", 0, 6, 4)).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(reason(&mut scheduler, handle), Reason::PlansInFlight { oldest: plan.id(), limit: 1 });
}

#[test]
fn request_behind_a_more_urgent_one_is_explained_by_the_blocks_kept_for_that() {
    let limits = SchedulerConfig { policy: Policy::Priority, max_plans_in_flight: 2, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(6, &limits);
    let low = scheduler.add_request(NewRequest { priority: 2, ..counting_request("low", 0, 3, 9) }).unwrap();
    let aborted = scheduler.add_request(NewRequest { priority: 1, ..counting_request("aborted", 50, 12, 9) }).unwrap();
    step(&mut scheduler);
    scheduler.schedule().unwrap();
    scheduler.abort(aborted, None).unwrap();
    let high = scheduler.add_request(NewRequest { priority: 0, ..counting_request("high", 80, 20, 4) }).unwrap();
    assert_eq!(reason(&mut scheduler, low), Reason::Reserved { request: high, num_blocks: 5 });
}

#[test]
fn explanation_of_a_request_that_ended_names_an_unknown_handle() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(counting_request("r", 0, 6, 1)).unwrap();
    run_to_the_end(&mut scheduler, 1000);
    assert_eq!(scheduler.explain(handle), Err(Error::UnknownHandle(handle)));
}

#[test]
fn handle_is_found_by_the_id_of_its_request() {
    let mut scheduler = default_scheduler(8);
    let handle = scheduler.add_request(counting_request("r", 0, 6, 1)).unwrap();
    assert_eq!((scheduler.inbox().find("r"), scheduler.inbox().find("s")), (Some(handle), None));
}

// --- snapshot

#[test]
fn snapshot_shows_requests_by_state_and_in_order() {
    let mut scheduler = scheduler(16, &SchedulerConfig { max_num_seqs: 2, ..SchedulerConfig::default() });
    scheduler.add_request(NewRequest { session: true, ..counting_request("rests", 0, 6, 1) }).unwrap();
    run_to_the_end(&mut scheduler, 1000);
    for (id, first) in [("runs", 50), ("runs too", 60), ("waits", 70), ("is held", 80), ("waits too", 90)] {
        scheduler.add_request(counting_request(id, first, 4, 4)).unwrap();
    }
    let held = scheduler.inbox().find("is held").unwrap();
    scheduler.hold(held).unwrap();
    let plan = scheduler.schedule().unwrap();
    let snapshot = scheduler.snapshot();
    let found: Vec<_> =
        snapshot.requests.iter().map(|request| (request.request_id.as_str(), request.state, request.is_held)).collect();
    assert_eq!(
        found,
        [
            ("runs", RequestState::Running, false),
            ("runs too", RequestState::Running, false),
            ("waits", RequestState::Waiting, false),
            ("is held", RequestState::Waiting, true),
            ("waits too", RequestState::Waiting, false),
            ("rests", RequestState::Resting, false),
        ]
    );
    let first = snapshot.sequences[0];
    assert_eq!((first.row, first.num_tokens, first.num_computed_tokens, first.num_blocks), (Some(0), 4, 0, 1));
    let plans: Vec<_> = snapshot.plans.iter().map(|found| (found.plan, found.num_tokens, found.num_samples)).collect();
    assert_eq!(plans, [(plan.id(), 8, 2)]);
    assert_eq!((snapshot.num_blocks, snapshot.num_session_blocks, snapshot.num_seats), ([12, 0, 4, 0], 2, [0, 0]));
}

#[test]
fn block_map_shows_state_and_holders_of_every_block() {
    let mut scheduler = default_scheduler(3);
    scheduler.add_request(counting_request("r", 0, 6, 4)).unwrap();
    step(&mut scheduler);
    let map: Vec<_> = scheduler.manager().pool().block_map().collect();
    assert_eq!(map[0], (BlockState::Null, 0));
    let count = |state, holders| map.iter().filter(|&&found| found == (state, holders)).count();
    assert_eq!((count(BlockState::Held, 1), count(BlockState::Free, 0)), (2, 1));
}
