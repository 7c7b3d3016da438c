//! How a plan ends: what the model sampled, what of the guesses it accepted, and what must follow.

use pagedkv_core::{FinishReason, FinishedRequest, Fork, Handle, PlanId, StepResult};

use super::super::random::Random;
use super::request::path;
use super::{Entry, Node, SchedulerModel};

/// The arguments with which a plan is committed.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Tokens(Vec<i32>),
    /// One row per sequence that samples, padded with -1, and the guesses that they accept.
    Rows {
        rows: Vec<i32>,
        accepted: Vec<i32>,
        width: usize,
        /// Whether the guesses must be named.
        has_trees: bool,
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

    /// Samples that can have guesses, as [`Self::row`] takes them.
    pub(crate) fn decoding(&self) -> Vec<(Handle, usize)> {
        let idle = self.requests.iter().filter(|request| !self.is_in_flight(request.handle));
        let samples = idle.flat_map(|request| (0..request.live().count()).map(|sample| (request.handle, sample)));
        samples.filter(|&(handle, sample)| self.row(handle, sample).is_some_and(|(_, decodes)| decodes)).collect()
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
    pub(crate) fn set_drafts(&mut self, row: i32, ids: &[i32], parents: &[i32]) {
        let mut samples = self.requests.iter_mut().flat_map(|request| &mut request.samples);
        let sample = samples.find(|sample| !sample.is_over && sample.row == Some(row)).expect("it sits there");
        sample.drafts = parents.iter().zip(ids).map(|(&parent, &token)| Node { token, parent }).collect();
    }

    fn rows(&self, random: &mut Random) -> Outcome {
        let plan = self.plans.front().expect("a plan is in flight");
        let (mut rows, mut accepted) = (Vec::new(), Vec::new());
        let mut drawn = plan.tokens.iter();
        for entry in &plan.entries {
            if entry.drafts.is_empty() {
                rows.extend(drawn.by_ref().take(entry.drawn.len()).map(|&token| vec![token]));
                accepted.resize(rows.len(), vec![]);
                continue;
            }
            drawn.by_ref().take(entry.drafts.len() + 1).for_each(drop);
            let last = random.below(entry.drafts.len() + 1).checked_sub(1);
            let path = last.map_or(vec![], |last| path(&entry.drafts, last));
            let tokens = path.iter().map(|&node| entry.drafts[node].token);
            rows.push(tokens.chain([token(random)]).collect());
            accepted.push(path.into_iter().map(|node| node as i32).collect());
        }
        let width = rows.iter().map(Vec::len).max().unwrap_or(1) + random.below(2);
        rows.iter_mut().chain(&mut accepted).for_each(|row| row.resize(width, -1));
        let has_trees = plan.entries.iter().any(|entry| entry.expected.is_tree) || random.below(2) == 0;
        Outcome::Rows { rows: rows.concat(), accepted: accepted.concat(), width, has_trees }
    }

    /// Ends the oldest plan; answers what the scheduler must answer.
    pub(crate) fn commit(&mut self, outcome: &Outcome) -> StepResult {
        self.drain_aborts();
        if let Outcome::Beams { tokens, parents } = outcome {
            return self.commit_beams(tokens, parents);
        }
        let plan = self.plans.pop_front().expect("a plan is in flight");
        let unpad = |rows: &[i32], width: usize| -> Vec<Vec<i32>> {
            rows.chunks(width).map(|row| row.iter().copied().take_while(|&entry| entry >= 0).collect()).collect()
        };
        let (rows, paths) = match outcome {
            Outcome::Tokens(tokens) => (tokens.iter().map(|&token| vec![token]).collect(), vec![vec![]; tokens.len()]),
            Outcome::Rows { rows, accepted, width, .. } => (unpad(rows, *width), unpad(accepted, *width)),
            Outcome::Beams { .. } => unreachable!("handled above"),
        };
        let mut result = StepResult::default();
        let mut rows = rows.into_iter().zip(paths);
        for (s, entry) in plan.entries.iter().enumerate() {
            let tables: Vec<_> = plan.tables.iter().map(|group| group[s].as_slice()).collect();
            self.compute(entry);
            self.part(entry, &mut result);
            for (&sample, (row, path)) in entry.drawn.iter().zip(&mut rows) {
                let goes_on = self.take_tokens(plan.arrays.id(), entry, sample, &row, &mut result);
                if goes_on && !path.is_empty() {
                    self.await_moves(entry, sample, &tables, &path);
                }
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

    /// The tokens of a plan that commits are computed.
    pub(super) fn compute(&mut self, entry: &Entry) {
        let request = self.find_mut(entry.handle).filter(|request| request.residence == entry.residence);
        let Some(request) = request else { return };
        if !request.has_parted {
            request.num_prompt_computed = entry.end;
        } else if !request.samples[entry.sample].is_over {
            request.samples[entry.sample].num_computed = entry.end;
        }
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
            let prompt_len = request.prompt_len();
            let sample = &mut request.samples[sample];
            (sample.num_scheduled, sample.num_computed) = (prompt_len, prompt_len);
        }
        let fork = |&child: &usize| Fork { handle: entry.handle, parent: live[0] as u32, child: child as u32 };
        result.forked.extend(live[1..].iter().map(fork));
    }

    /// Accepted guesses that do not lie where they belong are moved there by the next plan.
    fn await_moves(&mut self, entry: &Entry, sample: usize, tables: &[&[i32]], path: &[i32]) {
        let first = entry.end - entry.drafts.len();
        let sizes: Vec<usize> = self.limits.groups.iter().map(|group| group.block_size).collect();
        let slot = |group: usize, at: usize| {
            let size = sizes[group];
            i64::from(tables[group][at / size]) * size as i64 + (at % size) as i64
        };
        let request = self.find_mut(entry.handle).expect("it lives");
        let in_place = (0..).zip(path).take_while(|&(place, &node)| node == place).count();
        if request.residence == entry.residence && in_place < path.len() {
            let moves = (0..tables.len()).flat_map(|group| {
                let moved = in_place..path.len();
                moved
                    .map(move |i| (group, i))
                    .map(|(group, i)| [group as i64, slot(group, first + path[i] as usize), slot(group, first + i)])
            });
            request.samples[sample].awaiting = Some((first + in_place, moves.collect()));
        }
    }

    /// Answers whether the sample goes on.
    fn take_tokens(
        &mut self,
        plan: PlanId,
        entry: &Entry,
        sample: usize,
        row: &[i32],
        result: &mut StepResult,
    ) -> bool {
        let handle = entry.handle;
        let Some(request) = self.find_mut(handle).filter(|request| !request.samples[sample].is_over) else {
            result.num_ignored += row.len() as u32;
            return false;
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
                found.num_computed = found.num_scheduled;
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
        self.note_tokens(handle, num_taken);
        if let Some(reason) = reason {
            self.end(handle, sample, reason, result);
        }
        reason.is_none()
    }

    /// Why a sample ends with this token as its next, if it does.
    pub(super) fn reason(&self, handle: Handle, sample: usize, token: i32) -> Option<FinishReason> {
        let request = &self.requests[self.position(handle).expect("it lives")];
        let found = &request.samples[sample];
        let num_outputs = request.num_known(sample) + 1 - found.turn_start;
        let stops = request.asked.stop_token_ids.contains(&token) && num_outputs >= request.asked.min_tokens as usize;
        let is_long = num_outputs == found.max_tokens;
        if stops { Some(FinishReason::Stop) } else { is_long.then_some(FinishReason::Length) }
    }

    /// Ends a sample in a commit.
    pub(super) fn end(&mut self, handle: Handle, sample: usize, reason: FinishReason, result: &mut StepResult) {
        let request = &self.requests[self.position(handle).expect("it lives")];
        let finished = FinishedRequest {
            handle,
            request_id: request.asked.request_id.clone(),
            num_cached_tokens: request.num_cached_tokens as u32,
            num_preemptions: request.num_preemptions,
            stats: self.stats_of(request),
        };
        if self.end_for(handle, sample, reason) {
            result.finished.push(finished);
        }
    }
}
