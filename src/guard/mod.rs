//! What stands between a program and a heap's blocks: nothing, or (feature `checks`) a seal on each.
//!
//! ```text
//!   GlobalHeap ─┐                    ┌ plain     straight through                         the build that ships
//!               ├─▶ allocate, free ──┤
//!         Heap ─┘                    └ sealed    header, canary, checked when freed       feature `checks`
//! ```
//!
//! Both heaps hand out memory through these functions, and report slots that leave their spans. This is the one place
//! where the builds differ.

use core::alloc::Layout;
use core::ptr::NonNull;

#[cfg(not(feature = "checks"))]
mod plain;
#[cfg(feature = "checks")]
mod sealed;

#[cfg(not(feature = "checks"))]
pub use plain::{allocate, begin, free, resize, usable_size};
#[cfg(feature = "checks")]
pub use sealed::{allocate, begin, free, resize, usable_size};

/// The most bytes in a slot. What is longer is zeroed by the heap, which may know that it is zero already.
pub const MOST_SLOT: usize = 32 << 10;

/// A heap without a guard.
pub trait Plain {
    /// Allocates memory for a layout, all zero if requested. `None` if there is no room, or no such layout.
    fn take(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>>;

    /// Frees it.
    ///
    /// # Safety
    ///
    /// `take` returned it for this layout, and nothing uses it any more.
    unsafe fn give(&self, memory: NonNull<u8>, layout: Layout);

    /// Resizes a block to `size` bytes, in place or by moving it. `None` leaves it unchanged.
    ///
    /// # Safety
    ///
    /// `take` returned it for this layout, and it belongs to the caller. On success the caller owns the returned block
    /// instead.
    unsafe fn resize(&self, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>>;

    /// What is at an address; `None` outside the heap.
    #[cfg_attr(not(feature = "checks"), allow(dead_code, reason = "for the checked build"))]
    fn place(&self, address: usize) -> Option<Place>;

    /// Whether there is memory at an address of the heap: not on a page that is free, and was never used or went back
    /// to the system.
    #[cfg_attr(not(feature = "checks"), allow(dead_code, reason = "for the checked build"))]
    fn has_memory(&self, address: usize) -> bool;
}

/// Where an address lies in a heap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Bytes in a slot there; 0 outside a span.
    pub class: usize,
    /// The first page of the span; the page itself if there is none.
    pub span: usize,
}
