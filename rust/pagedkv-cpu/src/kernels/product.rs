//! The matrix product of many rows with a panel, in registers: six rows times a few columns at a time.

use crate::simd::{Bf16Dot, Vector};

/// Rows that one block of registers takes.
pub(crate) const BLOCK_ROWS: usize = 6;

/// `c = c * shrink + a . b`, or `c = a . b` without `shrink`.
pub(crate) struct Product {
    /// Rows of 32-bit cells, one per step, in whole blocks.
    pub(crate) a: *const u8,
    /// Bytes from one row of `a` to the next.
    pub(crate) a_stride: usize,
    pub(crate) num_rows: usize,
    /// Columns of a panel.
    pub(crate) b: *const f32,
    /// Steps from one column of `b` to the next.
    pub(crate) b_steps: usize,
    pub(crate) num_columns: usize,
    /// Rows of as many vectors as `b` has columns.
    pub(crate) c: *mut f32,
    /// Floats from one row of `c` to the next.
    pub(crate) c_stride: usize,
    /// A number per row, or null.
    pub(crate) shrink: *const f32,
    /// What each block of rows needs: steps where there is a `shrink`, columns where there is none.
    pub(crate) limits: *const usize,
}

/// Multiplies.
///
/// # Safety
///
/// The processor has the instructions, and the pointers of [`Product`] have room for what they say.
pub(crate) type ProductFn = unsafe fn(&Product);

/// How cells are multiplied.
///
/// # Safety
///
/// As for [`Vector`].
pub(crate) trait Cells<V: Vector> {
    type Operand: Copy;
    unsafe fn splat(a: *const u8) -> Self::Operand;
    unsafe fn load(b: *const f32) -> Self::Operand;
    unsafe fn add(sum: V, a: Self::Operand, b: Self::Operand) -> V;
}

/// Cells of one float32.
pub(crate) struct Floats;

impl<V: Vector> Cells<V> for Floats {
    type Operand = V;

    #[inline(always)]
    unsafe fn splat(a: *const u8) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::splat(a.cast::<f32>().read()) }
    }

    #[inline(always)]
    unsafe fn load(b: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(b) }
    }

    #[inline(always)]
    unsafe fn add(sum: V, a: V, b: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { b.mul_add(a, sum) }
    }
}

/// Cells of two bfloat16.
pub(crate) struct Pairs;

impl<V: Bf16Dot> Cells<V> for Pairs {
    type Operand = V::Unit;

    #[inline(always)]
    unsafe fn splat(a: *const u8) -> V::Unit {
        // SAFETY: the caller's promise.
        unsafe { V::splat_pair(a) }
    }

    #[inline(always)]
    unsafe fn load(b: *const f32) -> V::Unit {
        // SAFETY: the caller's promise.
        unsafe { V::load_unit(b.cast()) }
    }

    #[inline(always)]
    unsafe fn add(sum: V, a: V::Unit, b: V::Unit) -> V {
        // SAFETY: the caller's promise.
        unsafe { sum.dot_pairs(b, a) }
    }
}

/// Multiplies: columns outside, so that those of one block stay in the first cache while all rows pass.
///
/// # Safety
///
/// As for [`ProductFn`].
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector, C: Cells<V>>(product: &Product) {
    let mut column = 0;
    while column < product.num_columns {
        let left = product.num_columns - column;
        // SAFETY: the caller's promise.
        column += unsafe {
            match (left, V::LANES) {
                (4.., 16) => columns::<V, C, 4>(product, column),
                (2.., _) => columns::<V, C, 2>(product, column),
                _ => columns::<V, C, 1>(product, column),
            }
        };
    }
}

/// Some columns, all blocks of rows; answers how many columns.
#[inline(always)]
unsafe fn columns<V: Vector, C: Cells<V>, const COLUMNS: usize>(product: &Product, column: usize) -> usize {
    for block in 0..product.num_rows / BLOCK_ROWS {
        // SAFETY: the caller's promise.
        unsafe {
            let limit = product.limits.add(block).read();
            if product.shrink.is_null() {
                if column < limit {
                    block_of_rows::<V, C, COLUMNS>(product, block * BLOCK_ROWS, column, product.b_steps);
                }
            } else if limit > 0 {
                block_of_rows::<V, C, COLUMNS>(product, block * BLOCK_ROWS, column, limit);
            }
        }
    }
    COLUMNS
}

#[inline(always)]
unsafe fn block_of_rows<V: Vector, C: Cells<V>, const COLUMNS: usize>(
    product: &Product,
    row: usize,
    column: usize,
    steps: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let c = product.c.add(row * product.c_stride + column * V::LANES);
        let mut sums = [[V::splat(0.0); COLUMNS]; BLOCK_ROWS];
        if !product.shrink.is_null() {
            for (i, sums) in sums.iter_mut().enumerate() {
                let shrink = V::splat(product.shrink.add(row + i).read());
                for (j, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load(c.add(i * product.c_stride + j * V::LANES)).mul(shrink);
                }
            }
        }
        let a = product.a.add(row * product.a_stride);
        let b = product.b.add(column * product.b_steps * V::LANES);
        for step in 0..steps {
            let mut of_b = [C::load(b.add(step * V::LANES)); COLUMNS];
            for (j, of_b) in of_b.iter_mut().enumerate().skip(1) {
                *of_b = C::load(b.add((j * product.b_steps + step) * V::LANES));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let of_a = C::splat(a.add(i * product.a_stride + 4 * step));
                for (sum, of_b) in sums.iter_mut().zip(of_b) {
                    *sum = C::add(*sum, of_a, of_b);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (j, sum) in sums.iter().enumerate() {
                sum.store(c.add(i * product.c_stride + j * V::LANES));
            }
        }
    }
}
