//! Flags: what is known of each slot of more than 1 KiB, beside the heap.
//!
//! ```text
//!   kibibytes   │   │   │   │   │   │   │   │   │   │   │   │      slots of 2,304 bytes begin at 0, 2.25, 4.5, 6.75, 9
//!   flags       │ 0 │   │ 1 │   │ 3 │   │ 2 │   │   │ 1 │   │      one byte each
//!                 ╰ in use  ╰ free  ╰ roomy ╰ moved once
//! ```
//!
//! Every slot of more than 1 KiB that is not in use, wherever it is, has its flag up: one byte for each kibibyte of the
//! heap, since no two such slots begin in the same kibibyte. So a double free is caught without reading the block's
//! memory, which may be a cache miss; the flags of 64 KiB of blocks share one cache line. A span is born with all flags
//! up. The flag of a slot in use says whether its block has grown (`room.rs`). Smaller slots have marks (`mark.rs`).
//!
//! Cost: 0.1 % of the heap, where there are spans of such slots; a load and a store for a free, a store for an
//! allocation. Two threads whose blocks lie within the same 64 KiB wait for the line that both write to: a pair takes
//! 20 to 30 ns instead of 7 while both are at it (`docs/measurements.md`, "one line of flags").

use crate::sync::{AtomicU8, Ordering, Zeroed};

/// What is known of the slot of more than 1 KiB that begins in this kibibyte. All-zero bytes: no slot begins here, or
/// it is in use by a block that has never moved to grow. Otherwise [`FREE`], [`ROOMY`], or twice the number of such
/// moves.
#[derive(Debug)]
pub struct Flag(AtomicU8);

// SAFETY: an atomic integer, of which a zero byte is zero.
unsafe impl Zeroed for Flag {
    fn zeroed() -> Self {
        Self(AtomicU8::new(0))
    }
}

/// The slot is free.
const FREE: u8 = 1;

/// The slot, or the run that begins here, is in use by a block that may be shorter than it.
const ROOMY: u8 = 3;

/// The bit that these two share with no other value: such a block cannot simply be freed.
const LOOK: u8 = FREE & ROOMY;

/// Moves are counted up to this many.
pub const MOST_MOVES: u8 = 2;

impl Flag {
    /// Marks the slot, which was in use, as free.
    #[inline(always)]
    pub fn raise(&self) {
        self.set(FREE);
    }

    /// Marks the slot, which was free, as in use.
    #[inline(always)]
    pub fn lower(&self) {
        self.set(0);
    }

    /// Marks what begins here as in use by a block that may be shorter.
    #[inline(always)]
    pub fn make_roomy(&self) {
        self.set(ROOMY);
    }

    /// Notes that the block has moved there to grow, and `before` times earlier.
    #[inline(always)]
    pub fn note_move(&self, before: u8) {
        self.set(2 * (before + 1).min(MOST_MOVES));
    }

    /// Whether the slot is neither free nor roomy.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.get() & LOOK == 0
    }

    /// Whether a block lies here that may be shorter.
    #[inline(always)]
    pub fn is_roomy(&self) -> bool {
        self.get() == ROOMY
    }

    /// How often the block has moved to grow. A roomy one counts as having moved often.
    #[inline(always)]
    pub fn moves(&self) -> u8 {
        match self.get() {
            ROOMY => MOST_MOVES,
            value => value / 2,
        }
    }

    #[inline(always)]
    fn set(&self, value: u8) {
        // Relaxed: the caller owns the slot, and hands the flag over with it.
        self.0.store(value, Ordering::Relaxed);
    }

    #[inline(always)]
    fn get(&self) -> u8 {
        // Relaxed: as in `set`.
        self.0.load(Ordering::Relaxed)
    }
}
