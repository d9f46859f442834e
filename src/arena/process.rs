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
//! It is made, and held across forks, where that is done for all heaps: `global/process.rs`. So in the child of a fork
//! a new arena may stand on it, whatever other threads were doing. An arena that they were using has locks of its own,
//! which nobody holds.
//!
//! Without an operating system there is no such heap, and no value of [`ProcessHeap`] exists.

#![forbid(unsafe_code)]

#[cfg(all(any(unix, windows), feature = "std"))]
pub use system::ProcessHeap;

#[cfg(not(all(any(unix, windows), feature = "std")))]
pub use nowhere::ProcessHeap;

#[cfg(all(any(unix, windows), feature = "std"))]
mod system {
    /// The process's own heap of pages for arenas.
    ///
    /// A [`PageHeap`](crate::PageHeap) separate from the program's allocator: `GlobalHeap::limit`, `PAGEHEAP_LIMIT`,
    /// the statistics and the background thread of a `GlobalHeap` do not cover it. It has no limit until its
    /// `set_limit` is called, and returns nothing to the system by itself: call `scavenge`, `release`, or now and then
    /// `tick`. It reserves 1 TiB of addresses (1 GiB if pointers have 32 bits), or as much as it can get, without
    /// memory behind them.
    ///
    /// In the child of a fork it works, whatever the parent's other threads were doing, and so do new arenas on it. An
    /// arena that other threads were using may not: [its own lock](crate::arena#after-a-fork) may be held for ever.
    /// Pages that such a thread was just taking, giving back or releasing, or kept in a [`Cache`](crate::Cache), may be
    /// lost to the child, and such a cache cannot be lent again. A fork costs the child a few hundred nanoseconds more
    /// for each 4 MiB that the heap has grown to. If the library that contains this copy of the crate is unloaded,
    /// the heap stays, with all its addresses, and nobody uses it again.
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
