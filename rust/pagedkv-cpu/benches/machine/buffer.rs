//! A buffer larger than any cache, in pages of the kind that is asked for.

/// The alignment of huge pages on x86-64, and of 4 KiB ones anyway.
const ALIGN_BYTES: usize = 1 << 21;
const WORD_BYTES: usize = size_of::<u64>();

/// Words that lie at a multiple of [`ALIGN_BYTES`].
pub(crate) struct Buffer {
    words: Vec<u64>,
    first: usize,
}

impl Buffer {
    /// Makes a buffer, every page of which is touched.
    pub(crate) fn new(bytes: usize, huge_pages: bool) -> Self {
        let len = bytes.next_multiple_of(ALIGN_BYTES) / WORD_BYTES;
        let mut words: Vec<u64> = Vec::with_capacity(len + ALIGN_BYTES / WORD_BYTES);
        let first = words.as_ptr().align_offset(ALIGN_BYTES);
        if huge_pages {
            advise_huge_pages(words.as_mut_ptr().wrapping_add(first), len * WORD_BYTES);
        }
        words.resize(first + len, 0x3d3c_bc3d_3cbd_3dbc);
        Self { words, first }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.words().len() * WORD_BYTES
    }

    /// Where it lies, for whoever looks up its pages.
    pub(crate) fn address(&self) -> usize {
        self.words().as_ptr().addr()
    }

    pub(crate) fn words(&self) -> &[u64] {
        &self.words[self.first..]
    }

    /// Its two halves, to copy from and to.
    pub(crate) fn halves(&mut self) -> (&[u64], &mut [u64]) {
        let words = &mut self.words[self.first..];
        let (from, to) = words.split_at_mut(words.len() / 2);
        (from, to)
    }
}

/// Asks for huge pages as torch does with `THP_MEM_ALLOC_ENABLE=1`; a system that refuses gives small ones.
#[cfg(target_os = "linux")]
fn advise_huge_pages(address: *mut u64, bytes: usize) {
    // SAFETY: the range lies inside one allocation, and the advice changes nothing of what it holds.
    unsafe { libc::madvise(address.cast(), bytes, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_address: *mut u64, _bytes: usize) {}
