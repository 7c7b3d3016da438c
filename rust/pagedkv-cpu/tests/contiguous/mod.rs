//! Views of slices, row after row.

use std::ffi::c_void;

use pagedkv_cpu::{DType, View};

/// A view of the whole slice.
pub(crate) fn view<T, const N: usize>(data: &mut [T], dtype: DType, shape: [usize; N]) -> View<N> {
    assert_eq!(std::mem::size_of_val(data), shape.iter().product::<usize>() * dtype.size_bytes());
    let mut strides = [1; N];
    for i in (1..N).rev() {
        strides[i - 1] = strides[i] * shape[i] as i64;
    }
    // SAFETY: the slice covers the shape and outlives every use in these tests.
    unsafe { View::new(data.as_mut_ptr().cast::<c_void>(), dtype, shape, strides) }
}
