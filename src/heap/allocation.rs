//! What an allocation tells beside the pages: how many of them are known to be zero.
//!
//! ```text
//!   scavenged, has no memory behind it   reads as zero, faults when it is touched     counted
//!   backed                               whatever was written to it last
//! ```
//!
//! Worked: of 3 pages that were taken, 2 had been released. `scavenged` is 2, so one of them may hold old bytes, and
//! the run [is not zeroed](Allocation::is_zeroed). The count costs nothing: the scavenged bits of a word are taken with
//! the others.

#![forbid(unsafe_code)]

use crate::units::{PageCount, PageRun};

/// Pages that were allocated, and what is known about their contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Allocation {
    /// The pages.
    pub run: PageRun,
    /// How many of them had no memory behind them and read as zero.
    pub scavenged: PageCount,
}

impl Allocation {
    /// Whether every byte of the run reads as zero.
    #[must_use]
    pub fn is_zeroed(&self) -> bool {
        self.scavenged == self.run.pages()
    }
}
