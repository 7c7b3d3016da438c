//! What the one who steps does: plans, drafts, commits, rollbacks and transfers.

use pagedkv_core::{Error, Handle, PlanId, Policy, Reason, Scheduler, StepPlan, StepResult};

use super::World;
use crate::model::random::Random;
use crate::model::scheduler::Outcome;

impl World {
    pub(super) fn schedule(&mut self, tokens: u8) {
        let limit = self.model.limits.max_plans_in_flight;
        if self.model.in_flight().len() == limit {
            let error = Error::TooManyPlans(limit as u32);
            self.refused(Scheduler::schedule, |refused| *refused == error);
            return self.commit(tokens);
        }
        self.tick();
        self.model.drain_aborts();
        if self.model.limits.lookahead > 0 && tokens % 2 == 1 {
            for (at, (handle, sample)) in (0..).zip(self.model.decoding()) {
                self.draft_for(handle, sample, tokens.wrapping_add(at));
            }
        }
        let reasons = self.explain();
        self.model.before_schedule(&self.scheduler);
        let before = (self.scheduler.num_preemptions(), self.scheduler.manager().pool().num_evictions());
        let plan = self.plan(tokens);
        let after = (self.scheduler.num_preemptions(), self.scheduler.manager().pool().num_evictions());
        if before == after && self.model.limits.policy != Policy::External {
            self.model.check_reasons(&plan, &reasons);
        }
        let counts = self.scheduler.snapshot().requests;
        let counts: Vec<_> = counts.iter().map(|request| (request.handle, request.num_preemptions)).collect();
        let mut random = Random::new(u64::from(tokens));
        // Mostly zeros, so that outputs are shared as well, and now and then a stop token.
        self.model.schedule(&self.scheduler, plan, &counts, || [0, 0, 0, 1, 0, 0, 0, 2][random.below(8)]);
    }

    /// A plan; where the caller orders, by keys that have nothing to do with anything.
    fn plan(&mut self, tokens: u8) -> StepPlan {
        let plan = if self.model.limits.policy == Policy::External {
            let mut waiting = Vec::new();
            self.scheduler.for_each_waiting(|request| waiting.push(request.handle.get()));
            let mut random = Random::new(u64::from(tokens));
            let keys: Vec<f64> = waiting.iter().map(|_| random.below(4) as f64).collect();
            self.scheduler.schedule_by(&waiting, &keys)
        } else {
            self.scheduler.schedule()
        };
        plan.expect("fewer plans in flight than allowed")
    }

    /// What is said of each request before a plan is made.
    fn explain(&mut self) -> Vec<(Handle, Reason)> {
        let handles: Vec<_> = self.model.requests.iter().map(|request| request.handle).collect();
        let reason = |handle| (handle, self.scheduler.explain(handle).expect("a live request").reason);
        handles.into_iter().map(reason).collect()
    }

    pub(super) fn draft(&mut self, number: u8, sample: u8, tokens: u8) {
        match self.handle(number) {
            Some(handle) => self.draft_for(handle, usize::from(sample), tokens),
            None => self.schedule(tokens),
        }
    }

    fn draft_for(&mut self, handle: Handle, sample: usize, tokens: u8) {
        // A refused call takes up the inbox all the same.
        self.model.drain_aborts();
        self.scheduler.for_each_waiting(|_| ());
        let mut random = Random::new(u64::from(tokens));
        let lookahead = self.model.limits.lookahead;
        let ids: Vec<i32> =
            (0..=random.below(lookahead + 1)).map(|_| [0, 0, 0, 1, 0, 0, 2, 3][random.below(8)]).collect();
        let start_loc = [0, ids.len() as i32];
        let is_tree = random.below(2) == 0;
        let parent = |i: usize| if is_tree { random.below(i + 1) as i32 - 1 } else { i as i32 - 1 };
        let parents: Vec<i32> = (0..ids.len()).map(parent).collect();
        let call = |scheduler: &mut Scheduler, row| {
            if is_tree {
                scheduler.set_draft_trees(&[row], &start_loc, &ids, &parents)
            } else {
                scheduler.set_draft_tokens(&[row], &start_loc, &ids)
            }
        };
        let invalid = |argument: &'static str| move |error: &Error| matches!(error, Error::InvalidArgument { argument: found, .. } if *found == argument);
        if ids.len() > lookahead {
            return self.refused(|scheduler| call(scheduler, 0), invalid("start_loc"));
        }
        match self.model.row(handle, sample) {
            None => (),
            Some((row, _)) if self.model.is_in_flight(handle) => {
                self.refused(|scheduler| call(scheduler, row), |error| matches!(error, Error::SequenceInFlight(_)));
            }
            Some((row, false)) => self.refused(|scheduler| call(scheduler, row), invalid("rows")),
            Some((row, true)) => {
                call(&mut self.scheduler, row).expect("a row on which a sequence decodes");
                self.model.set_drafts(row, &ids, &parents);
            }
        }
    }

    /// Time goes on.
    fn tick(&mut self) {
        self.model.now += 1.0;
        self.scheduler.advance(self.model.now).expect("a finite time");
    }

    pub(super) fn commit(&mut self, outcome: u8) {
        let Some(plan) = self.model.oldest_plan() else {
            return self.schedule(outcome);
        };
        self.tick();
        let outcome = self.model.outcome(u64::from(outcome));
        let expected = self.model.commit(&outcome);
        let result = Self::end(&mut self.scheduler, plan, &outcome).expect("the oldest plan");
        assert_eq!(result, expected);
        self.follow_kept();
        self.ended_plans.push(plan);
    }

    pub(super) fn end(scheduler: &mut Scheduler, plan: PlanId, outcome: &Outcome) -> pagedkv_core::Result<StepResult> {
        match outcome {
            Outcome::Tokens(tokens) => scheduler.commit(plan, tokens),
            Outcome::Rows { rows, width, has_trees: false, .. } => scheduler.commit_drafts(plan, rows, *width),
            Outcome::Rows { rows, accepted, width, .. } => scheduler.commit_trees(plan, rows, accepted, *width),
            Outcome::Beams { tokens, parents } => scheduler.commit_beams(plan, tokens, parents),
        }
    }

    /// Ends a transfer that was started, or all of them.
    pub(super) fn end_transfers(&mut self, which: u8, ok: bool) {
        let started = self.model.started_transfers();
        if started.is_empty() {
            return self.model.run_next_plan();
        }
        let ids = if which < 128 { started } else { vec![started[usize::from(which) % started.len()]] };
        self.scheduler.transfers_done(&ids, ok).expect("transfers that are outstanding");
        self.model.end_transfers(&self.scheduler, &ids, ok);
        self.ended_transfers.extend(ids);
    }

    pub(super) fn rollback(&mut self, number: u8) {
        let plans = self.model.in_flight();
        if plans.is_empty() {
            return self.schedule(number);
        }
        let first = usize::from(number) % plans.len();
        self.model.rollback(plans[first]);
        self.scheduler.rollback(plans[first]).expect("a plan in flight");
        self.follow_kept();
        self.ended_plans.extend(&plans[first..]);
    }
}
