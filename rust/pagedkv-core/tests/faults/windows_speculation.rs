//! Guesses that were wrong, and lengths at their limits.

use pagedkv_core::step_plan::Field;
use pagedkv_core::{CacheConfig, GroupSpec, Handle, NULL_BLOCK, NewRequest, Scheduler, SchedulerConfig, StepPlan};

use crate::steps::{
    BLOCK_SIZE, SAMPLED, add, assert_empty, check, commit, handles, num_tokens, plan, preempted, run_to_the_end,
    scheduler, step,
};

fn speculating(usable_blocks: u32) -> Scheduler {
    scheduler(usable_blocks, &SchedulerConfig { lookahead: 8, ..SchedulerConfig::default() })
}

/// A request that has its first token, and its row.
fn decoding(scheduler: &mut Scheduler, prompt_len: usize, max_tokens: u32) -> i32 {
    add(scheduler, "drafts", 1, prompt_len, max_tokens);
    let (first, _) = step(scheduler);
    first.i32s(Field::Rows)[0]
}

fn draft(scheduler: &mut Scheduler, row: i32, ids: &[i32]) {
    scheduler.set_draft_tokens(&[row], &[0, ids.len() as i32], ids).expect("an idle sequence");
}

#[test]
fn fault_43_both_ends_of_a_plan_agree_on_the_number_of_blocks() {
    for prompt_len in 14..19 {
        let cache = CacheConfig::new(64);
        let mut scheduler = Scheduler::new(&cache, &SchedulerConfig::default()).unwrap();
        add(&mut scheduler, "r", 1, prompt_len, 4);
        let plan = plan(&mut scheduler);
        let received = StepPlan::from_buffer(plan.buffer()).unwrap();
        let columns = |plan: &StepPlan| plan.i32s(Field::TableUpdates).len() / 4;
        assert_eq!((columns(&plan), columns(&received)), (prompt_len.div_ceil(16), prompt_len.div_ceil(16)));
        let mut indptr = [0; 2];
        let mut indices = vec![0; 8];
        let sent = scheduler.write_csr(plan.id(), 0, &mut indptr, &mut indices, &mut [0]).unwrap();
        assert_eq!(sent, prompt_len.div_ceil(16), "{prompt_len} tokens");
    }
}

#[test]
fn fault_44_draft_tokens_that_were_rejected_are_never_found() {
    let mut scheduler = speculating(16);
    let row = decoding(&mut scheduler, 4, 12);
    draft(&mut scheduler, row, &[50, 51, 52, 53]);
    let verifies = plan(&mut scheduler);
    // The block of the fifth to eighth token is full of guesses, of which the first alone was right.
    scheduler.commit_drafts(verifies.id(), &[50, SAMPLED], 2).unwrap();
    check(&scheduler);
    let guessed: Vec<i32> = [1, 1, 1, 1, SAMPLED, 50, 51, 52, 53].to_vec();
    scheduler.add_request(NewRequest::new("asks", guessed, 1)).unwrap();
    let (plan, _) = step(&mut scheduler);
    let asks = handles(&plan).iter().position(|&handle| handle == 1).expect("it is admitted");
    let starts = plan.i32s(Field::QueryStartLoc);
    assert_eq!(starts[asks + 1] - starts[asks], 5, "it finds the prompt's block and no more");
}

