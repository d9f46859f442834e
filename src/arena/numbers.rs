//! Arithmetic with numbers of slots: a range in one word, and a division without one.
//!
//! ```text
//!   63           32 31            0
//!   │     end      │     next     │        the slots `next`, …, `end - 1` are fresh; 0: none
//! ```
//!
//! Worked: slots of 24 = 3 · 2³ bytes. The number of the one at offset 72 is 72 · 0xAAAA…AB, rotated by 3: 3. An offset
//! at which no slot begins gives a number that is larger than there are any.

#![forbid(unsafe_code)]

/// A range of numbers, `next` and those up to `end`, in one word.
#[inline(always)]
pub(super) fn pack(next: u32, end: u32) -> u64 {
    u64::from(end) << 32 | u64::from(next)
}

/// The range that [`pack`] packed: `next`, `end`.
#[inline(always)]
pub(super) fn unpack(range: u64) -> (u32, u32) {
    (range as u32, (range >> 32) as u32)
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
