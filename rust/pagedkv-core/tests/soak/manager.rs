//! The manager's world, which is several files.

#[path = "../kv_cache_manager_props/command.rs"]
pub(crate) mod command;
#[path = "../kv_cache_manager_props/growth.rs"]
mod growth;
#[path = "../kv_cache_manager_props/mistakes.rs"]
mod mistakes;
#[path = "../kv_cache_manager_props/world.rs"]
pub(crate) mod world;
