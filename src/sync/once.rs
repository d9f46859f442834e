//! A word that is written once and then only read: not a checker's atomic, so that it can be a `static` under a checker
//! too.
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

    /// The value; 0 before it is set. A thread that synchronised with one that set it, or tried to, sees it.
    #[inline(always)]
    pub fn get(&self) -> usize {
        // Relaxed: there is one value for ever, and it publishes nothing else; partner: none.
        self.0.load(Ordering::Relaxed)
    }

    /// Sets it, unless it is already set.
    pub fn set(&self, value: usize) {
        // Relaxed: as in `get`. Either way, this thread has seen the value before whatever the caller does next.
        let _others = self.0.compare_exchange(0, value, Ordering::Relaxed, Ordering::Relaxed);
    }
}
