//! Magazines: one thread's free slots of one class.
//!
//! ```text
//!   magazine   top ───────────────────────╮     limit ──────────────────╮
//!              loaded   null │ slot │ slot │ slot │      │      │      │      │      a rack (`rack.rs`)
//!              spare    null │ slot │ slot │ slot │ slot │ slot │ slot │ slot │      full, or none
//! ```
//!
//! Allocating takes the topmost address, freeing puts one on top, whoever the slot came from: no lock, no atomic
//! operation. Below the first address stands null: what is read there says that the magazine is empty. One without
//! a rack reads a null that is always there, and has its limit there too.
//!
//! **Room** begins at 6 slots and quadruples with each visit to the class, up to a batch: 126 slots or 512 KiB (14
//! slots of the largest). A thread that lives for a moment takes little.
//!
//! **The spare** (J. Bonwick's second magazine) comes in where a magazine has room for a batch. Loaded full: it becomes
//! the spare, a blank one is loaded, and the spare before, a batch, goes to the class as it is. Loaded empty: a full
//! spare takes its place; where there is none a batch comes from the class as it is. So a thread that allocates and
//! frees by turns goes to the class once in a batch at the most.
//!
//! **Marks** stand in free slots of up to 1 KiB that the program had: by them a slot that comes back is seen to be free
//! already (`mark.rs`). Larger ones are not touched: they have flags (`spans.rs`).
//!
//! A magazine belongs to one thread. Only the count may be read by others, for statistics.

use core::cell::Cell;
use core::ptr::{self, NonNull};

use crate::sync::{AtomicPtr, Ordering};

use super::rack::{Entry, Rack};
use super::size_class::SizeClass;

/// What a magazine has room for at first.
const FIRST_ROOM: u32 = 6;

/// The null that a magazine without a rack reads. Never written.
static NOTHING: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

/// A thread's free slots of one class. All-zero bytes: not [open](Self::open) yet.
#[derive(Debug)]
#[repr(C)]
pub struct Magazine {
    /// The last slot's entry, or the null below the first. I12: the entries up to here are slots, each this magazine's.
    top: AtomicPtr<Entry>,
    /// The last entry of the rack. I13: top ≤ limit, limit − floor ≤ a batch.
    limit: Cell<*mut Entry>,
    /// The null below the first entry.
    floor: AtomicPtr<Entry>,
    /// A full rack with room for a batch, or null.
    spare: AtomicPtr<u8>,
}

// What the compiler multiplies by.
const _: () = assert!(size_of::<Magazine>() == 4 * size_of::<usize>());

impl Magazine {
    /// Makes it empty, without a rack: before anything else is done with zeroed memory. What was in it is forgotten.
    pub fn open(&self) {
        self.set_none();
        // Relaxed: one writer.
        self.spare.store(ptr::null_mut(), Ordering::Relaxed);
    }

    fn set_none(&self) {
        let nothing = (&raw const NOTHING).cast_mut().cast();
        self.set(nothing, nothing, nothing);
    }

    fn set(&self, floor: *mut Entry, top: *mut Entry, limit: *mut Entry) {
        // Relaxed, here and below: one writer, and nothing depends on what others read.
        self.floor.store(floor, Ordering::Relaxed);
        self.top.store(top, Ordering::Relaxed);
        self.limit.set(limit);
    }

    /// The slot freed last, as it is.
    #[inline(always)]
    pub fn pop(&self) -> Option<NonNull<u8>> {
        // Relaxed, twice: as in `set`.
        let top = self.top.load(Ordering::Relaxed);
        // SAFETY: an entry of the rack, or the null below (I12).
        let slot = NonNull::new(unsafe { top.read() })?;
        self.top.store(top.wrapping_sub(1), Ordering::Relaxed);
        Some(slot)
    }

    /// Takes a slot in, if there is room. Whether it did.
    ///
    /// # Safety
    ///
    /// The slot is the caller's, of this magazine's class and heap; if taken, it is the magazine's.
    #[inline(always)]
    #[must_use]
    pub unsafe fn push(&self, slot: NonNull<u8>) -> bool {
        // Relaxed, twice: as in `set`.
        let top = self.top.load(Ordering::Relaxed).wrapping_add(1);
        if top > self.limit.get() {
            return false;
        }
        // SAFETY: an entry of the rack, not above its last (I13).
        unsafe { top.write(slot.as_ptr()) };
        self.top.store(top, Ordering::Relaxed);
        true
    }

