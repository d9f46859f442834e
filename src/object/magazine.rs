//! Magazines: one thread's free slots of one class.
//!
//! ```text
//!              floor ──╮       top ────────╮     limit ──────────────────╮
//!   magazine   loaded  head │ slot │ slot │ slot │      │      │      │      │      a rack of its own (`plot.rs`)
//!              spares  head │ slot │ slot │ slot │ slot │ slot │ slot │ slot │      full racks that travel (`rack.rs`)
//! ```
//!
//! A magazine is a stack of addresses of free slots. Allocating pops the topmost address; freeing pushes one,
//! whichever thread allocated the slot. Neither takes a lock or uses an atomic read-modify-write. A top above the
//! floor means that there is a slot to pop; a top below the limit means that there is room to push. A magazine without
//! a rack has its floor above all addresses and its limit below, so that pops and pushes both fail, whatever the top.
//!
//! **The top** is a [`Stake`]: neither a pop nor a push announces itself, and still another thread can empty the
//! magazine of a sleeping one. It takes the slots up to the top, and raises the floor to there. The rack stays: a call
//! of its user that was interrupted may still pop the one slot above that top, or push one there. So a loaded rack lies
//! in memory that no other thread needs, and slots are copied between it and the racks that travel.
//!
//! ```text
//!   before   head │ slot │ slot │ slot │      │      │           after   head │      │      │ word │      │      │
//!            floor ╯               top ╯       limit ╯                     limit ╯ floor, top ╯ ╰── a slot at most
//! ```
//!
//! Such a rack is shut, like those below, and the word at its floor says how far that has been raised. At its next
//! visit to the class, the user puts the rack away (unless such a slot is there), and begins with a small one, as a
//! thread does that has none.
//!
//! **Shut racks.** When an allocation loads a rack with more room, the rack is shut: slots can be popped but not
//! pushed. The first free takes the slow path, which opens it. So room for frees that nobody sees is created by frees
//! alone, and they report it (`keeper.rs`). A shut rack has its limit one word below its floor. Its room is kept in the
//! word at the floor: the last one of its head, which otherwise links racks in a store.
//!
//! **A user may end in the middle of a call**, by a signal whose handler ends the thread. Then a slot may be lost, or a
//! rack that was in hand with its slots. But whatever two stores it has ended between, nothing is handed out twice, and
//! nothing is written outside a rack, by destructors of the thread's that use the magazine either (`ended.rs`): a top
//! may be too low, not too high; and a limit is above its floor only while both belong to one rack. The next slow path,
//! or the next user, [settles](Magazine::settle) it.
//!
//! **Room** starts at 6 slots (30 of 8 bytes, 14 of 16, if the first call is a free) and quadruples with each visit to
//! the class, up to a batch: 510 slots or 32 KiB; or else 126 slots or 512 KiB (14 slots of the largest). So a
//! short-lived thread takes little.
//!
//! **Spares** (J. Bonwick's second magazine) are used once a magazine has room for a batch. When the loaded rack is
//! full, its slots move to a blank rack, which becomes a spare. When the loaded rack is empty, it is filled from a
//! spare; without one, a whole batch comes from the class, and its bytes are added to the thread's *demand*. A thread
//! keeps one spare of each class, of up to 128 KiB in any case, a longer one if it has fetched as much; and others
//! while all have no more bytes than the demand, of which 2 MiB count; and all threads no more than 32 MiB
//! (`hoard.rs`). So a thread that allocates 20 batches and frees them, over and over, visits the class 20 times, and
//! then no more. And one that only frees what others have allocated keeps one of a short class, and passes on the rest.
//! (When each kept one, threads took each other's batches, and with them the lines of each block: 31 ns instead of 12
//! for each of 16.)
//!
//! **Marks** stand in free slots of up to 1 KiB that the program has used: a free recognises a slot that is already
//! free by its mark (`mark.rs`). Larger slots are not touched: they have flags (`spans.rs`).
//!
//! A magazine belongs to one thread. Other threads may read only its count, for statistics.

use core::hint::cold_path;
use core::mem::offset_of;
use core::ptr::{self, NonNull};

use crate::sync::{AtomicPtr, Ordering, Stake, fence_light};

use super::rack::{Entry, Pile, Rack};
use super::shape::Shape;
use super::size_class::SizeClass;

/// The room of a magazine's first rack.
const FIRST_ROOM: u32 = 6;

/// Above every entry: the floor of a magazine without a rack.
const NOWHERE: *mut Entry = ptr::without_provenance_mut(usize::MAX);

// As the room of every rack is (`Shape::is_valid`).
const _: () = assert!(FIRST_ROOM % 8 == 6);

