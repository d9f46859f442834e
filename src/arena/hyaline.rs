//! Hyaline: a retired slot becomes free when the last reader that may be reading it has left.
//!
//! ```text
//!   record of a reader   63            32 31          0        the list: what was retired while it was inside
//!                        ┌───────────────┬─────────────┐
//!                        │ inside: 1, 0  │ first       │──▶ node of batch 9 ──▶ node of batch 7 ──▶ 0
//!                        └───────────────┴─────────────┘          │                   │
//!   batch 9:  first ── node ── node ── node                       ▼                   ▼
//!             refs 2    └ in A's list                        refs of 9 − 1       refs of 7 − 1
//!                              └ in B's list              the thread that brings it to 0 frees the batch
//! ```
//!
//! A reader *enters* by setting a flag in its record. It *leaves* by taking the list that has grown in the record and
//! counting down each batch in it. A thread *retires* a batch of slots once no place where readers look leads to them.
//! It inserts one node of the batch into the list of every record concerned (those whose reader is inside), and then
//! adds the number of those records to the batch's count. The count may have been counted down below zero by then; only
//! the sum matters. The thread that brings it to zero, a leaving reader or the retiring thread, owns the batch and
//! frees it: exactly one does.
//!
//! So no thread scans other threads' epochs again and again, and no thread waits. A batch is freed by the last reader
//! that could see it, when it leaves. Nothing is allocated: the lists consist of the nodes of the batch itself. If a
//! batch has too few (it needs one node per record and one for the count), *spare* nodes without a slot are added.
//!
//! Worked: A and B are inside. A batch of slots 5, 6 and 8 is retired: 5 holds the count, node 6 goes to A's list, node
//! 8 to B's, and 2 is added. B leaves: it takes 8 and counts 2 → 1. C enters, and is not concerned, since it cannot
//! have seen the three. A leaves: it takes 6 and counts 1 → 0, so A frees 5, 6 and 8.
//!
//! **A sleeping reader** that is inside would, so far, block all reclamation: everything retired from then on would
//! wait for it. Therefore a slot records the *era* it was allocated in, a batch the oldest era of its slots, and a
//! record the era up to which its reader has looked, since the reader finds slots by [`protect`](Hyaline::protect)
//! only. A batch younger than that does not concern the reader. Eras advance as slots are allocated. So the reader
//! holds back only slots allocated before it fell asleep or in the same era, and slots retired in one batch with them.
//!
//! **Places.** The price is that a reader must find a slot in a *place*, which is cleared before the slot is retired. A
//! link in a slot that was itself taken out stays unchanged, and may lead to slots that have since been freed; and as
//! the reader has never looked at anything so young, no one waited for it.
//!
//! **Records.** There is one per shard owner, which is its only user and enters by a plain store. Its era only
//! advances, from one reader to the next: for a reader that has just entered, it may promise more than the reader has
//! looked at, but never less.
//!
//! Cost: 2.4 ns to enter and leave; `protect` 1 ns more than the load; 8 ns to retire and free a slot, including its
//! share of the heavy fence, in batches of 64. After R. Nikolaev and B. Ravindran, "Snapshot-free, transparent, and
//! robust memory reclamation for lock-free data structures", PLDI 2021, where this is Hyaline-1S, the robust variant.

#![forbid(unsafe_code)]

use crossbeam_utils::CachePadded;

use super::node::{Node, Nodes};
use super::stack::{Links, NIL, Stack};
use crate::sync::{AtomicU64, AtomicUsize, Barrier, Ordering, Table};

/// The era before anything was allocated. A reader that has not looked yet is in era 0, before that.
pub const FIRST_ERA: u64 = 1;

/// In a record's head: its reader is inside.
const INSIDE: u64 = 1 << 32;

/// Numbers from here on denote spare nodes.
const SPARES: u32 = 0xF000_0000;

