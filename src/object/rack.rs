//! Racks: tables of free slots' addresses, in which slots go between threads and classes.
//!
//! ```text
//!   rack      mark │      │ slot │ slot │ slot │  …  │      │      │      room for 6, 14, 30, … or 510
//!                         ╰──── count of them ────╯
//!   in store  mark │ the next rack │ …
//! ```
//!
//! A rack is itself a slot of one of the heap's classes: 64 bytes for 6 addresses, 1 KiB for 126, 4 KiB for 510. Its
//! mark, and above 1 KiB its flag, is that of a free slot: a program that frees a block a second time that has become
//! a rack is turned away. Whoever has the rack has the slots whose addresses stand in it. What is in them nobody looks
//! at, neither when they come nor when they go: a slot that is taken is not waited for, whoever's cache its bytes are
//! in, and what a program writes into a block that it has freed leads nobody astray, unless that has become a rack.
//!
//! (Free slots were strings before, linked through their first words: then each slot that is taken has to be read to
//! find the next. What that costs is in `docs/measurements.md`: 16 KiB in bulk took 18 ns, and takes 12.5.)
//!
//! **Blanks** are racks without slots. A thread that brings a full rack needs a blank one, and one that fetches a full
//! rack has a blank one over. It keeps 16 of each kind, 16 KiB at most; beyond that they go round by stores of their
//! own, without a lock.
//!
//! Worked: slots of 64 bytes have racks of 510, that is 13 % of the slots in hand; of 4 KiB such of 126, 0.2 %. Slots
//! with the program, or home in their spans, need none.
//!
//! **Why 510.** A batch costs the same, however long: some 400 instructions and five locked ones to be stored and
//! fetched, and those wait for what the program has just written to. With 126 that was a tenth of the time of programs
//! that allocate many small blocks and free them.

use core::cell::Cell;
use core::ptr::{self, NonNull};
use core::slice;

use crate::sync::{AtomicU32, Ordering};

use super::mark;
use super::size_class::{BATCH_SLOTS, SizeClass};
use super::spans::Spans;
use super::store::{BatchLinks, BatchPlace, Chain, Store};

/// What stands in a rack: where a slot is.
pub type Entry = *mut u8;

/// Bytes before the word that leads on.
const LINK_BYTES: usize = size_of::<u64>();

/// Bytes before the first entry.
const HEAD_BYTES: usize = 2 * LINK_BYTES;

/// log2 of: the shortest rack's room, plus two.
const FIRST_LOG: u32 = 3;

/// Kinds of racks: of room for 6, 14, 30, 62, 126, 254, 510.
const KINDS: usize = 7;

/// Racks without slots that are kept for all, of each kind, and bytes of them; may be overrun by as many as there are
/// threads.
const KEPT: u32 = 256;
const KEPT_BYTES: usize = 256 << 10;

/// Where there was no memory for a rack, so many times none is tried to be made.
const TRIES_SPARED: u32 = 1 << 10;

/// Racks without slots that a thread keeps, of each kind, and bytes of them.
const STOCK: u32 = 16;
const STOCK_BYTES: usize = 16 << 10;

/// Racks made at once, and bytes of them.
pub const RACKS_AT_ONCE: u32 = 4;
const BYTES_AT_ONCE: usize = 4 << 10;

/// A rack, its slots with it. Dropped, it is lost: it goes [back](Self::into_memory) to where its memory is from.
#[derive(Debug)]
pub struct Rack {
    /// Behind the head: the first entry.
    first: NonNull<Entry>,
    count: u32,
    room: u32,
}

impl Rack {
    /// Bytes of a rack with so much room.
    pub const fn bytes(room: u32) -> usize {
        HEAD_BYTES + room as usize * size_of::<Entry>()
    }

    /// The class of a rack with so much room.
    pub const fn class(room: u32) -> Option<SizeClass> {
        SizeClass::of(Self::bytes(room), LINK_BYTES)
    }

