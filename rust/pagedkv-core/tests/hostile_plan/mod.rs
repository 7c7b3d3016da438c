//! A plan as somebody sends it who may not be trusted, and a reader who looks at all of it.

use pagedkv_core::step_plan::{ElementType, Field};
use pagedkv_core::{CacheConfig, NewRequest, Scheduler, SchedulerConfig, StepPlan};

/// A plan with prefills, decodes, copies, table updates and changes.
pub(crate) fn plan() -> StepPlan {
    let cache = CacheConfig { block_size: 2, ..CacheConfig::new(32) };
    let mut scheduler = Scheduler::new(&cache, &SchedulerConfig::default()).expect("a valid configuration");
    scheduler.add_request(NewRequest { n: 2, ..NewRequest::new("forks", vec![1, 2, 3], 4) }).expect("it fits");
    let first = scheduler.schedule().expect("no plan is in flight");
    scheduler.commit(first.id(), &[7, 8]).expect("the oldest plan");
    scheduler.add_request(NewRequest::new("prefills", vec![4; 5], 4)).expect("it fits");
    scheduler.schedule().expect("no plan is in flight")
}

/// Refused, or a whole plan: every array has its shape, the lists of changes can be read, and it can be sent on and
/// padded.
pub(crate) fn read(bytes: &[u8]) {
    let Ok(plan) = StepPlan::from_buffer(bytes) else { return };
    assert_eq!(plan.buffer(), bytes);
    let sizes = plan.sizes();
    for field in Field::ALL {
        let (rows, columns) = field.shape(&sizes);
        let len = match field.element_type() {
            ElementType::U8 => plan.bytes(field).len(),
            ElementType::I32 => plan.i32s(field).len(),
            ElementType::I64 => plan.i64s(field).len(),
        };
        assert_eq!(len, rows * columns.unwrap_or(1), "{field:?}");
    }
    let padded = plan
        .pad_to(sizes.num_sequences + 1, sizes.num_tokens + 2, sizes.num_samples + 3)
        .expect("sizes of at least the plan's own");
    assert_eq!(padded.changes(), plan.changes());
    assert_eq!(StepPlan::from_buffer(padded.buffer()).expect("a whole plan").buffer(), padded.buffer());
    assert_eq!((padded.id(), padded.blocked_on()), (plan.id(), plan.blocked_on()));
}

/// Reads what these bytes stand for: themselves behind a first byte that is even, else a plan with some bytes changed
/// (two bytes say where, one what) and as many as the first byte says, halved, cut off its end.
pub(crate) fn replay(bytes: &[u8]) {
    let Some((&kind, rest)) = bytes.split_first() else { return };
    if kind.is_multiple_of(2) {
        return read(rest);
    }
    let mut sent = plan().buffer().to_vec();
    sent.truncate(sent.len() - usize::from(kind / 2));
    for patch in rest.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([patch[0], patch[1]])) % sent.len();
        sent[at] = patch[2];
    }
    read(&sent);
}
