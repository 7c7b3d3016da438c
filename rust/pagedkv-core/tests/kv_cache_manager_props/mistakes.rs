//! Calls that must be refused, and change nothing.

use std::sync::Arc;

use pagedkv_core::{ComputedBlocks, Error, Identity, ImageSpan, KVCacheManager, PlanId, Result, RootKey, SequenceId};

use super::world::{World, identity};

impl World {
    pub(crate) fn refused<T: std::fmt::Debug>(
        &mut self,
        error: Error,
        call: impl FnOnce(&mut KVCacheManager) -> Result<T>,
    ) {
        let before = self.digest();
        let answer = call(&mut self.manager);
        assert_eq!(answer.map_err(|refused| (refused, ())).err(), Some((error, ())));
        assert_eq!(self.digest(), before, "a refused call changed something");
        self.model.events.note("refused calls", 1);
    }

    pub(crate) fn invalid<T: std::fmt::Debug>(
        &mut self,
        argument: &'static str,
        call: impl FnOnce(&mut KVCacheManager) -> Result<T>,
    ) {
        let before = self.digest();
        let answer = call(&mut self.manager);
        let refused = matches!(&answer, Err(Error::InvalidArgument { argument: found, .. }) if *found == argument);
        assert!(refused, "{argument}: {answer:?}");
        assert_eq!(self.digest(), before, "a refused call changed something");
        self.model.events.note("refused calls", 1);
    }

    pub(crate) fn mistake(&mut self, which: u8, target: u8) {
        let stale = (!self.freed.is_empty()).then(|| self.freed[usize::from(target) % self.freed.len()]);
        if let (0..6, Some(stale)) = (which % 16, stale) {
            return self.mistake_about_a_freed_sequence(which % 16, stale);
        }
        match (which % 16, self.sequence(target)) {
            (6, Some(id)) if self.model.is_idle(id) => {
                let too_many = self.model.find(id).tokens.len() as u32 + 1;
                self.invalid("num_tokens", |manager| manager.truncate(id, 0));
                self.invalid("num_tokens", |manager| manager.truncate(id, too_many));
            }
            (7 | 8, Some(id)) if self.model.is_drafting(id) => {}
            (7, Some(id)) if self.model.in_flight().count() > 0 => {
                self.invalid("num_new_tokens", |manager| manager.allocate_slots(id, 0, &ComputedBlocks::default()));
            }
            (8, Some(id)) if self.model.in_flight().count() > 0 => {
                self.invalid("num_new_tokens", |manager| {
                    manager.allocate_slots(id, u32::MAX, &ComputedBlocks::default())
                });
            }
            (9, Some(id)) if self.model.in_flight().count() == 0 => {
                self.refused(Error::NoPlan, |manager| manager.allocate_slots(id, 1, &ComputedBlocks::default()));
            }
            (10, _) => self.mistake_about_tokens(target),
            (11, _) => self.create_with_bad_images(target),
            _ => self.mistake_about_a_plan(target),
        }
    }

    fn mistake_about_tokens(&mut self, target: u8) {
        self.invalid("prompt_token_ids", |manager| manager.create([].into(), identity(0), true));
        let negative = |argument| {
            let (expected, found) = ("a token id of at least 0".to_owned(), "-1".to_owned());
            Error::InvalidElement { argument, index: 1, expected, found }
        };
        self.refused(negative("prompt_token_ids"), |manager| manager.create([0, -1].into(), identity(0), true));
        if let Some(id) = self.sequence(target) {
            self.refused(negative("token_ids"), |manager| manager.append_tokens(id, &[0, -1]));
        }
    }

    fn mistake_about_a_freed_sequence(&mut self, which: u8, stale: SequenceId) {
        let error = Error::UnknownSequence(stale.to_bits());
        match which {
            0 => self.refused(error, |manager| manager.free(stale)),
            1 => self.refused(error, |manager| manager.fork(stale)),
            2 => self.refused(error, |manager| manager.truncate(stale, 1)),
            3 => self.refused(error, |manager| manager.append_tokens(stale, &[0])),
            4 => self.refused(error, |manager| manager.get_computed_blocks(stale)),
            _ => self.refused(error, |manager| manager.allocate_slots(stale, 1, &ComputedBlocks::default())),
        }
    }

    fn create_with_bad_images(&mut self, which: u8) {
        let image = |start, len| ImageSpan { start, len, digest: [0].into() };
        let images = match which % 4 {
            0 => vec![image(0, 0)],
            1 => vec![image(2, 2), image(3, 1)],
            2 => vec![image(4, 1), image(0, 1)],
            _ => vec![image(u32::MAX, 1)],
        };
        let identity = Arc::new(Identity { root: RootKey::default(), images });
        self.invalid("image_spans", |manager| manager.create([0, 1].into(), identity, true));
    }

    fn mistake_about_a_plan(&mut self, number: u8) {
        let plans: Vec<_> = self.model.in_flight().collect();
        if let (&[oldest, .., newest], 0) = (plans.as_slice(), number % 2) {
            let error = Error::PlanOutOfOrder { found: newest, oldest };
            return self.refused(error, |manager| manager.commit(newest));
        }
        let newest = self.ended.iter().chain(&plans).map(|plan| plan.get()).max().unwrap_or(0);
        let never = PlanId::new(newest + 1 + u64::from(number));
        let ended = self.ended.get(usize::from(number) % self.ended.len().max(1));
        let plan = *ended.filter(|_| !number.is_multiple_of(3)).unwrap_or(&never);
        self.refused(Error::PlanNotInFlight(plan), |manager| manager.commit(plan));
        self.refused(Error::PlanNotInFlight(plan), |manager| manager.rollback(plan));
    }
}
