//! The way to the host and back.

use crate::error::{Result, invalid};

/// What it takes to bring blocks to the host or back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SwapLink {
    /// Bytes a second.
    pub bandwidth: f64,
    /// Seconds that every copy takes beside its bytes.
    pub per_copy: f64,
    /// Copies that a block takes: one where it is one span of memory, one for the keys and one for the values of each
    /// layer where layers lie apart.
    pub copies_per_block: u32,
    /// Bytes of a block.
    pub block_bytes: f64,
}

impl SwapLink {
    /// Bytes a second over `PCIe` 4.0 x16 from pinned memory; assumed, 80 % of the 31.5 GB/s of the standard.
    pub const PCIE_4_BANDWIDTH: f64 = 25e9;
    /// Seconds of one copy beside its bytes; assumed, what an asynchronous copy on a CUDA stream costs.
    pub const COPY_SECONDS: f64 = 7e-6;

    /// # Errors
    /// [`crate::SimError::InvalidArgument`] for a bandwidth that is not above 0, or times or sizes below 0.
    pub fn validate(&self) -> Result<()> {
        if !(self.bandwidth.is_finite() && self.bandwidth > 0.0) {
            return invalid("swap_bandwidth", "bytes a second, above 0", self.bandwidth);
        }
        for (argument, value) in [("swap_copy_seconds", self.per_copy), ("block_bytes", self.block_bytes)] {
            if !(value.is_finite() && value >= 0.0) {
                return invalid(argument, "a finite number of at least 0", value);
            }
        }
        Ok(())
    }

    /// Seconds for so many blocks, one way.
    pub fn seconds(&self, blocks: u64) -> f64 {
        let copies = blocks as f64 * f64::from(self.copies_per_block);
        copies * self.per_copy + blocks as f64 * self.block_bytes / self.bandwidth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_per_layer_cost_most_where_blocks_are_small() {
        let link = |block_size: f64, copies_per_block| SwapLink {
            bandwidth: SwapLink::PCIE_4_BANDWIDTH,
            per_copy: SwapLink::COPY_SECONDS,
            copies_per_block,
            block_bytes: block_size * 819_200.0,
        };
        let small = link(1.0, 80).seconds(256) / link(256.0, 80).seconds(1);
        let small_in_one_span = link(1.0, 1).seconds(256) / link(256.0, 1).seconds(1);
        assert!(small > 10.0, "{small}");
        assert!(small_in_one_span < 1.25, "{small_in_one_span}");
    }
}
