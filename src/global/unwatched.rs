//! What Unixes other than Linux say about memory: nothing. No file is opened, which may end the process, as OpenBSD's
//! `pledge` does. Same shape as `pressure.rs`.

#![forbid(unsafe_code)]

use crate::scavenge::pressure::Pressure;

/// The right to look. Here anybody has it at any time.
pub(super) struct Turn;

impl Turn {
    /// Begins.
    pub(super) fn begin() -> Option<Self> {
        Some(Self)
    }
}

/// Sees nothing.
pub(super) struct Watch;

impl Watch {
    /// Nothing to begin with.
    pub(super) fn new(_root: &'static str) -> Self {
        Self
    }

    /// Unknown.
    pub(super) fn look(&mut self) -> Option<Pressure> {
        None
    }
}

/// Unknown.
pub(super) fn is_alone() -> bool {
    false
}

/// Unknown.
pub(crate) fn resident() -> usize {
    0
}
