//! `Allocator` for [`Heap`](super::Heap) and [`GlobalHeap`](crate::GlobalHeap), in each version of the crate
//! `allocator-api2` that somebody asks for.
//!
//! ```text
//!   Vec<u32, &Heap>     hashbrown::HashMap<K, V, S, &Heap>     Box<T, &'static GlobalHeap>
//! ```
//!
//! A `GlobalHeap` need not be the program's allocator: one beside it has magazines for each thread, which a `Heap` has
//! not, and stays for ever.
//!
//! What is of no bytes takes no memory and is not freed: the crate's own boxes of such values make up an address, and
//! free that.
//!
//! Versions 0.2 and 0.4 have a trait each, of one shape; the features `allocator-api2-02` and `allocator-api2-04` are
//! independent. A block of another size with the same alignment is resized in place where it can be. The length that is
//! handed out is the one that was asked for: what lies behind it in the slot is `usable_size`'s to tell.
//!
//! Worked: a `Vec<u64, &Heap>` grows from 64 to 128 KiB: the pages behind it are free, so it stays where it is.

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
/// It was allocated from this heap with that layout, and nothing uses it any more. Of no bytes it may be none.
unsafe fn give<P: Plain>(heap: &P, start: NonNull<u8>, layout: Layout) {
    if layout.size() != 0 {
        // SAFETY: the caller's promise.
        unsafe { guard::free(heap, start, layout) };
    }
}

/// A block of another layout, with as much of the old one as there is room for.
///
/// # Safety
///
/// The old one was allocated from this heap with that layout and is the caller's; on success it is not.
unsafe fn resize<P: Plain>(heap: &P, start: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
    if old.align() == new.align() && old.size() != 0 && new.size() != 0 {
        // SAFETY: the caller's promise.
        return unsafe { guard::resize(heap, start, old, new.size()) };
    }
    let moved = take(heap, new, false)?;
    // SAFETY: two blocks of at least so many bytes; the old one is given up.
    unsafe {
        ptr::copy_nonoverlapping(start.as_ptr(), moved.as_ptr(), old.size().min(new.size()));
        give(heap, start, old);
    }
    Some(moved)
}

/// The trait of one version for one type of heap.
macro_rules! allocator {
    ($($heap:ident<$first:ident $(+ $more:ident)*>),*) => {$(
        // SAFETY: a block is its holder's until it is freed or the `Heap` dropped, wherever the heap is moved: it lies
        // in pages of its own. A `GlobalHeap` stays also when the value is dropped.
        unsafe impl<S: $first $(+ $more)* + 'static> Allocator for $heap<S> {
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                whole(super::take(self, layout, false), layout)
            }

            fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                whole(super::take(self, layout, true), layout)
            }

            unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
                // SAFETY: the caller's promise.
                unsafe { super::give(self, start, layout) };
            }

            unsafe fn grow(&self, start: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
                // SAFETY: the caller's promise.
                whole(unsafe { super::resize(self, start, old, new) }, new)
            }

            unsafe fn shrink(&self, start: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
                // SAFETY: the caller's promise.
                whole(unsafe { super::resize(self, start, old, new) }, new)
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
            use crate::global::GlobalHeap;
            use crate::source::{Memory, Source};
            use $version::alloc::{AllocError, Allocator};

            fn whole(block: Option<NonNull<u8>>, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                let block = block.ok_or(AllocError)?;
                Ok(NonNull::slice_from_raw_parts(block, layout.size()))
            }

            allocator!(Heap<Memory>, GlobalHeap<Source + Send + Sync>);
        }
    };
}

#[cfg(feature = "allocator-api2-02")]
version!(v02, allocator_api2_02);

#[cfg(feature = "allocator-api2-04")]
version!(v04, allocator_api2_04);
