//! Existing bytes as a source: a static array, an entry of a kernel's memory map, a block of another allocator.
//!
//! ```text
//!   base                                                     base + bytes
//!    ├── Pages ──▶ ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ left ╌╌╌╌╌╌╌╌╌╌╌╌ ◀── Metadata ──┤
//! ```
//!
//! Pages are taken from the bottom and metadata from the top, until the two meet. Several heaps may share a region,
//! within the limits that [`Region`] names. Every transition is immediate, because the memory exists: `prepare` clears
//! metadata and does nothing for pages, `commit` does nothing, and `release` is refused, because there is nobody to
//! give the memory back to. It needs no operating system and no lock: a reservation is one compare-exchange
//! (`ledger.rs` has the drawing).
//!
//! **What pages read as.** Nothing is known about the bytes of a region, so `prepare` returns [`Contents::Unknown`].
//! The owner may [promise](Region::zeroed) that they are zero; a page then counts as zero the first time it is
//! prepared, and never again. Two marks are enough to recognise the first time: pages have been prepared only below
//! one, metadata only above the other.
//!
//! **Several pieces.** Memory maps have gaps. A region reaches from the lowest piece to the highest, and is told what
//! between them is [not memory](Region::with_gaps). Pages may be reserved across a gap, as the heap does not use those
//! that touch it. Metadata lies in one piece: in the highest that has room.
//!
//! ```text
//!   base
//!    ├── Pages ──▶ ╌╌╌╌╌╌╌╌╌┤░░ gap ░░├╌╌╌╌╌╌╌╌╌ left ╌╌╌╌╌╌ ◀── Metadata ──┤
//! ```

use core::mem::MaybeUninit;
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};

use super::ledger::{End, Ledger, Part, addresses, first_gap};
use super::{Contents, Memory, Purpose, Refused, Reservation, Source};

/// A [`Source`] over bytes that the caller owns.
///
/// **Little memory.** A region of 64 KiB with the default granule of 4 KiB and an aligned base has 16 granules. A heap
/// with pages of 4 KiB and the 64 caches of [`Config`](crate::Config) manages 13 of them, without caches 14: one or two
/// are its tables, and one is set aside in case the base is not aligned to a page. With pages of 8 KiB it manages 6. So
/// in little memory give a [`PageHeap`](crate::PageHeap) `.caches(0)` and small pages. A [`Heap`](crate::Heap) or a
/// `GlobalHeap` always has pages of 8 KiB and one cache. It opens in 32 KiB (40 if the base is not aligned to a page),
/// has 3 pages in 64 KiB, and 11 in 128. With fewer than 12 pages all threads of a `GlobalHeap` share one structure, as
/// there is no room for one each, so its fast paths are not used.
///
/// **Several heaps** may share it, by reference. Each end has room for 255 reservations at a time. A
/// [`PageHeap`](crate::PageHeap) takes one at the bottom and one at the top, a [`Heap`](crate::Heap) a second one at
/// the top, and a third one there once several threads use it at the same time, if there is room. (So does a
/// `GlobalHeap`. If another heap was made in between, whose tables lie around that third one, they become available
/// with the first heap.) A reservation that is
/// given back becomes available at once if it was the last one taken at its end, otherwise when that end is empty. So
/// drop heaps in the reverse order of their creation. And make those first that have large
/// [alignments](crate::Config::align), or advise huge pages: what is skipped in front of their pages becomes available
/// only when that end is empty, even if they are refused.
///
/// ```
/// use core::mem::MaybeUninit;
/// use pageheap::source::{Purpose, Region, Source};
///
/// static mut BYTES: [MaybeUninit<u8>; 1 << 16] = [MaybeUninit::zeroed(); 1 << 16];
/// // SAFETY: the only use of BYTES, which nobody has written.
/// static REGION: Region = unsafe { Region::from_static(&mut *(&raw mut BYTES)).zeroed() };
///
/// let pages = REGION.reserve(Purpose::Pages, 8192, 8192).unwrap();
/// assert_eq!(pages.base.addr().get() % 8192, 0);
/// # // SAFETY: just reserved, not used.
/// # unsafe { REGION.unreserve(Purpose::Pages, pages) };
/// ```
///
/// `GAPS` is the number of its [gaps](Self::with_gaps).
#[derive(Debug)]
pub struct Region<const GAPS: usize = 0> {
    /// Lowest byte. All pointers handed out are derived from it.
    base: *mut u8,
    /// Which bytes are reserved.
    ledger: Ledger,
    /// Whether the bytes were zero when they were handed over.
    zeroed: bool,
    /// Offset from which on no page has ever been prepared. Only grows; written by any thread.
    pages_below: AtomicUsize,
    /// Offset below which no metadata has ever been prepared. Only falls; written by any thread.
    metadata_above: AtomicUsize,
    /// Addresses that are not memory; in any order, and they may overlap.
    gaps: [Range<*mut u8>; GAPS],
}

