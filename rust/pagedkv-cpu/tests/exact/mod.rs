//! Arrays in memory of their own and of exactly their size: `AddressSanitizer` sees a byte too many, and valgrind the use
//! of one that was not written.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use pagedkv_cpu::{DType, View};

/// An array, row after row, that holds nothing at first.
pub(crate) struct Exact<const N: usize> {
    memory: Box<[MaybeUninit<u8>]>,
    dtype: DType,
    shape: [usize; N],
}

impl<const N: usize> Exact<N> {
    pub(crate) fn new(dtype: DType, shape: [usize; N]) -> Self {
        let memory = Box::new_uninit_slice(shape.iter().product::<usize>() * dtype.size_bytes());
        assert!(memory.as_ptr().addr().is_multiple_of(dtype.size_bytes()), "an allocator that aligns to words");
        Self { memory, dtype, shape }
    }

    /// One that is full.
    pub(crate) fn of(dtype: DType, shape: [usize; N], bytes: &[u8]) -> Self {
        let mut array = Self::new(dtype, shape);
        assert_eq!(bytes.len(), array.memory.len());
        array.write([0; N], bytes);
        array
    }

    /// Writes elements from `index` on.
    pub(crate) fn write(&mut self, index: [usize; N], bytes: &[u8]) {
        let element = index.iter().zip(self.shape).fold(0, |at, (i, n)| at * n + i);
        let start = element * self.dtype.size_bytes();
        for (cell, byte) in self.memory[start..start + bytes.len()].iter_mut().zip(bytes) {
            cell.write(*byte);
        }
    }

    pub(crate) fn view(&mut self) -> View<N> {
        let mut strides = [1; N];
        for i in (1..N).rev() {
            strides[i - 1] = strides[i] * self.shape[i] as i64;
        }
        // SAFETY: the memory covers the shape, and tests keep the array as long as they use the view.
        unsafe { View::new(self.memory.as_mut_ptr().cast::<c_void>(), self.dtype, self.shape, strides) }
    }

    /// What was written, all of it.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: an operation under test wrote the whole array, which is what valgrind is there to find out.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.memory.len()) }
    }
}
