//! All spans of a heap: from an address to its span and slot, and back.
//!
//! ```text
//!   address ── − base, >> 13 ──▶ page ── table ──▶ class, pages back ──▶ span ── × reciprocal ──▶ slot
//! ```
//!
//! **Flags.** Every slot of more than 1 KiB that is not in use, wherever it is, has its flag up: one byte for each
//! kibibyte of the heap, since no two such slots begin in the same kibibyte. So a double free is caught without
//! reading the block's memory, which may be a cache miss; the flags of 64 KiB of blocks share one cache line. A span
//! is born with all flags up. The flag of a slot in use says whether its block has grown (`room.rs`). Flags take 0.1 %
//! of the heap, where there are spans. Smaller slots have marks (`mark.rs`).
//!
//! Nothing here is read from a slot.

use core::ptr::NonNull;

use crate::fatal::{self, Number};
use crate::metadata::offset;
use crate::sync::{AtomicU8, AtomicUsize, Ordering, Table, Zeroed};
use crate::units::{PageIndex, PageRun};

use super::holes::bytes_of;
use super::length::Length;
use super::link::Nth;
use super::size_class::{FLAG_SHIFT, MAX_SLOT_BYTES, PAGE_BYTES, PAGE_SHIFT, SizeClass};
use super::span::{Row, Slots, Span, has_row};
use super::store::{BatchPlace, Lane, Store};

/// What is known of the slot of more than 1 KiB that begins in this kibibyte. All-zero bytes: no slot begins here, or
/// it is in use by a block that has never moved to grow. Otherwise [`FREE`], [`ROOMY`], or twice the number of such
/// moves.
#[derive(Debug)]
pub struct Flag(AtomicU8);

// SAFETY: an atomic integer, of which a zero byte is zero.
unsafe impl Zeroed for Flag {
    fn zeroed() -> Self {
        Self(AtomicU8::new(0))
    }
}

// SAFETY: atomic integers only, of which zero bytes are zero; `vacant` makes the same value.
unsafe impl Zeroed for Span {
    fn zeroed() -> Self {
        Self::vacant()
    }
}

// SAFETY: atomic integers; `empty` makes the same value.
unsafe impl Zeroed for Row {
    fn zeroed() -> Self {
        Self::empty()
    }
}

/// The slot is free.
const FREE: u8 = 1;

/// The slot, or the run that begins here, is in use by a block that may be shorter than it.
const ROOMY: u8 = 3;

/// The bit that these two share with no other value: such a block cannot simply be freed.
const LOOK: u8 = FREE & ROOMY;

/// Moves are counted up to this many.
const MOST_MOVES: u8 = 2;

impl Flag {
    /// Marks the slot, which was in use, as free.
    #[inline(always)]
    pub fn raise(&self) {
        self.set(FREE);
    }

    #[inline(always)]
    fn set(&self, value: u8) {
        // Relaxed: as in `Spans::hand_out`.
        self.0.store(value, Ordering::Relaxed);
    }

    #[inline(always)]
    fn get(&self) -> u8 {
        // Relaxed: as in `Spans::hand_out`.
        self.0.load(Ordering::Relaxed)
    }
}

/// Pages of the longest slot.
const LONGEST_SLOT_PAGES: usize = MAX_SLOT_BYTES >> PAGE_SHIFT;

/// What a roomy block lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// A slot of this class.
    Slot(SizeClass),
    /// These pages.
    Run(PageRun),
}

impl Room {
    /// Its length in bytes.
    #[inline(always)]
    pub fn bytes(self) -> usize {
        match self {
            Self::Slot(class) => class.bytes(),
            Self::Run(run) => run.pages().0 << PAGE_SHIFT,
        }
    }

    /// What counts as room to grow: all of it, unless it is a run that is no longer than slots are. A block lies in
    /// such a run for want of a span.
    #[inline(always)]
    pub fn spare_bytes(self) -> usize {
        match self {
            Self::Run(run) if run.pages().0 <= LONGEST_SLOT_PAGES => 0,
            _ => self.bytes(),
        }
    }

