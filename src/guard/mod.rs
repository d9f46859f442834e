//! What stands between a program and a heap's blocks: nothing, or (feature `checks`) a seal on each.
//!
//! ```text
//!   GlobalHeap ─┐                    ┌ plain     straight through                         the build that ships
//!               ├─▶ allocate, free ──┤
//!         Heap ─┘                    └ sealed    header, canary, looked at when freed     feature `checks`
//! ```
//!
//! Both heaps hand out memory through the three functions below, and this is the one place where the builds differ: no
//! other file asks for the feature.

use core::alloc::Layout;
use core::ptr::NonNull;

#[cfg(not(feature = "checks"))]
mod plain;
#[cfg(feature = "checks")]
mod sealed;

#[cfg(not(feature = "checks"))]
pub use plain::{allocate, free, resize, usable_size};
#[cfg(feature = "checks")]
pub use sealed::{allocate, free, resize, usable_size};

/// A heap without a guard.
pub trait Plain {
    /// Memory for a layout; all zero, if asked. `None` if there is no room, or no such layout.
    fn take(&self, layout: Layout, zeroed: bool) -> Option<NonNull<u8>>;

    /// Takes it back.
    ///
    /// # Safety
    ///
    /// `take` returned it for this layout, and nothing uses it any more.
    unsafe fn give(&self, memory: NonNull<u8>, layout: Layout);

    /// Makes a block `size` bytes long, where it is or elsewhere. `None` leaves it as it was.
    ///
    /// # Safety
    ///
    /// `take` returned it for this layout, and it is the caller's; on success it is not, but what is returned.
    #[cfg_attr(feature = "checks", allow(dead_code, reason = "a sealed block always moves"))]
    unsafe fn resize(&self, memory: NonNull<u8>, layout: Layout, size: usize) -> Option<NonNull<u8>>;

    /// What there is at an address; `None` outside the heap.
    #[cfg_attr(not(feature = "checks"), allow(dead_code, reason = "for the checked build"))]
    fn place(&self, address: usize) -> Option<Place>;
}

/// Where an address lies in a heap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Bytes in a slot there; 0 in no span.
    pub class: usize,
    /// The first page of the span; the page itself where there is none.
    pub span: usize,
}
