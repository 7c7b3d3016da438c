//! Copies between the device and the host tier that are under way.

use pagedkv_core::step_plan::Field;
use pagedkv_core::{
    BlockId, BlockState, CacheConfig, Handle, Identity, NewRequest, PreemptionMode, RootKey, Scheduler,
    SchedulerConfig, StepPlan,
};

use crate::steps::{BLOCK_SIZE, add, assert_empty, check, commit, handles, num_tokens, plan, request, step};

fn swapping(usable_blocks: u32) -> Scheduler {
    let cache = CacheConfig { block_size: BLOCK_SIZE, num_host_blocks: 8, ..CacheConfig::new(usable_blocks + 1) };
    let limits = SchedulerConfig { preemption_mode: PreemptionMode::Swap, ..SchedulerConfig::default() };
    Scheduler::new(&cache, &limits).expect("a valid configuration")
}

/// An old and a young request of two blocks each in a pool of four; the second plan preempts the young one, whose blocks
/// go out under the id 1, because the old one needs a third block.
fn going_out() -> (Scheduler, Handle, Handle, StepPlan, Vec<BlockId>) {
    let mut scheduler = swapping(4);
    let old = add(&mut scheduler, "old", 1, 8, 8);
    let young = add(&mut scheduler, "young", 2, 7, 9);
    step(&mut scheduler);
    let leaving = scheduler.block_table(young, 0).unwrap().expect("it is resident").to_vec();
    let plan = plan(&mut scheduler);
    assert_eq!(plan.i64s(Field::SwapOutIds), [1, 1], "the scene is another");
    (scheduler, old, young, plan, leaving)
}

/// The young request's first transfer went well, one of its blocks was reused, and the old request is gone: the plan
/// brings it back under the id 2.
fn coming_in() -> (Scheduler, Handle, StepPlan) {
    let (mut scheduler, old, young, swaps, _) = going_out();
    commit(&mut scheduler, &swaps);
    scheduler.transfers_done(&[1], true).unwrap();
    step(&mut scheduler);
    scheduler.abort(old, None).unwrap();
    let plan = plan(&mut scheduler);
    assert!(plan.i64s(Field::SwapInIds).iter().all(|&id| id == 2) && !plan.i64s(Field::SwapInIds).is_empty());
    (scheduler, young, plan)
}

fn host_blocks_in_use(scheduler: &Scheduler) -> u32 {
    let (total, free) = scheduler.num_host_blocks();
    total - free
}

#[test]
fn fault_03_an_abort_while_blocks_go_out_gives_all_of_them_back_when_the_transfer_ends() {
    let (mut scheduler, old, young, swaps, _) = going_out();
    commit(&mut scheduler, &swaps);
    scheduler.abort(young, None).unwrap();
    scheduler.abort(old, None).unwrap();
    step(&mut scheduler);
    assert_eq!((scheduler.num_unfinished_requests(), scheduler.manager().pool().num_fenced()), (0, 2));
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(host_blocks_in_use(&scheduler), 0);
    assert_empty(&scheduler);
}

#[test]
fn fault_03_an_abort_while_blocks_come_in_gives_all_of_them_back_when_the_transfer_ends() {
    let (mut scheduler, young, swaps) = coming_in();
    commit(&mut scheduler, &swaps);
    scheduler.abort(young, None).unwrap();
    step(&mut scheduler);
    assert!(scheduler.manager().pool().num_fenced() > 0);
    scheduler.transfers_done(&[2], false).unwrap();
    assert_eq!(host_blocks_in_use(&scheduler), 0);
    assert_empty(&scheduler);
}

#[test]
fn fault_04_blocks_that_go_out_are_given_to_nobody_before_the_transfer_ends() {
    let (mut scheduler, _, _, swaps, leaving) = going_out();
    commit(&mut scheduler, &swaps);
    let waits = plan(&mut scheduler);
    assert!(num_tokens(&waits) == 0 && waits.waits_for_transfers());
    let states = leaving.iter().map(|&block| scheduler.manager().pool().state(block).unwrap());
    assert!(states.into_iter().all(|state| state == BlockState::Fenced));
    commit(&mut scheduler, &waits);
    scheduler.transfers_done(&[1], true).unwrap();
    assert_eq!(num_tokens(&step(&mut scheduler).0), 1);
}

#[test]
fn fault_12_a_transfer_to_the_host_that_failed_is_not_taken_for_done() {
    let (mut scheduler, old, young, swaps, _) = going_out();
    commit(&mut scheduler, &swaps);
    scheduler.transfers_done(&[1], false).unwrap();
    assert_eq!(host_blocks_in_use(&scheduler), 0);
    // The old one takes both blocks before it ends, so nothing of the young one is left anywhere.
    (0..6).for_each(|_| drop(step(&mut scheduler)));
    scheduler.abort(old, None).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((handles(&plan), plan.i32s(Field::SwapIn)), (vec![young.get()], &[][..]));
    assert!(num_tokens(&plan) > 1, "it is computed again");
}

