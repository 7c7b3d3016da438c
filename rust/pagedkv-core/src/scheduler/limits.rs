//! Limits that change between two steps.

use super::Scheduler;
use super::request::Request;
use super::room::most_blocks;
use crate::config::SchedulerConfig;
use crate::error::{Result, invalid};

/// What [`Scheduler::update_limits`] changes; `None` leaves a limit as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LimitsUpdate {
    /// Tokens per step.
    pub max_num_batched_tokens: Option<u32>,
    /// Seats, up to those that the scheduler was made with.
    pub max_num_seqs: Option<u32>,
    /// Share of the usable blocks that an admission leaves free while other requests run.
    pub watermark: Option<f64>,
    /// Most prompt tokens of one request per step; 0 for no limit but the budget.
    pub long_prefill_token_threshold: Option<u32>,
    /// Most requests that may be in the middle of their prompt.
    pub max_num_partial_prefills: Option<u32>,
    /// Most draft nodes per sequence, up to those that the scheduler was made with.
    pub lookahead: Option<u32>,
}

impl LimitsUpdate {
    fn apply_to(self, limits: &SchedulerConfig) -> SchedulerConfig {
        let old = limits.clone();
        SchedulerConfig {
            max_num_batched_tokens: self.max_num_batched_tokens.unwrap_or(old.max_num_batched_tokens),
            max_num_seqs: self.max_num_seqs.unwrap_or(old.max_num_seqs),
            watermark: self.watermark.unwrap_or(old.watermark),
            long_prefill_token_threshold: self.long_prefill_token_threshold.unwrap_or(old.long_prefill_token_threshold),
            max_num_partial_prefills: self.max_num_partial_prefills.unwrap_or(old.max_num_partial_prefills),
            lookahead: self.lookahead.unwrap_or(old.lookahead),
            ..old
        }
    }
}

impl Scheduler {
    /// The limits of the next step.
    pub fn limits(&self) -> &SchedulerConfig {
        &self.limits
    }

    /// Changes limits between two steps, all or none. Requests that sit stay where they are when seats become fewer; new
    /// ones get none until enough have left. Draft tokens that are more than a lower `lookahead` are dropped.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for what [`SchedulerConfig::validate`] refuses, for more seats or a longer
    /// lookahead than the scheduler was made with, and for limits under which a request that was added and has not ended
    /// could never run to its end; it is named.
    ///
    /// # Complexity
    /// O(requests).
    pub fn update_limits(&mut self, update: LimitsUpdate) -> Result<()> {
        self.drain_inbox();
        let limits = update.apply_to(&self.limits);
        limits.validate()?;
        for (argument, found, most) in [
            ("max_num_seqs", limits.max_num_seqs, self.seats.num_rows()),
            ("lookahead", limits.lookahead, self.most_lookahead),
        ] {
            if found > most {
                return invalid(argument, format!("at most {most}, as the scheduler was made"), found);
            }
        }
        for (slot, request) in self.requests.iter().filter(|(_, request)| request.num_live > 0) {
            self.check_feasible(slot, request, &limits)?;
        }
        self.inbox.set_limits(&limits)?;
        self.watermark_blocks = limits.watermark_blocks(self.inbox.usable_blocks());
        self.seats.set_limit(limits.max_num_seqs);
        for sample in self.requests.iter_mut().flat_map(|request| &mut request.samples) {
            if sample.drafts.len() > limits.lookahead as usize {
                sample.drafts.clear();
            }
        }
        self.most_blocks = most_blocks(&self.manager, &limits);
        self.limits = limits;
        Ok(())
    }

    /// Whether a request that was accepted can still run to its end.
    fn check_feasible(&self, slot: u32, request: &Request, limits: &SchedulerConfig) -> Result<()> {
        let seats = request.num_seats();
        if seats > limits.max_num_seqs {
            let expected = format!("at least {seats}, the seats of request {:?}", request.id);
            return invalid("max_num_seqs", expected, limits.max_num_seqs);
        }
        if request.is_gang() && seats > limits.max_num_batched_tokens {
            let expected = format!("at least {seats}, which request {:?} plans together", request.id);
            return invalid("max_num_batched_tokens", expected, limits.max_num_batched_tokens);
        }
        let needed = self.blocks_at_the_longest(slot, None, limits);
        let usable = u64::from(self.inbox.usable_blocks());
        if needed > usable && limits.lookahead > self.limits.lookahead {
            let expected = format!("less: request {:?} would need {needed} of {usable} blocks", request.id);
            return invalid("lookahead", expected, limits.lookahead);
        }
        if needed > usable && limits.max_num_batched_tokens > self.limits.max_num_batched_tokens {
            let expected = format!("less: request {:?} would need {needed} of {usable} blocks", request.id);
            return invalid("max_num_batched_tokens", expected, limits.max_num_batched_tokens);
        }
        Ok(())
    }
}
