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
mod inbox;
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
mod snapshot;
mod stats;
mod swap;
mod transfers;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hashbrown::HashMap;

use smallvec::SmallVec;

use crate::chain_hash::LoraName;
use crate::config::{CacheConfig, Policy, PreemptionMode, SchedulerConfig};
use crate::error::{Error, Result, invalid};
use crate::events::{KVCacheSnapshot, KVEventBatch};
use crate::host_pool::HostPool;
use crate::identity::Identity;
use crate::ids::{BlockId, Handle, PlanId};
use crate::invariants::BrokenLaw;
use crate::kv_cache_manager::{ComputedBlocks, KVCacheManager, PinId};
use crate::step_plan::{BufferPool, Change};
pub use commit::{FinishedRequest, Fork, StepResult};
use drafts::Node;
pub use explain::{Explanation, Reason};
use inbox::Command;
pub use inbox::Inbox;
pub use limits::LimitsUpdate;
use pass::Entry;
use policy::Order;
pub use policy::{OrderPolicy, RequestView};
pub use request::{FinishReason, NewRequest};
use request::{Request, Stage};
use room::most_blocks;
use seats::Seats;
pub use snapshot::{PlanSnapshot, RequestSnapshot, RequestState, SequenceSnapshot, Snapshot};
use stats::Recorder;
pub use stats::{MAX_TENANT_STATS, RequestStats, RequestTotals, SchedulerStats, TenantName};
use transfers::Transfers;

/// Outputs for which a sequence makes room at once.
const MAX_RESERVED_TOKENS: u32 = 256;

/// A sequence during one residence, and an entry of its block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cell {
    sequence: u32,
    epoch: u32,
    group: u32,
    column: u32,
}

/// A request's sample that lost its seat, or ended.
#[derive(Clone, Debug)]
struct Departure {
    handle: Handle,
    sample: u32,
    change: Change,
}

/// How far a sample is, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Known tokens, the prompt included.
    pub num_tokens: u32,
    /// Tokens whose keys and values are in its blocks, by plans that committed and transfers that ended.
    pub num_computed: u32,
    /// The same when every plan in flight has committed and its transfer has ended.
    pub num_scheduled: u32,
    /// How often its request lost its blocks.
    pub num_preemptions: u32,
}

/// What the next plan has to announce.
#[derive(Debug, Default)]
struct Announcements {
    /// Residences whose whole row must be sent.
    new: Vec<(u32, u32)>,
    /// Cells that a plan which never ran had sent.
    repeated: Vec<Cell>,
    preempted: Vec<Departure>,
    finished: Vec<Departure>,
    /// Transfers that no plan in flight, or one that never ran, has told.
    transfers: Vec<i64>,
}

