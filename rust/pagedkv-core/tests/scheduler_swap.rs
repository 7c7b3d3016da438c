//! Preemption by swap to a host tier, one behaviour a test.

#[path = "scene/steps.rs"]
mod steps;

use pagedkv_core::step_plan::Field;
use pagedkv_core::{CacheConfig, Error, Handle, NewRequest, PreemptionMode, Scheduler, SchedulerConfig, StepPlan};
use steps::{BLOCK_SIZE, commit};

fn scheduler(usable_blocks: u32, num_host_blocks: u32, max_plans_in_flight: u32) -> Scheduler {
    let cache = CacheConfig { block_size: BLOCK_SIZE, num_host_blocks, ..CacheConfig::new(usable_blocks + 1) };
    let preemption_mode = PreemptionMode::Swap;
    let limits = SchedulerConfig { preemption_mode, max_plans_in_flight, ..SchedulerConfig::default() };
    Scheduler::new(&cache, &limits).expect("a valid configuration")
}

fn add(scheduler: &mut Scheduler, request_id: &str, prompt_len: i32, max_tokens: u32) -> Handle {
    add_samples(scheduler, request_id, prompt_len, max_tokens, 1)
}

/// Prompts of different requests have nothing in common.
fn add_samples(scheduler: &mut Scheduler, request_id: &str, prompt_len: i32, max_tokens: u32, n: u32) -> Handle {
    let first = 1000 * i32::from(request_id.as_bytes()[0]);
    let prompt = (first..first + prompt_len).collect();
    let request = NewRequest { n, ..NewRequest::new(request_id, prompt, max_tokens) };
    scheduler.add_request(request).expect("a request that fits")
}

fn step(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.schedule().expect("no plan is in flight");
    commit(scheduler, &plan);
    scheduler.check_integrity().expect("every law holds");
    plan
}

fn pairs(plan: &StepPlan, field: Field) -> Vec<(i32, i32)> {
    plan.i32s(field).chunks(2).map(|pair| (pair[0], pair[1])).collect()
}

fn starts(plan: &StepPlan) -> Vec<(i64, i32)> {
    let lengths = plan.i32s(Field::QueryStartLoc).windows(2).map(|pair| pair[1] - pair[0]);
    let starts = plan.i32s(Field::SeqLens).iter().zip(lengths).map(|(len, new)| len - new);
    plan.i64s(Field::Handles).iter().copied().zip(starts).collect()
}

fn table(scheduler: &Scheduler, handle: Handle) -> Vec<i32> {
    let table = scheduler.block_table(handle, 0).expect("it lives").unwrap_or_default();
    table.iter().map(|block| block.get() as i32).collect()
}

/// Two requests in a pool of four blocks, two blocks each. The older one needs a third, and the second plan preempts the
/// younger one, which has computed seven tokens.
struct Scene {
    scheduler: Scheduler,
    old: Handle,
    young: Handle,
    youngs_blocks: Vec<i32>,
    plan: StepPlan,
}

impl Scene {
    fn new() -> Self {
        let mut scheduler = scheduler(4, 8, 1);
        let old = add(&mut scheduler, "old", 8, 8);
        let young = add(&mut scheduler, "young", 7, 9);
        step(&mut scheduler);
        let youngs_blocks = table(&scheduler, young);
        let plan = scheduler.schedule().expect("no plan is in flight");
        Self { scheduler, old, young, youngs_blocks, plan }
    }

    /// The preempting plan has ended; its transfer too, one way or the other.
    fn out(ok: bool) -> Self {
        let mut scene = Self::new();
        commit(&mut scene.scheduler, &scene.plan);
        scene.scheduler.transfers_done(&[1], ok).expect("the first transfer");
        scene
    }

    /// The older request has taken one of the younger one's blocks and ended; the younger one is on its way in.
    fn coming_in() -> (Self, StepPlan) {
        Self::coming_in_after(1)
    }

