//! The bookkeeping alone, for people with a scheduler of their own.

use std::sync::Arc;

use numpy::PyArray1;
use pagedkv_core::{ComputedBlocks as CoreComputed, KVCacheManager as Core, PlanId, Retention, SequenceId};
use pyo3::prelude::*;

use crate::arrays::{Rows, array, ids, table};
use crate::config::CacheConfig;
use crate::errors::to_py_err;
use crate::guard::Guarded;
use crate::identity::{Span, identity};

/// Sequences and the blocks that they hold, for people with a scheduler of their own.
///
/// Sequences grow inside plans: `begin_plan` opens one, `allocate_slots` adds tokens of a sequence to the newest, and
/// `commit` or `rollback` ends it. A block can be hit by others when the plan that fills it has committed.
///
/// Parameters
/// ----------
/// cache_config : CacheConfig
///     The pool.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct KVCacheManager {
    pub(crate) core: Guarded<Core>,
}

impl KVCacheManager {
    pub(crate) fn call<R>(&self, call: impl FnOnce(&mut Core) -> pagedkv_core::Result<R>) -> PyResult<R> {
        self.core.with(call)?.map_err(to_py_err)
    }
}

#[pymethods]
impl KVCacheManager {
    #[new]
    fn new(cache_config: &CacheConfig) -> PyResult<Self> {
        let core = Core::new(&cache_config.0).map_err(to_py_err)?;
        Ok(Self { core: Guarded::new(core) })
    }

