//! What all threads of a heap may keep in spares (`magazine.rs`): one sum that none of them exceeds.
//!
//! ```text
//!   thread   its demand: up to 2 MiB ──▶ hoard: up to 32 MiB of all threads
//! ```
//!
//! Worked: 200 threads that each use 2 MiB, one after another, leave 104 MB resident; without the common limit they
//! left 473 (`docs/measurements.md`).
//!
//! Cost: a read-modify-write when a thread's part grows, which it does 2 MiB at most, and one when the thread ends.

#![forbid(unsafe_code)]

use core::cell::Cell;

use crate::sync::{AtomicUsize, Ordering};

/// The most bytes in the spares of a thread. One spare of each class may be there in any case.
const SPARE_BYTES: u32 = 2 << 20;

/// The most bytes in the spares of all threads of a heap.
const SPARES_BYTES: usize = 32 << 20;

/// The bytes that all threads of a heap may have in spares because they needed them before: first come, first kept,
/// until the thread ends or is emptied. Written by a thread that goes to the store, which shares lines anyway, and no
/// longer once it has its part. A thread that is ended by force in mid-call may take its part with it.
#[derive(Debug)]
pub struct Hoard(AtomicUsize);

impl Hoard {
    /// None taken.
    pub const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Takes so many more, if they are there; returns whether they were.
    pub fn take(&self, bytes: usize) -> bool {
        // Relaxed, here and below: a sum that publishes nothing. A look first: when all is taken, nobody writes.
        if self.0.load(Ordering::Relaxed) + bytes > SPARES_BYTES {
            return false;
        }
        let taken = self.0.fetch_add(bytes, Ordering::Relaxed) + bytes <= SPARES_BYTES;
        if !taken {
            self.give(bytes);
        }
        taken
    }

    /// Gives so many back.
    pub fn give(&self, bytes: usize) {
        if bytes > 0 {
            // Relaxed: as above.
            self.0.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// In the child of a fork: this much is taken.
    pub fn recount(&self, bytes: usize) {
        // Relaxed: the child has one thread.
        self.0.store(bytes, Ordering::Relaxed);
    }
}

/// A thread's part of a hoard: the bytes that came from elsewhere. For one thread at a time. All-zero bytes: none.
#[derive(Debug, Default)]
pub struct Demand(Cell<u32>);

impl Demand {
    /// How many they are.
    pub fn bytes(&self) -> usize {
        self.0.get() as usize
    }

    /// Counts more, as far as the hoard allows.
    pub fn raise(&self, bytes: usize, hoard: &Hoard) {
        let before = self.0.get();
        let more = (bytes as u32).min(SPARE_BYTES - before);
        if more > 0 && hoard.take(more as usize) {
            self.0.set(before + more);
        }
    }

    /// Gives back what exceeds this many.
    pub fn lower(&self, bytes: u32, hoard: &Hoard) {
        let before = self.0.get();
        self.0.set(before.min(bytes));
        hoard.give(before.saturating_sub(bytes) as usize);
    }

    /// As if it had none.
    pub fn forget(&self) {
        self.0.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_together_hoard_no_more_than_the_limit() {
        let (hoard, part) = (Hoard::new(), SPARE_BYTES as usize);
        let taken = (0..).take_while(|_| hoard.take(part)).count();
        assert_eq!(taken * part, SPARES_BYTES);
        assert!(!hoard.take(1));
        hoard.give(part);
        assert!(hoard.take(part) && !hoard.take(1));
        hoard.recount(0);
        assert!(hoard.take(SPARES_BYTES) && !hoard.take(1));
    }

    #[test]
    fn what_a_thread_demands_less_of_others_may_have() {
        let (hoard, demand, part) = (Hoard::new(), Demand::default(), SPARE_BYTES as usize);
        assert!(hoard.take(SPARES_BYTES - part));
        for bytes in [1, 2 * part, 1] {
            demand.raise(bytes, &hoard);
        }
        assert!(demand.bytes() == part && !hoard.take(1));
        for bytes in [SPARE_BYTES, 1000, 2000] {
            demand.lower(bytes, &hoard);
        }
        assert!(demand.bytes() == 1000 && hoard.take(part - 1000) && !hoard.take(1));
    }
}
