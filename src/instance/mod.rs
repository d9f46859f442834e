//! [`Heap`]: an object heap as a value, with pages and a limit of its own, gone at once when it is dropped.
//!
//! ```text
//!   Heap ── lock ──▶ one thread's structure: magazines, a cache of pages ──▶ classes, spans ──▶ pages of its own
//!     └── drop: every reservation goes back to the source, blocks and all
//! ```
//!
//! The object layer is the one of [`GlobalHeap`](crate::GlobalHeap): the same classes, the same spans, the same checks.
//! What differs is that threads have no magazines of their own here - where would they be when the heap is dropped? -
//! but share one set under a lock; and that beside the lock there is time to look whether a block that is freed is one
//! of this heap's, of this layout.
//!
//! Worked: a `Heap` of 1 MiB is asked for 100 bytes, freed, asked again: the second block is the first, from the
//! magazine, and a lock taken and let go. When it is dropped, two `munmap` for the pages and tables of pages and one
//! for the classes are all there is to do, however many blocks there are.
//!
//! Cost: that of [`Heap`]; three nanoseconds of a pair are the look. Blocks are cleared and copied, and pages are given
//! back for a soft limit, with nothing held.

use core::alloc::Layout;
use core::fmt;
use core::panic::{RefUnwindSafe, UnwindSafe};
use core::ptr::NonNull;
use core::time::Duration;

use crate::global::{Opening, resident};
use crate::guard::{self, Place, Plain};
use crate::heap::{Clock, Config, MapEntry, NewHeapError};
use crate::object::{GlobalStats, Keeper, ObjectFault, Objects, SizeClass, Snapshot};
use crate::scavenge::pressure::Notices;
use crate::source::{Memory, Source};
use crate::units::PageCount;

#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2-04"))]
mod api2;

/// An object heap: blocks of any layout, from pages of its own.
///
/// For code that must be isolated: a plug-in that may have 64 MiB and no more, a request whose memory goes when it is
/// answered, a data structure whose nodes should lie together, a leak that should be found.
///
/// `Send + Sync`: any thread may allocate, and free what another allocated. Dropping the heap gives everything back to
/// its source; blocks still allocated are gone with it (and [`free`](Self::free)'s contract says that nobody uses
/// them).
///
/// ```
/// use std::alloc::Layout;
///
/// use pageheap::source::System;
/// use pageheap::{Config, Heap, PageCount};
///
/// let heap = Heap::new(System, Config::new(1 << 30).limit(PageCount(128)))?;
/// let layout = Layout::new::<[u64; 100]>();
/// let block = heap.allocate(layout).unwrap();
/// assert!(heap.contains(block.as_ptr()));
/// // SAFETY: allocated with this layout, and nothing uses it any more.
/// unsafe { heap.free(block, layout) };
/// // A limit of its own: 128 pages are 1 MiB.
/// assert!(heap.allocate(Layout::new::<[u8; 2 << 20]>()).is_none());
/// # Ok::<(), pageheap::NewHeapError>(())
/// ```
///
/// With the feature `allocator-api2-02` or `allocator-api2-04` it is an `Allocator` for collections.
///
/// # What it promises
///
/// * It never unwinds. `errno` stays as it was. Impossible layouts get `None`.
/// * Misuse that is found ends the process, with a message that names the address: see [`free`](Self::free).
/// * `fork`: it works in the child as a [`GlobalHeap`](crate::GlobalHeap) does. (A [`PageHeap`](crate::PageHeap) is not
///   told of forks.)
/// * **Not in signal handlers**: neither allocate nor free there.
///
/// # What it costs
///
/// 16 to 25 ns a pair of allocation and freeing: all threads share one set of magazines, under a lock. Many threads
/// that allocate all the time should have a heap each, or the global one. To make and drop a heap: ~15 system calls.
///
/// It has no thread of its own: until it is dropped it gives memory back when [`tick`](Self::tick),
/// [`release`](Self::release) or [`scavenge`](Self::scavenge) is called; how they differ:
/// [Giving memory back](crate#giving-memory-back). Limits are in pages of 8 KiB.
pub struct Heap<S: Source + 'static> {
    /// Lies in its own tables, until `drop`.
    objects: NonNull<Objects<S>>,
}

