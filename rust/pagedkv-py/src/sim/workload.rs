//! Workloads.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use numpy::PyArray1;
use pagedkv_sim::trace::{self, Lengths, TraceError};
use pagedkv_sim::workload as sim;
use pagedkv_sim::workload::{Chat, Sampling};
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::sim_err;
use crate::args::{u32s, u64s};
use crate::arrays::{array, ids};
use crate::errors::invalid;

/// Requests to simulate: when each comes, how long it is, and what its prompt shares with others.
///
/// A workload is made by one of its class methods, and never changes. Equal seeds give equal requests, on every machine.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct Workload(pub(crate) Arc<sim::Workload>);

impl From<sim::Workload> for Workload {
    fn from(workload: sim::Workload) -> Self {
        Self(Arc::new(workload))
    }
}

fn poisson(lengths: &[Lengths], rate: f64, seed: u64) -> PyResult<Workload> {
    let arrivals = sim::poisson(lengths.len(), rate, seed).map_err(sim_err)?;
    Ok(sim::Workload::new(lengths, &arrivals).map_err(sim_err)?.into())
}

fn read(path: &PathBuf, read: fn(File) -> Result<sim::Workload, TraceError>) -> PyResult<Workload> {
    let found = read(File::open(path)?);
    let named = |error: TraceError| invalid("path", "a trace of requests", &format!("{}: {error}", path.display()));
    found.map(Into::into).map_err(named)
}

/// Lengths given by two columns.
pub(super) fn lengths(prompt_tokens: &Bound<'_, PyAny>, output_tokens: &Bound<'_, PyAny>) -> PyResult<Vec<Lengths>> {
    let (prompts, outputs) = (ids("prompt_tokens", prompt_tokens)?, ids("output_tokens", output_tokens)?);
    if prompts.len() != outputs.len() {
        let expected = format!("{} lengths, as many as prompt_tokens", prompts.len());
        return Err(invalid("output_tokens", &expected, &outputs.len().to_string()));
    }
    for (name, lengths) in [("prompt_tokens", &prompts), ("output_tokens", &outputs)] {
        if let Some((at, short)) = lengths.iter().enumerate().find(|&(_, &length)| length < 1) {
            return Err(invalid(&format!("{name}[{at}]"), "a length of at least 1", &short.to_string()));
        }
    }
    let row = |(&prompt, &output): (&i32, &i32)| Lengths {
        prompt_tokens: prompt.cast_unsigned(),
        output_tokens: output.cast_unsigned(),
    };
    Ok(prompts.iter().zip(&outputs).map(row).collect())
}

#[pymethods]
impl Workload {
    /// Requests with lengths like ShareGPT's, arriving at random.
    ///
    /// Parameters
    /// ----------
    /// num_requests : int
    ///     How many.
    /// rate : float
    ///     Requests a second, a Poisson process.
    /// seed : int
    ///     Of lengths and arrivals.
    #[classmethod]
    #[pyo3(signature = (num_requests, rate, seed=0))]
    fn sharegpt(
        _class: &Bound<'_, PyType>,
        #[pyo3(from_py_with = u32s::num_requests)] num_requests: u32,
        rate: f64,
        #[pyo3(from_py_with = u64s::seed)] seed: u64,
    ) -> PyResult<Self> {
        poisson(&sim::sharegpt(num_requests as usize, seed), rate, seed)
    }

    /// Requests with lengths like Alpaca's, arriving at random; `sigma` is the spread of the logarithm of the answers.
    #[classmethod]
    #[pyo3(signature = (num_requests, rate, seed=0, sigma=0.85))]
    fn alpaca(
        _class: &Bound<'_, PyType>,
        #[pyo3(from_py_with = u32s::num_requests)] num_requests: u32,
        rate: f64,
        #[pyo3(from_py_with = u64s::seed)] seed: u64,
        sigma: f64,
    ) -> PyResult<Self> {
        if !(sigma.is_finite() && sigma >= 0.0) {
            return Err(invalid("sigma", "a finite spread of at least 0", &sigma.to_string()));
        }
        poisson(&sim::alpaca(num_requests as usize, sigma, seed), rate, seed)
    }

    /// Requests with lengths like sentences and their translations, arriving at random.
    #[classmethod]
    #[pyo3(signature = (num_requests, rate, seed=0))]
    fn translation(
        _class: &Bound<'_, PyType>,
        #[pyo3(from_py_with = u32s::num_requests)] num_requests: u32,
        rate: f64,
        #[pyo3(from_py_with = u64s::seed)] seed: u64,
    ) -> PyResult<Self> {
        poisson(&sim::translation(num_requests as usize, seed), rate, seed)
    }

