//! A request, its samples, and what the caller says of it.

use std::sync::Arc;

use smallvec::SmallVec;

use super::drafts::Drafts;
use super::policy::{Order, RequestView};
use super::room::blocks_at_the_longest;
use super::stats::RequestRecord;
use super::transfers::Swapped;
use crate::cache_layout::TableSpec;
use crate::config::{CacheConfig, EvictionPolicy, Policy, Retention, SchedulerConfig};
use crate::error::{Error, Result, invalid};
use crate::identity::Identity;
use crate::ids::{Handle, PlanId};
use crate::kv_cache_manager::{Arrival, KVCacheManager, Match, check_identity, check_tokens};

/// "No sequence", "no row".
pub(super) const NONE: u32 = u32::MAX;

/// What a caller asks for. Fields that this version refuses by name are here already.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// The caller's name for the request; unique among live ones.
    pub request_id: String,
    /// The prompt; at least one token, none negative.
    pub prompt_token_ids: Vec<i32>,
    /// Most tokens to sample per sample; at least 1.
    pub max_tokens: u32,
    /// Samples to draw.
    pub n: u32,
    /// Tokens that end a sample.
    pub stop_token_ids: Vec<i32>,
    /// Tokens to sample before a stop token ends a sample.
    pub min_tokens: u32,
    /// Lower is more urgent; refused unless 0 where the policy is not [`Policy::Priority`] or the caller's own.
    pub priority: i32,
    /// Whose share the request counts against under [`Policy::FairShare`].
    pub tenant: Option<String>,
    /// When it arrived, in the caller's seconds, finite; for statistics and the caller's own policies.
    pub arrival: f64,
    /// Extra keys of the prefix.
    pub identity: Identity,
    /// Whether the request reads and feeds the prefix cache.
    pub use_prefix_cache: bool,
    /// How its blocks are to be kept in the cache; refused unless the eviction policy has priorities.
    pub retention: Option<Retention>,
    /// Prompt tokens, from the first on, whose keys and values the caller can load from outside, from where others computed
    /// them: see [`super::Scheduler::transfers_done`].
    pub num_external_tokens: u32,
    /// Not planned again before the commit of its last plan.
    pub needs_commit: bool,
    /// Whether samples that finish keep their blocks, to be continued by [`super::Scheduler::append_tokens`]. Refused
    /// with `needs_commit` and n > 1: beams take each other's numbers.
    pub session: bool,
}

impl NewRequest {
    /// A plain request for one sample.
    pub fn new(request_id: impl Into<String>, prompt_token_ids: Vec<i32>, max_tokens: u32) -> Self {
        Self {
            request_id: request_id.into(),
            prompt_token_ids,
            max_tokens,
            n: 1,
            stop_token_ids: Vec::new(),
            min_tokens: 0,
            priority: 0,
            tenant: None,
            arrival: 0.0,
            identity: Identity::default(),
            use_prefix_cache: true,
            retention: None,
            num_external_tokens: 0,
            needs_commit: false,
            session: false,
        }
    }

    /// Checks all but what the limits say, which may change.
    pub(super) fn validate(&self, cache: &CacheConfig, policy: Policy) -> Result<()> {
        self.refuse_unsupported(policy)?;
        check_identity(&self.identity)?;
        if let Some(retention) = self.retention {
            retention.validate()?;
            if cache.eviction_policy != EvictionPolicy::Priority {
                return Err(Error::Unsupported("cache_priority: the eviction policy is not \"priority\"".into()));
            }
        }
        if self.prompt_token_ids.is_empty() {
            return invalid("prompt_token_ids", "at least one token", "none");
        }
        // The sign of all together first: that is a pass of vector operations.
        let signs = self.prompt_token_ids.iter().fold(0, |signs, token| signs | token);
        if let Some(negative) = self.prompt_token_ids.iter().find(|&&token| signs < 0 && token < 0) {
            return invalid("prompt_token_ids", "token ids of at least 0", negative);
        }
        check_tokens("stop_token_ids", &self.stop_token_ids)?;
        if let Some(beyond) = self
            .identity
            .images
            .iter()
            .map(|image| image.start + image.len)
            .find(|&end| end as usize > self.prompt_token_ids.len())
        {
            return invalid("image_spans", format!("ends up to {}", self.prompt_token_ids.len()), beyond);
        }
        if self.max_tokens == 0 {
            return invalid("max_tokens", "at least 1", 0);
        }
        if self.num_external_tokens as usize > self.prompt_token_ids.len() {
            let expected = format!("at most {} (the prompt's tokens)", self.prompt_token_ids.len());
            return invalid("num_external_tokens", expected, self.num_external_tokens);
        }
        if !self.arrival.is_finite() {
            return invalid("now", "a finite time in seconds", self.arrival);
        }
        Ok(())
    }

