//! The scheduler's verbs about requests that live, and what it tells about itself.

use numpy::{Element, PyArray1};
use pagedkv_core::{
    BlockState, Explanation as CoreExplanation, Handle, LimitsUpdate, NewRequest, Scheduler as Core, Snapshot,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::args::number;
use crate::arrays::{array, ids, optional_ids, wrong_type};
use crate::config::SchedulerConfig;
use crate::errors::{invalid, to_py_err};
use crate::getters::getters;
use crate::scheduler::{Scheduler, time};

/// Why a request waits, or what it gets, in the next step.
///
/// `reason` is one of "ready", "resting", "held", "plans_in_flight", "in_flight", "transfer", "token_budget", "seats",
/// "blocks", "partial_prefills", "reserved", "behind"; `fields` has its numbers by name; `str()` says it in words.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct Explanation(CoreExplanation);

getters!(Explanation.0 {
    handle: i64 = |found| found.handle.get();
    request_id: &str = |found| &found.request_id;
    /// "running", "waiting" or "resting".
    state: &'static str = |found| found.state.name();
    reason: &'static str = |found| found.reason.name();
    /// Requests of the same state that come before it.
    num_before: u32;
    num_tokens: u32;
    /// Tokens computed, or being computed by plans in flight.
    num_scheduled_tokens: u32;
    num_blocks: u32;
    num_seats: u32;
});

#[pymethods]
impl Explanation {
    #[getter]
    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let fields = PyDict::new(py);
        self.0.reason.fields().into_iter().try_for_each(|(name, value)| fields.set_item(name, value))?;
        Ok(fields)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        let CoreExplanation { handle, reason, .. } = &self.0;
        format!("Explanation(handle={}, reason={:?})", handle.get(), reason.name())
    }
}

