//! Integer arrays in and out.

use numpy::{PyArray1, PyReadonlyArray1, PyReadwriteArray1};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::dlpack::import;
use crate::errors::invalid;

/// Token or block ids: an int32 or int64 array of any library, or a sequence of ints. Copied.
pub(crate) fn ids(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    if let Ok(array) = object.extract::<PyReadonlyArray1<'_, i32>>() {
        return Ok(match array.as_slice() {
            Ok(slice) => slice.to_vec(),
            Err(_) => array.as_array().to_vec(),
        });
    }
    if let Ok(array) = object.extract::<PyReadonlyArray1<'_, i64>>() {
        return array.as_array().iter().map(|&id| narrow(argument, id)).collect();
    }
    if let Ok(list) = object.extract::<Vec<i32>>() {
        return Ok(list);
    }
    if object.hasattr("__dlpack__")? && !object.is_instance_of::<numpy::PyUntypedArray>() {
        return imported(argument, object);
    }
    Err(wrong_type(argument, "a one-dimensional int32 or int64 array, or a sequence of ints", object))
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
        "int64" => {
            let wide = crate::cpu_ops::integers::<i64>(argument, object)?;
            wide.into_iter().map(|id| narrow(argument, id)).collect()
        }
        _ => Err(wrong_type(argument, "dtype int32 or int64", object)),
    }
}

fn narrow(argument: &str, id: i64) -> PyResult<i32> {
    i32::try_from(id).map_err(|_| invalid(argument, "ids below 2^31", &id.to_string()))
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
