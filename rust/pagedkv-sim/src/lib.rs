//! Simulates LLM serving on the scheduler of `pagedkv-core` itself, the very code that serves, beside older systems.
//!
//! - [`trace`] reads recorded requests, [`workload`] makes up others; equal seeds give equal requests.
//! - [`cost`] says how long a step takes on some machine, [`survival`] which beams go on.
//! - [`systems`] are what plans the steps: the scheduler of this package, vLLM's at the time of its paper, Orca's three
//!   ways of reserving memory over a [`buddy`] allocator, and `FasterTransformer`'s batches of whole requests.
//! - [`simulation`] moves the clock from step to step and records what memory held.
//! - [`saturated`] keeps a pool full and needs no clock.

#![forbid(unsafe_code)]

pub mod buddy;
pub mod cost;
mod error;
pub mod random;
pub mod saturated;
pub mod simulation;
pub mod survival;
pub mod systems;
pub mod trace;
pub mod workload;

pub use error::{Result, SimError};
