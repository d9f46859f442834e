//! Magazines: one thread's free slots of one class.
//!
//! ```text
//!   magazine   head ──▶ slot ──▶ slot ──▶ slot ──▶ ∅        linked through the first word of each free slot
//!              left 5, room 8
//!              spare ──▶ slot ──▶ … 128 of them … ──▶ ∅     a whole batch, or none
//! ```
//!
//! Allocating pops, freeing pushes, whoever the slot came from: no lock, no atomic operation, three words touched.
//!
//! **Room** begins at 4 slots and doubles with each visit to the class, up to a batch: 128 slots or 256 KiB (eight
//! slots of the largest). A thread that lives for a moment takes little.
//!
//! **The spare** (J. Bonwick's second magazine) comes in where a magazine has room for a batch. Full: it becomes the
//! spare, and the spare before, a batch and known to be, goes to the class as it is. Empty: the spare takes its place;
//! where there is none a batch comes from the class as it is. So nobody walks a list to cut it in two, and a thread
//! that allocates and frees by turns goes to the class once in a batch at the most.
//!
//! **Links** stand under a key, by which a slot that comes back is seen to be free already (`mark.rs`).
//!
//! A magazine belongs to one thread. Only the count may be read by others, for statistics.

use core::cell::Cell;
use core::ptr::{self, NonNull};

use crate::sync::{AtomicPtr, AtomicU32, Ordering};

use super::mark;
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
        unsafe { mark::link(slot, self.head) };
        self.head = slot;
        self.count += 1;
    }

    /// Takes the first slot, its link as it is.
    #[inline]
    pub fn pop(&mut self) -> Option<*mut u8> {
        self.count = self.count.checked_sub(1)?;
        let slot = self.head;
        // SAFETY: `count` slots are on the string, each the list's own and written by `push` (of this list or of the
        // magazine it came from).
        self.head = unsafe { mark::next(slot) };
        Some(slot)
    }

    /// Whether the slot is on the string.
    pub fn has(self, wanted: *mut u8) -> bool {
        let mut rest = self;
        core::iter::from_fn(|| rest.pop()).any(|slot| slot == wanted)
    }
}

// A slot holds a pointer.
const _: () = assert!(size_of::<*mut u8>() <= 8);

/// A batch: as many slots of a class as [`SizeClass::batch`] says, on a string. Whoever has it owns the slots.
#[derive(Debug)]
pub struct Batch {
    head: NonNull<u8>,
}

impl Batch {
    /// The batch that [`into_raw`](Self::into_raw) gave.
    ///
    /// # Safety
    ///
    /// It did, and nobody else makes one of it.
    pub const unsafe fn from_raw(head: NonNull<u8>) -> Self {
        Self { head }
    }

    /// Its first slot, to be kept where there is room for a pointer only.
    pub const fn into_raw(self) -> NonNull<u8> {
        self.head
    }

    /// Its last slot: `batch − 1` links from the first.
    fn last(&self, class: SizeClass) -> *mut u8 {
        // SAFETY: its slots are its own, and each but the last leads to the next.
        (1..class.batch()).fold(self.head.as_ptr(), |slot, _| unsafe { mark::next(slot) })
    }

    /// Makes its last slot lead to `behind`. Null: to none, as in a batch by itself. O(slots).
    pub fn string_last(&self, class: SizeClass, behind: *mut u8) {
        // SAFETY: its slots are its own, and at least a word long.
        unsafe { mark::link(self.last(class), behind) };
    }

    /// What its last slot leads to. O(slots).
    pub fn behind_last(&self, class: SizeClass) -> *mut u8 {
        // SAFETY: as in `string_last`.
        unsafe { mark::next(self.last(class)) }
    }

    /// As a list.
    pub fn into_list(self, class: SizeClass) -> List {
        List {
            head: self.head.as_ptr(),
            count: class.batch(),
        }
    }
}

/// A thread's free slots of one class. All-zero bytes: empty, and without room.
#[derive(Debug)]
#[repr(C)]
pub struct Magazine {
    /// The first slot, or null. I12: `room − left` slots hang from here, each this magazine's own.
    head: Cell<*mut u8>,
    /// How many more slots it takes. I13: left ≤ room ≤ a batch.
    left: AtomicU32,
    room: AtomicU32,
    /// A batch of slots, each this magazine's own, or null.
    spare: AtomicPtr<u8>,
}

impl Magazine {
    /// The slot freed last. Its first word is zero.
    #[inline]
    pub fn pop(&self) -> Option<NonNull<u8>> {
        self.pop_by(mark::key())
    }

    /// Fast: the same, for who has the key at hand.
    #[inline(always)]
    pub fn pop_by(&self, key: mark::Key) -> Option<NonNull<u8>> {
        let slot = NonNull::new(self.head.get())?;
        // SAFETY: a slot in the magazine is its own and was written by `put` or came on a list (I12).
        unsafe {
            self.head.set(mark::next_by(key, slot.as_ptr()));
            mark::wipe(slot.as_ptr());
        }
        self.set_left(self.left().wrapping_add(1));
        Some(slot)
    }

