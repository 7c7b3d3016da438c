//! Writes the keys and values of new tokens into their slots.

use super::stream::{copy_row, fence};
use crate::convert::{load, store};
use crate::dims::{
    CACHE, Dims, KEYS, check_apart, check_cached, check_computed, check_distinct, check_dtype, check_keys, check_rows,
    check_scale,
};
use crate::error::{Error, Result};
use crate::threads;
use crate::view::{View, are_distinct};

/// Tokens that one job writes: what it reads and what it writes fits a second-level cache.
const TOKENS_PER_JOB: usize = 64;

/// Bytes from which on rows are written past the caches, which they would not outlive anyway.
const MIN_STREAMED_BYTES: usize = 1 << 22;

/// What stored FP8 keys and values must be multiplied by, float32 `(1,)` or `(num_kv_heads,)`; 1 by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scales {
    /// Of keys.
    pub k: Option<View<1>>,
    /// Of values.
    pub v: Option<View<1>>,
}

/// Writes token `i` of `k` and `v` into slot `slot_mapping[i]` of the caches; slot -1 is skipped.
///
/// Slot `s` is offset `s % block_size` of block `s / block_size`. Where a slot comes twice, the later token wins.
/// The caches may be of another element type than `k` and `v`: values are rounded to the nearest, in FP8 after they were
/// divided by the scale, and what is too large for FP8 becomes its largest number.
///
/// # Errors
///
/// Shapes that disagree, element types that are not computed with, rows that are not contiguous, inputs that overlap a
/// cache, scales beside a cache that is not FP8, and slots outside the cache; nothing is written then.
///
/// # Complexity
///
/// One row of `head_dim` elements moved per token, KV head and cache.
pub fn append_kv(
    k: &View<3>,
    v: &View<3>,
    k_cache: &View<4>,
    v_cache: &View<4>,
    slot_mapping: &[i64],
    scales: &Scales,
    threads: usize,
) -> Result<()> {
    let mut dims = Dims::default();
    dims.bind("k", k, KEYS)?;
    dims.bind("v", v, KEYS)?;
    dims.bind("k_cache", k_cache, CACHE)?;
    dims.bind("v_cache", v_cache, CACHE)?;
    for (name, input, cache) in [("k", k, k_cache), ("v", v, v_cache)] {
        check_input(name, input, cache)?;
        check_apart(("k_cache", k_cache), (name, input))?;
        check_apart(("v_cache", v_cache), (name, input))?;
    }
    for (name, cache) in [("k_cache", k_cache), ("v_cache", v_cache)] {
        check_cached(name, cache)?;
        check_distinct(name, cache)?;
    }
    check_keys("k_cache", k_cache)?;
    check_rows("v_cache", v_cache)?;
    for (name, scale, cache) in [("k_scale", scales.k, k_cache), ("v_scale", scales.v, v_cache)] {
        let Some(scale) = scale else { continue };
        check_scale(name, &scale, cache)?;
        check_apart(("k_cache", k_cache), (name, &scale))?;
        check_apart(("v_cache", v_cache), (name, &scale))?;
    }
    let num_slots = check_slots(slot_mapping, k.shape()[0], k_cache)?;
    let threads = if come_once(slot_mapping, num_slots) { threads } else { 1 };
    let keys = Rows { src: k, cache: k_cache, scale: scales.k.as_ref() };
    let values = Rows { src: v, cache: v_cache, scale: scales.v.as_ref() };
    if lie_apart(k_cache, v_cache) {
        append(&[keys, values], slot_mapping, threads);
    } else {
        // One after the other: should the two share memory, the outcome is still the same on every run.
        append(&[keys], slot_mapping, threads);
        append(&[values], slot_mapping, threads);
    }
    Ok(())
}

/// Whether no element of one cache lies where one of the other does, as far as strides tell.
fn lie_apart(a: &View<4>, b: &View<4>) -> bool {
    let size = a.dtype().size_bytes() as i64;
    let distance = b.at([0; 4]).addr() as i64 - a.at([0; 4]).addr() as i64;
    let is_alike = a.dtype() == b.dtype() && a.strides() == b.strides() && distance % size == 0;
    let [blocks, heads, tokens, elements] = a.shape();
    let [block, head, token, element] = a.strides();
    is_alike && are_distinct(&[2, blocks, heads, tokens, elements], &[distance / size, block, head, token, element])
}

/// Keys or values may be of a type that is computed with, or be stored as they are.
fn check_input(name: &'static str, input: &View<3>, cache: &View<4>) -> Result<()> {
    if input.dtype().is_fp8() {
        check_dtype(name, input, cache.dtype())?;
    } else {
        check_computed(name, input)?;
    }
    check_rows(name, input)
}

/// Refuses slots outside the cache; answers how many it has.
fn check_slots(slot_mapping: &[i64], num_tokens: usize, cache: &View<4>) -> Result<usize> {
    if slot_mapping.len() != num_tokens {
        return Err(Error::Shape {
            argument: "slot_mapping",
            expected: format!("(num_tokens={num_tokens},)"),
            found: format!("({},)", slot_mapping.len()),
        });
    }
    let [num_blocks, _, block_size, _] = cache.shape();
    let num_slots = num_blocks * block_size;
    match slot_mapping.iter().position(|slot| !(-1..num_slots as i64).contains(slot)) {
        None => Ok(num_slots),
        Some(index) => Err(Error::Element {
            argument: "slot_mapping",
            index: index.to_string(),
            expected: format!("-1 or a slot below {num_slots}"),
            found: slot_mapping[index],
        }),
    }
}

