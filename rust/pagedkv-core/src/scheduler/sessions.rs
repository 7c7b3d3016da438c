//! Sessions: samples that finish keep their blocks, and go on when more tokens come.
//!
//! A request with `session` *rests* when its last sample has finished: it has given up seats and rows, each sample that
//! ended by stop or length keeps the blocks of its computed tokens, and the request's handle and id stay taken. Resting
//! blocks are nobody's to take: they are held until [`Scheduler::free`] or an abort. [`Scheduler::append_tokens`] begins
//! the next *turn* of a sample: the request waits again, as one that arrives now, with its blocks; from then on it may be
//! preempted like any other. Its other samples rest on meanwhile.

use super::Scheduler;
use super::request::{FinishReason, NONE, Stage};
use super::room::blocks_at_the_longest;
use super::stats::Recorder;
use crate::config::SchedulerConfig;
use crate::error::{Error, Result, invalid};
use crate::ids::Handle;

impl Scheduler {
    /// Begins the next turn of a session's sample: its last token, which is not computed yet, and `ids` behind it are a
    /// prefill, after which up to `max_tokens` are sampled (those of the request if `None`). Where several samples of a
    /// resting session get tokens before the next plan, they go on together.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a request that has ended and is no session; [`Error::InvalidArgument`] for a sample
    /// that the session does not keep, a negative token, or too many of them; [`Error::NeverFits`];
    /// [`Error::NotFinished`] for a request that runs or a sample that waits; [`Error::RequestInFlight`].
    ///
    /// # Complexity
    /// O(tokens appended + blocks that the request's other samples keep).
    pub fn append_tokens(&mut self, handle: Handle, sample: u32, ids: &[i32], max_tokens: Option<u32>) -> Result<()> {
        self.drain_inbox();
        let slot = *self.by_handle.get(&handle).ok_or(Error::UnknownHandle(handle))?;
        let max_tokens = max_tokens.unwrap_or(self.request(slot).max_tokens);
        self.check_turn(slot, sample, ids, max_tokens)?;
        if self.request(slot).stage == Stage::Resting {
            self.inbox.set_resting(handle, false);
            let request = self.request_mut(slot);
            request.stage = Stage::Waiting;
            (request.num_preemptions, request.num_cached_tokens, request.num_new_tokens) = (0, 0, 0);
            let request = &mut self.requests[slot];
            self.recorder.arrived_again(request);
        } else {
            // It arrives once more, now with this sample too.
            self.leave_queues(slot);
            let request = &self.requests[slot];
            let ended = request.samples.iter().filter(|sample| sample.finish.is_some());
            let spent: u64 = ended.map(|sample| u64::from(sample.num_outputs)).sum();
            self.policy.ended(&request.view(0, 0), request.most_outputs() - spent);
        }
        self.begin_turn(slot, sample as usize, ids, max_tokens);
        let mut request = self.requests.take(slot);
        let num_tokens = self.num_known_tokens(&request);
        self.arrive(&mut request, num_tokens);
        if request.due_at != u64::MAX {
            self.ageing.insert((request.due_at, handle), slot);
        }
        self.requests.put_back(slot, request);
        self.note_keeper(slot);
        if self.request(slot).is_keeper {
            // What a session kept goes on with the other samples: together they are computed again.
            self.forget_swapped(slot);
        }
        self.queue(slot);
        Ok(())
    }

