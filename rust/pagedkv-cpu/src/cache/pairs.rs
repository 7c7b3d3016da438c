//! Pairs of a source and a destination block.

use crate::error::{Error, Result};

/// The error for one side of a pair: 0 is the source, 1 the destination.
pub(super) fn refused(pairs: &[[i32; 2]], index: usize, side: usize, expected: String) -> Error {
    Error::Element {
        argument: "pairs",
        index: format!("{index}, {side}"),
        expected,
        found: i64::from(pairs[index][side]),
    }
}

/// Refuses blocks beyond the pools and a destination that comes twice. Answers the destinations in ascending order.
pub(super) fn check_pairs(pairs: &[[i32; 2]], num_blocks: [usize; 2]) -> Result<Vec<i32>> {
    for (index, pair) in pairs.iter().enumerate() {
        for side in 0..2 {
            if !usize::try_from(pair[side]).is_ok_and(|block| block < num_blocks[side]) {
                return Err(refused(pairs, index, side, format!("a block below {}", num_blocks[side])));
            }
        }
    }
    let mut destinations: Vec<(i32, usize)> = pairs.iter().map(|pair| pair[1]).zip(0..).collect();
    destinations.sort_unstable();
    match destinations.windows(2).find(|two| two[0].0 == two[1].0) {
        None => Ok(destinations.into_iter().map(|(block, _)| block).collect()),
        Some(twice) => Err(refused(pairs, twice[1].1, 1, "each destination once".to_owned())),
    }
}
