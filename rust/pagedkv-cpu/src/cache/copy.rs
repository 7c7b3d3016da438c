//! Copies whole blocks over all layers, as copy-on-write asks for.

use crate::dims::check_distinct;
use crate::error::{Error, Result};
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
    check_pairs(pairs, pool.shape()[0])?;
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
            unsafe {
                destination
                    .wrapping_offset(*start)
                    .copy_from_nonoverlapping(source.wrapping_offset(*start), spans.bytes);
            }
        }
    });
    Ok(())
}

fn check_pairs(pairs: &[[i32; 2]], num_blocks: usize) -> Result<()> {
    let refuse = |index: usize, side: usize, expected: String| Error::Element {
        argument: "pairs",
        index: format!("{index}, {side}"),
        expected,
        found: i64::from(pairs[index][side]),
    };
    for (index, pair) in pairs.iter().enumerate() {
        for (side, block) in pair.iter().enumerate() {
            if usize::try_from(*block).is_ok_and(|block| block < num_blocks) {
                continue;
            }
            return Err(refuse(index, side, format!("a block below {num_blocks}")));
        }
    }
    let mut destinations: Vec<(i32, usize)> = pairs.iter().map(|p| p[1]).zip(0..).collect();
    destinations.sort_unstable();
    if let Some(twice) = destinations.windows(2).find(|d| d[0].0 == d[1].0) {
        return Err(refuse(twice[1].1, 1, "each destination once".to_owned()));
    }
    let is_destination = |block: i32| destinations.binary_search_by_key(&block, |d| d.0).is_ok();
    match pairs.iter().position(|pair| is_destination(pair[0])) {
        None => Ok(()),
        Some(index) => Err(refuse(index, 0, "a source that is no destination".to_owned())),
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
