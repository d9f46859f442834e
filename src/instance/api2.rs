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

/// The trait of one version.
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2-04"))]
macro_rules! version {
    ($module:ident, $version:ident) => {
        mod $module {
            use core::alloc::Layout;
            use core::ptr::{self, NonNull};

            use super::super::Heap;
            use crate::global::GlobalHeap;
            use crate::guard::{self, Plain};
            use crate::source::{Memory, Source};
            use $version::alloc::{AllocError, Allocator};

            fn whole(block: Option<NonNull<u8>>, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                let block = block.ok_or(AllocError)?;
                Ok(NonNull::slice_from_raw_parts(block, layout.size()))
            }

            fn block<P: Plain>(heap: &P, layout: Layout, zeroed: bool) -> Result<NonNull<[u8]>, AllocError> {
                if layout.size() == 0 {
                    return whole(Some(layout.dangling_ptr()), layout);
                }
                whole(guard::allocate(heap, layout, zeroed), layout)
            }

            /// # Safety
            ///
            /// The block was allocated from this heap with that layout, and nothing uses it any more. Of no bytes it
            /// may be none.
            unsafe fn free<P: Plain>(heap: &P, start: NonNull<u8>, layout: Layout) {
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
            unsafe fn resized<P: Plain>(
                heap: &P,
                start: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, AllocError> {
                if old.align() == new.align() && old.size() != 0 && new.size() != 0 {
                    // SAFETY: the caller's promise.
                    return whole(unsafe { guard::resize(heap, start, old, new.size()) }, new);
                }
                let moved = block(heap, new, false)?;
                // SAFETY: two blocks of at least so many bytes; the old one is given up.
                unsafe {
                    ptr::copy_nonoverlapping(start.as_ptr(), moved.cast().as_ptr(), old.size().min(new.size()));
                    free(heap, start, old);
                }
                Ok(moved)
            }

            macro_rules! allocator {
                () => {
                    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                        block(self, layout, false)
                    }

                    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                        block(self, layout, true)
                    }

                    unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
                        // SAFETY: the caller's promise.
                        unsafe { free(self, start, layout) };
                    }

                    unsafe fn grow(
                        &self,
                        start: NonNull<u8>,
                        old: Layout,
                        new: Layout,
                    ) -> Result<NonNull<[u8]>, AllocError> {
                        // SAFETY: the caller's promise.
                        unsafe { resized(self, start, old, new) }
                    }

                    unsafe fn shrink(
                        &self,
                        start: NonNull<u8>,
                        old: Layout,
                        new: Layout,
                    ) -> Result<NonNull<[u8]>, AllocError> {
                        // SAFETY: the caller's promise.
                        unsafe { resized(self, start, old, new) }
                    }
                };
            }

            // SAFETY: a block is its holder's until it is freed or the heap dropped, wherever the heap is moved: it
            // lies in pages of its own.
            unsafe impl<S: Memory + 'static> Allocator for Heap<S> {
                allocator!();
            }

            // SAFETY: a block is its holder's until it is freed, also when the value was moved or dropped: the heap
            // stays, and is found by way of the value wherever that is.
            unsafe impl<S: Source + Send + Sync + 'static> Allocator for GlobalHeap<S> {
                allocator!();
            }
        }
    };
}

#[cfg(feature = "allocator-api2-02")]
version!(v02, allocator_api2_02);

#[cfg(feature = "allocator-api2-04")]
version!(v04, allocator_api2_04);