    /// How many with so much room are made at once.
    pub fn at_once(room: u32) -> u32 {
        Self::within(RACKS_AT_ONCE, BYTES_AT_ONCE, room)
    }

    /// So many, or as many as have so many bytes.
    fn within(most: u32, bytes: usize, room: u32) -> u32 {
        most.min((bytes / Self::bytes(room)) as u32)
    }

    /// A blank one.
    ///
    /// # Safety
    ///
    /// `memory` is the caller's, of [`bytes`](Self::bytes), aligned to 8, and the rack's from here on.
    pub unsafe fn new(memory: NonNull<u8>, room: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::from_parts(memory, room, 0) }
    }

    /// One with `count` slots in it.
    ///
    /// # Safety
    ///
    /// As for [`new`](Self::new), and so many entries are written: slots that go with it.
    pub unsafe fn from_parts(memory: NonNull<u8>, room: u32, count: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            mark::write(mark::key(), memory.as_ptr());
            Self {
                first: memory.add(HEAD_BYTES).cast(),
                count,
                room,
            }
        }
    }

    /// The rack whose [`first`](Self::first) entry is there.
    ///
    /// # Safety
    ///
    /// It was taken apart by the caller, who makes one of it; `room` and so many entries are as they were.
    pub unsafe fn from_first(first: NonNull<Entry>, room: u32, count: u32) -> Self {
        Self { first, count, room }
    }

    /// The memory; what is in it is the caller's.
    pub fn into_memory(self) -> NonNull<u8> {
        // SAFETY: as far behind it as in `from_parts`.
        unsafe { self.first.cast::<u8>().sub(HEAD_BYTES) }
    }

    /// How many slots are in it.
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Whether none is in it.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many it has room for.
    pub fn room(&self) -> u32 {
        self.room
    }

    /// The first entry.
    pub fn first(&self) -> NonNull<Entry> {
        self.first
    }

    /// Puts a slot in. There must be room.
    ///
    /// # Safety
    ///
    /// The slot is the caller's, and the rack's from here on.
    #[inline]
    pub unsafe fn push(&mut self, slot: Entry) {
        debug_assert!(self.count < self.room);
        // SAFETY: below `room`, which the memory has (the promise of `new`; the caller says there is room).
        unsafe { self.first.add(self.count as usize).write(slot) };
        self.count += 1;
    }

    /// Takes the slot out that came last.
    #[inline]
    pub fn pop(&mut self) -> Option<Entry> {
        self.count = self.count.checked_sub(1)?;
        // SAFETY: below what was the count, so written.
        Some(unsafe { self.first.add(self.count as usize).read() })
    }

    /// Moves all slots to another rack, which is empty and has room for them.
    pub fn pour(&mut self, other: &mut Self) {
        debug_assert!(other.is_empty() && self.count <= other.room);
        // SAFETY: two racks, so no memory of the one is the other's; as many entries as are written here, and there is
        // room for there.
        unsafe { ptr::copy_nonoverlapping(self.first.as_ptr(), other.first.as_ptr(), self.count as usize) };
        other.count = core::mem::take(&mut self.count);
    }

    /// Where its slots are.
    pub fn slots(&self) -> &[Entry] {
        // SAFETY: `count` entries are written, and nobody writes to them as long as the rack is borrowed.
        unsafe { slice::from_raw_parts(self.first.as_ptr(), self.count as usize) }
    }
}

/// A rack on the stack, for few slots.
#[derive(Debug, Default)]
#[repr(align(8))]
pub struct Few([u64; 8]);

// A head and entries.
const _: () = assert!(size_of::<Few>() >= Rack::bytes(Few::ROOM));

impl Few {
    /// How many.
    pub const ROOM: u32 = 6;

