//! The soft limit: threads that would exceed it release memory to stay below it.
//!
//! ```text
//!   backed ▲          ┌┄┄ hard limit: allocations are refused
//!          │      ╱╲ ╱
//!          │┄┄┄┄┄╱┄┄╳┄┄┄┄ soft limit: a thread that takes a page without memory then releases other pages
//!          │┄┄┄┄╱┄┄┄┄┄┄┄┄ 95 % of it: the scavenger's goal, at its own pace
//!          └────────────▶
//! ```
//!
//! Pages gain memory in only one way: when scavenged pages are allocated. So that is where they are counted (one
//! addition, next to a page fault that costs a hundred times as much), and where a thread that exceeds the limit
//! **assists**. It releases as many free pages as it has taken, or 2 MiB if that is more. It examines at most 64
//! chunks, or one for each page that it has taken: some 100 µs at worst (more where the system's pages are longer, and
//! each run that goes gains but one page), or a fraction of what its own page faults will cost. (Chunks in gaps are
//! passed over: 20 ns each, or more where there are many gaps.) The next one goes on behind them.
//!
//! - Pages it should release but cannot find are recorded, because the layer above has stores that it can empty
//!   ([`shortfall`](PageHeap::shortfall)).
//! - For each 64th of the limit in excess, that layer empties what threads keep
//!   ([`wants_round`](PageHeap::wants_round)).
//! - If there was nothing to release in any chunk, all memory is live. Then no thread tries again until another 64th of
//!   the limit is backed, or an eighth of the excess, if that is more.
//!
//! A soft limit never makes an allocation fail.
//!
//! Worked example: a limit of 1 GiB; 1 GiB is backed, of which 300 MiB are free in short runs; a request for 1 MiB in
//! one piece. The thread takes 128 pages that have no memory behind them, then releases 128 others, from the top.

#![forbid(unsafe_code)]

use crate::geometry::Shape;
use crate::source::Source;
use crate::sync::{AtomicUsize, Ordering};
use crate::units::PageCount;

use super::PageHeap;
use super::scan::Released;

/// The most pages one call releases, unless it takes more.
const MOST_PAGES: usize = 256;
/// The most chunks one call examines, unless it takes as many pages.
const MOST_CHUNKS: usize = 64;

/// How much memory is behind pages, and how much there should be.
#[derive(Debug)]
pub(super) struct Ceiling {
    /// Pages grown and not scavenged. Exact when no thread is at work.
    backed: AtomicUsize,
    /// The maximum of `backed`.
    peak: AtomicUsize,
    /// Bytes of allocated pages whose memory a layer above has given back: whole pages of them are not backed.
    holes: AtomicUsize,
    soft: AtomicUsize,
    /// Above this an attempt is worthwhile.
    next: AtomicUsize,
    /// Above this, threads are asked for what they keep.
    round: AtomicUsize,
    /// The chunk after the one to examine next.
    end: AtomicUsize,
    /// Chunks examined since the last one with something to release.
    vain: AtomicUsize,
    /// Pages that should have been released and were not found.
    short: AtomicUsize,
    /// 1 while a thread holds a lock over allocations: a thread that should assist owes it instead. (A thread that
    /// holds no such lock may see 1 too; it settles its debt when its call ends.)
    deferred: AtomicUsize,
    /// Pages taken for which no thread has assisted yet.
    owed: AtomicUsize,
}

// Relaxed throughout: numbers from which nothing is concluded except whether to try; SeqCst where noted.

impl Ceiling {
    pub(super) fn new(soft: usize) -> Self {
        Self {
            backed: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            holes: AtomicUsize::new(0),
            soft: AtomicUsize::new(soft),
            next: AtomicUsize::new(soft),
            round: AtomicUsize::new(a_round_above(soft, soft)),
            end: AtomicUsize::new(0),
            vain: AtomicUsize::new(0),
            short: AtomicUsize::new(0),
            deferred: AtomicUsize::new(0),
            owed: AtomicUsize::new(0),
        }
    }