/// The maximum number of slots.
pub const MAX_SLOTS: u32 = SPARES - 1;

/// In the `batch` of a batch's first node: spare nodes follow its slots.
const WITH_SPARES: u32 = 1 << 31;

/// Where a reader publishes that it is inside, and how far it has looked.
#[derive(Debug)]
pub struct Record {
    head: AtomicU64,
    era: AtomicU64,
}

impl Record {
    /// A record with nobody inside; equal to zeroed memory.
    #[must_use]
    pub fn new() -> Self {
        Self {
            head: AtomicU64::new(0),
            era: AtomicU64::new(0),
        }
    }

    /// Whether its reader is inside and may have seen a slot allocated in era `birth` or later.
    fn concerns(&self, birth: u64) -> bool {
        // Acquire: pairs with the Releases of `enter` and `leave`. Relaxed: the fence before it is what counts; see
        // `protect`.
        self.head.load(Ordering::Acquire) >= INSIDE && self.era.load(Ordering::Relaxed) >= birth
    }
}

impl Default for Record {
    fn default() -> Self {
        Self::new()
    }
}

/// Slots to be retired together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The first of a chain of slots that ends in [`NIL`].
    pub first: u32,
    /// The number of slots.
    pub count: u32,
    /// The oldest era in which one of them was allocated.
    pub oldest: u64,
}

/// Readers, and the slots retired while they are inside.
#[derive(Debug)]
pub struct Hyaline {
    /// One for each owner of a shard.
    records: Table<CachePadded<Record>>,
    /// How many records have ever been used; the others need not be examined.
    used: AtomicUsize,
    spares: Table<Node>,
    idle_spares: Stack,
    barrier: Barrier,
}

/// Links of nodes that may be spares.
struct Chain<'h, N> {
    hyaline: &'h Hyaline,
    nodes: &'h N,
}

// Relaxed throughout for links: a chain has one owner; see `node`.
impl<N: Nodes> Links for Chain<'_, N> {
    fn next(&self, slot: u32) -> u32 {
        self.hyaline.node(self.nodes, slot).link.load(Ordering::Relaxed)
    }

    fn set_next(&self, slot: u32, next: u32) {
        let node = self.hyaline.node(self.nodes, slot);
        node.link.store(next, Ordering::Relaxed);
    }
}

impl Hyaline {
    /// Creates an instance without readers. `records` and `spares` are all new.
    pub fn new(nodes: &impl Nodes, records: Table<CachePadded<Record>>, spares: Table<Node>, barrier: Barrier) -> Self {
        let hyaline = Self {
            records,
            used: AtomicUsize::new(0),
            spares,
            idle_spares: Stack::new(),
            barrier,
        };
        hyaline.put_spares(nodes);
        hyaline
    }

    /// Makes all spares idle.
    fn put_spares(&self, nodes: &impl Nodes) {
        for spare in (0..self.spares.len()).rev() {
            let number = SPARES + spare as u32;
            self.idle_spares.push(&Chain { hyaline: self, nodes }, number, number);
        }
    }

    /// Resets to the initial state: nobody is inside, and nothing is retired.
    pub fn reset(&mut self, nodes: &impl Nodes) {
        // Relaxed, throughout: nobody else is here.
        for record in 0..self.used.load(Ordering::Relaxed) {
            let record = self.records.get(record);
            record.head.store(0, Ordering::Relaxed);
            record.era.store(0, Ordering::Relaxed);
        }
        self.used.store(0, Ordering::Relaxed);
        self.idle_spares = Stack::new();
        self.put_spares(nodes);
    }

    /// Gives record `record` a reader, which may enter from now on.
    pub fn admit(&self, record: usize) {
        // Relaxed: the reader's light fence follows before it reads anything; a retiring thread loads this after a
        // heavy fence.
        self.used.fetch_max(record + 1, Ordering::Relaxed);
    }

