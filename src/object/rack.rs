//! Racks: tables of free slots' addresses, the containers in which slots move between threads and classes.
//!
//! ```text
//!   rack      mark │      │ slot │ slot │ slot │  …  │      │      │      room for 14, 30, … or 510
//!                         ╰──── count of them ────╯
//!   in store  mark │ the next rack │ …
//! ```
//!
//! A rack that travels is itself a slot of one of the heap's classes: 128 bytes hold 14 addresses, 1 KiB holds 126, 4
//! KiB holds 510. (One that a magazine has loaded does not travel, and lies elsewhere: `plot.rs`.) It bears the mark of
//! a free slot and, above 1 KiB, the flag: so a program that frees a block twice is caught even if the block has become
//! a rack meanwhile. Whoever holds the rack owns the slots whose addresses are in it. Nobody reads those slots on the
//! way in or out, for two gains: taking a slot never waits for a cache miss, in whichever cache its bytes are; and a
//! program that writes to a block after freeing it corrupts nothing here, unless the block has become a rack.
//!
//! (Free slots used to form lists, linked through their first words, so each slot had to be read to find the next. The
//! cost is in `docs/measurements.md`: allocating 16 KiB blocks in bulk took 18 ns, and takes 12.5.)
//!
//! **Blank racks** hold no slots. A thread that hands over a batch needs one for it, and a thread that fetches a batch
//! has one left over. It keeps 32 of each kind, 128 KiB at most; the rest circulate through the store, without a lock.
//!
//! Worked: slots of 64 bytes travel in racks of 510, which adds 13 % to the slots in hand; slots of 4 KiB travel in
//! racks of 126, which adds 0.2 %. Slots that are in use, or home in their spans, need no rack.
//!
//! **Why 510.** Moving a batch costs the same however long it is: to store and fetch one takes some 400 instructions,
//! five of them locked, and the locked ones wait until the program's latest writes have drained. With racks of 126
//! this took a tenth of the run time of programs that allocate and free many small blocks.

use core::ptr::{self, NonNull};
use core::slice;

use crate::sync::{AtomicPtr, AtomicU32, Ordering};

use super::chain::{BatchLinks, BatchPlace, Chain};
use super::mark;
use super::order::straighten;
use super::size_class::{BATCH_SLOTS, CLASSES, SizeClass};
use super::spans::Spans;
use super::store::OTHER_STACKS;

/// An entry of a rack: a slot's address.
pub type Entry = *mut u8;

/// Bytes before the link word.
const LINK_BYTES: usize = size_of::<u64>();

/// Bytes before the first entry.
const HEAD_BYTES: usize = 2 * LINK_BYTES;

/// log2 of the smallest rack's room plus two.
const FIRST_LOG: u32 = (BATCH_SLOTS[0] + 2).ilog2();

/// Kinds of racks that travel: with room for 14, 30, 62, 126, 254, 510.
const KINDS: usize = OTHER_STACKS;

/// The most blank racks kept for all threads, of each kind, and their bytes; each lane keeps its share in any case. May
/// be exceeded by as many racks as there are threads.
const KEPT: u32 = 256;
const KEPT_BYTES: usize = 1 << 20;

/// After there was no memory for a rack, this many requests are refused without trying.
const TRIES_SPARED: u32 = 1 << 10;

/// The most blank racks a thread keeps, of each kind, and their bytes.
const STOCK: u32 = 32;
const STOCK_BYTES: usize = 128 << 10;

/// The most racks made at once, and their bytes.
pub const RACKS_AT_ONCE: u32 = 4;
const BYTES_AT_ONCE: usize = 4 << 10;

/// A rack, which owns its slots. Dropping it leaks them: its [memory](Self::into_memory) must go back where it came
/// from.
#[derive(Debug)]
pub struct Rack {
    /// The first entry, behind the head.
    first: NonNull<Entry>,
    count: u32,
    room: u32,
}

impl Rack {
    /// Bytes of a rack with this much room: eight for each entry, so that they are a power of two, even where an
    /// address has four (a [`Pile`] relies on that).
    pub const fn bytes(room: u32) -> usize {
        HEAD_BYTES + room as usize * LINK_BYTES
    }

    /// Bytes of the longest rack.
    pub const MOST_BYTES: usize = Self::bytes(BATCH_SLOTS[2] as u32);

    /// The size class of a rack with this much room.
    pub const fn class(room: u32) -> Option<SizeClass> {
        SizeClass::of(Self::bytes(room), LINK_BYTES)
    }

