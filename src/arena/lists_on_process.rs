//! Free lists on the process's own heap: the default for programs on an operating system.
//!
//! ```text
//!   FreeList::new(layout)              FreeList::new_in(layout, ProcessHeap)
//!   ShardedFreeList::new(layout, n)    ShardedFreeList::new_in(layout, n, ProcessHeap)
//! ```
//!
//! Worked: a list of 64-byte slots takes one run of 136 KiB from the process's heap at its first allocation, and a
//! second after 2,048 slots.

#![cfg(all(any(unix, windows), feature = "std"))]
#![forbid(unsafe_code)]

use core::alloc::Layout;

use super::config::ArenaConfig;
use super::error::ArenaError;
use super::free_list::FreeList;
use super::process::ProcessHeap;
use super::sharded::ShardedFreeList;

impl FreeList {
    /// Creates a list of slots for `layout` on the process's own heap ([`ProcessHeap`]), without a limit. It takes no
    /// memory until the first allocation.
    ///
    /// # Errors
    /// None today: whether there is room for a slot of any layout shows when one is allocated.
    pub fn new(layout: Layout) -> Result<Self, ArenaError> {
        Self::new_in(layout, ProcessHeap)
    }

    /// Creates a list of slots for values of type `T`, like [`new`](Self::new).
    ///
    /// # Panics
    /// If [`new`](Self::new) fails: not today.
    #[must_use]
    pub fn for_type<T>() -> Self {
        match Self::new(Layout::new::<T>()) {
            Ok(list) => list,
            Err(error) => panic!("{error}"),
        }
    }

    /// Creates a list of slots for `layout` on the process's own heap, configured by `config`.
    ///
    /// # Errors
    /// As for [`with_config_in`](Self::with_config_in).
    pub fn with_config(layout: Layout, config: ArenaConfig) -> Result<Self, ArenaError> {
        Self::with_config_in(layout, config, ProcessHeap)
    }
}

impl ShardedFreeList {
    /// Creates a list of slots for `layout` on the process's own heap ([`ProcessHeap`]), with up to `owners` owners at
    /// a time and no limit.
    ///
    /// # Errors
    /// As for [`new_in`](Self::new_in).
    pub fn new(layout: Layout, owners: usize) -> Result<Self, ArenaError> {
        Self::new_in(layout, owners, ProcessHeap)
    }

    /// Creates a list of slots for values of type `T`, like [`new`](Self::new).
    ///
    /// ```
    /// use pageheap::arena::ShardedFreeList;
    ///
    /// let list = ShardedFreeList::for_type::<String>(8)?;
    /// let name = list.owner()?.boxed("slot".to_owned()).map(|name| name.len())?;
    /// assert_eq!(name, 4);
    /// # Ok::<(), pageheap::arena::ArenaError>(())
    /// ```
    ///
    /// # Errors
    /// As for [`new_in`](Self::new_in).
    pub fn for_type<T>(owners: usize) -> Result<Self, ArenaError> {
        Self::new(Layout::new::<T>(), owners)
    }

    /// Creates a list of slots for `layout` on the process's own heap, with up to `owners` owners at a time, configured
    /// by `config`.
    ///
    /// # Errors
    /// As for [`with_config_in`](Self::with_config_in).
    pub fn with_config(layout: Layout, owners: usize, config: ArenaConfig) -> Result<Self, ArenaError> {
        Self::with_config_in(layout, owners, config, ProcessHeap)
    }
}
