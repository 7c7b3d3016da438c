//! The naive model: slow, plain and obviously right, and without a line of the crate's own code in it.
//!
//! It keeps what the crate does not: the *contents* of the memory. Every slot remembers the whole history of what was
//! last written there, so a block that reaches the wrong sequence shows as a history that is not its own.
#![allow(dead_code, unused_imports, reason = "every test crate includes the whole model and uses its part")]

pub(crate) mod corpus;
pub(crate) mod device;
pub(crate) mod driven;
pub(crate) mod events;
pub(crate) mod manager;
pub(crate) mod memory;
pub(crate) mod mirror;
pub(crate) mod random;
pub(crate) mod scheduler;
