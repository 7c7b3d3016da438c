//! Draft trees: what runs, what each guess sees, and how an accepted path comes together.

use pagedkv_core::step_plan::Field;
use pagedkv_core::{CacheConfig, Error, Handle, NewRequest, Scheduler, SchedulerConfig, StepPlan, StepResult};

const PROMPT: [i32; 6] = [10, 11, 12, 13, 14, 15];

fn scheduler(usable_blocks: u32, limits: SchedulerConfig) -> Scheduler {
    let cache = CacheConfig { block_size: 4, ..CacheConfig::new(1 + usable_blocks) };
    let limits = SchedulerConfig { max_num_seqs: 4, max_model_len: 64, lookahead: 8, ..limits };
    Scheduler::new(&cache, &limits).unwrap()
}

/// A request whose first token, 20, is sampled and stands at position 6.
fn decoding(limits: SchedulerConfig) -> Scheduler {
    let mut scheduler = scheduler(32, limits);
    scheduler.add_request(NewRequest::new("r", PROMPT.to_vec(), 12)).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20]).unwrap();
    scheduler
}

/// Two guesses for the next token, and two more behind each: 21 (22, 23), 31 (32, 33).
const IDS: [i32; 6] = [21, 31, 22, 23, 32, 33];
const PARENTS: [i32; 6] = [-1, -1, 0, 0, 1, 1];

fn draft(scheduler: &mut Scheduler) -> StepPlan {
    scheduler.set_draft_trees(&[0], &[0, 6], &IDS, &PARENTS).unwrap();
    scheduler.schedule().unwrap()
}

fn commit(scheduler: &mut Scheduler, plan: &StepPlan, rows: &[i32], accepted: &[i32]) -> StepResult {
    let result = scheduler.commit_trees(plan.id(), rows, accepted, rows.len()).unwrap();
    scheduler.check_integrity().unwrap();
    result
}

/// The second guess for the next token and the second one behind it were right.
fn accepted(limits: SchedulerConfig) -> Scheduler {
    let mut scheduler = decoding(limits);
    let plan = draft(&mut scheduler);
    commit(&mut scheduler, &plan, &[31, 33, 40], &[1, 5, -1]);
    scheduler
}

fn slots(scheduler: &Scheduler, handle: i64, positions: &[usize]) -> Vec<i64> {
    let table = scheduler.block_table(Handle::new(handle), 0).unwrap().unwrap();
    positions.iter().map(|position| i64::from(table[position / 4].get()) * 4 + (position % 4) as i64).collect()
}

fn moves(plan: &StepPlan) -> Vec<[i64; 3]> {
    plan.i64s(Field::SlotMoves).chunks(3).map(|slots| [slots[0], slots[1], slots[2]]).collect()
}

// --- the plan

