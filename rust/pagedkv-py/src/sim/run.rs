//! Runs of a simulation.

use std::sync::Arc;

use numpy::PyArray1;
use pagedkv_sim::cost::SwapLink;
use pagedkv_sim::simulation::{Options, Outcome, run};
use pagedkv_sim::survival::Survival;
use pagedkv_sim::systems::{Estimate, Limits, Orca, Paged, Paper, PaperPreemption, StaticBatch, System};
use pyo3::prelude::*;

use super::cost::CostModel;
use super::sim_err;
use super::workload::Workload;
use crate::args::{u32s, u64s};
use crate::arrays::array;
use crate::config::{CacheConfig, SchedulerConfig};
use crate::errors::invalid;
use crate::getters::getters;

const SYSTEMS: &str = "one of pagedkv, vllm, orca_max, orca_pow2, orca_oracle, fastertransformer";

/// What became of a simulated workload.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct Simulation(Outcome);

getters!(Simulation.0 {
    /// Steps in all.
    num_steps: u64;
    /// Seconds at the end.
    seconds: f64;
    /// Seconds that went into transfers to and from the host.
    swap_seconds: f64;
    /// Prompt tokens that were computed, those computed again included.
    prompt_tokens_computed: u64;
    /// Requests that lost their memory and were computed again, counted each time.
    num_recomputed: u64 = |outcome| outcome.preemptions.recomputed;
    /// Requests that were swapped, counted each time.
    num_swapped: u64 = |outcome| outcome.preemptions.swapped;
    /// Steps in the window; the means that follow are over these, each counted once.
    num_window_steps: u64 = |outcome| outcome.means.num_steps;
    /// Running requests.
    mean_requests: f64 = |outcome| outcome.means.num_requests;
    /// Running sequences.
    mean_seqs: f64 = |outcome| outcome.means.num_seqs;
    /// Share of the pool that holds tokens; of sequences that share blocks each counts.
    token_share: f64 = |outcome| outcome.means.token_share;
    /// Share of the pool that is kept for tokens that will come.
    reserved_share: f64 = |outcome| outcome.means.reserved_share;
    /// Share of the pool that is kept for tokens that will never come, or lies behind the last token of a block.
    internal_share: f64 = |outcome| outcome.means.internal_share;
    /// Logical blocks over physical ones, 0 for systems without blocks.
    sharing_ratio: f64 = |outcome| outcome.means.sharing_ratio;
    /// Share of the slots in block tables that hold no token, 0 for systems without blocks.
    block_waste: f64 = |outcome| outcome.means.block_waste;
    /// Seconds of a step.
    mean_step_seconds: f64 = |outcome| outcome.means.step_seconds;
});

#[pymethods]
impl Simulation {
    /// Seconds at which the first token of each request was there, float64 (num_requests,); NaN if it did not end.
    #[getter]
    fn first_token<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        array(py, self.0.requests.iter().map(|request| request.first_token).collect())
    }

    /// Seconds at which the last token of each request was there, float64 (num_requests,); NaN if it did not end.
    #[getter]
    fn finish<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        array(py, self.0.requests.iter().map(|request| request.finish).collect())
    }

    /// Prompt tokens of each request that came from a cache, int32 (num_requests,).
    #[getter]
    fn cached_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, self.0.requests.iter().map(|request| request.cached_tokens.cast_signed()).collect())
    }
}

