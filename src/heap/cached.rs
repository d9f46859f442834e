//! The heap's caches, lent: [`Cache`] handles for whoever has a place to keep one, shards by number for whoever has
//! not.
//!
//! ```text
//!   slots   ┌ shard 0 ┬ shard 1 ┬ … ┬ handle ┬ handle ┬ vacant ┬ …           64 bytes each, in the heap's metadata
//!           └─ busy flag, a call ───┴─ owned until dropped ─────┘
//! ```
//!
//! A handle is `Send` but not `Sync`: it may move to another thread, not be used by two. A shard may be named by
//! anybody; if somebody is at work on it the call goes to the heap instead of waiting.
//!
//! **What others see.** Pages in a cache, and pages freed into its buffer (at most 64 each), are neither allocated nor
//! free: [`Stats`](crate::Stats) counts them as cached, and nobody else can have them until a flush. A handle flushes
//! when it is dropped, when it is told to, before it grows the heap or reports that there is no room, and after anybody
//! has run out: the next time that it cannot serve an allocation. And what a cache holds that nobody is at work on may
//! be seized, see `src/cache.rs`: a thread that sleeps keeps nothing.

use core::cell::Cell;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;

use crate::cache::{Entered, MAX_CACHED_PAGES, Slot};
use crate::check::Fault;
use crate::free_set::{Claim, Request, Word};
use crate::geometry::{Geometry, SEARCHES_TO_GROW, Shape, WORD_PAGES};
use crate::source::Source;
use crate::sync::{Ordering, fence_heavy, relax};
use crate::units::{PageCount, PageIndex, PageRun};

use super::{Allocation, FreeError, PageHeap};

/// A cache of pages that the holder owns: allocation and freeing without an atomic read-modify-write, but for one in 64
/// pages.
///
/// ```
/// use pageheap::source::System;
/// use pageheap::{Config, PageCount, PageHeap};
///
/// let heap: PageHeap<System> = PageHeap::new(System, Config::new(1 << 30)).unwrap();
/// let cache = heap.cache().unwrap();
/// let run = cache.allocate(PageCount(1)).unwrap();
/// // SAFETY: the run is ours, and nothing uses it.
/// unsafe { cache.free(run) };
/// ```
#[derive(Debug)]
pub struct Cache<'h, S: Source, G: Shape = Geometry> {
    heap: &'h PageHeap<S, G>,
    slot: &'h Slot,
    index: usize,
    not_sync: PhantomData<Cell<()>>,
}

impl<S: Source, G: Shape> Cache<'_, S, G> {
    /// As [`PageHeap::allocate`], from the cache if it can serve: up to 16 pages, the lowest run of its word.
    #[inline(always)]
    #[must_use]
    pub fn allocate(&self, pages: PageCount) -> Option<PageRun> {
        self.allocate_tracked(pages).map(|allocation| allocation.run)
    }

    /// As [`allocate`](Self::allocate), and says how many of the pages are known to read as zero.
    #[inline(always)]
    #[must_use]
    pub fn allocate_tracked(&self, pages: PageCount) -> Option<Allocation> {
        self.allocate_or(pages, PageHeap::allocate_beyond_or_refuse)
    }

    /// As [`allocate_tracked`](Self::allocate_tracked), for a layer above that counts its own refusals.
    #[inline(always)]
    pub(crate) fn try_tracked(&self, pages: PageCount) -> Option<Allocation> {
        self.allocate_or(pages, PageHeap::allocate_beyond)
    }

    /// From the word, or `beyond` it.
    #[inline(always)]
    fn allocate_or(
        &self,
        pages: PageCount,
        beyond: impl FnOnce(&PageHeap<S, G>, &Slot, PageCount) -> Option<Allocation>,
    ) -> Option<Allocation> {
        if pages.0.wrapping_sub(1) < MAX_CACHED_PAGES
            && let Some(slot) = self.heap.own(self.slot)
            && let Some(allocation) = self.heap.allocate_from(&slot, pages.0)
        {
            return Some(allocation);
        }
        beyond(self.heap, self.slot, pages)
    }

    /// As [`PageHeap::free`]: into the cache if the run lies in its word, into the buffer if in another.
    ///
    /// # Safety
    ///
    /// As for [`PageHeap::free`].
    #[inline(always)]
    pub unsafe fn free(&self, run: PageRun) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_free(run) } {
            error.abort();
        }
    }

    /// As [`free`](Self::free), but misuse that is noticed is an error, and the cache as it was.
    ///
    /// # Errors
    /// [`FreeError`] if a page is not the heap's, or is in this cache already. A page that is free elsewhere is noticed
    /// only by the flush, which aborts; if it has been handed out before that it may not be noticed at all.
    ///
    /// # Safety
    ///
    /// As for [`PageHeap::free`]: unlike with [`PageHeap::try_free`], the pages must be allocated.
    #[inline(always)]
    pub unsafe fn try_free(&self, run: PageRun) -> Result<(), FreeError> {
        match self.heap.own(self.slot) {
            // SAFETY: the caller's promise.
            Some(slot) => unsafe { self.heap.free_through(&slot, run) },
            // SAFETY: the caller's promise.
            None => unsafe { self.heap.try_free(run) },
        }
    }

    /// Gives everything in the cache back to the heap.
    pub fn flush(&self) {
        self.heap.flush_slot(&self.heap.own_at_last(self.slot));
    }

    /// Whether the page is in the cache, or in its buffer.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn holds(&self, page: PageIndex) -> bool {
        let (word, bit) = (page.0 / WORD_PAGES, page.0 % WORD_PAGES);
        self.slot
            .words()
            .iter()
            .any(|&(index, pages)| index == word && pages >> bit & 1 == 1)
    }

    /// The heap.
    #[must_use]
    pub fn heap(&self) -> &PageHeap<S, G> {
        self.heap
    }
}

