//! Gaps: parts of the heap's addresses that are not memory, such as device registers between two pieces of RAM.
//!
//! ```text
//!   source   ├──── RAM ────┤░░░ gap ░░░├─────── RAM ───────┤
//!   pages    │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │ 8 │ 9 │
//!                          └─ never free ─┘                     a page that touches a gap is part of it
//! ```
//!
//! The source says where they are ([`Source::gap`]). When the heap grows across one, its pages enter the set as pages
//! that somebody has allocated, and nobody ever frees them. So no search, cache or scavenger knows of gaps, and a
//! source without any costs nothing. What gaps do cost is tables: as much per page as other pages.
//!
//! Worked example: pages of 8 KiB, a gap from byte 30,000 to byte 50,000. It begins in page 3 and ends in page 6, so
//! pages 3 to 6 are lost, 32 KiB for a gap of 20 KB.

#![forbid(unsafe_code)]

use core::ops::Range;

use crate::geometry::Shape;
use crate::source::Source;
use crate::units::{PageCount, PageIndex};

use super::PageHeap;

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Under the lock, after tables and pages up to `end` have been prepared: adds the pages from the end of the heap
    /// to `end`, free and, if `mark`, scavenged; but not those in gaps.
    pub(super) fn add_pages(&self, end: usize, mark: bool) {
        let mut start = self.set.grown();
        while start < end {
            let gap = self.gap(start, end);
            if gap.start > start {
                let pages = gap.start - start;
                self.driver.ceiling.change(if mark { 0 } else { pages }, 0);
                self.set.extend(pages, mark);
            }
            if !gap.is_empty() {
                self.set.skip(gap.len());
            }
            start = gap.end;
        }
    }

    /// The pages of the first gap between two pages. Empty, at `end`, if there is none.
    fn gap(&self, start: usize, end: usize) -> Range<usize> {
        let address = self.address(PageIndex(start));
        let Some(gap) = self.source.gap(address, (end - start) << G::PAGE_SHIFT) else {
            return end..end;
        };
        // Both are bounded, so that growth advances whatever a source says.
        let first = start.saturating_add(gap.start >> G::PAGE_SHIFT).min(end - 1);
        let behind = start.saturating_add(PageCount::holding(gap.end, G::PAGE_SHIFT).0);
        first..behind.clamp(first + 1, end)
    }

    /// Grown pages that lie in gaps. O(gaps).
    pub(super) fn gap_pages(&self) -> usize {
        let (mut start, end, mut pages) = (0, self.set.grown(), 0);
        while start < end {
            let gap = self.gap(start, end);
            pages += gap.len();
            start = gap.end;
        }
        pages
    }

    /// Whether a page lies in a gap. O(gaps).
    pub(crate) fn is_in_gap(&self, page: PageIndex) -> bool {
        !self.gap(page.0, page.0 + 1).is_empty()
    }
}
