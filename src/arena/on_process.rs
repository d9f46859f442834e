//! Arenas on the process's own heap, for programs that have an operating system and no wishes.
//!
//! ```text
//!   Arena::new()              Arena::new_in(ProcessHeap)
//!   Arena::with_config(c)     Arena::with_config_in(c, ProcessHeap)
//! ```
//!
//! A warm process makes such an arena without a call to the system: its first slab is a run of pages that another arena
//! has given back. Worked: two arenas of 32 KiB one after the other have the same four pages.

#![cfg(all(unix, feature = "std"))]
#![forbid(unsafe_code)]

use super::bump::Arena;
use super::config::ArenaConfig;
use super::error::ArenaError;
use super::pool::Pool;
use super::process::ProcessHeap;

impl Arena {
    /// An arena on the process's own heap, without a limit. Takes nothing until something is allocated.
    ///
    /// That heap is apart from the program's allocator, and gives nothing back to the system by itself: see
    /// [`ProcessHeap`].
    #[must_use]
    pub fn new() -> Self {
        Self::new_in(ProcessHeap)
    }

    /// An arena on the process's own heap, set up by `config`.
    ///
    /// # Errors
    /// If what is to be taken at once cannot be had. Nothing is kept then.
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
    /// A pool on the process's own heap ([`ProcessHeap`]), without a limit, in slabs of 1 MiB. Takes nothing until
    /// something is allocated.
    #[must_use]
    pub fn new() -> Self {
        Self::new_in(ProcessHeap)
    }

    /// A pool on the process's own heap, set up by `config`.
    ///
    /// # Errors
    /// If what is to be taken at once cannot be had. Nothing is kept then.
    pub fn with_config(config: ArenaConfig) -> Result<Self, ArenaError> {
        Self::with_config_in(config, ProcessHeap)
    }
}

impl Default for Pool<ProcessHeap> {
    fn default() -> Self {
        Self::new()
    }
}
