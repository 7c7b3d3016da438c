//! A plain read: every word once, in order, into sums.

use std::hint::black_box;

use pagedkv_cpu::Isa;

/// Words added up side by side: 256 bytes, eight vectors of AVX2.
const STEP: usize = 32;

/// Reads all words with the registers of an instruction set.
pub(crate) fn read(isa: Isa, words: &[u64]) {
    let sum = match isa {
        // SAFETY: the processor has the instructions, or `Isa::choose` would not have found them.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => unsafe { sum_avx512(words) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { sum_avx2(words) },
        _ => sum(words),
    };
    black_box(sum);
}

#[expect(clippy::inline_always, reason = "compiled anew with the instructions of each caller")]
#[inline(always)]
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0_u64; STEP];
    for step in words.chunks_exact(STEP) {
        for (sum, word) in sums.iter_mut().zip(step) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
fn sum_avx512(words: &[u64]) -> u64 {
    sum(words)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(words: &[u64]) -> u64 {
    sum(words)
}
