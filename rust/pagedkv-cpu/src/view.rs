//! A strided view of somebody's memory: pointer, element type, shape and strides in elements.
//!
//! Every operation of this crate takes views, so that a layer of a block-contiguous pool, a pool with the layer
//! outermost and a cache made by another engine go down the same path. Offsets are 64-bit throughout.

use std::ffi::c_void;
use std::ops::Range;

/// The element types that may cross into this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
    /// FP8, 4 exponent bits, finite only (`float8_e4m3fn`).
    F8E4M3,
    /// FP8, 5 exponent bits (`float8_e5m2`).
    F8E5M2,
    /// Signed 32-bit integer: block ids, lengths, rows.
    I32,
    /// Signed 64-bit integer: slots.
    I64,
    /// Unsigned byte: FP8 from a library that does not know it.
    U8,
    /// Unsigned 16-bit integer: bfloat16 from a library that does not know it.
    U16,
}

impl DType {
    /// Every element type, in the order of declaration.
    pub const ALL: [Self; 9] =
        [Self::F32, Self::F16, Self::BF16, Self::F8E4M3, Self::F8E5M2, Self::I32, Self::I64, Self::U8, Self::U16];

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 | Self::U16 => 2,
            Self::F8E4M3 | Self::F8E5M2 | Self::U8 => 1,
        }
    }

    /// The name that torch and `NumPy` users know.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F8E4M3 => "float8_e4m3fn",
            Self::F8E5M2 => "float8_e5m2",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
            Self::U16 => "uint16",
        }
    }

    /// The element type of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Whether queries, results and new keys may be of it.
    pub const fn is_computed(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// Whether it is stored with a scale.
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::F8E4M3 | Self::F8E5M2)
    }
}

/// An integer that index arrays are made of.
pub trait Integer: Copy + private::Sealed {
    /// Its element type.
    const DTYPE: DType;
}

impl Integer for i32 {
    const DTYPE: DType = DType::I32;
}

impl Integer for i64 {
    const DTYPE: DType = DType::I64;
}

impl Integer for u8 {
    const DTYPE: DType = DType::U8;
}

mod private {
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for i32 {}
    impl Sealed for i64 {}
}

/// `N` dimensions over raw memory; strides count elements and may be any 64-bit value, zero and negative included.
#[derive(Clone, Copy, Debug)]
pub struct View<const N: usize> {
    data: *mut c_void,
    dtype: DType,
    shape: [usize; N],
    strides: [i64; N],
    is_packed: bool,
}

// SAFETY: a view is an address with a layout; `View::new` makes its maker promise that the memory may be used from any
// thread, and every operation gives distinct elements to distinct threads before it writes.
unsafe impl<const N: usize> Send for View<N> {}
// SAFETY: as for `Send`.
unsafe impl<const N: usize> Sync for View<N> {}

impl<const N: usize> View<N> {
    /// Describes memory that starts at `data` with the element at index 0 in every dimension.
    ///
    /// # Safety
    ///
    /// While an operation uses the view or a copy of it, every element at an index below `shape` must lie in one live
    /// allocation, aligned to its size, readable from any thread and written by nobody else. A view that is passed as
    /// an output must be writable too.
    pub const unsafe fn new(data: *mut c_void, dtype: DType, shape: [usize; N], strides: [i64; N]) -> Self {
        Self { data, dtype, shape, strides, is_packed: false }
    }

    /// The same memory with its keys packed: each run of sixteen tokens of a head lies `[head_dim / x][16][x]`, where `x`
    /// is 2 in bfloat16 and FP8, else 1. Of a pool, the values stay as they are; strides go on saying where heads and
    /// blocks start.
    #[must_use]
    pub const fn packed(self) -> Self {
        Self { is_packed: true, ..self }
    }

    /// Whether its keys are packed.
    pub const fn is_packed(&self) -> bool {
        self.is_packed
    }

    /// Element type.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements in each dimension.
    pub const fn shape(&self) -> [usize; N] {
        self.shape
    }

    /// Elements between neighbours in each dimension.
    pub const fn strides(&self) -> [i64; N] {
        self.strides
    }

    /// Whether some dimension has no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Whether neighbours in the last dimension are neighbours in memory. The strides of an empty view mean nothing.
    pub fn has_contiguous_rows(&self) -> bool {
        self.is_empty() || self.shape[N - 1] < 2 || self.strides[N - 1] == 1
    }

    /// The integer at `index`.
    ///
    /// # Panics
    ///
    /// If the view holds another element type, or `index` is not below the shape.
    pub fn get<T: Integer>(&self, index: [usize; N]) -> T {
        // SAFETY: the cell was checked, and the maker of the view promised that its elements can be read.
        unsafe { self.cell::<T>(index).read() }
    }

