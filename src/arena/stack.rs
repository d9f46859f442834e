//! A Treiber stack of numbers: lock-free, without pointers, and protected from ABA by a tag.
//!
//! ```text
//!   head   63          32 31           0          links, out of line
//!          ┌─────────────┬─────────────┐          ┌────┬────┬────┬────┬────┬────┐
//!          │ tag         │ top         │──▶ 4 ──▶ │    │ 0  │    │    │ 2  │    │ …
//!          └─────────────┴─────────────┘          └────┴────┴────┴────┴────┴────┘
//!            + 1 at each change                      1    2    3    4    5    6
//! ```
//!
//! Slots are numbered from 1; 0 means none. The link from a slot to the next is a word outside the slot. So a pop that
//! reads the link of a slot which another thread has meanwhile taken, and is writing to, reads none of its data. And
//! links may be in any memory, including a model checker's.
//!
//! Worked, the ABA: the stack is 4, 2. A thread reads top 4 and its link 2, and sleeps. Others pop 4, pop 2 and push 4:
//! the top is 4 again, but 2 is in use. The sleeper's compare-exchange from "4" to "2" would hand out 2 twice. With the
//! tag it expects "(7, 4)" while the head is by now "(10, 4)", and fails. The tag has 32 bits: a thread would have to
//! sleep between two instructions for an exact multiple of 4,294,967,296 changes.
//!
//! A chain of any length is pushed by one compare-exchange, and popped by one. A walk along links that change under it
//! may lead to any slot, but then the head has changed too, and the exchange fails.
//!
//! Cost: one uncontended compare-exchange each way (2.4 to 9 ns, depending on the processor). After R. K. Treiber,
//! "Systems programming: coping with parallelism", 1986; the counter beside the pointer is from the IBM System/370
//! Principles of Operation.

#![forbid(unsafe_code)]

use crate::sync::{AtomicU64, Ordering};

/// No slot: the end of a chain.
pub const NIL: u32 = 0;

/// The links of a stack's slots.
pub trait Links {
    /// What the slot is linked to, or [`NIL`] if it is on no stack; for [`pop_chain`](Stack::pop_chain) by Acquire.
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

// The tag has at least 32 bits: fewer could wrap within the time a thread can be preempted for. And it leaves room for
// a number below it.
const _: () = assert!(u64::BITS - TAG.trailing_zeros() >= 32 && TAG.trailing_zeros() >= u32::BITS);

/// The top of a head.
#[inline(always)]
fn top(head: u64) -> u32 {
    head as u32
}

/// The head that follows `head`, with a new top.
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
            // Release: the chain's links, and whatever its last owner did with the slots; partner: the Acquire in
            // `pop`.
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
        // Acquire: pairs with the Release of `push`; the link is the one that was pushed. The same for a failed
        // exchange.
        let mut head = self.head.load(Ordering::Acquire);
        while top(head) != NIL {
            let next = links.next(top(head));
            // Release, of AcqRel: what the popper announced before, for a thread that reads this head by `look`.
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

    /// Pops up to `most` slots by one exchange. Returns the first of the chain, and how many. The link of the last one
    /// stays as it was.
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

    /// Like [`push`](Self::push) of one slot, with exclusive access.
    #[inline]
    pub fn push_mut(&mut self, links: &impl Links, slot: u32) {
        // Relaxed, twice: nobody else is here; the next user gets the stack from us.
        let head = self.head.load(Ordering::Relaxed);
        links.set_next(slot, top(head));
        self.head.store(successor(head, slot), Ordering::Relaxed);
    }

    /// Like [`pop`](Self::pop), with exclusive access.
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

    /// The head as it is, equal to an earlier look if nothing was pushed or popped in between; and whether the stack is
    /// empty.
    #[inline]
    pub fn look(&self) -> (u64, bool) {
        // Acquire: pairs with the Release of `push` and `pop`.
        let head = self.head.load(Ordering::Acquire);
        (head, top(head) == NIL)
    }

    /// The top, for a walk along a stack that nobody changes.
    pub fn top(&self) -> u32 {
        // Acquire: as in `look`.
        top(self.head.load(Ordering::Acquire))
    }
}
