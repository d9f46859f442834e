//! The end of a heap: everything goes back to the source; or all but pages in use, if its library is unloaded.

use crate::geometry::Shape;
use crate::metadata::offset;
use crate::source::{Purpose, Source};
use crate::units::PageCount;

use super::PageHeap;

impl<S: Source, G: Shape> Drop for PageHeap<S, G> {
    fn drop(&mut self) {
        // SAFETY: `&mut self`, which nobody uses after this.
        unsafe { self.give_up() };
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Gives everything back, and returns the source: to a layer above that reserved something before the heap did, and
    /// gives it back after. By reference, so that the heap is not moved over the stack; and a shared one, as all there
    /// are to a heap in its tables come from the one that was handed out when it opened.
    ///
    /// # Safety
    ///
    /// The heap is neither used again nor dropped.
    pub(crate) unsafe fn end(&self) -> S {
        // SAFETY: the heap is not used again, and read once. What else is in it has no drop; it would leak.
        unsafe {
            self.give_up();
            core::ptr::read(&raw const self.source)
        }
    }

    /// # Safety
    ///
    /// No run, handle or table is in use any more, or ever will be; the source may be used once more, or dropped.
    unsafe fn give_up(&self) {
        // SAFETY: as promised. Both reservations are what `reserve` returned, and are given up once: a table has no
        // drop, and nothing below touches one.
        unsafe {
            self.source.unreserve(Purpose::Pages, self.pages);
            self.source.unreserve(Purpose::Metadata, self.metadata.reservation());
        }
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// Gives back everything but pages in use: the memory of free pages, and the address space after the last page in
    /// use. Returns the source, as [`end`](Self::end) does.
    ///
    /// # Safety
    ///
    /// As for [`end`](Self::end). The users of those pages will not need the heap for them again, and do not need the
    /// source.
    pub(crate) unsafe fn abandon(&self) -> S {
        self.scavenge(PageCount(usize::MAX));
        let grown = self.set.grown();
        let used = (grown - self.set.free_at_end(grown)) << G::PAGE_SHIFT;
        let used = used.next_multiple_of(self.source.granule());
        // SAFETY: nobody uses the heap any more: pages after the last one in use belong to nobody, the tables were the
        // heap's own. Each is given up once, and the source is read once: the heap is not dropped.
        unsafe {
            match self.pages.bytes.checked_sub(used) {
                Some(rest) if used > 0 => self.source.trim(Purpose::Pages, offset(self.base, used), rest),
                _ => self.source.unreserve(Purpose::Pages, self.pages),
            }
            self.source.unreserve(Purpose::Metadata, self.metadata.reservation());
            core::ptr::read(&raw const self.source)
        }
    }
}
