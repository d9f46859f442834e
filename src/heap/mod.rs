//! [`PageHeap`]: runs of pages from one reserved range, for any thread, over any source of memory.
//!
//! ```text
//!   PageHeap
//!   ├── FreeSet        which pages are free: bitmap, tree, hints            no lock
//!   ├── slots          the caches: one word each                           no lock but for lending a slot
//!   ├── locks          growth; the lending of slots                        futex, or spinning
//!   └── source         ┌──── grown ────┬──── reserved ─────────────────┐
//!                      │ pages         │ PROT_NONE, costs nothing      │    + one range for metadata
//!                      └───────────────┴───────────────────────────────┘
//! ```
//!
//! A heap reserves its address range once and never moves it. A page is an index; one shift and one addition turn it
//! into an address. The heap starts with no pages. It grows by what it needs or by an eighth of its size, whichever is
//! more, up to its limit.
//!
//! Worked example: `allocate(PageCount(3))` on a heap whose only free page lies in word 17. The hint for 3 pages points
//! to page 0. Chunk 0 has no run of 3 free pages, and neither has anything above it (four blocks of summaries, one root
//! entry); the proof confirms this. The heap then takes the growth lock, asks its source for 512 more pages, prepares
//! their tables, adds them to the set, and searches again.
//!
//! The heap never reads or writes the pages themselves.

mod above;
mod address;
mod allocation;
mod cached;
mod committed;
mod config;
mod scan;
mod limit;
mod look;
mod driver;
mod end;
mod error;
mod fork;
mod gaps;
mod grow;
mod ladder;
mod map;
mod stats;
mod begin;
pub(crate) mod figures;

pub(crate) use above::{Above, Beside};
pub use allocation::Allocation;
pub(crate) use begin::Room;
pub use cached::Cache;
pub use config::Config;
pub(crate) use config::Processors;
pub use driver::Clock;
use driver::Driver;
pub use error::{FreeError, NewHeapError};
pub use figures::Figure;
pub(crate) use ladder::lower;
pub(crate) use map::Joined;
pub use map::{MapEntry, PageUse};
pub use stats::{Calls, Stats};

use core::panic::{RefUnwindSafe, UnwindSafe};
use core::ptr::NonNull;

use crate::cache::Slot;
use crate::check::Fault;
use crate::free_set::{FreeSet, Request};
use crate::geometry::{Geometry, Shape, WORD_PAGES};
use crate::metadata::{Metadata, offset};
use crate::source::{Contents, Reservation, Source};
use crate::sync::{AtomicU32, AtomicUsize, Lock, Ordering, Table, Turnstile};
use crate::units::{PageCount, PageIndex, PageRun};
use stats::Counters;

