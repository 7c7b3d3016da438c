//! Events of the prefix cache.

use numpy::PyArray1;
use pagedkv_core::events::MEDIUM_GPU;
use pagedkv_core::{self as core, BlockHash, ExtraKey, KVCacheEvent};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::arrays::array;
use crate::chain_hash::hash_list;
use crate::getters::getters;

/// Blocks that can be hit: each continues the one before. Fields are those of vLLM's event of this name.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct BlockStored(core::BlockStored);

/// Blocks that cannot be hit any more.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct BlockRemoved(core::BlockRemoved);

/// No block can be hit any more.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct AllBlocksCleared;

fn hash<'py>(py: Python<'py>, hash: &BlockHash, external: bool) -> PyResult<Bound<'py, PyAny>> {
    if external { hash.to_u64().into_bound_py_any(py) } else { PyBytes::new(py, hash.as_bytes()).into_bound_py_any(py) }
}

/// A string where the bytes are UTF-8, as they are hashed.
fn text<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into_bound_py_any(py),
        Err(_) => PyBytes::new(py, bytes).into_bound_py_any(py),
    }
}

fn extra_key<'py>(py: Python<'py>, key: &ExtraKey) -> PyResult<Bound<'py, PyAny>> {
    match key {
        ExtraKey::Lora(lora) => lora.name.as_str().into_bound_py_any(py),
        ExtraKey::LoraId(id) => id.into_bound_py_any(py),
        ExtraKey::Image { digest, offset } => (text(py, digest)?, offset).into_bound_py_any(py),
        ExtraKey::CacheSalt(salt) => text(py, salt),
    }
}

getters!(BlockStored.0 {
    block_size: u32;
    lora_id: Option<i64>;
    lora_name: Option<&str> = |stored| stored.lora_name.as_deref();
    group_idx: u32;
    kv_cache_spec_kind: &'static str = |stored| spec_kind(stored.sliding_window);
    kv_cache_spec_sliding_window: Option<u32> = |stored| stored.sliding_window;
});

const fn spec_kind(sliding_window: Option<u32>) -> &'static str {
    if sliding_window.is_some() { "sliding_window" } else { "full_attention" }
}

#[pymethods]
impl BlockStored {
    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        hash_list(py, &self.0.block_hashes, false)
    }

    /// Of the block before the first of them; None at the start of a prefix.
    #[getter]
    fn parent_block_hash<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.0.parent_block_hash.as_ref().map(|parent| hash(py, parent, false)).transpose()
    }

    /// Tokens of all of them, int32, `block_size` each.
    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        array(py, self.0.token_ids.clone())
    }

    #[getter]
    #[expect(clippy::unused_self, reason = "a property of Python")]
    fn medium(&self) -> &'static str {
        MEDIUM_GPU
    }

    /// What went into each hash besides tokens, one entry per block: the adapter's name (its number if it has none),
    /// (digest, offset) of images, the salt; None for plain text.
    #[getter]
    fn extra_keys<'py>(&self, py: Python<'py>) -> PyResult<Vec<Option<Bound<'py, PyTuple>>>> {
        let entry = |keys: &Vec<ExtraKey>| {
            let keys = keys.iter().map(|key| extra_key(py, key)).collect::<PyResult<Vec<_>>>()?;
            if keys.is_empty() { Ok(None) } else { PyTuple::new(py, keys).map(Some) }
        };
        self.0.extra_keys.iter().map(entry).collect()
    }

    /// The event as the map that vLLM's subscribers read.
    ///
    /// Parameters
    /// ----------
    /// external : bool
    ///     Hashes as unsigned 64-bit numbers, as vLLM sends them unless told otherwise; else as bytes.
    #[pyo3(signature = (*, external=true))]
    fn as_dict<'py>(&self, py: Python<'py>, external: bool) -> PyResult<Bound<'py, PyDict>> {
        let stored = &self.0;
        let parent = stored.parent_block_hash.as_ref().map(|parent| hash(py, parent, external)).transpose()?;
        let map = PyDict::new(py);
        map.set_item("type", "BlockStored")?;
        map.set_item("block_hashes", hash_list(py, &stored.block_hashes, external)?)?;
        map.set_item("parent_block_hash", parent)?;
        map.set_item("token_ids", &stored.token_ids)?;
        map.set_item("block_size", stored.block_size)?;
        map.set_item("lora_id", stored.lora_id)?;
        map.set_item("medium", MEDIUM_GPU)?;
        map.set_item("lora_name", &stored.lora_name)?;
        map.set_item("extra_keys", self.extra_keys(py)?)?;
        map.set_item("group_idx", stored.group_idx)?;
        map.set_item("kv_cache_spec_kind", self.kv_cache_spec_kind())?;
        if let Some(window) = stored.sliding_window {
            map.set_item("kv_cache_spec_sliding_window", window)?;
        }
        Ok(map)
    }

    fn __repr__(&self) -> String {
        format!("BlockStored({} blocks, group_idx={})", self.0.block_hashes.len(), self.0.group_idx)
    }
}

