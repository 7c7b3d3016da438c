//! How a plan ends: what the model sampled, what of the guesses it accepted, and what must follow.

use pagedkv_core::{FinishReason, FinishedRequest, Fork, Handle, PlanId, StepResult};

use super::super::random::Random;
use super::{Entry, Node, SchedulerModel};

/// The arguments with which a plan is committed.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Tokens(Vec<i32>),
    /// One row per sequence that samples, padded with -1.
    Rows {
        rows: Vec<i32>,
        width: usize,
    },
    Beams {
        tokens: Vec<i32>,
        parents: Vec<i32>,
    },
}

/// Mostly zeros, so that outputs are shared as well, and now and then a stop token.
pub(super) fn token(random: &mut Random) -> i32 {
    [0, 0, 0, 1, 0, 0, 0, 2][random.below(8)]
}

impl SchedulerModel {
    /// Decides how the oldest plan ends.
    pub(crate) fn outcome(&mut self, seed: u64) -> Outcome {
        if self.plans.front().is_some_and(|plan| !plan.has_run) {
            self.run_next_plan();
        }
        let mut random = Random::new(seed);
        let plan = self.plans.front().expect("a plan is in flight");
        if plan.entries.iter().any(|entry| !entry.drafts.is_empty()) {
            return self.rows(&mut random);
        }
        if random.below(2) == 0 {
            return self.beams(&mut random);
        }
        Outcome::Tokens(plan.tokens.clone())
    }

    /// The row of a sample, as far as a plan told it, and whether its sequence decodes.
    pub(crate) fn row(&self, handle: Handle, sample: usize) -> Option<(i32, bool)> {
        let request = &self.requests[self.position(handle)?];
        let sample = request.live().nth(sample % request.live().count())?;
        let decodes = request.has_parted && request.num_scheduled(sample) + 1 == request.tokens(sample).len();
        request.samples[sample].row.map(|row| (row, decodes))
    }

    /// Whether a plan in flight is about the request.
    pub(crate) fn is_in_flight(&self, handle: Handle) -> bool {
        self.plans.iter().flat_map(|plan| &plan.entries).any(|entry| entry.handle == handle)
    }

    /// The sequence on a row gets guesses for its next tokens.
    pub(crate) fn set_drafts(&mut self, row: i32, ids: &[i32]) {
        let mut samples = self.requests.iter_mut().flat_map(|request| &mut request.samples);
        let sample = samples.find(|sample| !sample.is_over && sample.row == Some(row)).expect("it sits there");
        sample.drafts = (-1..).zip(ids).map(|(parent, &token)| Node { token, parent }).collect();
    }

    fn rows(&self, random: &mut Random) -> Outcome {
        let plan = self.plans.front().expect("a plan is in flight");
        let mut rows = Vec::new();
        let mut drawn = plan.tokens.iter();
        for entry in &plan.entries {
            if entry.drafts.is_empty() {
                rows.extend(drawn.by_ref().take(entry.drawn.len()).map(|&token| vec![token]));
                continue;
            }
            drawn.by_ref().take(entry.drafts.len() + 1).for_each(drop);
            let num_accepted = random.below(entry.drafts.len() + 1);
            let accepted = entry.drafts[..num_accepted].iter().map(|node| node.token);
            rows.push(accepted.chain([token(random)]).collect());
        }
        let width = rows.iter().map(Vec::len).max().unwrap_or(1) + random.below(2);
        rows.iter_mut().for_each(|row| row.resize(width, -1));
        Outcome::Rows { rows: rows.concat(), width }
    }

    /// Ends the oldest plan; answers what the scheduler must answer.
    pub(crate) fn commit(&mut self, outcome: &Outcome) -> StepResult {
        self.drain_aborts();
        if let Outcome::Beams { tokens, parents } = outcome {
            return self.commit_beams(tokens, parents);
        }
        let plan = self.plans.pop_front().expect("a plan is in flight");
        let rows: Vec<Vec<i32>> = match outcome {
            Outcome::Tokens(tokens) => tokens.iter().map(|&token| vec![token]).collect(),
            Outcome::Rows { rows, width } => {
                rows.chunks(*width).map(|row| row.iter().copied().take_while(|&token| token >= 0).collect()).collect()
            }
            Outcome::Beams { .. } => unreachable!("handled above"),
        };
        let mut result = StepResult::default();
        let mut rows = rows.into_iter();
        for entry in &plan.entries {
            self.part(entry, &mut result);
            for (&sample, row) in entry.drawn.iter().zip(&mut rows) {
                self.take_tokens(plan.arrays.id(), entry, sample, &row, &mut result);
            }
        }
        self.note(&result);
        result
    }

