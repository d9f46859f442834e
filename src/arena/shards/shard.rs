//! One shard: its words, the section inside it, and what its owner remembers.
//!
//! ```text
//!   Shard    busy │ moving │ full, pocket │ loaded │ previous │ retired, offer │ vacant  one cache line, one between
//!   Pocket              slot, node, memory                                               the owner's alone
//! ```
//!
//! *The pocket* is one free slot whose node and address the owner still remembers. A free followed by an allocation
//! returns it as it was. Through a batch, the owner would go from the address to the number, through the words of the
//! batch, and from the number back to the address, each step waiting for the one before: 7 ns for both instead of 3.
//! The shard records whether the pocket is full and of which slot, so that a gatherer finds it. What the owner
//! remembers besides is private, and stays true, because a slot does not move.
//!
//! Worked: slot 7 is freed: pocket 7, full 1. Another thread gathers: full 0, and 7 goes to the depot and then to a
//! thread that passes it to the owner. The owner frees it: its address is the one it remembers, and its node says that
//! it is allocated: full 1.

#![forbid(unsafe_code)]

use core::cell::Cell;

use crate::arena::node::Node;
use crate::arena::stack::NIL;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// What one owner holds, or what the threads that share a lane hold.
#[derive(Debug)]
pub struct Shard {
    /// 1 while a thread is inside.
    pub(super) busy: AtomicU32,
    /// Odd while the thread inside carries slots that are visible nowhere, or changes more than one word.
    moving: AtomicU32,
    /// 1 while a free slot is in the pocket; and which slot that is, or was last.
    pub(super) full: AtomicU32,
    pub(super) pocket: AtomicU32,
    /// Chains of free slots: their number, and the first.
    pub(super) loaded: AtomicU64,
    pub(super) previous: AtomicU64,
    /// A chain of retired slots, and the oldest of their births.
    pub(super) retired: AtomicU64,
    pub(super) oldest: AtomicU64,
    /// How many retired slots there must be before they are offered again to Hyaline, which has refused them.
    pub(super) offer: AtomicU32,
    /// If not lent: the next such shard, plus one.
    pub(super) vacant: AtomicU32,
}

impl Shard {
    /// An empty shard; equal to zeroed memory.
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

    /// Makes the shard as new. Nobody else uses it.
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

    /// How many slots a gatherer has to wait for if a thread is inside: never fewer than there are at one moment.
    pub(super) fn held(&self) -> u64 {
        // Acquire, throughout: partner: the Releases of `Move`. So a thread that sees any of its stores sees that
        // something is under way, and sees the end only together with all of them.
        let before = self.moving.load(Ordering::Acquire);
        let pocket = u64::from(self.full.load(Ordering::Acquire));
        let counts = [&self.loaded, &self.previous, &self.retired].map(|word| word.load(Ordering::Acquire) >> 32);
        let still = before == self.moving.load(Ordering::Acquire) && before.is_multiple_of(2);
        pocket + counts.iter().sum::<u64>() + u64::from(!still)
    }

    /// Marks, until it is dropped, that something is under way in more than one place. The caller is inside.
    pub(super) fn under_way(&self) -> Move<'_> {
        // Relaxed, twice: our own word; every store that follows is a Release, and so is every exchange.
        let before = self.moving.load(Ordering::Relaxed);
        self.moving.store(before.wrapping_add(1), Ordering::Relaxed);
        Move { shard: self }
    }
}

/// What an owner remembers of the slot that is, or was last, in its shard's pocket: its number, its node, and the
/// address of its memory. It stays with the shard.
#[derive(Debug)]
pub struct Pocket<'n> {
    pub(super) slot: Cell<u32>,
    pub(super) node: Cell<Option<&'n Node>>,
    pub(super) memory: Cell<*mut u8>,
}

impl Pocket<'_> {
    /// For a shard whose pocket is empty.
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

/// A slot that was allocated: its number, and the address of its memory if it came out of a pocket.
pub type Taken = (u32, *mut u8);

/// A thread that carries slots; see [`Shard::held`].
pub(super) struct Move<'s> {
    shard: &'s Shard,
}

impl Move<'_> {
    pub(super) fn store(&self, word: &AtomicU64, chain: u64) {
        // Release: a thread that sees this store sees that something is under way; partner: the Acquires in `held`.
        word.store(chain, Ordering::Release);
    }
}

impl Drop for Move<'_> {
    fn drop(&mut self) {
        // Relaxed: our own word. Release: a thread that sees the end sees all stores before it.
        let before = self.shard.moving.load(Ordering::Relaxed);
        self.shard.moving.store(before.wrapping_add(1), Ordering::Release);
    }
}

impl Default for Shard {
    fn default() -> Self {
        Self::new()
    }
}

/// The presence of a thread inside a shard. Dropping it leaves.
pub(super) struct Section<'s> {
    pub(super) shard: &'s Shard,
}

impl<'s> Section<'s> {
    /// The section of a thread that has just published that it is inside.
    #[inline(always)]
    pub(super) fn of(shard: &'s Shard) -> Self {
        Self { shard }
    }
}

impl Drop for Section<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: hands the shard to a gatherer, or to the next thread in a lane.
        self.shard.busy.store(0, Ordering::Release);
    }
}
