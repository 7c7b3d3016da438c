//! The step plan: read-only arrays over the core's buffer.

use std::sync::Arc;

use numpy::{PyArray, PyArrayMethods, PyReadwriteArray2, PyUntypedArray};
use pagedkv_core::step_plan::{ElementType, Field};
use pagedkv_core::{Change, StepPlan as CorePlan};
use pyo3::prelude::*;

use crate::arrays::{bytes, contiguous, i32s_mut, wrong_type};
use crate::errors::{invalid, to_py_err};
use crate::guard::Guarded;

type ChangeList = Vec<(u32, String, u32)>;
type SharedScheduler = Arc<Guarded<pagedkv_core::Scheduler>>;

/// One step's plan: S sequences, T tokens, M samples, G cache groups. Decodes come first.
///
/// Its arrays are read-only NumPy views of one buffer, which lives as
/// long as the plan or any of them and never changes. `docs/step_contract.md` explains each.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct StepPlan {
    plan: CorePlan,
    scheduler: Option<SharedScheduler>,
}

impl StepPlan {
    pub(crate) fn new(plan: CorePlan, scheduler: &SharedScheduler) -> Self {
        Self { plan, scheduler: Some(scheduler.clone()) }
    }

    pub(crate) fn id(&self) -> pagedkv_core::PlanId {
        self.plan.id()
    }

    /// The plan's number, if `scheduler` made it: numbers of different schedulers say nothing to one another.
    pub(crate) fn id_for(&self, scheduler: &SharedScheduler) -> PyResult<pagedkv_core::PlanId> {
        match &self.scheduler {
            Some(own) if Arc::ptr_eq(own, scheduler) => Ok(self.plan.id()),
            Some(_) => Err(invalid("plan", "a plan of this scheduler", "one of another")),
            None => Err(invalid("plan", "the plan that schedule returned", "one that was rebuilt from a buffer")),
        }
    }

    fn scheduler(&self) -> PyResult<&SharedScheduler> {
        let why = "block tables of a plan that was rebuilt from a buffer: they are with its scheduler";
        self.scheduler.as_ref().ok_or_else(|| crate::errors::unsupported(why))
    }
}

/// A read-only array over a field of the plan's buffer.
fn view<'py>(plan: &Bound<'py, StepPlan>, field: Field) -> Bound<'py, PyUntypedArray> {
    let core = &plan.get().plan;
    let (rows, columns) = field.shape(&core.sizes());
    match field.element_type() {
        ElementType::I64 => over(plan, core.i64s(field), rows, columns),
        ElementType::I32 => over(plan, core.i32s(field), rows, columns),
        ElementType::U8 => over(plan, core.bytes(field), rows, columns),
    }
}

fn over<'py, T: numpy::Element>(
    plan: &Bound<'py, StepPlan>,
    values: &[T],
    rows: usize,
    columns: Option<usize>,
) -> Bound<'py, PyUntypedArray> {
    let shape = match columns {
        Some(columns) => vec![rows, columns],
        None => vec![rows],
    };
    let values =
        numpy::ndarray::ArrayViewD::from_shape(shape, values).expect("a field has as many elements as its shape");
    // SAFETY: the memory belongs to the plan, which is the array's base object and so outlives it; a plan's buffer never
    // moves or changes while the plan lives, and the array is made read-only before anyone else sees it.
    let array = unsafe { PyArray::borrow_from_array(&values, plan.clone().into_any()) };
    array.readwrite().make_nonwriteable();
    array.as_untyped().clone()
}

fn change_list(changes: Vec<Change>) -> ChangeList {
    changes.into_iter().map(|change| (change.row, change.request_id, change.sample)).collect()
}

macro_rules! fields {
    ($($name:ident: $field:ident, $doc:literal;)*) => {
        #[pymethods]
        impl StepPlan {
            $(#[doc = $doc]
            #[getter]
            fn $name<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyUntypedArray> {
                view(slf, Field::$field)
            })*
        }
    };
}

fields! {
    handles: Handles, "Request of each sequence, int64 (S,).";
    sequence: Sequence, "Sample of its request that each sequence is, int32 (S,).";
    rows: Rows, "Row of each sequence in the block table, int32 (S,).";
    token_ids: TokenIds, "Input ids, int32 (T,).";
    positions: Positions, "Positions, int32 (T,).";
    input_from: InputFrom, "-1, or the sample of the previous plan whose token goes here, int32 (T,).";
    slot_mapping: SlotMapping, "Where each token's key and value go, int64 (G, T).";
    query_start_loc: QueryStartLoc, "Where each sequence's tokens start, int32 (S + 1,).";
    seq_lens: SeqLens, "Lengths after this step, int32 (S,).";
    sample_rows: SampleRows, "Token from whose output each sample is drawn, int32 (M,).";
    sample_start_loc: SampleStartLoc, "Where each sequence's samples start, int32 (S + 1,).";
    tree_mask: TreeMask, "What tokens of draft trees see of their step, uint8; rows of bits in whole 64-bit words.";
    tree_mask_start_loc: TreeMaskStartLoc, "Where each sequence's rows of the tree mask start, in bytes, int32 (S + 1,).";
    table_updates: TableUpdates, "Group, row, column, block, int32 (k, 4).";
    copies: Copies, "Source and destination block, int32 (k, 2).";
    swap_in: SwapIn, "Host and device block, int32 (k, 2).";
    swap_out: SwapOut, "Device and host block, int32 (k, 2).";
    swap_in_ids: SwapInIds, "Transfers of swap_in, int64 (k,).";
    swap_out_ids: SwapOutIds, "Transfers of swap_out, int64 (k,).";
    loads: Loads, "What to load from outside: group, column of the request's tables, block, int32 (k, 3).";
    load_ids: LoadIds, "Transfers of loads, int64 (k,).";
    load_handles: LoadHandles, "The request of each of loads, int64 (k,).";
    slot_moves: SlotMoves, "Group, source and destination slot, int64 (k, 3).";
    num_common_prefix_blocks: NumCommonPrefixBlocks, "Blocks that every sequence shares, int32 (G,).";
}

