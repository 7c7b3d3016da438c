//! Draft tokens: what is checked, what is accepted, and that nothing of the rest stays behind.

use pagedkv_core::{CacheConfig, Error, NewRequest, Scheduler, SchedulerConfig, StepPlan, step_plan::Field};

const PROMPT: [i32; 6] = [10, 11, 12, 13, 14, 15];

fn scheduler(num_blocks: u32, max_plans_in_flight: u32) -> Scheduler {
    let cache = CacheConfig { block_size: 4, ..CacheConfig::new(num_blocks) };
    let limits = SchedulerConfig {
        max_num_seqs: 4,
        max_model_len: 64,
        lookahead: 4,
        max_plans_in_flight,
        ..SchedulerConfig::default()
    };
    Scheduler::new(&cache, &limits).unwrap()
}

/// A scheduler with one request whose first token, 20, is sampled.
fn decoding(max_tokens: u32) -> Scheduler {
    let mut scheduler = scheduler(32, 1);
    scheduler.add_request(NewRequest::new("r", PROMPT.to_vec(), max_tokens)).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20]).unwrap();
    scheduler
}

fn draft(scheduler: &mut Scheduler, ids: &[i32]) {
    scheduler.set_draft_tokens(&[0], &[0, ids.len() as i32], ids).unwrap();
}

fn commit(scheduler: &mut Scheduler, plan: &StepPlan, rows: &[i32]) -> Vec<i32> {
    let result = scheduler.commit_drafts(plan.id(), rows, rows.len()).unwrap();
    scheduler.check_integrity().unwrap();
    result.num_new_tokens
}

#[test]
fn drafts_run_behind_the_last_token_and_a_sample_is_drawn_after_each() {
    let mut scheduler = decoding(9);
    draft(&mut scheduler, &[21, 22, 23]);
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::TokenIds), [20, 21, 22, 23]);
    assert_eq!(plan.i32s(Field::Positions), [6, 7, 8, 9]);
    assert_eq!(plan.i32s(Field::SampleRows), [0, 1, 2, 3]);
    assert_eq!(plan.i32s(Field::InputFrom), [-1; 4]);
    assert_eq!(plan.i32s(Field::SeqLens), [10]);
}

#[test]
fn accepted_drafts_need_not_be_computed_again() {
    let mut scheduler = decoding(9);
    draft(&mut scheduler, &[21, 22, 23]);
    let plan = scheduler.schedule().unwrap();
    assert_eq!(commit(&mut scheduler, &plan, &[21, 22, 99, -1]), [3]);
    let plan = scheduler.schedule().unwrap();
    assert_eq!((plan.i32s(Field::TokenIds), plan.i32s(Field::Positions)), (&[99][..], &[9][..]));
}

#[test]
fn rejected_drafts_give_their_blocks_back_within_the_commit() {
    let mut scheduler = decoding(9);
    draft(&mut scheduler, &[21, 22, 23, 24]);
    let plan = scheduler.schedule().unwrap();
    assert_eq!(scheduler.manager().pool().num_held(), 3);
    assert_eq!(commit(&mut scheduler, &plan, &[50, -1, -1, -1, -1]), [1]);
    assert_eq!(scheduler.manager().pool().num_held(), 2);
}

#[test]
fn rejected_drafts_never_enter_the_prefix_cache() {
    let mut scheduler = decoding(9);
    draft(&mut scheduler, &[21, 22, 23, 24]);
    let plan = scheduler.schedule().unwrap();
    commit(&mut scheduler, &plan, &[50, -1, -1, -1, -1]);
    let prompt = [&PROMPT[..], &[20, 21, 22]].concat();
    scheduler.add_request(NewRequest::new("other", prompt, 1)).unwrap();
    let plan = scheduler.schedule().unwrap();
    // The first block is a hit, the one with the guess is not.
    assert_eq!(plan.i32s(Field::QueryStartLoc), [0, 1, 6]);
}

