//! Bare addresses as a source: page frames of a device, blocks of a file, consecutive identifiers.
//!
//! A heap never touches the pages it manages, so they need not be memory. `Numbers` hands out a range of bare addresses
//! for [`Purpose::Pages`]. It refuses [`Purpose::Metadata`], which must be real memory, so combine it with another
//! source in a [`Split`](super::Split), for instance `Split<Numbers, System>`.
//!
//! Example: for frames of 64 KiB of a device whose memory starts at 0x8000_0000, use `Numbers::new(0x8000_0000, bytes)`
//! with a granule of 64 KiB; the address of an allocated run *is* the device address. Address 0 cannot be handed out,
//! because a pointer is never null. So a range that starts there loses its first unit, which is a granule, or more if
//! the range has 2^24 granules (`ledger.rs`). A range may end at the very top of the address space.
//!
//! There is nothing behind the numbers, so `prepare` does nothing and returns [`Contents::Unknown`], and `release` is
//! refused. To be notified of releases, in order to trim a device for instance, write a [`Source`] of your own.

use core::num::NonZeroUsize;
use core::ptr::NonNull;

use super::ledger::{End, Ledger, Part};
use super::{Contents, Purpose, Refused, Region, Reservation, Source};

/// A [`Source`] of pages that are plain numbers. No heap can stand on it alone
/// ([`NewHeapError::NoMetadata`](crate::NewHeapError::NoMetadata)), because a heap's tables must be memory: put it in a
/// [`Split`](super::Split).
///
/// Numbers are handed out in units: the granule, doubled until the range has fewer than 2^24 units. Several heaps may
/// share it as they may share a [`Region`]: 255 at a time, and with the same rule for giving back.
///
/// ```
/// use pageheap::source::{Numbers, Purpose, Source};
///
/// let frames = Numbers::new(0x8000_0000, 1 << 30).with_granule(1 << 16);
/// let run = frames.reserve(Purpose::Pages, 1 << 20, 1 << 16).unwrap();
/// assert_eq!(run.base.addr().get(), 0x8000_0000);
/// assert_eq!(frames.reserve(Purpose::Metadata, 1 << 16, 1 << 16), None);
/// ```
#[derive(Debug)]
pub struct Numbers {
    /// Lowest number; never 0.
    first: NonZeroUsize,
    /// Which numbers are reserved.
    ledger: Ledger,
}

impl Numbers {
    /// The numbers from `first` on, `bytes` of them, or as many as there are up to the top of the address space. What
    /// lies before the first whole unit (see [`Numbers`]) is left out, as is the unit at address 0, because a pointer
    /// is never null.
    #[must_use]
    pub const fn new(first: usize, bytes: usize) -> Numbers {
        let (first, bytes) = match NonZeroUsize::new(first) {
            Some(first) => (first, bytes),
            None => (NonZeroUsize::MIN, bytes.saturating_sub(1)),
        };
        // 2^64 - first: how many numbers there are. That is less than 2^64 because `first` is not 0.
        let most = first.get().wrapping_neg();
        let bytes = if bytes < most { bytes } else { most };
        Numbers {
            first,
            ledger: Ledger::new(bytes, Region::GRANULE),
        }
    }

    /// The same numbers with another granule than 4 KiB. `bytes` is rounded up to a power of two of at least 64.
    ///
    /// # Panics
    /// If some of the numbers are reserved.
    #[must_use]
    pub const fn with_granule(self, bytes: usize) -> Numbers {
        Numbers {
            ledger: self.ledger.with_granule(bytes),
            ..self
        }
    }
}

// SAFETY:
// * the ledger hands out disjoint, aligned parts of the range;
// * metadata is always refused, and pages are not memory, so nothing is promised about either;
// * nothing is ever reported as zero, and nothing fails half way.
unsafe impl Source for Numbers {
    const COMMITS: bool = false;

    fn granule(&self) -> usize {
        self.ledger.granule()
    }

    /// The numbers that are left.
    fn budget(&self) -> usize {
        self.ledger.left(self.first.get())
    }

    /// `None` for metadata.
    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        if purpose != Purpose::Pages {
            return None;
        }
        let part = self.ledger.take(self.first.get(), End::Bottom, bytes, align, &[])?;
        let base = NonNull::without_provenance(self.first.checked_add(part.offset)?);
        Some(Reservation {
            base,
            bytes: part.bytes,
        })
    }

    unsafe fn prepare(&self, purpose: Purpose, _start: NonNull<u8>, _bytes: usize) -> Result<Contents, Refused> {
        match purpose {
            Purpose::Pages => Ok(Contents::Unknown),
            Purpose::Metadata => Err(Refused),
        }
    }

    /// Does nothing: there is nothing behind the numbers.
    unsafe fn commit(&self, _start: NonNull<u8>, _bytes: usize) -> Result<(), Refused> {
        Ok(())
    }

    /// Always refused: there is nothing to give back.
    unsafe fn release(&self, _start: NonNull<u8>, _bytes: usize) -> Result<Contents, Refused> {
        Err(Refused)
    }

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        if purpose == Purpose::Pages {
            let offset = reservation.base.addr().get().wrapping_sub(self.first.get());
            self.ledger.give(
                self.first.get(),
                End::Bottom,
                Part {
                    offset,
                    bytes: reservation.bytes,
                },
            );
        }
    }
}
