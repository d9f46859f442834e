//! An arena's statistics.
//!
//! ```text
//!   limit      ├──────────────────────────────────────────────────┤
//!   reserved   ├───────────────────────────────────┤                 pages taken
//!   committed  ├───────────────────────┤                             handed out at least once since
//!   allocated  ├───────────┤        peak ┆                           handed out now, with padding
//! ```

#![forbid(unsafe_code)]

use core::fmt;

/// An arena at one moment, in bytes. While other threads are at work, the fields may be of slightly different moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaStats {
    /// The maximum of `reserved`; `usize::MAX` without a limit.
    pub limit: usize,
    /// Pages taken from the backing.
    pub reserved: usize,
    /// The part of `reserved` that has been handed out at least once since it was taken: an upper bound on resident
    /// memory, if the system provides memory on first touch. It excludes what an arena keeps for itself: a page at the
    /// end of each slab, and the nodes of a list's slots.
    pub committed: usize,
    /// Handed out at present, including padding between objects.
    pub allocated: usize,
    /// The maximum that `allocated` has reached. For a sharded list, slots held by its shards are included.
    pub peak: usize,
    /// Blocks taken from the backing and not returned.
    pub slabs: usize,
}

impl fmt::Display for ArenaStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            usize::MAX => writeln!(f, "limit      {:>14}", "none")?,
            limit => writeln!(f, "limit      {limit:>14} bytes")?,
        }
        writeln!(f, "reserved   {:>14} bytes in {} slabs", self.reserved, self.slabs)?;
        writeln!(f, "committed  {:>14} bytes", self.committed)?;
        write!(f, "allocated  {:>14} bytes, {} at its peak", self.allocated, self.peak)
    }
}
