//! From a `Tensor` to a capsule.

use std::sync::Arc;

use dlpark::ffi::{DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::python::{DlpackExporter, ExportAbi, ExportRequest, export_dlpack};
use dlpark::{DlpackFlags, Managed, ManagedTensorBase};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

use super::Tensor;
use super::dtype::to_dlpack;

impl Tensor {
    /// A capsule over the same memory, of the kind that the request asks for.
    pub(super) fn capsule<'py>(&self, py: Python<'py>, request: ExportRequest<'py>) -> PyResult<Py<PyAny>> {
        if self.is_packed_in_part() {
            return Err(self.refuse_packed("export by DLPack"));
        }
        if self.readonly && request.abi() == ExportAbi::Legacy {
            return Err(PyBufferError::new_err(
                "read-only memory leaves only in a versioned capsule: ask with max_version=(1, 0) or later",
            ));
        }
        export_dlpack(self, py, request)
    }

    /// A fresh header over the memory, which the export keeps alive.
    fn header<M: ManagedTensorBase>(&self) -> PyResult<dlpark::allocation::dynamic::Initialized<M>> {
        let mut header = Dynamic::new(&self.shape[..], &self.strides[..])
            .initialize_as::<M>(Arc::clone(&self.owner))
            .map_err(|error| PyBufferError::new_err(error.to_string()))?;
        header.set_data(self.data.0).set_dtype(to_dlpack(self.dtype)).set_device(self.device);
        Ok(header)
    }
}

impl DlpackExporter for Tensor {
    fn device(&self) -> DLDevice {
        self.device
    }

    fn flags(&self) -> DlpackFlags {
        if self.readonly { DlpackFlags::READ_ONLY } else { DlpackFlags::empty() }
    }

    fn prepare_export(&self, _py: Python<'_>, _request: &ExportRequest<'_>) -> PyResult<()> {
        Ok(())
    }

    fn export_legacy(&self, _py: Python<'_>) -> PyResult<Managed<DLManagedTensor>> {
        // SAFETY: the header describes memory that `owner`, which it holds, keeps alive; shape and strides are copied.
        Ok(unsafe { self.header()?.finish() })
    }

    fn export_versioned(&self, _py: Python<'_>) -> PyResult<Managed<DLManagedTensorVersioned>> {
        let mut header = self.header()?;
        header.set_flags(DlpackExporter::flags(self)).map_err(|error| PyBufferError::new_err(error.to_string()))?;
        // SAFETY: as for the unversioned header; the flag says whether the memory may be written.
        Ok(unsafe { header.finish() })
    }
}
