//! What an arena knows of itself.
//!
//! ```text
//!   limit      ├──────────────────────────────────────────────────┤
//!   reserved   ├───────────────────────────────────┤                 pages taken
//!   committed  ├───────────────────────┤                             handed out at least once since
//!   allocated  ├───────────┤        peak ┆                           handed out now, with padding
//! ```

#![forbid(unsafe_code)]

use core::fmt;

/// An arena at one moment, in bytes. Other threads may be at work: the parts are then of slightly different moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaStats {
    /// The most that `reserved` may be; `usize::MAX` without a limit.
    pub limit: usize,
    /// Pages taken from the backing.
    pub reserved: usize,
    /// Of those, what has been handed out at least once since it was taken: an upper bound on the memory behind it
    /// where the system gives memory on first touch. What an arena keeps for itself is not in it: a page at the end of
    /// each slab, and of a list the nodes of its slots.
    pub committed: usize,
    /// Handed out now, with the padding between objects.
    pub allocated: usize,
    /// The most that `allocated` has been. Of a sharded list: what its shards kept for themselves included.
    pub peak: usize,
    /// Blocks taken from the backing and not given back.
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
