//! Between pages and addresses: page 0 lies at the base, each other behind the one before.
//!
//! ```text
//!   base ─▶│ page 0 │ page 1 │ page 2 │ …        address = base + page · page_bytes
//! ```
//!
//! A heap at 0x7000_0000 with pages of 8 KiB has page 3 at 0x7000_6000, and 0x7000_7fff lies in it. An addition and a
//! shift each way; who asks for a page is told of none where the heap has not grown to.

#![forbid(unsafe_code)]

use core::ptr::NonNull;

use crate::geometry::Shape;
use crate::metadata::offset;
use crate::source::Source;
use crate::units::{PageCount, PageIndex, PageRun};

use super::PageHeap;

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Bytes in a page.
    #[must_use]
    pub const fn page_bytes(&self) -> usize {
        G::PAGE_BYTES
    }

    /// The address of a page below [`capacity`](Self::capacity). May be a bare number, if the source is one of numbers.
    /// Of a page farther away it is no address of the heap's, and may be that of anything else: nothing is checked.
    #[inline(always)]
    #[must_use]
    pub fn address(&self, page: PageIndex) -> NonNull<u8> {
        offset(self.base, page.0 << G::PAGE_SHIFT)
    }

    /// The bytes of a run. May be bare numbers. As for [`address`](Self::address), the run is one of the heap's.
    #[inline(always)]
    #[must_use]
    pub fn pointer(&self, run: PageRun) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.address(run.start()), run.pages().0 << G::PAGE_SHIFT)
    }

    /// The page an address lies in, if it lies in the grown part of the heap.
    #[inline(always)]
    #[must_use]
    pub fn page_of(&self, address: *const u8) -> Option<PageIndex> {
        let page = address.addr().wrapping_sub(self.base.addr().get()) >> G::PAGE_SHIFT;
        (page < self.set.grown()).then_some(PageIndex(page))
    }

    /// The run of pages that `bytes` bytes from `address` take, if it begins on a page and lies in the grown part of
    /// the heap.
    #[inline(always)]
    #[must_use]
    pub fn run_of(&self, address: *const u8, bytes: usize) -> Option<PageRun> {
        let offset = address.addr().wrapping_sub(self.base.addr().get());
        let (start, grown) = (offset >> G::PAGE_SHIFT, self.set.grown());
        let pages = PageCount::holding(bytes, G::PAGE_SHIFT);
        if offset & (G::PAGE_BYTES - 1) != 0 || start >= grown || pages.0 > grown - start {
            return None;
        }
        PageRun::new(PageIndex(start), pages)
    }
}
