//! The heap's caches, lent: [`Cache`] handles for callers that can keep one, numbered shards for those that cannot.
//!
//! ```text
//!   slots   ┌ shard 0 ┬ shard 1 ┬ … ┬ handle ┬ handle ┬ vacant ┬ …           64 bytes each, in the heap's metadata
//!           └─ busy flag, a call ───┴─ owned until dropped ─────┘
//! ```
//!
//! A handle is `Send` but not `Sync`: it may move to another thread, but two threads must not use it at once. Any
//! thread may name a shard; if another thread is using that shard, the call goes to the heap instead of waiting.
//!
//! **Visibility.** Pages in a cache, and pages freed into its buffer (at most 64 each), are neither allocated nor free:
//! [`Stats`](crate::Stats) counts them as cached, and no other thread can have them until a flush. A handle flushes:
//!
//! - when it is dropped or `flush` is called,
//! - before it grows the heap or reports that there is no room,
//! - after any thread has run out of memory: the next time this cache cannot serve an allocation.
//!
//! In addition, the pages of a cache that no thread is working on may be seized, see `src/cache.rs`: a sleeping thread
//! keeps nothing.

use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;

use crate::cache::{Entered, MAX_CACHED_PAGES, Slot};
use crate::check::Fault;
use crate::free_set::{Claim, Request, Word};
use crate::geometry::{Geometry, SEARCHES_TO_GROW, Shape, WORD_PAGES};
use crate::source::Source;
use crate::sync::{Ordering, fence_heavy, rest};
use crate::units::{PageCount, PageIndex, PageRun};

use super::{Allocation, FreeError, PageHeap};

/// A cache of pages owned by its holder. It allocates and frees without an atomic read-modify-write, except for one
/// each time that it takes the free pages of a word of 64 from the heap, or gives those of one back: at best one in 64
/// pages.
///
/// What it holds, 128 pages at most, no other thread can have: an allocation elsewhere is refused for want of it. It
/// goes back when the handle is dropped or [flushed](Self::flush), before it grows the heap or reports that there is no
/// room, and, once any thread has run out of memory, the next time that the cache cannot serve an allocation. Where the
/// system has a fence through all threads, [`PageHeap::tick`] and [`PageHeap::release`] take it back as well, unless
/// its owner is at work on it.
///
/// ```
/// use pageheap::source::System;
/// use pageheap::{Config, PageCount, PageHeap};
///
/// let heap = PageHeap::new(System, Config::new(1 << 30)).unwrap();
/// let cache = heap.cache().unwrap();
/// let run = cache.allocate(PageCount(1)).unwrap();
/// // SAFETY: the run is ours, and nothing uses it.
/// unsafe { cache.free(run) };
/// ```
pub struct Cache<'h, S: Source, G: Shape = Geometry> {
    heap: &'h PageHeap<S, G>,
    slot: &'h Slot,
    index: usize,
    not_sync: PhantomData<Cell<()>>,
}

