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

use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};

use super::ledger::{End, Ledger, Part};
use super::{Contents, Memory, Purpose, Refused, Reservation, Source};

/// A [`Source`] over bytes that the caller owns.
///
/// **Little memory.** A region of 64 KiB with the default granule of 4 KiB and an aligned base has 16 granules. A heap
/// with pages of 4 KiB and the 64 caches of [`Config`](crate::Config) manages 13 of them, without caches 14: one or two
/// are its tables, and one is set aside in case the base is not aligned to a page. With pages of 8 KiB it manages 6. So
/// in little memory give a [`PageHeap`](crate::PageHeap) `.caches(0)` and small pages. A [`Heap`](crate::Heap) or a
/// `GlobalHeap` always has pages of 8 KiB and one cache. It opens in 40 KiB (48 if the base is not aligned to a page),
/// has 2 pages in 64 KiB, and 10 in 128.
///
/// **Several heaps** may share it, by reference. Each end has room for 255 reservations at a time. A
/// [`PageHeap`](crate::PageHeap) takes one at the bottom and one at the top, a [`Heap`](crate::Heap) a second one at
/// the top. A reservation that is given back becomes available at once if it was the last one taken at its end,
/// otherwise when that end is empty. So drop heaps in the reverse order of their creation.
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
#[derive(Debug)]
pub struct Region {
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
}

// SAFETY: the bytes are the region's own (promise of `new`), and parts of them are handed out without overlap by
// compare-exchange; the other fields are atomics and constants.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// The default granule, 4 KiB; [`with_granule`](Self::with_granule) sets another.
    pub const GRANULE: usize = 4096;

    /// A region over `bytes` bytes from `base`.
    ///
    /// # Safety
    /// * `base` is not null, and `bytes` bytes from it may be read and written through it, for as long as the region or
    ///   anything taken from it is in use;
    /// * nothing else uses them in that time.
    #[must_use]
    pub const unsafe fn new(base: *mut u8, bytes: usize) -> Region {
        Region {
            base,
            ledger: Ledger::new(bytes, Self::GRANULE),
            zeroed: false,
            pages_below: AtomicUsize::new(0),
            metadata_above: AtomicUsize::new(usize::MAX),
        }
    }

    /// A region over bytes that are borrowed for ever.
    #[must_use]
    pub const fn from_static(bytes: &'static mut [MaybeUninit<u8>]) -> Region {
        // SAFETY: the exclusive borrow of the slice never ends, so the bytes are valid, and ours alone.
        unsafe { Region::new(bytes.as_mut_ptr().cast(), bytes.len()) }
    }

    /// The same region with another granule. `bytes` is rounded up to a power of two of at least 64.
    #[must_use]
    pub const fn with_granule(self, bytes: usize) -> Region {
        Region {
            ledger: Ledger::new(self.ledger.bytes(), bytes),
            ..self
        }
    }

    /// The same region, with the promise that its bytes are zero.
    ///
    /// # Safety
    /// Every byte reads as zero, and is initialised as far as the language is concerned.
    #[must_use]
    pub const unsafe fn zeroed(self) -> Region {
        Region { zeroed: true, ..self }
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
// * the ledger hands out disjoint, aligned parts of bytes that are the region's own;
// * `prepare` clears metadata before it reports zero, and memory is always readable and writable;
// * pages are reported as zero only on the owner's promise and before their first use (`first_use`);
// * nothing fails half way.
unsafe impl Source for Region {
    const COMMITS: bool = false;

    fn granule(&self) -> usize {
        self.ledger.granule()
    }

    /// The bytes that are left.
    fn budget(&self) -> usize {
        self.ledger.left(self.base.addr())
    }

    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        let part = self.ledger.take(self.base.addr(), end_for(purpose), bytes, align)?;
        // SAFETY: the part lies within the bytes that `new` was promised, all of one object.
        let base = NonNull::new(unsafe { self.base.add(part.offset) })?;
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
                unsafe { self.base.add(part.offset).write_bytes(0, bytes) };
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

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        let part = Part {
            offset: self.offset(reservation.base),
            bytes: reservation.bytes,
        };
        self.ledger.give(self.base.addr(), end_for(purpose), part);
    }
}

// SAFETY: the bytes are the region's, and memory (promise of `new`).
unsafe impl Memory for Region {}

/// Pages from the bottom, metadata from the top.
fn end_for(purpose: Purpose) -> End {
    match purpose {
        Purpose::Pages => End::Bottom,
        Purpose::Metadata => End::Top,
    }
}
