#![doc = "placeholder"]
#![no_std]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "std")]
extern crate std;

// Reading order is import order: a module uses only modules above it (`tests/tidy.rs` keeps that).

// Words.
mod geometry;
mod units;
mod summary;

// Ground.
mod fatal;
mod sync;
pub mod source;

// Pages.
mod bitmap;
mod hints;
mod radix;
mod free_set;
mod check;
mod cache;
mod scavenge;
mod metadata;
mod heap;

// Objects.
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
mod object;

// Doors.
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
mod global;
#[doc(hidden)]
#[cfg(feature = "internals")]
pub mod internals;

pub use geometry::Geometry;
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
pub use global::GlobalHeap;
pub use heap::{Allocation, Cache, Calls, Config, FreeError, NewHeapError, PageHeap, Stats};
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
pub use object::{GlobalStats, ObjectFault};
pub use units::{PageCount, PageIndex, PageRun};
