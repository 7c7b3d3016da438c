//! Integer arrays in and out.

use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadwriteArray1};
use pagedkv_core::SequenceId;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::args::{Number, elements};
use crate::dlpack::import;
use crate::errors::invalid;

/// Token or block ids: an int32 or int64 array of any library, or a sequence of ints. Copied.
pub(crate) fn ids(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    if let Ok(array) = object.cast::<PyArray1<i32>>() {
        // One with gaps is read row by row.
        return array.to_vec().or_else(|_| Ok(object.extract::<PyReadonlyArray1<'_, i32>>()?.as_array().to_vec()));
    }
    if let Ok(array) = object.extract::<PyReadonlyArray1<'_, i64>>() {
        return narrowed(argument, array.as_array().iter().copied());
    }
    if let Ok(list) = object.extract::<Vec<i32>>() {
        return Ok(list);
    }
    if let Some(list) = listed(argument, object)? {
        return Ok(list);
    }
    if object.hasattr("__dlpack__")? && !object.is_instance_of::<numpy::PyUntypedArray>() {
        return imported(argument, object);
    }
    Err(wrong_type(argument, "a one-dimensional int32 or int64 array, or a sequence of ints", object))
}

/// [`ids`] of an argument that may be left out; then there are none.
pub(crate) fn optional_ids(argument: &str, object: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<i32>> {
    object.map_or(Ok(Vec::new()), |object| ids(argument, object))
}

/// Ids of 64 bits: an int64 or int32 array of any library, or a sequence of ints. Copied.
pub(crate) fn longs(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    // An empty array is one whatever its type.
    object.extract::<Vec<i64>>().or_else(|_| wide(argument, object))
}

/// Rows of token ids as one run with their width, where the object is an array of two dimensions.
pub(crate) fn rows(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Option<(Vec<i32>, usize)>> {
    let ndim = object.getattr("ndim").and_then(|ndim| ndim.extract::<usize>());
    if !ndim.is_ok_and(|ndim| ndim == 2) {
        return Ok(None);
    }
    let width = object.getattr("shape")?.get_item(1)?.extract()?;
    let flat = object.call_method1("reshape", (-1,))?;
    ids(argument, &flat).map(|flat| Some((flat, width)))
}

fn imported(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    let tensor = import(argument, object, None)?;
    match tensor.dtype().name() {
        "int32" => crate::cpu_ops::integers::<i32>(argument, object),
        "int64" => narrowed(argument, crate::cpu_ops::integers::<i64>(argument, object)?.into_iter()),
        _ => Err(wrong_type(argument, "dtype int32 or int64", object)),
    }
}

/// Ids of sequences, as an int64 or int32 array of any library, or a sequence of ints.
pub(crate) fn sequences(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<SequenceId>> {
    Ok(wide(argument, object)?.into_iter().map(|id| SequenceId::from_bits(id.cast_unsigned())).collect())
}

/// Numbers of tokens, as an int32 or int64 array of any library, or a sequence of ints.
pub(crate) fn counts(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let count = |(i, count): (usize, i64)| {
        let found = || invalid(&format!("{argument}[{i}]"), "a number from 0 to 2^32 - 1", &count.to_string());
        u32::try_from(count).map_err(|_| found())
    };
    wide(argument, object)?.into_iter().enumerate().map(count).collect()
}

fn wide(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if let Ok(array) = object.extract::<PyReadonlyArray1<'_, i64>>() {
        return Ok(array.as_array().to_vec());
    }
    if let Ok(array) = object.extract::<PyReadonlyArray1<'_, i32>>() {
        return Ok(array.as_array().iter().copied().map(i64::from).collect());
    }
    if let Some(list) = listed(argument, object)? {
        return Ok(list);
    }
    if object.hasattr("__dlpack__")? && !object.is_instance_of::<numpy::PyUntypedArray>() {
        return match import(argument, object, None)?.dtype().name() {
            "int32" => Ok(imported(argument, object)?.into_iter().map(i64::from).collect()),
            "int64" => crate::cpu_ops::integers::<i64>(argument, object),
            _ => Err(wrong_type(argument, "dtype int32 or int64", object)),
        };
    }
    Err(wrong_type(argument, "a one-dimensional int32 or int64 array, or a sequence of ints", object))
}

/// The numbers of a list; arrays are no lists.
fn listed<T: Number>(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<T>>> {
    if object.hasattr("__dlpack__")? { Ok(None) } else { elements(argument, object) }
}

fn narrowed(argument: &str, ids: impl Iterator<Item = i64>) -> PyResult<Vec<i32>> {
    let narrow = |(i, id): (usize, i64)| {
        let found = || invalid(&format!("{argument}[{i}]"), "an id below 2^31", &id.to_string());
        i32::try_from(id).map_err(|_| found())
    };
    ids.enumerate().map(narrow).collect()
}

/// Floating-point numbers of exactly one type, as a NumPy array. Copied, since others may write into it.
pub(crate) fn floats<T: numpy::Element + Copy>(
    argument: &str,
    dtype: &str,
    object: &Bound<'_, PyAny>,
) -> PyResult<Vec<T>> {
    let array = object.extract::<PyReadonlyArray1<'_, T>>();
    let array = array.map_err(|_| wrong_type(argument, &format!("a one-dimensional {dtype} array"), object))?;
    Ok(array.as_array().to_vec())
}

/// Bytes of an object with the buffer protocol. Copied, since others may write into it.
pub(crate) fn bytes(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let found = PyBuffer::<u8>::get(object);
    let buffer = found.map_err(|_| wrong_type(argument, "bytes, or a buffer of unsigned bytes", object))?;
    if !buffer.is_c_contiguous() {
        return Err(invalid(argument, "a contiguous buffer", "one with gaps"));
    }
    buffer.to_vec(object.py())
}

/// An argument of the wrong type.
pub(crate) fn wrong_type(argument: &str, expected: &str, object: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!("{argument}: expected {expected}, found {}", found(object)))
}

fn found(object: &Bound<'_, PyAny>) -> String {
    let kind = object.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string());
    let describe = |attribute: &str| object.getattr(attribute).ok().map(|value| format!(" {attribute} {value}"));
    [Some(kind), describe("dtype"), describe("shape")].into_iter().flatten().collect()
}

/// A one-dimensional int32 array of the caller's to write into.
pub(crate) fn i32s_mut<'py>(argument: &str, object: &Bound<'py, PyAny>) -> PyResult<PyReadwriteArray1<'py, i32>> {
    let array = object.extract::<PyReadwriteArray1<'py, i32>>();
    array.map_err(|_| wrong_type(argument, "a writable int32 array of one dimension", object))
}

pub(crate) fn contiguous<'a>(argument: &str, array: &'a mut PyReadwriteArray1<'_, i32>) -> PyResult<&'a mut [i32]> {
    array.as_slice_mut().map_err(|_| invalid(argument, "a contiguous array", "one with gaps"))
}

pub(crate) fn array<T: numpy::Element>(py: Python<'_>, values: Vec<T>) -> Bound<'_, PyArray1<T>> {
    PyArray1::from_vec(py, values)
}

/// An int32 array of two dimensions.
pub(crate) type Rows<'py> = Bound<'py, PyArray2<i32>>;

/// Rows of a fixed width as an array of two dimensions.
pub(crate) fn table<'py, const N: usize>(py: Python<'py>, rows: &[[i32; N]]) -> PyResult<Rows<'py>> {
    PyArray1::from_slice(py, rows.as_flattened()).reshape([rows.len(), N])
}
