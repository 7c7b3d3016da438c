//! Samples that continue one another.

use pagedkv_core::{FinishReason, Fork, Handle, StepResult};

use super::super::random::Random;
use super::commit::{Outcome, token};
use super::{Plan, SchedulerModel};

impl SchedulerModel {
    /// Lets beams go and branch; requests that do not wait for commits get their one token per sample.
    pub(super) fn beams(&self, random: &mut Random) -> Outcome {
        let plan = self.plans.front().expect("a plan is in flight");
        let mut parents = Vec::new();
        let mut tokens = Vec::new();
        let drawn = drawn(plan);
        for family in drawn.chunk_by(|one, other| one.1 == other.1) {
            let request = self.requests.iter().find(|request| request.handle == family[0].1);
            let most = request.filter(|request| request.asked.needs_commit).map_or(0, |request| request.samples.len());
            if most == 0 {
                parents.extend(family.iter().map(|&(index, ..)| index as i32));
                tokens.extend(family.iter().map(|&(index, ..)| plan.tokens[index]));
                continue;
            }
            for _ in 0..random.below(most + 1).max(usize::from(random.below(4) > 0)) {
                parents.push(family[random.below(family.len())].0 as i32);
                tokens.push(token(random));
            }
        }
        Outcome::Beams { tokens, parents }
    }

    pub(super) fn commit_beams(&mut self, tokens: &[i32], parents: &[i32]) -> StepResult {
        let plan = self.plans.pop_front().expect("a plan is in flight");
        let mut result = StepResult::default();
        for entry in &plan.entries {
            self.compute(entry);
            self.part(entry, &mut result);
        }
        let mut drawn = drawn(&plan);
        for &(_, handle, sample) in &drawn {
            if let Some(request) = self.find_mut(handle) {
                let sample = &mut request.samples[sample];
                sample.pending.retain(|pending| pending.plan != plan.arrays.id());
                sample.drafts.clear();
            }
        }
        drawn.retain(|&(_, handle, sample)| self.is_alive(handle, sample));
        let mut outcome = vec![None; tokens.len()];
        for family in drawn.chunk_by(|one, other| one.1 == other.1) {
            self.continue_family(family, tokens, parents, &mut outcome, &mut result);
        }
        for (&parent, outcome) in parents.iter().zip(&outcome) {
            match (drawn.iter().find(|drawn| drawn.0 == parent as usize), outcome) {
                (Some(&(_, handle, _)), &Some((sequence, reason))) => push(&mut result, handle, sequence, 1, reason),
                _ => result.num_ignored += 1,
            }
        }
        for &(index, handle, sample) in &drawn {
            if !parents.contains(&(index as i32)) {
                push(&mut result, handle, sample as i32, 0, FinishReason::Dropped as i8);
                self.events.note("dropped beams", 1);
            }
        }
        self.note(&result);
        result
    }

    fn is_alive(&self, handle: Handle, sample: usize) -> bool {
        self.requests.iter().any(|request| request.handle == handle && !request.samples[sample].is_over)
    }

    /// What the tokens of one request do, all parents being as they were before them.
    fn continue_family(
        &mut self,
        family: &[(usize, Handle, usize)],
        tokens: &[i32],
        parents: &[i32],
        outcome: &mut [Option<(i32, i8)>],
        result: &mut StepResult,
    ) {
        let before = self.requests[self.position(family[0].1).expect("it lives")].samples.clone();
        let mut heirs = Vec::new();
        for &(index, handle, sample) in family {
            let own: Vec<usize> = (0..tokens.len()).filter(|&i| parents[i] as usize == index).collect();
            let reasons: Vec<_> = own.iter().map(|&i| self.reason(handle, sample, tokens[i])).collect();
            self.note_tokens(handle, own.len());
            let goes_on = reasons.iter().any(Option::is_none);
            let mut keeps = goes_on;
            let mut is_first_end = true;
            for (&i, reason) in own.iter().zip(&reasons) {
                if let Some(reason) = reason {
                    let number = if !goes_on && is_first_end { sample as i32 } else { -1 };
                    outcome[i] = Some((number, *reason as i8));
                    is_first_end = false;
                } else {
                    heirs.push((i, sample, keeps));
                    keeps = false;
                }
            }
            if !goes_on {
                let reason = reasons.iter().flatten().next().copied().unwrap_or(FinishReason::Dropped);
                let last = own.first().map(|&i| tokens[i]);
                self.find_mut(handle).expect("it lives").samples[sample].outputs.extend(last);
                self.end(handle, sample, reason, result);
            }
        }
        heirs.sort_unstable();
        let mut places = Vec::new();
        for &(i, parent, keeps) in &heirs {
            let request = self.find_mut(family[0].1).expect("some of its samples go on");
            let sample = if keeps { parent } else { (0..before.len()).find(|&s| request.samples[s].is_over).unwrap() };
            if !keeps {
                let child = &mut request.samples[sample];
                let row = child.row.filter(|_| request.is_resident);
                *child = super::Sample { row, ..before[parent].clone() };
                if let Some(swapped) = &mut request.swapped {
                    swapped.lens[sample] = swapped.lens[parent];
                }
                result.forked.push(Fork { handle: family[0].1, parent: parent as u32, child: sample as u32 });
                self.events.note("branches", 1);
            }
            places.push((i, sample));
        }
        for (i, sample) in places {
            let request = self.find_mut(family[0].1).expect("some of its samples go on");
            request.samples[sample].outputs.push(tokens[i]);
            outcome[i] = Some((sample as i32, 0));
        }
    }
}

/// The plan's samples: their number, request and sample.
fn drawn(plan: &Plan) -> Vec<(usize, Handle, usize)> {
    let drawn = plan.entries.iter().flat_map(|entry| entry.drawn.iter().map(|&sample| (entry.handle, sample)));
    drawn.enumerate().map(|(index, (handle, sample))| (index, handle, sample)).collect()
}

fn push(result: &mut StepResult, handle: Handle, sequence: i32, num_new_tokens: i32, finish_reason: i8) {
    result.handles.push(handle.get());
    result.sequence.push(sequence);
    result.num_new_tokens.push(num_new_tokens);
    result.finish_reason.push(finish_reason);
}
