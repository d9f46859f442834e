//! How much to keep: what the program needed recently plus a tenth; once it is silent, nothing.
//!
//! ```text
//!   pages  ▲      peak of the last 10 s ┄┄┄┄┄┐ + 10 %
//!          │   ╱╲      ╱╲       ╱╲           └┄┄┄┄ what the heap may hold
//!          │  ╱  ╲    ╱  ╲     ╱  ╲
//!          │ ╱    ╲__╱    ╲___╱    ╲________  live        silent for 1 s: the live pages and no more
//!          └──────────────────────────────────▶ time
//! ```
//!
//! The whole rule, for anyone who wants to predict it: **while a program allocates or frees pages, its heap keeps as
//! much memory as it needed at any time in the last ten seconds, plus a tenth; the excess goes back, at 1 % of one
//! processor. When no page has been allocated or freed for a second, the threads' caches are emptied, and if they are
//! not missed in the next quarter of a second, all free memory goes back, within another half second.** It follows
//! that:
//!
//! - A load that rises and falls faster than once in ten seconds costs no page faults, as long as something happens
//!   between its peaks, even if only in caches.
//! - A load that sleeps for two seconds or more in between pays for its peak each time.
//! - A program that sleeps holds nothing it does not use.
//!
//! Worked example: a program drops a heap of 480 MiB at t = 0 and then waits for its next request. At 1.0 to 1.25 s
//! four looks in a row have found everything unchanged, and caches are emptied. A quarter of a second later no thread
//! has refilled its cache; at 1.75 s the heap is down to what is live. Had the program gone on working, the 480 MiB
//! (528 at most) would have stayed until t = 10 s.
//!
//! What was needed between two looks is not observed directly, but by what it leaves behind: if there is more memory
//! behind the pages than the last look and the releases since have left, so much more was needed. If that comes to a
//! tenth of what is free while the excess goes, all of it was. So a load that swings faster than the looks pays for the
//! part they miss once in ten seconds at most, and one that grows slowly does not keep what it has free: if it takes
//! 1 MiB a second and 1 GiB is free, that goes. A load that swings so fast is not silent either: a run across words
//! counts a pass through the turnstile, and a cache its refills. One that consists of nothing but runs within words,
//! past all caches and back before each look, is noticed only by the memory it takes again: once in one to two seconds
//! it pays for that.
//!
//! Silence requires both the clock *and* the number of looks: a jumping clock alone does not cause it.

#![forbid(unsafe_code)]

/// Nanoseconds between two looks at the heap, or more if it is large.
pub const PERIOD: u64 = 250_000_000;
/// How long nothing may happen before a program counts as silent.
const SILENCE: u64 = 1_000_000_000;
/// How many looks must agree on that.
const LOOKS: u32 = 4;
/// How long a peak counts, in slots of one generation each.
const PEAKS: usize = 10;
/// A generation, in nanoseconds.
const GENERATION: u64 = 1_000_000_000;
/// What is kept above the peak: a tenth.
const ABOVE: usize = 10;

/// What past looks have seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// The most pages live, by generation, modulo [`PEAKS`].
    peaks: [usize; PEAKS],
    generation: u64,
    /// A print of what is seen to change when pages are allocated or freed.
    print: u64,
    quiet_since: u64,
    quiet_looks: u32,
    last: u64,
}

/// The result of one look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advice {
    /// How many pages may have memory behind them.
    pub keep: usize,
    /// No page has been allocated or freed for a second.
    pub silent: bool,
}

impl Retention {
    /// Nothing seen yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            peaks: [0; PEAKS],
            generation: 0,
            print: 0,
            quiet_since: 0,
            quiet_looks: 0,
            last: 0,
        }
    }

    /// Whether it is time for another look, `apart` nanoseconds after the last one. Also true if the clock went back.
    #[must_use]
    pub fn is_due(&self, now: u64, apart: u64) -> bool {
        now < self.last || now - self.last >= apart || self.last == 0
    }

    /// Whether the last look found what the one before it had found.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.quiet_looks > 0
    }

    /// Whether a look at this time is the first of its generation.
    #[must_use]
    pub fn turns(&self, now: u64) -> bool {
        now / GENERATION != self.generation
    }

    /// Records a look: `live` pages are in use `now`, `needed` were since the last look, and `print` changes when pages
    /// are seen to be allocated or freed. That more were needed than are in use shows that some were.
    pub fn look(&mut self, now: u64, live: usize, needed: usize, print: u64) -> Advice {
        if print != self.print || needed > live || now < self.last {
            (self.quiet_since, self.quiet_looks) = (now, 0);
        } else {
            self.quiet_looks = self.quiet_looks.saturating_add(1);
        }
        (self.print, self.last) = (print, now);
        self.turn(now / GENERATION);
        let slot = &mut self.peaks[(self.generation % PEAKS as u64) as usize];
        *slot = needed.max(live).max(*slot);
        let silent = self.quiet_looks >= LOOKS && now - self.quiet_since >= SILENCE;
        let peak = self.peaks.iter().fold(needed.max(live), |peak, &seen| peak.max(seen));
        Advice {
            keep: if silent {
                live
            } else {
                peak.saturating_add(peak / ABOVE)
            },
            silent,
        }
    }

    /// Adopts a print that the scavenger itself has changed: that is no sign of activity.
    pub fn overlook(&mut self, print: u64) {
        self.print = print;
    }

    /// Moves on to a generation: those skipped had no peak.
    fn turn(&mut self, generation: u64) {
        let passed = generation.saturating_sub(self.generation).min(PEAKS as u64);
        // Backwards: nothing is forgotten.
        for step in 1..=passed {
            self.peaks[((generation - passed + step) % PEAKS as u64) as usize] = 0;
        }
        self.generation = generation;
    }
}
