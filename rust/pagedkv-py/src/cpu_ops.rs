//! The operations of the CPU as functions: import the arrays, let go of the interpreter, call.

use pagedkv_cpu::{BLOCK_TABLE, CACHE, Error, GROUPED_BLOCK_TABLE, Integer, KEYS, POOL, Scales, VALUES_OUT, View};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::dlpack::{Tensor, import};
use crate::errors::invalid;

const NUM_THREADS: &str = "PAGEDKV_NUM_THREADS";

/// Writes keys and values of new tokens into their slots; see `pagedkv_cpu::append_kv`.
#[pyfunction]
#[pyo3(signature = (k, v, k_cache, v_cache, slot_mapping, *, k_scale=None, v_scale=None, num_threads=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the operation in every language")]
pub(crate) fn append_kv(
    py: Python<'_>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    k_cache: &Bound<'_, PyAny>,
    v_cache: &Bound<'_, PyAny>,
    slot_mapping: &Bound<'_, PyAny>,
    k_scale: Option<&Bound<'_, PyAny>>,
    v_scale: Option<&Bound<'_, PyAny>>,
    #[pyo3(from_py_with = crate::args::optional_usizes::num_threads)] num_threads: Option<usize>,
) -> PyResult<()> {
    let (k, v) = (array("k", k)?, array("v", v)?);
    let (k_cache, v_cache) = (array("k_cache", k_cache)?, array("v_cache", v_cache)?);
    let slots: Vec<i64> = integers("slot_mapping", slot_mapping)?;
    let (k_scale, v_scale) = (optional("k_scale", k_scale)?, optional("v_scale", v_scale)?);
    let (scales, threads) = (scales(k_scale.as_ref(), v_scale.as_ref())?, threads(py, num_threads)?);
    let (k_view, v_view) = (k.view("k", KEYS)?, v.view("v", KEYS)?);
    let (k_to, v_to) = (k_cache.view_mut("k_cache", CACHE)?, v_cache.view_mut("v_cache", CACHE)?);
    py.detach(|| pagedkv_cpu::append_kv(&k_view, &v_view, &k_to, &v_to, &slots, &scales, threads)).map_err(to_py_err)
}

/// Copies whole blocks over all layers; see `pagedkv_cpu::copy_blocks`.
#[pyfunction]
#[pyo3(signature = (pool, pairs, *, num_threads=None))]
pub(crate) fn copy_blocks(
    py: Python<'_>,
    pool: &Bound<'_, PyAny>,
    pairs: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = crate::args::optional_usizes::num_threads)] num_threads: Option<usize>,
) -> PyResult<()> {
    let pool = array("pool", pool)?;
    let pairs: Vec<[i32; 2]> = records("pairs", pairs)?;
    let threads = threads(py, num_threads)?;
    let view = pool.view_mut("pool", POOL)?;
    py.detach(|| pagedkv_cpu::copy_blocks(&view, &pairs, threads)).map_err(to_py_err)
}

/// Moves single tokens over all layers; see `pagedkv_cpu::move_kv`.
#[pyfunction]
#[pyo3(signature = (pool, slot_moves, group=0, *, num_threads=None))]
pub(crate) fn move_kv(
    py: Python<'_>,
    pool: &Bound<'_, PyAny>,
    slot_moves: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = crate::args::i64s::group)] group: i64,
    #[pyo3(from_py_with = crate::args::optional_usizes::num_threads)] num_threads: Option<usize>,
) -> PyResult<()> {
    let pool = array("pool", pool)?;
    let moves: Vec<[i64; 3]> = records("slot_moves", slot_moves)?;
    let threads = threads(py, num_threads)?;
    let view = pool.view_mut("pool", POOL)?;
    py.detach(|| pagedkv_cpu::move_kv(&view, &moves, group, threads)).map_err(to_py_err)
}