    /// Conversations: each prompt is the last tokens of what was said before and a query, with lengths like ShareGPT's.
    ///
    /// Parameters
    /// ----------
    /// num_requests : int
    ///     How many.
    /// rate : float
    ///     Requests a second, a Poisson process.
    /// seed : int
    ///     Of everything.
    /// new_conversation : float
    ///     Chance that an arrival opens a conversation; otherwise it goes on with a random open one.
    /// most_prompt_tokens, most_answer_tokens : int
    ///     What is longer is cut: of the history the oldest tokens.
    /// most_turns : int
    ///     Turns after which a conversation ends.
    #[classmethod]
    #[pyo3(signature = (
        num_requests, rate, seed=0, *, new_conversation=0.5, most_prompt_tokens=1024, most_answer_tokens=1016, most_turns=16
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are the settings of conversations")]
    fn chat(
        _class: &Bound<'_, PyType>,
        #[pyo3(from_py_with = u32s::num_requests)] num_requests: u32,
        rate: f64,
        #[pyo3(from_py_with = u64s::seed)] seed: u64,
        new_conversation: f64,
        #[pyo3(from_py_with = u32s::most_prompt_tokens)] most_prompt_tokens: u32,
        #[pyo3(from_py_with = u32s::most_answer_tokens)] most_answer_tokens: u32,
        #[pyo3(from_py_with = u32s::most_turns)] most_turns: u32,
    ) -> PyResult<Self> {
        let lengths = sim::sharegpt(num_requests as usize, seed);
        let arrivals = sim::poisson(lengths.len(), rate, seed).map_err(sim_err)?;
        let settings = Chat { new_conversation, most_prompt_tokens, most_answer_tokens, most_turns };
        Ok(sim::chat(&lengths, &arrivals, settings, seed).map_err(sim_err)?.into())
    }

    /// Requests of given lengths that share nothing.
    ///
    /// Parameters
    /// ----------
    /// prompt_tokens, output_tokens : array of int32, shape (num_requests,)
    ///     Lengths.
    /// arrivals : sequence of float
    ///     Seconds, ascending.
    #[classmethod]
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python come by value")]
    fn from_lengths(
        _class: &Bound<'_, PyType>,
        prompt_tokens: &Bound<'_, PyAny>,
        output_tokens: &Bound<'_, PyAny>,
        arrivals: Vec<f64>,
    ) -> PyResult<Self> {
        let lengths = lengths(prompt_tokens, output_tokens)?;
        Ok(sim::Workload::new(&lengths, &arrivals).map_err(sim_err)?.into())
    }

    /// Read a table of requests: CSV with a header, such as Azure's LLM traces.
    ///
    /// Columns are told by name: `prompt_tokens` and `output_tokens`, or as other traces call them; `arrival` in seconds,
    /// `timestamp` in milliseconds or `TIMESTAMP`, a date; `priority` and `tenant`. All but the lengths are optional.
    ///
    /// Raises
    /// ------
    /// InvalidArgumentError
    ///     Naming line and field.
    #[classmethod]
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python come by value")]
    fn read_table(_class: &Bound<'_, PyType>, path: PathBuf) -> PyResult<Self> {
        read(&path, trace::read_table)
    }

    /// Read requests with hashed prefixes: one JSON object per line, as Mooncake's traces are, and as `TraceRecorder` writes.
    ///
    /// A line has `timestamp` in milliseconds, `input_length`, `output_length`, and optionally `hash_ids` for each
    /// `block_size` tokens of the prompt (512 where it does not say), `priority` and `tenant`.
    ///
    /// Raises
    /// ------
    /// InvalidArgumentError
    ///     Naming line and field.
    #[classmethod]
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python come by value")]
    fn read_jsonl(_class: &Bound<'_, PyType>, path: PathBuf) -> PyResult<Self> {
        read(&path, trace::read_jsonl)
    }

    /// The same requests, each with `n` samples, or `n` beams.
    #[pyo3(signature = (n, *, beam=false))]
    fn with_sampling(&self, #[pyo3(from_py_with = u32s::n)] n: u32, beam: bool) -> PyResult<Self> {
        if n == 0 {
            return Err(invalid("n", "at least 1", "0"));
        }
        let sampling = if beam { Sampling::Beam(n) } else { Sampling::Parallel(n) };
        Ok(sim::Workload::clone(&self.0).with_sampling(sampling).into())
    }

    /// The same requests behind a system prompt that all share, by which each prompt becomes longer.
    fn with_shared_prefix(&self, #[pyo3(from_py_with = u32s::tokens)] tokens: u32) -> PyResult<Self> {
        Ok(sim::Workload::clone(&self.0).with_shared_prefix(tokens).map_err(sim_err)?.into())
    }

