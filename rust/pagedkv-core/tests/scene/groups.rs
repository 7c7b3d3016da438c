//! Caches of several groups.

use pagedkv_core::{CacheConfig, GroupSpec};

/// Groups of one layer each, by multiples of the block size and windows.
pub(crate) fn config(block_size: u32, usable_blocks: u32, groups: &[(u32, Option<u32>)]) -> CacheConfig {
    let spec = |(layer, &(multiple, sliding_window)): (u32, &(u32, Option<u32>))| GroupSpec {
        layers: vec![layer],
        sliding_window,
        ..GroupSpec::new(0, 1, 12 / multiple, "float16")
    };
    let groups = (0..).zip(groups).map(spec).collect();
    CacheConfig { block_size, groups, ..CacheConfig::new(usable_blocks + 1) }
}
