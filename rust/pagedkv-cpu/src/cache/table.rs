//! Keeps the block table that kernels read up to date.

use crate::dims::{check_distinct, check_dtype};
use crate::error::{Error, Result};
use crate::view::{DType, View};

const COLUMNS: [&str; 3] = ["group", "row", "column"];

/// Writes each (group, row, column, block) of `updates` into the table.
///
/// # Errors
///
/// A table that is not int32 or overlaps itself, a cell outside it and a block that is none of `num_blocks`; nothing is
/// written then.
///
/// # Complexity
///
/// O(1) per update.
pub fn update_block_table(block_table: &View<3>, updates: &[[i32; 4]], num_blocks: usize) -> Result<()> {
    check_dtype("block_table", block_table, DType::I32)?;
    check_distinct("block_table", block_table)?;
    let shape = block_table.shape();
    for (index, update) in updates.iter().enumerate() {
        let refuse = |field: usize, expected: String| Error::Element {
            argument: "table_updates",
            index: format!("{index}, {field}"),
            expected,
            found: i64::from(update[field]),
        };
        for (field, name) in COLUMNS.into_iter().enumerate() {
            if usize::try_from(update[field]).is_ok_and(|i| i < shape[field]) {
                continue;
            }
            return Err(refuse(field, format!("a {name} below {}", shape[field])));
        }
        if !usize::try_from(update[3]).is_ok_and(|block| block < num_blocks) {
            return Err(refuse(3, format!("a block below {num_blocks}")));
        }
    }
    for [group, row, column, block] in updates {
        block_table.set([*group as usize, *row as usize, *column as usize], *block);
    }
    Ok(())
}
