//! The Python module `pagedkv._core`: convert, lock, call, convert.

#![allow(clippy::doc_markdown, reason = "the docstrings of the Python module are numpydoc, not Markdown")]

use pyo3::prelude::*;

mod args;
mod arrays;
mod attention_arrays;
mod attention_plan;
mod chain_hash;
mod config;
mod cpu_attention;
mod cpu_ops;
mod device_work;
mod dlpack;
mod errors;
mod events;
mod getters;
mod guard;
mod identity;
mod manager;
mod manager_batch;
mod plan;
mod policy;
mod pool;
mod prefix_cache;
mod result;
mod row_ops;
mod scheduler;
mod sim;
mod stats;
mod transfers;
mod verbs;

#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    const HEAD_DIM_STEP: usize = pagedkv_cpu::HEAD_DIM_STEP;
    #[pymodule_export]
    const PACKED_TOKENS: usize = pagedkv_cpu::PACKED_TOKENS;

    #[pymodule_export]
    use crate::attention_plan::AttentionPlan;
    #[pymodule_export]
    use crate::chain_hash::chain_hashes;
    #[pymodule_export]
    use crate::config::{CacheConfig, GroupSpec, SchedulerConfig, choose_layer_slots};
    #[pymodule_export]
    use crate::cpu_attention::{instruction_sets, merge_states, paged_attention};
    #[pymodule_export]
    use crate::cpu_ops::{
        append_kv, copy_blocks, default_num_threads, gather_kv, move_kv, num_gathered_tokens, swap_blocks,
        update_block_table,
    };
    #[pymodule_export]
    use crate::device_work::device_work;
    #[pymodule_export]
    use crate::dlpack::{Tensor, from_dlpack};
    #[pymodule_export]
    use crate::manager::{AllocatedSlots, ComputedBlocks, KVCacheManager};
    #[pymodule_export]
    use crate::manager_batch::{BatchSlots, ComputedBlocksBatch};
    #[pymodule_export]
    use crate::plan::StepPlan;
    #[pymodule_export]
    use crate::pool::BlockPool;
    #[pymodule_export]
    use crate::result::{FinishedRequest, StepResult};
    #[pymodule_export]
    use crate::row_ops::{draw_tokens, rms_norm, rotary_embedding};
    #[pymodule_export]
    use crate::scheduler::Scheduler;
    #[pymodule_export]
    use crate::verbs::Explanation;

    #[pymodule_export]
    use crate::events::{AllBlocksCleared, BlockRemoved, BlockStored, KVCacheSnapshot, KVEventBatch};
    #[pymodule_export]
    use crate::stats::{Histogram, PrefixCacheStats, RequestStats, RequestTotals, SchedulerStats};

    #[pymodule_export]
    use crate::sim::{CostModel, SaturatedReplay, Simulation, Workload, read_lengths, replay_saturated, simulate};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        pagedkv_cpu::note_process();
        crate::errors::register(module)
    }
}
