//! Calls for blocks above 32 KiB: the hands and lists of this thread's shelf (`object/shelf.rs`); and for those above
//! 1 MiB what was put aside (`object/aside.rs`), for which no structure is entered. And pages for arenas, which are
//! never fast: a warm arena asks for none.
//!
//! ```text
//!   take_large ── a run in the hand of this length? ── on its list? ── slow
//!   give_large ── room in the hand of this length?  ── on its list? ── in a lot? ── slow
//!   take_apart ── an aligned run in the hand of this length? ───────── slow        give_apart: as give_large, no list
//!   take_long ─── a run of this length aside? ──────────────────────── slow
//!   give_long ─── room aside? ──────────────────────────────────────── slow
//! ```
//!
//! As in `calls.rs`, what is not the fast path is reached by a tail call, so that the fast path saves no register.

use core::alloc::Layout;
use core::ptr::NonNull;

use crate::arena::{Backing, Block};
use crate::fatal;
use crate::object::{Hold, Length, Objects, SizeClass, Span, Working};
use crate::source::Source;
use crate::sync::Ordering;

use super::GlobalHeap;

impl<S: Source + 'static> GlobalHeap<S> {
    /// Fast path: from the hand of this thread's shelf, if it has such a run. The other attempts are reached by a tail
    /// call that needs only its arguments, so no register is saved.
    #[inline(never)]
    pub(super) fn take_large<const ZEROED: bool>(&self, layout: Layout) -> Option<NonNull<u8>> {
        if ZEROED {
            return self.alloc_zeroed_slow(layout);
        }
        if layout.align() > SizeClass::MOST_ALIGN {
            return self.take_apart(layout);
        }
        let Some(length) = Length::of_size(layout.size()) else {
            return self.take_long(layout);
        };
        let Some((thread, objects)) = self.enter_with() else {
            return self.alloc_slow(layout);
        };
        // SAFETY: the structure was entered by the address of this heap.
        let Some(memory) = (unsafe { objects.take_from_hand(&thread, length) }) else {
            return self.take_listed(layout, thread, length);
        };
        Some(memory)
    }

    /// Blocks that are too long for a shelf: one that was put aside, if it is exactly as long.
    #[inline(never)]
    fn take_long(&self, layout: Layout) -> Option<NonNull<u8>> {
        if !fatal::is_ending()
            && let Some(objects) = self.opened()
            && let Some(memory) = objects.take_from_aside(layout)
        {
            return Some(memory);
        }
        self.alloc_slow(layout)
    }

    /// The same from a list, if the hand is empty.
    #[inline(never)]
    fn take_listed(&self, layout: Layout, thread: Working<'static>, length: Length) -> Option<NonNull<u8>> {
        // SAFETY: the caller has entered it.
        let memory = unsafe { self.entered().take_from_list(&thread, length) };
        drop(thread);
        memory.or_else(|| self.alloc_slow(layout))
    }

    /// Alignments above those of slots: from the hand of this thread's shelf, if the run in it is aligned.
    #[inline(never)]
    pub(super) fn take_apart(&self, layout: Layout) -> Option<NonNull<u8>> {
        if let Some((thread, objects)) = self.enter_with() {
            let memory = objects.take_aligned_from_hand(&thread, layout);
            drop(thread);
            if memory.is_some() {
                return memory;
            }
        }
        self.alloc_slow(layout)
    }

    /// The same way back.
    ///
    /// # Safety
    ///
    /// As for [`GlobalAlloc::dealloc`](core::alloc::GlobalAlloc::dealloc).
    #[inline(never)]
    pub(super) unsafe fn give_apart(&self, memory: NonNull<u8>, layout: Layout) {
        if let Some((thread, objects)) = self.enter_with() {
            let length = objects.put_aligned_in_hand(&thread, memory, layout);
            drop(thread);
            if let Some(length) = length {
                return self.after_put(objects, length);
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.dealloc_slow(memory, layout.size(), layout.align()) };
    }

    /// Fast path: into the hand of this thread's shelf, if there is room; as [`take_large`](Self::take_large).
    ///
    /// # Safety
    ///
    /// As for [`GlobalAlloc::dealloc`](core::alloc::GlobalAlloc::dealloc), with a layout of this size and of at most
    /// page alignment, which large blocks have anyway.
    #[inline(never)]
    pub(super) unsafe fn give_large(&self, memory: NonNull<u8>, size: usize) {
        // SAFETY: the caller's promise; a structure is entered by the address of this heap.
        unsafe {
            if let Some(length) = Length::of_size(size)
                && let Some((thread, objects)) = self.enter_with()
            {
                match objects.put_in_hand(&thread, memory, length) {
                    Hold::Taken => {
                        drop(thread);
                        self.after_put(self.entered(), length);
                    }
                    Hold::Full(entry) => self.give_listed(memory, size, thread, length, entry),
                    Hold::Refused => self.give_refused(memory, size, thread),
                }
                return;
            }
            self.give_long(memory, size);
        }
    }

    /// Blocks that are too long for a shelf: aside, if there is room. And those for which there is no shelf.
    ///
    /// # Safety
    ///
    /// As for [`give_large`](Self::give_large).
    #[inline(never)]
    unsafe fn give_long(&self, memory: NonNull<u8>, size: usize) {
        // SAFETY: the caller's promise: a layout had this size, and at most page alignment, for which 1 stands.
        unsafe {
            let layout = Layout::from_size_align_unchecked(size, 1);
            if !fatal::is_ending()
                && let Some(objects) = self.opened()
                && objects.put_aside(memory, layout)
            {
                if objects.keeper().is_away() {
                    self.tell_bytes(objects, size);
                }
                return;
            }
            self.dealloc_slow(memory, size, 1);
        }
    }

    /// The same onto a list, if the hand is full.
    ///
    /// # Safety
    ///
    /// As for [`give_large`](Self::give_large); the block has this length and this entry.
    #[inline(never)]
    unsafe fn give_listed(
        &self,
        memory: NonNull<u8>,
        size: usize,
        thread: Working<'static>,
        length: Length,
        entry: &'static Span,
    ) {
        // SAFETY: the caller has entered it, and found the hand full.
        let (objects, taken) = unsafe {
            let objects = self.entered();
            (objects, objects.put_on_list(&thread, memory, length, entry))
        };
        drop(thread);
        if taken {
            self.after_put(objects, length);
            return;
        }
        // SAFETY: the caller's promise; it has entered a structure of this heap.
        unsafe { self.give_in_lot(memory, size, length, entry) };
    }

    /// The same into a lot, from where other threads take it, if this one asks for no such runs.
    ///
    /// # Safety
    ///
    /// As for [`give_listed`](Self::give_listed), and [`entered`](Self::entered).
    #[inline(never)]
    unsafe fn give_in_lot(&self, memory: NonNull<u8>, size: usize, length: Length, entry: &'static Span) {
        // SAFETY: the caller's promise: a block of this length, with this entry, that no list has taken.
        unsafe {
            let objects = self.entered();
            if objects.put_in_lot(memory, length, entry) {
                self.after_put(objects, length);
                return;
            }
            self.dealloc_slow(memory, size, 1);
        }
    }

    /// A block that the table does not list as such: the slow path finds out what it is.
    ///
    /// # Safety
    ///
    /// As for [`give_large`](Self::give_large).
    #[cold]
    #[inline(never)]
    unsafe fn give_refused(&self, memory: NonNull<u8>, size: usize, thread: Working<'static>) {
        drop(thread);
        // SAFETY: the caller's promise.
        unsafe { self.dealloc_slow(memory, size, 1) };
    }

    /// The heap, loaded again: a load instead of a register, of which the fast paths have none left.
    ///
    /// # Safety
    ///
    /// The calling thread has entered a structure of it, even if it has left that since.
    #[inline(always)]
    unsafe fn entered(&self) -> &'static Objects<S> {
        // Relaxed: as in `enter_with`.
        // SAFETY: the caller's promise: so it is the address of a heap, which is never destroyed.
        unsafe { &*self.objects.load(Ordering::Relaxed) }
    }

    /// Called after a block was put on the shelf, with nothing held.
    #[inline(always)]
    fn after_put(&self, objects: &'static Objects<S>, length: Length) {
        if objects.keeper().is_away() {
            self.tell(objects, length);
        }
    }

    #[cold]
    #[inline(never)]
    fn tell(&self, objects: &'static Objects<S>, length: Length) {
        self.tell_bytes(objects, length.pages() << SizeClass::PAGE_SHIFT);
    }

    #[cold]
    #[inline(never)]
    fn tell_bytes(&self, objects: &'static Objects<S>, bytes: usize) {
        objects.tell(bytes);
        self.call_keeper(objects);
    }
}

