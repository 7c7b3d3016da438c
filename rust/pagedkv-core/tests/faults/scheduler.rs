//! Who runs, who waits, and that both end.

use pagedkv_core::step_plan::Field;
use pagedkv_core::{
    CacheConfig, Error, EvictionPolicy, Handle, NewRequest, Policy, Retention, Scheduler, SchedulerConfig, StepPlan,
};

use crate::steps::{
    add, admitted, assert_empty, check, commit, default_scheduler, handles, num_tokens, plan, preempted, request,
    run_to_the_end, scheduler, step,
};

/// Requests that outgrow the pool together, and the steps until all have ended.
fn crowd(limits: &SchedulerConfig) -> Scheduler {
    let mut scheduler = scheduler(6, limits);
    for number in 0..6 {
        add(&mut scheduler, &format!("r{number}"), number, 3 + number as usize, 12);
    }
    scheduler
}

/// The step that gave a request its seat.
fn step_of(plans: &[StepPlan], id: &str) -> usize {
    plans.iter().position(|plan| admitted(plan).iter().any(|admitted| admitted == id)).expect("it is admitted")
}

#[test]
fn fault_48_a_request_that_runs_in_a_plan_is_not_preempted_by_it() {
    let mut scheduler = crowd(&SchedulerConfig::default());
    let mut num_preempted = 0;
    for plan in run_to_the_end(&mut scheduler, 400) {
        let runs = handles(&plan);
        let ids: Vec<String> = runs.iter().map(|handle| format!("r{handle}")).collect();
        num_preempted += preempted(&plan).len();
        assert!(preempted(&plan).iter().all(|id| !ids.contains(id)), "{:?} among {ids:?}", preempted(&plan));
    }
    assert!(num_preempted > 3, "the scene is another");
}

#[test]
fn fault_49_who_comes_behind_one_that_left_is_not_skipped() {
    let mut scheduler = default_scheduler(32);
    let all: Vec<_> = (0..5).map(|number| add(&mut scheduler, &format!("r{number}"), number, 3, 16)).collect();
    step(&mut scheduler);
    scheduler.abort(all[1], None).unwrap();
    scheduler.finish(all[3], 0).unwrap();
    assert_eq!(handles(&step(&mut scheduler).0), [0, 2, 4]);
}

#[test]
fn fault_49_who_comes_before_a_victim_is_not_skipped() {
    let mut scheduler = scheduler(4, &SchedulerConfig::default());
    add(&mut scheduler, "old", 1, 4, 4);
    add(&mut scheduler, "middle", 2, 3, 4);
    add(&mut scheduler, "young", 3, 8, 2);
    step(&mut scheduler);
    let (plan, _) = step(&mut scheduler);
    assert_eq!((preempted(&plan), handles(&plan)), (vec!["young".to_string()], vec![0, 1]));
}

#[test]
fn fault_50_a_preempted_request_is_the_first_to_come_back() {
    let mut scheduler = default_scheduler(3);
    add(&mut scheduler, "old", 1, 3, 8);
    add(&mut scheduler, "young", 2, 5, 4);
    while scheduler.num_preemptions() == 0 {
        step(&mut scheduler);
    }
    add(&mut scheduler, "late", 3, 1, 1);
    let plans = run_to_the_end(&mut scheduler, 40);
    assert!(step_of(&plans, "young") <= step_of(&plans, "late"), "the late one came first");
}

