//! The manager's verbs over arrays of sequences: one crossing each.

use std::sync::Arc;

use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadwriteArray2};
use pagedkv_core::{BatchSlots as CoreSlots, ComputedBlocks as CoreComputed, Growths, SequenceId};
use pyo3::prelude::*;

use crate::arrays::{Rows, array, contiguous, counts, i32s_mut, ids, sequences, table, wrong_type};
use crate::errors::invalid;
use crate::identity::identity;
use crate::manager::KVCacheManager;

fn handles<'py>(py: Python<'py>, sequences: &[SequenceId]) -> Bound<'py, PyArray1<i64>> {
    array(py, sequences.iter().map(|id| id.to_bits().cast_signed()).collect())
}

/// Where each of `num_sequences` has its tokens: given, or one for each.
fn bounds(object: Option<&Bound<'_, PyAny>>, num_sequences: usize) -> PyResult<Vec<i32>> {
    object.map_or_else(|| Ok((0..=num_sequences as i32).collect()), |object| ids("start_loc", object))
}

/// The arrays of a batch of growths.
struct Wanted {
    sequences: Vec<SequenceId>,
    num_new_tokens: Vec<u32>,
    num_draft_tokens: Vec<u32>,
}

impl Wanted {
    fn read(
        sequences: &Bound<'_, PyAny>,
        num_new_tokens: &Bound<'_, PyAny>,
        num_draft_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        Ok(Self {
            sequences: self::sequences("sequences", sequences)?,
            num_new_tokens: counts("num_new_tokens", num_new_tokens)?,
            num_draft_tokens: num_draft_tokens.map_or(Ok(Vec::new()), |drafts| counts("num_draft_tokens", drafts))?,
        })
    }

    fn growths<'a>(&'a self, computed: Option<&'a ComputedBlocksBatch>) -> Growths<'a> {
        Growths {
            sequences: &self.sequences,
            num_new_tokens: &self.num_new_tokens,
            num_draft_tokens: &self.num_draft_tokens,
            computed: computed.map_or(&[], |computed| &computed.0),
        }
    }
}