/// A heap of pages over the memory of `S`, in the shape `G`.
///
/// It is `Send + Sync`: every operation takes `&self` and may be called from any thread. Dropping the heap returns
/// everything to its source, including runs that are still allocated.
///
/// ```
/// use pageheap::source::System;
/// use pageheap::{Config, PageCount, PageHeap};
///
/// let heap = PageHeap::new(System, Config::new(1 << 30)).unwrap();
/// let run = heap.allocate(PageCount(3)).unwrap();
/// let bytes = heap.pointer(run);
/// assert_eq!(bytes.len(), 3 * 8192);
/// // SAFETY: the run is ours, and nothing uses it any more.
/// unsafe { heap.free(run) };
/// ```
///
/// # `fork`
///
/// A `PageHeap` is not notified of forks. In the child of a multi-threaded process, use it only if no other thread was
/// using it at the moment of the fork: otherwise a thread that does not exist in the child may hold one of its locks.
/// (The process's own heap, [`ProcessHeap`](crate::arena::ProcessHeap), is notified.)
///
/// # Interrupts and signals
///
/// A handler may have interrupted a thread that holds one of the heap's locks, and would wait for it for ever. So there
/// * [`free`](Self::free), [`free_on`](Self::free_on) and [`shrink`](Self::shrink) may be called;
/// * [`allocate`](Self::allocate), [`allocate_on`](Self::allocate_on), [`allocate_at`](Self::allocate_at) and their kin
///   once the heap has grown to its limit and the call that did so has returned, if it has no soft limit;
/// * nothing else: a [`Cache`] may be seized just now, and [`cache`](Self::cache), [`tick`](Self::tick) and
///   [`scavenge`](Self::scavenge) take locks.
///
/// To let a heap grow at boot: `allocate_at` of its last page, and free that (`None` if it lies in a gap). Before a
/// refusal there is a wait for threads that have pages in hand: where these cannot run meanwhile, as in a handler, of
/// up to a second.
pub struct PageHeap<S: Source, G: Shape = Geometry> {
    set: FreeSet<G>,
    slots: Table<Slot>,
    /// Slots `0..shards` belong to shards; the others are lent to handles.
    shards: usize,
    base: NonNull<u8>,
    /// Pages in the reservation. I7: grown ≤ capacity, limit ≤ capacity.
    capacity: usize,
    /// See [`Request::phase`]; for alignments as large as the address space.
    phase: usize,
    limit: AtomicUsize,
    lock: Lock,
    /// Pages the source has prepared. Accessed only under the lock. I8: grown ≤ prepared.
    prepared: AtomicUsize,
    /// 1 if the source refused the last growth.
    stuck: AtomicU32,
    /// 1 while pages are being added.
    adding: AtomicU32,
    /// Protects the lending of slots.
    lending: Lock,
    /// First free slot, plus one; then the number of slots lent so far. Both are accessed only under `lending`.
    vacant: AtomicU32,
    lent: AtomicU32,
    /// Incremented to ask every handle to flush when it next leaves its fast path.
    flush_calls: AtomicU32,
    /// Threads that are releasing a run, which belongs to nobody meanwhile.
    scavengers: Turnstile,
    /// Threads that carry pages from caches and stores to the set, or put back the room behind a run.
    movers: Turnstile<1>,
    driver: Driver,
    /// 1 once pages were marked that the source did not know to be zero; see [`to_mark`](Self::to_mark).
    doubtful: AtomicU32,
    /// Memory that is given back gradually may stay resident until the system wants it.
    lazily: bool,
    /// An allocation that finds no room waits for threads that are releasing pages.
    patient: bool,
    /// How many pages to begin with, if that is enough; at most a chunk.
    first: usize,
    counters: Counters,
    pages: Reservation,
    metadata: Metadata,
    source: S,
}

// SAFETY: to the heap, addresses are numbers; it dereferences them only through tables of atomics. The source must be
// shareable wherever the heap is shared.
unsafe impl<S: Source + Send, G: Shape> Send for PageHeap<S, G> {}
// SAFETY: as above. Of the driver's two cells, one is used only by the thread that holds the turn; the other is set
// before the heap is shared, and cleared when nobody else uses the heap any more.
unsafe impl<S: Source + Sync, G: Shape> Sync for PageHeap<S, G> {}

// A panic that is caught leaves the heap consistent: nothing in it unwinds half way. Sources must not unwind
// (`Source`). A clock may, but it is called between complete steps, while only the turn is held, and unwinding gives
// that back.
impl<S: Source + UnwindSafe, G: Shape> UnwindSafe for PageHeap<S, G> {}
impl<S: Source + RefUnwindSafe, G: Shape> RefUnwindSafe for PageHeap<S, G> {}

impl<S: Source, G: Shape> PageHeap<S, G> {
    // ---- allocating
    // ---------------------------------------------------------------------------------------------------------

    /// Allocates the lowest run of `pages` free pages, and grows the heap if necessary. Returns `None` if there is no
    /// room, or for zero pages. Their contents are arbitrary. They are there until they are [freed](Self::free) or the
    /// heap is dropped; a [`PageRun`] is a number, and dropping it frees nothing.
    ///
    /// Cost: ~15 ns if pages are free next to the last such run; otherwise a search of the tree (~60 ns); a system
    /// call or two if the heap grows. `None` is proven (`src/free_set`), unless other threads free pages during each of
    /// 1,024 searches: after that many failures the heap gives up. Pages that are in the source's `release` are not
    /// waited for, unless the heap is configured to ([`Config::wait_for_release`]). They are an eighth of the heap for
    /// each thread that scavenges, or a huge page, and are missed only if the heap cannot grow. So are those that
    /// another thread's request for more than 64 takes and, as others are gone, puts back; and those in the caches of
    /// [`Cache`] handles, which are only asked to flush.
    #[inline]
    #[must_use]
    pub fn allocate(&self, pages: PageCount) -> Option<PageRun> {
        match self.serve(&Request::of(pages.0), Self::ready_at_last, Self::allocate_or_grow) {
            Some(allocation) => Some(allocation.run),
            None => self.refuse(pages.0),
        }
    }

