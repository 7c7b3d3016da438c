//! Eight lanes of AVX2 with FMA and F16C.
#![allow(clippy::wildcard_imports, reason = "the intrinsics of an instruction set")]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each function is an instruction or two and as unsafe as a whole: see `Vector` for what callers promise"
)]

use std::arch::x86_64::*;

use super::Vector;

/// One register of AVX2.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(__m256);

/// All bits of the lanes whose bit is set.
#[inline(always)]
unsafe fn lanes(bits: u32) -> __m256 {
    let each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    let set = _mm256_and_si256(_mm256_set1_epi32(bits as i32), each);
    _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, each))
}

/// Words that hold a byte in their upper half become float16, 2^-8 times as large; the only NaN stays one.
#[inline(always)]
unsafe fn e4m3_words(words: __m256i) -> __m256i {
    let shifted = _mm256_and_si256(_mm256_srai_epi16::<1>(words), _mm256_set1_epi16(0xbf80_u16 as i16));
    // A carry out of the largest magnitude alone makes the exponent all ones.
    let carry = _mm256_and_si256(_mm256_add_epi16(shifted, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0x4000));
    _mm256_or_si256(shifted, carry)
}

#[inline(always)]
unsafe fn half<const UPPER: usize>(words: __m256i) -> Avx2 {
    let words = if UPPER == 0 { _mm256_castsi256_si128(words) } else { _mm256_extracti128_si256::<1>(words) };
    Avx2(_mm256_cvtph_ps(words))
}

/// The lower bytes of words moved to the upper half with `PART` below 2, else the upper bytes as they are, the lower ones
/// still below them.
#[inline(always)]
unsafe fn bytes<const PART: usize>(unit: __m256i) -> __m256i {
    if PART < 2 { _mm256_slli_epi16::<8>(unit) } else { unit }
}

/// Each half of the register gets, of its lanes alone, the sums of the four rows.
#[inline(always)]
unsafe fn sum_four(a: Avx2, b: Avx2, c: Avx2, d: Avx2) -> __m256 {
    _mm256_hadd_ps(_mm256_hadd_ps(a.0, b.0), _mm256_hadd_ps(c.0, d.0))
}

/// Column `c` of four rows that were interleaved in pairs.
#[inline(always)]
unsafe fn column(a: __m256, b: __m256, c: usize) -> __m256 {
    if c.is_multiple_of(2) { _mm256_shuffle_ps::<0x44>(a, b) } else { _mm256_shuffle_ps::<0xee>(a, b) }
}

