//! A word that is written once and read for ever: no checker's atomic, so that it can be a `static` where one is at
//! work.
//!
//! ```text
//!   0 ── the first `set` ──▶ a value, for ever
//! ```

#![forbid(unsafe_code)]

use core::sync::atomic::{AtomicUsize, Ordering};

/// Zero until it is set.
#[derive(Debug)]
pub struct OnceWord(AtomicUsize);

impl OnceWord {
    /// Not set.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// The value; 0 before it is set. Who has been told by the one who set it, or by one who tried to, sees it.
    #[inline(always)]
    pub fn get(&self) -> usize {
        // Relaxed: one value for ever, and it hands nothing over.
        self.0.load(Ordering::Relaxed)
    }

    /// Sets it, if nobody has.
    pub fn set(&self, value: usize) {
        // Relaxed: as in `get`. Either way the value has been seen here before what the caller does next.
        let _others = self.0.compare_exchange(0, value, Ordering::Relaxed, Ordering::Relaxed);
    }
}
