//! Without an operating system threads have no place of their own: all share one structure. Equal in shape to
//! `pthread`.

#![forbid(unsafe_code)]

use crate::object::{Objects, Thread};
use crate::source::Source;

/// None.
#[inline(always)]
pub(super) fn current<T>(_objects: *const T) -> Option<&'static Thread> {
    None
}

/// None.
#[inline(always)]
pub(super) fn enlist<S: Source>(_objects: &'static Objects<S>) -> Option<&'static Thread> {
    None
}
