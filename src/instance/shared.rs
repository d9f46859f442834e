//! [`SharedHeap`]: a heap that several collections own together.
//!
//! ```text
//!   Vec<u32, SharedHeap<S>>     HashMap<K, V, B, SharedHeap<S>>     SharedHeap<S>
//!              └────────────────────────────┴───────────────┬─────────────┘
//!                                                           ▼
//!                             an Arc ──▶ Heap<S>, gone with the last of them
//! ```
//!
//! Worked: a tenant has a heap and two maps in it. The `Arc` is one block of the program's allocator, of 40 bytes with
//! 64-bit pointers; each map has a pointer to it. When the maps are dropped their blocks go back to the heap, and when
//! the tenant's own handle is dropped, the heap's pages to the system.

#![forbid(unsafe_code)]

use core::fmt;
use core::ops::Deref;

use std::sync::Arc;

use crate::source::Source;

use super::Heap;

/// A [`Heap`] that several owners have together: an `Arc` of one. The heap is dropped with the last of them.
///
/// With the feature `allocator-api2-02` or `allocator-api2-04` it is an `Allocator` of that version, as a reference to
/// a heap is. A reference must not outlive the heap; a clone of this keeps it. So a value may own both a heap and the
/// collections that lie in it, and a collection may go to any thread:
///
/// ```
/// # #[cfg(feature = "allocator-api2-02")]
/// # fn main() -> Result<(), pageheap::NewHeapError> {
/// # use allocator_api2_02 as allocator_api2;
/// use allocator_api2::vec::Vec;
/// use pageheap::source::System;
/// use pageheap::{Config, Heap, SharedHeap};
///
/// struct Tenant {
///     heap: SharedHeap<System>,
///     numbers: Vec<u64, SharedHeap<System>>,
/// }
///
/// let heap = SharedHeap::from(Heap::new(System, Config::new(1 << 30).limit_bytes(64 << 20))?);
/// let numbers = Vec::new_in(heap.clone());
/// let mut tenant = Tenant { heap, numbers };
/// tenant.numbers.extend(0..1000);
/// assert!(tenant.heap.contains(tenant.numbers.as_ptr().cast()));
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "allocator-api2-02"))]
/// # fn main() {}
/// ```
///
/// A collection that is forgotten (`mem::forget`) keeps the heap for ever. So does a collection that lies in its own
/// heap, in a `Box<_, SharedHeap<S>>`, say, that nobody drops.
///
/// A clone and its drop take an atomic read-modify-write each; a call of the heap, one load more than through a
/// reference. The `Arc` lies in memory of the program's allocator.
pub struct SharedHeap<S: Source + 'static>(Arc<Heap<S>>);

impl<S: Source + 'static> From<Heap<S>> for SharedHeap<S> {
    fn from(heap: Heap<S>) -> Self {
        Self(Arc::new(heap))
    }
}

/// One more owner of the same heap.
impl<S: Source + 'static> Clone for SharedHeap<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Source + 'static> Deref for SharedHeap<S> {
    type Target = Heap<S>;

    #[inline]
    fn deref(&self) -> &Heap<S> {
        &self.0
    }
}

impl<S: Source + 'static> fmt::Debug for SharedHeap<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedHeap").field(&**self).finish()
    }
}
