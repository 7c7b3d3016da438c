//! Pins, sessions, forks and the longest prefix first, where there are several cache groups, or windows.

#[path = "scene/groups.rs"]
mod groups;
mod scene;
#[path = "scene/steps.rs"]
mod steps;

use std::sync::Arc;

use groups::config;
use pagedkv_core::step_plan::Field;
use pagedkv_core::{
    CacheConfig, Handle, Identity, KVCacheManager, NULL_BLOCK, NewRequest, PinId, Policy, Reason, Scheduler,
    SchedulerConfig,
};
use scene::{cache, compute, create, num_hit_tokens};
use steps::{admitted, assert_empty, behind, check, commit, counting_request, handles, plan, run_to_the_end, step};

/// Every token, and windows of three, in blocks of two.
const FULL_AND_WINDOW: [(u32, Option<u32>); 2] = [(1, None), (1, Some(3))];

fn tokens(len: i32) -> Vec<i32> {
    (0..len).collect()
}

// --- pins

fn pinning(usable_blocks: u32, pin_quota_blocks: u32, groups: &[(u32, Option<u32>)]) -> KVCacheManager {
    let config = CacheConfig { pin_quota_blocks, ..config(2, usable_blocks, groups) };
    KVCacheManager::new(&config).expect("a valid configuration")
}

fn pin(manager: &mut KVCacheManager, tokens: &[i32]) -> Option<(PinId, u32)> {
    manager.pin(tokens.into(), Arc::default()).expect("a valid call")
}

/// Tokens of another sequence that would be found.
fn num_found(manager: &mut KVCacheManager, tokens: &[i32]) -> u32 {
    let sequence = create(manager, tokens);
    let found = num_hit_tokens(manager, sequence);
    manager.free(sequence).expect("a live sequence");
    found
}

#[test]
fn pin_holds_of_each_group_what_a_hit_of_its_whole_prefix_needs() {
    let mut manager = pinning(15, 8, &FULL_AND_WINDOW);
    cache(&mut manager, &tokens(9));
    let (_, num_tokens) = pin(&mut manager, &tokens(8)).expect("there is room in the quota");
    assert_eq!((num_tokens, manager.num_pinned()), (8, (1, 4 + 1)), "the last of four blocks is what the window sees");
    // This takes all ten others.
    cache(&mut manager, &[100; 10]);
    assert_eq!(num_found(&mut manager, &tokens(9)), 8);
    assert_eq!(num_found(&mut manager, &tokens(7)), 0, "no window ends there any more");
    manager.check_integrity().unwrap();
}

#[test]
fn pin_keeps_whole_blocks_of_the_largest_group() {
    let mut manager = pinning(16, 8, &[(1, None), (2, None)]);
    cache(&mut manager, &tokens(7));
    let (_, num_tokens) = pin(&mut manager, &tokens(7)).expect("there is room in the quota");
    assert_eq!((num_tokens, manager.num_pinned()), (4, (1, 2 + 1)));
}

#[test]
fn quota_of_pins_counts_the_blocks_of_all_groups() {
    let mut manager = pinning(16, 4, &FULL_AND_WINDOW);
    cache(&mut manager, &tokens(9));
    let num_held = manager.pool().num_held();
    assert_eq!(pin(&mut manager, &tokens(8)), None, "five blocks");
    assert_eq!((manager.num_pinned(), manager.pool().num_held()), ((0, 0), num_held));
    let (short, num_tokens) = pin(&mut manager, &tokens(6)).expect("four blocks");
    assert_eq!((num_tokens, manager.num_pinned()), (6, (1, 3 + 1)));
    manager.unpin(short).unwrap();
    assert_eq!((manager.num_pinned(), manager.pool().num_held()), ((0, 0), 0));
    assert_eq!(num_found(&mut manager, &tokens(9)), 8, "what was pinned is cached as before");
    manager.check_integrity().unwrap();
}

#[test]
fn request_finds_a_pinned_prefix_in_every_group_after_others_used_the_pool() {
    let config = CacheConfig { pin_quota_blocks: 8, ..config(2, 18, &FULL_AND_WINDOW) };
    let mut scheduler = Scheduler::new(&config, &SchedulerConfig::default()).expect("a valid configuration");
    scheduler.add_request(counting_request("first", 0, 9, 1)).unwrap();
    step(&mut scheduler);
    scheduler.pin(tokens(8).into(), Identity::default()).unwrap().expect("there is room in the quota");
    for (id, first) in [("other", 100), ("another", 200)] {
        scheduler.add_request(counting_request(id, first, 9, 1)).unwrap();
        step(&mut scheduler);
    }
    scheduler.add_request(counting_request("again", 0, 10, 1)).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!(plan.i32s(Field::Positions), [8, 9]);
}

