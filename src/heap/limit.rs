//! The soft limit: memory behind pages is kept below it by those who would go beyond.
//!
//! ```text
//!   backed ▲          ┌┄┄ hard limit: pages are refused
//!          │      ╱╲ ╱
//!          │┄┄┄┄┄╱┄┄╳┄┄┄┄ soft limit: who takes a page without memory behind it releases others then
//!          │┄┄┄┄╱┄┄┄┄┄┄┄┄ 95 % of it: what the scavenger holds the heap to, in its own time
//!          └────────────▶
//! ```
//!
//! Memory comes behind pages in one way only: scavenged ones are taken. So that is where it is counted (one addition,
//! beside a page fault that costs a hundred times as much), and where a thread that goes over the limit **assists**: it
//! releases as many free pages as it has taken, or 2 MiB if that is more, looking at 64 chunks at the most and those it
//! could have taken: some 100 µs at the worst, or a part of what its own page faults will cost. What it does not find
//! is noted, for the layer above has stores that it can empty ([`shortfall`](PageHeap::shortfall)); and for each 64th
//! of the limit that there is too much it empties what threads keep ([`wants_round`](PageHeap::wants_round)). If there
//! was nothing to release, which is to say that all is live, nobody tries again until a 64th of the limit more is
//! backed, or an eighth of what it is over, if that is more. A soft limit refuses nothing.
//!
//! Worked: a limit of 1 GiB, 1 GiB backed, 300 MiB of it free in short runs, and a request for 1 MiB in one piece. 128
//! pages are taken that have no memory behind them; the thread then releases 128 others, from the top.

#![forbid(unsafe_code)]

use crate::geometry::Shape;
use crate::source::Source;
use crate::sync::{AtomicUsize, Ordering};
use crate::units::PageCount;

use super::PageHeap;

/// Pages one call releases at the most, if it does not take more.
const MOST_PAGES: usize = 256;
/// Chunks one call looks at, at the most, if it does not take as many.
const MOST_CHUNKS: usize = 64;

/// Memory behind pages, and how much of it there should be.
#[derive(Debug)]
pub(super) struct Ceiling {
    /// Pages grown and not scavenged. Exact when nobody is at work.
    backed: AtomicUsize,
    /// The most of them.
    peak: AtomicUsize,
    /// Bytes of pages allocated that a layer above has given back the memory of: whole pages of them are not backed.
    holes: AtomicUsize,
    soft: AtomicUsize,
    /// Above this it is worth a try.
    next: AtomicUsize,
    /// Above this threads are to be asked for what they keep to themselves.
    round: AtomicUsize,
    /// The chunk behind the one to look at next.
    end: AtomicUsize,
    /// Pages that should have been released, and were not found.
    short: AtomicUsize,
    /// 1 while somebody holds a lock over allocations: who should assist owes it. (A thread that holds no lock may find
    /// it so too, where there are such; then it settles its debt when its call ends.)
    deferred: AtomicUsize,
    /// Pages taken for which he who took them is yet to assist.
    owed: AtomicUsize,
}

// Relaxed throughout: numbers that nothing is concluded from but to try; SeqCst where it is said.

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
            short: AtomicUsize::new(0),
            deferred: AtomicUsize::new(0),
            owed: AtomicUsize::new(0),
        }
    }

    /// Pages lose their memory, or their mark.
    pub(super) fn change(&self, more: usize, fewer: usize) {
        let before = self.backed.fetch_add(more.wrapping_sub(fewer), Ordering::Relaxed);
        self.peak.fetch_max(before.wrapping_add(more), Ordering::Relaxed);
        if fewer > more {
            // All was live, perhaps, when there was more; that says nothing of now.
            let backed = before.wrapping_add(more).saturating_sub(fewer);
            let soft = self.soft.load(Ordering::Relaxed);
            self.next
                .fetch_min(a_step_above(backed, soft).max(soft), Ordering::Relaxed);
            self.round
                .fetch_min(a_round_above(backed.max(soft), soft), Ordering::Relaxed);
        }
    }

    pub(super) fn backed(&self) -> usize {
        self.backed.load(Ordering::Relaxed)
    }

    /// So many pages have memory, counted anew.
    #[cfg_attr(
        not(feature = "std"),
        allow(dead_code, reason = "for fork, which needs an operating system")
    )]
    pub(super) fn recount(&self, backed: usize) {
        self.backed.store(backed, Ordering::Relaxed);
        self.peak.fetch_max(backed, Ordering::Relaxed);
    }

    /// What the scavenger holds the heap to: 95 % of the limit.
    pub(super) fn goal(&self) -> usize {
        let soft = self.soft.load(Ordering::Relaxed);
        soft - soft / 20
    }
}

