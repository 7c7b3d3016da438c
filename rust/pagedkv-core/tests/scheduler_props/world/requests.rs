//! What clients do: requests come, grow, fork, are held and end.

use std::sync::Arc;

use pagedkv_core::{Error, FinishReason, Identity, ImageSpan, NewRequest, Policy, RootKey, Scheduler};

use super::{MOST_REQUESTS, MOST_RESTING, World};
use crate::model::random::two_tokens;
use crate::model::scheduler::Request;

/// The adapter that some requests use.
pub(super) const LORA_ID: i64 = 1;

impl World {
    fn request(&self, prompt: u8, output: u8, kind: u8) -> NewRequest {
        let longest = if kind.is_multiple_of(5) { 9 } else { 2 * self.model.limits.block_size };
        let tokens = two_tokens(1 + usize::from(prompt) % longest, prompt / 9);
        let len = tokens.len() as u32;
        let (lora_id, images) = match kind / 8 % 16 {
            0 => (Some(LORA_ID), vec![]),
            1 if len > 2 => (None, vec![ImageSpan { start: 1, len: 2, digest: [7].into() }]),
            2 if len > 2 => (None, vec![ImageSpan { start: 1, len: 2, digest: [8].into() }]),
            _ => (None, vec![]),
        };
        let policy = self.model.limits.policy;
        let n = [1, 1, 1, 1, 2, 2, 2, 3][usize::from(kind % 8)];
        let needs_commit = (output / 9).is_multiple_of(4);
        NewRequest {
            session: prompt.is_multiple_of(3) && !(needs_commit && n > 1),
            priority: if policy == Policy::Priority { i32::from(output % 3) } else { 0 },
            tenant: (policy == Policy::FairShare).then(|| ["a", "b"][usize::from(output % 2)].into()),
            n,
            stop_token_ids: if output.is_multiple_of(3) { vec![2] } else { vec![] },
            min_tokens: u32::from(output / 3 % 3),
            arrival: self.model.now,
            needs_commit,
            use_prefix_cache: kind < 224,
            num_external_tokens: if (prompt ^ output).is_multiple_of(6) { 1 + u32::from(kind / 3) % len } else { 0 },
            identity: Identity { root: RootKey { lora_id, cache_salt: None }, images },
            ..NewRequest::new(format!("r{}", self.num_added), tokens, 1 + u32::from(output / 36 % 6))
        }
    }

    pub(super) fn add(&mut self, prompt: u8, output: u8, kind: u8) {
        if self.model.requests.len() >= MOST_REQUESTS {
            return self.commit(prompt);
        }
        if self.model.resting.len() >= MOST_RESTING {
            return self.free(1, 0);
        }
        let request = self.request(prompt, output, kind);
        self.submit(request);
    }

    pub(super) fn submit(&mut self, request: NewRequest) {
        if let Some(refusal) = self.refuses(&request) {
            self.call(Some(refusal), |scheduler| scheduler.add_request(request));
            return;
        }
        let handle = self.scheduler.add_request(request.clone()).expect("a request that fits");
        self.model.add_request(handle, &Arc::new(request));
        self.num_added += 1;
    }

    /// Why a request is refused, if it is.
    fn refuses(&self, request: &NewRequest) -> Option<Error> {
        let needed = self.model.num_blocks_needed(request);
        let limits = self.model.limits;
        let invalid =
            |argument| Some(Error::InvalidArgument { argument, expected: String::new(), found: String::new() });
        let together = if request.needs_commit { limits.max_num_batched_tokens } else { usize::MAX };
        if request.n as usize > limits.max_num_seqs.min(together) {
            return invalid("n");
        }
        if request.prompt_token_ids.len() + request.max_tokens as usize > limits.max_model_len {
            return invalid("max_tokens");
        }
        let usable = limits.usable_blocks;
        (needed > usable).then_some(Error::NeverFits { needed: needed as u64, usable: usable as u64 })
    }

    pub(super) fn abort(&mut self, number: u8, sample: u8) {
        let Some(handle) = self.handle(number) else {
            return self.schedule(sample);
        };
        let sample = (sample % 4).checked_sub(1);
        let request = self.model.requests.iter().find(|request| request.handle == handle);
        let n = request.map_or(usize::MAX, Request::num_samples);
        if let Some(missing) = sample.map(u32::from).filter(|&sample| sample as usize >= n) {
            let is_expected = |error: &Error| matches!(error, Error::InvalidArgument { argument: "sequence", .. });
            return self.refused(|scheduler| scheduler.abort(handle, Some(missing)), is_expected);
        }
        self.scheduler.abort(handle, sample.map(u32::from)).expect("a handle that was given out");
        self.model.abort(handle, sample.map(usize::from));
        if number.is_multiple_of(2) {
            // Aborts wait in the inbox for the next of these.
            self.commit(number);
        }
    }