#[pymethods]
impl Scheduler {
    /// Begin the next turn of a session that has finished.
    ///
    /// Its last token, which is not computed yet, and `ids` behind it are a prefill; then tokens are sampled as before. The
    /// request waits again, as one that arrives now. Where several samples get tokens before the next plan, they go on
    /// together.
    ///
    /// Parameters
    /// ----------
    /// handle : int
    ///     A request added with `session=True`, all of whose samples have finished.
    /// sequence : int
    ///     Which of its samples goes on.
    /// ids : array of int32 or int64, or sequence of int
    ///     May be empty.
    /// max_tokens : int, optional
    ///     Most tokens to sample in this turn; by default those of the request.
    ///
    /// Raises
    /// ------
    /// UnknownIdError
    ///     If the request has ended and is no session.
    /// InvalidArgumentError
    ///     For a sample that was given up, negative ids, or more tokens than `max_model_len`.
    /// StateError
    ///     If it runs, or a plan in flight names it.
    /// NeverFitsError
    ///     If even an empty pool could not hold it at its longest.
    #[pyo3(signature = (handle, sequence, ids, max_tokens=None))]
    fn append_tokens(
        &self,
        #[pyo3(from_py_with = crate::args::i64s::handle)] handle: i64,
        #[pyo3(from_py_with = crate::args::u32s::sequence)] sequence: u32,
        ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = crate::args::optional_u32s::max_tokens)] max_tokens: Option<u32>,
    ) -> PyResult<()> {
        let ids = self::ids("ids", ids)?;
        let append = |core: &mut Core| core.append_tokens(Handle::new(handle), sequence, &ids, max_tokens);
        self.core.with(append)?.map_err(to_py_err)
    }

    /// Give up the blocks that a finished session keeps, or those of one of its samples.
    ///
    /// Raises
    /// ------
    /// UnknownIdError, InvalidArgumentError
    ///     If the request has ended and is no session; if it lives and is none.
    /// StateError
    ///     If the session, or the sample, has not finished: abort it.
    #[pyo3(signature = (handle, sequence=None))]
    fn free(
        &self,
        #[pyo3(from_py_with = crate::args::i64s::handle)] handle: i64,
        #[pyo3(from_py_with = crate::args::optional_u32s::sequence)] sequence: Option<u32>,
    ) -> PyResult<()> {
        self.core.with(|core| core.free(Handle::new(handle), sequence))?.map_err(to_py_err)
    }

    /// Keep a request out of plans until `release`, in whatever state it is. Holding twice is holding once.
    ///
    /// It keeps its place in the order and does not stand in the way of those behind it; its seats and blocks stay its own
    /// until a request finds none.
    ///
    /// Raises
    /// ------
    /// UnknownIdError
    ///     If the request has ended and is no session.
    fn hold(&self, #[pyo3(from_py_with = crate::args::i64s::handle)] handle: i64) -> PyResult<()> {
        self.core.with(|core| core.hold(Handle::new(handle)))?.map_err(to_py_err)
    }

    /// Let a held request run again; one that is not held is left alone. Raises as `hold`.
    fn release(&self, #[pyo3(from_py_with = crate::args::i64s::handle)] handle: i64) -> PyResult<()> {
        self.core.with(|core| core.release(Handle::new(handle)))?.map_err(to_py_err)
    }

    /// Add a request that begins with all tokens of another one's sample, sharing its blocks, and then `ids`.
    ///
    /// Parameters
    /// ----------
    /// handle, sequence : int
    ///     A sample that runs or waits and is in no plan in flight, or that a finished session keeps. It stays as it is.
    /// request_id : str
    ///     Unique among live requests.
    /// ids : array of int32 or int64, or sequence of int
    ///     Tokens behind those of the sample; may be empty.
    /// max_tokens, n, stop_token_ids, min_tokens, priority, tenant, needs_commit, session, now
    ///     As in `add_request`. Adapter, salt, images, the use of the prefix cache, `cache_priority` and `cache_ttl` are
    ///     those of the sample.
    ///
    /// Returns
    /// -------
    /// int
    ///     The new request's handle.
    ///
    /// Raises
    /// ------
    /// UnknownIdError
    ///     If the request has ended and is no session.
    /// InvalidArgumentError, NeverFitsError
    ///     As for `add_request`, and for a sample that has ended and is not kept.
    /// StateError
    ///     If a plan in flight names the request.
    #[pyo3(signature = (
        handle, sequence, request_id, ids=None, *, max_tokens, n=1, stop_token_ids=None, min_tokens=0, priority=0,
        tenant=None, needs_commit=false, session=false, now=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of add_request")]
    fn fork(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = crate::args::i64s::handle)] handle: i64,
        #[pyo3(from_py_with = crate::args::u32s::sequence)] sequence: u32,
        request_id: String,
        ids: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::u32s::max_tokens)] max_tokens: u32,
        #[pyo3(from_py_with = crate::args::u32s::n)] n: u32,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::u32s::min_tokens)] min_tokens: u32,
        #[pyo3(from_py_with = crate::args::i32s::priority)] priority: i32,
        tenant: Option<String>,
        needs_commit: bool,
        session: bool,
        #[pyo3(from_py_with = crate::args::optional_f64s::now)] now: Option<f64>,
    ) -> PyResult<i64> {
        let request = NewRequest {
            n,
            stop_token_ids: optional_ids("stop_token_ids", stop_token_ids)?,
            min_tokens,
            priority,
            tenant,
            arrival: time(py, now)?,
            needs_commit,
            session,
            ..NewRequest::new(request_id, optional_ids("ids", ids)?, max_tokens)
        };
        let forked = self.core.with(|core| core.fork(Handle::new(handle), sequence, request))?;
        forked.map(Handle::get).map_err(to_py_err)
    }

    /// Change limits between two steps, all or none; None leaves a limit as it is.
    ///
    /// Parameters
    /// ----------
    /// max_num_batched_tokens, watermark, long_prefill_token_threshold, max_num_partial_prefills : optional
    ///     As in `SchedulerConfig`.
    /// max_num_seqs, lookahead : int, optional
    ///     Up to those that the scheduler was made with. Requests that have seats keep them.
    ///
    /// Raises
    /// ------
    /// InvalidArgumentError
    ///     For limits that are refused at construction too, or under which a request that lives could never run to its
    ///     end.
    #[pyo3(signature = (
        *, max_num_batched_tokens=None, max_num_seqs=None, watermark=None, long_prefill_token_threshold=None,
        max_num_partial_prefills=None, lookahead=None,
    ))]
    fn update_limits(
        &self,
        #[pyo3(from_py_with = crate::args::optional_u32s::max_num_batched_tokens)] max_num_batched_tokens: Option<u32>,
        #[pyo3(from_py_with = crate::args::optional_u32s::max_num_seqs)] max_num_seqs: Option<u32>,
        #[pyo3(from_py_with = crate::args::optional_f64s::watermark)] watermark: Option<f64>,
        #[pyo3(from_py_with = crate::args::optional_u32s::long_prefill_token_threshold)]
        long_prefill_token_threshold: Option<u32>,
        #[pyo3(from_py_with = crate::args::optional_u32s::max_num_partial_prefills)] max_num_partial_prefills: Option<
            u32,
        >,
        #[pyo3(from_py_with = crate::args::optional_u32s::lookahead)] lookahead: Option<u32>,
    ) -> PyResult<()> {
        let update = LimitsUpdate {
            max_num_batched_tokens,
            max_num_seqs,
            watermark,
            long_prefill_token_threshold,
            max_num_partial_prefills,
            lookahead,
        };
        self.core.with(|core| core.update_limits(update))?.map_err(to_py_err)
    }

    /// The limits of the next step.
    #[getter]
    fn limits(&self) -> PyResult<SchedulerConfig> {
        self.core.with(|core| SchedulerConfig(core.limits().clone()))
    }

    /// Say why a request waits, or what it gets, in the next step, as the state is now.
    ///
    /// Parameters
    /// ----------
    /// request : int or str
    ///     A handle, or the id of a live request.
    ///
    /// Returns
    /// -------
    /// Explanation
    ///
    /// Notes
    /// -----
    /// What requests of the next plan share with one another is not foreseen, nor what it evicts; where a request takes
    /// blocks or seats from others, those behind it are only said to be behind it. Under a policy of your own the keys of
    /// the last step count.
    fn explain(&self, request: &Bound<'_, PyAny>) -> PyResult<Explanation> {
        let handle = if let Ok(id) = request.extract::<String>() {
            let found = self.inbox.find(&id);
            found.ok_or_else(|| invalid("request", "the id of a live request", &format!("{id:?}")))?
        } else {
            let handle = number("request", request).map_err(|error| {
                let is_none = error.is_instance_of::<PyTypeError>(request.py());
                if is_none { wrong_type("request", "a handle or a request id", request) } else { error }
            });
            Handle::new(handle?)
        };
        self.core.with(|core| core.explain(handle))?.map(Explanation).map_err(to_py_err)
    }

    /// Show the whole state as dicts, lists and arrays.
    ///
    /// Returns
    /// -------
    /// dict
    ///     "requests": columns with one entry per request, those that run first, then those that wait, each in their order,
    ///     then sessions at rest: "handle" (int64), "request_id", "state", "tenant" (lists), "is_held", "is_due" (bool),
    ///     "priority" (int32), "arrival" (float64), "num_in_flight", "num_cached_tokens", "num_preemptions" (int32).
    ///     "sequences": the same for their samples: "handle" (int64), "sequence", "row" (-1 for none), "num_tokens",
    ///     "num_computed_tokens", "num_scheduled_tokens", "num_blocks" (int32), "is_kept" (bool).
    ///     "plans": plans in flight, oldest first: "plan" (int64), "num_sequences", "num_tokens", "num_samples" (int32).
    ///     "num_blocks": free, cached, held, fenced, and those that only sessions keep. "num_seats": free and fenced.
    ///     "num_admissions", "num_preemptions", "num_evictions": since the scheduler was made.
    ///
    /// Notes
    /// -----
    /// Cost: O(requests + sequences).
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let snapshot = self.core.with(Core::snapshot)?;
        let shown = PyDict::new(py);
        shown.set_item("requests", requests(py, &snapshot)?)?;
        shown.set_item("sequences", sequences(py, &snapshot)?)?;
        shown.set_item("plans", plans(py, &snapshot)?)?;
        let blocks = PyDict::new(py);
        let names = ["free", "cached", "held", "fenced"];
        names.iter().zip(snapshot.num_blocks).try_for_each(|(name, count)| blocks.set_item(name, count))?;
        blocks.set_item("in_sessions", snapshot.num_session_blocks)?;
        shown.set_item("num_blocks", blocks)?;
        let seats = PyDict::new(py);
        ["free", "fenced"].iter().zip(snapshot.num_seats).try_for_each(|(name, count)| seats.set_item(name, count))?;
        shown.set_item("num_seats", seats)?;
        shown.set_item("num_admissions", snapshot.num_admissions)?;
        shown.set_item("num_preemptions", snapshot.num_preemptions)?;
        shown.set_item("num_evictions", snapshot.num_evictions)?;
        Ok(shown)
    }

    /// State and holders of every block.
    ///
    /// Returns
    /// -------
    /// dict
    ///     "state" (uint8): 0 the null block, 1 free, 2 held, 3 cached, 4 fenced; "ref_count" (int32); both of shape
    ///     (num_blocks,).
    fn block_map<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (states, counts) = self.core.with(|core| {
            let map = core.manager().pool().block_map();
            map.map(|(state, count)| (code(state), count as i32)).unzip::<_, _, Vec<u8>, Vec<i32>>()
        })?;
        let shown = PyDict::new(py);
        shown.set_item("state", array(py, states))?;
        shown.set_item("ref_count", array(py, counts))?;
        Ok(shown)
    }
}

