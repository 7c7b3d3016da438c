//! A distribution given by its quantiles.

/// Quantiles: shares from 0 to 1, ascending, and what lies below them.
pub(super) struct Quantiles<const N: usize>(pub(super) [(f64, f64); N]);

impl<const N: usize> Quantiles<N> {
    /// What lies below a share, between quantiles on a straight line, rounded to whole tokens.
    pub(super) fn at(&self, share: f64) -> u32 {
        let above = self.0.partition_point(|&(quantile, _)| quantile <= share).clamp(1, N - 1);
        let ((low, from), (high, to)) = (self.0[above - 1], self.0[above]);
        let value = from + (to - from) * (share - low) / (high - low);
        libm::round(value) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_lie_on_lines_between_the_quantiles() {
        let quantiles = Quantiles([(0.0, 1.0), (0.5, 11.0), (1.0, 111.0)]);
        let found = [0.0, 0.25, 0.5, 0.75, 1.0].map(|share| quantiles.at(share));
        assert_eq!(found, [1, 6, 11, 61, 111]);
    }
}