    pub(super) fn note(&mut self, result: &StepResult) {
        self.events.note("ignored tokens", u64::from(result.num_ignored));
        self.events.note("forks", result.forked.len() as u64);
        self.events.note("finished requests", result.finished.len() as u64);
    }

    pub(super) fn part(&mut self, entry: &Entry, result: &mut StepResult) {
        let Some(request) = self.find_mut(entry.handle).filter(|request| request.residence == entry.residence) else {
            return;
        };
        if !entry.completes_prompt {
            return;
        }
        request.has_parted = true;
        let live: Vec<usize> = request.live().collect();
        for &sample in &live {
            request.samples[sample].num_scheduled = request.prompt_len();
        }
        let fork = |&child: &usize| Fork { handle: entry.handle, parent: live[0] as u32, child: child as u32 };
        result.forked.extend(live[1..].iter().map(fork));
    }

    fn take_tokens(&mut self, plan: PlanId, entry: &Entry, sample: usize, row: &[i32], result: &mut StepResult) {
        let handle = entry.handle;
        let Some(request) = self.find_mut(handle).filter(|request| !request.samples[sample].is_over) else {
            result.num_ignored += row.len() as u32;
            return;
        };
        let is_resident = request.residence == entry.residence;
        let found = &mut request.samples[sample];
        found.drafts.clear();
        if entry.drafts.is_empty() {
            let pending = found.pending.remove(0);
            assert_eq!((pending.plan, pending.token), (plan, row[0]));
        } else {
            assert_eq!(found.drafting.take(), Some(plan));
            if is_resident {
                found.num_scheduled = entry.end - entry.drafts.len() + row.len() - 1;
            }
        }
        let mut reason = None;
        let mut num_taken = 0;
        while num_taken < row.len() && reason.is_none() {
            reason = self.reason(handle, sample, row[num_taken]);
            self.find_mut(handle).expect("it lives").samples[sample].outputs.push(row[num_taken]);
            num_taken += 1;
        }
        result.num_ignored += (row.len() - num_taken) as u32;
        result.handles.push(handle.get());
        result.sequence.push(sample as i32);
        result.num_new_tokens.push(num_taken as i32);
        result.finish_reason.push(reason.map_or(0, |reason| reason as i8));
        if !entry.drafts.is_empty() {
            self.events.note("accepted drafts", row.len() as u64 - 1);
            self.events.note("rejected drafts", (entry.drafts.len() + 1 - row.len()) as u64);
        }
        if reason.is_some() {
            self.end(handle, sample, result);
        }
    }

    /// Why a sample ends with this token as its next, if it does.
    pub(super) fn reason(&self, handle: Handle, sample: usize, token: i32) -> Option<FinishReason> {
        let request = &self.requests[self.position(handle).expect("it lives")];
        let num_outputs = request.samples[sample].outputs.len() + 1;
        let stops = request.asked.stop_token_ids.contains(&token) && num_outputs >= request.asked.min_tokens as usize;
        let is_long = num_outputs == request.asked.max_tokens as usize;
        if stops { Some(FinishReason::Stop) } else { is_long.then_some(FinishReason::Length) }
    }

    /// Ends a sample in a commit.
    pub(super) fn end(&mut self, handle: Handle, sample: usize, result: &mut StepResult) {
        let request = &self.requests[self.position(handle).expect("it lives")];
        let finished = FinishedRequest {
            handle,
            request_id: request.asked.request_id.clone(),
            num_cached_tokens: request.num_cached_tokens as u32,
            num_preemptions: request.num_preemptions,
        };
        if self.finish(handle, sample) {
            result.finished.push(finished);
        }
    }
}