    /// Whether a block of `size` bytes can lie in it with room. One that would get a run by itself only if that is
    /// shorter: a block whose own run would be as long is freed by the fast path, which does not check.
    ///
    /// Alignment does not matter. A slot was chosen for it: its size is a multiple of the alignment, so a size that
    /// fits also fits when rounded up. And a run is of whole pages, to which no slot is aligned more.
    #[inline(always)]
    pub fn holds(self, size: usize) -> bool {
        match self {
            Self::Slot(class) => size <= class.bytes(),
            Self::Run(run) if !SizeClass::is_exceeded_by(size) => size <= run.pages().0 << PAGE_SHIFT,
            Self::Run(run) => Length::of_size(size).is_some_and(|length| length.pages() < run.pages().0),
        }
    }
}

/// Flags per page.
pub const PAGE_FLAGS: usize = PAGE_BYTES >> FLAG_SHIFT;

/// Bytes that describe one page of a span of the class: its entry in the table, and its flags if the class has any.
/// Other spans leave their flags untouched, and those with a map in their entries their rows.
pub fn metadata_of_page(class: SizeClass) -> usize {
    let flags = if class.is_flagged() { PAGE_FLAGS } else { 0 };
    let row = if has_row(class) { size_of::<Row>() } else { 0 };
    size_of::<Span>() + flags + row
}

/// All spans of a heap, and the memory they describe. What the fast paths read is one cache line, which is seldom
/// written.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Spans {
    /// The address of page 0.
    base: NonNull<u8>,
    /// One page before `base`: a link's number counts from there.
    origin: *mut u8,
    flags: Table<Flag>,
    table: Table<Span>,
    rows: Table<Row>,
    /// `covered`, in bytes.
    reach: AtomicUsize,
    /// How many entries are prepared. I14: spans lie, and large blocks in the table begin, below this. Raised
    /// under the tables' lock.
    covered: AtomicUsize,
    /// Batches and blank racks on their way between threads.
    pub(super) store: Store,
    /// The page below which the next search for holes begins.
    pub(super) punched: AtomicUsize,
    /// Grains per granule of the source; 1 if the granule is shorter than a grain.
    pub(super) granule: usize,
}

// What is written often is kept off that cache line.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(core::mem::offset_of!(Spans, punched) >= 64);

// SAFETY: addresses, and tables of atomics. A slot is reached by its owner, or under the lock of its class.
unsafe impl Send for Spans {}
// SAFETY: as above.
unsafe impl Sync for Spans {}

impl Spans {
    /// Spans over `table`, with their flags, rows and a store, of the heap whose page 0 is at `base`; `granule` is the
    /// source's.
    pub fn new(
        (table, flags, rows): (Table<Span>, Table<Flag>, Table<Row>),
        lanes: Table<Lane>,
        base: NonNull<u8>,
        granule: usize,
    ) -> Self {
        Self {
            base,
            origin: base.as_ptr().wrapping_sub(PAGE_BYTES),
            flags,
            reach: AtomicUsize::new(0),
            table,
            rows,
            covered: AtomicUsize::new(0),
            store: Store::new(lanes),
            punched: AtomicUsize::new(0),
            granule: granule.div_ceil(bytes_of(1)),
        }
    }

    /// Spans of `pages` pages that have no memory.
    #[cfg(test)]
    pub fn for_test(pages: usize) -> Self {
        let entries: std::boxed::Box<[Span]> = (0..pages).map(|_| Span::vacant()).collect();
        // SAFETY: vacant entries, which are zero bytes; nobody else has them, and they are never freed.
        let table = unsafe { Table::new(NonNull::from(std::boxed::Box::leak(entries)).cast(), pages) };
        let spans = Self::new(
            (table, Table::empty(), Table::empty()),
            Table::empty(),
            NonNull::dangling(),
            PAGE_BYTES,
        );
        spans.reaches(pages);
        spans
    }

