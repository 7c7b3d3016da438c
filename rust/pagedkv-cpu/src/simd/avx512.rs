//! Sixteen lanes of AVX-512 (F, BW, VL, DQ), and products of bfloat16 pairs and bytes looked up (VBMI) where the processor has
//! them.
#![allow(clippy::wildcard_imports, reason = "the intrinsics of an instruction set")]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each function is an instruction or two and as unsafe as a whole: see `Vector` for what callers promise"
)]

use std::arch::x86_64::*;
use std::mem::transmute;

use super::{Bf16Dot, Bf16Table, ByteLookup, Vector};

/// One register of AVX-512.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(__m512);

/// Words that hold a byte in their upper half become float16, 2^-8 times as large; the only NaN stays one.
#[inline(always)]
unsafe fn e4m3_words(words: __m512i) -> __m512i {
    const AND_OR: i32 = 0xea; // a & b | c
    let shifted = _mm512_and_si512(_mm512_srai_epi16::<1>(words), _mm512_set1_epi16(0xbf80_u16 as i16));
    // A carry out of the largest magnitude alone makes the exponent all ones.
    let sum = _mm512_add_epi16(shifted, _mm512_set1_epi16(0x80));
    _mm512_ternarylogic_epi32::<AND_OR>(sum, _mm512_set1_epi16(0x4000), shifted)
}

#[inline(always)]
unsafe fn half<const UPPER: usize>(words: __m512i) -> Avx512 {
    let words = if UPPER == 0 { _mm512_castsi512_si256(words) } else { _mm512_extracti64x4_epi64::<1>(words) };
    Avx512(_mm512_cvtph_ps(words))
}

/// The lower bytes of words moved to the upper half with `PART` below 2, else the upper bytes as they are, the lower ones
/// still below them.
#[inline(always)]
unsafe fn bytes<const PART: usize>(unit: __m512i) -> __m512i {
    if PART < 2 { _mm512_slli_epi16::<8>(unit) } else { unit }
}

