//! Where requests and aborts are left, from any thread, while a step is being planned.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::request::NewRequest;
use crate::config::{CacheConfig, SchedulerConfig};
use crate::error::{Error, Result, invalid};
use crate::ids::Handle;

#[derive(Debug)]
pub(super) enum Command {
    Add(Handle, Box<NewRequest>),
    Abort(Handle, Option<u32>),
}

#[derive(Debug, Default)]
struct State {
    live: HashMap<String, Handle>,
    /// Samples of each live request.
    num_samples: HashMap<Handle, u32>,
    commands: Vec<Command>,
    next_handle: i64,
}

/// Takes requests and aborts without waiting for a step. Clones share one inbox.
#[derive(Clone, Debug)]
pub struct Inbox {
    cache: Arc<CacheConfig>,
    limits: Arc<SchedulerConfig>,
    state: Arc<Mutex<State>>,
}

impl Inbox {
    pub(super) fn new(cache: &CacheConfig, limits: &SchedulerConfig) -> Self {
        Self { cache: Arc::new(cache.clone()), limits: Arc::new(limits.clone()), state: Arc::default() }
    }

    /// Leaves a request; the next `schedule` takes it up.
    ///
    /// # Errors
    /// [`Error::NeverFits`], [`Error::DuplicateRequest`], [`Error::InvalidArgument`], [`Error::Unsupported`].
    pub fn add_request(&self, request: NewRequest) -> Result<Handle> {
        request.validate(&self.cache, &self.limits)?;
        let mut state = self.lock();
        if state.live.contains_key(&request.request_id) {
            return Err(Error::DuplicateRequest(request.request_id));
        }
        let handle = Handle::new(state.next_handle);
        state.next_handle += 1;
        state.live.insert(request.request_id.clone(), handle);
        state.num_samples.insert(handle, request.n);
        state.commands.push(Command::Add(handle, Box::new(request)));
        Ok(handle)
    }

    /// Leaves the abort of a request, or of one of its samples. One that has ended already is left alone.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a handle that was never given out, [`Error::InvalidArgument`] for a sample that a live
    /// request has not.
    pub fn abort(&self, handle: Handle, sample: Option<u32>) -> Result<()> {
        let mut state = self.lock();
        if !(0..state.next_handle).contains(&handle.get()) {
            return Err(Error::UnknownHandle(handle));
        }
        if let (Some(sample), Some(&n)) = (sample, state.num_samples.get(&handle))
            && sample >= n
        {
            return invalid("sequence", format!("0 to {}", n - 1), sample);
        }
        state.commands.push(Command::Abort(handle, sample));
        Ok(())
    }

    /// Whether a handle was given out, now or ever.
    pub(super) fn knows(&self, handle: Handle) -> bool {
        (0..self.lock().next_handle).contains(&handle.get())
    }

    /// Requests that were added and have not ended.
    pub fn num_unfinished_requests(&self) -> usize {
        self.lock().live.len()
    }

    /// Swaps what was left for an empty list.
    pub(super) fn drain(&self, into: &mut Vec<Command>) {
        std::mem::swap(&mut self.lock().commands, into);
    }

    pub(super) fn forget(&self, request_id: &str) {
        let mut state = self.lock();
        if let Some(handle) = state.live.remove(request_id) {
            state.num_samples.remove(&handle);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete before anything in it can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
