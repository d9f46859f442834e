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
//! A heap reserves its range once and never moves: a page is an index, its address is one shift and one addition away.
//! It begins with nothing and grows by what it needs or an eighth of what it has, whichever is more, up to its limit.
//!
//! Worked: `allocate(PageCount(3))` on a heap that holds a page of word 17 and nothing else. The hint for 3 pages says
//! page 0; chunk 0 has no 3 free pages; nor has anything above it (four blocks of summaries, one root entry); the proof
//! says the same. Under the lock the heap asks its source for 512 pages more, prepares the tables for them, gives them
//! to the set, and searches again.
//!
//! The heap never reads or writes the pages.

mod above;
mod address;
mod cached;
mod config;
mod scan;
mod limit;
mod driver;
mod end;
mod error;
mod fork;
mod grow;
mod ladder;
mod map;
mod stats;
pub(crate) mod figures;

pub(crate) use above::Above;
pub use cached::Cache;
pub use config::Config;
pub(crate) use driver::Beside;
pub use driver::Clock;
use driver::Driver;
pub use error::{FreeError, NewHeapError};
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
use crate::source::{Contents, MIN_GRANULE, Purpose, Reservation, Source};
use crate::sync::{AtomicU32, AtomicUsize, Lock, Ordering, Table, Turnstile};
use crate::units::{PageCount, PageIndex, PageRun};
use stats::Counters;

/// A heap of pages over the memory of `S`, in the shape `G`.
///
/// `Send + Sync`: all operations take `&self`, from any thread. Dropping the heap returns everything to its source;
/// runs still allocated are gone with it.
///
/// ```
/// use pageheap::source::System;
/// use pageheap::{Config, PageCount, PageHeap};
///
/// let heap: PageHeap<System> = PageHeap::new(System, Config::new(1 << 30)).unwrap();
/// let run = heap.allocate(PageCount(3)).unwrap();
/// let bytes = heap.pointer(run);
/// assert_eq!(bytes.len(), 3 * 8192);
/// // SAFETY: the run is ours, and nothing uses it any more.
/// unsafe { heap.free(run) };
/// ```
pub struct PageHeap<S: Source, G: Shape = Geometry> {
    set: FreeSet<G>,
    slots: Table<Slot>,
    /// Slots `0..shards` are shards', the others are lent to handles.
    shards: usize,
    base: NonNull<u8>,
    /// Pages in the reservation. I7: grown ≤ capacity, limit ≤ capacity.
    capacity: usize,
    /// See [`Request::phase`], for an alignment as large as the address space.
    phase: usize,
    limit: AtomicUsize,
    lock: Lock,
    /// Pages the source has prepared. Only under the lock. I8: grown ≤ prepared.
    prepared: AtomicUsize,
    /// 1 where the source refused the last growth.
    stuck: AtomicU32,
    /// For the lending of slots.
    lending: Lock,
    /// First free slot, plus one; slots lent so far. Only under `lending`.
    vacant: AtomicU32,
    lent: AtomicU32,
    /// Raised to ask every handle to flush when it next leaves its fast path.
    flush_calls: AtomicU32,
    /// Who is releasing a run, which is nobody's meanwhile.
    scavengers: Turnstile,
    /// Who carries pages from caches and stores to the set.
    movers: Turnstile<1>,
    driver: Driver,
    /// 1 once pages were marked that the source did not know to be zero; see [`to_mark`](Self::to_mark).
    doubtful: AtomicU32,
    /// Memory that goes back by and by may stay until it is wanted.
    lazily: bool,
    /// An allocation that finds no room waits for who is releasing pages.
    patient: bool,
    counters: Counters,
    pages: Reservation,
    metadata: Metadata,
    source: S,
}

// SAFETY: the addresses are numbers to the heap, which never goes through them but by way of tables of atomics; the
// source is required to be shareable where the heap is shared.
unsafe impl<S: Source + Send, G: Shape> Send for PageHeap<S, G> {}
// SAFETY: as above.
unsafe impl<S: Source + Sync, G: Shape> Sync for PageHeap<S, G> {}