    /// Gives up the blocks that a session's samples keep, or those of one sample; the session is gone with its last one.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a request that has ended and is no session, [`Error::InvalidArgument`] for one that is
    /// no session or has no such sample, [`Error::NotFinished`] for a sample that has not ended: abort that.
    ///
    /// # Complexity
    /// O(blocks released).
    pub fn free(&mut self, handle: Handle, sample: Option<u32>) -> Result<()> {
        self.drain_inbox();
        let slot = *self.by_handle.get(&handle).ok_or(Error::UnknownHandle(handle))?;
        let request = self.request(slot);
        if !request.is_session {
            return invalid("handle", "a session", format!("request {:?}, which is none", request.id));
        }
        let samples = self.samples_of(slot, sample)?;
        if let Some(live) = samples.clone().find(|&sample| self.request(slot).samples[sample].finish.is_none()) {
            return Err(Error::NotFinished { handle, sample: live as u32 });
        }
        for sample in samples {
            if self.by_handle.contains_key(&handle) {
                self.give_up(slot, sample);
            }
        }
        Ok(())
    }

    /// Sessions that rest, and the blocks that nobody else holds besides them.
    ///
    /// # Complexity
    /// O(requests + blocks of resting sessions).
    pub fn num_resting(&self) -> (usize, u32) {
        let resting = self.requests.iter().filter(|(_, request)| request.stage == Stage::Resting).count();
        (resting, self.manager.num_blocks_of_sessions())
    }

    /// The numbers of a request's samples, or of the one that is meant.
    pub(super) fn samples_of(&self, slot: u32, sample: Option<u32>) -> Result<std::ops::Range<usize>> {
        let n = self.request(slot).samples.len();
        match sample {
            Some(sample) if sample as usize >= n => invalid("sequence", format!("0 to {}", n - 1), sample),
            Some(sample) => Ok(sample as usize..sample as usize + 1),
            None => Ok(0..n),
        }
    }

    fn check_turn(&self, slot: u32, sample: u32, ids: &[i32], max_tokens: u32) -> Result<()> {
        let request = self.request(slot);
        let number = self.samples_of(slot, Some(sample))?.start;
        let found = &request.samples[number];
        if found.finish.is_none() || !matches!(request.stage, Stage::Waiting | Stage::Resting) {
            return Err(Error::NotFinished { handle: request.handle, sample });
        }
        if request.num_in_flight > 0 {
            return Err(Error::RequestInFlight(request.handle));
        }
        if !found.is_kept {
            return invalid("sequence", "a sample that the session keeps", format!("{sample}, which was given up"));
        }
        if let Some(negative) = ids.iter().find(|&&token| token < 0) {
            return invalid("ids", "token ids of at least 0", negative);
        }
        if max_tokens == 0 {
            return invalid("max_tokens", "at least 1", 0);
        }
        let known = self.num_tokens_of(slot, number) as usize + ids.len();
        if known as u64 + u64::from(max_tokens) > u64::from(self.limits.max_model_len) {
            let expected = format!("all tokens + max_tokens of at most {} (max_model_len)", self.limits.max_model_len);
            return invalid("max_tokens", expected, format!("{known} + {max_tokens}"));
        }
        if request.num_live + 1 > self.limits.max_num_seqs {
            let expected = format!("at most {} (max_num_seqs) samples that go on together", self.limits.max_num_seqs);
            return invalid("sequence", expected, format!("one more than {}", request.num_live));
        }
        let turn = (number, known as u32 + max_tokens);
        let needed = self.blocks_at_the_longest(slot, Some(turn), &self.limits);
        let usable = u64::from(self.inbox.usable_blocks());
        if needed > usable { Err(Error::NeverFits { needed, usable }) } else { Ok(()) }
    }