#[inline(always)]
unsafe fn unpack_pairs(a: __m512, b: __m512) -> (__m512, __m512) {
    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
    (_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
}

/// Each quarter of the register gets, of its lanes alone, the sums of the four rows.
#[inline(always)]
unsafe fn sum_four(a: Avx512, b: Avx512, c: Avx512, d: Avx512) -> __m512 {
    let ab = _mm512_add_ps(_mm512_unpacklo_ps(a.0, b.0), _mm512_unpackhi_ps(a.0, b.0));
    let cd = _mm512_add_ps(_mm512_unpacklo_ps(c.0, d.0), _mm512_unpackhi_ps(c.0, d.0));
    let (low, high) = unpack_pairs(ab, cd);
    _mm512_add_ps(low, high)
}

/// Neighbouring quarters added: those of `a`, then those of `b`.
#[inline(always)]
unsafe fn sum_quarters(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
}

impl Vector for Avx512 {
    const LANES: usize = 16;
    type Unit = __m512i;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self(_mm512_set1_ps(value))
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(_mm512_loadu_ps(from))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm512_storeu_ps(to, self.0);
    }

    instructions! {
        add(other) = _mm512_add_ps;
        sub(other) = _mm512_sub_ps;
        mul(other) = _mm512_mul_ps;
        div(other) = _mm512_div_ps;
        mul_add(factor, addend) = _mm512_fmadd_ps;
        max(other) = _mm512_max_ps;
        min(other) = _mm512_min_ps;
    }

    #[inline(always)]
    unsafe fn fused_mul_add(self, factor: Self, addend: Self) -> Self {
        self.mul_add(factor, addend)
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        Self(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0))
    }

    #[inline(always)]
    unsafe fn scale_by_power(self, exponent: Self) -> Self {
        let is_normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(exponent.0, _mm512_set1_ps(-126.0));
        Self(_mm512_maskz_scalef_ps(is_normal, self.0, exponent.0))
    }

    #[inline(always)]
    unsafe fn select(self, bits: u32, other: Self) -> Self {
        Self(_mm512_mask_blend_ps(bits as __mmask16, other.0, self.0))
    }

    #[inline(always)]
    unsafe fn less(self, other: Self) -> u32 {
        u32::from(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0))
    }

    #[inline(always)]
    unsafe fn copy_sign(self, other: Self) -> Self {
        let sign = _mm512_set1_ps(-0.0);
        Self(_mm512_or_ps(_mm512_andnot_ps(sign, self.0), _mm512_and_ps(sign, other.0)))
    }

    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Self(_mm512_andnot_ps(_mm512_set1_ps(-0.0), self.0))
    }

    #[inline(always)]
    unsafe fn max_of_spans<const SPAN: usize>(self) -> Self {
        let mut x = self.0;
        if SPAN >= 2 {
            x = _mm512_max_ps(x, _mm512_permute_ps::<0xb1>(x));
        }
        if SPAN >= 4 {
            x = _mm512_max_ps(x, _mm512_permute_ps::<0x4e>(x));
        }
        if SPAN >= 8 {
            x = _mm512_max_ps(x, _mm512_shuffle_f32x4::<0xb1>(x, x));
        }
        if SPAN >= 16 {
            x = _mm512_max_ps(x, _mm512_shuffle_f32x4::<0x4e>(x, x));
        }
        Self(x)
    }

    #[inline(always)]
    unsafe fn sum_rows<const N: usize>(rows: [Self; N]) -> Self {
        debug_assert!(N == Self::LANES, "broken law: {N} rows of a square");
        let [a, b, c, d] = [
            sum_four(rows[0], rows[1], rows[2], rows[3]),
            sum_four(rows[4], rows[5], rows[6], rows[7]),
            sum_four(rows[8], rows[9], rows[10], rows[11]),
            sum_four(rows[12], rows[13], rows[14], rows[15]),
        ];
        Self(sum_quarters(sum_quarters(a, b), sum_quarters(c, d)))
    }

    #[inline(always)]
    unsafe fn transpose(from: *const *const f32, to: *mut f32, stride: usize) {
        let mut pairs = [_mm512_setzero_ps(); 16];
        for i in 0..8 {
            let a = _mm512_loadu_ps(from.add(2 * i).read());
            let b = _mm512_loadu_ps(from.add(2 * i + 1).read());
            pairs[2 * i] = _mm512_unpacklo_ps(a, b);
            pairs[2 * i + 1] = _mm512_unpackhi_ps(a, b);
        }
        // fours[4 * i + c] holds columns c, c + 4, c + 8 and c + 12 of rows 4 * i to 4 * i + 3.
        let mut fours = [_mm512_setzero_ps(); 16];
        for i in 0..4 {
            (fours[4 * i], fours[4 * i + 1]) = unpack_pairs(pairs[4 * i], pairs[4 * i + 2]);
            (fours[4 * i + 2], fours[4 * i + 3]) = unpack_pairs(pairs[4 * i + 1], pairs[4 * i + 3]);
        }
        for c in 0..4 {
            let (a, b, d, e) = (fours[c], fours[4 + c], fours[8 + c], fours[12 + c]);
            let (x0, x1) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
            let (y0, y1) = (_mm512_shuffle_f32x4::<0x44>(d, e), _mm512_shuffle_f32x4::<0xee>(d, e));
            _mm512_storeu_ps(to.add(c * stride), _mm512_shuffle_f32x4::<0x88>(x0, y0));
            _mm512_storeu_ps(to.add((c + 4) * stride), _mm512_shuffle_f32x4::<0xdd>(x0, y0));
            _mm512_storeu_ps(to.add((c + 8) * stride), _mm512_shuffle_f32x4::<0x88>(x1, y1));
            _mm512_storeu_ps(to.add((c + 12) * stride), _mm512_shuffle_f32x4::<0xdd>(x1, y1));
        }
    }

    #[inline(always)]
    unsafe fn load_unit(from: *const u8) -> Self::Unit {
        _mm512_loadu_si512(from.cast())
    }

    #[inline(always)]
    unsafe fn load_part(from: *const u8, bytes: usize) -> Self::Unit {
        _mm512_maskz_loadu_epi8((1_u64 << bytes) - 1, from.cast())
    }

    #[inline(always)]
    unsafe fn widen_f32(unit: Self::Unit) -> Self {
        Self(_mm512_castsi512_ps(unit))
    }

    #[inline(always)]
    unsafe fn widen_f16<const PART: usize>(unit: Self::Unit) -> Self {
        half::<PART>(unit)
    }

    #[inline(always)]
    unsafe fn widen_bf16<const PART: usize>(unit: Self::Unit) -> Self {
        if PART == 0 {
            return Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(unit)));
        }
        Self(_mm512_castsi512_ps(_mm512_and_si512(unit, _mm512_set1_epi32(0xffff_0000_u32 as i32))))
    }

    #[inline(always)]
    unsafe fn widen_e4m3<const PART: usize>(unit: Self::Unit) -> Self {
        let words = e4m3_words(bytes::<PART>(unit));
        if PART & 1 == 0 { half::<0>(words) } else { half::<1>(words) }
    }

    #[inline(always)]
    unsafe fn widen_e5m2<const PART: usize>(unit: Self::Unit) -> Self {
        let words = _mm512_and_si512(bytes::<PART>(unit), _mm512_set1_epi16(0xff00_u16 as i16));
        if PART & 1 == 0 { half::<0>(words) } else { half::<1>(words) }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
}

