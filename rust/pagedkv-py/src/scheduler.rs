//! The scheduler: one crossing per call.

use std::sync::Arc;

use numpy::PyArray1;
use pagedkv_core::{
    BlockId, Handle, Identity, ImageSpan, Inbox, NewRequest, PlanId, RootKey, Scheduler as Core, StepResult as CoreResult,
};
use pyo3::prelude::*;

use crate::arrays::{array, ids};
use crate::config::{CacheConfig, SchedulerConfig};
use crate::errors::{internal, invalid, to_py_err, unsupported};
use crate::guard::Guarded;
use crate::plan::StepPlan;

/// A span of prompt positions that stand for an image: start, length, digest.
pub(crate) type Span = (u32, u32, Vec<u8>);

/// Continuous batching over a paged KV cache.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct Scheduler {
    core: Arc<Guarded<Core>>,
    inbox: Inbox,
}

/// Extra keys of a prefix.
pub(crate) fn identity(lora_id: Option<i64>, cache_salt: Option<&Bound<'_, PyAny>>, images: Vec<Span>) -> PyResult<Identity> {
    let cache_salt = cache_salt.map(salt).transpose()?;
    let images = images.into_iter().map(|(start, len, digest)| ImageSpan { start, len, digest: digest.into() });
    Ok(Identity { root: RootKey { lora_id, cache_salt }, images: images.collect() })
}

fn salt(object: &Bound<'_, PyAny>) -> PyResult<Box<[u8]>> {
    if let Ok(text) = object.extract::<&str>() {
        return Ok(text.as_bytes().into());
    }
    let bytes = object.extract::<&[u8]>().map_err(|_| invalid("cache_salt", "str or bytes", &crate::arrays::found(object)));
    bytes.map(Into::into)
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (cache_config, scheduler_config=None))]
    fn new(cache_config: &CacheConfig, scheduler_config: Option<&SchedulerConfig>) -> PyResult<Self> {
        let limits = scheduler_config.map(|config| config.0.clone()).unwrap_or_default();
        let core = Core::new(&cache_config.0, &limits).map_err(to_py_err)?;
        let inbox = core.inbox();
        Ok(Self { core: Arc::new(Guarded::new(core)), inbox })
    }

    #[pyo3(signature = (
        request_id, prompt_token_ids, *, max_tokens, n=1, stop_token_ids=None, min_tokens=0, priority=0, tenant=None,
        cache_salt=None, lora_id=None, image_spans=Vec::new(), use_prefix_cache=true, num_external_tokens=0,
        needs_commit=false, session=false, now=None,
    ))]
    #[expect(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "the contract's keywords")]
    fn add_request(
        &self,
        request_id: String,
        prompt_token_ids: &Bound<'_, PyAny>,
        max_tokens: u32,
        n: u32,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        min_tokens: u32,
        priority: i32,
        tenant: Option<String>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        lora_id: Option<i64>,
        image_spans: Vec<Span>,
        use_prefix_cache: bool,
        num_external_tokens: u32,
        needs_commit: bool,
        session: bool,
        now: Option<f64>,
    ) -> PyResult<i64> {
        // Arrival order is the order of the calls; the time serves policies that this version refuses.
        let _ = now;
        let request = NewRequest {
            request_id,
            prompt_token_ids: ids("prompt_token_ids", prompt_token_ids)?,
            max_tokens,
            n,
            stop_token_ids: stop_token_ids.map_or(Ok(Vec::new()), |stop| ids("stop_token_ids", stop))?,
            min_tokens,
            priority,
            tenant,
            identity: identity(lora_id, cache_salt, image_spans)?,
            use_prefix_cache,
            num_external_tokens,
            needs_commit,
            session,
        };
        self.inbox.add_request(request).map(Handle::get).map_err(to_py_err)
    }

    #[pyo3(signature = (handle, sequence=None))]
    fn abort(&self, handle: i64, sequence: Option<u32>) -> PyResult<()> {
        self.inbox.abort(Handle::new(handle), sequence).map_err(to_py_err)
    }

    fn finish(&self, handle: i64, sequence: u32) -> PyResult<()> {
        self.core.with(|core| core.finish(Handle::new(handle), sequence))?.map_err(to_py_err)
    }

    fn schedule(&self) -> PyResult<StepPlan> {
        let plan = self.core.with(Core::schedule)?.map_err(to_py_err)?;
        Ok(StepPlan::new(plan, &self.core))
    }

    #[pyo3(signature = (plan, tokens, parents=None, accepted=None))]
    fn commit(
        &self,
        plan: &StepPlan,
        tokens: &Bound<'_, PyAny>,
        parents: Option<&Bound<'_, PyAny>>,
        accepted: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<StepResult> {
        if parents.is_some() {
            return Err(unsupported("parents: there is no beam search"));
        }
        if accepted.is_some() {
            return Err(unsupported("accepted: there are no draft tokens"));
        }
        let tokens = ids("tokens", tokens)?;
        let result = self.core.with(|core| core.commit(plan.id(), &tokens))?.map_err(to_py_err)?;
        Ok(StepResult(result))
    }

    fn rollback(&self, plan: &StepPlan) -> PyResult<()> {
        self.core.with(|core| core.rollback(plan.id()))?.map_err(to_py_err)
    }

    fn has_unfinished_requests(&self) -> bool {
        self.inbox.num_unfinished_requests() > 0
    }

    fn num_unfinished_requests(&self) -> usize {
        self.inbox.num_unfinished_requests()
    }

    /// Requests with seats, and requests that wait for them.
    fn num_requests(&self) -> PyResult<(usize, usize)> {
        self.core.with(|core| core.num_requests())
    }

    #[pyo3(signature = (handle, sequence=0))]
    fn block_table<'py>(&self, py: Python<'py>, handle: i64, sequence: u32) -> PyResult<Option<Bound<'py, PyArray1<i32>>>> {
        let table = self.core.with(|core| {
            let table = core.block_table(Handle::new(handle), sequence)?;
            Ok(table.map(|table| table.iter().map(|block| block.get() as i32).collect::<Vec<_>>()))
        })?;
        Ok(table.map_err(to_py_err)?.map(|table| array(py, table)))
    }

    fn ref_counts<'py>(&self, py: Python<'py>, block_ids: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let blocks = ids("block_ids", block_ids)?;
        let counts = self.core.with(|core| {
            let count = |&block: &i32| core.manager().pool().ref_count(BlockId::new(block as u32)).map(|count| count as i32);
            blocks.iter().map(count).collect::<Result<Vec<_>, _>>()
        })?;
        Ok(array(py, counts.map_err(to_py_err)?))
    }

    #[getter]
    fn usage(&self) -> PyResult<f64> {
        self.core.with(|core| core.manager().usage())
    }

    /// Blocks free, cached, held and fenced.
    #[getter]
    fn num_blocks_by_state(&self) -> PyResult<(u32, u32, u32, u32)> {
        self.core.with(|core| counts(core.manager().pool()))
    }

    #[getter]
    fn num_preemptions(&self) -> PyResult<u64> {
        self.core.with(|core| core.num_preemptions())
    }

    fn reset_prefix_cache(&self) -> PyResult<()> {
        self.core.with(Core::reset_prefix_cache)
    }

    fn check_integrity(&self) -> PyResult<()> {
        self.core.with(|core| core.check_integrity())?.map_err(|broken| internal(&broken.to_string()))
    }
}

