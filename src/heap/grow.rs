//! Growth: the one thing a heap does under a lock.
//!
//! ```text
//!   lock ─▶ did somebody else grow? ─▶ tables prepared ─▶ pages prepared ─▶ given to the set ─▶ unlock ─▶ search again
//! ```
//!
//! How much: what the request lacks, or an eighth of the heap up to 64 MiB, whichever is more, in whole chunks; on
//! refusal by the source, what the request lacks. Prepared pages are not resident, so growing ahead costs address space
//! only, and saves system calls.

use crate::free_set::Request;
use crate::geometry::Shape;
use crate::metadata::offset;
use crate::source::{Contents, Purpose, Source};
use crate::sync::Ordering;

use super::PageHeap;

/// The most bytes grown ahead of need.
const MOST_AHEAD: usize = 64 << 20;

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Grows until the request could be met if nobody else took the pages; the heap had `seen` pages when it could not.
    /// `Some` also if another thread has grown the heap since.
    #[cold]
    pub(super) fn grow_for(&self, request: &Request, seen: usize) -> Option<()> {
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
        self.grow_locked(ahead.min(limit)).or_else(|| self.grow_locked(end))
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
        self.grow_locked(whole.min(limit)).or_else(|| self.grow_locked(end))
    }

    /// Under the lock. `end` is above `grown` and at most the limit.
    fn grow_locked(&self, end: usize) -> Option<()> {
        let grown = self.set.grown();
        let calls = self.metadata.cover::<G, S>(&self.source, end);
        self.counters.prepare.add(*calls.as_ref().unwrap_or(&1) as u64);
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