// SAFETY: the bytes are the region's own (promise of `new`), and parts of them are handed out without overlap by
// compare-exchange; the other fields are atomics and constants.
unsafe impl<const GAPS: usize> Send for Region<GAPS> {}
// SAFETY: as above.
unsafe impl<const GAPS: usize> Sync for Region<GAPS> {}

impl Region {
    /// The default granule, 4 KiB; [`with_granule`](Self::with_granule) sets another.
    pub const GRANULE: usize = 4096;

    /// A region over `bytes` bytes from `base`.
    ///
    /// # Safety
    /// * `base` is not null, and `bytes` bytes from it may be read and written through it, for as long as the region or
    ///   anything taken from it is in use;
    /// * nothing else uses them in that time.
    ///
    /// Both except in [gaps](Self::with_gaps), if it is given any before it is used. A [`Heap`](crate::Heap) uses its
    /// region until it is dropped, and so for ever if it is forgotten: the process's list of heaps refers to it. A
    /// [`GlobalHeap`](crate::GlobalHeap) uses its region for ever, even if it is dropped: threads refer to it.
    #[must_use]
    pub const unsafe fn new(base: *mut u8, bytes: usize) -> Region {
        Region {
            base,
            ledger: Ledger::new(bytes, Self::GRANULE),
            zeroed: false,
            pages_below: AtomicUsize::new(0),
            metadata_above: AtomicUsize::new(usize::MAX),
            gaps: [],
        }
    }

    /// A region over bytes that are borrowed for ever.
    #[must_use]
    pub const fn from_static(bytes: &'static mut [MaybeUninit<u8>]) -> Region {
        // SAFETY: the exclusive borrow of the slice never ends, so the bytes are valid, and ours alone.
        unsafe { Region::new(bytes.as_mut_ptr().cast(), bytes.len()) }
    }

    /// The same region with gaps: ranges of addresses in it that are not memory, or that something else uses. Nothing
    /// there is read, written or handed out, and no page that touches one is handed out. They may come in any order,
    /// overlap, be empty, or reach beyond the region; so an array can be longer than a memory map. One that ends before
    /// it begins reaches to the end of the address space.
    ///
    /// **Cost.** Gaps count as part of the heap: in its limit, and in its tables, which take 0.3 bytes for each page of
    /// a [`PageHeap`](crate::PageHeap), and a 48th of the range for a [`Heap`](crate::Heap) or a `GlobalHeap`: 21 MiB
    /// for 1 GiB. Tables lie in the highest piece that has room for them, and pieces above that are not used. If no
    /// piece has room for the tables of the whole range, or they would leave less than half of it, the heap covers less
    /// of the range. So if pieces lie far apart, give each a heap of its own.
    /// Where several heaps share a region, what tables below a gap have left unused above it is available again once
    /// the last of the heaps is dropped.
    ///
    /// ```
    /// use core::ops::Range;
    ///
    /// use pageheap::source::Region;
    /// use pageheap::{Config, Heap};
    /// # use core::mem::MaybeUninit;
    ///
    /// /// # Safety
    /// /// The pieces, in order, belong to the heap from now on. All may be reached through the first one's pointer.
    /// unsafe fn heap_of(pieces: [Range<*mut u8>; 3]) -> Heap<Region<2>> {
    ///     let [first, second, third] = pieces;
    ///     // SAFETY: the pieces are ours, and what lies between them is a gap.
    ///     let region = unsafe { Region::new(first.start, third.end.addr() - first.start.addr()) };
    ///     let region = region.with_gaps([first.end..second.start, second.end..third.start]);
    ///     Heap::new(region, Config::new(usize::MAX)).unwrap()
    /// }
    /// # let memory = vec![MaybeUninit::<u8>::uninit(); 1 << 20].leak().as_mut_ptr().cast::<u8>();
    /// # // SAFETY: the bytes live for ever and nothing else uses them.
    /// # let heap = unsafe {
    /// #     let piece = |start: usize, end: usize| memory.add(start)..memory.add(end);
    /// #     heap_of([piece(0, 200_000), piece(300_000, 400_000), piece(600_000, 1 << 20)])
    /// # };
    /// # assert!(heap.allocate(core::alloc::Layout::new::<[u8; 150_000]>()).is_some());
    /// ```
    #[must_use]
    pub const fn with_gaps<const GAPS: usize>(self, gaps: [Range<*mut u8>; GAPS]) -> Region<GAPS> {
        Region {
            base: self.base,
            ledger: self.ledger,
            zeroed: self.zeroed,
            pages_below: self.pages_below,
            metadata_above: self.metadata_above,
            gaps,
        }
    }
}

