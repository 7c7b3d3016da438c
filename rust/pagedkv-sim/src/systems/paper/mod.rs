//! vLLM's scheduler at the time of its paper.
//!
//! Rules (the paper, section 4.5, and `astra/cacheflow/master/` of its artifact), once per step:
//!
//! 1. Running groups in the order of arrival need a free block for each of their sequences; one that finds too few
//!    preempts the group that arrived last, itself at worst.
//! 2. If nothing was preempted, swapped groups come back in the order of arrival while their blocks and one for each
//!    sequence leave the watermark free.
//! 3. If no group is swapped, waiting ones are admitted in the order of arrival while their prompts leave the watermark
//!    free and fit into the step; the first that does not ends the pass.
//!
//! Preemption takes all sequences of a group. A group of one is computed again, with what it had drawn as a part of its
//! prompt; one of several is swapped.

mod blocks;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use blocks::{Blocks, Tables};

use super::beams::Beams;
use super::{Ended, Holdings, Limits, Preemptions, System};
use crate::cost::Work;
use crate::error::{Result, SimError};
use crate::survival::Survival;
use crate::workload::{Sampling, Workload};

/// What becomes of the memory of a group that is preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaperPreemption {
    /// As in the paper: a single sequence is computed again, several are swapped.
    BySamples,
    /// All are computed again.
    Recompute,
    /// All are swapped.
    Swap,
}

#[derive(Debug)]
struct Group {
    index: u32,
    /// Tokens of each sequence that are known.
    len: u32,
    end: u32,
    tables: Tables,
    first_token: Option<f64>,
}

/// The system.
#[derive(Debug)]
pub struct Paper {
    workload: Arc<Workload>,
    limits: Limits,
    preemption: PaperPreemption,
    blocks: Blocks,
    watermark: u32,
    host_blocks: u32,
    /// Requests to be computed.
    waiting: BTreeSet<u32>,
    /// Of those that were preempted: known tokens, and when the first was drawn.
    preempted: hashbrown::HashMap<u32, (u32, Option<f64>)>,
    running: Vec<Group>,
    swapped: VecDeque<Group>,
    beams: Option<Beams>,
    preemptions: Preemptions,
    copied_tokens: u64,
}

impl Paper {
    /// A system with an empty pool. With `sharing` off every sequence has a copy of its own of all that it has.
    ///
    /// # Errors
    /// Those of [`Limits::validate`] and [`Workload::check_lengths`]; [`SimError::InvalidRequest`] for a request that no
    /// empty pool could hold.
    pub fn new(
        workload: Arc<Workload>,
        limits: Limits,
        preemption: PaperPreemption,
        host_blocks: u32,
        sharing: bool,
        survival: Survival,
    ) -> Result<Self> {
        limits.validate()?;
        workload.check_lengths(limits.max_model_len)?;
        let beams = match workload.sampling {
            Sampling::Beam(width) => Some(Beams::new(survival, width)),
            Sampling::Parallel(_) => None,
        };
        let prefix_blocks = if sharing { workload.shared_prefix_tokens / limits.block_size } else { 0 };
        let blocks = Blocks::new(&limits, prefix_blocks, sharing)?;
        let paper = Self {
            watermark: limits.num_blocks / 100,
            workload,
            limits,
            preemption,
            blocks,
            host_blocks,
            waiting: BTreeSet::new(),
            preempted: hashbrown::HashMap::new(),
            running: Vec::new(),
            swapped: VecDeque::new(),
            beams,
            preemptions: Preemptions::default(),
            copied_tokens: 0,
        };
        paper.check_requests()?;
        Ok(paper)
    }

