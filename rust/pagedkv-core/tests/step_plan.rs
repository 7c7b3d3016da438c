//! A plan as bytes: it travels, it is padded, and it does not trust what it is rebuilt from.

mod hostile_plan;
mod model;

use hostile_plan::plan;
use model::random::Random;
use pagedkv_core::step_plan::{ALIGNMENT, ElementType, Field};
use pagedkv_core::{CacheConfig, Error, NewRequest, Scheduler, SchedulerConfig, StepPlan};

/// Arrays of 32-bit integers, but those that are empty where nothing is transferred.
fn arrays() -> impl Iterator<Item = Field> {
    let has_something = |field: &Field| !matches!(field, Field::SwapIn | Field::SwapOut | Field::Loads);
    Field::ALL.into_iter().filter(|field| field.element_type() == ElementType::I32).filter(has_something)
}

#[test]
fn plan_is_rebuilt_from_its_bytes() {
    let plan = plan();
    let rebuilt = StepPlan::from_buffer(plan.buffer()).unwrap();
    assert_eq!(rebuilt.buffer(), plan.buffer());
    assert_eq!(rebuilt.changes(), plan.changes());
    assert!(arrays().all(|field| rebuilt.i32s(field) == plan.i32s(field)));
}

#[test]
fn plan_has_something_in_every_array_that_these_tests_look_at() {
    let plan = plan();
    assert!(arrays().all(|field| !plan.i32s(field).is_empty()));
}

#[test]
fn plan_starts_every_array_on_a_cache_line() {
    let plan = plan();
    let start = plan.buffer().as_ptr().addr();
    assert!(arrays().all(|field| (plan.bytes(field).as_ptr().addr() - start).is_multiple_of(ALIGNMENT)));
    assert!(start.is_multiple_of(ALIGNMENT));
}

#[test]
fn plan_is_not_rebuilt_from_bytes_that_are_too_few() {
    let plan = plan();
    let bytes = plan.buffer();
    let is_refused = |len: usize| matches!(StepPlan::from_buffer(&bytes[..len]), Err(Error::InvalidArgument { .. }));
    assert!((0..bytes.len()).all(is_refused));
}

#[test]
fn plan_is_not_rebuilt_from_bytes_that_are_too_many() {
    let bytes = [plan().buffer(), &[0; ALIGNMENT]].concat();
    assert!(matches!(StepPlan::from_buffer(&bytes), Err(Error::InvalidArgument { argument: "buffer", .. })));
}

#[test]
fn plan_of_any_bytes_is_refused_or_whole() {
    let mut random = Random::new(7);
    let original = plan().buffer().to_vec();
    for _ in 0..20_000 {
        let mut bytes = original.clone();
        for _ in 0..=random.below(3) {
            // The sizes and the change lists are what a reader could trip over.
            let at = if random.below(2) == 0 { random.below(128) } else { random.below(bytes.len()) };
            bytes[at] = random.next() as u8;
        }
        hostile_plan::read(&bytes);
    }
}

#[test]
fn plan_of_the_bytes_that_the_fuzzer_kept_is_refused_or_whole() {
    model::corpus::replay("step_plan", hostile_plan::replay);
}

#[test]
fn padding_adds_what_kernels_skip() {
    let plan = plan();
    let (s, t, m) = (plan.sizes().num_sequences, plan.sizes().num_tokens, plan.sizes().num_samples);
    let padded = plan.pad_to(s + 1, t + 2, m + 1).unwrap();
    let tail = |field, len: u32| padded.i32s(field)[len as usize..].to_vec();
    assert_eq!(tail(Field::Rows, s), [0]);
    assert_eq!(tail(Field::SeqLens, s), [0]);
    assert_eq!(tail(Field::InputFrom, t), [-1, -1]);
    assert_eq!(tail(Field::SampleRows, m), [0]);
    assert_eq!(tail(Field::QueryStartLoc, s), [t as i32; 2]);
    assert_eq!(tail(Field::SampleStartLoc, s), [m as i32; 2]);
    assert_eq!(padded.i64s(Field::SlotMapping)[t as usize..], [-1, -1]);
}

#[test]
fn padding_keeps_what_was_there() {
    let plan = plan();
    let (s, t, m) = (plan.sizes().num_sequences, plan.sizes().num_tokens, plan.sizes().num_samples);
    let padded = plan.pad_to(s + 3, t + 3, m + 3).unwrap();
    for field in arrays() {
        let own = plan.i32s(field);
        assert_eq!(&padded.i32s(field)[..own.len()], own, "{field:?}");
    }
    assert_eq!(padded.changes(), plan.changes());
}

#[test]
fn padding_below_the_plans_own_size_is_refused() {
    let plan = plan();
    let refused = plan.pad_to(plan.sizes().num_sequences - 1, 64, 64);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "sequences", .. })));
}

#[test]
fn plan_never_changes_once_made() {
    let cache = CacheConfig { block_size: 2, ..CacheConfig::new(32) };
    let mut scheduler = Scheduler::new(&cache, &SchedulerConfig::default()).unwrap();
    scheduler.add_request(NewRequest::new("r", vec![1, 2, 3], 4)).unwrap();
    let first = scheduler.schedule().unwrap();
    let before = first.buffer().to_vec();
    scheduler.commit(first.id(), &[7]).unwrap();
    let second = scheduler.schedule().unwrap();
    scheduler.commit(second.id(), &[7]).unwrap();
    assert_eq!(first.buffer(), before);
}

#[test]
fn arrays_of_plans_padded_to_the_same_sizes_lie_at_the_same_offsets_before_the_changes() {
    let cache = CacheConfig { block_size: 2, ..CacheConfig::new(32) };
    let mut scheduler = Scheduler::new(&cache, &SchedulerConfig::default()).unwrap();
    let empty = scheduler.schedule().unwrap();
    let changes = [
        Field::TableUpdates,
        Field::Copies,
        Field::SwapIn,
        Field::SwapOut,
        Field::SwapInIds,
        Field::SwapOutIds,
        Field::Loads,
        Field::LoadIds,
        Field::LoadHandles,
        Field::SlotMoves,
        Field::TreeMask,
        Field::Changes,
    ];
    let offsets = |plan: &StepPlan| {
        let padded = plan.pad_to(8, 32, 8).unwrap();
        let start = padded.buffer().as_ptr().addr();
        let place = |field| (padded.bytes(field).as_ptr().addr() - start, padded.bytes(field).len());
        let fixed = Field::ALL.into_iter().filter(|field| !changes.contains(field)).map(place).collect::<Vec<_>>();
        let end = fixed.iter().map(|(at, len)| at + len).max().unwrap();
        let filled = changes.into_iter().map(place).filter(|&(_, len)| len > 0);
        assert!(filled.into_iter().all(|(at, _)| at >= end), "a list of changes lies before an array of fixed size");
        fixed
    };
    assert_eq!(offsets(&empty), offsets(&plan()));
}
