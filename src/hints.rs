//! Where to begin a search: for each of some run lengths, a page before which no such run ends.
//!
//! ```text
//!   length   1 2 3 4 5 6 7 8 12 16 24 32 48 64 128 256     a search for n begins at the hint of the longest length ≤ n
//!
//!   invariant of the hint h for length t:  no t free pages in a row lie wholly below page h
//!   so a search for n ≥ t pages may begin at page h − (t − 1)
//! ```
//!
//! Go keeps one such address, for single pages; every longer request there descends from the root each time. With a
//! hint to each length a request begins where the last one of its kind ended.
//!
//! Freeing a page p makes no run that ends before p + 1, so it lowers to p every hint above p - and of those only the
//! ones whose length the run around p can have reached. A hint is raised only by a search for exactly its length, to
//! the end of what it found, and then looked over again ([`FreeSet`](crate::free_set::FreeSet) does it): the freer's
//! "bits, fence, hint" and the raiser's "hint, fence, bits" leave no order in which neither sees the other. A hint too
//! low costs time. A hint too high would hide a page until the next free below it; models and
//! [`check`](crate::PageHeap::check) look for that.

#![forbid(unsafe_code)]

use crate::geometry::{HINT_BANDS, HINT_PAGES};
use crate::sync::{AtomicUsize, Ordering};

/// The hints of a heap.
#[derive(Debug)]
pub struct Hints {
    pages: [AtomicUsize; HINT_BANDS],
}

/// The index of a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band(usize);

impl Band {
    /// The band whose hint a search for `count` pages begins at.
    #[inline(always)]
    #[must_use]
    pub fn of(count: usize) -> Self {
        // Most requests are for few pages, and the first bands are those counts.
        let mut band = count.min(HINT_BANDS) - 1;
        while HINT_PAGES[band] > count {
            band -= 1;
        }
        while band + 1 < HINT_BANDS && HINT_PAGES[band + 1] <= count {
            band += 1;
        }
        Self(band)
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
            pages: core::array::from_fn(|_| AtomicUsize::new(0)),
        }
    }

    /// The hint of `band` now.
    #[inline(always)]
    pub fn load(&self, band: Band) -> usize {
        // Acquire: pairs with the release of `try_raise`; what its author saw, and did not see, we see the same way.
        self.pages[band.0].load(Ordering::Acquire)
    }

    /// After pages from `page` on were freed, into runs of at most `longest`: lowers the hints that no longer hold.
    ///
    /// The caller has a fence between the freeing and this.
    #[inline(always)]
    pub fn lower(&self, page: usize, longest: usize) {
        for (hint, &length) in self.pages.iter().zip(&HINT_PAGES) {
            if length > longest {
                return;
            }
            // Relaxed: the caller's fence orders it after the freeing; partner: the fence between `try_raise` and the
            // second look.
            if hint.load(Ordering::Relaxed) > page {
                // AcqRel: one chain of changes of the hint, each seeing the last.
                hint.fetch_min(page, Ordering::AcqRel);
            }
        }
    }

    /// Takes a raise of `band` back, to `page`.
    pub fn lower_band(&self, band: Band, page: usize) {
        // AcqRel, as in `lower`.
        self.pages[band.0].fetch_min(page, Ordering::AcqRel);
    }

    /// Raises the hint of `band` from `seen` to `page` unless it was changed. The caller must look again at what it
    /// skipped.
    pub fn try_raise(&self, band: Band, seen: usize, page: usize) -> bool {
        // AcqRel, as in `lower`.
        self.pages[band.0]
            .compare_exchange(seen, page, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }
}
