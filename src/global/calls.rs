//! The calls a program makes: the fast path, and the slow path behind it.
//!
//! ```text
//!   take ── a small size? ── this thread's? ── a slot in the magazine? ──▶ it             21 instructions
//!             │ other            │ no               │ empty
//!             ▼                  └──────────────────┴─▶ slow: `Objects`, with this thread's or the shared structure
//!           class ─▶ the same; or shelf ─▶ slow
//! ```
//!
//! **Inlined.** The fast path of `alloc` is inlined into the program, and on x86-64 Linux that of `dealloc`. A size is
//! rounded up to its alignment first. For a layout known at compile time, such as a `Box`'s, the place of the magazine
//! is a constant instead of six instructions. What compilers make of the code around a free matters more than the
//! free: so that of `dealloc` is a statement in assembler (`inline.rs`). Elsewhere the caller finds the magazine and
//! calls one copy of the rest.
//!
//! **No register is saved** on the fast paths here. If anything limits them, stores do: one per cycle reaches the
//! cache, and saving a register is a store. So everything off them is reached by a tail call with the same arguments,
//! and if a slot is not accepted, the slow path receives its seat, which gives the class, instead of its size.

use core::alloc::{GlobalAlloc, Layout};
use core::ptr::{self, NonNull};

use crate::fatal::{self, Number};
use crate::guard::{self, Place, Plain};
use crate::object::{FlaggedSize, MarkedSize, Moved, Objects, Seat, SizeClass, Spans, Thread, bears_mark};
use crate::source::Source;
use crate::sync::Ordering;

#[cfg(all(target_os = "linux", feature = "std"))]
use super::unload::register as will_be_ended;
use super::{GlobalHeap, exhausted, local};

