//! Where to begin a search: for each of sixteen run lengths, a page below which no such run ends.
//!
//! ```text
//!   length   1 2 3 4 5 6 7 8 12 16 24 32 48 64 128 256     a search for n begins at the hint of the longest length ≤ n
//!
//!   invariant of the hint h for length t:  no t free pages in a row lie wholly below page h
//!   so a search for n ≥ t pages may begin at page h − (t − 1)
//!
//!   bit      63 62                     27 26               0
//!            ┌─┬────────────────────────┬───────────────────┐
//!            │W│          page          │      version      │      W: watched. A release that has nothing to do with a
//!            └─┴────────────────────────┴───────────────────┘      hint sees that by one comparison
//! ```
//!
//! Go keeps one such address, for single pages, and descends from the root for every longer request. With a hint for
//! each length, a request begins where the last one of its kind ended.
//!
//! **Lowering.** Freeing page p creates no run that ends before p + 1. So the release lowers to p every hint above p,
//! and of those only the ones whose length the run around p can have reached.
//!
//! **Raising** works like load-linked/store-conditional. A search for exactly the hint's length *watches* the hint,
//! remembers the word, searches, and raises the hint to the end of what it found if the word is still the one it
//! remembers. A release that is not below the hint has nothing to lower; but if the hint is watched, the release
//! increments the version and clears the watch. A search in progress may have missed that release, so it will not
//! raise; the next search watches again. A raise leaves the hint watched, so a search that follows a search writes
//! nothing before it looks, and a release that follows a release only reads.
//!
//! Why nothing is missed. A release sets its bits, updates the tree if it must, passes a fence, and reads the hint. A
//! search reads the hint as watched, passes a fence, reads a calm of the [turnstile](crate::sync::Turnstile), then tree
//! and bits, then the same calm again, and does its exchange. There are two cases:
//!
//! - The release reads the hint in the state the search saw, or in a later one. In the first case it changes the word,
//!   and the exchange fails; in the second it reads the raised hint, and lowers it.
//! - The release reads an older state. Then its fence is the earlier one, and the search sees its pages in bits and
//!   tree. The release may instead have found its run already promised by the leaf, by a thread that was still carrying
//!   that promise up. That thread was in the turnstile: either the calm proves that it has left, or there is no calm.
//!
//! So no hint is too high unless some thread is between setting its bits and reading the hints. The search's own passes
//! through the turnstile are known to it and do not count. A failed exchange loses nothing but a raise: a hint that is
//! too low costs time. A hint that is too high would hide a page until the next free below it; the models and
//! [`check`](crate::PageHeap::check) look for that.
//!
//! **The version wraps** after 2²⁷ changes. To fool a search, a multiple of that many changes must fall between its
//! two reads of the word, and leave the page where it was. Each change is a release that finds the hint watched and
//! leaves it unwatched, so that another search must watch it before the next such change; or one that lowers its
//! page, which a raise must undo in the end. A release takes 20 ns at least: 2.7 s in all. So the search would have
//! to be stopped for that long between two reads that are 100 ns apart, and resume at exactly one count in 134
//! million. The consequence: a run released meanwhile lies below the hint, and searches that begin at this hint (for
//! its length or more, up to the next hint's) take a higher run. That lasts at most until a run of this length is
//! freed below the hidden one. It does not affect a request for which nothing is found above: the heap is searched
//! from page 0 before it grows and before it refuses. No page is lost or handed out twice, and no "no" is wrong.

#![forbid(unsafe_code)]

use crate::geometry::{HINT_BANDS, HINT_PAGES};
use crate::sync::{AtomicU64, Ordering};

/// The hints of a heap.
#[derive(Debug)]
pub struct Hints {
    marks: [AtomicU64; HINT_BANDS],
}

/// The index of a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band(usize);

/// A hint as a thread read it: its page, how often releases have changed it, and whether searches rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u64);

const WATCHED: u64 = 1 << 63;
const PAGE_SHIFT: u32 = 27;
const VERSIONS: u64 = (1 << PAGE_SHIFT) - 1;
/// The highest page that a hint can hold: 256 TiB of pages of 4 KiB. Hints are not raised beyond it.
const MAX_PAGE: u64 = (1 << (u64::BITS - 1 - PAGE_SHIFT)) - 1;

impl Mark {
    /// The page: no run of the band's length lies wholly below it.
    #[inline(always)]
    #[must_use]
    pub const fn page(self) -> usize {
        ((self.0 & !WATCHED) >> PAGE_SHIFT) as usize
    }

    #[inline(always)]
    const fn is_watched(self) -> bool {
        self.0 & WATCHED != 0
    }

    /// The mark after a raise to `page`: still watched, for the next search.
    #[inline(always)]
    const fn raised_to(self, page: usize) -> Self {
        Self(WATCHED | (page as u64) << PAGE_SHIFT | self.0 & VERSIONS)
    }

