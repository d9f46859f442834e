//! Gaps: parts of the heap's addresses that are not memory, such as device registers between two pieces of RAM.
//!
//! ```text
//!   source   ├──── RAM ────┤░░░ gap ░░░├─────── RAM ───────┤
//!   pages    │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │ 8 │ 9 │
//!                        └── never free ─┘        a page that touches a gap is part of it
//! ```
//!
//! The source says where they are ([`Source::gap`]). When the heap grows across one, its pages enter the set as pages
//! that somebody has allocated, and nobody ever frees them. So no search, cache or scavenger knows of gaps, and a
//! source without any costs nothing. What gaps do cost is tables: as much per page as other pages.
//!
//! I20: a page in a gap is neither free nor in a cache.
//!
//! Worked example: pages of 8 KiB, a gap from byte 30,000 to byte 50,000. It begins in page 3 and ends in page 6, so
//! pages 3 to 6 are lost, 32 KiB for a gap of 20 KB.

#![forbid(unsafe_code)]

use core::ops::Range;
use core::ptr::NonNull;

use crate::bitmap;
use crate::check::Fault;
use crate::geometry::{Shape, WORD_PAGES};
use crate::metadata::offset;
use crate::source::Source;
use crate::sync::Ordering;
use crate::units::{PageCount, PageIndex, PageRun};

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
                // Relaxed: who sees that the heap has grown sees it, by the release in `extend`.
                self.adding.store(1, Ordering::Relaxed);
                self.set.extend(pages, mark);
                // Release: partner: the acquires of `hold_grown`.
                self.adding.store(0, Ordering::Release);
            }
            if !gap.is_empty() {
                self.counters.gaps.add(gap.len() as u64);
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

    /// The gaps between two pages, in order. Looks at all gaps for each gap.
    fn gaps(&self, start: usize, end: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut start = start;
        core::iter::from_fn(move || {
            let gap = (start < end).then(|| self.gap(start, end))?;
            start = gap.end;
            (!gap.is_empty()).then_some(gap)
        })
    }

    /// Of the first `grown` pages, how many are memory. (If the heap is just growing, about as many.)
    #[inline]
    pub(super) fn memory_in(&self, grown: usize) -> usize {
        grown.saturating_sub(self.counters.gaps.get() as usize)
    }

    /// The pages of a word that lie in gaps, below page `end`.
    #[inline]
    pub(super) fn gaps_in_word(&self, word: usize, end: usize) -> u64 {
        let start = word * WORD_PAGES;
        let gaps = self.gaps(start, end.min(start + WORD_PAGES));
        gaps.fold(0, |bits, gap| bits | bitmap::mask(gap.start - start, gap.len()))
    }

    /// I20. Looks at the words that gaps touch.
    pub(super) fn check_gaps(&self) -> Result<(), Fault> {
        let grown = self.set.grown();
        let words = |gap: Range<usize>| gap.start / WORD_PAGES..gap.end.div_ceil(WORD_PAGES);
        self.gaps(0, grown).flat_map(words).try_for_each(|word| {
            let gaps = self.gaps_in_word(word, grown);
            self.set.check_gaps(word, gaps, self.cached_in(word))
        })
    }

    /// The first page of a grown run that lies in a gap.
    #[inline(always)]
    pub(crate) fn gap_page_of(&self, run: PageRun) -> Option<PageIndex> {
        let (start, end) = (run.start().0, run.end().0);
        let gap = self.gap(start, end);
        (!gap.is_empty()).then_some(PageIndex(gap.start))
    }

    /// Whether all pages of a chunk, part of which has been grown, lie in one gap.
    #[inline]
    pub(super) fn is_gap(&self, chunk: usize) -> bool {
        let start = chunk << G::CHUNK_SHIFT;
        let end = (start + G::CHUNK_PAGES).min(self.set.grown());
        self.gap(start, end) == (start..end)
    }

    /// The page that contains an address, if it lies in the grown part of the heap and in no gap.
    pub(crate) fn memory_page_of(&self, address: *const u8) -> Option<PageIndex> {
        let page = self.page_of(address)?;
        self.gap(page.0, page.0 + 1).is_empty().then_some(page)
    }

    /// Bytes from `base` to the last gap in `bytes` bytes, if there is one.
    pub(super) fn bytes_below_gap(source: &S, base: NonNull<u8>, bytes: usize) -> Option<usize> {
        let bytes = bytes.min(usize::MAX - base.addr().get());
        let (mut from, mut last) = (0, None);
        while from < bytes
            && let Some(gap) = source.gap(offset(base, from), bytes - from)
        {
            last = Some(from.saturating_add(gap.start).min(bytes));
            // At least a page, whatever a source says.
            from = from.saturating_add(gap.end.max(G::PAGE_BYTES));
        }
        last
    }
}
