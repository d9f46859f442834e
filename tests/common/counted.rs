//! A source that counts what is reserved of it.

use std::sync::atomic::{AtomicIsize, Ordering};

use pageheap::source::{Purpose, Reservation, Source, System, Verbs};

/// The system, with a count of the bytes reserved. Not `Clone`.
pub struct Counted(pub &'static AtomicIsize);

// SAFETY: the system's verbs, plus a count.
unsafe impl Verbs for Counted {
    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        let reservation = System.reserve(purpose, bytes, align)?;
        self.0.fetch_add(reservation.bytes as isize, Ordering::Relaxed);
        Some(reservation)
    }

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        self.0.fetch_sub(reservation.bytes as isize, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.unreserve(purpose, reservation) };
    }
}
