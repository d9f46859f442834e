//! A source of page numbers that checks nothing and costs nothing: metadata from the test program's allocator, pages that are only
//! addresses.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use pageheap::source::{Contents, Purpose, Refused, Reservation, Source};

/// Pages from address 2^44 on (a new heap on a source of its own each time).
#[derive(Clone, Copy, Debug)]
pub struct Bare {
    /// Bytes of the operating system's page, as far as the heap is told.
    pub granule: usize,
    /// Added to the lowest address.
    pub offset: usize,
    /// What pages read as once they are released or prepared.
    pub contents: Contents,
}

impl Default for Bare {
    fn default() -> Self {
        Self {
            granule: 4096,
            offset: 0,
            contents: Contents::Zero,
        }
    }
}

impl Bare {
    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, 1 << 16).expect("a size for metadata")
    }
}

// SAFETY: pages are numbers nobody goes through; one heap to a source in these tests, so its ranges overlap nothing. Metadata is memory
// of the global allocator, zeroed, aligned to 64 KiB, which is the largest granule.
unsafe impl Source for Bare {
    fn granule(&self) -> usize {
        self.granule
    }

    fn budget(&self) -> usize {
        usize::MAX
    }

    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        let base = match purpose {
            Purpose::Pages => {
                let address = (1_usize << 44).next_multiple_of(align) + self.offset;
                assert!(address.is_multiple_of(align), "an offset smaller than the alignment");
                NonNull::new(std::ptr::without_provenance_mut(address))?
            }
            // SAFETY: the layout has a size.
            Purpose::Metadata => NonNull::new(unsafe { alloc_zeroed(Self::layout(bytes)) })?,
        };
        Some(Reservation { base, bytes })
    }

    unsafe fn prepare(&self, _: Purpose, _: NonNull<u8>, _: usize) -> Result<Contents, Refused> {
        Ok(self.contents)
    }

    unsafe fn commit(&self, _: NonNull<u8>, _: usize) -> Result<(), Refused> {
        Ok(())
    }

    unsafe fn release(&self, _: NonNull<u8>, _: usize) -> Result<Contents, Refused> {
        Ok(self.contents)
    }

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        if purpose == Purpose::Metadata {
            // SAFETY: what `reserve` allocated with this layout, given up once.
            unsafe { dealloc(reservation.base.as_ptr(), Self::layout(reservation.bytes)) };
        }
    }
}
