//! When requests come.

use crate::error::{Result, invalid};
use crate::random::Random;

/// Seconds at which `count` requests come, independent of one another, `rate` a second on average.
///
/// # Errors
/// [`crate::SimError::InvalidArgument`] for a rate that is not above 0.
pub fn poisson(count: usize, rate: f64, seed: u64) -> Result<Vec<f64>> {
    check_rate(rate)?;
    let mut random = Random::of(seed, ARRIVALS);
    let mut now = 0.0;
    let next = |_| {
        now += random.exponential(1.0 / rate);
        now
    };
    Ok((0..count).map(next).collect())
}

/// Seconds at which requests come that are equally far apart.
///
/// # Errors
/// As [`poisson`].
pub fn every(count: usize, rate: f64) -> Result<Vec<f64>> {
    check_rate(rate)?;
    Ok((0..count).map(|i| i as f64 / rate).collect())
}

fn check_rate(rate: f64) -> Result<()> {
    if rate.is_finite() && rate > 0.0 { Ok(()) } else { invalid("rate", "requests a second, above 0", rate) }
}

/// Keeps arrivals apart from lengths of the same seed.
const ARRIVALS: u64 = u64::from_le_bytes(*b"arrivals");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poisson_arrivals_have_their_rate_and_exponential_gaps() {
        let arrivals = poisson(100_000, 4.0, 2).unwrap();
        assert!((arrivals.last().unwrap() / 25_000.0 - 1.0).abs() < 0.02);
        let gaps: Vec<_> = arrivals.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.02);
    }

    #[test]
    fn a_rate_of_zero_is_refused() {
        let error = poisson(3, 0.0, 0).unwrap_err().to_string();
        assert_eq!(error, "rate: expected requests a second, above 0, found 0");
    }
}