#[test]
fn guesses_stand_at_their_depth_and_lie_one_behind_the_other() {
    let mut scheduler = decoding(SchedulerConfig::default());
    let plan = draft(&mut scheduler);
    assert_eq!(plan.i32s(Field::TokenIds), [20, 21, 31, 22, 23, 32, 33]);
    assert_eq!(plan.i32s(Field::Positions), [6, 7, 7, 8, 8, 8, 8]);
    assert_eq!(plan.i64s(Field::SlotMapping), slots(&scheduler, 0, &[6, 7, 8, 9, 10, 11, 12]));
    assert_eq!(plan.i32s(Field::SeqLens), [13]);
    assert_eq!(plan.i32s(Field::SampleRows), [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn each_guess_sees_itself_and_what_it_continues() {
    let mut scheduler = decoding(SchedulerConfig::default());
    let plan = draft(&mut scheduler);
    let rows: Vec<u64> = plan
        .bytes(Field::TreeMask)
        .chunks_exact(StepPlan::tree_mask_row_bytes(7))
        .map(|row| u64::from_le_bytes(row.try_into().unwrap()))
        .collect();
    let expected = [0b000_0001, 0b000_0011, 0b000_0101, 0b000_1011, 0b001_0011, 0b010_0101, 0b100_0101];
    assert_eq!(rows, expected);
    assert_eq!(plan.i32s(Field::TreeMaskStartLoc), [0, 56]);
}

#[test]
fn only_sequences_with_a_tree_have_rows_in_the_mask() {
    let mut scheduler = scheduler(32, SchedulerConfig::default());
    for id in ["a", "b", "c"] {
        scheduler.add_request(NewRequest::new(id, PROMPT.to_vec(), 12)).unwrap();
    }
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20, 20, 20]).unwrap();
    scheduler.set_draft_trees(&[0, 2], &[0, 2, 4], &[1, 2, 3, 4], &[-1, 0, -1, -1]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i64s(Field::Handles), [1, 0, 2]);
    assert_eq!(plan.i32s(Field::TreeMaskStartLoc), [0, 0, 0, 24]);
}

#[test]
fn a_plan_without_trees_has_no_mask() {
    let mut scheduler = decoding(SchedulerConfig::default());
    scheduler.set_draft_tokens(&[0], &[0, 3], &[1, 2, 3]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert!(plan.bytes(Field::TreeMask).is_empty());
    assert_eq!(plan.i32s(Field::TreeMaskStartLoc), [0, 0]);
}

#[test]
fn rows_of_the_mask_are_whole_words_where_a_tree_has_more_than_63_guesses() {
    let cache = CacheConfig { block_size: 4, ..CacheConfig::new(64) };
    let mut scheduler = Scheduler::new(&cache, &SchedulerConfig { lookahead: 64, ..Default::default() }).unwrap();
    scheduler.add_request(NewRequest::new("r", vec![1], 9)).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[2]).unwrap();
    let ids: Vec<i32> = (0..64).collect();
    scheduler.set_draft_trees(&[0], &[0, 64], &ids, &[-1; 64]).unwrap();
    let plan = scheduler.schedule().unwrap();
    let mask = plan.bytes(Field::TreeMask);
    assert_eq!(mask.len(), 65 * 16);
    assert_eq!(&mask[64 * 16..], [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn guesses_too_deep_to_be_accepted_are_left_out_with_all_behind_them() {
    let mut scheduler = scheduler(32, SchedulerConfig::default());
    scheduler.add_request(NewRequest::new("r", PROMPT.to_vec(), 3)).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20]).unwrap();
    assert_eq!(draft(&mut scheduler).i32s(Field::TokenIds), [20, 21, 31]);
}

#[test]
fn a_tree_that_the_budget_cuts_to_a_chain_is_one() {
    let limits = SchedulerConfig { max_num_batched_tokens: 6, ..SchedulerConfig::default() };
    let mut scheduler = decoding(limits);
    scheduler.set_draft_trees(&[0], &[0, 6], &[1, 2, 3, 4, 5, 6], &[-1, 0, 1, 2, 3, 3]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::Positions), [6, 7, 8, 9, 10, 11]);
    assert!(plan.bytes(Field::TreeMask).is_empty());
}

// --- the commit

#[test]
fn the_accepted_path_is_the_sequence_from_then_on() {
    let mut scheduler = decoding(SchedulerConfig::default());
    let plan = draft(&mut scheduler);
    assert_eq!(commit(&mut scheduler, &plan, &[31, 33, 40], &[1, 5, -1]).num_new_tokens, [3]);
    let plan = scheduler.schedule().unwrap();
    assert_eq!((plan.i32s(Field::TokenIds), plan.i32s(Field::Positions)), (&[40][..], &[9][..]));
}

#[test]
fn an_accepted_path_moves_together_in_the_next_plan() {
    let mut scheduler = decoding(SchedulerConfig::default());
    let plan = draft(&mut scheduler);
    let source = slots(&scheduler, 0, &[8, 12]);
    commit(&mut scheduler, &plan, &[31, 33, 40], &[1, 5, -1]);
    let target = slots(&scheduler, 0, &[7, 8]);
    let plan = scheduler.schedule().unwrap();
    assert_eq!(moves(&plan), [[0, source[0], target[0]], [0, source[1], target[1]]]);
    scheduler.commit(plan.id(), &[41]).unwrap();
    assert!(moves(&scheduler.schedule().unwrap()).is_empty());
}

#[test]
fn a_path_that_is_in_place_does_not_move() {
    let mut scheduler = decoding(SchedulerConfig::default());
    let plan = draft(&mut scheduler);
    commit(&mut scheduler, &plan, &[21, 40], &[0, -1]);
    assert!(moves(&scheduler.schedule().unwrap()).is_empty());
}

#[test]
fn only_what_is_out_of_place_moves() {
    let mut scheduler = decoding(SchedulerConfig::default());
    let plan = draft(&mut scheduler);
    let source = slots(&scheduler, 0, &[10, 8]);
    commit(&mut scheduler, &plan, &[21, 23, 40], &[0, 3, -1]);
    assert_eq!(moves(&scheduler.schedule().unwrap()), [[0, source[0], source[1]]]);
}

#[test]
fn rejected_guesses_and_what_is_only_moved_from_give_their_blocks_back_within_the_commit() {
    let mut scheduler = decoding(SchedulerConfig::default());
    let plan = draft(&mut scheduler);
    assert_eq!(scheduler.manager().pool().num_held(), 4);
    commit(&mut scheduler, &plan, &[31, 33, 40], &[1, 5, -1]);
    assert_eq!(scheduler.manager().pool().num_held(), 3);
}

#[test]
fn a_commit_that_is_refused_changes_nothing() {
    let mut scheduler = decoding(SchedulerConfig::default());
    let plan = draft(&mut scheduler);
    let before = format!("{scheduler:?}");
    let mut refused = |rows: &[i32], accepted: &[i32]| {
        let error = scheduler.commit_trees(plan.id(), rows, accepted, rows.len()).unwrap_err();
        let Error::InvalidArgument { argument, .. } = error else { panic!("{error:?}") };
        argument
    };
    assert_eq!(refused(&[31, 33, 40], &[1, 3, -1]), "accepted", "no path");
    assert_eq!(refused(&[33, 40], &[5, -1]), "accepted", "not from the root");
    assert_eq!(refused(&[31, 33, 40], &[1, 6, -1]), "accepted", "no guess");
    assert_eq!(refused(&[31, 33, 40], &[1, -1, -1]), "accepted", "shorter than the tokens");
    assert_eq!(refused(&[31, 40], &[1, 5]), "accepted", "longer than the tokens");
    assert_eq!(refused(&[31, 40], &[1]), "accepted", "another shape");
    assert_eq!(refused(&[21, 33, 40], &[1, 5, -1]), "tokens", "another guess's token");
    assert_eq!(refused(&[-1, -1], &[-1, -1]), "tokens", "no token");
    let refused = scheduler.commit_drafts(plan.id(), &[21, 40], 2);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "accepted", .. })), "{refused:?}");
    assert_eq!(format!("{scheduler:?}"), before);
}

