//! Where the object layer keeps its own data: a reservation for metadata, beside that of the pages.
//!
//! ```text
//!   ┌ classes ┬ the heap ┬ shared thread ┬ lanes ┐┌ span of page 0 │ 1 │ 2 │ … ┐┌ flags of page 0 │ 1 │ 2 │ …
//!   │ prepared at once, 15 or 47 KiB             ││ ▓▓▓▓▓▓▓▓░░░░░░░░░░░░░░░░░░ ││ ▓▓▓▓▓▓▓▓░░░░░░░░░░░░░░░
//!   └────────────────────────────────────────────┘└────────────────────────────┘└───────────────────────────
//!                                                   prepared as spans reach them
//! ```
//!
//! The heap itself lies here, not in the [`GlobalHeap`](crate::GlobalHeap) that points to it: so threads that end can
//! find the heap whatever has become of that value. Nothing here is given back before the heap is closed (`close.rs`).
//!
//! Each page of 8 KiB takes 32 bytes and 8 flags: 0.5 %, where there are spans.

use core::ptr::NonNull;

use crate::heap::{Beside, PageHeap};
use crate::source::{Purpose, Refused, Reservation, Source};
use crate::sync::{AtomicU64, AtomicUsize, Lock, Ordering, Table, Zeroed};
use crate::units::PageIndex;

use super::Objects;
use super::central::Central;
use super::size_class::CLASSES;
use super::span::Span;
use super::spans::{PAGE_FLAGS, Spans};
use super::store::Lane;
use super::thread::Thread;

// SAFETY: atomic integers only, of which zero bytes are zero; `vacant` makes the same value.
unsafe impl Zeroed for Span {
    fn zeroed() -> Self {
        Self::vacant()
    }
}

// SAFETY: atomic integers; `new` makes the same value.
unsafe impl Zeroed for Lane {
    fn zeroed() -> Self {
        Self::new()
    }
}

// SAFETY: atomic integers and a lock, which is one too; `new` makes the same value.
unsafe impl Zeroed for Central {
    fn zeroed() -> Self {
        Self::new()
    }
}

/// The alignment of what needs a line of its own: two cache lines, which some processors fetch together.
const LINE: usize = 128;

// A power of two: an entry is found by a shift.
const _: () = assert!(size_of::<Span>() == 32);

// 80 of them are most of what a small heap can afford.
const _: () = assert!(size_of::<Central>() <= 64);

/// Lanes of the store: so many that threads rarely share one. A small heap has one: each takes 2.1 KiB.
const LANES: usize = 16;
const PAGES_FOR_LANES: usize = 1 << 12;

/// Where the heap lies: behind the classes, so that what every call reads does not begin a page. Blocks of a page and
/// more do: the write to such a block and a read that follows it would agree in their last twelve bits, by which
/// processors guess whether the read depends on the write.
const HEAP: usize = (CLASSES * size_of::<Central>()).next_multiple_of(LINE);
const _: () = assert!(HEAP % 4096 >= LINE);

/// Where a heap over this source lies: there, or behind it, if the source is aligned to so much that it has to.
const fn heap_at<S: Source>() -> usize {
    HEAP.next_multiple_of(align_of::<Objects<S>>())
}

// Every part of the reservation may begin wherever a line does.
const _: () = assert!(align_of::<Thread>() <= LINE && align_of::<Central>() <= LINE && align_of::<Lane>() == LINE);

/// The object layer's reservation, and where things lie in it.
#[derive(Debug)]
pub struct Tables {
    reservation: Reservation,
    base: NonNull<u8>,
    thread: usize,
    lanes: usize,
    /// How many there are.
    lane_count: usize,
    spans: usize,
    flags: usize,
    /// Entries of the table of spans.
    pages: usize,
    granule: usize,
    pub(super) lock: Lock,
    /// Bytes of flags prepared. Under the lock.
    flagged: AtomicUsize,
    /// Requests to the source.
    prepare: AtomicU64,
}

// SAFETY: an address and numbers; the memory behind it is accessed through tables of atomics, or under a lock.
unsafe impl Send for Tables {}
// SAFETY: as above.
unsafe impl Sync for Tables {}

