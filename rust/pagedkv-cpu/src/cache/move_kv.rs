//! Moves single tokens over all layers, as the accepted path of a draft tree asks for.

use crate::dims::{check_distinct, check_keys};
use crate::error::{Error, Result};
use crate::packed_keys::PackedKeys;
use crate::threads;
use crate::view::View;

/// For each (group, source slot, destination slot) of `moves` whose group is `group`, moves the keys and values of a token
/// in all layers of `pool`, `(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)`.
///
/// Slot `s` is offset `s % block_size` of block `s / block_size`. All sources are read before any destination is written.
///
/// # Errors
///
/// Slots outside the pool, a destination that comes twice, rows that are neither contiguous nor packed, and a pool whose
/// elements overlap; nothing is written then.
///
/// # Complexity
///
/// The bytes of a token in all layers per move, copied twice, and O(k log k) to check k moves.
pub fn move_kv(pool: &View<6>, moves: &[[i64; 3]], group: i64, threads: usize) -> Result<()> {
    check_keys("pool", pool)?;
    check_distinct("pool", pool)?;
    let [num_blocks, num_layers, num_sides, num_heads, block_size, head_dim] = pool.shape();
    let moves = check_moves(moves, group, num_blocks * block_size)?;
    let row_bytes = head_dim * pool.dtype().size_bytes();
    let keys = PackedKeys::new(pool.dtype(), head_dim);
    let num_lanes = num_layers * num_sides * num_heads;
    // A job takes the rows of one head, of all moves: they touch no other job's, and fit a cache.
    threads::for_each(threads, num_lanes * moves.len() * row_bytes / 4, num_lanes, |lane| {
        let (rest, head) = (lane / num_heads, lane % num_heads);
        let is_packed = pool.is_packed() && rest % num_sides == 0;
        let row = |slot: usize| {
            let offset = slot % block_size;
            let at =
                |token| pool.at([slot / block_size, rest / num_sides, rest % num_sides, head, token, 0]).cast::<u8>();
            if is_packed { at(0).wrapping_add(keys.offset(offset)) } else { at(offset) }
        };
        let mut rows = vec![0_u8; moves.len() * row_bytes];
        for (buffer, &[source, _]) in rows.chunks_exact_mut(row_bytes.max(1)).zip(&moves) {
            // SAFETY: slots were checked, and rows are contiguous or packed; nobody writes this head's meanwhile.
            unsafe {
                if is_packed {
                    keys.unpack(row(source), 1, buffer.as_mut_ptr());
                } else {
                    buffer.as_mut_ptr().copy_from_nonoverlapping(row(source), row_bytes);
                }
            }
        }
        for (buffer, &[_, destination]) in rows.chunks_exact(row_bytes.max(1)).zip(&moves) {
            // SAFETY: as above; each destination comes once.
            unsafe {
                if is_packed {
                    keys.pack(buffer.as_ptr(), 1, row(destination));
                } else {
                    row(destination).copy_from_nonoverlapping(buffer.as_ptr(), row_bytes);
                }
            }
        }
    });
    Ok(())
}

/// The moves of one group, as slots.
fn check_moves(moves: &[[i64; 3]], group: i64, num_slots: usize) -> Result<Vec<[usize; 2]>> {
    let refuse = |index: usize, side: usize, expected: String| Error::Element {
        argument: "slot_moves",
        index: format!("{index}, {side}"),
        expected,
        found: moves[index][side],
    };
    let mut found = Vec::new();
    let mut destinations = Vec::new();
    for (index, &[_, source, destination]) in moves.iter().enumerate().filter(|(_, entry)| entry[0] == group) {
        let slot = |side: usize, slot: i64| match usize::try_from(slot) {
            Ok(slot) if slot < num_slots => Ok(slot),
            _ => Err(refuse(index, side, format!("a slot below {num_slots}"))),
        };
        let pair = [slot(1, source)?, slot(2, destination)?];
        destinations.push((pair[1], index));
        found.push(pair);
    }
    destinations.sort_unstable();
    if let Some(twice) = destinations.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(refuse(twice[1].1, 2, "each destination once".to_owned()));
    }
    Ok(found)
}