// --- sessions

fn scheduler(usable_blocks: u32, groups: &[(u32, Option<u32>)], limits: &SchedulerConfig) -> Scheduler {
    Scheduler::new(&config(2, usable_blocks, groups), limits).expect("a valid configuration")
}

fn with_windows(usable_blocks: u32) -> Scheduler {
    scheduler(usable_blocks, &FULL_AND_WINDOW, &SchedulerConfig::default())
}

/// Which columns of a sample's table in a group hold a block.
fn held(scheduler: &Scheduler, handle: Handle, group: usize) -> Vec<usize> {
    let table = scheduler.group_table(handle, 0, group).expect("a live request").unwrap_or_default();
    (0..table.len()).filter(|&column| table[column] != NULL_BLOCK).collect()
}

/// A session of seven tokens and three sampled ones has ended: nine are computed.
fn resting(usable_blocks: u32) -> (Scheduler, Handle) {
    let mut scheduler = with_windows(usable_blocks);
    let handle = scheduler.add_request(NewRequest { session: true, ..counting_request("s", 0, 7, 3) }).unwrap();
    run_to_the_end(&mut scheduler, 9);
    (scheduler, handle)
}

#[test]
fn session_at_rest_keeps_of_a_window_what_its_next_token_sees() {
    let (scheduler, handle) = resting(16);
    assert_eq!(held(&scheduler, handle, 0), [0, 1, 2, 3, 4]);
    assert_eq!(held(&scheduler, handle, 1), [3, 4], "the query at 9 sees 7 and 8");
    assert_eq!((scheduler.num_resting(), scheduler.manager().pool().num_held()), ((1, 7), 7));
}

#[test]
fn next_turn_of_a_session_goes_on_in_every_group() {
    let (mut scheduler, handle) = resting(16);
    scheduler.append_tokens(handle, 0, &[50, 51], Some(2)).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((plan.i32s(Field::Positions), plan.i32s(Field::Copies)), (&[9, 10, 11][..], &[][..]));
    assert_eq!(held(&scheduler, handle, 0), [0, 1, 2, 3, 4, 5]);
    assert_eq!(held(&scheduler, handle, 1), [5], "the query at 12 sees 10 and 11");
}

#[test]
fn rolled_back_turn_keeps_what_it_had_of_every_group() {
    let (mut scheduler, handle) = resting(16);
    scheduler.append_tokens(handle, 0, &[50, 51], Some(2)).unwrap();
    let undone = plan(&mut scheduler);
    scheduler.rollback(undone.id()).unwrap();
    check(&scheduler);
    assert_eq!((held(&scheduler, handle, 0).len(), held(&scheduler, handle, 1)), (5, vec![3, 4]));
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [9, 10, 11]);
}

#[test]
fn session_that_ends_ahead_of_a_plan_in_flight_keeps_the_window_of_what_is_committed() {
    let limits = SchedulerConfig { max_plans_in_flight: 2, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(16, &FULL_AND_WINDOW, &limits);
    let handle = scheduler.add_request(NewRequest { session: true, ..counting_request("s", 0, 7, 9) }).unwrap();
    let [prefill, decode] = [(); 2].map(|()| plan(&mut scheduler));
    commit(&mut scheduler, &prefill);
    scheduler.finish(handle, 0).unwrap();
    commit(&mut scheduler, &decode);
    assert_eq!((held(&scheduler, handle, 0), held(&scheduler, handle, 1)), (vec![0, 1, 2, 3], vec![2, 3]));
    scheduler.append_tokens(handle, 0, &[], Some(2)).unwrap();
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [7]);
}

#[test]
fn turn_that_lost_its_blocks_finds_what_every_group_still_has() {
    let (mut scheduler, session) = resting(16);
    scheduler.append_tokens(session, 0, &[50], Some(1)).unwrap();
    scheduler.hold(session).unwrap();
    // Nine blocks are left; one of these takes five of each group, and the held turn gives way.
    let taker = scheduler.add_request(counting_request("taker", 100, 10, 1)).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((handles(&plan), held(&scheduler, session, 0).len()), (vec![taker.get()], 0));
    scheduler.release(session).unwrap();
    let Reason::Ready { num_tokens } = scheduler.explain(session).unwrap().reason else {
        panic!("nothing is in its way")
    };
    let (plan, _) = step(&mut scheduler);
    assert_eq!((handles(&plan), plan.sizes().num_tokens), (vec![session.get()], num_tokens));
    assert!(num_tokens < 11, "some of it is still cached");
}

