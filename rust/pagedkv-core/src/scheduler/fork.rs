//! Requests that begin where a sample of another one stands, with its tokens and its blocks.

use std::sync::Arc;

use super::Scheduler;
use super::request::{NONE, NewRequest, Request, Stage};
use crate::error::{Error, Result, invalid};
use crate::identity::Identity;
use crate::ids::Handle;

impl Scheduler {
    /// A new request that begins with all tokens of a sample, and then `request.prompt_token_ids`, of which there may be
    /// none. It shares the blocks of the sample's computed tokens; the last one, where it is not full, is copied when one
    /// of the two first writes into it. The sample runs, waits, or is kept by a session; it goes on as if nothing had
    /// been. Adapter, salt, images and the use of the prefix cache are those of the sample, and so is how blocks are kept in
    /// the cache if the new request does not say. The new request arrives last, and may lose its blocks before it is
    /// admitted to one that comes before it.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`]; [`Error::RequestInFlight`]; [`Error::InvalidArgument`] for a sample that has ended and is
    /// not kept, and an identity or tokens outside of the new request's own; and those of [`Self::add_request`].
    ///
    /// # Complexity
    /// O(tokens + blocks of the sample).
    pub fn fork(&mut self, handle: Handle, sample: u32, request: NewRequest) -> Result<Handle> {
        self.drain_inbox();
        let slot = *self.by_handle.get(&handle).ok_or(Error::UnknownHandle(handle))?;
        let number = self.samples_of(slot, Some(sample))?.start;
        let parent = self.request(slot);
        let found = &parent.samples[number];
        if found.finish.is_some() && !found.is_kept {
            return invalid("sequence", "a sample that has not ended, or that a session keeps", sample);
        }
        if parent.is_under_way() {
            return Err(Error::RequestInFlight(handle));
        }
        if request.identity != Identity::default() {
            return invalid("identity", "none: a fork has that of its sample", "another one");
        }
        if request.num_external_tokens > 0 {
            return invalid("num_external_tokens", "0: a fork has what its sample has", request.num_external_tokens);
        }
        if let Some(negative) = request.prompt_token_ids.iter().find(|&&token| token < 0) {
            return invalid("ids", "token ids of at least 0", negative);
        }
        // Before the samples part, one sequence has the blocks of all.
        let holder = if parent.stage == Stage::Prompt { parent.leader() } else { number };
        let (source, identity) = (parent.samples[holder].sequence, parent.identity.clone());
        if source != NONE && !self.manager.sequence(source as usize).is_idle() {
            // A plan in flight moves its accepted guesses, even if it does not run it.
            return Err(Error::RequestInFlight(handle));
        }
        let mut request = NewRequest {
            identity: (*identity).clone(),
            use_prefix_cache: parent.use_prefix_cache,
            retention: request.retention.or(parent.retention),
            ..request
        };
        let mut tokens = self.tokens_of(slot, number);
        tokens.append(&mut request.prompt_token_ids);
        request.prompt_token_ids = tokens;
        let forked = self.inbox.register(&request)?;
        let mut request = Request { identity, ..Request::new(forked, request) };
        if source != NONE {
            let child = self.manager.fork_with(source as usize, request.prompt.clone());
            self.manager.sequences[child as usize].retention = request.retention;
            request.samples[0].sequence = child;
        }
        self.enqueue(request);
        self.note_keeper(self.by_handle[&forked]);
        Ok(forked)
    }

    /// All known tokens of a sample.
    fn tokens_of(&self, slot: u32, sample: usize) -> Vec<i32> {
        let request = self.request(slot);
        let Some(sequence) = self.manager.sequences.get(request.samples[sample].sequence as usize) else {
            return request.prompt.to_vec();
        };
        let mut tokens = vec![0; sequence.tokens.len() as usize];
        sequence.tokens.copy_to(0, &mut tokens);
        tokens
    }
}

impl crate::KVCacheManager {
    /// A fork of a sequence, with tokens that begin with all that it has computed; one at least is left to compute.
    fn fork_with(&mut self, index: usize, tokens: Arc<Vec<i32>>) -> u32 {
        let most = tokens.len() as u32 - 1;
        let child = self.fork_at(index).index;
        self.set_tokens(child as usize, tokens);
        self.cut_computed(child as usize, most);
        child
    }
}
