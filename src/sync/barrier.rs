//! A pair of fences of which one is nearly free, wherever that can be had, and two full ones elsewhere.
//!
//! ```text
//!   who comes by often            who comes seldom
//!   store "I am inside"           store "keep out"
//!   light ─────────────── ╳ ───── heavy                at least one of the two loads sees the other's store
//!   load  "keep out?"             load  "inside?"
//! ```
//!
//! Two full fences make that so (Dekker). Where the kernel can make every thread of the process pass a full fence, the
//! frequent side needs only to tell the compiler: ~0 ns for it, 0.2 us for the other with one thread at work, some
//! microseconds with many. Where it cannot, both pay ~6 ns. Which of the two it is must be the same for both sides, so
//! a barrier finds out when it is made, and belongs to the structure it is for.

#![forbid(unsafe_code)]

use super::imp::{fence, fence_heavy, fence_light};

/// How the two sides of a structure meet.
#[derive(Clone, Copy, Debug)]
pub struct Barrier {
    asymmetric: bool,
}

impl Barrier {
    /// The best there is here, for both sides of one structure.
    #[must_use]
    pub fn new() -> Self {
        Self {
            asymmetric: fence_heavy(),
        }
    }

    /// The frequent side.
    #[inline(always)]
    pub(crate) fn light(self) {
        if self.asymmetric {
            fence_light();
        } else {
            fence();
        }
    }

    /// The other. Whether it was done: a kernel may refuse today what it granted yesterday, and then nothing may be
    /// concluded.
    #[must_use]
    pub(crate) fn heavy(self) -> bool {
        // Also towards others on this side, whom nobody interrupts.
        fence();
        let done = !self.asymmetric || fence_heavy();
        fence();
        done
    }
}

impl Default for Barrier {
    fn default() -> Self {
        Self::new()
    }
}
