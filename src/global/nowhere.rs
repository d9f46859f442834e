//! Without an operating system threads have no storage of their own: all share one structure. Same shape as `pthread`.

#![forbid(unsafe_code)]

use crate::object::{Nobody, Objects, Thread, Working};
use crate::source::Source;

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

/// Whether threads have structures of their own: none has. So an allocation need not look at the placeholder. It would
/// write to it, as to the top of a magazine, and all processors share that.
pub(super) const HAS_STRUCTURES: bool = false;

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
