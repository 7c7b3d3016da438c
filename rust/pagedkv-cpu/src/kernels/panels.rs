//! Keys and values of a tile laid out for the matrix product of many rows.
//!
//! A panel is a row of columns, each a vector wide: `[column][step][lane]`, one 32-bit cell per lane. A step is what one
//! multiplication takes: an element in float32, or a pair of bfloat16. For scores the lanes are tokens and the steps run
//! along `head_dim`; for the output the lanes run along `head_dim` and the steps are tokens.

use super::score;
use super::weigh;
use crate::simd::{Bf16Dot, ByteElement, ByteLookup, Element, Vector, widen_half, widen_pairs};

/// What to lay out, and where.
pub(crate) struct Panel {
    /// Where each token's row, or its first cell in packed keys, lies; for keys, the last token's is repeated up to a whole
    /// vector of tokens.
    pub(crate) rows: *const *const u8,
    /// Tokens.
    pub(crate) len: usize,
    /// Bytes from the first KV head to this one.
    pub(crate) offset: isize,
    /// Bytes of a row.
    pub(crate) row_bytes: usize,
    /// The cells.
    pub(crate) cells: *mut f32,
    /// Steps of a column.
    pub(crate) steps: usize,
    /// Room for as many rows of keys as a vector has lanes.
    pub(crate) stage: *mut f32,
}

/// Lays out keys or values.
///
/// # Safety
///
/// The processor has the instructions, and the pointers of [`Panel`] have room for what they say.
pub(crate) type PackFn = unsafe fn(&Panel);

/// How a row of keys becomes the cells of its token.
pub(crate) trait KeyCells<V: Vector> {
    /// Writes all cells of one unit, `PARTS` vectors of them; answers how many.
    unsafe fn cells(unit: V::Unit, to: *mut f32) -> usize;
}

impl<V: Vector, E: Element> KeyCells<V> for score::Widened<E> {
    #[inline(always)]
    unsafe fn cells(unit: V::Unit, to: *mut f32) -> usize {
        for part in 0..E::PARTS {
            // SAFETY: the caller's promise.
            unsafe { E::widen::<V>(unit, part).store(to.add(part * V::LANES)) };
        }
        E::PARTS
    }
}

impl<V: Bf16Dot> KeyCells<V> for score::Pairs {
    #[inline(always)]
    unsafe fn cells(unit: V::Unit, to: *mut f32) -> usize {
        // SAFETY: the caller's promise.
        unsafe { V::store_unit(unit, to.cast()) };
        1
    }
}

impl<V: ByteLookup, E: ByteElement> KeyCells<V> for score::BytePairs<E> {
    #[inline(always)]
    unsafe fn cells(unit: V::Unit, to: *mut f32) -> usize {
        for part in 0..2 {
            // SAFETY: the caller's promise.
            unsafe { V::store_unit(widen_half::<V, E>(unit, part), to.add(part * V::LANES).cast()) };
        }
        2
    }
}

