//! Eight lanes in plain Rust, for processors without a vector path of their own.

use half::{bf16, f16};

use super::Vector;
use crate::fp8::e4m3_as_f16;

const LANES: usize = 8;

/// Eight lanes that the compiler may or may not keep in vector registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, with: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|lane| with(self.0[lane], other.0[lane])))
    }
}

// The methods are unsafe because the trait is: only those that take pointers can go wrong.
impl Vector for Portable {
    const LANES: usize = LANES;
    type Unit = [u8; 4 * LANES];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        Self(std::array::from_fn(|lane| self.0[lane] * factor.0[lane] + addend.0[lane]))
    }

    #[inline(always)]
    unsafe fn fused_mul_add(self, factor: Self, addend: Self) -> Self {
        // Products of float32 are exact in float64; `f32::mul_add` may be a call per lane.
        let wide = |lane: usize| f64::from(self.0[lane]) * f64::from(factor.0[lane]) + f64::from(addend.0[lane]);
        Self(std::array::from_fn(|lane| wide(lane) as f32))
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        // 1.5 * 2^23: adding it leaves the nearest integer in the low bits; `round_ties_even` may be a call per lane.
        const SHIFT: f32 = 12_582_912.0;
        Self(self.0.map(|x| (x + SHIFT) - SHIFT))
    }

    #[inline(always)]
    unsafe fn scale_by_power(self, exponent: Self) -> Self {
        self.zip(exponent, |x, n| x * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    unsafe fn select(self, bits: u32, other: Self) -> Self {
        Self(std::array::from_fn(|lane| if bits >> lane & 1 == 1 { self.0[lane] } else { other.0[lane] }))
    }

    #[inline(always)]
    unsafe fn less(self, other: Self) -> u32 {
        (0..LANES).fold(0, |bits, lane| bits | u32::from(self.0[lane] < other.0[lane]) << lane)
    }

    #[inline(always)]
    unsafe fn copy_sign(self, other: Self) -> Self {
        self.zip(other, f32::copysign)
    }

    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }

    #[inline(always)]
    unsafe fn max_of_spans<const SPAN: usize>(self) -> Self {
        let mut spans = self.0;
        for span in spans.chunks_exact_mut(SPAN) {
            let largest = span.iter().copied().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b });
            span.fill(largest);
        }
        Self(spans)
    }

    #[inline(always)]
    unsafe fn sum_rows<const N: usize>(rows: [Self; N]) -> Self {
        debug_assert!(N == Self::LANES, "broken law: {N} rows of a square");
        Self(std::array::from_fn(|i| {
            let s = rows[i].0;
            ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
        }))
    }

    #[inline(always)]
    unsafe fn transpose(from: *const *const f32, to: *mut f32, stride: usize) {
        for i in 0..LANES {
            // SAFETY: the caller's promise.
            let row = unsafe { Self::load(from.add(i).read()) };
            for (j, value) in row.0.into_iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe { to.add(j * stride + i).write(value) };
            }
        }
    }

    #[inline(always)]
    unsafe fn load_unit(from: *const u8) -> Self::Unit {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Self::Unit>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const u8, bytes: usize) -> Self::Unit {
        let mut unit = [0; 4 * LANES];
        // SAFETY: the caller's promise.
        unsafe { unit.as_mut_ptr().copy_from_nonoverlapping(from, bytes) };
        unit
    }

    #[inline(always)]
    unsafe fn widen_f32(unit: Self::Unit) -> Self {
        Self(std::array::from_fn(|lane| f32::from_bits(word::<4>(&unit, lane))))
    }

    #[inline(always)]
    unsafe fn widen_f16<const PART: usize>(unit: Self::Unit) -> Self {
        Self(std::array::from_fn(|lane| f16::from_bits(word::<2>(&unit, PART * LANES + lane) as u16).to_f32()))
    }

    #[inline(always)]
    unsafe fn widen_bf16<const PART: usize>(unit: Self::Unit) -> Self {
        Self(std::array::from_fn(|lane| bf16::from_bits(word::<2>(&unit, 2 * lane + PART) as u16).to_f32()))
    }

    #[inline(always)]
    unsafe fn widen_e4m3<const PART: usize>(unit: Self::Unit) -> Self {
        Self(std::array::from_fn(|lane| f16::from_bits(e4m3_as_f16(byte::<PART>(&unit, lane))).to_f32()))
    }

    #[inline(always)]
    unsafe fn widen_e5m2<const PART: usize>(unit: Self::Unit) -> Self {
        Self(std::array::from_fn(|lane| f16::from_bits(u16::from(byte::<PART>(&unit, lane)) << 8).to_f32()))
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}

/// Element `index` of `BYTES` bytes.
#[inline(always)]
fn word<const BYTES: usize>(unit: &[u8; 4 * LANES], index: usize) -> u32 {
    (0..BYTES).fold(0, |word, i| word | u32::from(unit[index * BYTES + i]) << (8 * i))
}

#[inline(always)]
fn byte<const PART: usize>(unit: &[u8; 4 * LANES], lane: usize) -> u8 {
    unit[super::element::position(crate::view::DType::F8E4M3, LANES, PART, lane)]
}
