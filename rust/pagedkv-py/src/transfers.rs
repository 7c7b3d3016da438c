//! Transfers between the pool and other places.

use numpy::PyArray1;
use pyo3::prelude::*;

use crate::arrays::{array, longs};
use crate::errors::to_py_err;
use crate::scheduler::Scheduler;

#[pymethods]
impl Scheduler {
    /// End transfers: what plans asked for under these ids in `swap_out`, `swap_in` or `loads` is done, or failed.
    ///
    /// Parameters
    /// ----------
    /// ids : array or sequence of int
    ///     Transfers, from `StepPlan.swap_out_ids`, `swap_in_ids` and `load_ids`.
    /// ok : bool
    ///     False if they failed: what they should have moved is computed again.
    ///
    /// Raises
    /// ------
    /// UnknownIdError
    ///     For a transfer that is not outstanding: never begun, or ended before.
    /// InvalidArgumentError
    ///     For one that is given twice.
    #[pyo3(signature = (ids, ok=true))]
    fn transfers_done(&self, ids: &Bound<'_, PyAny>, ok: bool) -> PyResult<()> {
        let ids = longs("ids", ids)?;
        self.core.with(|core| core.transfers_done(&ids, ok))?.map_err(to_py_err)
    }

    /// Transfers that plans told and that have not ended, ascending, int64.
    #[getter]
    fn outstanding_transfers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let ids: Vec<i64> = self.core.with(|core| core.outstanding_transfers().collect())?;
        Ok(array(py, ids))
    }

    /// Blocks of the host tier, and how many of them are free.
    #[getter]
    fn num_host_blocks(&self) -> PyResult<(u32, u32)> {
        self.core.with(|core| core.num_host_blocks())
    }

    /// Preemptions whose blocks went to the host tier.
    #[getter]
    fn num_swaps(&self) -> PyResult<u64> {
        self.core.with(|core| core.num_swaps())
    }
}