    pub(super) fn finish(&mut self, number: u8, sample: u8) {
        let Some(handle) = self.handle(number) else {
            return self.schedule(sample);
        };
        self.model.drain_aborts();
        let request = self.model.requests.iter().find(|request| request.handle == handle);
        let Some(n) = request.map(Request::num_samples) else {
            assert_eq!(self.scheduler.finish(handle, 0), Ok(()));
            return;
        };
        let sample = usize::from(sample) % n;
        assert_eq!(self.scheduler.finish(handle, sample as u32), Ok(()));
        self.model.end_for(handle, sample, FinishReason::Stop);
        self.follow_kept();
    }

    pub(super) fn append(&mut self, number: u8, sample: u8, tokens: u8) {
        self.take_up();
        let Some(handle) = self.any_handle(number).filter(|_| self.model.requests.len() < MOST_REQUESTS) else {
            return self.schedule(tokens);
        };
        let request = self.model.all().find(|request| request.handle == handle).expect("it has a handle");
        let sample = usize::from(sample) % request.num_samples();
        let ids = two_tokens(usize::from(tokens % 4), tokens);
        let max_tokens = 1 + usize::from(tokens / 4 % 4);
        let refusal = self.model.refuses_turn(&self.scheduler, handle, sample, ids.len(), max_tokens);
        let appended = self
            .call(refusal, |scheduler| scheduler.append_tokens(handle, sample as u32, &ids, Some(max_tokens as u32)));
        if appended.is_some() {
            self.model.begin_turn(handle, sample, &ids, max_tokens);
        }
    }

    pub(super) fn free(&mut self, number: u8, sample: u8) {
        self.take_up();
        let Some(handle) = self.any_handle(number) else {
            return self.schedule(sample);
        };
        let request = self.model.all().find(|request| request.handle == handle).expect("it has a handle");
        let n = request.num_samples();
        let samples =
            if sample.is_multiple_of(2) { 0..n } else { usize::from(sample) % n..usize::from(sample) % n + 1 };
        let live = samples.clone().find(|&sample| !request.has_ended(sample));
        let refusal = if request.is_session() {
            live.map(|sample| Error::NotFinished { handle, sample: sample as u32 })
        } else {
            Some(Error::InvalidArgument { argument: "handle", expected: String::new(), found: String::new() })
        };
        let only = (!sample.is_multiple_of(2)).then_some(samples.start as u32);
        if self.call(refusal, |scheduler| scheduler.free(handle, only)).is_some() {
            samples.for_each(|sample| self.model.give_up(handle, sample));
        }
    }

    pub(super) fn set_held(&mut self, number: u8, is_held: bool) {
        self.take_up();
        let Some(handle) = self.any_handle(number) else {
            return self.schedule(number);
        };
        let call = if is_held { Scheduler::hold } else { Scheduler::release };
        call(&mut self.scheduler, handle).expect("a handle that lives");
        self.model.set_held(handle, is_held);
    }

    pub(super) fn fork(&mut self, number: u8, sample: u8, kind: u8) {
        self.take_up();
        let handle = self.any_handle(number).filter(|_| self.model.requests.len() < MOST_REQUESTS);
        let Some(handle) = handle else {
            return self.commit(kind);
        };
        let parent = self.model.all().find(|request| request.handle == handle).expect("it has a handle");
        let sample = usize::from(sample) % parent.num_samples();
        let asked = NewRequest {
            n: [1, 1, 2, 3][usize::from(kind % 4)],
            session: kind.is_multiple_of(5),
            arrival: self.model.now,
            ..NewRequest::new(
                format!("r{}", self.num_added),
                two_tokens(usize::from(kind / 4 % 3), kind),
                1 + u32::from(kind / 12 % 4),
            )
        };
        let whole = self.model.fork_request(handle, sample, &asked);
        let refusal = self.model.refuses_fork(handle, sample).or_else(|| self.refuses(&whole));
        if let Some(forked) = self.call(refusal, |scheduler| scheduler.fork(handle, sample as u32, asked)) {
            self.model.fork(handle, sample, forked, &Arc::new(whole));
            self.follow_kept();
            self.num_added += 1;
        }
    }
}
