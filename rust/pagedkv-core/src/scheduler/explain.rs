//! Why a request waits: what stands in its way, in a record and in words.

use super::Scheduler;
use super::request::Stage;
use super::snapshot::RequestState;
use crate::error::{Error, Result};
use crate::ids::{Handle, PlanId};

/// What decides over a request in the next [`Scheduler::schedule`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// Nothing is in its way: the next plan computes so many of its tokens.
    Ready {
        /// Tokens that run; 0 where blocks come back from the host tier first.
        num_tokens: u32,
    },
    /// It is a session that has finished and keeps its blocks: it waits for `append_tokens`.
    Resting,
    /// The caller holds it: it waits for `release`.
    Held,
    /// As many plans are in flight as may be.
    PlansInFlight {
        /// The plan to end first.
        oldest: PlanId,
        /// `max_plans_in_flight`.
        limit: u32,
    },
    /// It is in a plan in flight, and goes on when that has ended.
    InFlight {
        /// The newest plan that names it.
        plan: PlanId,
    },
    /// Its blocks are on their way to the host tier or back: it goes on when that has ended.
    Transfer {
        /// The transfer that [`Scheduler::transfers_done`] ends.
        transfer: i64,
    },
    /// The tokens of the step are taken by those before it.
    TokenBudget {
        /// `max_num_batched_tokens`.
        budget: u32,
        /// Tokens that are left for it; fewer than it can run with.
        left: u32,
    },
    /// There are not enough seats.
    Seats {
        /// Seats that it needs.
        needed: u32,
        /// Seats that are free.
        free: u32,
        /// Seats that are free when plans in flight have ended.
        fenced: u32,
    },
    /// There are not enough blocks.
    Blocks {
        /// Blocks that it needs now, with what it must leave to others.
        needed: u32,
        /// Blocks that it may take.
        available: u32,
        /// Blocks that wait for plans in flight.
        fenced: u32,
        /// Blocks that only sessions at rest hold: `free` gives them back.
        in_sessions: u32,
    },
    /// As many requests are in the middle of their prompt as may be.
    PartialPrefills {
        /// `max_num_partial_prefills`.
        limit: u32,
    },
    /// Blocks are kept for a waiting request that comes before it.
    Reserved {
        /// The one that comes before it.
        request: Handle,
        /// Blocks that are kept for that one.
        num_blocks: u32,
    },
    /// Another request comes first in the order, and does not get what it needs, or takes it from those behind.
    Behind {
        /// The other one.
        request: Handle,
    },
}

impl Reason {
    /// A word for it, for programs.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Ready { .. } => "ready",
            Self::Resting => "resting",
            Self::Held => "held",
            Self::PlansInFlight { .. } => "plans_in_flight",
            Self::InFlight { .. } => "in_flight",
            Self::Transfer { .. } => "transfer",
            Self::TokenBudget { .. } => "token_budget",
            Self::Seats { .. } => "seats",
            Self::Blocks { .. } => "blocks",
            Self::PartialPrefills { .. } => "partial_prefills",
            Self::Reserved { .. } => "reserved",
            Self::Behind { .. } => "behind",
        }
    }

    /// What it says, by name.
    pub fn fields(&self) -> Vec<(&'static str, i64)> {
        let number = |name, value: u32| (name, i64::from(value));
        match *self {
            Self::Ready { num_tokens } => vec![number("num_tokens", num_tokens)],
            Self::Resting | Self::Held => Vec::new(),
            Self::PlansInFlight { oldest, limit } => {
                vec![("oldest", oldest.get().cast_signed()), number("limit", limit)]
            }
            Self::Transfer { transfer } => vec![("transfer", transfer)],
            Self::InFlight { plan } => vec![("plan", plan.get().cast_signed())],
            Self::TokenBudget { budget, left } => vec![number("budget", budget), number("left", left)],
            Self::Seats { needed, free, fenced } => {
                vec![number("needed", needed), number("free", free), number("fenced", fenced)]
            }
            Self::Blocks { needed, available, fenced, in_sessions } => vec![
                number("needed", needed),
                number("available", available),
                number("fenced", fenced),
                number("in_sessions", in_sessions),
            ],
            Self::PartialPrefills { limit } => vec![number("limit", limit)],
            Self::Reserved { request, num_blocks } => {
                vec![("request", request.get()), number("num_blocks", num_blocks)]
            }
            Self::Behind { request } => vec![("request", request.get())],
        }
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ready { num_tokens } => {
                write!(out, "nothing is in its way: the next plan computes {num_tokens} tokens")
            }
            Self::Resting => write!(out, "it has finished and keeps its blocks: it waits for append_tokens or free"),
            Self::Held => write!(out, "it is held: it waits for release"),
            Self::PlansInFlight { oldest, limit } => {
                write!(out, "{limit} plans are in flight, as many as may be: end plan {} first", oldest.get())
            }
            Self::InFlight { plan } => write!(out, "it goes on when plan {}, which names it, has ended", plan.get()),
            Self::Transfer { transfer } => {
                write!(out, "its blocks are on their way: it goes on when transfer {transfer} has ended")
            }
            Self::TokenBudget { budget, left } => {
                write!(out, "those before it leave {left} of the {budget} tokens of a step")
            }
            Self::Seats { needed, free, fenced } => {
                write!(out, "it needs {needed} seats, {free} are free, {fenced} wait for plans in flight")
            }
            Self::Blocks { needed, available, fenced, in_sessions } => write!(
                out,
                "it needs {needed} blocks, {available} are available, {fenced} wait for plans in flight, {in_sessions} are \
                 kept by sessions at rest"
            ),
            Self::PartialPrefills { limit } => {
                write!(out, "{limit} requests are in the middle of their prompt, as many as may be")
            }
            Self::Reserved { request, num_blocks } => {
                write!(out, "{num_blocks} blocks are kept for handle {}, which comes before it", request.get())
            }
            Self::Behind { request } => write!(out, "handle {} comes before it", request.get()),
        }
    }
}

