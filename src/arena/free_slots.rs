//! Free slots: a pocket for one, a stack of numbers for the others, and the fresh slots, which were never used.
//!
//! ```text
//!   pocket   address of one free slot, or null              ┐ one cache line
//!   stack    tag │ top ──▶ link ──▶ link ──▶ 0              ┘
//!
//!   link of a slot     next free, or 0          free, on the stack
//!                      LIVE                     allocated, or in the pocket
//!                      0, as in fresh memory    never used
//! ```
//!
//! Four bytes a slot, outside of it. A slot is allocated from the pocket, then from the stack, and if both are empty
//! from the fresh ones. So only as many slots are ever used as were needed at once, the lowest first.
//!
//! *The pocket* serves a free followed by an allocation. It holds the slot's address and not its number, so nothing
//! waits for a link, or for the translation from address to number and back, and the link of a slot that goes in and
//! out is not written. It is filled and emptied by a compare-exchange. No ABA is possible: a thread that finds an
//! address there twice finds a free slot twice.
//!
//! *Double frees:* a slot is free if its link is not LIVE, or if it is the one in the pocket. A free checks both; two
//! threads that free one slot within the same nanoseconds can both pass. The slot may then be handed out twice. Its
//! link may also lead to itself, so that the stack ends there and the slots below it are lost until the list is reset.
//!
//! *"No" is exact.* The last fresh slot is gone for good. The stack is seen empty, then the pocket, and then the stack
//! unchanged, tag included: so when the pocket was read, nothing was free.
//!
//! Worked: slots 1 and 2 are allocated. 1 is freed: the pocket is empty and takes it. 2 is freed: the pocket is full,
//! so the stack becomes (tag 1, top 2). 1 is freed again: its link is LIVE, but it is in the pocket, so this is an
//! error. Three slots are allocated: 1, by its address; 2, from the stack; and 3, a fresh one.
//!
//! Cost: a compare-exchange each way, through the pocket or the stack; one compare-exchange for many slots if they come
//! in batches. With exclusive access (`&mut`) none is needed.

#![forbid(unsafe_code)]

use core::ptr::{self, NonNull};

use crossbeam_utils::CachePadded;

use super::node::{LIVE, Nodes};
use super::shards::FreeAlready;
use super::stack::{Links, NIL, Stack};
use crate::sync::{AtomicPtr, AtomicU32, Ordering};

/// A slot that is the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// By its number.
    Number(u32),
    /// Out of the pocket: by its memory, as it was freed.
    Memory(NonNull<u8>),
}

/// Where free slots are.
#[derive(Debug)]
struct Heads {
    pocket: AtomicPtr<u8>,
    stack: Stack,
}

impl Heads {
    fn new() -> CachePadded<Self> {
        CachePadded::new(Self {
            pocket: AtomicPtr::new(ptr::null_mut()),
            stack: Stack::new(),
        })
    }
}

/// Free slots of `N`.
#[derive(Debug)]
pub struct FreeSlots<N> {
    nodes: N,
    heads: CachePadded<Heads>,
}

struct Chain<'n, N>(&'n N);

impl<N: Nodes<AtomicU32>> Links for Chain<'_, N> {
    #[inline(always)]
    fn next(&self, slot: u32) -> u32 {
        // Acquire: a walk along a chain that changes under it may come to any slot, but only to one that exists: the
        // thread that linked to it knew of it, and released that below.
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

/// The link of one slot, which is the caller's.
struct Own<'n>(&'n AtomicU32);

impl Links for Own<'_> {
    #[inline(always)]
    fn next(&self, _: u32) -> u32 {
        NIL
    }

    #[inline(always)]
    fn set_next(&self, _: u32, next: u32) {
        // Release: for the Acquire in `Chain`.
        self.0.store(next, Ordering::Release);
    }
}

impl<N: Nodes<AtomicU32>> FreeSlots<N> {
    /// Creates a list in which all slots of `nodes` are fresh.
    pub fn new(nodes: N) -> Self {
        Self {
            nodes,
            heads: Heads::new(),
        }
    }

    /// The slots' links.
    #[inline(always)]
    pub fn nodes(&self) -> &N {
        &self.nodes
    }

    #[inline(always)]
    fn hand_out(&self, slot: u32) -> Taken {
        // Relaxed: the slot is ours.
        self.nodes.node(slot).store(LIVE, Ordering::Relaxed);
        Taken::Number(slot)
    }

