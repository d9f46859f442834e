//! Magazines: one thread's free slots of one class.
//!
//! ```text
//!              floor ──╮       top ────────╮     limit ──────────────────╮
//!   magazine   loaded  head │ slot │ slot │ slot │      │      │      │      │      a rack (`rack.rs`)
//!              spare   head │ slot │ slot │ slot │ slot │ slot │ slot │ slot │      full, or none
//! ```
//!
//! Allocating takes the topmost address, freeing puts one on top, whoever the slot came from: no lock, no atomic
//! operation. Above the floor there is a slot to take, below the limit room for one. One without a rack has its floor
//! above all addresses (or all is null, before the first), its limit below, so nothing is taken or put there.
//!
//! **The top** is a [`Stake`]: by what stands there its user says that he is at work, so that this
//! costs no store of its own. Who empties the magazine of a thread that sleeps takes the rack, and leaves the top: the
//! user may have read it already, and will find that it is above no floor and below no limit.
//!
//! **Shut.** A rack that an allocation loads to have more room is shut: slots are taken from it, but none is put. The
//! first slot that comes back goes the slow way, which opens it. So room for what nobody sees comes into being in frees
//! alone, which tell of it (`keeper.rs`). One that is shut has its limit at its floor, and how much room it has stands
//! there, in the word by which racks in store hang together.
//!
//! **Room** begins at 6 slots and quadruples with each visit to the class, up to a batch: 510 slots or 32 KiB; or else
//! 126, or 512 KiB (14 slots of the largest). A thread that lives for a moment takes little.
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
use core::hint::cold_path;
use core::ptr::{self, NonNull};

use crate::sync::{AtomicPtr, Ordering, Stake};

use super::rack::{Entry, Rack};
use super::size_class::SizeClass;

/// What a magazine has room for at first.
const FIRST_ROOM: u32 = 6;

/// Above every entry: where nothing is.
const NOWHERE: *mut Entry = ptr::without_provenance_mut(usize::MAX);

/// A thread's free slots of one class. All-zero bytes: empty, without a rack.
#[derive(Debug)]
#[repr(C)]
pub struct Magazine {
    /// The last slot's entry, or the word below the first. Without a rack anything. I12: with one, the entries up to
    /// here are slots, each this magazine's.
    top: Stake<Entry>,
    /// The last entry of the rack, the floor if it is shut; null without one. I13: of one that is open top ≤ limit,
    /// limit − floor ≤ a batch.
    limit: Cell<*mut Entry>,
    /// The word below the first entry; [`NOWHERE`], or null, without a rack.
    floor: AtomicPtr<Entry>,
    /// A full rack with room for a batch, or null.
    spare: AtomicPtr<u8>,
}

// What the compiler multiplies by.
const _: () = assert!(size_of::<Magazine>() == 4 * size_of::<usize>());

impl Magazine {
    /// Fast: the slot freed last, as it is, if there is one; by the quick way (`sync/owner.rs`), if who asks is
    /// `admitted`.
    #[inline(always)]
    pub fn pop_quick(&self, admitted: impl FnOnce() -> bool) -> Option<NonNull<u8>> {
        let top = self.top.begin();
        if admitted()
            && let Some((slot, below)) = self.slot_at(top)
        {
            self.top.end(below);
            return Some(slot);
        }
        cold_path();
        self.top.end(top);
        None
    }

    /// Fast: takes a slot in, by the quick way, if who asks is `admitted`, there is room, and `sign` puts on it that it
    /// is free. Whether it did.
    ///
    /// # Safety
    ///
    /// As for [`push`](Self::push).
    #[inline(always)]
    #[must_use]
    pub unsafe fn push_quick(
        &self,
        slot: NonNull<u8>,
        admitted: impl FnOnce() -> bool,
        sign: impl FnOnce() -> bool,
    ) -> bool {
        let top = self.top.begin();
        if admitted()
            && let Some(entry) = self.room_at(top)
            && sign()
        {
            // SAFETY: an entry of the rack, with no slot in it.
            unsafe { entry.write(slot.as_ptr()) };
            self.top.end(entry.as_ptr());
            return true;
        }
        cold_path();
        self.top.end(top);
        false
    }

    /// After its user has ended, perhaps in the middle.
    pub fn settle(&self) {
        self.top.settle();
    }

    /// The slot at `top`, what `top` is without it, if there is one: not if what is at hand is stale, from before
    /// somebody emptied the magazine. `top` was its top, and who asks has been admitted since.
    #[inline(always)]
    fn slot_at(&self, top: *mut Entry) -> Option<(NonNull<u8>, *mut Entry)> {
        // SAFETY: nobody writes it now: only the owner does, and who has seized it, whom he has seen go. Not by an
        // atomic load, which the compiler would not make one with the comparison.
        if top <= unsafe { self.floor.as_ptr().read() } {
            cold_path();
            return None;
        }
        // SAFETY: a top above the floor: so there is a rack, for without one the floor is NOWHERE, or top and floor are
        // null; and `top` is its: an entry with a slot (I12), which is not null.
        Some(unsafe { (NonNull::new_unchecked(top.read()), top.wrapping_sub(1)) })
    }

    /// The entry above `top`, if there is room: not if `top` is stale. As for `slot_at`.
    #[inline(always)]
    fn room_at(&self, top: *mut Entry) -> Option<NonNull<Entry>> {
        let next = top.wrapping_add(1);
        if next > self.limit.get() {
            cold_path();
            return None;
        }
        // SAFETY: not above the limit, so there is a rack, and it is in that (I13).
        Some(unsafe { NonNull::new_unchecked(next) })
    }