const fn code(state: BlockState) -> u8 {
    match state {
        BlockState::Null => 0,
        BlockState::Free => 1,
        BlockState::Held => 2,
        BlockState::Cached => 3,
        BlockState::Fenced => 4,
    }
}

/// One value of each row, as an array.
fn column<'py, R, T: Element>(py: Python<'py>, rows: &[R], value: impl Fn(&R) -> T) -> Bound<'py, PyArray1<T>> {
    array(py, rows.iter().map(value).collect())
}

fn requests<'py>(py: Python<'py>, snapshot: &Snapshot) -> PyResult<Bound<'py, PyDict>> {
    let rows = &snapshot.requests;
    let shown = PyDict::new(py);
    shown.set_item("handle", column(py, rows, |row| row.handle.get()))?;
    shown.set_item("request_id", rows.iter().map(|row| row.request_id.as_str()).collect::<Vec<_>>())?;
    shown.set_item("state", rows.iter().map(|row| row.state.name()).collect::<Vec<_>>())?;
    shown.set_item("tenant", rows.iter().map(|row| row.tenant.as_deref()).collect::<Vec<_>>())?;
    shown.set_item("is_held", column(py, rows, |row| row.is_held))?;
    shown.set_item("is_due", column(py, rows, |row| row.is_due))?;
    shown.set_item("priority", column(py, rows, |row| row.priority))?;
    shown.set_item("arrival", column(py, rows, |row| row.arrival))?;
    shown.set_item("num_in_flight", column(py, rows, |row| row.num_in_flight as i32))?;
    shown.set_item("num_cached_tokens", column(py, rows, |row| row.num_cached_tokens as i32))?;
    shown.set_item("num_preemptions", column(py, rows, |row| row.num_preemptions as i32))?;
    Ok(shown)
}