    fn check_requests(&self) -> Result<()> {
        let width = self.width();
        let most = self.blocks.num_free().saturating_sub(self.watermark);
        for (request, index) in self.workload.requests.iter().zip(0..) {
            // The last token is drawn, and never stored; one block more lets a sequence append.
            let longest = self.blocks.needed(request.prompt_tokens + request.output_tokens - 1, 1);
            let prompt = self.blocks.needed(request.prompt_tokens, 1);
            let needed = u64::from(prompt) + u64::from(width) * u64::from(longest - prompt + 1);
            let needed = if self.blocks.sharing { needed } else { u64::from(width) * u64::from(longest) };
            if needed > u64::from(most) || width > self.limits.max_num_seqs {
                return Err(SimError::InvalidRequest {
                    index,
                    line: request.line,
                    field: "prompt_tokens + output_tokens",
                    expected: format!("{most} blocks at most, with {} sequences", self.limits.max_num_seqs),
                    found: format!("{needed} blocks, with {width} sequences"),
                });
            }
            if u64::from(request.prompt_tokens) + u64::from(request.output_tokens)
                > u64::from(self.limits.max_num_batched_tokens)
            {
                return Err(SimError::InvalidRequest {
                    index,
                    line: request.line,
                    field: "prompt_tokens + output_tokens",
                    expected: format!(
                        "at most {} (max_num_batched_tokens: prompts are not cut)",
                        self.limits.max_num_batched_tokens
                    ),
                    found: (request.prompt_tokens + request.output_tokens).to_string(),
                });
            }
        }
        Ok(())
    }

    fn width(&self) -> u32 {
        self.workload.sampling.width()
    }

    fn num_seqs(&self) -> u32 {
        self.running.len() as u32 * self.width()
    }

    /// Gives every running group the slots of its next token, at the cost of those that came last.
    fn grow_running(&mut self, work: &mut Work) -> bool {
        let width = self.width();
        let mut kept = Vec::with_capacity(self.running.len());
        let mut rest: VecDeque<Group> = std::mem::take(&mut self.running).into();
        let mut any_preempted = false;
        while let Some(mut group) = rest.pop_front() {
            while self.blocks.num_free() < width {
                any_preempted = true;
                match rest.pop_back() {
                    Some(victim) => self.preempt(victim, work),
                    None => break,
                }
            }
            if self.blocks.num_free() < width {
                self.preempt(group, work);
                break;
            }
            work.copied_tokens += self.blocks.append(&mut group.tables, group.len);
            work.context_tokens += u64::from(width) * u64::from(group.len);
            kept.push(group);
        }
        self.running = kept;
        any_preempted
    }

    fn preempt(&mut self, mut group: Group, work: &mut Work) {
        let swaps = match self.preemption {
            PaperPreemption::BySamples => self.width() > 1,
            PaperPreemption::Recompute => false,
            PaperPreemption::Swap => true,
        };
        let on_host: u32 = self.swapped.iter().map(|group| group.tables.num_distinct()).sum();
        if swaps && on_host + group.tables.num_distinct() <= self.host_blocks {
            work.swapped_blocks += u64::from(self.blocks.swap_out(&mut group.tables));
            self.preemptions.swapped += 1;
            let at = self.swapped.partition_point(|other| other.index < group.index);
            self.swapped.insert(at, group);
            return;
        }
        self.blocks.free(&mut group.tables);
        self.preemptions.recomputed += 1;
        self.preempted.insert(group.index, (group.len, group.first_token));
        self.waiting.insert(group.index);
    }

    fn swap_in(&mut self, work: &mut Work) {
        let width = self.width();
        while let Some(group) = self.swapped.front() {
            let needed = group.tables.num_distinct() + width;
            if needed + self.watermark > self.blocks.num_free() || self.num_seqs() + width > self.limits.max_num_seqs {
                break;
            }
            let mut group = self.swapped.pop_front().expect("there is a first one");
            work.swapped_blocks += u64::from(self.blocks.swap_in(&mut group.tables));
            work.copied_tokens += self.blocks.append(&mut group.tables, group.len);
            work.context_tokens += u64::from(width) * u64::from(group.len);
            self.insert_running(group);
        }
    }

    fn insert_running(&mut self, group: Group) {
        let at = self.running.partition_point(|other| other.index < group.index);
        self.running.insert(at, group);
    }

