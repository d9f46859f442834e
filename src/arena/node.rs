//! What a list knows of a slot, kept outside of the slot.
//!
//! ```text
//!   node, 16 bytes       link (32)            batch (32)              word (64)
//!   ─────────────────────────────────────────────────────────────────────────────────────────
//!   allocated            LIVE                 –                       birth: the era it was allocated in
//!   free in a shard      next in the chain    –                       –
//!   free in the depot    next in the batch    first: how many         first: the next batch
//!   retired, waiting     next in the batch    number of the first     next in a reader's list
//!   … the batch's first  next in the batch    how many                readers still to leave
//! ```
//!
//! A slot is in one state at a time, so its three words serve all states. A slot's link is LIVE while it is allocated
//! and at no other time; that detects a slot freed twice, retired twice, or freed before it was allocated. The check is
//! a load and a comparison: two threads that free one slot within the same few nanoseconds can both pass.
//!
//! Cost: 16 bytes a slot, four nodes to a cache line; a slot's own memory is never read or written.

#![forbid(unsafe_code)]

use super::stack::Links;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// The link of an allocated slot.
pub const LIVE: u32 = u32::MAX;

/// What is known of a slot.
#[derive(Debug)]
#[repr(C)]
pub struct Node {
    pub(crate) word: AtomicU64,
    pub(crate) link: AtomicU32,
    pub(crate) batch: AtomicU32,
}

impl Node {
    /// The node of a fresh slot; equal to zeroed memory.
    #[must_use]
    pub fn new() -> Self {
        Self {
            word: AtomicU64::new(0),
            link: AtomicU32::new(0),
            batch: AtomicU32::new(0),
        }
    }
}

impl Default for Node {
    fn default() -> Self {
        Self::new()
    }
}

/// How many slots there are: estimates, for shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// How many were never used.
    pub fresh: u64,
    /// How many exist, these included.
    pub exist: u64,
    /// How many could be added.
    pub more: u64,
}

/// Where nodes lie, and where fresh slots, which were never used, come from. `T` is what is known of a slot.
pub trait Nodes<T = Node> {
    /// The node of a slot that came out of [`fresh`](Self::fresh).
    fn node(&self, slot: u32) -> &T;

    /// Takes up to `most` consecutive fresh slots for the caller alone: the first, and how many. `None` if no more are
    /// left. (If there was no room for more the last time, that is asked for only if `again`.) Releases what the caller
    /// did before to a thread that finds none left.
    fn fresh(&self, most: u32, again: bool) -> Option<(u32, u32)>;

    /// How many slots there are, and can be.
    fn extent(&self) -> Extent;

    /// Visits every slot that has come out of [`fresh`](Self::fresh).
    fn each_used(&self, visit: impl FnMut(u32));
}

/// Links between the slots of one batch.
#[derive(Debug)]
pub struct Chain<'n, N>(pub &'n N);

// Relaxed throughout: a chain has one owner, and is handed over by the stack, the shard or the reader's list it is in.
impl<N: Nodes> Links for Chain<'_, N> {
    #[inline(always)]
    fn next(&self, slot: u32) -> u32 {
        self.0.node(slot).link.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn set_next(&self, slot: u32, next: u32) {
        self.0.node(slot).link.store(next, Ordering::Relaxed);
    }
}

/// Links between the first slots of batches.
#[derive(Debug)]
pub struct Batches<'n, N>(pub &'n N);

impl<N: Nodes> Links for Batches<'_, N> {
    #[inline(always)]
    fn next(&self, slot: u32) -> u32 {
        self.0.node(slot).word.load(Ordering::Relaxed) as u32
    }

    #[inline(always)]
    fn set_next(&self, slot: u32, next: u32) {
        self.0.node(slot).word.store(u64::from(next), Ordering::Relaxed);
    }
}
