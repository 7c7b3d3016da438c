//! How many blocks sequences and requests come to, over all cache groups.

use smallvec::SmallVec;

use super::Scheduler;
use crate::cache_layout::TableSpec;
use crate::config::SchedulerConfig;
use crate::ids::NULL_BLOCK;
use crate::kv_cache_manager::{ComputedBlocks, KVCacheManager};

/// Tokens that a sequence may have computed before blocks leave its windows.
fn most_tokens(limits: &SchedulerConfig) -> u64 {
    u64::from(limits.max_plans_in_flight) * u64::from(limits.max_num_batched_tokens) + u64::from(limits.lookahead)
}

/// Most blocks that a sequence holds of each cache group at once, where blocks leave it.
pub(super) fn most_blocks(manager: &KVCacheManager, limits: &SchedulerConfig) -> SmallVec<[u32; 1]> {
    let most = |spec: &TableSpec| spec.most_blocks(most_tokens(limits)).unwrap_or(u64::MAX);
    manager.groups.iter().map(|spec| u32::try_from(most(spec)).unwrap_or(u32::MAX)).collect()
}

/// Blocks of samples at their longest: full blocks of the first `shared` tokens once, the rest once per sample; of a window
/// group no more than each sample can hold at once.
pub(super) fn blocks_at_the_longest(
    groups: &[TableSpec],
    limits: &SchedulerConfig,
    shared: u64,
    longest: &(impl Iterator<Item = u64> + Clone),
) -> u64 {
    let of_group = |spec: &TableSpec| {
        let block_size = u64::from(spec.block_size);
        let shared = shared / block_size;
        let all = shared + longest.clone().map(|longest| longest.div_ceil(block_size) - shared).sum::<u64>();
        spec.most_blocks(most_tokens(limits)).map_or(all, |most| all.min(longest.clone().count() as u64 * most))
    };
    groups.iter().map(of_group).sum()
}

impl Scheduler {
    /// Blocks that a sequence takes on the way to its first `target` tokens, beyond those that it holds. Of a window group
    /// it never holds more than one window and the plans in flight span.
    pub(super) fn blocks_to_come(&self, index: usize, target: u32) -> u32 {
        let tables = self.manager.sequence(index).tables.iter().zip(&self.manager.groups).zip(&self.most_blocks);
        let to_come = tables.map(|((table, spec), most)| {
            let new = target.div_ceil(spec.block_size).saturating_sub(table.len());
            new.min(most.saturating_sub(table.num_held()))
        });
        to_come.sum()
    }

    /// [`Self::blocks_to_come`] as it will be when a growth with these hits has reached its first `reached` tokens.
    pub(super) fn blocks_behind(&self, index: usize, hits: &ComputedBlocks, reached: u32, target: u32) -> u32 {
        let tables = self.manager.sequence(index).tables.iter().zip(&self.manager.groups).zip(&self.most_blocks);
        let behind = tables.enumerate().map(|(group, ((table, spec), most))| {
            let reached = reached.div_ceil(spec.block_size);
            let num_null = hits.group_blocks(group).iter().filter(|&&block| block == NULL_BLOCK).count() as u32;
            let held = reached.saturating_sub(table.num_null + num_null);
            target.div_ceil(spec.block_size).saturating_sub(reached).min(most.saturating_sub(held))
        });
        behind.sum()
    }

    /// Blocks that a sequence takes from those that are available on the way to its first `target` tokens, hits included.
    pub(super) fn blocks_to_admit(&self, index: usize, target: u32, hits: &ComputedBlocks) -> u32 {
        let sequence = self.manager.sequence(index);
        if self.manager.is_plain() {
            return self.manager.blocks_needed(index, target - sequence.num_scheduled - hits.num_tokens(), hits);
        }
        let mut needed = 0;
        for (group, (table, spec)) in sequence.tables.iter().zip(&self.manager.groups).enumerate() {
            let blocks = hits.group_blocks(group);
            let num_hits = blocks.iter().filter(|&&block| block != NULL_BLOCK).count() as u32;
            let new = target.div_ceil(spec.block_size).saturating_sub(table.len() + blocks.len() as u32);
            let most = self.most_blocks[group].saturating_sub(table.num_held() + num_hits);
            needed += self.manager.num_evictable(blocks) + new.min(most);
            needed += u32::from(self.manager.tail_to_copy(index, group).is_some());
        }
        needed
    }
}