/// The same calls for many sequences at once. `sequences` is an int64 array of ids or a sequence of ints; each is listed
/// once, except to be forked. All of a batch is done or, after an error that names the element, nothing.
#[pymethods]
impl KVCacheManager {
    /// Sequences of the prompts that lie end to end in an array, none of them computed.
    ///
    /// Parameters
    /// ----------
    /// prompt_token_ids : array of int32 or int64, shape (num_tokens,), or sequence of int
    ///     The prompts.
    /// start_loc : array or sequence of int, shape (num_sequences + 1,)
    ///     Prompt i is `prompt_token_ids[start_loc[i]:start_loc[i + 1]]`.
    /// cache_salt, lora_id, use_prefix_cache
    ///     As for `create`, the same for all. Prompts with images are created one by one.
    ///
    /// Returns
    /// -------
    /// ndarray of int64, shape (num_sequences,)
    ///     Their ids.
    #[pyo3(signature = (prompt_token_ids, start_loc, *, cache_salt=None, lora_id=None, use_prefix_cache=true))]
    fn create_batch<'py>(
        &self,
        py: Python<'py>,
        prompt_token_ids: &Bound<'_, PyAny>,
        start_loc: &Bound<'_, PyAny>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::args::optional_i64s::lora_id)] lora_id: Option<i64>,
        use_prefix_cache: bool,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let (tokens, bounds) = (ids("prompt_token_ids", prompt_token_ids)?, ids("start_loc", start_loc)?);
        let identity = Arc::new(identity(lora_id, cache_salt, Vec::new())?);
        let made = self.call(|core| core.create_batch(&tokens, &bounds, &identity, use_prefix_cache))?;
        Ok(handles(py, &made))
    }

    /// End sequences and release their blocks.
    fn free_batch(&self, sequences: &Bound<'_, PyAny>) -> PyResult<()> {
        let sequences = self::sequences("sequences", sequences)?;
        self.call(|core| core.free_batch(&sequences))
    }

    /// A fork of each sequence, int64, same length as `sequences`. One that is listed several times is forked as often.
    fn fork_batch<'py>(&self, py: Python<'py>, sequences: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let sequences = self::sequences("sequences", sequences)?;
        let forks = self.call(|core| core.fork_batch(&sequences))?;
        Ok(handles(py, &forks))
    }

    /// Add known tokens to the end of sequences.
    ///
    /// Parameters
    /// ----------
    /// sequences : array of int64 or sequence of int, shape (num_sequences,)
    ///     The sequences.
    /// token_ids : array or sequence of int
    ///     The tokens of sequence i are `token_ids[start_loc[i]:start_loc[i + 1]]`.
    /// start_loc : array or sequence of int, shape (num_sequences + 1,), optional
    ///     By default one token for each.
    /// num_accepted : array or sequence of int, shape (num_sequences,), optional
    ///     Draft tokens that hold, as for `append_tokens`; by default none.
    #[pyo3(signature = (sequences, token_ids, start_loc=None, *, num_accepted=None))]
    fn append_tokens_batch(
        &self,
        sequences: &Bound<'_, PyAny>,
        token_ids: &Bound<'_, PyAny>,
        start_loc: Option<&Bound<'_, PyAny>>,
        num_accepted: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let sequences = self::sequences("sequences", sequences)?;
        let tokens = ids("token_ids", token_ids)?;
        let bounds = bounds(start_loc, sequences.len())?;
        let accepted = num_accepted.map_or(Ok(Vec::new()), |accepted| counts("num_accepted", accepted))?;
        if start_loc.is_none() && tokens.len() != sequences.len() {
            let expected = format!("{}, one per sequence, where no start_loc is given", sequences.len());
            return Err(invalid("token_ids", &expected, &tokens.len().to_string()));
        }
        self.call(|core| core.append_tokens_batch(&sequences, &tokens, &bounds, &accepted))
    }

    /// What a lookup finds for each sequence; nothing is changed. It sees what earlier calls gave to plans in flight, and
    /// nothing of the batch that it is made for: prompts that arrive together share what one of them computes if the
    /// first grows before the others are looked up.
    fn get_computed_blocks_batch(&self, sequences: &Bound<'_, PyAny>) -> PyResult<ComputedBlocksBatch> {
        let sequences = self::sequences("sequences", sequences)?;
        self.call(|core| core.get_computed_blocks_batch(&sequences)).map(ComputedBlocksBatch)
    }

    /// Slots in the newest plan for the next tokens of sequences.
    ///
    /// Parameters
    /// ----------
    /// sequences : array of int64 or sequence of int, shape (num_sequences,)
    ///     The sequences.
    /// num_new_tokens, num_draft_tokens : array or sequence of int, shape (num_sequences,)
    ///     As for `allocate_slots`.
    /// computed : ComputedBlocksBatch, optional
    ///     What `get_computed_blocks_batch` found for the same sequences, with no other change since.
    /// rows : array or sequence of int, shape (num_sequences,), optional
    ///     Rows of the sequences in the caller's block table, for `table_updates`; by default their places in the batch.
    ///
    /// Returns
    /// -------
    /// BatchSlots or None
    ///     None, and nothing changed, if there is no room for all of them; `num_that_fit` says for how many there is.
    #[pyo3(signature = (sequences, num_new_tokens, computed=None, *, num_draft_tokens=None, rows=None))]
    fn allocate_slots_batch(
        &self,
        sequences: &Bound<'_, PyAny>,
        num_new_tokens: &Bound<'_, PyAny>,
        computed: Option<&ComputedBlocksBatch>,
        num_draft_tokens: Option<&Bound<'_, PyAny>>,
        rows: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<BatchSlots>> {
        let wanted = Wanted::read(sequences, num_new_tokens, num_draft_tokens)?;
        let rows = rows.map(|rows| ids("rows", rows)).transpose()?;
        if let Some(rows) = &rows
            && rows.len() != wanted.sequences.len()
        {
            return Err(invalid("rows", &format!("{} entries", wanted.sequences.len()), &rows.len().to_string()));
        }
        let (slots, num_groups) = self.call(|core| {
            let slots = core.allocate_slots_batch(&wanted.growths(computed))?;
            Ok((slots, core.num_groups()))
        })?;
        Ok(slots.map(|slots| BatchSlots { slots, rows, num_groups }))
    }

    /// How many of the sequences, from the first on, `allocate_slots_batch` has room for; nothing is changed.
    #[pyo3(signature = (sequences, num_new_tokens, computed=None, *, num_draft_tokens=None))]
    fn num_that_fit(
        &self,
        sequences: &Bound<'_, PyAny>,
        num_new_tokens: &Bound<'_, PyAny>,
        computed: Option<&ComputedBlocksBatch>,
        num_draft_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let wanted = Wanted::read(sequences, num_new_tokens, num_draft_tokens)?;
        self.call(|core| core.num_that_fit(&wanted.growths(computed)))
    }

    /// Write the block tables of sequences in a cache group into `out`, int32 (num_sequences, columns), the rest of each row
    /// as 0.
    #[pyo3(signature = (sequences, out, group=0))]
    fn write_block_table(
        &self,
        sequences: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = crate::args::usizes::group)] group: usize,
    ) -> PyResult<()> {
        let sequences = self::sequences("sequences", sequences)?;
        let found = out.extract::<PyReadwriteArray2<'_, i32>>();
        let mut out = found.map_err(|_| wrong_type("out", "a writable int32 array of two dimensions", out))?;
        let columns = out.as_array().ncols();
        let out = out.as_slice_mut().map_err(|_| invalid("out", "a contiguous array", "one with gaps"))?;
        self.call(|core| core.write_block_table(&sequences, group, columns, out))
    }

    /// Write the block tables of sequences in a cache group end to end into int32 arrays, as FlashInfer reads them: indptr
    /// (num_sequences + 1,), indices, last_page_len (num_sequences,). Returns how many indices there are.
    #[pyo3(signature = (sequences, indptr, indices, last_page_len, group=0))]
    fn write_csr(
        &self,
        sequences: &Bound<'_, PyAny>,
        indptr: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        last_page_len: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = crate::args::usizes::group)] group: usize,
    ) -> PyResult<usize> {
        let sequences = self::sequences("sequences", sequences)?;
        let (mut indptr, mut indices) = (i32s_mut("indptr", indptr)?, i32s_mut("indices", indices)?);
        let mut last = i32s_mut("last_page_len", last_page_len)?;
        let (indptr, indices) = (contiguous("indptr", &mut indptr)?, contiguous("indices", &mut indices)?);
        let last = contiguous("last_page_len", &mut last)?;
        self.call(|core| core.write_csr(&sequences, group, indptr, indices, last))
    }
}

