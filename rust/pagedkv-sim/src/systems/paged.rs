//! The scheduler of this package: `pagedkv-core` itself, with a clock around it.

use std::collections::VecDeque;
use std::sync::Arc;

use pagedkv_core::step_plan::Field;
use pagedkv_core::{CacheConfig, Handle, NewRequest, PlanId, Policy, Scheduler, SchedulerConfig, StepPlan};

use super::beams::Beams;
use super::{Ended, Holdings, Preemptions, System};
use crate::cost::Work;
use crate::error::{Result, SimError, invalid};
use crate::survival::Survival;
use crate::workload::{Sampling, Workload};

/// Requests that are handed to a scheduler that takes them in the order of arrival, beyond those that run: more would
/// change nothing but memory.
const MAX_WAITING: usize = 512;

/// A sequence of the plan in flight that draws.
#[derive(Clone, Copy, Debug)]
struct Drawing {
    index: u32,
    sample: u32,
    num_samples: u32,
    /// Its length after the step.
    len: u32,
}

/// The system.
#[derive(Debug)]
pub struct Paged {
    workload: Arc<Workload>,
    scheduler: Scheduler,
    cache: CacheConfig,
    policy: Policy,
    pending: VecDeque<u32>,
    /// The handle of request 0; handles rise by one.
    first_handle: Option<i64>,
    plan: Option<PlanId>,
    drawing: Vec<Drawing>,
    num_seqs: u32,
    beams: Option<Beams>,
    tokens: Vec<i32>,
    parents: Vec<i32>,
}

impl Paged {
    /// A system with an empty pool.
    ///
    /// # Errors
    /// Those of [`Scheduler::new`] and [`Workload::check_lengths`]; [`SimError::InvalidArgument`] for plans in flight.
    pub fn new(
        workload: Arc<Workload>,
        cache: &CacheConfig,
        limits: &SchedulerConfig,
        survival: Survival,
    ) -> Result<Self> {
        if limits.max_plans_in_flight != 1 {
            return invalid(
                "max_plans_in_flight",
                "1: a simulated step begins when the one before ended",
                limits.max_plans_in_flight,
            );
        }
        let scheduler = Scheduler::new(cache, limits)?;
        workload.check_lengths(limits.max_model_len)?;
        let beams = match workload.sampling {
            Sampling::Beam(width) => Some(Beams::new(survival, width)),
            Sampling::Parallel(_) => None,
        };
        Ok(Self {
            workload,
            scheduler,
            cache: cache.clone(),
            policy: limits.policy,
            pending: VecDeque::new(),
            first_handle: None,
            plan: None,
            drawing: Vec::new(),
            num_seqs: 0,
            beams,
            tokens: Vec::new(),
            parents: Vec::new(),
        })
    }

    fn hand_over(&mut self) -> Result<()> {
        let most = if self.policy == Policy::Fcfs { MAX_WAITING } else { usize::MAX };
        while let Some(&index) = self.pending.front() {
            if self.scheduler.num_requests().1 >= most {
                break;
            }
            let handle =
                self.scheduler.add_request(self.request(index)).map_err(|error| self.refusal(index, &error))?;
            self.first_handle.get_or_insert(handle.get() - i64::from(index));
            self.pending.pop_front();
        }
        Ok(())
    }

    fn request(&self, index: u32) -> NewRequest {
        let request = &self.workload.requests[index as usize];
        let prompt = if self.cache.enable_prefix_caching {
            self.workload.prompt(index)
        } else {
            vec![0; request.prompt_tokens as usize]
        };
        let mut made = NewRequest::new(index.to_string(), prompt, request.output_tokens);
        made.n = self.workload.sampling.width();
        made.needs_commit = self.beams.is_some();
        made.arrival = request.arrival;
        if self.policy == Policy::Priority {
            made.priority = request.priority;
        }
        made.tenant = Some(request.tenant).filter(|&tenant| tenant > 0).map(|tenant| tenant.to_string());
        made
    }

    fn refusal(&self, index: u32, error: &pagedkv_core::Error) -> SimError {
        let request = &self.workload.requests[index as usize];
        let (prompt, output) = (request.prompt_tokens, request.output_tokens);
        SimError::InvalidRequest {
            index,
            line: request.line,
            field: "prompt_tokens + output_tokens",
            expected: format!("a request that the scheduler accepts ({error})"),
            found: format!("{prompt} + {output}"),
        }
    }

    fn index_of(&self, handle: i64) -> u32 {
        (handle - self.first_handle.unwrap_or(0)) as u32
    }

