//! Pseudo-random numbers, the same in every run: xorshift64*, a few instructions each.

/// A generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number less than `end`, by the high half of a product: no division.
    #[inline]
    pub fn below(&mut self, end: usize) -> usize {
        ((self.next() >> 32).wrapping_mul(end as u64) >> 32) as usize
    }

    /// A number from `first` to `last`, inclusive.
    #[inline]
    pub fn between(&mut self, first: usize, last: usize) -> usize {
        first + self.below(last - first + 1)
    }

    /// True in `percent` of a hundred cases.
    #[inline]
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}
