//! The same bytes under another shape and element type.

use pagedkv_cpu::{DType, shape_text};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

use super::{Sizes, Tensor, is_host};
use crate::errors::invalid;

impl Tensor {
    /// Reads the dimensions from `axis` on, which must be one span of memory in order, as `sizes` elements of `dtype`.
    pub(super) fn reinterpreted(&self, axis: usize, sizes: Vec<i64>, dtype: DType, argument: &str) -> PyResult<Self> {
        if axis > self.shape.len() {
            let found = shape_text(&self.shape);
            return Err(PyIndexError::new_err(format!("axis: {axis} is not in shape {found}")));
        }
        if self.is_packed_in_part() {
            return Err(self.refuse_packed("reinterpret"));
        }
        let (from, to) = (self.dtype.size_bytes() as i64, dtype.size_bytes() as i64);
        self.check_span(axis, argument)?;
        self.check_bytes(axis, &sizes, dtype, argument)?;
        let mut part = self.clone();
        part.dtype = dtype;
        part.shape.truncate(axis);
        part.strides.truncate(axis);
        for (stride, size) in part.strides.iter_mut().zip(&part.shape) {
            if *size > 1 && *stride * from % to != 0 {
                let expected = format!("strides of whole elements of {}", dtype.name());
                return Err(invalid(argument, &expected, &format!("strides {}", shape_text(&self.strides))));
            }
            *stride = *stride * from / to;
        }
        if is_host(self.device) && !(self.data.0 as usize).is_multiple_of(to as usize) {
            let expected = format!("memory aligned to {to} bytes");
            return Err(invalid(argument, &expected, &format!("address {:p}", self.data.0)));
        }
        part.strides.extend(contiguous(&sizes));
        part.shape.extend(sizes);
        Ok(part)
    }

    fn check_span(&self, axis: usize, argument: &str) -> PyResult<()> {
        let inner = self.shape[axis..].iter().zip(&self.strides[axis..]).zip(contiguous(&self.shape[axis..]));
        if self.shape.contains(&0) || inner.into_iter().all(|((n, stride), wanted)| *n == 1 || *stride == wanted) {
            return Ok(());
        }
        let expected = format!("one span of memory from dimension {axis} on");
        Err(invalid(argument, &expected, &format!("strides {}", shape_text(&self.strides))))
    }

    fn check_bytes(&self, axis: usize, sizes: &[i64], dtype: DType, argument: &str) -> PyResult<()> {
        let bytes = |sizes: &[i64], dtype: DType| {
            sizes
                .iter()
                .try_fold(dtype.size_bytes() as i64, |bytes, n| if *n < 0 { None } else { bytes.checked_mul(*n) })
        };
        let found = bytes(&self.shape[axis..], self.dtype);
        if found.is_some() && bytes(sizes, dtype) == found {
            return Ok(());
        }
        let expected = format!("the bytes of {} elements of {}", shape_text(sizes), dtype.name());
        let found = format!("{} elements of {}", shape_text(&self.shape[axis..]), self.dtype.name());
        Err(invalid(argument, &expected, &found))
    }
}

fn contiguous(sizes: &[i64]) -> Sizes {
    let mut strides = Sizes::from_elem(1, sizes.len());
    for i in (1..sizes.len()).rev() {
        strides[i - 1] = strides[i] * sizes[i];
    }
    strides
}
