//! The structures that threads share which have none of their own, and all threads of a [`Heap`](crate::Heap).
//!
//! ```text
//!   which? ─▶ lock ─▶ magazines, classes, pages ─▶ unlock ─▶ assist, zeroes, copies
//! ```
//!
//! There is one, or a few (`commons.rs`), each with a lock, for whose holder its other users may have to wait. (A
//! thread that is alone with one uses magazines and shelf without the lock: `sync/bias.rs`.) So nothing slow is done
//! under a lock: memory is zeroed and copied after it is released, and so is the release that a thread owes the heap's
//! soft limit. No allocation waits for another thread's release.
//!
//! Worked: two threads of one `Heap` ask for a zeroed 64 MiB and for 16 bytes. The first holds the lock for 100 ns,
//! and then zeroes its block for 10 ms; the second waits for those 100 ns.

use core::alloc::Layout;
use core::ptr::NonNull;

use crate::source::Source;
use crate::sync::{Alone, Held, thread};

use super::annex::Common;
use super::length::Length;
use super::mark;
use super::size_class::SizeClass;
use super::{Moved, Objects, Thread};

/// A shared structure, locked.
#[derive(Debug)]
pub struct Shared<'a, S: Source + 'static> {
    objects: &'a Objects<S>,
    thread: &'a Thread,
    /// Present until this is dropped.
    guard: Option<Held<'a>>,
}

impl<S: Source + 'static> core::ops::Deref for Shared<'_, S> {
    type Target = Thread;

    fn deref(&self) -> &Thread {
        self.thread
    }
}

impl<S: Source + 'static> Drop for Shared<'_, S> {
    #[inline]
    fn drop(&mut self) {
        let heap = &self.objects.heap;
        // Where there are several, another may be held: from then on all threads owe, and pay when their call ends.
        if !self.objects.commons.is_spread() {
            heap.assist_at_once(true);
        }
        // Where there is one structure, the debt is ours as long as we hold its lock. Where there are several, it may
        // be that of another for once, or another pays ours.
        let debt = heap.take_debt();
        self.guard = None;
        self.objects.settle_debt(debt);
    }
}

