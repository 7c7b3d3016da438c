//! Many random worlds, one after another: what fails names the seed, the world and the command, which is all it takes to
//! repeat it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::test_runner::{Config, FileFailurePersistence};

use crate::model::driven::Driven;
use crate::model::events::Events;
use crate::model::random::Random;

const COMMANDS_PER_WORLD: usize = 250;

/// Runs so many worlds and answers what they met.
pub(crate) fn run_worlds<W: Driven>(seed: u64, num_worlds: usize, make: impl Fn(&mut Random) -> W) -> Events {
    let mut total = Events::default();
    for number in 0..num_worlds {
        let mut random = Random::new(seed.wrapping_add(number as u64));
        let mut world = make(&mut random);
        for step in 0..COMMANDS_PER_WORLD {
            let command = W::Command::from(random.bytes());
            let outcome = catch_unwind(AssertUnwindSafe(|| world.run(command)));
            assert!(outcome.is_ok(), "seed {seed}, world {number}, step {step}: {command:?}");
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| world.end(number)));
        assert!(outcome.is_ok(), "seed {seed}, world {number}: at the end");
        total.add(world.met());
    }
    total
}

/// What proptest shrinks is kept beside the source, until it is a test of its own.
pub(crate) fn config() -> Config {
    Config {
        cases: 256,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..Config::default()
    }
}
