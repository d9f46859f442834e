//! The end of a heap: everything goes back to the source; or, when its library is unloaded, all but pages in use.
//!
//! ```text
//!   dropped      pages, tables: given up
//!   unloaded     magazines ─▶ classes ─▶ free pages: released         tables, pages behind the last in use: given up
//! ```
//!
//! The heap lies in its own tables, so these go last; the source, which they go back to, is moved out of them first.

use core::mem::ManuallyDrop;
use core::ptr::NonNull;

use crate::source::{Purpose, Source};

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
        // SAFETY: as promised, it has been a heap until now; it is not used after its tables, in which it lies, have
        // been given up. The source stays: it may be of the library's code.
        unsafe {
            let objects = this.as_ref();
            objects.settle_up();
            // Entries that say nothing of a free page are not worth a call each now.
            objects.heap.driver().forget_beside();
            let tables = objects.tables.reservation();
            let source = ManuallyDrop::new(objects.heap.abandon());
            source.unreserve(Purpose::Metadata, tables);
        }
    }

    /// Ends a heap and all its blocks. O(1), apart from the system's work.
    ///
    /// # Safety
    ///
    /// Nobody uses the heap, its tables, its threads' structures or its blocks now, or ever will.
    pub unsafe fn close(this: NonNull<Self>) {
        // SAFETY: as promised; the heap is not used after its tables, in which it lies, have been given up. That is
        // after what was reserved after them, so that a source which stacks reservations has the room again at once.
        unsafe {
            let objects = this.as_ref();
            // Pages of the heap's go back with all others.
            _ = objects.commons.give_others(objects.heap.source());
            let tables = objects.tables.reservation();
            let source = objects.heap.end();
            source.unreserve(Purpose::Metadata, tables);
        }
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
