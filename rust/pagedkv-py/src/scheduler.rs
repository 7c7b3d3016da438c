//! The scheduler: one crossing per call.

use std::sync::Arc;

use numpy::PyArray1;
use pagedkv_core::{Handle, Inbox, NewRequest, Policy, Scheduler as Core};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::arrays::{self, array, ids, optional_ids, rows, wrong_type};
use crate::config::{CacheConfig, SchedulerConfig};
use crate::errors::{invalid, to_py_err};
use crate::guard::Guarded;
use crate::identity::{Span, identity};
use crate::plan::StepPlan;
use crate::policy::ask;
use crate::prefix_cache::retention;
use crate::result::StepResult;
use crate::stats::{RequestStats, SchedulerStats};

/// Continuous batching over a paged KV cache: which tokens of which sequences run in the next step.
///
/// Safe to use from several threads: `add_request` and `abort` never wait for a step, the other calls take one lock.
///
/// Parameters
/// ----------
/// cache_config : CacheConfig
///     The pool.
/// scheduler_config : SchedulerConfig, optional
///     Limits of a step.
/// policy : callable, optional
///     Called once per `schedule`, never under the lock, with keyword arguments that describe the waiting requests:
///     `handles` (int64), `priority` (int32), `arrival` (float64), `num_tokens` and `max_tokens` (int64), all of shape
///     (num_waiting,), and `tenants` (list of str or None). Returns one key per request as a sequence or array of
///     floats; lower comes first.
///
/// Notes
/// -----
/// `docs/step_contract.md` is the whole contract. A call that is refused raises and changes nothing; a broken law raises
/// `InternalError`, and so does every call after it.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct Scheduler {
    pub(crate) core: Arc<Guarded<Core>>,
    pub(crate) inbox: Inbox,
    /// Gives the keys of waiting requests.
    policy: Option<Py<PyAny>>,
}

/// The time that a caller gave, or that of `time.monotonic`.
pub(crate) fn time(py: Python<'_>, now: Option<f64>) -> PyResult<f64> {
    static MONOTONIC: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    now.map_or_else(|| MONOTONIC.import(py, "time", "monotonic")?.call0()?.extract(), Ok)
}

