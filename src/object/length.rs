//! How many pages a large block gets.
//!
//! ```text
//!   length    5   6   7 … 16 │ 18  20 … 32 │ 36 … 64 │ 72 … 128      pages; a step of one, two, four, eight
//!   number    4   5   6   15 │ 16  17   23 │ 24   31 │ 32    39
//! ```
//!
//! Lengths are as coarse as size classes, an eighth of a doubling, so that a freed run also fits a slightly longer
//! block. They go up to 128 pages (1 MiB); a block that is longer, or aligned to more than a page, gets exactly the
//! pages it needs.
//!
//! Worked: 100,000 bytes are 13 pages, which is a length. 200,000 bytes are 25 pages, which becomes 26.

#![forbid(unsafe_code)]

use core::alloc::Layout;

use crate::units::PageCount;

use super::size_class::{PAGE_BYTES, PAGE_SHIFT};

/// The longest run on a shelf.
pub const MOST_PAGES: usize = 128;

/// Lengths up to here are exact: a doubling in steps of one.
const EXACT_PAGES: usize = 16;

/// How many lengths there are: sixteen exact ones, and three doublings of eight steps each.
pub const LENGTHS: usize = EXACT_PAGES + 3 * 8;

/// A length that a run on a shelf can have, by its number. I16: the number is less than [`LENGTHS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length(u8);

/// The length of a run of `i` pages, for each i.
static TABLED: [Length; MOST_PAGES + 1] = {
    let mut table = [Length(0); MOST_PAGES + 1];
    let mut pages = 1;
    while pages <= MOST_PAGES {
        table[pages] = Length::reckon(pages);
        pages += 1;
    }
    table
};

/// And back; with 256 entries, so that an index of one byte needs no bounds check.
static PAGES: [u8; 1 << u8::BITS] = {
    let mut table = [0; 1 << u8::BITS];
    let mut index = 0;
    while index < LENGTHS {
        table[index] = length_at(index) as u8;
        index += 1;
    }
    table
};

impl Length {
    /// The length of the run that a large layout gets; `None` if it gets exactly what it needs.
    #[inline(always)]
    pub const fn of(layout: Layout) -> Option<Self> {
        if layout.align() > PAGE_BYTES {
            return None;
        }
        Self::of_size(layout.size())
    }

    /// Like [`of`](Self::of), for a layout aligned to at most a page.
    #[inline(always)]
    pub const fn of_size(size: usize) -> Option<Self> {
        if size > MOST_PAGES * PAGE_BYTES {
            return None;
        }
        Some(TABLED[(size + PAGE_BYTES - 1) >> PAGE_SHIFT])
    }

    /// The length of a run of exactly `pages` pages; `None` if there is no such length.
    #[inline]
    pub const fn exactly(pages: usize) -> Option<Self> {
        if pages > MOST_PAGES {
            return None;
        }
        let length = TABLED[pages];
        if length.pages() == pages { Some(length) } else { None }
    }

    /// For `pages` pages, 1 ≤ pages ≤ 128.
    const fn reckon(pages: usize) -> Self {
        if pages <= EXACT_PAGES {
            return Self((pages - 1) as u8);
        }
        // As in `SizeClass::of`: eight steps to a doubling.
        let last = pages - 1;
        let shift = last.ilog2() - 3;
        let step = last >> shift;
        Self((EXACT_PAGES + 8 * (shift as usize - 1) + step - 8) as u8)
    }
}

impl Length {
    /// Its number.
    #[inline(always)]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Its pages.
    #[inline(always)]
    pub const fn pages(self) -> usize {
        PAGES[self.index()] as usize
    }
}

/// How many pages a large block of this layout gets.
#[inline]
pub const fn pages_for(layout: Layout) -> PageCount {
    match Length::of(layout) {
        Some(length) => PageCount(length.pages()),
        None => PageCount::holding(if layout.size() == 0 { 1 } else { layout.size() }, PAGE_SHIFT),
    }
}

/// The pages of the length with this number.
pub const fn length_at(index: usize) -> usize {
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

    /// Every length is long enough, less than an eighth too long, and maps to itself.
    #[test]
    fn a_length_holds_its_layout_and_is_its_own() {
        for pages in 1..=MOST_PAGES {
            let length = Length::of(layout(pages)).unwrap();
            let most = length.pages();
            assert!(
                pages <= most && (most - pages) * 8 < pages.max(8),
                "{pages}: {length:?}"
            );
            assert_eq!(length_at(length.index()), most, "{pages}");
            assert_eq!(Length::of(layout(most)), Some(length), "{pages}");
            let one_less = Layout::from_size_align(pages * PAGE_BYTES - 1, 8).unwrap();
            assert_eq!(Length::of(one_less), Some(length), "{pages}");
        }
        assert_eq!(Length::of(layout(MOST_PAGES + 1)), None);
        assert_eq!(pages_for(layout(MOST_PAGES + 1)), PageCount(MOST_PAGES + 1));
    }
}