// SAFETY:
// * a block is a run of the heap of pages, which are memory, of which it takes as many as requested, so aligned. Nobody
//   else has them until they are given back, and they stay in place: an open heap is never destroyed;
// * it counts as zero only where the heap of pages says so;
// * nothing here unwinds, and nothing calls the program's hook for exhausted memory. (The other hooks run on the
//   background thread.)
unsafe impl<S: Source + 'static> Backing for GlobalHeap<S> {
    fn page_bytes(&self) -> usize {
        1 << SizeClass::PAGE_SHIFT
    }

    fn most_bytes(&self) -> usize {
        self.opened().map_or(usize::MAX, Objects::most_lent)
    }

    fn take(&self, bytes: usize, align: usize) -> Option<Block> {
        let objects = self.objects()?;
        let own = self.with_own(objects, |thread| objects.lend_pages(thread, bytes, align));
        let block = own.unwrap_or_else(|| objects.lend_pages_shared(bytes, align));
        self.call_keeper_alone(objects);
        block.or_else(|| objects.refuse())
    }

    unsafe fn give(&self, memory: NonNull<[u8]>) {
        // As in `dealloc_slow`.
        if fatal::is_ending() || fatal::is_shutting_down() {
            return;
        }
        let objects = self.opened_for(memory.cast());
        // SAFETY: the caller's promise.
        self.with_thread(objects, |thread| unsafe { objects.take_back(thread, memory) });
        self.call_keeper(objects);
    }
}
