//! The paper's `FasterTransformer` baseline: batches of whole requests that begin and end together.
//!
//! Rules (`ft/ft_server.py` of the paper's artifact): the earliest waiting requests, as many as the batch and its memory
//! allow while the longest prompt and the longest answer together stay below the limit. Prompts are padded to the longest, the batch runs
//! as many steps as the longest answer has tokens, and all answers are there at its end.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Ended, Holdings, Limits, Preemptions, System};
use crate::cost::Work;
use crate::error::{Result, SimError, invalid};
use crate::workload::{Sampling, Workload};

/// Tokens by which a batch must stay below the model's length.
const MARGIN: u32 = 8;

/// The system.
#[derive(Debug)]
pub struct StaticBatch {
    workload: Arc<Workload>,
    limits: Limits,
    batch_size: u32,
    waiting: VecDeque<u32>,
    batch: Vec<u32>,
    longest_prompt: u32,
    longest_answer: u32,
    step: u32,
    first_token: f64,
}

impl StaticBatch {
    /// A system with nothing to do.
    ///
    /// # Errors
    /// Those of [`Limits::validate`] and [`Workload::check_lengths`]; [`SimError::InvalidArgument`] for an empty batch, or
    /// for more than one sample; [`SimError::InvalidRequest`] for a request that no empty pool could hold.
    pub fn new(workload: Arc<Workload>, limits: Limits, batch_size: u32) -> Result<Self> {
        limits.validate()?;
        workload.check_lengths(limits.max_model_len)?;
        if batch_size == 0 {
            return invalid("batch_size", "at least 1", batch_size);
        }
        if workload.sampling != Sampling::Parallel(1) {
            return invalid("sampling", "one sample for each request of a static batch", workload.sampling.width());
        }
        check_requests(&workload, u64::from(limits.num_blocks) * u64::from(limits.block_size))?;
        Ok(Self {
            workload,
            limits,
            batch_size,
            waiting: VecDeque::new(),
            batch: Vec::new(),
            longest_prompt: 0,
            longest_answer: 0,
            step: 0,
            first_token: 0.0,
        })
    }

    fn fill(&mut self) {
        (self.longest_prompt, self.longest_answer, self.step) = (0, 0, 0);
        while let Some(&index) = self.waiting.front() {
            let request = &self.workload.requests[index as usize];
            let prompt = self.longest_prompt.max(request.prompt_tokens);
            let answer = self.longest_answer.max(request.output_tokens);
            let size = self.batch.len() as u32 + 1;
            let slots = u64::from(self.limits.num_blocks) * u64::from(self.limits.block_size);
            let is_too_long = prompt + answer > self.limits.max_model_len.saturating_sub(MARGIN)
                || u64::from(size) * u64::from(prompt + answer) > slots;
            if size > self.batch_size || (size > 1 && is_too_long) {
                break;
            }
            (self.longest_prompt, self.longest_answer) = (prompt, answer);
            self.batch.push(index);
            self.waiting.pop_front();
        }
    }
}

fn check_requests(workload: &Workload, slots: u64) -> Result<()> {
    for (request, index) in workload.requests.iter().zip(0..) {
        let found = u64::from(request.prompt_tokens) + u64::from(request.output_tokens);
        if found > slots {
            return Err(SimError::InvalidRequest {
                index,
                line: request.line,
                field: "prompt_tokens + output_tokens",
                expected: format!("at most {slots} (slots of the pool)"),
                found: found.to_string(),
            });
        }
    }
    Ok(())
}

impl System for StaticBatch {
    fn add(&mut self, index: u32) -> Result<()> {
        self.waiting.push_back(index);
        Ok(())
    }

    fn num_unfinished(&self) -> usize {
        self.waiting.len() + self.batch.len()
    }

    fn begin_step(&mut self, _now: f64) -> Result<Work> {
        if self.batch.is_empty() {
            self.fill();
        }
        let size = self.batch.len() as u64;
        let mut work = Work { num_seqs: size as u32, ..Work::default() };
        if self.step == 0 {
            for _ in 0..size {
                work.add_prompt(u64::from(self.longest_prompt), 0);
            }
        } else {
            work.context_tokens = size * u64::from(self.longest_prompt + self.step);
        }
        Ok(work)
    }

    fn end_step(&mut self, now: f64, ended: &mut Vec<Ended>) -> Result<()> {
        if self.step == 0 {
            self.first_token = now;
        }
        self.step += 1;
        if self.step == self.longest_answer {
            let first_token = self.first_token;
            ended.extend(self.batch.drain(..).map(|index| Ended { index, first_token, cached_tokens: 0 }));
        }
        Ok(())
    }

    fn holdings(&self) -> Holdings {
        let mut holdings = Holdings {
            num_requests: self.batch.len() as u32,
            num_seqs: self.batch.len() as u32,
            total: u64::from(self.limits.num_blocks) * u64::from(self.limits.block_size),
            ..Holdings::default()
        };
        for &index in &self.batch {
            let request = &self.workload.requests[index as usize];
            let len = request.prompt_tokens + self.step.min(request.output_tokens);
            let end = request.prompt_tokens + request.output_tokens;
            holdings.tokens += u64::from(len);
            holdings.reserved += u64::from(end - len);
            holdings.internal += u64::from((self.longest_prompt + self.longest_answer).saturating_sub(end));
        }
        holdings
    }

    fn preemptions(&self) -> Preemptions {
        Preemptions::default()
    }
}
