//! What the test programs share.

#![allow(dead_code, reason = "no program uses all of it")]

use pageheap::GlobalHeap;

pub mod draw;

/// Where a heap of bare numbers may begin: as `Simulated` has it. Where pointers have 64 bits it is 2^44.
pub const BASE: usize = 1 << (usize::BITS / 16 * 11);

/// A size that not every pointer can tell: `wide` where they have 64 bits, `narrow` where they have 32.
pub const fn by_width(wide: u64, narrow: usize) -> usize {
    if usize::BITS < u64::BITS { narrow } else { wide as usize }
}

/// A heap that takes less of the addresses than it would, where those are few.
pub const fn new_heap() -> GlobalHeap {
    GlobalHeap::new().reserve(by_width(1 << 42, 256 << 20))
}

/// So many bytes of addresses for a heap; where pointers have 32 bits a 64th of them all at the most: dozens of heaps
/// live in a test's process, beside its stacks.
pub const fn addresses(bytes: u64) -> usize {
    const MOST: u64 = 64 << 20;
    by_width(bytes, (if bytes < MOST { bytes } else { MOST }) as usize)
}
