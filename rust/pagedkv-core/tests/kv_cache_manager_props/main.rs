//! Random commands to the manager, right and wrong ones, against the naive model; every law after each of them.
//!
//! The worlds are tiny (two tokens, blocks of 1 to 3, at most 8 of them) so that sharing, copies, evictions and fences
//! are the rule and not the exception.

mod command;
mod growth;
mod mistakes;
#[path = "../model/mod.rs"]
mod model;
#[path = "../volume/mod.rs"]
mod volume;
mod world;

use command::Command;
use model::corpus;
use model::driven::Driven;
use proptest::prelude::*;
use volume::run_worlds;
use world::{NUM_WORLDS, World};

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
    run_worlds(seed, 2000, |random| World::numbered(random.below(NUM_WORLDS))).assert_met(&WORTH_MEETING, 100);
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
    #![proptest_config(volume::config())]

    #[test]
    fn kv_cache_manager_agrees_with_the_model(
        world in 0..NUM_WORLDS,
        commands in prop::collection::vec(any::<[u8; 4]>().prop_map(Command::from), 0..120),
        rolls_back: bool,
    ) {
        World::numbered(world).live(commands, rolls_back.into());
    }
}