// SAFETY: the object layer may be used by several threads if its source may.
unsafe impl<S: Source + Send + Sync + 'static> Send for Heap<S> {}
// SAFETY: as above.
unsafe impl<S: Source + Send + Sync + 'static> Sync for Heap<S> {}

// Nothing in it unwinds half way, as in the `PageHeap` below. It has the source, if not as a field.
impl<S: Source + UnwindSafe + 'static> UnwindSafe for Heap<S> {}
impl<S: Source + RefUnwindSafe + 'static> RefUnwindSafe for Heap<S> {}

impl<S: Memory + 'static> Heap<S> {
    /// A heap over `source`, which reserves as many bytes as `config` says, or what it can get.
    ///
    /// # Errors
    /// If not even the smallest heap could be reserved: why its pages could not. Nothing stays reserved.
    ///
    /// What it heeds of `config`, and what not: see [`Config`].
    pub fn new(source: S, config: Config) -> Result<Self, NewHeapError> {
        let opening = Opening::begin();
        // At least the one cache that all threads share.
        let config = config.caches(1);
        let opened = Objects::open(source, config, Keeper::new(false, Notices::NONE, ""));
        if let Ok(objects) = opened {
            opening.enter(objects);
        }
        // Before the source, which may own a heap like this one, is dropped.
        drop(opening);
        let objects = opened.map_err(|(_, reason)| reason)?;
        Ok(Self {
            objects: NonNull::from_ref(objects),
        })
    }
}

impl<S: Source + 'static> Heap<S> {
    #[inline]
    fn objects(&self) -> &Objects<S> {
        // SAFETY: it stays until `drop`.
        unsafe { self.objects.as_ref() }
    }

    // ---- blocks
    // -------------------------------------------------------------------------------------------------------------

    /// A block for `layout`, of whose bytes nothing is known. `None` if there is no room, or no such layout; a layout
    /// of no bytes gets a block of its own. (Not so by the trait `Allocator`, where it gets none: what came by the one
    /// way goes back by it.)
    #[must_use]
    pub fn allocate(&self, layout: Layout) -> Option<NonNull<u8>> {
        guard::allocate(self, layout, false)
    }

    /// As [`allocate`](Self::allocate); every byte of the layout's size is zero. Pages that are known to be zero are
    /// not touched.
    #[must_use]
    pub fn allocate_zeroed(&self, layout: Layout) -> Option<NonNull<u8>> {
        guard::allocate(self, layout, true)
    }

    /// Takes a block back. Aborts, with a message that names the address, where misuse is noticed: another heap's
    /// block, another layout's (of another size class), or an address inside one, always, up to an alignment of 16 MiB
    /// and but for blocks that grew; one freed twice, mostly (`docs/reliability.md`).
    ///
    /// # Safety
    ///
    /// It was allocated from this heap with this layout (or one of the size that [`usable_size`](Self::usable_size)
    /// says), and nothing uses it any more.
    pub unsafe fn free(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { guard::free(self, block, layout) };
    }

    /// Makes a block `size` bytes long, where it is or elsewhere; the bytes up to the shorter length stay, and so does
    /// the alignment. `None` leaves it as it was.
    ///
    /// A block that is made shorter is refused only where there is no memory at all, and then only one of up to 32 KiB
    /// that is to have 1 KiB or less. (With the feature `checks` any: all move.)
    ///
    /// # Safety
    ///
    /// It was allocated from this heap with this layout and is the caller's; on success it is not, but what is
    /// returned.
    #[must_use]
    pub unsafe fn resize(&self, block: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller's promise.
        unsafe { guard::resize(self, block, layout, size) }
    }

    /// How many bytes a block of this layout has, all of which may be used; see
    /// [`GlobalHeap::usable_size`](crate::GlobalHeap::usable_size).
    #[must_use]
    pub fn usable_size(&self, layout: Layout) -> usize {
        guard::usable_size(layout, Objects::<S>::usable_size(layout))
    }

    /// Whether an address lies in the part of the heap that has grown. O(1), and touches no memory at the address.
    #[must_use]
    pub fn contains(&self, address: *const u8) -> bool {
        self.objects().contains(address)
    }

    // ---- the whole
    // ----------------------------------------------------------------------------------------------------------

    /// The most pages the heap may grow to.
    #[must_use]
    pub fn limit(&self) -> PageCount {
        self.objects().heap().limit()
    }

    /// Changes the most pages the heap may grow to. What has grown stays, and can be had; but no block longer than
    /// the limit.
    pub fn set_limit(&self, limit: PageCount) {
        self.objects().heap().set_limit(limit);
    }

    /// The most pages that should have memory behind them; see [`PageHeap::soft_limit`](crate::PageHeap::soft_limit).
    #[must_use]
    pub fn soft_limit(&self) -> PageCount {
        self.objects().heap().soft_limit()
    }

    /// Changes the most pages that should have memory behind them. Takes effect with the next page that gets some, and
    /// with the next [`tick`](Self::tick).
    pub fn set_soft_limit(&self, limit: PageCount) {
        self.objects().heap().set_soft_limit(limit);
    }

    /// Gives memory behind free pages back to the source: what the magazines and the cache hold, too. Says how many
    /// pages, of 8 KiB.
    pub fn scavenge(&self, pages: PageCount) -> PageCount {
        let objects = self.objects();
        objects.scavenge(pages)
    }

    /// Gives all memory behind free pages back, `bytes` bytes or a little more (not less than a page, or a huge page
    /// that would be cut), at once, also of a heap that [releases lazily](Config::release_lazily); returns how many
    /// bytes. See [`GlobalHeap::release`](crate::GlobalHeap::release).
    pub fn release(&self, bytes: usize) -> usize {
        let pages = PageCount::holding(bytes, SizeClass::PAGE_SHIFT);
        self.objects().release(pages).0 << SizeClass::PAGE_SHIFT
    }

    /// One step of the scavenger, for programs with a loop of their own. Returns how long to wait before the next; see
    /// [`PageHeap::tick`](crate::PageHeap::tick) for what it gives back, and when.
    pub fn tick<C: Clock + ?Sized>(&self, clock: &C) -> Duration {
        self.objects().tick(clock)
    }

    /// Counts. O(heap): 0.4 ns for each 64 pages.
    #[must_use]
    pub fn stats(&self) -> GlobalStats {
        self.objects().stats()
    }

    /// Counts by classes too, and asks the system what the whole process has resident; see
    /// [`GlobalHeap::snapshot`](crate::GlobalHeap::snapshot). O(heap).
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.objects().snapshot(resident())
    }

    /// What every page is, in order of address; see [`PageHeap::map`](crate::PageHeap::map). To be drawn by a
    /// [`Picture`](crate::Picture).
    pub fn map(&self) -> impl Iterator<Item = MapEntry> + '_ {
        self.objects().map()
    }

    /// Re-derives all the heap says of itself from its bits and spans. O(heap).
    ///
    /// For a heap nobody uses meanwhile: while somebody does, a fault that is none may be found, and no harm done. A
    /// thread that ends uses it until it has been joined; `std::thread::scope` alone waits for less. Who releases, or
    /// ticks, is waited for: some seconds at the most, then what he has in hand may be such a fault.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn check(&self) -> Result<(), ObjectFault> {
        self.objects().check()
    }
}