#[test]
fn accepted_drafts_fill_blocks_that_others_can_hit() {
    let mut scheduler = decoding(9);
    draft(&mut scheduler, &[21, 22]);
    let plan = scheduler.schedule().unwrap();
    commit(&mut scheduler, &plan, &[21, 22, 23]);
    let prompt = [&PROMPT[..], &[20, 21, 22]].concat();
    scheduler.add_request(NewRequest::new("other", prompt, 1)).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::QueryStartLoc), [0, 1, 2]);
}

#[test]
fn drafts_beyond_max_tokens_do_not_run() {
    let mut scheduler = decoding(3);
    draft(&mut scheduler, &[21, 22, 23]);
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::TokenIds), [20, 21]);
    assert_eq!(commit(&mut scheduler, &plan, &[21, 22]), [2]);
    assert_eq!(scheduler.num_unfinished_requests(), 0);
}

#[test]
fn tokens_behind_a_stop_token_are_dropped_and_counted() {
    let mut scheduler = scheduler(32, 1);
    scheduler.add_request(NewRequest { stop_token_ids: vec![21], ..NewRequest::new("r", PROMPT.to_vec(), 9) }).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20]).unwrap();
    draft(&mut scheduler, &[21, 22]);
    let plan = scheduler.schedule().unwrap();
    let result = scheduler.commit_drafts(plan.id(), &[21, 22, 23], 3).unwrap();
    assert_eq!((&result.num_new_tokens[..], result.num_ignored, result.finish_reason[0]), (&[1][..], 2, 1));
}

#[test]
fn drafts_that_do_not_fit_are_left_out_rather_than_anybody_preempted() {
    let mut scheduler = scheduler(6, 1);
    scheduler.add_request(NewRequest::new("a", PROMPT.to_vec(), 6)).unwrap();
    scheduler.add_request(NewRequest::new("b", vec![1; 6], 6)).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20, 30]).unwrap();
    scheduler.set_draft_tokens(&[0, 1], &[0, 4, 8], &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::QueryStartLoc), [0, 1, 6]);
    assert_eq!(scheduler.num_preemptions(), 0);
}

#[test]
fn a_sequence_whose_drafts_are_checked_waits_for_the_commit() {
    let mut scheduler = scheduler(32, 2);
    scheduler.add_request(NewRequest::new("r", PROMPT.to_vec(), 9)).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20]).unwrap();
    draft(&mut scheduler, &[21]);
    let plan = scheduler.schedule().unwrap();
    let next = scheduler.schedule().unwrap();
    assert_eq!((next.sizes().num_sequences, next.blocked_on()), (0, Some(plan.id())));
}

#[test]
fn a_rollback_gives_the_drafts_back() {
    let mut scheduler = decoding(9);
    draft(&mut scheduler, &[21, 22]);
    let plan = scheduler.schedule().unwrap();
    scheduler.rollback(plan.id()).unwrap();
    scheduler.check_integrity().unwrap();
    assert_eq!(scheduler.schedule().unwrap().i32s(Field::TokenIds), [20, 21, 22]);
}

#[test]
fn an_abort_while_drafts_are_checked_drops_the_whole_row() {
    let mut scheduler = decoding(9);
    draft(&mut scheduler, &[21, 22]);
    let plan = scheduler.schedule().unwrap();
    scheduler.abort(pagedkv_core::Handle::new(0), None).unwrap();
    let result = scheduler.commit_drafts(plan.id(), &[21, 22, 23], 3).unwrap();
    assert_eq!(result.num_ignored, 3);
    assert_eq!(scheduler.manager().pool().num_held(), 0);
}

#[test]
fn a_commit_that_is_refused_changes_nothing() {
    let mut scheduler = decoding(9);
    draft(&mut scheduler, &[21, 22]);
    let plan = scheduler.schedule().unwrap();
    let before = format!("{scheduler:?}");
    for rows in [&[22, 30, -1][..], &[-1, -1, -1], &[21, -1, 22], &[21, 22, 23, 24], &[]] {
        assert!(scheduler.commit_drafts(plan.id(), rows, rows.len()).is_err(), "{rows:?}");
    }
    assert!(scheduler.commit(plan.id(), &[1, 2, 3]).is_err());
    assert_eq!(format!("{scheduler:?}"), before);
}

