//! Random commands to the manager, right and wrong ones, against the naive model; every law after each of them.
//!
//! The worlds are tiny (two tokens, blocks of 1 to 3, at most 8 of them) so that sharing, copies, evictions and fences
//! are the rule and not the exception.

mod command;
mod growth;
mod mistakes;
#[path = "../model/mod.rs"]
mod model;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use command::Command;
use model::corpus;
use model::events::Events;
use model::random::Random;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use world::{NUM_WORLDS, World};

/// Runs worlds of 250 commands each; what fails names the seed, the world and the command.
fn run_worlds(seed: u64, num_worlds: usize) -> Events {
    let mut total = Events::default();
    for number in 0..num_worlds {
        let mut random = Random::new(seed.wrapping_add(number as u64));
        let mut world = World::numbered(random.below(NUM_WORLDS));
        for step in 0..250 {
            let command = Command::decode(random.bytes());
            let outcome = catch_unwind(AssertUnwindSafe(|| world.run(command)));
            assert!(outcome.is_ok(), "seed {seed}, world {number}, step {step}: {command:?}");
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| world.drain(number % 2 > 0)));
        assert!(outcome.is_ok(), "seed {seed}, world {number}: at the end");
        total.add(&world.model.events);
    }
    total
}

const WORTH_MEETING: [&str; 18] = [
    "blocks that left a window",
    "hits before a window",
    "cuts before a window",
    "hit blocks",
    "hits in flight",
    "hits on fenced",
    "copies",
    "copies for the cache",
    "refusals",
    "evictions",
    "undone growths",
    "undone after running",
    "fenced blocks",
    "refused calls",
    "accepted guesses",
    "untold tokens",
    "events",
    "lost events",
];

fn check_volume(seed: u64) {
    run_worlds(seed, 2000).assert_met(&WORTH_MEETING, 100);
}

#[test]
fn kv_cache_manager_agrees_with_the_model_over_500_000_commands() {
    check_volume(0x5eed_0000_0000);
}

#[test]
fn kv_cache_manager_agrees_with_the_model_over_another_500_000_commands() {
    check_volume(0x5eed_0001_0000);
}

#[test]
fn kv_cache_manager_agrees_with_the_model_on_what_the_fuzzer_kept() {
    corpus::replay("kv_cache_manager", World::replay);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn kv_cache_manager_agrees_with_the_model(
        world in 0..NUM_WORLDS,
        commands in prop::collection::vec(any::<[u8; 4]>().prop_map(Command::decode), 0..120),
        rolls_back: bool,
    ) {
        let mut world = World::numbered(world);
        commands.into_iter().for_each(|command| world.run(command));
        world.drain(rolls_back);
    }
}
