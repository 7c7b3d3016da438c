//! FP8 as pairs of bfloat16: which bytes are looked up together, and in which tables.
//!
//! A lookup gives the lower and upper bytes of 64 values, which meet within each sixteen bytes of a register. What is looked
//! up is arranged first, so that values come out where they are multiplied.

use super::{ByteLookup, Element, F8E4M3, F8E5M2, position};
use crate::fp8::as_bf16;
use crate::view::DType;

const UNIT: usize = 64;
const LANES: usize = 16;

/// The bytes of the bfloat16 of each FP8 without its sign.
pub(crate) struct Bf16Table {
    pub(super) low: [u8; 128],
    pub(super) high: [u8; 128],
}

impl Bf16Table {
    const fn of(dtype: DType) -> Self {
        let mut table = Self { low: [0; 128], high: [0; 128] };
        let mut bits = 0;
        while bits < 128 {
            [table.low[bits], table.high[bits]] = as_bf16(dtype, bits as u8).to_le_bytes();
            bits += 1;
        }
        table
    }
}

/// Elements of one byte that bfloat16 holds.
pub(crate) trait ByteElement: Element {
    const TABLE: &'static Bf16Table;
}

impl ByteElement for F8E4M3 {
    const TABLE: &'static Bf16Table = &Bf16Table::of(DType::F8E4M3);
}

impl ByteElement for F8E5M2 {
    const TABLE: &'static Bf16Table = &Bf16Table::of(DType::F8E5M2);
}

/// Of a unit of bytes: the first 32 come out as half 0, the others as half 1.
const NATURAL: [u8; UNIT] = {
    let mut order = [0; UNIT];
    let mut i = 0;
    while i < UNIT {
        let (group, half, byte) = (i / 16, i % 16 / 8, i % 8);
        order[i] = (32 * half + 8 * group + byte) as u8;
        i += 1;
    }
    order
};

/// Of a byte each of two units: parts 0 and 1 of what [`position`] says, or 2 and 3, come out as halves, a pair a lane.
const fn paired(first_part: usize) -> [u8; UNIT] {
    let mut order = [0; UNIT];
    let mut i = 0;
    while i < UNIT {
        let (lane, half, unit) = (i / 16 * 4 + i % 8 / 2, i % 16 / 8, i % 2);
        order[i] = (UNIT * unit + position(DType::F8E4M3, LANES, first_part + half, lane)) as u8;
        i += 1;
    }
    order
}
const PAIRED: [[u8; UNIT]; 2] = [paired(0), paired(2)];

/// Elements 0 to 31 of a unit, or with part 1 those from 32 on.
#[inline(always)]
pub(crate) unsafe fn widen_half<V: ByteLookup, E: ByteElement>(unit: V::Unit, part: usize) -> V::Unit {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = V::arrange(unit, unit, &NATURAL);
        if part == 0 { V::look_up::<0>(bytes, E::TABLE) } else { V::look_up::<1>(bytes, E::TABLE) }
    }
}

/// Pairs of an element of `a` and one of `b`, those of vector `part` of [`position`].
#[inline(always)]
pub(crate) unsafe fn widen_pairs<V: ByteLookup, E: ByteElement>(a: V::Unit, b: V::Unit, part: usize) -> V::Unit {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = V::arrange(a, b, if part < 2 { &PAIRED[0] } else { &PAIRED[1] });
        if part.is_multiple_of(2) { V::look_up::<0>(bytes, E::TABLE) } else { V::look_up::<1>(bytes, E::TABLE) }
    }
}
