//! Policies of the caller's: what they are told, and what is done with their answer.

use numpy::PyReadonlyArray1;
use pagedkv_core::Scheduler as Core;
use pagedkv_core::scheduler::RequestView;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{array, wrong_type};
use crate::guard::Guarded;

/// Handles of the waiting requests and the keys that the policy gives them. It is called without the lock.
pub(crate) fn ask(core: &Guarded<Core>, policy: &Bound<'_, PyAny>) -> PyResult<(Vec<i64>, Vec<f64>)> {
    let mut waiting = Waiting::default();
    core.with(|core| core.for_each_waiting(|request| waiting.push(request)))?;
    waiting.ask(policy)
}

/// What a policy is told of the waiting requests.
#[derive(Default)]
struct Waiting {
    handles: Vec<i64>,
    priority: Vec<i32>,
    arrival: Vec<f64>,
    num_tokens: Vec<i64>,
    max_tokens: Vec<i64>,
    tenants: Vec<Option<String>>,
}

impl Waiting {
    fn push(&mut self, request: &RequestView<'_>) {
        self.handles.push(request.handle.get());
        self.priority.push(request.priority);
        self.arrival.push(request.arrival);
        self.num_tokens.push(i64::from(request.num_tokens));
        self.max_tokens.push(request.max_tokens as i64);
        self.tenants.push(request.tenant.map(str::to_owned));
    }

    fn ask(self, policy: &Bound<'_, PyAny>) -> PyResult<(Vec<i64>, Vec<f64>)> {
        let py = policy.py();
        let arguments = PyDict::new(py);
        arguments.set_item(intern!(py, "handles"), array(py, self.handles.clone()))?;
        arguments.set_item(intern!(py, "priority"), array(py, self.priority))?;
        arguments.set_item(intern!(py, "arrival"), array(py, self.arrival))?;
        arguments.set_item(intern!(py, "num_tokens"), array(py, self.num_tokens))?;
        arguments.set_item(intern!(py, "max_tokens"), array(py, self.max_tokens))?;
        arguments.set_item(intern!(py, "tenants"), self.tenants)?;
        let answer = policy.call((), Some(&arguments))?;
        let keys = match answer.extract::<PyReadonlyArray1<'_, f64>>() {
            Ok(keys) => keys.as_array().to_vec(),
            Err(_) => answer.extract().map_err(|_| wrong_type("policy", "an answer of floats", &answer))?,
        };
        Ok((self.handles, keys))
    }
}
