//! Requests that must not run yet, because a grammar or an adapter is not ready, and the queues that they share with
//! those that may.

use super::Scheduler;
use super::request::Stage;
use crate::error::{Error, Result};
use crate::ids::Handle;

impl Scheduler {
    /// Keeps a request out of plans until [`Self::release`], in whatever state it is. It keeps its place in the order and
    /// does not stand in the way of those behind it. Its seats and blocks stay its own while others have room; a request
    /// that finds none takes them, wherever the two are in the order. Holding twice is holding once.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a request that has ended, unless it is a session: that is held from its next turn on.
    pub fn hold(&mut self, handle: Handle) -> Result<()> {
        self.set_held(handle, true)
    }

    /// Lets a held request run again, from its place in the order. One that is not held is left alone.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a request that has ended, unless it is a session.
    pub fn release(&mut self, handle: Handle) -> Result<()> {
        self.set_held(handle, false)
    }

    fn set_held(&mut self, handle: Handle, is_held: bool) -> Result<()> {
        self.drain_inbox();
        let slot = *self.by_handle.get(&handle).ok_or(Error::UnknownHandle(handle))?;
        let is_waiting = self.leave_queue(slot);
        self.request_mut(slot).is_held = is_held;
        if is_waiting {
            self.queue(slot);
        }
        Ok(())
    }

    /// Whether a request that is not held runs or waits.
    pub(super) fn has_work(&self) -> bool {
        !self.waiting.is_empty() || self.running.iter().any(|&slot| !self.request(slot).is_held)
    }

    /// Puts a request among those that wait, or among those that would.
    pub(super) fn queue(&mut self, slot: u32) {
        let request = self.request(slot);
        let (order, is_held) = (request.order, request.is_held);
        let queue = if is_held { &mut self.held } else { &mut self.waiting };
        queue.insert(order, slot);
    }

    /// Takes a request out of its queue. Answers whether it was in one.
    pub(super) fn leave_queue(&mut self, slot: u32) -> bool {
        let request = self.request(slot);
        let (order, is_held) = (request.order, request.is_held);
        let queue = if is_held { &mut self.held } else { &mut self.waiting };
        queue.remove(&order).is_some()
    }

    /// Takes a request from among those that run or wait, and from those that may become due.
    pub(super) fn leave_queues(&mut self, slot: u32) {
        let request = self.request(slot);
        let (due_at, handle, stage) = (request.due_at, request.handle, request.stage);
        self.ageing.remove(&(due_at, handle));
        if stage == Stage::Waiting {
            self.leave_queue(slot);
        } else {
            self.leave_running(slot);
        }
        self.set_keeper(slot, false);
    }

    /// Notes whether a request that waits has blocks from before.
    pub(super) fn set_keeper(&mut self, slot: u32, is_keeper: bool) {
        let had = std::mem::replace(&mut self.request_mut(slot).is_keeper, is_keeper);
        self.num_keepers += u32::from(is_keeper);
        self.num_keepers -= u32::from(had);
    }
}
