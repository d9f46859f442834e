//! How much a shard may hold: a proportional-integral controller of the batch size.
//!
//! ```text
//!   free share, per mille ──▶ error = 200 − share ──┬──▶ × 2 ────────────────┐
//!                                                   └──▶ Σ, |Σ| ≤ 1000 ──÷ 2─┴──▶ 64 − (…)/8, kept in 1..=64
//! ```
//!
//! Large batches make the common path cheap, but slots in the shards' batches must be gathered by the other threads. As
//! long as a fifth of all slots is available to any thread, a batch has 64 slots. The further the share falls below
//! that, and the longer it stays there, the smaller batches get. In the worst case a batch has one slot, and nothing is
//! held back but slots that are retired (`shards/retire.rs`).
//!
//! Worked: 10 % of a list stays free. The error is 100 per mille. The proportional part takes 25 from the batch at
//! once, the integral 6 with each step: batches of 33, 27, 21, 14, 8 and 2 slots, and of one from the seventh step on.
//! Back at 60 % free, the error is −400: the proportional part alone restores batches of 64 at the first step, and the
//! integral, at most 1000, is gone after three.
//!
//! *Anti-windup.* The integral is bounded, and does not grow while the output is already at its bound (conditional
//! integration): however long a shortage lasts, recovery takes equally long. All numbers are integers: there is no NaN,
//! no drift, and no floating point in a kernel.
//!
//! A step costs ~4 ns and is taken when batches move, so there is no clock and no thread: an idle list needs no
//! control. After Åström and Hägglund, "PID Controllers", chapter 3, without the D, which would amplify noise.

#![forbid(unsafe_code)]

/// Slots of the largest batch.
pub const MAX_BATCH: u32 = 64;

/// The share of available slots, per mille, below which batches shrink.
const TARGET: i32 = 200;

/// The bound of the integral, in either direction.
const WINDUP: i32 = 1000;

/// The controller's state: the integral of the error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Controller {
    integral: i32,
}

impl Controller {
    /// A controller in a given state, clamped to the bounds.
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

    /// One step: `free` of `all` slots are available. Returns the next state, and how many slots a batch should have.
    #[must_use]
    pub fn step(self, free: u64, all: u64) -> (Self, u32) {
        let share = (u128::from(free.min(all)) * 1000 / u128::from(all.max(1))) as i32;
        let error = TARGET - share;
        let next = Self::from_integral(self.integral + error);
        let batch = |controller: Self| MAX_BATCH as i32 - (2 * error + controller.integral / 2) / 8;
        let wanted = batch(next);
        // At a bound, and both the error and its integral push further: the integral is large enough.
        let stuck =
            wanted < 1 && error > 0 && self.integral > 0 || wanted > MAX_BATCH as i32 && error < 0 && self.integral < 0;
        let kept = if stuck { self } else { next };
        (kept, wanted.clamp(1, MAX_BATCH as i32) as u32)
    }
}
