//! Commands to the scheduler against the naive model, as the property tests drive them; every law after each, and every
//! plan run on a device that knows only its arrays.
#![no_main]

#[path = "../../rust/pagedkv-core/tests/model/mod.rs"]
mod model;
#[path = "../../rust/pagedkv-core/tests/scheduler_props/world/mod.rs"]
mod world;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| world::World::replay(bytes));
