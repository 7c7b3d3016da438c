//! Simulations, and replays of traces without a clock.

mod cost;
mod run;
mod workload;

use std::fs::File;

use numpy::PyArray1;
use pagedkv_sim::SimError;
use pagedkv_sim::saturated::{Replay, replay};
use pagedkv_sim::trace::{Lengths, read_lengths as read};
use pyo3::prelude::*;

pub(crate) use cost::CostModel;
pub(crate) use run::{Simulation, simulate};
pub(crate) use workload::Workload;

use crate::arrays::array;
use crate::config::{CacheConfig, SchedulerConfig};
use crate::errors::{internal, invalid, refused, to_py_err};

/// The exception for an error of the simulator.
pub(super) fn sim_err(error: SimError) -> PyErr {
    match error {
        SimError::Core(error) => to_py_err(error),
        SimError::InvalidArgument { argument, expected, found } => invalid(argument, &expected, &found),
        SimError::InvalidRequest { .. } => refused(&error.to_string()),
        _ => internal(&error.to_string()),
    }
}

type Columns<'py> = (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<i32>>);

/// Read a trace of lengths: a CSV table with the columns prompt_tokens and output_tokens.
///
/// Returns
/// -------
/// prompt_tokens, output_tokens : ndarray of int32, shape (num_requests,)
///     In file order.
///
/// Raises
/// ------
/// InvalidArgumentError
///     Naming line and field.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python come by value")]
pub(crate) fn read_lengths(py: Python<'_>, path: std::path::PathBuf) -> PyResult<Columns<'_>> {
    let rows = read(File::open(&path)?).map_err(|error| invalid("path", "a table of lengths", &error.to_string()))?;
    let column = |value: fn(&Lengths) -> u32| rows.iter().map(|row| value(row) as i32).collect();
    Ok((array(py, column(|row| row.prompt_tokens)), array(py, column(|row| row.output_tokens))))
}

/// What a pool held, step by step, while requests kept it full.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct SaturatedReplay {
    replay: Replay,
    block_size: u32,
}

/// Keep a pool full with requests of these lengths until the last has ended. Prefixes are not shared.
///
/// Parameters
/// ----------
/// prompt_tokens, output_tokens : array of int32, shape (num_requests,)
///     Lengths; all requests wait from the start.
/// cache_config : CacheConfig
///     The pool.
/// scheduler_config : SchedulerConfig
///     Limits of a step.
#[pyfunction]
pub(crate) fn replay_saturated(
    py: Python<'_>,
    prompt_tokens: &Bound<'_, PyAny>,
    output_tokens: &Bound<'_, PyAny>,
    cache_config: &CacheConfig,
    scheduler_config: &SchedulerConfig,
) -> PyResult<SaturatedReplay> {
    let rows = workload::lengths(prompt_tokens, output_tokens)?;
    let replay = py.detach(|| replay(&rows, &cache_config.0, &scheduler_config.0)).map_err(to_py_err)?;
    Ok(SaturatedReplay { replay, block_size: cache_config.0.block_size })
}

#[pymethods]
impl SaturatedReplay {
    /// Resident requests, int32 (num_steps,).
    #[getter]
    fn num_running<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, self.replay.steps.iter().map(|step| step.num_running as i32).collect())
    }

    /// Tokens that have a slot, int64 (num_steps,).
    #[getter]
    fn num_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        array(py, self.replay.steps.iter().map(|step| step.num_tokens as i64).collect())
    }

    /// Blocks that hold them, int32 (num_steps,).
    #[getter]
    fn num_held_blocks<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, self.replay.steps.iter().map(|step| step.num_held_blocks as i32).collect())
    }

    /// Preemptions on the way.
    #[getter]
    fn num_preemptions(&self) -> u64 {
        self.replay.num_preemptions
    }

    /// Mean share of the slots of held blocks that hold no token, over the steps behind the first `warm_up` share.
    #[pyo3(signature = (warm_up=0.1))]
    fn mean_waste(&self, #[pyo3(from_py_with = crate::args::f64s::warm_up)] warm_up: f64) -> f64 {
        self.replay.mean_waste(self.block_size, warm_up)
    }
}
