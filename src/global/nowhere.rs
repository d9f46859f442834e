//! Without an operating system threads have no place of their own: all share one structure. Equal in shape to
//! `pthread`.

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
    /// Waits until nobody else opens a heap.
    #[cold]
    pub(crate) fn begin() -> Self {
        Self { _guard: OPENING.lock() }
    }

    /// Nobody needs to know: without an operating system nobody forks.
    pub(crate) fn enter<S: Source>(&self, _objects: &'static Objects<S>) {}

    /// As [`enter`](Self::enter).
    pub(crate) fn leave<S: Source>(&self, _objects: &Objects<S>) {}
}

/// Nobody says.
pub(super) fn is_alone() -> bool {
    false
}

/// The same.
pub(crate) fn resident() -> usize {
    0
}

/// Whoever is inside the hook for exhausted memory. Here nobody can tell: the hook must not allocate.
pub(super) struct Inside;

impl Inside {
    /// In.
    pub(super) fn enter() -> Option<Self> {
        Some(Self)
    }
}

/// What stands for no structure: of a key that no heap has.
static NOBODY: Nobody = Nobody::new(1);

/// What stands for none.
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