impl<S: Source + 'static> GlobalHeap<S> {
    /// Fast path: a slot that `pop` takes from this thread's structure; `pop` checks whether that belongs to this heap.
    #[inline(always)]
    fn take_slot(
        &self,
        layout: Layout,
        zeroed: bool,
        pop: impl FnOnce(&Thread, *const Objects<S>) -> Option<NonNull<u8>>,
    ) -> Option<NonNull<u8>> {
        if !local::HAS_STRUCTURES {
            return self.take_slow(layout, zeroed);
        }
        // Relaxed: compared first. A thread that has a structure of the heap knew the heap when it got that structure.
        let objects = self.objects.load(Ordering::Relaxed);
        let Some(slot) = pop(local::current(), objects) else {
            return self.take_slow(layout, zeroed);
        };
        if zeroed {
            // SAFETY: a slot of at least that many bytes.
            unsafe { slot.write_bytes(0, layout.size()) };
        }
        Some(slot)
    }

    /// Fast path: a slot of the class that lies in this thread's magazine.
    #[inline(always)]
    fn take_at_hand(&self, class: SizeClass) -> Option<NonNull<u8>> {
        if !local::HAS_STRUCTURES {
            return None;
        }
        // Relaxed: as in `take_slot`.
        let (thread, objects) = (local::current(), self.objects.load(Ordering::Relaxed));
        if !class.is_flagged() {
            return thread.pop(objects, Seat::from(class));
        }
        // SAFETY: the spans are requested only if the thread's structure has this address.
        unsafe { thread.pop_flagged(objects, || Self::spans_of(objects), Seat::from(class)) }
    }

    /// Fast path: `push` puts a slot into this thread's magazine of the seat if there is room and the structure belongs
    /// to this heap, which it checks. If not, the slow path gets the seat: with the size, a register would have to hold
    /// it, and that register be saved.
    ///
    /// # Safety
    ///
    /// As for [`GlobalAlloc::dealloc`], with a layout of this seat; if `push` refuses, the memory still belongs to the
    /// caller.
    #[inline(always)]
    unsafe fn give_slot(&self, memory: NonNull<u8>, seat: Seat, push: impl FnOnce(&Thread, *const Objects<S>) -> bool) {
        // Relaxed: as in `take_slot`.
        let objects = self.objects.load(Ordering::Relaxed);
        if !push(local::current(), objects) {
            // SAFETY: the caller's promise.
            unsafe { self.give_seated_slow(memory, seat) };
        }
    }

    /// The spans of the heap at `objects`.
    ///
    /// # Safety
    ///
    /// A structure of this address belongs to the calling thread: so it is the address of a heap, which is never
    /// destroyed.
    #[inline(always)]
    unsafe fn spans_of(objects: *const Objects<S>) -> &'static Spans {
        // SAFETY: the caller's promise.
        unsafe { &*objects }.spans()
    }

    /// Layouts that are not a small size: of more than 1 KiB, as they are or rounded up to their alignment.
    #[inline(never)]
    fn take_other<const ZEROED: bool>(&self, layout: Layout) -> Option<NonNull<u8>> {
        if SizeClass::is_exceeded_by(layout.size()) {
            return self.take_large::<ZEROED>(layout);
        }
        if FlaggedSize::is_met(layout.align())
            && let Some(size) = FlaggedSize::of(layout.size())
        {
            let pop = |thread: &Thread, objects| {
                // SAFETY: the spans are requested only if the thread's structure has this address.
                unsafe { thread.pop_flagged(objects, || Self::spans_of(objects), Seat::of(size)) }
            };
            return self.take_slot(layout, ZEROED, pop);
        }
        self.take_aligned::<ZEROED>(layout)
    }

    /// Alignments above 8 bytes, of sizes that are more than 1 KiB when rounded up to that (so 600 bytes aligned to 2
    /// KiB come here too): handled as the rounded size, by the same paths.
    #[inline(never)]
    fn take_aligned<const ZEROED: bool>(&self, layout: Layout) -> Option<NonNull<u8>> {
        if layout.align() > SizeClass::MOST_ALIGN {
            return if ZEROED {
                self.alloc_zeroed_slow(layout)
            } else {
                self.take_apart(layout)
            };
        }
        let rounded = SizeClass::rounded(layout.size(), layout.align());
        let Some(size) = FlaggedSize::of(rounded) else {
            return self.take_slow(layout, ZEROED);
        };
        self.take_slot(layout, ZEROED, |thread, objects| {
            // SAFETY: the spans are requested only if the thread's structure has this address.
            unsafe { thread.pop_flagged(objects, || Self::spans_of(objects), Seat::of(size)) }
        })
    }

    /// A size whose slot carries its own mark. The caller has found the magazine.
    ///
    /// # Safety
    ///
    /// As for [`GlobalAlloc::dealloc`], with a layout that has this seat.
    #[inline(never)]
    #[allow(dead_code, reason = "unused where `inline.rs` has a statement for it")]
    pub(super) unsafe fn give_seated(&self, memory: NonNull<u8>, seat: Seat) {
        // SAFETY: the caller gives the block up; it was allocated with such a layout, so it is a slot of this class.
        let push = |thread: &Thread, objects| unsafe { thread.push(objects, seat, memory) };
        // SAFETY: the caller's promise.
        unsafe { self.give_slot(memory, seat, push) };
    }

    /// # Safety
    ///
    /// As for [`give_seated`](Self::give_seated).
    #[cold]
    #[inline(never)]
    unsafe fn give_seated_slow(&self, memory: NonNull<u8>, seat: Seat) {
        let size = seat.class().map_or(0, SizeClass::bytes);
        // SAFETY: the caller's promise: a slot has the size of a slot.
        unsafe { self.dealloc_slow(memory, size, 1) };
    }

    /// Larger sizes, and an alignment that adds nothing: so it is not passed on.
    ///
    /// # Safety
    ///
    /// As for [`GlobalAlloc::dealloc`], with a layout of this size, of more than 1 KiB, and an alignment that the [size
    /// alone meets](FlaggedSize::is_met).
    #[inline(never)]
    unsafe fn give_sized(&self, memory: NonNull<u8>, size: usize) {
        let Some(small) = FlaggedSize::of(size) else {
            // SAFETY: the caller's promise.
            unsafe { self.give_large(memory, size) };
            return;
        };
        let seat = Seat::of(small);
        // SAFETY: the caller gives the block up; it was allocated with such a layout, so it is a slot of this class, of
        // more than 1 KiB. The spans as above.
        let push = |thread: &Thread, objects| unsafe {
            thread.push_flagged(objects, || Self::spans_of(objects), seat, memory)
        };
        // SAFETY: the caller's promise.
        unsafe { self.give_slot(memory, seat, push) };
    }

    /// As [`take_aligned`](Self::take_aligned).
    ///
    /// # Safety
    ///
    /// As for [`GlobalAlloc::dealloc`].
    #[inline(never)]
    unsafe fn give_aligned(&self, memory: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise; a layout of the rounded size has the same slot, or the same pages.
        unsafe {
            if layout.align() > SizeClass::MOST_ALIGN {
                return self.give_apart(memory, layout);
            }
            self.give_sized(memory, SizeClass::rounded(layout.size(), layout.align()));
        }
    }

    /// Blocks that have no room to grow, or need none. Reached by a tail call, so that the path with room saves no
    /// register.
    ///
    /// # Safety
    ///
    /// As for [`GlobalAlloc::realloc`].
    #[inline(never)]
    unsafe fn resize_without_room(&self, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        let class = |size| SizeClass::of(size, layout.align());
        let (from, Some(to)) = (class(layout.size()), class(size)) else {
            // SAFETY: the caller's promise.
            return unsafe { self.realloc_slow(memory, layout, size) };
        };
        // Fast path: the slot serves the new size as well.
        if from == Some(to) {
            return Some(memory);
        }
        // A block without a class is longer than any slot, so it becomes shorter.
        if let Some(from) = from
            && from < to
            && to.is_flagged()
        {
            // SAFETY: the caller's promise.
            return unsafe { self.grow(memory, layout, size, from) };
        }
        let moved = if size > layout.size() {
            self.take(Layout::from_size_align(size, layout.align()).ok()?, false)?
        } else {
            // If there is none, the block may stay: so do not ask for memory or refuse anything before that is known.
            let Some(moved) = self.take_at_hand(to) else {
                // SAFETY: the caller's promise.
                return unsafe { self.realloc_slow(memory, layout, size) };
            };
            moved
        };
        // SAFETY: two blocks of at least that many bytes, the new one of this class; the caller gives the old one up.
        unsafe {
            ptr::copy_nonoverlapping(memory.as_ptr(), moved.as_ptr(), size.min(layout.size()));
            self.give(memory, layout);
            if bears_mark(moved, to) {
                return Some(self.leave_mark(moved, to));
            }
        }
        Some(moved)
    }

    /// Copies a block to another slot (`object/stray.rs`). Returns where it is now.
    ///
    /// # Safety
    ///
    /// It was just allocated, of this class, and belongs to the caller; if it moves, it no longer does.
    #[cold]
    unsafe fn leave_mark(&self, block: NonNull<u8>, class: SizeClass) -> NonNull<u8> {
        let Some(objects) = self.opened() else { return block };
        // SAFETY: the bytes of a class are a layout's; the caller's promise.
        self.with_thread(objects, |thread| unsafe {
            objects.leave_mark(thread, block, Layout::from_size_align_unchecked(class.bytes(), 1))
        })
    }

    /// Grows a block to more than 1 KiB when it has no room in place (`object/room.rs`).
    ///
    /// # Safety
    ///
    /// As for [`GlobalAlloc::realloc`], between these classes.
    #[inline(never)]
    unsafe fn grow(&self, memory: NonNull<u8>, layout: Layout, size: usize, from: SizeClass) -> Option<NonNull<u8>> {
        let Some(objects) = self.opened() else {
            // SAFETY: the caller's promise, which cannot be true: that is detected there.
            return unsafe { self.realloc_slow(memory, layout, size) };
        };
        let spans = objects.spans();
        let moves = if from.is_flagged() { spans.moves(memory) } else { 0 };
        if Spans::is_restless(moves, layout.size(), size) {
            // SAFETY: the caller's promise.
            return unsafe { self.realloc_slow(memory, layout, size) };
        }
        let moved = self.take_other::<false>(Layout::from_size_align(size, layout.align()).ok()?)?;
        // SAFETY: two blocks of at least that many bytes; the caller gives the old one up.
        unsafe {
            ptr::copy_nonoverlapping(memory.as_ptr(), moved.as_ptr(), layout.size());
            self.give(memory, layout);
        }
        spans.note_move(moved, moves);
        Some(moved)
    }

    #[cold]
    #[inline(never)]
    fn take_slow(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
        if zeroed {
            self.alloc_zeroed_slow(layout)
        } else {
            self.alloc_slow(layout)
        }
    }

    #[inline(never)]
    pub(super) fn alloc_slow(&self, layout: Layout) -> Option<NonNull<u8>> {
        let objects = self.objects()?;
        let attempt = || {
            let own = self.with_own(objects, |thread| objects.allocate(thread, layout));
            own.unwrap_or_else(|| objects.take_shared(layout, false))
        };
        let memory = attempt().or_else(|| self.retry(objects, layout, attempt));
        self.call_keeper_alone(objects);
        memory.or_else(|| objects.refuse())
    }

    #[inline(never)]
    pub(super) fn alloc_zeroed_slow(&self, layout: Layout) -> Option<NonNull<u8>> {
        let objects = self.objects()?;
        let attempt = || match self.with_own(objects, |thread| objects.allocate_to_zero(thread, layout)) {
            Some(fresh) => Some(objects.zero(fresh?, layout)),
            None => objects.take_shared(layout, true),
        };
        let memory = attempt().or_else(|| self.retry(objects, layout, attempt));
        self.call_keeper_alone(objects);
        memory.or_else(|| objects.refuse())
    }

    /// The heap, for a block that is freed. Aborts if there is none yet.
    pub(super) fn opened_for(&self, memory: NonNull<u8>) -> &'static Objects<S> {
        self.opened().unwrap_or_else(|| {
            fatal::abort(
                "a block was freed before any was allocated; its address, that of the heap",
                Number::Address(memory.addr().get()),
                Number::Address(ptr::from_ref(self).addr()),
            )
        })
    }

    /// # Safety
    ///
    /// As for [`GlobalAlloc::dealloc`], with a layout of this size, and of this alignment or an equivalent one.
    #[inline(never)]
    pub(super) unsafe fn dealloc_slow(&self, memory: NonNull<u8>, size: usize, align: usize) {
        // SAFETY: a layout had this size, with an alignment that is not less, or it is a slot's: so rounding it up does
        // not overflow.
        let layout = unsafe { Layout::from_size_align_unchecked(size, align) };
        // When the process ends, a thread that frees must not wait for a lock that is never released.
        if fatal::is_ending() || fatal::is_shutting_down() {
            return;
        }
        let objects = self.opened_for(memory);
        // SAFETY: the caller's promise.
        unsafe {
            let own = self.with_own(objects, |thread| objects.free(thread, memory, layout));
            own.unwrap_or_else(|| objects.free_shared(memory, layout));
        }
        self.call_keeper(objects);
    }

    /// # Safety
    ///
    /// As for [`GlobalAlloc::realloc`].
    #[inline(never)]
    unsafe fn realloc_slow(&self, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        let objects = self.objects()?;
        // SAFETY: the caller's promise; a failed attempt changes nothing.
        let attempt = || unsafe {
            match self.with_own(objects, |thread| objects.resize(thread, memory, layout, size)) {
                Some(placed) => Some(match placed? {
                    Moved::Not => memory,
                    Moved::With(moved) => moved,
                    Moved::To(moved) => {
                        Objects::<S>::copy_resized(memory, layout, moved, size);
                        self.dealloc_slow(memory, layout.size(), layout.align());
                        moved
                    }
                }),
                None => objects.resize_shared(memory, layout, size),
            }
        };
        let moved = attempt().or_else(|| {
            let layout = Layout::from_size_align(size, layout.align()).ok()?;
            self.retry(objects, layout, attempt)
        });
        if moved.is_some_and(|moved| moved != memory || size < layout.size()) {
            // This was a free too: of the block, or of its end.
            self.call_keeper(objects);
        } else {
            self.call_keeper_alone(objects);
        }
        moved.or_else(|| objects.refuse())
    }

    /// Calls the program's hook, if there is one and the layout could ever be met.
    #[cold]
    fn retry<R>(&self, objects: &'static Objects<S>, layout: Layout, attempt: impl Fn() -> Option<R>) -> Option<R> {
        let possible = objects.fits(layout);
        self.exhausted
            .filter(|_| possible)
            .and_then(|hook| exhausted::retry(hook, layout, attempt))
    }

    /// After an allocation: as [`call_keeper`](Self::call_keeper), but only if there is no other thread. The program
    /// may be in a callback of the loader (`dl_iterate_phdr`, used to symbolise backtraces). The loader then holds a
    /// lock that thread creation waits for while another thread loads a library.
    #[inline]
    pub(super) fn call_keeper_alone(&self, objects: &'static Objects<S>) {
        if objects.keeper().is_wanted_by_anybody() && local::is_alone() {
            self.call_keeper(objects);
        }
    }

    /// With nothing of the heap's held: starts the background thread if it is time for one, provided that it will be
    /// ended before its code is unloaded.
    #[inline]
    pub(super) fn call_keeper(&self, objects: &'static Objects<S>) {
        if objects.keeper().is_wanted()
            && let Some(start) = self.background
            && will_be_ended()
        {
            start(objects);
        }
    }
}