#[test]
fn freed_session_gives_back_the_blocks_of_every_group() {
    let (mut scheduler, handle) = resting(16);
    scheduler.free(handle, None).unwrap();
    assert_empty(&scheduler);
}

// --- forks

#[test]
fn fork_shares_the_blocks_of_every_group_and_takes_none() {
    let mut scheduler = with_windows(16);
    let parent = scheduler.add_request(counting_request("parent", 0, 7, 6)).unwrap();
    step(&mut scheduler);
    let num_held = scheduler.manager().pool().num_held();
    let fork = scheduler.fork(parent, 0, behind("fork", &[], 2)).unwrap();
    for group in 0..2 {
        let [one, other] = [parent, fork].map(|handle| scheduler.group_table(handle, 0, group).unwrap().unwrap());
        assert_eq!(one, other, "group {group}");
    }
    assert_eq!(scheduler.manager().pool().num_held(), num_held);
    check(&scheduler);
}

#[test]
fn fork_copies_the_last_block_of_each_group_in_which_it_is_not_full() {
    let limits = SchedulerConfig::default();
    for (groups, prompt_len, num_copies) in [
        (&[(1, None), (2, Some(8))][..], 6, 1),
        (&[(1, None), (2, Some(8))], 7, 2),
        (&[(1, None), (2, Some(8))], 8, 0),
        (&[(1, Some(3)), (1, None), (2, None)], 7, 3),
    ] {
        let mut scheduler = scheduler(32, groups, &limits);
        let parent = scheduler.add_request(counting_request("parent", 0, prompt_len, 6)).unwrap();
        step(&mut scheduler);
        let fork = scheduler.fork(parent, 0, behind("fork", &[90, 91], 2)).unwrap();
        let (plan, _) = step(&mut scheduler);
        assert_eq!(handles(&plan), [parent.get(), fork.get()]);
        assert_eq!(plan.i32s(Field::Copies).len() / 2, num_copies, "{prompt_len} tokens in {groups:?}");
        run_to_the_end(&mut scheduler, 20);
        assert_empty(&scheduler);
    }
}

#[test]
fn fork_keeps_its_window_when_that_of_its_parent_goes_on() {
    let mut scheduler = with_windows(32);
    let parent = scheduler.add_request(counting_request("parent", 0, 7, 12)).unwrap();
    step(&mut scheduler);
    let fork = scheduler.fork(parent, 0, behind("fork", &[], 3)).unwrap();
    scheduler.hold(fork).unwrap();
    (0..6).for_each(|_| drop(step(&mut scheduler)));
    assert_eq!((held(&scheduler, parent, 1), held(&scheduler, fork, 1)), (vec![5, 6], vec![2, 3]));
    scheduler.abort(parent, None).unwrap();
    scheduler.release(fork).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!(
        (handles(&plan), plan.i32s(Field::Positions)),
        (vec![fork.get()], &[7][..]),
        "nothing is computed again"
    );
    assert_eq!(held(&scheduler, fork, 1), [3], "the query at 8 sees 6 and 7");
    run_to_the_end(&mut scheduler, 9);
    assert_empty(&scheduler);
}

#[test]
fn fork_knows_what_had_left_the_window_of_its_parent() {
    let mut manager = pinning(16, 1, &FULL_AND_WINDOW);
    let parent = create(&mut manager, &tokens(13));
    compute(&mut manager, parent, 12);
    let fork = manager.fork(parent).unwrap();
    manager.truncate(fork, 11).unwrap();
    assert_eq!(manager.num_computed_tokens(fork), Ok(0), "position 9 has left the window");
    assert_eq!(manager.num_computed_tokens(parent), Ok(12));
    manager.check_integrity().unwrap();
}

#[test]
fn fork_of_a_session_at_rest_goes_on_in_every_group_and_leaves_it_as_it_is() {
    let (mut scheduler, session) = resting(24);
    scheduler.fork(session, 0, behind("fork", &[60], 2)).unwrap();
    let (plan, _) = step(&mut scheduler);
    assert_eq!((plan.i32s(Field::Positions), plan.i32s(Field::Copies).len() / 2), (&[9, 10][..], 2));
    run_to_the_end(&mut scheduler, 9);
    assert_eq!((held(&scheduler, session, 0).len(), held(&scheduler, session, 1)), (5, vec![3, 4]));
    scheduler.append_tokens(session, 0, &[61], Some(1)).unwrap();
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [9, 10]);
}

