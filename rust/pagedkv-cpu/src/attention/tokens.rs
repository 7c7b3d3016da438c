//! Where the keys and values of a run of tokens lie, and which of them each query sees.

use std::ffi::c_void;
use std::ops::Range;

use super::plan::{Plan, Sequence};
use crate::kernels::{RowsAhead, STRIP_TOKENS};
use crate::packed_keys::{GROUP_TOKENS, PackedKeys};
use crate::view::{DType, View};

/// The rows of up to `N` tokens under the first KV head.
#[derive(Clone, Debug)]
pub(super) struct TokenRows<const N: usize> {
    /// The tokens.
    pub(super) tokens: Range<usize>,
    /// Where their keys lie; the last address is repeated to the end.
    pub(super) keys: [*const u8; N],
    /// Where their values lie; likewise.
    pub(super) values: [*const u8; N],
}

impl<const N: usize> TokenRows<N> {
    pub(super) const fn new() -> Self {
        Self { tokens: 0..0, keys: [std::ptr::null(); N], values: [std::ptr::null(); N] }
    }

    /// Finds `tokens`, at least one and at most `N`.
    pub(super) fn find(&mut self, plan: &Plan, sequence: &Sequence, caches: [&View<4>; 2], tokens: Range<usize>) {
        debug_assert!((1..=N).contains(&tokens.len()), "broken law: {tokens:?} in a run of {N}");
        let block_size = plan.cut.block_size;
        for (cache, rows) in caches.into_iter().zip([&mut self.keys, &mut self.values]) {
            let mut token = tokens.start;
            while token < tokens.end {
                let offset = token % block_size;
                let len = (block_size - offset).min(tokens.end - token);
                let at = token - tokens.start;
                fill_rows(cache, sequence.block(token / block_size), offset, &mut rows[at..at + len]);
                token += len;
            }
            let last = rows[tokens.len() - 1];
            rows[tokens.len()..].fill(last);
        }
        self.tokens = tokens;
    }
}

/// The rows of a strip, and the same as they are asked for ahead of time.
pub(super) struct StripRows {
    pub(super) rows: TokenRows<STRIP_TOKENS>,
    pub(super) ahead: RowsAhead,
}

impl StripRows {
    pub(super) const fn new() -> Self {
        Self { rows: TokenRows::new(), ahead: [[std::ptr::null(); _]; _] }
    }

    /// Finds `tokens`, at least one and at most a strip.
    pub(super) fn find(&mut self, plan: &Plan, sequence: &Sequence, caches: [&View<4>; 2], tokens: Range<usize>) {
        self.rows.find(plan, sequence, caches, tokens);
        let (TokenRows { keys, values, .. }, k_cache) = (&self.rows, caches[0]);
        let row_bytes = k_cache.shape()[3] * k_cache.dtype().size_bytes();
        let key = |token: usize| {
            if k_cache.is_packed() {
                // A group of packed keys is as long as its rows would be, one after another.
                keys[token / GROUP_TOKENS * GROUP_TOKENS].wrapping_add(token % GROUP_TOKENS * row_bytes)
            } else {
                keys[token]
            }
        };
        for (i, places) in self.ahead.iter_mut().enumerate() {
            let other = i + STRIP_TOKENS / 2;
            *places = [key(i), values[i], key(other), values[other]];
        }
    }
}

/// Finds where neighbours in a block lie: their rows, or the first cells of packed keys.
fn fill_rows(cache: &View<4>, block: usize, offset: usize, rows: &mut [*const u8]) {
    if cache.is_packed() {
        let keys = PackedKeys::new(cache.dtype(), cache.shape()[3]);
        let first = cache.at([block, 0, 0, 0]).cast::<u8>().cast_const();
        for (token, row) in (offset..).zip(rows) {
            *row = first.wrapping_add(keys.offset(token));
        }
        return;
    }
    let step = cache.strides()[2] as isize * cache.dtype().size_bytes() as isize;
    let first = cache.at([block, 0, offset, 0]).cast::<u8>().cast_const();
    for (i, row) in (0..).zip(rows) {
        *row = first.wrapping_offset(i * step);
    }
}

/// Where to start with the keys from `start` on: packed ones are read a group at a time. Nobody sees those before.
pub(super) fn first_read(cache: &View<4>, start: usize) -> usize {
    if cache.is_packed() { start / GROUP_TOKENS * GROUP_TOKENS } else { start }
}

/// Bytes from the first KV head of a cache to another one.
pub(super) fn head_offset(cache: &View<4>, kv_head: usize) -> isize {
    kv_head as isize * cache.strides()[1] as isize * cache.dtype().size_bytes() as isize
}

/// Which tokens of a run each query of a tile sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visibility {
    /// Every query sees all.
    All,
    /// Some query does not see some token.
    Part,
}

/// Writes `words` words of bits for each of `queries`.
pub(super) fn visible_bits(
    sequence: &Sequence,
    queries: &Range<usize>,
    tokens: &Range<usize>,
    words: usize,
    bits: &mut [u64],
) -> Visibility {
    let mut all = true;
    for (query, bits) in queries.clone().zip(bits.chunks_exact_mut(words)) {
        all &= sequence.visible_bits(query, tokens, bits);
    }
    if all { Visibility::All } else { Visibility::Part }
}

/// Whether `len` elements from `row` on are all finite; a weight of 0 does not hide those that are not.
///
/// # Safety
///
/// They can be read.
pub(super) unsafe fn is_finite(dtype: DType, row: *const c_void, len: usize) -> bool {
    // SAFETY: the caller's promise, and every bit pattern is a value of these types.
    unsafe {
        match dtype {
            DType::F32 => all(row.cast::<u32>(), len, |x| x & 0x7f80_0000 != 0x7f80_0000),
            DType::F16 => all(row.cast::<u16>(), len, |x| x & 0x7c00 != 0x7c00),
            DType::BF16 => all(row.cast::<u16>(), len, |x| x & 0x7f80 != 0x7f80),
            DType::F8E4M3 => all(row.cast::<u8>(), len, |x| x & 0x7f != 0x7f),
            DType::F8E5M2 => all(row.cast::<u8>(), len, |x| x & 0x7c != 0x7c),
            other => panic!("broken law: values of {}", other.name()),
        }
    }
}

unsafe fn all<T: Copy>(row: *const T, len: usize, holds: impl Fn(T) -> bool) -> bool {
    // SAFETY: the caller's promise. No early end, so that the loop can take many elements at a time.
    unsafe { std::slice::from_raw_parts(row, len).iter().fold(true, |all, x| all & holds(*x)) }
}
