//! How fast to scavenge: one hundredth of one processor, and a little more in a hurry.
//!
//! ```text
//!   work a quantum (1 ms) ─▶ pause ─▶ work ─▶ pause …          pause = work / ratio
//!                              ▲
//!        share of time worked ─┴─ PI controller ─▶ ratio       towards 1 %, whatever sleeping really costs
//! ```
//!
//! Two mechanisms limit the work. A **PI controller** (as in Go's scavenger, with its constants) chooses pauses such
//! that the share of time worked comes to 1 %, even on systems whose sleeps are too long or too short. An **account**
//! makes this a guarantee: it earns 1 % of elapsed time, holds 250 ms at most, and pays for the work. An overdraft is
//! slept off in full. So in any interval of length T the work is at most T / 100 + 250 ms, plus a quantum and a look.
//!
//! **Trimming** empties stores and magazines in one go. It is paid from the account too, but causes no pause of its own
//! while the account holds anything, and counts as 25 ms at most. Full stores (32 MiB) of blocks of 100 bytes take 7
//! ms; if one trim could empty the account, what it brought back would remain resident for seconds. A trim that takes
//! longer than 25 ms, in a build that is not optimised or with hundreds of threads, therefore adds the difference to
//! the bound above.
//!
//! **Looks** at the whole heap take as long as it is large: milliseconds if it has grown to hundreds of GiB. They are
//! paid from the account, and cause no pause of their own either: the next look comes later instead, so that looks take
//! half of the share at most, and the controller aims at the rest. (When they caused pauses, a look that took more than
//! 2.5 ms was followed by a pause after which the next look was due, and nearly nothing was released: 64 MiB in a heap
//! of 1 TiB took 420 s. And a single look made the controller pause for ten seconds.) While nothing is seen to change,
//! looks may come more often, as long as half of what the account can hold is left for the releasing: of those that a
//! silent program is noticed by, only the first is late. Worked example: a look of 4 ms is followed by the next one
//! after 0.8 s, and if that sees nothing new by others after 0.25 s each.
//!
//! **Hurry** is for a program that has fallen silent: while the account holds anything, the scavenger may use half of
//! one processor. Worked example: 480 MiB in whole huge pages are 16 to 60 ms of work, paid from the account, done
//! within an eighth of a second. On a slow machine with busy neighbours they took 170 to 250 ms; when the account held
//! 100 ms and a hurry was a fifth of a processor, up to 178 MiB were still resident after two seconds.
//!
//! Clocks may be coarse (work that took no time is estimated from its pages), stand still, or jump: time that goes
//! backwards counts as none, a jump forwards as ten seconds at most.

#![forbid(unsafe_code)]

/// Nanoseconds in a millisecond.
const MILLISECOND: u64 = 1_000_000;
/// The share of one processor.
const SHARE: f64 = 0.01;
/// Its reciprocal, for the account.
const PARTS: u64 = 100;
/// The most the account holds, in nanoseconds of work.
const MOST_CREDIT: u64 = 250 * MILLISECOND;
/// In a hurry: the pause is this many times the work.
const HURRIED_PAUSE: u64 = 1;
/// The most one trim is charged.
const MOST_TRIM: u64 = 25 * MILLISECOND;
/// The reciprocal of the share of one processor that looks may take, if they are frequent: half of what there is.
const LOOK_PARTS: u64 = 2 * PARTS;
/// The longest time that counts as elapsed between two quanta.
const LONGEST: u64 = 10_000 * MILLISECOND;
/// The most work, and the most debt, that counts: a second.
const MOST_WORK: u64 = 1_000 * MILLISECOND;
/// What releasing a granule of the system costs if the clock does not show it: Go's figure.
const GRANULE_WORK: u64 = 10_000;

/// The length of one quantum of work, in nanoseconds.
pub const QUANTUM: u64 = MILLISECOND;

/// A proportional-integral controller with limits, and without windup at them.
///
/// Its input is the share worked; its output is how much work a pause of one second pays for. Its whole state is one
/// number.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Controller {
    integral: f64,
}

impl Controller {
    /// Proportional gain.
    const GAIN: f64 = 0.3375;
    /// How long an error must last to count once more, in nanoseconds.
    const INTEGRAL_TIME: f64 = 3.2e6;
    /// How fast the excess beyond the limits is forgotten, in nanoseconds.
    const RESET_TIME: f64 = 1e9;
    /// The least output, also used if none can be computed.
    pub const LEAST: f64 = 0.001;
    /// The greatest output.
    pub const MOST: f64 = 1000.0;