    // ---- allocating

    /// Allocates a slot. `None` if at some moment there was none.
    ///
    /// The common case is all that is inlined, and always is: out of line, the result is passed through memory by two
    /// stores and one wide load, which waits for both (15 ns for a pair instead of 5).
    #[inline(always)]
    pub fn allocate(&self) -> Option<Taken> {
        match self.take_pocket() {
            Some(memory) => Some(Taken::Memory(memory)),
            None => self.allocate_behind(),
        }
    }

    #[inline(never)]
    fn allocate_behind(&self) -> Option<Taken> {
        self.take_free().or_else(|| self.allocate_late())
    }

    /// Takes the slot in the pocket, or the top of the stack. `None` if neither was seen, or another thread got the
    /// pocket's.
    #[inline(always)]
    fn take_free(&self) -> Option<Taken> {
        if let Some(memory) = self.take_pocket() {
            return Some(Taken::Memory(memory));
        }
        let slot = self.heads.stack.pop(&Chain(&self.nodes))?;
        Some(self.hand_out(slot))
    }

    #[inline(always)]
    fn take_pocket(&self) -> Option<NonNull<u8>> {
        // Relaxed: only compared.
        let memory = NonNull::new(self.heads.pocket.load(Ordering::Relaxed))?;
        // Acquire: pairs with the Release of `free`: what the slot's last owner did with it. Release: what we freed
        // before, for a thread that sees the pocket empty in `is_empty`. Relaxed: a failure only means that another
        // thread has it.
        let taken =
            self.heads
                .pocket
                .compare_exchange(memory.as_ptr(), ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed);
        taken.is_ok().then_some(memory)
    }

    /// Whether at some moment both the stack and the pocket were empty. If not, something was there or has changed.
    /// Public for models.
    pub fn is_empty(&self) -> bool {
        let (head, empty) = self.heads.stack.look();
        // Acquire: pairs with the Release of `take_pocket`: the thread that emptied it may have pushed another slot to
        // the stack before, which the second look sees.
        empty && self.heads.pocket.load(Ordering::Acquire).is_null() && self.heads.stack.look().0 == head
    }

    #[cold]
    #[inline(never)]
    fn allocate_late(&self) -> Option<Taken> {
        let mut fresh = true;
        loop {
            if let Some(taken) = self.take_free() {
                return Some(taken);
            }
            if !self.is_empty() {
                continue;
            }
            if !fresh {
                return None;
            }
            match self.nodes.fresh(1, true) {
                Some((first, _)) => return Some(self.hand_out(first)),
                // Since we looked, another thread may have taken the last one and freed another.
                None => fresh = false,
            }
        }
    }

    /// Allocates up to `most` slots and calls `each` for each of them: by one exchange for the pocket's, one for all
    /// that the stack has, and one for a run of fresh ones. Returns how many there were.
    pub fn allocate_many(&self, most: usize, mut each: impl FnMut(Taken)) -> usize {
        let chain = Chain(&self.nodes);
        let (mut taken, mut fresh) = (0, true);
        while taken < most {
            if let Some(memory) = self.take_pocket() {
                each(Taken::Memory(memory));
                taken += 1;
            } else if let Some((mut slot, count)) = self.heads.stack.pop_chain(&chain, most - taken) {
                for _ in 0..count {
                    let next = chain.next(slot);
                    each(self.hand_out(slot));
                    slot = next;
                }
                taken += count;
            } else if !self.is_empty() {
                continue;
            } else if !fresh {
                break;
            } else if let Some((first, count)) = self.nodes.fresh(u32::try_from(most - taken).unwrap_or(u32::MAX), true)
            {
                (first..first + count).for_each(|slot| each(self.hand_out(slot)));
                taken += count as usize;
            } else {
                fresh = false;
            }
        }
        taken
    }

    // ---- freeing

    /// Frees a slot, whose memory is at `memory` and whose link is `link`.
    ///
    /// # Errors
    /// The slot is not allocated.
    #[inline]
    pub fn free(&self, slot: u32, memory: NonNull<u8>, link: &AtomicU32) -> Result<(), FreeAlready> {
        // Relaxed, twice: the caller says that the slot is its own; and only compared.
        if link.load(Ordering::Relaxed) != LIVE {
            return Err(FreeAlready);
        }
        let memory = memory.as_ptr();
        let mut pocket = self.heads.pocket.load(Ordering::Relaxed);
        if pocket.is_null() {
            // Release: what was done with the slot, for the Acquire in `take_pocket`. Relaxed: as above.
            let put = self
                .heads
                .pocket
                .compare_exchange(pocket, memory, Ordering::Release, Ordering::Relaxed);
            match put {
                Ok(_) => return Ok(()),
                Err(now) => pocket = now,
            }
        }
        if pocket == memory {
            return Err(FreeAlready);
        }
        self.heads.stack.push(&Own(link), slot, slot);
        Ok(())
    }