impl<S: Source + 'static> Plain for Heap<S> {
    fn take(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
        let objects = self.objects();
        let memory = if zeroed {
            let fresh = objects.allocate_to_zero(&objects.shared(), layout);
            fresh.map(|fresh| objects.zero(fresh, layout))
        } else {
            objects.allocate(&objects.shared(), layout)
        };
        memory.or_else(|| objects.refuse())
    }

    unsafe fn give(&self, memory: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.objects().free_shared(memory, layout) };
    }

    unsafe fn resize(&self, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        let objects = self.objects();
        // SAFETY: the caller's promise.
        let moved = unsafe { objects.resize_shared(memory, layout, size) };
        moved.or_else(|| objects.refuse())
    }

    fn place(&self, address: usize) -> Option<Place> {
        self.objects().place(address)
    }
}

impl<S: Source + 'static> Drop for Heap<S> {
    fn drop(&mut self) {
        let opening = Opening::begin();
        opening.leave(self.objects());
        // The source may own a heap like this one, which goes with it.
        drop(opening);
        // SAFETY: `&mut self`: nobody else uses the heap, and no thread has a structure of it. It is on no list any
        // more.
        unsafe { Objects::close(self.objects) };
    }
}

impl<S: Source + 'static> fmt::Debug for Heap<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap")
            .field("limit", &self.limit())
            .finish_non_exhaustive()
    }
}
