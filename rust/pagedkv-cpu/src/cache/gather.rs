//! Collects the keys and values of whole sequences into contiguous arrays.

use std::ffi::c_void;

use super::append::{Scales, read_scale};
use crate::attention::{BlockTable, check_seq_lens};
use crate::convert::{load, store};
use crate::dims::{
    CACHE, Dims, VALUES_OUT, check_apart, check_cached, check_computed, check_distinct, check_dtype, check_keys,
    check_rows, check_scale,
};
use crate::error::{Error, Result};
use crate::packed_keys::{GROUP_TOKENS, PackedKeys};
use crate::threads;
use crate::view::{DType, View};

/// Copies the first `seq_lens[s]` tokens of each sequence, one sequence after another, into `k_out` and `v_out`.
///
/// Sequence `s` is row `rows[s]` of `block_table`, or row `s` without `rows`. Outputs may be of another element type
/// than the caches: FP8 becomes numbers, multiplied by the scale. An output of FP8 is a copy of what is stored.
///
/// # Errors
///
/// Shapes that disagree, element types that are not computed with, an output of FP8 whose cache is not of that type, rows
/// that are not contiguous, outputs that overlap themselves or an input, scales beside a cache that is not FP8 or an
/// output that is, lengths beyond the table and block ids outside the cache; nothing is written then.
///
/// # Complexity
///
/// One row of `head_dim` elements moved per token, KV head and cache.
#[expect(clippy::too_many_arguments, reason = "the arguments of the operation in every language")]
pub fn gather_kv(
    k_cache: &View<4>,
    v_cache: &View<4>,
    block_table: &View<2>,
    rows: Option<&[i32]>,
    seq_lens: &[i32],
    k_out: &View<3>,
    v_out: &View<3>,
    scales: &Scales,
    threads: usize,
) -> Result<()> {
    let seq_lens = check_seq_lens(seq_lens)?;
    let mut dims = Dims::default();
    dims.bind("k_cache", k_cache, CACHE)?;
    dims.bind("v_cache", v_cache, CACHE)?;
    dims.fix("sum(seq_lens)", seq_lens.iter().sum());
    dims.bind("k_out", k_out, VALUES_OUT)?;
    dims.bind("v_out", v_out, VALUES_OUT)?;
    for (name, cache) in [("k_cache", k_cache), ("v_cache", v_cache)] {
        check_cached(name, cache)?;
        check_apart(("k_out", k_out), (name, cache))?;
        check_apart(("v_out", v_out), (name, cache))?;
    }
    check_keys("k_cache", k_cache)?;
    check_rows("v_cache", v_cache)?;
    for (name, out, cache) in [("k_out", k_out, k_cache), ("v_out", v_out, v_cache)] {
        check_output(name, out, cache)?;
    }
    for (name, scale, cache, out) in [("k_scale", scales.k, k_cache, k_out), ("v_scale", scales.v, v_cache, v_out)] {
        let Some(scale) = scale else { continue };
        check_scale(name, &scale, cache)?;
        check_numbers(name, out)?;
        check_apart(("k_out", k_out), (name, &scale))?;
        check_apart(("v_out", v_out), (name, &scale))?;
    }
    let pieces = pieces(k_cache, block_table, rows, &seq_lens)?;
    gather_one(k_cache, k_out, scales.k.as_ref(), &pieces, threads);
    gather_one(v_cache, v_out, scales.v.as_ref(), &pieces, threads);
    Ok(())
}

/// An output may be of a type that is computed with, or take what is stored as it is.
fn check_output(name: &'static str, out: &View<3>, cache: &View<4>) -> Result<()> {
    if out.dtype().is_fp8() {
        check_dtype(name, out, cache.dtype())?;
    } else {
        check_computed(name, out)?;
    }
    check_rows(name, out)?;
    check_distinct(name, out)
}

/// Refuses a scale beside an output of FP8, which takes bytes and no numbers.
fn check_numbers(argument: &'static str, out: &View<3>) -> Result<()> {
    if !out.dtype().is_fp8() {
        return Ok(());
    }
    let expected = "none beside an output of FP8, which is a copy".to_owned();
    Err(Error::Value { argument, expected, found: format!("an output of {}", out.dtype().name()) })
}