    fn coming_in_after(num_steps: u32) -> (Self, StepPlan) {
        let mut scene = Self::out(true);
        (0..num_steps).for_each(|_| drop(step(&mut scene.scheduler)));
        scene.scheduler.abort(scene.old, None).unwrap();
        let plan = scene.scheduler.schedule().unwrap();
        (scene, plan)
    }
}

// --- out

#[test]
fn blocks_of_a_preempted_request_go_out_once_each_under_one_id() {
    let Scene { scheduler, youngs_blocks, plan, .. } = Scene::new();
    let (sources, targets): (Vec<_>, Vec<_>) = pairs(&plan, Field::SwapOut).into_iter().unzip();
    assert_eq!(sources, youngs_blocks);
    assert_eq!(targets, [0, 1]);
    assert_eq!(plan.i64s(Field::SwapOutIds), [1, 1]);
    assert_eq!((plan.changes().preempted.len(), scheduler.num_swaps()), (1, 1));
}

/// A request of two samples, of 12 tokens each, goes out in the sixth plan of a pool of seven blocks.
fn samples_out() -> (Scheduler, Handle, Handle, StepPlan) {
    let mut scheduler = scheduler(7, 8, 1);
    let old = add(&mut scheduler, "old", 8, 16);
    let young = add_samples(&mut scheduler, "young", 8, 8, 2);
    (0..5).for_each(|_| drop(step(&mut scheduler)));
    let plan = step(&mut scheduler);
    (scheduler, old, young, plan)
}

#[test]
fn blocks_that_samples_share_go_out_once() {
    let (_, _, _, plan) = samples_out();
    let sources: Vec<_> = pairs(&plan, Field::SwapOut).into_iter().map(|pair| pair.0).collect();
    assert_eq!(sources.len(), 4, "two blocks of the prompt, and one of each sample's own: {sources:?}");
}

#[test]
fn request_that_needs_the_blocks_waits_for_the_transfer_and_the_plan_says_so() {
    let Scene { plan, .. } = Scene::new();
    assert_eq!(plan.sizes().num_tokens, 0);
    assert!(plan.waits_for_transfers() && plan.blocked_on().is_none());
}

#[test]
fn request_that_needs_the_blocks_goes_on_when_the_transfer_ended() {
    let mut scene = Scene::out(true);
    assert_eq!(starts(&step(&mut scene.scheduler)), [(scene.old.get(), 8)]);
}

#[test]
fn no_further_victim_is_taken_while_blocks_go_out() {
    let mut scheduler = scheduler(6, 8, 1);
    add(&mut scheduler, "old", 8, 8);
    add(&mut scheduler, "middle", 7, 2);
    add(&mut scheduler, "young", 7, 9);
    step(&mut scheduler);
    step(&mut scheduler);
    assert_eq!(scheduler.num_preemptions(), 1);
    step(&mut scheduler);
    assert_eq!(scheduler.num_preemptions(), 1);
}

#[test]
fn request_is_not_planned_while_its_blocks_go_out() {
    let Scene { mut scheduler, old, plan, .. } = Scene::new();
    commit(&mut scheduler, &plan);
    scheduler.abort(old, None).unwrap();
    let plan = step(&mut scheduler);
    assert!(plan.sizes().num_tokens == 0 && plan.waits_for_transfers());
}

#[test]
fn request_is_computed_again_where_the_host_tier_has_no_room_for_all_of_it() {
    let mut scheduler = scheduler(4, 1, 1);
    add(&mut scheduler, "old", 8, 8);
    add(&mut scheduler, "young", 7, 9);
    step(&mut scheduler);
    let plan = step(&mut scheduler);
    assert_eq!((plan.changes().preempted.len(), scheduler.num_swaps()), (1, 0));
    assert_eq!(scheduler.num_host_blocks(), (1, 1));
}

