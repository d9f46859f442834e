//! [`Heap`]: an object heap as a value, with pages and a limit of its own, gone at once when it is dropped.
//!
//! ```text
//!   Heap ── lock, or alone ──▶ a structure: magazines, shelf, cache ──▶ classes, spans ──▶ pages of its own
//!     └── drop: every reservation goes back to the source, blocks and all
//! ```
//!
//! The object layer is that of [`GlobalHeap`](crate::GlobalHeap): the same classes, spans and checks. Two things
//! differ. Threads have no magazines of their own, because those would have to disappear when the heap is dropped. They
//! share a set under a lock, or several if they meet there (`object/commons.rs`); a thread that is alone with one need
//! not take its lock (`sync/bias.rs`). And a free checks whether the block belongs to this heap and this layout: the
//! blocks of two heaps are easily mixed up.
//!
//! Worked example: a `Heap` of 1 MiB allocates 100 bytes, frees them, and allocates 100 again. The second block is the
//! first one, from the magazine, for 11 ns with the free, or 49 with the lock.
//! Dropping the heap takes two `munmap` calls for the pages and their tables and one for the classes, however many
//! blocks there are.
//!
//! The cost is stated at [`Heap`]; three nanoseconds of an allocate-free pair are the check. Clearing and copying
//! blocks, and giving pages back for a soft limit, happen outside the lock.

use core::alloc::Layout;
use core::fmt;
use core::panic::{RefUnwindSafe, UnwindSafe};
use core::ptr::NonNull;
use core::time::Duration;

use crate::arena::{Backing, Block};
use crate::global::{Opening, exhausted, resident};
use crate::guard::{self, Place, Plain};
use crate::heap::{Clock, Config, MapEntry, NewHeapError};
use crate::object::{GlobalStats, Keeper, ObjectFault, Objects, SizeClass, Snapshot};
use crate::scavenge::pressure::Notices;
use crate::source::{Memory, Source};
use crate::units::PageCount;

#[cfg(feature = "std")]
mod shared;
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2-04"))]
mod api2;

#[cfg(feature = "std")]
pub use shared::SharedHeap;

/// The program's hook, called before a refusal: a closure, since each heap may have something else to free.
#[cfg(feature = "std")]
type Hook<S> = std::boxed::Box<dyn Fn(&Heap<S>, Layout) -> bool + Send + Sync>;

/// Without `std` there is no memory for a closure, and so no hook.
#[cfg(not(feature = "std"))]
type Hook<S> = fn(&Heap<S>, Layout) -> bool;