#[test]
fn chains_are_committed_with_or_without_their_path() {
    let mut scheduler = decoding(SchedulerConfig::default());
    scheduler.set_draft_tokens(&[0], &[0, 2], &[21, 22]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(commit(&mut scheduler, &plan, &[21, 40, -1], &[0, -1, -1]).num_new_tokens, [2]);
}

#[test]
fn parents_that_make_no_tree_are_refused() {
    let mut scheduler = decoding(SchedulerConfig::default());
    for parents in [&[0, -1][..], &[-1, 1], &[-2, 0], &[-1], &[-1, 0, 0]] {
        let refused = scheduler.set_draft_trees(&[0], &[0, 2], &[1, 2], parents);
        assert!(matches!(refused, Err(Error::InvalidArgument { argument: "parents", .. })), "{refused:?}");
    }
}

#[test]
fn tokens_behind_a_stop_token_on_the_path_are_dropped_and_counted() {
    let mut scheduler = scheduler(32, SchedulerConfig::default());
    let request = NewRequest { stop_token_ids: vec![31], ..NewRequest::new("r", PROMPT.to_vec(), 12) };
    scheduler.add_request(request).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20]).unwrap();
    let plan = draft(&mut scheduler);
    let result = commit(&mut scheduler, &plan, &[31, 33, 40], &[1, 5, -1]);
    assert_eq!((&result.num_new_tokens[..], result.num_ignored, result.finish_reason[0]), (&[1][..], 2, 1));
    assert!(moves(&scheduler.schedule().unwrap()).is_empty());
}

// --- the prefix cache

/// Cached tokens that another request of the whole sequence so far finds, from the last plan's queries.
fn num_hits(scheduler: &mut Scheduler) -> i32 {
    let tokens = [&PROMPT[..], &[20, 31, 33, 40, 41, 42]].concat();
    scheduler.add_request(NewRequest::new("other", tokens, 1)).unwrap();
    let plan = scheduler.schedule().unwrap();
    let last = plan.sizes().num_sequences as usize - 1;
    let starts = plan.i32s(Field::QueryStartLoc);
    12 - (starts[last + 1] - starts[last])
}

#[test]
fn a_block_that_awaits_moves_is_a_hit_for_later_requests_of_the_plan_that_moves() {
    let mut scheduler = accepted(SchedulerConfig::default());
    assert_eq!(num_hits(&mut scheduler), 8);
}

#[test]
fn a_block_that_awaits_moves_is_published_when_the_plan_that_moves_commits() {
    let mut scheduler = accepted(SchedulerConfig::default());
    let plan = scheduler.schedule().unwrap();
    scheduler.abort(Handle::new(0), None).unwrap();
    scheduler.commit(plan.id(), &[41]).unwrap();
    assert_eq!(num_hits(&mut scheduler), 8);
}