#[test]
fn fault_51_an_urgent_request_takes_the_seat_of_a_patient_one() {
    let limits = SchedulerConfig { max_num_seqs: 1, policy: Policy::Priority, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(32, &limits);
    scheduler.add_request(NewRequest { priority: 5, ..request("patient", 1, 3, 64) }).unwrap();
    step(&mut scheduler);
    scheduler.add_request(NewRequest { priority: 1, ..request("urgent", 2, 3, 2) }).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((preempted(&plan), admitted(&plan)), (vec!["patient".to_string()], vec!["urgent".to_string()]));
}

#[test]
fn fault_52_the_cache_keeps_what_a_request_says_is_worth_keeping() {
    let kept = |retention| {
        let cache = CacheConfig { block_size: 4, eviction_policy: EvictionPolicy::Priority, ..CacheConfig::new(9) };
        let mut scheduler = Scheduler::new(&cache, &SchedulerConfig::default()).unwrap();
        scheduler.add_request(NewRequest { retention, ..request("kept", 1, 9, 1) }).unwrap();
        (2..12).for_each(|first| {
            step(&mut scheduler);
            add(&mut scheduler, "other", first, 9, 1);
        });
        step(&mut scheduler);
        add(&mut scheduler, "asks", 1, 9, 1);
        9 - num_tokens(&step(&mut scheduler).0)
    };
    assert_eq!(kept(Some(Retention { priority: 90, seconds: f64::INFINITY })), 8);
    assert_eq!(kept(None), 0, "the scene is another");
}

#[test]
fn fault_53_a_big_request_waits_for_those_before_it_alone() {
    let mut scheduler = default_scheduler(8);
    for number in 0..3 {
        add(&mut scheduler, &format!("running{number}"), number, 4, 4);
    }
    step(&mut scheduler);
    add(&mut scheduler, "big", 9, 28, 1);
    let mut plans = Vec::new();
    for number in 0..8 {
        // Small ones keep coming, and would fit beside those that run.
        add(&mut scheduler, &format!("small{number}"), 20 + number, 3, 1);
        plans.push(step(&mut scheduler).0);
    }
    let big = step_of(&plans, "big");
    assert!((0..8).all(|number| step_of(&plans, &format!("small{number}")) >= big), "a small one overtook it");
}

#[test]
fn fault_53_small_requests_wait_for_a_big_one_no_longer_than_it_runs() {
    let limits = SchedulerConfig { max_num_batched_tokens: 8, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(16, &limits);
    add(&mut scheduler, "big", 9, 40, 1);
    add(&mut scheduler, "small", 1, 3, 1);
    let waited = step_of(&run_to_the_end(&mut scheduler, 8), "small");
    assert_eq!(waited, 5, "the prompt takes five steps of eight tokens, and nobody else may start before it is done");
}

#[test]
fn fault_54_partial_prefills_do_not_preempt_each_other_for_ever() {
    let limits = SchedulerConfig { max_num_batched_tokens: 4, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    let oldest = add(&mut scheduler, "oldest", 1, 24, 8);
    for number in 1..4 {
        add(&mut scheduler, &format!("r{number}"), 1 + number, 24, 8);
    }
    let mut has_left = false;
    for _ in 0..200 {
        let (plan, result) = step(&mut scheduler);
        has_left |= result.finished.iter().any(|finished| finished.handle == oldest);
        assert!(!preempted(&plan).contains(&"oldest".to_string()), "the oldest is a victim");
        assert!(has_left || handles(&plan).contains(&oldest.get()), "the oldest stands still");
    }
    assert_eq!(scheduler.num_unfinished_requests(), 0);
}

#[test]
fn fault_55_waiting_requests_hold_no_block() {
    let mut scheduler = crowd(&SchedulerConfig { max_num_batched_tokens: 5, ..SchedulerConfig::default() });
    while scheduler.num_unfinished_requests() > 0 {
        step(&mut scheduler);
        let (num_running, num_waiting) = scheduler.num_requests();
        let holding = (0..6)
            .filter(|&handle| matches!(scheduler.block_table(pagedkv_core::Handle::new(handle), 0), Ok(Some(_))))
            .count();
        assert!(holding <= num_running, "{holding} hold blocks, {num_running} run and {num_waiting} wait");
    }
    assert!(scheduler.num_preemptions() > 0, "the scene is another");
}

#[test]
fn fault_55_a_held_request_gives_its_blocks_to_one_that_finds_none() {
    let mut scheduler = default_scheduler(4);
    let held = add(&mut scheduler, "held", 1, 7, 6);
    let other = add(&mut scheduler, "other", 2, 7, 6);
    step(&mut scheduler);
    scheduler.hold(held).unwrap();
    for _ in 0..5 {
        assert_eq!(handles(&step(&mut scheduler).0), [other.get()]);
    }
    assert_eq!((scheduler.block_table(held, 0), scheduler.num_requests()), (Ok(None), (0, 1)));
    scheduler.release(held).unwrap();
    run_to_the_end(&mut scheduler, 12);
}

#[test]
fn fault_55_a_turn_that_waits_gives_its_blocks_to_the_request_before_it() {
    let mut scheduler = default_scheduler(4);
    let session = NewRequest { session: true, ..request("session", 1, 6, 3) };
    let session = scheduler.add_request(session).unwrap();
    run_to_the_end(&mut scheduler, 4);
    let before = add(&mut scheduler, "before", 2, 10, 3);
    scheduler.append_tokens(session, 0, &[1], None).unwrap();
    assert_eq!(handles(&step(&mut scheduler).0), [before.get()]);
    run_to_the_end(&mut scheduler, 12);
}

#[test]
fn fault_55_who_waits_is_told_why() {
    let limits = SchedulerConfig { max_num_seqs: 1, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    add(&mut scheduler, "running", 1, 3, 8);
    step(&mut scheduler);
    let waits = add(&mut scheduler, "waits", 2, 3, 8);
    let explanation = format!("{:?}", scheduler.explain(waits).unwrap());
    assert!(explanation.contains("Seat"), "{explanation}");
}

/// One seat, and a request whose load has ended while another one waits for that seat.
fn with_a_load_that_has_ended() -> (Scheduler, Handle) {
    let limits = SchedulerConfig { max_num_seqs: 1, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(8, &limits);
    let loaded =
        scheduler.add_request(NewRequest { num_external_tokens: 8, ..request("loaded", 1, 9, 2) }).expect("it fits");
    add(&mut scheduler, "waits", 2, 9, 2);
    assert_eq!(step(&mut scheduler).0.i64s(Field::LoadIds), [1, 1]);
    scheduler.transfers_done(&[1], true).expect("the load is outstanding");
    (scheduler, loaded)
}

#[test]
fn fault_56_a_request_whose_load_is_done_has_its_seat() {
    let (mut scheduler, loaded) = with_a_load_that_has_ended();
    assert_eq!(handles(&step(&mut scheduler).0), [loaded.get()]);
}

#[test]
fn fault_65_a_load_is_issued_once() {
    let (mut scheduler, _) = with_a_load_that_has_ended();
    let plans = run_to_the_end(&mut scheduler, 8);
    assert!(plans.iter().all(|plan| plan.i64s(Field::LoadIds).is_empty()));
}

#[test]
fn fault_57_a_request_that_can_never_fit_is_refused_with_the_reason() {
    let mut scheduler = default_scheduler(4);
    let refused = scheduler.add_request(request("r", 1, 16, 2));
    assert_eq!(refused, Err(Error::NeverFits { needed: 5, usable: 4 }));
    let text = refused.unwrap_err().to_string();
    assert_eq!(text, "request needs 5 blocks at its longest, the pool has 4 usable ones");
    assert_eq!(scheduler.num_unfinished_requests(), 0);
}

#[test]
fn fault_58_a_request_of_exactly_the_pools_capacity_runs() {
    for usable_blocks in 1..6 {
        let mut scheduler = default_scheduler(usable_blocks);
        // The last token that is sampled needs no slot.
        add(&mut scheduler, "r", 1, 4 * usable_blocks as usize - 3, 4);
        assert_eq!(run_to_the_end(&mut scheduler, 4).len(), 4);
        assert_empty(&scheduler);
    }
}

#[test]
fn fault_59_a_pass_does_not_take_up_again_whom_it_preempted() {
    let mut scheduler = crowd(&SchedulerConfig::default());
    for plan in run_to_the_end(&mut scheduler, 400) {
        let (left, came) = (preempted(&plan), admitted(&plan));
        assert!(left.iter().all(|id| !came.contains(id)), "{left:?} left and {came:?} came");
    }
}

#[test]
fn fault_60_a_step_is_not_empty_while_work_fits() {
    let limits = [
        SchedulerConfig::default(),
        SchedulerConfig { max_num_batched_tokens: 1, ..SchedulerConfig::default() },
        SchedulerConfig { watermark: 0.9, ..SchedulerConfig::default() },
        SchedulerConfig { max_num_seqs: 1, max_num_partial_prefills: 1, ..SchedulerConfig::default() },
        SchedulerConfig { policy: Policy::LongestPrefixMatch, ageing: Some(0), ..SchedulerConfig::default() },
        SchedulerConfig { long_prefill_token_threshold: 4, prefill_chunk_multiple: 3, ..SchedulerConfig::default() },
    ];
    for limits in limits {
        let mut scheduler = crowd(&limits);
        let plans = run_to_the_end(&mut scheduler, 1000);
        assert!(plans.iter().all(|plan| num_tokens(plan) > 0 && plan.blocked_on().is_none()), "{limits:?}");
    }
}

#[test]
fn fault_61_a_cold_prompt_is_admitted_after_a_bounded_number_of_cached_ones() {
    let ageing = 4;
    let limits = SchedulerConfig {
        max_num_seqs: 1,
        policy: Policy::LongestPrefixMatch,
        ageing: Some(ageing),
        ..SchedulerConfig::default()
    };
    let mut scheduler = scheduler(32, &limits);
    add(&mut scheduler, "warms", 1, 9, 1);
    step(&mut scheduler);
    add(&mut scheduler, "cold", 2, 9, 1);
    let mut order = Vec::new();
    for number in 0..2 * ageing {
        add(&mut scheduler, &format!("cached{number}"), 1, 9, 1);
        order.extend(admitted(&step(&mut scheduler).0));
    }
    let place = order.iter().position(|id| id == "cold").expect("it is admitted while cached ones keep coming");
    assert!(place <= ageing as usize, "{order:?}");
}

#[test]
fn fault_61_a_long_prefill_does_not_starve_decodes() {
    let limits = SchedulerConfig { max_num_batched_tokens: 4, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(32, &limits);
    let decodes = add(&mut scheduler, "decodes", 1, 3, 20);
    step(&mut scheduler);
    add(&mut scheduler, "prefills", 2, 40, 1);
    for _ in 0..10 {
        let (plan, _) = step(&mut scheduler);
        assert_eq!((handles(&plan)[0], num_tokens(&plan)), (decodes.get(), 4));
    }
}

#[test]
fn fault_63_tokens_of_a_request_that_was_aborted_in_flight_are_dropped_and_counted() {
    let mut scheduler = default_scheduler(8);
    let aborted = add(&mut scheduler, "aborted", 1, 3, 4);
    add(&mut scheduler, "stays", 2, 3, 4);
    let running = plan(&mut scheduler);
    scheduler.abort(aborted, None).unwrap();
    let result = commit(&mut scheduler, &running);
    assert_eq!((result.num_ignored, result.handles), (1, vec![1]));
    check(&scheduler);
}

#[test]
fn fault_64_preemptions_are_bounded_by_what_the_requests_outgrow() {
    let mut scheduler = crowd(&SchedulerConfig::default());
    let plans = run_to_the_end(&mut scheduler, 400);
    // Whoever is first in the order is never a victim, and a victim is taken up only when all that it knows fits beside
    // the rest: it computes at least one token more before it can be one again.
    let num_computed: u32 = plans.iter().map(num_tokens).sum();
    assert!(scheduler.num_preemptions() <= 6 * 12, "{} preemptions", scheduler.num_preemptions());
    assert!(num_computed < 20 * 6 * 20, "{num_computed} tokens were computed");
    for plan in &plans {
        assert!(preempted(plan).len() <= 5, "all but the first at the most");
    }
    assert_empty(&scheduler);
}

#[test]
fn fault_66_a_prompt_shorter_than_what_is_cached_of_it_underflows_nothing() {
    for (cached_len, prompt_len) in [(17, 1), (17, 4), (17, 5), (17, 16)] {
        let mut scheduler = default_scheduler(16);
        add(&mut scheduler, "cached", 1, cached_len, 1);
        step(&mut scheduler);
        add(&mut scheduler, "short", 1, prompt_len, 1);
        let (plan, result) = step(&mut scheduler);
        let computed = prompt_len - (prompt_len - 1) / 4 * 4;
        assert_eq!((plan.i32s(Field::SeqLens)[0] as usize, num_tokens(&plan) as usize), (prompt_len, computed));
        assert_eq!(result.finished.len(), 1);
    }
}

#[test]
fn fault_66_an_allocation_that_fails_evicts_nothing() {
    let mut manager = crate::scene::manager(2, 4);
    crate::scene::cache(&mut manager, &[0; 5]);
    let held = crate::scene::create(&mut manager, &[1; 2]);
    crate::scene::compute(&mut manager, held, 2);
    let wants = crate::scene::create(&mut manager, &[2; 8]);
    manager.begin_plan();
    assert_eq!(crate::scene::grow(&mut manager, wants, 8), None, "four blocks of three");
    let again = crate::scene::create(&mut manager, &[0; 5]);
    assert_eq!((manager.pool().num_evictions(), crate::scene::num_hit_tokens(&manager, again)), (0, 4));
}
