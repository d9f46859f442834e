//! What a layer above a heap of pages has to say when that is scavenged.
//!
//! ```text
//!   tick ─▶ activity? ─▶ a look ─▶ trim ─▶ free pages go ─▶ nothing left, and silent ─▶ punch ─▶ rest
//! ```
//!
//! A heap of pages by itself has nobody above: all it knows of is free pages and caches.

#![forbid(unsafe_code)]

/// A layer that keeps free memory where the heap below does not see it.
pub(crate) trait Above {
    /// Whether who drives the scavenger is about to sleep for ever, and all is to be given up before.
    fn settles(&self) -> bool {
        false
    }

    /// A number that changes with what the layer does.
    fn activity(&self) -> u64 {
        0
    }

    /// Gives up what is kept in store, all of it or some; whether nothing is kept now.
    fn trim(&self, all: bool) -> bool {
        let _ = all;
        true
    }

    /// Gives back parts of pages that are allocated, below page `end`, while `go_on`. Below which page is left to be
    /// looked at: 0 when all is done.
    fn punch(&self, end: usize, go_on: &dyn Fn() -> bool) -> usize {
        let _ = (end, go_on);
        0
    }
}

/// Nobody.
#[derive(Debug)]
pub(crate) struct Nothing;

impl Above for Nothing {}