    /// Writes the integer at `index` of an output.
    ///
    /// # Panics
    ///
    /// As `get`.
    pub(crate) fn set<T: Integer>(&self, index: [usize; N], value: T) {
        // SAFETY: the cell was checked, and the maker of the view promised that an output can be written.
        unsafe { self.cell::<T>(index).write(value) }
    }

    fn cell<T: Integer>(&self, index: [usize; N]) -> *mut T {
        assert!(self.dtype == T::DTYPE, "a view of {} has no {}", self.dtype.name(), T::DTYPE.name());
        assert!(index.iter().zip(&self.shape).all(|(i, n)| i < n), "{index:?} is outside {:?}", self.shape);
        self.at(index).cast()
    }

    /// Address of the element at `index`.
    ///
    /// # Panics
    ///
    /// In debug builds, if `index` is not below the shape.
    pub(crate) fn at(&self, index: [usize; N]) -> *mut c_void {
        debug_assert!(
            index.iter().zip(&self.shape).all(|(i, n)| i < n),
            "index {index:?} is outside shape {:?}",
            self.shape
        );
        let mut offset = 0_i64;
        for (i, stride) in index.iter().zip(&self.strides) {
            offset += *i as i64 * stride;
        }
        self.data.wrapping_byte_offset(offset as isize * self.dtype.size_bytes() as isize)
    }

    /// The addresses between its lowest and its highest byte.
    pub(crate) fn extent(&self) -> Range<usize> {
        extent(self.data as usize, &self.shape, &self.strides, self.dtype.size_bytes())
    }

    /// Whether its elements surely lie at distinct addresses, as those of an output must.
    pub(crate) fn is_distinct(&self) -> bool {
        are_distinct(&self.shape, &self.strides)
    }
}

/// The addresses from the first to the last byte of an array at `data`, whatever lies between its elements.
///
/// # Complexity
///
/// O(n) for n dimensions.
pub fn extent(data: usize, shape: &[usize], strides: &[i64], item_bytes: usize) -> Range<usize> {
    if shape.contains(&0) {
        return 0..0;
    }
    let (mut low, mut high) = (0_i64, 0_i64);
    for (n, stride) in shape.iter().zip(strides) {
        let reach = (*n as i64 - 1) * stride;
        low += reach.min(0);
        high += reach.max(0);
    }
    let byte = |offset: i64| data.wrapping_add_signed(offset as isize * item_bytes as isize);
    byte(low)..byte(high) + item_bytes
}

/// Whether the elements of an array of that shape and those strides surely lie at distinct addresses.
///
/// Holds when each dimension, taken from the smallest stride up, steps over all that the smaller ones reach.
///
/// # Complexity
///
/// O(n log n) for n dimensions.
pub fn are_distinct(shape: &[usize], strides: &[i64]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut steps: Vec<(i64, i64)> = shape
        .iter()
        .zip(strides)
        .filter(|(n, _)| **n > 1)
        .map(|(n, stride)| (stride.saturating_abs(), *n as i64 - 1))
        .collect();
    steps.sort_unstable();
    let mut reach = 0_i64;
    steps.into_iter().all(|(stride, count)| {
        let fits = stride > reach;
        reach = reach.saturating_add(stride.saturating_mul(count));
        fits
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view<const N: usize>(shape: [usize; N], strides: [i64; N]) -> View<N> {
        let data = std::ptr::without_provenance_mut(4096);
        // SAFETY: the tests below compute addresses and dereference none.
        unsafe { View::new(data, DType::F32, shape, strides) }
    }

    #[test]
    fn extent_covers_both_ends_when_a_stride_is_negative() {
        assert_eq!(view([3, 4], [-8, 1]).extent(), 4096 - 64..4096 + 16);
        assert_eq!(view([0, 4], [-8, 1]).extent(), 0..0);
    }

    #[test]
    fn distinct_elements_are_recognised_whatever_the_order_of_dimensions() {
        assert!(view([5, 3], [1, 5]).is_distinct());
        assert!(view([5, 1, 3], [3, 0, 1]).is_distinct());
        assert!(!view([5, 3], [2, 1]).is_distinct());
        assert!(!view([5, 3], [0, 1]).is_distinct());
    }

    #[test]
    fn offsets_stay_exact_when_strides_pass_32_bits() {
        let view = view([70_000, 2], [1 << 32, 1]);
        assert_eq!(view.at([69_999, 1]) as usize, 4096 + 4 * ((69_999 << 32) + 1));
    }
}