    /// Frees slots, each given as to [`free`](Self::free), by one exchange for all. Returns how many there were.
    ///
    /// # Errors
    /// If a slot is not allocated: how many came before it. Those are free; it and those behind it are unchanged.
    pub fn free_many<'n>(
        &self,
        slots: impl Iterator<Item = (u32, NonNull<u8>, &'n AtomicU32)>,
    ) -> Result<usize, usize> {
        let (mut first, mut last, mut count) = (NIL, None, 0);
        let mut all = true;
        for (slot, memory, link) in slots {
            // Relaxed, twice: as in `free`.
            let is_live = link.load(Ordering::Relaxed) == LIVE;
            all = is_live && self.heads.pocket.load(Ordering::Relaxed) != memory.as_ptr();
            if !all {
                break;
            }
            // Linked to the slot before it, which marks it as free: a slot that is named twice is detected.
            let link = Own(link);
            link.set_next(slot, first);
            (first, count) = (slot, count + 1);
            last = last.or(Some(link));
        }
        if let Some(last) = last {
            self.heads.stack.push(&last, first, first);
        }
        if all { Ok(count) } else { Err(count) }
    }

    // ---- with exclusive access

    /// Allocates a slot with exclusive access: without a locked instruction.
    #[inline]
    pub fn allocate_mut(&mut self) -> Option<Taken> {
        // Relaxed, twice: nobody else is here.
        if let Some(memory) = NonNull::new(self.heads.pocket.load(Ordering::Relaxed)) {
            self.heads.pocket.store(ptr::null_mut(), Ordering::Relaxed);
            return Some(Taken::Memory(memory));
        }
        match self.heads.stack.pop_mut(&Chain(&self.nodes)) {
            Some(slot) => Some(self.hand_out(slot)),
            None => self.allocate_late(),
        }
    }

    /// Like [`free`](Self::free), with exclusive access: without a locked instruction.
    ///
    /// # Errors
    /// The slot is not allocated.
    #[inline]
    pub fn free_mut(&mut self, slot: u32, memory: NonNull<u8>) -> Result<(), FreeAlready> {
        // Relaxed, throughout: nobody else is here.
        let link = self.nodes.node(slot);
        if link.load(Ordering::Relaxed) != LIVE {
            return Err(FreeAlready);
        }
        let pocket = self.heads.pocket.load(Ordering::Relaxed);
        if pocket.is_null() {
            self.heads.pocket.store(memory.as_ptr(), Ordering::Relaxed);
        } else if pocket == memory.as_ptr() {
            return Err(FreeAlready);
        } else {
            self.heads.stack.push_mut(&Own(link), slot);
        }
        Ok(())
    }

    /// Forgets all free slots; `renew` makes every slot fresh.
    pub fn reset(&mut self, renew: impl FnOnce(&mut N)) {
        self.heads = Heads::new();
        renew(&mut self.nodes);
    }

    // ---- looking

    /// Counts the allocated slots. Takes 1.5 ns for each slot ever used.
    pub fn count_live(&self) -> u64 {
        let mut live = 0;
        // Relaxed, twice: a snapshot.
        self.nodes
            .each_used(|slot| live += u64::from(self.nodes.node(slot).load(Ordering::Relaxed) == LIVE));
        // The pocket's slot is among those counted.
        live.saturating_sub(u64::from(!self.heads.pocket.load(Ordering::Relaxed).is_null()))
    }

    /// Calls `visit` for every free slot that was ever used. For a list that no thread uses meanwhile.
    pub fn each_free(&self, mut visit: impl FnMut(Taken)) {
        // Relaxed: nobody is at work.
        if let Some(memory) = NonNull::new(self.heads.pocket.load(Ordering::Relaxed)) {
            visit(Taken::Memory(memory));
        }
        let mut slot = self.heads.stack.top();
        while slot != NIL {
            visit(Taken::Number(slot));
            slot = Chain(&self.nodes).next(slot);
        }
    }
}
