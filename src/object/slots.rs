//! How slots move between a thread's magazines, the classes' stores, and spans: the slow path of `malloc` and `free`.
//!
//! ```text
//!   magazine empty   a spare ─▶ a batch in store ─▶ slots out of spans ─▶ a new span ─▶ a run ─▶ everybody else's
//!   magazine full    more room ─▶ the spares ─▶ store ─▶ spans
//! ```
//!
//! **Racks** carry slots, and are slots themselves (`rack.rs`): they are taken out of spans one by one, and go home
//! again when there are too many blank ones. No class lock is held and no magazine is used meanwhile, so this does not
//! recurse. The rack that a magazine has loaded is the thread's own (`plot.rs`), and stays with it. When there is no
//! memory for a rack, slots move out of spans and home one by one. There, where a magazine may have no more room
//! (`hoard.rs`), where stores and magazines are emptied for the soft limit (`relief.rs`), and where a store has far too
//! much (`central.rs`), a call may wait for the holder of a class lock.

use core::ptr::NonNull;

use crate::fatal::{self, Number};
use crate::source::Source;
use crate::units::{PageIndex, PageRun};

use super::batches::batch_bytes;
use super::hoard::FREE_BYTES;
use super::mark;
use super::plot::Plot;
use super::rack::{Few, RACKS_AT_ONCE, Rack};
use super::size_class::SizeClass;
use super::spans::Room;
use super::{Magazine, Objects, Seat, Thread};

/// How far apart the slots should be that two threads allocate: two cache lines, which some processors fetch together.
const APART_BYTES: usize = 128;

// A rack on the stack has room for them.
const _: () = assert!(RACKS_AT_ONCE <= Few::ROOM);

