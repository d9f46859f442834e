//! Arenas on the process's own heap: the default for programs on an operating system.
//!
//! ```text
//!   Arena::new()              Arena::new_in(ProcessHeap)
//!   Arena::with_config(c)     Arena::with_config_in(c, ProcessHeap)
//! ```
//!
//! In a warm process, making such an arena takes no system call: its first slab is a run of pages that another arena
//! has given back. Worked: two arenas of 32 KiB, one after the other, use the same four pages.

#![cfg(all(any(unix, windows), feature = "std"))]
#![forbid(unsafe_code)]

use super::bump::Arena;
use super::config::ArenaConfig;
use super::error::ArenaError;
use super::pool::Pool;
use super::process::ProcessHeap;

impl Arena {
    /// Creates an arena on the process's own heap, without a limit. It takes no memory until the first allocation.
    ///
    /// That heap is separate from the program's allocator, and returns nothing to the system by itself: see
    /// [`ProcessHeap`].
    #[must_use]
    pub fn new() -> Self {
        Self::new_in(ProcessHeap)
    }

    /// Creates an arena on the process's own heap, configured by `config`.
    ///
    /// # Errors
    /// Fails if the preallocation cannot be made. Nothing is then kept.
    pub fn with_config(config: ArenaConfig) -> Result<Self, ArenaError> {
        Self::with_config_in(config, ProcessHeap)
    }
}

impl Default for Arena<ProcessHeap> {
    fn default() -> Self {
        Self::new()
    }
}

impl Pool {
    /// Creates a pool on the process's own heap ([`ProcessHeap`]), in slabs of 1 MiB, without a limit. It takes no
    /// memory until the first allocation.
    #[must_use]
    pub fn new() -> Self {
        Self::new_in(ProcessHeap)
    }

    /// Creates a pool on the process's own heap, configured by `config`.
    ///
    /// # Errors
    /// Fails if the preallocation cannot be made. Nothing is then kept.
    pub fn with_config(config: ArenaConfig) -> Result<Self, ArenaError> {
        Self::with_config_in(config, ProcessHeap)
    }
}

impl Default for Pool<ProcessHeap> {
    fn default() -> Self {
        Self::new()
    }
}
