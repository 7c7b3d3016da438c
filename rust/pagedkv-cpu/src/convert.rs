//! Rows of `head_dim` elements between storage types and float32.
//!
//! Narrowing rounds to nearest, ties to even; widening is exact.

use std::ffi::c_void;
use std::slice::{from_raw_parts, from_raw_parts_mut};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

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
            DType::BF16 => from_raw_parts_mut(dst.cast::<bf16>(), n).convert_from_f32_slice(src),
            DType::F8E4M3 | DType::F8E5M2 => {
                for (bits, s) in from_raw_parts_mut(dst.cast::<u8>(), n).iter_mut().zip(src) {
                    *bits = fp8::encode(dtype, *s);
                }
            }
            other => panic!("broken law: {} reached a conversion", other.name()),
        }
    }
}

// A shift, which vectorises on every target; the slice conversion of `half` goes element by element.
fn widen_bf16(src: &[u16], dst: &mut [f32]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = f32::from_bits(u32::from(*s) << 16);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