    /// Lanes for a store, in a test.
    #[cfg(test)]
    pub fn lanes_for_test(count: usize) -> Table<Lane> {
        let lanes: std::boxed::Box<[Lane]> = (0..count).map(|_| Lane::new()).collect();
        // SAFETY: empty lanes, which are zero bytes; nobody else has them, and they are never freed.
        unsafe { Table::new(NonNull::from(std::boxed::Box::leak(lanes)).cast(), count) }
    }

    /// How many pages the table covers now.
    #[inline]
    pub fn covered(&self) -> usize {
        // Acquire: pairs with the release in `reaches`; the entries below are prepared.
        self.covered.load(Ordering::Acquire)
    }

    /// The entry of a page that is covered.
    #[inline]
    pub fn entry(&self, page: PageIndex) -> &Span {
        self.table.get(page.0)
    }

    /// The entry of any page, if the table has one. For a caller that must not panic, and checks
    /// [`covered`](Self::covered) itself.
    #[inline(always)]
    pub fn entry_if(&self, page: PageIndex) -> Option<&Span> {
        (page.0 < self.table.len()).then(|| self.table.get(page.0))
    }

    /// The address of a slot.
    #[inline]
    pub(super) fn slot(&self, class: SizeClass, span: PageIndex, slot: u32) -> *mut u8 {
        offset(self.base, (span.0 << PAGE_SHIFT) + slot as usize * class.bytes()).as_ptr()
    }

    /// The place of the rack that is this slot: slots are aligned to 8 bytes, and 2³² pages are 2⁴⁵ bytes.
    pub(super) fn place_of(&self, slot: NonNull<u8>) -> BatchPlace {
        let distance = slot.addr().get() - self.base.addr().get();
        BatchPlace::new(distance as u64 / 8 + 1)
    }

    /// The slot that is the rack at `place`.
    pub(super) fn slot_at(&self, place: BatchPlace) -> NonNull<u8> {
        offset(self.base, (place.number() - 1) as usize * 8)
    }

    /// The class of the span in which `address` lies. Aborts if it lies in none.
    #[cold]
    pub fn class_of(&self, address: *mut u8) -> SizeClass {
        self.tag_of(address).1
    }

    /// The page at `address`, the class of its span, and how many pages back that begins. Aborts if there is none.
    #[inline]
    fn tag_of(&self, address: *mut u8) -> (usize, SizeClass, usize) {
        let page = address.addr().wrapping_sub(self.base.addr().get()) >> PAGE_SHIFT;
        if page >= self.covered() {
            fatal::abort(
                "a block was freed that is not of this heap; its address, the heap's",
                Number::Address(address.addr()),
                Number::Address(self.base.addr().get()),
            );
        }
        let Some((class, back)) = self.entry(PageIndex(page)).tag() else {
            fatal::abort(
                "a block was freed that is not allocated, or with the wrong layout; its address, the heap's",
                Number::Address(address.addr()),
                Number::Address(self.base.addr().get()),
            );
        };
        (page, class, back)
    }

    /// The span and the number of the slot at `address`. Aborts if no slot of `class` begins there.
    #[inline]
    pub(super) fn locate(&self, class: SizeClass, address: *mut u8) -> (PageIndex, u32) {
        let (page, tagged, back) = self.tag_of(address);
        if tagged != class {
            fatal::abort(
                "a block was freed with the wrong layout; its address, its size class",
                Number::Address(address.addr()),
                Number::Count(tagged.bytes()),
            );
        }
        let span = page.saturating_sub(back);
        match class.slot_at(address.addr() - self.base.addr().get() - (span << PAGE_SHIFT)) {
            Some(slot) => (PageIndex(span), slot),
            None => fatal::abort(
                "a block was freed by an address inside it; the address, its size class",
                Number::Address(address.addr()),
                Number::Count(class.bytes()),
            ),
        }
    }

