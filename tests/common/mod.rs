//! What the test programs share.

#![allow(dead_code, reason = "no program uses all of it")]

use std::time::{Duration, Instant};

use pageheap::GlobalHeap;

pub mod bytes;
pub mod draw;
pub mod random;

/// Whether every requirement is to be tested at full size, however long that takes: `PAGEHEAP_TEST_FULL` is set, as for
/// a release (`.ci/run test_release`).
pub fn is_full() -> bool {
    std::env::var_os("PAGEHEAP_TEST_FULL").is_some()
}

/// Whether one of three runs succeeds: a busy machine may disturb any of them.
pub fn one_of_three(mut run: impl FnMut() -> bool) -> bool {
    (0..3).any(|_| run())
}

/// Fails if a heap that gives memory back meanwhile is not in order. A check waits for that, two seconds at most: one
/// that took nearly that may have given up on a busy machine, and its fault says nothing.
pub fn is_in_order<F: std::fmt::Debug>(check: impl FnOnce() -> Result<(), F>) {
    let begin = Instant::now();
    if let Err(fault) = check() {
        assert!(begin.elapsed() > Duration::from_millis(1500), "{fault:?}");
    }
}

/// Where a heap of bare numbers may begin, as in `Simulated`: 2^44 with 64-bit pointers.
pub const BASE: usize = 1 << (usize::BITS / 16 * 11);

/// A size that may exceed a narrow `usize`: `wide` with 64-bit pointers, `narrow` with 32-bit ones.
pub const fn by_width(wide: u64, narrow: usize) -> usize {
    if usize::BITS < u64::BITS { narrow } else { wide as usize }
}

/// A heap that reserves less address space than the default where there is little of it.
pub const fn new_heap() -> GlobalHeap {
    GlobalHeap::new().reserve(by_width(1 << 42, 256 << 20))
}

/// `bytes` bytes of address space for a heap; with 32-bit pointers at most a 64th of all addresses, because dozens of
/// heaps live in a test process, beside its stacks.
pub const fn addresses(bytes: u64) -> usize {
    const MOST: u64 = 64 << 20;
    by_width(bytes, (if bytes < MOST { bytes } else { MOST }) as usize)
}
