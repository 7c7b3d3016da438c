//! Beams: samples that continue one another.

use pagedkv_core::{
    BlockId, CacheConfig, Error, Handle, NewRequest, Scheduler, SchedulerConfig, StepPlan, step_plan::Field,
};

const PROMPT: [i32; 6] = [10, 11, 12, 13, 14, 15];

fn scheduler(num_blocks: u32) -> Scheduler {
    let cache = CacheConfig { block_size: 4, ..CacheConfig::new(num_blocks) };
    let limits = SchedulerConfig { max_num_seqs: 6, max_model_len: 64, ..SchedulerConfig::default() };
    Scheduler::new(&cache, &limits).unwrap()
}

fn beams(id: &str, n: u32, max_tokens: u32) -> NewRequest {
    NewRequest { n, needs_commit: true, stop_token_ids: vec![2], ..NewRequest::new(id, PROMPT.to_vec(), max_tokens) }
}

/// Three beams whose first tokens are 20, 21 and 22.
fn three_beams(num_blocks: u32) -> (Scheduler, Handle) {
    let mut scheduler = scheduler(num_blocks);
    let handle = scheduler.add_request(beams("r", 3, 12)).unwrap();
    let plan = scheduler.schedule().unwrap();
    commit(&mut scheduler, &plan, &[20, 21, 22], &[0, 0, 0]);
    (scheduler, handle)
}

fn commit(scheduler: &mut Scheduler, plan: &StepPlan, tokens: &[i32], parents: &[i32]) -> Vec<i32> {
    let result = scheduler.commit_beams(plan.id(), tokens, parents).unwrap();
    scheduler.check_integrity().unwrap();
    result.sequence[..tokens.len()].to_vec()
}

fn table(scheduler: &Scheduler, handle: Handle, sample: u32) -> Vec<BlockId> {
    scheduler.block_table(handle, sample).unwrap().unwrap_or_default().to_vec()
}

#[test]
fn beams_of_one_parent_share_all_its_blocks() {
    let (scheduler, handle) = three_beams(32);
    assert_eq!(table(&scheduler, handle, 0), table(&scheduler, handle, 1));
    assert_eq!(table(&scheduler, handle, 0), table(&scheduler, handle, 2));
    assert_eq!(scheduler.manager().pool().num_held(), 2);
}

#[test]
fn each_beam_goes_on_with_its_own_token() {
    let (mut scheduler, _) = three_beams(32);
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::TokenIds), [20, 21, 22]);
    assert_eq!(plan.i32s(Field::Sequence), [0, 1, 2]);
}

#[test]
fn further_tokens_of_a_parent_take_the_lowest_free_numbers_and_their_rows() {
    let (mut scheduler, _) = three_beams(32);
    let plan = scheduler.schedule().unwrap();
    let rows = plan.i32s(Field::Rows).to_vec();
    // Beam 1 has two heirs and beam 2 one; beam 0 has none.
    assert_eq!(commit(&mut scheduler, &plan, &[30, 31, 32], &[2, 1, 1]), [2, 1, 0]);
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::TokenIds), [32, 31, 30]);
    assert_eq!(plan.i32s(Field::Rows), rows);
    assert_eq!(plan.i32s(Field::Positions), [7, 7, 7]);
}

#[test]
fn a_block_with_one_child_is_never_copied() {
    let (mut scheduler, _) = three_beams(32);
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::Copies).len(), 2 * 2);
    commit(&mut scheduler, &plan, &[30, 31, 32], &[2, 1, 0]);
    let plan = scheduler.schedule().unwrap();
    assert!(plan.i32s(Field::Copies).is_empty());
}

#[test]
fn heirs_of_one_parent_copy_its_last_block_for_all_but_one() {
    let (mut scheduler, _) = three_beams(32);
    let plan = scheduler.schedule().unwrap();
    commit(&mut scheduler, &plan, &[30, 31, 32], &[1, 1, 1]);
    assert_eq!(scheduler.manager().pool().num_held(), 2);
    assert_eq!(scheduler.schedule().unwrap().i32s(Field::Copies).len(), 2 * 2);
}