    /// As [`allocate`](Self::allocate), but also reports how many of the pages are known to read as zero.
    #[inline]
    #[must_use]
    pub fn allocate_tracked(&self, pages: PageCount) -> Option<Allocation> {
        self.allocate_with(&Request::of(pages.0))
    }

    /// Allocates the lowest run of `pages` free pages whose address is a multiple of `align` bytes, a power of two.
    ///
    /// Returns `None` if there is no room, for zero pages, or if `align` is not a power of two. Alignments up to a page
    /// cost nothing. If the heap grows to reach an aligned address, it keeps the skipped pages as free pages, with
    /// tables for them: ~36 bytes for each MiB, 36 MiB for an alignment of 1 TiB.
    #[must_use]
    pub fn allocate_aligned(&self, pages: PageCount, align: usize) -> Option<Allocation> {
        if !align.is_power_of_two() {
            return None;
        }
        self.allocate_with(&self.request(pages, align))
    }

    fn request(&self, pages: PageCount, align: usize) -> Request {
        let align = (align >> G::PAGE_SHIFT).max(1);
        Request {
            pages: pages.0,
            align,
            phase: self.phase & (align - 1),
        }
    }

    /// Whether the heap could provide this many pages, aligned to `align` bytes, if everything else were free.
    pub(crate) fn fits(&self, pages: PageCount, align: usize) -> bool {
        let start = self.request(pages, align).align_page(0);
        let end = start.and_then(|start| start.checked_add(pages.0));
        end.is_some_and(|end| end <= self.limit().0)
    }

    /// Allocates exactly the pages of `run` if they are free or the heap has not grown to them yet; in that case it
    /// grows.
    ///
    /// Returns `None` if one of them is allocated, in a cache, being released, past the limit, or could not be grown.
    /// This does not count as a refusal. Cost: ~15 ns; more for runs longer than a word, or if the heap grows.
    #[must_use]
    pub fn allocate_at(&self, run: PageRun) -> Option<Allocation> {
        let (start, pages, end) = (run.start().0, run.pages().0, run.end().0);
        while self.set.grown() < end {
            self.grow_to(run.start(), end)?;
        }
        self.hold_grown(start, pages).then(|| self.ready(start, pages))?
    }

    /// Extends `run`, which belongs to the caller, in place. Returns the longer run and the part that was added, or
    /// `None` if the pages behind the run are not available (as in [`allocate_at`](Self::allocate_at), which it is as
    /// fast as) or `to` is not more than its length.
    #[must_use]
    pub fn grow_in_place(&self, run: PageRun, to: PageCount) -> Option<(PageRun, Allocation)> {
        let longer = PageRun::new(run.start(), to)?;
        let more = PageRun::new(run.end(), PageCount(to.0.checked_sub(run.pages().0)?))?;
        let added = self.allocate_at(more)?;
        Some((longer, added))
    }

    #[inline]
    fn allocate_with(&self, request: &Request) -> Option<Allocation> {
        match self.serve(request, Self::ready_at_last, Self::allocate_or_grow) {
            None => self.refuse(request.pages),
            some => some,
        }
    }

    /// Counts a refusal, unless the request could never have been served.
    #[cold]
    #[inline(never)]
    pub(crate) fn refuse<T>(&self, pages: usize) -> Option<T> {
        self.counters
            .refusals
            .add(u64::from(pages > 0 && pages <= self.capacity));
        None
    }

    /// As [`allocate_aligned`](Self::allocate_aligned), for a layer above.
    pub(crate) fn try_aligned(&self, pages: PageCount, align: usize) -> Option<Allocation> {
        self.try_with(&self.request(pages, align))
    }

    /// A run followed by at least `room` more free pages, if the hint leads to one. The heap neither grows nor waits
    /// for this. The pages behind the run stay as they are, scavenged or not.
    pub(crate) fn try_apart(&self, pages: PageCount, room: PageCount) -> Option<Allocation> {
        let all = pages.0.checked_add(room.0)?;
        if pages.0 == 0 || all > self.capacity {
            return None;
        }
        // Held until the room is back: a thread that is about to report that there is no room waits for it.
        let pass = (room.0 > 0).then(|| self.pass());
        let start = self.set.hold_from_hint(&Request::of(all))?;
        if room.0 > 0 {
            self.release_or_abort(start + pages.0, room.0);
        }
        drop(pass);
        self.ready(start, pages.0)
    }

