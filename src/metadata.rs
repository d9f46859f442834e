//! Where the tables of a heap lie, and how much of them is prepared.
//!
//! ```text
//!   one reservation for metadata
//!   ┌───────────────┬────────────────────┬────────────────────┬──────────────┬────────┬───
//!   │ small tables  │ free bits          │ scavenged bits     │ leaves       │ level 3│ …
//!   │ ready at once │ ▓▓▓▓░░░░░░░░░░░░░░ │ ▓▓▓▓░░░░░░░░░░░░░░ │ ▓▓░░░░░░░░░░ │ ▓░░░░░ │      ▓ prepared, ░ reserved
//!   └───────────────┴────────────────────┴────────────────────┴──────────────┴────────┴───
//! ```
//!
//! The whole extent is reserved with the heap, so no table ever moves. Memory is prepared as the heap grows, always
//! before the pages it describes. A table that would not fill one granule of the operating system shares the first part
//! with other small tables.
//!
//! Per page: one free bit, one scavenged bit, and per 512 pages one word for the scavenger and 8/7 of a summary: 0.283
//! bytes. A heap of 1 TiB reserves 36 MiB for that and, while it holds one page, has 7 granules of 4 KiB in memory.

use core::ptr::NonNull;

use crate::bitmap::Bitmap;
use crate::cache::Slot;
use crate::geometry::{MAX_CHUNK_WORDS, MAX_LEVELS, Shape, WORD_PAGES};
use crate::radix::Tree;
use crate::source::{Purpose, Refused, Reservation, Source};
use crate::sync::{AtomicU64, AtomicUsize, Ordering, Table, Zeroed};

/// Free bits, scavenged bits, the levels, the scavenger's words for chunks, the slots of caches.
const TABLES: usize = 2 + MAX_LEVELS + 2;
const FREE: usize = 0;
const SCAVENGED: usize = 1;
const LEVELS: usize = 2;
const CHUNKS: usize = LEVELS + MAX_LEVELS;
const SLOTS: usize = CHUNKS + 1;

/// Tables start on a cache line, so that a block of children is one line.
const LINE: usize = 64;

// SAFETY: a slot is atomic integers only, for which all-zero bytes are zero; `Slot::new` makes the same.
unsafe impl Zeroed for Slot {
    fn zeroed() -> Self {
        Self::new()
    }
}

/// Sizes and positions of the tables of a heap that may grow to some number of pages.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    offsets: [usize; TABLES],
    bytes: [usize; TABLES],
    /// Where the tables end that are prepared at once.
    small: usize,
    total: usize,
    granule: usize,
}

impl Plan {
    /// The plan for a heap of up to `pages` pages and `slots` caches. `None` if it would not fit the address space.
    pub fn new<G: Shape>(pages: usize, slots: usize, granule: usize) -> Option<Self> {
        let mut bytes = [0; TABLES];
        for (table, bytes) in bytes.iter_mut().enumerate() {
            *bytes = Self::needed::<G>(table, pages, slots)?;
        }
        let mut plan = Self {
            offsets: [0; TABLES],
            bytes,
            small: 0,
            total: 0,
            granule,
        };
        plan.place(|bytes| bytes < granule, LINE)?;
        plan.total = plan.total.checked_next_multiple_of(granule)?;
        plan.small = plan.total;
        plan.place(|bytes| bytes >= granule, granule)?;
        Some(plan)
    }

    /// Places the tables of the chosen sizes after those already placed, each at a multiple of `unit`.
    fn place(&mut self, chosen: impl Fn(usize) -> bool, unit: usize) -> Option<()> {
        for (offset, &bytes) in self
            .offsets
            .iter_mut()
            .zip(&self.bytes)
            .filter(|&(_, &bytes)| chosen(bytes))
        {
            *offset = self.total;
            self.total = self.total.checked_add(bytes)?.checked_next_multiple_of(unit)?;
        }
        Some(())
    }

    /// Total bytes.
    pub const fn total(&self) -> usize {
        self.total
    }

    /// Bytes that a table needs for the first `pages` pages and `slots` caches.
    fn needed<G: Shape>(table: usize, pages: usize, slots: usize) -> Option<usize> {
        let entries = match table {
            FREE | SCAVENGED => pages
                .div_ceil(G::CHUNK_PAGES)
                .checked_mul(G::CHUNK_PAGES / WORD_PAGES)?,
            SLOTS => return slots.checked_mul(size_of::<Slot>()),
            CHUNKS => pages.div_ceil(G::CHUNK_PAGES),
            level if level - LEVELS < G::LEVELS => Tree::<G>::entries(level - LEVELS, pages),
            _ => 0,
        };
        entries.checked_mul(size_of::<u64>())
    }
}

// A chunk's words are one cache line; so are a node's children; so is a slot.
const _: () = assert!(MAX_CHUNK_WORDS * size_of::<u64>() == LINE);

/// The metadata of one heap.
#[derive(Debug)]
pub struct Metadata {
    reservation: Reservation,
    plan: Plan,
    /// Bytes of each table that are prepared. Written under the heap's lock.
    prepared: [AtomicUsize; TABLES],
}

// SAFETY: the reservation is an address and a length; all access to the memory behind it goes through tables of
// atomics.
unsafe impl Send for Metadata {}
// SAFETY: as above.
unsafe impl Sync for Metadata {}

