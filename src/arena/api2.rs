//! `Allocator` for references to arenas, in each version of the crate `allocator-api2` that somebody asks for.
//!
//! ```text
//!   Vec<u32, &Arena>     hashbrown::HashMap<K, V, S, &Pool>     Box<T, &Scope<'s>>
//! ```
//!
//! Versions 0.2 and 0.4 have a trait each, of one shape; the features `allocator-api2-02` and `allocator-api2-04` are
//! independent. An allocation that is freed, grown or shrunk while it is the last of its arena is so in place: a `Vec`
//! that fills while nothing else is allocated never moves. What is freed otherwise stays until the reset.
//!
//! Worked: a `Vec<u64, &Local>` pushes 1,000 numbers: it grows from 4 to 1,024 elements in eight steps, each of which
//! moves the end of the same memory.

/// The trait of one version for one type of arena.
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2-04"))]
macro_rules! allocator {
    ($version:ident: $($(#[$doc:meta])* <$($life:lifetime)?> $arena:ty),*) => {$(
        $(#[$doc])*
        // SAFETY: memory stays as it is until the arena is reset, rewound or dropped, which is impossible as long as it
        // is borrowed; a copy of a reference is the same arena.
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

/// One version.
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2-04"))]
macro_rules! version {
    ($module:ident, $version:ident) => {
        mod $module {
            use core::alloc::Layout;
            use core::ptr::NonNull;

            use super::super::backing::Backing;
            use super::super::bump::Arena;
            use super::super::local::{Local, Scope};
            use super::super::pool::Pool;
            use super::super::typed;

            allocator!($version: <> Arena<B>, <> Pool<B>, <'a> Local<'a, B>, <'s> Scope<'s, B>);
        }
    };
}

#[cfg(feature = "allocator-api2-02")]
version!(v02, allocator_api2_02);

#[cfg(feature = "allocator-api2-04")]
version!(v04, allocator_api2_04);
