//! What the model knows of a request.

use std::sync::Arc;

use pagedkv_core::{Handle, NewRequest, PlanId};

use super::stats::Times;
use super::transfers::Swapped;

/// A token that a plan in flight samples.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    pub(super) plan: PlanId,
    pub(super) index: usize,
    pub(super) token: i32,
}

/// A guess, and the one that it continues, by its number; -1 for the last known token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) token: i32,
    pub(crate) parent: i32,
}

/// Guesses from the last known token to this one, by their numbers.
pub(super) fn path(nodes: &[Node], node: usize) -> Vec<usize> {
    let mut path = vec![node];
    while let Ok(parent) = usize::try_from(nodes[path[path.len() - 1]].parent) {
        path.push(parent);
    }
    path.reverse();
    path
}

pub(super) fn depth(nodes: &[Node], node: usize) -> usize {
    path(nodes, node).len()
}

#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// All that is known behind the prompt.
    pub(super) outputs: Vec<i32>,
    /// Tokens known when the present turn began to sample.
    pub(super) turn_start: usize,
    pub(super) max_tokens: usize,
    pub(super) pending: Vec<Pending>,
    /// Guesses that wait for a plan, or are given back by the rollback of one.
    pub(super) drafts: Vec<Node>,
    /// The first position whose contents the next plan moves into place, and its moves: group, source and destination
    /// slot.
    pub(super) awaiting: Option<(usize, Vec<[i64; 3]>)>,
    /// The plan in flight that checks guesses.
    pub(super) drafting: Option<PlanId>,
    /// Where it sits, as far as a plan told.
    pub(super) row: Option<i32>,
    pub(super) is_over: bool,
    /// It has ended and a session keeps it.
    pub(super) is_kept: bool,
    pub(super) num_scheduled: usize,
    /// Of these, by plans that committed.
    pub(super) num_computed: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) handle: Handle,
    pub(super) asked: Arc<NewRequest>,
    pub(super) samples: Vec<Sample>,
    pub(super) is_resident: bool,
    pub(super) is_held: bool,
    /// Rises whenever the request loses its blocks.
    pub(super) residence: u32,
    /// Whether each sample is a sequence; before, one computes the prompt for all.
    pub(super) has_parted: bool,
    pub(super) num_prompt_scheduled: usize,
    pub(super) num_prompt_computed: usize,
    pub(super) num_preemptions: u32,
    pub(super) num_cached_tokens: usize,
    pub(super) times: Times,
    pub(super) swapped: Option<Swapped>,
    /// Tokens that it may still ask for from outside.
    pub(super) num_external: usize,
    /// Its transfer that has not ended.
    pub(super) transfer: Option<i64>,
    /// Admissions of later requests while it waited, and how many there may be.
    pub(super) num_overtakings: usize,
    pub(super) most_overtakings: usize,
}

impl Request {
    pub(super) fn live(&self) -> impl Iterator<Item = usize> {
        (0..self.samples.len()).filter(|&sample| !self.samples[sample].is_over)
    }

    /// Whether its samples are planned together or not at all.
    pub(super) fn is_gang(&self) -> bool {
        self.asked.needs_commit && self.samples.len() > 1
    }

    /// Whether every live sample has only its last known token to compute.
    pub(super) fn is_ready(&self) -> bool {
        self.has_parted && self.live().all(|sample| self.num_scheduled(sample) + 1 == self.tokens(sample).len())
    }

    /// Whether it may ask for a load from outside.
    pub(crate) fn may_load(&self) -> bool {
        self.asked.num_external_tokens > 0
    }

    pub(crate) fn num_samples(&self) -> usize {
        self.samples.len()
    }

    pub(crate) fn request_id(&self) -> &str {
        &self.asked.request_id
    }

    /// Tokens that all samples can come to.
    pub(crate) fn most_tokens(&self) -> usize {
        self.samples.iter().map(|sample| sample.turn_start + sample.max_tokens).sum()
    }

    pub(super) fn prompt_len(&self) -> usize {
        self.asked.prompt_token_ids.len()
    }

    /// The prompt and what is known behind it.
    pub(super) fn num_known(&self, sample: usize) -> usize {
        self.prompt_len() + self.samples[sample].outputs.len()
    }

    /// The prompt, what was sampled, and what plans in flight sample.
    pub(super) fn tokens(&self, sample: usize) -> Vec<i32> {
        let Sample { outputs, pending, .. } = &self.samples[sample];
        let pending = pending.iter().map(|pending| pending.token);
        self.asked.prompt_token_ids.iter().chain(outputs).copied().chain(pending).collect()
    }

    pub(super) fn num_scheduled(&self, sample: usize) -> usize {
        if self.has_parted { self.samples[sample].num_scheduled } else { self.num_prompt_scheduled }
    }

    pub(super) fn set_num_scheduled(&mut self, sample: usize, num_tokens: usize) {
        if self.has_parted {
            self.samples[sample].num_scheduled = num_tokens;
        } else {
            self.num_prompt_scheduled = num_tokens;
        }
    }

    pub(super) fn set_num_computed(&mut self, sample: usize, num_tokens: usize) {
        if self.has_parted {
            self.samples[sample].num_computed = num_tokens;
        } else {
            self.num_prompt_computed = num_tokens;
        }
    }

    /// Tokens of the sample that can be computed now.
    pub(super) fn limit(&self, sample: usize) -> usize {
        if self.has_parted {
            let Sample { turn_start, max_tokens, .. } = self.samples[sample];
            self.tokens(sample).len().min(turn_start + max_tokens - 1)
        } else {
            self.prompt_len()
        }
    }

    /// Guesses that may run now: behind the last known token, and no more than can still be accepted.
    pub(super) fn num_drafts(&self, sample: usize) -> usize {
        let found = &self.samples[sample];
        let most = found.turn_start + found.max_tokens - 1 - self.num_known(sample);
        let can_draft = self.has_parted && found.pending.is_empty();
        let is_in_reach = |&node: &usize| depth(&found.drafts, node) <= most;
        if can_draft { (0..found.drafts.len()).take_while(is_in_reach).count() } else { 0 }
    }

    /// The samples whose sequences can be planned.
    pub(super) fn sequences(&self) -> Vec<usize> {
        if self.has_parted { self.live().collect() } else { self.live().take(1).collect() }
    }

    pub(super) fn leave(&mut self) {
        self.is_resident = false;
        self.residence += 1;
        self.has_parted = false;
        (self.num_prompt_scheduled, self.num_prompt_computed) = (0, 0);
        for sample in self.samples.iter_mut().filter(|sample| !sample.is_kept) {
            (sample.num_scheduled, sample.num_computed) = (0, 0);
            sample.awaiting = None;
            sample.row = None;
            sample.drafts.clear();
        }
    }
}
