//! The system as a source that commits, as on Windows: memory that is not committed must not be touched.

use std::ptr::NonNull;

use pageheap::source::{Contents, Memory, Purpose, Refused, Reservation, Source, System};

/// Pages that are only Prepared, or were released, cannot be read: that ends the process by a signal.
#[derive(Debug)]
pub struct Strict;

// SAFETY: the verbs are the system's, except that pages are made accessible when they are committed, and no longer are
// when they are released.
unsafe impl Source for Strict {
    const COMMITS: bool = true;

    fn granule(&self) -> usize {
        System.granule()
    }

    fn budget(&self) -> usize {
        System.budget()
    }

    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        System.reserve(purpose, bytes, align)
    }

    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        if purpose == Purpose::Pages {
            return Ok(Contents::Zero);
        }
        // SAFETY: the caller's promise.
        unsafe { System.prepare(purpose, start, bytes) }
    }

    unsafe fn commit(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        // SAFETY: the caller's promise. What is accessible already stays as it is.
        unsafe { System.prepare(Purpose::Pages, start, bytes) }.map(|_| ())
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise.
        let contents = unsafe { System.release(start, bytes) }?;
        // SAFETY: the same range, which nobody uses.
        let refused = unsafe { libc::mprotect(start.as_ptr().cast(), bytes, libc::PROT_NONE) };
        assert_eq!(refused, 0, "a protection of the whole range");
        Ok(contents)
    }

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        // SAFETY: the caller's promise.
        unsafe { System.unreserve(purpose, reservation) }
    }
}

// SAFETY: the system's pages are memory.
unsafe impl Memory for Strict {}