impl Bf16Dot for Avx512 {
    #[inline(always)]
    unsafe fn dot_pairs(self, a: Self::Unit, b: Self::Unit) -> Self {
        // Both types are 512 bits without an invalid value.
        let (a, b) = (transmute::<__m512i, __m512bh>(a), transmute::<__m512i, __m512bh>(b));
        Self(_mm512_dpbf16_ps(self.0, a, b))
    }

    #[inline(always)]
    unsafe fn splat_pair(from: *const u8) -> Self::Unit {
        _mm512_set1_epi32(from.cast::<i32>().read_unaligned())
    }

    #[inline(always)]
    unsafe fn pair_up<const PART: usize>(a: Self::Unit, b: Self::Unit) -> Self::Unit {
        const UPPER: __mmask32 = 0xaaaa_aaaa;
        if PART == 0 {
            return _mm512_mask_blend_epi16(UPPER, a, _mm512_slli_epi32::<16>(b));
        }
        _mm512_mask_blend_epi16(UPPER, _mm512_srli_epi32::<16>(a), b)
    }

    #[inline(always)]
    unsafe fn store_unit(unit: Self::Unit, to: *mut u8) {
        _mm512_storeu_si512(to.cast(), unit);
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u8) {
        let rounded = transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(self.0));
        _mm256_storeu_si256(to.cast(), rounded);
    }
}

/// Bytes looked up by the lower seven bits of each.
#[inline(always)]
unsafe fn look_up(bytes: __m512i, table: &[u8; 128]) -> __m512i {
    let table = table.as_ptr();
    let (low, high) = (_mm512_loadu_si512(table.cast()), _mm512_loadu_si512(table.add(64).cast()));
    _mm512_permutex2var_epi8(low, bytes, high)
}

impl ByteLookup for Avx512 {
    #[inline(always)]
    unsafe fn arrange(a: Self::Unit, b: Self::Unit, order: &[u8; 64]) -> Self::Unit {
        _mm512_permutex2var_epi8(a, _mm512_loadu_si512(order.as_ptr().cast()), b)
    }

    #[inline(always)]
    unsafe fn look_up<const HALF: usize>(bytes: Self::Unit, table: &Bf16Table) -> Self::Unit {
        const AND_OR: i32 = 0xea; // a & b | c
        let sign = _mm512_set1_epi8(i8::MIN);
        let low = look_up(bytes, &table.low);
        let high = _mm512_ternarylogic_epi32::<AND_OR>(bytes, sign, look_up(bytes, &table.high));
        if HALF == 0 { _mm512_unpacklo_epi8(low, high) } else { _mm512_unpackhi_epi8(low, high) }
    }
}
