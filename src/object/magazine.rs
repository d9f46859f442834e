//! Magazines: one thread's free slots of one class.
//!
//! ```text
//!              floor ──╮       top ────────╮     limit ──────────────────╮
//!   magazine   loaded  head │ slot │ slot │ slot │      │      │      │      │      a rack (`rack.rs`)
//!              spares  head │ slot │ slot │ slot │ slot │ slot │ slot │ slot │      full, or none
//! ```
//!
//! A magazine is a stack of addresses of free slots. Allocating pops the topmost address; freeing pushes one,
//! whichever thread allocated the slot. Neither takes a lock or uses an atomic read-modify-write. A top above the
//! floor means that there is a slot to pop; a top below the limit means that there is room to push. A magazine without
//! a rack has its floor above all addresses (or, before its first rack, all pointers null) and its limit below, so
//! that pops and pushes both fail.
//!
//! **The top** is a [`Stake`]: the value stored there also announces that its user is at work, so the announcement
//! costs no store of its own. A thread that empties the magazine of a sleeping thread takes the rack but leaves the
//! top alone: the user may have read it already. When the user goes on, its stale top is neither above the floor nor
//! below the limit.
//!
//! **Shut racks.** When an allocation loads a rack with more room, the rack is shut: slots can be popped but not
//! pushed. The first free takes the slow path, which opens it. So room for frees that nobody sees is created by frees
//! alone, and they report it (`keeper.rs`). A shut rack has its limit at its floor. Its room is kept in the last word
//! of its head, which otherwise links racks in a store.
//!
//! **Room** starts at 6 slots (30 of 8 bytes, 14 of 16, if the first call is a free) and quadruples with each visit to
//! the class, up to a batch: 510 slots or 32 KiB; or else 126 slots or 512 KiB (14 slots of the largest). So a
//! short-lived thread takes little.
//!
//! **Spares** (J. Bonwick's second magazine) are used once a magazine has room for a batch. When the loaded rack is
//! full, it becomes a spare, and a blank rack is loaded. When the loaded rack is empty, a full spare replaces it;
//! without one, a whole batch comes from the class, and its bytes are added to the thread's *demand*. A thread keeps
//! one spare of each class in any case, and more while they have no more bytes than the demand, which is 2 MiB at
//! most, and 32 MiB for all threads. Further batches go to the class. So a thread that allocates 20 batches and frees
//! them, over and over, visits the class 20 times, and then no more. And one that only frees what others have
//! allocated keeps one, and passes on the rest. (When each kept one, threads took each other's batches, and with them
//! the cache lines of each block: 31 ns for a block allocated and freed by each of 16 threads, now 12;
//! `docs/measurements.md`.)
//!
//! **Marks** stand in free slots of up to 1 KiB that the program has used: a free recognises a slot that is already
//! free by its mark (`mark.rs`). Larger slots are not touched: they have flags (`spans.rs`).
//!
//! A magazine belongs to one thread. Other threads may read only its count, for statistics.

use core::cell::Cell;
use core::hint::cold_path;
use core::mem::offset_of;
use core::ptr::{self, NonNull};
use core::slice;

use crate::sync::{AtomicPtr, Ordering, Stake};

use super::rack::{Entry, Pile, Rack};
use super::size_class::SizeClass;

/// The room of a magazine's first rack.
const FIRST_ROOM: u32 = 6;

/// Above every entry: the floor of a magazine without a rack.
const NOWHERE: *mut Entry = ptr::without_provenance_mut(usize::MAX);

/// One thread's free slots of one class. All-zero bytes: empty, without a rack.
#[derive(Debug)]
#[repr(C)]
pub struct Magazine {
    /// The topmost slot's entry, or the word below the first entry. Meaningless without a rack. I12: with a rack, the
    /// entries up to here are slots that belong to this magazine.
    top: Stake<Entry>,
    /// The last entry of the rack, or the floor if it is shut; null without a rack. I13: of an open rack, top ≤ limit
    /// and limit − floor ≤ a batch.
    limit: Cell<*mut Entry>,
    /// The word below the first entry; without a rack [`NOWHERE`], or null.
    floor: AtomicPtr<Entry>,
    /// Full racks with a batch in each.
    spares: Pile,
}

// A seat is that of a magazine's top (`global/inline.rs`).
const _: () = assert!(offset_of!(Magazine, top) == 0);

// The factor by which a magazine's index is multiplied.
const _: () = assert!(size_of::<Magazine>() == 4 * size_of::<usize>());

impl Magazine {
    /// Where the limit is in a magazine, whose first word is the top.
    pub const LIMIT: usize = offset_of!(Self, limit);

