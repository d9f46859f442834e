//! Numbers that are never used twice in a process: the generations of pools.
//!
//! ```text
//!   pool A   1 ──reset──▶ 3 ──reset──▶ 4
//!   pool B        2 ─────────────────────── dropped
//! ```
//!
//! There is one counter per process, so a number identifies both the pool and its round. At one reset every nanosecond,
//! 64 bits last 584 years. The counter orders nothing and is not modelled; hence the atomic of `core`, which can be a
//! static even under a model checker.

#![forbid(unsafe_code)]

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

static LAST: AtomicU64 = AtomicU64::new(0);

/// A number that no other pool or round has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Generation(u64);

impl Generation {
    /// The next number.
    pub(super) fn next() -> Self {
        // Relaxed: a number by itself.
        Self(LAST.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
