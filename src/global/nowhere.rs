//! Without an operating system threads have no storage of their own: all share one structure. Same shape as `pthread`.

#![forbid(unsafe_code)]

use crate::object::{Nobody, Objects, Thread, Working};
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

    /// Does nothing: without an operating system there are no forks.
    pub(crate) fn enter<S: Source>(&self, _objects: &'static Objects<S>) {}

    /// As [`enter`](Self::enter).
    pub(crate) fn leave<S: Source>(&self, _objects: &Objects<S>) {}
}

/// Unknown.
pub(super) fn is_alone() -> bool {
    false
}

/// Unknown.
pub(crate) fn resident() -> usize {
    0
}

/// A thread inside the hook for exhausted memory. Here threads cannot be told apart: the hook must not allocate.
pub(super) struct Inside;

impl Inside {
    /// Enters.
    pub(super) fn enter() -> Option<Self> {
        Some(Self)
    }
}

/// The placeholder for a missing structure, with a key that no heap has.
static NOBODY: Nobody = Nobody::new(1);

/// The placeholder.
#[inline(always)]
pub(super) fn current() -> &'static Thread {
    NOBODY.stand_in()
}

/// None.
#[inline(always)]
pub(super) fn enter<T>(_objects: *const T) -> Option<Working<'static>> {
    None
}

/// None.
#[inline(always)]
pub(super) fn enlist<S: Source>(_objects: &'static Objects<S>) -> Option<&'static Thread> {
    None
}