    /// Whether the slot lies here, or in the spare. O(slots).
    #[cold]
    pub fn has(&self, slot: NonNull<u8>, class: SizeClass) -> bool {
        let has = |rack: &Rack| rack.slots().contains(&slot.as_ptr());
        let rack = self.loaded();
        if rack.as_ref().is_some_and(has) {
            return true;
        }
        let spare = self.take_spare(class);
        let found = spare.as_ref().is_some_and(has);
        if let Some(spare) = spare {
            self.set_spare(spare);
        }
        found
    }

    /// How many slots. May be read by anybody; outside the owning thread it is a moment's picture.
    pub fn count(&self, class: SizeClass) -> u32 {
        // Relaxed, all: as in `set`. Another thread's may have changed its rack in between.
        let (top, floor) = (self.top.load(Ordering::Relaxed), self.floor.load(Ordering::Relaxed));
        let loaded = top.addr().wrapping_sub(floor.addr()) / size_of::<Entry>();
        let loaded = if loaded > class.batch() as usize {
            0
        } else {
            loaded as u32
        };
        loaded + if self.has_spare() { class.batch() } else { 0 }
    }

    /// How many slots there is room for.
    pub fn room(&self) -> u32 {
        // Relaxed, twice: as in `set`.
        let (limit, floor) = (self.limit.get(), self.floor.load(Ordering::Relaxed));
        (limit.addr().wrapping_sub(floor.addr()) / size_of::<Entry>()) as u32
    }

    /// Whether it has room for a batch: then batches come and go.
    pub fn is_wide(&self, class: SizeClass) -> bool {
        self.room() == class.batch()
    }

    /// The room it should have next: four times as much, up to a batch.
    pub fn next_room(&self, class: SizeClass) -> u32 {
        (4 * self.room() + FIRST_ROOM).min(class.batch())
    }

    /// The rack that is loaded, which stays so.
    fn loaded(&self) -> Option<Rack> {
        let room = self.room();
        if room == 0 {
            return None;
        }
        // Relaxed, twice: as in `set`.
        let (top, floor) = (self.top.load(Ordering::Relaxed), self.floor.load(Ordering::Relaxed));
        let count = top.addr().wrapping_sub(floor.addr()) / size_of::<Entry>();
        let first = NonNull::new(floor.wrapping_add(1))?;
        // SAFETY: the parts of the rack that `load` took in; below `top` are slots (I12).
        Some(unsafe { Rack::from_first(first, room, count as u32) })
    }

    /// Takes the rack out that is loaded.
    pub fn unload(&self) -> Option<Rack> {
        let rack = self.loaded();
        self.set_none();
        rack
    }

    /// Loads a rack, with what is in it, and takes the one out that is loaded.
    pub fn load(&self, rack: Rack) -> Option<Rack> {
        let before = self.loaded();
        let floor = rack.first().as_ptr().wrapping_sub(1);
        let at = |entries: u32| floor.wrapping_add(entries as usize);
        self.set(floor, at(rack.len()), at(rack.room()));
        before
    }

    /// Takes the spare out.
    pub fn take_spare(&self, class: SizeClass) -> Option<Rack> {
        // Relaxed, twice: as in `set`.
        let memory = NonNull::new(self.spare.load(Ordering::Relaxed))?;
        self.spare.store(ptr::null_mut(), Ordering::Relaxed);
        // SAFETY: `set_spare` had it from such a rack.
        Some(unsafe { Rack::from_parts(memory, class.batch(), class.batch()) })
    }

    /// Puts a batch aside. There must be no spare.
    pub fn set_spare(&self, batch: Rack) {
        debug_assert!(batch.len() == batch.room() && !self.has_spare());
        // Relaxed: as in `set`.
        self.spare.store(batch.into_memory().as_ptr(), Ordering::Relaxed);
    }

    fn has_spare(&self) -> bool {
        // Relaxed: as in `set`.
        !self.spare.load(Ordering::Relaxed).is_null()
    }
}
