//! Blocks for which a request waits until a plan in flight ends are kept for it.

#[path = "scene/steps.rs"]
mod steps;

use pagedkv_core::step_plan::Field;
use pagedkv_core::{CacheConfig, NewRequest, Scheduler, SchedulerConfig};
use steps::commit;

fn scheduler(block_size: u32, usable_blocks: u32, limits: SchedulerConfig) -> Scheduler {
    let cache = CacheConfig { block_size, ..CacheConfig::new(usable_blocks + 1) };
    Scheduler::new(&cache, &SchedulerConfig { max_plans_in_flight: 2, ..limits }).expect("a valid configuration")
}

fn add(scheduler: &mut Scheduler, request_id: &str, prompt: &[i32], max_tokens: u32) {
    let request = NewRequest::new(request_id, prompt.to_vec(), max_tokens);
    scheduler.add_request(request).expect("a request that fits");
}

#[test]
fn a_younger_request_leaves_the_free_blocks_to_an_older_one_that_waits_for_a_plan_to_end() {
    let limits = SchedulerConfig { long_prefill_token_threshold: 2, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(1, 9, limits);
    add(&mut scheduler, "old", &[0; 6], 2);
    add(&mut scheduler, "middle", &[1], 4);
    add(&mut scheduler, "young", &[2], 4);
    let first = scheduler.schedule().unwrap();
    commit(&mut scheduler, &first);
    let second = scheduler.schedule().unwrap();
    assert_eq!(second.i32s(Field::SeqLens), [2, 2, 4], "the scene is another");
    // One block is left, the older request needs two, and the second plan still names those of the youngest.
    let third = scheduler.schedule().unwrap();
    assert_eq!((third.sizes().num_sequences, third.blocked_on()), (0, Some(second.id())));
    assert_eq!(scheduler.num_preemptions(), 1);
    scheduler.rollback(third.id()).unwrap();
    commit(&mut scheduler, &second);
    assert_eq!(scheduler.schedule().unwrap().i32s(Field::SeqLens), [3, 6]);
}

/// Beams of one block that have parted, while the second of two plans names blocks of a request that was aborted since.
fn beams_beside_an_aborted_request(n: u32, usable_blocks: u32, middle: Option<&[i32]>) -> Scheduler {
    let mut scheduler = scheduler(4, usable_blocks, SchedulerConfig::default());
    let request = NewRequest { n, needs_commit: true, ..NewRequest::new("beams", vec![0; 3], 2) };
    scheduler.add_request(request).unwrap();
    if let Some(prompt) = middle {
        add(&mut scheduler, "middle", prompt, 4);
    }
    add(&mut scheduler, "aborted", &[2; 1], 3);
    let first = scheduler.schedule().unwrap();
    scheduler.schedule().unwrap();
    commit(&mut scheduler, &first);
    scheduler.abort(pagedkv_core::Handle::new(i64::from(middle.is_some()) + 1), None).unwrap();
    scheduler
}

#[test]
fn nobody_is_admitted_to_blocks_for_which_a_running_request_waits() {
    let mut scheduler = beams_beside_an_aborted_request(3, 3, None);
    add(&mut scheduler, "new", &[3], 1);
    // The beams need two copies and one block is free.
    assert_eq!(scheduler.schedule().unwrap().sizes().num_sequences, 0);
    assert_eq!(scheduler.manager().pool().num_available(), 1);
}

#[test]
fn blocks_that_beams_needed_together_went_one_by_one_to_younger_requests() {
    let mut scheduler = beams_beside_an_aborted_request(4, 5, Some(&[1; 3]));
    // The beams need three copies and two blocks are free; the other request needs one.
    assert_eq!(scheduler.schedule().unwrap().sizes().num_sequences, 0);
    assert_eq!(scheduler.manager().pool().num_available(), 2);
}