impl Scheduler {
    /// Runs a step at a time; other Python threads run meanwhile.
    fn at<R: Send>(
        &self,
        py: Python<'_>,
        now: f64,
        call: impl FnOnce(&mut Core) -> pagedkv_core::Result<R> + Send,
    ) -> PyResult<pagedkv_core::Result<R>> {
        self.core.detached(py, |core| core.advance(now).and_then(|()| call(core)))
    }
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (cache_config, scheduler_config=None, *, policy=None))]
    fn new(
        cache_config: &CacheConfig,
        scheduler_config: Option<&SchedulerConfig>,
        policy: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let mut limits = scheduler_config.map(|config| config.0.clone()).unwrap_or_default();
        if let Some(policy) = &policy {
            if !policy.is_callable() {
                return Err(wrong_type("policy", "a callable that returns keys", policy));
            }
            limits.policy = Policy::External;
        } else if limits.policy == Policy::External {
            return Err(invalid("policy", "a callable with SchedulerConfig(policy=\"external\")", "None"));
        }
        let core = Core::new(&cache_config.0, &limits).map_err(to_py_err)?;
        let inbox = core.inbox();
        Ok(Self { core: Arc::new(Guarded::new(core)), inbox, policy: policy.map(Bound::unbind) })
    }

    /// Leave a request for the next `schedule`.
    ///
    /// Parameters
    /// ----------
    /// request_id : str
    ///     Unique among live requests.
    /// prompt_token_ids : array of int32 or int64, shape (num_tokens,), or sequence of int
    ///     Copied; an int32 array is the fast way.
    /// max_tokens : int
    ///     Most tokens to sample, per sample.
    /// n : int
    ///     Samples. They share the prompt's blocks and take n seats.
    /// stop_token_ids : array or sequence of int
    ///     Tokens that end a sample once `min_tokens` were sampled; at least 0.
    /// cache_salt : str or bytes, optional
    ///     Only requests with equal salts share cached prefixes.
    /// lora_id : int, optional
    ///     The adapter, by an id that is never used for another one.
    /// image_spans : sequence of (start, length, digest bytes)
    ///     Prompt positions that stand for something else than their token ids.
    /// use_prefix_cache : bool
    ///     Whether the request reads and feeds the prefix cache.
    /// needs_commit : bool
    ///     Not planned again before the commit of its last plan.
    /// priority : int
    ///     Lower is more urgent; refused where the policy does not look at it.
    /// tenant : str, optional
    ///     Whose share the request counts against under the policy "fair", and under whom it is counted in `stats`.
    /// cache_priority : int, optional
    ///     From 0, which goes first, to 100: how its blocks are to be kept in the cache; 35 for those that do not say.
    ///     Refused unless the eviction policy is "priority".
    /// cache_ttl : float, optional
    ///     Seconds after the release of a block for which `cache_priority` holds; for good by default.
    /// session : bool
    ///     Whether samples that finish keep their blocks until `append_tokens`, `free` or `abort`.
    /// num_external_tokens : int
    ///     Prompt tokens, from the first on, whose keys and values the caller can load from where others computed them. The
    ///     plan that admits the request names what to load, in `StepPlan.loads`, unless the prefix cache has it; when
    ///     `transfers_done` says that it is there, the rest is computed.
    /// now : float, optional
    ///     Arrival in seconds, by default of `time.monotonic()`. Statistics and policies of the caller's look at it.
    ///
    /// Returns
    /// -------
    /// int
    ///     A handle that is never used again.
    ///
    /// Raises
    /// ------
    /// NeverFitsError
    ///     If even an empty pool could not hold the request at its longest.
    /// InvalidArgumentError
    ///     For an argument out of range or a `request_id` in use; a ValueError, like the one above.
    /// UnsupportedError
    ///     For what this version does not have.
    #[pyo3(signature = (
        request_id, prompt_token_ids, *, max_tokens, n=1, stop_token_ids=None, min_tokens=0, priority=0, tenant=None,
        cache_salt=None, lora_id=None, image_spans=Vec::new(), use_prefix_cache=true, num_external_tokens=0,
        needs_commit=false, session=false, cache_priority=None, cache_ttl=None, now=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "the contract's keywords")]
    fn add_request(
        &self,
        request_id: String,
        prompt_token_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = crate::args::u32s::max_tokens)] max_tokens: u32,
        #[pyo3(from_py_with = crate::args::u32s::n)] n: u32,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::u32s::min_tokens)] min_tokens: u32,
        #[pyo3(from_py_with = crate::args::i32s::priority)] priority: i32,
        tenant: Option<String>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::optional_i64s::lora_id)] lora_id: Option<i64>,
        #[pyo3(from_py_with = crate::args::image_spans)] image_spans: Vec<Span>,
        use_prefix_cache: bool,
        #[pyo3(from_py_with = crate::args::u32s::num_external_tokens)] num_external_tokens: u32,
        needs_commit: bool,
        session: bool,
        #[pyo3(from_py_with = crate::args::optional_u8s::cache_priority)] cache_priority: Option<u8>,
        #[pyo3(from_py_with = crate::args::optional_f64s::cache_ttl)] cache_ttl: Option<f64>,
        #[pyo3(from_py_with = crate::args::optional_f64s::now)] now: Option<f64>,
    ) -> PyResult<i64> {
        let request = NewRequest {
            request_id,
            prompt_token_ids: ids("prompt_token_ids", prompt_token_ids)?,
            max_tokens,
            n,
            stop_token_ids: optional_ids("stop_token_ids", stop_token_ids)?,
            min_tokens,
            priority,
            tenant,
            arrival: time(prompt_token_ids.py(), now)?,
            identity: identity(lora_id, cache_salt, image_spans)?,
            use_prefix_cache,
            retention: retention(cache_priority, cache_ttl)?,
            num_external_tokens,
            needs_commit,
            session,
        };
        self.core.check_usable()?;
        self.inbox.add_request(request).map(Handle::get).map_err(to_py_err)
    }

    /// End a request, or one of its samples, whatever state it is in. One that has ended is left alone.
    ///
    /// The id of a request that is aborted as a whole may be used again at once.
    #[pyo3(signature = (handle, sequence=None))]
    fn abort(
        &self,
        #[pyo3(from_py_with = crate::args::i64s::handle)] handle: i64,
        #[pyo3(from_py_with = crate::args::optional_u32s::sequence)] sequence: Option<u32>,
    ) -> PyResult<()> {
        self.core.check_usable()?;
        self.inbox.abort(Handle::new(handle), sequence).map_err(to_py_err)
    }

    /// End a sample before the next `schedule` because the caller found its end, a stop string say.
    fn finish(
        &self,
        #[pyo3(from_py_with = crate::args::i64s::handle)] handle: i64,
        #[pyo3(from_py_with = crate::args::u32s::sequence)] sequence: u32,
    ) -> PyResult<()> {
        self.core.with(|core| core.finish(Handle::new(handle), sequence))?.map_err(to_py_err)
    }

    /// Make the next plan.
    ///
    /// Parameters
    /// ----------
    /// now : float, optional
    ///     The time in seconds, by default of `time.monotonic()`. Earlier than before counts as no later.
    ///
    /// Returns
    /// -------
    /// StepPlan
    ///     Empty where nothing can run now; `blocked_on` then names the plan to end first.
    ///
    /// Raises
    /// ------
    /// StateError
    ///     If `max_plans_in_flight` plans are in flight.
    ///
    /// Notes
    /// -----
    /// Cost: O(sequences + tokens + changed table entries); it does not depend on the length of running contexts.
    #[pyo3(signature = (*, now=None))]
    fn schedule(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = crate::args::optional_f64s::now)] now: Option<f64>,
    ) -> PyResult<StepPlan> {
        let now = time(py, now)?;
        let plan = match &self.policy {
            Some(policy) => {
                let (handles, keys) = ask(&self.core, policy.bind(py))?;
                self.at(py, now, |core| core.schedule_by(&handles, &keys))?
            }
            None => self.at(py, now, Core::schedule)?,
        };
        let plan = plan.map_err(to_py_err)?;
        Ok(StepPlan::new(plan, &self.core))
    }

    /// End the oldest plan with what the model sampled.
    ///
    /// Parameters
    /// ----------
    /// plan : StepPlan
    ///     The oldest plan in flight.
    /// tokens : array of int32 or int64, shape (M,) or (N, k), or sequence of int
    ///     One token per sample, in the order of the plan; where drafts were checked, one row per sequence that samples: the
    ///     accepted tokens and the one after them, padded with -1.
    /// parents : array or sequence of int, optional
    ///     For beams, one per token: token i continues the sample `parents[i]` of the plan, as it was before this step's
    ///     token. Samples without a token end; further tokens of a parent take the request's lowest free numbers and
    ///     rows. In the result, tokens come in their order, with sequence -1 for those that ended without a seat, then
    ///     the samples that were dropped.
    /// accepted : array of int32 or int64, shape (N, k), optional
    ///     For draft trees, in the shape of `tokens`: the guesses that were accepted, by their numbers in the plan and from
    ///     the root on, padded with -1.
    /// now : float, optional
    ///     As in `schedule`.
    ///
    /// Returns
    /// -------
    /// StepResult
    ///
    /// Raises
    /// ------
    /// StateError
    ///     If the plan is not the oldest in flight.
    /// InvalidArgumentError
    ///     For another number of tokens than samples, or a negative token.
    #[pyo3(signature = (plan, tokens, parents=None, accepted=None, *, now=None))]
    fn commit(
        &self,
        py: Python<'_>,
        plan: &StepPlan,
        tokens: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
        accepted: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::optional_f64s::now)] now: Option<f64>,
    ) -> PyResult<StepResult> {
        let now = time(py, now)?;
        let id = plan.id_for(&self.core)?;
        let result = if let Some(accepted) = accepted {
            if let Some(parents) = parents {
                return Err(wrong_type("parents", "None beside accepted", parents));
            }
            let Some((rows, width)) = rows("tokens", tokens)? else {
                return Err(invalid("tokens", "an array of two dimensions beside accepted", "one dimension"));
            };
            let Some((accepted, path_width)) = arrays::rows("accepted", accepted)? else {
                return Err(invalid("accepted", "an array of two dimensions", "one dimension"));
            };
            if path_width != width {
                return Err(invalid("accepted", &format!("rows of {width}, as tokens has"), &path_width.to_string()));
            }
            self.at(py, now, |core| core.commit_trees(id, &rows, &accepted, width))?
        } else if let Some(parents) = parents {
            let (tokens, parents) = (ids("tokens", tokens)?, ids("parents", parents)?);
            self.at(py, now, |core| core.commit_beams(id, &tokens, &parents))?
        } else if let Some((rows, width)) = rows("tokens", tokens)? {
            self.at(py, now, |core| core.commit_drafts(id, &rows, width))?
        } else {
            let tokens = ids("tokens", tokens)?;
            self.at(py, now, |core| core.commit(id, &tokens))?
        };
        result.map(StepResult).map_err(to_py_err)
    }

    /// Give running sequences, by their rows, guesses for their next tokens, for the next plan to check.
    ///
    /// Parameters
    /// ----------
    /// rows : array or sequence of int, shape (R,)
    ///     Rows of sequences that decode and are in no plan in flight.
    /// start_loc : array or sequence of int, shape (R + 1,)
    ///     The guesses of row i are `ids[start_loc[i]:start_loc[i + 1]]`, at most `lookahead` of them.
    /// ids : array or sequence of int
    ///     Token ids.
    /// parents : array or sequence of int, optional
    ///     For trees: the number of the guess of the same row that each continues, which comes before it, or -1 for the
    ///     last known token. What does not fit is left out with all behind it, so trees are best given level by level.
    #[pyo3(signature = (rows, start_loc, ids, parents=None))]
    fn set_draft_tokens(
        &self,
        rows: &Bound<'_, PyAny>,
        start_loc: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (rows, start_loc) = (arrays::ids("rows", rows)?, arrays::ids("start_loc", start_loc)?);
        let ids = arrays::ids("ids", ids)?;
        let set = match parents.map(|parents| arrays::ids("parents", parents)).transpose()? {
            Some(parents) => self.core.with(|core| core.set_draft_trees(&rows, &start_loc, &ids, &parents))?,
            None => self.core.with(|core| core.set_draft_tokens(&rows, &start_loc, &ids))?,
        };
        set.map_err(to_py_err)
    }

    /// Undo a plan that did not run, or whose results are void, and cancel every plan behind it.
    ///
    /// Raises
    /// ------
    /// StateError
    ///     If the plan is not in flight.
    fn rollback(&self, py: Python<'_>, plan: &StepPlan) -> PyResult<()> {
        let id = plan.id_for(&self.core)?;
        self.core.detached(py, |core| core.rollback(id))?.map_err(to_py_err)
    }

    /// Whether a request that was added has not ended.
    fn has_unfinished_requests(&self) -> PyResult<bool> {
        self.core.check_usable().map(|()| self.inbox.num_unfinished_requests() > 0)
    }

    /// Requests that were added and have not ended.
    fn num_unfinished_requests(&self) -> PyResult<usize> {
        self.core.check_usable().map(|()| self.inbox.num_unfinished_requests())
    }

    /// Requests with seats, and requests that wait for them.
    fn num_requests(&self) -> PyResult<(usize, usize)> {
        self.core.with(|core| core.num_requests())
    }

    /// Block table of a sample in a cache group, int32 (num_blocks,), or None while it holds no block. Where a window needs
    /// no block it has the null block, 0.
    #[pyo3(signature = (handle, sequence=0, group=0))]
    fn block_table<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = crate::args::i64s::handle)] handle: i64,
        #[pyo3(from_py_with = crate::args::u32s::sequence)] sequence: u32,
        #[pyo3(from_py_with = crate::args::usizes::group)] group: usize,
    ) -> PyResult<Option<Bound<'py, PyArray1<i32>>>> {
        let table = self.core.with(|core| {
            let table = core.group_table(Handle::new(handle), sequence, group)?;
            Ok(table.map(|table| table.iter().map(|block| block.get() as i32).collect::<Vec<_>>()))
        })?;
        Ok(table.map_err(to_py_err)?.map(|table| array(py, table)))
    }

    /// Preemptions so far.
    #[getter]
    fn num_preemptions(&self) -> PyResult<u64> {
        self.core.with(|core| core.num_preemptions())
    }

    /// The scheduler in figures.
    ///
    /// Notes
    /// -----
    /// Cost: O(live requests + tenants).
    fn stats(&self) -> PyResult<SchedulerStats> {
        self.core.with(|core| core.stats()).map(SchedulerStats)
    }

    /// A live request in figures. Those of one that ended are in `StepResult.finished`.
    ///
    /// Raises
    /// ------
    /// UnknownIdError
    ///     For a request that has ended, or that no `schedule` or `commit` has taken up yet.
    fn request_stats(&self, #[pyo3(from_py_with = crate::args::i64s::handle)] handle: i64) -> PyResult<RequestStats> {
        let stats = self.core.with(|core| core.request_stats(Handle::new(handle)))?;
        stats.map(Into::into).map_err(to_py_err)
    }
}
