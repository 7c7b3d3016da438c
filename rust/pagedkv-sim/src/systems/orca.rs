//! The paper's Orca baselines: iteration-level batches over contiguous chunks of a buddy allocator.
//!
//! Rules (the paper, section 6.1, and `orca/` of its artifact): a request reserves at admission one chunk for each of its
//! sequences, large enough for prompt and estimated answer, and keeps it to the end. First come, first served; the first
//! request that does not fit blocks those behind it. Nothing is preempted and nothing shared.

use std::collections::VecDeque;
use std::sync::Arc;

use super::beams::Beams;
use super::{Ended, Holdings, Limits, Preemptions, System};
use crate::buddy::{BuddyAllocator, Chunk};
use crate::cost::Work;
use crate::error::{Result, SimError};
use crate::survival::Survival;
use crate::workload::{Sampling, Workload};

/// How a system that must reserve beforehand guesses the length of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Estimate {
    /// It knows the length.
    Oracle,
    /// The next power of two.
    PowerOfTwo,
    /// As long as the model allows.
    Max,
}

impl Estimate {
    fn tokens(self, output_tokens: u32, max_model_len: u32) -> u32 {
        match self {
            Self::Oracle => output_tokens,
            Self::PowerOfTwo => output_tokens.next_power_of_two(),
            Self::Max => max_model_len,
        }
    }
}

#[derive(Debug)]
struct Running {
    index: u32,
    /// Tokens of each sequence, the one that this step computes included.
    len: u32,
    end: u32,
    /// Tokens that a chunk was reserved for.
    reserved: u32,
    chunks: Vec<Chunk>,
    first_token: Option<f64>,
    /// Beams that change places copy all they have; what the next step copies.
    copied_tokens: u64,
}

/// The system.
#[derive(Debug)]
pub struct Orca {
    workload: Arc<Workload>,
    limits: Limits,
    estimate: Estimate,
    buddies: BuddyAllocator,
    waiting: VecDeque<u32>,
    running: Vec<Running>,
    beams: Option<Beams>,
}

impl Orca {
    /// A system with an empty pool.
    ///
    /// # Errors
    /// Those of [`Limits::validate`]; [`SimError::InvalidRequest`] for a request that no empty pool could hold.
    pub fn new(workload: Arc<Workload>, limits: Limits, estimate: Estimate, survival: Survival) -> Result<Self> {
        limits.validate()?;
        workload.check_lengths(limits.max_model_len)?;
        let largest = limits.max_model_len.div_ceil(limits.block_size).next_power_of_two();
        let buddies = BuddyAllocator::new(limits.num_blocks, largest)?;
        let beams = match workload.sampling {
            Sampling::Beam(width) => Some(Beams::new(survival, width)),
            Sampling::Parallel(_) => None,
        };
        let orca = Self { workload, limits, estimate, buddies, waiting: VecDeque::new(), running: Vec::new(), beams };
        orca.check_requests()?;
        Ok(orca)
    }

    /// Tokens that a sequence of a request reserves a chunk for.
    fn reservation(&self, index: u32) -> u32 {
        let request = &self.workload.requests[index as usize];
        let estimate = self.estimate.tokens(request.output_tokens, self.limits.max_model_len);
        (request.prompt_tokens + estimate).min(self.limits.max_model_len)
    }

    fn check_requests(&self) -> Result<()> {
        let width = self.workload.sampling.width();
        for (request, index) in self.workload.requests.iter().zip(0..) {
            let units = self.reservation(index).div_ceil(self.limits.block_size);
            let mut empty = self.buddies.clone();
            let fits = self.buddies.num_units() / units.next_power_of_two() >= 2 * width
                || (0..width).all(|_| empty.allocate(units).is_some());
            if width > self.limits.max_num_seqs || !fits {
                return Err(SimError::InvalidRequest {
                    index,
                    line: request.line,
                    field: "prompt_tokens + output_tokens",
                    expected: format!("{width} chunks that fit into a pool of {} blocks", self.limits.num_blocks),
                    found: format!("{width} of {} blocks", units.next_power_of_two()),
                });
            }
        }
        Ok(())
    }

