//! The work lists of GPU kernels.

use numpy::PyArray1;
use pagedkv_core::device_work::{DeviceBatch, DeviceWork, DeviceWorkOptions};
use pagedkv_core::split_kv::KeySplit;
use pyo3::prelude::*;

use crate::args::{elements, kind};
use crate::arrays::array;
use crate::cpu_ops::integers;
use crate::errors::{invalid, to_py_err};

/// Items for few rows and for many, merges, words of the tree mask, tree depths, and rows of the workspace.
type Lists<'py> = (List<'py>, List<'py>, List<'py>, List<'py>, List<'py>, usize);
type List<'py> = Bound<'py, PyArray1<i32>>;

/// Cuts a batch for the kernels of a GPU; see `pagedkv_core::device_work`.
#[pyfunction]
#[pyo3(signature = (num_kv_heads, group, seq_lens, query_start_loc, num_tokens, table, *, rows=None, sliding_window=None,
                    tree_mask=None, tree_mask_start_loc=None, few_rows, many_rows, num_workers, min_keys=256,
                    fixed_keys=None))]
#[expect(clippy::too_many_arguments, reason = "what a batch is, and what decides where it is cut")]
pub(crate) fn device_work<'py>(
    py: Python<'py>,
    #[pyo3(from_py_with = crate::args::usizes::num_kv_heads)] num_kv_heads: usize,
    #[pyo3(from_py_with = crate::args::usizes::group)] group: usize,
    seq_lens: &Bound<'py, PyAny>,
    query_start_loc: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = crate::args::usizes::num_tokens)] num_tokens: usize,
    #[pyo3(from_py_with = rows_and_tokens)] table: (usize, usize),
    rows: Option<&Bound<'py, PyAny>>,
    #[pyo3(from_py_with = crate::args::optional_usizes::sliding_window)] sliding_window: Option<usize>,
    tree_mask: Option<&Bound<'py, PyAny>>,
    tree_mask_start_loc: Option<&Bound<'py, PyAny>>,
    #[pyo3(from_py_with = crate::args::usizes::few_rows)] few_rows: usize,
    #[pyo3(from_py_with = crate::args::usizes::many_rows)] many_rows: usize,
    #[pyo3(from_py_with = crate::args::usizes::num_workers)] num_workers: usize,
    #[pyo3(from_py_with = crate::args::usizes::min_keys)] min_keys: usize,
    #[pyo3(from_py_with = crate::args::optional_usizes::fixed_keys)] fixed_keys: Option<usize>,
) -> PyResult<Lists<'py>> {
    let counts = [
        ("num_kv_heads", Some(num_kv_heads)),
        ("group", Some(group)),
        ("sliding_window", sliding_window),
        ("few_rows", Some(few_rows)),
        ("many_rows", Some(many_rows)),
        ("num_workers", Some(num_workers)),
        ("min_keys", Some(min_keys)),
        ("fixed_keys", fixed_keys),
    ];
    if let Some((name, _)) = counts.iter().find(|(_, count)| *count == Some(0)) {
        return Err(invalid(name, "at least 1", "0"));
    }
    let seq_lens: Vec<i32> = integers("seq_lens", seq_lens)?;
    let query_start_loc: Vec<i32> = integers("query_start_loc", query_start_loc)?;
    let rows: Option<Vec<i32>> = rows.map(|rows| integers("rows", rows)).transpose()?;
    let trees: Option<(Vec<u8>, Vec<i32>)> = match (tree_mask, tree_mask_start_loc) {
        (Some(bits), Some(starts)) => Some((integers("tree_mask", bits)?, integers("tree_mask_start_loc", starts)?)),
        (None, None) => None,
        _ => return Err(invalid("tree_mask", "tree_mask and tree_mask_start_loc together", "one of the two")),
    };
    let batch = DeviceBatch {
        seq_lens: &seq_lens,
        query_start_loc: &query_start_loc,
        rows: rows.as_deref(),
        tree_mask: trees.as_ref().map(|(bits, starts)| (bits.as_slice(), starts.as_slice())),
        num_tokens,
        table,
    };
    let split = fixed_keys.map_or(KeySplit::Balanced { min_keys }, KeySplit::Fixed);
    let options = DeviceWorkOptions { num_kv_heads, group, sliding_window, few_rows, many_rows, split, num_workers };
    let work = DeviceWork::new(&batch, &options).map_err(to_py_err)?;
    let [few, many, merges, mask, depths] =
        [work.few, work.many, work.merges, work.tree_mask, work.tree_depths].map(|list| array(py, list));
    Ok((few, many, merges, mask, depths, work.num_partial_rows))
}

/// The rows of a block table, and the tokens that one has room for.
fn rows_and_tokens(object: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
    match elements("table", object)?.as_deref() {
        Some([rows, tokens]) => Ok((*rows, *tokens)),
        _ => Err(invalid("table", "two integers: its rows, and the tokens of a row", &kind(object))),
    }
}
