//! A small generator of random numbers (splitmix64), so that a seed in a failure message is all it takes to repeat it.

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        ((self.next() >> 33) % end as u64) as usize
    }

    pub(crate) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.next() as u8)
    }
}

/// `length` tokens of two kinds, by number; most numbers share long prefixes.
pub(crate) fn two_tokens(length: usize, number: u8) -> Vec<i32> {
    let bits = [0, 0, 0, 0b1000_0000, 0b0010_0000, 0b0000_1000, 0b0000_0001, number][usize::from(number % 8)];
    (0..length).map(|i| i32::from(bits >> (i % 8) & 1)).collect()
}
