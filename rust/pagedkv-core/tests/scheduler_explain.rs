//! Explanations that were wrong or that panicked, each compared with what the next plan does.

#[path = "scene/steps.rs"]
mod steps;

use pagedkv_core::step_plan::Field;
use pagedkv_core::{Handle, NewRequest, Reason, Scheduler, SchedulerConfig};
use steps::{add, check, default_scheduler, plan, request, scheduler, step};

fn reason(scheduler: &mut Scheduler, handle: Handle) -> Reason {
    scheduler.explain(handle).expect("a live request").reason
}

fn ready(num_tokens: u32) -> Reason {
    Reason::Ready { num_tokens }
}

/// Two beams of one prompt.
fn beams(id: &str, prompt_len: usize, max_tokens: u32) -> NewRequest {
    NewRequest { n: 2, needs_commit: true, ..request(id, 1, prompt_len, max_tokens) }
}

#[test]
fn beams_that_are_still_in_their_prompt_are_explained_by_its_next_chunk() {
    let mut scheduler = scheduler(8, &SchedulerConfig { max_num_batched_tokens: 4, ..SchedulerConfig::default() });
    let handle = scheduler.add_request(beams("beams", 9, 2)).unwrap();
    for num_tokens in [4, 4, 1] {
        assert_eq!(reason(&mut scheduler, handle), ready(num_tokens));
        let plan = plan(&mut scheduler);
        assert_eq!(plan.sizes().num_tokens, num_tokens);
        let result = scheduler.commit_beams(plan.id(), &vec![7; plan.sizes().num_samples as usize], &[0, 1]);
        // Before the prompt is computed there is nothing to choose from.
        if result.is_err() {
            steps::commit(&mut scheduler, &plan);
        }
        check(&scheduler);
    }
}

#[test]
fn samples_that_share_a_tail_are_explained_as_copying_it_once_less_than_there_are() {
    let mut scheduler = default_scheduler(3);
    let handle = scheduler.add_request(NewRequest { n: 2, ..request("samples", 1, 6, 2) }).unwrap();
    step(&mut scheduler);
    assert_eq!(reason(&mut scheduler, handle), ready(2));
    let (plan, _) = step(&mut scheduler);
    assert_eq!((plan.sizes().num_tokens, plan.i32s(Field::Copies).len()), (2, 2));
}

/// So many beams and two other requests, of one block each and one of them full where `is_full`. Each beam is about to
/// need a block: there are enough free ones for all but one of them, and one more waits for a plan in flight.
fn beams_without_room(n: u32, is_full: bool) -> (Scheduler, Handle, [Handle; 2]) {
    let limits = SchedulerConfig { max_num_batched_tokens: 12, max_plans_in_flight: 2, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(n + 3, &limits);
    let beams = scheduler.add_request(NewRequest { n, ..beams("beams", 4, 2) }).unwrap();
    let others = [("other", 2, if is_full { 4 } else { 2 }), ("another", 3, 2)]
        .map(|(id, first, len)| add(&mut scheduler, id, first, len, 2));
    step(&mut scheduler);
    let all = [beams, others[0], others[1]];
    all.iter().for_each(|&handle| scheduler.hold(handle).unwrap());
    let aborted = add(&mut scheduler, "aborted", 4, 4, 1);
    assert_eq!(steps::handles(&plan(&mut scheduler)), [aborted.get()]);
    scheduler.abort(aborted, None).unwrap();
    all.iter().for_each(|&handle| scheduler.release(handle).unwrap());
    (scheduler, beams, others)
}

#[test]
fn beams_that_do_not_all_find_room_are_explained_as_taking_no_tokens_from_those_behind() {
    let (mut scheduler, beams, others) = beams_without_room(2, false);
    let limits = pagedkv_core::LimitsUpdate { max_num_batched_tokens: Some(2), ..Default::default() };
    scheduler.update_limits(limits).unwrap();
    let found = reason(&mut scheduler, beams);
    assert!(matches!(found, Reason::Blocks { needed: 1, available: 0, fenced: 1, .. }), "{found:?}");
    for other in others {
        assert_eq!(reason(&mut scheduler, other), ready(1));
    }
    assert_eq!(steps::handles(&plan(&mut scheduler)), others.map(Handle::get));
}

/// Of those behind so many beams, the one that needs a block is told that none is left, and stays out of the next plan.
fn assert_no_block_is_left_behind_beams(n: u32) {
    let (mut scheduler, _, others) = beams_without_room(n, true);
    let found = reason(&mut scheduler, others[0]);
    assert!(matches!(found, Reason::Blocks { needed: 1, available: 0, fenced: 1, .. }), "{found:?}");
    assert_eq!(steps::handles(&plan(&mut scheduler)), [others[1].get()]);
}

#[test]
fn request_behind_one_that_blocks_are_reserved_for_is_explained_by_what_is_left_of_them() {
    assert_no_block_is_left_behind_beams(2);
}

#[test]
fn blocks_that_some_beams_would_get_are_explained_as_reserved_for_all_of_them() {
    assert_no_block_is_left_behind_beams(3);
}
