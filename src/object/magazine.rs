//! Magazines: one thread's free slots of one class.
//!
//! ```text
//!   magazine   head ──▶ slot ──▶ slot ──▶ slot ──▶ ∅        linked through the first word of each free slot
//!              count 3, room 8
//! ```
//!
//! Allocating pops, freeing pushes, whoever the slot came from: no lock, no atomic operation, three words touched.
//! Where it is empty it is filled from its class with half the slots it has room for; where it is full the half freed
//! longest ago goes back. So a thread that only allocates, one that only frees, and one that does both by turns all go
//! to the class at most once in half a magazine.
//!
//! **Room** begins small and doubles with every such visit, up to 256 slots or 64 KiB (four slots of the largest
//! class): a thread that lives for a moment takes little, one that works hard seldom waits.
//!
//! A magazine belongs to one thread. Only the count may be read by others, for statistics.

use core::cell::Cell;
use core::ptr;

use crate::fatal;
use crate::sync::{AtomicU32, Ordering};

use super::size_class::SizeClass;

/// What a magazine has room for at first.
const FIRST_ROOM: u32 = 4;

/// Free slots of one class on a string. Whoever has the list owns the slots.
#[derive(Debug)]
pub struct List {
    head: *mut u8,
    count: u32,
}

impl List {
    /// No slots.
    pub const fn new() -> Self {
        Self {
            head: ptr::null_mut(),
            count: 0,
        }
    }

    /// How many slots.
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Puts a slot in front.
    ///
    /// # Safety
    ///
    /// The slot is the caller's, of one of the heap's classes, and is the list's from here on.
    #[inline]
    pub unsafe fn push(&mut self, slot: *mut u8) {
        // SAFETY: a slot is at least a pointer long and aligned for one (the smallest class is 8 bytes), and ours.
        unsafe { slot.cast::<*mut u8>().write(self.head) };
        self.head = slot;
        self.count += 1;
    }

    /// Takes the first slot.
    #[inline]
    pub fn pop(&mut self) -> Option<*mut u8> {
        self.count = self.count.checked_sub(1)?;
        let slot = self.head;
        // SAFETY: `count` slots are on the string, each the list's own and written by `push` (of this list or of the
        // magazine it came from).
        self.head = unsafe { slot.cast::<*mut u8>().read() };
        Some(slot)
    }
}

// A slot holds a pointer.
const _: () = assert!(size_of::<*mut u8>() <= 8);

/// A thread's free slots of one class. All-zero bytes: empty, and without room.
#[derive(Debug)]
#[repr(C)]
pub struct Magazine {
    /// The first slot, or null. I12: `count` slots hang from here, each this magazine's own.
    head: Cell<*mut u8>,
    count: AtomicU32,
    /// I13: count ≤ room.
    room: Cell<u32>,
}

impl Magazine {
    /// Fast: the slot freed last.
    #[inline(always)]
    pub fn pop(&self) -> Option<*mut u8> {
        let slot = self.head.get();
        if slot.is_null() {
            return None;
        }
        // SAFETY: a slot in the magazine is its own and was written by `push` or came on a list (I12).
        self.head.set(unsafe { slot.cast::<*mut u8>().read() });
        self.set_count(self.count().wrapping_sub(1));
        Some(slot)
    }

    /// Fast: takes a slot in, if there is room. Whether it did.
    ///
    /// # Safety
    ///
    /// The slot is the caller's, of this magazine's class and heap; if taken, it is the magazine's.
    #[inline(always)]
    #[must_use]
    pub unsafe fn push(&self, slot: *mut u8) -> bool {
        let count = self.count();
        if count >= self.room.get() {
            return false;
        }
        if count > 0 && slot == self.head.get() {
            fatal::abort(
                "block freed twice in a row; its address, blocks held",
                slot.addr(),
                count as usize,
            );
        }
        // SAFETY: as in `List::push`.
        unsafe { slot.cast::<*mut u8>().write(self.head.get()) };
        self.head.set(slot);
        self.set_count(count + 1);
        true
    }

    /// How many slots. May be read by anybody; outside the owning thread it is a moment's picture.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        // Relaxed: one writer, and nothing depends on what others read.
        self.count.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn set_count(&self, count: u32) {
        // Relaxed: as in `count`.
        self.count.store(count, Ordering::Relaxed);
    }

    /// Makes room for twice as much, up to two batches. How many slots half of it is.
    pub fn widen(&self, class: SizeClass) -> u32 {
        let room = (self.room.get() * 2).max(FIRST_ROOM).min(2 * class.batch());
        self.room.set(room);
        room / 2
    }

    /// Hangs a list in. The magazine must be empty.
    pub fn fill(&self, list: List) {
        debug_assert!(self.head.get().is_null() && list.count <= self.room.get());
        self.head.set(list.head);
        self.set_count(list.count);
    }

    /// Takes out all but the `keep` slots freed last.
    pub fn cut(&self, keep: u32) -> List {
        let count = self.count();
        if keep == 0 || keep >= count {
            return if keep == 0 { self.empty() } else { List::new() };
        }
        let mut last = self.head.get();
        for _ in 1..keep {
            // SAFETY: fewer steps than slots hang there (I12).
            last = unsafe { last.cast::<*mut u8>().read() };
        }
        // SAFETY: `last` is the magazine's slot number `keep`, of more.
        let head = unsafe { last.cast::<*mut u8>().replace(ptr::null_mut()) };
        self.set_count(keep);
        List {
            head,
            count: count - keep,
        }
    }

    /// Takes everything out, and the room away.
    pub fn empty(&self) -> List {
        let list = List {
            head: self.head.get(),
            count: self.count(),
        };
        self.head.set(ptr::null_mut());
        self.set_count(0);
        self.room.set(0);
        list
    }
}