    fn admit(&mut self, work: &mut Work) {
        let width = self.width();
        while let Some(&index) = self.waiting.first() {
            let request = &self.workload.requests[index as usize];
            let preempted = self.preempted.get(&index).copied();
            let (len, first_token) = preempted.unwrap_or((request.prompt_tokens, None));
            let found = self.blocks.prefix_tokens().min(request.prompt_tokens - 1);
            // What samples drew before they were preempted is computed for each.
            let computed =
                u64::from(request.prompt_tokens - found) + u64::from(len - request.prompt_tokens) * u64::from(width);
            let others = work.prompt_tokens + u64::from(self.num_seqs());
            if (others > 0 && others + computed > u64::from(self.limits.max_num_batched_tokens))
                || self.num_seqs() + width > self.limits.max_num_seqs
                || self.blocks.needed_to_admit(request.prompt_tokens, len, width) + self.watermark
                    > self.blocks.num_free()
            {
                break;
            }
            self.waiting.pop_first();
            self.preempted.remove(&index);
            let tables = self.blocks.admit(request.prompt_tokens, len, width);
            work.add_prompt(computed, u64::from(found));
            let end = request.prompt_tokens + request.output_tokens;
            self.insert_running(Group { index, len, end, tables, first_token });
        }
    }

    fn fork_beams(&mut self) {
        let Some(beams) = &mut self.beams else { return };
        let mut parents = Vec::new();
        for group in &mut self.running {
            beams.step(group.index, &mut parents);
            // Sharing or not, a beam that goes on from another has to have what that one had.
            self.copied_tokens += self.blocks.fork(&mut group.tables, &parents, group.len);
        }
    }
}

impl System for Paper {
    fn add(&mut self, index: u32) -> Result<()> {
        self.waiting.insert(index);
        Ok(())
    }

    fn num_unfinished(&self) -> usize {
        self.waiting.len() + self.running.len() + self.swapped.len()
    }

    fn begin_step(&mut self, _now: f64) -> Result<Work> {
        let mut work = Work { copied_tokens: std::mem::take(&mut self.copied_tokens), ..Work::default() };
        if !self.grow_running(&mut work) {
            self.swap_in(&mut work);
        }
        if self.swapped.is_empty() {
            self.admit(&mut work);
        }
        work.num_seqs = self.num_seqs();
        Ok(work)
    }

    fn end_step(&mut self, now: f64, ended: &mut Vec<Ended>) -> Result<()> {
        self.fork_beams();
        let (blocks, beams) = (&mut self.blocks, &mut self.beams);
        let cached_tokens = blocks.prefix_tokens();
        self.running.retain_mut(|group| {
            let first_token = *group.first_token.get_or_insert(now);
            group.len += 1;
            if group.len < group.end {
                return true;
            }
            blocks.free(&mut group.tables);
            if let Some(beams) = beams {
                beams.end(group.index);
            }
            ended.push(Ended { index: group.index, first_token, cached_tokens });
            false
        });
        Ok(())
    }

    fn holdings(&self) -> Holdings {
        let width = u64::from(self.width());
        let tokens: u64 = self.running.iter().map(|group| width * u64::from(group.len)).sum();
        let logical_blocks: u64 = self.running.iter().map(|group| group.tables.num_logical()).sum();
        let logical_blocks = logical_blocks + u64::from(self.blocks.num_prefix) * u64::from(self.num_seqs());
        let physical_blocks = u64::from(self.blocks.num_held());
        let block_size = u64::from(self.limits.block_size);
        Holdings {
            num_requests: self.running.len() as u32,
            num_seqs: self.num_seqs(),
            tokens,
            reserved: 0,
            internal: (logical_blocks * block_size).saturating_sub(tokens),
            total: u64::from(self.limits.num_blocks) * block_size,
            logical_blocks,
            physical_blocks,
        }
    }

    fn preemptions(&self) -> Preemptions {
        self.preemptions
    }
}
