//! A Treiber stack of numbers: lock-free, without pointers, safe from ABA by a tag.
//!
//! ```text
//!   head   63          32 31           0          links, out of line
//!          ┌─────────────┬─────────────┐          ┌────┬────┬────┬────┬────┬────┐
//!          │ tag         │ top         │──▶ 4 ──▶ │    │ 0  │    │    │ 2  │    │ …
//!          └─────────────┴─────────────┘          └────┴────┴────┴────┴────┴────┘
//!            + 1 at each change                      1    2    3    4    5    6
//! ```
//!
//! Slots are numbered from 1, and 0 is nobody. What links a slot to the next is a word outside of the slot, so a pop
//! that reads the link of a slot which meanwhile was taken, and is being written by its owner, reads nothing of his;
//! and links may be any memory, also a model checker's.
//!
//! Worked, the ABA: the stack is 4, 2. A thread reads top 4 and its link 2, and sleeps. Others pop 4, pop 2, push 4:
//! the top is 4 again, and 2 is somebody's. The sleeper's compare-exchange from "4" to "2" would hand 2 out twice. With
//! the tag it is from "(7, 4)", the head is "(10, 4)" by now, and it fails. The tag has 32 bits: a thread would have to
//! sleep between two instructions for an exact multiple of 4,294,967,296 changes.
//!
//! A chain of any length is pushed by one compare-exchange, and popped by one: a walk along links that change under it
//! may lead to any slot, but then the head has changed too, and the exchange fails.
//!
//! Cost: one uncontended compare-exchange each (2.4 to 9 ns, by processor). After R. K. Treiber, "Systems programming:
//! coping with parallelism", 1986; the counter beside the pointer is the IBM System/370 Principles of Operation's.

#![forbid(unsafe_code)]

use crate::sync::{AtomicU64, Ordering};

/// Nobody's number: the end of a chain.
pub const NIL: u32 = 0;

/// Where the links of a stack's slots are.
pub trait Links {
    /// What the slot is linked to; for [`pop_chain`](Stack::pop_chain) by Acquire, or [`NIL`] if it is on no stack.
    fn next(&self, slot: u32) -> u32;
    /// Links the slot, which is the caller's; for [`pop_chain`](Stack::pop_chain) by Release.
    fn set_next(&self, slot: u32, next: u32);
}

/// The head of a stack.
#[derive(Debug)]
pub struct Stack {
    head: AtomicU64,
}

/// One change, in a head.
const TAG: u64 = 1 << 32;

// The tag has 32 bits at the least: fewer would come round within what a thread can be preempted for. And it leaves
// room for a number below it.
const _: () = assert!(u64::BITS - TAG.trailing_zeros() >= 32 && TAG.trailing_zeros() >= u32::BITS);

/// The top of a head.
#[inline(always)]
fn top(head: u64) -> u32 {
    head as u32
}

/// The head that follows `head`, with another top.
#[inline(always)]
fn successor(head: u64, top: u32) -> u64 {
    (head & !(TAG - 1)).wrapping_add(TAG) | u64::from(top)
}

impl Default for Stack {
    fn default() -> Self {
        Self::new()
    }
}

impl Stack {
    /// An empty stack.
    #[must_use]
    pub fn new() -> Self {
        Self {
            head: AtomicU64::new(0),
        }
    }

    /// Pushes a chain, linked from `first` to `last`, which is the caller's.
    #[inline]
    pub fn push(&self, links: &impl Links, first: u32, last: u32) {
        // Relaxed: only compared.
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            links.set_next(last, top(head));
            // Release: the chain's links, and whatever its last owner did with the slots, for the Acquire in `pop`.
            match self
                .head
                .compare_exchange_weak(head, successor(head, first), Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Pops the top.
    #[inline]
    pub fn pop(&self, links: &impl Links) -> Option<u32> {
        // Acquire: pairs with the Release of `push`; the link is the one that was pushed. So does a failed exchange.
        let mut head = self.head.load(Ordering::Acquire);
        while top(head) != NIL {
            let next = links.next(top(head));
            // Release, of AcqRel: what the popper announced before, for whoever reads this head by `look`.
            match self
                .head
                .compare_exchange_weak(head, successor(head, next), Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Some(top(head)),
                Err(now) => head = now,
            }
        }
        None
    }

    /// Pops up to `most` slots by one exchange: the first of the chain, and how many. The last one's link is left as it
    /// was.
    pub fn pop_chain(&self, links: &impl Links, most: usize) -> Option<(u32, usize)> {
        // Acquire, AcqRel: as in `pop`.
        let mut head = self.head.load(Ordering::Acquire);
        while top(head) != NIL && most > 0 {
            let (mut rest, mut count) = (links.next(top(head)), 1);
            while count < most && rest != NIL && self.head.load(Ordering::Acquire) == head {
                rest = links.next(rest);
                count += 1;
            }
            match self
                .head
                .compare_exchange_weak(head, successor(head, rest), Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Some((top(head), count)),
                Err(now) => head = now,
            }
        }
        None
    }

    /// As [`push`](Self::push) of one slot, for who has the stack to himself.
    #[inline]
    pub fn push_mut(&mut self, links: &impl Links, slot: u32) {
        // Relaxed, twice: nobody else is here; whoever comes next got the stack from us.
        let head = self.head.load(Ordering::Relaxed);
        links.set_next(slot, top(head));
        self.head.store(successor(head, slot), Ordering::Relaxed);
    }

    /// As [`pop`](Self::pop), for who has the stack to himself.
    #[inline]
    pub fn pop_mut(&mut self, links: &impl Links) -> Option<u32> {
        // Relaxed, twice: as in `push_mut`.
        let head = self.head.load(Ordering::Relaxed);
        if top(head) == NIL {
            return None;
        }
        let rest = successor(head, links.next(top(head)));
        self.head.store(rest, Ordering::Relaxed);
        Some(top(head))
    }

    /// The head as it is: equal to an earlier look if nothing was pushed or popped between them. And whether the stack
    /// is empty.
    #[inline]
    pub fn look(&self) -> (u64, bool) {
        // Acquire: pairs with the Release of `push` and `pop`.
        let head = self.head.load(Ordering::Acquire);
        (head, top(head) == NIL)
    }

    /// The top, for one who walks a stack that nobody changes.
    pub fn top(&self) -> u32 {
        // Acquire: as in `look`.
        top(self.head.load(Ordering::Acquire))
    }
}