/// One thread's free slots of one class. [`forget`](Self::forget) makes one of other bytes.
#[derive(Debug)]
#[repr(C)]
pub struct Magazine {
    /// The topmost slot's entry, or the floor; a word lower while a pop is under way. Meaningless without a rack. I12:
    /// with a rack, the entries above the floor up to here are slots that belong to this magazine.
    top: Stake<Entry>,
    /// The last entry of the rack, or a word below the floor if it is shut; null without a rack. I13: of an open
    /// rack, top ≤ limit and limit − floor ≤ a batch.
    limit: AtomicPtr<Entry>,
    /// The word below the first entry with a slot: the last of the rack's head, or an entry that a seizer has emptied.
    /// Without a rack [`NOWHERE`].
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

    /// Fast path: pops the slot freed last, contents untouched, if there is one and the caller is `admitted`.
    #[inline(always)]
    pub fn pop_quick(&self, admitted: impl FnOnce() -> bool) -> Option<NonNull<u8>> {
        let top = self.top.lower();
        if admitted()
            && let Some(slot) = self.slot_at(top)
        {
            return Some(slot);
        }
        cold_path();
        self.top.set(top);
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
        if admitted()
            && let Some(entry) = self.room_at(self.top.get())
            && sign()
        {
            // SAFETY: an entry of the rack that holds no slot.
            unsafe { entry.write(slot.as_ptr()) };
            self.top.set(entry.as_ptr());
            return true;
        }
        cold_path();
        false
    }

    /// The slot at `top`, if there is one. `None` also if `top` is stale, read before another thread emptied the
    /// magazine. `top` was the magazine's top, and the caller has been admitted since.
    #[inline(always)]
    fn slot_at(&self, top: *mut Entry) -> Option<NonNull<u8>> {
        // Relaxed: what a seizer has written, the caller sees since it was admitted (partner: `Owner::admits`). If one
        // is at it, the caller lowered the top before, so that the floor remains below `top` all the same.
        if top <= self.floor.load(Ordering::Relaxed) {
            cold_path();
            return None;
        }
        // SAFETY: the top is above the floor, so both belong to one rack: without one the floor is NOWHERE. (Or they
        // did until this thread was ended, but for a destructor, as it took that rack out.) So at `top` there is a slot
        // (I12), which is not null. No seizer takes it: the floor shows what it took, or it has seen a lower top.
        Some(unsafe { NonNull::new_unchecked(top.read()) })
    }

    /// The entry above `top`, if there is room. The caller has been admitted.
    #[inline(always)]
    fn room_at(&self, top: *mut Entry) -> Option<NonNull<Entry>> {
        // Relaxed: as in `slot_at`. If a seizer is at it, there is room whether it has lowered the limit or not.
        if top >= self.limit.load(Ordering::Relaxed) {
            cold_path();
            return None;
        }
        // SAFETY: it is below the limit, so the rack is open, and the next entry lies in it (I13), or is the word at
        // the floor, if the top is too low: a shut one has its limit below the floor, and without one it is null.
        Some(unsafe { NonNull::new_unchecked(top.wrapping_add(1)) })
    }

    /// Pops the slot freed last, contents untouched.
    #[inline]
    pub fn pop(&self) -> Option<NonNull<u8>> {
        let top = self.top.get();
        let slot = self.slot_at(top)?;
        self.top.set(top.wrapping_sub(1));
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
        let Some(entry) = self.room_at(self.top.get()) else {
            return false;
        };
        // SAFETY: an entry of the rack that holds no slot.
        unsafe { entry.write(slot.as_ptr()) };
        self.top.set(entry.as_ptr());
        true
    }

    /// Leaves the magazine as a user does that ends in the middle of a pop.
    #[cfg(test)]
    pub fn end_in_the_middle(&self) {
        let _top = self.top.lower();
    }

    /// The same, of a load or an unload.
    #[cfg(test)]
    pub fn end_in_loading(&self) {
        self.set_limit(ptr::null_mut());
    }

    /// The same, of lowering a floor, after one store or after two.
    #[cfg(test)]
    pub fn end_in_lowering(&self, stores: u32) {
        let Some(raised) = self.shape().map(Shape::raised).filter(|&raised| raised > 0) else {
            return;
        };
        let first = self.floor().wrapping_sub(raised);
        self.set_limit(first.wrapping_sub(1));
        if stores == 2 {
            self.top.set(first);
        }
    }

    /// The top.
    #[cfg(test)]
    pub fn stake(&self) -> &Stake<Entry> {
        &self.top
    }