/// What lookups found for the sequences of a batch.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct ComputedBlocksBatch(Vec<CoreComputed>);

#[pymethods]
impl ComputedBlocksBatch {
    /// Tokens of each sequence that need not be computed, int32 (num_sequences,).
    #[getter]
    fn num_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, self.0.iter().map(|computed| computed.num_tokens() as i32).collect())
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }
}

/// Slots for the tokens of a batch: what a step over its sequences reads, besides the tokens themselves.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct BatchSlots {
    slots: CoreSlots,
    rows: Option<Vec<i32>>,
    num_groups: usize,
}

#[pymethods]
impl BatchSlots {
    /// Where each token's key and value go, int64 (num_groups, num_tokens).
    #[getter]
    fn slot_mapping<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        let num_tokens = self.slots.query_start_loc.last().copied().unwrap_or(0) as usize;
        PyArray1::from_slice(py, &self.slots.slot_mapping).reshape([self.num_groups, num_tokens])
    }

    /// Where each sequence's tokens start, int32 (num_sequences + 1,).
    #[getter]
    fn query_start_loc<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.slots.query_start_loc)
    }

    /// Lengths with these tokens, int32 (num_sequences,).
    #[getter]
    fn seq_lens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyArray1::from_slice(py, &self.slots.seq_lens)
    }

    /// Source and destination of blocks to copy before anything is written, int32 (k, 2).
    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Rows<'py>> {
        table(py, &self.slots.copies)
    }

    /// Group, row, column, block, int32 (k, 4): what changed in the block tables, in the form of a step plan.
    #[getter]
    fn table_updates<'py>(&self, py: Python<'py>) -> PyResult<Rows<'py>> {
        let row = |i: i32| self.rows.as_ref().map_or(i, |rows| rows[i as usize]);
        let updates = self.slots.table_updates.iter().map(|&[group, i, column, block]| [group, row(i), column, block]);
        table(py, &updates.collect::<Vec<_>>())
    }
}
