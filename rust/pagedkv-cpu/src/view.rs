//! A strided view of somebody's memory: pointer, element type, shape and strides in elements.
//!
//! Every kernel of this crate takes views, so that a layer of a block-contiguous pool, a pool with the layer outermost
//! and a cache made by another engine go down the same path. Offsets are 64-bit throughout.

/// The element types that a cache or its operands may hold.
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
}

impl DType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::F8E4M3 | Self::F8E5M2 => 1,
        }
    }

    /// The name that torch and NumPy users know.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F8E4M3 => "float8_e4m3fn",
            Self::F8E5M2 => "float8_e5m2",
        }
    }
}

/// `N` dimensions over raw memory; strides count elements and may be any 64-bit value, zero and negative included.
#[derive(Clone, Copy, Debug)]
pub struct View<const N: usize> {
    /// Address of the element at index 0 in every dimension.
    pub data: *mut u8,
    /// Element type.
    pub dtype: DType,
    /// Elements in each dimension.
    pub shape: [usize; N],
    /// Elements between neighbours in each dimension.
    pub strides: [i64; N],
}