    /// How many racks with this much room are made at once.
    pub fn at_once(room: u32) -> u32 {
        Self::within(RACKS_AT_ONCE, BYTES_AT_ONCE, room)
    }

    /// `most` racks, or as many as fit in `bytes` bytes.
    fn within(most: u32, bytes: usize, room: u32) -> u32 {
        most.min((bytes / Self::bytes(room)) as u32)
    }

    /// Makes a blank rack.
    ///
    /// # Safety
    ///
    /// The caller owns `memory`, [`bytes`](Self::bytes) long and aligned to 8; the rack owns it from here on.
    pub unsafe fn new(memory: NonNull<u8>, room: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::from_parts(memory, room, 0) }
    }

    /// Makes a rack with `count` slots in it.
    ///
    /// # Safety
    ///
    /// As for [`new`](Self::new), and `count` entries are written: slots that the rack comes to own.
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

    /// Rebuilds the rack whose [`first`](Self::first) entry is there.
    ///
    /// # Safety
    ///
    /// The caller took the rack apart and makes one of it again; `room` and `count` entries are as they were.
    pub unsafe fn from_first(first: NonNull<Entry>, room: u32, count: u32) -> Self {
        Self { first, count, room }
    }

    /// Returns the memory; the slots that were in the rack are the caller's.
    pub fn into_memory(self) -> NonNull<u8> {
        // SAFETY: `first` lies this far behind the memory's beginning, as in `from_parts`.
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

    /// How many slots it has room for.
    pub fn room(&self) -> u32 {
        self.room
    }

    /// The first entry.
    pub fn first(&self) -> NonNull<Entry> {
        self.first
    }

    /// Pushes a slot. There must be room.
    ///
    /// # Safety
    ///
    /// The caller owns the slot; the rack owns it from here on.
    #[inline]
    pub unsafe fn push(&mut self, slot: Entry) {
        debug_assert!(self.count < self.room);
        // SAFETY: below `room`, so inside the memory (the promise of `new`; the caller says there is room).
        unsafe { self.first.add(self.count as usize).write(slot) };
        self.count += 1;
    }

    /// Pops the slot pushed last.
    #[inline]
    pub fn pop(&mut self) -> Option<Entry> {
        self.count = self.count.checked_sub(1)?;
        // SAFETY: below the old count, so written.
        Some(unsafe { self.first.add(self.count as usize).read() })
    }

    /// Moves all slots to another rack, which is empty and has room for them.
    pub fn pour(&mut self, other: &mut Self) {
        debug_assert!(other.is_empty() && self.count <= other.room);
        // SAFETY: two racks, so their memories are disjoint; the entries copied are written here, and the other has
        // room for them.
        unsafe { ptr::copy_nonoverlapping(self.first.as_ptr(), other.first.as_ptr(), self.count as usize) };
        other.count = core::mem::take(&mut self.count);
    }

    /// Puts its slots in order, if they [almost are](straighten). O(slots).
    pub fn straighten(&mut self) {
        // SAFETY: `count` entries are written, and nobody else accesses them while the rack is borrowed.
        straighten(unsafe { slice::from_raw_parts_mut(self.first.as_ptr(), self.count as usize) });
    }

    /// Its slots' addresses.
    pub fn slots(&self) -> &[Entry] {
        // SAFETY: `count` entries are written, and nobody writes to them while the rack is borrowed.
        unsafe { slice::from_raw_parts(self.first.as_ptr(), self.count as usize) }
    }
}

/// Memory for a rack of a few slots, on the stack.
#[derive(Debug, Default)]
#[repr(align(8))]
pub struct Few([u64; 8]);

// Large enough for a head and the entries.
const _: () = assert!(size_of::<Few>() >= Rack::bytes(Few::ROOM));

impl Few {
    /// How many slots it has room for.
    pub const ROOM: u32 = 6;

    /// Makes a blank rack in it.
    ///
    /// # Safety
    ///
    /// The rack is not used after this borrow or after `self`.
    pub unsafe fn rack(&mut self) -> Rack {
        // SAFETY: enough words, valid as long as promised.
        unsafe { Rack::new(NonNull::from(&mut self.0).cast(), Self::ROOM) }
    }

    /// Makes a rack in it that holds one slot.
    ///
    /// # Safety
    ///
    /// As for [`rack`](Self::rack); and the caller owns the slot, which the rack owns from here on.
    pub unsafe fn of(&mut self, slot: NonNull<u8>) -> Rack {
        // SAFETY: as promised; there is room.
        unsafe {
            let mut rack = self.rack();
            rack.push(slot.as_ptr());
            rack
        }
    }
}

