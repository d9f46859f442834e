//! How fast: one hundredth of one processor, and a little more in a hurry.
//!
//! ```text
//!   work a quantum (1 ms) ─▶ pause ─▶ work ─▶ pause …          pause = work / ratio
//!                              ▲
//!        share of time worked ─┴─ PI controller ─▶ ratio       towards 1 %, whatever sleeping really costs
//! ```
//!
//! Two hands on the brake. A **PI controller** (as Go's scavenger has one, its constants too) makes the pauses such
//! that the share of time worked comes to 1 %, on systems whose sleeps are too long or too short. An **account** makes
//! it a promise: it earns 1 % of the time that goes by, holds 250 ms at most, and pays for the work. What is overdrawn
//! is slept off in full. So of any stretch of time T the work is at most T / 100 + 250 ms, and a quantum.
//!
//! **Trimming**, which empties stores and magazines at a stroke, is paid from the account too, but makes no pause of
//! its own as long as there is something in it, and counts as 25 ms at most: full stores (32 MiB) of blocks of 100
//! bytes take 7 ms, and an account that one trim has emptied would leave what it brought back lying about for
//! seconds. So a trim that takes longer than that, in a build that is not optimised or with hundreds of threads, adds
//! what it takes longer.
//!
//! **Hurry** is for a program that has fallen silent: as long as the account holds anything, half of one processor.
//! Worked: 480 MiB in whole huge pages are 16 to 60 ms of work, paid from the account, done within an eighth of a
//! second. On a slow machine whose neighbours are busy they have been 170 to 250 ms; the account held 100 ms and a
//! hurry was a fifth of a processor, and after two seconds up to 178 MiB were there yet.
//!
//! Clocks may be coarse (work that took no time is estimated by its pages), stand still, or jump: time that goes
//! backwards is no time, a jump forwards counts as ten seconds at most.

#![forbid(unsafe_code)]

/// Nanoseconds in a millisecond.
const MILLISECOND: u64 = 1_000_000;
/// The share of one processor.
const SHARE: f64 = 0.01;
/// Its reciprocal, for the account.
const PARTS: u64 = 100;
/// What the account holds at most, in nanoseconds of work.
const MOST_CREDIT: u64 = 250 * MILLISECOND;
/// In a hurry: this many times the work is slept.
const HURRIED_PAUSE: u64 = 1;
/// What one trim costs at most.
const MOST_TRIM: u64 = 25 * MILLISECOND;
/// More than this never counts as passed between two quanta.
const LONGEST: u64 = 10_000 * MILLISECOND;
/// More work than this is not believed, nor debt: a second.
const MOST_WORK: u64 = 1_000 * MILLISECOND;
/// What releasing a granule of the system takes, should the clock not say: Go's figure.
const GRANULE_WORK: u64 = 10_000;

/// How long one quantum of work is, in nanoseconds.
pub const QUANTUM: u64 = MILLISECOND;

/// A controller, proportional and integral, with limits, and without windup at them.
///
/// Its input is the share worked, its output how much work a pause of one second is for. All state is one number.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Controller {
    integral: f64,
}

impl Controller {
    /// Proportional gain.
    const GAIN: f64 = 0.3375;
    /// How long an error must last to count once more, in nanoseconds.
    const INTEGRAL_TIME: f64 = 3.2e6;
    /// How fast what is beyond the limits is forgotten, in nanoseconds.
    const RESET_TIME: f64 = 1e9;
    /// The least output, also where it cannot be computed.
    pub const LEAST: f64 = 0.001;
    /// The most.
    pub const MOST: f64 = 1000.0;

    /// The output after `period` nanoseconds in which `input` was seen where `wanted` is wished for. Always a number
    /// from [`LEAST`](Self::LEAST) to [`MOST`](Self::MOST); after an overflow it starts anew, from the least.
    #[must_use]
    pub fn next(&mut self, input: f64, wanted: f64, period: f64) -> f64 {
        let error = wanted - input;
        let raw = Self::GAIN * error + self.integral;
        let output = raw.clamp(Self::LEAST, Self::MOST);
        self.integral += Self::GAIN * period / Self::INTEGRAL_TIME * error + period / Self::RESET_TIME * (output - raw);
        if output.is_finite() && self.integral.is_finite() {
            // Whatever was put in, the way back is not far.
            self.integral = self.integral.clamp(-Self::MOST, Self::MOST);
            return output;
        }
        self.integral = 0.0;
        Self::LEAST
    }
}

/// The pauses of one scavenger. Times are nanoseconds of any clock that mostly goes forwards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pacer {
    controller: Controller,
    /// What may be worked now; overdrawn if negative.
    credit: i64,
    /// When it last heard.
    last: u64,
}

impl Default for Pacer {
    fn default() -> Self {
        Self::new()
    }
}

impl Pacer {
    /// With a full account.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            controller: Controller { integral: 0.0 },
            credit: MOST_CREDIT as i64,
            last: 0,
        }
    }

    /// Pays for `trimmed` nanoseconds that stores and magazines were emptied in, before the [`pause`](Self::pause).
    pub fn charge(&mut self, trimmed: u64) {
        let charge = trimmed.min(MOST_TRIM) as i64;
        self.credit = self.credit.saturating_sub(charge).max(-(MOST_WORK as i64));
    }

    /// How long to pause after `worked` nanoseconds of work that end `now`, and in which `granules` granules were
    /// released.
    #[must_use]
    pub fn pause(&mut self, now: u64, worked: u64, granules: usize, hurry: bool) -> u64 {
        let worked = if worked == 0 {
            GRANULE_WORK.saturating_mul(granules as u64)
        } else {
            worked
        }
        .min(MOST_WORK);
        // The work is part of what has passed, though a clock that steps back may not say so.
        let passed = now.saturating_sub(self.last).clamp(worked, LONGEST);
        self.last = now;
        let earned = self
            .credit
            .saturating_add((passed / PARTS) as i64)
            .min(MOST_CREDIT as i64);
        self.credit = earned.saturating_sub(worked as i64).max(-(MOST_WORK as i64));
        let overdrawn = u64::try_from(self.credit.saturating_neg()).unwrap_or(0);
        let debt = overdrawn.saturating_mul(PARTS);
        if worked == 0 {
            return debt;
        }
        let ratio = self
            .controller
            .next(worked as f64 / passed as f64, SHARE, passed as f64);
        if self.credit >= 0 && hurry {
            return worked * HURRIED_PAUSE;
        }
        // Not negative, and cut off at the top where it would not fit.
        let steady = (worked as f64 / ratio) as u64;
        steady.min(LONGEST).max(debt)
    }
}