    fn node<'n>(&'n self, nodes: &'n impl Nodes, number: u32) -> &'n Node {
        if number >= SPARES {
            self.spares.get((number - SPARES) as usize)
        } else {
            nodes.node(number)
        }
    }

    /// Enters: the record's reader is inside from now on.
    #[inline]
    pub fn enter(&self, record: usize) {
        // Nobody else writes the head while nobody is inside. Release: a thread that sees this value (`concerns`,
        // `insert`) knows that everything read before it has been read.
        self.records.get(record).head.store(INSIDE, Ordering::Release);
        // Either the reader's loads come after this, or the retiring thread sees the reader: it unlinks, then makes a
        // heavy fence, then looks. If it does not find us, our fence comes after its fence, and we cannot find what it
        // has unlinked.
        self.barrier.light();
    }

    /// Returns the result of `load`, and guarantees that a slot it leads to is not freed before the reader, which is
    /// inside, leaves.
    ///
    /// The allocator of the slot read the era before the slot was published, so the era read after the load is not
    /// less. If that equals the era published, with a fence behind it, before the load, a thread that retires the slot
    /// after this load sees it. A thread whose fence came before ours had unlinked the slot before we loaded.
    #[inline]
    pub fn protect<P>(&self, record: usize, era: &AtomicU64, mut load: impl FnMut() -> P) -> P {
        let record = self.records.get(record);
        loop {
            // Relaxed: our own word, or that of the record's previous user, whose shard came to us under a lock. Before
            // the load, which may itself protect something and publish a later era.
            let published = record.era.load(Ordering::Relaxed);
            let found = load();
            // Acquire: stays after the load above, which is an Acquire if its result is to be followed.
            let now = era.load(Ordering::Acquire);
            if published == now {
                return found;
            }
            // Never decreases: only the record's readers publish an era, one after another, and each was read before
            // this one.
            record.era.store(now, Ordering::Relaxed);
            self.barrier.light();
        }
    }

    /// Leaves. Calls `free` for each batch that becomes free by this, with its first slot and the number of slots.
    #[inline]
    pub fn leave(&self, nodes: &impl Nodes, record: usize, free: impl FnMut(u32, u32)) {
        // Acquire: the nodes, from the threads that inserted them. Release: everything read while inside has been read.
        let head = self.records.get(record).head.swap(0, Ordering::AcqRel);
        if head as u32 != NIL {
            self.count_down(nodes, head as u32, free);
        }
    }

