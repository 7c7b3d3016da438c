//! Where requests and aborts are left, from any thread, while a step is being planned.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;

use super::request::NewRequest;
use crate::cache_layout::TableSpec;
use crate::config::{CacheConfig, Policy, SchedulerConfig};
use crate::error::{Error, Result, invalid};
use crate::ids::Handle;

#[derive(Debug)]
pub(super) enum Command {
    Add(Handle, Box<NewRequest>),
    Abort(Handle, Option<u32>),
}

/// What is known of a request from the call that adds it until it has ended.
#[derive(Debug)]
struct Known {
    id: Arc<str>,
    num_samples: u32,
    is_resting: bool,
}

#[derive(Debug, Default)]
struct State {
    limits: SchedulerConfig,
    /// Ids in use: that of a request whose abort was left is free again.
    by_id: HashMap<Arc<str>, Handle>,
    known: HashMap<Handle, Known>,
    /// Requests among them that are sessions at rest.
    num_resting: usize,
    commands: Vec<Command>,
    next_handle: i64,
}

impl State {
    fn register(&mut self, cache: &CacheConfig, groups: &[TableSpec], request: &NewRequest) -> Result<Handle> {
        request.validate_limits(cache, groups, &self.limits)?;
        let request_id = request.request_id.as_str();
        if self.by_id.contains_key(request_id) {
            return Err(Error::DuplicateRequest(request_id.into()));
        }
        let handle = Handle::new(self.next_handle);
        self.next_handle += 1;
        let id: Arc<str> = request_id.into();
        self.by_id.insert(id.clone(), handle);
        self.known.insert(handle, Known { id, num_samples: request.n, is_resting: false });
        Ok(handle)
    }

    fn free_id(&mut self, handle: Handle) {
        if let Some(Known { id, .. }) = self.known.get(&handle)
            && self.by_id.get(id) == Some(&handle)
        {
            self.by_id.remove(id);
        }
    }
}

/// Takes requests and aborts without waiting for a step. Clones share one inbox.
#[derive(Clone, Debug)]
pub struct Inbox {
    cache: Arc<CacheConfig>,
    groups: Arc<[TableSpec]>,
    policy: Policy,
    state: Arc<Mutex<State>>,
}

impl Inbox {
    pub(super) fn new(cache: &CacheConfig, groups: &[TableSpec], limits: &SchedulerConfig) -> Self {
        let state = State { limits: limits.clone(), ..State::default() };
        let (cache, state) = (Arc::new(cache.clone()), Arc::new(Mutex::new(state)));
        Self { cache, groups: groups.into(), policy: limits.policy, state }
    }

    /// Leaves a request; the next `schedule` takes it up.
    ///
    /// # Errors
    /// [`Error::NeverFits`], [`Error::DuplicateRequest`], [`Error::InvalidArgument`], [`Error::Unsupported`].
    ///
    /// # Complexity
    /// O(prompt tokens + images); the lock is held for O(1) of it, so nobody waits for a step.
    pub fn add_request(&self, request: NewRequest) -> Result<Handle> {
        request.validate(&self.cache, self.policy)?;
        let mut state = self.lock();
        let handle = state.register(&self.cache, &self.groups, &request)?;
        state.commands.push(Command::Add(handle, Box::new(request)));
        Ok(handle)
    }

    /// Takes a request's name and gives it a handle; whoever calls takes it up.
    pub(super) fn register(&self, request: &NewRequest) -> Result<Handle> {
        request.validate(&self.cache, self.policy)?;
        self.lock().register(&self.cache, &self.groups, request)
    }

    /// The request that has this id, its abort not being left.
    pub fn find(&self, request_id: &str) -> Option<Handle> {
        self.lock().by_id.get(request_id).copied()
    }

    /// Changes the limits by which requests are refused, unless one that waits here could not be kept under them.
    pub(super) fn set_limits(&self, limits: &SchedulerConfig) -> Result<()> {
        let mut state = self.lock();
        for command in &state.commands {
            if let Command::Add(_, request) = command {
                request.validate_limits(&self.cache, &self.groups, limits)?;
            }
        }
        state.limits = limits.clone();
        Ok(())
    }

    /// Leaves the abort of a request, or of one of its samples. One that has ended already is left alone. The id of a
    /// request that is aborted as a whole may be used again at once.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a handle that was never given out, [`Error::InvalidArgument`] for a sample that a live
    /// request has not.
    ///
    /// # Complexity
    /// O(1).
    pub fn abort(&self, handle: Handle, sample: Option<u32>) -> Result<()> {
        let mut state = self.lock();
        if !(0..state.next_handle).contains(&handle.get()) {
            return Err(Error::UnknownHandle(handle));
        }
        let n = state.known.get(&handle).map(|known| known.num_samples);
        if let (Some(sample), Some(n)) = (sample, n)
            && sample >= n
        {
            return invalid("sequence", format!("0 to {}", n - 1), sample);
        }
        if sample.is_none() || n == Some(1) {
            state.free_id(handle);
        }
        state.commands.push(Command::Abort(handle, sample));
        Ok(())
    }

    /// Blocks that a request may count on.
    pub(super) fn usable_blocks(&self) -> u32 {
        self.cache.usable_blocks()
    }

    /// Samples of a request that has not ended, whether it was taken up or not.
    pub(super) fn num_samples(&self, handle: Handle) -> Option<u32> {
        self.lock().known.get(&handle).map(|known| known.num_samples)
    }

    /// Whether a handle was given out, now or ever.
    pub(super) fn knows(&self, handle: Handle) -> bool {
        (0..self.lock().next_handle).contains(&handle.get())
    }

    /// Requests that were added and have not ended, sessions at rest left out.
    pub fn num_unfinished_requests(&self) -> usize {
        let state = self.lock();
        state.known.len() - state.num_resting
    }

    /// Swaps what was left for an empty list.
    pub(super) fn drain(&self, into: &mut Vec<Command>) {
        std::mem::swap(&mut self.lock().commands, into);
    }

    /// The request has ended.
    pub(super) fn forget(&self, handle: Handle) {
        let mut state = self.lock();
        state.free_id(handle);
        let known = state.known.remove(&handle);
        state.num_resting -= usize::from(known.is_some_and(|known| known.is_resting));
    }

    /// A session rests, or goes on.
    pub(super) fn set_resting(&self, handle: Handle, is_resting: bool) {
        let mut state = self.lock();
        let known = state.known.get_mut(&handle).expect("a request that has not ended is known");
        let before = std::mem::replace(&mut known.is_resting, is_resting);
        state.num_resting = state.num_resting + usize::from(is_resting) - usize::from(before);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete before anything in it can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