/// On other systems its code is never unloaded.
#[cfg(not(all(target_os = "linux", feature = "std")))]
fn will_be_ended() -> bool {
    true
}

#[inline(always)]
fn or_null(memory: Option<NonNull<u8>>) -> *mut u8 {
    memory.map_or(ptr::null_mut(), NonNull::as_ptr)
}

impl<S: Source + 'static> Plain for GlobalHeap<S> {
    #[inline(always)]
    fn take(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
        let Some(size) = MarkedSize::of_layout(layout) else {
            return if zeroed {
                self.take_other::<true>(layout)
            } else {
                self.take_other::<false>(layout)
            };
        };
        self.take_slot(layout, zeroed, |thread, objects| {
            thread.pop(objects, Seat::of_marked(size))
        })
    }

    #[inline(always)]
    unsafe fn give(&self, memory: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(size) = MarkedSize::of_layout(layout) {
                self.give_marked(memory, Seat::of_marked(size));
            } else if FlaggedSize::is_met(layout.align()) {
                self.give_sized(memory, layout.size());
            } else {
                self.give_aligned(memory, layout);
            }
        }
    }

    #[inline(always)]
    unsafe fn resize(&self, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        // Fast path: it has room.
        if layout.size() > MarkedSize::MOST_BYTES && size >= layout.size() {
            let has_room = |objects: &Objects<S>| objects.spans().has_room(memory, size);
            if self.opened().is_some_and(has_room) {
                return Some(memory);
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.resize_without_room(memory, layout, size) }
    }

    fn place(&self, address: usize) -> Option<Place> {
        self.opened()?.place(address)
    }

    fn has_memory(&self, address: usize) -> bool {
        self.opened().is_some_and(|objects| objects.has_memory(address))
    }
}