    /// The same requests, arriving at random: `rate` a second, or as recorded but so many times faster.
    #[pyo3(signature = (rate=None, *, speedup=None, seed=0))]
    fn with_arrivals(
        &self,
        rate: Option<f64>,
        speedup: Option<f64>,
        #[pyo3(from_py_with = u64s::seed)] seed: u64,
    ) -> PyResult<Self> {
        let mut workload = sim::Workload::clone(&self.0);
        match (rate, speedup) {
            (Some(rate), None) => {
                let arrivals = sim::poisson(workload.requests.len(), rate, seed).map_err(sim_err)?;
                workload.requests.iter_mut().zip(arrivals).for_each(|(request, arrival)| request.arrival = arrival);
                workload.has_arrivals = true;
            }
            (None, Some(speedup)) if speedup.is_finite() && speedup > 0.0 => {
                workload.requests.iter_mut().for_each(|request| request.arrival /= speedup);
            }
            (None, Some(speedup)) => return Err(invalid("speedup", "a finite factor above 0", &speedup.to_string())),
            _ => return Err(invalid("rate, speedup", "one of both", "both or none")),
        }
        Ok(workload.into())
    }

    /// The requests with fewer than `tokens` tokens in all, prompt and answer.
    fn shorter_than(&self, #[pyo3(from_py_with = u32s::tokens)] tokens: u32) -> Self {
        sim::Workload::clone(&self.0).shorter_than(tokens).into()
    }

    /// The first `num_requests` requests.
    fn first(&self, #[pyo3(from_py_with = u32s::num_requests)] num_requests: u32) -> Self {
        let mut workload = sim::Workload::clone(&self.0);
        workload.requests.truncate(num_requests as usize);
        workload.into()
    }

    /// The requests at these places, in this order and without arrivals; a place may come again.
    fn take(&self, places: &Bound<'_, PyAny>) -> PyResult<Self> {
        let places = ids("places", places)?;
        Ok(sim::Workload::clone(&self.0).take(&places).map_err(sim_err)?.into())
    }

    /// The same requests with tenants, numbers of which 0 is nobody, and priorities, lower ones more urgent.
    fn with_tenants(&self, tenants: &Bound<'_, PyAny>, priorities: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut workload = sim::Workload::clone(&self.0);
        let (tenants, priorities) = (ids("tenants", tenants)?, ids("priorities", priorities)?);
        for (name, column) in [("tenants", &tenants), ("priorities", &priorities)] {
            if column.len() != workload.requests.len() {
                let expected = format!("{}, one per request", workload.requests.len());
                return Err(invalid(name, &expected, &column.len().to_string()));
            }
        }
        if let Some(negative) = tenants.iter().find(|&&tenant| tenant < 0) {
            return Err(invalid("tenants", "numbers of at least 0", &negative.to_string()));
        }
        for ((request, tenant), priority) in workload.requests.iter_mut().zip(tenants).zip(priorities) {
            (request.tenant, request.priority) = (tenant.cast_unsigned(), priority);
        }
        Ok(workload.into())
    }

    /// Whether requests have arrivals of their own: recorded in the trace, given, or drawn. Without, all come at once.
    #[getter]
    fn has_arrivals(&self) -> bool {
        self.0.has_arrivals
    }

    fn __len__(&self) -> usize {
        self.0.requests.len()
    }

    /// Seconds at which requests come, float64 (num_requests,).
    #[getter]
    fn arrivals<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        array(py, self.0.requests.iter().map(|request| request.arrival).collect())
    }

    /// Tokens of the prompts, int32 (num_requests,).
    #[getter]
    fn prompt_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, self.0.requests.iter().map(|request| request.prompt_tokens.cast_signed()).collect())
    }

    /// Tokens that each sample draws, int32 (num_requests,).
    #[getter]
    fn output_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, self.0.requests.iter().map(|request| request.output_tokens.cast_signed()).collect())
    }

    /// Tenants, int32 (num_requests,); 0 is nobody.
    #[getter]
    fn tenants<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, self.0.requests.iter().map(|request| request.tenant.cast_signed()).collect())
    }

    /// The tokens that stand for the prompt of a request, int32 (prompt_tokens,): equal where requests share text.
    fn prompt<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = u32s::index)] index: u32,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        if index as usize >= self.0.requests.len() {
            let expected = format!("a request below {}", self.0.requests.len());
            return Err(invalid("index", &expected, &index.to_string()));
        }
        Ok(array(py, self.0.prompt(index)))
    }
}