#[test]
fn fault_12_a_transfer_from_the_host_that_failed_is_not_taken_for_done() {
    let (mut scheduler, young, swaps) = coming_in();
    commit(&mut scheduler, &swaps);
    scheduler.transfers_done(&[2], false).unwrap();
    check(&scheduler);
    let (plan, _) = step(&mut scheduler);
    assert_eq!(handles(&plan), [young.get()]);
    assert!(num_tokens(&plan) > 1, "what did not come in is computed again");
}

const ADAPTER: i64 = 5;

fn with_adapter(id: &str, first: i32, prompt_len: usize, max_tokens: u32) -> NewRequest {
    let root = RootKey { lora_id: Some(ADAPTER), cache_salt: None };
    NewRequest { identity: Identity { root, images: Vec::new() }, ..request(id, first, prompt_len, max_tokens) }
}

/// As [`going_out`], with an adapter; the transfer went well and the old request runs on for so many steps.
fn swapped_out(num_steps: usize) -> Scheduler {
    let mut scheduler = swapping(4);
    scheduler.add_request(with_adapter("old", 1, 8, 8)).unwrap();
    scheduler.add_request(with_adapter("young", 2, 7, 9)).unwrap();
    step(&mut scheduler);
    let (swaps, _) = step(&mut scheduler);
    assert_eq!(swaps.i64s(Field::SwapOutIds), [1, 1], "the scene is another");
    scheduler.transfers_done(&[1], true).unwrap();
    (0..num_steps).for_each(|_| drop(step(&mut scheduler)));
    scheduler
}

/// The young request went out, the cache was reset by `resets`, and it came back: tokens that another request of the same
/// prompt has to compute.
fn computed_after_a_return(resets: impl FnOnce(&mut Scheduler)) -> u32 {
    let mut scheduler = swapped_out(1);
    resets(&mut scheduler);
    let [old, young] = [0, 1].map(Handle::new);
    scheduler.abort(old, None).unwrap();
    let (brings_back, _) = step(&mut scheduler);
    assert!(!brings_back.i64s(Field::SwapInIds).is_empty(), "the scene is another");
    scheduler.transfers_done(&[2], true).unwrap();
    check(&scheduler);
    scheduler.abort(young, None).unwrap();
    scheduler.add_request(with_adapter("asks", 2, 7, 1)).unwrap();
    num_tokens(&step(&mut scheduler).0)
}

#[test]
fn fault_34_what_comes_back_from_the_host_tier_after_a_reset_is_found_by_nobody() {
    assert_eq!(computed_after_a_return(Scheduler::reset_prefix_cache), 7);
    assert_eq!(computed_after_a_return(|_| ()), 3, "the scene is another");
}

#[test]
fn fault_34_what_comes_back_from_the_host_tier_under_an_adapter_loaded_anew_is_found_by_nobody() {
    assert_eq!(computed_after_a_return(|scheduler| scheduler.invalidate_lora(ADAPTER)), 7);
    assert_eq!(computed_after_a_return(|scheduler| scheduler.invalidate_lora(ADAPTER + 1)), 3, "the scene is another");
}

/// The young request is held while it is out, all its blocks are reused, the cache was reset by `resets`, and another
/// request computed the same prompt: blocks that are copied from the host tier when the young one comes back.
fn copied_beside_the_same_prefix(resets: impl FnOnce(&mut Scheduler)) -> usize {
    let mut scheduler = swapped_out(1);
    scheduler.hold(Handle::new(1)).unwrap();
    (0..6).for_each(|_| drop(step(&mut scheduler)));
    assert_eq!(scheduler.num_requests(), (0, 1), "the old one should be over");
    resets(&mut scheduler);
    scheduler.add_request(with_adapter("asks", 2, 7, 1)).unwrap();
    step(&mut scheduler);
    scheduler.release(Handle::new(1)).unwrap();
    plan(&mut scheduler).i64s(Field::SwapInIds).len()
}

#[test]
fn fault_34_what_comes_back_from_the_host_tier_after_a_reset_finds_nothing_that_was_computed_since() {
    assert_eq!(copied_beside_the_same_prefix(Scheduler::reset_prefix_cache), 2);
    assert_eq!(copied_beside_the_same_prefix(|scheduler| scheduler.invalidate_lora(ADAPTER)), 2);
    assert_eq!(copied_beside_the_same_prefix(|_| ()), 1, "the scene is another");
}

#[test]
fn fault_40_a_plan_that_needs_blocks_which_go_out_names_what_it_waits_for() {
    let (mut scheduler, _, _, swaps, _) = going_out();
    commit(&mut scheduler, &swaps);
    assert!(plan(&mut scheduler).waits_for_transfers());
    assert_eq!(scheduler.outstanding_transfers().collect::<Vec<_>>(), [1]);
}