#[pymethods]
impl StepPlan {
    /// Rebuild a plan from the bytes of another's buffer: a bytes object, or anything whose buffer is contiguous and of
    /// unsigned bytes, an array of uint8 say. They are copied.
    #[staticmethod]
    fn from_buffer(buffer: &Bound<'_, PyAny>) -> PyResult<Self> {
        let plan = match buffer.extract::<&[u8]>() {
            Ok(bytes) => CorePlan::from_buffer(bytes),
            Err(_) => CorePlan::from_buffer(&bytes("buffer", buffer)?),
        };
        Ok(Self { plan: plan.map_err(to_py_err)?, scheduler: None })
    }

    /// Number of the plan.
    #[getter(id)]
    fn py_id(&self) -> u64 {
        self.plan.id().get()
    }

    /// Number of the plan whose end unfinished work waits for, where this plan is empty for that reason.
    #[getter]
    fn blocked_on(&self) -> Option<u64> {
        self.plan.blocked_on().map(pagedkv_core::PlanId::get)
    }

    /// Whether this plan has no tokens while there is work, and transfers are outstanding, its own included.
    #[getter]
    fn waits_for_transfers(&self) -> bool {
        self.plan.waits_for_transfers()
    }

    /// S.
    #[getter]
    fn num_sequences(&self) -> u32 {
        self.plan.sizes().num_sequences
    }

    /// T.
    #[getter]
    fn num_tokens(&self) -> u32 {
        self.plan.sizes().num_tokens
    }

    /// M.
    #[getter]
    fn num_samples(&self) -> u32 {
        self.plan.sizes().num_samples
    }

    /// Sequences that have a row from this plan on: (row, request_id, sample).
    #[getter(new)]
    fn py_new(&self) -> ChangeList {
        change_list(self.plan.changes().new)
    }

    /// Sequences that lost their blocks and will come back: (row, request_id, sample).
    #[getter]
    fn preempted(&self) -> ChangeList {
        change_list(self.plan.changes().preempted)
    }

    /// Sequences that ended: (row, request_id, sample).
    #[getter]
    fn finished(&self) -> ChangeList {
        change_list(self.plan.changes().finished)
    }

    /// The whole plan as one uint8 array that starts on a cache line.
    #[getter]
    fn buffer<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyUntypedArray> {
        let bytes = slf.get().plan.buffer();
        over(slf, bytes, bytes.len(), None)
    }

    /// A new plan with arrays of these sizes, padded so that kernels skip the rest: rows 0, slots -1, lengths 0.
    fn pad_to(
        &self,
        #[pyo3(from_py_with = crate::args::u32s::sequences)] sequences: u32,
        #[pyo3(from_py_with = crate::args::u32s::tokens)] tokens: u32,
        #[pyo3(from_py_with = crate::args::u32s::samples)] samples: u32,
    ) -> PyResult<Self> {
        let plan = self.plan.pad_to(sequences, tokens, samples).map_err(to_py_err)?;
        Ok(Self { plan, scheduler: self.scheduler.clone() })
    }

    /// Write the block tables of the plan's sequences in a cache group into `out`, int32 (S, columns), while the plan is in
    /// flight. Where a window needs no block the null block, 0, is written.
    #[pyo3(signature = (out, group=0))]
    fn write_block_table(
        &self,
        out: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = crate::args::usizes::group)] group: usize,
    ) -> PyResult<()> {
        let id = self.id();
        let scheduler = self.scheduler()?;
        let found = out.extract::<PyReadwriteArray2<'_, i32>>();
        let mut out = found.map_err(|_| wrong_type("out", "a writable int32 array of two dimensions", out))?;
        let columns = out.as_array().ncols();
        let out = out.as_slice_mut().map_err(|_| invalid("out", "a contiguous array", "one with gaps"))?;
        scheduler.with(|core| core.write_block_table(id, group, columns, out))?.map_err(to_py_err)
    }

    /// Write the block tables of a cache group end to end into int32 arrays, as FlashInfer reads them: indptr (S + 1,),
    /// indices, last_page_len (S,). Returns how many indices there are.
    #[pyo3(signature = (indptr, indices, last_page_len, group=0))]
    fn write_csr(
        &self,
        indptr: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        last_page_len: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = crate::args::usizes::group)] group: usize,
    ) -> PyResult<usize> {
        let (mut indptr, mut indices) = (i32s_mut("indptr", indptr)?, i32s_mut("indices", indices)?);
        let mut last = i32s_mut("last_page_len", last_page_len)?;
        let (indptr, indices) = (contiguous("indptr", &mut indptr)?, contiguous("indices", &mut indices)?);
        let last = contiguous("last_page_len", &mut last)?;
        let id = self.id();
        self.scheduler()?.with(|core| core.write_csr(id, group, indptr, indices, last))?.map_err(to_py_err)
    }

    fn __repr__(&self) -> String {
        let sizes = self.plan.sizes();
        format!(
            "StepPlan(id={}, sequences={}, tokens={}, samples={})",
            sizes.plan_id, sizes.num_sequences, sizes.num_tokens, sizes.num_samples
        )
    }
}
