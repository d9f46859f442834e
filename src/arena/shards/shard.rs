//! One shard: its words, who is inside, and what its owner has in mind.
//!
//! ```text
//!   Shard    busy │ moving │ full, pocket │ loaded │ previous │ retired, offer │ vacant  one cache line, one between
//!   Pocket              slot, node, memory                                               the owner's alone
//! ```
//!
//! *The pocket* is one slot that is free, and that the owner still knows by heart: its node, its address. Who frees a
//! slot and allocates the next gets it as it was. By a batch he would go from the address to the number, through the
//! words of the batch, and from the number back to the address, each step waiting for the one before: 7 ns for both
//! instead of 3. Whether the pocket is full and of which slot is in the shard, so that whoever gathers finds it; what
//! the owner knows besides is his, and stays true: a slot's place does not change.
//!
//! Worked: slot 7 is freed: pocket 7, full 1. Somebody gathers: full 0, and 7 goes to the depot, and to another thread,
//! who gives it to the owner by hand. He frees it: its address is the one he has in mind, its node says that it is
//! allocated: full 1.

#![forbid(unsafe_code)]

use core::cell::Cell;

use crate::arena::node::Node;
use crate::arena::stack::NIL;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// What one owner holds, or those who meet in a lane.
#[derive(Debug)]
pub struct Shard {
    /// 1 while somebody is inside.
    pub(super) busy: AtomicU32,
    /// Odd while he inside carries slots that are seen nowhere, or changes more than one word.
    moving: AtomicU32,
    /// 1 while there is a free slot in the pocket; and which slot that is, or was last.
    pub(super) full: AtomicU32,
    pub(super) pocket: AtomicU32,
    /// Chains of free slots: how many, the first.
    pub(super) loaded: AtomicU64,
    pub(super) previous: AtomicU64,
    /// A chain of retired ones, and the oldest of their births.
    pub(super) retired: AtomicU64,
    pub(super) oldest: AtomicU64,
    /// How many these must be before they are offered to Hyaline again, which has refused them.
    pub(super) offer: AtomicU32,
    /// Not lent: the next such shard, plus one.
    pub(super) vacant: AtomicU32,
}

impl Shard {
    /// A shard with nothing in it, as zeroed memory has it.
    #[must_use]
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            busy: AtomicU32::new(0),
            moving: AtomicU32::new(0),
            full: AtomicU32::new(0),
            pocket: AtomicU32::new(NIL),
            loaded: zero(),
            previous: zero(),
            retired: zero(),
            oldest: zero(),
            offer: AtomicU32::new(0),
            vacant: AtomicU32::new(0),
        }
    }

    /// As new, with nobody else about.
    pub(super) fn clear(&self) {
        // Relaxed, throughout: nobody else is here.
        for word in [
            &self.busy,
            &self.moving,
            &self.full,
            &self.pocket,
            &self.vacant,
            &self.offer,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&self.loaded, &self.previous, &self.retired, &self.oldest] {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Slots that whoever gathers has to wait for, if somebody is inside: not less than there are, at one moment.
    pub(super) fn held(&self) -> u64 {
        // Acquire, throughout: what `Move` stores is released, so who sees any of it sees that something is under way;
        // and that it is over, only with all of it.
        let before = self.moving.load(Ordering::Acquire);
        let pocket = u64::from(self.full.load(Ordering::Acquire));
        let counts = [&self.loaded, &self.previous, &self.retired].map(|word| word.load(Ordering::Acquire) >> 32);
        let still = before == self.moving.load(Ordering::Acquire) && before.is_multiple_of(2);
        pocket + counts.iter().sum::<u64>() + u64::from(!still)
    }

    /// Something is under way in more than one place, until this is dropped. The caller is inside.
    pub(super) fn under_way(&self) -> Move<'_> {
        // Relaxed, twice: our own word; every store that follows is released, and so is every exchange.
        let before = self.moving.load(Ordering::Relaxed);
        self.moving.store(before.wrapping_add(1), Ordering::Relaxed);
        Move { shard: self }
    }
}

/// What an owner remembers of the slot that is in his shard's pocket, or was last: its number, its node, and where its
/// memory is. It stays with the shard.
#[derive(Debug)]
pub struct Pocket<'n> {
    pub(super) slot: Cell<u32>,
    pub(super) node: Cell<Option<&'n Node>>,
    pub(super) memory: Cell<*mut u8>,
}

impl Pocket<'_> {
    /// Of a shard whose pocket is empty.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            slot: Cell::new(NIL),
            node: Cell::new(None),
            memory: Cell::new(core::ptr::null_mut()),
        }
    }
}

impl Default for Pocket<'_> {
    fn default() -> Self {
        Self::new()
    }
}

/// A slot that was allocated: its number, and where its memory is, if it came out of a pocket.
pub type Taken = (u32, *mut u8);

/// One who carries slots about; see [`Shard::held`].
pub(super) struct Move<'s> {
    shard: &'s Shard,
}

impl Move<'_> {
    pub(super) fn store(&self, word: &AtomicU64, chain: u64) {
        // Release: who sees this sees that something is under way.
        word.store(chain, Ordering::Release);
    }
}

impl Drop for Move<'_> {
    fn drop(&mut self) {
        // Relaxed: our own word. Release: who sees that it is over sees what came of it.
        let before = self.shard.moving.load(Ordering::Relaxed);
        self.shard.moving.store(before.wrapping_add(1), Ordering::Release);
    }
}

impl Default for Shard {
    fn default() -> Self {
        Self::new()
    }
}

#[inline(always)]
pub(super) fn pack(first: u32, count: u32) -> u64 {
    u64::from(count) << 32 | u64::from(first)
}

#[inline(always)]
pub(super) fn unpack(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// One who is inside a shard. Dropping it is leaving.
pub(super) struct Section<'s> {
    pub(super) shard: &'s Shard,
}

impl<'s> Section<'s> {
    /// Of who has just said that he is inside.
    #[inline(always)]
    pub(super) fn of(shard: &'s Shard) -> Self {
        Self { shard }
    }
}

impl Drop for Section<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: hands the shard to whoever gathers, or comes next in a lane.
        self.shard.busy.store(0, Ordering::Release);
    }
}