impl Tables {
    /// Reserves the tables of a heap of up to `pages` pages and prepares the first part. On failure nothing stays
    /// reserved.
    pub fn reserve<S: Source>(source: &S, pages: usize) -> Option<(Self, Reservation)> {
        let granule = source.granule();
        let thread = heap_at::<S>() + size_of::<Objects<S>>().next_multiple_of(LINE);
        let lanes = thread + size_of::<Thread>().next_multiple_of(LINE);
        let lane_count = if pages < PAGES_FOR_LANES { 1 } else { LANES };
        let spans = (lanes + lane_count * size_of::<Lane>()).next_multiple_of(granule.max(LINE));
        let flags = pages
            .checked_mul(size_of::<Span>())?
            .checked_add(spans)?
            .checked_next_multiple_of(granule)?;
        let bytes = pages
            .checked_mul(PAGE_FLAGS)?
            .checked_add(flags)?
            .checked_next_multiple_of(granule)?;
        let align = granule.max(align_of::<Objects<S>>()).max(LINE);
        let reservation = Reservation::of(source, Purpose::Metadata, bytes, align)?;
        // SAFETY: the first granules of a reservation just made, for metadata.
        if unsafe { source.prepare(Purpose::Metadata, reservation.base, spans) }.is_err() {
            // SAFETY: just reserved, and nothing refers to it.
            unsafe { source.unreserve(Purpose::Metadata, reservation) };
            return None;
        }
        let tables = Self {
            reservation,
            base: reservation.base,
            thread,
            lanes,
            lane_count,
            spans,
            flags,
            pages,
            granule,
            lock: Lock::new(),
            flagged: AtomicUsize::new(0),
            prepare: AtomicU64::new(1),
        };
        Some((tables, reservation))
    }

    /// The whole reservation, to be given back.
    pub fn reservation(&self) -> Reservation {
        self.reservation
    }

    /// The heap's place: enough room, aligned, zeroed.
    pub fn place<S: Source>(&self) -> NonNull<Objects<S>> {
        // SAFETY: inside the reservation, at a multiple of the heap's alignment; and the reservation was made as
        // aligned as the heap is (`reserve`), or more.
        unsafe { self.base.add(heap_at::<S>()) }.cast()
    }

    /// The structure shared by threads that have none of their own: zeroed at first, and then
    /// [forgotten](Thread::forget).
    pub fn shared_thread(&self) -> NonNull<Thread> {
        // SAFETY: inside the reservation, on a line.
        unsafe { self.base.add(self.thread) }.cast()
    }

    /// The classes, and the spans of the pages of `heap`. Called once.
    ///
    /// # Safety
    ///
    /// The reservation is never given back, and this is called once.
    pub unsafe fn tables<S: Source>(&self, heap: &PageHeap<S>) -> (Table<Central>, Spans) {
        // SAFETY: disjoint parts of the reservation, on lines, used for nothing else. Classes and lanes are prepared; a
        // span's entry is accessed only below `covered`, which `cover` raises after it has prepared the entries.
        unsafe {
            let centrals = Table::new(self.base, CLASSES);
            let lanes = Table::new(self.base.add(self.lanes), self.lane_count);
            let spans = Table::new(self.base.add(self.spans), self.pages);
            let flags = Table::new(self.base.add(self.flags), self.pages * PAGE_FLAGS);
            (
                centrals,
                Spans::new(spans, flags, lanes, heap.address(PageIndex(0)), self.granule),
            )
        }
    }

    /// The spans' entries, for the release of pages: a free page's entry has no meaning except its tag, which is zero.
    pub fn beside(&self) -> Beside {
        Beside {
            // SAFETY: inside the reservation, on a granule.
            base: unsafe { self.base.add(self.spans) },
            entry: size_of::<Span>(),
        }
    }

    /// Prepares the entries of the first `pages` pages.
    ///
    /// # Errors
    /// If the source refuses, or the table is too short.
    #[cold]
    pub fn cover<S: Source>(&self, source: &S, spans: &Spans, pages: usize) -> Result<(), Refused> {
        let _guard = self.lock.lock();
        let covered = spans.covered();
        if pages <= covered {
            return Ok(());
        }
        if pages > self.pages {
            return Err(Refused);
        }
        let done = (covered * size_of::<Span>()).next_multiple_of(self.granule);
        let end = (pages * size_of::<Span>()).next_multiple_of(self.granule);
        let reach = (end / size_of::<Span>()).min(self.pages);
        self.flag(source, reach)?;
        if end > done {
            // Relaxed: a statistic.
            self.prepare.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the table's granules behind those prepared, inside the reservation, which was rounded up to a
            // granule.
            unsafe { source.prepare(Purpose::Metadata, self.base.add(self.spans + done), end - done)? };
        }
        spans.reaches(reach);
        Ok(())
    }

    /// Prepares the flags of the first `pages` pages. Under the lock.
    fn flag<S: Source>(&self, source: &S, pages: usize) -> Result<(), Refused> {
        // Relaxed, here and below: under the lock, or a statistic.
        let done = self.flagged.load(Ordering::Relaxed);
        let end = (pages * PAGE_FLAGS).next_multiple_of(self.granule);
        if end > done {
            self.prepare.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the flags' granules behind those prepared, inside the reservation, which was rounded up to a
            // granule.
            unsafe { source.prepare(Purpose::Metadata, self.base.add(self.flags + done), end - done)? };
            self.flagged.store(end, Ordering::Relaxed);
        }
        Ok(())
    }

    /// How many prepare calls the source got, and how many bytes are prepared.
    pub fn state(&self, spans: &Spans) -> (u64, usize) {
        // Relaxed, twice: statistics.
        let bytes = self.spans + spans.covered() * size_of::<Span>() + self.flagged.load(Ordering::Relaxed);
        (self.prepare.load(Ordering::Relaxed), bytes)
    }
}
