//! What an allocation tells beside the pages: how many of them are known to be zero, and how many up to the end.
//!
//! ```text
//!   scavenged, has no memory behind it   reads as zero, faults when it is touched     counted
//!   backed                               whatever was written to it last
//! ```
//!
//! Worked: of 3 pages that were taken, 2 had been released. `scavenged` is 2, so one of them may hold old bytes, and
//! the run [is not zeroed](Allocation::is_zeroed). The count costs nothing: the scavenged bits of a word are taken with
//! the others.
//!
//! Where the two are the last ones, only the first page is [`used`](Allocation::used). That is the rule where a heap
//! grows: the run begins with what is free at the heap's end, and continues with pages that nobody ever had.

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
    /// How many of these are the run's last pages, in a row. A run from a cache, which has 16 pages at most, is not
    /// looked at so closely: none.
    pub(crate) last: PageCount,
}

impl Allocation {
    /// A run of which so many pages are scavenged, of them the `last` ones in a row; in doubt none is.
    #[inline(always)]
    pub(super) fn of(run: PageRun, scavenged: PageCount, last: usize) -> Self {
        let last = PageCount(last).min(scavenged);
        Self { run, scavenged, last }
    }

    /// Whether every byte of the run reads as zero.
    #[must_use]
    pub fn is_zeroed(&self) -> bool {
        self.scavenged == self.run.pages()
    }

    /// How many pages, from the first, may hold something: every byte behind them reads as zero.
    pub(crate) fn used(&self) -> PageCount {
        if self.is_zeroed() {
            return PageCount::ZERO;
        }
        self.run.pages() - self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::{Config, PageHeap};
    use crate::source::{Contents, Simulated};

    #[test]
    fn behind_what_may_be_used_all_is_zero() {
        let heap = PageHeap::new(Simulated::new(4096), Config::new(1 << 20)).unwrap();
        let use_first = |pages| {
            let taken = heap.allocate_tracked(PageCount(pages)).unwrap();
            heap.set.release(taken.run.start().0, pages).unwrap();
            (taken.scavenged.0, taken.used().0)
        };
        assert_eq!(use_first(3), (3, 0));
        assert_eq!(use_first(70), (67, 3));
        assert_eq!(use_first(70), (0, 70));
        assert_eq!(use_first(100), (30, 70));
        heap.to_mark(Contents::Unknown, true);
        assert_eq!(use_first(120), (0, 120), "there are marks, but they no longer say so");
    }
}
