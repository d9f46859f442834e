//! Shapes: what a shut rack says of itself, in the word at its floor.
//!
//! ```text
//!   bits    │ 20     │ 19 … 10 │ 9 … 0 │
//!           │ seized │ raised  │ room  │      room 6, 14, 30, … 510: the lowest three bits are 110, those of no slot
//! ```
//!
//! A magazine has no space for this, and a rack that accepts no slots has a word to spare: the last of its head, or an
//! entry that a seizer has emptied (`magazine.rs`). A user that ends in the middle of a call may leave a slot's address
//! there instead, so what is read is checked first.
//!
//! Worked: a rack for 30 slots, from which a seizer took 7, has the shape 1 << 20 | 7 << 10 | 30, seven entries up.
//!
//! Cost: a store when a rack is shut, a load when it is opened.

#![forbid(unsafe_code)]

use super::size_class::BATCH_SLOTS;

/// The word at the floor of a shut rack: its room, how many entries the floor has been raised, and whether by a seizer.
#[derive(Clone, Copy)]
pub struct Shape(usize);

impl Shape {
    const BITS: u32 = 10;
    const MASK: usize = (1 << Self::BITS) - 1;
    const SEIZED: usize = 1 << (2 * Self::BITS);

    /// What the word says, if it [is a shape](Self::is_valid).
    pub const fn from_word(word: usize) -> Self {
        Self(word)
    }

    /// As it is stored.
    pub const fn word(self) -> usize {
        self.0
    }

    /// Of a rack that its user shuts.
    pub const fn shut(room: u32) -> Self {
        Self(room as usize)
    }

    /// Of one that a seizer has emptied, and whose floor it has raised by so many entries in all.
    pub const fn seized(room: u32, raised: usize) -> Self {
        Self(room as usize | raised << Self::BITS | Self::SEIZED)
    }

    /// How many slots it has room for, from its beginning.
    pub const fn room(self) -> u32 {
        (self.0 & Self::MASK) as u32
    }

    /// How many entries its floor has been raised.
    pub const fn raised(self) -> usize {
        (self.0 >> Self::BITS) & Self::MASK
    }

    /// Whether a seizer was here last.
    pub const fn is_seized(self) -> bool {
        self.0 & Self::SEIZED != 0
    }

    /// Whether it is one, and no slot's address: a rack has room for two less than a multiple of eight.
    pub const fn is_valid(self) -> bool {
        self.0 % 8 == 6
    }
}

// A batch has no more slots.
const _: () = assert!(BATCH_SLOTS[2] <= Shape::MASK);
