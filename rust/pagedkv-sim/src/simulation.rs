//! The clock: from step to step, or to the next arrival where nothing runs.

use crate::cost::{CostModel, SwapLink, Work};
use crate::error::{Result, SimError, invalid};
use crate::systems::{Ended, Holdings, Preemptions, System};
use crate::workload::Workload;

/// What is run and what is recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Seconds after which nothing more is planned; infinite to run until the last request has ended.
    pub until: f64,
    /// Steps that begin within these seconds count for the means over steps.
    pub window: (f64, f64),
}

impl Default for Options {
    fn default() -> Self {
        Self { until: f64::INFINITY, window: (0.0, f64::INFINITY) }
    }
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestOutcome {
    /// Seconds at which its first token was there; NaN if it did not end.
    pub first_token: f64,
    /// Seconds at which its last token was there; NaN if it did not end.
    pub finish: f64,
    /// Prompt tokens that came from a cache.
    pub cached_tokens: u32,
}

/// Means over the steps of the window, each counted once, however long it took; as the paper counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepMeans {
    /// Steps in the window.
    pub num_steps: u64,
    /// Running requests.
    pub num_requests: f64,
    /// Running sequences.
    pub num_seqs: f64,
    /// Share of the pool that holds tokens; of sequences that share blocks each counts.
    pub token_share: f64,
    /// Share of the pool that is kept for tokens that will come.
    pub reserved_share: f64,
    /// Share of the pool that is kept for tokens that will never come.
    pub internal_share: f64,
    /// Logical blocks over physical ones.
    pub sharing_ratio: f64,
    /// Share of the slots of held blocks without a token, for systems with blocks that share none.
    pub block_waste: f64,
    /// Seconds of a step.
    pub step_seconds: f64,
}

/// A whole simulation.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What became of each request, in the order of the workload.
    pub requests: Vec<RequestOutcome>,
    /// Means over steps.
    pub means: StepMeans,
    /// Preemptions.
    pub preemptions: Preemptions,
    /// Steps in all.
    pub num_steps: u64,
    /// Seconds at the end.
    pub seconds: f64,
    /// Seconds that went into transfers to and from the host.
    pub swap_seconds: f64,
    /// Prompt tokens that were computed, those computed again included.
    pub prompt_tokens_computed: u64,
}

/// Runs a workload on a system.
///
/// # Errors
/// What the system refuses; [`SimError::InvalidArgument`] for options out of range.
pub fn run(
    workload: &Workload,
    system: &mut dyn System,
    cost: &dyn CostModel,
    link: &SwapLink,
    options: &Options,
) -> Result<Outcome> {
    link.validate()?;
    let (from, to) = options.window;
    if from.is_nan() || to.is_nan() || from < 0.0 || from >= to {
        return invalid("window", "two ascending seconds of at least 0", format!("({from}, {to})"));
    }
    if options.until.is_nan() || options.until <= 0.0 {
        return invalid("until", "seconds above 0", options.until);
    }
    let mut simulation = Simulation::new(workload.requests.len());
    let mut next = 0;
    let mut ended = Vec::new();
    while simulation.now < options.until {
        next = add_arrived(workload, system, next, simulation.now)?;
        if system.num_unfinished() == 0 {
            let Some(request) = workload.requests.get(next) else { break };
            simulation.now = request.arrival;
            continue;
        }
        let work = system.begin_step(simulation.now)?;
        let seconds = cost.step_seconds(&work);
        let swapping = link.seconds(work.swapped_blocks);
        if (from..to).contains(&simulation.now) && work.num_seqs > 0 {
            simulation.record(&system.holdings(), seconds + swapping);
        }
        simulation.now += seconds + swapping;
        simulation.count(&work, swapping);
        system.end_step(simulation.now, &mut ended)?;
        if work.is_nothing() && ended.is_empty() {
            let num_unfinished = system.num_unfinished();
            let Some(request) = workload.requests.get(next) else {
                return Err(SimError::Stalled { seconds: simulation.now, num_unfinished });
            };
            simulation.now = request.arrival;
        }
        ended.drain(..).for_each(|ended| simulation.end(ended));
    }
    Ok(simulation.outcome(system))
}

fn add_arrived(workload: &Workload, system: &mut dyn System, mut next: usize, now: f64) -> Result<usize> {
    while workload.requests.get(next).is_some_and(|request| request.arrival <= now) {
        system.add(next as u32)?;
        next += 1;
    }
    Ok(next)
}

struct Simulation {
    now: f64,
    requests: Vec<RequestOutcome>,
    sums: StepMeans,
    num_with_blocks: u64,
    num_steps: u64,
    swap_seconds: f64,
    prompt_tokens_computed: u64,
}

impl Simulation {
    fn new(num_requests: usize) -> Self {
        let open = RequestOutcome { first_token: f64::NAN, finish: f64::NAN, cached_tokens: 0 };
        Self {
            now: 0.0,
            requests: vec![open; num_requests],
            sums: StepMeans::default(),
            num_with_blocks: 0,
            num_steps: 0,
            swap_seconds: 0.0,
            prompt_tokens_computed: 0,
        }
    }

    fn record(&mut self, holdings: &Holdings, seconds: f64) {
        let total = holdings.total as f64;
        let sums = &mut self.sums;
        sums.num_steps += 1;
        sums.num_requests += f64::from(holdings.num_requests);
        sums.num_seqs += f64::from(holdings.num_seqs);
        sums.token_share += holdings.tokens as f64 / total;
        sums.reserved_share += holdings.reserved as f64 / total;
        sums.internal_share += holdings.internal as f64 / total;
        sums.step_seconds += seconds;
        if holdings.physical_blocks > 0 && holdings.logical_blocks > 0 {
            self.num_with_blocks += 1;
            sums.sharing_ratio += holdings.logical_blocks as f64 / holdings.physical_blocks as f64;
            let slots = holdings.tokens + holdings.internal;
            sums.block_waste += holdings.internal as f64 / slots as f64;
        }
    }

    fn count(&mut self, work: &Work, swapping: f64) {
        self.num_steps += 1;
        self.swap_seconds += swapping;
        self.prompt_tokens_computed += work.prompt_tokens;
    }

    fn end(&mut self, ended: Ended) {
        let Ended { index, first_token, cached_tokens } = ended;
        self.requests[index as usize] = RequestOutcome { first_token, finish: self.now, cached_tokens };
    }

    fn outcome(self, system: &dyn System) -> Outcome {
        let sums = self.sums;
        let (steps, blocks) = (sums.num_steps.max(1) as f64, self.num_with_blocks.max(1) as f64);
        let means = StepMeans {
            num_steps: sums.num_steps,
            num_requests: sums.num_requests / steps,
            num_seqs: sums.num_seqs / steps,
            token_share: sums.token_share / steps,
            reserved_share: sums.reserved_share / steps,
            internal_share: sums.internal_share / steps,
            sharing_ratio: sums.sharing_ratio / blocks,
            block_waste: sums.block_waste / blocks,
            step_seconds: sums.step_seconds / steps,
        };
        Outcome {
            requests: self.requests,
            means,
            preemptions: system.preemptions(),
            num_steps: self.num_steps,
            seconds: self.now,
            swap_seconds: self.swap_seconds,
            prompt_tokens_computed: self.prompt_tokens_computed,
        }
    }
}
