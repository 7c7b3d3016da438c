//! Tokens that a plan computes before anyone knows them: those that older plans in flight sample, and guesses.
//!
//! A slot counts as computed only for a token that the plan was declared to compute. So growth beyond the known tokens is
//! bounded by what plans in flight will sample, guesses count as far as [`KVCacheManager::append_accepted`] says, and
//! what nobody told by the commit is taken back.

use smallvec::smallvec;

use super::plan::Growth;
use super::{AllocatedSlots, ComputedBlocks, KVCacheManager, check_tokens};
use crate::error::{Error, Result, invalid};
use crate::ids::SequenceId;

impl KVCacheManager {
    /// Gives a sequence slots in the newest plan: after the blocks of `computed`, for its next `num_new_tokens` tokens,
    /// and behind them for `num_draft_tokens` guesses.
    ///
    /// `None`, and nothing changed, if there is no room. New tokens are known, or each is what an older plan in flight
    /// samples for the sequence. Guesses come behind the last known token. The sequence grows no more in their plan, and in
    /// later ones only when tokens were appended at their places, see [`Self::append_accepted`], or their plan ended.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::NoPlan`], [`Error::StaleComputedBlocks`], [`Error::SequenceInFlight`] for a
    /// sequence whose guesses are open, [`Error::InvalidArgument`] for no tokens or more than there can be.
    ///
    /// # Complexity
    /// O(new tokens + hit blocks).
    pub fn allocate_slots_with_drafts(
        &mut self,
        sequence: SequenceId,
        num_new_tokens: u32,
        num_draft_tokens: u32,
        computed: &ComputedBlocks,
    ) -> Result<Option<AllocatedSlots>> {
        let index = self.find(sequence)?;
        self.check_growth(sequence, num_new_tokens, num_draft_tokens, computed)?;
        let num_slots = num_new_tokens + num_draft_tokens;
        if num_slots == 1
            && computed.num_tokens == 0
            && let Some(takes_block) = self.decodes(index)
        {
            if takes_block && self.pool.num_available() == 0 {
                return Ok(None);
            }
            self.extend_by_one(index, takes_block);
            let slot = self.slot(index, 0, self.sequences[index].num_scheduled - 1);
            return Ok(Some(AllocatedSlots { slot_mapping: smallvec![slot], copies: Vec::new() }));
        }
        if self.blocks_needed(index, num_slots, computed) > self.pool.num_available() {
            return Ok(None);
        }
        self.extend(index, num_slots, computed);
        self.mark_drafts(index, num_draft_tokens);
        let end = self.sequences[index].num_scheduled;
        let slots = end - num_slots..end;
        let groups = 0..self.groups.len();
        let slot_mapping = groups.flat_map(|group| slots.clone().map(move |position| (group, position)));
        let slot_mapping = slot_mapping.map(|(group, position)| self.slot(index, group, position)).collect();
        Ok(Some(AllocatedSlots { slot_mapping, copies: self.last_copies().to_vec() }))
    }

    /// Adds known tokens to the end of a sequence. Those at places that a plan in flight computes are what it computed
    /// there; guesses at their places are rejected.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::InvalidElement`] for a negative token, [`Error::InvalidArgument`] for more
    /// than 2^31 - 1 tokens in all.
    ///
    /// # Complexity
    /// O(tokens), and a look into the prefix cache for each block that they fill.
    pub fn append_tokens(&mut self, sequence: SequenceId, tokens: &[i32]) -> Result<()> {
        self.append_accepted(sequence, tokens, 0)
    }

    /// Adds known tokens to the end of a sequence, and says how many of the guesses at their places hold: the first
    /// `num_accepted`, which count as computed when their plan commits. The slots of the others are taken back.
    ///
    /// # Errors
    /// As [`Self::append_tokens`]; [`Error::InvalidArgument`] for more accepted guesses than the tokens lie on.
    pub fn append_accepted(&mut self, sequence: SequenceId, tokens: &[i32], num_accepted: u32) -> Result<()> {
        let index = self.find(sequence)?;
        self.check_append(index, tokens, num_accepted)?;
        self.append_checked(index, tokens, num_accepted);
        Ok(())
    }

    pub(super) fn append_checked(&mut self, index: usize, tokens: &[i32], num_accepted: u32) {
        if self.drafts_under(index, tokens.len()) > 0 {
            self.settle_drafts(index, num_accepted);
        }
        tokens.iter().for_each(|&token| self.append_token(index, token));
    }

    pub(crate) fn append_token(&mut self, index: usize, token: i32) {
        self.sequences[index].tokens.push(token);
        self.register_filled(index);
        if self.has_windows {
            // The one before it was the last that was known.
            self.leave_windows(index);
        }
    }

    /// Remembers that the last tokens of the latest growth are guesses.
    pub(super) fn mark_drafts(&mut self, index: usize, num_drafts: u32) {
        if num_drafts > 0 {
            let plan = self.plans.back_mut().expect("a plan is open");
            plan.growths.last_mut().expect("the growth is recorded").has_drafts = true;
            self.sequences[index].num_drafts = num_drafts;
            self.sequences[index].drafts_at = (plan.id, plan.growths.len() as u32 - 1);
        }
    }