#[test]
fn request_that_has_not_filled_a_block_is_computed_again() {
    let mut scheduler = scheduler(3, 8, 1);
    add(&mut scheduler, "old", 8, 4);
    add(&mut scheduler, "young", 3, 1 + 1);
    step(&mut scheduler);
    step(&mut scheduler);
    assert_eq!((scheduler.num_preemptions(), scheduler.num_swaps()), (1, 0));
}

#[test]
fn what_plans_in_flight_compute_goes_out_as_well() {
    let mut scheduler = scheduler(4, 8, 2);
    add(&mut scheduler, "old", 8, 8);
    let young = add(&mut scheduler, "young", 7, 9);
    let first = scheduler.schedule().unwrap();
    let second = scheduler.schedule().unwrap();
    assert_eq!(pairs(&second, Field::SwapOut).len(), 2, "the prompts are computed by a plan in flight");
    commit(&mut scheduler, &first);
    commit(&mut scheduler, &second);
    scheduler.transfers_done(&[1], true).unwrap();
    scheduler.abort(Handle::new(0), None).unwrap();
    assert_eq!(starts(&step(&mut scheduler)), [(young.get(), 7)]);
}

// --- in

#[test]
fn what_is_still_on_the_device_comes_back_without_a_copy() {
    let mut scene = Scene::out(true);
    scene.scheduler.abort(scene.old, None).unwrap();
    let plan = step(&mut scene.scheduler);
    assert!(pairs(&plan, Field::SwapIn).is_empty());
    assert_eq!(starts(&plan), [(scene.young.get(), 7)]);
    assert_eq!(table(&scene.scheduler, scene.young), scene.youngs_blocks);
    assert_eq!(scene.scheduler.num_host_blocks(), (8, 8));
}

#[test]
fn what_was_reused_comes_back_by_a_copy_and_the_rest_without_one() {
    let (scene, plan) = Scene::coming_in();
    let table = table(&scene.scheduler, scene.young);
    let back: Vec<_> = pairs(&plan, Field::SwapIn).into_iter().map(|pair| pair.1).collect();
    let taken: Vec<_> = table.iter().copied().filter(|block| !back.contains(block)).collect();
    assert_eq!((back.len(), taken.len()), (1, 1));
    assert!(scene.youngs_blocks.contains(&taken[0]));
}

#[test]
fn request_has_seat_and_table_while_its_blocks_come_in_and_is_not_planned() {
    let (scene, plan) = Scene::coming_in();
    assert_eq!(plan.changes().new.len(), 1);
    assert_eq!(plan.i32s(Field::TableUpdates).len() / 4, 2);
    assert!(plan.sizes().num_tokens == 0 && plan.waits_for_transfers());
    assert_eq!(scene.scheduler.num_requests(), (1, 0));
}

#[test]
fn request_goes_on_when_its_blocks_are_in_and_the_host_blocks_are_free() {
    let (mut scene, plan) = Scene::coming_in();
    commit(&mut scene.scheduler, &plan);
    scene.scheduler.transfers_done(&[2], true).unwrap();
    assert_eq!(scene.scheduler.num_host_blocks(), (8, 8));
    assert_eq!(starts(&step(&mut scene.scheduler)), [(scene.young.get(), 7)]);
}

#[test]
fn full_blocks_that_came_in_are_hit_again() {
    let (mut scene, plan) = Scene::coming_in_after(5);
    assert_eq!(pairs(&plan, Field::SwapIn).len(), 2, "the scene is another");
    commit(&mut scene.scheduler, &plan);
    scene.scheduler.transfers_done(&[2], true).unwrap();
    scene.scheduler.abort(scene.young, None).unwrap();
    step(&mut scene.scheduler);
    let again = add(&mut scene.scheduler, "young", 7, 1);
    assert_eq!(starts(&step(&mut scene.scheduler)), [(again.get(), 4)]);
}