#[test]
fn drafts_are_refused_where_they_have_no_place() {
    let mut scheduler = decoding(9);
    let mut refused =
        |rows: &[i32], start_loc: &[i32], ids: &[i32]| scheduler.set_draft_tokens(rows, start_loc, ids).unwrap_err();
    assert!(matches!(refused(&[1], &[0, 1], &[5]), Error::InvalidArgument { argument: "rows", .. }));
    assert!(matches!(refused(&[-1], &[0, 1], &[5]), Error::InvalidArgument { argument: "rows", .. }));
    assert!(matches!(refused(&[0, 0], &[0, 1, 2], &[5, 6]), Error::InvalidArgument { argument: "rows", .. }));
    assert!(matches!(refused(&[0], &[0, 5], &[1, 2, 3, 4, 5]), Error::InvalidArgument { argument: "start_loc", .. }));
    assert!(matches!(refused(&[0], &[0, 2], &[1]), Error::InvalidArgument { argument: "start_loc", .. }));
    assert!(matches!(refused(&[0], &[0, 1], &[-7]), Error::InvalidArgument { argument: "ids", .. }));
}

#[test]
fn drafts_of_a_sequence_in_flight_are_refused() {
    let mut scheduler = decoding(9);
    let _plan = scheduler.schedule().unwrap();
    let refused = scheduler.set_draft_tokens(&[0], &[0, 1], &[5]);
    assert!(matches!(refused, Err(Error::SequenceInFlight(_))), "{refused:?}");
}

/// Two or more beams of three tokens, where a plan may have so many tokens.
fn beams(scheduler: &mut Scheduler, n: u32, max_tokens: u32) {
    let request = NewRequest { n, needs_commit: true, ..NewRequest::new("beams", vec![2; 3], max_tokens) };
    scheduler.add_request(request).unwrap();
    let plan = scheduler.schedule().unwrap();
    let tokens: Vec<i32> = (20..).take(plan.sizes().num_samples as usize).collect();
    scheduler.commit(plan.id(), &tokens).unwrap();
}

#[test]
fn drafts_of_a_beam_took_the_budget_of_the_others() {
    let cache = CacheConfig { block_size: 4, ..CacheConfig::new(32) };
    let limits = SchedulerConfig { max_num_batched_tokens: 4, lookahead: 4, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(&cache, &limits).unwrap();
    beams(&mut scheduler, 2, 9);
    scheduler.set_draft_tokens(&[0, 1], &[0, 4, 8], &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!((plan.i32s(Field::Sequence), plan.i32s(Field::QueryStartLoc)), (&[1, 0][..], &[0, 1, 4][..]));
}

#[test]
fn drafts_of_a_beam_took_the_blocks_of_the_others() {
    let mut scheduler = scheduler(1 + 9, 1);
    scheduler.add_request(NewRequest::new("old", vec![1; 23], 2)).unwrap();
    beams(&mut scheduler, 3, 3);
    // Two blocks are left, for the copies of the one that the three beams share.
    scheduler.set_draft_tokens(&[1], &[0, 1], &[5]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::QueryStartLoc), [0, 1, 2, 3, 4]);
    scheduler.check_integrity().unwrap();
}

#[test]
fn drafts_of_an_old_request_had_a_young_one_preempted() {
    let mut scheduler = scheduler(1 + 6, 1);
    for (id, len) in [("old", 7), ("young", 8), ("youngest", 2)] {
        scheduler.add_request(NewRequest::new(id, vec![len; len as usize], 6)).unwrap();
    }
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20, 30, 40]).unwrap();
    // They take the last block, which the second request needs.
    scheduler.set_draft_tokens(&[0], &[0, 4], &[1, 2, 3, 4]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!((plan.i32s(Field::QueryStartLoc), scheduler.num_preemptions()), (&[0, 1, 2, 3][..], 0));
    let result = scheduler.commit(plan.id(), &[21, 31, 41]).unwrap();
    assert_eq!(result.num_new_tokens, [1, 1, 1]);
    scheduler.check_integrity().unwrap();
}
