//! Blocks and reference counts, nothing more.

use numpy::PyArray1;
use pagedkv_core::{BlockId, BlockPool as Core, CacheConfig as CoreConfig};
use pyo3::prelude::*;

use crate::arrays::{array, ids};
use crate::errors::to_py_err;
use crate::guard::Guarded;

/// A pool of blocks with reference counts.
///
/// Block 0 is the null block and is never handed out. Blocks most recently freed are handed out first.
///
/// Parameters
/// ----------
/// num_blocks : int
///     Blocks of the pool, the null block included.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct BlockPool(Guarded<Core>);

fn blocks(object: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
    Ok(ids("block_ids", object)?.into_iter().map(|id| BlockId::new(id as u32)).collect())
}

#[pymethods]
impl BlockPool {
    #[new]
    fn new(#[pyo3(from_py_with = crate::args::u32s::num_blocks)] num_blocks: u32) -> PyResult<Self> {
        Ok(Self(Guarded::new(Core::new(&CoreConfig::new(num_blocks)).map_err(to_py_err)?)))
    }

    /// Take blocks, each with one holder.
    ///
    /// Returns
    /// -------
    /// ndarray of int32, shape (num_blocks,), or None
    ///     None, and nothing changed, if there are not enough.
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = crate::args::usizes::num_blocks)] num_blocks: usize,
    ) -> PyResult<Option<Bound<'py, PyArray1<i32>>>> {
        let taken = self.0.with(|core| {
            if num_blocks > core.num_available() as usize {
                return None;
            }
            let mut taken = vec![BlockId::default(); num_blocks];
            core.allocate(&mut taken)?;
            Some(taken.into_iter().map(|block| block.get() as i32).collect())
        })?;
        Ok(taken.map(|taken| array(py, taken)))
    }

    /// Take one more hold on each block. Raises NotHeldError for a free one.
    fn touch(&self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = blocks(block_ids)?;
        self.0.with(|core| core.touch(&blocks))?.map_err(to_py_err)
    }

    /// Give up one hold on each block. Raises NotHeldError, and changes nothing, for more than there are.
    fn free(&self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = blocks(block_ids)?;
        self.0.with(|core| core.free(&blocks))?.map_err(to_py_err)
    }

    /// Holders of each block, int32, same length as `block_ids`.
    fn ref_counts<'py>(&self, py: Python<'py>, block_ids: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let blocks = blocks(block_ids)?;
        let counts = self.0.with(|core| {
            let count = |&block| core.ref_count(block).map(|count| count as i32);
            blocks.iter().map(count).collect::<pagedkv_core::Result<Vec<_>>>()
        })?;
        Ok(array(py, counts.map_err(to_py_err)?))
    }

    /// Check every law of the pool; O(pool). Raises InternalError.
    fn check_integrity(&self) -> PyResult<()> {
        self.0.audit(Core::check_integrity)
    }

    /// For tests: makes the bookkeeping wrong, so that an audit finds it.
    fn _break_a_law(&self) -> PyResult<()> {
        self.0.with(Core::break_a_law)
    }

    /// Blocks of the pool, the null block included.
    #[getter]
    fn num_blocks(&self) -> PyResult<u32> {
        self.0.with(|core| core.num_blocks())
    }

    /// Blocks that can be handed out now.
    #[getter]
    fn num_free_blocks(&self) -> PyResult<u32> {
        self.0.with(|core| core.num_available())
    }
}
