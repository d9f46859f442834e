//! Growth, the one thing a heap does under a lock; and the last tries before a refusal.
//!
//! ```text
//!   lock ─▶ did somebody else grow? ─▶ tables prepared ─▶ pages prepared ─▶ given to the set ─▶ unlock ─▶ search again
//! ```
//!
//! How much: what the request lacks, or an eighth of the heap up to 64 MiB, whichever is more, in whole chunks; on
//! refusal by the source, what the request lacks. Prepared pages are not resident, so growing ahead costs address space
//! only, and saves system calls.

use crate::free_set::Request;
use crate::geometry::{SEARCHES_TO_GROW, Shape};
use crate::metadata::offset;
use crate::source::{Contents, Purpose, Source};
use crate::sync::{Ordering, relax};
use crate::units::PageCount;

use super::{Allocation, PageHeap};

/// The most bytes grown ahead of need.
const MOST_AHEAD: usize = 64 << 20;

/// How often a refusal yields to those with pages in their hands that do not move: a good part of a second, more than
/// their calls take. (On a machine that is not busy; without an operating system each is 16 pauses of the processor, as
/// long as they are.)
const ROUNDS: u32 = 1 << 20;

/// How often an allocation that is about to be refused tries once more because one of them has come or gone.
const TRIES: u32 = 16;

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// No room where the hint said: all of the heap, and growth where that is proved to be needed.
    #[cold]
    pub(super) fn allocate_or_grow(&self, request: &Request) -> Option<Allocation> {
        // Where no growth can follow, the last try is proof enough.
        if self.set.grown() >= self.limit().0 {
            return self.allocate_last(request);
        }
        loop {
            let grown = self.set.grown();
            if let Some(start) = self.set.hold_or_prove_within(request, SEARCHES_TO_GROW) {
                return self.ready(start, request.pages);
            }
            if self.grow_for(request, grown).is_none() {
                return self.allocate_last(request);
            }
        }
    }

    /// No room and no growth: both once more, after every cache that can be reached has given back what it holds, and
    /// after whoever was carrying pages from caches and stores to the set has arrived. Growth too: what came home may
    /// lie at the end of the heap, and the request lacks less.
    ///
    /// Who is releasing pages is not waited for: his are missed, unless he comes or goes while the proof is made. Only
    /// a heap that was made to ([`Config::wait_for_release`](crate::Config::wait_for_release)) waits for him too. It
    /// ends, whatever others do: so many tries, so many waits in all of them together, and each proof has its bound
    /// ([`Request::searches`]). Where the heap has grown it is searched again without a try: that ends at the limit.
    #[cold]
    fn allocate_last(&self, request: &Request) -> Option<Allocation> {
        self.flush_shards();
        // Relaxed: a request, heeded when its readers next come by.
        self.flush_calls.fetch_add(1, Ordering::Relaxed);
        let (mut tries, mut waits) = (0, 0);
        while tries < TRIES {
            let grown = self.set.grown();
            let seen = [self.movers.look(), self.scavengers.look()];
            if let Some(start) = self.set.hold_or_prove(request) {
                return self.ready(start, request.pages);
            }
            if self.grow_for(request, grown).is_some() {
                continue;
            }
            tries += 1;
            // What they hold may be what is missing: not before one of them has come or gone is there more.
            let [(_, moving), (_, releasing)] = seen;
            while [self.movers.look(), self.scavengers.look()] == seen {
                if !(moving || releasing && self.patient) || waits > ROUNDS {
                    return None;
                }
                waits += 1;
                relax(waits);
            }
        }
        None
    }

    /// Grows until the request could be met if nobody else took the pages; the heap had `seen` pages when it could not.
    /// `Some` also if another thread has grown the heap since.
    #[cold]
    pub(super) fn grow_for(&self, request: &Request, seen: usize) -> Option<()> {
        // A full heap says no without the lock, which somebody may hold for as long as his source takes.
        if seen >= self.limit().0 {
            return None;
        }
        let _guard = self.lock.lock();
        let grown = self.set.grown();
        if grown != seen {
            return Some(());
        }
        // Free pages at the end count.
        let begin = request.align_page(grown - self.set.free_at_end(request.pages))?;
        let end = begin.checked_add(request.pages)?.max(grown + 1);
        let ahead = grown
            .saturating_add((grown / 8).min(MOST_AHEAD >> G::PAGE_SHIFT))
            .max(end);
        let ahead = ahead.checked_next_multiple_of(G::CHUNK_PAGES).unwrap_or(end);
        let limit = self.limit().0;
        if end > limit {
            return None;
        }
        self.grow_ahead(ahead.min(limit), end)
    }

    /// Grows to `end` pages at least.
    #[cold]
    pub(super) fn grow_to(&self, end: usize) -> Option<()> {
        let _guard = self.lock.lock();
        // Once: it may be changed meanwhile.
        let limit = self.limit().0;
        if self.set.grown() >= end {
            return Some(());
        }
        if end > limit {
            return None;
        }
        let whole = end.checked_next_multiple_of(G::CHUNK_PAGES).unwrap_or(end);
        self.grow_ahead(whole.min(limit), end)
    }

    /// Under the lock, to `ahead`, or, where the source refuses that, to `end`.
    fn grow_ahead(&self, ahead: usize, end: usize) -> Option<()> {
        let grown = self.grow_locked(ahead).or_else(|| self.grow_locked(end));
        // Relaxed: a number by itself.
        self.stuck.store(grown.is_none().into(), Ordering::Relaxed);
        grown
    }

    /// Whether so many pages more cannot be had by growth, as far as can be known: the limit is too near, or the source
    /// has refused the last.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn is_stuck(&self, pages: PageCount) -> bool {
        // Relaxed: a number by itself.
        self.set.grown().saturating_add(pages.0) > self.limit().0 || self.stuck.load(Ordering::Relaxed) != 0
    }

    /// Under the lock. `end` is above `grown` and at most the limit.
    fn grow_locked(&self, end: usize) -> Option<()> {
        let grown = self.set.grown();
        let calls = self.metadata.cover::<G, S>(&self.source, end);
        let (Ok(asked) | Err(asked)) = calls;
        self.counters.prepare.add(asked as u64);
        calls.ok()?;
        let contents = self.prepare_pages(end)?;
        let mark = self.to_mark(contents, false);
        self.driver.ceiling.change(if mark { 0 } else { end - grown }, 0);
        self.set.extend(end - grown, mark);
        self.counters.growths.add(1);
        Some(())
    }

    /// Has the source prepare pages up to `end`, in whole granules. Says what the new ones read as.
    fn prepare_pages(&self, end: usize) -> Option<Contents> {
        // Relaxed: under the lock.
        let prepared = self.prepared.load(Ordering::Relaxed);
        if end <= prepared {
            // The rest of a granule: never handed out, but we did not keep what it reads as.
            return Some(Contents::Unknown);
        }
        let granule = (self.source.granule() >> G::PAGE_SHIFT).max(1);
        let target = end.next_multiple_of(granule).min(self.capacity);
        let start = offset(self.base, prepared << G::PAGE_SHIFT);
        let bytes = (target - prepared) << G::PAGE_SHIFT;
        self.counters.prepare.add(1);
        // SAFETY: behind what is prepared, inside the reservation (target ≤ capacity), on granule borders: the capacity
        // is a multiple of granule and page, and so is everything prepared before.
        let contents = unsafe { self.source.prepare(Purpose::Pages, start, bytes) }.ok()?;
        self.prepared.store(target, Ordering::Relaxed);
        if prepared > self.set.grown() {
            Some(Contents::Unknown)
        } else {
            Some(contents)
        }
    }
}