#[test]
fn a_token_that_ends_its_beam_needs_no_seat() {
    let (mut scheduler, _) = three_beams(32);
    let plan = scheduler.schedule().unwrap();
    let result = scheduler.commit_beams(plan.id(), &[2, 31, 32, 33], &[0, 0, 1, 2]).unwrap();
    assert_eq!(result.sequence, [-1, 0, 1, 2]);
    assert_eq!(result.finish_reason, [1, 0, 0, 0]);
    assert!(result.finished.is_empty());
}

#[test]
fn a_request_none_of_whose_beams_goes_on_is_over() {
    let (mut scheduler, handle) = three_beams(32);
    let plan = scheduler.schedule().unwrap();
    let result = scheduler.commit_beams(plan.id(), &[2], &[1]).unwrap();
    assert_eq!(result.finished[0].handle, handle);
    assert_eq!((result.sequence, result.finish_reason), (vec![1, 0, 2], vec![1, 4, 4]));
    scheduler.check_integrity().unwrap();
    assert_eq!(scheduler.manager().pool().num_held(), 0);
}

#[test]
fn seats_stay_with_the_request_until_it_ends() {
    let (mut scheduler, _) = three_beams(32);
    let plan = scheduler.schedule().unwrap();
    commit(&mut scheduler, &plan, &[30], &[1]);
    let four = NewRequest { n: 4, ..NewRequest::new("other", vec![1; 3], 2) };
    scheduler.add_request(four).unwrap();
    assert_eq!(scheduler.schedule().unwrap().sizes().num_sequences, 1);
}

#[test]
fn beams_are_planned_together_or_not_at_all() {
    let cache = CacheConfig { block_size: 4, ..CacheConfig::new(32) };
    let limits =
        SchedulerConfig { max_num_seqs: 6, max_num_batched_tokens: 6, max_model_len: 64, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(&cache, &limits).unwrap();
    // Four decodes come first and leave a budget of 2 to three beams.
    for id in ["a", "b", "c"] {
        scheduler.add_request(NewRequest::new(id, vec![1, 2], 20)).unwrap();
    }
    scheduler.add_request(beams("r", 3, 12)).unwrap();
    let mut sizes = Vec::new();
    for _ in 0..6 {
        let plan = scheduler.schedule().unwrap();
        let handles = plan.i64s(Field::Handles);
        sizes.push(handles.iter().filter(|&&handle| handle == 3).count());
        scheduler.commit(plan.id(), &vec![9; plan.sizes().num_samples as usize]).unwrap();
        scheduler.check_integrity().unwrap();
    }
    assert!(sizes.contains(&3) && !sizes[3..].contains(&2), "{sizes:?}");
}

#[test]
fn beams_that_were_preempted_come_back_with_their_own_tokens() {
    let mut scheduler = scheduler(9);
    scheduler.add_request(NewRequest::new("old", vec![1; 8], 16)).unwrap();
    let handle = scheduler.add_request(beams("r", 3, 5)).unwrap();
    let mut texts = vec![Vec::new(); 3];
    let mut ended = false;
    let mut token = 100;
    while !ended {
        let plan = scheduler.schedule().unwrap();
        let (handles, starts) = (plan.i64s(Field::Handles), plan.i32s(Field::SampleStartLoc));
        let (mut tokens, mut parents) = (Vec::new(), Vec::new());
        let mut old = texts.clone();
        for (i, &planned) in handles.iter().enumerate() {
            for sample in starts[i]..starts[i + 1] {
                token += 1;
                tokens.push(token);
                parents.push(sample);
                if planned == handle.get() {
                    let number =
                        if starts[i + 1] - starts[i] == 3 { sample - starts[i] } else { plan.i32s(Field::Sequence)[i] };
                    old[number as usize].push(token);
                }
            }
        }
        // What runs for a beam is what it was given.
        for (i, &planned) in handles.iter().enumerate() {
            let (from, to) =
                (plan.i32s(Field::QueryStartLoc)[i] as usize, plan.i32s(Field::QueryStartLoc)[i + 1] as usize);
            for at in from..to {
                let position = plan.i32s(Field::Positions)[at] as usize;
                if planned == handle.get() && position >= 6 {
                    let number = plan.i32s(Field::Sequence)[i] as usize;
                    assert_eq!(plan.i32s(Field::TokenIds)[at], texts[number][position - 6]);
                }
            }
        }
        texts = old;
        ended = scheduler
            .commit_beams(plan.id(), &tokens, &parents)
            .unwrap()
            .finished
            .iter()
            .any(|over| over.handle == handle);
        scheduler.check_integrity().unwrap();
    }
    assert!(scheduler.num_preemptions() > 0);
    assert!(texts.iter().all(|text| text.len() == 5), "{texts:?}");
}

#[test]
fn a_commit_of_beams_that_is_refused_changes_nothing() {
    let (mut scheduler, _) = three_beams(32);
    let plan = scheduler.schedule().unwrap();
    let before = format!("{scheduler:?}");
    let mut refused = |tokens: &[i32], parents: &[i32]| scheduler.commit_beams(plan.id(), tokens, parents).unwrap_err();
    assert!(matches!(refused(&[1, 3, 4, 5], &[0, 0, 1, 2]), Error::InvalidArgument { argument: "parents", .. }));
    assert!(matches!(refused(&[1], &[3]), Error::InvalidArgument { argument: "parents", .. }));
    assert!(matches!(refused(&[1], &[-1]), Error::InvalidArgument { argument: "parents", .. }));
    assert!(matches!(refused(&[1, 3], &[0]), Error::InvalidArgument { argument: "tokens", .. }));
    assert!(matches!(refused(&[-1], &[0]), Error::InvalidArgument { argument: "tokens", .. }));
    assert_eq!(format!("{scheduler:?}"), before);
}

#[test]
fn requests_that_do_not_wait_for_commits_cannot_branch() {
    let mut scheduler = scheduler(32);
    scheduler.add_request(NewRequest { n: 2, ..NewRequest::new("r", PROMPT.to_vec(), 4) }).unwrap();
    let plan = scheduler.schedule().unwrap();
    let refused = scheduler.commit_beams(plan.id(), &[1, 2], &[0, 0]);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "parents", .. })), "{refused:?}");
}

