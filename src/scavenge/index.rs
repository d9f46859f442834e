//! What is known of each chunk: how full it is, how long it has not filled up, whether there is anything left in it.
//!
//! ```text
//!    63        35  34   33    30 29     20 19     10 9       0
//!   ┌────────────┬────┬────────┬─────────┬─────────┬─────────┐
//!   │ print      │done│  age   │ before  │  peak   │ in use  │        one u64 a chunk
//!   └────────────┴────┴────────┴─────────┴─────────┴─────────┘
//! ```
//!
//! The paths that allocate keep no account of this: whoever scavenges looks at the bits anyway, four times a second,
//! and writes down what it saw. A **generation** is a second.
//!
//! * A chunk that is **dense**, 31/32 of it in use now or at any time since the generation before, is left whole: the
//!   few pages it would yield are worth less than the huge page they would cost.
//! * A chunk that has **filled up** in this generation is being used, and left alone too.
//! * A chunk in which nothing was left to release is **done** until its bits change (the print tells), or the program
//!   has been at work and falls silent again: of what was let go lazily, bits do not tell all.
//!
//! Worked: a chunk of 512 pages with 496 in use is dense. 100 are freed; it stays dense for what is left of this
//! generation and the next, and is a candidate after that, one to two seconds later.
//!
//! The rules are those of Go's `scavengeIndex`; that one is kept by every allocation, this one by looking.

#![forbid(unsafe_code)]

const COUNT_BITS: u32 = 10;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
const AGE_SHIFT: u32 = 3 * COUNT_BITS;
const MOST_AGE: u64 = 15;
const DONE_SHIFT: u32 = AGE_SHIFT + 4;
const PRINT_SHIFT: u32 = DONE_SHIFT + 1;

/// A chunk, as it was last seen. All zero: never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunk {
    /// Pages not free.
    pub in_use: usize,
    /// The most of them seen in this generation.
    pub peak: usize,
    /// The most of them in the generation before.
    pub before: usize,
    /// Generations since more came in use; counted to 15.
    pub age: usize,
    /// Nothing was left to release when it was last looked through.
    pub done: bool,
    /// Of its bits, to see that they have changed.
    pub print: u64,
}

impl Chunk {
    /// As it is kept in a table.
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

    /// As it is kept in a table.
    #[must_use]
    pub fn pack(self) -> u64 {
        let count = |pages: usize, index: u32| (pages as u64).min(COUNT) << (index * COUNT_BITS);
        let flags = (self.age as u64).min(MOST_AGE) << AGE_SHIFT | u64::from(self.done) << DONE_SHIFT;
        count(self.in_use, 0) | count(self.peak, 1) | count(self.before, 2) | flags | self.print << PRINT_SHIFT
    }

    /// Seen with `in_use` pages in use, and bits of this print; `turned` if a generation has begun since.
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

    /// Whether it is worth looking through; `pages` are in a chunk. Who is `forced` takes what is there.
    #[must_use]
    pub fn is_ready(self, pages: usize, forced: bool) -> bool {
        let dense = pages - pages / 32;
        !self.done && self.in_use < pages && (forced || self.peak < dense && self.before < dense && self.age > 0)
    }
}
