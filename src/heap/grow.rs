//! Growth, the one thing a heap does under a lock; and the last attempts before a refusal.
//!
//! ```text
//!   lock ─▶ grown meanwhile? ─▶ tables prepared ─▶ pages prepared ─▶ given to the set ─▶ unlock ─▶ search again
//! ```
//!
//! The heap grows by what the request lacks, or by an eighth of its size up to 64 MiB, whichever is more, in whole
//! chunks; if the source refuses that, by what the request lacks. Prepared pages are not resident, so growing ahead
//! costs only address space, and saves system calls. (Unless the system makes huge pages unasked: then the first byte
//! that is touched takes 2 MiB, if as much is prepared around it. So heaps of objects, of which small programs have
//! one, begin with less than a chunk: [`Config::first`](super::Config).)

use crate::free_set::Request;
use crate::geometry::{SEARCHES_TO_GROW, Shape};
use crate::metadata::offset;
use crate::source::{Contents, Purpose, Source};
use crate::sync::{Calm, Ordering, is_forking, relax, rest};
use crate::units::{PageCount, PageIndex};

use super::{Allocation, PageHeap};

/// The most bytes to grow ahead of need.
const MOST_AHEAD: usize = 64 << 20;

/// How often a refusal yields to threads that have pages in hand and make no progress: a good part of a second, longer
/// than their calls take. (On a machine that is not busy. Without an operating system each yield is 16 processor
/// pauses, of whatever length those are.)
const ROUNDS: u32 = 1 << 20;

/// The same in a handler of a fork: a few yields. Many of those threads wait for what the caller holds for the fork,
/// or, in the child, do not exist; and all others wait meanwhile.
const ROUNDS_FORKING: u32 = 1 << 4;

/// How often it yields for a shard that a thread is using, in all: long enough for that thread to leave, unless it has
/// no processor.
const ROUNDS_FOR_SHARDS: u32 = 1 << 8;

/// How often it yields at last until nobody has pages in hand, after others have come and gone.
const ROUNDS_TO_CALM: u32 = 1 << 12;

