//! The end of a heap: everything goes back to the source; or, when its library is unloaded, all but pages in use.
//!
//! ```text
//!   dropped      pages, tables: given up
//!   unloaded     magazines ─▶ classes ─▶ free pages: released         tables, pages behind the last in use: given up
//! ```
//!
//! The heap lies in its own tables, so it is moved out of them first.

use core::ptr::{self, NonNull};

use crate::heap::PageHeap;
use crate::source::{Purpose, Reservation, Source};

use super::size_class::SizeClass;
use super::{Objects, Thread};

impl<S: Source + 'static> Objects<S> {
    /// Ends a heap whose library is unloaded: gives back all but pages in use.
    ///
    /// # Safety
    ///
    /// `heap` is the address of a heap of this type. Nobody uses it, its tables or its threads' structures now, or
    /// ever will.
    pub unsafe fn abandon(heap: NonNull<()>) {
        let this = heap.cast::<Self>();
        // SAFETY: it has been a heap until now (the caller's promise).
        unsafe { this.as_ref() }.settle_up();
        // SAFETY: as promised; what is moved out is no longer used at its old place, and the tables are given up once.
        unsafe {
            let (heap, tables) = Self::move_out(this);
            heap.source().unreserve(Purpose::Metadata, tables);
            heap.abandon();
        }
    }

    /// Ends a heap and all its blocks. O(1), apart from the system's work.
    ///
    /// # Safety
    ///
    /// Nobody uses the heap, its tables, its threads' structures or its blocks now, or ever will.
    pub unsafe fn close(this: NonNull<Self>) {
        // SAFETY: as promised; what is moved out is no longer used at its old place. The tables are given up once:
        // after what was reserved after them, so that a source which stacks reservations has the room again at once.
        unsafe {
            let objects = this.as_ref();
            // Pages of the heap's go back with all others.
            _ = objects.commons.give_others(objects.heap.source());
            let (heap, tables) = Self::move_out(this);
            heap.into_source().unreserve(Purpose::Metadata, tables);
        }
    }

    /// Moves the heap of pages out of the tables, which the caller has to give up.
    ///
    /// # Safety
    ///
    /// As for [`abandon`](Self::abandon).
    unsafe fn move_out(this: NonNull<Self>) -> (PageHeap<S>, Reservation) {
        // SAFETY: read once; nobody looks at the original again. Nothing else in the object layer needs to be dropped.
        let heap = unsafe { ptr::read(&raw const (*this.as_ptr()).heap) };
        // A release from here on must not discard entries that will no longer exist.
        heap.driver().forget_beside();
        // SAFETY: still in place.
        (heap, unsafe { this.as_ref() }.tables.reservation())
    }

    /// Returns what threads hold to the classes, and what is free there to the heap, the structures included.
    pub(super) fn settle_up(&self) {
        let shared = self.shared_first();
        self.register.for_each(|thread| {
            // Its user may have been stopped in the middle of a call.
            thread.settle();
            self.flush(thread);
        });
        if let Some(class) = SizeClass::of(size_of::<Thread>(), align_of::<Thread>()) {
            // The walk has read its next link before this, and nobody else is left who might use what is freed.
            self.register.for_each(|thread| {
                // SAFETY: a slot of this class that nobody uses any more.
                unsafe { self.give_slot(shared.cache(), class, NonNull::from(thread).cast()) };
            });
        }
        for common in self.other_commons() {
            self.flush(&common.thread);
        }
        // SAFETY: nobody is left who might use them.
        if let Some(run) = unsafe { self.commons.give_others(self.heap.source()) } {
            self.free_run(shared.cache(), run);
        }
        self.flush(&shared);
        self.empty_stores(shared.cache());
        self.flush(&shared);
        self.clear_aside();
    }
}

#[cfg(test)]
mod tests {
    use core::alloc::Layout;

    use super::*;

    /// Of a heap whose library is unloaded nothing stays in use but what the program has.
    #[test]
    fn what_lies_aside_or_on_shelves_is_free_in_the_end() {
        let objects = Objects::for_test(16 << 20, 1, false);
        for size in [100_000, 2 << 20, 3 << 20] {
            let layout = Layout::from_size_align(size, 8).unwrap();
            let block = objects.allocate(&objects.shared(), layout).unwrap();
            // SAFETY: freed with its layout.
            unsafe { objects.free_shared(block, layout) };
        }
        assert!(objects.stats().shelf_pages.0 > 384);
        objects.settle_up();
        assert_eq!(objects.heap.stats().in_use.0, 0, "{}", objects.stats());
    }
}
