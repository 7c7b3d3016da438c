//! Random requests, steps, aborts and rollbacks, with up to three plans in flight, against the naive model; every law
//! after each of them, and each plan run on a device that knows only its arrays.

#[path = "../model/mod.rs"]
mod model;
#[path = "../volume/mod.rs"]
mod volume;
mod world;

use model::corpus;
use model::driven::Driven;
use proptest::prelude::*;
use volume::run_worlds;
use world::{Command, World};

const WORTH_MEETING: [&str; 31] = [
    "null entries told",
    "hit tokens before a window",
    "tokens",
    "hit tokens",
    "copies",
    "forks",
    "inputs from the plan before",
    "preemptions",
    "undone plans",
    "undone plans that had run",
    "undone admissions",
    "blocked plans",
    "ignored tokens",
    "finished requests",
    "refused calls",
    "admissions",
    "overtakings",
    "accepted drafts",
    "rejected drafts",
    "trees",
    "moves",
    "branches",
    "dropped beams",
    "sessions at rest",
    "turns",
    "holds",
    "releases",
    "forks of requests",
    "preemptions of waiting requests",
    "plans that wait for sessions",
    "reasons",
];

const WORTH_MEETING_WITH_A_HOST_TIER: [&str; 6] = [
    "swap-outs",
    "swap-ins",
    "returns",
    "blocks taken back",
    "transfers that failed",
    "transfers of requests that had ended",
];

fn check_volume(seed: u64) {
    let events = run_worlds(seed, 2000, |random| World::numbered(random.next()));
    events.assert_met(&WORTH_MEETING, 100);
    events.assert_met(&["undone moves"], 10);
}

#[test]
fn scheduler_agrees_with_the_model_over_500_000_commands() {
    check_volume(0x5eed_0000_0000);
}

#[test]
fn scheduler_agrees_with_the_model_over_another_500_000_commands() {
    check_volume(0x5eed_0001_0000);
}

#[test]
fn scheduler_agrees_with_the_model_on_what_the_fuzzer_kept() {
    corpus::replay("scheduler", World::replay);
}

#[test]
fn scheduler_agrees_with_the_model_over_500_000_commands_under_pressure_with_a_host_tier() {
    let events = run_worlds(0x5eed_0002_0000, 2000, |random| World::swapping(random.next()));
    events.assert_met(&WORTH_MEETING_WITH_A_HOST_TIER, 100);
    events.assert_met(&["transfers of requests that were preempted again"], 5);
}

proptest! {
    #![proptest_config(volume::config())]

    #[test]
    fn scheduler_agrees_with_the_model(
        world: u64,
        commands in prop::collection::vec(any::<[u8; 4]>().prop_map(Command::from), 0..120),
    ) {
        World::numbered(world).live(commands, 0);
    }
}