#[pymethods]
impl BlockRemoved {
    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        hash_list(py, &self.0.block_hashes, false)
    }

    #[getter]
    #[expect(clippy::unused_self, reason = "a property of Python")]
    fn medium(&self) -> &'static str {
        MEDIUM_GPU
    }

    #[getter]
    fn group_idx(&self) -> u32 {
        self.0.group_idx
    }

    /// The event as the map that vLLM's subscribers read; `external` as in `BlockStored.as_dict`.
    #[pyo3(signature = (*, external=true))]
    fn as_dict<'py>(&self, py: Python<'py>, external: bool) -> PyResult<Bound<'py, PyDict>> {
        let map = PyDict::new(py);
        map.set_item("type", "BlockRemoved")?;
        map.set_item("block_hashes", hash_list(py, &self.0.block_hashes, external)?)?;
        map.set_item("medium", MEDIUM_GPU)?;
        map.set_item("group_idx", self.0.group_idx)?;
        Ok(map)
    }

    fn __repr__(&self) -> String {
        format!("BlockRemoved({} blocks, group_idx={})", self.0.block_hashes.len(), self.0.group_idx)
    }
}

#[pymethods]
impl AllBlocksCleared {
    /// The event as the map that vLLM's subscribers read.
    #[pyo3(signature = (*, external=true))]
    #[expect(clippy::unused_self, reason = "a method of Python")]
    fn as_dict<'py>(&self, py: Python<'py>, external: bool) -> PyResult<Bound<'py, PyDict>> {
        let _ = external;
        let map = PyDict::new(py);
        map.set_item("type", "AllBlocksCleared")?;
        Ok(map)
    }

    #[expect(clippy::unused_self, reason = "a method of Python")]
    fn __repr__(&self) -> &'static str {
        "AllBlocksCleared()"
    }
}

fn objects(py: Python<'_>, events: Vec<KVCacheEvent>) -> PyResult<Py<PyList>> {
    let object = |event| match event {
        KVCacheEvent::BlockStored(stored) => BlockStored(stored).into_bound_py_any(py),
        KVCacheEvent::BlockRemoved(removed) => BlockRemoved(removed).into_bound_py_any(py),
        KVCacheEvent::AllBlocksCleared => AllBlocksCleared.into_bound_py_any(py),
    };
    let events = events.into_iter().map(object).collect::<PyResult<Vec<_>>>()?;
    PyList::new(py, events).map(Bound::unbind)
}

/// Events of a prefix cache since the last batch, in order.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct KVEventBatch {
    sequence_number: u64,
    num_lost: u64,
    events: Py<PyList>,
}

impl KVEventBatch {
    pub(crate) fn new(py: Python<'_>, batch: core::KVEventBatch) -> PyResult<Self> {
        let core::KVEventBatch { sequence_number, events, num_lost } = batch;
        Ok(Self { sequence_number, num_lost, events: objects(py, events)? })
    }
}

#[pymethods]
impl KVEventBatch {
    /// Number of the first event; the others follow.
    #[getter]
    fn sequence_number(&self) -> u64 {
        self.sequence_number
    }

    /// Events right before the first that were dropped because nobody took them. Where there are any, the batch starts
    /// with AllBlocksCleared and tells everything that can be hit.
    #[getter]
    fn num_lost(&self) -> u64 {
        self.num_lost
    }

    #[getter]
    fn events(&self, py: Python<'_>) -> Py<PyList> {
        self.events.clone_ref(py)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let num_events = self.events.bind(py).len();
        format!("KVEventBatch(sequence_number={}, {num_events} events)", self.sequence_number)
    }
}

/// What of a prefix cache can be hit, for who joins late.
#[pyclass(frozen, module = "pagedkv._core")]
pub(crate) struct KVCacheSnapshot {
    next_sequence_number: u64,
    events: Py<PyList>,
}

impl KVCacheSnapshot {
    pub(crate) fn new(py: Python<'_>, snapshot: core::KVCacheSnapshot) -> PyResult<Self> {
        let core::KVCacheSnapshot { events, next_sequence_number } = snapshot;
        Ok(Self { next_sequence_number, events: objects(py, events)? })
    }
}

#[pymethods]
impl KVCacheSnapshot {
    /// Number of the first event that is not in it.
    #[getter]
    fn next_sequence_number(&self) -> u64 {
        self.next_sequence_number
    }

    /// Events that build the present state from nothing.
    #[getter]
    fn events(&self, py: Python<'_>) -> Py<PyList> {
        self.events.clone_ref(py)
    }
}
