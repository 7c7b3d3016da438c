//! Continuous batching over a [`KVCacheManager`]: which tokens of which sequences run in the next step.
//!
//! [`Scheduler::schedule`] makes a plan, [`Scheduler::commit`] ends it with the tokens that the model sampled,
//! [`Scheduler::rollback`] undoes it. Up to `max_plans_in_flight` plans may be made before the oldest is ended.
//!
//! Order is first come, first served, by handle. Running requests come first; one that finds no room takes it from the
//! youngest running one behind it (preemption by recompute, all samples of a request or none). The oldest is never a
//! victim and fits an empty pool by the check in `add_request`, so it always progresses. Waiting requests are admitted
//! in order, the first that does not fit ends the pass, and none is admitted unless the whole of its known tokens fits
//! beside what running prefills still need; so a preempted request is taken up again before any that came later.

mod admission;
mod arrivals;
mod beams;
mod build;
mod commit;
mod decode;
mod drafts;
mod explain;
mod export;
mod forecast;
mod fork;
mod hold;
mod in_flight;
mod inbox;
mod invariants;
mod limits;
mod order;
mod pass;
mod policy;
mod preempt;
mod request;
mod rollback;
mod room;
mod seats;
mod sessions;
mod slots;
mod snapshot;
mod stats;
mod swap;
mod transfers;
mod views;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hashbrown::HashMap;

use smallvec::SmallVec;

use crate::chain_hash::LoraName;
use crate::config::{CacheConfig, Policy, PreemptionMode, SchedulerConfig};
use crate::error::{Result, invalid};
use crate::events::{KVCacheSnapshot, KVEventBatch};
use crate::host_pool::HostPool;
use crate::identity::Identity;
use crate::ids::Handle;
use crate::kv_cache_manager::{ComputedBlocks, KVCacheManager, PinId};
use crate::step_plan::BufferPool;
pub use commit::{FinishedRequest, Fork, StepResult};
pub use explain::{Explanation, Reason};
use in_flight::{Announcements, Entry, InFlight};
use inbox::Command;
pub use inbox::Inbox;
pub use limits::LimitsUpdate;
use policy::Order;
pub use policy::{OrderPolicy, RequestView};
use request::Request;
pub use request::{FinishReason, NewRequest};
use room::most_blocks;
use seats::Seats;
use slots::Requests;
pub use snapshot::{PlanSnapshot, RequestSnapshot, RequestState, SequenceSnapshot, Snapshot};
use stats::Recorder;
pub use stats::{MAX_TENANT_STATS, RequestStats, RequestTotals, SchedulerStats, TenantName};
use transfers::Transfers;
pub use views::Progress;

/// Outputs for which a sequence makes room at once.
const MAX_RESERVED_TOKENS: u32 = 256;

/// The scheduler. See the module's page.
#[derive(Debug)]
pub struct Scheduler {
    manager: KVCacheManager,
    limits: SchedulerConfig,
    watermark_blocks: u32,
    /// What the scheduler was made for: the block table has that many columns.
    most_lookahead: u32,
    /// Most blocks that a sequence holds of each cache group whose blocks leave.
    most_blocks: SmallVec<[u32; 1]>,
    inbox: Inbox,
    commands: Vec<Command>,
    requests: Requests,
    by_handle: HashMap<Handle, u32>,
    policy: Box<dyn OrderPolicy>,
    waiting: BTreeMap<Order, u32>,
    /// Requests that would wait, were they not held.
    held: BTreeMap<Order, u32>,
    /// Waiting requests that have blocks from before.
    num_keepers: u32,
    /// Requests that are not due yet, by the number of admissions that makes them so.
    ageing: BTreeMap<(u64, Handle), u32>,
    num_admissions: u64,
    num_arrivals: u64,
    /// Resident requests, oldest first.
    running: Vec<u32>,
    seats: Seats,
    host: HostPool,
    transfers: Transfers,
    plans: VecDeque<InFlight>,
    spare_plans: Vec<InFlight>,
    announcements: Announcements,
    buffers: BufferPool,
    hits: ComputedBlocks,
    num_preemptions: u64,
    recorder: Recorder,
    /// Of these, preemptions by swap.
    num_swaps: u64,
}

impl Scheduler {
    /// A scheduler over a pool of its own.
    ///
    /// # Errors
    /// Those of [`CacheConfig::validate`] and [`SchedulerConfig::validate`].
    pub fn new(cache: &CacheConfig, limits: &SchedulerConfig) -> Result<Self> {
        limits.validate()?;
        Self::ordered_by(built_in(limits), cache, limits)
    }

    fn ordered_by(policy: Box<dyn OrderPolicy>, cache: &CacheConfig, limits: &SchedulerConfig) -> Result<Self> {
        if limits.preemption_mode == PreemptionMode::Swap && cache.num_host_blocks == 0 {
            return invalid("num_host_blocks", "at least 1 with preemption_mode \"swap\"", 0);
        }
        let mut manager = KVCacheManager::new(cache)?;
        manager.lost_growths = (limits.preemption_mode == PreemptionMode::Swap).then(Vec::new);
        manager.departed = manager.has_windows.then(Vec::new);
        if policy.wants_hits() {
            manager.pool.prefixes.remember_births();
        }
        Ok(Self {
            inbox: Inbox::new(cache, &manager.groups, limits),
            most_blocks: most_blocks(&manager, limits),
            manager,
            limits: limits.clone(),
            watermark_blocks: limits.watermark_blocks(cache.usable_blocks()),
            most_lookahead: limits.lookahead,
            commands: Vec::new(),
            requests: Requests::default(),
            by_handle: HashMap::new(),
            policy,
            waiting: BTreeMap::new(),
            held: BTreeMap::new(),
            num_keepers: 0,
            ageing: BTreeMap::new(),
            num_admissions: 0,
            num_arrivals: 0,
            running: Vec::new(),
            seats: Seats::new(limits.max_num_seqs),
            host: HostPool::new(cache.num_host_blocks)?,
            transfers: Transfers::new(),
            plans: VecDeque::new(),
            spare_plans: Vec::new(),
            announcements: Announcements::default(),
            buffers: BufferPool::default(),
            hits: ComputedBlocks::default(),
            num_preemptions: 0,
            recorder: Recorder::new(),
            num_swaps: 0,
        })
    }