    /// After its user has ended, perhaps in the middle of a call: its top is not below its floor, and what is half
    /// loaded is no rack. (If that was in the middle of a pop, the slot is lost: whether the user got it, nobody
    /// knows.)
    #[inline]
    pub fn settle(&self) {
        if !self.has_any_rack() {
            return;
        }
        if !self.has_rack() {
            self.have_none();
        } else if self.top.get() < self.floor() {
            self.top.set(self.floor());
        }
    }

    #[inline]
    fn has_rack(&self) -> bool {
        self.is_open() || self.is_shut()
    }

    /// Makes zeroed or used memory an empty magazine; whatever was in it is forgotten.
    pub fn forget(&self) {
        self.have_none();
        self.spares.forget();
    }

    /// From here on there is no rack. (Between the two stores there is none either, though a pop may succeed.)
    fn have_none(&self) {
        self.set_limit(ptr::null_mut());
        self.set_floor(NOWHERE);
        // What becomes of the rack is done later; partner: the same thread, if a signal ends it.
        fence_light();
    }

    fn set_floor(&self, floor: *mut Entry) {
        // Release, here and below: what was written before is there when this is; partner: the same thread, if a signal
        // ends it. (Threads that are admitted after a seizer see its writes anyway.)
        self.floor.store(floor, Ordering::Release);
    }

    fn set_limit(&self, limit: *mut Entry) {
        // Release: as above.
        self.limit.store(limit, Ordering::Release);
    }

    #[inline]
    fn floor(&self) -> *mut Entry {
        // Relaxed: the caller wrote it, or was admitted after who did; or it is a snapshot.
        self.floor.load(Ordering::Relaxed)
    }

    #[inline]
    fn limit(&self) -> *mut Entry {
        // Relaxed: as above.
        self.limit.load(Ordering::Relaxed)
    }

    /// Whether the slot is in the loaded rack or in a spare. O(slots).
    #[cold]
    pub fn has(&self, slot: NonNull<u8>, class: SizeClass) -> bool {
        let has = |rack: &Rack| rack.slots().contains(&slot.as_ptr());
        self.loaded().as_ref().is_some_and(has) || self.has_in_spares(has, class)
    }

    /// Whether `has` holds for a spare: each is taken off and put back. (Not by recursion: stacks are small.)
    pub(super) fn has_in_spares(&self, has: impl Fn(&Rack) -> bool, class: SizeClass) -> bool {
        let (mut found, passed) = (false, Pile::default());
        while !found && let Some(spare) = self.take_spare(class) {
            found = has(&spare);
            passed.push(spare);
        }
        core::iter::from_fn(|| Self::take_batch(&passed, class)).for_each(|spare| self.set_spare(spare));
        found
    }

    /// How many slots there are. Any thread may call this; to threads other than the owner the result is a snapshot.
    #[inline]
    pub fn count(&self, class: SizeClass) -> u32 {
        let loaded = self.above_floor(self.top.get());
        // Another thread may have changed its rack between the two reads.
        let loaded = if loaded > class.batch() as usize { 0 } else { loaded };
        loaded as u32 + self.spares.len() * class.batch()
    }

    /// How many slots the rack has room for in all.
    #[inline]
    pub fn room(&self) -> u32 {
        if self.is_open() {
            return self.above_floor(self.limit()) as u32;
        }
        self.shape().map_or(0, Shape::room)
    }

    /// Whether there is a rack that accepts slots.
    #[inline]
    fn is_open(&self) -> bool {
        // Not without a rack: then the limit is null, or the floor NOWHERE.
        self.limit() > self.floor()
    }

    /// The shape of a shut rack; `None` if there is an open one, or none.
    #[inline]
    fn shape(&self) -> Option<Shape> {
        let (floor, limit) = (self.floor(), self.limit());
        let is_shut = limit < floor && !limit.is_null() && floor != NOWHERE;
        // SAFETY: a shut rack, which has this word at its floor (`shut`, `seize`). (Or there is a slot, by a destructor
        // of a thread that had ended in the middle of a pop, and was stopped in this push while a seizer was here.)
        let shape = is_shut.then(|| Shape::from_word(unsafe { floor.cast::<usize>().read() }));
        shape.filter(|shape| shape.is_valid())
    }

    /// Whether there is a rack that accepts no slots.
    #[inline]
    pub fn is_shut(&self) -> bool {
        self.shape().is_some()
    }

    /// Whether it has anything.
    #[inline]
    pub fn has_any(&self) -> bool {
        self.has_any_rack() || !self.spares.is_empty()
    }