impl<S: Source + 'static> Objects<S> {
    /// A shared structure, for threads that have none of their own. Waits for the thread that uses it.
    pub fn shared(&self) -> Shared<'_, S> {
        let me = thread();
        let common = self.common_to_lock(me);
        self.hold_shared(common, common.lock.lock(me))
    }

    /// The first one.
    pub(super) fn shared_first(&self) -> Shared<'_, S> {
        let first = self.first();
        self.hold_shared(first, first.lock.lock(thread()))
    }

    #[inline]
    fn hold_shared<'a>(&'a self, common: &'a Common, guard: Held<'a>) -> Shared<'a, S> {
        self.heap.assist_at_once(false);
        Shared {
            objects: self,
            thread: &common.thread,
            guard: Some(guard),
        }
    }

    /// As [`shared`](Self::shared), for allocations and frees: a thread that makes all of them soon does without the
    /// lock.
    #[inline]
    fn shared_often(&self) -> Shared<'_, S> {
        let me = thread();
        let common = self.common_to_lock(me);
        self.hold_shared(common, common.lock.lock_often(me))
    }

    /// A block for the layout, `zeroed` or not, for threads without a structure of their own.
    #[inline]
    pub fn take_shared(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
        // A large block may be known to be zero, in part.
        if zeroed && SizeClass::is_exceeded_by(layout.size()) {
            return self.take_with_lock(layout, true);
        }
        let Some(block) = self.take_alone(layout) else {
            return self.take_with_lock(layout, zeroed);
        };
        if zeroed {
            // SAFETY: a block of at least that many bytes.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        Some(block)
    }

    /// Fast path: a block from a shared magazine or a shared shelf, if the calling thread is alone with them and there
    /// is one.
    #[inline]
    fn take_alone(&self, layout: Layout) -> Option<NonNull<u8>> {
        let me = thread();
        let common = self.common(me);
        // First: where other threads have come, this is all there is to do.
        let alone = common.lock.enter(me)?;
        let Some(class) = SizeClass::of(layout.size(), layout.align()) else {
            return self.take_run(&common.thread, alone, layout);
        };
        let slot = common.thread.magazine(class).pop();
        drop(alone);
        Some(self.hand_out(slot?, class))
    }

    /// The same for a large block. Not inlined: so the path of slots saves no registers. If there is none, the request
    /// is counted where the lock is taken, once.
    #[inline(never)]
    fn take_run(&self, thread: &Thread, _alone: Alone<'_>, layout: Layout) -> Option<NonNull<u8>> {
        let length = Length::of(layout)?;
        // SAFETY: the caller is alone with the structure, as good as under its lock.
        let held = unsafe { self.take_from_hand(thread, length) };
        held.or_else(|| {
            let listed = thread.shelf().is_listed(length);
            listed.then(|| self.run_from_shelf(thread, length)).flatten()
        })
    }

    /// What a thread does that is not alone with a structure, or finds nothing there. Not inlined: so the short way
    /// saves no registers.
    #[inline(never)]
    fn take_with_lock(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
        if zeroed {
            let taken = self.allocate_to_zero(&self.shared_often(), layout);
            let again = || self.with_all_for(layout, |thread| self.allocate_to_zero(thread, layout));
            let fresh = taken.or_else(again)?;
            return Some(self.zero(fresh, layout));
        }
        let taken = self.take_from_shared(layout);
        taken.or_else(|| self.with_all_for(layout, |thread| self.allocate(thread, layout)))
    }

    /// [`with_all`](Self::with_all), unless the request can never be met.
    fn with_all_for<R>(&self, layout: Layout, work: impl FnOnce(&Thread) -> Option<R>) -> Option<R> {
        self.fits(layout).then(|| self.with_all(work)).flatten()
    }

    fn take_from_shared(&self, layout: Layout) -> Option<NonNull<u8>> {
        let shared = self.shared_often();
        let length = if SizeClass::of(layout.size(), layout.align()).is_some() {
            None
        } else {
            Length::of(layout)
        };
        length
            .and_then(|length| self.run_from_shelf(&shared, length))
            .or_else(|| self.allocate(&shared, layout))
    }

    /// Fast path: puts a slot back into a shared magazine, if the calling thread is alone
    /// with them, there is room, and the slot does not look free. Returns whether it did.
    ///
    /// # Safety
    ///
    /// The caller owns the slot, of the class and of this heap; if this was done, the magazine does.
    #[inline]
    unsafe fn give_alone(&self, slot: NonNull<u8>, class: SizeClass) -> bool {
        let me = thread();
        let common = self.common(me);
        let Some(_alone) = common.lock.enter(me) else {
            return false;
        };
        let magazine = common.thread.magazine(class);
        // SAFETY: the caller's promise; a word long at least, and aligned for one. Nobody else is here to take
        // the slot out before it is marked as free.
        unsafe {
            if class.is_flagged() {
                let Some(flag) = self.spans.flag_of(slot).filter(|_| magazine.push(slot)) else {
                    return false;
                };
                flag.raise();
            } else {
                if mark::seems_free(slot.as_ptr()) || !magazine.push(slot) {
                    return false;
                }
                mark::write(mark::key(), slot.as_ptr());
            }
        }
        true
    }

    /// The same for a large block, which goes onto the shared shelf.
    #[inline(never)]
    fn give_run_alone(&self, memory: NonNull<u8>, layout: Layout) -> bool {
        let me = thread();
        let common = self.common(me);
        let alone = common.lock.enter(me);
        alone.is_some() && self.shelve(&common.thread, memory, Length::of(layout))
    }

    /// For a thread with a structure of its own, after a call: it may have found a shared one locked, or there are
    /// several, and so owe the soft limit a release that it would otherwise have made at once.
    #[inline]
    pub fn settle_debts(&self) {
        self.settle_debt(self.heap.take_debt());
    }

    /// Pays the caller's debt, with nothing held; and empties what threads share, if that was called for.
    #[inline]
    pub(super) fn settle_debt(&self, debt: usize) {
        if debt > 0 || self.commons.is_called() {
            self.pay(debt);
        }
    }

    #[cold]
    fn pay(&self, debt: usize) {
        let mut freed = 0;
        if self.commons.heeds_call() {
            self.try_commons(None, |shared| freed += self.flush(shared));
        }
        self.heap.settle(debt + freed);
        self.punch_over();
    }

    /// Like [`free`](Self::free), with the shared structure. Aborts if no block of the layout's class begins there.
    ///
    /// # Safety
    ///
    /// The memory was allocated from this heap with this layout, and nothing uses it any more.
    pub unsafe fn free_shared(&self, memory: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise: a block of a class is a slot of it, unless a flag says otherwise.
        unsafe {
            let given = match self.certify(memory, layout) {
                Some(class) => self.give_alone(memory, class),
                None => self.give_run_alone(memory, layout),
            };
            if !given {
                self.free_with_lock(memory, layout);
            }
        }
    }

    /// What a thread does that is not alone with the heap, or finds no room. Not inlined: so the short way saves no
    /// registers.
    ///
    /// # Safety
    ///
    /// As for [`free_shared`](Self::free_shared).
    #[inline(never)]
    unsafe fn free_with_lock(&self, memory: NonNull<u8>, layout: Layout) {
        let shared = self.shared_often();
        if SizeClass::of(layout.size(), layout.align()).is_none() && self.shelve(&shared, memory, Length::of(layout)) {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { self.free(&shared, memory, layout) };
    }

    /// Aborts if no slot of the layout's class begins there; returns the class. A magazine takes whatever it is given
    /// and hands it out again: without the check the blocks of two heaps could be mixed up. The free itself checks, for
    /// every heap, a block that may legally be no slot, or one with room.
    #[inline]
    fn certify(&self, memory: NonNull<u8>, layout: Layout) -> Option<SizeClass> {
        let class = SizeClass::of(layout.size(), layout.align())?;
        if !class.is_flagged() || self.spans.flag_of(memory).is_some() {
            self.spans.locate(class, memory.as_ptr());
        }
        Some(class)
    }

    /// Like [`resize`](Self::resize), with the shared structure. Aborts as [`free_shared`](Self::free_shared) does.
    ///
    /// # Safety
    ///
    /// The memory was allocated from this heap with this layout and belongs to the caller. On success it no longer
    /// does; the returned memory does.
    pub unsafe fn resize_shared(&self, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>> {
        self.certify(memory, layout);
        // SAFETY: the caller's promise; the structure is held meanwhile; an attempt that fails changes nothing.
        let place = |thread: &Thread| unsafe { self.place_resized(thread, memory, layout, size) };
        let placed = place(&self.shared());
        let new = Layout::from_size_align(size, layout.align()).ok()?;
        match placed.or_else(|| self.with_all_for(new, place))? {
            Moved::Not => Some(memory),
            Moved::With(moved) => Some(moved),
            Moved::To(moved) => {
                // SAFETY: as `place_resized` promises, which has made this layout; the old block is given up, and the
                // structure is held again.
                unsafe {
                    Self::copy_resized(memory, layout, moved, size);
                    let new = Layout::from_size_align_unchecked(size, layout.align());
                    let shared = self.shared();
                    self.free(&shared, memory, layout);
                    Some(self.settle_moved(&shared, moved, new))
                }
            }
        }
    }
}