    /// The first page of the large block in use that has `pages` pages and begins at `memory`, if there is one.
    pub fn large_at(&self, memory: NonNull<u8>, pages: usize, length: Option<Length>) -> Option<PageIndex> {
        let page = self.page_at(memory)?;
        self.entry(page).is_large(pages, length).then_some(page)
    }

    /// The same for a block that may lie on a shelf, with its entry.
    #[inline(always)]
    pub fn large_of(&self, memory: NonNull<u8>, length: Length) -> Option<(Nth, &Span)> {
        let distance = memory.addr().get().wrapping_sub(self.origin.addr());
        // As in `page_at`, plus one.
        let number = distance.rotate_right(PAGE_SHIFT);
        let page = number.wrapping_sub(1);
        if page >= self.covered() {
            return None;
        }
        // SAFETY: the page is covered, so its entry is prepared.
        let entry = unsafe { self.table.at(page) };
        entry.is_large_of(length).then_some((Nth::new(number), entry))
    }

    /// The address and the entry of a page.
    ///
    /// # Safety
    ///
    /// The page is covered.
    #[inline(always)]
    pub unsafe fn known(&self, page: Nth) -> (NonNull<u8>, &Span) {
        let (number, origin) = (page.number(), self.origin);
        // Wrapping, because the heap may consist of bare numbers.
        let address = origin.wrapping_add(number << PAGE_SHIFT);
        // SAFETY: the page is covered, so its entry is prepared; and a page's address is not null.
        unsafe { (NonNull::new_unchecked(address), self.table.at(number - 1)) }
    }

    /// The page at an address of this heap.
    #[inline(always)]
    pub fn page_of(&self, memory: NonNull<u8>) -> PageIndex {
        PageIndex(self.distance(memory) >> PAGE_SHIFT)
    }

    /// The page that begins at `memory`, if there is one and it is covered.
    #[inline(always)]
    fn page_at(&self, memory: NonNull<u8>) -> Option<PageIndex> {
        let distance = memory.addr().get().wrapping_sub(self.base.addr().get());
        // If the distance is not a whole number of pages, the remainder rotates into the top bits: a number no page
        // has.
        let page = PageIndex(distance.rotate_right(PAGE_SHIFT));
        (page.0 < self.covered()).then_some(page)
    }

    /// Notes that the program gets the slot, which has more than 1 KiB.
    ///
    /// # Safety
    ///
    /// The caller owns the slot, which is of this heap.
    #[inline(always)]
    pub unsafe fn hand_out(&self, slot: NonNull<u8>) {
        // SAFETY: it lies in a span, and so below what is covered (I14).
        // Relaxed, here and below: the caller owns the slot, and hands the flag over with it.
        unsafe { self.flags.at(self.distance(slot) >> FLAG_SHIFT) }
            .0
            .store(0, Ordering::Relaxed);
    }

    /// The flag of the slot of more than 1 KiB that begins at `slot`, unless the flag says that it is free or roomy.
    #[inline(always)]
    pub fn flag_of(&self, slot: NonNull<u8>) -> Option<&Flag> {
        self.flag_at(slot).filter(|flag| flag.get() & LOOK == 0)
    }

    /// The flag for a slot that begins at `slot`, if there is one.
    #[inline(always)]
    fn flag_at(&self, slot: NonNull<u8>) -> Option<&Flag> {
        let distance = self.distance(slot);
        // Acquire: pairs with the release in `reaches`; the flags of this many bytes are prepared.
        if distance >= self.reach.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: the flag is prepared.
        Some(unsafe { self.flags.at(distance >> FLAG_SHIFT) })
    }

    /// How often the block at `memory`, of more than 1 KiB and the caller's, has moved to grow: two at most.
    #[inline(always)]
    pub fn moves(&self, memory: NonNull<u8>) -> u8 {
        match self.flag_at(memory).map_or(0, Flag::get) {
            ROOMY => MOST_MOVES,
            value => value / 2,
        }
    }

