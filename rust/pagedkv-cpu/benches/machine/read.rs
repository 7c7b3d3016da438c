//! A plain read: every word once, by loads and sums alone.

use std::hint::black_box;

use pagedkv_cpu::Isa;

/// Places that a thread may read from at the same time, a page at a time; how many are fastest differs between machines (an
/// AMD EPYC: one 38 GB/s on a thread, two 40, four 42, eight 34).
pub(crate) const STREAMS: [usize; 4] = [1, 2, 4, 8];
const PAGE_WORDS: usize = 512;
/// Words that are added up side by side.
const STEP: usize = 32;

/// Reads all words from so many places at a time, with the registers of an instruction set.
pub(crate) fn read(isa: Isa, streams: usize, words: &[u64]) {
    let sum = match streams {
        1 => read_from::<1>(isa, words),
        2 => read_from::<2>(isa, words),
        4 => read_from::<4>(isa, words),
        _ => read_from::<8>(isa, words),
    };
    black_box(sum);
}

fn read_from<const STREAMS: usize>(isa: Isa, words: &[u64]) -> u64 {
    match isa {
        Isa::Scalar => sum::<STREAMS>(words),
        // SAFETY: every other set contains AVX2, and `Isa::choose` found that the processor has it. Wider registers read no
        // faster; the compiler kept these sums in memory when it had AVX-512, and 3.7 GB/s came of it.
        #[cfg(target_arch = "x86_64")]
        _ => unsafe { sum_avx2::<STREAMS>(words) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => sum::<STREAMS>(words),
    }
}

#[expect(clippy::inline_always, reason = "compiled anew with the instructions of each caller")]
#[inline(always)]
fn sum<const STREAMS: usize>(words: &[u64]) -> u64 {
    let mut sums = [0_u64; STEP];
    for group in 0..words.len() / (STREAMS * PAGE_WORDS) {
        let pages = &words[group * STREAMS * PAGE_WORDS..][..STREAMS * PAGE_WORDS];
        for first in (0..PAGE_WORDS).step_by(STEP) {
            for stream in 0..STREAMS {
                let step = &pages[stream * PAGE_WORDS + first..][..STEP];
                for i in 0..STEP {
                    sums[i] = sums[i].wrapping_add(step[i]);
                }
            }
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2<const STREAMS: usize>(words: &[u64]) -> u64 {
    sum::<STREAMS>(words)
}
