//! Ending a plan with the tokens that the model sampled.

use super::Scheduler;
use super::drafts::tokens_of;
use super::in_flight::{Cell, Entry, InFlight};
use super::request::{FinishReason, Stage};
use super::stats::RequestStats;
use crate::error::{Error, Result, invalid};
use crate::ids::{Handle, PlanId};
use crate::kv_cache_manager::DepartedColumn;

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
#[derive(Clone, Debug, PartialEq)]
pub struct FinishedRequest {
    /// Its handle, which names nothing any more, unless it is a session.
    pub handle: Handle,
    /// The caller's name for it.
    pub request_id: String,
    /// Prompt tokens that came from the prefix cache.
    pub num_cached_tokens: u32,
    /// How often it lost its blocks.
    pub num_preemptions: u32,
    /// All that was counted of it.
    pub stats: RequestStats,
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
    /// than the plan has samples, a negative one, or a plan that checks draft tokens.
    ///
    /// # Complexity
    /// O(sequences of the plan + blocks released).
    pub fn commit(&mut self, plan: PlanId, tokens: &[i32]) -> Result<StepResult> {
        let record = self.oldest(plan)?;
        if record.entries.iter().any(|entry| entry.num_drafts > 0) {
            return invalid(
                "tokens",
                "one row per sequence that samples: the plan checks draft tokens",
                "one dimension",
            );
        }
        if tokens.len() != record.samples.len() {
            return invalid("tokens", format!("{}, one per sample", record.samples.len()), tokens.len());
        }
        if let Some(negative) = tokens.iter().find(|&&token| token < 0) {
            return invalid("tokens", "token ids of at least 0", negative);
        }
        Ok(self.commit_rows(plan, tokens, 1, None))
    }

    /// Ends the oldest plan with one row of `width` tokens per sequence that samples (a prompt with n samples has n):
    /// the draft tokens that were accepted and the one after them, padded with -1. What was rejected is undone.
    ///
    /// # Errors
    /// As [`Self::commit`]; [`Error::InvalidArgument`] also for a row that is empty, or whose tokens but the last are not
    /// the first ones of the sequence's draft, and for a draft that is a tree.
    ///
    /// # Complexity
    /// As [`Self::commit`].
    pub fn commit_drafts(&mut self, plan: PlanId, rows: &[i32], width: usize) -> Result<StepResult> {
        Self::check_rows(self.oldest(plan)?, rows, width, None)?;
        Ok(self.commit_rows(plan, rows, width, None))
    }

    /// As [`Self::commit_drafts`], where drafts are trees: row by row, in the shape of `rows`, `accepted` has the guesses
    /// that were accepted, by their numbers and from the root on, padded with -1. Where the path lies scattered among
    /// rejected guesses, the next plan's slot moves bring it together.
    ///
    /// # Errors
    /// As [`Self::commit_drafts`]; [`Error::InvalidArgument`] also for what is no path of the tree.
    ///
    /// # Complexity
    /// As [`Self::commit`], and O(accepted guesses) for those that move.
    pub fn commit_trees(&mut self, plan: PlanId, rows: &[i32], accepted: &[i32], width: usize) -> Result<StepResult> {
        Self::check_rows(self.oldest(plan)?, rows, width, Some(accepted))?;
        Ok(self.commit_rows(plan, rows, width, Some(accepted)))
    }

    fn commit_rows(&mut self, plan: PlanId, rows: &[i32], width: usize, accepted: Option<&[i32]>) -> StepResult {
        self.drain_inbox();
        self.manager.end_plan(plan).expect("the plan is the oldest in flight");
        let mut record = self.plans.pop_front().expect("the plan is the oldest in flight");
        let mut result = StepResult::with_capacity(record.samples.len());
        let mut at = 0;
        for entry in &record.entries {
            let span = at..at + entry.num_rows() * width;
            at = span.end;
            if !entry.draws_one() || !self.commit_one(entry, rows[span.start], &mut result) {
                let rows = rows[span.clone()].chunks_exact(width).map(tokens_of);
                let paths = accepted.map(|accepted| accepted[span].chunks_exact(width));
                self.commit_entry(entry, &record.samples, rows, paths, &mut result);
            }
        }
        self.announce_departures();
        self.recorder.ignored(result.num_ignored);
        self.seats.plans_ended(self.plans.front().map(|record| record.id));
        record.clear();
        self.spare_plans.push(record);
        result
    }

