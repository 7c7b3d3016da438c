//! Single rows between their storage and the cells of the kernels.
//!
//! Compiled for each instruction set: of a step that sees few keys, this is the larger part.
#![expect(
    clippy::inline_always,
    reason = "a function that is not inlined into one that enables the instructions cannot use them"
)]

use std::ffi::c_void;

use super::MAX_HEAD_DIM;
use super::cells::Cells;
use crate::convert::{load, narrowed_bf16, store};
use crate::isa::Isa;
use crate::view::DType;

/// A row of elements that lie one after another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored {
    pub(super) data: *mut c_void,
    pub(super) dtype: DType,
    pub(super) len: usize,
}

impl Stored {
    #[inline(always)]
    fn at(&self, element: usize) -> *mut c_void {
        self.data.wrapping_byte_add(element * self.dtype.size_bytes())
    }
}

/// What turns a weighted sum into a result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Normaliser {
    pub(super) factor: f32,
    pub(super) sum: f32,
}

impl Normaliser {
    /// One number for both, where results are rounded to 16 bits: a division takes ten times as long as a product, and its
    /// last bit is lost.
    #[inline(always)]
    fn factor_of_narrow(self) -> f32 {
        self.factor / self.sum
    }
}

/// Makes a function of `$body` that runs it with the instructions of a set.
macro_rules! with_instructions {
    ($(#[$attribute:meta])* $name:ident = $body:ident($($argument:ident: $type:ty),*)) => {
        $(#[$attribute])*
        pub(super) unsafe fn $name(isa: Isa, $($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($argument: $type),*) {
                // SAFETY: the caller's promise.
                unsafe { $body($($argument),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
            unsafe fn avx512($($argument: $type),*) {
                // SAFETY: the caller's promise.
                unsafe { $body($($argument),*) }
            }
            // SAFETY: the caller's promise.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => avx2($($argument),*),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => avx512($($argument),*),
                    _ => $body($($argument),*),
                }
            }
        }
    };
}

with_instructions! {
    /// Widens a row to float32, in the order of the cells, and zeros behind its end.
    ///
    /// # Safety
    ///
    /// The processor has the instructions, and the row can be read.
    pack = pack_with(row: Stored, order: Cells, cells: &mut [f32])
}

with_instructions! {
    /// Copies each `lanes` cells of a row to a place `step` cells behind the last one; there are 1, 8 or 16 lanes.
    ///
    /// # Safety
    ///
    /// The processor has the instructions.
    spread = spread_with(row: &[f32], lanes: usize, step: usize, to: &mut [f32])
}

with_instructions! {
    /// Writes `cells * factor / sum` to a row.
    ///
    /// # Safety
    ///
    /// The processor has the instructions, and the row can be written.
    finish = finish_with(cells: &[f32], order: Cells, by: Normaliser, row: Stored)
}

#[inline(always)]
unsafe fn pack_with(row: Stored, order: Cells, cells: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match (order, row.dtype) {
            (Cells::EvensFirst(8), DType::BF16) => pack_bf16::<8>(row, cells),
            (Cells::EvensFirst(16), DType::BF16) => pack_bf16::<16>(row, cells),
            (Cells::EvensFirst(32), DType::BF16) => pack_bf16::<32>(row, cells),
            _ => pack_part(row, order, 0, cells),
        }
    }
}

/// Bfloat16 by whole units, whose length is known, so that they do not leave the registers.
#[inline(always)]
unsafe fn pack_bf16<const HALF: usize>(row: Stored, cells: &mut [f32]) {
    let mut start = 0;
    while start + 2 * HALF <= row.len {
        // SAFETY: the caller's promise; a row is no longer than its cells.
        unsafe {
            let to = cells.as_mut_ptr().add(start).cast::<[[f32; HALF]; 2]>();
            *to = widened_pairs(row.at(start).cast::<[u32; HALF]>().read_unaligned());
        }
        start += 2 * HALF;
    }
    // SAFETY: the caller's promise.
    unsafe { pack_part(row, Cells::EvensFirst(HALF), start, cells) };
}

#[inline(always)]
fn widened_pairs<const HALF: usize>(pairs: [u32; HALF]) -> [[f32; HALF]; 2] {
    let mut cells = [[0.0; HALF]; 2];
    for i in 0..HALF {
        cells[0][i] = f32::from_bits(pairs[i] << 16);
        cells[1][i] = f32::from_bits(pairs[i] & 0xffff_0000);
    }
    cells
}

/// The elements from `start` on, where a unit starts, and zeros behind them.
unsafe fn pack_part(row: Stored, order: Cells, start: usize, cells: &mut [f32]) {
    let (cells, len) = (&mut cells[start..], row.len - start);
    let Cells::EvensFirst(half) = order else {
        let (cells, behind) = cells.split_at_mut(len);
        // SAFETY: the caller's promise.
        unsafe { load(row.dtype, row.at(start), cells) };
        behind.fill(0.0);
        return;
    };
    if cells.is_empty() {
        return;
    }
    let mut natural = [0_f32; MAX_HEAD_DIM];
    // SAFETY: the caller's promise.
    unsafe { load(row.dtype, row.at(start), &mut natural[..len]) };
    for (cells, natural) in cells.chunks_exact_mut(2 * half).zip(natural.chunks_exact(2 * half)) {
        for i in 0..half {
            (cells[i], cells[half + i]) = (natural[2 * i], natural[2 * i + 1]);
        }
    }
}

#[inline(always)]
unsafe fn finish_with(cells: &[f32], order: Cells, by: Normaliser, row: Stored) {
    // SAFETY: the caller's promise.
    unsafe {
        match (order, row.dtype) {
            (Cells::EvensFirst(8), DType::BF16) => finish_bf16::<8>(cells, by, row),
            (Cells::EvensFirst(16), DType::BF16) => finish_bf16::<16>(cells, by, row),
            (Cells::EvensFirst(32), DType::BF16) => finish_bf16::<32>(cells, by, row),
            _ => finish_part(cells, order, by, row, 0),
        }
    }
}

#[inline(always)]
unsafe fn finish_bf16<const HALF: usize>(cells: &[f32], by: Normaliser, row: Stored) {
    let (mut start, factor) = (0, by.factor_of_narrow());
    while start + 2 * HALF <= row.len {
        // SAFETY: the caller's promise; a row is no longer than its cells.
        unsafe {
            let from = cells.as_ptr().add(start).cast::<[[f32; HALF]; 2]>();
            row.at(start).cast::<[u32; HALF]>().write_unaligned(narrowed_pairs(&*from, factor));
        }
        start += 2 * HALF;
    }
    // SAFETY: the caller's promise.
    unsafe { finish_part(cells, Cells::EvensFirst(HALF), by, row, start) };
}

#[inline(always)]
fn narrowed_pairs<const HALF: usize>(cells: &[[f32; HALF]; 2], factor: f32) -> [u32; HALF] {
    let mut pairs = [0; HALF];
    for i in 0..HALF {
        let low = u32::from(narrowed_bf16(cells[0][i] * factor));
        pairs[i] = low | u32::from(narrowed_bf16(cells[1][i] * factor)) << 16;
    }
    pairs
}

/// The elements from `start` on, where a unit starts.
unsafe fn finish_part(cells: &[f32], order: Cells, by: Normaliser, row: Stored, start: usize) {
    let (cells, len) = (&cells[start..], row.len - start);
    if len == 0 {
        return;
    }
    let mut natural = [0_f32; MAX_HEAD_DIM];
    match order {
        Cells::Natural => natural[..len].copy_from_slice(&cells[..len]),
        Cells::EvensFirst(half) => {
            for (cells, natural) in cells.chunks_exact(2 * half).zip(natural.chunks_exact_mut(2 * half)) {
                for i in 0..half {
                    (natural[2 * i], natural[2 * i + 1]) = (cells[i], cells[half + i]);
                }
            }
        }
    }
    let natural = &mut natural[..len];
    if row.dtype == DType::F32 {
        natural.iter_mut().for_each(|value| *value = *value * by.factor / by.sum);
    } else {
        let factor = by.factor_of_narrow();
        natural.iter_mut().for_each(|value| *value *= factor);
    }
    // SAFETY: the caller's promise.
    unsafe { store(row.dtype, natural, row.at(start)) };
}

#[inline(always)]
unsafe fn spread_with(row: &[f32], lanes: usize, step: usize, to: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match lanes {
            1 => spread_lanes::<1>(row, step, to),
            8 => spread_lanes::<8>(row, step, to),
            16 => spread_lanes::<16>(row, step, to),
            other => panic!("broken law: vectors of {other} lanes"),
        }
    }
}

#[inline(always)]
unsafe fn spread_lanes<const LANES: usize>(row: &[f32], step: usize, to: &mut [f32]) {
    let num_vectors = row.len() / LANES;
    assert!(num_vectors == 0 || (num_vectors - 1) * step + LANES <= to.len(), "broken law: no room for a row");
    for vector in 0..num_vectors {
        // SAFETY: there is room, and the row has so many vectors.
        unsafe {
            let cells = row.as_ptr().add(vector * LANES).cast::<[f32; LANES]>().read_unaligned();
            to.as_mut_ptr().add(vector * step).cast::<[f32; LANES]>().write_unaligned(cells);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::load;

    /// Numbers that every type holds exactly.
    fn numbers(len: usize) -> Vec<f32> {
        (0..len).map(|i| (i % 97) as f32 - 40.0).collect()
    }

    fn stored(bytes: &mut [u32], dtype: DType, len: usize) -> Stored {
        Stored { data: bytes.as_mut_ptr().cast(), dtype, len }
    }

    #[test]
    fn elements_go_to_their_cells_and_come_back() {
        let orders = [Cells::Natural, Cells::EvensFirst(8), Cells::EvensFirst(16), Cells::EvensFirst(32)];
        let isas = || Isa::ALL.into_iter().filter(|isa| isa.is_available());
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for len in [8, 40, 64, 136, 512] {
                for (order, isa) in orders.into_iter().flat_map(|order| isas().map(move |isa| (order, isa))) {
                    let (mut bytes, mut written) = (vec![0_u32; len], vec![0_u32; len]);
                    let row = stored(&mut bytes, dtype, len);
                    let padded = len.next_multiple_of(64);
                    let mut cells = vec![f32::NAN; padded];
                    let mut back = vec![0_f32; len];
                    // SAFETY: the vectors have room for the row, and the set is available.
                    unsafe {
                        store(dtype, &numbers(len), row.data);
                        pack(isa, row, order, &mut cells);
                        let by = Normaliser { factor: 3.0, sum: 2.0 };
                        let row = stored(&mut written, dtype, len);
                        finish(isa, &cells, order, by, row);
                        load(dtype, row.data, &mut back);
                    }
                    let of_cell = |cell| numbers(len).get(order.element(cell)).copied().unwrap_or(0.0);
                    let wanted: Vec<f32> = (0..padded).map(of_cell).collect();
                    assert_eq!(cells, wanted, "{dtype:?} {len} {order:?} {isa:?}");
                    let wanted: Vec<f32> = numbers(len).iter().map(|x| 1.5 * x).collect();
                    assert_eq!(back, wanted, "{dtype:?} {len} {order:?} {isa:?}");
                }
            }
        }
    }
}