/// What a request has, and what decides over it next. See [`Scheduler::explain`].
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The request.
    pub handle: Handle,
    /// The caller's name for it.
    pub request_id: String,
    /// Where it is.
    pub state: RequestState,
    /// What decides over it.
    pub reason: Reason,
    /// Requests of the same state that come before it in the order, held ones included.
    pub num_before: u32,
    /// Tokens known of its samples, all together; those of the prompt count for each sample that has a sequence.
    pub num_tokens: u32,
    /// Of these, computed or being computed.
    pub num_scheduled_tokens: u32,
    /// Blocks that its samples hold, each counted once.
    pub num_blocks: u32,
    /// Seats that it has.
    pub num_seats: u32,
}

impl std::fmt::Display for Explanation {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { request_id, state, reason, num_before, num_tokens, num_scheduled_tokens, .. } = self;
        let (state, Self { num_blocks, num_seats, .. }) = (state.name(), self);
        write!(
            out,
            "{request_id:?} is {state} with {num_before} before it, {num_scheduled_tokens} of {num_tokens} tokens \
             computed, {num_blocks} blocks and {num_seats} seats; {reason}"
        )
    }
}

impl Scheduler {
    /// Why a request waits, or what it gets, in the next [`Self::schedule`], as the state is now; under a policy from
    /// outside, by the keys of the last one. What requests of the next plan share with one another is not foreseen, nor
    /// what a request finds cached that the plan evicts before its turn; where a request takes blocks or seats from
    /// others, those behind it are only said to be behind it.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a request that has ended.
    ///
    /// # Complexity
    /// O(running requests + waiting ones before it + tokens of their prompts that the cache holds + blocks of sessions).
    pub fn explain(&mut self, handle: Handle) -> Result<Explanation> {
        self.drain_inbox();
        let slot = *self.by_handle.get(&handle).ok_or(Error::UnknownHandle(handle))?;
        self.refresh_order();
        let reason = self.reason(slot);
        let request = self.request(slot);
        let (order, state) = (request.order, request.state());
        let before = |&&other: &&u32| self.request(other).order < order;
        let num_before = match state {
            RequestState::Running => self.running.iter().filter(before).count(),
            RequestState::Waiting => self.waiting.values().chain(self.held.values()).filter(before).count(),
            RequestState::Resting => 0,
        };
        let mut found = Explanation {
            handle,
            request_id: request.id.to_string(),
            state,
            reason,
            num_before: num_before as u32,
            num_tokens: 0,
            num_scheduled_tokens: 0,
            num_blocks: 0,
            num_seats: request.samples.iter().filter(|sample| sample.row != super::request::NONE).count() as u32,
        };
        let sequences: Vec<u32> = request.samples.iter().map(|sample| sample.sequence).collect();
        for sequence in sequences.iter().filter_map(|&index| self.manager.sequences.get(index as usize)) {
            found.num_tokens += sequence.tokens.len();
            found.num_scheduled_tokens += sequence.num_scheduled.min(sequence.tokens.len());
        }
        let live = sequences.into_iter().filter(|&index| index != super::request::NONE);
        found.num_blocks = self.manager.num_distinct_blocks(live);
        Ok(found)
    }

    fn reason(&mut self, slot: u32) -> Reason {
        let request = self.request(slot);
        if request.stage == Stage::Resting {
            return Reason::Resting;
        }
        if request.is_held {
            return Reason::Held;
        }
        if let Some(transfer) = request.transfer {
            return Reason::Transfer { transfer };
        }
        if let (Some(oldest), limit) = (self.plans.front(), self.limits.max_plans_in_flight)
            && self.plans.len() >= limit as usize
        {
            return Reason::PlansInFlight { oldest: oldest.id, limit };
        }
        self.forecast(slot)
    }
}
