//! How slots go between a thread's magazines, the stores of classes, and spans: the slow half of `malloc` and `free`.
//!
//! ```text
//!   magazine empty   its spare ─▶ a batch in store ─▶ slots out of spans ─▶ a new span ─▶ everybody else's
//!   magazine full    more room ─▶ the spare's place ─▶ store ─▶ spans
//! ```
//!
//! **Racks** are what slots go in (`rack.rs`), and slots themselves: out of spans one by one, home again where there
//! are too many blank ones. No lock of a class is held meanwhile, nor is any magazine used, so nothing here comes back
//! to where it began. Where there is no memory for a rack slots go out of spans, and home, one by one: there, and
//! where stores and magazines are emptied for the soft limit (`relief.rs`), a call may wait for who holds the lock of a
//! class.

use core::ptr::NonNull;

use crate::source::Source;
use crate::units::{PageCount, PageIndex, PageRun};

use super::mark;
use super::rack::{Blanks, Few, RACKS_AT_ONCE, Rack};
use super::size_class::SizeClass;
use super::spans::Room;
use super::{Magazine, Objects, Thread};

// As many as there is room for on the stack.
const _: () = assert!(RACKS_AT_ONCE <= Few::ROOM);

impl<S: Source + 'static> Objects<S> {
    #[inline]
    pub(super) fn allocate_slot(&self, thread: &Thread, class: SizeClass) -> Option<NonNull<u8>> {
        // Where there is no memory for a rack, or for a span.
        let slot = self
            .pop_or_refill(thread, class)
            .or_else(|| self.take_slot(thread.cache(), class))
            .or_else(|| self.try_at_last(thread, || self.take_slot(thread.cache(), class)))?;
        Some(self.hand_out(slot, class))
    }

    /// A slot, if there is one without much ado: at the heap's limit no span is looked for.
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

    /// A slot of the caller's becomes the program's.
    #[inline]
    pub(super) fn hand_out(&self, slot: NonNull<u8>, class: SizeClass) -> NonNull<u8> {
        if class.is_flagged() {
            // SAFETY: the slot is ours.
            unsafe { self.spans.hand_out(slot) };
        } else {
            // SAFETY: as above: a word long at least, and aligned for one.
            unsafe { mark::wipe(slot.as_ptr()) };
        }
        slot
    }

    /// Takes a slot back. Aborts if it is found to be free, or is none.
    ///
    /// # Safety
    ///
    /// It is one of the class and of this heap, and the caller's; it is not afterwards.
    #[inline]
    pub(super) unsafe fn free_slot(&self, thread: &Thread, class: SizeClass, slot: NonNull<u8>) {
        let mut class = class;
        if class.is_flagged() {
            match self.spans.flag_of(slot) {
                Some(flag) => flag.raise(),
                None => match self.take_room(slot, class.bytes()) {
                    Some(Room::Slot(longer)) => class = longer,
                    Some(Room::Run(run)) => return self.free_roomy_run(thread, run),
                    None => {
                        self.is_free_already(thread, slot, class, 0);
                    }
                },
            }
        } else {
            // SAFETY: as promised: a word long at least, and aligned for one.
            unsafe {
                if let Some(number) = mark::seems_free(slot.as_ptr())
                    && self.is_free_already(thread, slot, class, number)
                {
                    return;
                }
                mark::write(mark::key(), slot.as_ptr());
            }
        }
        let magazine = thread.magazine(class);
        // SAFETY: as promised.
        while !unsafe { magazine.push(slot) } {
            if !self.make_room(thread, magazine, class) {
                // SAFETY: as promised.
                unsafe { self.give_slot(thread.cache(), class, slot) };
                return;
            }
        }
    }

    /// Brings slots to an empty magazine, if there are any: its spare, a batch in store, or some out of spans. Where it
    /// gets more room by that, and where it was shut before, it is shut.
    fn refill(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) {
        let is_open = magazine.room() > 0 && !magazine.is_shut();
        let is_wider = self.refill_open(thread, magazine, class);
        if is_wider || !is_open {
            magazine.shut();
        }
    }

    /// The same, and leaves it open. Whether it has more room now.
    fn refill_open(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) -> bool {
        if let Some(batch) = magazine.take_spare(class) {
            self.recycle(thread, magazine.load(batch));
            return false;
        }
        self.heed_calls(thread);
        let few = self.is_to_be_small(magazine, class);
        let mut is_wider = false;
        if !few && !magazine.is_wide(class) {
            if let Some(wider) = self.blank(thread, magazine.next_room(class)) {
                self.recycle(thread, magazine.load(wider));
                is_wider = true;
            }
        } else if !few && let Some(batch) = self.central(class).take_batch(&self.spans, class, thread.hint()) {
            self.recycle(thread, magazine.load(batch));
            return false;
        }
        let Some(mut rack) = magazine.unload() else {
            return false;
        };
        // Not all that there is room for while that grows.
        let room = rack.room();
        let wanted = match room {
            _ if few => room.min(Self::few_of(class)),
            _ if room == class.batch() => room,
            _ => room / 2 + 1,
        };
        self.take_slots(thread.cache(), class, wanted, &mut rack);
        let _none = magazine.load(rack);
        self.keep_below(thread);
        is_wider
    }

    /// Makes room in a magazine that is full or shut. Whether it could: not where there is no memory for a rack, and
    /// none to empty.
    fn make_room(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) -> bool {
        let opened = magazine.open();
        if opened > 0 {
            self.tell_room(class, opened);
            return true;
        }
        self.heed_calls(thread);
        if self.is_to_be_small(magazine, class) && self.bring_home(thread, magazine, class) {
            return true;
        }
        let is_wide = magazine.is_wide(class);
        if is_wide && let Some(batch) = magazine.take_spare(class) {
            self.store(thread, class, batch);
        }
        let Some(mut blank) = self.blank(thread, magazine.next_room(class)) else {
            return self.give_loaded(thread, magazine, class);
        };
        let full = magazine.unload();
        if is_wide && let Some(full) = full {
            magazine.set_spare(full);
        } else if let Some(mut full) = full {
            full.pour(&mut blank);
            self.recycle(thread, Some(full));
        }
        let room = blank.room();
        let _none = magazine.load(blank);
        self.tell_room(class, room);
        true
    }

    /// Tells the keeper of room in a magazine: what is freed into it nobody sees. By frees alone, behind which somebody
    /// looks whether one is to be started.
    fn tell_room(&self, class: SizeClass, room: u32) {
        self.tell(room as usize * class.bytes());
    }

    /// Gives home what is loaded, and keeps the rack. Whether there is one.
    #[cold]
    fn give_loaded(&self, thread: &Thread, magazine: &Magazine, class: SizeClass) -> bool {
        let rack = magazine.unload().map(|mut rack| {
            self.give_slots(thread.cache(), class, &mut rack);
            magazine.load(rack)
        });
        rack.is_some()
    }

    /// A batch goes into the store of its class, or else to its spans. (The keeper has been told of the room it had.)
    pub(super) fn store(&self, thread: &Thread, class: SizeClass, batch: Rack) {
        let hint = thread.hint();
        if let Err(batch) = self.central(class).store_batch(&self.spans, class, batch, hint) {
            self.bring(thread.cache(), class, batch, hint);
        }
    }

    /// A batch goes to its spans, or, if others are at work there for long, into store.
    fn bring(&self, cache: Option<usize>, class: SizeClass, batch: Rack, hint: usize) {
        if let Some((rack, leaving)) = self.central(class).give_batch(&self.spans, class, batch, hint) {
            self.give_spans(cache, class, leaving);
            self.keep(cache, rack, hint);
        }
    }

    // ---- slots
    // --------------------------------------------------------------------------------------------------------------

    /// Up to `wanted` slots of a class, from its spans or a new one, into a rack that has room for them. None if there
    /// is no memory for one.
    pub(super) fn take_slots(&self, cache: Option<usize>, class: SizeClass, wanted: u32, rack: &mut Rack) {
        let central = self.central(class);
        loop {
            let filled = central.take(&self.spans, class, wanted, rack);
            self.tell_filled(filled.unwrap_or(0));
            let is_busy = filled.is_none();
            if !rack.is_empty() {
                return;
            }
            // A thread that takes few at a time, where others have left batches.
            if !is_busy && let Some(batch) = central.take_batch(&self.spans, class, 0) {
                self.bring(cache, class, batch, 0);
                continue;
            }
            match self.new_span(cache, class) {
                Some(run) => central.take_fresh(&self.spans, class, run, wanted, rack),
                // Before saying no.
                None if is_busy => self.tell_filled(central.take_at_last(&self.spans, class, wanted, rack)),
                None => {}
            }
            return;
        }
    }

    /// A slot of a class, as it is.
    pub(super) fn take_slot(&self, cache: Option<usize>, class: SizeClass) -> Option<NonNull<u8>> {
        let mut few = Few::default();
        // SAFETY: used here only.
        let mut rack = unsafe { few.rack() };
        self.take_slots(cache, class, 1, &mut rack);
        NonNull::new(rack.pop()?)
    }

    /// Gives slots back to their spans, all of the rack's, and spans that are none any more to the heap; how many pages
    /// those have.
    pub(super) fn give_slots(&self, cache: Option<usize>, class: SizeClass, rack: &mut Rack) -> usize {
        if rack.is_empty() {
            return 0;
        }
        let leaving = self.central(class).give(&self.spans, class, rack);
        self.give_spans(cache, class, leaving)
    }

    /// Gives one slot back.
    ///
    /// # Safety
    ///
    /// It is one of the class and of this heap, and the caller's; it is not afterwards.
    pub(super) unsafe fn give_slot(&self, cache: Option<usize>, class: SizeClass, slot: NonNull<u8>) {
        let mut few = Few::default();
        // SAFETY: used here only; the caller's promise.
        let mut rack = unsafe { few.of(slot) };
        self.give_slots(cache, class, &mut rack);
    }

    /// Gives back all slots of a rack, and the rack; how many pages that freed.
    pub(super) fn give_rack(&self, cache: Option<usize>, class: SizeClass, rack: Option<Rack>) -> usize {
        rack.map_or(0, |mut rack| {
            let pages = self.give_slots(cache, class, &mut rack);
            pages + self.keep(cache, rack, 0)
        })
    }

    /// Gives the pages of spans back that are none any more, as [`Central::give`] has linked them; how many.
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

    fn new_span(&self, cache: Option<usize>, class: SizeClass) -> Option<PageRun> {
        let run = self.pages(cache, PageCount(class.pages()))?.run;
        self.covers(cache, run)?;
        Some(run)
    }

    // ---- racks
    // --------------------------------------------------------------------------------------------------------------

    /// A blank rack. `None` if there is no memory for one.
    fn blank(&self, thread: &Thread, room: u32) -> Option<Rack> {
        let own = thread.stock().pop(room);
        own.or_else(|| self.blanks.take(&self.spans, room, thread.hint()))
            .or_else(|| self.make_racks(thread, room))
    }

    /// A new rack, and some for the thread's stock.
    #[cold]
    fn make_racks(&self, thread: &Thread, room: u32) -> Option<Rack> {
        if !self.blanks.may_make(room) {
            return None;
        }
        let mut few = Few::default();
        // SAFETY: used here only.
        let mut slots = unsafe { few.rack() };
        // Nobody is waited for: it goes without, too.
        let (class, cache) = (Rack::class(room)?, thread.cache());
        let central = self.central(class);
        let wanted = Rack::at_once(room);
        let filled = central.take(&self.spans, class, wanted, &mut slots);
        self.tell_filled(filled.unwrap_or(0));
        if slots.is_empty()
            && let Some(run) = self.new_span(cache, class)
        {
            central.take_fresh(&self.spans, class, run, wanted, &mut slots);
        }
        let mut racks = core::iter::from_fn(|| slots.pop())
            .filter_map(NonNull::new)
            .map(|slot| {
                self.blanks.count_made(room);
                // SAFETY: a slot of a class for it, which is nobody else's.
                unsafe { Rack::new(slot, room) }
            });
        let first = racks.next();
        racks.for_each(|rack| self.recycle(thread, Some(rack)));
        if first.is_none() {
            self.blanks.refused(room);
        }
        first
    }

    /// A blank rack is not needed any more.
    fn recycle(&self, thread: &Thread, blank: Option<Rack>) {
        if let Some(Err(blank)) = blank.map(|blank| thread.stock().push(blank)) {
            self.keep(thread.cache(), blank, thread.hint());
        }
    }

    /// The same; how many pages that freed.
    fn keep(&self, cache: Option<usize>, blank: Rack, hint: usize) -> usize {
        debug_assert!(blank.is_empty());
        self.blanks
            .put(&self.spans, blank, hint)
            .map_or_else(|blank| self.unmake_rack(cache, blank, hint), |()| 0)
    }

    /// A rack goes home to its span; if others are at work there for long, it is kept after all.
    #[cold]
    fn unmake_rack(&self, cache: Option<usize>, blank: Rack, hint: usize) -> usize {
        let room = blank.room();
        let Some(class) = Rack::class(room) else { return 0 };
        let (mut few, memory) = (Few::default(), blank.into_memory());
        // SAFETY: used here only; a slot of this class (`make_racks`).
        let mut slots = unsafe { few.of(memory) };
        match self.central(class).give_soon(&self.spans, class, &mut slots) {
            Some(leaving) => {
                self.blanks.count_unmade(room);
                self.give_spans(cache, class, leaving)
            }
            None => {
                // SAFETY: what it was.
                let blank = unsafe { Rack::new(memory, room) };
                self.blanks.put_anyway(&self.spans, blank, hint);
                0
            }
        }
    }

    /// Gives away the blank racks of a thread; how many pages that freed.
    pub(super) fn give_stock(&self, thread: &Thread, cache: Option<usize>) -> usize {
        let mut pages = 0;
        for room in Blanks::rooms() {
            while let Some(blank) = thread.stock().pop(room) {
                pages += self.keep(cache, blank, 0);
            }
        }
        pages
    }

    /// Gives home the blank racks that are kept for all. Waits for who is at work where they come from.
    pub(super) fn give_blanks(&self, cache: Option<usize>) {
        for room in Blanks::rooms() {
            // Not for ever, as in `empty_stores`: as many as there are.
            for _ in 0..self.blanks.made(room) {
                let (Some(blank), Some(class)) = (self.blanks.take(&self.spans, room, 0), Rack::class(room)) else {
                    break;
                };
                // SAFETY: a slot of this class, used as a rack no more.
                unsafe { self.give_slot(cache, class, blank.into_memory()) };
                self.blanks.count_unmade(room);
            }
        }
    }
}