/// Tokens that [`gather_kv`] would collect, so that outputs are made only for lengths and blocks that are there.
///
/// # Errors
///
/// Lengths beyond the table, rows outside it, and block ids outside the cache.
///
/// # Complexity
///
/// O(1) per block.
pub fn num_gathered_tokens(
    cache: &View<4>,
    block_table: &View<2>,
    rows: Option<&[i32]>,
    seq_lens: &[i32],
) -> Result<usize> {
    let seq_lens = check_seq_lens(seq_lens)?;
    pieces(cache, block_table, rows, &seq_lens)?;
    Ok(seq_lens.iter().sum())
}

fn pieces(cache: &View<4>, block_table: &View<2>, rows: Option<&[i32]>, seq_lens: &[usize]) -> Result<Vec<Piece>> {
    let [num_blocks, _, block_size, _] = cache.shape();
    let table = BlockTable::new(block_table, rows, seq_lens.len(), num_blocks, block_size)?;
    let mut pieces = Vec::new();
    let mut token = 0;
    for (sequence, len) in seq_lens.iter().enumerate() {
        for (i, block) in table.blocks(sequence, 0..*len)?.into_iter().enumerate() {
            let len = block_size.min(len - i * block_size);
            pieces.push(Piece { block, token, len });
            token += len;
        }
    }
    Ok(pieces)
}

/// The used slots of one block and the first output token they become.
struct Piece {
    block: u32,
    token: usize,
    len: usize,
}

fn gather_one(cache: &View<4>, out: &View<3>, scale: Option<&View<1>>, pieces: &[Piece], threads: usize) {
    let [num_tokens, num_heads, head_dim] = out.shape();
    let work = num_tokens * num_heads * head_dim;
    threads::for_each(threads, work, pieces.len(), |index| {
        let (mut row, mut packed) = (vec![0_f32; head_dim], Vec::new());
        for head in 0..num_heads {
            let factor = scale.map_or(1.0, |scale| read_scale(scale, head));
            if cache.is_packed() {
                gather_packed(cache, out, (head, factor), &pieces[index], (&mut row, &mut packed));
                continue;
            }
            let Piece { block, token, len } = pieces[index];
            for offset in 0..len {
                let from = cache.at([block as usize, head, offset, 0]);
                // SAFETY: the row lies inside its view (blocks were checked); no other piece has these output tokens.
                unsafe { write_row((cache.dtype(), from, factor), out, [token + offset, head], &mut row) };
            }
        }
    });
}

/// Writes the rows of a head in a piece, times a factor; the last two are room for one row and for a group of packed ones.
fn gather_packed(
    cache: &View<4>,
    out: &View<3>,
    (head, factor): (usize, f32),
    piece: &Piece,
    (row, rows): (&mut [f32], &mut Vec<u32>),
) {
    let keys = PackedKeys::new(cache.dtype(), row.len());
    let words = keys.row_bytes() / 4;
    rows.resize(GROUP_TOKENS * words, 0);
    let block = cache.at([piece.block as usize, head, 0, 0]).cast::<u8>();
    for offset in (0..piece.len).step_by(GROUP_TOKENS) {
        let count = PackedKeys::run_len(offset, piece.len - offset);
        // SAFETY: the tokens are in one group of a block, which was checked; the buffer holds a group.
        unsafe { keys.unpack(block.wrapping_add(keys.offset(offset)), count, rows.as_mut_ptr().cast()) };
        for (i, packed) in rows.chunks_exact(words).take(count).enumerate() {
            let from = (cache.dtype(), packed.as_ptr().cast(), factor);
            // SAFETY: as for rows that are not packed.
            unsafe { write_row(from, out, [piece.token + offset + i, head], row) };
        }
    }
}

/// Writes a row of the output, from a row of a type and times a factor; `wide` is room for one.
///
/// # Safety
///
/// The row can be read and shares no memory with the output.
unsafe fn write_row(
    (dtype, from, factor): (DType, *const c_void, f32),
    out: &View<3>,
    [token, head]: [usize; 2],
    wide: &mut [f32],
) {
    let to = out.at([token, head, 0]);
    // SAFETY: the caller's promise, and the row of the output lies inside it.
    unsafe {
        if dtype == out.dtype() {
            let bytes = wide.len() * dtype.size_bytes();
            to.cast::<u8>().copy_from_nonoverlapping(from.cast::<u8>(), bytes);
        } else {
            load(dtype, from, wide);
            wide.iter_mut().for_each(|x| *x *= factor);
            store(out.dtype(), wide, to);
        }
    }
}
