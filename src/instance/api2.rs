//! `Allocator` for [`Heap`](super::Heap), `SharedHeap` and [`GlobalHeap`](crate::GlobalHeap), for each enabled version
//! of the crate `allocator-api2`.
//!
//! ```text
//!   Vec<u32, &Heap>     hashbrown::HashMap<K, V, S, SharedHeap>     Box<T, &'static GlobalHeap>
//! ```
//!
//! A `GlobalHeap` need not be the program's allocator. One that is used beside it has magazines for each thread, which
//! a `Heap` does not, unless the thread has called another `GlobalHeap` before, such as the program's; and it is never
//! dropped.
//!
//! A value of zero bytes takes no memory and is not freed: the crate's own boxes of such values make up an address, and
//! free that.
//!
//! Versions 0.2 and 0.4 each have a trait, of the same shape; the features `allocator-api2-02` and `allocator-api2-04`
//! are independent. Resizing a block with the same alignment happens in place if possible. The returned length is the
//! one requested; `usable_size` reports what else there is in the slot.
//!
//! Worked example: a `Vec<u64, &Heap>` grows from 64 to 128 KiB. The pages behind it are free, so it stays in place.

use core::alloc::Layout;
use core::ptr::{self, NonNull};

use crate::guard::{self, Plain};

fn take<P: Plain>(heap: &P, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
    if layout.size() == 0 {
        return Some(layout.dangling_ptr());
    }
    guard::allocate(heap, layout, zeroed)
}

/// # Safety
///
/// It was allocated from this heap with that layout, and nothing uses it any more. With a size of zero it may point to
/// no block.
unsafe fn give<P: Plain>(heap: &P, start: NonNull<u8>, layout: Layout) {
    if layout.size() != 0 {
        // SAFETY: the caller's promise.
        unsafe { guard::free(heap, start, layout) };
    }
}

/// Resizes to a block of another layout, with as much of the old contents as fits.
///
/// # Safety
///
/// The old block was allocated from this heap with that layout and belongs to the caller; on success it no longer does.
unsafe fn resize<P: Plain>(heap: &P, start: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
    if old.align() == new.align() && old.size() != 0 && new.size() != 0 {
        // SAFETY: the caller's promise.
        return unsafe { guard::resize(heap, start, old, new.size()) };
    }
    let moved = take(heap, new, false)?;
    // SAFETY: two blocks of at least that many bytes; the old one is given up.
    unsafe {
        ptr::copy_nonoverlapping(start.as_ptr(), moved.as_ptr(), old.size().min(new.size()));
        give(heap, start, old);
    }
    Some(moved)
}

/// Implements the trait of one version for types that are a heap or lead to one.
macro_rules! allocator {
    ($($handle:ident to $heap:ident<$first:ident $(+ $more:ident)*>),*) => {$(
        // SAFETY: a block belongs to its holder until it is freed or the `Heap` is dropped, wherever the heap is moved:
        // it lies in pages of its own. A `GlobalHeap` stays even if the value is dropped. All clones of a `SharedHeap`
        // lead to the same heap, always, which is dropped with the last of them: nobody gets it out of their `Arc`.
        unsafe impl<S: $first $(+ $more)* + 'static> Allocator for $handle<S> {
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                whole(super::take::<$heap<S>>(self, layout, false), layout)
            }

            fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                whole(super::take::<$heap<S>>(self, layout, true), layout)
            }

            unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
                // SAFETY: the caller's promise.
                unsafe { super::give::<$heap<S>>(self, start, layout) };
            }

            unsafe fn grow(&self, start: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
                // SAFETY: the caller's promise.
                whole(unsafe { super::resize::<$heap<S>>(self, start, old, new) }, new)
            }

            unsafe fn shrink(&self, start: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
                // SAFETY: the caller's promise.
                whole(unsafe { super::resize::<$heap<S>>(self, start, old, new) }, new)
            }
        }
    )*};
}

/// One version.
macro_rules! version {
    ($module:ident, $version:ident) => {
        mod $module {
            use core::alloc::Layout;
            use core::ptr::NonNull;

            use super::super::Heap;
            #[cfg(feature = "std")]
            use super::super::SharedHeap;
            use crate::global::GlobalHeap;
            use crate::source::{Memory, Source};
            use $version::alloc::{AllocError, Allocator};

            fn whole(block: Option<NonNull<u8>>, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                let block = block.ok_or(AllocError)?;
                Ok(NonNull::slice_from_raw_parts(block, layout.size()))
            }

            allocator!(Heap to Heap<Memory>, GlobalHeap to GlobalHeap<Source + Send + Sync>);
            #[cfg(feature = "std")]
            allocator!(SharedHeap to Heap<Memory>);
        }
    };
}

#[cfg(feature = "allocator-api2-02")]
version!(v02, allocator_api2_02);

#[cfg(feature = "allocator-api2-04")]
version!(v04, allocator_api2_04);