    /// Checks what the limits say.
    ///
    /// # Complexity
    /// O(1).
    pub(super) fn validate_limits(
        &self,
        cache: &CacheConfig,
        groups: &[TableSpec],
        limits: &SchedulerConfig,
    ) -> Result<()> {
        if !(1..=limits.max_num_seqs).contains(&self.n) {
            return invalid("n", format!("1 to {} (max_num_seqs)", limits.max_num_seqs), self.n);
        }
        if self.needs_commit && self.n > limits.max_num_batched_tokens {
            let expected = format!(
                "at most {} (max_num_batched_tokens) with needs_commit, which plans all samples together",
                limits.max_num_batched_tokens
            );
            return invalid("n", expected, self.n);
        }
        let longest = self.prompt_token_ids.len() as u64 + u64::from(self.max_tokens);
        if longest > u64::from(limits.max_model_len) {
            let expected = format!("prompt + max_tokens of at most {} (max_model_len)", limits.max_model_len);
            return invalid("max_tokens", expected, format!("{} + {}", self.prompt_token_ids.len(), self.max_tokens));
        }
        // The last token that is sampled needs no slot.
        let (prompt, longest) = (self.prompt_token_ids.len() as u64, longest - 1 + u64::from(limits.lookahead));
        // A sample of a session may have to compute the prompt anew while another one keeps it.
        let shared = if self.session && self.n > 1 { 0 } else { prompt };
        let needed = blocks_at_the_longest(groups, limits, shared, &std::iter::repeat_n(longest, self.n as usize));
        let usable = u64::from(cache.usable_blocks());
        if needed > usable { Err(Error::NeverFits { needed, usable }) } else { Ok(()) }
    }

    fn refuse_unsupported(&self, policy: Policy) -> Result<()> {
        let ignores_priority = !matches!(policy, Policy::Priority | Policy::External);
        let refused = [
            (self.priority != 0 && ignores_priority, "priority: the policy is not \"priority\""),
            (
                self.session && self.needs_commit && self.n > 1,
                "session with needs_commit and n > 1: beams take each other's sequence numbers; fork the one to go on with",
            ),
        ];
        let found = refused.iter().find(|(is_asked, _)| *is_asked);
        found.map_or(Ok(()), |(_, why)| Err(Error::Unsupported((*why).into())))
    }
}

/// Why a sample ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i8)]
pub enum FinishReason {
    /// A stop token, or the caller's [`super::Scheduler::finish`].
    Stop = 1,
    /// `max_tokens` were sampled.
    Length = 2,
    /// The caller's abort.
    Abort = 3,
    /// A beam that no token continued.
    Dropped = 4,
}

/// How far the samples of a request have parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not resident.
    Waiting,
    /// One sequence computes the prompt for all samples, which fork when it is done.
    Prompt,
    /// Each sample is a sequence.
    Apart,
    /// A session whose samples have all ended, some of which keep their blocks.
    Resting,
}

#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// Its sequence in the manager; [`NONE`] before the first fork.
    pub(super) sequence: u32,
    /// Its seat; [`NONE`] while its request waits.
    pub(super) row: u32,
    /// Tokens known when the present turn began to sample: the prompt, or all that a session's sample had then.
    pub(super) turn_start: u32,
    /// Most tokens that the present turn may sample.
    pub(super) max_tokens: u32,
    /// Tokens sampled in the present turn, and known.
    pub(super) num_outputs: u32,
    /// Tokens that plans in flight will sample.
    pub(super) num_pending: u32,
    /// The newest plan that samples for it, and which of that plan's samples is its.
    pub(super) drawn: (PlanId, u32),
    pub(super) finish: Option<FinishReason>,
    /// It has ended and a session keeps it.
    pub(super) is_kept: bool,
    /// Guesses for its next tokens, for the next plan that has room for them.
    pub(super) drafts: Drafts,
    /// A plan in flight checks guesses: only its commit tells which tokens there are.
    pub(super) is_drafting: bool,
}

impl Sample {
    /// Tokens of the present turn that get slots: the last one that is sampled needs none.
    pub(super) fn most_computed(&self) -> u32 {
        self.turn_start + self.max_tokens - 1
    }
}

