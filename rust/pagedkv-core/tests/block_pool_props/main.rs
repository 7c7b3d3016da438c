//! Random calls to the pool, with blocks listed twice and blocks that do not exist, against a list and a table of counts.

#[path = "../model/mod.rs"]
mod model;
mod world;

use std::panic::catch_unwind;

use model::corpus;
use model::random::Random;
use world::World;

fn run(seed: u64) {
    let mut random = Random::new(seed);
    let mut world = World::numbered(random.next());
    (0..200).for_each(|_| world.run(random.bytes()));
}

#[test]
fn block_pool_agrees_with_the_naive_pool_over_200_000_calls() {
    for seed in 0..1000 {
        let outcome = catch_unwind(|| run(seed));
        assert!(outcome.is_ok(), "seed {seed}");
    }
}

#[test]
fn block_pool_agrees_with_the_naive_pool_on_what_the_fuzzer_kept() {
    corpus::replay("block_pool", World::replay);
}
