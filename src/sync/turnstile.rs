//! A turnstile: tells whether anybody is, or has been, in the middle of something.
//!
//! Whoever changes summaries (and so may leave one too small for a moment), or holds part of a run it may have to give
//! back, passes in before and out after. Who wants to conclude from what it does *not* see - that no run is free, that
//! no page lies below a hint - reads the turnstile before and after looking: calm both times, and the same calm, means
//! nobody passed while it looked.
//!
//! ```text
//!   stripe   63            32 31             0      one for the chunks ≡ i (mod 8), a cache line of its own
//!            ┌───────────────┬────────────────┐
//!            │ ever entered  │ inside now     │      enter: + (1 << 32 | 1)    leave: − 1
//!            └───────────────┴────────────────┘
//!   calm = no stripe has anybody inside; a calm is known by the sum of all that ever entered
//! ```
//!
//! To pass costs two uncontended read-modify-writes (~14 ns); to read, a load of each stripe. Nobody ever waits at it.
//! Who reads and also passes, as a search does that corrects summaries, knows how often, and expects a calm that is
//! later by as much. The count of entries wraps after 2³² passes; for a reader to be fooled that many must happen
//! between its two readings.

#![forbid(unsafe_code)]

use crossbeam_utils::CachePadded;

use super::{AtomicU64, Ordering, STRIPES};

const INSIDE: u64 = (1 << 32) - 1;
const ENTER: u64 = (1 << 32) + 1;

/// Counts who is inside and who has ever been, in `N` stripes, a power of two.
#[derive(Debug)]
pub struct Turnstile<const N: usize = STRIPES> {
    stripes: [CachePadded<AtomicU64>; N],
}

/// A moment at which nobody was inside, to be compared with a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calm {
    entered: u32,
}

impl Calm {
    /// The calm after this one and `passes` more passes through the turnstile.
    #[inline(always)]
    #[must_use]
    pub const fn after(self, passes: u32) -> Self {
        Self {
            entered: self.entered.wrapping_add(passes),
        }
    }
}

/// One who is inside; dropping it is leaving.
#[derive(Debug)]
pub struct Pass<'a> {
    stripe: &'a AtomicU64,
}

impl<const N: usize> Default for Turnstile<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Turnstile<N> {
    // A chunk's stripe is its low bits.
    const MASK: usize = {
        assert!(N.is_power_of_two());
        N - 1
    };

    /// A turnstile that nobody has passed.
    #[must_use]
    pub fn new() -> Self {
        Self {
            stripes: core::array::from_fn(|_| CachePadded::new(AtomicU64::new(0))),
        }
    }

    /// Goes in, by the stripe of `chunk`.
    ///
    /// The entry is a read-modify-write, so `fence_after_rmw` behind it keeps it before every later load.
    #[inline]
    pub fn enter(&self, chunk: usize) -> Pass<'_> {
        let stripe = &self.stripes[chunk & Self::MASK];
        // Acquire: nothing done inside is done before. Seen by whoever acquires anything written inside.
        stripe.fetch_add(ENTER, Ordering::Acquire);
        Pass { stripe }
    }

    /// The present calm, or `None` if anybody is inside.
    ///
    /// Two equal calms, with the reader's own change and a fence behind it before what he looks at, say this: if he saw
    /// anything that somebody wrote inside, that one had left before the first calm. For what is read by Acquire brings
    /// the writer's entry with it, so the second calm counts that entry; the first counted it too, being equal, and did
    /// not find him inside, so he had left; and his leaving was a release, so the reader sees all he did. No fence is
    /// needed here for that.
    #[inline]
    pub fn calm(&self) -> Option<Calm> {
        let (entered, inside) = self.look();
        (!inside).then_some(entered)
    }

    /// Sends everybody out: in the child of a fork, which has one thread, and that is not inside.
    #[cfg_attr(
        not(feature = "std"),
        allow(dead_code, reason = "for fork, which needs an operating system")
    )]
    pub(crate) fn clear(&self) {
        for stripe in &self.stripes {
            // Relaxed: nobody else is there. The entries stay counted, so that no calm of before comes again.
            stripe.fetch_and(!INSIDE, Ordering::Relaxed);
        }
    }

    /// How many have ever entered, and whether anybody is inside now.
    #[inline]
    pub fn look(&self) -> (Calm, bool) {
        // Acquire: pairs with the release of `Pass::drop`; what was done inside is seen. Both counts are summed at
        // once: never are so many inside that they reach the entries.
        let sum = self
            .stripes
            .iter()
            .fold(0_u64, |sum, stripe| sum.wrapping_add(stripe.load(Ordering::Acquire)));
        let entered = (sum >> 32) as u32;
        (Calm { entered }, sum & INSIDE != 0)
    }
}

impl Drop for Pass<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: whoever reads calm after this sees all that was done inside.
        self.stripe.fetch_sub(1, Ordering::Release);
    }
}