impl<S: Source, G: Shape> Drop for Cache<'_, S, G> {
    fn drop(&mut self) {
        self.flush();
        self.heap.take_back(self.index);
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// A cache of the caller's own. `None` if [`Config::caches`](super::Config::caches) are lent, or there is no memory
    /// for one more.
    ///
    /// Under a lock of its own: ~40 ns. A handle that is forgotten (`mem::forget`) keeps its slot, and up to 128 pages,
    /// for ever.
    #[must_use]
    pub fn cache(&self) -> Option<Cache<'_, S, G>> {
        let index = self.lend()?;
        Some(Cache {
            heap: self,
            slot: self.slots.get(index),
            index,
            not_sync: PhantomData,
        })
    }

    /// The cache in slot `index`, for one who was lent the slot and alone uses it. It is not given back when dropped.
    #[inline(always)]
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn cache_at(&self, index: usize) -> ManuallyDrop<Cache<'_, S, G>> {
        ManuallyDrop::new(Cache {
            heap: self,
            slot: self.slots.get(index),
            index,
            not_sync: PhantomData,
        })
    }

    /// How often all caches have been asked to flush.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn flush_calls(&self) -> u32 {
        // Relaxed: a request, not a handover.
        self.flush_calls.load(Ordering::Relaxed)
    }

    /// Lends a slot.
    pub(crate) fn lend(&self) -> Option<usize> {
        let _guard = self.lending.lock();
        // Relaxed: all under the lock.
        let vacant = self.vacant.load(Ordering::Relaxed);
        if vacant != 0 {
            let index = vacant as usize - 1;
            let slot = self.slots.get(index);
            self.vacant.store(slot.link.load(Ordering::Relaxed), Ordering::Relaxed);
            slot.link
                .store(self.flush_calls.load(Ordering::Relaxed), Ordering::Relaxed);
            return Some(index);
        }
        let index = self.shards + self.lent.load(Ordering::Relaxed) as usize;
        if index >= self.slots.len() {
            return None;
        }
        let calls = self.metadata.cover_slots(&self.source, index + 1);
        let (Ok(asked) | Err(asked)) = calls;
        self.counters.prepare.add(asked as u64);
        calls.ok()?;
        // Release: `for_each_slot` reads how many slots are covered.
        self.lent.fetch_add(1, Ordering::Release);
        self.slots
            .get(index)
            .link
            .store(self.flush_calls.load(Ordering::Relaxed), Ordering::Relaxed);
        Some(index)
    }

    /// Takes a slot back, which has been flushed.
    pub(crate) fn take_back(&self, index: usize) {
        let _guard = self.lending.lock();
        self.put_back(index);
    }

    /// Links a slot in with the vacant ones. Under the lock.
    pub(super) fn put_back(&self, index: usize) {
        // Relaxed: all under the lock.
        let slot = self.slots.get(index);
        slot.link.store(self.vacant.load(Ordering::Relaxed), Ordering::Relaxed);
        self.vacant.store(index as u32 + 1, Ordering::Relaxed);
    }

    /// As [`allocate`](Self::allocate), through the cache of shard `shard` (modulo how many there are).
    #[must_use]
    pub fn allocate_on(&self, shard: usize, pages: PageCount) -> Option<PageRun> {
        let Some(slot) = self.shard(shard) else {
            return self.allocate(pages);
        };
        if pages.0.wrapping_sub(1) < MAX_CACHED_PAGES
            && let Some(allocation) = self.allocate_from(&slot, pages.0)
        {
            return Some(allocation.run);
        }
        let Some(allocation) = self.allocate_through(&slot, pages) else {
            return self.refuse(pages.0);
        };
        Some(allocation.run)
    }

    /// As [`free`](Self::free), through the cache of shard `shard` (modulo how many there are).
    ///
    /// # Safety
    ///
    /// As for [`free`](Self::free).
    pub unsafe fn free_on(&self, shard: usize, run: PageRun) {
        let freed = match self.shard(shard) {
            // SAFETY: the caller's promise.
            Some(slot) => unsafe { self.free_through(&slot, run) },
            // SAFETY: the caller's promise.
            None => unsafe { self.try_free(run) },
        };
        if let Err(error) = freed {
            error.abort();
        }
    }

    #[inline]
    fn shard(&self, shard: usize) -> Option<Entered<'_>> {
        if self.shards == 0 {
            None
        } else {
            self.slots.get(shard % self.shards).try_enter()
        }
    }

    /// Gives back what the caches of all shards hold, but for those somebody is at work on.
    pub fn flush_shards(&self) {
        for index in 0..self.shards {
            if let Some(slot) = self.slots.get(index).try_enter() {
                self.flush_slot(&slot);
            }
        }
    }

    /// Pages of the slot's own word, committed where the source wants it. On refusal they stay in the word as they
    /// were.
    #[inline(always)]
    fn allocate_from(&self, slot: &Slot, pages: usize) -> Option<Allocation> {
        let Claim { start, scavenged } = slot.allocate(pages, |claim| {
            !S::COMMITS || claim.scavenged == 0 || self.commit(claim.start, pages)
        })?;
        Some(Allocation {
            run: PageRun::known(start, pages),
            scavenged: self.known_zero(scavenged),
        })
    }

    /// As [`Slot::own`].
    #[inline(always)]
    fn own<'a>(&self, slot: &'a Slot) -> Option<Entered<'a>> {
        slot.own(&self.driver.seizing)
    }

    /// As [`own`](Self::own), after a seizure if one is under way: some microseconds.
    fn own_at_last<'a>(&self, slot: &'a Slot) -> Entered<'a> {
        let mut round = 0;
        loop {
            if let Some(slot) = self.own(slot) {
                return slot;
            }
            relax(round);
            round = round.saturating_add(1);
        }
    }

    /// As [`allocate_beyond`](Self::allocate_beyond), and counts a "no".
    #[inline(never)]
    fn allocate_beyond_or_refuse(&self, slot: &Slot, pages: PageCount) -> Option<Allocation> {
        self.allocate_beyond(slot, pages).or_else(|| self.refuse(pages.0))
    }

    /// A handle's cache could not serve, or is being seized: then the heap is asked first.
    #[inline(never)]
    fn allocate_beyond(&self, slot: &Slot, pages: PageCount) -> Option<Allocation> {
        if let Some(slot) = self.own(slot) {
            return self.allocate_through(&slot, pages);
        }
        if pages == PageCount::ZERO || pages.0 > self.capacity {
            return None;
        }
        match self.set.hold_lowest_within(&Request::of(pages.0), SEARCHES_TO_GROW) {
            Some(start) => self.ready(start, pages.0),
            None => self.allocate_through(&self.own_at_last(slot), pages),
        }
    }

    /// Takes what caches hold whose owners are not at work on them, threads that sleep included, back into the set.
    /// Nobody waits for it but flushes. Nothing where the system has no fence for it.
    ///
    /// Cost: one system call (some microseconds), 5 ns for each cache ever lent, two read-modify-writes for each one
    /// that holds pages.
    pub(crate) fn seize_caches(&self) {
        let Some(_guard) = self.driver.seizer.try_lock() else {
            return;
        };
        let mut any = false;
        self.for_each_handle(|slot| any |= slot.holds_pages());
        if !any || !self.barrier() {
            return;
        }
        // Until the pages are back: whoever is about to say that there is no room waits for them.
        let _pass = self.pass();
        // Relaxed: the fence behind it makes it seen; partner: `Slot::own`.
        self.driver.seizing.store(1, Ordering::Relaxed);
        if self.barrier() {
            self.for_each_handle(|slot| {
                if slot.holds_pages() && slot.is_left() {
                    self.flush_slot(slot);
                }
            });
        }
        // Release: pairs with the acquire of `Slot::own`.
        self.driver.seizing.store(0, Ordering::Release);
    }

    /// As [`fence_heavy`], counted.
    pub(crate) fn barrier(&self) -> bool {
        self.count_barriers(1);
        fence_heavy()
    }

    /// So many were passed, or will be.
    pub(crate) fn count_barriers(&self, calls: u64) {
        self.counters.barrier.add(calls);
    }

    /// The cache could not serve.
    #[inline(never)]
    fn allocate_through(&self, slot: &Slot, pages: PageCount) -> Option<Allocation> {
        if pages == PageCount::ZERO {
            return None;
        }
        self.heed_flush_calls(slot);
        if pages.0.wrapping_sub(1) < MAX_CACHED_PAGES && slot.is_empty() {
            self.flush_slot(slot);
            if let Some(word) = self.claim_word() {
                slot.fill(word);
                if let Some(allocation) = self.allocate_from(slot, pages.0) {
                    return Some(allocation);
                }
            }
        }
        let request = Request::of(pages.0);
        if let Some(start) = self.set.hold_lowest_within(&request, SEARCHES_TO_GROW) {
            return self.ready(start, request.pages);
        }
        // Our own pages may be what is missing: before the heap grows, or says no.
        self.flush_slot(slot);
        self.try_with(&request)
    }

    /// The word with the lowest free page, growing the heap if there is none.
    fn claim_word(&self) -> Option<Word> {
        loop {
            let grown = self.set.grown();
            if let Some(word) = self.set.claim_word_within(SEARCHES_TO_GROW) {
                return Some(word);
            }
            self.grow_for(&Request::of(1), grown)?;
        }
    }

    /// # Safety
    ///
    /// As for [`PageHeap::try_free`], and the caller owns the slot.
    #[inline(always)]
    unsafe fn free_through(&self, slot: &Slot, run: PageRun) -> Result<(), FreeError> {
        let (start, pages) = (run.start().0, run.pages().0);
        if start % WORD_PAGES + pages > WORD_PAGES || run.end().0 > self.set.grown() {
            // SAFETY: the caller's promise.
            return unsafe { self.try_free(run) };
        }
        slot.free(&self.set, start, pages)
            .map_err(|page| self.free_already(page))
    }

    /// A call for a flush that this slot's owner has not heeded yet?
    fn heed_flush_calls(&self, slot: &Slot) {
        // Relaxed: a request, not a handover.
        let calls = self.flush_calls.load(Ordering::Relaxed);
        if slot.link.load(Ordering::Relaxed) != calls {
            slot.link.store(calls, Ordering::Relaxed);
            self.flush_slot(slot);
        }
    }

    fn flush_slot(&self, slot: &Slot) {
        if let Err(page) = slot.flush(&self.set) {
            self.free_already(page).abort();
        }
    }

    /// Every slot that has ever been used.
    pub(super) fn for_each_slot(&self, mut visit: impl FnMut(&Slot)) {
        (0..self.shards).for_each(|index| visit(self.slots.get(index)));
        self.for_each_handle(visit);
    }

    /// Every slot that has ever been lent to a handle.
    fn for_each_handle(&self, mut visit: impl FnMut(&Slot)) {
        // Acquire: pairs with the release in `lend`; the slots are covered.
        let used = self.shards + self.lent.load(Ordering::Acquire) as usize;
        (self.shards..used).for_each(|index| visit(self.slots.get(index)));
    }

    /// No page is both cached and free, or cached twice.
    pub(super) fn check_caches(&self) -> Result<(), Fault> {
        let mut result = Ok(());
        self.for_each_slot(|slot| {
            for (word, pages) in slot.words() {
                let mut holders = 0;
                self.for_each_slot(|other| {
                    holders += other
                        .words()
                        .iter()
                        .filter(|(index, held)| *index == word && held & pages != 0)
                        .count();
                });
                if pages != 0 && result.is_ok() {
                    result = self.set.check_cached(word, pages, holders);
                }
            }
        });
        result
    }
}
