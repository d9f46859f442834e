#![doc = "placeholder"]
#![no_std]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "std")]
extern crate std;

// Reading order is import order: a module uses only modules above it (`tests/tidy.rs` keeps that).
mod bitmap;
mod cache;
mod check;
mod fatal;
mod free_set;
mod geometry;
mod heap;
mod hints;
#[doc(hidden)]
#[cfg(feature = "internals")]
pub mod internals;
mod metadata;
mod radix;
mod scavenge;
pub mod source;
mod summary;
mod sync;
mod units;
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
mod object;
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
mod global;

pub use geometry::Geometry;
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
pub use global::GlobalHeap;
pub use heap::{Allocation, Cache, Calls, Config, FreeError, NewHeapError, PageHeap, Stats};
#[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
pub use object::{GlobalStats, ObjectFault};
pub use units::{PageCount, PageIndex, PageRun};
