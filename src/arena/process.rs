//! The default heap of arenas: one heap of pages for the whole process.
//!
//! ```text
//!   Arena::new() ┐
//!   Pool::new()  ├──▶ ProcessHeap ──first use──▶ PageHeap<System>, up to 1 TiB of addresses, never unmade
//!   …            ┘
//! ```
//!
//! It is made when the first block is requested, so a program without such arenas pays nothing. Pages that one arena
//! gives back serve the next, so once the process is warm a new arena needs no system call. The heap never returns
//! memory to the system by itself: call `scavenge` or `tick` on [`ProcessHeap::get`].
//!
//! It grows under a lock. In the child of a fork, a thread that held the lock no longer exists. So a program that forks
//! while other threads use arenas must not use this heap in the child, through any arena, not even a new one.
//!
//! Without an operating system there is no such heap, and no value of [`ProcessHeap`] exists.

#![forbid(unsafe_code)]

#[cfg(all(any(unix, windows), feature = "std"))]
pub use system::ProcessHeap;

#[cfg(not(all(any(unix, windows), feature = "std")))]
pub use nowhere::ProcessHeap;

#[cfg(all(any(unix, windows), feature = "std"))]
mod system {
    use std::sync::OnceLock;

    use crate::heap::{Config, PageHeap};
    use crate::source::System;

    /// Address space to request for the heap: 1 TiB, or a quarter of a 32-bit address space.
    const RESERVE_BYTES: usize = match 1_usize.checked_shl(40) {
        Some(bytes) => bytes,
        None => 1 << 30,
    };

    static HEAP: OnceLock<Option<PageHeap<System>>> = OnceLock::new();

    /// The process's own heap of pages for arenas.
    ///
    /// A [`PageHeap`] separate from the program's allocator: `GlobalHeap::limit`, `PAGEHEAP_LIMIT`, the statistics and
    /// the background thread of a `GlobalHeap` do not cover it. It has no limit until its `set_limit` is called, and
    /// returns nothing to the system by itself: call `scavenge`, `release`, or now and then `tick`. It has no fork
    /// handlers. It reserves 1 TiB of addresses (1 GiB if pointers have 32 bits), or as much as it can get, without
    /// memory behind them.
    ///
    /// ```
    /// use pageheap::PageCount;
    /// use pageheap::arena::ProcessHeap;
    ///
    /// if let Some(heap) = ProcessHeap::get() {
    ///     // What no arena holds goes back to the system.
    ///     heap.scavenge(PageCount(usize::MAX));
    /// }
    /// ```
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ProcessHeap;

    impl ProcessHeap {
        /// The heap, made at the first call. Returns `None` if the system refused to reserve address space then; it is
        /// not asked again.
        #[must_use]
        pub fn get() -> Option<&'static PageHeap<System>> {
            let heap = HEAP.get_or_init(|| PageHeap::new(System, Config::new(RESERVE_BYTES)).ok());
            heap.as_ref()
        }
    }
}

#[cfg(not(all(any(unix, windows), feature = "std")))]
mod nowhere {
    use crate::heap::PageHeap;
    use crate::source::Region;

    /// The process's own heap of pages for arenas. Without an operating system there is none, so this type has no
    /// value.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum ProcessHeap {}

    impl ProcessHeap {
        /// `None`.
        #[must_use]
        pub fn get() -> Option<&'static PageHeap<Region>> {
            None
        }
    }
}