/// So many pages, and a 64th of the limit, or, far above it, an eighth of what is too much: that is live, and who
/// releases what lies between it and takes it again gets nowhere.
fn a_step_above(pages: usize, soft: usize) -> usize {
    let over = pages.saturating_sub(soft);
    pages.saturating_add((soft / 64).max(16).max(over / 8))
}

/// The same, and at least 128: a round takes longer than a step.
fn a_round_above(pages: usize, soft: usize) -> usize {
    pages.saturating_add((soft / 64).max(128))
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// The most pages that should have memory behind them. More than the heap can have: no limit.
    #[must_use]
    pub fn soft_limit(&self) -> PageCount {
        PageCount(self.driver.ceiling.soft.load(Ordering::Relaxed))
    }

    /// Changes the most pages that should have memory behind them. Takes effect with the next page that gets some, and
    /// with the next [`tick`](Self::tick).
    pub fn set_soft_limit(&self, limit: PageCount) {
        let ceiling = &self.driver.ceiling;
        // SeqCst, both, and both in `aim`: either who assists meanwhile sees the new limit, or our zero stands behind
        // what he has worked out from the old one. A zero, for then it does not matter who of several changes what
        // first: he that takes pages next works it out.
        ceiling.soft.store(limit.0, Ordering::SeqCst);
        ceiling.next.store(0, Ordering::SeqCst);
        ceiling.round.store(0, Ordering::Relaxed);
    }

    /// It is worth a try above `next`, which was worked out from the limit `soft`.
    fn aim(&self, next: usize, soft: usize) {
        let ceiling = &self.driver.ceiling;
        // SeqCst, both: as in `set_soft_limit`.
        ceiling.next.store(next, Ordering::SeqCst);
        if ceiling.soft.load(Ordering::SeqCst) != soft {
            ceiling.next.store(0, Ordering::Relaxed);
        }
    }

    /// Pages with memory behind them: grown, and neither scavenged nor, under a layer of objects, holes. O(1).
    #[must_use]
    pub fn backed(&self) -> PageCount {
        PageCount(self.driver.ceiling.backed())
    }

    /// The most pages that ever had memory behind them. O(1).
    #[must_use]
    pub fn peak_backed(&self) -> PageCount {
        PageCount(self.driver.ceiling.peak.load(Ordering::Relaxed))
    }

    /// Pages without memory were taken, and get some.
    #[cold]
    #[inline(never)]
    pub(super) fn count_taken(&self, pages: usize) {
        let ceiling = &self.driver.ceiling;
        ceiling.change(pages, 0);
        self.assist_above_aim(pages);
    }

    /// Assists, where it is worth a try, for pages that have been counted.
    pub(crate) fn assist_above_aim(&self, taken: usize) {
        let ceiling = &self.driver.ceiling;
        let backed = ceiling.backed();
        if backed > ceiling.next.load(Ordering::Relaxed) {
            self.assist_or_owe(backed, taken);
        }
    }

    /// So many bytes of pages that are allocated have no memory behind them any more; `fewer`: may have some again.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    #[cold]
    pub(crate) fn count_holes(&self, more: usize, fewer: usize) {
        let holes = &self.driver.ceiling.holes;
        let before = holes.fetch_add(more.wrapping_sub(fewer), Ordering::Relaxed);
        // Each counts the step it has made: the sum of all is the whole pages there are.
        let after = before.wrapping_add(more).wrapping_sub(fewer);
        let (before, after) = (before >> G::PAGE_SHIFT, after >> G::PAGE_SHIFT);
        let (gone, come) = (after.saturating_sub(before), before.saturating_sub(after));
        self.driver.ceiling.change(come, gone);
        self.counters.released.add(gone as u64);
    }

    /// In the child of a fork, behind [`recover`](Self::recover): there are so many.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn recount_holes(&self, bytes: usize) {
        self.driver.ceiling.holes.store(bytes, Ordering::Relaxed);
        self.driver.ceiling.change(0, bytes >> G::PAGE_SHIFT);
    }

    /// Bytes of pages allocated that have no memory behind them. O(1).
    pub(crate) fn hole_bytes(&self) -> usize {
        self.driver.ceiling.holes.load(Ordering::Relaxed)
    }

    /// The same in whole pages, of which each may be several holes.
    pub(super) fn holes(&self) -> PageCount {
        PageCount(self.hole_bytes() >> G::PAGE_SHIFT)
    }

    /// Assists, if nothing is held meanwhile that others wait for.
    fn assist_or_owe(&self, backed: usize, taken: usize) {
        if !self.owes(taken) {
            self.timed(|| self.assist(backed, taken));
        }
    }

    /// For a layer above that allocates under a lock: from when it has it, who should assist owes it; before it lets
    /// go, he does so `at_once` again.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    #[inline]
    pub(crate) fn assist_at_once(&self, at_once: bool) {
        let deferred = usize::from(!at_once);
        self.driver.ceiling.deferred.store(deferred, Ordering::Relaxed);
    }

    /// Where somebody holds a lock over allocations: he owes so many pages. Whether he does.
    pub(crate) fn owes(&self, pages: usize) -> bool {
        let ceiling = &self.driver.ceiling;
        let owes = ceiling.deferred.load(Ordering::Relaxed) != 0;
        if owes {
            ceiling.owed.fetch_add(pages, Ordering::Relaxed);
        }
        owes
    }

    /// What is owed, to be [settled](Self::settle) by the caller.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    #[inline]
    pub(crate) fn take_debt(&self) -> usize {
        let owed = &self.driver.ceiling.owed;
        if owed.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        owed.swap(0, Ordering::Relaxed)
    }

    /// Assists for pages that were taken under a lock, without it.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    #[cold]
    pub(crate) fn settle(&self, debt: usize) {
        let backed = self.driver.ceiling.backed();
        self.timed(|| self.assist(backed, debt));
    }

    /// Pages that should have gone back and were not found free: a layer above may have some in store.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    #[inline]
    pub(crate) fn shortfall(&self) -> usize {
        self.driver.ceiling.short.load(Ordering::Relaxed)
    }

    /// Who asks for what is missing has to find it: nobody else is told of it.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn take_shortfall(&self) -> usize {
        self.driver.ceiling.short.swap(0, Ordering::Relaxed)
    }

    /// Whether there is so much more than there should be, a 64th and more, that a layer above is to empty what threads
    /// keep to themselves: which says so to one caller, and not again before there is as much more.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
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
        // Nothing from a limit that is not exceeded: somebody may just have set another.
        backed > round.max(soft) && step().is_ok()
    }

    /// A layer above has given back what it had: up to so many pages go on to the source, if there are still too many.
    #[allow(dead_code, reason = "for the object layer, which models leave out")]
    pub(crate) fn assist_again(&self, pages: usize) {
        let backed = self.driver.ceiling.backed();
        if backed > self.soft_limit().0 {
            self.assist_or_owe(backed, pages);
        }
    }

    /// Releases some of what is free, because there is more than there should be; `taken` pages have just been.
    fn assist(&self, backed: usize, taken: usize) {
        let ceiling = &self.driver.ceiling;
        let soft = ceiling.soft.load(Ordering::Relaxed);
        if backed <= soft {
            // The limit is new.
            return self.aim(soft, soft);
        }
        let wanted = backed.saturating_sub(soft).clamp(1, MOST_PAGES.max(taken));
        let granule = (self.source.granule() >> G::PAGE_SHIFT).max(1);
        let chunks = self.set.grown().div_ceil(G::CHUNK_PAGES);
        let (mut end, mut released) = (ceiling.end.load(Ordering::Relaxed), 0);
        for _ in 0..chunks.min(MOST_CHUNKS.max(taken >> G::CHUNK_SHIFT)) {
            if granule > G::CHUNK_PAGES || released >= wanted {
                break;
            }
            end = if end == 0 || end > chunks { chunks } else { end } - 1;
            released += self.scavenge_chunk(end, granule, wanted - released, false).pages;
        }
        ceiling.short.store(wanted.saturating_sub(released), Ordering::Relaxed);
        // The last one may have more.
        ceiling
            .end
            .store(end + usize::from(released >= wanted), Ordering::Relaxed);
        let next = if released == 0 {
            a_step_above(backed, soft).max(soft)
        } else {
            soft
        };
        self.aim(next, soft);
    }
}
