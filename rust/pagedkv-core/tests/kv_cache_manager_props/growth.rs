//! Lookups and growth, at once and after other commands.

use pagedkv_core::{ComputedBlocks, Error, SequenceId};

use super::world::World;
use crate::model::manager::states;

/// Guesses of one growth.
const MOST_DRAFTS: usize = 2;

impl World {
    /// The newest plan, ready for growth: a plan that ran already is closed.
    pub(crate) fn open_plan(&mut self) {
        if self.model.num_plans_to_run() == 0 {
            self.begin_plan();
        }
        if self.model.num_plans_to_run() == 0 {
            self.begin_plan();
        }
    }

    pub(crate) fn look_up(&self, id: SequenceId) -> ComputedBlocks {
        let computed = self.manager.get_computed_blocks(id).expect("a live sequence");
        assert_eq!(computed.num_tokens() as usize, self.model.num_hit_tokens(id), "the hits of {id:?}");
        self.model.check_hits(id, &computed);
        computed
    }

    pub(crate) fn grow(&mut self, id: SequenceId, length: u8, computed: &ComputedBlocks) {
        let sequence = self.model.find(id);
        if self.model.is_drafting(id) {
            let error = Error::SequenceInFlight(id.to_bits());
            return self.refused(error, |manager| manager.allocate_slots(id, 1, computed));
        }
        let start = sequence.num_scheduled + computed.num_tokens() as usize;
        let known = sequence.tokens.len();
        let most = (known + self.model.num_coming(id)).saturating_sub(start);
        if most == 0 {
            self.invalid("num_new_tokens", |manager| manager.allocate_slots(id, 1, computed));
            self.append(id, 0, length);
            return self.grow(id, length, &ComputedBlocks::default());
        }
        let num_new_tokens = 1 + usize::from(length) % most;
        let has_room_for_drafts = start + num_new_tokens >= known;
        let num_drafts = if has_room_for_drafts { usize::from(length) / most % (MOST_DRAFTS + 1) } else { 0 };
        let states = states(&self.manager);
        let before = self.digest();
        let (new, drafts) = (num_new_tokens as u32, num_drafts as u32);
        let answer = self.manager.allocate_slots_with_drafts(id, new, drafts, computed);
        let answer = answer.expect("the lookup is fresh");
        if answer.is_none() {
            assert_eq!(self.digest(), before, "a refusal for want of room changed something");
        }
        self.model.grow(id, num_new_tokens + num_drafts, num_drafts, computed, &states, answer.as_ref());
    }

    /// A lookup that was kept is refused, or it still holds.
    pub(crate) fn grow_by_kept(&mut self, id: SequenceId, length: u8) {
        let Some((owner, computed)) = self.kept.take() else {
            return;
        };
        if self.model.num_plans_to_run() == 0 {
            return;
        }
        let is_known = self.model.sequences.iter().any(|sequence| sequence.id == owner);
        let target = if is_known && !length.is_multiple_of(4) { owner } else { id };
        let before = self.digest();
        if target != owner && computed.num_tokens() > 0 {
            let error = Error::StaleComputedBlocks;
            return self.refused(error, |manager| manager.allocate_slots(target, 1, &computed));
        }
        let sequence = self.model.find(target);
        let start = sequence.num_scheduled + computed.num_tokens() as usize;
        if self.model.is_drafting(target) || start >= sequence.tokens.len() + self.model.num_coming(target) {
            return;
        }
        let states = states(&self.manager);
        match self.manager.allocate_slots(target, 1, &computed) {
            Ok(answer) => {
                self.model.check_hits(target, &computed);
                self.model.grow(target, 1, 0, &computed, &states, answer.as_ref());
            }
            Err(error) => {
                assert_eq!(error, Error::StaleComputedBlocks);
                assert!(computed.num_tokens() > 0, "nothing found cannot be stale");
                assert_eq!(self.digest(), before, "a refused call changed something");
                self.model.events.note("refused calls", 1);
            }
        }
    }
}
