//! The beginning of a heap: first its room is reserved, then the value is written where it is to lie.
//!
//! ```text
//!   source, config ─▶ Room: two reservations, 0.4 KiB ─┬─▶ PageHeap: 4 KiB, field by field, where the caller wants it
//!                                                      └─▶ the source again, and nothing reserved
//! ```
//!
//! A heap is large, since each count that many threads change has a cache line of its own. A value of 4 KiB that goes
//! through three functions and two `Result`s is on the stack five times, more than a thread with 16 KiB has. So
//! whatever can fail is done with a [`Room`], and [`Room::write`] is a list of fields.
//!
//! Worked example: the first allocation of a program, on a thread with the smallest stack. The object layer reserves
//! its tables, then a `Room` of 1 TiB; the system grants 256 GiB. That is less than half, so the room is given back,
//! and smaller tables are tried. When both fit each other the heap is written into the tables. All that takes less than
//! 8 KiB of stack (the test `requirements::a_heap_opens_on_eight_kibibytes_of_stack`).

use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ptr::NonNull;

use crate::cache::Slot;
use crate::free_set::FreeSet;
use crate::geometry::{Geometry, Shape};
use crate::in_place::write_fields;
use crate::metadata::Metadata;
use crate::source::{HugePages, MIN_GRANULE, Purpose, Reservation, Source};
use crate::sync::{AtomicU32, AtomicUsize, Lock, Turnstile};
use crate::units::PageCount;

use super::driver::Driver;
use super::stats::Counters;
use super::{Calls, Config, NewHeapError, PageHeap};

/// The memory of a heap that has yet to be written down. If it is neither [written](Self::write) as a heap nor
/// [given back](Self::give_back), it stays reserved.
#[derive(Debug)]
#[must_use]
pub(crate) struct Room<S: Source, G: Shape = Geometry> {
    pages: Reservation,
    metadata: Metadata,
    /// Pages in the reservation.
    capacity: usize,
    calls: Calls,
    config: Config,
    source: S,
    shape: PhantomData<fn() -> G>,
}

impl<S: Source, G: Shape> Room<S, G> {
    /// Reserves room for a heap. On failure nothing stays reserved, and the source is returned.
    pub(crate) fn reserve(source: S, config: Config) -> Result<Self, (S, NewHeapError)> {
        let granule = source.granule();
        if granule < MIN_GRANULE || !granule.is_power_of_two() || (S::COMMITS && granule > G::PAGE_BYTES) {
            return Err((source, NewHeapError::Granule));
        }
        let slots = config.shards.saturating_add(config.caches);
        if slots >= u32::MAX as usize {
            let error = NewHeapError::no_metadata(&source, slots.checked_mul(size_of::<Slot>()));
            return Err((source, error));
        }
        let (pages, metadata, capacity, calls) = match PageHeap::<S, G>::reserve(&source, &config) {
            Ok(reserved) => reserved,
            Err(error) => return Err((source, error)),
        };
        let covered = metadata.cover_slots(&source, config.shards);
        let mut room = Self {
            pages,
            metadata,
            capacity,
            calls,
            config,
            source,
            shape: PhantomData,
        };
        match covered {
            Ok(calls) => {
                room.calls.prepare += calls as u64;
                room.advise();
                Ok(room)
            }
            Err(_) => {
                let bytes = Some(config.shards * size_of::<Slot>());
                let error = NewHeapError::no_metadata(&room.source, bytes);
                Err((room.give_back(), error))
            }
        }
    }

    /// Tells the source the policy for huge pages; whether to grant it is up to the source.
    fn advise(&mut self) {
        let huge = self.config.huge_pages;
        if huge != HugePages::System {
            self.calls.advise += 1;
            // Not what was reserved: that may be more, and end anywhere.
            let bytes = self.capacity << G::PAGE_SHIFT;
            // SAFETY: all pages, which are in the reservation, and begin and end on granule boundaries.
            let _granted = unsafe { self.source.advise(self.pages.base, bytes, huge) };
        }
    }

    /// How many pages the heap will be able to grow to.
    pub(crate) const fn capacity(&self) -> PageCount {
        PageCount(self.capacity)
    }