    /// What a plan does; notes which sequences draw.
    fn read(&mut self, plan: &StepPlan) -> Work {
        let mut work = Work::default();
        let (starts, lens) = (plan.i32s(Field::QueryStartLoc), plan.i32s(Field::SeqLens));
        let (handles, samples) = (plan.i64s(Field::Handles), plan.i32s(Field::Sequence));
        let sample_starts = plan.i32s(Field::SampleStartLoc);
        self.drawing.clear();
        for (i, &len) in lens.iter().enumerate() {
            let query = u64::from((starts[i + 1] - starts[i]).cast_unsigned());
            let len = len.cast_unsigned();
            if query == 1 {
                work.context_tokens += u64::from(len);
            } else {
                work.add_prompt(query, u64::from(len) - query);
            }
            let num_samples = (sample_starts[i + 1] - sample_starts[i]).cast_unsigned();
            if num_samples > 0 {
                let (index, sample) = (self.index_of(handles[i]), samples[i].cast_unsigned());
                self.drawing.push(Drawing { index, sample, num_samples, len });
            }
        }
        self.num_seqs = lens.len() as u32;
        work.num_seqs = self.num_seqs;
        work.copied_tokens = (plan.i32s(Field::Copies).len() / 2) as u64 * u64::from(self.cache.block_size);
        let swaps = plan.i32s(Field::SwapIn).len() + plan.i32s(Field::SwapOut).len();
        work.swapped_blocks = (swaps / 2) as u64;
        work
    }

    /// The tokens that the plan's samples draw: nobody else's, where the prefix cache compares them.
    fn draw(&mut self) {
        self.tokens.clear();
        for drawing in &self.drawing {
            for nth in 0..drawing.num_samples {
                let token = if self.cache.enable_prefix_caching {
                    let prompt = self.workload.requests[drawing.index as usize].prompt_tokens;
                    Workload::answer(drawing.index, drawing.sample + nth, drawing.len - prompt)
                } else {
                    0
                };
                self.tokens.push(token);
            }
        }
    }

    /// For each token the sample of the plan that it continues.
    fn choose_parents(&mut self) {
        let Some(beams) = &mut self.beams else { return };
        let width = self.workload.sampling.width();
        let (mut chosen, mut first) = (Vec::new(), 0);
        self.parents.clear();
        for family in self.drawing.chunk_by(|one, other| one.index == other.index) {
            let drawn: u32 = family.iter().map(|drawing| drawing.num_samples).sum();
            let request = &self.workload.requests[family[0].index as usize];
            let is_last = family[0].len + 1 >= request.prompt_tokens + request.output_tokens;
            beams.step(family[0].index, &mut chosen);
            // The first tokens all continue the prompt, and the last ones end; of beams that come back after a
            // preemption some may still have tokens to compute.
            if is_last || drawn != width || family.len() == 1 {
                self.parents.extend((first..first + drawn).map(u32::cast_signed));
            } else {
                self.parents.extend(chosen.iter().map(|parent| (first + parent).cast_signed()));
            }
            first += drawn;
        }
    }
}

impl System for Paged {
    fn add(&mut self, index: u32) -> Result<()> {
        self.pending.push_back(index);
        Ok(())
    }

    fn num_unfinished(&self) -> usize {
        self.pending.len() + self.scheduler.num_unfinished_requests()
    }

    fn begin_step(&mut self, now: f64) -> Result<Work> {
        self.scheduler.advance(now)?;
        self.hand_over()?;
        let plan = self.scheduler.schedule()?;
        self.plan = Some(plan.id());
        Ok(self.read(&plan))
    }

    fn end_step(&mut self, now: f64, ended: &mut Vec<Ended>) -> Result<()> {
        let Some(plan) = self.plan.take() else { return Ok(()) };
        self.scheduler.advance(now)?;
        self.draw();
        let result = if self.beams.is_some() {
            self.choose_parents();
            self.scheduler.commit_beams(plan, &self.tokens, &self.parents)?
        } else {
            self.scheduler.commit(plan, &self.tokens)?
        };
        let transfers: Vec<i64> = self.scheduler.outstanding_transfers().collect();
        if !transfers.is_empty() {
            self.scheduler.transfers_done(&transfers, true)?;
        }
        for finished in result.finished {
            let index = self.index_of(Handle::get(finished.handle));
            if let Some(beams) = &mut self.beams {
                beams.end(index);
            }
            let first_token = finished.stats.arrival_time + finished.stats.time_to_first_token.unwrap_or(0.0);
            ended.push(Ended { index, first_token, cached_tokens: finished.num_cached_tokens });
        }
        Ok(())
    }

    fn holdings(&self) -> Holdings {
        let block_size = u64::from(self.cache.block_size);
        let pool = self.scheduler.manager().pool();
        let tokens = self.scheduler.num_resident_tokens();
        let logical_blocks = self.scheduler.num_resident_blocks();
        Holdings {
            num_requests: self.scheduler.num_requests().0 as u32,
            num_seqs: self.num_seqs,
            tokens,
            reserved: 0,
            internal: (logical_blocks * block_size).saturating_sub(tokens),
            total: u64::from(self.cache.num_blocks - 1) * block_size,
            logical_blocks,
            physical_blocks: u64::from(pool.num_held()),
        }
    }

    fn preemptions(&self) -> Preemptions {
        let swapped = self.scheduler.num_swaps();
        Preemptions { recomputed: self.scheduler.num_preemptions() - swapped, swapped }
    }
}