    pub(super) fn check_append(&self, index: usize, tokens: &[i32], num_accepted: u32) -> Result<()> {
        check_tokens("token_ids", tokens)?;
        let known = self.sequences[index].tokens.len() as usize;
        if known + tokens.len() > i32::MAX as usize {
            return invalid("token_ids", "a length below 2^31", format!("{known} + {}", tokens.len()));
        }
        let most = self.drafts_under(index, tokens.len());
        if num_accepted > most {
            return invalid("num_accepted", format!("0 to {most}, the guesses under the tokens"), num_accepted);
        }
        Ok(())
    }

    /// What is wrong with a growth, if anything is.
    pub(super) fn check_growth(
        &self,
        id: SequenceId,
        num_new_tokens: u32,
        num_draft_tokens: u32,
        computed: &ComputedBlocks,
    ) -> Result<()> {
        let sequence = &self.sequences[id.index as usize];
        if self.plans.is_empty() {
            return Err(Error::NoPlan);
        }
        let is_fresh = computed.sequence == Some(id) && computed.stamp == self.pool.stamp;
        if computed.num_tokens > 0 && !is_fresh {
            return Err(Error::StaleComputedBlocks);
        }
        if sequence.num_drafts > 0 || self.plans.back().is_some_and(|newest| newest.id == sequence.drafts_at.0) {
            return Err(Error::SequenceInFlight(id.to_bits()));
        }
        let start = sequence.num_scheduled + computed.num_tokens;
        let known = sequence.tokens.len();
        let most = (known + self.num_coming(id.index as usize)).saturating_sub(start);
        if num_new_tokens == 0 || num_new_tokens > most {
            let expected = format!("1 to {most}, the tokens that are known or that older plans in flight sample");
            return invalid("num_new_tokens", expected, num_new_tokens);
        }
        let end = start + num_new_tokens;
        if num_draft_tokens > 0 && end < known {
            let expected = format!("none before the {} known tokens behind these", known - end);
            return invalid("num_draft_tokens", expected, num_draft_tokens);
        }
        if end.checked_add(num_draft_tokens).is_none_or(|end| end > i32::MAX as u32) {
            return invalid("num_draft_tokens", "a length below 2^31", num_draft_tokens);
        }
        Ok(())
    }

    /// Whether every plan behind the oldest one stands on tokens that are known.
    pub(super) fn check_told(&self) -> Result<()> {
        let record = self.plans.front().expect("a plan is in flight");
        for growth in record.growths.iter().filter(|growth| growth.is_of(&self.sequences)) {
            let sequence = &self.sequences[growth.sequence as usize];
            if sequence.in_flight.len() > 1 && growth.after > sequence.tokens.len() {
                let id = SequenceId { index: growth.sequence, generation: sequence.generation };
                return Err(Error::UntoldTokens(id.to_bits()));
            }
        }
        Ok(())
    }

    /// Takes back what a sequence whose last plan ended computed of tokens that nobody told.
    pub(super) fn drop_untold(&mut self, index: usize) {
        let sequence = &mut self.sequences[index];
        if sequence.in_flight.is_empty() {
            sequence.num_drafts = 0;
            let untold = sequence.num_computed.saturating_sub(sequence.tokens.len());
            if untold > 0 {
                self.accept(index, untold, 0, None);
            }
        }
    }

    /// The slot of a position in a group.
    pub(super) fn slot(&self, index: usize, group: usize, position: u32) -> i64 {
        let block_size = self.groups[group].block_size;
        let block = self.sequences[index].tables[group].blocks[(position / block_size) as usize];
        i64::from(block.get()) * i64::from(block_size) + i64::from(position % block_size)
    }

    /// Tokens that plans before the newest will sample for the sequence, behind its known ones.
    fn num_coming(&self, index: usize) -> u32 {
        let newest = self.plans.back().map(|record| record.id);
        let sequence = &self.sequences[index];
        let samples = |&&(plan, after): &&(_, u32)| Some(plan) != newest && after >= sequence.tokens.len();
        sequence.in_flight.iter().filter(samples).count() as u32
    }

    /// Open guesses at the places of the next `len` tokens.
    fn drafts_under(&self, index: usize, len: usize) -> u32 {
        let sequence = &self.sequences[index];
        let first = (sequence.num_scheduled - sequence.num_drafts) as usize;
        let reached = (sequence.tokens.len() as usize + len).saturating_sub(first);
        sequence.num_drafts.min(reached as u32)
    }

    /// The growth of a sequence's latest guesses was undone: the ones before them are the latest.
    pub(super) fn forget_drafts(&mut self, index: usize) {
        let is_its =
            |growth: &Growth| growth.has_drafts && growth.sequence as usize == index && growth.is_of(&self.sequences);
        let places = self.plans.iter().rev().filter_map(|plan| Some((plan.id, plan.growths.iter().rposition(is_its)?)));
        let latest = places.map(|(plan, growth)| (plan, growth as u32)).next();
        self.sequences[index].num_drafts = 0;
        self.sequences[index].drafts_at = latest.unwrap_or_default();
    }

    /// Keeps the first `num_accepted` guesses and takes back the slots of the others.
    fn settle_drafts(&mut self, index: usize, num_accepted: u32) {
        let sequence = &mut self.sequences[index];
        let end = sequence.num_scheduled - std::mem::take(&mut sequence.num_drafts) + num_accepted;
        sequence.in_flight.last_mut().expect("guesses are of a plan in flight").1 = end;
        let (plan, growth) = sequence.drafts_at;
        let record = self.plans.iter_mut().find(|record| record.id == plan);
        record.expect("guesses are of a plan in flight").growths[growth as usize].after = end;
        self.shrink(index, end);
    }
}
