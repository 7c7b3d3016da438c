//! A pool that is kept full: every request is there from the start, and each runs to exactly its length.
//!
//! The paper's memory experiment (Fig. 2) without a clock: what a pool holds step by step depends on the lengths and on
//! the scheduler's decisions alone. Prefixes are not shared, as in the paper.

use pagedkv_core::{CacheConfig, NewRequest, Result, Scheduler, SchedulerConfig};

use crate::trace::Lengths;

/// What one step found in the pool, after planning and before the end of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Resident requests.
    pub num_running: u32,
    /// Tokens that have a slot.
    pub num_tokens: u64,
    /// Blocks that hold them.
    pub num_held_blocks: u32,
}

/// A whole replay.
#[derive(Clone, Debug, PartialEq)]
pub struct Replay {
    /// Steps in order.
    pub steps: Vec<Step>,
    /// Requests that lost their blocks on the way, counted each time.
    pub num_preemptions: u64,
}

impl Replay {
    /// Mean share of the slots of held blocks that hold no token, over the steps behind the first `warm_up` share.
    pub fn mean_waste(&self, block_size: u32, warm_up: f64) -> f64 {
        let skipped = (self.steps.len() as f64 * warm_up).ceil() as usize;
        let measured = &self.steps[skipped.min(self.steps.len())..];
        let waste =
            |step: &Step| 1.0 - step.num_tokens as f64 / (f64::from(step.num_held_blocks) * f64::from(block_size));
        let full = measured.iter().filter(|step| step.num_held_blocks > 0);
        full.clone().map(waste).sum::<f64>() / full.count() as f64
    }
}

/// Replays requests of these lengths, all waiting from the start, until the last has ended.
///
/// # Errors
/// Those of [`Scheduler::new`], and of [`Scheduler::add_request`] for a request that can never fit.
pub fn replay(lengths: &[Lengths], cache: &CacheConfig, limits: &SchedulerConfig) -> Result<Replay> {
    let cache = CacheConfig { enable_prefix_caching: false, ..cache.clone() };
    let mut scheduler = Scheduler::new(&cache, limits)?;
    for (i, row) in lengths.iter().enumerate() {
        let prompt = vec![0; row.prompt_tokens as usize];
        scheduler.add_request(NewRequest::new(i.to_string(), prompt, row.output_tokens))?;
    }
    let mut steps = Vec::new();
    let mut tokens = Vec::new();
    while scheduler.num_unfinished_requests() > 0 {
        let plan = scheduler.schedule()?;
        steps.push(Step {
            num_running: scheduler.num_requests().0 as u32,
            num_tokens: scheduler.num_resident_tokens(),
            num_held_blocks: scheduler.manager().pool().num_held(),
        });
        tokens.resize(plan.sizes().num_samples as usize, 0);
        scheduler.commit(plan.id(), &tokens)?;
    }
    Ok(Replay { steps, num_preemptions: scheduler.num_preemptions() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(rows: &[(u32, u32)]) -> Vec<Lengths> {
        rows.iter().map(|&(prompt_tokens, output_tokens)| Lengths { prompt_tokens, output_tokens }).collect()
    }

    #[test]
    fn a_single_request_fills_its_slots_one_by_one() {
        let config = CacheConfig { block_size: 4, ..CacheConfig::new(8) };
        let replay = replay(&lengths(&[(3, 3)]), &config, &SchedulerConfig::default()).unwrap();
        let tokens: Vec<_> = replay.steps.iter().map(|step| (step.num_tokens, step.num_held_blocks)).collect();
        assert_eq!(tokens, [(3, 1), (4, 1), (5, 2)]);
        assert!((replay.mean_waste(4, 0.0) - (0.25 + 0.0 + 0.375) / 3.0).abs() < 1e-12);
    }

    #[test]
    fn equal_prompts_do_not_share_blocks() {
        let config = CacheConfig { block_size: 4, ..CacheConfig::new(32) };
        let replay = replay(&lengths(&[(9, 1), (9, 1)]), &config, &SchedulerConfig::default()).unwrap();
        assert_eq!(replay.steps[0].num_held_blocks, 6);
    }

    #[test]
    fn a_request_that_can_never_fit_is_refused() {
        let found = replay(&lengths(&[(100, 1)]), &CacheConfig::new(2), &SchedulerConfig::default());
        assert!(matches!(found, Err(pagedkv_core::Error::NeverFits { .. })), "{found:?}");
    }
}