/// The words that link racks in a store.
#[derive(Debug)]
pub(super) struct Heads<'a>(pub(super) &'a Spans);

impl Heads<'_> {
    /// The full rack at `place`, which has left the store.
    pub(super) fn full(&self, place: BatchPlace, room: u32) -> Rack {
        // SAFETY: places are made of full racks (`Spans::store_batch`), and the caller owns this one.
        unsafe { Rack::from_parts(self.0.slot_at(place), room, room) }
    }

    /// The slots of the full rack at `place`; its head is not touched.
    pub(super) fn slots(&self, place: BatchPlace, room: u32) -> &[Entry] {
        // SAFETY: as above; `room` entries follow the head.
        unsafe { slice::from_raw_parts(self.0.slot_at(place).add(HEAD_BYTES).cast().as_ptr(), room as usize) }
    }
}

impl BatchLinks for Heads<'_> {
    fn read(&self, place: BatchPlace) -> Chain {
        // SAFETY: the caller owns the rack, which begins with its head.
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

/// Racks of one kind, linked through their heads; the low bits of the first one's address say how many. For one thread
/// at a time; others may read the count. All-zero bytes: none.
#[derive(Debug, Default)]
pub struct Pile(AtomicPtr<u8>);

// A rack's address leaves room for the count: racks are slots whose size is a power of two, in spans that begin a page.
// (So do those of a plot.)
const _: () = assert!(Rack::bytes((1 << FIRST_LOG) - 2) > Pile::MOST as usize);

impl Pile {
    /// The most racks in a pile.
    pub const MOST: u32 = 63;

    /// The rack on top, and the count.
    #[inline]
    fn top(&self) -> *mut u8 {
        // Relaxed: one writer, and nothing depends on what other threads read.
        self.0.load(Ordering::Relaxed)
    }

    fn set_top(&self, top: *mut u8) {
        // Release: the link of the rack that it leads to is written; partner: the same thread, if a signal ends it.
        self.0.store(top, Ordering::Release);
    }

    /// How many there are; to other threads a snapshot.
    #[inline]
    pub fn len(&self) -> u32 {
        self.top().addr() as u32 & Self::MOST
    }

    /// Whether there is none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts a rack on top. There must be less than [`MOST`](Self::MOST). The pile owns the rack and its slots.
    pub fn push(&self, rack: Rack) {
        let (first, memory) = (self.top(), rack.into_memory());
        debug_assert!(self.len() < Self::MOST && memory.addr().get() & Self::MOST as usize == 0);
        // SAFETY: a rack, which begins with its head.
        unsafe { memory.add(LINK_BYTES).cast().write(first) };
        let count = self.len() as usize + 1;
        self.set_top(memory.as_ptr().map_addr(|address| address | count));
    }

    /// Takes the rack on top: its memory.
    pub fn pop(&self) -> Option<NonNull<u8>> {
        let memory = NonNull::new(self.top().map_addr(|address| address & !(Self::MOST as usize)))?;
        // SAFETY: a rack that was pushed, whose head has what was below it.
        let below = unsafe { memory.add(LINK_BYTES).cast::<*mut u8>().read() };
        self.set_top(below);
        Some(memory)
    }

    /// Forgets all of them.
    pub fn forget(&self) {
        self.set_top(ptr::null_mut());
    }
}

/// One thread's own blank racks. All-zero bytes: none.
#[derive(Debug)]
pub struct Stock {
    /// By kind.
    piles: [Pile; KINDS],
}

impl Stock {
    /// Pops the blank rack kept last.
    pub fn pop(&self, room: u32) -> Option<Rack> {
        let memory = self.piles[kind(room)].pop()?;
        // SAFETY: a blank rack of that room (`push`), which the caller owns now.
        Some(unsafe { Rack::new(memory, room) })
    }

    /// Keeps a blank rack, if the stock is not full.
    ///
    /// # Errors
    /// The rack, if the stock is full.
    pub fn push(&self, rack: Rack) -> Result<(), Rack> {
        debug_assert!(rack.is_empty());
        let pile = &self.piles[kind(rack.room())];
        if pile.len() >= Rack::within(STOCK, STOCK_BYTES, rack.room()) {
            return Err(rack);
        }
        pile.push(rack);
        Ok(())
    }

    /// Whether it holds no racks.
    pub fn is_empty(&self) -> bool {
        self.piles.iter().all(Pile::is_empty)
    }

    /// Forgets all racks in it.
    pub fn forget(&self) {
        self.piles.iter().for_each(Pile::forget);
    }
}

/// Blank racks for all threads, and how many racks there are.
#[derive(Debug)]
pub struct Blanks {
    made: [AtomicU32; KINDS],
    /// How many more requests are refused without trying, since there was no memory: by kind, and for plots.
    tired: [AtomicU32; KINDS + 1],
}

/// What there may be no memory for.
#[derive(Clone, Copy, Debug)]
pub enum Making {
    /// A rack that travels, with this much room.
    Rack(u32),
    /// Pages for a plot (`plot.rs`).
    Plot,
}

impl Making {
    fn index(self) -> usize {
        match self {
            Self::Rack(room) => kind(room),
            Self::Plot => KINDS,
        }
    }
}

/// The kind with this much room.
fn kind(room: u32) -> usize {
    ((room + 2).ilog2().saturating_sub(FIRST_LOG) as usize).min(KINDS - 1)
}

/// The stack of the store for blank racks with this much room.
fn stack(room: u32) -> usize {
    CLASSES + kind(room)
}

impl Blanks {
    /// No racks.
    pub fn new() -> Self {
        Self {
            made: core::array::from_fn(|_| AtomicU32::new(0)),
            tired: core::array::from_fn(|_| AtomicU32::new(0)),
        }
    }

    /// Takes a blank rack, if one is kept. `hint` picks the lane.
    pub fn take(&self, spans: &Spans, room: u32, hint: usize) -> Option<Rack> {
        let place = spans.store.take(&Heads(spans), stack(room), hint, 0)?;
        // SAFETY: `put` made this place of a rack with that room.
        Some(unsafe { Rack::new(spans.slot_at(place), room) })
    }

    /// Keeps a blank rack, unless there are enough.
    ///
    /// # Errors
    /// The rack, if there are enough.
    pub fn put(&self, spans: &Spans, rack: Rack, hint: usize) -> Result<(), Rack> {
        let most = Rack::within(KEPT, KEPT_BYTES, rack.room()) as usize;
        if !spans.store.has_room(stack(rack.room()), hint, most) {
            return Err(rack);
        }
        self.put_anyway(spans, rack, hint);
        Ok(())
    }

    /// Keeps a blank rack even if there are enough.
    pub fn put_anyway(&self, spans: &Spans, rack: Rack, hint: usize) {
        let (stack, place) = (stack(rack.room()), spans.place_of(rack.into_memory()));
        spans.store.put(&Heads(spans), stack, hint, place, 0);
    }

    /// Whether to try to make one. Finding out that there is no memory for one is expensive, for other threads too.
    pub fn may_make(&self, what: Making) -> bool {
        let tired = &self.tired[what.index()];
        // Relaxed, here and below: when two threads count at once, there is one try more or fewer.
        let left = tired.load(Ordering::Relaxed);
        if left > 0 {
            tired.store(left - 1, Ordering::Relaxed);
        }
        left == 0
    }

    /// Notes that there was no memory for one.
    pub fn refused(&self, what: Making) {
        // Relaxed: as above.
        self.tired[what.index()].store(TRIES_SPARED, Ordering::Relaxed);
    }

    /// Counts a rack that was made.
    pub fn count_made(&self, room: u32) {
        // Relaxed: a statistic.
        self.made[kind(room)].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a rack that is one no longer.
    pub fn count_unmade(&self, room: u32) {
        // Relaxed: as above.
        self.made[kind(room)].fetch_sub(1, Ordering::Relaxed);
    }

    /// How many racks with that room exist, wherever they are.
    pub fn made(&self, room: u32) -> u32 {
        // Relaxed: as above.
        self.made[kind(room)].load(Ordering::Relaxed)
    }

    /// How many slots of the class are racks.
    pub fn of_class(&self, class: SizeClass) -> usize {
        let kinds = Self::rooms().zip(&self.made);
        // Relaxed: as above.
        let made = kinds.filter(|&(room, _)| Rack::class(room) == Some(class));
        made.map(|(_, made)| made.load(Ordering::Relaxed) as usize).sum()
    }

    /// The rooms that they come in.
    pub fn rooms() -> impl Iterator<Item = u32> {
        (FIRST_LOG..).take(KINDS).map(|log| (1 << log) - 2)
    }
}

// The rooms span those of batches.
const _: () =
    assert!(BATCH_SLOTS[0] + 2 == 1 << FIRST_LOG && BATCH_SLOTS[2] + 2 == 1 << (FIRST_LOG as usize + KINDS - 1));