impl<S: Source + 'static> Objects<S> {
    #[inline]
    pub(super) fn allocate_slot(&self, thread: &Thread, class: SizeClass) -> Option<NonNull<u8>> {
        // The second attempt is for when there is no memory for a rack.
        let slot = self
            .pop_or_refill(thread, class)
            .or_else(|| self.take_slot(thread.cache(), class));
        match slot {
            Some(slot) => Some(self.hand_out(slot, class)),
            None => self.allocate_without_span(thread, class),
        }
    }

    /// The same when there is no memory for a span.
    #[cold]
    fn allocate_without_span(&self, thread: &Thread, class: SizeClass) -> Option<NonNull<u8>> {
        self.allocate_in_run(thread, thread.cache(), class).or_else(|| {
            self.try_at_last(thread, |cache| {
                let slot = self.take_slot(cache, class).map(|slot| self.hand_out(slot, class));
                slot.or_else(|| self.allocate_in_run(thread, cache, class))
            })
        })
    }

    /// A slot that can be had cheaply: at the heap's limit no span is searched for.
    pub(super) fn slot_at_hand(&self, thread: &Thread, class: SizeClass) -> Option<NonNull<u8>> {
        let slot = if self.heap.grown() < self.heap.limit() {
            self.pop_or_refill(thread, class)
        } else {
            thread.magazine(class).pop()
        };
        Some(self.hand_out(slot?, class))
    }

    #[inline]
    fn pop_or_refill(&self, thread: &Thread, class: SizeClass) -> Option<NonNull<u8>> {
        let magazine = thread.magazine(class);
        magazine.pop().or_else(|| {
            self.refill(thread, magazine, class);
            magazine.pop()
        })
    }

    /// Hands a slot that the caller owns to the program.
    #[inline]
    pub(super) fn hand_out(&self, slot: NonNull<u8>, class: SizeClass) -> NonNull<u8> {
        if class.is_flagged() {
            // SAFETY: we own the slot.
            unsafe { self.spans.hand_out(slot) };
        } else {
            // SAFETY: as above; a word long at least, and aligned for one.
            unsafe { mark::wipe(slot.as_ptr()) };
        }
        slot
    }

    /// Takes a slot back. Aborts if it turns out to be free already, or not to be a slot.
    ///
    /// # Safety
    ///
    /// The caller owns it, of the class and of this heap; afterwards it does not.
    #[inline]
    pub(super) unsafe fn free_slot(&self, thread: &Thread, class: SizeClass, slot: NonNull<u8>) {
        let mut class = class;
        if class.is_flagged() {
            match self.spans.flag_of(slot) {
                Some(flag) => flag.raise(),
                None => match self.take_room(slot, class.bytes()) {
                    Some(Room::Slot(longer)) => class = longer,
                    Some(Room::Run(run)) => return self.free_to_shelf(thread, run),
                    None => self.abort_flagged(slot, class),
                },
            }
        } else {
            // SAFETY: as promised; a word long at least, and aligned for one.
            unsafe {
                if mark::is_on(slot.as_ptr()) {
                    return self.leave_marked(thread, slot, class);
                }
                mark::write(mark::key(), slot.as_ptr());
            }
        }
        let magazine = thread.magazine(class);
        // SAFETY: as promised.
        while !unsafe { magazine.push(slot) } {
            Self::begin_anew(thread, magazine);
            let begins = Self::begins_with_free(class) && (magazine.room() == 0 || magazine.is_shut());
            // SAFETY: as promised.
            if begins && unsafe { self.begin_with_free(thread, magazine, class, slot) } {
                return;
            }
            if !self.make_room(thread, magazine, class) {
                // SAFETY: as promised.
                unsafe { self.give_slot(thread.cache(), class, slot) };
                self.tell(class.bytes());
                return;
            }
        }
    }

    /// After a push by the inlined fast path, which has refused a slot of up to 1 KiB, and noted at which seat in the
    /// calling thread's `own` structure. Returns the slot's class. Aborts if the seat is that of another class: then
    /// the layout was wrong.
    ///
    /// # Safety
    ///
    /// The caller owns the slot, and uses the structure.
    #[cold]
    pub unsafe fn class_refused(&self, own: Option<NonNull<Thread>>, slot: NonNull<u8>) -> SizeClass {
        let class = self.spans.class_of(slot.as_ptr());
        let seat = Seat::from(class);
        // Without a structure of its own, the note is a placeholder's, in which many threads take notes.
        // SAFETY: a structure is never destroyed.
        let is_noted = own.is_none_or(|own| unsafe { own.as_ref() }.has_refused_at(seat));
        if class.is_flagged() || !is_noted {
            fatal::abort(
                "a block was freed with the wrong layout; its address, its size class",
                Number::Address(slot.addr().get()),
                Number::Count(class.bytes()),
            );
        }
        class
    }

    /// Refills an empty magazine, if there are slots: with a spare, a batch from the store, or slots out of spans. A
    /// magazine that gets more room by this, or was shut before, is left shut.
    fn refill(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) {
        Self::begin_anew(thread, magazine);
        let is_open = magazine.room() > 0 && !magazine.is_shut();
        let is_wider = self.refill_open(thread, magazine, class);
        if is_wider || !is_open {
            magazine.shut();
        }
    }

    /// Does the work of `refill`, but leaves the magazine open. Returns whether it has more room now.
    fn refill_open(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) -> bool {
        if let Some(batch) = thread.take_spare(class) {
            return self.load_batch(thread, magazine, class, batch);
        }
        self.heed_calls(thread);
        let few = self.is_to_be_small(magazine, class);
        let (is_wide, mut is_wider) = (magazine.is_wide(class), false);
        if !few && !is_wide {
            is_wider = self.widen(thread, magazine, magazine.next_room(class));
        } else if !few && let Some(batch) = self.spans.take_batch(class, thread.hint()) {
            thread.demand().raise(batch_bytes(class), &self.hoard);
            return self.load_batch(thread, magazine, class, batch);
        }
        let Some(mut rack) = magazine.unload() else {
            return is_wider;
        };
        // A magazine that still grows is not filled completely.
        let room = rack.room();
        let wanted = match room {
            _ if few => room.min(Self::few_of(class)),
            _ if room == class.batch() => room,
            _ => room / 2 + 1,
        };
        self.take_slots(thread.cache(), class, wanted, &mut rack);
        if is_wide && !few {
            thread.demand().raise(rack.len() as usize * class.bytes(), &self.hoard);
        }
        magazine.load(rack);
        self.keep_below(thread);
        is_wider
    }

    /// Loads a batch to allocate from, in order if it almost is. Slots of more than 1 KiB stay as they are: their
    /// batches are shorter, so to look costs more for each slot, and what order would gain there was not measured.
    /// Returns whether the magazine has more room now.
    fn load_batch(&self, thread: &Thread, magazine: &Magazine, class: SizeClass, mut batch: Rack) -> bool {
        if !class.is_flagged() {
            batch.straighten();
        }
        let is_narrow = !magazine.is_wide(class);
        if is_narrow && !self.widen(thread, magazine, class.batch()) {
            self.store(thread, class, batch);
            return false;
        }
        magazine.fill(&mut batch);
        self.recycle(thread, Some(batch));
        is_narrow
    }

    /// Makes room in a magazine that is full or shut; if it may not have more, its slots go home. Fails if there is no
    /// memory for a rack and no rack to empty.
    fn make_room(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) -> bool {
        if self.reopen(magazine, class) {
            return true;
        }
        self.heed_calls(thread);
        let has_room = self.clear_or_widen(thread, magazine, class);
        // Also if slots went home: the keeper may find pages without a live block there.
        self.tell_room(class, magazine.room());
        has_room
    }

    /// The same for a magazine that has no more room than it shows.
    fn clear_or_widen(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) -> bool {
        if self.is_to_be_small(magazine, class) && self.bring_home(thread, magazine, class) {
            return true;
        }
        let is_wide = magazine.is_wide(class);
        let more = if is_wide {
            0
        } else {
            Self::counted_room(magazine, class)
        };
        if !thread.demand().keep_room(more, &self.hoard) {
            if self.give_loaded_within(thread, magazine, class) {
                return true;
            }
            thread.demand().keep_room_anyway(more, &self.hoard);
        }
        let has_room = if is_wide {
            self.set_batch_aside(thread, magazine, class)
        } else {
            self.widen(thread, magazine, magazine.next_room(class))
        };
        if !has_room {
            thread.demand().drop_room(more);
            return self.give_loaded(thread, magazine, class);
        }
        true
    }

    /// Makes the slots of a full magazine a spare, or stores them. Fails if there is no memory for a rack.
    fn set_batch_aside(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) -> bool {
        let Some(mut batch) = self.blank(thread, class.batch()) else {
            return false;
        };
        magazine.drain(&mut batch);
        let hoard = (!self.is_over()).then_some(&self.hoard);
        if let Some(other) = thread.set_spare(class, batch, hoard) {
            self.store(thread, class, other);
        }
        true
    }

    /// Gives a magazine a rack with more room, and the slots that it has. Fails if there is no memory for one.
    fn widen(&self, thread: &Thread, magazine: &Magazine, room: u32) -> bool {
        let Some(mut wider) = self.own_blank(thread, room) else {
            return false;
        };
        if let Some(mut before) = magazine.unload() {
            before.pour(&mut wider);
            // SAFETY: the magazine had it from the plot.
            unsafe { thread.plot().put(before) };
        }
        magazine.load(wider);
        true
    }

    /// How many bytes of room count, if frees widen this magazine: beyond a little, all. (What an allocation widens
    /// does not: the thread takes as many slots at once.)
    fn counted_room(magazine: &Magazine, class: SizeClass) -> usize {
        let (room, next) = (magazine.room(), magazine.next_room(class));
        if room == 0 || next as usize * class.bytes() <= FREE_BYTES {
            0
        } else {
            (next - room) as usize * class.bytes()
        }
    }

    /// If another thread has emptied the magazine meanwhile: it begins as one that has no rack. Also settles it, in
    /// case the thread is ending in the middle of another call.
    #[inline]
    fn begin_anew(thread: &Thread, magazine: &Magazine) {
        if let Some(rack) = magazine.begin_anew() {
            // SAFETY: the magazine had it from the plot.
            unsafe { thread.plot().put(rack) };
        }
    }

    /// Whether a thread's first free of the class is treated apart.
    #[inline]
    pub(super) fn begins_with_free(class: SizeClass) -> bool {
        class.bytes() < APART_BYTES
    }

    /// Takes the first slot that a thread frees into a magazine that has no room, or is shut, and puts it at the
    /// bottom: below the slots that are there already, or, without a rack, below some from spans. It may well be
    /// another thread's, and lie next to blocks of that one: if this thread got it again, both would write to one cache
    /// line again and again (the passive false sharing of Hoard's authors). If the magazine is full to the last slot,
    /// this one goes home. (If it is empty, though not without a rack, nothing lies above.) Fails if there is no memory
    /// for a rack.
    ///
    /// # Safety
    ///
    /// The caller owns the slot, of the class and of this heap; if it was taken, it does not.
    #[cold]
    unsafe fn begin_with_free(
        &self,
        thread: &Thread,
        magazine: &Magazine,
        class: SizeClass,
        slot: NonNull<u8>,
    ) -> bool {
        if !self.reopen(magazine, class) {
            let apart = (APART_BYTES / class.bytes()) as u32;
            let rooms = Plot::rooms().find(|&room| room > apart);
            let room = rooms.unwrap_or(apart).max(magazine.next_room(class));
            let Some(mut rack) = self.own_blank(thread, room) else {
                return false;
            };
            // Who takes whole spans leaves none at home. (A free does not wait for the lock, as `take_slots` may.)
            self.take_at_home(class, apart, &mut rack);
            if rack.is_empty() {
                self.take_fresh(thread.cache(), class, apart, &mut rack);
            }
            magazine.load(rack);
            self.tell_room(class, room);
        }
        // SAFETY: as promised.
        let push_below = || unsafe { magazine.push_below(slot) };
        // A magazine with its longest rack would be drained, and the slot lie alone in it.
        let widens = || !magazine.is_wide(class) && self.make_room(thread, magazine, class);
        if !(push_below() || widens() && push_below()) {
            // SAFETY: as promised.
            unsafe { self.give_slot(thread.cache(), class, slot) };
        }
        true
    }

    /// Opens a magazine that is shut. Returns whether it was.
    fn reopen(&self, magazine: &Magazine, class: SizeClass) -> bool {
        let room = magazine.open();
        if room > 0 {
            self.tell_room(class, room);
        }
        room > 0
    }

    /// Reports room in a magazine to the keeper, because frees into that room go unseen. Called by frees alone: after
    /// a free, the thread checks whether a keeper should be started.
    fn tell_room(&self, class: SizeClass, room: u32) {
        self.tell(room as usize * class.bytes());
    }

    /// Sends the loaded slots home and keeps the rack. Returns whether there is a rack.
    #[cold]
    fn give_loaded(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) -> bool {
        magazine
            .edit(|rack| self.give_slots(thread.cache(), class, rack))
            .is_some()
    }

    /// The same, unless the class lock is held for some milliseconds. Returns whether it did.
    #[cold]
    fn give_loaded_within(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) -> bool {
        let leaving = magazine
            .edit(|rack| self.central(class).give_within(&self.spans, class, rack))
            .flatten();
        if let Some(leaving) = leaving {
            self.give_spans(thread.cache(), class, leaving);
        }
        leaving.is_some()
    }

    /// Sends the loaded slots home and leaves the magazine without a rack. Returns how many pages that freed.
    pub(super) fn strip(&self, thread: &Thread, cache: Option<usize>, class: SizeClass) -> usize {
        let Some(mut rack) = thread.magazine(class).unload() else {
            return 0;
        };
        let pages = self.give_slots(cache, class, &mut rack);
        // SAFETY: the magazine had it from the plot.
        unsafe { thread.plot().put(rack) };
        pages
    }

    /// Stores a batch in its class, or else returns it to its spans. (The keeper has been told of the room it had.)
    pub(super) fn store(&self, thread: &Thread, class: SizeClass, batch: Rack) {
        let hint = thread.hint();
        if let Err(batch) = self.spans.store_batch(class, batch, hint) {
            self.bring(thread.cache(), class, batch, hint);
        }
    }

    /// Returns a batch to its spans; if the lock is held for long, stores it.
    fn bring(&self, cache: Option<usize>, class: SizeClass, batch: Rack, hint: usize) {
        if let Some((rack, leaving)) = self.central(class).give_batch(&self.spans, class, batch, hint) {
            self.give_spans(cache, class, leaving);
            self.keep(cache, rack, hint);
        }
    }

    // ---- slots
    // --------------------------------------------------------------------------------------------------------------

    /// Takes up to `wanted` slots of a class, from its spans or, if the rack is empty, a new one, into a rack that has
    /// room for them. Takes none if there is no memory.
    pub(super) fn take_slots(&self, cache: Option<usize>, class: SizeClass, wanted: u32, rack: &mut Rack) {
        loop {
            let is_busy = !self.take_at_home(class, wanted, rack);
            if !rack.is_empty() {
                return;
            }
            // A thread that takes few slots at a time finds batches that others have stored.
            if !is_busy && let Some((_pass, batch)) = self.take_announced(class) {
                self.bring(cache, class, batch, 0);
                continue;
            }
            self.take_fresh(cache, class, wanted, rack);
            if is_busy && rack.is_empty() {
                // The last resort before failing.
                self.tell_filled(self.central(class).take_at_last(&self.spans, class, wanted, rack));
            }
            return;
        }
    }

    /// Takes up to `wanted` slots of a class from its spans. Returns `false` if its lock is held for long.
    #[inline]
    fn take_at_home(&self, class: SizeClass, wanted: u32, rack: &mut Rack) -> bool {
        let filled = self.central(class).take(&self.spans, class, wanted, rack);
        self.tell_filled(filled.unwrap_or(0));
        filled.is_some()
    }

    /// A slot of a class, contents untouched.
    pub(super) fn take_slot(&self, cache: Option<usize>, class: SizeClass) -> Option<NonNull<u8>> {
        let mut few = Few::default();
        // SAFETY: used here only.
        let mut rack = unsafe { few.rack() };
        self.take_slots(cache, class, 1, &mut rack);
        NonNull::new(rack.pop()?)
    }

    /// Returns all slots of a rack to their spans, and dissolved spans to the heap. Returns how many pages those have.
    pub(super) fn give_slots(&self, cache: Option<usize>, class: SizeClass, rack: &mut Rack) -> usize {
        if rack.is_empty() {
            return 0;
        }
        let leaving = self.central(class).give(&self.spans, class, rack);
        self.give_spans(cache, class, leaving)
    }

    /// Returns one slot, and a dissolved span to the heap. Returns how many pages that has.
    ///
    /// # Safety
    ///
    /// The caller owns it, of the class and of this heap; afterwards it does not.
    pub(super) unsafe fn give_slot(&self, cache: Option<usize>, class: SizeClass, slot: NonNull<u8>) -> usize {
        let mut few = Few::default();
        // SAFETY: used here only; the caller's promise.
        let mut rack = unsafe { few.of(slot) };
        self.give_slots(cache, class, &mut rack)
    }

    /// Returns all slots of a rack, and the rack. Returns how many pages that freed.
    pub(super) fn give_rack(&self, cache: Option<usize>, class: SizeClass, rack: Option<Rack>) -> usize {
        rack.map_or(0, |mut rack| {
            let pages = self.give_slots(cache, class, &mut rack);
            pages + self.keep(cache, rack, 0)
        })
    }

    /// Frees the pages of dissolved spans, linked by [`Central::give`]. Returns how many.
    ///
    /// [`Central::give`]: super::central::Central::give
    pub(super) fn give_spans(&self, cache: Option<usize>, class: SizeClass, mut leaving: Option<PageIndex>) -> usize {
        let mut pages = 0;
        while let Some(span) = leaving {
            leaving = self.spans.entry(span).behind.get();
            self.tell_left(class, span);
            self.free_run(cache, PageRun::known(span.0, class.pages()));
            pages += class.pages();
        }
        pages
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::alloc::Layout;
    use core::cell::Cell;
    use core::ops::Deref;

    use super::*;
    use crate::object::resting::{Parts, Prints, Resting};
    use crate::source::Region;

    /// A heap, and the structure of a thread that has entered.
    fn enter() -> (&'static Objects<Region>, impl Deref<Target = Thread>) {
        let objects = Objects::for_test(16 << 20, 64, false);
        // SAFETY: never destroyed.
        let own: &'static Thread = unsafe { objects.enlist().unwrap().as_ref() };
        (objects, own.enter(objects).unwrap())
    }

    /// A thread's stack may have 16 KiB, and a free that looks doubtful looks through all of them.
    #[test]
    fn a_slot_is_found_among_many_spares_with_little_stack() {
        let ((objects, own), layout) = (enter(), Layout::new::<u64>());
        let class = SizeClass::of(8, 8).unwrap();
        let blocks: std::vec::Vec<_> = (0..60 * class.batch())
            .map(|_| objects.allocate(&own, layout).unwrap())
            .collect();
        own.demand().raise(2 << 20, &objects.hoard);
        // SAFETY: freed with its layout, by a thread that has entered.
        let free = |&block| unsafe { objects.free(&own, block, layout) };
        blocks.iter().for_each(free);
        let magazine = own.magazine(class);
        let spares = magazine.spares();
        assert!(spares > 50, "{spares}");
        let (least, most) = (Cell::new(usize::MAX), Cell::new(0));
        let is_last = |_: &_| {
            let here = 0_u8;
            let at = core::hint::black_box(&raw const here).addr();
            least.set(least.get().min(at));
            most.set(most.get().max(at));
            false
        };
        assert!(!magazine.has_in_spares(is_last, class));
        assert!(most.get() - least.get() < 1024, "{} bytes", most.get() - least.get());
        // Wherever it lies; and none of them is lost.
        assert!(blocks.iter().step_by(101).all(|&block| magazine.has(block, class)));
        assert_eq!(magazine.spares(), spares);
    }

    /// Also where all slots of the class's spans are out.
    #[test]
    fn a_thread_that_frees_first_is_not_given_that_slot() {
        for class in SizeClass::all().filter(|&class| Objects::<Region>::begins_with_free(class)) {
            let (objects, own) = enter();
            let all = (0..class.slots()).map(|_| objects.take_slot(None, class).unwrap());
            let first = objects.hand_out(all.last().unwrap(), class);
            // SAFETY: the test owns it, and has entered.
            unsafe { objects.free_slot(&own, class, first) };
            let (magazine, apart) = (own.magazine(class), APART_BYTES / class.bytes());
            assert_eq!(magazine.count(class) as usize, 1 + apart, "{class:?}");
            let lowest = core::iter::from_fn(|| magazine.pop()).last();
            assert_eq!(lowest, Some(first), "{class:?}");
        }
    }

    /// A thread works with small blocks, and its shelf rests.
    #[test]
    fn who_gives_up_a_shelf_goes_on_hoarding_slots() {
        let (objects, own) = enter();
        let resting = Resting::default();
        let shelf = (0..9).map(|_| resting.note(Prints::of(1, core::iter::empty()))).last();
        own.demand().raise(1000, &objects.hoard);
        assert!(own.demand().keep_spare(1000, false, &objects.hoard));
        assert_eq!(objects.empty_seized(&own, shelf.unwrap()), 0);
        assert_eq!(own.demand().part(), 1);
        objects.empty_seized(&own, Parts::ALL);
        assert_eq!(own.demand().part(), 0);
    }
}