    /// The output after `period` nanoseconds in which the input was `input` and should have been `wanted`. Always a
    /// number from [`LEAST`](Self::LEAST) to [`MOST`](Self::MOST); after an overflow the controller restarts from the
    /// least.
    #[must_use]
    pub fn next(&mut self, input: f64, wanted: f64, period: f64) -> f64 {
        let error = wanted - input;
        let raw = Self::GAIN * error + self.integral;
        let output = raw.clamp(Self::LEAST, Self::MOST);
        self.integral += Self::GAIN * period / Self::INTEGRAL_TIME * error + period / Self::RESET_TIME * (output - raw);
        if output.is_finite() && self.integral.is_finite() {
            // Bounded, so that recovery is quick whatever the input was.
            self.integral = self.integral.clamp(-Self::MOST, Self::MOST);
            return output;
        }
        self.integral = 0.0;
        Self::LEAST
    }
}

/// The pauses of one scavenger. Times are nanoseconds of any clock that mostly moves forwards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pacer {
    controller: Controller,
    /// How much may be worked now; overdrawn if negative.
    credit: i64,
    /// When `pause` was last called.
    last: u64,
    /// How long to wait between two looks that find something new: by the shorter of the last two.
    apart: u64,
    /// What the last look took.
    before: u64,
    /// The share of one processor that such looks take.
    looking: f64,
}

impl Default for Pacer {
    fn default() -> Self {
        Self::new()
    }
}

impl Pacer {
    /// A pacer with a full account.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            controller: Controller { integral: 0.0 },
            credit: MOST_CREDIT as i64,
            last: 0,
            before: 0,
            apart: 0,
            looking: 0.0,
        }
    }

    /// Pays for a look that took `worked` nanoseconds, before the [`pause`](Self::pause). There is one each `period`
    /// nanoseconds at most.
    pub fn looked(&mut self, worked: u64, period: u64) {
        let worked = worked.min(MOST_WORK);
        // One that was held up, by a clock that counts that as work, says nothing of the next.
        let usual = worked.min(core::mem::replace(&mut self.before, worked));
        self.apart = period.max(usual * LOOK_PARTS);
        self.looking = usual as f64 / self.apart.max(1) as f64;
        self.pay(worked);
    }

    /// How long to wait between two looks, at least `period` nanoseconds; `quiet` if the last one saw nothing new.
    #[must_use]
    pub fn between_looks(&self, period: u64, quiet: bool) -> u64 {
        if quiet && self.credit >= MOST_CREDIT as i64 / 2 {
            period
        } else {
            period.max(self.apart)
        }
    }

    /// Pays for `trimmed` nanoseconds of emptying stores and magazines, before the [`pause`](Self::pause).
    pub fn charge(&mut self, trimmed: u64) {
        self.pay(trimmed.min(MOST_TRIM));
    }

    fn pay(&mut self, worked: u64) {
        self.credit = self.credit.saturating_sub(worked as i64).max(-(MOST_WORK as i64));
    }

    /// How long to pause after `worked` nanoseconds of releasing that ended at `now` and released `granules` granules.
    #[must_use]
    pub fn pause(&mut self, now: u64, worked: u64, granules: usize, hurry: bool) -> u64 {
        let worked = if worked == 0 {
            GRANULE_WORK.saturating_mul(granules as u64)
        } else {
            worked
        }
        .min(MOST_WORK);
        // The work is part of the elapsed time, even if a clock that steps back does not show it.
        let passed = now.saturating_sub(self.last).clamp(worked, LONGEST);
        self.last = now;
        let earned = self
            .credit
            .saturating_add((passed / PARTS) as i64)
            .min(MOST_CREDIT as i64);
        self.credit = earned.saturating_sub(worked as i64).max(-(MOST_WORK as i64));
        let overdrawn = u64::try_from(self.credit.saturating_neg()).unwrap_or(0);
        let debt = overdrawn.saturating_mul(PARTS);
        // A clock that stands still tells the controller nothing.
        let share = worked as f64 / passed.max(1) as f64;
        let ratio = self.controller.next(share, SHARE - self.looking, passed as f64);
        if worked == 0 {
            return debt;
        }
        if self.credit >= 0 && hurry {
            return worked * HURRIED_PAUSE;
        }
        // Not negative, and cut off at the top if it would not fit.
        let steady = (worked as f64 / ratio) as u64;
        steady.min(LONGEST).max(debt)
    }
}