/// Copies whole blocks over all layers between two pools; see `pagedkv_cpu::swap_blocks`.
#[pyfunction]
#[pyo3(signature = (source, destination, pairs, *, num_threads=None))]
pub(crate) fn swap_blocks(
    py: Python<'_>,
    source: &Bound<'_, PyAny>,
    destination: &Bound<'_, PyAny>,
    pairs: &Bound<'_, PyAny>,
    num_threads: Option<usize>,
) -> PyResult<()> {
    let (source, destination) = (array("source", source)?, array("destination", destination)?);
    let pairs: Vec<[i32; 2]> = records("pairs", pairs)?;
    let threads = threads(py, num_threads)?;
    let (from, to) = (source.view("source", POOL)?, destination.view_mut("destination", POOL)?);
    py.detach(|| pagedkv_cpu::swap_blocks(&from, &to, &pairs, threads)).map_err(to_py_err)
}

/// Collects whole sequences into contiguous arrays; see `pagedkv_cpu::gather_kv`.
#[pyfunction]
#[pyo3(signature = (k_cache, v_cache, block_table, seq_lens, k_out, v_out, rows=None, *, k_scale=None, v_scale=None,
                    num_threads=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the operation in every language")]
pub(crate) fn gather_kv(
    py: Python<'_>,
    k_cache: &Bound<'_, PyAny>,
    v_cache: &Bound<'_, PyAny>,
    block_table: &Bound<'_, PyAny>,
    seq_lens: &Bound<'_, PyAny>,
    k_out: &Bound<'_, PyAny>,
    v_out: &Bound<'_, PyAny>,
    rows: Option<&Bound<'_, PyAny>>,
    k_scale: Option<&Bound<'_, PyAny>>,
    v_scale: Option<&Bound<'_, PyAny>>,
    #[pyo3(from_py_with = crate::args::optional_usizes::num_threads)] num_threads: Option<usize>,
) -> PyResult<()> {
    let (k_cache, v_cache) = (array("k_cache", k_cache)?, array("v_cache", v_cache)?);
    let (k_out, v_out) = (array("k_out", k_out)?, array("v_out", v_out)?);
    let block_table = array("block_table", block_table)?;
    let seq_lens: Vec<i32> = integers("seq_lens", seq_lens)?;
    let rows: Option<Vec<i32>> = rows.map(|rows| integers("rows", rows)).transpose()?;
    let (k_scale, v_scale) = (optional("k_scale", k_scale)?, optional("v_scale", v_scale)?);
    let (scales, threads) = (scales(k_scale.as_ref(), v_scale.as_ref())?, threads(py, num_threads)?);
    let (k_from, v_from) = (k_cache.view("k_cache", CACHE)?, v_cache.view("v_cache", CACHE)?);
    let table = block_table.view("block_table", BLOCK_TABLE)?;
    let (k_to, v_to) = (k_out.view_mut("k_out", VALUES_OUT)?, v_out.view_mut("v_out", VALUES_OUT)?);
    let rows = rows.as_deref();
    py.detach(|| pagedkv_cpu::gather_kv(&k_from, &v_from, &table, rows, &seq_lens, &k_to, &v_to, &scales, threads))
        .map_err(to_py_err)
}

/// Tokens that `gather_kv` would collect, lengths and blocks checked; see `pagedkv_cpu::num_gathered_tokens`.
#[pyfunction]
#[pyo3(signature = (k_cache, block_table, seq_lens, rows=None))]
pub(crate) fn num_gathered_tokens(
    k_cache: &Bound<'_, PyAny>,
    block_table: &Bound<'_, PyAny>,
    seq_lens: &Bound<'_, PyAny>,
    rows: Option<&Bound<'_, PyAny>>,
) -> PyResult<usize> {
    let (k_cache, block_table) = (array("k_cache", k_cache)?, array("block_table", block_table)?);
    let seq_lens: Vec<i32> = integers("seq_lens", seq_lens)?;
    let rows: Option<Vec<i32>> = rows.map(|rows| integers("rows", rows)).transpose()?;
    let (cache, table) = (k_cache.view("k_cache", CACHE)?, block_table.view("block_table", BLOCK_TABLE)?);
    pagedkv_cpu::num_gathered_tokens(&cache, &table, rows.as_deref(), &seq_lens).map_err(to_py_err)
}