// Who has caught a panic finds a heap that is right: nothing in it unwinds half way. Sources may not (`Source`); a
// clock may, and is asked between steps that are whole, with nothing held but the turn, which is given back.
impl<S: Source + UnwindSafe, G: Shape> UnwindSafe for PageHeap<S, G> {}
impl<S: Source + RefUnwindSafe, G: Shape> RefUnwindSafe for PageHeap<S, G> {}

/// Pages taken, and what is known of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allocation {
    /// The pages.
    pub run: PageRun,
    /// How many of them were backed by no memory and read as zero.
    pub scavenged: PageCount,
}

impl Allocation {
    /// Whether every byte of the run reads as zero.
    #[must_use]
    pub fn is_zeroed(&self) -> bool {
        self.scavenged == self.run.pages()
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// A heap over `source`.
    ///
    /// Reserves the bytes [`Config::new`] names, or less, down to a megabyte or as much as the source has if that is
    /// less, and the room for the tables; commits a few granules. O(1).
    ///
    /// # Errors
    /// If not even the smallest heap could be reserved. Nothing stays reserved.
    pub fn new(source: S, config: Config) -> Result<Self, NewHeapError> {
        Self::try_new(source, config).map_err(|(_, error)| error)
    }

    /// As [`new`](Self::new), but a source in vain comes back.
    pub(crate) fn try_new(source: S, config: Config) -> Result<Self, (S, NewHeapError)> {
        let granule = source.granule();
        if granule < MIN_GRANULE || !granule.is_power_of_two() || (S::COMMITS && granule > G::PAGE_BYTES) {
            return Err((source, NewHeapError::Granule));
        }
        if config.shards.saturating_add(config.caches) >= u32::MAX as usize {
            return Err((source, NewHeapError::NoMetadata));
        }
        let (pages, metadata, capacity, tries) = match Self::reserve(&source, &config) {
            Ok(reserved) => reserved,
            Err(error) => return Err((source, error)),
        };
        let Ok(calls) = metadata.cover_slots(&source, config.shards) else {
            // SAFETY: reserved just above, and nothing refers to them.
            unsafe {
                source.unreserve(Purpose::Pages, pages);
                source.unreserve(Purpose::Metadata, metadata.reservation());
            }
            return Err((source, NewHeapError::NoMetadata));
        };
        // SAFETY: the reservation is given back by `drop`, after the tables are gone; this is its only call. Everything
        // below goes to a page only below `grown`, to a slot only below `lent` or `shards`, and those are raised after
        // `cover` and `cover_slots`.
        let (set, chunks, slots) = unsafe { metadata.tables::<G>() };
        let address = pages.base.addr().get();
        let heap = Self {
            set,
            slots,
            shards: config.shards,
            base: pages.base,
            capacity,
            phase: address >> G::PAGE_SHIFT,
            limit: AtomicUsize::new(config.limit.map_or(capacity, |limit| limit.0.min(capacity))),
            lock: Lock::new(),
            lending: Lock::new(),
            prepared: AtomicUsize::new(0),
            stuck: AtomicU32::new(0),
            vacant: AtomicU32::new(0),
            lent: AtomicU32::new(0),
            flush_calls: AtomicU32::new(0),
            scavengers: Turnstile::new(),
            movers: Turnstile::new(),
            driver: Driver::new(chunks, config.soft_limit.map_or(usize::MAX, |limit| limit.0)),
            doubtful: AtomicU32::new(0),
            lazily: config.lazily,
            patient: config.patient,
            counters: Counters::new(),
            pages,
            metadata,
            source,
        };
        heap.counters.reserve.add(tries.reserve);
        heap.counters.unreserve.add(tries.unreserve);
        heap.counters.prepare.add(tries.prepare + calls as u64);
        heap.advise(config.huge_pages);
        Ok(heap)
    }

    // ---- allocating
    // ---------------------------------------------------------------------------------------------------------

    /// Takes the lowest run of `pages` free pages, growing the heap if it has to. `None` if there is no room, or for
    /// zero pages.
    ///
    /// Cost: ~15 ns where pages are free next to the last such run; a search of the tree (~60 ns) otherwise; a system
    /// call or two where the heap grows. `None` is proved (`src/free_set`), but where others free pages during each of
    /// 1,024 searches: so many found nothing. Pages that are in the source's `release` at the moment are not waited
    /// for, unless the heap was made to ([`Config::wait_for_release`]): they are an eighth of the heap for each who
    /// scavenges, or a huge page, and missed only where the heap cannot grow.
    #[inline]
    #[must_use]
    pub fn allocate(&self, pages: PageCount) -> Option<PageRun> {
        match self.try_with(&Request::of(pages.0)) {
            Some(allocation) => Some(allocation.run),
            None => self.refuse(pages.0),
        }
    }

    /// As [`allocate`](Self::allocate), and says how many of the pages are known to read as zero.
    #[inline]
    #[must_use]
    pub fn allocate_tracked(&self, pages: PageCount) -> Option<Allocation> {
        self.allocate_with(&Request::of(pages.0))
    }

    /// Takes the lowest run of `pages` free pages whose address is a multiple of `align` bytes, a power of two.
    ///
    /// `None` if there is no room, for zero pages, or if `align` is no power of two. Alignments up to a page cost
    /// nothing. A heap that grows to the next such address has the pages before it free, and tables for them: ~34 bytes
    /// for each MiB, 34 MiB for an alignment of 1 TiB.
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

    /// Whether so many pages, aligned to `align` bytes, could be had if all else were free.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn fits(&self, pages: PageCount, align: usize) -> bool {
        let start = self.request(pages, align).align_page(0);
        let end = start.and_then(|start| start.checked_add(pages.0));
        end.is_some_and(|end| end <= self.limit().0)
    }