    /// Turns pages just held into an allocation; commits them if the source requires it. If that fails, puts them back
    /// as they were.
    #[inline(always)]
    fn ready(&self, start: usize, pages: usize) -> Option<Allocation> {
        if S::COMMITS && self.set.scavenged_in(start, pages) > 0 && !self.commit(start, pages) {
            self.release_or_abort(start, pages);
            return None;
        }
        let marks = self.set.take_scavenged(start, pages);
        let run = PageRun::known(start, pages);
        Some(Allocation::of(run, self.known_zero(marks.count), marks.last))
    }

    /// Whether to mark pages that are only Prepared, and read as `contents`, as scavenged. Pages that have `gone` are
    /// marked, or the soft limit would count them forever. If the source commits, all are marked: the mark is what
    /// makes `ready` call `commit`. Once a page is marked that is not known to be zero, marks no longer imply zero in
    /// this heap.
    pub(super) fn to_mark(&self, contents: Contents, gone: bool) -> bool {
        let zero = contents == Contents::Zero;
        let mark = S::COMMITS || gone || zero;
        if mark && !zero {
            // Relaxed: stored before the pages are given to the set, loaded (in `known_zero`) after they were taken out
            // of it.
            self.doubtful.store(1, Ordering::Relaxed);
        }
        mark
    }

    /// How many of `scavenged` pages just taken are known to read as zero: all of them, or none once that was in doubt.
    #[inline(always)]
    pub(super) fn known_zero(&self, scavenged: usize) -> PageCount {
        if scavenged == 0 {
            return PageCount::ZERO;
        }
        self.count_taken(scavenged);
        // Relaxed: see `to_mark`.
        let doubtful = self.doubtful.load(Ordering::Relaxed) != 0;
        PageCount(if doubtful { 0 } else { scavenged })
    }

    /// Has the source commit pages that the caller holds, some of which are scavenged. Returns whether it did.
    #[cold]
    fn commit(&self, start: usize, pages: usize) -> bool {
        self.counters.commit.add(1);
        let address = offset(self.base, start << G::PAGE_SHIFT);
        // SAFETY: the pages belong to the caller alone, are inside the reservation, prepared, and on granule
        // boundaries: a source that commits has a granule of at most one page (checked in `new`).
        unsafe { self.source.commit(address, pages << G::PAGE_SHIFT) }.is_ok()
    }

    // ---- freeing
    // ------------------------------------------------------------------------------------------------------------

