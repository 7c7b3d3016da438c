//! Which world a number stands for.

use pagedkv_core::{CacheConfig, EventConfig, Policy, PreemptionMode, Scheduler, SchedulerConfig};

use super::{MAX_MODEL_LEN, World};
use crate::model::memory::{Group, Groups, cache_config};
use crate::model::mirror::Mirrors;
use crate::model::random::Random;
use crate::model::scheduler::{Limits, SchedulerModel};

impl World {
    pub(super) fn made(number: u64, swaps: bool) -> Self {
        let mut random = Random::new(number);
        let mut below = |end| random.below(end);
        let policy = [Policy::Priority, Policy::LongestPrefixMatch, Policy::FairShare, Policy::External];
        let policy = if below(2) == 0 { Policy::Fcfs } else { policy[below(4)] };
        let cuts_chunks = below(4) == 0;
        let watermark = if below(4) == 0 { 0.3 } else { 0.0 };
        let lookahead = [0, 0, 0, 2, 3, 4, 5, 6][below(8)];
        let usable_blocks = (8 - below(8) * below(2)).max(2) + lookahead;
        let mut limits = Limits {
            policy,
            cuts_chunks,
            block_size: 1 + below(3),
            groups: Groups::new(&[Group { block_size: 1, window: None }]),
            usable_blocks,
            watermark_blocks: 0,
            max_num_batched_tokens: 1 + below(8),
            max_num_seqs: 1 + below(4),
            max_model_len: MAX_MODEL_LEN,
            max_plans_in_flight: 1 + below(3),
            lookahead,
            caching: below(4) > 0,
            num_host_blocks: 0,
            ageing: below(3),
        };
        let mut config = SchedulerConfig {
            max_num_seqs: limits.max_num_seqs as u32,
            max_num_batched_tokens: limits.max_num_batched_tokens as u32,
            max_model_len: MAX_MODEL_LEN as u32,
            watermark,
            max_plans_in_flight: limits.max_plans_in_flight as u32,
            lookahead: limits.lookahead as u32,
            policy,
            ageing: Some(limits.ageing as u32),
            ..SchedulerConfig::default()
        };
        if cuts_chunks {
            config.long_prefill_token_threshold = 1 + below(4) as u32;
            config.max_num_partial_prefills = 1 + below(2) as u32;
            let longest = config.long_prefill_token_threshold.min(config.max_num_batched_tokens);
            config.prefill_chunk_multiple = 1 + below(longest as usize) as u32;
        }
        let groups = Group::shaped([0, 0, 0, 1, 2, 3, 4, 6][below(8)], limits.block_size);
        limits.groups = Groups::new(&groups);
        limits.usable_blocks = usable_blocks * (1 + groups.len()) / 2;
        limits.watermark_blocks = (watermark * limits.usable_blocks as f64).ceil() as usize;
        let tells = number.is_multiple_of(4);
        let mut cache = CacheConfig {
            enable_prefix_caching: limits.caching,
            events: tells.then(|| EventConfig { max_pending: 20, ..EventConfig::default() }),
            ..cache_config(&limits.groups, limits.usable_blocks + 1)
        };
        // Drawn last, so that the worlds are otherwise those of the same number without a host tier.
        if swaps {
            limits.usable_blocks = (5 + below(3)) * (1 + groups.len()) / 2;
            limits.watermark_blocks = (watermark * limits.usable_blocks as f64).ceil() as usize;
            cache.num_blocks = limits.usable_blocks as u32 + 1;
            limits.policy = if below(3) == 0 { Policy::Fcfs } else { Policy::Priority };
            config.policy = limits.policy;
            limits.max_num_seqs = 2 + below(3);
            config.max_num_seqs = limits.max_num_seqs as u32;
        }
        if swaps || below(2) == 0 {
            limits.num_host_blocks = 1 + below(12 * groups.len());
            cache.num_host_blocks = limits.num_host_blocks as u32;
            config.preemption_mode = PreemptionMode::Swap;
        }
        Self {
            scheduler: Scheduler::new(&cache, &config).expect("a valid configuration"),
            model: SchedulerModel::new(limits),
            num_added: 0,
            ended_plans: Vec::new(),
            mirrors: tells.then(Mirrors::default),
            ended_transfers: Vec::new(),
        }
    }
}
