//! What is known about each chunk: how full it is, since when it has not become fuller, whether anything is left in it.
//!
//! ```text
//!    63        35  34   33    30 29     20 19     10 9       0
//!   ┌────────────┬────┬────────┬─────────┬─────────┬─────────┐
//!   │ print      │done│  age   │ before  │  peak   │ in use  │        one u64 a chunk
//!   └────────────┴────┴────────┴─────────┴─────────┴─────────┘
//! ```
//!
//! The allocation paths do not maintain this: the scavenger reads the bits anyway, four times a second, and records
//! what it sees. A **generation** is a second.
//!
//! * A chunk is **dense** if 31/32 of it is in use now or was at any time since the previous generation. It is left
//!   whole: the few pages it would yield are worth less than the huge page they would cost.
//! * A chunk that has **filled up** in this generation is being used, and is left alone too.
//! * A chunk in which nothing was left to release, or of which every free page has been, is **done** until its bits
//!   change (the print shows that), or the program has been active and falls silent again: for lazily released pages
//!   the bits do not tell everything.
//!
//! Worked example: a chunk of 512 pages with 496 in use is dense. 100 are freed; it stays dense for the rest of this
//! generation and the next, and is a candidate after that, one to two seconds later.
//!
//! The rules are those of Go's `scavengeIndex`; Go updates it on every allocation, this crate by looking.

#![forbid(unsafe_code)]

const COUNT_BITS: u32 = 10;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
const AGE_SHIFT: u32 = 3 * COUNT_BITS;
const MOST_AGE: u64 = 15;
const DONE_SHIFT: u32 = AGE_SHIFT + 4;
const PRINT_SHIFT: u32 = DONE_SHIFT + 1;

/// A chunk as it was last seen. All zero: never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunk {
    /// Pages not free.
    pub in_use: usize,
    /// The maximum of `in_use` in this generation.
    pub peak: usize,
    /// The maximum of `in_use` in the previous generation.
    pub before: usize,
    /// Generations since `in_use` last increased; counted up to 15.
    pub age: usize,
    /// Nothing was left to release when it was last examined, or looked at.
    pub done: bool,
    /// A print of its bits, to detect changes.
    pub print: u64,
}

impl Chunk {
    /// From the packed form in the table.
    #[must_use]
    pub fn unpack(bits: u64) -> Self {
        let count = |index: u32| (bits >> (index * COUNT_BITS) & COUNT) as usize;
        Self {
            in_use: count(0),
            peak: count(1),
            before: count(2),
            age: (bits >> AGE_SHIFT & MOST_AGE) as usize,
            done: bits >> DONE_SHIFT & 1 == 1,
            print: bits >> PRINT_SHIFT,
        }
    }

    /// To the packed form in the table.
    #[must_use]
    pub fn pack(self) -> u64 {
        let count = |pages: usize, index: u32| (pages as u64).min(COUNT) << (index * COUNT_BITS);
        let flags = (self.age as u64).min(MOST_AGE) << AGE_SHIFT | u64::from(self.done) << DONE_SHIFT;
        count(self.in_use, 0) | count(self.peak, 1) | count(self.before, 2) | flags | self.print << PRINT_SHIFT
    }

    /// Updates what is known: `in_use` pages are in use, the bits have this print; `turned` if a new generation has
    /// begun.
    #[must_use]
    pub fn seen(self, in_use: usize, print: u64, turned: bool) -> Self {
        let print = print >> PRINT_SHIFT;
        let (mut peak, mut before, mut age) = (self.peak, self.before, self.age);
        if turned {
            (before, peak, age) = (peak, 0, (age + 1).min(MOST_AGE as usize));
        }
        if in_use > self.in_use {
            age = 0;
        }
        Self {
            in_use,
            peak: peak.max(in_use),
            before,
            age,
            done: self.done && print == self.print,
            print,
        }
    }

    /// Updates what is known after the chunk was examined: whether it is `done`, and whether that has `changed` its
    /// bits.
    ///
    /// If so, it is done until it is next seen: there is no print of the bits as they are now, and the program may
    /// bring about those of before by having the same pages again.
    #[must_use]
    pub fn examined(self, done: bool, changed: bool) -> Self {
        // That of a chunk without a free page, which was not examined.
        let print = if changed { 0 } else { self.print };
        Self { done, print, ..self }
    }

    /// Whether the chunk is worth examining; `pages` is the number of pages in a chunk. `forced` takes whatever is
    /// there.
    #[must_use]
    pub fn is_ready(self, pages: usize, forced: bool) -> bool {
        let dense = pages - pages / 32;
        !self.done && self.in_use < pages && (forced || self.peak < dense && self.before < dense && self.age > 0)
    }
}
