//! What a layer above a page heap contributes when the page heap is scavenged.
//!
//! ```text
//!   tick ─▶ activity? ─▶ a look ─▶ trim ─▶ free pages go ─▶ nothing left, and silent ─▶ punch ─▶ rest
//! ```
//!
//! A page heap by itself has no layer above: it knows only free pages and caches.

#![forbid(unsafe_code)]

/// A layer that keeps free memory where the page heap below does not see it.
pub(crate) trait Above {
    /// Whether the driving thread is about to sleep indefinitely, and everything is to be given up first.
    fn settles(&self) -> bool {
        false
    }

    /// A number that changes with the layer's activity.
    fn activity(&self) -> u64 {
        0
    }

    /// Gives up what is kept in stores, all of it or some. Returns whether nothing is kept now.
    fn trim(&self, all: bool) -> bool {
        let _ = all;
        true
    }

    /// Gives back parts of allocated pages, below page `end`, while `go_on`. Returns the page below which there is
    /// still something to examine: 0 when all is done.
    fn punch(&self, end: usize, go_on: &dyn Fn() -> bool) -> usize {
        let _ = (end, go_on);
        0
    }
}

/// No layer above.
#[derive(Debug)]
pub(crate) struct Nothing;

impl Above for Nothing {}
