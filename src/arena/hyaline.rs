//! Hyaline: slots that somebody may still be reading are free when the last such reader has left.
//!
//! ```text
//!   record of a reader   63            32 31          0        the list: what was retired while he was inside
//!                        ┌───────────────┬─────────────┐
//!                        │ inside: 1, 0  │ first       │──▶ node of batch 9 ──▶ node of batch 7 ──▶ 0
//!                        └───────────────┴─────────────┘          │                   │
//!   batch 9:  first ── node ── node ── node                       ▼                   ▼
//!             refs 2    └ in A's list                        refs of 9 − 1       refs of 7 − 1
//!                              └ in B's list              whoever brings it to 0 frees the batch
//! ```
//!
//! A reader *enters* by saying so in his record, and *leaves* by taking the list that has grown in it and counting down
//! each batch he finds. Who *retires* a batch of slots (which are in no place any more where a reader looks) puts one
//! of its nodes into the list of every record that this concerns (whose reader is inside), and then adds the number of
//! those records to the batch's count; the count may have been counted down below zero by then, and only the sum
//! decides. Whoever brings it to zero, a reader who leaves or the one who retires, has the batch for himself and frees
//! it: exactly one does.
//!
//! So nobody scans other threads' epochs again and again, nobody waits, a batch is freed by the last reader who could
//! see it at the moment he leaves, and nothing is allocated: the lists are made of the nodes of the batch itself. If it
//! has too few (one node is needed for each record, and one for the count) *spare* nodes without a slot help out.
//!
//! Worked: A and B are inside. A batch of slots 5, 6, 8 is retired: its count is in 5, node 6 goes to A's list, node 8
//! to B's, 2 is added. B leaves: takes 8, counts 2 → 1. C enters: nothing, C cannot have seen the three. A leaves: 6, 1
//! → 0, and A frees 5, 6 and 8.
//!
//! **A reader who falls asleep** inside would, as it stands, stop everything: whatever is retired from then on would
//! wait for him. So a slot knows the *era* it was allocated in, a batch the oldest of its slots', and a record the era
//! up to which its reader has looked: he finds slots by [`protect`](Hyaline::protect) only. A batch that is younger
//! than that is none of his, and passes him by. Eras go on as slots are allocated. So he holds back what was allocated
//! before he fell asleep, or in the same era, what was retired in one batch with it, and no more.
//!
//! **Places.** What that costs: he must find a slot in a *place*, from which it is taken before it is retired. A link
//! in a slot that was itself taken out leads, unchanged, to slots that may have been freed since; and as he has looked
//! at nothing so young, nobody waited for him.
//!
//! **Records.** One for each owner of a shard, who is alone in it and enters by a plain store. Its era only goes on,
//! from reader to reader: of one who has just entered it says more than he has looked at, and never less.
//!
//! Cost: entering and leaving 2.4 ns together; `protect` 1 ns more than the load; a slot retired and freed 8 ns with
//! its share of the heavy fence, in batches of 64. After R. Nikolaev and B. Ravindran, "Snapshot-free, transparent, and
//! robust memory reclamation for lock-free data structures", PLDI 2021, where this is Hyaline-1S, the robust one.

#![forbid(unsafe_code)]

use crossbeam_utils::CachePadded;

use super::node::{Node, Nodes};
use super::stack::{Links, NIL, Stack};
use crate::sync::{AtomicU64, AtomicUsize, Barrier, Ordering, Table};

/// The era before anything was allocated. Who has not looked yet has the one before that, 0.
pub const FIRST_ERA: u64 = 1;

/// In a record's head: its reader is inside.
const INSIDE: u64 = 1 << 32;

/// Numbers from here on are spare nodes.
const SPARES: u32 = 0xF000_0000;

/// The most slots there can be.
pub const MAX_SLOTS: u32 = SPARES - 1;

/// In the `batch` of a batch's first node: spare nodes follow its slots.
const WITH_SPARES: u32 = 1 << 31;

/// Where a reader says that he is inside, and how far he has looked.
#[derive(Debug)]
pub struct Record {
    head: AtomicU64,
    era: AtomicU64,
}

impl Record {
    /// A record with nobody inside, as zeroed memory has it.
    #[must_use]
    pub fn new() -> Self {
        Self {
            head: AtomicU64::new(0),
            era: AtomicU64::new(0),
        }
    }

    /// Whether its reader is inside, and may have seen a slot allocated in era `birth` or later.
    fn concerns(&self, birth: u64) -> bool {
        // Acquire: pairs with the Releases of `enter` and `leave`. Relaxed: what counts is the fence before; see
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
    /// How many.
    pub count: u32,
    /// The oldest era in which one of them was allocated.
    pub oldest: u64,
}

/// Readers, and what is retired under them.
#[derive(Debug)]
pub struct Hyaline {
    /// One for each owner of a shard.
    records: Table<CachePadded<Record>>,
    /// Records that have ever been used; the others need not be looked at.
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

// Relaxed throughout where links are concerned: a chain has one owner; see `node`.
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
    /// No readers. `records` are all new; so are the `spares`.
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

    /// All spares are idle.
    fn put_spares(&self, nodes: &impl Nodes) {
        for spare in (0..self.spares.len()).rev() {
            let number = SPARES + spare as u32;
            self.idle_spares.push(&Chain { hyaline: self, nodes }, number, number);
        }
    }

    /// Nobody is inside, and nothing is retired: as new.
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

    /// Record `record` has a reader, who may enter from now on.
    pub fn admit(&self, record: usize) {
        // Relaxed: the reader's light fence follows before he reads, and whoever retires reads behind a heavy one.
        self.used.fetch_max(record + 1, Ordering::Relaxed);
    }

