//! Random numbers, the same ones for the same seed.

#![allow(dead_code, reason = "no program uses all of it")]

/// A sufficiently random generator: xorshift64*. The seed is not zero.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        assert_ne!(self.0, 0, "such a generator draws nothing but zeros");
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16) as usize % end
    }

    /// A size of up to `1 << bits` bytes, all orders of magnitude equally likely.
    pub fn size(&mut self, bits: usize) -> usize {
        let shift = self.below(bits) + 1;
        1 + self.below(1 << shift)
    }
}
