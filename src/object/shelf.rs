//! A thread's shelf: runs of pages freed lately, for the next large block of the same length.
//!
//! ```text
//!   length    5   6   7 … 16 │ 18  20 … 32 │ 36 … 64 │ 72 … 128      pages; a step of one, two, four, eight
//!   shelf     ∅  412  ∅    ∅ │  ∅  96    ∅ │  ∅    ∅ │  ∅    ∅       the run freed last, by its first page
//!                 └▶ 9000 ─▶ ∅                                       and those before it, linked through the table
//! ```
//!
//! **Lengths** are as coarse as size classes are, an eighth of a doubling, so that a freed run fits the next block
//! though that is a little longer. Up to 128 pages (1 MiB); a block that is longer, or aligned to more than a page, has
//! exactly the pages it needs and never lies here. A shelf holds 4,096 pages (16 MiB) at the most.
//!
//! Worked: 100,000 bytes are 13 pages, a length as it is. 200,000 bytes are 25, which makes 26.
//!
//! A shelf is its thread's, as its magazines are: who scavenges takes what lies there while the thread sleeps (see
//! `thread.rs`). The links stand in the table of spans (`span.rs`), so the pages are not touched.
//!
//! Cost: ~3 ns to put and take; ~50 ns without, and 1 µs for each page whose memory the scavenger had taken meanwhile.

#![forbid(unsafe_code)]

use core::alloc::Layout;

use crate::sync::{AtomicU32, Ordering};
use crate::units::{PageCount, PageIndex, PageRun};

use super::size_class::{PAGE_BYTES, PAGE_SHIFT};
use super::span::Link;
use super::spans::Spans;

/// The longest run on a shelf.
const MOST_PAGES: usize = 128;

/// Pages on a shelf, all runs together: 16 MiB.
const SHELF_PAGES: u32 = 4096;

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
    /// For each length the run that was put last. I17: it and those linked behind it are in the table as on a shelf.
    last: [Link; LENGTHS],
}

impl Shelf {
    // Relaxed throughout: one owner, or one who has seized it.

    /// How many pages lie there, read from anywhere: a moment's picture.
    pub fn pages(&self) -> PageCount {
        // Relaxed: a statistic for all but the owner.
        PageCount(self.pages.load(Ordering::Relaxed) as usize)
    }

    /// Takes the run of this length that was put last, if there is one: its first page.
    #[inline]
    pub fn take(&self, spans: &Spans, length: Length) -> Option<PageIndex> {
        let last = self.last.get(length.index as usize)?;
        let start = last.get()?;
        last.set(spans.entry(start).unshelve());
        // Relaxed: see above.
        let pages = self.pages.load(Ordering::Relaxed);
        self.pages.store(pages.wrapping_sub(length.pages), Ordering::Relaxed);
        Some(start)
    }

    /// Puts a large block of this length there, if there is room: the caller's, and in the table. Whether it did.
    #[inline]
    #[must_use]
    pub fn put(&self, spans: &Spans, length: Length, start: PageIndex) -> bool {
        let Some(last) = self.last.get(length.index as usize) else {
            return false;
        };
        // Relaxed: see above.
        let pages = self.pages.load(Ordering::Relaxed) + length.pages;
        if pages > SHELF_PAGES {
            return false;
        }
        spans.entry(start).shelve(last.get());
        last.set(Some(start));
        // Relaxed: see above.
        self.pages.store(pages, Ordering::Relaxed);
        true
    }

    /// Takes everything out; the runs are in the table no more. Also in the child of a fork, where the owner is not and
    /// may have been anywhere in `put` or `take`: then what he had in hand is lost, perhaps with what lay below it, and
    /// no run comes out that is not on the shelf.
    pub fn clear(&self, spans: &Spans, mut gone: impl FnMut(PageRun)) {
        for (index, last) in self.last.iter().enumerate() {
            while let Some(start) = last.get() {
                let entry = spans.entry(start);
                if !entry.is_shelved() {
                    last.set(None);
                    break;
                }
                last.set(entry.unshelve());
                entry.leave();
                gone(PageRun::known(start.0, length_at(index)));
            }
        }
        // Relaxed: see above.
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

    fn empty() -> Shelf {
        Shelf {
            pages: AtomicU32::new(0),
            last: core::array::from_fn(|_| Link::none()),
        }
    }

    /// Puts a block of so many pages that begins at `start`.
    fn put(shelf: &Shelf, spans: &Spans, start: usize, pages: usize) -> bool {
        let length = Length::of(layout(pages)).unwrap();
        spans.entry(PageIndex(start)).enter_large(length.pages());
        shelf.put(spans, length, PageIndex(start))
    }

    /// Against a list of what was put: the last comes first, and the table says where each is.
    #[test]
    fn what_is_put_is_taken_once() {
        let (shelf, spans) = (empty(), Spans::for_test(1000));
        let (seven, many) = (Length::of(layout(7)).unwrap(), Length::of(layout(128)).unwrap());
        assert!(put(&shelf, &spans, 0, 7) && put(&shelf, &spans, 700, 128) && put(&shelf, &spans, 20, 7));
        assert!(spans.entry(PageIndex(0)).is_shelved() && !spans.entry(PageIndex(0)).is_large(7));
        assert_eq!(shelf.pages(), PageCount(142));
        let taken = [0; 3].map(|_| shelf.take(&spans, seven));
        assert_eq!(taken, [Some(PageIndex(20)), Some(PageIndex(0)), None]);
        assert!(spans.entry(PageIndex(0)).is_large(7));
        let mut gone = None;
        shelf.clear(&spans, |run| assert_eq!(gone.replace(run), None));
        assert_eq!(gone, Some(PageRun::known(700, 128)));
        assert!(!spans.entry(PageIndex(700)).is_shelved() && !spans.entry(PageIndex(700)).is_large(128));
        assert_eq!((shelf.take(&spans, many), shelf.pages()), (None, PageCount::ZERO));
    }

    /// No more than its pages, however many runs there are; and all of them come out.
    #[test]
    fn a_shelf_is_short() {
        let (shelf, spans) = (empty(), Spans::for_test(200 * MOST_PAGES));
        let put = (0..200).filter(|run| put(&shelf, &spans, run * MOST_PAGES, 1 + run % MOST_PAGES));
        let most = put.count();
        assert!(shelf.pages().0 <= SHELF_PAGES as usize && shelf.pages().0 > SHELF_PAGES as usize - MOST_PAGES);
        let (pages, mut out, mut sum) = (shelf.pages().0, 0, 0);
        shelf.clear(&spans, |run| (out, sum) = (out + 1, sum + run.pages().0));
        assert_eq!((out, sum), (most, pages));
    }

    /// A run whose entry does not say that it lies there is in somebody's hand, who is no more: it stays out.
    #[test]
    fn what_is_half_put_does_not_come_out() {
        let (shelf, spans) = (empty(), Spans::for_test(100));
        assert!(put(&shelf, &spans, 10, 3) && put(&shelf, &spans, 20, 3));
        spans.entry(PageIndex(20)).enter_large(3);
        shelf.clear(&spans, |run| panic!("{run:?}"));
        assert_eq!(shelf.take(&spans, Length::of(layout(3)).unwrap()), None);
    }
}