/// How often an allocation that is about to be refused tries once more because one of those threads has entered or
/// left.
const TRIES: u32 = 16;

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// As [`allocate_with`](Self::allocate_with), for a layer above: asks no other thread for what it keeps, and does
    /// not count a refusal. The caller may still find a way ([`at_last`](Self::at_last)).
    #[inline]
    pub(crate) fn try_with(&self, request: &Request) -> Option<Allocation> {
        self.serve(request, Self::ready_for, Self::find_or_prove)
    }

    /// Allocates where the hint leads, and makes these pages `ready`; or `otherwise`.
    #[inline(always)]
    pub(super) fn serve(
        &self,
        request: &Request,
        ready: impl FnOnce(&Self, &Request, usize) -> Option<Allocation>,
        otherwise: impl FnOnce(&Self, &Request) -> Option<Allocation>,
    ) -> Option<Allocation> {
        if request.pages == 0 || request.pages > self.capacity {
            return None;
        }
        if let Some(start) = self.set.hold_from_hint(request) {
            return ready(self, request, start);
        }
        otherwise(self, request)
    }

    /// Called when there is no room where the hint pointed: searches the whole heap, and grows it if that is proven
    /// necessary. In the end asks other threads for what they keep.
    #[cold]
    pub(super) fn allocate_or_grow(&self, request: &Request) -> Option<Allocation> {
        // If no growth can follow, the last attempt is proof enough.
        let is_full = self.set.grown() >= self.limit().0;
        let found = if is_full {
            None
        } else {
            self.find_or_grow(request, SEARCHES_TO_GROW)
        };
        match found {
            Some(start) => self.ready_at_last(request, start),
            None => self.allocate_last(request),
        }
    }

    /// Searches, and grows the heap if that is proven necessary. Asks no other thread for what it keeps. Before it
    /// gives up it searches up to `searches` times. Returns where the pages begin, which are held.
    fn find_or_grow(&self, request: &Request, searches: u32) -> Option<usize> {
        loop {
            let grown = self.set.grown();
            let can_grow = grown < self.limit().0;
            let before_growth = if can_grow { SEARCHES_TO_GROW } else { searches };
            let found = self.set.hold_or_prove_within(request, before_growth);
            if found.is_some() {
                return found;
            }
            if can_grow && self.grow_for(request, grown).is_some() {
                continue;
            }
            let is_proven = searches == before_growth;
            return (!is_proven).then(|| self.set.hold_or_prove_within(request, searches))?;
        }
    }

    /// The same, until it is proven that there is no room: for a layer above, which asks other threads itself.
    #[cold]
    pub(super) fn find_or_prove(&self, request: &Request) -> Option<Allocation> {
        self.ready_for(request, self.find_or_grow(request, u32::MAX)?)
    }

    /// A run that the caller can do without: no other thread is asked for what it keeps.
    #[cold]
    pub(crate) fn try_lightly(&self, pages: PageCount) -> Option<Allocation> {
        if pages.0 == 0 || pages.0 > self.capacity {
            return None;
        }
        let request = Request::of(pages.0);
        self.ready_for(&request, self.find_or_grow(&request, SEARCHES_TO_GROW)?)
    }

    /// No room and no growth: tries both once more, [at last](Self::at_last).
    #[cold]
    pub(super) fn allocate_last(&self, request: &Request) -> Option<Allocation> {
        if request.pages == 0 || request.pages > self.capacity {
            return None;
        }
        let start = self.at_last(&mut 0, || self.find_or_grow(request, u32::MAX))?;
        self.ready_at_last(request, start)
    }

    /// The last attempts before a refusal: after every reachable cache has given back its pages, and after threads that
    /// were carrying pages to the set (from caches and stores, or as growth) have arrived, or have left the shard that
    /// they were using, which is then emptied. An attempt also grows, because returned pages may lie at the end of the
    /// heap, so that the request lacks less.
    ///
    /// Threads that are releasing pages are not waited for: their pages are missed, unless such a thread enters or
    /// leaves during the proof. Only a heap configured for it
    /// ([`Config::wait_for_release`](crate::Config::wait_for_release)) waits for them as well.
    ///
    /// When other threads have come and gone too often, it waits until none of them is inside, and tries a last time.
    ///
    /// This terminates whatever other threads do: the number of tries is bounded, so is the total number of `waits`
    /// (which the caller keeps from call to call, if it makes several), and so is each proof ([`Request::searches`]).
    ///
    /// An attempt should not count as one of those threads itself, as it does if it claims through a cache: then none
    /// is waited for. (One that grows the heap does, and in vain only if others take what it has added.)
    #[cold]
    pub(crate) fn at_last<R>(&self, waits: &mut u32, attempt: impl Fn() -> Option<R>) -> Option<R> {
        self.flush_free_shards();
        // Relaxed: a request, heeded when its readers next pass by.
        self.flush_calls.fetch_add(1, Ordering::Relaxed);
        let most = if is_forking() { ROUNDS_FORKING } else { ROUNDS };
        let look = || [self.movers.look(), self.scavengers.look()];
        let is_awaited = |[(_, moving), (_, releasing)]: [(Calm, u32); 2]| moving > 0 || releasing > 0 && self.patient;
        let mut rounds_for_shards = 0;
        for _ in 0..TRIES {
            let seen = look();
            let got = attempt();
            if got.is_some() {
                return got;
            }
            // The attempt may have missed what was on its way into a shard, or came there after they were flushed.
            let mut is_shard_busy = self.flush_free_shards();
            // What they hold may be what is missing: nothing changes until one of them enters or leaves.
            while look() == seen {
                is_shard_busy &= rounds_for_shards < ROUNDS_FOR_SHARDS.min(most);
                if !(is_awaited(seen) || is_shard_busy) || *waits >= most {
                    return None;
                }
                *waits += 1;
                relax(*waits);
                if is_shard_busy {
                    rounds_for_shards += 1;
                    is_shard_busy = self.flush_free_shards();
                }
            }
        }
        // Each time somebody has come or gone. Who stayed meanwhile, unnoticed among them, has left when nobody is
        // inside.
        let most = most.min(waits.saturating_add(ROUNDS_TO_CALM));
        while is_awaited(look()) && *waits < most {
            *waits += 1;
            relax(*waits);
        }
        attempt()
    }

    /// Grows until the request could be met if no other thread took the pages. `seen` is the size of the heap when it
    /// could not be met. Returns `Some` also if another thread has grown the heap since.
    #[cold]
    pub(super) fn grow_for(&self, request: &Request, seen: usize) -> Option<()> {
        // A full heap refuses without the lock, which another thread may hold for as long as its source takes.
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
        let first = self.first.next_multiple_of(self.granule_pages()).min(G::CHUNK_PAGES);
        let step = if ahead <= first { first } else { G::CHUNK_PAGES };
        let ahead = ahead.checked_next_multiple_of(step).unwrap_or(end);
        let limit = self.limit().0;
        if end > limit {
            return None;
        }
        self.grow_ahead(ahead.min(limit), end)
    }

    /// Grows to at least `end` pages, for a run that begins at `start`: not if a page of that is in use.
    #[cold]
    pub(super) fn grow_to(&self, start: PageIndex, end: usize) -> Option<()> {
        // Read once: it may change meanwhile. Before the lock is taken, as in `grow_for`.
        let limit = self.limit().0;
        if end > limit {
            return None;
        }
        let _guard = self.lock.lock();
        if self.set.grown() >= end {
            return Some(());
        }
        if !self.is_free_from(start) {
            return None;
        }
        let whole = end.checked_next_multiple_of(G::CHUNK_PAGES).unwrap_or(end);
        self.grow_ahead(whole.min(limit), end)
    }

    /// Takes pages of those that have grown, whose size the caller has read. If they are not all free, but pages were
    /// just being added, once more when those are there. Waits for that alone, 40 ns for each chunk added: not for the
    /// lock, whose holder may be waiting for the source, or have been interrupted by the caller when it found that
    /// another had grown.
    pub(super) fn hold_grown(&self, start: usize, pages: usize) -> bool {
        // Before the attempt: what is added by now was free then. Acquire: the caller has read how far the heap has
        // grown, so it sees the 1 of who has said that, or a 0 after which all those pages are free; partner:
        // `add_pages`.
        let is_added = self.adding.load(Ordering::Acquire) == 0;
        self.set.hold(start, pages).is_ok() || !is_added && self.hold_once_added(start, pages)
    }

    #[cold]
    fn hold_once_added(&self, start: usize, pages: usize) -> bool {
        let mut round = 0;
        // Acquire: as in `hold_grown`.
        while self.adding.load(Ordering::Acquire) != 0 {
            round = rest(round);
        }
        self.set.hold(start, pages).is_ok()
    }

    /// Under the lock: grows to `ahead` or, if the source refuses that, to `end`.
    fn grow_ahead(&self, ahead: usize, end: usize) -> Option<()> {
        let grown = self.grow_locked(ahead).or_else(|| self.grow_locked(end));
        // Relaxed: an independent number.
        self.stuck.store(grown.is_none().into(), Ordering::Relaxed);
        grown
    }

    /// Whether growth cannot provide `pages` more pages, as far as is known: the limit is too near, or the source
    /// refused the last growth.
    pub(crate) fn is_stuck(&self, pages: PageCount) -> bool {
        // Relaxed: an independent number.
        self.set.grown().saturating_add(pages.0) > self.limit().0 || self.stuck.load(Ordering::Relaxed) != 0
    }

    /// Whether every page from `page` to the end of the grown part is free at this moment. Under the lock.
    fn is_free_from(&self, page: PageIndex) -> bool {
        let behind = self.set.grown().saturating_sub(page.0);
        self.set.free_at_end(behind) >= behind
    }

    /// Under the lock. `end` is above `grown` and at most the limit.
    fn grow_locked(&self, end: usize) -> Option<()> {
        let calls = self.metadata.cover::<G, S>(&self.source, end);
        let (Ok(asked) | Err(asked)) = calls;
        self.counters.prepare.add(asked as u64);
        calls.ok()?;
        // Relaxed: under the lock.
        let before = self.prepared.load(Ordering::Relaxed);
        let contents = self.prepare_pages(end)?;
        // The set says how far it has grown before all of these pages are free: who finds nothing until then waits.
        let _pass = self.pass();
        if self.set.grown() < before {
            // The rest of a granule: never handed out, but we did not record what it reads as.
            self.add_pages(before.min(end), self.to_mark(Contents::Unknown, false));
        }
        self.add_pages(end, self.to_mark(contents, false));
        self.counters.growths.add(1);
        Some(())
    }

    /// Has the source prepare pages up to `end`, in whole granules, if they are not. Returns what the new ones read as.
    fn prepare_pages(&self, end: usize) -> Option<Contents> {
        // Relaxed: under the lock.
        let prepared = self.prepared.load(Ordering::Relaxed);
        if end <= prepared {
            return Some(Contents::Unknown);
        }
        let granule = self.granule_pages();
        let target = end.next_multiple_of(granule).min(self.capacity);
        let start = offset(self.base, prepared << G::PAGE_SHIFT);
        let bytes = (target - prepared) << G::PAGE_SHIFT;
        self.counters.prepare.add(1);
        // SAFETY: after the prepared part, inside the reservation (target ≤ capacity), on granule boundaries: the
        // capacity is a multiple of granule and page, and so is everything prepared before.
        let contents = unsafe { self.source.prepare(Purpose::Pages, start, bytes) }.ok()?;
        self.prepared.store(target, Ordering::Relaxed);
        Some(contents)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use crate::heap::Config;
    use crate::source::Simulated;
    use std::sync::Barrier;

    /// What a thread has in the shard that it is using cannot be taken before it has left.
    #[test]
    fn who_is_refused_waits_for_who_is_using_a_shard() {
        let config = Config::new(1 << 19).caches(0).shards(2);
        let heap = PageHeap::new(Simulated::new(4096), config).unwrap();
        let first = heap.allocate_on(1, PageCount(1)).unwrap();
        assert_eq!(heap.stats().cached, PageCount(63));
        // Not for long: so on a busy machine it may have waited in vain.
        let found = (0..100).find_map(|_| {
            let (is_inside, before) = (Barrier::new(2), heap.flush_calls());
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let using = heap.slots.get(1).try_enter().unwrap();
                    is_inside.wait();
                    while heap.flush_calls() == before {
                        std::thread::yield_now();
                    }
                    drop(using);
                });
                is_inside.wait();
                heap.allocate(PageCount(63))
            })
        });
        assert_eq!(found.map(|run| run.start().0), Some(first.start().0 + 1));
        // Nor for ever.
        let _using = heap.slots.get(0).try_enter().unwrap();
        assert!(heap.allocate(PageCount(1)).is_none());
    }

    /// Nor what comes there after shards were flushed, and before the attempt.
    #[test]
    fn pages_that_come_into_a_shard_meanwhile_are_found() {
        let config = Config::new(1 << 19).caches(0).shards(2);
        let heap = PageHeap::new(Simulated::new(4096), config).unwrap();
        let all = heap.allocate(PageCount(64)).unwrap();
        // SAFETY: freed once.
        unsafe { heap.free(all) };
        let has_come = core::cell::Cell::new(false);
        let found = heap.at_last(&mut 0, || {
            if !has_come.replace(true) {
                // Another thread, just now.
                heap.allocate_on(1, PageCount(1)).unwrap();
            }
            heap.find_or_grow(&Request::of(63), u32::MAX)
        });
        assert!(found.is_some());
    }

    #[test]
    fn pages_that_are_being_added_are_waited_for() {
        let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 19)).unwrap();
        let all = heap.allocate(heap.limit()).unwrap();
        let (first, _others) = all.split_at(PageCount(1)).unwrap();
        // Relaxed: before the thread begins. Release, below: as in `add_pages`.
        heap.adding.store(1, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| heap.allocate_at(first).is_some());
            std::thread::sleep(core::time::Duration::from_millis(20));
            assert!(!asks.is_finished());
            // SAFETY: allocated above; nothing uses it.
            unsafe { heap.free(first) };
            heap.adding.store(0, Ordering::Release);
            assert!(asks.join().unwrap());
        });
    }

    /// As what was interrupted may hold it.
    #[test]
    fn a_heap_that_has_grown_to_its_limit_needs_no_lock() {
        let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 19)).unwrap();
        let all = heap.allocate(heap.limit()).unwrap();
        let (first, _others) = all.split_at(PageCount(1)).unwrap();
        let _held = heap.lock.lock();
        // In a thread of its own: where it waits, it waits for ever.
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| {
                let longer = [(all, 65), (first, 2)].map(|(run, pages)| heap.grow_in_place(run, PageCount(pages)));
                let refused = longer == [None; 2] && heap.allocate_at(first).is_none();
                refused && heap.allocate(PageCount(1)).is_none()
            });
            assert!(asks.join().unwrap());
        });
    }
}
