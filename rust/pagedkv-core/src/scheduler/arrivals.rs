//! Requests and aborts from the inbox are taken up, and samples end because their callers say so.

use super::Scheduler;
use super::inbox::Command;
use super::request::{FinishReason, Request};
use crate::error::{Error, Result, invalid};
use crate::ids::Handle;

impl Scheduler {
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

    pub(super) fn drain_inbox(&mut self) {
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

    pub(super) fn enqueue(&mut self, mut request: Request) {
        let num_tokens = request.prompt_len();
        self.arrive(&mut request, num_tokens);
        self.recorder.arrived(&mut request);
        let (handle, order, due_at) = (request.handle, request.order, request.due_at);
        let slot = self.requests.insert(request);
        self.by_handle.insert(handle, slot);
        self.waiting.insert(order, slot);
        if due_at != u64::MAX {
            self.ageing.insert((due_at, handle), slot);
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
}