    /// The highest mark that a release of pages from `page` on may leave unchanged.
    #[inline(always)]
    fn highest(page: usize) -> Self {
        let page = (page as u64).min(MAX_PAGE);
        Self(page << PAGE_SHIFT | VERSIONS)
    }

    /// The mark after a release: at `page` or lower, and changed, so that searches which watched it notice.
    #[inline(always)]
    fn disturbed(self, page: usize) -> Self {
        // The version wraps within its bits. A search that relied on the old mark no longer finds it.
        let version = self.0.wrapping_add(1) & VERSIONS;
        Self((self.page().min(page) as u64) << PAGE_SHIFT | version)
    }
}

/// The bands of the counts that are requested often.
const OF_FEW: [u8; 65] = {
    let (mut table, mut count) = ([0; 65], 1);
    while count < table.len() {
        table[count] = band_of(count) as u8;
        count += 1;
    }
    table
};

/// The last band whose length is at most `count`.
const fn band_of(count: usize) -> usize {
    let mut band = HINT_BANDS - 1;
    while band > 0 && HINT_PAGES[band] > count {
        band -= 1;
    }
    band
}

impl Band {
    /// The band whose hint a search for `count` pages begins at.
    #[inline(always)]
    #[must_use]
    pub fn of(count: usize) -> Self {
        Self(match OF_FEW.get(count) {
            Some(&band) => band as usize,
            None => band_of(count),
        })
    }

    /// The run length that the band's hint is about.
    #[inline(always)]
    #[must_use]
    pub fn pages(self) -> usize {
        HINT_PAGES[self.0]
    }

    /// Every band.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..HINT_BANDS).map(Self)
    }
}

impl Default for Hints {
    fn default() -> Self {
        Self::new()
    }
}

impl Hints {
    /// All hints at page 0.
    #[must_use]
    pub fn new() -> Self {
        Self {
            marks: core::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// The current hint of `band`.
    #[inline(always)]
    pub fn load(&self, band: Band) -> Mark {
        // Acquire: pairs with the release by the thread that changed it; what that thread saw, and did not see, holds
        // for us too.
        Mark(self.marks[band.0].load(Ordering::Acquire))
    }

    /// Watches the hint of `band` so that a search may rely on it: from now on every release leaves a trace in it.
    ///
    /// `mark` is the hint as it was read. The caller puts a fence between this and the search:
    /// [`fence_after_load`](crate::sync::fence_after_load), since nothing is written if the hint is watched already.
    #[inline(always)]
    pub fn watch(&self, band: Band, mark: Mark) -> Mark {
        if mark.is_watched() {
            return mark;
        }
        // AcqRel: the changes of the hint form one chain, each seeing the last.
        Mark(self.marks[band.0].fetch_or(WATCHED, Ordering::AcqRel) | WATCHED)
    }

    /// After pages from `page` on were freed, into runs of at most `longest` pages: lowers the hints that no longer
    /// hold, and marks the others as changed for the searches that rely on them.
    ///
    /// The caller puts a fence between the freeing and this.
    #[inline(always)]
    pub fn lower(&self, page: usize, longest: usize) {
        let highest = Mark::highest(page);
        for (hint, &length) in self.marks.iter().zip(&HINT_PAGES) {
            if length > longest {
                return;
            }
            // Relaxed: the caller's fence orders the load after the freeing; partner: the fence after `watch`.
            let seen = Mark(hint.load(Ordering::Relaxed));
            if seen.0 > highest.0 {
                Self::disturb(hint, seen, page);
            }
        }
    }

    #[inline(never)]
    fn disturb(hint: &AtomicU64, seen: Mark, page: usize) {
        let mut seen = seen;
        while seen.0 > Mark::highest(page).0 {
            // AcqRel, as in `watch`; Relaxed: a guess, which the next exchange checks.
            match hint.compare_exchange_weak(seen.0, seen.disturbed(page).0, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => seen = Mark(now),
            }
        }
    }

    /// Raises the hint of `band` to `page` if it still is `seen`, which was watched: no release has come in between.
    /// Returns whether another search has raised it instead.
    #[inline(always)]
    pub fn raise(&self, band: Band, seen: Mark, page: usize) -> bool {
        debug_assert!(seen.is_watched(), "nobody would have told");
        if page <= seen.page() || page as u64 > MAX_PAGE {
            return false;
        }
        // AcqRel, as in `watch`. Relaxed: on failure there is nothing to do.
        let answer =
            self.marks[band.0].compare_exchange(seen.0, seen.raised_to(page).0, Ordering::AcqRel, Ordering::Relaxed);
        // A release that has come in between leaves the page where it was, or lower.
        answer.is_err_and(|now| Mark(now).page() > seen.page())
    }
}
