//! Numbers of free slots: one stack for all, and the slots that were never used.
//!
//! ```text
//!   link of a slot     next free, or 0          free
//!                      LIVE                     allocated
//!                      0, as in fresh memory    never used
//! ```
//!
//! Four bytes a slot, outside of it. A slot is allocated from the stack, and where that is empty from those never used;
//! so as many slots are ever used as were needed at once, the lowest first.
//!
//! "No" is exact: the last fresh slot is gone for good, so if the stack is empty after that was seen, there was none.
//!
//! Cost: a compare-exchange each way (~9 ns), as many slots as there are for one where they come in batches. With the
//! list to oneself (`&mut`) neither is needed.

#![forbid(unsafe_code)]

use crossbeam_utils::CachePadded;

use super::node::{LIVE, Nodes};
use super::shards::FreeAlready;
use super::stack::{Links, NIL, Stack};
use crate::sync::{AtomicU32, Ordering};

/// Free slots of `N`.
#[derive(Debug)]
pub struct FreeSlots<N> {
    nodes: N,
    stack: CachePadded<Stack>,
}

struct Chain<'n, N>(&'n N);

impl<N: Nodes<AtomicU32>> Links for Chain<'_, N> {
    #[inline(always)]
    fn next(&self, slot: u32) -> u32 {
        // Acquire: who walks a chain that changes under him may come to any slot, but to one that exists: whoever
        // linked to it knew of it, and released that below.
        match self.0.node(slot).load(Ordering::Acquire) {
            LIVE => NIL,
            next => next,
        }
    }

    #[inline(always)]
    fn set_next(&self, slot: u32, next: u32) {
        // Release: for the Acquire above.
        self.0.node(slot).store(next, Ordering::Release);
    }
}

impl<N: Nodes<AtomicU32>> FreeSlots<N> {
    /// All slots of `nodes` are fresh.
    pub fn new(nodes: N) -> Self {
        Self {
            nodes,
            stack: CachePadded::new(Stack::new()),
        }
    }

    /// The slots' links.
    #[inline(always)]
    pub fn nodes(&self) -> &N {
        &self.nodes
    }

    #[inline(always)]
    fn hand_out(&self, slot: u32) -> u32 {
        // Relaxed: the slot is ours.
        self.nodes.node(slot).store(LIVE, Ordering::Relaxed);
        slot
    }

    /// Takes a slot. `None` if at some moment there was none.
    #[inline]
    pub fn allocate(&self) -> Option<u32> {
        let slot = self.stack.pop(&Chain(&self.nodes)).or_else(|| self.allocate_fresh())?;
        Some(self.hand_out(slot))
    }

    #[cold]
    fn allocate_fresh(&self) -> Option<u32> {
        let fresh = self.nodes.fresh(1).map(|(first, _)| first);
        // The last fresh slot may have been taken, and another freed, since we looked.
        fresh.or_else(|| self.stack.pop(&Chain(&self.nodes)))
    }

    /// Takes up to `most` slots, one call of `each` for one of them: by one exchange for all that the stack has, and
    /// one for a run of fresh ones. How many there were.
    pub fn allocate_many(&self, most: usize, mut each: impl FnMut(u32)) -> usize {
        let chain = Chain(&self.nodes);
        let mut taken = 0;
        while taken < most {
            if let Some((mut slot, count)) = self.stack.pop_chain(&chain, most - taken) {
                for _ in 0..count {
                    let next = chain.next(slot);
                    each(self.hand_out(slot));
                    slot = next;
                }
                taken += count;
            } else if let Some((first, count)) = self.nodes.fresh(u32::try_from(most - taken).unwrap_or(u32::MAX)) {
                (first..first + count).for_each(|slot| each(self.hand_out(slot)));
                taken += count as usize;
            } else if self.stack.look().1 {
                break;
            }
        }
        taken
    }

    /// Puts a slot back.
    ///
    /// # Errors
    /// The slot is not allocated.
    #[inline]
    pub fn free(&self, slot: u32) -> Result<(), FreeAlready> {
        self.check(slot)?;
        self.stack.push(&Chain(&self.nodes), slot, slot);
        Ok(())
    }

    #[inline(always)]
    fn check(&self, slot: u32) -> Result<(), FreeAlready> {
        // Relaxed: the slot is the caller's, as he says.
        if self.nodes.node(slot).load(Ordering::Relaxed) == LIVE {
            Ok(())
        } else {
            Err(FreeAlready)
        }
    }

    /// Puts slots back, by one exchange for all.
    ///
    /// # Errors
    /// The place in `slots` of one that is not allocated. Those before it are free, it and those behind it are as they
    /// were.
    pub fn free_many(&self, slots: impl Iterator<Item = u32>) -> Result<(), usize> {
        let chain = Chain(&self.nodes);
        let (mut first, mut last, mut result) = (NIL, NIL, Ok(()));
        for (place, slot) in slots.enumerate() {
            if self.check(slot).is_err() {
                result = Err(place);
                break;
            }
            // Linked to what came before it, which marks it as free: a slot that is named twice is found.
            chain.set_next(slot, first);
            first = slot;
            last = if last == NIL { slot } else { last };
        }
        if first != NIL {
            self.stack.push(&chain, first, last);
        }
        result
    }

    /// Takes a slot of a list that nobody else has: without a locked instruction.
    #[inline]
    pub fn allocate_mut(&mut self) -> Option<u32> {
        let slot = self
            .stack
            .pop_mut(&Chain(&self.nodes))
            .or_else(|| self.allocate_fresh())?;
        Some(self.hand_out(slot))
    }

    /// Puts a slot back into a list that nobody else has: without a locked instruction.
    ///
    /// # Errors
    /// The slot is not allocated.
    #[inline]
    pub fn free_mut(&mut self, slot: u32) -> Result<(), FreeAlready> {
        self.check(slot)?;
        self.stack.push_mut(&Chain(&self.nodes), slot);
        Ok(())
    }

    /// Forgets all free slots; `renew` makes every slot fresh.
    pub fn reset(&mut self, renew: impl FnOnce(&mut N)) {
        self.stack = CachePadded::new(Stack::new());
        renew(&mut self.nodes);
    }

    /// Slots that are allocated: counted, 1.5 ns for each that ever was.
    pub fn count_live(&self) -> u64 {
        let mut live = 0;
        self.nodes.each_used(|slot| live += u64::from(self.check(slot).is_ok()));
        live
    }

    /// Every slot on the stack, by `visit`. For a list nobody uses meanwhile.
    pub fn each_free(&self, mut visit: impl FnMut(u32)) {
        let mut slot = self.stack.top();
        while slot != NIL {
            visit(slot);
            slot = Chain(&self.nodes).next(slot);
        }
    }
}