impl<const GAPS: usize> Region<GAPS> {
    /// The same region with another granule. `bytes` is rounded up to a power of two of at least 64.
    ///
    /// # Panics
    /// If something of the region is reserved.
    #[must_use]
    pub const fn with_granule(self, bytes: usize) -> Self {
        Self {
            ledger: self.ledger.with_granule(bytes),
            ..self
        }
    }

    /// The same region, with the promise that its bytes are zero.
    ///
    /// # Safety
    /// Every byte outside the gaps reads as zero, and is initialised as far as the language is concerned.
    #[must_use]
    pub const unsafe fn zeroed(self) -> Self {
        Self { zeroed: true, ..self }
    }

    /// Offset of `start`, which lies in the region.
    fn offset(&self, start: NonNull<u8>) -> usize {
        start.addr().get().wrapping_sub(self.base.addr())
    }

    /// Records that the pages of `part` are prepared. Returns whether they read as zero.
    fn first_use(&self, part: Part) -> bool {
        let end = part.offset + part.bytes;
        // Relaxed, here and for the other mark: a mark set for an earlier reservation of these bytes, given back since,
        // became visible when `reserve` took them (partner: Release and Acquire in the ledger). Marks that other
        // threads set meanwhile concern disjoint ranges and can only turn a yes into a no. One read-modify-write raises
        // the mark and returns its old value, so no byte counts as zero twice.
        let pages_below = self.pages_below.fetch_max(end, Ordering::Relaxed);
        self.zeroed && pages_below <= part.offset && end <= self.metadata_above.load(Ordering::Relaxed)
    }
}

// SAFETY:
// * the ledger hands out disjoint, aligned parts of bytes that are the region's own, those for metadata without gaps;
// * `gap` reports all others that are not, and `prepare` touches no pages;
// * `prepare` clears metadata before it reports zero, and memory is always readable and writable;
// * pages are reported as zero only on the owner's promise and before their first use (`first_use`);
// * nothing fails half way.
unsafe impl<const GAPS: usize> Source for Region<GAPS> {
    const COMMITS: bool = false;

    fn granule(&self) -> usize {
        self.ledger.granule()
    }

    /// The bytes that are left.
    fn budget(&self) -> usize {
        self.ledger.left(self.base.addr())
    }

    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        let (first, end) = (self.base.addr(), end_for(purpose));
        let part = self.ledger.take(first, end, bytes, align, &self.gaps)?;
        let base = NonNull::new(self.base.wrapping_add(part.offset))?;
        Some(Reservation {
            base,
            bytes: part.bytes,
        })
    }

    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let part = Part {
            offset: self.offset(start),
            bytes,
        };
        match purpose {
            Purpose::Pages if self.first_use(part) => Ok(Contents::Zero),
            Purpose::Pages => Ok(Contents::Unknown),
            Purpose::Metadata => {
                // Relaxed: as in `first_use`, which reads it.
                self.metadata_above.fetch_min(part.offset, Ordering::Relaxed);
                // SAFETY: the caller promises a Reserved range of this region: these are our bytes, and nobody uses
                // them.
                unsafe { start.as_ptr().write_bytes(0, bytes) };
                Ok(Contents::Zero)
            }
        }
    }

    /// Does nothing: the memory exists.
    unsafe fn commit(&self, _start: NonNull<u8>, _bytes: usize) -> Result<(), Refused> {
        Ok(())
    }

    /// Always refused: there is nobody to give the memory back to.
    unsafe fn release(&self, _start: NonNull<u8>, _bytes: usize) -> Result<Contents, Refused> {
        Err(Refused)
    }

    fn gap(&self, start: NonNull<u8>, bytes: usize) -> Option<Range<usize>> {
        first_gap(self.gaps.iter().map(addresses), start.addr().get(), bytes)
    }

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        let part = Part {
            offset: self.offset(reservation.base),
            bytes: reservation.bytes,
        };
        self.ledger.give(self.base.addr(), end_for(purpose), part);
    }
}

// SAFETY: the bytes are the region's, and memory, except in gaps (promise of `new`).
unsafe impl<const GAPS: usize> Memory for Region<GAPS> {}

/// Pages from the bottom, metadata from the top.
fn end_for(purpose: Purpose) -> End {
    match purpose {
        Purpose::Pages => End::Bottom,
        Purpose::Metadata => End::Top,
    }
}