    /// The address of its first page.
    pub(crate) const fn base(&self) -> NonNull<u8> {
        self.pages.base
    }

    /// Gives everything back, and returns the source.
    pub(crate) fn give_back(self) -> S {
        // SAFETY: reserved for this value, which is consumed; nothing refers to them.
        unsafe {
            self.source.unreserve(Purpose::Pages, self.pages);
            self.source.unreserve(Purpose::Metadata, self.metadata.reservation());
        }
        self.source
    }

    /// Writes the heap where it is to lie.
    ///
    /// # Safety
    ///
    /// The place is aligned, valid for writes, and nobody else's.
    pub(crate) unsafe fn write(self, place: *mut PageHeap<S, G>) {
        // SAFETY: the place is the caller's promise. `drop` gives the reservation back after the tables are gone, and
        // this is the only call of `tables`. Pages are accessed only below `grown`, and slots only below `lent` or
        // `shards`; those are raised only after `cover` and `cover_slots`; `reserve` has covered the shards' slots.
        unsafe {
            let (free, scavenged, tree, chunks, slots) = self.metadata.tables::<G>();
            write_fields!(
                place,
                PageHeap {
                    set: FreeSet::new(free, scavenged, tree),
                    slots,
                    shards: self.config.shards,
                    base: self.pages.base,
                    capacity: self.capacity,
                    phase: self.pages.base.addr().get() >> G::PAGE_SHIFT,
                    limit: AtomicUsize::new(self.config.limit.pages(G::PAGE_SHIFT).min(self.capacity)),
                    lock: Lock::new(),
                    lending: Lock::new(),
                    prepared: AtomicUsize::new(0),
                    stuck: AtomicU32::new(0),
                    adding: AtomicU32::new(0),
                    vacant: AtomicU32::new(0),
                    lent: AtomicU32::new(0),
                    flush_calls: AtomicU32::new(0),
                    scavengers: Turnstile::new(),
                    movers: Turnstile::new(),
                    driver: Driver::new(chunks, self.config.soft_limit.pages(G::PAGE_SHIFT)),
                    doubtful: AtomicU32::new(0),
                    lazily: self.config.lazily,
                    patient: self.config.patient,
                    first: (self.config.first >> G::PAGE_SHIFT).min(G::CHUNK_PAGES),
                    counters: Counters::of(&self.calls),
                    pages: self.pages,
                    metadata: self.metadata,
                    source: self.source,
                }
            );
        }
    }
}

impl<S: Source> PageHeap<S> {
    /// Creates a heap of pages of 8 KiB over `source`. [`with_shape`](PageHeap::with_shape) is for other pages.
    ///
    /// Reserves the number of bytes given to [`Config::new`], and room for the tables. If the source cannot provide
    /// that much, takes less: down to one megabyte, or as much as the source has if that is less. Commits a few
    /// granules. O(1).
    ///
    /// # Errors
    /// If not even the smallest heap could be reserved. Nothing stays reserved.
    pub fn new(source: S, config: Config) -> Result<Self, NewHeapError> {
        Self::with_shape(source, config)
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    /// As [`new`](PageHeap::new), in the shape that the type names.
    ///
    /// ```
    /// use pageheap::source::System;
    /// use pageheap::{Config, Geometry, PageHeap};
    ///
    /// // Pages of 4 KiB, under five levels of summaries.
    /// let heap = PageHeap::<System, Geometry<5, 12>>::with_shape(System, Config::new(1 << 30)).unwrap();
    /// assert_eq!(heap.page_bytes(), 4096);
    /// ```
    ///
    /// # Errors
    /// As for [`new`](PageHeap::new).
    pub fn with_shape(source: S, config: Config) -> Result<Self, NewHeapError> {
        let room = Room::reserve(source, config).map_err(|(_, error)| error)?;
        let mut heap = MaybeUninit::uninit();
        // SAFETY: a place for one, which has one afterwards.
        unsafe {
            room.write(heap.as_mut_ptr());
            Ok(heap.assume_init())
        }
    }
}
