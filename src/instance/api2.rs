//! `Allocator` for [`Heap`](super::Heap), in each version of the crate `allocator-api2` that somebody asks for.
//!
//! ```text
//!   Vec<u32, &Heap>     hashbrown::HashMap<K, V, S, &Heap>     Box<T, &Heap>
//! ```
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
            use crate::source::Memory;
            use $version::alloc::{AllocError, Allocator};

            fn whole(block: Option<NonNull<u8>>, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                let block = block.ok_or(AllocError)?;
                Ok(NonNull::slice_from_raw_parts(block, layout.size()))
            }

            // SAFETY: a block is its holder's until it is freed or the heap dropped, wherever the heap is moved: it
            // lies in pages of its own.
            unsafe impl<S: Memory + 'static> Allocator for Heap<S> {
                fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                    whole(self.allocate(layout), layout)
                }

                fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                    whole(self.allocate_zeroed(layout), layout)
                }

                unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
                    // SAFETY: the caller's promise.
                    unsafe { self.free(start, layout) };
                }

                unsafe fn grow(
                    &self,
                    start: NonNull<u8>,
                    old: Layout,
                    new: Layout,
                ) -> Result<NonNull<[u8]>, AllocError> {
                    if old.align() == new.align() {
                        // SAFETY: the caller's promise.
                        return whole(unsafe { self.resize(start, old, new.size()) }, new);
                    }
                    let moved = self.allocate(new).ok_or(AllocError)?;
                    // SAFETY: two blocks of at least so many bytes; the old one is given up.
                    unsafe {
                        ptr::copy_nonoverlapping(start.as_ptr(), moved.as_ptr(), old.size().min(new.size()));
                        self.free(start, old);
                    }
                    whole(Some(moved), new)
                }

                unsafe fn shrink(
                    &self,
                    start: NonNull<u8>,
                    old: Layout,
                    new: Layout,
                ) -> Result<NonNull<[u8]>, AllocError> {
                    // SAFETY: the caller's promise; `grow` copies what fits.
                    unsafe { Allocator::grow(self, start, old, new) }
                }
            }
        }
    };
}

#[cfg(feature = "allocator-api2-02")]
version!(v02, allocator_api2_02);

#[cfg(feature = "allocator-api2-04")]
version!(v04, allocator_api2_04);
