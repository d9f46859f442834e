//! The heap of pages that arenas stand on unless they are given another: one for the process.
//!
//! ```text
//!   Arena::new() ┐
//!   Pool::new()  ├──▶ ProcessHeap ──first use──▶ PageHeap<System>, up to 1 TiB of addresses, never unmade
//!   …            ┘
//! ```
//!
//! Made when the first block is asked for, so a program without such arenas pays nothing. Pages that one arena gives
//! back are the next one's: a new arena costs no system call once the process is warm. It never gives memory back to
//! the system by itself: [`ProcessHeap::get`] is where to call `scavenge` or `tick`.
//!
//! It grows under a lock. In the child of a fork a thread that held it is no more: who forks while other threads use
//! arenas must not use this heap in the child, by whatever arena, a new one included.
//!
//! Without an operating system there is no such heap, and a [`ProcessHeap`] cannot be had.

#![forbid(unsafe_code)]

#[cfg(all(unix, feature = "std"))]
pub use system::ProcessHeap;

#[cfg(not(all(unix, feature = "std")))]
pub use nowhere::ProcessHeap;

#[cfg(all(unix, feature = "std"))]
mod system {
    use std::sync::OnceLock;

    use crate::heap::{Config, PageHeap};
    use crate::source::System;

    /// Address space that the heap wishes for: 1 TiB, or a quarter of a 32-bit one.
    const RESERVE_BYTES: usize = match 1_usize.checked_shl(40) {
        Some(bytes) => bytes,
        None => 1 << 30,
    };

    static HEAP: OnceLock<Option<PageHeap<System>>> = OnceLock::new();

    /// The process's own heap of pages for arenas.
    ///
    /// A [`PageHeap`] beside the program's allocator: `GlobalHeap::limit`, `PAGEHEAP_LIMIT`, the statistics and the
    /// background thread of a `GlobalHeap` do not cover it. It has no limit, until its `set_limit` is called, and gives
    /// nothing back to the system by itself: call `scavenge`, `release`, or `tick` by and by. It is not told of forks.
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
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct ProcessHeap;

    impl ProcessHeap {
        /// The heap, made at the first call. `None` if the system would not reserve address space for it then: it is
        /// not tried again.
        pub fn get() -> Option<&'static PageHeap<System>> {
            let heap = HEAP.get_or_init(|| PageHeap::new(System, Config::new(RESERVE_BYTES)).ok());
            heap.as_ref()
        }
    }
}

#[cfg(not(all(unix, feature = "std")))]
mod nowhere {
    use crate::heap::PageHeap;
    use crate::source::Region;

    /// The process's own heap of pages for arenas: there is none without an operating system, and so no value of this
    /// type.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ProcessHeap {}

    impl ProcessHeap {
        /// `None`.
        pub fn get() -> Option<&'static PageHeap<Region>> {
            None
        }
    }
}