    /// Counts down every batch of a list.
    #[cold]
    fn count_down(&self, nodes: &impl Nodes, mut at: u32, mut free: impl FnMut(u32, u32)) {
        while at != NIL {
            // Relaxed, twice: acquired with the head. Read first, because once counted down the batch may belong to any
            // thread.
            let node = self.node(nodes, at);
            let next = node.word.load(Ordering::Relaxed) as u32;
            let first = node.batch.load(Ordering::Relaxed);
            // Release: our reads of the slots are done. Acquire: so are the other readers', before anyone writes the
            // slots.
            if nodes.node(first).word.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.free(nodes, first, &mut free);
            }
            at = next;
        }
    }

    /// Frees a batch that nobody reads any more: detaches its spares, and passes its slots on.
    fn free(&self, nodes: &impl Nodes, first: u32, free: &mut impl FnMut(u32, u32)) {
        // Relaxed: the batch is ours alone.
        let count = nodes.node(first).batch.load(Ordering::Relaxed);
        if count & WITH_SPARES != 0 {
            self.cut_spares(nodes, first, count & !WITH_SPARES);
        }
        free(first, count & !WITH_SPARES);
    }

    /// Ends a chain behind its `count` slots, and returns the spares behind them to the idle ones.
    #[cold]
    fn cut_spares(&self, nodes: &impl Nodes, first: u32, count: u32) {
        let chain = Chain { hyaline: self, nodes };
        let last = (1..count).fold(first, |slot, _| chain.next(slot));
        let spare = chain.next(last);
        chain.set_next(last, NIL);
        if spare == NIL {
            return;
        }
        let mut end = spare;
        while chain.next(end) != NIL {
            end = chain.next(end);
        }
        self.idle_spares.push(&chain, spare, end);
    }

    /// Retires a batch whose slots are in no place any more. If no reader inside may have found one, `free` is called
    /// at once; otherwise the last such reader frees the batch.
    ///
    /// # Errors
    /// Returns the batch unchanged if it has too few slots for the present readers and the spares are used up (a larger
    /// one will do), or if the kernel refuses the barrier.
    pub fn retire(&self, nodes: &impl Nodes, batch: Batch, mut free: impl FnMut(u32, u32)) -> Result<(), Batch> {
        // Readers that we do not find below cannot find what was unlinked before; see `enter`.
        if !self.barrier.heavy() {
            return Err(batch);
        }
        let assigned = self.assign(nodes, batch)?;
        let chain = Chain { hyaline: self, nodes };
        let (mut inserted, mut at) = (0, chain.next(batch.first));
        for _ in 0..assigned {
            let next = chain.next(at);
            inserted += u64::from(self.insert(nodes, at));
            at = next;
        }
        // AcqRel: as in `count_down`. Readers that have already left have counted down below zero.
        let refs = &nodes.node(batch.first).word;
        if refs.fetch_add(inserted, Ordering::AcqRel).wrapping_add(inserted) == 0 {
            self.free(nodes, batch.first, &mut free);
        }
        Ok(())
    }

    /// Assigns a node to each record that the batch concerns, and returns how many. Readers that enter later are not
    /// concerned.
    fn assign(&self, nodes: &impl Nodes, batch: Batch) -> Result<usize, Batch> {
        let chain = Chain { hyaline: self, nodes };
        let (mut at, mut assigned, mut count) = (batch.first, 0, batch.count);
        // Relaxed, here and below: behind the fence of `retire`, and the batch is ours until it is inserted.
        for index in 0..self.used.load(Ordering::Relaxed) {
            if !self.records.get(index).concerns(batch.oldest) {
                continue;
            }
            if chain.next(at) == NIL {
                let Some(spare) = self.idle_spares.pop(&chain) else {
                    self.cut_spares(nodes, batch.first, batch.count);
                    return Err(batch);
                };
                chain.set_next(spare, NIL);
                chain.set_next(at, spare);
                count |= WITH_SPARES;
            }
            at = chain.next(at);
            let node = self.node(nodes, at);
            node.word.store(index as u64, Ordering::Relaxed);
            node.batch.store(batch.first, Ordering::Relaxed);
            assigned += 1;
        }
        let first = nodes.node(batch.first);
        first.word.store(0, Ordering::Relaxed);
        first.batch.store(count, Ordering::Relaxed);
        Ok(assigned)
    }

    /// Inserts a node into the list of the record it was assigned to, unless the reader has left. Returns whether it
    /// did.
    fn insert(&self, nodes: &impl Nodes, number: u32) -> bool {
        let node = self.node(nodes, number);
        // Relaxed, twice: ours.
        let record = self.records.get(node.word.load(Ordering::Relaxed) as usize);
        // Acquire, here and where the exchange fails: if the reader has left, its reads are done.
        let mut head = record.head.load(Ordering::Acquire);
        while head >= INSIDE {
            node.word.store(u64::from(head as u32), Ordering::Relaxed);
            let with_us = INSIDE | u64::from(number);
            // Release: the node, for the reader when it leaves. (If the list was taken and regrown meanwhile, no harm
            // is done: the head we link to is the head.)
            match record
                .head
                .compare_exchange_weak(head, with_us, Ordering::Release, Ordering::Acquire)
            {
                Ok(_) => return true,
                Err(now) => head = now,
            }
        }
        false
    }
}