    /// Counts pages that gain memory (`more`), and pages that lose it (`fewer`).
    pub(super) fn change(&self, more: usize, fewer: usize) {
        let before = self.backed.fetch_add(more.wrapping_sub(fewer), Ordering::Relaxed);
        self.peak.fetch_max(before.wrapping_add(more), Ordering::Relaxed);
        if fewer > more {
            self.lower(before.wrapping_add(more).saturating_sub(fewer));
        }
    }

    /// After there is less memory. Perhaps all was live when there was more; that says nothing about now.
    fn lower(&self, backed: usize) {
        let soft = self.soft.load(Ordering::Relaxed);
        // Release: either a thread whose assistance fails meanwhile sees that there is less, or our minimum comes
        // after what it computed from more; partner: `aim`. (All others change the word by read-modify-writes too.)
        self.next
            .fetch_min(a_step_above(backed, soft).max(soft), Ordering::Release);
        self.round
            .fetch_min(a_round_above(backed.max(soft), soft), Ordering::Relaxed);
    }

    pub(super) fn backed(&self) -> usize {
        self.backed.load(Ordering::Relaxed)
    }

    /// Sets the number of backed pages and the bytes in holes after a recount.
    pub(super) fn recount(&self, backed: usize, holes: usize) {
        self.holes.store(holes, Ordering::Relaxed);
        self.backed.store(backed, Ordering::Relaxed);
        self.peak.fetch_max(backed, Ordering::Relaxed);
        self.lower(backed);
    }

    /// Counts chunks that a thread has `passed` in vain. Returns whether these are all of the heap's `chunks`, as they
    /// were when they were looked at.
    fn is_vain(&self, passed: usize, chunks: usize) -> bool {
        let vain = self.vain.load(Ordering::Relaxed) + passed;
        let is_all = vain >= chunks;
        self.vain.store(if is_all { 0 } else { vain }, Ordering::Relaxed);
        is_all
    }

    /// The scavenger's goal: 95 % of the limit.
    pub(super) fn goal(&self) -> usize {
        let soft = self.soft.load(Ordering::Relaxed);
        soft - soft / 20
    }
}

/// `pages` plus a 64th of the limit or, far above the limit, an eighth of the excess. Memory in that range is live:
/// releasing it only to take it again gains nothing.
fn a_step_above(pages: usize, soft: usize) -> usize {
    let over = pages.saturating_sub(soft);
    pages.saturating_add((soft / 64).max(16).max(over / 8))
}