#[test]
fn a_block_whose_moves_were_rolled_back_is_no_hit() {
    let mut scheduler = accepted(SchedulerConfig::default());
    let plan = scheduler.schedule().unwrap();
    scheduler.abort(Handle::new(0), None).unwrap();
    scheduler.rollback(plan.id()).unwrap();
    scheduler.check_integrity().unwrap();
    assert_eq!(num_hits(&mut scheduler), 4);
}

// --- what may happen to moves

#[test]
fn a_rollback_of_the_plan_that_moves_has_the_path_computed_again() {
    let mut scheduler = accepted(SchedulerConfig::default());
    let plan = scheduler.schedule().unwrap();
    scheduler.rollback(plan.id()).unwrap();
    scheduler.check_integrity().unwrap();
    let plan = scheduler.schedule().unwrap();
    assert!(moves(&plan).is_empty());
    assert_eq!(plan.i32s(Field::TokenIds), [31, 33, 40]);
    assert_eq!(plan.i32s(Field::Positions), [7, 8, 9]);
    assert_eq!(scheduler.commit(plan.id(), &[41]).unwrap().num_new_tokens, [1]);
}

#[test]
fn moves_are_in_the_next_plan_even_if_the_sequence_is_not() {
    let limits = SchedulerConfig { max_num_batched_tokens: 7, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(32, limits);
    for (id, len) in [("old", 20), ("r", 6)] {
        scheduler.add_request(NewRequest::new(id, vec![1; len], 12)).unwrap();
    }
    let mut tokens = vec![];
    while tokens.len() < 2 {
        let plan = scheduler.schedule().unwrap();
        tokens = vec![20; plan.sizes().num_samples as usize];
        scheduler.commit(plan.id(), &tokens).unwrap();
    }
    scheduler.set_draft_trees(&[1], &[0, 2], &[21, 31], &[-1, -1]).unwrap();
    let plan = scheduler.schedule().unwrap();
    let rows = [[21, -1], [31, 40]].concat();
    scheduler.commit_trees(plan.id(), &rows, &[-1, -1, 1, -1], 2).unwrap();
    // The older request takes the whole budget.
    scheduler.set_draft_tokens(&[0], &[0, 6], &[1, 2, 3, 4, 5, 6]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!((plan.i64s(Field::Handles), moves(&plan).len()), (&[0][..], 1));
    scheduler.rollback(plan.id()).unwrap();
    scheduler.check_integrity().unwrap();
    scheduler.set_draft_tokens(&[0], &[0, 0], &[]).unwrap();
    assert_eq!(scheduler.schedule().unwrap().i32s(Field::QueryStartLoc), [0, 1, 3]);
}

#[test]
fn an_abort_drops_the_moves_that_no_plan_has() {
    let mut scheduler = accepted(SchedulerConfig::default());
    scheduler.abort(Handle::new(0), None).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.check_integrity().unwrap();
    assert!(moves(&plan).is_empty());
    assert_eq!(scheduler.manager().pool().num_held(), 0);
}

#[test]
fn a_preemption_drops_the_moves_frees_the_blocks_at_once_and_has_the_path_computed_again() {
    let mut scheduler = scheduler(5, SchedulerConfig::default());
    scheduler.add_request(NewRequest::new("old", vec![1; 7], 3)).unwrap();
    scheduler.add_request(NewRequest::new("r", PROMPT.to_vec(), 5)).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20, 20]).unwrap();
    scheduler.set_draft_trees(&[1], &[0, 3], &[21, 31, 32], &[-1, -1, 1]).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit_trees(plan.id(), &[21, -1, -1, 31, 32, 40], &[-1, -1, -1, 1, 2, -1], 3).unwrap();
    // All blocks are held, and the older request needs another one.
    let plan = scheduler.schedule().unwrap();
    assert_eq!((plan.i64s(Field::Handles), scheduler.num_preemptions()), (&[0][..], 1));
    assert!(moves(&plan).is_empty());
    scheduler.check_integrity().unwrap();
    scheduler.commit(plan.id(), &[22]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert!(plan.i32s(Field::TokenIds).ends_with(&[20, 31, 32, 40]), "{:?}", plan.i32s(Field::TokenIds));
}

#[test]
fn moves_of_a_plan_that_commits_after_its_sequence_was_preempted_fill_blocks_all_the_same() {
    let limits = SchedulerConfig { max_plans_in_flight: 2, ..SchedulerConfig::default() };
    let mut scheduler = accepted(limits);
    let moving = scheduler.schedule().unwrap();
    assert_eq!(moves(&moving).len(), 2);
    scheduler.finish(Handle::new(0), 0).unwrap();
    let behind = scheduler.schedule().unwrap();
    scheduler.commit(moving.id(), &[41]).unwrap();
    scheduler.commit(behind.id(), &[]).unwrap();
    scheduler.check_integrity().unwrap();
    assert_eq!(num_hits(&mut scheduler), 8);
}

#[test]
fn beam_went_on_while_another_computed_again_what_a_rollback_had_taken() {
    let mut scheduler = scheduler(32, SchedulerConfig::default());
    let request = NewRequest { n: 2, needs_commit: true, ..NewRequest::new("beams", PROMPT.to_vec(), 12) };
    scheduler.add_request(request).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20, 30]).unwrap();
    scheduler.set_draft_trees(&[0], &[0, 2], &[21, 31], &[-1, -1]).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.i32s(Field::Sequence), [1, 0]);
    scheduler.commit_trees(plan.id(), &[32, -1, 31, 40], &[-1, -1, 1, -1], 2).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.rollback(plan.id()).unwrap();
    // The first beam lacks the guess that was to be moved.
    let plan = scheduler.schedule().unwrap();
    assert_eq!((plan.i32s(Field::Sequence), plan.i32s(Field::TokenIds)), (&[0][..], &[31][..]));
    scheduler.commit(plan.id(), &[]).unwrap();
    assert_eq!(scheduler.schedule().unwrap().i32s(Field::TokenIds), [40, 32]);
}

