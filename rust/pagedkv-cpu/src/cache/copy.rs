//! Copies whole blocks over all layers, as copy-on-write asks for.

use super::pairs::{check_pairs, refused};
use super::stream::copy_span;
use crate::dims::check_distinct;
use crate::error::Result;
use crate::threads;
use crate::view::View;

/// Copies block `pairs[i][0]` to block `pairs[i][1]`, for a pool whose first dimension counts blocks.
///
/// Where the rest of a block is one span of memory, as in the block-contiguous layout, each pair is one copy.
///
/// # Errors
///
/// Blocks outside the pool, a destination that comes twice or is also a source (the outcome would depend on the order),
/// and a pool whose elements overlap; nothing is written then.
///
/// # Complexity
///
/// The bytes of a block per pair, and O(k log k) to check k pairs.
pub fn copy_blocks<const N: usize>(pool: &View<N>, pairs: &[[i32; 2]], threads: usize) -> Result<()> {
    check_distinct("pool", pool)?;
    check_copies(pairs, pool.shape()[0])?;
    let spans = Spans::of(pool);
    let bytes = spans.starts.len() * spans.bytes;
    threads::for_each(threads, bytes * pairs.len() / 4, pairs.len(), |index| {
        let [source, destination] = pairs[index].map(|block| {
            let mut first = [0; N];
            first[0] = block as usize;
            pool.at(first).cast::<u8>()
        });
        for start in &spans.starts {
            // SAFETY: the spans of a block lie inside the pool and, its elements being distinct, apart from those of
            // every other block; a destination is no source and belongs to this pair alone.
            unsafe { copy_span(source.wrapping_offset(*start), destination.wrapping_offset(*start), spans.bytes) };
        }
    });
    Ok(())
}

/// As [`check_pairs`] within one pool, where a destination is no source either.
fn check_copies(pairs: &[[i32; 2]], num_blocks: usize) -> Result<()> {
    let destinations = check_pairs(pairs, [num_blocks; 2])?;
    match pairs.iter().position(|pair| destinations.binary_search(&pair[0]).is_ok()) {
        None => Ok(()),
        Some(index) => Err(refused(pairs, index, 0, "a source that is no destination".to_owned())),
    }
}

/// The contiguous pieces of one block, as byte offsets from its first element.
struct Spans {
    starts: Vec<isize>,
    bytes: usize,
}

impl Spans {
    fn of<const N: usize>(pool: &View<N>) -> Self {
        let mut steps: Vec<(i64, usize)> = pool.strides()[1..]
            .iter()
            .copied()
            .zip(pool.shape()[1..].iter().copied())
            .filter(|(_, n)| *n != 1)
            .collect();
        if steps.iter().any(|(_, n)| *n == 0) {
            return Self { starts: Vec::new(), bytes: 0 };
        }
        steps.sort_unstable();
        let mut len = 1_i64;
        steps.retain(|(stride, n)| {
            let joins = *stride == len;
            if joins {
                len *= *n as i64;
            }
            !joins
        });
        let size = pool.dtype().size_bytes();
        let mut starts = vec![0_isize];
        for (stride, n) in steps.into_iter().rev() {
            starts = starts
                .into_iter()
                .flat_map(|start| (0..n).map(move |i| start + i as isize * stride as isize * size as isize))
                .collect();
        }
        Self { starts, bytes: len as usize * size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::DType;

    fn spans(shape: [usize; 4], strides: [i64; 4]) -> (usize, usize) {
        let data = std::ptr::without_provenance_mut(4096);
        // SAFETY: no element is read or written.
        let view = unsafe { View::new(data, DType::BF16, shape, strides) };
        let spans = Spans::of(&view);
        (spans.starts.len(), spans.bytes)
    }

    #[test]
    fn a_block_is_one_span_when_its_layers_are_contiguous() {
        assert_eq!(spans([5, 3, 2, 8], [48, 16, 8, 1]), (1, 96));
    }

    #[test]
    fn a_block_is_one_span_per_layer_when_layers_are_outermost() {
        assert_eq!(spans([5, 3, 2, 8], [16, 80, 8, 1]), (3, 32));
    }

    #[test]
    fn a_block_is_one_span_per_layer_when_layers_run_backwards() {
        assert_eq!(spans([5, 3, 2, 8], [48, -16, 8, 1]), (3, 32));
    }

    #[test]
    fn a_block_is_one_span_per_element_when_nothing_is_contiguous() {
        assert_eq!(spans([5, 3, 2, 8], [480, 160, 80, 10]), (48, 2));
    }
}
