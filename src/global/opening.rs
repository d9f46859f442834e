//! The right to open heaps, where no process forks: a lock.

#![forbid(unsafe_code)]

use crate::object::Objects;
use crate::source::Source;
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
    pub(crate) fn enter<S: Source>(&self, _objects: &'static Objects<S>) {}

    /// As [`enter`](Self::enter).
    pub(crate) fn leave<S: Source>(&self, _objects: &Objects<S>) {}
}