    /// Fast path: pops the slot freed last, contents untouched, if there is one and the caller is `admitted`. It
    /// announces itself by the top (`sync/owner.rs`).
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

    /// Fast path: pushes a slot, if the caller is `admitted`, there is room, and `sign` marks the slot as free.
    /// Returns whether it did.
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
            // SAFETY: an entry of the rack that holds no slot.
            unsafe { entry.write(slot.as_ptr()) };
            self.top.end(entry.as_ptr());
            return true;
        }
        cold_path();
        self.top.end(top);
        false
    }

    /// The user gives up what it has begun; returns whether it had begun anything.
    pub fn withdraw(&self) -> bool {
        let begun = self.top.get().is_none();
        self.top.end(self.top.last());
        begun
    }

    /// Leaves the magazine as a user does that ends in the middle of an operation.
    #[cfg(test)]
    pub fn end_in_the_middle(&self) {
        let _top = self.top.begin();
    }

    /// Repairs the top after its user has ended, perhaps in the middle of an operation.
    pub fn settle(&self) {
        self.top.settle();
    }

    /// The slot at `top`, and the top below it, if there is one. `None` also if `top` is stale, read before another
    /// thread emptied the magazine. `top` was the magazine's top, and the caller has been admitted since.
    #[inline(always)]
    fn slot_at(&self, top: *mut Entry) -> Option<(NonNull<u8>, *mut Entry)> {
        // SAFETY: nobody writes it now: the only writers are the owner and a seizer, and the owner has seen the seizer
        // gone. Not an atomic load, because the compiler would not fold that into the comparison.
        if top <= unsafe { self.floor.as_ptr().read() } {
            cold_path();
            return None;
        }
        // SAFETY: the top is above the floor, so there is a rack: without one the floor is NOWHERE, or top and floor
        // are null. And `top` belongs to that rack: it is an entry with a slot (I12), which is not null.
        Some(unsafe { (NonNull::new_unchecked(top.read()), top.wrapping_sub(1)) })
    }

    /// The entry above `top`, if there is room; `None` also if `top` is stale. Conditions as for `slot_at`.
    #[inline(always)]
    fn room_at(&self, top: *mut Entry) -> Option<NonNull<Entry>> {
        let next = top.wrapping_add(1);
        if next > self.limit.get() {
            cold_path();
            return None;
        }
        // SAFETY: it is not above the limit, so there is a rack and the entry lies in it (I13).
        Some(unsafe { NonNull::new_unchecked(next) })
    }

    /// Pops the slot freed last, contents untouched.
    #[inline]
    pub fn pop(&self) -> Option<NonNull<u8>> {
        let (slot, top) = self.slot_at(self.top.get()?)?;
        self.top.end(top);
        Some(slot)
    }

    /// Pushes a slot, if there is room. Returns whether it did.
    ///
    /// # Safety
    ///
    /// The caller owns the slot, which is of this magazine's class and heap; if pushed, the magazine owns it.
    #[inline]
    #[must_use]
    pub unsafe fn push(&self, slot: NonNull<u8>) -> bool {
        let Some(entry) = self.top.get().and_then(|top| self.room_at(top)) else {
            return false;
        };
        // SAFETY: an entry of the rack that holds no slot.
        unsafe { entry.write(slot.as_ptr()) };
        self.top.end(entry.as_ptr());
        true
    }

    /// Makes zeroed or used memory an empty magazine; whatever was in it is forgotten.
    pub fn forget(&self) {
        self.set(NOWHERE, ptr::null_mut());
        self.top.end(ptr::null_mut());
        self.spares.forget();
    }

    fn set(&self, floor: *mut Entry, limit: *mut Entry) {
        // Relaxed, here and below: one writer, and nothing depends on what other threads read.
        self.floor.store(floor, Ordering::Relaxed);
        self.limit.set(limit);
    }

    /// Whether the slot is in the loaded rack or in a spare. O(slots).
    #[cold]
    pub fn has(&self, slot: NonNull<u8>, class: SizeClass) -> bool {
        let has = |rack: &Rack| rack.slots().contains(&slot.as_ptr());
        self.loaded().as_ref().is_some_and(has) || self.has_in_spares(&has, class)
    }

    /// Whether `has` holds for a spare, by recursion: each is taken off and put back.
    fn has_in_spares(&self, has: &impl Fn(&Rack) -> bool, class: SizeClass) -> bool {
        self.take_spare(class).is_some_and(|spare| {
            let found = has(&spare) || self.has_in_spares(has, class);
            self.set_spare(spare);
            found
        })
    }

    /// How many slots there are. Any thread may call this; to threads other than the owner the result is a snapshot.
    pub fn count(&self, class: SizeClass) -> u32 {
        let loaded = self.below(self.top.last());
        // Another thread may have changed its rack between the two reads.
        let loaded = if loaded > class.batch() as usize { 0 } else { loaded };
        loaded as u32 + self.spares.len() * class.batch()
    }

    /// How many slots the rack has room for in all.
    pub fn room(&self) -> u32 {
        if self.limit.get().is_null() {
            return 0;
        }
        // Relaxed: as in `set`.
        let (limit, floor) = (self.limit.get(), self.floor.load(Ordering::Relaxed));
        if limit == floor {
            // SAFETY: a shut rack, whose head ends with this word (`shut`).
            return unsafe { floor.cast::<usize>().read() as u32 };
        }
        (limit.addr().wrapping_sub(floor.addr()) / size_of::<Entry>()) as u32
    }

    /// Whether there is a rack that accepts no slots.
    pub fn is_shut(&self) -> bool {
        // Relaxed: as in `set`.
        !self.limit.get().is_null() && self.limit.get() == self.floor.load(Ordering::Relaxed)
    }

    /// Shuts the loaded rack, if there is one: from here on it accepts no slots.
    pub fn shut(&self) {
        let room = self.room();
        if room > 0 {
            // Relaxed: as in `set`.
            let floor = self.floor.load(Ordering::Relaxed);
            // SAFETY: the last word of the loaded rack's head. Only `room` reads it: the link that stands there in a
            // store is written when the rack is stored.
            unsafe { floor.cast::<usize>().write(room as usize) };
            self.limit.set(floor);
        }
    }

    /// Opens a shut rack and returns its room; 0 if there was none.
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

    /// Moves the slot freed last below all others. O(slots).
    pub fn sink(&self) {
        if let Some(rack) = self.loaded() {
            // SAFETY: entries with slots (I12), which the owner alone accesses, and no other reference to them exists.
            unsafe { slice::from_raw_parts_mut(rack.first().as_ptr(), rack.len() as usize) }.rotate_right(1);
        }
    }

    /// Whether there is room for a batch: then whole batches move in and out.
    pub fn is_wide(&self, class: SizeClass) -> bool {
        self.room() == class.batch()
    }

    /// The room the next rack should have: four times as much, up to a batch.
    pub fn next_room(&self, class: SizeClass) -> u32 {
        (4 * self.room() + FIRST_ROOM).min(class.batch())
    }

    /// The number of entries up to `top`.
    fn below(&self, top: *mut Entry) -> usize {
        // Relaxed: as in `set`.
        let floor = self.floor.load(Ordering::Relaxed);
        top.addr().wrapping_sub(floor.addr()) / size_of::<Entry>()
    }

    /// The loaded rack, which stays loaded. `None` to a seizer while the user is on its way to be turned back.
    fn loaded(&self) -> Option<Rack> {
        let (room, top) = (self.room(), self.top.get()?);
        if room == 0 {
            return None;
        }
        // Relaxed: as in `set`.
        let first = NonNull::new(self.floor.load(Ordering::Relaxed).wrapping_add(1))?;
        // SAFETY: the parts of the rack that `load` took in; the entries up to `top` are slots (I12).
        Some(unsafe { Rack::from_first(first, room, self.below(top) as u32) })
    }

    /// Takes the loaded rack out. Called by the owner or by a seizer, so it does not write `top`.
    pub fn unload(&self) -> Option<Rack> {
        let rack = self.loaded()?;
        self.set(NOWHERE, ptr::null_mut());
        Some(rack)
    }

    /// Loads a rack, open, with its slots, and returns the rack that was loaded.
    pub fn load(&self, rack: Rack) -> Option<Rack> {
        let before = self.loaded();
        let floor = rack.first().as_ptr().wrapping_sub(1);
        let at = |entries: u32| floor.wrapping_add(entries as usize);
        self.set(floor, at(rack.room()));
        self.top.end(at(rack.len()));
        before
    }

    /// Takes out the spare set aside last.
    pub fn take_spare(&self, class: SizeClass) -> Option<Rack> {
        let memory = self.spares.pop()?;
        // SAFETY: `set_spare` pushed such a rack.
        Some(unsafe { Rack::from_parts(memory, class.batch(), class.batch()) })
    }

    /// Sets a batch aside as a spare. There must be room for it.
    pub fn set_spare(&self, batch: Rack) {
        debug_assert!(batch.len() == batch.room());
        self.spares.push(batch);
    }

    /// How many spares there are.
    pub fn spares(&self) -> u32 {
        self.spares.len()
    }
}