    /// Takes exactly the pages of `run`, if they are free or not yet grown, to where the heap grows. `None` if one of
    /// them is taken, in a cache, just being released, past the limit, or could not be grown; that is no refusal, and
    /// not counted as one. ~15 ns, more for runs of more than a word or where the heap grows.
    #[must_use]
    pub fn allocate_at(&self, run: PageRun) -> Option<Allocation> {
        let (start, pages, end) = (run.start().0, run.pages().0, run.end().0);
        while self.set.grown() < end {
            self.grow_to(end)?;
        }
        self.set.hold(start, pages).ok()?;
        self.ready(start, pages)
    }

    /// Makes `run`, which is the caller's, longer in place: the longer run, and what was added. `None` if the pages
    /// behind it cannot be had, or `to` is not more than it has.
    #[must_use]
    pub fn grow_in_place(&self, run: PageRun, to: PageCount) -> Option<(PageRun, Allocation)> {
        let longer = PageRun::new(run.start(), to)?;
        let more = PageRun::new(run.end(), PageCount(to.0.checked_sub(run.pages().0)?))?;
        let added = self.allocate_at(more)?;
        Some((longer, added))
    }

    #[inline]
    fn allocate_with(&self, request: &Request) -> Option<Allocation> {
        match self.try_with(request) {
            None => self.refuse(request.pages),
            some => some,
        }
    }

    /// Counts a "no", if it is one to what could have been had.
    #[cold]
    #[inline(never)]
    pub(crate) fn refuse<T>(&self, pages: usize) -> Option<T> {
        self.counters
            .refusals
            .add(u64::from(pages > 0 && pages <= self.capacity));
        None
    }

