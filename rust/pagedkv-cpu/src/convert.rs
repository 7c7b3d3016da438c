//! Rows of `head_dim` elements between storage types and float32.
//!
//! Narrowing rounds to nearest, ties to even; widening is exact.
#![expect(
    clippy::inline_always,
    reason = "a function that is not inlined into one that enables the instructions cannot use them"
)]

use std::ffi::c_void;
use std::slice::{from_raw_parts, from_raw_parts_mut};

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::fp8;
use crate::view::DType;

/// Widens `dst.len()` elements that lie one after another at `src`.
///
/// # Panics
///
/// If `dtype` is no floating type.
///
/// # Safety
///
/// `src` must be readable for that many elements of `dtype` and aligned to them.
pub(crate) unsafe fn load(dtype: DType, src: *const c_void, dst: &mut [f32]) {
    let n = dst.len();
    // SAFETY: the caller's promise, and every bit pattern is a value of these types.
    unsafe {
        match dtype {
            DType::F32 => dst.copy_from_slice(from_raw_parts(src.cast::<f32>(), n)),
            DType::F16 => from_raw_parts(src.cast::<f16>(), n).convert_to_f32_slice(dst),
            DType::BF16 => widen_bf16(from_raw_parts(src.cast::<u16>(), n), dst),
            DType::F8E4M3 | DType::F8E5M2 => {
                for (d, bits) in dst.iter_mut().zip(from_raw_parts(src.cast::<u8>(), n)) {
                    *d = fp8::decode(dtype, *bits);
                }
            }
            other => panic!("broken law: {} reached a conversion", other.name()),
        }
    }
}

/// Narrows `src` into as many elements that lie one after another at `dst`.
///
/// # Panics
///
/// If `dtype` is no floating type.
///
/// # Safety
///
/// `dst` must be writable for that many elements of `dtype`, aligned to them, and apart from `src`.
pub(crate) unsafe fn store(dtype: DType, src: &[f32], dst: *mut c_void) {
    let n = src.len();
    // SAFETY: the caller's promise, and every bit pattern is a value of these types.
    unsafe {
        match dtype {
            DType::F32 => from_raw_parts_mut(dst.cast::<f32>(), n).copy_from_slice(src),
            DType::F16 => from_raw_parts_mut(dst.cast::<f16>(), n).convert_from_f32_slice(src),
            DType::BF16 => narrow_bf16(src, from_raw_parts_mut(dst.cast::<u16>(), n)),
            DType::F8E4M3 | DType::F8E5M2 => {
                for (bits, s) in from_raw_parts_mut(dst.cast::<u8>(), n).iter_mut().zip(src) {
                    *bits = fp8::encode(dtype, *s);
                }
            }
            other => panic!("broken law: {} reached a conversion", other.name()),
        }
    }
}

fn widen_bf16(src: &[u16], dst: &mut [f32]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = widened_bf16(*s);
    }
}

fn narrow_bf16(src: &[f32], dst: &mut [u16]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = narrowed_bf16(*s);
    }
}

/// The float32 that bits of a bfloat16 stand for: a shift, which vectorises on every target; the slice conversion of
/// `half` goes element by element.
#[inline(always)]
pub(crate) fn widened_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bfloat16, as `half` rounds, without branches, so that it vectorises too.
#[inline(always)]
pub(crate) fn narrowed_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn float32_is_narrowed_to_bfloat16_as_half_does() {
        for bits in (0..=u32::MAX).step_by(4093).chain([0x7f80_0001, 0xff80_0001, 0x7f7f_8000, 0x7f7f_7fff]) {
            let (wide, mut narrow) = ([f32::from_bits(bits)], [0]);
            narrow_bf16(&wide, &mut narrow);
            assert_eq!(narrow, [bf16::from_f32(wide[0]).to_bits()], "{bits:#x}");
        }
    }

    #[test]
    fn every_half_survives_the_way_to_float32_and_back() {
        for dtype in [DType::F16, DType::BF16] {
            for bits in 0..=u16::MAX {
                let (mut wide, mut back) = ([0_f32], 0_u16);
                // SAFETY: both pointers are to one live 16-bit value.
                unsafe {
                    load(dtype, (&raw const bits).cast(), &mut wide);
                    store(dtype, &wide, (&raw mut back).cast());
                }
                assert!(back == bits || wide[0].is_nan(), "{dtype:?} {bits:#x} became {back:#x}");
            }
        }
    }
}