#[test]
fn prefix_that_another_request_computed_meanwhile_comes_back_without_a_copy() {
    let mut scheduler = scheduler(5, 8, 1);
    let old = add(&mut scheduler, "old", 8, 12);
    let young = add(&mut scheduler, "young", 9, 4);
    step(&mut scheduler);
    step(&mut scheduler);
    scheduler.transfers_done(&[1], true).unwrap();
    (0..10).for_each(|_| drop(step(&mut scheduler)));
    assert_eq!(scheduler.progress(old, 0).unwrap().num_computed, 18, "the scene is another");
    // Every block of the pool was the older one's; now another computes the younger one's prefix.
    scheduler.abort(old, None).unwrap();
    scheduler.hold(young).unwrap();
    let twin = NewRequest::new("twin", (121_000..121_009).collect(), 1);
    scheduler.add_request(twin).unwrap();
    step(&mut scheduler);
    scheduler.release(young).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!(pairs(&plan, Field::SwapIn).len(), 1, "the block that is not full");
}

#[test]
fn samples_that_had_parted_come_back_parted() {
    let (mut scheduler, old, young, _) = samples_out();
    scheduler.transfers_done(&[1], true).unwrap();
    scheduler.abort(old, None).unwrap();
    assert_eq!(starts(&step(&mut scheduler)), [(young.get(), 12), (young.get(), 12)]);
}

#[test]
fn samples_whose_blocks_did_not_come_in_compute_their_prompt_once() {
    let (mut scheduler, old, young, _) = samples_out();
    scheduler.transfers_done(&[1], true).unwrap();
    // The older one takes what each sample of the younger one had for itself.
    (0..5).for_each(|_| drop(step(&mut scheduler)));
    scheduler.abort(old, None).unwrap();
    let plan = step(&mut scheduler);
    let id = plan.i64s(Field::SwapInIds)[0];
    scheduler.transfers_done(&[id], false).unwrap();
    scheduler.check_integrity().unwrap();
    let plan = step(&mut scheduler);
    assert_eq!(plan.i64s(Field::Handles), [young.get()], "one sample computes the prompt for both");
}

// --- failures

#[test]
fn what_failed_on_its_way_out_and_was_reused_is_computed_again() {
    let mut scene = Scene::out(false);
    assert_eq!(scene.scheduler.num_host_blocks(), (8, 8));
    (0..5).for_each(|_| drop(step(&mut scene.scheduler)));
    scene.scheduler.abort(scene.old, None).unwrap();
    assert_eq!(starts(&step(&mut scene.scheduler)), [(scene.young.get(), 0)]);
}

#[test]
fn what_failed_on_its_way_in_is_computed_again_from_where_it_begins() {
    let (mut scene, plan) = Scene::coming_in();
    let back = pairs(&plan, Field::SwapIn)[0].1;
    let there = table(&scene.scheduler, scene.young).iter().position(|&block| block == back).unwrap() as i32;
    commit(&mut scene.scheduler, &plan);
    scene.scheduler.transfers_done(&[2], false).unwrap();
    scene.scheduler.check_integrity().unwrap();
    assert_eq!(scene.scheduler.num_host_blocks(), (8, 8));
    assert_eq!(starts(&step(&mut scene.scheduler)), [(scene.young.get(), 4 * there)]);
}

#[test]
fn transfer_that_is_not_outstanding_is_refused_by_its_id() {
    let mut scene = Scene::out(true);
    assert_eq!(scene.scheduler.transfers_done(&[1], true), Err(Error::UnknownTransfer(1)));
    assert_eq!(scene.scheduler.transfers_done(&[99], false), Err(Error::UnknownTransfer(99)));
}

#[test]
fn transfers_of_which_one_is_unknown_stay_outstanding() {
    let mut scene = Scene::new();
    assert_eq!(scene.scheduler.transfers_done(&[1, 2], true), Err(Error::UnknownTransfer(2)));
    assert_eq!(scene.scheduler.outstanding_transfers().collect::<Vec<_>>(), [1]);
}

