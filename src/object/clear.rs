//! Large blocks that are to be zero, and are not known to be.
//!
//! ```text
//!   pages never had, or given back ────────────────────────────────────▶ zero already
//!   less than 1 MiB ───────────────────────────────────────────────────▶ written
//!   more ── the source knows what is not zero, and that is little ─────▶ that is written
//!             │ no, or it was in vain lately
//!             ├─ less than 32 MiB ─────────────────────────────────────▶ written
//!             └─ more ── given back to the source ─────────────────────▶ zero, and fresh
//! ```
//!
//! Who wants much zeroed memory often touches a part of it: a table with few entries, an array with gaps. The pages
//! that he has left alone had nothing behind them when the block was freed, and have nothing when it is taken again;
//! only the source knows which they are, and asking it takes longer than a short block takes to be written.
//!
//! **In vain** it is where an eighth of a block or more was used, or nobody knows. Behind the first such answer one
//! block of that size is written without a question, behind the second in a row three, then seven, and at last 63. So
//! who asks for dense blocks pays little for one in 64 of them (8 µs for 1 MiB, 60 for 64; where every eighth page was
//! used, 800), and one that changes its ways is found out.
//!
//! Cost: a load and a store for a block of 1 MiB or more.

#![forbid(unsafe_code)]

use crate::source::Source;
use crate::sync::{AtomicU8, Ordering};
use crate::units::PageRun;

use super::Objects;

/// Blocks from here on are worth a question.
const ASKED_BYTES: usize = 1 << 20;

/// Blocks from here on that are to be zero get fresh memory from the source instead of being written to. As the C
/// library does from its largest threshold on.
const WIPED_BYTES: usize = 32 << 20;

/// Questions left out behind one in vain are up to two to this many, less one.
const MOST_FAILURES: u8 = 6;

/// Sizes told apart: by doublings, the last are one.
const SIZES: usize = 8;

/// How often asking was in vain, for blocks of each size.
#[derive(Debug)]
pub struct Patience {
    /// Nobody is to be asked.
    off: bool,
    hopes: [Hope; SIZES],
}

/// For one size. Several threads may count at once, and a count be lost: it says how seldom to ask, and no more.
#[derive(Debug)]
struct Hope {
    /// How often in a row.
    failures: AtomicU8,
    /// How many questions are left out before the next.
    waits: AtomicU8,
}

impl Patience {
    /// Nobody has asked yet; unless it is `on`, nobody will.
    pub fn new(on: bool) -> Self {
        Self {
            off: !on,
            hopes: core::array::from_fn(|_| Hope {
                failures: AtomicU8::new(0),
                waits: AtomicU8::new(0),
            }),
        }
    }

    fn of(&self, bytes: usize) -> &Hope {
        &self.hopes[((bytes / ASKED_BYTES).max(1).ilog2() as usize).min(SIZES - 1)]
    }
}

impl Hope {
    /// Whether it is worth a question now.
    fn asks(&self) -> bool {
        // Relaxed, here and below: numbers by themselves.
        let waits = self.waits.load(Ordering::Relaxed);
        self.waits.store(waits.saturating_sub(1), Ordering::Relaxed);
        waits == 0
    }

    /// What came of it.
    fn learns(&self, was_sparse: bool) {
        let failures = if was_sparse {
            0
        } else {
            // Relaxed, here and below: as in `asks`.
            (self.failures.load(Ordering::Relaxed) + 1).min(MOST_FAILURES)
        };
        self.failures.store(failures, Ordering::Relaxed);
        self.waits.store((1 << failures) - 1, Ordering::Relaxed);
    }
}

impl<S: Source + 'static> Objects<S> {
    /// Makes a run that the caller holds, for a block of so many bytes, read as zero, if that takes less than writing
    /// to all of it. Whether it did; else it reads as anything.
    pub(super) fn clear(&self, run: PageRun, bytes: usize) -> bool {
        if bytes < ASKED_BYTES {
            return false;
        }
        let hope = self.patience.of(bytes);
        if !self.patience.off && hope.asks() {
            let cleared = self.heap.clear(run);
            hope.learns(cleared);
            if cleared {
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
        assert_eq!(asked(false), 20, "1, 2, 4, 8, 16, 32 apart, and 64 from there on");
        assert!(ask(2 * ASKED_BYTES, false), "another size is another matter");
        let wait = (0..64).position(|_| ask(ASKED_BYTES, true));
        assert!(wait.is_some(), "who changes his ways is found out");
        assert_eq!(asked(true), 1000);
        assert!(
            ask(usize::MAX, true) && ask(ASKED_BYTES, true),
            "all sizes have a place"
        );
    }
}
