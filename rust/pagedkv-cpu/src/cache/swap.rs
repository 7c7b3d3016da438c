//! Copies whole blocks between two pools, as swapping to a host tier and back asks for.

use super::pairs::check_pairs;
use super::stream::copy_span;
use crate::dims::{check_apart, check_distinct, check_dtype, shape_text};
use crate::error::{Error, Result};
use crate::threads;
use crate::view::View;

/// Copies block `pairs[i][0]` of `source` to block `pairs[i][1]` of `destination`. The first dimension of both counts
/// blocks, the others are equal; strides may differ.
///
/// Where the rest of a block is one span of memory in both, as in the block-contiguous layout, each pair is one copy over
/// all layers.
///
/// # Errors
///
/// Pools of different element types or block shapes, packed keys in one of the two, pools that share memory, a destination
/// whose elements overlap, blocks outside the pools, and a destination block that comes twice; nothing is written then.
///
/// # Complexity
///
/// The bytes of a block per pair, and O(k log k) to check k pairs.
pub fn swap_blocks<const N: usize>(
    source: &View<N>,
    destination: &View<N>,
    pairs: &[[i32; 2]],
    threads: usize,
) -> Result<()> {
    check_dtype("destination", destination, source.dtype())?;
    let (from, to) = (source.shape(), destination.shape());
    if from[1..] != to[1..] {
        let block: Vec<String> = from[1..].iter().map(ToString::to_string).collect();
        let expected = format!("(num_blocks, {})", block.join(", "));
        return Err(Error::Shape { argument: "destination", expected, found: shape_text(&to) });
    }
    if source.is_packed() != destination.is_packed() {
        let layout = |view: &View<N>| if view.is_packed() { "packed keys" } else { "keys in the natural layout" };
        let (expected, found) = (format!("{}, as source has", layout(source)), layout(destination).to_owned());
        return Err(Error::Value { argument: "destination", expected, found });
    }
    check_distinct("destination", destination)?;
    check_apart(("destination", destination), ("source", source))?;
    check_pairs(pairs, [from[0], to[0]])?;
    let spans = Spans::of(source, destination);
    let bytes = spans.starts.len() * spans.bytes;
    threads::for_each(threads, bytes * pairs.len() / 4, pairs.len(), |index| {
        let first = |view: &View<N>, block: i32| {
            let mut at = [0; N];
            at[0] = block as usize;
            view.at(at).cast::<u8>()
        };
        let [from, to] = [first(source, pairs[index][0]), first(destination, pairs[index][1])];
        for &(from_start, to_start) in &spans.starts {
            // SAFETY: the spans of a block lie inside its pool; the pools are apart, the elements of the destination are
            // distinct, and a destination block belongs to this pair alone.
            unsafe { copy_span(from.wrapping_offset(from_start), to.wrapping_offset(to_start), spans.bytes) };
        }
    });
    Ok(())
}

/// The pieces of one block that are contiguous in both pools, as byte offsets from its first element in each.
struct Spans {
    starts: Vec<(isize, isize)>,
    bytes: usize,
}

impl Spans {
    fn of<const N: usize>(source: &View<N>, destination: &View<N>) -> Self {
        let (from, to) = (source.strides(), destination.strides());
        let mut steps: Vec<(i64, i64, usize)> =
            (1..N).map(|axis| (from[axis], to[axis], source.shape()[axis])).filter(|&(.., n)| n != 1).collect();
        if steps.iter().any(|&(.., n)| n == 0) {
            return Self { starts: Vec::new(), bytes: 0 };
        }
        steps.sort_unstable();
        let mut len = 1_i64;
        steps.retain(|&(from, to, n)| {
            let joins = from == len && to == len;
            if joins {
                len *= n as i64;
            }
            !joins
        });
        let size = source.dtype().size_bytes() as isize;
        let mut starts = vec![(0_isize, 0_isize)];
        for (from, to, n) in steps.into_iter().rev() {
            let (from, to) = (from as isize * size, to as isize * size);
            let along = |(a, b): (isize, isize)| (0..n as isize).map(move |i| (a + i * from, b + i * to));
            starts = starts.into_iter().flat_map(along).collect();
        }
        Self { starts, bytes: len as usize * size as usize }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::DType;

    fn spans(strides: [[i64; 4]; 2]) -> (usize, usize) {
        let view = |strides| {
            let data = std::ptr::without_provenance_mut(4096);
            // SAFETY: no element is read or written.
            unsafe { View::new(data, DType::BF16, [5, 3, 2, 8], strides) }
        };
        let spans = Spans::of(&view(strides[0]), &view(strides[1]));
        (spans.starts.len(), spans.bytes)
    }

    #[test]
    fn a_block_is_one_span_when_its_layers_are_contiguous_in_both_pools() {
        assert_eq!(spans([[48, 16, 8, 1], [48, 16, 8, 1]]), (1, 96));
    }

    #[test]
    fn a_block_is_one_span_per_layer_when_layers_are_outermost_in_one_pool() {
        assert_eq!(spans([[16, 80, 8, 1], [48, 16, 8, 1]]), (3, 32));
    }

    #[test]
    fn a_block_is_one_span_per_element_when_dimensions_are_in_another_order() {
        assert_eq!(spans([[48, 1, 3, 6], [48, 16, 8, 1]]), (48, 2));
    }
}
