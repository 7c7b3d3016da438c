//! Faults that other caches and schedulers had, one test each at least, named after the fault. `docs/faults.md` lists
//! them with the report that each comes from.

#[path = "../scene/mod.rs"]
mod scene;
#[path = "../scene/steps.rs"]
mod steps;

mod events;
mod identity;
mod ownership;
mod scheduler;
mod transfers;
mod visibility;
mod windows_speculation;
