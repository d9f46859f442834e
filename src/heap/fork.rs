//! A heap in the two processes that result from `fork`.
//!
//! ```text
//!   hold ──▶ fork ──▶ let go                       in the parent
//!               └───▶ recover ──▶ let go           in the child, which has one thread
//! ```
//!
//! Because the locks are held across the fork, what they guard is consistent in the child. Work without locks is
//! decided by one read-modify-write each, so no bit is half done. But a thread that does not exist in the child may
//! have been inside the turnstile, or between its bits and the tree: `recover` clears the turnstile and rebuilds the
//! tree. Pages that such a thread held, in its cache or in transit, stay allocated in the child: at most 128 a thread.
//!
//! `hold` costs two uncontended locks, ~90 ns with their release; `recover` is O(heap), a few hundred nanoseconds for
//! each 4 MiB.

#![forbid(unsafe_code)]

use crate::geometry::Shape;
use crate::source::Source;
use crate::sync::Ordering;

use super::PageHeap;
use super::driver::Driver;

/// How long a forking thread waits for one turn, in milliseconds, before it releases everything and starts over.
const FORK_WAITS: u32 = 20;

impl Driver {
    /// Before the process forks: keeps scavengers away until [`let_go`](Self::let_go), after they finish what they are
    /// at (a look, or one chunk). Returns whether it succeeded within a while: the holder of the turn may be waiting
    /// for the caller, if the caller holds anything.
    pub(crate) fn try_hold(&self) -> bool {
        // Relaxed, twice: as in `Driver::is_awaited`.
        self.awaited.fetch_add(1, Ordering::Relaxed);
        let turn = self.turn.lock_within(FORK_WAITS);
        self.awaited.fetch_sub(1, Ordering::Relaxed);
        let held = turn.is_some();
        core::mem::forget(turn);
        if held {
            self.turn.keep();
            self.seizer.hold();
        }
        held
    }

    /// Ends a [`try_hold`](Self::try_hold), in the process that forked or in the child.
    pub(crate) fn let_go(&self) {
        self.seizer.let_go();
        self.turn.let_go();
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Before the fork: waits until no thread grows the heap or lends a cache, and keeps it that way.
    pub(crate) fn hold(&self) {
        self.lending.hold();
        self.lock.hold();
    }

    /// After the fork, in either process.
    pub(crate) fn let_go(&self) {
        self.lock.let_go();
        self.lending.let_go();
    }

    /// In the child, before it lets go: no other thread exists, and those that were inside will not return. Allocated
    /// pages have so many bytes in holes.
    pub(crate) fn recover(&self, holes: usize) {
        self.scavengers.clear();
        self.movers.clear();
        self.set.recover();
        // Whoever was at work on a cache or a shard is gone, and may have left it half changed: its pages are lost.
        self.for_each_slot(|slot| {
            if !slot.is_left() {
                slot.forget();
            }
        });
        // Marks have gone with their pages, and a thread may have been between a mark and its count.
        let (grown, _, mut scavenged) = self.set.count();
        self.for_each_slot(|slot| scavenged += slot.state().scavenged);
        let gone = scavenged + (holes >> G::PAGE_SHIFT);
        self.driver
            .ceiling
            .recount(self.memory_in(grown).saturating_sub(gone), holes);
    }

    /// In the child, before it lets go: takes back the cache of a thread that does not exist in the child. Its pages
    /// are lost, because the thread may have been in the middle of changing it.
    pub(crate) fn forget_cache(&self, index: usize) {
        let slot = self.slots.get(index);
        self.driver.ceiling.change(slot.state().scavenged, 0);
        slot.forget();
        self.put_back(index);
    }
}

#[cfg(test)]
mod tests {
    use crate::geometry::WORD_PAGES;
    use crate::heap::{Config, PageHeap};
    use crate::source::Simulated;
    use crate::units::PageCount;