fn sequences<'py>(py: Python<'py>, snapshot: &Snapshot) -> PyResult<Bound<'py, PyDict>> {
    let rows = &snapshot.sequences;
    let shown = PyDict::new(py);
    shown.set_item("handle", column(py, rows, |row| row.handle.get()))?;
    shown.set_item("sequence", column(py, rows, |row| row.sample as i32))?;
    shown.set_item("row", column(py, rows, |row| row.row.map_or(-1, |row| row as i32)))?;
    shown.set_item("num_tokens", column(py, rows, |row| row.num_tokens as i32))?;
    shown.set_item("num_computed_tokens", column(py, rows, |row| row.num_computed_tokens as i32))?;
    shown.set_item("num_scheduled_tokens", column(py, rows, |row| row.num_scheduled_tokens as i32))?;
    shown.set_item("num_blocks", column(py, rows, |row| row.num_blocks as i32))?;
    shown.set_item("is_kept", column(py, rows, |row| row.is_kept))?;
    Ok(shown)
}

fn plans<'py>(py: Python<'py>, snapshot: &Snapshot) -> PyResult<Bound<'py, PyDict>> {
    let rows = &snapshot.plans;
    let shown = PyDict::new(py);
    shown.set_item("plan", column(py, rows, |row| row.plan.get().cast_signed()))?;
    shown.set_item("num_sequences", column(py, rows, |row| row.num_sequences as i32))?;
    shown.set_item("num_tokens", column(py, rows, |row| row.num_tokens as i32))?;
    shown.set_item("num_samples", column(py, rows, |row| row.num_samples as i32))?;
    Ok(shown)
}
