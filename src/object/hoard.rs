//! What all threads of a heap may keep in spares (`magazine.rs`): one sum that none of them exceeds.
//!
//! ```text
//!   thread   fetched: counted up to 2 MiB ─▶ as much may be in spares ─▶ its part of the hoard, 32 MiB of all threads
//! ```
//!
//! A thread that fetches batches and hands all away has no part: it took the others' when fetching was what counted.
//!
//! Worked: 200 threads that each use 2 MiB, one after another, leave 104 MB resident; without the common limit they
//! left 473 (`docs/measurements.md`).
//!
//! Cost: a read-modify-write when a thread's part grows, which it does 2 MiB at most, and one when the thread ends.

#![forbid(unsafe_code)]

use core::cell::Cell;

use crate::sync::{AtomicUsize, Ordering};

/// The most KiB in the spares of a thread. One spare of each class may be there in any case.
const SPARE_KIB: u16 = 2 << 10;

/// The most KiB in the spares of all threads of a heap.
const SPARES_KIB: usize = 32 << 10;

/// The KiB that all threads of a heap have in spares because they needed them before: first come, first kept, until
/// the thread ends or is emptied. Written by a thread that else goes to the store, which shares lines anyway, and no
/// longer once it has its part. A thread that is ended by force in mid-call may take its part with it.
#[derive(Debug)]
pub struct Hoard(AtomicUsize);

impl Hoard {
    /// None taken.
    pub const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Takes so many KiB more, if they are there; returns whether they were.
    pub fn take(&self, kib: usize) -> bool {
        // Relaxed, here and below: a sum that publishes nothing. A look first: when all is taken, nobody writes.
        if self.0.load(Ordering::Relaxed) + kib > SPARES_KIB {
            return false;
        }
        let taken = self.0.fetch_add(kib, Ordering::Relaxed) + kib <= SPARES_KIB;
        if !taken {
            self.give(kib);
        }
        taken
    }

    /// Gives so many back.
    pub fn give(&self, kib: usize) {
        if kib > 0 {
            // Relaxed: as above.
            self.0.fetch_sub(kib, Ordering::Relaxed);
        }
    }

    /// In the child of a fork: this much is taken.
    pub fn recount(&self, kib: usize) {
        // Relaxed: the child has one thread.
        self.0.store(kib, Ordering::Relaxed);
    }
}

/// What a thread has needed, and what it has in spares, in KiB, so that a structure has room for it. For one thread at
/// a time. All-zero bytes: nothing.
#[derive(Debug, Default)]
pub struct Demand {
    /// Of the batches that had to come from elsewhere; saturates at the most that spares may have.
    fetched: Cell<u16>,
    spares: Cell<u16>,
    /// What it has of the hoard: the most that was in spares beyond one of a class.
    part: Cell<u16>,
}

/// Rounded up, so that nothing is kept for nothing.
fn kib(bytes: usize) -> u16 {
    bytes.div_ceil(1 << 10) as u16
}

impl Demand {
    /// Counts a batch that had to come from elsewhere, or a part of one.
    pub fn raise(&self, bytes: usize) {
        self.fetched.set((self.fetched.get() + kib(bytes)).min(SPARE_KIB));
    }

    /// A spare more, needed or not.
    pub fn add(&self, bytes: usize) {
        self.spares.set(self.spares.get() + kib(bytes));
    }

    /// A spare more, if all are then no more than the thread has needed, and the hoard has what they lack. Returns
    /// whether that is so.
    pub fn keep(&self, bytes: usize, hoard: &Hoard) -> bool {
        let (all, part) = (self.spares.get() + kib(bytes), self.part.get());
        if all > self.fetched.get() || all > part && !hoard.take((all - part).into()) {
            return false;
        }
        self.part.set(part.max(all));
        self.spares.set(all);
        true
    }

    /// A spare less. (A user that ended in mid-call may have left too few.)
    pub fn remove(&self, bytes: usize) {
        self.spares.set(self.spares.get().saturating_sub(kib(bytes)));
    }

    /// The KiB that it has of the hoard.
    pub fn part(&self) -> usize {
        self.part.get().into()
    }

    /// After some have gone other than to be used: as if no more had been needed than are left.
    pub fn lower(&self, hoard: &Hoard) {
        let (spares, part) = (self.spares.get(), self.part.get());
        self.fetched.set(self.fetched.get().min(spares));
        self.part.set(part.min(spares));
        hoard.give(part.saturating_sub(spares).into());
    }

    /// After all spares have gone: as if none had been needed.
    pub fn end(&self, hoard: &Hoard) {
        let part = self.part();
        self.forget();
        hoard.give(part);
    }

    /// The same, where the part is not given back.
    pub fn forget(&self) {
        for count in [&self.fetched, &self.spares, &self.part] {
            count.set(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: usize = SPARE_KIB as usize;

    #[test]
    fn all_threads_together_hoard_no_more_than_the_limit() {
        let hoard = Hoard::new();
        let taken = (0..).take_while(|_| hoard.take(PART)).count();
        assert_eq!(taken * PART, SPARES_KIB);
        assert!(!hoard.take(1));
        hoard.give(PART);
        assert!(hoard.take(PART) && !hoard.take(1));
        hoard.recount(0);
        assert!(hoard.take(SPARES_KIB) && !hoard.take(1));
    }

    #[test]
    fn a_thread_has_of_the_hoard_what_it_has_needed_and_keeps() {
        let (hoard, demand) = (Hoard::new(), Demand::default());
        assert!(hoard.take(SPARES_KIB - PART));
        for kib in [1, 2 * PART, 1] {
            demand.raise(kib << 10);
        }
        assert!(demand.part() == 0 && hoard.take(PART - 10), "nothing yet");
        assert!((0..5).all(|_| demand.keep(2 << 10, &hoard)));
        assert!(demand.part() == 10 && !hoard.take(1));
        assert!(!demand.keep(1, &hoard), "the hoard has no more");
        // What has been taken is enough for as much again.
        demand.remove(2 << 10);
        assert!(demand.keep(2 << 10, &hoard) && demand.part() == 10);
        hoard.give(PART);
        demand.add((PART - 10) << 10);
        assert!(!demand.keep(1, &hoard), "the thread may have no more");
    }

    #[test]
    fn what_a_thread_keeps_less_of_others_may_have() {
        let (hoard, demand) = (Hoard::new(), Demand::default());
        assert!(hoard.take(SPARES_KIB - PART));
        demand.raise(PART << 10);
        demand.add((PART - 1) << 10);
        // Counted in whole KiB.
        assert!(demand.keep(1, &hoard) && !hoard.take(1));
        demand.remove((PART - 100) << 10);
        demand.lower(&hoard);
        assert!(demand.part() == 100 && hoard.take(PART - 100) && !hoard.take(1));
        assert!(!demand.keep(1, &hoard), "no more than that is needed now");
        demand.end(&hoard);
        assert!(demand.part() == 0 && hoard.take(100) && !hoard.take(1));
        assert!(!demand.keep(1, &hoard));
    }
}