/// Run a workload on a system, from the first arrival until the last request has ended.
///
/// Parameters
/// ----------
/// workload : Workload
///     The requests.
/// system : {"pagedkv", "vllm", "orca_max", "orca_pow2", "orca_oracle", "fastertransformer"}
///     The scheduler of this package; vLLM's at the time of its paper; Orca's batches over memory that is reserved for the
///     longest answer, the next power of two, or exactly; FasterTransformer's batches of whole requests.
/// cache_config : CacheConfig
///     The pool. Systems other than "pagedkv" read its numbers of blocks, its host blocks and its block size.
/// scheduler_config : SchedulerConfig
///     Limits of a step. Systems other than "pagedkv" read seats, tokens per step and the longest sequence.
/// cost_model : CostModel, optional
///     By default that of OPT-13B on an A100 with 40 GB.
/// preemption : {"by_samples", "recompute", "swap"}
///     What "vllm" does with those it preempts; by default requests with several samples are swapped.
/// sharing : bool
///     Whether samples share blocks in "vllm".
/// batch_size : int
///     Requests in a batch of "fastertransformer".
/// beam_turnover : float, optional
///     Chance that a beam goes on from another one, drawn at random: see docs/paper.md.
/// beam_seed : int
///     Seed of which beams go on.
/// swap_bandwidth, swap_copy_seconds, swap_copies_per_block, block_bytes
///     The way to the host: bytes a second, seconds of a copy beside its bytes, copies that a block takes, and its bytes.
/// until : float
///     Seconds after which nothing more is planned.
/// window : tuple of float
///     Steps that begin within these seconds count for the means over steps.
///
/// Returns
/// -------
/// Simulation
///     What became of each request, and the means over steps.
///
/// Raises
/// ------
/// InvalidArgumentError
///     For a request that the system can never run, by its place and the line of its file, and for arguments out of range.
#[pyfunction]
#[pyo3(signature = (
    workload, system, cache_config, scheduler_config, cost_model=None, *, preemption="by_samples", sharing=true,
    batch_size=5, beam_turnover=None, beam_seed=0, swap_bandwidth=25e9, swap_copy_seconds=7e-6,
    swap_copies_per_block=1, block_bytes=13_107_200.0, until=f64::INFINITY, window=(0.0, f64::INFINITY)
))]
#[expect(clippy::too_many_arguments, reason = "they are the settings of a simulation")]
pub(crate) fn simulate(
    py: Python<'_>,
    workload: &Workload,
    system: &str,
    cache_config: &CacheConfig,
    scheduler_config: &SchedulerConfig,
    cost_model: Option<&CostModel>,
    preemption: &str,
    sharing: bool,
    #[pyo3(from_py_with = u32s::batch_size)] batch_size: u32,
    beam_turnover: Option<f64>,
    #[pyo3(from_py_with = u64s::beam_seed)] beam_seed: u64,
    swap_bandwidth: f64,
    swap_copy_seconds: f64,
    #[pyo3(from_py_with = u32s::swap_copies_per_block)] swap_copies_per_block: u32,
    block_bytes: f64,
    until: f64,
    window: (f64, f64),
) -> PyResult<Simulation> {
    let survival = Survival { turnover: beam_turnover.unwrap_or(Survival::DEFAULT_TURNOVER), seed: beam_seed };
    survival.validate().map_err(sim_err)?;
    let settings = Settings {
        workload: workload.0.clone(),
        cache: cache_config,
        scheduler: scheduler_config,
        preemption: read_preemption(preemption)?,
        sharing,
        batch_size,
        survival,
    };
    let default = CostModel::default();
    let cost = cost_model.unwrap_or(&default).model.clone();
    let link = SwapLink {
        bandwidth: swap_bandwidth,
        per_copy: swap_copy_seconds,
        copies_per_block: swap_copies_per_block,
        block_bytes,
    };
    let options = Options { until, window };
    let mut system = settings.system(system)?;
    let outcome = py.detach(|| run(&workload.0, system.as_mut(), cost.as_ref(), &link, &options));
    outcome.map(Simulation).map_err(sim_err)
}

fn read_preemption(name: &str) -> PyResult<PaperPreemption> {
    match name {
        "by_samples" => Ok(PaperPreemption::BySamples),
        "recompute" => Ok(PaperPreemption::Recompute),
        "swap" => Ok(PaperPreemption::Swap),
        _ => Err(invalid("preemption", "one of by_samples, recompute, swap", &format!("{name:?}"))),
    }
}

struct Settings<'a> {
    workload: Arc<pagedkv_sim::workload::Workload>,
    cache: &'a CacheConfig,
    scheduler: &'a SchedulerConfig,
    preemption: PaperPreemption,
    sharing: bool,
    batch_size: u32,
    survival: Survival,
}

impl Settings<'_> {
    fn system(self, name: &str) -> PyResult<Box<dyn System + Send>> {
        let Self { workload, cache, scheduler, preemption, sharing, batch_size, survival } = self;
        let (cache, scheduler) = (&cache.0, &scheduler.0);
        let limits = Limits {
            num_blocks: cache.num_blocks - 1,
            block_size: cache.block_size,
            max_num_seqs: scheduler.max_num_seqs,
            max_num_batched_tokens: scheduler.max_num_batched_tokens,
            max_model_len: scheduler.max_model_len,
        };
        let orca = |workload, estimate| {
            Orca::new(workload, limits, estimate, survival).map(|orca| Box::new(orca) as Box<dyn System + Send>)
        };
        let made = match name {
            "pagedkv" => Paged::new(workload, cache, scheduler, survival).map(|paged| Box::new(paged) as _),
            "vllm" => Paper::new(workload, limits, preemption, cache.num_host_blocks, sharing, survival)
                .map(|paper| Box::new(paper) as _),
            "orca_max" => orca(workload, Estimate::Max),
            "orca_pow2" => orca(workload, Estimate::PowerOfTwo),
            "orca_oracle" => orca(workload, Estimate::Oracle),
            "fastertransformer" => StaticBatch::new(workload, limits, batch_size).map(|batches| Box::new(batches) as _),
            _ => return Err(invalid("system", SYSTEMS, &format!("{name:?}"))),
        };
        made.map_err(sim_err)
    }
}
