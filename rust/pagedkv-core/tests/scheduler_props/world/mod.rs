//! A scheduler and its model, side by side. The property tests, the fuzzer and the soak run all drive this one.

mod command;
mod mistakes;
mod requests;
mod settings;
mod steps;

use pagedkv_core::{Error, Handle, PlanId, Policy, Scheduler};

pub(crate) use command::Command;

use crate::model::driven::Driven;
use crate::model::events::Events;
use crate::model::mirror::{Mirror, Mirrors};
use crate::model::scheduler::{Request, SchedulerModel};
use requests::LORA_ID;

const MOST_REQUESTS: usize = 6;
const MOST_RESTING: usize = 2;
const MAX_MODEL_LEN: usize = 14;

pub(crate) struct World {
    pub(crate) scheduler: Scheduler,
    pub(crate) model: SchedulerModel,
    num_added: usize,
    ended_plans: Vec<PlanId>,
    ended_transfers: Vec<i64>,
    /// Those who see nothing but events, where there are some.
    mirrors: Option<Mirrors>,
}

impl World {
    /// A world by number: half of them first come, first served.
    pub(crate) fn numbered(number: u64) -> Self {
        Self::made(number, false)
    }

    /// A world by number in which much is preempted, and goes to the host tier.
    #[allow(dead_code, reason = "the fuzzer and the soak run draw from all worlds")]
    pub(crate) fn swapping(number: u64) -> Self {
        Self::made(number, true)
    }

    fn handle(&self, number: u8) -> Option<Handle> {
        let len = self.model.requests.len();
        (len > 0).then(|| self.model.requests[usize::from(number) % len].handle)
    }

    /// The mirrors must know what can be hit.
    fn follow_events(&mut self) {
        let Some(mirrors) = &mut self.mirrors else { return };
        if let Some(known) = mirrors.follow(&mut self.scheduler, &mut self.model.events) {
            assert_eq!(
                *known,
                Mirror::joining(&self.scheduler.event_snapshot().expect("events are on")).known,
                "what the events told and what can be hit"
            );
        }
    }

    fn refused<T: std::fmt::Debug>(
        &mut self,
        call: impl FnOnce(&mut Scheduler) -> pagedkv_core::Result<T>,
        is_expected: impl FnOnce(&Error) -> bool,
    ) {
        let before = format!("{:?}", self.scheduler);
        let error = call(&mut self.scheduler).expect_err("a call that must be refused");
        assert!(is_expected(&error), "{error:?}");
        assert_eq!(format!("{:?}", self.scheduler), before, "a refused call changed something");
        self.model.events.note("refused calls", 1);
    }

    /// A request that runs, waits or rests; more often one that rests.
    fn any_handle(&self, number: u8) -> Option<Handle> {
        let resting: Vec<_> = self.model.resting.iter().map(|request| request.handle).collect();
        let handles = if resting.is_empty() || number.is_multiple_of(4) {
            self.model.all().map(|request| request.handle).collect()
        } else {
            resting
        };
        (!handles.is_empty()).then(|| handles[usize::from(number / 4) % handles.len()])
    }

    /// A call with the outcome that the model expects; errors are compared by what they are about.
    fn call<T: std::fmt::Debug>(
        &mut self,
        refusal: Option<Error>,
        call: impl FnOnce(&mut Scheduler) -> pagedkv_core::Result<T>,
    ) -> Option<T> {
        let Some(refusal) = refusal else {
            return Some(call(&mut self.scheduler).expect("a call that the model allows"));
        };
        let is_expected = |error: &Error| match (&refusal, error) {
            (Error::InvalidArgument { argument, .. }, Error::InvalidArgument { argument: found, .. }) => {
                argument == found
            }
            _ => refusal == *error,
        };
        self.refused(call, is_expected);
        None
    }

    fn follow_kept(&mut self) {
        let sequences = self.scheduler.snapshot().sequences;
        self.model.follow_kept(&sequences);
    }

    /// The model and the scheduler take up what was left in the inbox.
    fn take_up(&mut self) {
        self.model.drain_aborts();
        self.scheduler.for_each_waiting(|_| ());
    }