#[test]
fn a_session_that_ends_before_the_moves_keeps_what_lies_in_whole_blocks_before_them() {
    let mut scheduler = scheduler(32, SchedulerConfig::default());
    let request = NewRequest { session: true, ..NewRequest::new("r", PROMPT.to_vec(), 12) };
    let handle = scheduler.add_request(request).unwrap();
    let plan = scheduler.schedule().unwrap();
    scheduler.commit(plan.id(), &[20]).unwrap();
    let plan = draft(&mut scheduler);
    commit(&mut scheduler, &plan, &[31, 33, 40], &[1, 5, -1]);
    scheduler.finish(handle, 0).unwrap();
    scheduler.check_integrity().unwrap();
    scheduler.append_tokens(handle, 0, &[50], None).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert!(moves(&plan).is_empty());
    assert_eq!(plan.i32s(Field::TokenIds), [14, 15, 20, 31, 33, 40, 50]);
}

#[test]
fn moves_of_a_held_request_are_in_the_next_plan() {
    let mut scheduler = accepted(SchedulerConfig::default());
    scheduler.hold(Handle::new(0)).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!((plan.sizes().num_sequences, moves(&plan).len()), (0, 2));
    scheduler.commit(plan.id(), &[]).unwrap();
    scheduler.release(Handle::new(0)).unwrap();
    scheduler.check_integrity().unwrap();
    assert_eq!(scheduler.schedule().unwrap().i32s(Field::TokenIds), [40]);
}

#[test]
fn a_fork_shares_the_whole_blocks_before_the_moves_and_hits_those_that_they_fill() {
    let mut scheduler = accepted(SchedulerConfig::default());
    scheduler.fork(Handle::new(0), 0, NewRequest::new("fork", vec![50], 3)).unwrap();
    assert_eq!(slots(&scheduler, 0, &[3]), slots(&scheduler, 1, &[3]));
    let plan = scheduler.schedule().unwrap();
    scheduler.check_integrity().unwrap();
    assert_eq!(moves(&plan).len(), 2);
    assert_eq!(plan.i32s(Field::TokenIds), [40, 33, 40, 50]);
    assert_eq!(slots(&scheduler, 0, &[7]), slots(&scheduler, 1, &[7]));
    scheduler.rollback(plan.id()).unwrap();
    scheduler.check_integrity().unwrap();
    assert_eq!(scheduler.schedule().unwrap().i32s(Field::TokenIds), [31, 33, 40, 33, 40, 50]);
}

#[test]
fn a_fork_while_a_plan_in_flight_moves_is_refused() {
    let mut scheduler = accepted(SchedulerConfig::default());
    scheduler.hold(Handle::new(0)).unwrap();
    let plan = scheduler.schedule().unwrap();
    let refused = scheduler.fork(Handle::new(0), 0, NewRequest::new("fork", vec![50], 3));
    assert!(matches!(refused, Err(Error::RequestInFlight(_))), "{refused:?}");
    scheduler.commit(plan.id(), &[]).unwrap();
    scheduler.fork(Handle::new(0), 0, NewRequest::new("fork", vec![50], 3)).unwrap();
    scheduler.check_integrity().unwrap();
}