    /// The slot freed last, as it is.
    #[inline]
    pub fn pop(&self) -> Option<NonNull<u8>> {
        let (slot, top) = self.slot_at(self.top.get()?)?;
        self.top.end(top);
        Some(slot)
    }

    /// Takes a slot in, if there is room. Whether it did.
    ///
    /// # Safety
    ///
    /// The slot is the caller's, of this magazine's class and heap; if taken, it is the magazine's.
    #[inline]
    #[must_use]
    pub unsafe fn push(&self, slot: NonNull<u8>) -> bool {
        let Some(entry) = self.top.get().and_then(|top| self.room_at(top)) else {
            return false;
        };
        // SAFETY: an entry of the rack, with no slot in it.
        unsafe { entry.write(slot.as_ptr()) };
        self.top.end(entry.as_ptr());
        true
    }

    /// Makes zeroed or used memory a magazine without anything: what was in it is forgotten.
    pub fn forget(&self) {
        self.set(NOWHERE, ptr::null_mut());
        self.top.end(ptr::null_mut());
        // Relaxed: one writer.
        self.spare.store(ptr::null_mut(), Ordering::Relaxed);
    }

    fn set(&self, floor: *mut Entry, limit: *mut Entry) {
        // Relaxed, here and below: one writer, and nothing depends on what others read.
        self.floor.store(floor, Ordering::Relaxed);
        self.limit.set(limit);
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
        let loaded = self.below(self.top.last());
        // Of another thread's, which may have changed its rack in between.
        let loaded = if loaded > class.batch() as usize { 0 } else { loaded };
        loaded as u32 + if self.has_spare() { class.batch() } else { 0 }
    }

    /// How many slots there is room for.
    pub fn room(&self) -> u32 {
        if self.limit.get().is_null() {
            return 0;
        }
        // Relaxed: as in `set`.
        let (limit, floor) = (self.limit.get(), self.floor.load(Ordering::Relaxed));
        if limit == floor {
            // SAFETY: a rack that is shut, whose head ends with this word (`shut`).
            return unsafe { floor.cast::<usize>().read() as u32 };
        }
        (limit.addr().wrapping_sub(floor.addr()) / size_of::<Entry>()) as u32
    }

    /// Whether there is a rack that takes no slot in.
    pub fn is_shut(&self) -> bool {
        // Relaxed: as in `set`.
        !self.limit.get().is_null() && self.limit.get() == self.floor.load(Ordering::Relaxed)
    }

    /// Shuts the rack that is loaded, if there is one: from here on it takes no slot in.
    pub fn shut(&self) {
        let room = self.room();
        if room > 0 {
            // Relaxed: as in `set`.
            let floor = self.floor.load(Ordering::Relaxed);
            // SAFETY: the last word of the head of the rack that is loaded, which nobody reads but `room`: what leads
            // on in a store is written when it gets there.
            unsafe { floor.cast::<usize>().write(room as usize) };
            self.limit.set(floor);
        }
    }

    /// Opens a rack that is shut: for how many slots. 0: none was.
    pub fn open(&self) -> u32 {
        if !self.is_shut() {
            return 0;
        }
        let room = self.room();
        // Relaxed: as in `set`.
        let floor = self.floor.load(Ordering::Relaxed);
        self.limit.set(floor.wrapping_add(room as usize));
        room
    }

    /// Whether it has room for a batch: then batches come and go.
    pub fn is_wide(&self, class: SizeClass) -> bool {
        self.room() == class.batch()
    }

    /// The room it should have next: four times as much, up to a batch.
    pub fn next_room(&self, class: SizeClass) -> u32 {
        (4 * self.room() + FIRST_ROOM).min(class.batch())
    }

    /// Entries up to `top`.
    fn below(&self, top: *mut Entry) -> usize {
        // Relaxed: as in `set`.
        let floor = self.floor.load(Ordering::Relaxed);
        top.addr().wrapping_sub(floor.addr()) / size_of::<Entry>()
    }

    /// The rack that is loaded, which stays so. None to who has seized it while its user comes in vain.
    fn loaded(&self) -> Option<Rack> {
        let (room, top) = (self.room(), self.top.get()?);
        if room == 0 {
            return None;
        }
        // Relaxed: as in `set`.
        let first = NonNull::new(self.floor.load(Ordering::Relaxed).wrapping_add(1))?;
        // SAFETY: the parts of the rack that `load` took in; below `top` are slots (I12).
        Some(unsafe { Rack::from_first(first, room, self.below(top) as u32) })
    }

    /// Takes the rack out that is loaded. By the owner, or by who has seized it: `top` is not written.
    pub fn unload(&self) -> Option<Rack> {
        let rack = self.loaded()?;
        self.set(NOWHERE, ptr::null_mut());
        Some(rack)
    }

    /// Loads a rack, open, with what is in it, and takes the one out that is loaded.
    pub fn load(&self, rack: Rack) -> Option<Rack> {
        let before = self.loaded();
        let floor = rack.first().as_ptr().wrapping_sub(1);
        let at = |entries: u32| floor.wrapping_add(entries as usize);
        self.set(floor, at(rack.room()));
        self.top.end(at(rack.len()));
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