impl<S: Source, G: Shape> Cache<'_, S, G> {
    /// As [`PageHeap::allocate`], but from the cache if possible: up to 16 pages, the lowest run in its word.
    #[inline(always)]
    #[must_use]
    pub fn allocate(&self, pages: PageCount) -> Option<PageRun> {
        self.allocate_tracked(pages).map(|allocation| allocation.run)
    }

    /// As [`allocate`](Self::allocate), but also reports how many of the pages are known to read as zero.
    #[inline(always)]
    #[must_use]
    pub fn allocate_tracked(&self, pages: PageCount) -> Option<Allocation> {
        self.allocate_or(pages, PageHeap::allocate_beyond_or_refuse)
    }

    /// As [`allocate_tracked`](Self::allocate_tracked), for a layer above, as [`PageHeap::try_with`].
    #[inline(always)]
    pub(crate) fn try_tracked(&self, pages: PageCount) -> Option<Allocation> {
        self.allocate_or(pages, PageHeap::allocate_beyond)
    }

    /// From the cache alone.
    pub(crate) fn try_at_hand(&self, pages: PageCount) -> Option<Allocation> {
        self.allocate_or(pages, |_, _, _| None)
    }

    /// Allocates from the word, or `beyond` it.
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

    /// As [`PageHeap::free`], but into the cache if the run lies in its word, and into the buffer if it lies in
    /// another.
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

    /// As [`free`](Self::free), but reports detected misuse as an error, and does not free the run then.
    ///
    /// # Errors
    /// [`FreeError`] if a page does not belong to the heap or is already in this cache. A page that is free elsewhere
    /// is detected only when the cache gives it back: by a flush, which aborts, or by a free into another word, which
    /// returns the error of that page, not one of its own; the other pages are back then. If the page has been handed
    /// out before that, it may not be detected at all.
    ///
    /// # Safety
    ///
    /// As for [`PageHeap::free`]. Unlike with [`PageHeap::try_free`], the pages must be allocated.
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
        // Held until the pages are back, as in `flush_shards`.
        let _pass = self.slot.holds_pages().then(|| self.heap.pass());
        self.heap.flush_slot(&self.heap.own_at_last(self.slot));
    }

    /// Whether the page is in the cache or in its buffer.
    pub(crate) fn holds(&self, page: PageIndex) -> bool {
        let (word, bit) = (page.0 / WORD_PAGES, page.0 % WORD_PAGES);
        self.slot
            .words()
            .iter()
            .any(|&(index, pages)| index == word && pages >> bit & 1 == 1)
    }

    /// The heap this cache belongs to.
    #[must_use]
    pub fn heap(&self) -> &PageHeap<S, G> {
        self.heap
    }
}

impl<S: Source, G: Shape> fmt::Debug for Cache<'_, S, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache")
            .field("heap", self.heap)
            .field("slot", &self.index)
            .finish_non_exhaustive()
    }
}