    fn admit(&mut self, work: &mut Work) {
        let width = self.workload.sampling.width();
        while let Some(&index) = self.waiting.front() {
            let request = self.workload.requests[index as usize];
            let batched = work.prompt_tokens + u64::from(self.num_seqs()) + u64::from(request.prompt_tokens);
            if batched > u64::from(self.limits.max_num_batched_tokens)
                && (work.prompt_tokens > 0 || !self.running.is_empty())
            {
                break;
            }
            let reserved = self.reservation(index);
            if self.num_seqs() + width > self.limits.max_num_seqs {
                break;
            }
            let Some(chunks) = self.allocate(reserved.div_ceil(self.limits.block_size), width) else { break };
            self.waiting.pop_front();
            work.add_prompt(u64::from(request.prompt_tokens), 0);
            let (len, end) = (request.prompt_tokens, request.prompt_tokens + request.output_tokens);
            self.running.push(Running { index, len, end, reserved, chunks, first_token: None, copied_tokens: 0 });
        }
    }

    fn allocate(&mut self, units: u32, width: u32) -> Option<Vec<Chunk>> {
        let mut chunks = Vec::with_capacity(width as usize);
        for _ in 0..width {
            if let Some(chunk) = self.buddies.allocate(units) {
                chunks.push(chunk);
            } else {
                chunks.into_iter().rev().for_each(|chunk| self.buddies.free(chunk));
                return None;
            }
        }
        Some(chunks)
    }

    fn num_seqs(&self) -> u32 {
        self.running.len() as u32 * self.workload.sampling.width()
    }
}

impl System for Orca {
    fn add(&mut self, index: u32) -> Result<()> {
        self.waiting.push_back(index);
        Ok(())
    }

    fn num_unfinished(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    fn begin_step(&mut self, _now: f64) -> Result<Work> {
        let width = u64::from(self.workload.sampling.width());
        let mut work = Work::default();
        for running in &mut self.running {
            work.context_tokens += width * u64::from(running.len);
            work.copied_tokens += std::mem::take(&mut running.copied_tokens);
        }
        self.admit(&mut work);
        work.num_seqs = self.num_seqs();
        Ok(work)
    }

    fn end_step(&mut self, now: f64, ended: &mut Vec<Ended>) -> Result<()> {
        let mut parents = Vec::new();
        for running in &mut self.running {
            running.first_token.get_or_insert(now);
            if let Some(beams) = &mut self.beams {
                beams.step(running.index, &mut parents);
                let moved = (0..).zip(&parents).filter(|(place, parent)| place != *parent).count();
                running.copied_tokens = moved as u64 * u64::from(running.len);
            }
            running.len += 1;
        }
        let (buddies, beams) = (&mut self.buddies, &mut self.beams);
        self.running.retain_mut(|running| {
            if running.len < running.end {
                return true;
            }
            running.chunks.drain(..).for_each(|chunk| buddies.free(chunk));
            if let Some(beams) = beams {
                beams.end(running.index);
            }
            let first_token = running.first_token.unwrap_or(now);
            ended.push(Ended { index: running.index, first_token, cached_tokens: 0 });
            false
        });
        Ok(())
    }

    fn holdings(&self) -> Holdings {
        let width = u64::from(self.workload.sampling.width());
        let mut holdings = Holdings {
            num_requests: self.running.len() as u32,
            num_seqs: self.num_seqs(),
            total: u64::from(self.limits.num_blocks) * u64::from(self.limits.block_size),
            ..Holdings::default()
        };
        for running in &self.running {
            holdings.tokens += width * u64::from(running.len);
            holdings.reserved += width * u64::from(running.end - running.len);
            holdings.internal += width * u64::from(running.reserved - running.end);
        }
        holdings
    }

    fn preemptions(&self) -> Preemptions {
        Preemptions::default()
    }
}
