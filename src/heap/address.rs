//! Conversion between pages and addresses: page 0 lies at the base, each page directly after the one before.
//!
//! ```text
//!   base ─▶│ page 0 │ page 1 │ page 2 │ …        address = base + page · page_bytes
//! ```
//!
//! In a heap at 0x7000_0000 with pages of 8 KiB, page 3 is at 0x7000_6000, and 0x7000_7fff lies in it. Each direction
//! is an addition and a shift. An address that the heap has not grown to has no page.

#![forbid(unsafe_code)]

use core::ptr::NonNull;

use crate::geometry::Shape;
use crate::metadata::offset;
use crate::source::Source;
use crate::units::{PageCount, PageIndex, PageRun};

use super::{FreeError, PageHeap};

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Bytes in a page.
    #[must_use]
    pub const fn page_bytes(&self) -> usize {
        G::PAGE_BYTES
    }

    /// The address of a page below [`capacity`](Self::capacity). It is a bare number if the source provides only
    /// numbers. Nothing is checked: for a page beyond the capacity, the result is not an address of this heap and may
    /// belong to anything else.
    #[inline(always)]
    #[must_use]
    pub fn address(&self, page: PageIndex) -> NonNull<u8> {
        offset(self.base, page.0 << G::PAGE_SHIFT)
    }

    /// The bytes of a run. They may be bare numbers. As for [`address`](Self::address), the run must belong to this
    /// heap.
    #[inline(always)]
    #[must_use]
    pub fn pointer(&self, run: PageRun) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.address(run.start()), run.pages().0 << G::PAGE_SHIFT)
    }

    /// The page that contains an address, if it lies in the grown part of the heap.
    #[inline(always)]
    #[must_use]
    pub fn page_of(&self, address: *const u8) -> Option<PageIndex> {
        let page = address.addr().wrapping_sub(self.base.addr().get()) >> G::PAGE_SHIFT;
        (page < self.set.grown()).then_some(PageIndex(page))
    }

    /// Whether part of a run has not been grown, or lies in a gap: then it cannot have been allocated.
    #[inline(always)]
    pub(super) fn is_outside(&self, run: PageRun) -> bool {
        run.end().0 > self.set.grown() || self.gap_page_of(run).is_some()
    }

    /// The error for such a run, with its first page outside.
    #[cold]
    pub(super) fn outside(&self, run: PageRun) -> FreeError {
        let grown = self.set.grown();
        // Clamped, because other threads may grow the heap meanwhile.
        let end = grown.clamp(run.start().0, run.end().0 - 1);
        let inside = PageRun::new(
            run.start(),
            PageCount(run.end().0.min(grown).saturating_sub(run.start().0)),
        );
        let page = inside.and_then(|run| self.gap_page_of(run)).map_or(end, |page| page.0);
        FreeError::outside(page, G::PAGE_BYTES, self.base, grown << G::PAGE_SHIFT)
    }

    /// The run of pages that `bytes` bytes from `address` occupy, if it begins on a page, lies in the grown part of the
    /// heap, and touches no gap.
    #[inline(always)]
    #[must_use]
    pub fn run_of(&self, address: *const u8, bytes: usize) -> Option<PageRun> {
        let offset = address.addr().wrapping_sub(self.base.addr().get());
        let (start, grown) = (offset >> G::PAGE_SHIFT, self.set.grown());
        let pages = PageCount::holding(bytes, G::PAGE_SHIFT);
        if offset & (G::PAGE_BYTES - 1) != 0 || start >= grown || pages.0 > grown - start {
            return None;
        }
        PageRun::new(PageIndex(start), pages).filter(|run| self.gap_page_of(*run).is_none())
    }
}