/// What is kept of a plan until it ends.
#[derive(Debug)]
struct InFlight {
    id: PlanId,
    entries: Vec<Entry>,
    /// The sample number of each sample drawn.
    samples: Vec<u32>,
    /// The guesses that entries run.
    nodes: Vec<Node>,
    announced: Announcements,
    /// Cells that the plan's table updates named, those of new rows apart.
    cells: Vec<Cell>,
}

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
    requests: Vec<Option<Request>>,
    vacant: Vec<u32>,
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
            requests: Vec::new(),
            vacant: Vec::new(),
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
    /// [`Error::UnknownHandle`] for a handle that was never given out.
    pub fn abort(&mut self, handle: Handle, sample: Option<u32>) -> Result<()> {
        self.inbox.abort(handle, sample)
    }

    /// Ends a sample because the caller found its end, a stop string say. Legal in every state, like an abort: one that
    /// has ended already is left alone.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a handle that was never given out, [`Error::InvalidArgument`] for a sample that a live
    /// request has not.
    ///
    /// # Complexity
    /// O(blocks released + what the inbox holds).
    pub fn finish(&mut self, handle: Handle, sample: u32) -> Result<()> {
        self.drain_inbox();
        let Some(&slot) = self.by_handle.get(&handle) else {
            return if self.inbox.knows(handle) { Ok(()) } else { Err(Error::UnknownHandle(handle)) };
        };
        let n = self.request(slot).samples.len();
        if sample as usize >= n {
            return invalid("sequence", format!("0 to {}", n - 1), sample);
        }
        self.finish_sample(slot, sample as usize, FinishReason::Stop);
        Ok(())
    }

    /// Requests that were added and have not ended, sessions at rest left out.
    pub fn num_unfinished_requests(&self) -> usize {
        self.inbox.num_unfinished_requests()
    }

    /// Requests with seats, and requests that wait for them.
    pub fn num_requests(&self) -> (usize, usize) {
        (self.running.len(), self.num_unfinished_requests() - self.running.len())
    }

    /// Tokens of all resident sequences, those of plans in flight included. A block that several share counts for each.
    ///
    /// # Complexity
    /// O(resident sequences).
    pub fn num_resident_tokens(&self) -> u64 {
        let samples = self.running.iter().flat_map(|&slot| &self.request(slot).samples);
        let sequences = samples.filter_map(|sample| self.manager.sequences.get(sample.sequence as usize));
        sequences.map(|sequence| u64::from(sequence.num_scheduled)).sum()
    }

    /// Preemptions since the scheduler was made.
    pub fn num_preemptions(&self) -> u64 {
        self.num_preemptions
    }

    /// Preemptions whose blocks went to the host tier.
    pub fn num_swaps(&self) -> u64 {
        self.num_swaps
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

    /// The block table of a sample in the first cache group; `None` while it holds none.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a request that is not live, [`Error::InvalidArgument`] for a sample that it has not.
    ///
    /// # Complexity
    /// O(1).
    pub fn block_table(&self, handle: Handle, sample: u32) -> Result<Option<&[BlockId]>> {
        self.group_table(handle, sample, 0)
    }

    /// The block table of a sample in a cache group, the null block where a window needs none; `None` while it has none.
    ///
    /// # Errors
    /// As [`Self::block_table`]; [`Error::InvalidArgument`] also for a group that the pool has not.
    pub fn group_table(&self, handle: Handle, sample: u32, group: usize) -> Result<Option<&[BlockId]>> {
        let slot = self.by_handle.get(&handle).copied();
        // A request that is still in the inbox has its samples, and holds nothing.
        let n = slot.map(|slot| self.request(slot).samples.len() as u32).or_else(|| self.inbox.num_samples(handle));
        let n = n.ok_or(Error::UnknownHandle(handle))?;
        if sample >= n {
            return invalid("sequence", format!("0 to {}", n - 1), sample);
        }
        self.manager.check_group(group)?;
        let Some(slot) = slot else { return Ok(None) };
        let found = &self.request(slot).samples[sample as usize];
        let sequence = self.manager.sequences.get(found.sequence as usize);
        let table = sequence.map(|sequence| sequence.tables[group].blocks.as_slice());
        Ok(table.filter(|table| !table.is_empty()))
    }

    /// How far a sample is. While its request shares one sequence, that is the first live sample's, and the others have
    /// nothing of their own.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a request that is not live, [`Error::InvalidArgument`] for a sample that it has not.
    pub fn progress(&self, handle: Handle, sample: u32) -> Result<Progress> {
        let slot = *self.by_handle.get(&handle).ok_or(Error::UnknownHandle(handle))?;
        let request = self.request(slot);
        let Some(found) = request.samples.get(sample as usize) else {
            return invalid("sequence", format!("0 to {}", request.samples.len() - 1), sample);
        };
        let num_preemptions = request.num_preemptions;
        let none = Progress { num_tokens: request.prompt_len(), num_computed: 0, num_scheduled: 0, num_preemptions };
        Ok(self.manager.sequences.get(found.sequence as usize).map_or(none, |sequence| Progress {
            num_tokens: sequence.tokens.len(),
            num_computed: sequence.num_computed,
            num_scheduled: sequence.num_scheduled,
            num_preemptions,
        }))
    }

    /// Checks the laws of the bookkeeping and those of the seats and queues.
    ///
    /// # Errors
    /// The first [`BrokenLaw`].
    ///
    /// # Complexity
    /// As [`KVCacheManager::check_integrity`].
    pub fn check_integrity(&self) -> std::result::Result<(), BrokenLaw> {
        self.manager.check_integrity()?;
        let broken = |what: String| Err(BrokenLaw { law: 5, what });
        let mut is_running = vec![false; self.requests.len()];
        self.running.iter().for_each(|&slot| is_running[slot as usize] = true);
        let mut sequences = 0;
        for (slot, request) in self.requests.iter().enumerate() {
            let Some(request) = request else { continue };
            self.check_request(slot as u32, request, is_running[slot])?;
            sequences += request.samples.iter().filter(|sample| sample.sequence != request::NONE).count();
        }
        let num_keepers = self.requests.iter().flatten().filter(|request| request.is_keeper).count();
        if num_keepers != self.num_keepers as usize {
            return broken(format!("{num_keepers} waiting requests have blocks, {} are counted", self.num_keepers));
        }
        if sequences != self.manager.num_sequences() {
            return broken(format!("{} sequences live, {sequences} belong to requests", self.manager.num_sequences()));
        }
        if !self.running.is_sorted_by_key(|&slot| self.request(slot).order) {
            return broken("the running requests are out of order".into());
        }
        self.check_transfers()?;
        self.seats.check()
    }

    /// A request is in exactly one place, and its samples have the seats and sequences that belong to it there.
    fn check_request(&self, slot: u32, request: &Request, is_running: bool) -> std::result::Result<(), BrokenLaw> {
        let broken = |what: String| Err(BrokenLaw { law: 5, what });
        let (waits, is_held) = (self.waiting.get(&request.order), self.held.get(&request.order));
        let (queue, other) = if request.is_held { (is_held, waits) } else { (waits, is_held) };
        let is_queued = queue == Some(&slot);
        let is_right = match request.stage {
            Stage::Waiting => is_queued && !is_running,
            Stage::Prompt | Stage::Apart => is_running && !is_queued,
            Stage::Resting => !is_running && !is_queued && request.num_live == 0,
        };
        if !is_right || other == Some(&slot) || (request.num_live == 0) != (request.stage == Stage::Resting) {
            return broken(format!("request {} is not in exactly one queue", request.id));
        }
        let mut has_blocks = false;
        for sample in &request.samples {
            let is_live = sample.finish.is_none();
            let has_seat = sample.row != request::NONE;
            if has_seat != (is_running && (is_live || request.is_gang())) {
                return broken(format!("a sample of request {} has no seat, or one too many", request.id));
            }
            let sequence = self.manager.sequences.get(sample.sequence as usize);
            let is_right = sequence.is_none_or(|sequence| {
                sequence.is_live && sequence.is_kept == sample.is_kept && (is_live || sample.is_kept)
            });
            if !is_right {
                return broken(format!("a sample of request {} has a sequence that is not its own", request.id));
            }
            has_blocks |= sequence.is_some_and(|sequence| is_live && sequence.num_scheduled > 0);
        }
        if request.is_keeper != (has_blocks && !is_running) {
            return broken(format!("it is not known whether request {} waits with blocks", request.id));
        }
        Ok(())
    }

    /// Takes the events of the prefix cache since the last call. See [`crate::events`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] where [`CacheConfig::events`] is off.
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
    /// As [`Self::take_events`]; [`Error::InvalidArgument`] for an adapter of which something is cached or in use.
    pub fn name_lora(&mut self, lora_id: i64, name: LoraName) -> Result<()> {
        self.manager.name_lora(lora_id, name)
    }

    /// Makes the bookkeeping wrong, for tests of what follows from that.
    #[doc(hidden)]
    pub fn break_a_law(&mut self) {
        self.manager.break_a_law();
    }

    fn drain_inbox(&mut self) {
        let mut commands = std::mem::take(&mut self.commands);
        self.inbox.drain(&mut commands);
        for command in commands.drain(..) {
            match command {
                Command::Add(handle, request) => self.enqueue(Request::new(handle, *request)),
                Command::Abort(handle, sample) => self.abort_now(handle, sample),
            }
        }
        self.commands = commands;
    }

    fn enqueue(&mut self, mut request: Request) {
        let slot = self.vacant.pop().unwrap_or(self.requests.len() as u32);
        let num_tokens = request.prompt_len();
        self.arrive(&mut request, num_tokens);
        self.recorder.arrived(&mut request);
        self.by_handle.insert(request.handle, slot);
        self.waiting.insert(request.order, slot);
        if request.due_at != u64::MAX {
            self.ageing.insert((request.due_at, request.handle), slot);
        }
        if slot as usize == self.requests.len() {
            self.requests.push(Some(request));
        } else {
            self.requests[slot as usize] = Some(request);
        }
    }

    fn abort_now(&mut self, handle: Handle, sample: Option<u32>) {
        let Some(&slot) = self.by_handle.get(&handle) else {
            return;
        };
        let samples = match sample {
            Some(sample) => sample as usize..(sample as usize + 1).min(self.request(slot).samples.len()),
            None => 0..self.request(slot).samples.len(),
        };
        for sample in samples {
            // The request is gone with its last live sample, which need not be the last in number.
            if self.by_handle.contains_key(&handle) {
                self.finish_sample(slot, sample, FinishReason::Abort);
            }
            if self.by_handle.contains_key(&handle) {
                self.give_up(slot, sample);
            }
        }
    }

    fn request(&self, slot: u32) -> &Request {
        self.requests[slot as usize].as_ref().expect("a slot in use has a request")
    }

    fn request_mut(&mut self, slot: u32) -> &mut Request {
        self.requests[slot as usize].as_mut().expect("a slot in use has a request")
    }

    /// The request that an entry is about, if it has not ended.
    fn entry_request(&mut self, entry: &Entry) -> Option<&mut Request> {
        self.requests[entry.slot as usize].as_mut().filter(|request| request.handle == entry.handle)
    }

    /// A sequence of the request's prompt, for its sample.
    fn ensure_sequence(&mut self, slot: u32, sample: usize) -> usize {
        let request = self.requests[slot as usize].as_mut().expect("a slot in use has a request");
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
