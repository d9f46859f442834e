//! Arithmetic with numbers of slots: two in one word, and a division without one.
//!
//! ```text
//!   63           32 31            0
//!   │    second    │    first     │        fresh slots: where they end, and the next; a shard's: how many, the first
//! ```
//!
//! Worked: slots of 24 = 3 · 2³ bytes. The number of the one at offset 72 is 72 · 0xAAAA…AB, rotated by 3: 3. An offset
//! at which no slot begins gives a number that is larger than there are any.

#![forbid(unsafe_code)]

/// Two numbers in one word.
#[inline(always)]
pub(super) fn pack(first: u32, second: u32) -> u64 {
    u64::from(second) << 32 | u64::from(first)
}

/// The two that [`pack`] packed.
#[inline(always)]
pub(super) fn unpack(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// The inverse of an odd number modulo a power of two, by Newton's iteration: each round doubles the number of correct
/// bits, of which the number itself has three.
pub(super) const fn inverse(odd: usize) -> usize {
    let mut inverse = odd;
    let mut bits = 3;
    while bits < usize::BITS {
        inverse = inverse.wrapping_mul(2_usize.wrapping_sub(odd.wrapping_mul(inverse)));
        bits *= 2;
    }
    inverse
}