#[test]
fn prefix_that_a_fork_computed_is_found_in_every_group() {
    let mut scheduler = with_windows(32);
    let parent = scheduler.add_request(counting_request("parent", 0, 6, 2)).unwrap();
    step(&mut scheduler);
    scheduler.hold(parent).unwrap();
    scheduler.fork(parent, 0, behind("fork", &[90, 91, 92], 1)).unwrap();
    step(&mut scheduler);
    // The parent's six tokens, the sampled one, and the three behind it.
    let same = [&tokens(6)[..], &[7, 90, 91, 92]].concat();
    scheduler.add_request(NewRequest::new("same", same, 1)).unwrap();
    assert_eq!(step(&mut scheduler).0.i32s(Field::Positions), [8, 9]);
}

#[test]
fn sample_that_knew_more_than_the_prompt_when_it_parted_kept_what_had_left_its_window() {
    let mut scheduler = with_windows(32);
    let session =
        scheduler.add_request(NewRequest { session: true, n: 2, ..counting_request("session", 0, 4, 2) }).unwrap();
    let plan = scheduler.schedule().unwrap();
    (0..2).for_each(|sample| scheduler.finish(session, sample).unwrap());
    commit(&mut scheduler, &plan);
    scheduler.append_tokens(session, 1, &[8, 9], Some(1)).unwrap();
    scheduler.append_tokens(session, 0, &[], Some(2)).unwrap();
    step(&mut scheduler);
    let table = scheduler.group_table(session, 1, 1).unwrap().expect("it has parted");
    assert_eq!(table.iter().map(|&block| block == NULL_BLOCK).collect::<Vec<_>>(), [true, false]);
}

// --- longest prefix first

/// Who gets the one seat first of `ids`, in the order of their arrival: "long" shares six tokens with what is cached,
/// "short" four with something else. The window blocks that a hit of the six needs are reused before that where `is_evicted`.
fn first_by_longest_prefix(ids: [&str; 2], is_evicted: bool) -> Vec<String> {
    let limits = SchedulerConfig { policy: Policy::LongestPrefixMatch, max_num_seqs: 1, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(20, &FULL_AND_WINDOW, &limits);
    scheduler.add_request(counting_request("cached first", 0, 9, 1)).unwrap();
    step(&mut scheduler);
    scheduler.add_request(counting_request("cached then", 100, 5, 1)).unwrap();
    step(&mut scheduler);
    if is_evicted {
        scheduler.add_request(counting_request("evicts", 200, 12, 1)).unwrap();
        step(&mut scheduler);
    }
    let running = scheduler.add_request(counting_request("runs", 300, 1, 2)).unwrap();
    step(&mut scheduler);
    for id in ids {
        let (shared, num_shared) = if id == "long" { (0, 6) } else { (100, 4) };
        let prompt = (shared..shared + num_shared).chain([900, 901]).collect();
        scheduler.add_request(NewRequest::new(id, prompt, 1)).unwrap();
    }
    scheduler.abort(running, None).unwrap();
    admitted(&step(&mut scheduler).0)
}

#[test]
fn longest_prefix_is_the_longest_on_which_all_groups_agree() {
    assert_eq!(first_by_longest_prefix(["short", "long"], false), ["long"]);
    assert_eq!(first_by_longest_prefix(["long", "short"], true), ["short"]);
}

#[test]
fn next_turn_of_a_session_comes_before_shorter_prefixes_in_every_group() {
    let limits = SchedulerConfig { policy: Policy::LongestPrefixMatch, max_num_seqs: 1, ..SchedulerConfig::default() };
    let mut scheduler = scheduler(32, &FULL_AND_WINDOW, &limits);
    let session = scheduler.add_request(NewRequest { session: true, ..counting_request("s", 0, 7, 3) }).unwrap();
    run_to_the_end(&mut scheduler, 9);
    let other = scheduler.add_request(counting_request("other", 0, 7, 1)).unwrap();
    scheduler.append_tokens(session, 0, &[50], Some(1)).unwrap();
    assert_eq!(handles(&step(&mut scheduler).0), [session.get()], "nine tokens before six");
    let (plan, _) = step(&mut scheduler);
    assert_eq!((handles(&plan), plan.i32s(Field::Positions)), (vec![other.get()], &[6][..]));
}
