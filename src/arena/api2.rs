//! `Allocator` for references to arenas and lists, for each enabled version of the crate `allocator-api2`.
//!
//! ```text
//!   Vec<u32, &Arena>     hashbrown::HashMap<K, V, S, &Pool>     Box<T, &Scope<'s, '_>>     Box<T, &FreeList>
//! ```
//!
//! Versions 0.2 and 0.4 each have a trait of the same shape; the features `allocator-api2-02` and `allocator-api2-04`
//! are independent. (Not 0.3: collections use 0.2, like `hashbrown` and `bumpalo`, or the newest; it would be one more
//! line here and one more dependency.) An arena frees, grows or shrinks its latest allocation in place, except large
//! objects, which have blocks of their own. So a `Vec` that fills while nothing else is allocated does not move before
//! it outgrows the slab, or 64 KiB. Other freed memory stays allocated until the reset.
//!
//! A list of slots serves requests that fit a slot, and refuses others. It returns the whole slot, but a `Vec` counts
//! only what it requested, and when that is full it requests twice as much. So one that grows by `push` ends the
//! process at the first doubling that does not fit, though the slot has room; by `with_capacity_in` or
//! `try_reserve_exact` it can have all of the slot. Growing and shrinking change nothing. A size of zero takes no slot;
//! shrinking to zero frees the slot.
//!
//! Worked: a `Vec<u64, &Local>` pushes 1,000 numbers. It grows from 4 to 1,024 elements in eight steps, each of which
//! moves the end of the same memory. A `Vec<u64, &FreeList>` in slots of 96 bytes pushes eight; for the ninth it
//! requests 128 bytes, which do not fit. Made by `with_capacity_in(12, &list)`, it has room for twelve.

/// The trait of one version for each type of arena.
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2-04"))]
macro_rules! allocator {
    ($version:ident: $($(#[$doc:meta])* <$($life:lifetime)?> $arena:ty),*) => {$(
        $(#[$doc])*
        // SAFETY: memory stays as it is until the arena is reset, rewound or dropped, which is impossible while it is
        // borrowed; a copy of a reference is the same arena.
        unsafe impl<$($life,)? B: Backing> $version::alloc::Allocator for &$arena {
            #[inline]
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, $version::alloc::AllocError> {
                (**self).allocate(layout).map_err(|_| $version::alloc::AllocError)
            }

            #[inline]
            unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
                typed::resize(*self, start, layout.size(), 0);
            }

            #[inline]
            unsafe fn grow(
                &self,
                start: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $version::alloc::AllocError> {
                // SAFETY: the caller's promise.
                let grown = unsafe { typed::reallocate(*self, start, old, new) };
                grown.map_err(|_| $version::alloc::AllocError)
            }

            #[inline]
            unsafe fn shrink(
                &self,
                start: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $version::alloc::AllocError> {
                // SAFETY: the caller's promise.
                let shrunk = unsafe { typed::reallocate(*self, start, old, new) };
                shrunk.map_err(|_| $version::alloc::AllocError)
            }
        }
    )*};
}

/// The trait of one version for each type of list.
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2-04"))]
macro_rules! list_allocator {
    ($version:ident: $(<$($life:lifetime)?> $list:ty),*) => {$(
        // SAFETY: a slot is memory, and its holder's, until the holder frees it or the list is reset or dropped, which
        // is impossible while it is borrowed; a copy of a reference is the same list.
        unsafe impl<$($life,)? B: Backing> $version::alloc::Allocator for &$list {
            #[inline]
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, $version::alloc::AllocError> {
                if layout.size() == 0 {
                    return Ok(NonNull::slice_from_raw_parts(layout.dangling_ptr(), 0));
                }
                if !slot_box::fits(layout, self.layout()) {
                    return Err($version::alloc::AllocError);
                }
                (**self).allocate().map_err(|_| $version::alloc::AllocError)
            }

            #[inline]
            unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
                if layout.size() != 0 {
                    // SAFETY: the caller's promise: a slot, since it was not allocated for zero bytes.
                    unsafe { (**self).deallocate(start) };
                }
            }

            #[inline]
            unsafe fn grow(
                &self,
                start: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $version::alloc::AllocError> {
                if old.size() == 0 {
                    return self.allocate(new);
                }
                // The whole slot is already there.
                if !slot_box::fits(new, self.layout()) {
                    return Err($version::alloc::AllocError);
                }
                Ok(NonNull::slice_from_raw_parts(start, self.layout().size()))
            }

            #[inline]
            unsafe fn grow_zeroed(
                &self,
                start: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $version::alloc::AllocError> {
                // SAFETY: the caller's promise; and the bytes behind the old ones are the caller's too.
                unsafe {
                    let grown = $version::alloc::Allocator::grow(self, start, old, new)?;
                    let behind = grown.cast::<u8>().add(old.size());
                    behind.write_bytes(0, grown.len() - old.size());
                    Ok(grown)
                }
            }

            #[inline]
            unsafe fn shrink(
                &self,
                start: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $version::alloc::AllocError> {
                if new.size() == 0 {
                    // SAFETY: the caller's promise; the caller will not free an allocation of zero bytes as a slot.
                    unsafe { self.deallocate(start, old) };
                    return self.allocate(new);
                }
                // SAFETY: the caller's promise; nothing is copied.
                unsafe { $version::alloc::Allocator::grow(self, start, old, new) }
            }
        }
    )*};
}

/// One version.
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2-04"))]
macro_rules! version {
    ($module:ident, $version:ident) => {
        mod $module {
            use core::alloc::Layout;
            use core::ptr::NonNull;

            use super::super::backing::Backing;
            use super::super::bump::Arena;
            use super::super::free_list::FreeList;
            use super::super::local::{Local, Scope};
            use super::super::owner::Owner;
            use super::super::pool::Pool;
            use super::super::sharded::ShardedFreeList;
            use super::super::{slot_box, typed};

            allocator!($version: <> Arena<B>, <> Pool<B>, <'a> Local<'a, B>, <> Scope<'_, '_, B>);
            list_allocator!($version: <> FreeList<B>, <> ShardedFreeList<B>, <'l> Owner<'l, B>);
        }
    };
}

#[cfg(feature = "allocator-api2-02")]
version!(v02, allocator_api2_02);

#[cfg(feature = "allocator-api2-04")]
version!(v04, allocator_api2_04);