/// An object heap: blocks of any layout, from pages of its own.
///
/// Use it to isolate memory: a plug-in with a limit of 64 MiB, a request whose memory is freed as a whole when it has
/// been answered, a data structure whose nodes should lie together, a leak to be found.
///
/// It is `Send + Sync`: any thread may allocate, and free what another allocated. Dropping the heap gives everything
/// back to its source, including blocks that are still allocated: their pointers dangle from then on.
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
/// With the feature `allocator-api2-02` or `allocator-api2-04`, a `Heap` and a reference to one are an `Allocator` of
/// that version, for collections; the program depends on the crate `allocator-api2` in that version too. `hashbrown`
/// uses 0.2. Collections need not be dropped one by one:
///
/// ```
/// # #[cfg(feature = "allocator-api2-02")]
/// # fn main() -> Result<(), pageheap::NewHeapError> {
/// # use allocator_api2_02 as allocator_api2;
/// use allocator_api2::vec::Vec;
/// use pageheap::source::System;
/// use pageheap::{Config, Heap, PageCount};
///
/// let heap = Heap::new(System, Config::new(1 << 30).limit(PageCount(128)))?;
/// let mut numbers = Vec::new_in(&heap);
/// numbers.extend(0..1000_u64);
/// assert!(heap.contains(numbers.as_ptr().cast()));
/// assert!(numbers.try_reserve(1 << 20).is_err(), "8 MiB are more than the limit");
/// std::mem::forget(numbers); // Goes back with the heap.
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "allocator-api2-02"))]
/// # fn main() {}
/// ```
///
/// Collections that own their heap together have a `SharedHeap`. (An `Arc<Heap>` is no `Allocator`: only the crate
/// that has the trait could make it one.)
///
/// Arenas may stand on a `Heap`, lent, owned or in an `Arc` ([`Backing`]): what they hold is within its limits, and
/// they cannot outlive it.
///
/// # What it promises
///
/// * It never unwinds. `errno` is preserved. Impossible layouts get `None`.
/// * Detected misuse ends the process, with a message that names the address: see [`free`](Self::free).
/// * `fork`: it works in the child as a [`GlobalHeap`](crate::GlobalHeap) does. (A [`PageHeap`](crate::PageHeap) is not
///   notified of forks.)
/// * **Not in signal handlers**: neither allocate nor free there. A handler that does may get a block that the code it
///   interrupted gets too.
///
/// # What it costs
///
/// An allocate-free pair of up to 1 MiB takes 12 ns while one thread uses the heap, and 14 in each of several, as long
/// as there are processors for them (Emerald Rapids; the system's allocator took 11). Threads share a set of magazines
/// and a shelf, under a lock that one which is alone with them need not take (where the system has a fence through all
/// threads: Linux and Windows, but not Wine). With the lock a pair takes 49 ns. Threads that meet there get sets of
/// their own, up to 16, which lie beside the heap's tables (or, if its source has no more room, among its pages), and
/// take a 32nd of its limit at the most, for ever: in a heap of less than 256 KiB they go on sharing. The first call of
/// another thread to a set that one had to itself takes some microseconds more. Threads that meet in this way again and
/// again get sets of their own, too, if there is room beside the tables; elsewhere the lock stays after the twelfth
/// time. [`tick`](Self::tick), [`release`](Self::release), [`scavenge`](Self::scavenge), a refusal, a fork, and now and
/// then an allocation above the soft limit wait for a thread that has a set to itself, and leave it to that thread. To
/// make and drop a heap takes ~15 system calls.
///
/// A heap that reserves 1 GiB and has one small block has 48 KiB of memory on Linux, 16 KiB of page tables, and 12
/// mappings (64 MiB: 36 KiB, 8 KiB, and 8). The first block takes 2 MiB if the system has huge pages for all, or for
/// who wants them as this heap does ([`Config::huge_pages`]). `vm.max_map_count` bounds the mappings of a process,
/// those of the program included, and so the number of heaps: 65,530 are enough for some 5,400 of 1 GiB, or 8,100 of 64
/// MiB. One more is not made, or is refused its first block. Those that are there go on, and grow.
///
/// A refusal takes some 30 µs, since everything that is kept somewhere is emptied first; 0.4 ms if eight threads at
/// work have sets to themselves. So a cache that makes room when it is refused should free several blocks at a time:
/// with 16, a block costs a tenth of what it costs with one. `on_exhausted` is for such caches.
///
/// It has no thread of its own: until it is dropped, it gives memory back only when [`tick`](Self::tick),
/// [`release`](Self::release) or [`scavenge`](Self::scavenge) is called; how they differ: [Giving memory
/// back](crate#giving-memory-back). Limits are in pages of 8 KiB; [`Config::limit_bytes`] takes bytes.
///
/// Its source is `'static`, because a fork looks for all heaps. Heaps that share a source have it in a `static` or an
/// `Arc`.
pub struct Heap<S: Source + 'static> {
    /// Lies in its own tables, until `drop`.
    objects: NonNull<Objects<S>>,
    exhausted: Option<Hook<S>>,
}

// SAFETY: several threads may use the object layer if they may use its source. The hook is `Send` and `Sync`.
unsafe impl<S: Source + Send + Sync + 'static> Send for Heap<S> {}
// SAFETY: as above.
unsafe impl<S: Source + Send + Sync + 'static> Sync for Heap<S> {}

