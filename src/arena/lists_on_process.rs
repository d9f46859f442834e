//! Free lists on the process's own heap, for programs that have an operating system and no wishes.
//!
//! ```text
//!   FreeList::new(layout)              FreeList::new_in(layout, ProcessHeap)
//!   ShardedFreeList::new(layout, n)    ShardedFreeList::new_in(layout, n, ProcessHeap)
//! ```
//!
//! Worked: a list of 64-byte slots takes one run of 136 KiB of the process's heap at its first allocation, and a second
//! after 2,048 slots.

#![cfg(all(unix, feature = "std"))]
#![forbid(unsafe_code)]

use core::alloc::Layout;

use super::config::ArenaConfig;
use super::error::ArenaError;
use super::free_list::FreeList;
use super::process::ProcessHeap;
use super::sharded::ShardedFreeList;

impl FreeList {
    /// A list of slots for `layout` on the process's own heap ([`ProcessHeap`]), without a limit. Takes nothing until
    /// something is allocated.
    ///
    /// # Errors
    /// If the layout is too large for any list.
    pub fn new(layout: Layout) -> Result<Self, ArenaError> {
        Self::new_in(layout, ProcessHeap)
    }

    /// A list of slots for values of type `T`, as [`new`](Self::new).
    #[must_use]
    pub fn for_type<T>() -> Self {
        match Self::new(Layout::new::<T>()) {
            Ok(list) => list,
            Err(error) => panic!("{error}"),
        }
    }

    /// A list of slots for `layout` on the process's own heap, set up by `config`.
    ///
    /// # Errors
    /// As for [`with_config_in`](Self::with_config_in).
    pub fn with_config(layout: Layout, config: ArenaConfig) -> Result<Self, ArenaError> {
        Self::with_config_in(layout, config, ProcessHeap)
    }
}

impl ShardedFreeList {
    /// A list of slots for `layout` on the process's own heap ([`ProcessHeap`]), with up to `owners` owners at a time,
    /// without a limit.
    ///
    /// # Errors
    /// As for [`new_in`](Self::new_in).
    pub fn new(layout: Layout, owners: usize) -> Result<Self, ArenaError> {
        Self::new_in(layout, owners, ProcessHeap)
    }

    /// A list of slots for `layout` on the process's own heap, with up to `owners` owners at a time, set up by
    /// `config`.
    ///
    /// # Errors
    /// As for [`with_config_in`](Self::with_config_in).
    pub fn with_config(layout: Layout, owners: usize, config: ArenaConfig) -> Result<Self, ArenaError> {
        Self::with_config_in(layout, owners, config, ProcessHeap)
    }
}