    /// A sequence of these tokens, none of them computed. It holds no block yet.
    ///
    /// Parameters are those of `Scheduler.add_request`.
    ///
    /// Returns
    /// -------
    /// int
    ///     Its id; a stale one is refused.
    #[pyo3(signature = (
        prompt_token_ids, *, cache_salt=None, lora_id=None, image_spans=Vec::new(), use_prefix_cache=true,
    ))]
    fn create(
        &self,
        prompt_token_ids: &Bound<'_, PyAny>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::optional_i64s::lora_id)] lora_id: Option<i64>,
        #[pyo3(from_py_with = crate::args::image_spans)] image_spans: Vec<Span>,
        use_prefix_cache: bool,
    ) -> PyResult<u64> {
        let tokens = ids("prompt_token_ids", prompt_token_ids)?;
        let identity = Arc::new(identity(lora_id, cache_salt, image_spans)?);
        self.call(|core| core.create(tokens.into(), identity, use_prefix_cache)).map(SequenceId::to_bits)
    }

    /// Add known tokens to the end of a sequence.
    ///
    /// Parameters
    /// ----------
    /// sequence : int
    ///     The sequence.
    /// token_ids : array of int32 or int64, shape (num_tokens,), or sequence of int
    ///     At places that a plan in flight computes, what it computed there.
    /// num_accepted : int
    ///     How many of the draft tokens at these places hold: they count as computed when their plan commits. The slots of
    ///     the others are taken back.
    #[pyo3(signature = (sequence, token_ids, *, num_accepted=0))]
    fn append_tokens(
        &self,
        #[pyo3(from_py_with = crate::args::u64s::sequence)] sequence: u64,
        token_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = crate::args::u32s::num_accepted)] num_accepted: u32,
    ) -> PyResult<()> {
        let tokens = ids("token_ids", token_ids)?;
        self.call(|core| core.append_accepted(SequenceId::from_bits(sequence), &tokens, num_accepted))
    }

    /// The longest cached prefix from where the sequence stands; nothing is changed. At least one token is left over.
    fn get_computed_blocks(
        &self,
        #[pyo3(from_py_with = crate::args::u64s::sequence)] sequence: u64,
    ) -> PyResult<ComputedBlocks> {
        self.call(|core| core.get_computed_blocks(SequenceId::from_bits(sequence))).map(ComputedBlocks)
    }

    /// Open a plan; growth goes to the newest.
    fn begin_plan(&self) -> PyResult<u64> {
        self.core.with(Core::begin_plan).map(PlanId::get)
    }

    /// Slots for a sequence's next tokens in the newest plan, after the blocks of `computed`.
    ///
    /// Parameters
    /// ----------
    /// sequence : int
    ///     The sequence.
    /// num_new_tokens : int
    ///     Tokens that the plan computes: known ones, and one for each older plan in flight that samples for the sequence.
    /// computed : ComputedBlocks, optional
    ///     What `get_computed_blocks` found, with no other change since.
    /// num_draft_tokens : int
    ///     Guesses behind them, which `append_tokens(..., num_accepted=)` settles.
    ///
    /// Returns
    /// -------
    /// AllocatedSlots or None
    ///     None, and nothing changed, if there is no room.
    #[pyo3(signature = (sequence, num_new_tokens, computed=None, *, num_draft_tokens=0))]
    fn allocate_slots(
        &self,
        #[pyo3(from_py_with = crate::args::u64s::sequence)] sequence: u64,
        #[pyo3(from_py_with = crate::args::u32s::num_new_tokens)] num_new_tokens: u32,
        computed: Option<&ComputedBlocks>,
        #[pyo3(from_py_with = crate::args::u32s::num_draft_tokens)] num_draft_tokens: u32,
    ) -> PyResult<Option<AllocatedSlots>> {
        let none = CoreComputed::default();
        let computed = computed.map_or(&none, |computed| &computed.0);
        let id = SequenceId::from_bits(sequence);
        let slots =
            self.call(|core| core.allocate_slots_with_drafts(id, num_new_tokens, num_draft_tokens, computed))?;
        Ok(slots.map(AllocatedSlots))
    }

    /// End the oldest plan: what it filled is public. Tokens that nobody told by now, and draft tokens that nobody
    /// accepted, do not count.
    fn commit(&self, #[pyo3(from_py_with = crate::args::u64s::plan)] plan: u64) -> PyResult<()> {
        self.call(|core| core.commit(PlanId::new(plan)))
    }

    /// Undo a plan and every plan behind it.
    fn rollback(&self, #[pyo3(from_py_with = crate::args::u64s::plan)] plan: u64) -> PyResult<()> {
        self.call(|core| core.rollback(PlanId::new(plan)))
    }

    /// A second sequence with the same tokens and blocks. It takes no block; the shared last one is copied when one of
    /// the two first writes into it.
    fn fork(&self, #[pyo3(from_py_with = crate::args::u64s::sequence)] sequence: u64) -> PyResult<u64> {
        self.call(|core| core.fork(SequenceId::from_bits(sequence))).map(SequenceId::to_bits)
    }

    /// Cut a sequence to its first tokens and release the blocks behind them. Where a window needs a block before the cut
    /// that has left it, nothing of the sequence counts as computed any more.
    fn truncate(
        &self,
        #[pyo3(from_py_with = crate::args::u64s::sequence)] sequence: u64,
        #[pyo3(from_py_with = crate::args::u32s::num_tokens)] num_tokens: u32,
    ) -> PyResult<()> {
        self.call(|core| core.truncate(SequenceId::from_bits(sequence), num_tokens))
    }

    /// End a sequence and release its blocks.
    fn free(&self, #[pyo3(from_py_with = crate::args::u64s::sequence)] sequence: u64) -> PyResult<()> {
        self.call(|core| core.free(SequenceId::from_bits(sequence)))
    }

    /// Block table of a sequence in a cache group, int32 (num_blocks,). Where a window needs no block it has the null block,
    /// 0.
    #[pyo3(signature = (sequence, group=0))]
    fn block_table<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = crate::args::u64s::sequence)] sequence: u64,
        #[pyo3(from_py_with = crate::args::usizes::group)] group: usize,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let table = self.call(|core| {
            let table = core.group_table(SequenceId::from_bits(sequence), group)?;
            Ok(table.iter().map(|block| block.get() as i32).collect::<Vec<_>>())
        })?;
        Ok(array(py, table))
    }

    /// Known tokens of a sequence.
    fn num_tokens(&self, #[pyo3(from_py_with = crate::args::u64s::sequence)] sequence: u64) -> PyResult<u32> {
        self.call(|core| core.num_tokens(SequenceId::from_bits(sequence)))
    }

    /// Tokens of a sequence that committed plans computed.
    fn num_computed_tokens(&self, #[pyo3(from_py_with = crate::args::u64s::sequence)] sequence: u64) -> PyResult<u32> {
        self.call(|core| core.num_computed_tokens(SequenceId::from_bits(sequence)))
    }

    /// Keep the blocks that a sequence fills or hits from now on as `cache_priority` and `cache_ttl` of
    /// `Scheduler.add_request` say.
    #[pyo3(signature = (sequence, cache_priority, cache_ttl=None))]
    fn retain(
        &self,
        #[pyo3(from_py_with = crate::args::u64s::sequence)] sequence: u64,
        #[pyo3(from_py_with = crate::args::u8s::cache_priority)] cache_priority: u8,
        #[pyo3(from_py_with = crate::args::optional_f64s::cache_ttl)] cache_ttl: Option<f64>,
    ) -> PyResult<()> {
        let retention = Retention { priority: cache_priority, seconds: cache_ttl.unwrap_or(f64::INFINITY) };
        self.call(|core| core.retain(SequenceId::from_bits(sequence), retention))
    }

    /// Let time pass, in seconds, for cached blocks whose priority holds for a time. Time that goes back is ignored; NaN
    /// and infinity are refused.
    fn advance(&self, #[pyo3(from_py_with = crate::args::f64s::now)] now: f64) -> PyResult<()> {
        self.call(|core| core.advance(now))
    }
}

/// What a lookup found: cached blocks, and the tokens that need not be computed.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct ComputedBlocks(CoreComputed);

#[pymethods]
impl ComputedBlocks {
    /// Blocks of the first cache group, int32.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.group_block_ids(py, 0)
    }

    /// Blocks of a cache group, int32; the null block, 0, where the group's window needs none.
    fn group_block_ids<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = crate::args::usizes::group)] group: usize,
    ) -> Bound<'py, PyArray1<i32>> {
        array(py, self.0.group_blocks(group).iter().map(|block| block.get() as i32).collect())
    }

    #[getter]
    fn num_tokens(&self) -> u32 {
        self.0.num_tokens()
    }
}

/// Slots for new tokens, and blocks to copy first.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct AllocatedSlots(pagedkv_core::AllocatedSlots);

#[pymethods]
impl AllocatedSlots {
    /// Where each new token's key and value go, int64 (G * num_tokens,): the rows of all cache groups, one after another.
    #[getter]
    fn slot_mapping<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        array(py, self.0.slot_mapping.to_vec())
    }

    /// Source and destination of the blocks to copy before anything is written, int32 (k, 2): at most one per cache group.
    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Rows<'py>> {
        let pairs = self.0.copies.iter().map(|copy| [copy.source, copy.target].map(|block| block.get() as i32));
        table(py, &pairs.collect::<Vec<_>>())
    }
}
