//! Bytes that claim to be a plan: they are refused, or they are a whole plan whose every array can be read.
#![no_main]

#[path = "../../rust/pagedkv-core/tests/hostile_plan/mod.rs"]
mod hostile_plan;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile_plan::replay(bytes));
