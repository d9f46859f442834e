//! The right to open heaps, where no process forks: a lock.

#![forbid(unsafe_code)]

use crate::object::Forks;
use crate::sync::{Guard, Lock};

static OPENING: Lock = Lock::new();

/// The right to open heaps.
pub(crate) struct Opening {
    _guard: Guard<'static>,
}

impl Opening {
    /// Waits until no other thread opens a heap.
    #[cold]
    pub(crate) fn begin() -> Self {
        Self { _guard: OPENING.lock() }
    }

    /// Does nothing: only a fork would ask which heaps there are.
    pub(crate) fn enter(&self, _heap: &'static impl Forks) {}

    /// As [`enter`](Self::enter).
    pub(crate) fn leave(&self, _heap: &impl Forks) {}
}