// Nothing in it unwinds half way, as in the `PageHeap` below; a hook that unwinds ends the process. It holds the
// source, though not as a field.
impl<S: Source + UnwindSafe + 'static> UnwindSafe for Heap<S> {}
impl<S: Source + RefUnwindSafe + 'static> RefUnwindSafe for Heap<S> {}

impl<S: Memory + 'static> Heap<S> {
    /// Creates a heap over `source`. Reserves as many bytes as `config` says, or what it can get. [`Config`] lists
    /// which options are used.
    ///
    /// # Errors
    /// If not even the smallest heap could be reserved: why not. Nothing stays reserved.
    pub fn new(source: S, config: Config) -> Result<Self, NewHeapError> {
        let opening = Opening::begin();
        // At least the one cache that all threads share.
        let config = config.caches(1);
        let opened = Objects::open(source, config, Keeper::new(false, Notices::NONE, ""));
        if let Ok(objects) = opened {
            opening.enter(objects);
        }
        // Before the source is dropped, because it may own a heap like this one.
        drop(opening);
        let objects = opened.map_err(|(_, reason)| reason)?;
        Ok(Self {
            objects: NonNull::from_ref(objects),
            exhausted: None,
        })
    }
}

impl<S: Source + 'static> Heap<S> {
    #[inline]
    fn objects(&self) -> &Objects<S> {
        // SAFETY: it stays in place until `drop`.
        unsafe { self.objects.as_ref() }
    }

    /// Calls `hook` before an allocation is refused for want of memory, at the limit or because the source has none: by
    /// [`allocate`](Self::allocate), [`allocate_zeroed`](Self::allocate_zeroed), [`resize`](Self::resize), or a
    /// collection. What could not be met in an empty heap, such as a block longer than the limit, is refused without
    /// it. The hook returns whether it has freed something, so that the allocation should be tried again, 256 times at
    /// most. Each attempt takes some 30 µs, 0.4 ms if eight threads at work have sets to themselves. So free at least
    /// as much as is asked for, if that is known, and not one entry of a cache at a time. The hook receives this heap
    /// and the layout of the block; with the feature `checks`, that of the block with its seal. A second hook replaces
    /// the first.
    ///
    /// The hook runs on the allocating thread, on several at a time perhaps, with none of this heap's locks held. (If a
    /// verb of a source made the allocation, the rules for verbs hold for the hook.) It may free and may call
    /// [`release`](Self::release). On Unix and Windows it may also allocate, from any heap: if there is no room it gets
    /// nothing, and no hook is called for that, be it this one, another `Heap`'s or a `GlobalHeap`'s. Elsewhere it must
    /// not, as it would be called again. It must not wait for a lock of the program that an allocating thread may hold.
    /// It must not unwind: that ends the process. It is not called for an arena on this heap, which gets an error.
    ///
    /// The heap owns the hook, and drops it last of all. A hook that owned a [`SharedHeap`] of the same heap, or a
    /// collection with one, would keep the heap for ever: give it a `Weak` of what holds the collections.
    ///
    /// ```
    /// # #[cfg(feature = "allocator-api2-02")]
    /// # fn main() -> Result<(), pageheap::NewHeapError> {
    /// # use allocator_api2_02 as allocator_api2;
    /// use std::sync::{Arc, Mutex};
    ///
    /// use allocator_api2::vec::Vec;
    /// use pageheap::source::System;
    /// use pageheap::{Config, Heap, SharedHeap};
    ///
    /// let cache = Arc::new(Mutex::new(std::vec::Vec::new()));
    /// let evictable = Arc::downgrade(&cache);
    /// let heap = Heap::new(System, Config::new(1 << 30).limit_bytes(1 << 20))?.on_exhausted(move |_, _| {
    ///     let Some(cache) = evictable.upgrade() else { return false };
    ///     // Does not wait: a thread that allocates may hold the lock.
    ///     cache.try_lock().is_ok_and(|mut cache| cache.pop().is_some())
    /// });
    /// let heap = SharedHeap::from(heap);
    /// for _ in 0..100 {
    ///     let entry = Vec::<u8, _>::with_capacity_in(100_000, heap.clone()); // There is room for ten.
    ///     cache.lock().unwrap().push(entry);
    /// }
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "allocator-api2-02"))]
    /// # fn main() {}
    /// ```
    #[cfg(feature = "std")]
    #[must_use]
    pub fn on_exhausted(mut self, hook: impl Fn(&Self, Layout) -> bool + Send + Sync + 'static) -> Self {
        self.exhausted = Some(std::boxed::Box::new(hook));
        self
    }

    /// What [`retry`](Self::retry) does for a new block. Not inlined: so the way of a block that was found keeps
    /// nothing in memory for this.
    #[cold]
    #[inline(never)]
    fn take_at_last(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
        self.retry(layout, || self.objects().take_shared(layout, zeroed))
    }

    /// The last step of an allocation that found no room: calls the program's hook, if there is one and the layout
    /// could ever be met. Counts a refusal if that does not help.
    #[cold]
    #[inline(never)]
    fn retry(&self, layout: Layout, attempt: impl Fn() -> Option<NonNull<u8>>) -> Option<NonNull<u8>> {
        let objects = self.objects();
        self.exhausted
            .as_ref()
            .filter(|_| objects.fits(layout))
            .and_then(|hook| exhausted::retry(|wanted| hook(self, wanted), layout, attempt))
            .or_else(|| objects.refuse())
    }

    // ---- blocks
    // -------------------------------------------------------------------------------------------------------------

    /// Allocates a block for `layout`, with arbitrary contents. It is there until it is freed or the heap is dropped.
    /// Returns `None` if there is no room, or no such layout. A pair with `free` takes some 12 ns up to 64 KiB; more if
    /// pages have to be found. A layout of zero bytes gets a block of its own. (Not through the trait `Allocator`,
    /// which gives it none: free a block through the interface that allocated it.)
    #[must_use]
    pub fn allocate(&self, layout: Layout) -> Option<NonNull<u8>> {
        guard::allocate(self, layout, false)
    }

    /// As [`allocate`](Self::allocate), but every byte of the layout's size is zero. Pages that are known to be zero
    /// are not touched.
    #[must_use]
    pub fn allocate_zeroed(&self, layout: Layout) -> Option<NonNull<u8>> {
        guard::allocate(self, layout, true)
    }

    /// Frees a block. Aborts, with a message that names the address, if it detects misuse. It always detects a block of
    /// another heap, a layout of another size class, or an address inside a block, up to an alignment of 16 MiB and
    /// except for blocks that grew, were shortened, or got pages of their own in a torn heap; a block freed twice it
    /// detects mostly (`docs/reliability.md`).
    ///
    /// # Safety
    ///
    /// The block was allocated from this heap with this layout (or one of the size that
    /// [`usable_size`](Self::usable_size) returns), and nothing uses it any more.
    pub unsafe fn free(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { guard::free(self, block, layout) };
    }

    /// Resizes a block to `size` bytes, in place or by moving it. The bytes up to the shorter length and the alignment
    /// are preserved; from now on its layout is that of `size` bytes with the alignment it had, and it is to be freed
    /// with that. Zero bytes are a size like any other, as in [`allocate`](Self::allocate). Returns `None` on failure,
    /// which leaves the block unchanged.
    ///
    /// Shrinking fails only if there is no memory at all, and then only for a block of up to 32 KiB that is to have 1
    /// KiB or less. (With the feature `checks` it may fail for any block, because all move.)
    ///
    /// # Safety
    ///
    /// The block was allocated from this heap with this layout and belongs to the caller. On success the caller owns
    /// the returned block instead.
    #[must_use]
    pub unsafe fn resize(&self, block: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller's promise.
        unsafe { guard::resize(self, block, layout, size) }
    }

    /// The size of a block of this layout, all of which may be used; see
    /// [`GlobalHeap::usable_size`](crate::GlobalHeap::usable_size).
    #[must_use]
    pub fn usable_size(&self, layout: Layout) -> usize {
        guard::usable_size(layout, Objects::<S>::usable_size(layout))
    }

    /// Whether an address lies in the part of the heap that has grown, and in no [gap](Source::gap). O(1), or O(gaps);
    /// does not touch memory at the address.
    #[must_use]
    pub fn contains(&self, address: *const u8) -> bool {
        self.objects().contains(address)
    }

    // ---- the whole heap
    // ----------------------------------------------------------------------------------------------------------

    /// Bytes in a page: 8 KiB. [`limit`](Self::limit), [`soft_limit`](Self::soft_limit) and
    /// [`scavenge`](Self::scavenge) count pages, [`release`](Self::release) counts bytes.
    #[must_use]
    pub const fn page_bytes(&self) -> usize {
        1 << SizeClass::PAGE_SHIFT
    }

    /// The source.
    #[must_use]
    pub fn source(&self) -> &S {
        self.objects().heap().source()
    }

    /// The maximum number of pages the heap may grow to.
    #[must_use]
    pub fn limit(&self) -> PageCount {
        self.objects().heap().limit()
    }

    /// Changes the maximum number of pages the heap may grow to; more than is reserved counts as no limit. Pages it has
    /// already grown to remain and can be allocated, but not for blocks longer than the limit
    /// (except one of up to 1 MiB that was freed before).
    pub fn set_limit(&self, limit: PageCount) {
        self.objects().heap().set_limit(limit);
    }

    /// The maximum number of pages that should have memory behind them; see
    /// [`PageHeap::soft_limit`](crate::PageHeap::soft_limit).
    #[must_use]
    pub fn soft_limit(&self) -> PageCount {
        self.objects().heap().soft_limit()
    }

    /// Changes the maximum number of pages that should have memory behind them. Takes effect with the next page that
    /// gains memory, and with the next [`tick`](Self::tick).
    pub fn set_soft_limit(&self, limit: PageCount) {
        self.objects().heap().set_soft_limit(limit);
    }

    /// Releases the memory of up to `pages` free pages of 8 KiB to the source (a few more rather than split a huge
    /// page), including those in the magazines, on the shelf and in the cache, unless another thread is using these at
    /// that moment. If there are fewer, the memory between live blocks of more than 1 KiB goes back too,
    /// unless the heap [releases lazily](Config::release_lazily) or its source commits, as on Windows. Returns how many
    /// pages.
    pub fn scavenge(&self, pages: PageCount) -> PageCount {
        self.objects().scavenge(pages)
    }

    /// Gives back the memory of free pages at once: `bytes` bytes or a little more (at least a page, or a huge page
    /// rather than splitting it), even in a heap that [releases lazily](Config::release_lazily). Returns how many
    /// bytes. See [`GlobalHeap::release`](crate::GlobalHeap::release).
    pub fn release(&self, bytes: usize) -> usize {
        let pages = PageCount::holding(bytes, SizeClass::PAGE_SHIFT);
        self.objects().release(pages).bytes(SizeClass::PAGE_SHIFT)
    }

    /// One step of the scavenger, for programs with a loop of their own. Returns how long to wait before the next step;
    /// [`PageHeap::tick`](crate::PageHeap::tick) says what it gives back, and when. A loop must not sleep for
    /// `Duration::MAX`: see [`GlobalHeap::tick`](crate::GlobalHeap::tick).
    pub fn tick<C: Clock + ?Sized>(&self, clock: &C) -> Duration {
        self.objects().tick(clock)
    }

    /// Collects the statistics. O(heap): 2-3 ns for each 64 pages, and 80 counts for each structure that threads have
    /// or had, under the lock that threads begin and end with. [`backed`](Self::backed) is O(1).
    #[must_use]
    pub fn stats(&self) -> GlobalStats {
        self.objects().stats()
    }

    /// Pages with memory behind them; see [`PageHeap::backed`](crate::PageHeap::backed). O(1).
    #[must_use]
    pub fn backed(&self) -> PageCount {
        self.objects().heap().backed()
    }

    /// The most pages that were ever [`backed`](Self::backed). O(1).
    #[must_use]
    pub fn peak_backed(&self) -> PageCount {
        self.objects().heap().peak_backed()
    }

    /// Collects statistics by size class too, and asks the system for the resident size of the whole process; see
    /// [`GlobalHeap::snapshot`](crate::GlobalHeap::snapshot). O(heap).
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        self.objects().take_snapshot(&mut snapshot, resident());
        snapshot
    }

    /// What every page is, in address order; see [`PageHeap::map`](crate::PageHeap::map). Draw it with a
    /// [`Picture`](crate::Picture).
    pub fn map(&self) -> impl Iterator<Item = MapEntry> + '_ {
        self.objects().map()
    }

    /// Re-derives everything the heap claims about itself from its bits and spans. O(heap).
    ///
    /// No thread should be using the heap meanwhile: otherwise the check may report a fault that is none, but it does
    /// no harm. A thread that ends uses the heap until it has been joined; `std::thread::scope` alone waits for less.
    /// The check waits for threads that release or tick, for some seconds at most; after that, what such a thread
    /// has in hand may appear as such a fault.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn check(&self) -> Result<(), ObjectFault> {
        self.objects().check()
    }
}