    /// A lock that another thread holds at the fork is held in the child for ever.
    #[test]
    fn all_locks_are_held_for_the_fork() {
        let heap = PageHeap::new(Simulated::new(4096), Config::new(4 << 20).caches(2)).unwrap();
        let held = || [&heap.lending, &heap.lock, &heap.driver.seizer].map(|lock| lock.is_held());
        assert_eq!(held(), [false; 3]);
        assert!(heap.driver.try_hold());
        heap.hold();
        assert_eq!(held(), [true; 3]);
        heap.let_go();
        heap.driver.let_go();
        assert_eq!(held(), [false; 3]);
        assert!(heap.cache().is_some());
    }

    /// What the child of a fork may find: free pages that were not announced, and threads inside that do not exist.
    #[test]
    fn what_others_left_half_done_is_made_right() {
        let pages = PageCount(3000);
        let heap = PageHeap::new(Simulated::new(4096), Config::new(64 << 20).limit(pages)).unwrap();
        let run = heap.allocate(pages).unwrap();
        assert!(heap.allocate(PageCount(1)).is_none());
        // As a release does first.
        let word = run.start().0 / WORD_PAGES + 40;
        heap.set.free.give(word, 0xff00).unwrap();
        assert!(heap.allocate(PageCount(8)).is_none(), "nobody was told");
        // As a release of memory does before the pages are free.
        heap.driver.ceiling.change(0, 8);
        heap.set.scavenged.mark(word + 1, 0xff);
        core::mem::forget((heap.scavengers.enter(0), heap.movers.enter(0)));
        heap.hold();
        heap.recover(0);
        heap.let_go();
        assert!(heap.scavengers.calm().is_some() && heap.movers.calm().is_some());
        heap.check().unwrap();
        assert_eq!(heap.backed().0, heap.stats().grown.0, "no page is marked");
        let found = heap.allocate(PageCount(8)).unwrap();
        assert_eq!(found.start().0, word * WORD_PAGES + 8);
        assert!(heap.allocate(PageCount(1)).is_none());
    }

    /// Whoever was at work on a cache when the process forked does not exist in the child. A request that fails there
    /// waited for it, each time.
    #[test]
    fn nobody_is_at_work_on_a_cache() {
        let heap = PageHeap::new(Simulated::new(4096), Config::new(4 << 20).caches(2).shards(1)).unwrap();
        let cache = heap.cache().unwrap();
        cache.allocate(PageCount(1)).unwrap();
        heap.for_each_slot(|slot| core::mem::forget(slot.try_enter()));
        assert_eq!(heap.look_at_caches(), (true, true));
        heap.hold();
        heap.recover(0);
        heap.let_go();
        assert_eq!(heap.look_at_caches(), (false, false), "its pages are lost");
        heap.check().unwrap();
        assert!(heap.allocate_on(0, PageCount(1)).is_some() && cache.allocate(PageCount(1)).is_some());
        heap.check().unwrap();
    }

    /// What is said to have had memory at most had it at some time.
    #[test]
    fn holes_are_not_counted_as_memory() {
        let heap = PageHeap::new(Simulated::new(4096), Config::new(4 << 20)).unwrap();
        let _run = heap.allocate(PageCount(100)).unwrap();
        let before = heap.backed();
        heap.count_holes(50 * heap.page_bytes(), 0);
        assert_eq!((heap.backed().0, heap.peak_backed()), (before.0 - 50, before));
        heap.hold();
        heap.recover(50 * heap.page_bytes());
        heap.let_go();
        assert_eq!((heap.backed().0, heap.peak_backed()), (before.0 - 50, before));
        heap.count_holes(0, 50 * heap.page_bytes());
        assert_eq!((heap.backed(), heap.hole_bytes()), (before, 0));
    }

    #[test]
    fn gaps_are_not_counted_as_memory() {
        let base: usize = 1 << (usize::BITS / 16 * 11);
        let gap = base..base + (1 << 20);
        let source = Simulated::new(4096).with_gaps(core::slice::from_ref(&gap));
        let heap = PageHeap::new(source, Config::new(4 << 20)).unwrap();
        heap.allocate(PageCount(200)).unwrap();
        let before = heap.backed();
        heap.hold();
        heap.recover(0);
        heap.let_go();
        assert_eq!(heap.backed(), before);
    }
}
