//! A turnstile: tells whether any thread is, or has been, in the middle of something.
//!
//! A thread passes through it (enters before, leaves after) while it changes summaries, and so may leave one too small
//! for a moment, or while it holds part of a run that it may have to give back. A thread that wants to conclude from
//! what it does *not* see - that no run is free, that no page lies below a hint - reads the turnstile before and after
//! its search. If it is calm both times, and the calm is the same, no thread passed during the search.
//!
//! ```text
//!   stripe   63            32 31             0      one for the chunks ≡ i (mod 8), a cache line of its own
//!            ┌───────────────┬────────────────┐
//!            │ ever entered  │ inside now     │      enter: + (1 << 32 | 1)    leave: − 1
//!            └───────────────┴────────────────┘
//!   calm = no stripe has a thread inside; a calm is identified by the sum of all entries so far
//! ```
//!
//! A pass costs two uncontended read-modify-writes (~14 ns), a reading one load per stripe. No thread ever waits here.
//! A reader that also passes, as a search does when it corrects summaries, knows how often it has, and expects a calm
//! that is later by that many entries. The count of entries wraps after 2³² passes; to fool a reader, that many must
//! fall between its two readings.

#![forbid(unsafe_code)]

use crossbeam_utils::CachePadded;

use super::{AtomicU64, Ordering, STRIPES};

const INSIDE: u64 = (1 << 32) - 1;
const ENTER: u64 = (1 << 32) + 1;

/// Counts the threads inside, and all entries so far, in `N` stripes, a power of two.
#[derive(Debug)]
pub struct Turnstile<const N: usize = STRIPES> {
    stripes: [CachePadded<AtomicU64>; N],
}

/// A moment at which no thread was inside, to be compared with a later one.
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

/// A thread's stay inside; dropping it leaves.
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

    /// A turnstile that no thread has passed.
    #[must_use]
    pub fn new() -> Self {
        Self {
            stripes: core::array::from_fn(|_| CachePadded::new(AtomicU64::new(0))),
        }
    }

    /// Enters, through the stripe of `chunk`.
    ///
    /// The entry is a read-modify-write, so a `fence_after_rmw` after it orders it before every later load.
    #[inline]
    pub fn enter(&self, chunk: usize) -> Pass<'_> {
        let stripe = &self.stripes[chunk & Self::MASK];
        // Acquire: nothing done inside happens before the entry. Partner: any thread that acquires anything written
        // inside sees the entry.
        stripe.fetch_add(ENTER, Ordering::Acquire);
        Pass { stripe }
    }

    /// The current calm, or `None` if any thread is inside.
    ///
    /// Suppose a reader makes a change of its own and passes a fence, then reads a calm, then what it is looking for,
    /// then an equal calm. Then, if it saw anything that some thread wrote inside, that thread had left before the
    /// first calm:
    ///
    /// - What is read by Acquire brings the writer's entry with it, so the second calm counts that entry.
    /// - The first calm is equal, so it counted the entry too, and it did not find the writer inside: the writer had
    ///   left.
    /// - Leaving is a release, so the reader sees everything the writer did.
    ///
    /// No fence is needed here for that.
    #[inline]
    pub fn calm(&self) -> Option<Calm> {
        let (entered, inside) = self.look();
        (inside == 0).then_some(entered)
    }

    /// All entries so far, modulo 2³².
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.look().0.entered
    }

    /// Removes every thread: for the child of a fork, whose single thread is not inside.
    pub(crate) fn clear(&self) {
        for stripe in &self.stripes {
            // Relaxed: no other thread exists. The entries stay counted, so that no earlier calm recurs.
            stripe.fetch_and(!INSIDE, Ordering::Relaxed);
        }
    }

    /// All entries so far, and how many threads are inside now. If neither changes, nobody has entered or left.
    #[inline]
    pub fn look(&self) -> (Calm, u32) {
        // Acquire: pairs with the release of `Pass::drop`; what was done inside is seen. Both counts are summed at
        // once: there are never so many threads inside that their count reaches the entries.
        let sum = self
            .stripes
            .iter()
            .fold(0_u64, |sum, stripe| sum.wrapping_add(stripe.load(Ordering::Acquire)));
        let entered = (sum >> 32) as u32;
        (Calm { entered }, (sum & INSIDE) as u32)
    }
}

impl Drop for Pass<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the acquire in `look`; a thread that reads calm after this sees everything done inside.
        self.stripe.fetch_sub(1, Ordering::Release);
    }
}
