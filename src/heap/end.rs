//! The end of a heap: everything goes back to the source; or all but pages in use, if its library is unloaded.

use crate::geometry::Shape;
use crate::metadata::offset;
use crate::source::{Purpose, Source};
use crate::units::PageCount;

use super::PageHeap;

impl<S: Source, G: Shape> Drop for PageHeap<S, G> {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Gives everything back, and returns the source: to a layer above that reserved something before the heap did, and
    /// gives it back after.
    pub(crate) fn into_source(self) -> S {
        let mut heap = core::mem::ManuallyDrop::new(self);
        heap.give_up();
        // SAFETY: read once: the heap, from which it is moved out, is neither dropped nor used again. (What else is in
        // it has no drop; it would leak.)
        unsafe { core::ptr::read(&raw const heap.source) }
    }

    fn give_up(&mut self) {
        // SAFETY: `&mut self`: no run, handle or table is in use any more. Both reservations are what `reserve`
        // returned, and are given up once: a table has no drop, and nothing below touches one.
        unsafe {
            self.source.unreserve(Purpose::Pages, self.pages);
            self.source.unreserve(Purpose::Metadata, self.metadata.reservation());
        }
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Gives back everything but pages in use: the memory of free pages, and the address space after the last page in
    /// use.
    ///
    /// # Safety
    ///
    /// The users of those pages will not need the heap for them again, and do not need the source.
    pub(crate) unsafe fn abandon(self) {
        self.scavenge(PageCount(usize::MAX));
        let heap = core::mem::ManuallyDrop::new(self);
        let grown = heap.set.grown();
        let used = (grown - heap.set.free_at_end(grown)) << G::PAGE_SHIFT;
        let used = used.next_multiple_of(heap.source.granule());
        // SAFETY: `self` is consumed; pages after the last one in use belong to nobody, the tables were the heap's own.
        // Each is given up once: the heap is not dropped.
        unsafe {
            match heap.pages.bytes.checked_sub(used) {
                Some(rest) if used > 0 => heap.source.trim(Purpose::Pages, offset(heap.base, used), rest),
                _ => heap.source.unreserve(Purpose::Pages, heap.pages),
            }
            heap.source.unreserve(Purpose::Metadata, heap.metadata.reservation());
        }
    }
}
