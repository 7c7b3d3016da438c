//! Replays of request traces on the scheduler of `pagedkv-core` itself, the very code that serves.
//!
//! [`trace`] reads lengths; [`saturated`] keeps a pool full and records, step by step, how much of it holds tokens.

#![forbid(unsafe_code)]

pub mod saturated;
pub mod trace;