    /// Fast: takes a slot in, if there is room and it does not seem free. Whether it did.
    ///
    /// # Safety
    ///
    /// The slot is the caller's, of this magazine's class and heap; if taken, it is the magazine's.
    #[inline(always)]
    #[must_use]
    pub unsafe fn push_by(&self, key: mark::Key, slot: *mut u8) -> bool {
        // SAFETY: the caller's promise.
        unsafe { mark::seems_free(slot).is_none() && self.put_by(key, slot) }
    }

    /// Takes a slot in, if there is room. Whether it did.
    ///
    /// # Safety
    ///
    /// As for [`push_by`](Self::push_by).
    #[inline]
    #[must_use]
    pub unsafe fn put(&self, slot: *mut u8) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.put_by(mark::key(), slot) }
    }

    /// As [`put`](Self::put), for who has the key at hand.
    ///
    /// # Safety
    ///
    /// As for [`push_by`](Self::push_by).
    #[inline(always)]
    unsafe fn put_by(&self, key: mark::Key, slot: *mut u8) -> bool {
        let left = self.left();
        if left == 0 {
            return false;
        }
        self.set_left(left - 1);
        // SAFETY: as in `List::push`.
        unsafe { mark::link_by(key, slot, self.head.get()) };
        self.head.set(slot);
        true
    }

    /// Whether the slot lies here, or in the spare. O(slots).
    #[cold]
    pub fn has(&self, slot: NonNull<u8>, class: SizeClass) -> bool {
        let held = List {
            head: self.head.get(),
            count: self.room() - self.left(),
        };
        // Relaxed: one writer, who asks.
        let spare = NonNull::new(self.spare.load(Ordering::Relaxed)).map(|head| Batch { head });
        held.has(slot.as_ptr()) || spare.is_some_and(|spare| spare.into_list(class).has(slot.as_ptr()))
    }

    #[inline(always)]
    fn left(&self) -> u32 {
        // Relaxed: one writer, and nothing depends on what others read.
        self.left.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn set_left(&self, left: u32) {
        // Relaxed: as in `left`.
        self.left.store(left, Ordering::Relaxed);
    }

    fn room(&self) -> u32 {
        // Relaxed: as in `left`.
        self.room.load(Ordering::Relaxed)
    }

    /// How many slots. May be read by anybody; outside the owning thread it is a moment's picture.
    pub fn count(&self, class: SizeClass) -> u32 {
        // Relaxed: as in `left`.
        let spare = if self.spare.load(Ordering::Relaxed).is_null() {
            0
        } else {
            class.batch()
        };
        self.room().saturating_sub(self.left()) + spare
    }

    /// Whether it has room for a batch: then batches come and go.
    pub fn is_wide(&self, class: SizeClass) -> bool {
        self.room() == class.batch()
    }

    /// Makes room for twice as much, up to a batch. How much it is.
    pub fn widen(&self, class: SizeClass) -> u32 {
        let room = self.room();
        let wider = (room * 2).max(FIRST_ROOM).min(class.batch());
        // Relaxed: as in `left`.
        self.room.store(wider, Ordering::Relaxed);
        self.set_left(self.left() + (wider - room));
        wider
    }

    /// Empty: puts the spare in its place. Whether there was one.
    pub fn unwrap_spare(&self) -> bool {
        debug_assert!(self.head.get().is_null());
        match self.take_spare() {
            Some(batch) => {
                self.load(batch);
                true
            }
            None => false,
        }
    }

    /// Takes the spare out.
    pub fn take_spare(&self) -> Option<Batch> {
        // Relaxed, twice: one writer, and nothing depends on what others read.
        let head = self.spare.load(Ordering::Relaxed);
        self.spare.store(ptr::null_mut(), Ordering::Relaxed);
        NonNull::new(head).map(|head| Batch { head })
    }

    /// Wide and full: becomes the spare, for which there must be room.
    pub fn set_aside(&self) {
        debug_assert_eq!(self.left(), 0);
        let head = self.head.replace(ptr::null_mut());
        // Relaxed: as in `left`.
        self.spare.store(head, Ordering::Relaxed);
        self.set_left(self.room());
    }

    /// Empty and wide: takes a batch in.
    pub fn load(&self, batch: Batch) {
        debug_assert!(self.head.get().is_null());
        self.head.set(batch.head.as_ptr());
        self.set_left(0);
    }

    /// Hangs a list in. The magazine must be empty, and have room for it.
    pub fn fill(&self, list: List) {
        debug_assert!(self.head.get().is_null() && list.count <= self.room());
        self.head.set(list.head);
        self.set_left(self.room() - list.count);
    }

    /// Takes everything out but the spare, and the room away.
    pub fn empty(&self) -> List {
        let list = List {
            head: self.head.replace(ptr::null_mut()),
            count: self.room() - self.left(),
        };
        // Relaxed: as in `left`.
        self.room.store(0, Ordering::Relaxed);
        self.set_left(0);
        list
    }
}