    fn node<'n>(&'n self, nodes: &'n impl Nodes, number: u32) -> &'n Node {
        if number >= SPARES {
            self.spares.get((number - SPARES) as usize)
        } else {
            nodes.node(number)
        }
    }

    /// The record's reader enters.
    #[inline]
    pub fn enter(&self, record: usize) {
        // Nobody else writes the head while nobody is inside. Release: whoever sees this one (`concerns`, `insert`)
        // knows that what was read before it is read.
        self.records.get(record).head.store(INSIDE, Ordering::Release);
        // The reader's loads come after this, or whoever retires sees the reader: he unlinks, then makes a heavy fence,
        // then looks. If he does not find us, our fence is behind his, and what he has unlinked cannot be found.
        self.barrier.light();
    }

    /// What `load` gives, and a promise: a slot it leads to is not freed before the reader, who is inside, leaves.
    ///
    /// The slot was allocated in an era that its allocator read before it was published, so the era read behind the
    /// load is not less. When that is the era that was published, with a fence behind it, before the load, then whoever
    /// retires the slot after this load sees it; and whoever made his fence before ours has unlinked the slot before we
    /// loaded.
    #[inline]
    pub fn protect<P>(&self, record: usize, era: &AtomicU64, mut load: impl FnMut() -> P) -> P {
        let record = self.records.get(record);
        loop {
            // Relaxed: our own word, or that of who had the record before, whose shard came to us under a lock. Before
            // the load, which may itself protect something, and publish a later one.
            let published = record.era.load(Ordering::Relaxed);
            let found = load();
            // Acquire: not before the load above, which was made by Acquire by whoever means to follow it.
            let now = era.load(Ordering::Acquire);
            if published == now {
                return found;
            }
            // Never back: the record's readers alone publish one, one after the other, and each was read before this.
            record.era.store(now, Ordering::Relaxed);
            self.barrier.light();
        }
    }

    /// The record's reader leaves. `free` is called for each batch that is free by that: its first slot, and how
    /// many.
    #[inline]
    pub fn leave(&self, nodes: &impl Nodes, record: usize, free: impl FnMut(u32, u32)) {
        // Acquire: the nodes of those who inserted them. Release: what was read while inside is read.
        let head = self.records.get(record).head.swap(0, Ordering::AcqRel);
        if head as u32 != NIL {
            self.count_down(nodes, head as u32, free);
        }
    }

    /// Counts down every batch of a list.
    #[cold]
    fn count_down(&self, nodes: &impl Nodes, mut at: u32, mut free: impl FnMut(u32, u32)) {
        while at != NIL {
            // Relaxed, twice: acquired with the head. Read first: once counted down, the batch may be anybody's.
            let node = self.node(nodes, at);
            let next = node.word.load(Ordering::Relaxed) as u32;
            let first = node.batch.load(Ordering::Relaxed);
            // Release: what we read of the slots. Acquire: what the other readers read, before somebody writes.
            if nodes.node(first).word.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.free(nodes, first, &mut free);
            }
            at = next;
        }
    }

    /// A batch that nobody reads any more: takes its spares off, and passes its slots on.
    fn free(&self, nodes: &impl Nodes, first: u32, free: &mut impl FnMut(u32, u32)) {
        // Relaxed: the batch is ours alone.
        let count = nodes.node(first).batch.load(Ordering::Relaxed);
        if count & WITH_SPARES != 0 {
            self.cut_spares(nodes, first, count & !WITH_SPARES);
        }
        free(first, count & !WITH_SPARES);
    }

    /// Ends a chain behind its `count` slots, and puts the spares behind them back.
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

    /// Retires a batch, whose slots are in no place any more: it is freed by `free` at once, if nobody is inside who
    /// may have found one, or by the last of them.
    ///
    /// # Errors
    /// The batch, as it was, if it has too few slots for the readers there are, and the spares are used up: a larger
    /// one will do.
    pub fn retire(&self, nodes: &impl Nodes, batch: Batch, mut free: impl FnMut(u32, u32)) -> Result<(), Batch> {
        // What was unlinked before is not found by those whom we do not find below; see `enter`.
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
        // AcqRel: as in `count_down`. Those who have left already have counted down below zero.
        let refs = &nodes.node(batch.first).word;
        if refs.fetch_add(inserted, Ordering::AcqRel).wrapping_add(inserted) == 0 {
            self.free(nodes, batch.first, &mut free);
        }
        Ok(())
    }

    /// Gives each record that a batch concerns a node of it, and says how many. Who enters later is not concerned.
    fn assign(&self, nodes: &impl Nodes, batch: Batch) -> Result<usize, Batch> {
        let chain = Chain { hyaline: self, nodes };
        let (mut at, mut assigned, mut count) = (batch.first, 0, batch.count);
        // Relaxed, here and below: behind the fence of `retire`; and the batch is ours until it is inserted.
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

    /// Puts a node into the list of the record it was assigned to, unless its reader has left. Whether it did.
    fn insert(&self, nodes: &impl Nodes, number: u32) -> bool {
        let node = self.node(nodes, number);
        // Relaxed, twice: ours.
        let record = self.records.get(node.word.load(Ordering::Relaxed) as usize);
        // Acquire, here and where the exchange fails: if he has left, what he read is read.
        let mut head = record.head.load(Ordering::Acquire);
        while head >= INSIDE {
            node.word.store(u64::from(head as u32), Ordering::Relaxed);
            let with_us = INSIDE | u64::from(number);
            // Release: the node, for who leaves. (A list that has come and gone meanwhile is no harm: the head we link
            // to is the head.)
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