    /// As [`allocate_aligned`](Self::allocate_aligned), for a layer above that counts its own refusals.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn try_aligned(&self, pages: PageCount, align: usize) -> Option<Allocation> {
        self.try_with(&self.request(pages, align))
    }

    /// As [`allocate_with`](Self::allocate_with), and a "no" is not counted: the caller may yet find a way.
    #[inline]
    pub(crate) fn try_with(&self, request: &Request) -> Option<Allocation> {
        if request.pages == 0 || request.pages > self.capacity {
            return None;
        }
        if let Some(start) = self.set.hold_from_hint(request) {
            return self.ready(start, request.pages);
        }
        self.allocate_or_grow(request)
    }

    /// A run with `room` free pages more behind it, if the hint leads to such: nothing is grown for it, nobody waited
    /// for. What is behind stays as it is, scavenged or not.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn try_apart(&self, pages: PageCount, room: PageCount) -> Option<Allocation> {
        let all = pages.0.checked_add(room.0)?;
        if pages.0 == 0 || all > self.capacity {
            return None;
        }
        let start = self.set.hold_from_hint(&Request::of(all))?;
        if room.0 > 0 {
            self.release_or_abort(start + pages.0, room.0);
        }
        self.ready(start, pages.0)
    }

    /// Pages just held, as an allocation: commits them where the source wants it. On refusal they go back as they were.
    #[inline(always)]
    fn ready(&self, start: usize, pages: usize) -> Option<Allocation> {
        if S::COMMITS && self.set.scavenged_in(start, pages) > 0 && !self.commit(start, pages) {
            self.release_or_abort(start, pages);
            return None;
        }
        let scavenged = self.known_zero(self.set.take_scavenged(start, pages));
        Some(Allocation {
            run: PageRun::known(start, pages),
            scavenged,
        })
    }

    /// Whether pages that are Prepared and no more, and read as `contents`, are to be marked as scavenged: those that
    /// have `gone` are, or the soft limit would count them for ever. Where the source commits all are: it is the mark
    /// that brings them to `commit`. With one that is not known to be zero, no mark says so from then on.
    pub(super) fn to_mark(&self, contents: Contents, gone: bool) -> bool {
        let zero = contents == Contents::Zero;
        let mark = S::COMMITS || gone || zero;
        if mark && !zero {
            // Relaxed: before the pages are given to the set, and read after they were taken out of it.
            self.doubtful.store(1, Ordering::Relaxed);
        }
        mark
    }

    /// Of `scavenged` pages just taken, how many are known to read as zero: all, or none once that was in doubt.
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

    /// Has the source commit pages the caller holds, some of which are scavenged. Whether it did.
    #[cold]
    fn commit(&self, start: usize, pages: usize) -> bool {
        self.counters.commit.add(1);
        let address = offset(self.base, start << G::PAGE_SHIFT);
        // SAFETY: the pages are the caller's alone, inside the reservation, prepared, and on granule borders: a source
        // that commits has a granule of at most a page (checked in `new`).
        unsafe { self.source.commit(address, pages << G::PAGE_SHIFT) }.is_ok()
    }

    // ---- freeing
    // ------------------------------------------------------------------------------------------------------------

    /// Puts a run back, or a part of one.
    ///
    /// Aborts the process, with a message that names the address, if a page of it is free already or lies outside the
    /// heap. ~20 ns, more where the tree has to learn of it.
    ///
    /// A page that lies in a cache is not seen: one that was freed by [`Cache::free`] or [`free_on`](Self::free_on) and
    /// then here, or the other way round. That is found when the cache gives its pages back, which aborts; but if the
    /// page has been handed out by then, by the heap or by the cache, it may be handed out twice.
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

    /// As [`free`](Self::free), but what is found is an error, and the heap as it was: all pages are looked at before
    /// one is put back.
    ///
    /// # Errors
    /// [`FreeError`] if a page is free already, or not this heap's.
    ///
    /// # Safety
    ///
    /// Every page of the run that is this heap's is free, or was allocated from it, belongs to the caller and is used
    /// by nothing any more. A page in a cache is neither ([`Stats::cached`] counts them), nor is one that another
    /// thread has in hand at the moment to allocate it, to free it, to bring it home from a cache, or to give its
    /// memory back: to free such a page hands it out twice, and where two threads free one at the same moment part of a
    /// run may be back in spite of the error.
    #[inline]
    pub unsafe fn try_free(&self, run: PageRun) -> Result<(), FreeError> {
        if run.end().0 > self.set.grown() {
            return Err(self.outside(run));
        }
        self.set
            .release(run.start().0, run.pages().0)
            .map_err(|page| self.free_already(page))
    }

    /// Puts many runs back, with one update of the tree for each chunk. Sorts the slice.
    ///
    /// Aborts like [`free`](Self::free), also where two of the runs overlap.
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

    /// As [`free_batch`](Self::free_batch), but what is found is an error, and the heap as it was: all runs are looked
    /// at before one is put back.
    ///
    /// # Errors
    /// [`FreeError`] if a page is free already, is named twice, or is not this heap's.
    ///
    /// # Safety
    ///
    /// As for [`try_free`](Self::try_free), for every run.
    pub unsafe fn try_free_batch(&self, runs: &mut [PageRun]) -> Result<(), FreeError> {
        runs.sort_unstable();
        let grown = self.set.grown();
        let mut end = 0;
        for &run in runs.iter() {
            if run.end().0 > grown {
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

    /// Makes a run shorter: frees all but its first `to` pages. `run` itself if `to` is not less than its length, or
    /// zero. Aborts like [`free`](Self::free), where a page given up is free already, say.
    ///
    /// # Safety
    ///
    /// The caller owns the run, and nothing uses the pages given up.
    #[must_use]
    pub unsafe fn shrink(&self, run: PageRun, to: PageCount) -> PageRun {
        let Some((head, tail)) = run.split_at(to) else {
            return run;
        };
        // SAFETY: part of a run that is the caller's, who gives it up.
        unsafe { self.free(tail) };
        head
    }

    pub(crate) fn release_or_abort(&self, start: usize, pages: usize) {
        if let Err(page) = self.set.release(start, pages) {
            self.free_already(page).abort();
        }
    }

    #[cold]
    fn outside(&self, run: PageRun) -> FreeError {
        let grown = self.set.grown();
        // The first that is not: others grow meanwhile.
        let page = grown.clamp(run.start().0, run.end().0 - 1);
        FreeError::outside(page, G::PAGE_BYTES, self.base, grown << G::PAGE_SHIFT)
    }

    #[cold]
    pub(crate) fn free_already(&self, page: usize) -> FreeError {
        FreeError::free_already(self.address(PageIndex(page)), self.base)
    }

    // ---- itself
    // -------------------------------------------------------------------------------------------------------------

    /// The most pages the heap may grow to.
    #[must_use]
    pub fn limit(&self) -> PageCount {
        // Relaxed: a number by itself.
        PageCount(self.limit.load(Ordering::Relaxed))
    }

    /// Changes the most pages the heap may grow to. What has grown stays, and can be had: a limit below that makes the
    /// heap no smaller. More than [`capacity`](Self::capacity) is as much as that.
    pub fn set_limit(&self, limit: PageCount) {
        // Relaxed: a number by itself.
        self.limit.store(limit.0.min(self.capacity), Ordering::Relaxed);
    }

    /// Pages grown so far.
    pub(crate) fn grown(&self) -> PageCount {
        PageCount(self.set.grown())
    }

    /// Whether the page is free, at this moment.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    #[inline]
    pub(crate) fn is_free(&self, page: PageIndex) -> bool {
        self.set.free.load(page.0 / WORD_PAGES) >> (page.0 % WORD_PAGES) & 1 == 1
    }

    /// Whether every page from `page` to the end of the grown part is free, at this moment.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn is_free_from(&self, page: PageIndex) -> bool {
        let behind = self.set.grown().saturating_sub(page.0);
        self.set.free_at_end(behind) == behind
    }

    /// Pages in the reservation: no limit can go beyond.
    #[must_use]
    pub fn capacity(&self) -> PageCount {
        PageCount(self.capacity)
    }

    /// The source the heap stands on.
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

    /// Re-derives every summary and hint from the bits, and compares caches with them. For a heap nobody uses
    /// meanwhile; O(heap).
    ///
    /// # Errors
    /// The first broken invariant, which draws the state.
    pub fn check(&self) -> Result<(), Fault> {
        self.set.check()?;
        self.check_caches()
    }
}