    /// The rack, blank.
    ///
    /// # Safety
    ///
    /// It is not used longer than this.
    pub unsafe fn rack(&mut self) -> Rack {
        // SAFETY: words enough, as long as promised.
        unsafe { Rack::new(NonNull::from(&mut self.0).cast(), Self::ROOM) }
    }

    /// The rack, with one slot in it.
    ///
    /// # Safety
    ///
    /// As for [`rack`](Self::rack), and the slot is the caller's, and the rack's from here on.
    pub unsafe fn of(&mut self, slot: NonNull<u8>) -> Rack {
        // SAFETY: as promised; there is room.
        unsafe {
            let mut rack = self.rack();
            rack.push(slot.as_ptr());
            rack
        }
    }
}

/// The words by which racks in store hang together.
#[derive(Debug)]
pub(super) struct Heads<'a>(pub(super) &'a Spans);

impl Heads<'_> {
    /// The full rack there, which is in store no more.
    pub(super) fn full(&self, place: BatchPlace, room: u32) -> Rack {
        // SAFETY: places are made of full racks (`Central::put`), and whoever asks has it.
        unsafe { Rack::from_parts(self.0.slot_at(place), room, room) }
    }

    /// Where the slots of the full rack there are, its head as it is.
    pub(super) fn slots(&self, place: BatchPlace, room: u32) -> &[Entry] {
        // SAFETY: as above; as many entries behind the head.
        unsafe { slice::from_raw_parts(self.0.slot_at(place).add(HEAD_BYTES).cast().as_ptr(), room as usize) }
    }
}

impl BatchLinks for Heads<'_> {
    fn read(&self, place: BatchPlace) -> Chain {
        // SAFETY: the caller has the rack, which begins with its head.
        Chain::from_bits(unsafe { self.0.slot_at(place).add(LINK_BYTES).cast::<u64>().read() })
    }

    fn write(&self, place: BatchPlace, behind: Chain) {
        // SAFETY: as in `read`.
        unsafe {
            self.0
                .slot_at(place)
                .add(LINK_BYTES)
                .cast::<u64>()
                .write(behind.into_bits())
        };
    }
}

/// A thread's own racks without slots. All-zero bytes: none.
#[derive(Debug)]
pub struct Stock {
    /// The first of each kind; their heads lead on.
    first: [Cell<*mut u8>; KINDS],
    count: [Cell<u8>; KINDS],
}

impl Stock {
    /// The blank rack that came last.
    pub fn pop(&self, room: u32) -> Option<Rack> {
        let (first, count) = (&self.first[kind(room)], &self.count[kind(room)]);
        let memory = NonNull::new(first.get())?;
        // SAFETY: a blank rack of that room (`push`), whose head leads to the next; the caller's now.
        unsafe {
            first.set(memory.add(LINK_BYTES).cast::<*mut u8>().read());
            count.set(count.get() - 1);
            Some(Rack::new(memory, room))
        }
    }

    /// Keeps a blank rack, if there are few.
    ///
    /// # Errors
    /// The rack, if there are enough.
    pub fn push(&self, rack: Rack) -> Result<(), Rack> {
        debug_assert!(rack.is_empty());
        let (first, count) = (&self.first[kind(rack.room())], &self.count[kind(rack.room())]);
        if u32::from(count.get()) >= Rack::within(STOCK, STOCK_BYTES, rack.room()) {
            return Err(rack);
        }
        let memory = rack.into_memory();
        // SAFETY: a rack, which begins with its head.
        unsafe { memory.add(LINK_BYTES).cast().write(first.get()) };
        first.set(memory.as_ptr());
        count.set(count.get() + 1);
        Ok(())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count.iter().all(|count| count.get() == 0)
    }

    /// Forgets them.
    pub fn open(&self) {
        self.first.iter().for_each(|first| first.set(ptr::null_mut()));
        self.count.iter().for_each(|count| count.set(0));
    }
}

