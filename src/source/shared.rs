//! Sources behind pointers: by reference, in a box, or shared by several heaps.
//!
//! ```text
//!   PageHeap<System>          owned by the heap
//!   PageHeap<&S>              lent for as long as the heap lives
//!   PageHeap<Arc<S>>          shared: dropped with its last owner        (with `std`)
//! ```
//!
//! A `Box`, `Rc` or `Arc` lies in memory of the program's allocator, so it is no source for the heap that is that
//! allocator.

use core::ops::Range;
use core::ptr::NonNull;
use core::time::Duration;

use super::{Contents, HugePages, Memory, Purpose, Refused, Reservation, Source};

macro_rules! pass_on {
    ($($(#[$condition:meta])* $pointer:ty),*) => {$(
        $(#[$condition])*
        // SAFETY: the pages are those of the source behind the pointer.
        unsafe impl<S: Memory> Memory for $pointer {}

        $(#[$condition])*
        // SAFETY: every verb is that of the source behind the pointer, whose promises hold for it, and which stays
        // where it is.
        unsafe impl<S: Source> Source for $pointer {
            const COMMITS: bool = S::COMMITS;
            const APART: bool = S::APART;

            fn granule(&self) -> usize {
                (**self).granule()
            }

            fn budget(&self) -> usize {
                (**self).budget()
            }

            fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
                (**self).reserve(purpose, bytes, align)
            }

            unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).prepare(purpose, start, bytes) }
            }

            unsafe fn commit(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).commit(start, bytes) }
            }

            unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).release(start, bytes) }
            }

            unsafe fn release_lazily(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).release_lazily(start, bytes) }
            }

            unsafe fn clear(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).clear(start, bytes) }
            }

            unsafe fn advise(&self, start: NonNull<u8>, bytes: usize, huge: HugePages) -> Result<(), Refused> {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).advise(start, bytes, huge) }
            }

            unsafe fn discard(&self, start: NonNull<u8>, bytes: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).discard(start, bytes) }
            }

            unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).unreserve(purpose, reservation) }
            }

            unsafe fn trim(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).trim(purpose, start, bytes) }
            }

            fn gap(&self, start: NonNull<u8>, bytes: usize) -> Option<Range<usize>> {
                (**self).gap(start, bytes)
            }

            fn worked(&self) -> Option<Duration> {
                (**self).worked()
            }
        }
    )*};
}

pass_on! {
    &S,
    #[cfg(feature = "std")] std::boxed::Box<S>,
    #[cfg(feature = "std")] std::rc::Rc<S>,
    #[cfg(feature = "std")] std::sync::Arc<S>
}
