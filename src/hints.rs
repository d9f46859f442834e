//! Where to begin a search: for each of some run lengths, a page before which no such run ends.
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
//! Go keeps one such address, for single pages; every longer request there descends from the root each time. With a
//! hint to each length a request begins where the last one of its kind ended.
//!
//! **Lowering.** Freeing a page p makes no run that ends before p + 1, so it lowers to p every hint above p - and of
//! those only the ones whose length the run around p can have reached.
//!
//! **Raising** is what load-linked and store-conditional would do. Who searches for exactly the hint's length *watches*
//! the hint, remembers the word, searches, and raises the hint to the end of what he found if the word is as he
//! remembers it. A release that is not below the hint has nothing to lower, but if the hint is watched it counts the
//! version up and takes the watch away: whoever is searching may have missed it, and will not raise. The next searcher
//! watches again. A raise leaves the hint watched, so a search after a search writes nothing before it looks, and a
//! release after a release only reads.
//!
//! Why nothing is missed. A releaser goes: bits, (tree,) fence, look at the hint. A searcher goes: look at the hint, as
//! it is watched; fence; calm of the [turnstile](crate::sync::Turnstile); tree and bits; the same calm; exchange.
//!
//! - The releaser finds the hint as the searcher does, or later: it changes the word, and the exchange fails; or it
//!   finds the raised hint, and lowers it.
//! - The releaser found the hint as it was before. Then its fence is the earlier one, and the searcher sees its pages
//!   in bits and tree. Or it had found the leaf told by somebody who was on the way up: that one was in the turnstile,
//!   and the calm says that he has left, or there is none.
//!
//! So a hint is too high at no time at which nobody is between his bits and his look at the hints. The searcher's own
//! passes through the turnstile are known to it and do not count. If the exchange fails, nothing is lost but a raise: a
//! hint too low costs time. A hint too high would hide a page until the next free below it; models and
//! [`check`](crate::PageHeap::check) look for that.
//!
//! **The version wraps** after 2²⁷ changes. For a searcher to be fooled a multiple of as many must happen between his
//! two looks, and leave the page where it was. Each is a release that finds the hint watched, and leaves it unwatched;
//! so between two of them another search watches it: two read-modify-writes on one word from two threads, 50 ns at the
//! least, 7 s for all. So he was stopped for that long between two looks that are 100 ns apart, and came back at one
//! count of 134 million. What happens then: a run that was released meanwhile lies below the hint, and searches that
//! begin at it (of its length and more, up to the next hint's) take a higher run. No longer than until a run of this
//! length is freed below the hidden one, and not where nothing is found above: before a heap grows, and before
//! it refuses, it is searched from page 0. No page is lost or given twice, and no "no" is wrong.

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

/// A hint as somebody saw it: its page, how often releases have changed it, and whether searches rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u64);

const WATCHED: u64 = 1 << 63;
const PAGE_SHIFT: u32 = 27;
const VERSIONS: u64 = (1 << PAGE_SHIFT) - 1;
/// The highest page that a hint can name: 256 TiB of pages of 4 KiB. Hints are not raised beyond.
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

    /// As it is after a raise: still watched, for the next search.
    #[inline(always)]
    const fn raised_to(self, page: usize) -> Self {
        Self(WATCHED | (page as u64) << PAGE_SHIFT | self.0 & VERSIONS)
    }

    /// The highest mark that a release of pages from `page` on has nothing to do with.
    #[inline(always)]
    fn highest(page: usize) -> Self {
        let page = (page as u64).min(MAX_PAGE);
        Self(page << PAGE_SHIFT | VERSIONS)
    }

    /// As a release leaves it: at `page` or lower, and whoever watched it will see that.
    #[inline(always)]
    fn disturbed(self, page: usize) -> Self {
        // The version wraps inside its bits; searches that relied on the mark no longer find it.
        let version = self.0.wrapping_add(1) & VERSIONS;
        Self((self.page().min(page) as u64) << PAGE_SHIFT | version)
    }
}

/// The bands of counts that are asked for often.
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

    /// The run length that the band's hint speaks of.
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

    /// The hint of `band` now.
    #[inline(always)]
    pub fn load(&self, band: Band) -> Mark {
        // Acquire: pairs with the release of whoever changed it; what he saw, and did not see, we see the same way.
        Mark(self.marks[band.0].load(Ordering::Acquire))
    }

    /// The hint of `band` as a search may rely on it: from now on no release goes by without leaving a trace in it.
    ///
    /// `mark` is it as it was. The caller has a fence between this and the search:
    /// [`fence_after_load`](crate::sync::fence_after_load), since nothing is written where the hint is watched already.
    #[inline(always)]
    pub fn watch(&self, band: Band, mark: Mark) -> Mark {
        if mark.is_watched() {
            return mark;
        }
        // AcqRel: one chain of changes of the hint, each seeing the last.
        Mark(self.marks[band.0].fetch_or(WATCHED, Ordering::AcqRel) | WATCHED)
    }

    /// After pages from `page` on were freed, into runs of at most `longest`: lowers the hints that no longer hold, and
    /// lets searches know that relied on the others.
    ///
    /// The caller has a fence between the freeing and this.
    #[inline(always)]
    pub fn lower(&self, page: usize, longest: usize) {
        let highest = Mark::highest(page);
        for (hint, &length) in self.marks.iter().zip(&HINT_PAGES) {
            if length > longest {
                return;
            }
            // Relaxed: the caller's fence orders it after the freeing; partner: the fence behind `watch`.
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

    /// Raises the hint of `band` to `page` if it is as `seen`, which was watched: no release has come between.
    #[inline(always)]
    pub fn raise(&self, band: Band, seen: Mark, page: usize) {
        debug_assert!(seen.is_watched(), "nobody would have told");
        if page <= seen.page() || page as u64 > MAX_PAGE {
            return;
        }
        // AcqRel, as in `watch`. Relaxed: if it fails there is nothing to be done.
        let _ =
            self.marks[band.0].compare_exchange(seen.0, seen.raised_to(page).0, Ordering::AcqRel, Ordering::Relaxed);
    }
}
