//! The limits of a heap while the program runs, and how much memory counts towards them.
//!
//! ```text
//!   0 ───────── backed ──── peak_backed ──── soft limit ───────────── limit ─────▶ bytes of pages
//!                                               │ memory goes back       │ allocations fail
//! ```
//!
//! Worked: `set_limit(64 << 20)` and `set_soft_limit(32 << 20)` are limits of 8,192 and 4,096 pages. All of these
//! calls are O(1), but for the first that opens the heap.

#![forbid(unsafe_code)]

use crate::source::Source;
use crate::units::PageCount;

use super::{GlobalHeap, Objects, SizeClass};

impl<S: Source + 'static> GlobalHeap<S> {
    /// Bytes of pages with memory behind them: what the heap itself adds to the process's resident size, tables apart,
    /// if all of these pages have been touched. A [soft limit](Self::soft_limit) is about this figure. O(1). 0 before
    /// the first allocation.
    #[must_use]
    pub fn backed(&self) -> usize {
        let backed = |objects: &Objects<S>| objects.heap().backed().bytes(SizeClass::PAGE_SHIFT);
        self.opened().map_or(0, backed)
    }

    /// The most bytes that were ever [`backed`](Self::backed). O(1).
    #[must_use]
    pub fn peak_backed(&self) -> usize {
        let peak = |objects: &Objects<S>| objects.heap().peak_backed().bytes(SizeClass::PAGE_SHIFT);
        self.opened().map_or(0, peak)
    }

    /// The current maximum number of bytes of pages the heap may grow to; without a limit, as many as it has reserved
    /// addresses for. `None` before the first allocation.
    #[must_use]
    pub fn current_limit(&self) -> Option<usize> {
        Some(self.opened()?.heap().limit().bytes(SizeClass::PAGE_SHIFT))
    }

    /// Changes the maximum number of bytes of pages the heap may grow to, rounded down to pages of 8 KiB; this
    /// overrides the `static` and the environment. More than is reserved counts as no limit. A lower limit does not
    /// shrink the heap: pages it has already grown to remain and can be allocated, but not for blocks longer than the
    /// limit (except one of up to 1 MiB that the thread has freed itself). (For less memory behind them, lower
    /// the [soft limit](Self::set_soft_limit) too.) Opens the heap if it is not open. Returns `false` if it
    /// cannot be opened; then nothing has changed.
    ///
    /// ```
    /// use pageheap::GlobalHeap;
    ///
    /// static HEAP: GlobalHeap = GlobalHeap::new();
    ///
    /// assert!(HEAP.set_limit(64 << 20) && HEAP.set_soft_limit(32 << 20));
    /// assert_eq!((HEAP.current_limit(), HEAP.current_soft_limit()), (Some(64 << 20), Some(32 << 20)));
    /// ```
    #[must_use]
    pub fn set_limit(&self, bytes: usize) -> bool {
        let pages = PageCount(bytes >> SizeClass::PAGE_SHIFT);
        self.objects().map(|objects| objects.heap().set_limit(pages)).is_some()
    }

    /// The current maximum number of bytes of pages that should have memory behind them; values near `usize::MAX` mean
    /// no limit. `None` before the first allocation.
    #[must_use]
    pub fn current_soft_limit(&self) -> Option<usize> {
        Some(self.opened()?.heap().soft_limit().bytes(SizeClass::PAGE_SHIFT))
    }

    /// As [`set_limit`](Self::set_limit), for the maximum number of bytes of pages that should have memory behind them;
    /// see [`soft_limit`](Self::soft_limit). Takes effect with the next page that gains memory, and with the next
    /// [`tick`](Self::tick).
    #[must_use]
    pub fn set_soft_limit(&self, bytes: usize) -> bool {
        let pages = PageCount(bytes >> SizeClass::PAGE_SHIFT);
        self.objects()
            .map(|objects| objects.heap().set_soft_limit(pages))
            .is_some()
    }
}
