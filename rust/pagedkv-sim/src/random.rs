//! Random numbers that are the same on every machine: PCG, and a mathematics library of our own choice under it.

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random(Pcg64Mcg);

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self(Pcg64Mcg::seed_from_u64(seed))
    }

    /// The stream of one of several things under one seed.
    pub fn of(seed: u64, thing: u64) -> Self {
        Self::new(mix(seed ^ mix(thing)))
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.0.random()
    }

    /// Uniform in 0..end.
    pub fn below(&mut self, end: usize) -> usize {
        self.0.random_range(0..end)
    }

    /// Exponential with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * libm::log1p(-self.uniform())
    }

    /// Two independent standard normal numbers (Box and Muller).
    pub fn normals(&mut self) -> (f64, f64) {
        let radius = libm::sqrt(2.0 * self.exponential(1.0));
        let angle = std::f64::consts::TAU * self.uniform();
        (radius * libm::cos(angle), radius * libm::sin(angle))
    }

    /// Puts the elements in random order.
    pub fn shuffle<T>(&mut self, elements: &mut [T]) {
        for end in (2..=elements.len()).rev() {
            elements.swap(end - 1, self.below(end));
        }
    }
}

/// The share of a standard normal variable below `z`.
pub fn normal_share(z: f64) -> f64 {
    0.5 * libm::erfc(-z * std::f64::consts::FRAC_1_SQRT_2)
}

/// A number in which every bit depends on every bit of `value` (`SplitMix64`, Steele, Lea and Flood 2014).
pub const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_mean_0_and_variance_1() {
        let mut random = Random::new(1);
        let numbers: Vec<f64> = (0..50_000).flat_map(|_| <[f64; 2]>::from(random.normals())).collect();
        let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
        let variance = numbers.iter().map(|number| number * number).sum::<f64>() / numbers.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }

    #[test]
    fn a_seed_gives_the_same_numbers_on_every_machine() {
        let mut random = Random::of(7, 3);
        let first: Vec<u64> = (0..3).map(|_| (random.uniform() * 1e6) as u64).collect();
        assert_eq!(first, EXPECTED);
    }

    const EXPECTED: [u64; 3] = [44_498, 932_721, 478_416];

    #[test]
    fn half_of_a_normal_variable_is_below_0() {
        assert!((normal_share(0.0) - 0.5).abs() < 1e-15);
        assert!((normal_share(1.959_963_985) - 0.975).abs() < 1e-9);
    }

    #[test]
    fn a_shuffle_keeps_every_element() {
        let mut elements: Vec<u32> = (0..100).collect();
        Random::new(3).shuffle(&mut elements);
        assert_ne!(elements, (0..100).collect::<Vec<_>>());
        elements.sort_unstable();
        assert_eq!(elements, (0..100).collect::<Vec<_>>());
    }
}