impl<S: Source, G: Shape> Drop for Cache<'_, S, G> {
    fn drop(&mut self) {
        self.flush();
        self.heap.take_back(self.index);
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Lends the caller a cache of its own. Returns `None` if [`Config::caches`](super::Config::caches) are already
    /// lent, or there is no memory for one more.
    ///
    /// Takes a separate lock: ~40 ns. A handle that is forgotten (`mem::forget`) keeps its slot forever, and up to 128
    /// pages until [`tick`](Self::tick) or [`release`](Self::release) takes them (where the system has no fence through
    /// all threads, these too).
    #[must_use]
    pub fn cache(&self) -> Option<Cache<'_, S, G>> {
        Some(ManuallyDrop::into_inner(self.cache_at(self.lend()?)))
    }

    /// The cache in slot `index`, for the thread that was lent the slot and is its only user. Dropping it does not
    /// return the slot.
    #[inline(always)]
    pub(crate) fn cache_at(&self, index: usize) -> ManuallyDrop<Cache<'_, S, G>> {
        ManuallyDrop::new(Cache {
            heap: self,
            slot: self.slots.get(index),
            index,
            not_sync: PhantomData,
        })
    }

    /// How many times all caches have been asked to flush.
    pub(crate) fn flush_calls(&self) -> u32 {
        // Relaxed: a request, not a handover.
        self.flush_calls.load(Ordering::Relaxed)
    }

    /// Lends a slot.
    pub(crate) fn lend(&self) -> Option<usize> {
        let _guard = self.lending.lock();
        // Relaxed: everything here is under the lock.
        let vacant = self.vacant.load(Ordering::Relaxed);
        let index = if vacant != 0 {
            let index = vacant as usize - 1;
            let next = self.slots.get(index).link.load(Ordering::Relaxed);
            self.vacant.store(next, Ordering::Relaxed);
            index
        } else {
            let index = self.shards + self.lent.load(Ordering::Relaxed) as usize;
            if index >= self.slots.len() {
                return None;
            }
            let calls = self.metadata.cover_slots(&self.source, index + 1);
            let (Ok(asked) | Err(asked)) = calls;
            self.counters.prepare.add(asked as u64);
            calls.ok()?;
            // Release: publishes that one more slot is covered; partner: the acquire in `for_each_handle`.
            self.lent.fetch_add(1, Ordering::Release);
            index
        };
        self.slots.get(index).link.store(self.flush_calls(), Ordering::Relaxed);
        Some(index)
    }

    /// Takes back a slot, which has been flushed.
    pub(crate) fn take_back(&self, index: usize) {
        self.end_apart(self.slots.get(index));
        let _guard = self.lending.lock();
        self.put_back(index);
    }

    /// Links a slot into the list of vacant ones. Under the lock.
    pub(super) fn put_back(&self, index: usize) {
        // Relaxed: everything here is under the lock.
        let slot = self.slots.get(index);
        slot.link.store(self.vacant.load(Ordering::Relaxed), Ordering::Relaxed);
        self.vacant.store(index as u32 + 1, Ordering::Relaxed);
    }

    /// As [`allocate`](Self::allocate), through the cache of shard `shard` (modulo the number of shards). Without
    /// shards, or while another thread uses this one, through none.
    #[must_use]
    pub fn allocate_on(&self, shard: usize, pages: PageCount) -> Option<PageRun> {
        let Some(slot) = self.shard(shard) else {
            return self.allocate(pages);
        };
        if pages.0.wrapping_sub(1) < MAX_CACHED_PAGES
            && let Some(claim) = self.claim_from(&slot, pages.0)
        {
            drop(slot);
            return Some(self.counted(claim, pages.0).run);
        }
        let allocation = self
            .allocate_through(slot, pages)
            .or_else(|| self.allocate_last(&Request::of(pages.0)))
            .or_else(|| self.refuse(pages.0))?;
        Some(allocation.run)
    }

    /// As [`free`](Self::free), through the cache of shard `shard`, as for [`allocate_on`](Self::allocate_on).
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

    /// Gives back what the caches of all shards hold, except those that a thread is using at the moment.
    pub fn flush_shards(&self) {
        self.flush_free_shards();
    }

    /// The same. Returns whether a thread was using one, which may have pages in hand too.
    pub(super) fn flush_free_shards(&self) -> bool {
        let mut is_any_busy = false;
        for index in 0..self.shards {
            let Some(slot) = self.slots.get(index).try_enter() else {
                is_any_busy = true;
                continue;
            };
            self.flush_announced(&slot);
        }
        is_any_busy
    }

    /// Allocates pages of the slot's own word, and commits them if the source requires it. If that fails, they stay in
    /// the word as they were.
    #[inline(always)]
    fn claim_from(&self, slot: &Slot, pages: usize) -> Option<Claim> {
        slot.allocate(pages, |claim| {
            !S::COMMITS || claim.scavenged == 0 || self.commit(claim.start, pages)
        })
    }

    /// Counts such pages. Memory may go back to the source here, which takes long: so what else is in the cache should
    /// be within reach of other threads.
    #[inline(always)]
    fn counted(&self, Claim { start, scavenged }: Claim, pages: usize) -> Allocation {
        Allocation {
            run: PageRun::known(start, pages),
            scavenged: self.known_zero(scavenged),
            last: PageCount::ZERO,
        }
    }

    /// Both. For the owner of the slot.
    #[inline(always)]
    fn allocate_from(&self, slot: &Slot, pages: usize) -> Option<Allocation> {
        let claim = self.claim_from(slot, pages)?;
        Some(self.counted(claim, pages))
    }

    /// As [`Slot::own`].
    #[inline(always)]
    fn own<'a>(&self, slot: &'a Slot) -> Option<Entered<'a>> {
        slot.own(&self.driver.seizing)
    }

    /// As [`own`](Self::own), but waits for a seizure that is under way: some microseconds.
    fn own_at_last<'a>(&self, slot: &'a Slot) -> Entered<'a> {
        let mut round = 0;
        loop {
            if let Some(slot) = self.own(slot) {
                return slot;
            }
            round = rest(round);
        }
    }

    /// As [`allocate_beyond`](Self::allocate_beyond), but in the end asks other threads, and counts a refusal.
    #[inline(never)]
    fn allocate_beyond_or_refuse(&self, slot: &Slot, pages: PageCount) -> Option<Allocation> {
        self.allocate_beyond(slot, pages)
            .or_else(|| {
                if S::COMMITS && pages != PageCount::ZERO {
                    // It may hold pages with memory beside those that a commit was refused for.
                    self.flush_announced(&self.own_at_last(slot));
                }
                self.allocate_last(&Request::of(pages.0))
            })
            .or_else(|| self.refuse(pages.0))
    }

    /// The handle's cache could not serve, or is being seized; in the latter case the heap is tried first.
    #[inline(never)]
    fn allocate_beyond(&self, slot: &Slot, pages: PageCount) -> Option<Allocation> {
        if let Some(slot) = self.own(slot) {
            return self.allocate_through(slot, pages);
        }
        if pages == PageCount::ZERO || pages.0 > self.capacity {
            return None;
        }
        let request = Request::of(pages.0);
        match self.set.hold_lowest_within(&request, SEARCHES_TO_GROW) {
            Some(start) => self.ready_for(&request, start),
            None => self.allocate_through(self.own_at_last(slot), pages),
        }
    }

    /// Takes the pages in caches whose owners are not working on them, including those of sleeping threads, back into
    /// the set. Only flushes wait for this. Does nothing if the system has no suitable fence. Returns whether any cache
    /// held pages, or may have had some in hand, as far as could be seen.
    ///
    /// Cost: one system call (some microseconds), 5 ns for each cache ever lent, two read-modify-writes for each one
    /// that holds pages.
    pub(crate) fn seize_caches(&self) -> bool {
        let Some(_guard) = self.driver.seizer.try_lock() else {
            return true;
        };
        let (mut held, mut busy) = (false, false);
        self.for_each_handle(|slot| {
            // In this order: who has given back what is no longer here, and has left, is acquired from.
            held |= slot.holds_pages();
            busy |= !slot.is_left();
        });
        if !held || !self.barrier() {
            return busy;
        }
        // Held until the pages are back: a thread that is about to report that there is no room waits for them.
        let _pass = self.pass();
        // Relaxed: the fence after it makes it visible; partner: the load in `Slot::own`.
        self.driver.seizing.store(1, Ordering::Relaxed);
        if self.barrier() {
            self.for_each_handle(|slot| {
                if slot.is_left() {
                    if slot.holds_pages() {
                        self.flush_slot(slot);
                    }
                    self.end_apart(slot);
                }
            });
        }
        // Release: pairs with the acquire of `Slot::own`.
        self.driver.seizing.store(0, Ordering::Release);
        true
    }

    /// Whether a thread is at work on a cache, and whether a cache holds pages. For a thread that has searched in vain:
    /// pages that it missed because they were on their way from the set to a cache are seen here, in the one or the
    /// other.
    ///
    /// Cost: 5 ns for each cache ever lent.
    pub(crate) fn look_at_caches(&self) -> (bool, bool) {
        let (mut busy, mut held) = (false, false);
        self.for_each_handle(|slot| {
            // In this order: who leaves has put into its slot what it claimed. And it entered before it claimed, which
            // the search has seen (words and summaries are read by Acquire).
            busy |= !slot.is_left();
            held |= slot.holds_pages();
        });
        (busy, held)
    }

    /// As [`fence_heavy`], counted.
    pub(crate) fn barrier(&self) -> bool {
        self.count_barrier();
        fence_heavy()
    }

    /// Counts a barrier that was passed, or will be.
    pub(crate) fn count_barrier(&self) {
        self.counters.barrier.add(1);
    }

    /// Called when the cache could not serve.
    #[inline(never)]
    fn allocate_through(&self, slot: Entered<'_>, pages: PageCount) -> Option<Allocation> {
        if pages == PageCount::ZERO {
            return None;
        }
        self.heed_flush_calls(&slot);
        // As in `flush_shards`, for the word that may be claimed in vain. A single page is in every word.
        let pass = (pages.0 > 1 && self.is_stuck(PageCount(1))).then(|| self.pass());
        if pages.0.wrapping_sub(1) < MAX_CACHED_PAGES && slot.is_empty() {
            self.flush_slot(&slot);
            if let Some(word) = self.claim_word(&slot) {
                slot.fill(word);
                if let Some(claim) = self.claim_from(&slot, pages.0) {
                    drop((slot, pass));
                    return Some(self.counted(claim, pages.0));
                }
            }
        }
        let request = Request::of(pages.0);
        if let Some(start) = self.set.hold_lowest_within(&request, SEARCHES_TO_GROW) {
            drop((slot, pass));
            return self.ready_for(&request, start);
        }
        // Our own pages may be what is missing: flush them before the heap grows or refuses.
        self.flush_announced(&slot);
        drop((slot, pass));
        self.try_with(&request)
    }

    /// Claims the word with the lowest free page, or, while other caches are refilled too, one apart from theirs; grows
    /// the heap if there is none.
    fn claim_word(&self, slot: &Slot) -> Option<Word> {
        if let Some((cache, last)) = slot.keeps_apart() {
            if let Some(word) = self.set.claim_word_apart(cache, last) {
                return Some(word);
            }
            self.end_apart(slot);
        }
        loop {
            let grown = self.set.grown();
            if let Some((word, met)) = self.set.claim_word_within(SEARCHES_TO_GROW) {
                self.leave_berth(slot);
                met.into_iter().for_each(|met| slot.note(met));
                return Some(word);
            }
            self.grow_for(&Request::of(1), grown)?;
        }
    }

    /// The cache keeps apart no longer.
    fn end_apart(&self, slot: &Slot) {
        self.leave_berth(slot);
        slot.come_back();
    }

    /// The cache goes on in another chunk than that of its last word.
    fn leave_berth(&self, slot: &Slot) {
        if slot.may_have_berth() {
            let (cache, last) = slot.berth();
            self.set.leave_apart(cache, last);
        }
    }

    /// # Safety
    ///
    /// As for [`PageHeap::try_free`], and the caller owns the slot.
    #[inline(always)]
    unsafe fn free_through(&self, slot: &Slot, run: PageRun) -> Result<(), FreeError> {
        let (start, pages) = (run.start().0, run.pages().0);
        if start % WORD_PAGES + pages > WORD_PAGES || self.is_outside(run) {
            // SAFETY: the caller's promise.
            return unsafe { self.try_free(run) };
        }
        slot.free(&self.set, start, pages)
            .map_err(|page| self.free_already(page))
    }

    /// Flushes if there was a call for a flush that this slot's owner has not heeded yet.
    fn heed_flush_calls(&self, slot: &Slot) {
        // Relaxed: a request, not a handover.
        let calls = self.flush_calls.load(Ordering::Relaxed);
        if slot.link.load(Ordering::Relaxed) != calls {
            slot.link.store(calls, Ordering::Relaxed);
            self.flush_announced(slot);
        }
    }

    /// Flushes. A thread that is about to report that there is no room waits for it.
    fn flush_announced(&self, slot: &Slot) {
        let _pass = slot.holds_pages().then(|| self.pass());
        self.flush_slot(slot);
    }

    fn flush_slot(&self, slot: &Slot) {
        if let Err(page) = slot.flush(&self.set) {
            self.free_already(page).abort();
        }
    }

    /// Visits every slot that has ever been used.
    pub(super) fn for_each_slot(&self, mut visit: impl FnMut(&Slot)) {
        (0..self.shards).for_each(|index| visit(self.slots.get(index)));
        self.for_each_handle(visit);
    }

    /// Visits every slot that has ever been lent to a handle.
    fn for_each_handle(&self, mut visit: impl FnMut(&Slot)) {
        // Acquire: pairs with the release in `lend`; the slots are covered.
        let used = self.shards + self.lent.load(Ordering::Acquire) as usize;
        (self.shards..used).for_each(|index| visit(self.slots.get(index)));
    }

    /// Checks that no page is both cached and free, or cached twice.
    pub(super) fn check_caches(&self) -> Result<(), Fault> {
        let mut result = Ok(());
        self.for_each_slot(|slot| {
            // Most caches hold nothing, and looking at all for each takes long where many were lent.
            for (word, pages) in slot.words().into_iter().filter(|&(_, pages)| pages != 0) {
                let mut holders = 0;
                self.for_each_slot(|other| {
                    holders += other
                        .words()
                        .iter()
                        .filter(|(index, held)| *index == word && held & pages != 0)
                        .count();
                });
                if result.is_ok() {
                    result = self.set.check_cached(word, pages, holders);
                }
            }
        });
        result
    }
}