/// `pages` plus a 64th of the limit, but at least 128 pages: a round takes longer than a step.
fn a_round_above(pages: usize, soft: usize) -> usize {
    pages.saturating_add((soft / 64).max(128))
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// The maximum number of pages that should have memory behind them. More than the heap can have means no limit.
    #[must_use]
    pub fn soft_limit(&self) -> PageCount {
        PageCount(self.driver.ceiling.soft.load(Ordering::Relaxed))
    }

    /// Changes the maximum number of pages that should have memory behind them. Takes effect with the next page that
    /// gains memory, and with the next [`tick`](Self::tick).
    pub fn set_soft_limit(&self, limit: PageCount) {
        let ceiling = &self.driver.ceiling;
        // SeqCst, both, and both in `aim`: either a thread that assists meanwhile sees the new limit, or our zero comes
        // after what it computed from the old one. Zero, because then the order of several concurrent changes does not
        // matter: the next thread that takes pages recomputes the threshold.
        ceiling.soft.store(limit.0, Ordering::SeqCst);
        ceiling.next.swap(0, Ordering::SeqCst);
        ceiling.round.store(0, Ordering::Relaxed);
        ceiling.vain.store(0, Ordering::Relaxed);
    }

    /// Sets the threshold `next`, which was computed from the limit `soft`.
    fn aim(&self, next: usize, soft: usize) {
        let ceiling = &self.driver.ceiling;
        // SeqCst, both: as in `set_soft_limit`. And so also acquire: pairs with the release in `change`.
        ceiling.next.swap(next, Ordering::SeqCst);
        if ceiling.soft.load(Ordering::SeqCst) != soft {
            ceiling.next.swap(0, Ordering::Relaxed);
        }
    }

    /// Pages with memory behind them: grown, and neither scavenged nor gaps nor, under an object layer, holes. O(1).
    #[must_use]
    pub fn backed(&self) -> PageCount {
        PageCount(self.driver.ceiling.backed())
    }

    /// The maximum number of pages that ever had memory behind them. O(1).
    #[must_use]
    pub fn peak_backed(&self) -> PageCount {
        PageCount(self.driver.ceiling.peak.load(Ordering::Relaxed))
    }

    /// Called when pages without memory were taken and are about to gain some.
    #[cold]
    #[inline(never)]
    pub(super) fn count_taken(&self, pages: usize) {
        let ceiling = &self.driver.ceiling;
        ceiling.change(pages, 0);
        self.assist_above_aim(pages);
    }

    /// Assists, if that is worthwhile, for pages that have already been counted.
    pub(crate) fn assist_above_aim(&self, taken: usize) {
        let ceiling = &self.driver.ceiling;
        let backed = ceiling.backed();
        if backed > ceiling.next.load(Ordering::Relaxed) {
            self.assist_or_owe(backed, taken);
        }
    }

    /// Counts bytes of allocated pages that have lost their memory (`more`), or may have it again (`fewer`).
    #[cold]
    pub(crate) fn count_holes(&self, more: usize, fewer: usize) {
        let holes = &self.driver.ceiling.holes;
        let before = holes.fetch_add(more.wrapping_sub(fewer), Ordering::Relaxed);
        // Each call counts its own step: the sum of all steps is the number of whole pages.
        let after = before.wrapping_add(more).wrapping_sub(fewer);
        let (before, after) = (before >> G::PAGE_SHIFT, after >> G::PAGE_SHIFT);
        let (gone, come) = (after.saturating_sub(before), before.saturating_sub(after));
        self.driver.ceiling.change(come, gone);
        self.counters.released.add(gone as u64);
    }

    /// Bytes of allocated pages that have no memory behind them. O(1).
    pub(crate) fn hole_bytes(&self) -> usize {
        self.driver.ceiling.holes.load(Ordering::Relaxed)
    }

    /// The same in whole pages; one page may consist of several holes.
    pub(super) fn holes(&self) -> PageCount {
        PageCount(self.hole_bytes() >> G::PAGE_SHIFT)
    }

    /// Assists, unless a lock is held that other threads wait for.
    fn assist_or_owe(&self, backed: usize, taken: usize) {
        if !self.owes(taken) {
            self.timed(|| self.assist(backed, taken));
        }
    }

    /// For a layer above that allocates under a lock. After it takes the lock, threads that should assist owe it
    /// instead; before it releases the lock, it restores assisting `at_once`.
    #[inline]
    pub(crate) fn assist_at_once(&self, at_once: bool) {
        let deferred = usize::from(!at_once);
        self.driver.ceiling.deferred.store(deferred, Ordering::Relaxed);
    }

    /// If a thread holds a lock over allocations, adds this many pages to the debt. Returns whether it did.
    pub(crate) fn owes(&self, pages: usize) -> bool {
        let ceiling = &self.driver.ceiling;
        let owes = ceiling.deferred.load(Ordering::Relaxed) != 0;
        if owes {
            ceiling.owed.fetch_add(pages, Ordering::Relaxed);
        }
        owes
    }

    /// Takes the debt; the caller [settles](Self::settle) it.
    #[inline]
    pub(crate) fn take_debt(&self) -> usize {
        let owed = &self.driver.ceiling.owed;
        if owed.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        owed.swap(0, Ordering::Relaxed)
    }

    /// Assists for pages that were taken under a lock, after the lock is released.
    #[cold]
    pub(crate) fn settle(&self, debt: usize) {
        let backed = self.driver.ceiling.backed();
        self.timed(|| self.assist(backed, debt));
    }

    /// Pages that should have been given back and were not found free: a layer above may have some in store.
    #[inline]
    pub(crate) fn shortfall(&self) -> usize {
        self.driver.ceiling.short.load(Ordering::Relaxed)
    }

    /// Takes the shortfall. The caller must find those pages: no other thread learns of them.
    pub(crate) fn take_shortfall(&self) -> usize {
        self.driver.ceiling.short.swap(0, Ordering::Relaxed)
    }

    /// Whether the excess, a 64th of the limit or more, is so large that a layer above should empty what threads keep.
    /// Answers yes to one caller, and not again until there is as much more.
    pub(crate) fn wants_round(&self) -> bool {
        let ceiling = &self.driver.ceiling;
        let (backed, soft) = (ceiling.backed(), ceiling.soft.load(Ordering::Relaxed));
        let round = ceiling.round.load(Ordering::Relaxed);
        let step = || {
            let next = a_round_above(backed, soft);
            ceiling
                .round
                .compare_exchange(round, next, Ordering::Relaxed, Ordering::Relaxed)
        };
        // Nothing if the limit is not exceeded: another thread may just have changed it.
        backed > round.max(soft) && step().is_ok()
    }

    /// The most pages that can be in use at present: what has grown stays, even above a limit that has since been
    /// lowered.
    pub(crate) fn most_pages(&self) -> PageCount {
        self.limit().max(self.grown())
    }

    /// Called after a layer above has given back what it had: releases up to `pages` pages to the source if there are
    /// still too many.
    pub(crate) fn assist_again(&self, pages: usize) {
        let backed = self.driver.ceiling.backed();
        if backed > self.soft_limit().0 {
            self.assist_or_owe(backed, pages);
        }
    }

    /// Releases some free pages because there is more memory than there should be; `taken` pages have just been taken.
    fn assist(&self, backed: usize, taken: usize) {
        let ceiling = &self.driver.ceiling;
        let soft = ceiling.soft.load(Ordering::Relaxed);
        if backed <= soft {
            // The limit is new.
            return self.aim(soft, soft);
        }
        let wanted = backed.saturating_sub(soft).clamp(1, MOST_PAGES.max(taken));
        let granule = self.granule_pages();
        let chunks = self.set.grown().div_ceil(G::CHUNK_PAGES);
        let first = ceiling.end.load(Ordering::Relaxed);
        let (mut end, mut found) = (first, Released::default());
        let (mut looks, mut passed) = (MOST_CHUNKS.max(taken), 0);
        // A source that refuses is not asked for every chunk.
        let is_over = |found: Released| found.refused || found.gained >= wanted;
        while granule <= G::CHUNK_PAGES && looks > 0 && passed < chunks && !is_over(found) {
            end = if end == 0 || end > chunks { chunks } else { end } - 1;
            passed += 1;
            if !self.is_gap(end) {
                looks -= 1;
                found.add(self.scavenge_chunk(end, granule, wanted - found.gained, false));
            }
        }
        let released = found.gained;
        ceiling.short.store(wanted.saturating_sub(released), Ordering::Relaxed);
        // The last chunk may have more.
        let next = end + usize::from(released >= wanted);
        let moved = ceiling
            .end
            .compare_exchange(first, next, Ordering::Relaxed, Ordering::Relaxed);
        // Other threads may have looked at the same chunks.
        let passed = if moved.is_ok() { passed } else { 0 };
        let none_left = found.refused || granule > G::CHUNK_PAGES;
        let is_vain = released == 0 && (none_left || ceiling.is_vain(passed, chunks));
        if released > 0 {
            ceiling.vain.store(0, Ordering::Relaxed);
        }
        let next = if is_vain {
            a_step_above(backed, soft).max(soft)
        } else {
            soft
        };
        self.aim(next, soft);
        // What we failed at says nothing about now, if memory has gone back since: then `aim` has made us see it.
        let now = ceiling.backed();
        if is_vain && now < backed {
            let next = a_step_above(now, soft).max(soft);
            ceiling.next.fetch_min(next, Ordering::Relaxed);
        }
    }
}
