//! Element types of the cache, as units that widen to vectors.

use super::Vector;
use crate::packed_keys::{GROUP_TOKENS, cell_elements};
use crate::view::DType;

/// How elements of one type are read.
///
/// # Safety
///
/// As for [`Vector`].
pub(crate) trait Element: Copy {
    const DTYPE: DType;
    /// Vectors that a unit widens to.
    const PARTS: usize = 4 / Self::DTYPE.size_bytes();
    /// What a widened value must be multiplied by.
    const SCALE: f32 = 1.0;

    /// Vector `part` of a unit; `part` is a constant once the caller's loop is unrolled.
    unsafe fn widen<V: Vector>(unit: V::Unit, part: usize) -> V;
}

/// The element of a unit that lies in `lane` of vector `part`.
pub(crate) const fn position(dtype: DType, lanes: usize, part: usize, lane: usize) -> usize {
    match dtype {
        DType::BF16 => 2 * lane + part,
        // Words first, then the byte within the word.
        DType::F8E4M3 | DType::F8E5M2 => 2 * ((part & 1) * lanes + lane) + (part >> 1),
        _ => part * lanes + lane,
    }
}

/// Of a line of packed keys, the unit and the part of it that hold element `element` of the line, of the tokens of vector
/// `vector`. A line is four bytes of each of sixteen tokens: one unit of sixteen lanes, or two of eight.
pub(crate) const fn packed_source(dtype: DType, lanes: usize, element: usize, vector: usize) -> (usize, usize) {
    let (size, x) = (dtype.size_bytes(), cell_elements(dtype));
    let byte = ((element / x * GROUP_TOKENS + vector * lanes) * x + element % x) * size;
    let mut part = 0;
    while position(dtype, lanes, part, 0) * size != byte % (4 * lanes) {
        part += 1;
    }
    (byte / (4 * lanes), part)
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct F32;
#[derive(Clone, Copy, Debug)]
pub(crate) struct F16;
#[derive(Clone, Copy, Debug)]
pub(crate) struct BF16;
#[derive(Clone, Copy, Debug)]
pub(crate) struct F8E4M3;
#[derive(Clone, Copy, Debug)]
pub(crate) struct F8E5M2;

// SAFETY of every call below: it is the caller's promise, passed on.
impl Element for F32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    unsafe fn widen<V: Vector>(unit: V::Unit, _: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::widen_f32(unit) }
    }
}

macro_rules! two_parts {
    ($element:ty, $dtype:expr, $widen:ident) => {
        impl Element for $element {
            const DTYPE: DType = $dtype;

            #[inline(always)]
            unsafe fn widen<V: Vector>(unit: V::Unit, part: usize) -> V {
                // SAFETY: the caller's promise.
                unsafe { if part == 0 { V::$widen::<0>(unit) } else { V::$widen::<1>(unit) } }
            }
        }
    };
}

two_parts!(F16, DType::F16, widen_f16);
two_parts!(BF16, DType::BF16, widen_bf16);

macro_rules! four_parts {
    ($element:ty, $dtype:expr, $widen:ident, $scale:expr) => {
        impl Element for $element {
            const DTYPE: DType = $dtype;
            const SCALE: f32 = $scale;

            #[inline(always)]
            unsafe fn widen<V: Vector>(unit: V::Unit, part: usize) -> V {
                // SAFETY: the caller's promise.
                unsafe {
                    match part {
                        0 => V::$widen::<0>(unit),
                        1 => V::$widen::<1>(unit),
                        2 => V::$widen::<2>(unit),
                        _ => V::$widen::<3>(unit),
                    }
                }
            }
        }
    };
}

four_parts!(F8E4M3, DType::F8E4M3, widen_e4m3, 256.0);
four_parts!(F8E5M2, DType::F8E5M2, widen_e5m2, 1.0);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vector_of_a_line_is_a_part_of_a_unit() {
        let line = |dtype: DType, lanes: usize| -> Vec<(usize, usize)> {
            let elements = 0..4 / dtype.size_bytes();
            let vectors = 0..GROUP_TOKENS / lanes;
            elements.flat_map(|e| vectors.clone().map(move |v| packed_source(dtype, lanes, e, v))).collect()
        };
        assert_eq!(line(DType::F8E4M3, 16), [(0, 0), (0, 2), (0, 1), (0, 3)]);
        assert_eq!(line(DType::BF16, 16), [(0, 0), (0, 1)]);
        assert_eq!(line(DType::F16, 8), [(0, 0), (0, 1), (1, 0), (1, 1)]);
        assert_eq!(line(DType::BF16, 8), [(0, 0), (1, 0), (0, 1), (1, 1)]);
        assert_eq!(line(DType::F32, 8), [(0, 0), (1, 0)]);
    }
}
