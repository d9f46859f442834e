//! A thread's shelf: runs of pages freed lately, for the next large block of the same length.
//!
//! ```text
//!   length    5   6   7 … 16 │ 18  20 … 32 │ 36 … 64 │ 72 … 128      pages; a step of one, two, four, eight
//!   shelf     ∅  412  ∅    ∅ │  ∅  96    ∅ │  ∅    ∅ │  ∅    ∅       a run of that length, by its first page
//! ```
//!
//! **Lengths** are as coarse as size classes are, an eighth of a doubling, so that a freed run fits the next block
//! though that is a little longer. Up to 128 pages (1 MiB); a block that is longer, or aligned to more than a page, has
//! exactly the pages it needs and never lies here. A shelf holds one run of each length and 512 pages (4 MiB) in all.
//!
//! Worked: 100,000 bytes are 13 pages, a length as it is. 200,000 bytes are 25, which makes 26.
//!
//! A shelf is its thread's, as its magazines are: who scavenges takes what lies there while the thread sleeps (see
//! `thread.rs`).
//!
//! Cost: ~3 ns to put and take; ~50 ns without, and 1 µs for each page whose memory the scavenger had taken meanwhile.

#![forbid(unsafe_code)]

use core::alloc::Layout;

use crate::sync::{AtomicU32, Ordering};
use crate::units::{PageCount, PageIndex, PageRun};

use super::size_class::{PAGE_BYTES, PAGE_SHIFT};

/// The longest run on a shelf.
const MOST_PAGES: usize = 128;

/// Pages on a shelf, all runs together.
const SHELF_PAGES: u32 = 512;

/// Lengths up to here are exact: a doubling in steps of one.
const EXACT_PAGES: usize = 16;

/// How many lengths there are: sixteen exact ones, three doublings in eight steps each.
const LENGTHS: usize = EXACT_PAGES + 3 * 8;

/// One of the lengths a run on a shelf can have. I16: its number is less than [`LENGTHS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    index: u32,
    pages: u32,
}

impl Length {
    /// That of the run a large layout gets; `None` if it gets exactly what it needs.
    #[inline]
    pub const fn of(layout: Layout) -> Option<Self> {
        let pages = layout.size().div_ceil(PAGE_BYTES);
        if pages > MOST_PAGES || layout.align() > PAGE_BYTES {
            return None;
        }
        if pages <= EXACT_PAGES {
            let pages = if pages == 0 { 1 } else { pages as u32 };
            return Some(Self {
                index: pages - 1,
                pages,
            });
        }
        // As in `SizeClass::of`: eight steps to a doubling.
        let last = pages - 1;
        let shift = last.ilog2() - 3;
        let step = last >> shift;
        Some(Self {
            index: (EXACT_PAGES + 8 * (shift as usize - 1) + step - 8) as u32,
            pages: ((step + 1) << shift) as u32,
        })
    }
}

impl Length {
    /// In pages.
    #[inline]
    pub const fn pages(self) -> usize {
        self.pages as usize
    }
}

/// The pages of a large block of this layout.
#[inline]
pub const fn pages_for(layout: Layout) -> PageCount {
    match Length::of(layout) {
        Some(length) => PageCount(length.pages()),
        None => PageCount::holding(if layout.size() == 0 { 1 } else { layout.size() }, PAGE_SHIFT),
    }
}

/// The shelf of one thread. All-zero bytes: empty.
#[derive(Debug)]
pub struct Shelf {
    /// Pages of all the runs.
    pages: AtomicU32,
    /// For each length the first page of a run, plus one; 0 for none.
    runs: [AtomicU32; LENGTHS],
}

impl Shelf {
    // Relaxed throughout: one owner, or one who has seized it.

    /// How many pages lie there, read from anywhere: a moment's picture.
    pub fn pages(&self) -> PageCount {
        // Relaxed: a statistic for all but the owner.
        PageCount(self.pages.load(Ordering::Relaxed) as usize)
    }

    /// Takes the run of this length, if there is one: its first page.
    #[inline]
    pub fn take(&self, length: Length) -> Option<PageIndex> {
        let place = self.runs.get(length.index as usize)?;
        // Relaxed, here and below: see above.
        let start = place.load(Ordering::Relaxed).checked_sub(1)?;
        place.store(0, Ordering::Relaxed);
        self.pages
            .store(self.pages.load(Ordering::Relaxed) - length.pages, Ordering::Relaxed);
        Some(PageIndex(start as usize))
    }