    /// Frees a run, or a part of one.
    ///
    /// Aborts the process, with a message that names the address, if a page of the run is already free or lies outside
    /// the heap. Cost: ~20 ns, more if the tree has to be updated.
    ///
    /// A double free is not detected at once while the page lies in a cache: that is, if it was freed by
    /// [`Cache::free`] or [`free_on`](Self::free_on) and then here, or the other way round. It is detected, and aborts,
    /// when the cache gives its pages back. If by then the heap or the cache has handed the page out, it may be handed
    /// out twice.
    ///
    /// # Safety
    ///
    /// The pages were allocated from this heap, and nothing uses them any more.
    #[inline]
    pub unsafe fn free(&self, run: PageRun) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_free(run) } {
            error.abort();
        }
    }

    /// As [`free`](Self::free), but reports misuse as an error and leaves the heap unchanged: it examines all pages
    /// before it puts one back.
    ///
    /// # Errors
    /// [`FreeError`] if a page is already free, or does not belong to this heap.
    ///
    /// # Safety
    ///
    /// Every page of the run that belongs to this heap is either free, or was allocated from it, belongs to the caller
    /// and is no longer used by anything. A page in a cache is neither ([`Stats::cached`] counts those); nor is a page
    /// that another thread is just allocating, freeing, flushing from a cache, or releasing to the source. Freeing such
    /// a page hands it out twice. If two threads free the same page at the same moment, part of a run may be back in
    /// spite of the error.
    #[inline]
    pub unsafe fn try_free(&self, run: PageRun) -> Result<(), FreeError> {
        if self.is_outside(run) {
            return Err(self.outside(run));
        }
        self.set
            .release(run.start().0, run.pages().0)
            .map_err(|page| self.free_already(page))
    }

    /// Frees many runs, with one update of the tree for each chunk. Sorts the slice.
    ///
    /// Aborts like [`free`](Self::free), and also if two of the runs overlap.
    ///
    /// # Safety
    ///
    /// As for [`free`](Self::free), for every run.
    pub unsafe fn free_batch(&self, runs: &mut [PageRun]) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_free_batch(runs) } {
            error.abort();
        }
    }

    /// As [`free_batch`](Self::free_batch), but reports misuse as an error and leaves the heap unchanged: it examines
    /// all runs before it puts one back.
    ///
    /// # Errors
    /// [`FreeError`] if a page is already free, is named twice, or does not belong to this heap.
    ///
    /// # Safety
    ///
    /// As for [`try_free`](Self::try_free), for every run.
    pub unsafe fn try_free_batch(&self, runs: &mut [PageRun]) -> Result<(), FreeError> {
        runs.sort_unstable();
        let mut end = 0;
        for &run in runs.iter() {
            if self.is_outside(run) {
                return Err(self.outside(run));
            }
            if run.start().0 < end {
                return Err(self.free_already(run.start().0));
            }
            end = run.end().0;
        }
        let pairs = runs.iter().map(|run| (run.start().0, run.pages().0));
        self.set.release_sorted(pairs).map_err(|page| self.free_already(page))
    }

    /// Shortens a run: frees all but its first `to` pages. Returns `run` itself if `to` is zero or not less than its
    /// length. Aborts like [`free`](Self::free), for example if one of the pages given up is already free.
    ///
    /// # Safety
    ///
    /// The caller owns the run, and nothing uses the pages given up.
    #[must_use]
    pub unsafe fn shrink(&self, run: PageRun, to: PageCount) -> PageRun {
        let Some((head, tail)) = run.split_at(to) else {
            return run;
        };
        // SAFETY: part of a run that belongs to the caller, which gives it up.
        unsafe { self.free(tail) };
        head
    }

    pub(crate) fn release_or_abort(&self, start: usize, pages: usize) {
        if let Err(page) = self.set.release(start, pages) {
            self.free_already(page).abort();
        }
    }

    #[cold]
    pub(crate) fn free_already(&self, page: usize) -> FreeError {
        FreeError::free_already(self.address(PageIndex(page)), self.base)
    }

    // ---- the heap itself
    // -------------------------------------------------------------------------------------------------------------

    /// The maximum number of pages the heap may grow to.
    #[must_use]
    pub fn limit(&self) -> PageCount {
        // Relaxed: an independent number.
        PageCount(self.limit.load(Ordering::Relaxed))
    }

    /// Changes the maximum number of pages the heap may grow to. Pages it has already grown to remain and can be
    /// allocated: a lower limit does not shrink the heap. A limit above [`capacity`](Self::capacity) counts as that
    /// capacity.
    pub fn set_limit(&self, limit: PageCount) {
        // Relaxed: an independent number.
        self.limit.store(limit.0.min(self.capacity), Ordering::Relaxed);
    }

    /// Pages grown so far.
    pub(crate) fn grown(&self) -> PageCount {
        PageCount(self.set.grown())
    }

    /// Whether the page is there and free at this moment.
    #[inline]
    pub(crate) fn is_free(&self, page: PageIndex) -> bool {
        page < PageIndex(self.set.grown()) && self.set.free.load(page.0 / WORD_PAGES) >> (page.0 % WORD_PAGES) & 1 == 1
    }

    /// Pages in the reservation; no limit can exceed it.
    #[must_use]
    pub fn capacity(&self) -> PageCount {
        PageCount(self.capacity)
    }

    /// The source this heap takes its memory from.
    #[must_use]
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The set of free pages, for tests.
    #[doc(hidden)]
    #[cfg(feature = "internals")]
    pub fn free_set(&self) -> &FreeSet<G> {
        &self.set
    }

    /// Re-derives every summary and hint from the bits, and compares the caches with them. No other thread should be
    /// using the heap meanwhile: the check might report a fault that is none. O(heap).
    ///
    /// # Errors
    /// The first broken invariant; the fault draws the state.
    pub fn check(&self) -> Result<(), Fault> {
        self.set.check()?;
        self.check_caches()?;
        self.check_gaps()
    }
}