/// Racks without slots, for all threads, and how many racks there are.
#[derive(Debug)]
pub struct Blanks {
    stores: [Store; KINDS],
    made: [AtomicU32; KINDS],
    /// How often nobody tries to make one, since there was no memory for it.
    tired: [AtomicU32; KINDS],
}

/// Which kind has so much room.
fn kind(room: u32) -> usize {
    ((room + 2).ilog2().saturating_sub(FIRST_LOG) as usize).min(KINDS - 1)
}

impl Blanks {
    /// None.
    pub fn new() -> Self {
        Self {
            stores: core::array::from_fn(|_| Store::new()),
            made: core::array::from_fn(|_| AtomicU32::new(0)),
            tired: core::array::from_fn(|_| AtomicU32::new(0)),
        }
    }

    /// A blank rack, if one is kept, as `hint` says.
    pub fn take(&self, spans: &Spans, room: u32, hint: usize) -> Option<Rack> {
        let place = self.stores[kind(room)].take(&Heads(spans), hint)?;
        // SAFETY: `put` made the place of a rack with that room.
        Some(unsafe { Rack::new(spans.slot_at(place), room) })
    }

    /// Keeps a blank rack, if they are few.
    ///
    /// # Errors
    /// The rack, if there are enough.
    pub fn put(&self, spans: &Spans, rack: Rack, hint: usize) -> Result<(), Rack> {
        if self.stores[kind(rack.room())].count() >= Rack::within(KEPT, KEPT_BYTES, rack.room()) {
            return Err(rack);
        }
        self.put_anyway(spans, rack, hint);
        Ok(())
    }

    /// Keeps a blank rack, be there enough.
    pub fn put_anyway(&self, spans: &Spans, rack: Rack, hint: usize) {
        let store = &self.stores[kind(rack.room())];
        store.put(&Heads(spans), hint, spans.place_of(rack.into_memory()));
    }

    /// Whether it is time to try to make one: where there is no memory for it that is found out at some cost, to others
    /// too.
    pub fn may_make(&self, room: u32) -> bool {
        let tired = &self.tired[kind(room)];
        // Relaxed, here and below: where two count at once one more try is made, or fewer.
        let left = tired.load(Ordering::Relaxed);
        if left > 0 {
            tired.store(left - 1, Ordering::Relaxed);
        }
        left == 0
    }

    /// There was no memory for one.
    pub fn refused(&self, room: u32) {
        // Relaxed: as above.
        self.tired[kind(room)].store(TRIES_SPARED, Ordering::Relaxed);
    }

    /// A rack was made.
    pub fn count_made(&self, room: u32) {
        // Relaxed: a statistic.
        self.made[kind(room)].fetch_add(1, Ordering::Relaxed);
    }

    /// A rack is none any more.
    pub fn count_unmade(&self, room: u32) {
        // Relaxed: as above.
        self.made[kind(room)].fetch_sub(1, Ordering::Relaxed);
    }

    /// Racks with that room, wherever they are.
    pub fn made(&self, room: u32) -> u32 {
        // Relaxed: as above.
        self.made[kind(room)].load(Ordering::Relaxed)
    }

    /// Slots of the class that are racks.
    pub fn of_class(&self, class: SizeClass) -> usize {
        let kinds = Self::rooms().zip(&self.made);
        // Relaxed: as above.
        let made = kinds.filter(|&(room, _)| Rack::class(room) == Some(class));
        made.map(|(_, made)| made.load(Ordering::Relaxed) as usize).sum()
    }

    /// The rooms that racks have.
    pub fn rooms() -> impl Iterator<Item = u32> {
        (FIRST_LOG..).take(KINDS).map(|log| (1 << log) - 2)
    }
}

// The rooms are those of batches.
const _: () =
    assert!(BATCH_SLOTS[0] + 2 == 1 << FIRST_LOG && BATCH_SLOTS[2] + 2 == 1 << (FIRST_LOG as usize + KINDS - 1));