pub(crate) fn counts(pool: &pagedkv_core::BlockPool) -> (u32, u32, u32, u32) {
    (pool.num_free(), pool.num_cached(), pool.num_held(), pool.num_fenced())
}

/// What a commit did.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct StepResult(CoreResult);

#[pymethods]
impl StepResult {
    #[getter]
    fn handles<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        array(py, self.0.handles.clone())
    }

    #[getter]
    fn sequence<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, self.0.sequence.clone())
    }

    #[getter]
    fn num_new_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, self.0.num_new_tokens.clone())
    }

    #[getter]
    fn finish_reason<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i8>> {
        array(py, self.0.finish_reason.clone())
    }

    #[getter]
    fn finished(&self) -> Vec<FinishedRequest> {
        self.0.finished.iter().cloned().map(FinishedRequest).collect()
    }

    /// Handle, parent and child sample.
    #[getter]
    fn forked(&self) -> Vec<(i64, u32, u32)> {
        self.0.forked.iter().map(|fork| (fork.handle.get(), fork.parent, fork.child)).collect()
    }

    #[getter]
    fn num_ignored(&self) -> u32 {
        self.0.num_ignored
    }
}

/// A request whose last sample ended.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct FinishedRequest(pagedkv_core::FinishedRequest);

#[pymethods]
impl FinishedRequest {
    #[getter]
    fn handle(&self) -> i64 {
        self.0.handle.get()
    }

    #[getter]
    fn request_id(&self) -> &str {
        &self.0.request_id
    }

    #[getter]
    fn num_cached_tokens(&self) -> u32 {
        self.0.num_cached_tokens
    }

    #[getter]
    fn num_preemptions(&self) -> u32 {
        self.0.num_preemptions
    }

    fn __repr__(&self) -> String {
        format!("FinishedRequest(handle={}, request_id={:?})", self.0.handle.get(), self.0.request_id)
    }
}

/// The plan with this number.
pub(crate) const fn plan_id(number: u64) -> PlanId {
    PlanId::new(number)
}
