//! Floating-point peaks: as many independent chains in registers as keep the units busy, and nothing else.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512bh, __m512i, _mm256_fmadd_ps, _mm256_set1_ps, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps,
};
use std::hint::black_box;

use pagedkv_cpu::Isa;

/// Chains side by side: more than latency times units anywhere, and with two factors they fit into 16 registers.
const CHAINS: usize = 12;
/// Some ten milliseconds each.
pub(crate) const FMA_ROUNDS: usize = 1 << 22;
pub(crate) const DOT_ROUNDS: usize = 1 << 22;
/// Lanes of the plain loop, which the compiler puts into the vectors that every processor of the architecture has.
const PLAIN_LANES: usize = 4;
/// A chain `x = x * SHRINK + STEP` stays near 1: neither subnormal nor infinite.
const SHRINK: f32 = 0.998;
const STEP: f32 = 0.002;

/// Whether the instruction set has products of bfloat16 pairs.
pub(crate) fn has_dot(isa: Isa) -> bool {
    isa >= Isa::Avx512Bf16
}

/// Floating-point operations of a round of [`fma`].
pub(crate) fn fma_flops(isa: Isa) -> usize {
    let lanes = match isa {
        Isa::Scalar => PLAIN_LANES,
        Isa::Avx2 => 8,
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => 16,
    };
    2 * CHAINS * lanes
}

/// Floating-point operations of a round of [`dot`]: 16 lanes of two products and two sums.
pub(crate) fn dot_flops() -> usize {
    CHAINS * 16 * 4
}

/// Multiplies and adds for [`FMA_ROUNDS`].
pub(crate) fn fma(isa: Isa) {
    match isa {
        // SAFETY: the processor has the instructions, or `Isa::choose` would not have found them.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => unsafe { fma_avx512() },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { fma_avx2() },
        _ => multiply_and_add(),
    }
}

/// Multiplies bfloat16 pairs and adds for [`DOT_ROUNDS`].
///
/// # Panics
///
/// On a processor without such products.
pub(crate) fn dot() {
    assert!(Isa::Avx512Bf16.is_available(), "dot: expected avx512_bf16, found none");
    // SAFETY: the processor has the instructions.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        dot_avx512();
    }
}

fn multiply_and_add() {
    let mut chains = [[1_f32; PLAIN_LANES]; CHAINS];
    let (shrink, step) = black_box((SHRINK, STEP));
    for _ in 0..FMA_ROUNDS {
        for chain in &mut chains {
            for lane in chain {
                *lane = *lane * shrink + step;
            }
        }
    }
    black_box(chains);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fma_avx2() {
    let mut chains = [_mm256_set1_ps(1.0); CHAINS];
    let (shrink, step) = (_mm256_set1_ps(black_box(SHRINK)), _mm256_set1_ps(black_box(STEP)));
    for _ in 0..FMA_ROUNDS {
        for chain in &mut chains {
            *chain = _mm256_fmadd_ps(*chain, shrink, step);
        }
    }
    black_box(chains);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fma_avx512() {
    let mut chains = [_mm512_set1_ps(1.0); CHAINS];
    let (shrink, step) = (_mm512_set1_ps(black_box(SHRINK)), _mm512_set1_ps(black_box(STEP)));
    for _ in 0..FMA_ROUNDS {
        for chain in &mut chains {
            *chain = _mm512_fmadd_ps(*chain, shrink, step);
        }
    }
    black_box(chains);
}

/// Sums grow to some 16,000 and no further than float32 counts exactly: each round adds 2^-9 twice.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dot_avx512() {
    const SMALL: i32 = 0x3d80_3d80; // 2^-4 twice
    const SMALLER: i32 = 0x3d00_3d00; // 2^-5 twice
    let mut chains = [_mm512_setzero_ps(); CHAINS];
    // SAFETY: both types are 512 bits without an invalid value.
    let pair = |bits: i32| unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(black_box(bits))) };
    let (a, b) = (pair(SMALL), pair(SMALLER));
    for _ in 0..DOT_ROUNDS {
        for chain in &mut chains {
            *chain = _mm512_dpbf16_ps(*chain, a, b);
        }
    }
    black_box(chains);
}