#[test]
fn fault_44_draft_tokens_are_not_found_while_they_are_checked() {
    let limits = SchedulerConfig { lookahead: 8, max_plans_in_flight: 2, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(16, &limits);
    let row = decoding(&mut scheduler, 4, 12);
    draft(&mut scheduler, row, &[50, 51, 52, 53]);
    let _verifies = plan(&mut scheduler);
    let guessed: Vec<i32> = [1, 1, 1, 1, SAMPLED, 50, 51, 52, 53].to_vec();
    scheduler.add_request(NewRequest::new("asks", guessed, 1)).unwrap();
    assert_eq!(num_tokens(&plan(&mut scheduler)), 5);
}

#[test]
fn fault_45_draft_tokens_do_not_survive_a_preemption() {
    let limits = SchedulerConfig { lookahead: 2, max_num_batched_tokens: 4, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(3, &limits);
    add(&mut scheduler, "old", 1, 7, 3);
    let young = add(&mut scheduler, "young", 2, 4, 3);
    let first = (0..3).map(|_| step(&mut scheduler).0).last().expect("three steps");
    let row = first.i32s(Field::Rows)[handles(&first).iter().position(|&handle| handle == young.get()).unwrap()];
    draft(&mut scheduler, row, &[50]);
    let (plan, _) = step(&mut scheduler);
    assert_eq!(preempted(&plan), ["young"], "the scene is another");
    // It comes back in two chunks, and has but its last token to compute when the second comes.
    let plans = run_to_the_end(&mut scheduler, 12);
    assert!(plans.iter().any(|plan| handles(plan) == [young.get()] && plan.i32s(Field::Positions) == [4]));
    assert!(plans.iter().all(|plan| !plan.i32s(Field::TokenIds).contains(&50)));
}

#[test]
fn fault_46_a_sequence_at_its_longest_computes_nothing_and_ends() {
    let limits = SchedulerConfig { max_model_len: 12, lookahead: 8, ..SchedulerConfig::default() };
    for max_tokens in 1..=8 {
        let mut scheduler = scheduler(16, &limits.clone());
        let row = decoding(&mut scheduler, 4, max_tokens);
        let mut num_outputs = 1;
        while scheduler.num_unfinished_requests() > 0 {
            draft(&mut scheduler, row, &[50; 8]);
            let plan = plan(&mut scheduler);
            let most = max_tokens - num_outputs;
            assert_eq!(num_tokens(&plan), most.min(1 + 8), "no more than can still be accepted");
            let rows = vec![50; most as usize - 1].into_iter().chain([SAMPLED]).collect::<Vec<_>>();
            scheduler.commit_drafts(plan.id(), &rows, rows.len()).unwrap();
            num_outputs += rows.len() as u32;
        }
        assert_eq!(num_outputs, max_tokens);
        step(&mut scheduler);
        assert_empty(&scheduler);
    }
}

#[test]
fn fault_46_a_prompt_of_the_longest_length_samples_its_one_token() {
    let mut scheduler = scheduler(8, &SchedulerConfig { max_model_len: 9, ..SchedulerConfig::default() });
    add(&mut scheduler, "r", 1, 8, 1);
    let first = plan(&mut scheduler);
    assert_eq!(commit(&mut scheduler, &first).finished.len(), 1);
    assert_empty(&scheduler);
}

// --- windows

/// Groups with these windows, of one layer each.
fn with_windows(usable_blocks: u32, windows: &[Option<u32>], max_plans_in_flight: u32) -> Scheduler {
    let group = |(layer, &sliding_window): (usize, &Option<u32>)| GroupSpec {
        layers: vec![layer as u32],
        sliding_window,
        ..GroupSpec::new(1, 1, 8, "float32")
    };
    let groups = windows.iter().enumerate().map(group).collect();
    let cache = CacheConfig { block_size: BLOCK_SIZE, groups, ..CacheConfig::new(usable_blocks + 1) };
    let limits = SchedulerConfig { lookahead: 8, max_plans_in_flight, ..SchedulerConfig::default() };
    Scheduler::new(&cache, &limits).expect("a valid configuration")
}

/// Columns of a sample's table in a group that hold a block.
fn columns(scheduler: &Scheduler, group: usize) -> Vec<usize> {
    let table = scheduler.group_table(Handle::new(0), 0, group).unwrap().expect("it is resident");
    table.iter().enumerate().filter(|(_, block)| **block != NULL_BLOCK).map(|(column, _)| column).collect()
}

#[test]
fn fault_41_blocks_leave_a_window_by_accepted_tokens_alone() {
    let mut scheduler = with_windows(16, &[Some(4)], 1);
    let row = decoding(&mut scheduler, 7, 16);
    assert_eq!(columns(&scheduler, 0), [1], "the next query, at 7, sees 4 to 7");
    draft(&mut scheduler, row, &[50; 8]);
    let verifies = plan(&mut scheduler);
    assert_eq!(
        columns(&scheduler, 0),
        [1, 2, 3],
        "nothing leaves for guesses, though the last of them needs it no more"
    );
    scheduler.commit_drafts(verifies.id(), &[SAMPLED], 1).unwrap();
    check(&scheduler);
    assert_eq!(columns(&scheduler, 0), [1], "the next query, at 8, still sees 5 to 8");
}

#[test]
fn fault_41_blocks_leave_a_window_at_the_commit_and_not_for_plans_that_may_be_undone() {
    let mut scheduler = with_windows(16, &[Some(4)], 3);
    add(&mut scheduler, "r", 1, 7, 16);
    step(&mut scheduler);
    let ahead = [plan(&mut scheduler), plan(&mut scheduler), plan(&mut scheduler)];
    assert_eq!(columns(&scheduler, 0), [1, 2]);
    scheduler.rollback(ahead[0].id()).unwrap();
    check(&scheduler);
    assert_eq!(columns(&scheduler, 0), [1]);
}

#[test]
fn fault_42_the_table_names_the_null_block_where_a_block_left_the_window() {
    let mut scheduler = with_windows(16, &[Some(4)], 1);
    add(&mut scheduler, "r", 1, 6, 16);
    let mut table = vec![-1; 8];
    for _ in 0..8 {
        let (plan, _) = step(&mut scheduler);
        for update in plan.i32s(Field::TableUpdates).chunks_exact(4) {
            table[update[2] as usize] = update[3];
        }
        let len = plan.i32s(Field::SeqLens)[0] as usize;
        let first_seen = len.saturating_sub(4) / 4;
        let before: Vec<i32> = scheduler
            .group_table(Handle::new(0), 0, 0)
            .unwrap()
            .map_or(vec![], |held| held.iter().map(|block| block.get() as i32).collect());
        assert!(table[first_seen..len.div_ceil(4)].iter().all(|&block| block > 0), "{table:?} at {len}");
        let told = table[..first_seen].iter().rev().skip(1).all(|&block| block <= 0);
        assert!(told, "a block that left by an earlier commit is still named: {table:?} at {len}, {before:?}");
    }
}

#[test]
fn fault_47_a_hit_is_what_every_group_can_give() {
    let mut scheduler = with_windows(40, &[None, Some(4)], 1);
    add(&mut scheduler, "first", 1, 25, 1);
    step(&mut scheduler);
    // The window's blocks of the head have left; those of the last tokens are enough for a hit of the whole.
    add(&mut scheduler, "again", 1, 25, 1);
    assert_eq!(num_tokens(&step(&mut scheduler).0), 1);
}

/// A long prompt is cached, then used again up to its first eight tokens, and `num_others` tokens of another prompt reuse
/// blocks: those of a prompt of 17 tokens, of which the first twelve are the same, that are computed then.
fn computed_of_17_after(num_others: usize) -> u32 {
    let mut scheduler = with_windows(40, &[None, Some(4)], 1);
    add(&mut scheduler, "long", 1, 25, 1);
    step(&mut scheduler);
    add(&mut scheduler, "short", 1, 9, 1);
    step(&mut scheduler);
    if num_others > 0 {
        add(&mut scheduler, "other", 2, num_others, 1);
        step(&mut scheduler);
    }
    let mut prompt = vec![1; 12];
    prompt.extend([9; 5]);
    scheduler.add_request(NewRequest::new("parts", prompt, 1)).unwrap();
    num_tokens(&step(&mut scheduler).0)
}

#[test]
fn fault_47_a_hit_ends_where_a_window_misses_and_starts_again_further_left() {
    assert_eq!(computed_of_17_after(0), 17 - 12, "every group has what is seen from twelve");
    // What left the window first goes first, but for what was used again: nothing is left at twelve, and it is at eight.
    assert_eq!(computed_of_17_after(60), 17 - 8);
}
