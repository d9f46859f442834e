//! A pair of fences of which one is nearly free, where the system allows that, and two full ones elsewhere.
//!
//! ```text
//!   frequent side                 rare side
//!   store "I am inside"           store "keep out"
//!   light ─────────────── ╳ ───── heavy                at least one of the two loads sees the other's store
//!   load  "keep out?"             load  "inside?"
//! ```
//!
//! Two full fences guarantee that (Dekker). Where the kernel can make every thread of the process pass a full fence,
//! the frequent side only needs a compiler fence: it costs ~0 ns there, and on the rare side 0.2 us with one thread at
//! work, some microseconds with many. Where the kernel cannot, both sides pay ~6 ns. Both sides must use the same
//! variant, so a barrier finds out which when it is made, and belongs to the structure it serves.

#![forbid(unsafe_code)]

use super::imp::{fence, fence_heavy, fence_light};

/// How the two sides of one structure are ordered against each other.
#[derive(Clone, Copy, Debug)]
pub struct Barrier {
    asymmetric: bool,
}

impl Barrier {
    /// The best variant available here, for both sides of one structure.
    #[must_use]
    pub fn new() -> Self {
        Self {
            asymmetric: fence_heavy(),
        }
    }

    /// The fence of the frequent side.
    #[inline(always)]
    pub(crate) fn light(self) {
        if self.asymmetric {
            fence_light();
        } else {
            fence();
        }
    }

    /// The fence of the rare side. Returns whether it took effect: a kernel may refuse today what it granted yesterday,
    /// and then nothing may be concluded.
    #[must_use]
    pub(crate) fn heavy(self) -> bool {
        // Full fences of its own, before and after: they order two threads of the rare side against each other.
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
