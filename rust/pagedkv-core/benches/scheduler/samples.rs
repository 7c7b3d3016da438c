//! What every measurement shares: a clock, shuffled orders, and lines of JSON.

use std::fmt::Write as _;
use std::time::Instant;

/// One line of output.
pub(crate) struct Line {
    what: &'static str,
    samples: Vec<f64>,
    limit: Vec<f64>,
    sizes: Vec<(&'static str, f64)>,
}

impl Line {
    /// A line of samples, of which the median counts.
    pub(crate) fn new(what: &'static str, samples: Vec<f64>) -> Self {
        Self { what, samples, limit: Vec::new(), sizes: Vec::new() }
    }

    /// What the machine allows for the same, measured beside it.
    pub(crate) fn limit(mut self, samples: Vec<f64>) -> Self {
        self.limit = samples;
        self
    }

    /// A number that the reader of the line should know.
    pub(crate) fn size(mut self, name: &'static str, value: f64) -> Self {
        self.sizes.push((name, value));
        self
    }

    /// The line as a JSON object.
    pub(crate) fn json(&self) -> String {
        let mut json = format!(r#"{{"what":"{}","samples":{:?},"limit":{:?}"#, self.what, self.samples, self.limit);
        for (name, value) in &self.sizes {
            write!(json, r#","{name}":{value:?}"#).expect("a string takes all that is written");
        }
        json.push('}');
        json
    }
}

/// Microseconds since `start` for each of `count`.
pub(crate) fn micros_each(start: Instant, count: usize) -> f64 {
    start.elapsed().as_secs_f64() * 1e6 / float(count)
}

/// A count as a number to calculate with.
#[expect(clippy::cast_precision_loss, reason = "counts here are far below 2^52")]
pub(crate) fn float(count: usize) -> f64 {
    count as f64
}

/// The value below which `share` of the samples lie.
pub(crate) fn quantile(samples: &mut [f64], share: f64) -> f64 {
    let at = (float(samples.len() - 1) * share).round() as usize;
    *samples.select_nth_unstable_by(at, f64::total_cmp).1
}

/// A generator of numbers that look random, the same in every run (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(word ^ (word >> 31)) * bound as u128) >> 64) as usize
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// Token ids as a prompt has them.
    pub(crate) fn tokens(&mut self, len: usize) -> Vec<i32> {
        (0..len).map(|_| self.below(100_000) as i32).collect()
    }
}