    /// Notes that the block at `memory` has moved there to grow, and `before` times earlier; not of a roomy one, which
    /// counts as having moved often.
    #[inline(always)]
    pub fn note_move(&self, memory: NonNull<u8>, before: u8) {
        if let Some(flag) = self.flag_at(memory).filter(|flag| flag.get() != ROOMY) {
            flag.set(2 * (before + 1).min(MOST_MOVES));
        }
    }

    /// Whether a block that has moved this often, and grows between these sizes, should get room.
    #[inline(always)]
    pub fn is_restless(moves: u8, from: usize, to: usize) -> bool {
        // Vectors and strings double when they grow by themselves. A block that grows by less does so in steps.
        moves >= MOST_MOVES || moves != 0 && to / 2 < from
    }

    /// What the block at `memory`, of more than 1 KiB and the caller's, lies in, if that may be longer than the block.
    #[inline(always)]
    pub fn room_at(&self, memory: NonNull<u8>) -> Option<Room> {
        let flag = self.flag_at(memory)?;
        if flag.get() != ROOMY {
            return None;
        }
        let distance = self.distance(memory);
        let page = PageIndex(distance >> PAGE_SHIFT);
        let entry = self.entry_if(page)?;
        match entry.tag() {
            Some((class, _)) => Some(Room::Slot(class)),
            // The flag stands for a whole kibibyte; a run begins with its page.
            None if distance & (PAGE_BYTES - 1) != 0 => None,
            None => Some(Room::Run(PageRun::known(page.0, entry.large_pages()?))),
        }
    }

    /// Whether the block at `memory`, of more than 1 KiB and the caller's, can grow in place to `size` bytes and stay
    /// roomy.
    #[inline(always)]
    pub fn has_room(&self, memory: NonNull<u8>, size: usize) -> bool {
        self.room_at(memory).is_some_and(|room| room.holds(size))
    }

    /// Notes that the slot or run at `memory`, which the caller owns, holds a block that may be shorter.
    pub fn enter_room(&self, memory: NonNull<u8>) {
        self.set_flag(memory, ROOMY);
    }

    /// Notes that it is free, or that its block is as long as the run.
    pub fn leave_room(&self, memory: NonNull<u8>) {
        self.set_flag(memory, FREE);
    }

    #[inline(always)]
    fn set_flag(&self, memory: NonNull<u8>, value: u8) {
        if let Some(flag) = self.flag_at(memory) {
            flag.set(value);
        }
    }

    /// Bytes to spare of the roomy slots, or the roomy run, that begin in a page. For checks.
    pub fn roomy_from(&self, page: PageIndex) -> usize {
        let flags = self.flags.row(page.0 * PAGE_FLAGS, PAGE_FLAGS);
        let roomy = flags.iter().filter(|flag| flag.get() == ROOMY).count();
        let entry = self.entry(page);
        let bytes = match entry.tag() {
            Some((class, _)) => class.bytes(),
            None => entry
                .large_pages()
                .map_or(0, |pages| Room::Run(PageRun::known(page.0, pages)).spare_bytes()),
        };
        roomy * bytes
    }

    /// The distance from page 0, in bytes; an address before page 0 gives more than the table reaches.
    #[inline(always)]
    fn distance(&self, slot: NonNull<u8>) -> usize {
        slot.addr().get().wrapping_sub(self.base.addr().get())
    }

    /// The table and the flags cover `pages` pages now. Under the tables' lock.
    pub(super) fn reaches(&self, pages: usize) {
        // Release, both: pair with the acquire in `covered` and `flag_at`; the entries and flags are prepared. In this
        // order: a thread that has a slot of a span has seen the span covered, and so sees that its flags exist.
        self.reach.store(pages << PAGE_SHIFT, Ordering::Release);
        self.covered.store(pages, Ordering::Release);
    }

    /// Raises all flags of a run that becomes a span, none of whose slots is in use. Called by its maker.
    pub(super) fn flag_all(&self, run: PageRun) {
        let flags = self.flags.row(run.start().0 * PAGE_FLAGS, run.pages().0 * PAGE_FLAGS);
        flags.iter().for_each(Flag::raise);
    }

