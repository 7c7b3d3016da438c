//! Calls to the pool against the naive pool, as the property tests drive them.
#![no_main]

#[path = "../../rust/pagedkv-core/tests/model/mod.rs"]
mod model;
#[path = "../../rust/pagedkv-core/tests/block_pool_props/world.rs"]
mod world;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| world::World::replay(bytes));