impl<S: Source + 'static> Plain for Heap<S> {
    fn take(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
        let block = self.objects().take_shared(layout, zeroed);
        block.or_else(|| self.take_at_last(layout, zeroed))
    }

    unsafe fn give(&self, memory: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.objects().free_shared(memory, layout) };
    }

    unsafe fn resize(&self, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller's promise; a failed attempt changes nothing.
        let attempt = || unsafe { self.objects().resize_shared(memory, layout, size) };
        attempt().or_else(|| match Layout::from_size_align(size, layout.align()) {
            Ok(new) => self.retry(new, attempt),
            Err(_) => self.objects().refuse(),
        })
    }

    fn place(&self, address: usize) -> Option<Place> {
        self.objects().place(address)
    }

    fn has_memory(&self, address: usize) -> bool {
        self.objects().has_memory(address)
    }
}

// SAFETY: a block is a run of the heap of pages, which are memory (`new`), of which it takes as many as requested, so
// aligned. Nobody else has them until they are given back, and they stay in place until the heap is dropped. They count
// as zero only where the heap of pages says so. Nothing here unwinds, or uses an arena.
unsafe impl<S: Source + 'static> Backing for Heap<S> {
    fn page_bytes(&self) -> usize {
        1 << SizeClass::PAGE_SHIFT
    }

    fn most_bytes(&self) -> usize {
        self.objects().most_lent()
    }

    fn take(&self, bytes: usize, align: usize) -> Option<Block> {
        let objects = self.objects();
        objects.lend_pages_shared(bytes, align).or_else(|| objects.refuse())
    }

    unsafe fn give(&self, memory: NonNull<[u8]>) {
        let objects = self.objects();
        // SAFETY: the caller's promise; the lock is held meanwhile.
        unsafe { objects.take_back(&objects.shared(), memory) };
    }
}

impl<S: Source + 'static> Drop for Heap<S> {
    fn drop(&mut self) {
        let opening = Opening::begin();
        opening.leave(self.objects());
        // The source may own a heap like this one, which is closed with it.
        drop(opening);
        // SAFETY: `&mut self`: no other thread uses the heap, and none has a structure of it. It is no longer on any
        // list.
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