// SAFETY:
// * memory returned is a slot or a run of pages of at least the layout's size, aligned (proof in `object::size_class`),
//   and belongs to nobody else until it is freed: a slot is in one place at a time (I10, I12), pages are taken by one
//   compare-exchange;
// * nothing here unwinds: what cannot continue aborts;
// * nothing here allocates from a global allocator: the heap takes what it needs for itself from its source or its own
//   spans.
unsafe impl<S: Source + Send + Sync + 'static> GlobalAlloc for GlobalHeap<S> {
    #[inline(always)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        or_null(guard::allocate(self, layout, false))
    }

    #[inline(always)]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise: a block, so not null.
        unsafe { guard::free(self, NonNull::new_unchecked(memory), layout) };
    }

    #[inline(never)]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        or_null(guard::allocate(self, layout, true))
    }

    #[inline(never)]
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_null(NonNull::new(memory).and_then(|memory| unsafe { guard::resize(self, memory, layout, size) }))
    }
}

#[cfg(all(test, not(feature = "std")))]
mod tests {
    extern crate std;

    use std::boxed::Box;

    use crate::source::Region;

    use super::*;

    /// It would be written to, and all processors share it.
    #[test]
    fn without_structures_none_is_looked_at() {
        static HEAP: GlobalHeap<Region> = GlobalHeap::empty();
        HEAP.init(Region::from_static(Box::leak(Box::new_uninit_slice(1 << 20))))
            .unwrap();
        let block = HEAP.take_slot(Layout::new::<u64>(), false, |_, _| unreachable!());
        assert!(block.is_some());
    }
}