/// Writes (group, row, column, block) cells of a cache of `num_blocks`; see `pagedkv_cpu::update_block_table`.
#[pyfunction]
pub(crate) fn update_block_table(
    py: Python<'_>,
    block_table: &Bound<'_, PyAny>,
    table_updates: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = crate::args::usizes::num_blocks)] num_blocks: usize,
) -> PyResult<()> {
    let block_table = array("block_table", block_table)?;
    let updates: Vec<[i32; 4]> = records("table_updates", table_updates)?;
    let view = block_table.view_mut("block_table", GROUPED_BLOCK_TABLE)?;
    py.detach(|| pagedkv_cpu::update_block_table(&view, &updates, num_blocks)).map_err(to_py_err)
}

/// Threads that the operations use where the caller names no number.
///
/// The environment variable `PAGEDKV_NUM_THREADS` decides, else torch if it is imported, else the CPUs of the process.
#[pyfunction]
pub(crate) fn default_num_threads(py: Python<'_>) -> PyResult<usize> {
    static MODULES: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if let Some(value) = std::env::var_os(NUM_THREADS) {
        let found = value.to_string_lossy().into_owned();
        return match found.parse() {
            Ok(threads) if threads > 0 => Ok(threads),
            _ => Err(invalid(NUM_THREADS, "a number above 0", &format!("{found:?}"))),
        };
    }
    let modules = MODULES.get_or_try_init(py, || py.import("sys")?.getattr("modules").map(Bound::unbind))?;
    let torch = modules.bind(py).call_method1(intern!(py, "get"), (intern!(py, "torch"),))?;
    if torch.is_none() {
        return Ok(std::thread::available_parallelism().map_or(1, usize::from));
    }
    torch.call_method0(intern!(py, "get_num_threads"))?.extract()
}

pub(crate) fn threads(py: Python<'_>, asked: Option<usize>) -> PyResult<usize> {
    match asked {
        None => default_num_threads(py),
        Some(0) => Err(invalid("num_threads", "a number above 0", "0")),
        Some(threads) => Ok(threads),
    }
}

pub(crate) fn array(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    import(argument, object, None)
}

/// As `array`, of an argument that may be left out.
pub(crate) fn optional(argument: &str, object: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Tensor>> {
    object.map(|object| array(argument, object)).transpose()
}

/// One number per head, or one for all.
pub(crate) fn per_head(argument: &str, tensor: Option<&Tensor>, heads: &str) -> PyResult<Option<View<1>>> {
    tensor.map(|tensor| tensor.view(argument, [heads])).transpose()
}

fn scales(k_scale: Option<&Tensor>, v_scale: Option<&Tensor>) -> PyResult<Scales> {
    let k = per_head("k_scale", k_scale, "num_kv_heads")?;
    Ok(Scales { k, v: per_head("v_scale", v_scale, "num_kv_heads")? })
}

/// The elements of a one-dimensional index array, copied: checked values must not change under a running operation.
pub(crate) fn integers<T: Integer>(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<T>> {
    let tensor = array(argument, object)?;
    check_integers::<T>(argument, &tensor)?;
    let view = tensor.view(argument, ["n"])?;
    Ok((0..view.shape()[0]).map(|i| view.get([i])).collect())
}

/// The rows of a two-dimensional index array with `N` columns, copied.
fn records<T: Integer, const N: usize>(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<[T; N]>> {
    let tensor = array(argument, object)?;
    check_integers::<T>(argument, &tensor)?;
    let columns = N.to_string();
    let view = tensor.view(argument, ["n", &columns])?;
    if view.shape()[1] != N {
        let [rows, found] = view.shape();
        return Err(invalid(argument, &format!("shape (n, {N})"), &format!("({rows}, {found})")));
    }
    let record = |i: usize| std::array::from_fn(|j| view.get([i, j]));
    Ok((0..view.shape()[0]).map(record).collect())
}

fn check_integers<T: Integer>(argument: &str, tensor: &Tensor) -> PyResult<()> {
    if tensor.dtype() == T::DTYPE {
        return Ok(());
    }
    let (expected, found) = (T::DTYPE.name(), tensor.dtype().name());
    Err(PyTypeError::new_err(format!("{argument}: expected dtype {expected}, found {found}")))
}

#[expect(clippy::needless_pass_by_value, reason = "map_err hands it over by value")]
pub(crate) fn to_py_err(error: Error) -> PyErr {
    if let Error::DType { .. } = error {
        return PyTypeError::new_err(error.to_string());
    }
    let (argument, expected, found) = error.parts();
    invalid(&argument, &expected, &found)
}
