//! Numbers that are never used twice in a process: the generations of pools.
//!
//! ```text
//!   pool A   1 ──reset──▶ 3 ──reset──▶ 4
//!   pool B        2 ─────────────────────── dropped
//! ```
//!
//! One counter for the process, so a number says both which pool and which of its rounds. 64 bits: at a reset every
//! nanosecond they last 584 years. It orders nothing and is not modelled; hence `core`'s atomic, which can stand in a
//! static under a model checker too.

#![forbid(unsafe_code)]

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

static LAST: AtomicU64 = AtomicU64::new(0);

/// A number that nobody else has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Generation(u64);

impl Generation {
    /// The next.
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
