//! Arrays of other libraries, in and out by `DLPack`, without copies.
//!
//! The protocol itself (capsules, the C exchange API, deleters) is the `dlpark` crate's; what it leaves open is here:
//! producers that know no `max_version`, element types a library has no name for, and errors that name the argument.

mod dtype;
mod export;
mod import;
mod packed;
mod reinterpret;

pub(crate) use import::{import, parse_dtype};

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use dlpark::ffi::{DLDevice, DLDeviceType};
use dlpark::python::{ExportRequest, ImportedDlpack};
use pagedkv_cpu::{DType, View, are_distinct, extent, shape_text};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use smallvec::SmallVec;

use crate::errors::invalid;
use packed::Packing;

type Sizes = SmallVec<[i64; 6]>;

/// An address inside memory that its owner keeps alive.
#[derive(Clone, Copy)]
struct Address(*mut c_void);

// SAFETY: an address does nothing by itself; the operations that follow it give distinct elements to distinct threads.
unsafe impl Send for Address {}
// SAFETY: as for `Send`.
unsafe impl Sync for Address {}

/// An array of another library, held by `DLPack`.
///
/// The memory stays alive as long as this object, a selection from it or an export of it does. Operations take it like
/// any other array, without importing it again.
#[pyclass(frozen, module = "pagedkv._core", name = "Tensor")]
#[derive(Clone)]
pub(crate) struct Tensor {
    owner: Arc<ImportedDlpack>,
    data: Address,
    dtype: DType,
    shape: Sizes,
    strides: Sizes,
    device: DLDevice,
    readonly: bool,
    packing: Packing,
}

impl Tensor {
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The view of an input, or the reason why the operations of the CPU cannot read it.
    pub(crate) fn view<const N: usize>(&self, argument: &str, dims: [&str; N]) -> PyResult<View<N>> {
        if !is_host(self.device) {
            let found = format!("device {}", device_name(self.device));
            return Err(invalid(argument, "memory on the cpu", &found));
        }
        let (Ok(shape), Ok(strides)) = (self.shape[..].try_into(), self.strides[..].try_into()) else {
            let expected = format!("shape {}", shape_text(&dims));
            return Err(invalid(argument, &expected, &shape_text(&self.shape)));
        };
        let shape: [i64; N] = shape;
        // SAFETY: the producer vouches for shape and strides (sizes were checked to be 0 or more), `import` checked the
        // alignment, and `owner` keeps the memory while callers hold the tensor.
        let view = unsafe { View::new(self.data.0, self.dtype, shape.map(|n| n as usize), strides) };
        Ok(if self.is_packed_in_part() { view.packed() } else { view })
    }

    /// The view of an output; read-only memory is refused.
    pub(crate) fn view_mut<const N: usize>(&self, argument: &str, dims: [&str; N]) -> PyResult<View<N>> {
        if self.readonly {
            return Err(invalid(argument, "writable memory", "a read-only array"));
        }
        self.view(argument, dims)
    }
}

impl Tensor {
    fn sizes(&self) -> SmallVec<[usize; 6]> {
        self.shape.iter().map(|n| *n as usize).collect()
    }

    fn extent(&self) -> Range<usize> {
        extent(self.data.0 as usize, &self.sizes(), &self.strides, self.dtype.size_bytes())
    }
}