impl Metadata {
    /// Reserves what `plan` needs and prepares the small tables. Also returns how many requests to prepare that took.
    /// On failure nothing stays reserved.
    ///
    /// # Errors
    /// The number of requests to prepare. If there was one, a reservation has been given back.
    pub fn reserve<S: Source>(source: &S, plan: Plan) -> Result<(Self, u64), u64> {
        let reservation = Reservation::of(source, Purpose::Metadata, plan.total, plan.granule).ok_or(0_u64)?;
        let asked = u64::from(plan.small > 0);
        // SAFETY: the first granules of a reservation just made, for metadata.
        let ready = asked == 0 || unsafe { source.prepare(Purpose::Metadata, reservation.base, plan.small).is_ok() };
        if !ready {
            // SAFETY: the reservation just made; nothing refers to it.
            unsafe { source.unreserve(Purpose::Metadata, reservation) };
            return Err(asked);
        }
        let prepared = core::array::from_fn(|table| {
            AtomicUsize::new(if plan.bytes[table] < plan.granule {
                plan.bytes[table]
            } else {
                0
            })
        });
        let tables = Self {
            reservation,
            plan,
            prepared,
        };
        Ok((tables, asked))
    }

    /// The reservation, to be given back.
    pub const fn reservation(&self) -> Reservation {
        self.reservation
    }

    /// Bytes prepared so far.
    pub fn bytes(&self) -> usize {
        let large = (0..TABLES).filter(|&table| self.plan.bytes[table] >= self.plan.granule);
        // Relaxed: a statistic.
        self.plan.small
            + large
                .map(|table| self.prepared[table].load(Ordering::Relaxed))
                .sum::<usize>()
    }

    /// Prepares the tables for the first `pages` pages. Only under the heap's lock. Returns the number of requests to
    /// the source.
    ///
    /// # Errors
    /// The same number, the last request having failed. What was prepared stays so, and is not requested again.
    pub fn cover<G: Shape, S: Source>(&self, source: &S, pages: usize) -> Result<usize, usize> {
        let mut calls = 0;
        for table in FREE..SLOTS {
            // The plan was made for at least as many pages, so this fits.
            let needed = Plan::needed::<G>(table, pages, 0).ok_or(calls)?;
            calls += self.cover_table(source, table, needed).map_err(|Refused| calls + 1)?;
        }
        Ok(calls)
    }

    /// Prepares the first `slots` slots. As [`cover`](Self::cover).
    ///
    /// # Errors
    /// As [`cover`](Self::cover).
    pub fn cover_slots<S: Source>(&self, source: &S, slots: usize) -> Result<usize, usize> {
        self.cover_table(source, SLOTS, slots * size_of::<Slot>())
            .map_err(|Refused| 1)
    }

    fn cover_table<S: Source>(&self, source: &S, table: usize, needed: usize) -> Result<usize, Refused> {
        // Relaxed: under the heap's lock.
        let done = self.prepared[table].load(Ordering::Relaxed);
        if needed <= done {
            return Ok(0);
        }
        let end = needed.next_multiple_of(self.plan.granule);
        // SAFETY: inside the reservation: `needed` is at most the table's bytes, and the next table begins on a
        // granule.
        let start = unsafe { self.reservation.base.add(self.plan.offsets[table] + done) };
        // SAFETY: the granules of this table after those prepared: reserved for metadata, and on granule boundaries.
        unsafe { source.prepare(Purpose::Metadata, start, end - done)? };
        self.prepared[table].store(end, Ordering::Relaxed);
        Ok(1)
    }

    /// The free bits, the scavenged bits and the tree, which make a set of free pages; one word for each chunk; and the
    /// slots. Called once for each heap.
    ///
    /// # Safety
    ///
    /// The reservation outlives what is returned; this is called once; no page's tables are accessed before
    /// [`cover`](Self::cover) has prepared them, and no slot before [`cover_slots`](Self::cover_slots).
    pub unsafe fn tables<G: Shape>(&self) -> (Bitmap, Bitmap, Tree<G>, Table<AtomicU64>, Table<Slot>) {
        let levels = core::array::from_fn(|level| {
            // SAFETY: as for `table`; this function's contract repeats it.
            unsafe { self.table(LEVELS + level) }
        });
        // SAFETY: the same.
        let (free, scavenged) = unsafe { (self.table(FREE), self.table(SCAVENGED)) };
        // SAFETY: the same.
        let (chunks, slots) = unsafe { (self.table(CHUNKS), self.table(SLOTS)) };
        (
            Bitmap::new(free),
            Bitmap::new(scavenged),
            Tree::new(levels),
            chunks,
            slots,
        )
    }

    /// # Safety
    ///
    /// As for [`tables`](Self::tables), and `T` is the type the plan sized the table for.
    unsafe fn table<T: Zeroed>(&self, table: usize) -> Table<T> {
        // Not the size of `T`: under a model that is whatever the checker keeps in an atomic.
        let entry = if table == SLOTS {
            size_of::<Slot>()
        } else {
            size_of::<u64>()
        };
        let len = self.plan.bytes[table] / entry;
        // SAFETY: the table's part of the reservation, on a cache line, used for nothing else, zero until written; what
        // is accessed is prepared first, and the reservation outlives the table (this function's contract).
        unsafe { Table::new(self.reservation.base.add(self.plan.offsets[table]), len) }
    }
}

/// The address `bytes` into a reservation, which may consist of bare numbers.
#[inline(always)]
pub fn offset(base: NonNull<u8>, bytes: usize) -> NonNull<u8> {
    // Bare numbers have no object to stay inside, so the arithmetic is wrapping; it does not wrap, because the range
    // was reserved.
    let pointer = base.as_ptr().wrapping_add(bytes);
    NonNull::new(pointer).unwrap_or(base)
}
