//! What a commit did.

use numpy::PyArray1;
use pagedkv_core::StepResult as CoreResult;
use pyo3::prelude::*;

use crate::arrays::array;
use crate::getters::getters;
use crate::stats::RequestStats;

/// What a commit did: four arrays with one entry per sample that got tokens, and lists of what changed state.
///
/// `finish_reason` is 0 for none, 1 for stop, 2 for length, 3 for abort, 4 for a beam that no token continued.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct StepResult(pub(crate) CoreResult);

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

getters!(FinishedRequest.0 {
    handle: i64 = |request| request.handle.get();
    request_id: &str = |request| &request.request_id;
    num_cached_tokens: u32;
    num_preemptions: u32;
    /// All that was counted of it.
    stats: RequestStats = |request| request.stats.into();
});

#[pymethods]
impl FinishedRequest {
    fn __repr__(&self) -> String {
        format!("FinishedRequest(handle={}, request_id={:?})", self.0.handle.get(), self.0.request_id)
    }
}
