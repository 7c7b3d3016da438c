//! Writes the keys and values of new tokens into their slots.

use crate::convert::{load, store};
use crate::dims::{CACHE, Dims, KEYS, check_apart, check_computed, check_distinct, check_rows};
use crate::error::{Error, Result};
use crate::threads;
use crate::view::View;

/// Writes token `i` of `k` and `v` into slot `slot_mapping[i]` of the caches; slot -1 is skipped.
///
/// Slot `s` is offset `s % block_size` of block `s / block_size`. Where a slot comes twice, the later token wins.
/// The caches may be of another element type than `k` and `v`.
///
/// # Errors
///
/// Shapes that disagree, element types that are not computed with, rows that are not contiguous, inputs that overlap a
/// cache, and slots outside the cache; nothing is written then.
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
    threads: usize,
) -> Result<()> {
    let mut dims = Dims::default();
    dims.bind("k", k, KEYS)?;
    dims.bind("v", v, KEYS)?;
    dims.bind("k_cache", k_cache, CACHE)?;
    dims.bind("v_cache", v_cache, CACHE)?;
    for (name, input) in [("k", k), ("v", v)] {
        check_computed(name, input)?;
        check_rows(name, input)?;
        check_apart(("k_cache", k_cache), (name, input))?;
        check_apart(("v_cache", v_cache), (name, input))?;
    }
    for (name, cache) in [("k_cache", k_cache), ("v_cache", v_cache)] {
        check_computed(name, cache)?;
        check_rows(name, cache)?;
        check_distinct(name, cache)?;
    }
    check_slots(slot_mapping, k.shape()[0], k_cache)?;
    // One after the other: should the two caches share memory, the outcome is still the same on every run.
    append_one(k, k_cache, slot_mapping, threads);
    append_one(v, v_cache, slot_mapping, threads);
    Ok(())
}

fn check_slots(slot_mapping: &[i64], num_tokens: usize, cache: &View<4>) -> Result<()> {
    if slot_mapping.len() != num_tokens {
        return Err(Error::Shape {
            argument: "slot_mapping",
            expected: format!("(num_tokens={num_tokens},)"),
            found: format!("({},)", slot_mapping.len()),
        });
    }
    let [num_blocks, _, block_size, _] = cache.shape();
    let num_slots = (num_blocks * block_size) as i64;
    match slot_mapping.iter().position(|slot| !(-1..num_slots).contains(slot)) {
        None => Ok(()),
        Some(index) => Err(Error::Element {
            argument: "slot_mapping",
            index: index.to_string(),
            expected: format!("-1 or a slot below {num_slots}"),
            found: slot_mapping[index],
        }),
    }
}

// A job takes one head of all tokens, so that tokens which name the same slot are written in order.
fn append_one(src: &View<3>, cache: &View<4>, slot_mapping: &[i64], threads: usize) {
    let [num_tokens, num_heads, head_dim] = src.shape();
    let block_size = cache.shape()[2];
    let work = num_tokens * num_heads * head_dim;
    threads::for_each(threads, work, num_heads, |head| {
        let mut row = vec![0_f32; head_dim];
        for (token, slot) in slot_mapping.iter().enumerate() {
            let Ok(slot) = usize::try_from(*slot) else { continue };
            let from = src.at([token, head, 0]);
            let to = cache.at([slot / block_size, head, slot % block_size, 0]);
            // SAFETY: both rows lie inside their views (slots were checked), which do not overlap.
            unsafe {
                if src.dtype() == cache.dtype() {
                    let bytes = head_dim * src.dtype().size_bytes();
                    to.cast::<u8>().copy_from_nonoverlapping(from.cast::<u8>(), bytes);
                } else {
                    load(src.dtype(), from, &mut row);
                    store(cache.dtype(), &row, to);
                }
            }
        }
    });
}