impl Vector for Avx2 {
    const LANES: usize = 8;
    type Unit = __m256i;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self(_mm256_set1_ps(value))
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(_mm256_loadu_ps(from))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm256_storeu_ps(to, self.0);
    }

    instructions! {
        add(other) = _mm256_add_ps;
        sub(other) = _mm256_sub_ps;
        mul(other) = _mm256_mul_ps;
        div(other) = _mm256_div_ps;
        mul_add(factor, addend) = _mm256_fmadd_ps;
        max(other) = _mm256_max_ps;
        min(other) = _mm256_min_ps;
    }

    #[inline(always)]
    unsafe fn fused_mul_add(self, factor: Self, addend: Self) -> Self {
        self.mul_add(factor, addend)
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        Self(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0))
    }

    #[inline(always)]
    unsafe fn scale_by_power(self, exponent: Self) -> Self {
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent.0), _mm256_set1_epi32(127));
        Self(_mm256_mul_ps(self.0, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))))
    }

    #[inline(always)]
    unsafe fn select(self, bits: u32, other: Self) -> Self {
        Self(_mm256_blendv_ps(other.0, self.0, lanes(bits)))
    }

    #[inline(always)]
    unsafe fn less(self, other: Self) -> u32 {
        _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0)) as u32
    }

    #[inline(always)]
    unsafe fn copy_sign(self, other: Self) -> Self {
        let sign = _mm256_set1_ps(-0.0);
        Self(_mm256_or_ps(_mm256_andnot_ps(sign, self.0), _mm256_and_ps(sign, other.0)))
    }

    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Self(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0))
    }

    #[inline(always)]
    unsafe fn max_of_spans<const SPAN: usize>(self) -> Self {
        let mut x = self.0;
        if SPAN >= 2 {
            x = _mm256_max_ps(x, _mm256_permute_ps::<0xb1>(x));
        }
        if SPAN >= 4 {
            x = _mm256_max_ps(x, _mm256_permute_ps::<0x4e>(x));
        }
        if SPAN >= 8 {
            x = _mm256_max_ps(x, _mm256_permute2f128_ps::<0x01>(x, x));
        }
        Self(x)
    }

    #[inline(always)]
    unsafe fn sum_rows<const N: usize>(rows: [Self; N]) -> Self {
        debug_assert!(N == Self::LANES, "broken law: {N} rows of a square");
        let x = sum_four(rows[0], rows[1], rows[2], rows[3]);
        let y = sum_four(rows[4], rows[5], rows[6], rows[7]);
        Self(_mm256_add_ps(_mm256_permute2f128_ps::<0x20>(x, y), _mm256_permute2f128_ps::<0x31>(x, y)))
    }

    #[inline(always)]
    unsafe fn transpose(from: *const *const f32, to: *mut f32, stride: usize) {
        let mut rows = [_mm256_setzero_ps(); 8];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = _mm256_loadu_ps(from.add(i).read());
        }
        let mut pairs = [_mm256_setzero_ps(); 8];
        for i in 0..4 {
            pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
        }
        for c in 0..4 {
            // Columns c and c + 4: lanes of four rows each.
            let (upper, lower) =
                (column(pairs[c / 2], pairs[2 + c / 2], c), column(pairs[4 + c / 2], pairs[6 + c / 2], c));
            _mm256_storeu_ps(to.add(c * stride), _mm256_permute2f128_ps::<0x20>(upper, lower));
            _mm256_storeu_ps(to.add((c + 4) * stride), _mm256_permute2f128_ps::<0x31>(upper, lower));
        }
    }

    #[inline(always)]
    unsafe fn load_unit(from: *const u8) -> Self::Unit {
        _mm256_loadu_si256(from.cast())
    }

    #[inline(always)]
    unsafe fn load_part(from: *const u8, bytes: usize) -> Self::Unit {
        let mut unit = [0_u8; 32];
        unit.as_mut_ptr().copy_from_nonoverlapping(from, bytes);
        _mm256_loadu_si256(unit.as_ptr().cast())
    }

    #[inline(always)]
    unsafe fn widen_f32(unit: Self::Unit) -> Self {
        Self(_mm256_castsi256_ps(unit))
    }

    #[inline(always)]
    unsafe fn widen_f16<const PART: usize>(unit: Self::Unit) -> Self {
        half::<PART>(unit)
    }

    #[inline(always)]
    unsafe fn widen_bf16<const PART: usize>(unit: Self::Unit) -> Self {
        if PART == 0 {
            return Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(unit)));
        }
        let upper = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff_0000_u32 as i32));
        Self(_mm256_and_ps(_mm256_castsi256_ps(unit), upper))
    }

    #[inline(always)]
    unsafe fn widen_e4m3<const PART: usize>(unit: Self::Unit) -> Self {
        let words = e4m3_words(bytes::<PART>(unit));
        if PART & 1 == 0 { half::<0>(words) } else { half::<1>(words) }
    }

    #[inline(always)]
    unsafe fn widen_e5m2<const PART: usize>(unit: Self::Unit) -> Self {
        let words = _mm256_and_si256(bytes::<PART>(unit), _mm256_set1_epi16(0xff00_u16 as i16));
        if PART & 1 == 0 { half::<0>(words) } else { half::<1>(words) }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
}
