//! From a Python object to a `Tensor`.

use std::fmt::Display;
use std::sync::Arc;

use dlpark::DlpackFlags;
use dlpark::python::{ImportRequest, ImportedDlpack};
use pagedkv_cpu::DType;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;

use super::dtype::{describe, from_dlpack, reads_as};
use super::packed::Packing;
use super::{Address, Sizes, Tensor, is_host};
use crate::errors::invalid;

/// Takes hold of an array, or says what is wrong with the argument of that name.
pub(crate) fn import(argument: &str, object: &Bound<'_, PyAny>, dtype: Option<DType>) -> PyResult<Tensor> {
    if let Ok(tensor) = object.cast::<Tensor>() {
        let mut tensor = tensor.get().clone();
        tensor.dtype = reinterpret(argument, tensor.dtype, dtype)?;
        return Ok(tensor);
    }
    let imported = request(argument, object)?;
    describe_memory(argument, imported, dtype)
}

/// The element type of that name.
pub(crate) fn parse_dtype(name: &str) -> PyResult<DType> {
    DType::from_name(name).ok_or_else(|| invalid("dtype", &format!("one of {}", known_dtypes()), &format!("{name:?}")))
}

fn request(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<ImportedDlpack> {
    let py = object.py();
    if !speaks_dlpack(object)? {
        let found = object.get_type().name()?;
        let message = format!("{argument}: expected an array that speaks DLPack, found {found}");
        return Err(PyTypeError::new_err(message));
    }
    // torch's exchange API hands such tensors out; only its `__dlpack__` refuses them.
    if let Ok(requires_grad) = object.getattr(intern!(py, "requires_grad"))
        && requires_grad.is_truthy()?
    {
        return Err(invalid(argument, "a tensor without gradient", "one that requires grad: detach it"));
    }
    let result = ImportRequest::new(object.as_borrowed()).and_then(|request| request.import(None, None));
    let result = match result {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => request_unversioned(object, error),
        other => other,
    };
    result.map_err(|error| {
        let found = object.get_type().name().map_or_else(|_| "array".to_owned(), |name| name.to_string());
        let found = format!("{found}: {}", error.value(py));
        let refusal = invalid(argument, "an array that gives its memory away", &found);
        refusal.set_cause(py, Some(error));
        refusal
    })
}

fn speaks_dlpack(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    Ok(object.hasattr(intern!(py, "__dlpack__"))? || is_capsule(object))
}

fn is_capsule(object: &Bound<'_, PyAny>) -> bool {
    object.cast::<pyo3::types::PyCapsule>().is_ok()
}

/// Asks again as before `DLPack` 1.0: a producer of that time takes no `max_version`, which shows as a `TypeError`.
fn request_unversioned(object: &Bound<'_, PyAny>, error: PyErr) -> PyResult<ImportedDlpack> {
    match object.call_method0(intern!(object.py(), "__dlpack__")) {
        Ok(capsule) => ImportRequest::new(capsule.as_borrowed())?.import(None, None),
        Err(_) => Err(error),
    }
}

fn describe_memory(argument: &str, imported: ImportedDlpack, dtype: Option<DType>) -> PyResult<Tensor> {
    let refuse = |problem: &dyn Display| invalid(argument, "a sound DLPack header", &problem.to_string());
    let tensor = imported.validate().map_err(|error| refuse(&error))?;
    let stored = from_dlpack(tensor.dtype()).ok_or_else(|| {
        let (expected, found) = (known_dtypes(), describe(tensor.dtype()));
        PyTypeError::new_err(format!("{argument}: expected dtype {expected}, found {found}"))
    })?;
    let dtype = reinterpret(argument, stored, dtype)?;
    let strides = tensor.strides_or_compact().map_err(|error| refuse(&error))?;
    let (shape, strides) = (Sizes::from_slice(tensor.shape()), Sizes::from_slice(&strides));
    // SAFETY: the producer vouches that the offset stays inside its allocation.
    let data = unsafe { tensor.offset_bytes_ptr() }.map_err(|error| refuse(&error))?;
    let device = tensor.device();
    if is_host(device) && tensor.num_elements() > 0 && !(data as usize).is_multiple_of(dtype.size_bytes()) {
        let expected = format!("memory aligned to {} bytes", dtype.size_bytes());
        return Err(invalid(argument, &expected, &format!("address {data:p}")));
    }
    Ok(Tensor {
        data: Address(data.cast_mut().cast()),
        dtype,
        shape,
        strides,
        device,
        readonly: imported.flags().contains(DlpackFlags::READ_ONLY),
        packing: Packing::Nothing,
        owner: Arc::new(imported),
    })
}

fn known_dtypes() -> String {
    let names: Vec<&str> = DType::ALL.into_iter().map(DType::name).collect();
    names.join(", ")
}

fn reinterpret(argument: &str, stored: DType, wanted: Option<DType>) -> PyResult<DType> {
    match wanted {
        None => Ok(stored),
        Some(wanted) if reads_as(stored, wanted) => Ok(wanted),
        Some(wanted) => {
            let (stored, wanted) = (stored.name(), wanted.name());
            let message = format!("{argument}: expected an array that can be read as {wanted}, found dtype {stored}");
            Err(PyTypeError::new_err(message))
        }
    }
}