    /// A scheduler that orders requests by a policy of the caller's.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_policy(cache: &CacheConfig, limits: &SchedulerConfig, policy: Box<dyn OrderPolicy>) -> Result<Self> {
        let limits = SchedulerConfig { policy: Policy::External, ..limits.clone() };
        limits.validate()?;
        Self::ordered_by(policy, cache, &limits)
    }

    /// Where other threads leave requests and aborts.
    pub fn inbox(&self) -> Inbox {
        self.inbox.clone()
    }

    /// Adds a request. See [`Inbox::add_request`].
    ///
    /// # Errors
    /// Those of [`Inbox::add_request`].
    pub fn add_request(&mut self, request: NewRequest) -> Result<Handle> {
        self.inbox.add_request(request)
    }

    /// Ends a request, or one of its samples, in whatever state it is. See [`Inbox::abort`].
    ///
    /// # Errors
    /// Those of [`Inbox::abort`].
    pub fn abort(&mut self, handle: Handle, sample: Option<u32>) -> Result<()> {
        self.inbox.abort(handle, sample)
    }

    /// The bookkeeping below: usage, block states, tables.
    pub fn manager(&self) -> &KVCacheManager {
        &self.manager
    }

    /// Forgets every cached prefix. See [`KVCacheManager::reset_prefix_cache`].
    pub fn reset_prefix_cache(&mut self) {
        self.manager.reset_prefix_cache();
    }

    /// Forgets every cached prefix of an adapter that was loaded anew. See [`KVCacheManager::invalidate_lora`].
    pub fn invalidate_lora(&mut self, lora_id: i64) {
        self.manager.invalidate_lora(lora_id);
    }

    /// Keeps a prefix in the cache. See [`KVCacheManager::pin`].
    ///
    /// # Errors
    /// Those of [`KVCacheManager::pin`].
    pub fn pin(&mut self, tokens: Arc<[i32]>, identity: Identity) -> Result<Option<(PinId, u32)>> {
        self.manager.pin(tokens, Arc::new(identity))
    }

    /// Takes a pin away. See [`KVCacheManager::unpin`].
    ///
    /// # Errors
    /// Those of [`KVCacheManager::unpin`].
    pub fn unpin(&mut self, pin: PinId) -> Result<()> {
        self.manager.unpin(pin)
    }

    /// Takes the events of the prefix cache since the last call. See [`crate::events`].
    ///
    /// # Errors
    /// Those of [`KVCacheManager::take_events`].
    pub fn take_events(&mut self) -> Result<KVEventBatch> {
        self.manager.take_events()
    }

    /// Everything that can be hit, as events, for who joins late.
    ///
    /// # Errors
    /// As [`Self::take_events`].
    ///
    /// # Complexity
    /// O(blocks).
    pub fn event_snapshot(&mut self) -> Result<KVCacheSnapshot> {
        self.manager.event_snapshot()
    }

    /// Says what an adapter is called in events and in their hashes.
    ///
    /// # Errors
    /// Those of [`KVCacheManager::name_lora`].
    pub fn name_lora(&mut self, lora_id: i64, name: LoraName) -> Result<()> {
        self.manager.name_lora(lora_id, name)
    }

    /// Makes the bookkeeping wrong, for tests of what follows from that.
    #[doc(hidden)]
    pub fn break_a_law(&mut self) {
        self.manager.break_a_law();
    }

    fn request(&self, slot: u32) -> &Request {
        &self.requests[slot]
    }

    fn request_mut(&mut self, slot: u32) -> &mut Request {
        &mut self.requests[slot]
    }

    /// The request that an entry is about, if it has not ended.
    fn entry_request(&mut self, entry: &Entry) -> Option<&mut Request> {
        self.requests.find_mut(entry.slot, entry.handle)
    }

    /// A sequence of the request's prompt, for its sample.
    fn ensure_sequence(&mut self, slot: u32, sample: usize) -> usize {
        let request = &mut self.requests[slot];
        if request.samples[sample].sequence == request::NONE {
            let (prompt, identity) = (request.prompt.clone(), request.identity.clone());
            let index = self.manager.create_checked(prompt, identity, request.use_prefix_cache).index;
            let sequence = &mut self.manager.sequences[index as usize];
            sequence.retention = request.retention;
            sequence.tokens.reserve(request.max_tokens.min(MAX_RESERVED_TOKENS) as usize);
            request.samples[sample].sequence = index;
        }
        request.samples[sample].sequence as usize
    }
}

fn built_in(limits: &SchedulerConfig) -> Box<dyn OrderPolicy> {
    match limits.policy {
        Policy::Fcfs => Box::new(policy::FirstComeFirstServed),
        Policy::Priority => Box::new(policy::ByPriority),
        Policy::LongestPrefixMatch => Box::new(policy::LongestPrefixMatch),
        Policy::FairShare => Box::new(policy::FairShare::new(&limits.tenant_weights)),
        Policy::External => Box::new(policy::External),
    }
}