    /// Blocks that a request may come to hold: full prompt blocks once, the rest once per sample that goes on, and what its
    /// other samples keep. A session's samples count in full: one may have to compute the prompt anew while another keeps
    /// it. `turn` is a sample that is to go on, and its tokens at the longest.
    pub(super) fn blocks_at_the_longest(&self, slot: u32, turn: Option<(usize, u32)>, limits: &SchedulerConfig) -> u64 {
        let request = self.request(slot);
        let shared = if request.is_session { 0 } else { request.prompt_len() };
        let begins = |number: usize| turn.is_some_and(|(sample, _)| sample == number);
        let others = request.samples.iter().enumerate().filter(|&(number, _)| !begins(number));
        let going_on = others.clone().filter(|(_, other)| other.finish.is_none());
        let lengths = going_on.map(|(_, other)| other.most_computed() + 1).chain(turn.map(|(_, longest)| longest));
        let lengths = lengths.map(|longest| u64::from(longest - 1) + u64::from(limits.lookahead));
        let kept = others.filter(|(_, other)| other.is_kept && other.sequence != NONE).map(|(_, other)| other.sequence);
        let kept = u64::from(self.manager.num_distinct_blocks(kept));
        blocks_at_the_longest(&self.manager.groups, limits, u64::from(shared), &lengths) + kept
    }

    fn num_tokens_of(&self, slot: u32, sample: usize) -> u32 {
        let request = self.request(slot);
        let sequence = self.manager.sequences.get(request.samples[sample].sequence as usize);
        sequence.map_or(request.prompt_len(), |sequence| sequence.tokens.len())
    }

    fn begin_turn(&mut self, slot: u32, sample: usize, ids: &[i32], max_tokens: u32) {
        let index = self.ensure_sequence(slot, sample);
        self.manager.leave_session(index);
        ids.iter().for_each(|&token| self.manager.append_token(index, token));
        let sequence = self.manager.sequence(index);
        let (turn_start, num_computed) = (sequence.tokens.len(), sequence.num_scheduled);
        let request = self.request_mut(slot);
        request.num_live += 1;
        request.num_new_tokens += u64::from(turn_start - num_computed);
        Recorder::prompt_grew(request, turn_start - num_computed);
        request.due_at = u64::MAX;
        let found = &mut request.samples[sample];
        (found.finish, found.is_kept) = (None, false);
        // Guesses at what would have followed the turn before.
        found.drafts.clear();
        (found.turn_start, found.max_tokens, found.num_outputs) = (turn_start, max_tokens, 0);
    }

    /// Notes whether a waiting request has blocks from before.
    pub(super) fn note_keeper(&mut self, slot: u32) {
        let live = self.request(slot).samples.iter().filter(|sample| sample.finish.is_none());
        let mut sequences = live.filter_map(|sample| self.manager.sequences.get(sample.sequence as usize));
        let is_keeper = sequences.any(|sequence| sequence.num_scheduled > 0);
        self.set_keeper(slot, is_keeper);
    }

    /// The turn is over: the policy is told what was left unused of it.
    pub(super) fn close_turn(&mut self, slot: u32) {
        let request = &mut self.requests[slot];
        let num_outputs: u64 = request.samples.iter().map(|sample| u64::from(sample.num_outputs)).sum();
        let unused = request.most_outputs().saturating_sub(num_outputs);
        self.policy.ended(&request.view(request.prompt_len(), 0), unused);
        request.samples.iter_mut().for_each(|sample| (sample.max_tokens, sample.num_outputs) = (0, 0));
    }

    /// The last sample has ended, and some are kept.
    pub(super) fn rest(&mut self, slot: u32) {
        let request = self.request_mut(slot);
        request.stage = Stage::Resting;
        request.num_external_tokens = 0;
        let handle = request.handle;
        self.inbox.set_resting(handle, true);
    }

    /// Gives up a sample that a session keeps, and the session with the last one. Another sample is left alone.
    pub(super) fn give_up(&mut self, slot: u32, sample: usize) {
        let request = self.request_mut(slot);
        let found = &mut request.samples[sample];
        if !std::mem::take(&mut found.is_kept) {
            return;
        }
        found.finish = Some(FinishReason::Abort);
        let sequence = std::mem::replace(&mut found.sequence, NONE);
        let is_gone = request.stage == Stage::Resting && request.samples.iter().all(|sample| !sample.is_kept);
        if sequence != NONE {
            self.manager.remove(sequence as usize);
        }
        if is_gone {
            self.remove_request(slot);
        }
    }
}