    /// The address of a page.
    #[inline(always)]
    pub fn address(&self, page: PageIndex) -> NonNull<u8> {
        offset(self.base, page.0 << PAGE_SHIFT)
    }

    /// The number of the slot at `address`, if it is one of this span.
    #[inline]
    pub(super) fn number_in(&self, class: SizeClass, span: PageIndex, address: *mut u8) -> Option<u32> {
        let offset = address.addr().wrapping_sub(self.slot(class, span, 0).addr());
        if offset < class.pages() << PAGE_SHIFT {
            class.slot_at(offset)
        } else {
            None
        }
    }

    /// Enters each page of `run`, a span that has arrived.
    pub(super) fn enter(&self, class: SizeClass, run: PageRun) {
        for back in 0..run.pages().0 {
            self.entry(PageIndex(run.start().0 + back)).enter(class, back);
        }
    }

    /// Dissolves the span that begins at `span`. Under the class lock, so that a fork finds the span either on the
    /// class's account or not at all.
    pub(super) fn leave(&self, class: SizeClass, span: PageIndex) {
        (0..class.pages()).for_each(|back| self.entry(PageIndex(span.0 + back)).leave());
    }

    /// The row of a span of the class, if it has one.
    #[inline(always)]
    pub(super) fn row(&self, class: SizeClass, span: PageIndex) -> Option<&Row> {
        has_row(class).then(|| self.rows.get(span.0))
    }

    /// The slots of a span. Under the class lock.
    #[inline(always)]
    pub(super) fn slots(&self, class: SizeClass, span: PageIndex) -> Slots<'_> {
        self.entry(span).slots(self.row(class, span))
    }
}

impl Spans {
    /// Bytes of holes of the span that begins there, or did until the caller got it.
    pub(super) fn holes_of(&self, class: SizeClass, span: PageIndex) -> usize {
        bytes_of(self.slots(class, span).holes(class).count_ones())
    }

    /// Bytes of holes below page `end`. The caller holds all locks, or is alone.
    pub(super) fn hole_bytes(&self, end: usize) -> usize {
        let pages = (0..self.covered().min(end)).map(PageIndex);
        let holes = pages.filter_map(|page| match self.entry(page).tag()? {
            (class, 0) => Some(self.holes_of(class, page)),
            _ => None,
        });
        holes.sum()
    }

    /// How many slots of the span are home; `None` if the record is impossible. For checks, under the class lock.
    pub(super) fn count_home(&self, class: SizeClass, span: PageIndex) -> Option<u32> {
        self.slots(class, span).count_home(class)
    }
}

#[cfg(test)]
mod tests {
    use core::alloc::Layout;

    use super::*;

    /// Only by its first byte, and only below what is covered.
    #[test]
    fn a_large_block_is_found_where_it_begins() {
        let spans = Spans::for_test(8);
        let three = Length::of(Layout::from_size_align(3 * PAGE_BYTES, 8).unwrap()).unwrap();
        let at = |bytes: usize| NonNull::new(spans.base.as_ptr().wrapping_add(bytes)).unwrap();
        let pages = [0, 5, 7];
        pages
            .iter()
            .for_each(|&page| spans.entry(PageIndex(page)).enter_large(three.pages(), Some(three)));
        for byte in 0..9 * PAGE_BYTES {
            let found = spans.large_of(at(byte), three).is_some();
            let begins = byte % PAGE_BYTES == 0 && pages.contains(&(byte / PAGE_BYTES));
            assert_eq!(found, begins, "{byte}");
            assert_eq!(
                spans.large_at(at(byte), three.pages(), Some(three)).is_some(),
                begins,
                "{byte}"
            );
        }
        for before in [1, 8, PAGE_BYTES - 8, PAGE_BYTES, 2 * PAGE_BYTES] {
            let memory = NonNull::new(spans.base.as_ptr().wrapping_sub(before));
            assert!(
                memory.is_none_or(|memory| spans.large_of(memory, three).is_none()),
                "{before}"
            );
        }
    }
}