/// Lays out keys: tokens become lanes.
///
/// # Safety
///
/// As for [`PackFn`].
#[inline(always)]
pub(super) unsafe fn pack_keys<V: Vector, K: KeyCells<V>>(panel: &Panel) {
    for column in 0..panel.len.div_ceil(V::LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut staged = [panel.stage.cast_const(); 16];
            for (lane, staged) in staged.iter_mut().take(V::LANES).enumerate() {
                let row = panel.rows.add(column * V::LANES + lane).read().offset(panel.offset);
                let to = panel.stage.add(lane * panel.steps);
                *staged = to;
                stage_row::<V, K>(row, panel.row_bytes, to);
            }
            let cells = panel.cells.add(column * panel.steps * V::LANES);
            for step in (0..panel.steps).step_by(V::LANES) {
                V::transpose(staged.as_ptr(), cells.add(step * V::LANES), V::LANES);
                for staged in &mut staged {
                    *staged = staged.add(V::LANES);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn stage_row<V: Vector, K: KeyCells<V>>(row: *const u8, row_bytes: usize, to: *mut f32) {
    let mut to = to;
    // SAFETY: the caller's promise.
    unsafe {
        for unit in 0..row_bytes / V::UNIT_BYTES {
            to = to.add(V::LANES * K::cells(V::load_unit(row.add(unit * V::UNIT_BYTES)), to));
        }
        let part = row_bytes % V::UNIT_BYTES;
        if part > 0 {
            K::cells(V::load_part(row.add(row_bytes - part), part), to);
        }
    }
}

/// How rows of values become cells.
pub(crate) trait ValueCells<V: Vector> {
    const TOKENS: usize;
    /// Writes the unit at byte `at` of one or two rows to columns `stride` cells apart; answers how many. The second row
    /// may be null.
    unsafe fn cells(rows: [*const u8; 2], at: usize, part_bytes: usize, to: *mut f32, stride: usize) -> usize;
}

#[inline(always)]
unsafe fn load<V: Vector>(row: *const u8, at: usize, part_bytes: usize) -> V::Unit {
    // SAFETY: the caller's promise.
    unsafe { if part_bytes == 0 { V::load_unit(row.add(at)) } else { V::load_part(row.add(at), part_bytes) } }
}

/// Nothing is read of a row that is not there.
#[inline(always)]
unsafe fn load_two<V: Vector>(rows: [*const u8; 2], at: usize, part_bytes: usize) -> [V::Unit; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let b = if rows[1].is_null() { V::load_part(rows[0], 0) } else { load::<V>(rows[1], at, part_bytes) };
        [load::<V>(rows[0], at, part_bytes), b]
    }
}

impl<V: Vector, E: Element> ValueCells<V> for weigh::Widened<E> {
    const TOKENS: usize = 1;

    #[inline(always)]
    unsafe fn cells(rows: [*const u8; 2], at: usize, part_bytes: usize, to: *mut f32, stride: usize) -> usize {
        // SAFETY: the caller's promise.
        unsafe {
            let unit = load::<V>(rows[0], at, part_bytes);
            for part in 0..E::PARTS {
                E::widen::<V>(unit, part).store(to.add(part * stride));
            }
        }
        E::PARTS
    }
}

impl<V: Bf16Dot> ValueCells<V> for weigh::Pairs {
    const TOKENS: usize = 2;

    #[inline(always)]
    unsafe fn cells(rows: [*const u8; 2], at: usize, part_bytes: usize, to: *mut f32, stride: usize) -> usize {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b] = load_two::<V>(rows, at, part_bytes);
            V::store_unit(V::pair_up::<0>(a, b), to.cast());
            V::store_unit(V::pair_up::<1>(a, b), to.add(stride).cast());
        }
        2
    }
}

impl<V: ByteLookup, E: ByteElement> ValueCells<V> for weigh::BytePairs<E> {
    const TOKENS: usize = 2;

    #[inline(always)]
    unsafe fn cells(rows: [*const u8; 2], at: usize, part_bytes: usize, to: *mut f32, stride: usize) -> usize {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b] = load_two::<V>(rows, at, part_bytes);
            for part in 0..4 {
                V::store_unit(widen_pairs::<V, E>(a, b, part), to.add(part * stride).cast());
            }
        }
        4
    }
}

/// Lays out values: tokens become steps.
///
/// # Safety
///
/// As for [`PackFn`].
#[inline(always)]
pub(super) unsafe fn pack_values<V: Vector, F: ValueCells<V>>(panel: &Panel) {
    let stride = panel.steps * V::LANES;
    for token in (0..panel.len).step_by(F::TOKENS) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut rows = [panel.rows.add(token).read().offset(panel.offset), std::ptr::null()];
            if token + 1 < panel.len {
                rows[1] = panel.rows.add(token + 1).read().offset(panel.offset);
            }
            let mut to = panel.cells.add(token / F::TOKENS * V::LANES);
            for unit in 0..panel.row_bytes / V::UNIT_BYTES {
                to = to.add(stride * F::cells(rows, unit * V::UNIT_BYTES, 0, to, stride));
            }
            let part = panel.row_bytes % V::UNIT_BYTES;
            if part > 0 {
                F::cells(rows, panel.row_bytes - part, part, to, stride);
            }
        }
    }
}