/// Whether no slot comes twice, so that tokens may be written in any order.
fn come_once(slot_mapping: &[i64], num_slots: usize) -> bool {
    let mut seen = vec![0_u64; num_slots.div_ceil(64)];
    slot_mapping.iter().filter_map(|slot| usize::try_from(*slot).ok()).all(|slot| {
        let (word, bit) = (&mut seen[slot / 64], 1 << (slot % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    })
}

/// What is written, and where to.
pub(super) struct Rows<'a> {
    pub(super) src: &'a View<3>,
    pub(super) cache: &'a View<4>,
    scale: Option<&'a View<1>>,
}

fn append(caches: &[Rows<'_>], slot_mapping: &[i64], threads: usize) {
    let [num_tokens, num_heads, head_dim] = caches[0].src.shape();
    let num_jobs = if threads > 1 { num_tokens.div_ceil(TOKENS_PER_JOB) } else { num_tokens.min(1) };
    let per_job = num_tokens.div_ceil(num_jobs.max(1));
    threads::for_each(threads, caches.len() * num_tokens * num_heads * head_dim, num_jobs, |job| {
        let mut room = Vec::new();
        let mut token = job * per_job;
        let end = num_tokens.min(token + per_job);
        while token < end {
            let len = run_len(&slot_mapping[token..end], caches[0].cache.shape()[2]);
            if let Ok(slot) = usize::try_from(slot_mapping[token]) {
                for rows in caches {
                    if rows.cache.is_packed() {
                        rows.pack_run(token, slot, len, &mut room);
                    } else {
                        rows.write_run(token, slot, len);
                    }
                }
            }
            token += len;
        }
        fence();
    });
}

/// How many tokens from the first one on lie in successive slots of one block.
fn run_len(slots: &[i64], block_size: usize) -> usize {
    let first = slots[0];
    let longest = if first < 0 { 1 } else { block_size - first as usize % block_size };
    slots.iter().take(longest).zip(first..).take_while(|(slot, next)| *slot == next).count()
}

impl Rows<'_> {
    /// Writes `len` tokens from `token` on to the slots from `slot` on, which lie in one block.
    fn write_run(&self, token: usize, slot: usize, len: usize) {
        let Self { src, cache, .. } = self;
        let [num_tokens, num_heads, head_dim] = src.shape();
        let block_size = cache.shape()[2];
        let is_same = src.dtype() == cache.dtype();
        let bytes = head_dim * src.dtype().size_bytes();
        let is_streamed = num_tokens * num_heads * bytes >= MIN_STREAMED_BYTES;
        let [token_step, from_step] = [0, 1].map(|i| src.strides()[i] as isize * src.dtype().size_bytes() as isize);
        let [to_step, slot_step] = [1, 2].map(|i| cache.strides()[i] as isize * cache.dtype().size_bytes() as isize);
        let first = src.at([token, 0, 0]).cast::<u8>();
        let slot = cache.at([slot / block_size, 0, slot % block_size, 0]).cast::<u8>();
        // A head's slots lie side by side: the longest spans are written one after the other.
        for head in 0..num_heads {
            let (mut from, mut to) =
                (first.wrapping_offset(head as isize * from_step), slot.wrapping_offset(head as isize * to_step));
            for _ in 0..len {
                // SAFETY: both rows lie inside their views (slots were checked), which do not overlap.
                unsafe {
                    match (is_same, is_streamed) {
                        (true, true) => copy_row(from, to, bytes),
                        (true, false) => to.copy_from_nonoverlapping(from, bytes),
                        (false, _) => self.convert(from.cast(), to.cast(), head),
                    }
                }
                (from, to) = (from.wrapping_offset(token_step), to.wrapping_offset(slot_step));
            }
        }
    }

    /// Converts one row.
    ///
    /// # Safety
    ///
    /// It can be read, the other written, and they do not overlap.
    pub(super) unsafe fn convert(&self, from: *const std::ffi::c_void, to: *mut std::ffi::c_void, head: usize) {
        const PIECE: usize = 128;
        let head_dim = self.src.shape()[2];
        let sizes = [self.src.dtype(), self.cache.dtype()].map(crate::view::DType::size_bytes);
        let scale = self.scale.map(|scale| read_scale(scale, head));
        let mut piece = [0_f32; PIECE];
        for first in (0..head_dim).step_by(PIECE) {
            let piece = &mut piece[..PIECE.min(head_dim - first)];
            // SAFETY: the caller's promise.
            unsafe {
                load(self.src.dtype(), from.byte_add(first * sizes[0]), piece);
                if let Some(scale) = scale {
                    piece.iter_mut().for_each(|x| *x /= scale);
                }
                store(self.cache.dtype(), piece, to.byte_add(first * sizes[1]));
            }
        }
    }
}

/// The scale of a KV head.
pub(super) fn read_scale(scale: &View<1>, head: usize) -> f32 {
    let index = if scale.shape()[0] == 1 { 0 } else { head };
    // SAFETY: the element lies inside the view, which is float32.
    unsafe { scale.at([index]).cast::<f32>().read() }
}
