//! Ending a plan with the tokens that the model sampled.

use super::pass::Entry;
use super::request::{FinishReason, Stage};
use super::{InFlight, Scheduler};
use crate::error::{Error, Result, invalid};
use crate::ids::{Handle, PlanId};

/// What a commit did. The four arrays have one entry per sample that got tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepResult {
    /// Requests.
    pub handles: Vec<i64>,
    /// Their samples.
    pub sequence: Vec<i32>,
    /// Tokens that each got.
    pub num_new_tokens: Vec<i32>,
    /// 0, or the [`FinishReason`].
    pub finish_reason: Vec<i8>,
    /// Requests whose last sample ended.
    pub finished: Vec<FinishedRequest>,
    /// Samples that became sequences of their own.
    pub forked: Vec<Fork>,
    /// Tokens for samples that had ended before.
    pub num_ignored: u32,
}

/// A request whose last sample ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishedRequest {
    /// Its handle, which names nothing any more.
    pub handle: Handle,
    /// The caller's name for it.
    pub request_id: String,
    /// Prompt tokens that came from the prefix cache.
    pub num_cached_tokens: u32,
    /// How often it lost its blocks.
    pub num_preemptions: u32,
}

/// A sample that became a sequence of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fork {
    /// The request.
    pub handle: Handle,
    /// The sample that computed the prompt.
    pub parent: u32,
    /// The sample that forked from it.
    pub child: u32,
}

impl Scheduler {
    /// Ends the oldest plan with its samples, one token each in the order of the plan.
    ///
    /// # Errors
    /// [`Error::PlanOutOfOrder`], [`Error::PlanNotInFlight`], [`Error::InvalidArgument`] for another number of tokens
    /// than the plan has samples, or a negative one.
    ///
    /// # Complexity
    /// O(sequences of the plan + blocks released).
    pub fn commit(&mut self, plan: PlanId, tokens: &[i32]) -> Result<StepResult> {
        self.check_commit(plan, tokens)?;
        self.drain_inbox();
        self.manager.commit(plan)?;
        let mut record = self.plans.pop_front().expect("the plan is the oldest in flight");
        let mut result = StepResult::default();
        for entry in &record.entries {
            let Some(request) = self.entry_request(entry) else {
                result.num_ignored += entry.num_samples;
                continue;
            };
            request.num_in_flight -= 1;
            if entry.completes_prompt {
                self.part_samples(entry, &mut result);
            }
            let drawn = entry.first_sample as usize..(entry.first_sample + entry.num_samples) as usize;
            for (&sample, &token) in record.samples[drawn.clone()].iter().zip(&tokens[drawn]) {
                self.take_token(entry, sample as usize, token, &mut result);
            }
        }
        self.seats.plans_ended(self.plans.front().map(|record| record.id));
        record.clear();
        self.spare_plans.push(record);
        Ok(result)
    }

    fn check_commit(&self, plan: PlanId, tokens: &[i32]) -> Result<()> {
        let record = match self.plans.front() {
            Some(record) if record.id == plan => record,
            Some(oldest) if self.plans.iter().any(|record| record.id == plan) => {
                return Err(Error::PlanOutOfOrder { found: plan, oldest: oldest.id });
            }
            _ => return Err(Error::PlanNotInFlight(plan)),
        };
        if tokens.len() != record.samples.len() {
            return invalid("tokens", format!("{}, one per sample", record.samples.len()), tokens.len());
        }
        match tokens.iter().find(|&&token| token < 0) {
            Some(negative) => invalid("tokens", "token ids of at least 0", negative),
            None => Ok(()),
        }
    }

    /// The prompt that the samples of a request share is computed: each becomes a sequence of its own.
    fn part_samples(&mut self, entry: &Entry, result: &mut StepResult) {
        if self.manager.resident(entry.sequence as usize, entry.epoch).is_none() {
            return;
        }
        self.request_mut(entry.slot).stage = Stage::Apart;
        let leader = self.request(entry.slot).leader();
        for child in leader + 1..self.request(entry.slot).samples.len() {
            if self.request(entry.slot).samples[child].finish.is_some() {
                continue;
            }
            let index = self.ensure_sequence(entry.slot, child);
            self.manager.adopt(index, entry.sequence as usize);
            self.sit(entry.slot, child);
            result.forked.push(Fork { handle: entry.handle, parent: leader as u32, child: child as u32 });
        }
    }

    fn take_token(&mut self, entry: &Entry, sample: usize, token: i32, result: &mut StepResult) {
        let Some(request) = self.entry_request(entry) else {
            result.num_ignored += 1;
            return;
        };
        request.samples[sample].num_pending -= 1;
        if request.samples[sample].finish.is_some() {
            result.num_ignored += 1;
            return;
        }
        // A request that was preempted before its first token has no sequences for its later samples yet.
        let index = self.ensure_sequence(entry.slot, sample);
        self.manager.append_token(index, token);
        let request = self.request_mut(entry.slot);
        request.samples[sample].num_outputs += 1;
        let reason = request.finish_reason(sample, token);
        result.handles.push(entry.handle.get());
        result.sequence.push(sample as i32);
        result.num_new_tokens.push(1);
        result.finish_reason.push(reason.map_or(0, |reason| reason as i8));
        let Some(reason) = reason else { return };
        if request.num_live == 1 {
            result.finished.push(FinishedRequest {
                handle: entry.handle,
                request_id: request.id.to_string(),
                num_cached_tokens: request.num_cached_tokens,
                num_preemptions: request.num_preemptions,
            });
        }
        self.finish_sample(entry.slot, sample, reason);
    }
}

impl super::request::Request {
    /// Why a sample ends with this token, its last so far, if it does.
    fn finish_reason(&self, sample: usize, token: i32) -> Option<FinishReason> {
        let num_outputs = self.samples[sample].num_outputs;
        if num_outputs >= self.min_tokens.max(1) && self.stop_token_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else {
            (num_outputs >= self.max_tokens).then_some(FinishReason::Length)
        }
    }
}

impl InFlight {
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.samples.clear();
        self.cells.clear();
        self.announced = super::Announcements::default();
    }
}
