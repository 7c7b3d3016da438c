//! Copies of large spans past the caches: what is copied will not be read soon, and a store that fetches no line first
//! moves a third less.
#![allow(clippy::cast_ptr_alignment, reason = "lines of the destination are aligned, and loads need not be")]

/// Bytes from which on a copy goes past the caches; below it, what was copied is likely read next.
const MIN_BYTES: usize = 1 << 18;

const LINE: usize = 64;

/// Copies a span.
///
/// # Safety
///
/// As for [`std::ptr::copy_nonoverlapping`].
pub(super) unsafe fn copy_span(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if bytes >= MIN_BYTES {
            stream(from, to, bytes);
            fence();
            return;
        }
        to.copy_from_nonoverlapping(from, bytes);
    }
}

/// Copies a row past the caches; [`fence`] must follow before another thread hears of it.
///
/// # Safety
///
/// As for [`std::ptr::copy_nonoverlapping`].
#[inline]
pub(super) unsafe fn copy_row(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise; whole aligned lines in between, the rest at both ends.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            let head = to.align_offset(LINE).min(bytes);
            let end = bytes - (bytes - head) % LINE;
            for at in (head..end).step_by(LINE) {
                stream_line(from.add(at), to.add(at));
            }
            // Rows are mostly whole lines, and a copy of nothing is a call.
            if end - head < bytes {
                to.copy_from_nonoverlapping(from, head);
                to.add(end).copy_from_nonoverlapping(from.add(end), bytes - end);
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        to.copy_from_nonoverlapping(from, bytes);
    }
}

/// Orders what was copied past the caches before what follows.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: part of every x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Four pages side by side keep more of the memory busy than one after the other (+10 %).
#[cfg(target_arch = "x86_64")]
unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
    const PAGE: usize = 4096;
    const PAGES: usize = 4;
    let head = to.align_offset(LINE).min(bytes);
    let groups = (bytes - head) / (PAGES * PAGE);
    // SAFETY: the caller's promise; whole aligned lines of the destination in between, the rest at both ends.
    unsafe {
        to.copy_from_nonoverlapping(from, head);
        let (from, to) = (from.add(head), to.add(head));
        for group in 0..groups {
            for offset in (0..PAGE).step_by(LINE) {
                for page in 0..PAGES {
                    let at = (group * PAGES + page) * PAGE + offset;
                    stream_line(from.add(at), to.add(at));
                }
            }
        }
        let done = groups * PAGES * PAGE;
        to.add(done).copy_from_nonoverlapping(from.add(done), bytes - head - done);
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn stream_line(from: *const u8, to: *mut u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_stream_si128};

    // SAFETY: the caller's promise, of one line; a prefetch may name any address.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(4 * LINE).cast());
        for part in (0..LINE).step_by(16) {
            _mm_stream_si128(to.add(part).cast(), _mm_loadu_si128(from.add(part).cast()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_arrive_whole_when_neither_end_is_aligned() {
        let from: Vec<u8> = (0..MIN_BYTES + 21_000).map(|i| (i % 251) as u8).collect();
        for (start, bytes) in [(0, MIN_BYTES), (3, MIN_BYTES + 20_077), (63, MIN_BYTES + 1), (5, 100)] {
            let mut to = vec![0; MIN_BYTES + 22_000];
            // SAFETY: both vectors are longer than what is copied.
            unsafe { copy_span(from.as_ptr().add(start), to.as_mut_ptr().add(start + 1), bytes) };
            assert!(to[start + 1..][..bytes] == from[start..][..bytes]);
            assert!(to[..=start].iter().chain(&to[start + 1 + bytes..]).all(|x| *x == 0));
        }
    }
}
