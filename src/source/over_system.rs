//! The system as a source, with verbs that a test observes, slows down or refuses.
//!
//! ```text
//!   heap ─▶ OverSystem<T> ─▶ T: Verbs ─▶ System          a verb that T does not override is the system's
//! ```
//!
//! Example: to count releases, `T` has a counter and a `release` that adds one and then calls that of [`System`].

use core::ops::{Deref, Range};
use core::ptr::NonNull;
use core::time::Duration;

use super::{Contents, Memory, Purpose, Refused, Reservation, Source, System};

/// The verbs of a source over the system. A verb that is not overridden is the system's or, if a source need not have
/// it, the default of [`Source`].
///
/// # Safety
///
/// Overridden verbs keep the promises of [`Source`]: each function here is a verb of it.
pub unsafe trait Verbs {
    /// See [`Source::granule`].
    fn granule(&self) -> usize {
        System.granule()
    }

    /// See [`Source::reserve`].
    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        System.reserve(purpose, bytes, align)
    }

    /// See [`Source::prepare`].
    ///
    /// # Errors
    /// As for [`Source::prepare`].
    ///
    /// # Safety
    /// As for [`Source::prepare`].
    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise.
        unsafe { System.prepare(purpose, start, bytes) }
    }

    /// See [`Source::release`].
    ///
    /// # Errors
    /// As for [`Source::release`].
    ///
    /// # Safety
    /// As for [`Source::release`].
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise.
        unsafe { System.release(start, bytes) }
    }

    /// See [`Source::release_lazily`].
    ///
    /// # Errors
    /// As for [`Source::release_lazily`].
    ///
    /// # Safety
    /// As for [`Source::release_lazily`].
    unsafe fn release_lazily(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.release(start, bytes) }
    }

    /// See [`Source::clear`].
    ///
    /// # Errors
    /// As for [`Source::clear`].
    ///
    /// # Safety
    /// As for [`Source::clear`].
    unsafe fn clear(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        let _ = (start, bytes);
        Err(Refused)
    }

    /// See [`Source::discard`].
    ///
    /// # Safety
    /// As for [`Source::discard`].
    unsafe fn discard(&self, start: NonNull<u8>, bytes: usize) {
        let _ = (start, bytes);
    }

    /// See [`Source::gap`].
    fn gap(&self, start: NonNull<u8>, bytes: usize) -> Option<Range<usize>> {
        System.gap(start, bytes)
    }

    /// See [`Source::unreserve`].
    ///
    /// # Safety
    /// As for [`Source::unreserve`].
    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        // SAFETY: the caller's promise.
        unsafe { System.unreserve(purpose, reservation) }
    }
}

/// A source of memory: the system's, with the verbs of `T`.
#[derive(Clone, Copy, Debug, Default)]
pub struct OverSystem<T>(pub T);

impl<T> Deref for OverSystem<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

// SAFETY: the verbs are the system's, or keep the same promises (required by `Verbs`).
unsafe impl<T: Verbs> Source for OverSystem<T> {
    const COMMITS: bool = System::COMMITS;

    fn granule(&self) -> usize {
        self.0.granule()
    }

    fn budget(&self) -> usize {
        System.budget()
    }

    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        self.0.reserve(purpose, bytes, align)
    }

    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.0.prepare(purpose, start, bytes) }
    }

    unsafe fn commit(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        unsafe { System.commit(start, bytes) }
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.0.release(start, bytes) }
    }

    unsafe fn release_lazily(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.0.release_lazily(start, bytes) }
    }

    unsafe fn clear(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.0.clear(start, bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.0.discard(start, bytes) }
    }

    unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
        // SAFETY: the caller's promise.
        unsafe { self.0.unreserve(purpose, reservation) }
    }

    fn gap(&self, start: NonNull<u8>, bytes: usize) -> Option<Range<usize>> {
        self.0.gap(start, bytes)
    }

    fn worked(&self) -> Option<Duration> {
        System.worked()
    }
}

// SAFETY: the system's pages are memory.
unsafe impl<T: Verbs> Memory for OverSystem<T> {}