    /// Whether there is a slot. A snapshot for other threads, so no rack is read; one half-way may count as a slot.
    pub fn has_any_slot(&self) -> bool {
        let floor = self.floor();
        floor != NOWHERE && !self.limit().is_null() && self.top.get() > floor || !self.spares.is_empty()
    }

    /// Whether there is a rack, or half of one.
    #[inline]
    fn has_any_rack(&self) -> bool {
        self.floor() != NOWHERE || !self.limit().is_null()
    }

    /// Whether there is no slot, nor room for one.
    pub fn is_bare(&self) -> bool {
        !self.has_rack() || self.is_shut() && self.top.get() <= self.floor()
    }

    /// Shuts the loaded rack, if there is one: from here on it accepts no slots.
    pub fn shut(&self) {
        let room = self.room();
        if room > 0 && !self.is_shut() {
            self.shut_at(self.floor(), Shape::shut(room));
        }
    }

    fn shut_at(&self, floor: *mut Entry, shape: Shape) {
        // SAFETY: the last word of the loaded rack's head, or an entry without a slot. Only `shape` reads it: the link
        // that stands there in a store is written when the rack is stored.
        unsafe { floor.cast::<usize>().write(shape.word()) };
        self.set_limit(floor.wrapping_sub(1));
        self.set_floor(floor);
        // As in `have_none`.
        fence_light();
    }

    /// Opens a shut rack and returns its room; 0 if there was none.
    #[inline]
    pub fn open(&self) -> u32 {
        let Some(shape) = self.shape() else { return 0 };
        self.lower_floor(shape);
        self.set_limit(self.floor().wrapping_add(shape.room() as usize));
        shape.room()
    }

    /// Moves what a seizer has left to the beginning of the rack: a slot at most.
    #[inline]
    fn lower_floor(&self, shape: Shape) {
        if shape.raised() > 0 {
            self.lower_raised(shape);
        }
    }

    #[cold]
    fn lower_raised(&self, shape: Shape) {
        let (floor, top) = (self.floor(), self.top.get());
        let first = floor.wrapping_sub(shape.raised());
        debug_assert!(self.above_floor(top.max(floor)) <= 1);
        // SAFETY: an entry of the loaded rack above the floor has a slot (I12).
        let left = (top > floor).then(|| unsafe { top.read() });
        // In this order: if the user ends meanwhile, what is lost is the slot. Above a floor there are only slots.
        self.set_limit(first.wrapping_sub(1));
        self.top.set(first);
        self.shut_at(first, Shape::shut(shape.room()));
        if let Some(slot) = left {
            let entry = first.wrapping_add(1);
            // SAFETY: an entry of the rack, whose slots have been taken.
            unsafe { entry.write(slot) };
            self.top.set(entry);
        }
    }

    /// For a seizer: takes the slots out, through `give`, which returns them to their spans. The rack stays, shut.
    pub fn seize(&self, give: impl FnOnce(&mut Rack)) {
        let (room, floor, seen) = (self.room(), self.floor(), self.top.seen());
        if room == 0 {
            return;
        }
        let raised = self.shape().map_or(0, Shape::raised);
        // Of a rack without slots, whose user pops in vain or has ended in that, the top may be below the floor.
        let seen = seen.max(floor);
        let count = self.above_floor(seen);
        if count > 0 {
            // SAFETY: there is a rack, so `floor` is not null.
            let first = unsafe { NonNull::new_unchecked(floor.wrapping_add(1)) };
            // SAFETY: entries with slots (I12), which the user leaves alone until this seizer lets go: the magazine
            // gives them up. The memory stays the magazine's; this rack has none, which `give` leaves alone.
            give(&mut unsafe { Rack::from_first(first, count as u32, count as u32) });
        }
        self.shut_at(seen, Shape::seized(room, raised + count));
    }

    /// [Settles](Self::settle) the magazine. If it has a rack that a seizer has left here, without a slot, takes that
    /// out.
    #[inline]
    pub fn begin_anew(&self) -> Option<Rack> {
        let Some(shape) = self.shape() else {
            self.settle();
            return None;
        };
        let (floor, top) = (self.floor(), self.top.get());
        if top < floor {
            self.top.set(floor);
        }
        if shape.is_seized() && top <= floor {
            self.unload()
        } else {
            None
        }
    }