#[test]
fn more_beams_than_a_step_has_tokens_are_refused_when_they_are_added() {
    let limits = SchedulerConfig { max_num_batched_tokens: 2, max_model_len: 64, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(&CacheConfig::new(32), &limits).unwrap();
    let refused = scheduler.add_request(beams("r", 3, 12));
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "n", .. })), "{refused:?}");
}

#[test]
fn aborted_beam_was_said_to_be_dropped_by_the_commit() {
    let (mut scheduler, handle) = three_beams(32);
    let plan = scheduler.schedule().unwrap();
    scheduler.abort(handle, Some(1)).unwrap();
    let result = scheduler.commit_beams(plan.id(), &[30, 31], &[0, 2]).unwrap();
    assert_eq!((result.sequence, result.finish_reason), (vec![0, 2], vec![0, 0]));
}

#[test]
fn drafts_that_found_no_room_outlived_the_token_of_their_beam() {
    let cache = CacheConfig { block_size: 4, ..CacheConfig::new(32) };
    let limits = SchedulerConfig { max_num_batched_tokens: 2, lookahead: 2, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(&cache, &limits).unwrap();
    scheduler.add_request(NewRequest { prompt_token_ids: vec![1, 2], ..beams("r", 2, 12) }).unwrap();
    let plan = scheduler.schedule().unwrap();
    commit(&mut scheduler, &plan, &[20, 21], &[0, 0]);
    scheduler.set_draft_tokens(&[0, 1], &[0, 1, 2], &[7, 8]).unwrap();
    let plan = scheduler.schedule().unwrap();
    // One beam ends, so that there would be room for a guess.
    commit(&mut scheduler, &plan, &[30], &[0]);
    assert_eq!(scheduler.schedule().unwrap().i32s(Field::TokenIds), [30]);
}
