//! A picture of the whole state, for people and for pages that show it live.

use super::Scheduler;
use super::request::{NONE, Request, Stage};
use crate::ids::{Handle, PlanId};
use crate::kv_cache_manager::Table;

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestState {
    /// It has seats.
    Running,
    /// It waits for seats.
    Waiting,
    /// A session that has finished and keeps blocks.
    Resting,
}

impl RequestState {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Resting => "resting",
        }
    }
}

/// A request, without its sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestSnapshot {
    /// Its handle.
    pub handle: Handle,
    /// The caller's name for it.
    pub request_id: String,
    /// Where it is.
    pub state: RequestState,
    /// Whether the caller holds it back.
    pub is_held: bool,
    /// Whether it was overtaken so often that it comes before those that were not.
    pub is_due: bool,
    /// Its priority.
    pub priority: i32,
    /// Whose it is.
    pub tenant: Option<String>,
    /// When it arrived, in the caller's seconds.
    pub arrival: f64,
    /// Places of its sequences in plans in flight.
    pub num_in_flight: u32,
    /// Prompt tokens that came from the cache.
    pub num_cached_tokens: u32,
    /// How often it lost its blocks, in the present turn.
    pub num_preemptions: u32,
}

/// A sample of a request that has a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceSnapshot {
    /// Its request.
    pub handle: Handle,
    /// Which of the request's samples it is.
    pub sample: u32,
    /// Its row in the block table.
    pub row: Option<u32>,
    /// Tokens that are known.
    pub num_tokens: u32,
    /// Tokens computed by plans that committed.
    pub num_computed_tokens: u32,
    /// Tokens computed when the plans in flight have committed.
    pub num_scheduled_tokens: u32,
    /// Blocks that it holds, those shared with others included.
    pub num_blocks: u32,
    /// Whether it has ended and a session keeps it.
    pub is_kept: bool,
}

/// A plan in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanSnapshot {
    /// Its number.
    pub plan: PlanId,
    /// Sequences in it.
    pub num_sequences: u32,
    /// Tokens that it computes.
    pub num_tokens: u32,
    /// Samples that it draws.
    pub num_samples: u32,
}

/// The state between two calls. See [`Scheduler::snapshot`].
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Those that run, then those that wait, each in their order, then sessions at rest by handle.
    pub requests: Vec<RequestSnapshot>,
    /// Their sequences, in the same order.
    pub sequences: Vec<SequenceSnapshot>,
    /// Plans in flight, oldest first.
    pub plans: Vec<PlanSnapshot>,
    /// Blocks free, cached, held and fenced.
    pub num_blocks: [u32; 4],
    /// Blocks that only sessions at rest hold.
    pub num_session_blocks: u32,
    /// Seats free, and seats that wait for plans in flight.
    pub num_seats: [u32; 2],
    /// Admissions since the scheduler was made.
    pub num_admissions: u64,
    /// Preemptions since the scheduler was made.
    pub num_preemptions: u64,
    /// Evictions since the scheduler was made.
    pub num_evictions: u64,
}

impl Scheduler {
    /// A picture of the state. Requests and aborts that were left are taken up first.
    ///
    /// # Complexity
    /// O(requests + sequences in plans in flight + blocks of sessions), and a sort of the waiting requests.
    pub fn snapshot(&mut self) -> Snapshot {
        self.drain_inbox();
        let mut slots = self.running.clone();
        let mut waiting: Vec<u32> = self.waiting.values().chain(self.held.values()).copied().collect();
        waiting.sort_unstable_by_key(|&slot| self.request(slot).order);
        slots.append(&mut waiting);
        let resting = self.requests.iter().filter(|(_, request)| request.stage == Stage::Resting);
        let mut resting: Vec<u32> = resting.map(|(slot, _)| slot).collect();
        resting.sort_unstable_by_key(|&slot| self.request(slot).handle);
        slots.append(&mut resting);
        let pool = self.manager.pool();
        Snapshot {
            requests: slots.iter().map(|&slot| self.request(slot).snapshot()).collect(),
            sequences: slots.iter().flat_map(|&slot| self.sequences_of(slot)).collect(),
            plans: self.plans.iter().map(super::InFlight::snapshot).collect(),
            num_blocks: [pool.num_free(), pool.num_cached(), pool.num_held(), pool.num_fenced()],
            num_session_blocks: self.manager.num_blocks_of_sessions(),
            num_seats: [self.seats.num_free(), self.seats.num_fenced()],
            num_admissions: self.num_admissions,
            num_preemptions: self.num_preemptions,
            num_evictions: pool.num_evictions(),
        }
    }

    fn sequences_of(&self, slot: u32) -> impl Iterator<Item = SequenceSnapshot> {
        let request = self.request(slot);
        request.samples.iter().enumerate().filter_map(move |(number, sample)| {
            let sequence = self.manager.sequences.get(sample.sequence as usize)?;
            Some(SequenceSnapshot {
                handle: request.handle,
                sample: number as u32,
                row: Some(sample.row).filter(|&row| row != NONE),
                num_tokens: sequence.tokens.len(),
                num_computed_tokens: sequence.num_computed,
                num_scheduled_tokens: sequence.num_scheduled,
                num_blocks: sequence.tables.iter().map(Table::num_held).sum(),
                is_kept: sample.is_kept,
            })
        })
    }
}

impl Request {
    pub(super) fn state(&self) -> RequestState {
        match self.stage {
            Stage::Waiting => RequestState::Waiting,
            Stage::Prompt | Stage::Apart => RequestState::Running,
            Stage::Resting => RequestState::Resting,
        }
    }

    fn snapshot(&self) -> RequestSnapshot {
        RequestSnapshot {
            handle: self.handle,
            request_id: self.id.to_string(),
            state: self.state(),
            is_held: self.is_held,
            is_due: self.order.is_due(),
            priority: self.priority,
            tenant: self.tenant.clone(),
            arrival: self.arrival,
            num_in_flight: self.num_in_flight,
            num_cached_tokens: self.num_cached_tokens,
            num_preemptions: self.num_preemptions,
        }
    }
}

impl super::InFlight {
    fn snapshot(&self) -> PlanSnapshot {
        PlanSnapshot {
            plan: self.id,
            num_sequences: self.entries.len() as u32,
            num_tokens: self.entries.iter().map(|entry| entry.end - entry.start).sum(),
            num_samples: self.samples.len() as u32,
        }
    }
}