    /// Pushes a slot below all others, if there is room. Returns whether it did. O(slots).
    ///
    /// # Safety
    ///
    /// As for [`push`](Self::push).
    #[must_use]
    pub unsafe fn push_below(&self, slot: NonNull<u8>) -> bool {
        let (floor, limit) = (self.floor(), self.limit());
        // The top is below the floor if the user has ended in the middle of a pop.
        let top = self.top.get().max(floor);
        let Some(entry) = self.room_at(top) else {
            return false;
        };
        let (lowest, count) = (floor.wrapping_add(1), self.above_floor(top));
        // As in `edit`: while slots are in two entries each, there is no rack.
        self.have_none();
        // SAFETY: the entries above the floor, with their slots, and the next one, which holds none, of a rack that was
        // open.
        unsafe {
            ptr::copy(lowest, lowest.add(1), count);
            lowest.write(slot.as_ptr());
        }
        self.load_at(entry.as_ptr(), floor, limit);
        true
    }

    /// Whether there is room for a batch: then whole batches move in and out.
    #[inline]
    pub fn is_wide(&self, class: SizeClass) -> bool {
        self.room() == class.batch()
    }

    /// The room the next rack should have: four times as much, up to a batch.
    pub fn next_room(&self, class: SizeClass) -> u32 {
        (4 * self.room() + FIRST_ROOM).min(class.batch())
    }

    /// The number of entries above the floor up to `entry`.
    #[inline]
    fn above_floor(&self, entry: *mut Entry) -> usize {
        entry.addr().wrapping_sub(self.floor().addr()) / size_of::<Entry>()
    }

    /// The loaded rack, which stays loaded, with its slots at its beginning.
    #[inline]
    fn loaded(&self) -> Option<Rack> {
        if let Some(shape) = self.shape() {
            self.lower_floor(shape);
        }
        let room = self.room();
        if room == 0 {
            return None;
        }
        // A user that has ended in the middle of a pop leaves its top below the floor.
        let top = self.top.get().max(self.floor());
        let first = NonNull::new(self.floor().wrapping_add(1))?;
        // SAFETY: the parts of the rack that `load` took in; the entries up to the top are slots (I12).
        Some(unsafe { Rack::from_first(first, room, self.above_floor(top) as u32) })
    }

    /// Takes the loaded rack out.
    pub fn unload(&self) -> Option<Rack> {
        let rack = self.loaded();
        self.have_none();
        rack
    }

    /// Loads a rack, open, with its slots. None may be loaded.
    pub fn load(&self, rack: Rack) {
        debug_assert!(self.floor() == NOWHERE);
        let floor = rack.first().as_ptr().wrapping_sub(1);
        let at = |entries: u32| floor.wrapping_add(entries as usize);
        self.load_at(at(rack.len()), floor, at(rack.room()));
    }

    /// From here on there is a rack, open, that has these.
    #[inline]
    fn load_at(&self, top: *mut Entry, floor: *mut Entry, limit: *mut Entry) {
        // First: there is no rack yet to which another top belongs.
        self.top.set(top);
        // Between the two there is none either, though a pop may succeed.
        self.set_floor(floor);
        self.set_limit(limit);
    }

    /// Changes what is in the loaded rack, if there is one; leaves it open.
    pub fn edit<R>(&self, change: impl FnOnce(&mut Rack) -> R) -> Option<R> {
        let mut rack = self.unload()?;
        let result = change(&mut rack);
        self.load(rack);
        Some(result)
    }

    /// Fills the loaded rack, which has no slots, from a batch; it is open afterwards.
    #[inline]
    pub fn fill(&self, batch: &mut Rack) {
        self.open();
        if let Some(mut rack) = self.loaded() {
            batch.pour(&mut rack);
            self.top.set(self.floor().wrapping_add(rack.len() as usize));
        }
    }

    /// Empties the loaded rack into a blank one; it is open afterwards.
    #[inline]
    pub fn drain(&self, blank: &mut Rack) {
        self.open();
        if let Some(mut rack) = self.loaded() {
            rack.pour(blank);
            self.top.set(self.floor());
        }
    }

    /// Takes out the spare set aside last.
    pub fn take_spare(&self, class: SizeClass) -> Option<Rack> {
        Self::take_batch(&self.spares, class)
    }

    /// Takes a full batch out of a pile of such.
    fn take_batch(pile: &Pile, class: SizeClass) -> Option<Rack> {
        let memory = pile.pop()?;
        // SAFETY: such a rack was pushed, by `set_spare` or `has_in_spares`.
        Some(unsafe { Rack::from_parts(memory, class.batch(), class.batch()) })
    }

    /// Sets a batch aside as a spare. There must be room for it.
    pub fn set_spare(&self, batch: Rack) {
        debug_assert!(batch.len() == batch.room());
        self.spares.push(batch);
    }

    /// How many spares there are.
    #[inline]
    pub fn spares(&self) -> u32 {
        self.spares.len()
    }
}
