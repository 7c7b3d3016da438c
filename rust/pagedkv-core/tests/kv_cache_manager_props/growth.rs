//! Lookups and growth, at once and after other commands.

use pagedkv_core::{ComputedBlocks, Error, SequenceId};

use super::world::World;
use crate::model::manager::states;

/// Tokens that may be scheduled before anyone knows them.
const MOST_UNKNOWN: usize = 2;

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
        assert_eq!(computed.blocks().len(), self.model.num_hits(id), "the hits of {id:?}");
        assert_eq!(computed.num_tokens() as usize, computed.blocks().len() * self.model.block_size);
        self.model.check_hits(id, computed.blocks());
        computed
    }

    pub(crate) fn grow(&mut self, id: SequenceId, length: u8, computed: &ComputedBlocks) {
        let sequence = self.model.find(id);
        let start = sequence.num_scheduled + computed.num_tokens() as usize;
        let most = (sequence.tokens.len() + MOST_UNKNOWN).saturating_sub(start);
        if most == 0 {
            return;
        }
        let num_new_tokens = 1 + usize::from(length) % most;
        let states = states(&self.manager);
        let before = self.digest();
        let answer = self.manager.allocate_slots(id, num_new_tokens as u32, computed);
        let answer = answer.expect("the lookup is fresh");
        if answer.is_none() {
            assert_eq!(self.digest(), before, "a refusal for want of room changed something");
        }
        self.model.grow(id, num_new_tokens, computed.blocks(), &states, answer.as_ref());
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
        let start = self.model.find(target).num_scheduled + computed.num_tokens() as usize;
        if start >= self.model.find(target).tokens.len() + MOST_UNKNOWN {
            return;
        }
        let states = states(&self.manager);
        match self.manager.allocate_slots(target, 1, &computed) {
            Ok(answer) => {
                self.model.check_hits(target, computed.blocks());
                self.model.grow(target, 1, computed.blocks(), &states, answer.as_ref());
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
