//! Where the object layer keeps its own data: a reservation for metadata, beside that of the pages.
//!
//! ```text
//!   ┌ classes ┬ the heap ┬ shared thread ┬ lanes ┐┌ rows of pages 0, 1, … ┐┌ their spans ┐┌ their flags ┐
//!   │ prepared at once, 16 or 48 KiB             ││ ▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░░ ││ ▓▓▓▓▓░░░░░░ ││ ▓▓▓▓▓░░░░░░ │
//!   └────────────────────────────────────────────┘└───────────────────────┘└─────────────┘└─────────────┘
//!                                                   prepared as spans reach them
//! ```
//!
//! The heap itself lies here, not in the [`GlobalHeap`](crate::GlobalHeap) that points to it: so threads that end can
//! find the heap whatever has become of that value. Nothing here is given back before the heap is closed (`close.rs`).
//!
//! Each page of 8 KiB takes 32 bytes and 8 flags: 0.5 %, where there are spans; and a row of 128 bytes, 1.6 %, where
//! their slots have less than 64 bytes. If all of that fits into a granule of the source, it is prepared at once, too:
//! a heap of 16 pages needs 2,688 bytes, not three granules.

use core::ptr::NonNull;

use crate::heap::Beside;
use crate::source::{Purpose, Refused, Reservation, Source};
use crate::sync::{AtomicU64, AtomicUsize, Lock, Ordering, Table, Zeroed};

use super::Objects;
use super::annex::Common;
use super::central::Central;
use super::size_class::CLASSES;
use super::span::{Row, Span};
use super::spans::{PAGE_FLAGS, Spans};
use super::store::Lane;

// SAFETY: atomic integers only, of which zero bytes are zero; `new` makes the same value.
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

// Powers of two: an entry is found by a shift.
const _: () = assert!(size_of::<Span>() == 32 && size_of::<Row>() == 128);

/// The tables that have an entry for each page: rows, spans, flags; and how many bytes that is.
const BESIDE: usize = 3;
const ENTRY_BYTES: [usize; BESIDE] = [size_of::<Row>(), size_of::<Span>(), PAGE_FLAGS];

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
const _: () = assert!(align_of::<Common>() <= LINE && align_of::<Central>() <= LINE && align_of::<Lane>() == LINE);