    /// Nothing is held back any more, and sessions give up what they keep.
    fn let_all_end(&mut self) {
        let held: Vec<_> =
            self.model.requests.iter().filter(|request| request.is_held()).map(|request| request.handle).collect();
        for handle in held {
            self.scheduler.release(handle).expect("it lives");
            self.model.set_held(handle, false);
        }
        let kept: Vec<_> = self
            .model
            .all()
            .filter(|request| request.is_session())
            .map(|request| (request.handle, request.num_samples()))
            .collect();
        for (handle, n) in kept {
            for sample in 0..n {
                let request = self.model.all().find(|request| request.handle == handle);
                if request.is_some_and(|request| request.has_ended(sample)) {
                    self.scheduler.free(handle, Some(sample as u32)).expect("it has ended");
                    self.model.give_up(handle, sample);
                }
            }
        }
    }

    /// Runs the world and the commands that these bytes stand for, to the end.
    #[allow(dead_code, reason = "the soak run has no bytes to replay")]
    pub(crate) fn replay(bytes: &[u8]) {
        let (number, commands) = bytes.split_at(bytes.len().min(8));
        let number: [u8; 8] = std::array::from_fn(|at| number.get(at).copied().unwrap_or(0));
        Self::numbered(u64::from_le_bytes(number)).live_bytes(commands, 0);
    }
}

impl Driven for World {
    type Command = Command;

    fn run(&mut self, command: Command) {
        match command {
            Command::Add { prompt, output, kind } => self.add(prompt, output, kind),
            Command::Schedule { tokens } => self.schedule(tokens),
            Command::RunPlan => self.model.run_next_plan(),
            Command::Draft { request, sample, tokens } => self.draft(request, sample, tokens),
            Command::TransfersDone { which, outcome } => self.end_transfers(which, !outcome.is_multiple_of(5)),
            Command::Commit { outcome } => self.commit(outcome),
            Command::Rollback { plan } => self.rollback(plan),
            Command::Abort { request, sample } => self.abort(request, sample),
            Command::Finish { request, sample } => self.finish(request, sample),
            Command::ResetPrefixCache => self.scheduler.reset_prefix_cache(),
            Command::InvalidateLora => self.scheduler.invalidate_lora(LORA_ID),
            Command::Append { request, sample, tokens } => self.append(request, sample, tokens),
            Command::Free { request, sample } => self.free(request, sample),
            Command::Hold { request } => self.set_held(request, true),
            Command::Release { request } => self.set_held(request, false),
            Command::Fork { request, sample, kind } => self.fork(request, sample, kind),
            Command::Mistake { which, target } => self.mistake(which, target),
        }
        self.model.check(&self.scheduler);
        self.follow_events();
    }

    /// Steps until every request is over: each step takes the oldest at least one token further.
    fn end(&mut self, _: usize) {
        while !self.model.in_flight().is_empty() {
            self.commit(0);
            self.model.check(&self.scheduler);
        }
        self.take_up();
        self.end_transfers(0, true);
        self.let_all_end();
        let mut steps_left: usize = self.model.requests.iter().map(Request::most_tokens).sum();
        if self.model.limits.num_host_blocks > 0 || self.model.requests.iter().any(Request::may_load) {
            // Whoever waits for blocks that go out, or come in, does so for a step.
            steps_left *= 4;
        }
        if self.model.limits.policy != Policy::Fcfs {
            // The first in the order may change while requests overtake one another, until all are due.
            steps_left *= MOST_REQUESTS;
        }
        // The last plan has nothing to run, and says who left.
        loop {
            self.schedule(steps_left as u8);
            let is_over = self.model.requests.is_empty();
            self.commit(steps_left as u8);
            if !self.model.started_transfers().is_empty() {
                self.end_transfers(0, !steps_left.is_multiple_of(3));
            }
            self.let_all_end();
            self.model.check(&self.scheduler);
            if is_over {
                break;
            }
            steps_left = steps_left.checked_sub(1).expect("every step takes the oldest request further");
        }
        self.model.check_empty(&self.scheduler);
    }

    fn met(&self) -> &Events {
        &self.model.events
    }
}
