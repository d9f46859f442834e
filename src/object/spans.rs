//! All spans of a heap: from an address to its span and slot, and back.
//!
//! ```text
//!   address ── − base, >> 13 ──▶ page ── table ──▶ class, pages back ──▶ span ── × reciprocal ──▶ slot
//! ```
//!
//! Nothing here is read from a slot: what is known of it lies in the table, in rows (`span.rs`), and in flags
//! (`flag.rs`).

use core::ptr::NonNull;

use crate::fatal::{self, Number};
use crate::metadata::offset;
use crate::sync::{AtomicUsize, Ordering, Table, Zeroed};
use crate::units::{PageIndex, PageRun};

use super::chain::BatchPlace;
use super::flag::{Flag, MOST_MOVES};
use super::holes::bytes_of;
use super::length::Length;
use super::link::Nth;
use super::size_class::{FLAG_SHIFT, MAX_SLOT_BYTES, PAGE_BYTES, PAGE_SHIFT, SizeClass};
use super::span::{Row, Slots, Span, has_row};
use super::store::{Lane, Store};

// SAFETY: atomic integers only, of which zero bytes are zero; `vacant` makes the same value. (A model does not rely on
// the bytes.)
unsafe impl Zeroed for Span {
    fn zeroed() -> Self {
        Self::vacant()
    }
}

// SAFETY: as above; `empty` makes the same value.
unsafe impl Zeroed for Row {
    fn zeroed() -> Self {
        Self::empty()
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
    /// `covered`, in bytes.
    reach: AtomicUsize,
    /// How many entries are prepared. I14: spans lie, and large blocks in the table begin, below this. Raised
    /// under the tables' lock.
    covered: AtomicUsize,
    rows: Table<Row>,
    /// Batches and blank racks on their way between threads.
    pub(super) store: Store,
    /// The page below which the next search for holes begins.
    pub(super) punched: AtomicUsize,
    /// Grains per granule of the source; 1 if the granule is shorter than a grain.
    pub(super) granule: usize,
}

// It ends with the rows, and what is written often is not on it. (A model's atomics are longer.)
#[cfg(target_pointer_width = "64")]
const _: () = {
    let line = core::mem::offset_of!(Spans, rows);
    assert!(line == 64 || size_of::<AtomicUsize>() != size_of::<usize>());
    assert!(core::mem::offset_of!(Spans, punched) > line);
};

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
            covered: AtomicUsize::new(0),
            rows,
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
    #[inline(always)]
    pub(super) fn locate(&self, class: SizeClass, address: *mut u8) -> (PageIndex, u32) {
        self.find(class, address)
            .unwrap_or_else(|| self.locate_misplaced(class, address))
    }

    /// The same, if there is one.
    #[inline(always)]
    fn find(&self, class: SizeClass, address: *mut u8) -> Option<(PageIndex, u32)> {
        let distance = address.addr().wrapping_sub(self.base.addr().get());
        let page = distance >> PAGE_SHIFT;
        let back = self.entry_covered(page)?.back_in(class)?;
        let offset = (distance & (PAGE_BYTES - 1)) + (back << PAGE_SHIFT);
        Some((PageIndex(page.saturating_sub(back)), class.slot_at(offset)?))
    }

    /// The entry of a page, if it is covered.
    #[inline(always)]
    fn entry_covered(&self, page: usize) -> Option<&Span> {
        // SAFETY: the page is covered, so its entry is prepared.
        (page < self.covered()).then(|| unsafe { self.table.at(page) })
    }

    /// Says what is wrong with an address that [`find`](Self::find) has not found; what it finds after all is right.
    #[cold]
    #[inline(never)]
    fn locate_misplaced(&self, class: SizeClass, address: *mut u8) -> (PageIndex, u32) {
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

    /// Reads what says where these slots are, so that it is in this processor's cache when they are taken home under
    /// their class's lock: the misses of slots that lie scattered overlap here, and keep nobody waiting. Aborts if it
    /// comes upon a slot that [`locate`](Self::locate) does not find.
    pub(super) fn prefetch(&self, class: SizeClass, slots: &[*mut u8]) {
        let mut last = usize::MAX;
        for &slot in slots {
            // Neighbours are often freed together.
            let page = slot.addr() >> PAGE_SHIFT;
            if page != last {
                last = page;
                let (span, number) = self.locate(class, slot);
                match self.row(class, span) {
                    Some(row) => row.prefetch(number),
                    None => self.entry(span).prefetch(),
                }
            }
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
        let entry = self.entry_covered(number.wrapping_sub(1))?;
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
        unsafe { self.flags.at(self.distance(slot) >> FLAG_SHIFT) }.lower();
    }

    /// The flag of the slot of more than 1 KiB that begins at `slot`, unless the flag says that it is free or roomy.
    #[inline(always)]
    pub fn flag_of(&self, slot: NonNull<u8>) -> Option<&Flag> {
        self.flag_at(slot).filter(|flag| flag.is_plain())
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
        self.flag_at(memory).map_or(0, Flag::moves)
    }

    /// Notes that the block at `memory` has moved there to grow, and `before` times earlier; not of a roomy one, which
    /// counts as having moved often.
    #[inline(always)]
    pub fn note_move(&self, memory: NonNull<u8>, before: u8) {
        if let Some(flag) = self.flag_at(memory).filter(|flag| !flag.is_roomy()) {
            flag.note_move(before);
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
        if !self.flag_at(memory)?.is_roomy() {
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
        if let Some(flag) = self.flag_at(memory) {
            flag.make_roomy();
        }
    }

    /// Notes that it is free, or that its block is as long as the run.
    pub fn leave_room(&self, memory: NonNull<u8>) {
        if let Some(flag) = self.flag_at(memory) {
            flag.raise();
        }
    }

    /// Bytes to spare of the roomy slots, or the roomy run, that begin in a page. For checks.
    pub fn roomy_from(&self, page: PageIndex) -> usize {
        let flags = self.flags.row(page.0 * PAGE_FLAGS, PAGE_FLAGS);
        let roomy = flags.iter().filter(|flag| flag.is_roomy()).count();
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

    /// Whether the row of a page that is in no span which has one is empty (I11). For checks.
    pub(super) fn is_row_empty(&self, page: PageIndex) -> bool {
        self.rows.get(page.0).is_empty()
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