    /// Puts a run of this length there, if there is room. Whether it did.
    #[inline]
    #[must_use]
    pub fn put(&self, length: Length, start: PageIndex) -> bool {
        let Some(place) = self.runs.get(length.index as usize) else {
            return false;
        };
        // Relaxed, here and below: see above.
        let pages = self.pages.load(Ordering::Relaxed) + length.pages;
        if place.load(Ordering::Relaxed) != 0 || pages > SHELF_PAGES {
            return false;
        }
        place.store(start.0 as u32 + 1, Ordering::Relaxed);
        self.pages.store(pages, Ordering::Relaxed);
        true
    }

    /// Whether this run lies there.
    #[cold]
    pub fn has(&self, length: Length, start: PageIndex) -> bool {
        let place = self.runs.get(length.index as usize);
        // Relaxed: see above.
        place.is_some_and(|place| place.load(Ordering::Relaxed) as usize == start.0 + 1)
    }

    /// Takes everything out.
    pub fn clear(&self, mut gone: impl FnMut(PageRun)) {
        for (index, place) in self.runs.iter().enumerate() {
            // Relaxed, here and below: see above.
            if let Some(start) = place.load(Ordering::Relaxed).checked_sub(1) {
                place.store(0, Ordering::Relaxed);
                gone(PageRun::known(start as usize, length_at(index)));
            }
        }
        self.pages.store(0, Ordering::Relaxed);
    }
}

/// The pages of the length with this number.
const fn length_at(index: usize) -> usize {
    if index < EXACT_PAGES {
        return index + 1;
    }
    let (shift, step) = (1 + (index - EXACT_PAGES) / 8, 8 + (index - EXACT_PAGES) % 8);
    (step + 1) << shift
}

// The last length is the longest.
const _: () = assert!(length_at(LENGTHS - 1) == MOST_PAGES);

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * PAGE_BYTES, 8).unwrap()
    }

    /// Every length: long enough, by less than an eighth too long, and itself again.
    #[test]
    fn a_length_holds_its_layout_and_is_its_own() {
        for pages in 1..=MOST_PAGES {
            let length = Length::of(layout(pages)).unwrap();
            let most = length.pages as usize;
            assert!(
                pages <= most && (most - pages) * 8 < pages.max(8),
                "{pages}: {length:?}"
            );
            assert_eq!(length_at(length.index as usize), most, "{pages}");
            assert_eq!(Length::of(layout(most)), Some(length), "{pages}");
            let one_less = Layout::from_size_align(pages * PAGE_BYTES - 1, 8).unwrap();
            assert_eq!(Length::of(one_less), Some(length), "{pages}");
        }
        assert_eq!(Length::of(layout(MOST_PAGES + 1)), None);
        assert_eq!(pages_for(layout(MOST_PAGES + 1)), PageCount(MOST_PAGES + 1));
    }

    /// Against a list of what was put.
    #[test]
    fn what_is_put_is_taken_once() {
        let shelf = Shelf {
            pages: AtomicU32::new(0),
            runs: core::array::from_fn(|_| AtomicU32::new(0)),
        };
        let (seven, many) = (Length::of(layout(7)).unwrap(), Length::of(layout(128)).unwrap());
        assert!(shelf.put(seven, PageIndex(0)) && !shelf.put(seven, PageIndex(7)));
        assert!(shelf.put(many, PageIndex(700)));
        assert_eq!(shelf.pages(), PageCount(135));
        assert_eq!((shelf.take(seven), shelf.take(seven)), (Some(PageIndex(0)), None));
        let mut gone = None;
        shelf.clear(|run| assert_eq!(gone.replace(run), None));
        assert_eq!(gone, Some(PageRun::known(700, 128)));
        assert_eq!((shelf.take(many), shelf.pages()), (None, PageCount::ZERO));
    }

    /// No more than its pages, however many lengths there are.
    #[test]
    fn a_shelf_is_short() {
        let shelf = Shelf {
            pages: AtomicU32::new(0),
            runs: core::array::from_fn(|_| AtomicU32::new(0)),
        };
        let put = (1..=MOST_PAGES).filter_map(|pages| {
            let length = Length::of(layout(pages)).unwrap();
            shelf.put(length, PageIndex(1000 * pages)).then_some(length.pages)
        });
        let sum: u32 = put.sum();
        assert!(sum <= SHELF_PAGES && sum > SHELF_PAGES / 2, "{sum}");
        assert_eq!(shelf.pages().0, sum as usize);
    }
}