#[pymethods]
impl Tensor {
    /// Elements in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.shape.iter())
    }

    /// Elements between neighbours in each dimension.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.strides.iter())
    }

    /// Name of the element type.
    #[getter(dtype)]
    fn dtype_name(&self) -> &'static str {
        self.dtype.name()
    }

    /// Name of the device, such as "cpu" or "cuda:0".
    #[getter]
    fn device(&self) -> String {
        device_name(self.device)
    }

    /// Whether the memory must not be written.
    #[getter]
    fn readonly(&self) -> bool {
        self.readonly
    }

    /// Whether keys in it are packed: operations of the cache take it, and no other library does.
    #[getter]
    fn is_packed(&self) -> bool {
        self.is_packed_in_part()
    }

    /// The same memory as a pool, `(..., 2, num_kv_heads, block_size, head_dim)`, whose keys are packed.
    fn packed(&self) -> PyResult<Self> {
        self.as_packed()
    }

    /// The part at `index` of dimension `axis`, without that dimension; it shares the memory.
    fn select(
        &self,
        #[pyo3(from_py_with = crate::args::usizes::axis)] axis: usize,
        #[pyo3(from_py_with = crate::args::i64s::index)] index: i64,
    ) -> PyResult<Self> {
        let Some(size) = self.shape.get(axis).copied() else {
            let found = shape_text(&self.shape);
            return Err(PyIndexError::new_err(format!("axis: {axis} is not in shape {found}")));
        };
        if !(0..size).contains(&index) {
            let message = format!("index: expected 0 to {}, found {index}", size - 1);
            return Err(PyIndexError::new_err(message));
        }
        let mut part = self.clone();
        part.packing = self.packing_of_part(axis, index)?;
        part.shape.remove(axis);
        let offset = index * part.strides.remove(axis);
        let bytes = offset as isize * self.dtype.size_bytes() as isize;
        part.data = Address(self.data.0.wrapping_byte_offset(bytes));
        Ok(part)
    }

    /// Whether its elements surely lie at distinct addresses, as those of an array that is written must.
    #[getter]
    fn is_distinct(&self) -> bool {
        are_distinct(&self.sizes(), &self.strides)
    }

    /// Whether another array begins before this one ends, and ends after this one begins.
    fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.extent(), other.extent());
        let is_one_space = (is_host(self.device) && is_host(other.device)) || self.device == other.device;
        is_one_space && a.start.max(b.start) < a.end.min(b.end)
    }

    /// The same memory with the dimensions from `axis` on, which lie in one span, as `sizes` elements of type `dtype`.
    ///
    /// Errors call the array `argument`.
    #[pyo3(signature = (axis, sizes, dtype, *, argument="tensor"))]
    fn reinterpret(
        &self,
        #[pyo3(from_py_with = crate::args::usizes::axis)] axis: usize,
        sizes: Vec<i64>,
        dtype: &str,
        argument: &str,
    ) -> PyResult<Self> {
        self.reinterpreted(axis, sizes, parse_dtype(dtype)?, argument)
    }

    /// A capsule over the same memory: versioned if `max_version` allows it, else of the kind before `DLPack` 1.0.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        self.capsule(py, ExportRequest::parse(stream, max_version, dl_device, copy)?)
    }

    fn __dlpack_device__(&self) -> (u32, i32) {
        self.device.into()
    }

    fn __repr__(&self) -> String {
        self.description()
    }
}

impl Tensor {
    fn description(&self) -> String {
        let (shape, dtype) = (shape_text(&self.shape), self.dtype.name());
        let readonly = if self.readonly { ", readonly" } else { "" };
        let packed = if self.is_packed_in_part() { ", packed keys" } else { "" };
        format!("Tensor(shape={shape}, dtype={dtype}, device={}{readonly}{packed})", device_name(self.device))
    }
}

/// Imports an array that speaks `DLPack`.
///
/// `dtype` names the element type where its library has none of that name; errors call the array `argument`.
#[pyfunction]
#[pyo3(signature = (obj, dtype=None, *, argument="obj"))]
pub(crate) fn from_dlpack(obj: &Bound<'_, PyAny>, dtype: Option<&str>, argument: &str) -> PyResult<Tensor> {
    import(argument, obj, dtype.map(parse_dtype).transpose()?)
}

/// Whether the CPU can follow the device's addresses; page-locked memory is ordinary memory to it.
fn is_host(device: DLDevice) -> bool {
    matches!(device.device_type, DLDeviceType::CPU | DLDeviceType::CUDAHOST | DLDeviceType::ROCMHOST)
}

fn device_name(device: DLDevice) -> String {
    let kind = match device.device_type {
        DLDeviceType::CPU => return "cpu".to_owned(),
        DLDeviceType::CUDAHOST => return "cpu (page-locked by cuda)".to_owned(),
        DLDeviceType::ROCMHOST => return "cpu (page-locked by rocm)".to_owned(),
        DLDeviceType::CUDA => "cuda",
        DLDeviceType::CUDAMANAGED => "cuda managed",
        DLDeviceType::ROCM => "rocm",
        DLDeviceType::METAL => "metal",
        DLDeviceType::ONEAPI => "oneapi",
        other => return format!("DLPack device type {}:{}", other.0, device.device_id),
    };
    format!("{kind}:{}", device.device_id)
}
