//! Zeroing large blocks that are not known to be zero.
//!
//! ```text
//!   pages never had, or given back: all, or all up to the end ─────────▶ zero already
//!   before them, less than 1 MiB ──────────────────────────────────────▶ written
//!   more ── the source knows what is not zero, and that is little ─────▶ that is written
//!             │ no, or it was in vain lately
//!             ├─ less than 32 MiB ─────────────────────────────────────▶ written
//!             └─ more ── given back to the source ─────────────────────▶ zero, and fresh
//! ```
//!
//! A program that asks for much zeroed memory often touches only part of it: a table with few entries, an array with
//! gaps. Pages it never touched had no memory behind them when the block was freed, and have none when it is reused.
//! Only the source knows which pages these are, and asking it takes longer than writing a short block.
//!
//! A block for which the heap has grown begins with what was free at the heap's end, and may be used; the rest is new.
//! Only the used part is treated so, as if it were a block by itself: of 16 MiB behind a dropped buffer of 3 MiB, 3 are
//! written, or asked about.
//!
//! **In vain.** A question was in vain if an eighth or more of the block was in use, or the source does not know.
//! After one such answer the next block of that size is written without asking; after two in a row the next three,
//! then seven, and so on up to 4095. So a program with dense blocks pays little: 8 µs for 1 MiB, 60 for 64 (with every
//! eighth page in use, 800), ever more rarely.
//!
//! **A use that becomes sparse.** A block that is written here is dense the next time, whatever the program does with
//! it. So from 255 left out on, such a block is given back to the source instead, and the next one of that size asked
//! about at once: what is in use then, the program has written. To fault a block of 1 MiB in again takes as long as to
//! write 35 of them (Zen 4; each page is read first, which is a fault of its own); hence the doubling, to one block in
//! 4097 in the end. A program that has become sparse is found out after 512 blocks, or as many as it had dense ones
//! before, but no more than 4097.
//!
//! Cost: a load and a store for a block of 1 MiB or more.

#![forbid(unsafe_code)]

use crate::source::Source;
use crate::sync::{AtomicU8, AtomicU16, Ordering};
use crate::units::PageRun;

use super::Objects;

/// Blocks of at least this size are worth a question.
const ASKED_BYTES: usize = 1 << 20;

/// Blocks of at least this size that must be zero get fresh memory from the source instead of being written. The C
/// library does the same from its largest threshold on.
const WIPED_BYTES: usize = 32 << 20;

/// After vain questions, the number left out is at most two to this power, less one.
const MOST_FAILURES: u8 = 12;

/// After this many vain questions in a row a block is given back, and after each that follows.
const FAILURES_BEFORE_FRESH: u8 = 9;

/// Beside the failures: the last block was given back, so that the next question shows what the program has written.
const FRESH: u8 = 1 << 7;

/// How many sizes are told apart, by doublings; the last one covers all larger blocks.
const SIZES: usize = 8;

/// How often asking was in vain, for blocks of each size.
#[derive(Debug)]
pub struct Patience {
    /// The source must never be asked.
    off: bool,
    hopes: [Hope; SIZES],
}

/// For one size. Threads may count concurrently and lose a count: it only says how rarely to ask.
#[derive(Debug)]
struct Hope {
    /// Vain questions in a row, apart from those about a fresh block; and [`FRESH`].
    failures: AtomicU8,
    /// How many questions to leave out before the next.
    waits: AtomicU16,
}

impl Patience {
    /// Nothing has been asked yet; unless `on`, nothing ever is.
    pub fn new(on: bool) -> Self {
        Self {
            off: !on,
            hopes: core::array::from_fn(|_| Hope {
                failures: AtomicU8::new(0),
                waits: AtomicU16::new(0),
            }),
        }
    }

    fn of(&self, bytes: usize) -> &Hope {
        &self.hopes[((bytes / ASKED_BYTES).max(1).ilog2() as usize).min(SIZES - 1)]
    }
}

impl Hope {
    /// Whether asking is worthwhile now.
    fn asks(&self) -> bool {
        // Relaxed, here and below: numbers by themselves.
        let waits = self.waits.load(Ordering::Relaxed);
        self.waits.store(waits.saturating_sub(1), Ordering::Relaxed);
        waits == 0
    }

    /// Records the answer. Returns whether the block is to be given back, so that the next question shows more.
    fn learns(&self, was_sparse: bool) -> bool {
        // Relaxed, here and below: as in `asks`.
        let failures = match self.failures.load(Ordering::Relaxed) {
            _ if was_sparse => 0,
            fresh if fresh & FRESH != 0 => fresh & !FRESH,
            before if before + 1 < FAILURES_BEFORE_FRESH => before + 1,
            before => (before + 1).min(MOST_FAILURES) | FRESH,
        };
        let is_to_be_fresh = failures & FRESH != 0;
        let waits = if is_to_be_fresh { 0 } else { (1 << failures) - 1 };
        self.failures.store(failures, Ordering::Relaxed);
        self.waits.store(waits, Ordering::Relaxed);
        is_to_be_fresh
    }
}

impl<S: Source + 'static> Objects<S> {
    /// Makes a run that the caller holds, for a block of `bytes` bytes or the first of a longer one, read as zero, if
    /// that is cheaper than writing all of it. Returns whether it did; otherwise the contents are arbitrary.
    pub(super) fn clear(&self, run: PageRun, bytes: usize) -> bool {
        if bytes < ASKED_BYTES {
            return false;
        }
        let hope = self.patience.of(bytes);
        if !self.patience.off && hope.asks() {
            let cleared = self.heap.clear(run);
            let is_to_be_fresh = hope.learns(cleared);
            if cleared || is_to_be_fresh && self.heap.wipe(run) {
                return true;
            }
        }
        bytes >= WIPED_BYTES && self.heap.wipe(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_blocks_are_asked_about_ever_more_seldom_and_sparse_ones_always() {
        let patience = Patience::new(true);
        let ask = |bytes, sparse| {
            let hope = patience.of(bytes);
            let asks = hope.asks();
            if asks {
                hope.learns(sparse);
            }
            asks
        };
        let asked = |sparse| (0..1000).filter(|_| ask(ASKED_BYTES, sparse)).count();
        assert_eq!(asked(true), 1000);
        assert_eq!(asked(false), 10, "1, 2, 4 … 256 apart, and 1");
        assert!(ask(2 * ASKED_BYTES, false), "another size is another matter");
        assert!((0..512).any(|_| ask(ASKED_BYTES, true)));
        assert_eq!(asked(true), 1000);
        assert!(
            ask(usize::MAX, true) && ask(ASKED_BYTES, true),
            "all sizes have a place"
        );
    }

    /// What has been written is dense to the next question, unless it is given back first.
    #[test]
    fn a_use_that_has_become_sparse_is_found_out_after_as_many_blocks_as_were_dense() {
        for dense in [1, 10, 100, 500, 511, 512, 513, 1000, 2000, 5000, 10_000, 50_000] {
            let patience = Patience::new(true);
            let hope = patience.of(ASKED_BYTES);
            let mut is_fresh = false;
            let mut use_one = |is_sparse: bool| {
                hope.asks() && {
                    let found = is_sparse && is_fresh;
                    is_fresh = hope.learns(found);
                    found
                }
            };
            (0..dense).for_each(|_| assert!(!use_one(false)));
            let blocks = 1 + (0..10_000).take_while(|_| !use_one(true)).count();
            assert!(
                blocks <= dense.clamp(512, 4096) + 1,
                "after {dense} dense ones: {blocks}"
            );
        }
    }
}
