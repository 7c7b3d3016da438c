//! FP8 values one at a time.

use half::{bf16, f16};

use crate::view::DType;

/// The float32 that stored bits stand for.
///
/// # Panics
///
/// If `dtype` is no FP8.
#[inline]
pub(crate) fn decode(dtype: DType, bits: u8) -> f32 {
    match dtype {
        DType::F8E4M3 => f16::from_bits(e4m3_as_f16(bits)).to_f32() * 256.0,
        DType::F8E5M2 => f16::from_bits(u16::from(bits) << 8).to_f32(),
        other => panic!("broken law: {} is no FP8", other.name()),
    }
}

/// The bfloat16 of the same value: it has room for every FP8.
///
/// # Panics
///
/// If `dtype` is no FP8.
pub(crate) const fn as_bf16(dtype: DType, bits: u8) -> u16 {
    let value = match dtype {
        DType::F8E4M3 => f16::from_bits(e4m3_as_f16(bits)).to_f32_const() * 256.0,
        DType::F8E5M2 => f16::from_bits((bits as u16) << 8).to_f32_const(),
        _ => panic!("broken law: bfloat16 of what is no FP8"),
    };
    bf16::from_f32_const(value).to_bits()
}

/// The nearest value, ties to even; the largest finite one beyond it, and NaN for NaN.
///
/// # Panics
///
/// If `dtype` is no FP8.
#[inline]
pub(crate) fn encode(dtype: DType, value: f32) -> u8 {
    let (mantissa_bits, bias, largest) = match dtype {
        DType::F8E4M3 => (3, 7, 448.0),
        DType::F8E5M2 => (2, 15, 57_344.0),
        other => panic!("broken law: {} is no FP8", other.name()),
    };
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7f;
    }
    let size = value.abs().min(largest);
    let exponent = (((size.to_bits() >> 23) as i32) - 127).max(1 - bias);
    // In units of the last place, which a subnormal shares with the smallest normal numbers.
    let units = (size * power_of_two(mantissa_bits - exponent)).round_ties_even() as u32;
    // A carry out of the mantissa is a carry into the exponent, as it should be.
    let below = ((exponent + bias - 1) as u32) << mantissa_bits;
    sign | (below + units) as u8
}

fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// The float16 that is 2^-8 times an e4m3; its only NaN stays one.
#[inline]
pub(crate) const fn e4m3_as_f16(bits: u8) -> u16 {
    let sign = (bits as u16 & 0x80) << 8;
    let magnitude = (bits as u16 & 0x7f) << 7;
    sign | if magnitude == 0x3f80 { 0x7e00 } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_survives_the_way_there_and_back() {
        for dtype in [DType::F8E4M3, DType::F8E5M2] {
            for bits in 0..=u8::MAX {
                let value = decode(dtype, bits);
                assert!(!value.is_finite() || encode(dtype, value) == bits, "{dtype:?} {bits:#x} is {value}");
            }
        }
    }

    #[test]
    fn every_value_is_a_bfloat16() {
        for dtype in [DType::F8E4M3, DType::F8E5M2] {
            for bits in 0..=u8::MAX {
                let (value, same) = (decode(dtype, bits), bf16::from_bits(as_bf16(dtype, bits)).to_f32());
                assert!(value.total_cmp(&same).is_eq() || value.is_nan() && same.is_nan(), "{dtype:?} {bits:#x}");
            }
        }
    }

    #[test]
    fn numbers_are_those_of_the_formats() {
        for (bits, value) in [(0x01, 0.001_953_125), (0x08, 0.015_625), (0x38, 1.0), (0x7e, 448.0), (0xfe, -448.0)] {
            assert_eq!(decode(DType::F8E4M3, bits).to_bits(), f32::to_bits(value));
        }
        for (bits, value) in [(0x01, 1.525_878_9e-5), (0x3c, 1.0), (0x7b, 57_344.0), (0x7c, f32::INFINITY)] {
            assert_eq!(decode(DType::F8E5M2, bits).to_bits(), f32::to_bits(value));
        }
        assert!(decode(DType::F8E4M3, 0x7f).is_nan() && decode(DType::F8E4M3, 0xff).is_nan());
    }

    #[test]
    fn what_is_too_large_becomes_the_largest_and_what_is_between_goes_to_even() {
        assert_eq!(encode(DType::F8E4M3, 1e9), 0x7e);
        assert_eq!(encode(DType::F8E4M3, f32::NEG_INFINITY), 0xfe);
        assert_eq!(encode(DType::F8E5M2, 1e9), 0x7b);
        assert_eq!(encode(DType::F8E4M3, 1.0625), 0x38); // half way between 1 and 1.125
        assert_eq!(encode(DType::F8E4M3, 1.1875), 0x3a); // half way between 1.125 and 1.25
        assert_eq!(encode(DType::F8E4M3, 0.000_976_562_5), 0); // half of the smallest
        assert_eq!(encode(DType::F8E4M3, f32::NAN), 0x7f);
    }
}