/// The object layer's reservation, and where things lie in it.
#[derive(Debug)]
pub struct Tables {
    reservation: Reservation,
    base: NonNull<u8>,
    common: usize,
    lanes: usize,
    /// How many there are.
    lane_count: usize,
    /// Bytes prepared at once.
    first: usize,
    /// Where the tables begin that have an entry for each page.
    beside: [usize; BESIDE],
    /// How many pages they have entries for.
    pages: usize,
    granule: usize,
    pub(super) lock: Lock,
    /// Bytes of each of those tables that are prepared. Under the lock.
    prepared: [AtomicUsize; BESIDE],
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
    ///
    /// # Errors
    /// How many bytes the tables would have had, if there can be so many.
    pub fn reserve<S: Source>(source: &S, pages: usize) -> Result<(Self, Reservation), Option<usize>> {
        let granule = source.granule();
        let common = heap_at::<S>() + size_of::<Objects<S>>().next_multiple_of(LINE);
        let lanes = common + size_of::<Common>().next_multiple_of(LINE);
        let lane_count = if pages < PAGES_FOR_LANES { 1 } else { LANES };
        let (mut first, step) = (lanes + lane_count * size_of::<Lane>(), granule.max(LINE));
        let (mut beside, mut bytes) = lay(first, pages, LINE).ok_or(None)?;
        if bytes - first <= granule {
            bytes = bytes.next_multiple_of(step);
            first = bytes;
        } else {
            first = first.next_multiple_of(step);
            (beside, bytes) = lay(first, pages, step).ok_or(None)?;
        }
        let align = granule.max(align_of::<Objects<S>>()).max(LINE);
        let reservation = Reservation::of(source, Purpose::Metadata, bytes, align).ok_or(Some(bytes))?;
        // SAFETY: the first granules of a reservation just made, for metadata.
        if unsafe { source.prepare(Purpose::Metadata, reservation.base, first) }.is_err() {
            // SAFETY: just reserved, and nothing refers to it.
            unsafe { source.unreserve(Purpose::Metadata, reservation) };
            return Err(Some(bytes));
        }
        let tables = Self {
            reservation,
            base: reservation.base,
            common,
            lanes,
            lane_count,
            first,
            beside,
            pages,
            granule,
            lock: Lock::new(),
            prepared: core::array::from_fn(|_| AtomicUsize::new(0)),
            prepare: AtomicU64::new(1),
        };
        Ok((tables, reservation))
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

    /// The first structure that threads share: room for one, which [`Common::make`] makes one.
    pub fn common(&self) -> NonNull<Common> {
        // SAFETY: inside the reservation, on a line.
        unsafe { self.base.add(self.common) }.cast()
    }

    /// The classes, and the spans of the pages of a heap that begins at `base`. Called once.
    ///
    /// # Safety
    ///
    /// The reservation is never given back, and this is called once.
    pub unsafe fn tables(&self, base: NonNull<u8>) -> (Table<Central>, Spans) {
        // SAFETY: disjoint parts of the reservation, on lines, used for nothing else. Classes and lanes are prepared;
        // what is beside the pages is accessed only below `covered`, which `cover` raises after it has prepared it.
        unsafe {
            let [rows, spans, flags] = self.beside.map(|table| self.base.add(table));
            let beside = (
                Table::new(spans, self.pages),
                Table::new(flags, self.pages * PAGE_FLAGS),
                Table::new(rows, self.pages),
            );
            let lanes = Table::new(self.base.add(self.lanes), self.lane_count);
            (
                Table::new(self.base, CLASSES),
                Spans::new(beside, lanes, base, self.granule),
            )
        }
    }

    /// The tables of entries that say nothing of a free page, for the release of pages: its row is zero, and its
    /// entry's tag is. `None` if no granule is theirs alone.
    pub fn beside(&self) -> Option<[Beside; 2]> {
        let table = |table: usize| Beside {
            // SAFETY: inside the reservation; on a granule, as not all is prepared at once.
            base: unsafe { self.base.add(self.beside[table]) },
            entry: ENTRY_BYTES[table],
        };
        (!self.is_prepared()).then(|| [0, 1].map(table))
    }

    /// Whether all was prepared at once.
    fn is_prepared(&self) -> bool {
        self.beside[0] < self.first
    }

    /// Prepares the entries of the first `pages` pages.
    ///
    /// # Errors
    /// If the source refuses, or the tables are too short.
    #[cold]
    pub fn cover<S: Source>(&self, source: &S, spans: &Spans, pages: usize) -> Result<(), Refused> {
        let _guard = self.lock.lock();
        if pages <= spans.covered() {
            return Ok(());
        }
        if pages > self.pages {
            return Err(Refused);
        }
        if self.is_prepared() {
            spans.reaches(self.pages);
            return Ok(());
        }
        let end = (pages * size_of::<Span>()).next_multiple_of(self.granule);
        let reach = (end / size_of::<Span>()).min(self.pages);
        (0..BESIDE).try_for_each(|table| self.extend(source, table, reach))?;
        spans.reaches(reach);
        Ok(())
    }

    /// Prepares the entries of the first `pages` pages in one of the tables beside them. Under the lock.
    fn extend<S: Source>(&self, source: &S, table: usize, pages: usize) -> Result<(), Refused> {
        // Relaxed, here and below: under the lock, or a statistic.
        let done = self.prepared[table].load(Ordering::Relaxed);
        let end = (pages * ENTRY_BYTES[table]).next_multiple_of(self.granule);
        if end > done {
            self.prepare.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the table's granules behind those prepared, inside the reservation, in which it ends with a
            // granule (`lay`).
            unsafe {
                let first = self.base.add(self.beside[table] + done);
                source.prepare(Purpose::Metadata, first, end - done)?;
            }
            self.prepared[table].store(end, Ordering::Relaxed);
        }
        Ok(())
    }

    /// How many prepare calls the source got, and how many bytes are prepared.
    pub fn state(&self) -> (u64, usize) {
        // Relaxed, twice: statistics.
        let beside: usize = self.prepared.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum();
        (self.prepare.load(Ordering::Relaxed), self.first + beside)
    }
}

/// Where the tables beside `pages` pages begin, the first of them at or behind `begin`, each on a multiple of `step`;
/// and where the last one ends.
fn lay(begin: usize, pages: usize, step: usize) -> Option<([usize; BESIDE], usize)> {
    let (mut beside, mut end) = ([0; BESIDE], begin.checked_next_multiple_of(step)?);
    for (table, entry) in beside.iter_mut().zip(ENTRY_BYTES) {
        *table = end;
        end = pages
            .checked_mul(entry)?
            .checked_add(end)?
            .checked_next_multiple_of(step)?;
    }
    Some((beside, end))
}