    fn commit_entry<'a>(
        &mut self,
        entry: &Entry,
        samples: &[u32],
        rows: impl Iterator<Item = &'a [i32]>,
        mut paths: Option<impl Iterator<Item = &'a [i32]>>,
        result: &mut StepResult,
    ) {
        let Some(request) = self.entry_request(entry) else {
            result.num_ignored += rows.map(|row| row.len() as u32).sum::<u32>();
            return;
        };
        request.num_in_flight -= 1;
        if entry.completes_prompt {
            self.part_samples(entry, result);
        }
        for (&sample, tokens) in samples[entry.first_sample as usize..].iter().zip(rows) {
            let path = paths.as_mut().and_then(Iterator::next);
            self.take_tokens(entry, sample as usize, tokens, path, result);
        }
    }

    /// Lets the next plan tell of the columns that left a window.
    pub(super) fn announce_departures(&mut self) {
        let cells = self.manager.departed.iter_mut().flat_map(|departed| departed.drain(..)).map(|column| {
            let DepartedColumn { sequence, epoch, group, column } = column;
            Cell { sequence, epoch, group, column }
        });
        self.announcements.repeated.extend(cells);
    }

    pub(super) fn oldest(&self, plan: PlanId) -> Result<&InFlight> {
        match self.plans.front() {
            Some(record) if record.id == plan => Ok(record),
            Some(oldest) if self.plans.iter().any(|record| record.id == plan) => {
                Err(Error::PlanOutOfOrder { found: plan, oldest: oldest.id })
            }
            _ => Err(Error::PlanNotInFlight(plan)),
        }
    }

    /// The prompt that the samples of a request share is computed: each becomes a sequence of its own.
    pub(super) fn part_samples(&mut self, entry: &Entry, result: &mut StepResult) {
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
            self.manager.part(index, entry.sequence as usize);
            self.sit(entry.slot, child);
            result.forked.push(Fork { handle: entry.handle, parent: leader as u32, child: child as u32 });
        }
    }

    fn take_tokens(
        &mut self,
        entry: &Entry,
        sample: usize,
        tokens: &[i32],
        path: Option<&[i32]>,
        result: &mut StepResult,
    ) {
        let ignored = tokens.len() as u32;
        let Some(request) = self.entry_request(entry) else {
            result.num_ignored += ignored;
            return;
        };
        request.samples[sample].num_pending -= 1;
        request.samples[sample].is_drafting = false;
        request.samples[sample].drafts.clear();
        if request.samples[sample].finish.is_some() {
            result.num_ignored += ignored;
            return;
        }
        let (num_taken, reason) = request.tokens_until_the_end(sample, tokens);
        request.samples[sample].num_outputs += num_taken;
        // A request that was preempted before its first token has no sequences for its later samples yet.
        let index = self.ensure_sequence(entry.slot, sample);
        if entry.num_drafts > 0 && self.manager.resident(index, entry.epoch).is_some() {
            self.manager.accept(index, entry.num_drafts, num_taken.min(ignored - 1), path);
        }
        tokens[..num_taken as usize].iter().for_each(|&token| self.manager.append_token(index, token));
        result.num_ignored += ignored - num_taken;
        let request = &mut self.requests[entry.slot];
        self.recorder.generated(request, num_taken as usize);
        result.push(entry.handle, sample as i32, num_taken as i32, reason.map_or(0, |reason| reason as i8));
        if let Some(reason) = reason {
            self.end(entry.slot, sample, reason, result);
        }
    }

    pub(super) fn end(&mut self, slot: u32, sample: usize, reason: FinishReason, result: &mut StepResult) {
        let request = self.request(slot);
        if request.num_live == 1 {
            result.finished.push(FinishedRequest {
                handle: request.handle,
                request_id: request.id.to_string(),
                num_cached_tokens: request.num_cached_tokens,
                num_preemptions: request.num_preemptions,
                stats: self.stats_of(request),
            });
        }
        self.finish_sample(slot, sample, reason);
    }
}

impl super::request::Request {
    /// How many of these tokens a sample takes, and why it ends with the last of them, if it does.
    fn tokens_until_the_end(&self, sample: usize, tokens: &[i32]) -> (u32, Option<FinishReason>) {
        let num_outputs = self.samples[sample].num_outputs;
        let mut last = (0, None);
        for (&token, nth) in tokens.iter().zip(1..) {
            last = (nth, self.reason_at(sample, num_outputs + nth, token));
            if last.1.is_some() {
                break;
            }
        }
        last
    }

    /// Why a sample would end with this token as its next, if it would.
    pub(super) fn reason_for(&self, sample: usize, token: i32) -> Option<FinishReason> {
        self.reason_at(sample, self.samples[sample].num_outputs + 1, token)
    }

    pub(super) fn reason_at(&self, sample: usize, num_outputs: u32, token: i32) -> Option<FinishReason> {
        if num_outputs >= self.min_tokens.max(1) && self.stop_token_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else {
            (num_outputs >= self.samples[sample].max_tokens).then_some(FinishReason::Length)
        }
    }
}
