//! What a vector register can do: the vocabulary that the kernels are written in, once per instruction set.
//!
//! The kernels are generic over [`Vector`] and are compiled once per instruction set, inside functions that enable it
//! (see `dispatch`). Every method is inlined into those; called from elsewhere the instructions would not be there.
//!
//! Stored elements are read in *units* of one register. A unit of 2-byte elements widens to two vectors, one of 1-byte
//! elements to four, in the order that takes fewest instructions: [`Element::position`] says which element of the unit
//! lies in which lane. Queries are packed in that order and results unpacked from it, so nothing is shuffled between.
#![expect(
    clippy::inline_always,
    reason = "a function that is not inlined into one that enables the instructions cannot use them"
)]

/// The methods of [`Vector`] that are one instruction of the same meaning in every set.
#[cfg(target_arch = "x86_64")]
macro_rules! instructions {
    ($($method:ident($($operand:ident),*) = $intrinsic:ident;)*) => {$(
        #[inline(always)]
        unsafe fn $method(self, $($operand: Self),*) -> Self {
            Self($intrinsic(self.0, $($operand.0),*))
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod byte_pairs;
mod element;
pub(crate) mod math;
mod portable;

pub(crate) use byte_pairs::{Bf16Table, ByteElement, widen_half, widen_pairs};
pub(crate) use element::{BF16, Element, F8E4M3, F8E5M2, F16, F32, packed_source, position};
pub(crate) use portable::Portable;

/// A register of float32 lanes.
///
/// # Safety
///
/// Every method needs a processor with the instructions of the type; methods that take pointers need them valid for
/// what they read or write, at any alignment.
pub(crate) trait Vector: Copy {
    /// Lanes of float32.
    const LANES: usize;
    /// Bytes of a unit of stored elements.
    const UNIT_BYTES: usize = Self::LANES * 4;
    /// One unit as it is stored.
    type Unit: Copy;

    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self * factor + addend`.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// The same in one rounding, on every processor.
    unsafe fn fused_mul_add(self, factor: Self, addend: Self) -> Self;
    /// The larger value, `other` where either is NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller value, `other` where either is NaN.
    unsafe fn min(self, other: Self) -> Self;
    /// The nearest integer.
    unsafe fn round(self) -> Self;
    /// `self * 2^exponent` for whole exponents from -126 to 127, 0 for -127.
    unsafe fn scale_by_power(self, exponent: Self) -> Self;
    /// Lanes whose bit is set, those of `other` elsewhere.
    unsafe fn select(self, bits: u32, other: Self) -> Self;
    /// The bits of lanes that are below those of `other`; not those of NaN.
    unsafe fn less(self, other: Self) -> u32;
    /// The magnitude of `self` with the sign of `other`.
    unsafe fn copy_sign(self, other: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// The largest value of each `SPAN` neighbouring lanes, in all of them; `SPAN` is a power of two.
    unsafe fn max_of_spans<const SPAN: usize>(self) -> Self;
    /// Lane `i` becomes the sum of the lanes of `rows[i]`; there are as many rows as lanes.
    unsafe fn sum_rows<const N: usize>(rows: [Self; N]) -> Self;
    /// Writes element `(j, i)` of a square of lanes to `to[j * stride + i]`, where row `i` of it lies at `from[i]`.
    unsafe fn transpose(from: *const *const f32, to: *mut f32, stride: usize);

    unsafe fn load_unit(from: *const u8) -> Self::Unit;
    /// The first `bytes` of a unit, zeros behind them; nothing else is read.
    unsafe fn load_part(from: *const u8, bytes: usize) -> Self::Unit;
    unsafe fn widen_f32(unit: Self::Unit) -> Self;
    unsafe fn widen_f16<const PART: usize>(unit: Self::Unit) -> Self;
    unsafe fn widen_bf16<const PART: usize>(unit: Self::Unit) -> Self;
    /// Times 2^-8.
    unsafe fn widen_e4m3<const PART: usize>(unit: Self::Unit) -> Self;
    unsafe fn widen_e5m2<const PART: usize>(unit: Self::Unit) -> Self;

    /// Asks for the cache line at that address; any address will do.
    unsafe fn prefetch(address: *const u8);
}

/// Products of bfloat16 pairs, summed in float32.
///
/// # Safety
///
/// As for [`Vector`].
pub(crate) trait Bf16Dot: Vector {
    /// Adds to each lane the two products of its pair.
    unsafe fn dot_pairs(self, a: Self::Unit, b: Self::Unit) -> Self;
    /// The pair at that address in every lane.
    unsafe fn splat_pair(from: *const u8) -> Self::Unit;
    /// Pairs of an element of `a` and one of `b`: the even elements of both, or with `PART` 1 the odd ones.
    unsafe fn pair_up<const PART: usize>(a: Self::Unit, b: Self::Unit) -> Self::Unit;
    unsafe fn store_unit(unit: Self::Unit, to: *mut u8);
    /// Rounds to nearest and writes half a unit.
    unsafe fn store_bf16(self, to: *mut u8);
}

/// Bytes that become bfloat16 by being looked up.
///
/// # Safety
///
/// As for [`Vector`].
pub(crate) trait ByteLookup: Bf16Dot {
    /// Byte `i` becomes byte `order[i]` of `a`, or of `b` where that is a whole unit more.
    unsafe fn arrange(a: Self::Unit, b: Self::Unit, order: &[u8; 64]) -> Self::Unit;
    /// Of every sixteen bytes the first eight as bfloat16, or with `HALF` 1 the other ones.
    unsafe fn look_up<const HALF: usize>(bytes: Self::Unit, table: &Bf16Table) -> Self::Unit;
}
