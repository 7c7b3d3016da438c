//! Commands to the manager against the naive model, as the property tests drive them; every law after each.
#![no_main]

#[path = "../../rust/pagedkv-core/tests/kv_cache_manager_props/command.rs"]
mod command;
#[path = "../../rust/pagedkv-core/tests/kv_cache_manager_props/growth.rs"]
mod growth;
#[path = "../../rust/pagedkv-core/tests/kv_cache_manager_props/mistakes.rs"]
mod mistakes;
#[path = "../../rust/pagedkv-core/tests/model/mod.rs"]
mod model;
#[path = "../../rust/pagedkv-core/tests/kv_cache_manager_props/world.rs"]
mod world;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| world::World::replay(bytes));