#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "what the caller asked for, and two marks")]
pub(super) struct Request {
    pub(super) handle: Handle,
    pub(super) id: Arc<str>,
    pub(super) prompt: Arc<Vec<i32>>,
    pub(super) identity: Arc<Identity>,
    pub(super) use_prefix_cache: bool,
    pub(super) retention: Option<Retention>,
    /// Most tokens to sample per turn where the turn says nothing else.
    pub(super) max_tokens: u32,
    pub(super) min_tokens: u32,
    pub(super) stop_token_ids: Box<[i32]>,
    pub(super) needs_commit: bool,
    pub(super) is_session: bool,
    /// Not planned until the caller releases it.
    pub(super) is_held: bool,
    /// It waits, and has blocks from before: a session's next turn, or a fork.
    pub(super) is_keeper: bool,
    /// Tokens that the present turn brought along.
    pub(super) num_new_tokens: u64,
    pub(super) samples: SmallVec<[Sample; 1]>,
    pub(super) num_live: u32,
    pub(super) stage: Stage,
    /// Entries of plans in flight that are about this request.
    pub(super) num_in_flight: u32,
    /// The newest plan that names it.
    pub(super) last_plan: PlanId,
    pub(super) priority: i32,
    pub(super) tenant: Option<String>,
    pub(super) arrival: f64,
    /// What the policy said, and the place that follows from it.
    pub(super) key: f64,
    pub(super) order: Order,
    /// Number of its arrival, by which equal keys are ordered.
    pub(super) turn: u64,
    /// Admissions after which the request is due; [`u64::MAX`] once it is, or never will be.
    pub(super) due_at: u64,
    /// State of the cache at the last lookup, and what it found.
    pub(super) matched: (u64, Match),
    /// Prompt tokens that the first residence took from the cache.
    pub(super) num_cached_tokens: u32,
    pub(super) num_preemptions: u32,
    pub(super) record: RequestRecord,
    /// Tokens that it may still ask for from outside.
    pub(super) num_external_tokens: u32,
    /// What it has in the host tier, or outside.
    pub(super) swapped: Option<Box<Swapped>>,
    /// Its transfer that has not ended: it is not planned until then.
    pub(super) transfer: Option<i64>,
    /// Its sequences whose blocks that transfer fills.
    pub(super) arrivals: Vec<Arrival>,
}

impl Request {
    pub(super) fn new(handle: Handle, request: NewRequest) -> Self {
        let sample = Sample {
            sequence: NONE,
            row: NONE,
            turn_start: request.prompt_token_ids.len() as u32,
            max_tokens: request.max_tokens,
            num_outputs: 0,
            num_pending: 0,
            drawn: (PlanId::new(0), 0),
            finish: None,
            is_kept: false,
            drafts: Drafts::default(),
            is_drafting: false,
        };
        Self {
            handle,
            num_new_tokens: request.prompt_token_ids.len() as u64,
            id: request.request_id.into(),
            prompt: Arc::new(request.prompt_token_ids),
            identity: Arc::new(request.identity),
            use_prefix_cache: request.use_prefix_cache,
            retention: request.retention,
            max_tokens: request.max_tokens,
            min_tokens: request.min_tokens,
            stop_token_ids: request.stop_token_ids.into(),
            needs_commit: request.needs_commit,
            is_session: request.session,
            is_held: false,
            is_keeper: false,
            samples: SmallVec::from_elem(sample, request.n as usize),
            num_live: request.n,
            stage: Stage::Waiting,
            num_in_flight: 0,
            last_plan: PlanId::new(0),
            priority: request.priority,
            tenant: request.tenant,
            arrival: request.arrival,
            key: 0.0,
            order: Order::new(0.0, false, 0),
            turn: 0,
            due_at: u64::MAX,
            matched: (u64::MAX, Match::default()),
            num_cached_tokens: 0,
            num_preemptions: 0,
            record: RequestRecord::default(),
            num_external_tokens: request.num_external_tokens,
            swapped: None,
            transfer: None,
            arrivals: Vec::new(),
        }
    }

    /// What a policy sees of the request.
    pub(super) fn view(&self, num_tokens: u32, num_hit_tokens: u32) -> RequestView<'_> {
        RequestView {
            handle: self.handle,
            priority: self.priority,
            tenant: self.tenant.as_deref(),
            arrival: self.arrival,
            num_tokens,
            max_tokens: self.num_new_tokens + self.most_outputs(),
            num_hit_tokens,
        }
    }

    /// Most tokens that the present turn may sample, all samples together.
    pub(super) fn most_outputs(&self) -> u64 {
        self.samples.iter().map(|sample| u64::from(sample.max_tokens)).sum()
    }

    pub(super) fn prompt_len(&self) -> u32 {
        self.prompt.len() as u32
    }

    /// Whether the samples are planned together or not at all, and seats stay with the request until it ends: beams take
    /// each other's places.
    pub(super) fn is_gang(&self) -> bool {
        self.needs_commit && self.samples.len() > 1
    }

    /// Whether a sample draws a token when the prompt is computed for all. One that had more tokens before goes on behind
    /// those: after a preemption all have, in a session's turn some may.
    pub(super) fn draws_behind_the_prompt(&self, sample: &Sample, manager: &KVCacheManager) -> bool {
        let sequence = manager.sequences.get(sample.sequence as usize);
        sample.finish.is_none() && sequence.is_none_or(|sequence| sequence.tokens.len() == self.prompt_len())
    }

    /// Seats that the request takes when it is admitted.
    pub(super) fn num_seats(&self) -> u32 {
        if self.is_gang() { self.samples.len() as u32 } else { self.num_live }
    }

    /// The live sample with the lowest number: it computes the prompt for the others.
    pub(super) fn leader(&self) -> usize {
        self.samples.iter().position(|sample| sample.finish.is_none()).expect("a live request has a live sample")
    }
}
