//! A plain read: every word once, by loads and sums alone.

use std::hint::black_box;

use pagedkv_cpu::Isa;

/// Places that a thread reads from at the same time, a page at a time: one alone leaves much of the memory's speed unused,
/// as a processor fetches only so far ahead of each (measured: one 4.3, two 6.1, four 9.5, eight 10.1 GB/s on a thread).
const STREAMS: usize = 8;
const PAGE_WORDS: usize = 512;
/// Words that are added up side by side: two vectors of AVX-512.
const STEP: usize = 16;

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
    for pages in words.chunks_exact(STREAMS * PAGE_WORDS) {
        for first in (0..PAGE_WORDS).step_by(STEP) {
            for page in pages.chunks_exact(PAGE_WORDS) {
                for (sum, word) in sums.iter_mut().zip(&page[first..first + STEP]) {
                    *sum = sum.wrapping_add(*word);
                }
            }
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