#[test]
fn swap_without_a_host_tier_is_refused() {
    let limits = SchedulerConfig { preemption_mode: PreemptionMode::Swap, ..SchedulerConfig::default() };
    let refused = Scheduler::new(&CacheConfig::new(8), &limits);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "num_host_blocks", .. })));
}

// --- rollback

#[test]
fn transfer_of_a_plan_that_is_undone_returns_under_its_id_with_the_same_pairs() {
    let mut scene = Scene::new();
    let before = pairs(&scene.plan, Field::SwapOut);
    scene.scheduler.rollback(scene.plan.id()).unwrap();
    let plan = step(&mut scene.scheduler);
    assert_eq!((pairs(&plan, Field::SwapOut), plan.i64s(Field::SwapOutIds)), (before, &[1, 1][..]));
}

#[test]
fn transfer_that_ended_before_its_plan_was_undone_does_not_return() {
    let mut scene = Scene::new();
    scene.scheduler.transfers_done(&[1], true).unwrap();
    scene.scheduler.rollback(scene.plan.id()).unwrap();
    assert!(pairs(&step(&mut scene.scheduler), Field::SwapOut).is_empty());
}

#[test]
fn request_that_comes_in_keeps_its_place_when_the_plan_is_undone() {
    let (mut scene, plan) = Scene::coming_in();
    let (before, table_before) = (pairs(&plan, Field::SwapIn), table(&scene.scheduler, scene.young));
    scene.scheduler.rollback(plan.id()).unwrap();
    assert_eq!(table(&scene.scheduler, scene.young), table_before);
    let plan = step(&mut scene.scheduler);
    assert_eq!((pairs(&plan, Field::SwapIn), plan.changes().new.len()), (before, 1));
}

#[test]
fn what_an_undone_plan_computed_does_not_come_back() {
    let mut scheduler = scheduler(4, 8, 2);
    let old = add(&mut scheduler, "old", 8, 8);
    let young = add(&mut scheduler, "young", 7, 9);
    let first = scheduler.schedule().unwrap();
    let second = scheduler.schedule().unwrap();
    assert_eq!(pairs(&second, Field::SwapOut).len(), 2, "the scene is another");
    scheduler.rollback(first.id()).unwrap();
    scheduler.transfers_done(&[1], true).unwrap();
    scheduler.abort(old, None).unwrap();
    assert_eq!(starts(&step(&mut scheduler)), [(young.get(), 0)]);
}

// --- ends

#[test]
fn blocks_of_a_request_that_ends_while_they_go_out_come_back_when_the_transfer_ended() {
    let Scene { mut scheduler, young, plan, .. } = Scene::new();
    commit(&mut scheduler, &plan);
    scheduler.abort(young, None).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.num_host_blocks(), (8, 6));
    scheduler.transfers_done(&[1], true).unwrap();
    scheduler.check_integrity().unwrap();
    assert_eq!((scheduler.num_host_blocks(), scheduler.manager().pool().num_fenced()), ((8, 8), 0));
}

#[test]
fn blocks_of_a_request_that_ends_while_they_come_in_come_back_when_the_transfer_ended() {
    let (mut scene, plan) = Scene::coming_in();
    commit(&mut scene.scheduler, &plan);
    scene.scheduler.finish(scene.young, 0).unwrap();
    scene.scheduler.check_integrity().unwrap();
    assert_eq!(scene.scheduler.manager().pool().num_fenced(), 1);
    scene.scheduler.transfers_done(&[2], true).unwrap();
    assert!(scene.scheduler.manager().usage().abs() < 1e-9);
    assert_eq!(scene.scheduler.num_host_blocks(), (8, 8));
}

#[test]
fn host_blocks_of_a_request_that_ends_while_it_waits_are_free_at_once() {
    let mut scene = Scene::out(true);
    scene.scheduler.finish(scene.young, 0).unwrap();
    assert_eq!(scene.scheduler.num_host_blocks(), (8, 8));
}
