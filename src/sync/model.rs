//! The same names under loom or shuttle: the checker's atomics, tables in boxes.
//!
//! The interface equals that of `native`. loom's atomics cannot be created by zeroing memory, so a table makes its
//! entries one by one. loom treats SeqCst accesses as AcqRel but SeqCst fences fully, which is why the protocols are
//! written with fences. shuttle is sequentially consistent: it explores schedules, not weak memory.

extern crate std;

use core::fmt;
use core::ptr::NonNull;
use std::boxed::Box;

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize};
#[cfg(loom)]
use loom::{
    sync::atomic::{Ordering, fence as checker_fence},
    thread::yield_now,
};
#[cfg(all(shuttle, not(loom)))]
pub use shuttle::sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize};
#[cfg(all(shuttle, not(loom)))]
use shuttle::{
    sync::atomic::{Ordering, fence as checker_fence},
    thread::yield_now,
};

/// One stripe: every pass meets every other, and there is less to explore.
pub(crate) const STRIPES: usize = 1;

/// One place, shared by all.
pub(crate) const SHARED: usize = 1;

/// Two places, of which one may be passed by.
pub(crate) const ASIDE: usize = 2;

/// A sequentially consistent (SeqCst) fence.
pub(crate) fn fence() {
    checker_fence(Ordering::SeqCst);
}

/// A full fence: a model follows the language's memory model, not x86's.
pub(crate) fn fence_after_rmw() {
    fence();
}

/// A full fence, for the same reason.
pub(crate) fn fence_after_load() {
    fence();
}

/// The light half of an asymmetric fence. A model has no such system call, so what that guarantees needs a fence on
/// this side too.
pub(crate) fn fence_light() {
    fence();
}

/// The heavy half.
pub(crate) fn fence_heavy() -> bool {
    fence();
    true
}

/// There is one process.
pub(crate) fn process() -> u32 {
    0
}

/// A model says itself which thread is which.
pub(crate) fn thread() -> usize {
    super::bias::UNKNOWN
}

/// Lets another thread run first.
pub(crate) fn relax(_round: u32) {
    yield_now();
}

/// Returns spuriously, after letting other threads run first.
pub(crate) fn wait(_word: &AtomicU32, _expected: u32, _round: u32) {
    yield_now();
}

/// As [`wait`].
pub(crate) fn wait_for(word: &AtomicU32, expected: u32, _time: Option<core::time::Duration>) {
    wait(word, expected, 0);
}

/// No thread sleeps: all that wait look again. It has found one if the word has changed when others have run.
pub(crate) fn wake(word: &AtomicU32) -> bool {
    // Relaxed, twice: only compared.
    let before = word.load(Ordering::Relaxed);
    yield_now();
    word.load(Ordering::Relaxed) != before
}

/// There is no time.
pub(crate) fn clock() -> u64 {
    0
}

/// Every thread that has waited once has waited for long.
pub(crate) fn is_long_since(_begin: u64) -> bool {
    true
}

/// A type whose tables start as [`zeroed`](Self::zeroed).
///
/// # Safety
///
/// None here; outside a model the all-zero bit pattern must be that value.
pub unsafe trait Zeroed {
    /// The value whose bytes would be all zero.
    fn zeroed() -> Self;
}

// SAFETY: the trait requires nothing in a model.
unsafe impl Zeroed for AtomicU64 {
    fn zeroed() -> Self {
        Self::new(0)
    }
}

// SAFETY: the trait requires nothing in a model.
unsafe impl Zeroed for AtomicU32 {
    fn zeroed() -> Self {
        Self::new(0)
    }
}

/// A row of shared values, boxed.
pub struct Table<T> {
    entries: Box<[T]>,
}

impl<T: Zeroed> Table<T> {
    /// A table without entries.
    #[must_use]
    pub fn empty() -> Self {
        Self { entries: Box::new([]) }
    }

    /// A table of `len` entries, whatever is at `base`.
    ///
    /// # Safety
    ///
    /// None here; see the native table.
    #[must_use]
    pub unsafe fn new(_base: NonNull<u8>, len: usize) -> Self {
        Self {
            entries: (0..len).map(|_| T::zeroed()).collect(),
        }
    }

    /// Entry `index`.
    ///
    /// # Panics
    /// Past the end.
    #[must_use]
    pub fn get(&self, index: usize) -> &T {
        &self.entries[index]
    }

    /// Entry `index`.
    ///
    /// # Safety
    ///
    /// None here; see the native table.
    #[must_use]
    pub unsafe fn at(&self, index: usize) -> &T {
        self.get(index)
    }

    /// The `count` entries from `first` on.
    ///
    /// # Panics
    /// Past the end.
    #[must_use]
    pub fn row(&self, first: usize, count: usize) -> &[T] {
        &self.entries[first..first + count]
    }

    /// The number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the table has no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<T> fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Table({} entries)", self.entries.len())
    }
}
