//! Slots of one size, in shards: each its owner's alone, without a locked instruction, until some thread finds no slot.
//!
//! ```text
//!   shard of A        shard of B        lanes, for other threads         one cache line each, and one between
//!   pocket   o        pocket   –        pocket   –
//!   loaded   o-o-o    loaded   o        loaded   o-o
//!   previous o-o-o-o  previous –        previous –
//!   retired  x-x      retired  x-x-x    retired  –     ──full──▶ Hyaline ──last reader has left──┐
//!      │ ▲ full, empty: a batch at a time                                                        │
//!      ▼ │                                                                                       ▼
//!   depot    batch ── batch ── batch ── …            a stack of batches: one compare-exchange for up to 64 slots
//!      ▲                                             used up, too? slots that were never used; and then
//!      └──── gather: all shards hold still, and give what they have
//! ```
//!
//! *Shards.* Each has two batches, so that alternating at the border of one does not access the depot each time
//! (Bonwick's magazines), and its owner has a [pocket](Pocket) for one slot. The [controller](super::controller) sets
//! how large a batch may get: 64 slots at most, and fewer if slots are long, since what waits in a shard is memory that
//! nobody else uses.
//!
//! *Sections.* An owner is alone in its shard, except for a gatherer. So it publishes that it is inside, checks whether
//! anyone gathers, and proceeds: a store, a load, and a store at the end. The barrier between costs nothing where the
//! kernel has an asymmetric one ([`Barrier`]). A gatherer publishes that it gathers, makes the heavy barrier, and then
//! checks who is inside: either it sees the owner, or the owner sees it and keeps out. Threads without a shard share a
//! few lanes, which are the same but entered by a compare-exchange.
//!
//! *A "no" is proved.* An allocation fails only if at some moment no slot was free: not in the depot, and not in any
//! shard, however idle its owner. The gatherer takes the slots of every shard that nobody is inside. A busy shard is
//! left alone, unless it has slots and nothing else has: then the gatherer waits for that section to end, for however
//! long, as for a lock holder. This and the gatherers' lock are the only waits.
//!
//! While all threads are kept out, each can finish the section it was in, but not begin another. So a shard that had no
//! slot at two looks had none between them. The depot, if empty and unchanged at two looks, was so between them, too.
//! One moment lies within all these intervals. A thread that carries slots from one place to another publishes that
//! first (`moving`, or the turnstile), and is waited for like one that has slots.
//!
//! *Exceptions.* The kernel may refuse the barrier that it granted when the list was made, for example if a system
//! call filter has since been installed. Nobody can then tell whether an owner is inside, so owners carry on. What
//! their shards hold, and what is retired from then on, is out of reach until they use or flush it. The requester's own
//! shard, the lanes, the depot and fresh slots are still searched. In the child of a fork, a thread that was inside may
//! not exist; there the wait ends after some seconds. And slots that readers held back are not seen while they are in
//! the hands of a thread that cannot put them into its shard, because it was preempted, or the gatherer is there.
//!
//! *Frees never wait*: kept out of its shard, a free puts a batch of one into the depot. A retire may wait: a batch
//! that Hyaline has no room for goes into a shard, which is closed while a thread gathers.
//!
//! Worked: an owner that frees and allocates in turn puts the slot into the pocket and takes it out again, 3 ns for
//! both. If it frees 200 slots, one is in the pocket, 64 fill `loaded`, the next makes them `previous`, and from the
//! 130th on every 64th sends 64 to the depot by one compare-exchange.

#![forbid(unsafe_code)]

mod gather;
mod lend;
mod retire;
mod shard;

pub use lend::Census;
pub use shard::{Pocket, Shard, Taken};

use crossbeam_utils::CachePadded;

use super::controller::{Controller, MAX_BATCH};
use super::hyaline::{FIRST_ERA, Hyaline};
use super::node::{Batches, Extent, LIVE, Node, Nodes};
use super::stack::{NIL, Stack};
use crate::arena::numbers::{pack, unpack};
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Barrier, Lock, Ordering, SHARED, Table, Turnstile, process};
use shard::Section;

/// Shards for threads that own none.
pub const LANES: usize = SHARED;

/// In `frozen`: every thread is to keep out of the shards.
const ALL: u32 = 1;

/// In `frozen`: threads without a shard are to keep out. Owners carry on, since nobody else can enter their shards.
const GUESTS: u32 = 2;

/// The error of freeing a slot that is not allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeAlready;

/// What every operation reads and few write.
#[derive(Debug)]
struct Control {
    /// Which threads are to keep out while one gathers: [`ALL`], [`GUESTS`], or 0 for none.
    frozen: AtomicU32,
    /// How many slots a batch may have (low half); and how many retired ones a shard collects before it passes them on.
    sizes: AtomicU32,
    /// The present era; see [`Hyaline`].
    era: AtomicU64,
}

impl Control {
    const fn sizes(limit: u32, patience: u32) -> u32 {
        patience << 16 | limit
    }

    /// How many slots a batch may have.
    #[inline(always)]
    fn limit(&self) -> u32 {
        // Relaxed: a number by itself.
        self.sizes.load(Ordering::Relaxed) & 0xFFFF
    }

    /// How many retired slots a shard collects.
    #[inline(always)]
    fn patience(&self) -> u32 {
        // Relaxed: as above.
        self.sizes.load(Ordering::Relaxed) >> 16
    }
}

/// What is written when batches move.
#[derive(Debug)]
struct Account {
    /// Slots in the depot.
    depot: AtomicUsize,
    /// The controller's integral.
    integral: AtomicU32,
    /// Batches taken.
    taken: AtomicU32,
    /// How often shards were gathered.
    gatherings: AtomicU64,
}

/// A list of free slots in shards. It knows numbers only, whatever they stand for.
#[derive(Debug)]
pub struct Shards<N> {
    nodes: N,
    control: CachePadded<Control>,
    depot: CachePadded<Stack>,
    account: CachePadded<Account>,
    turnstile: Turnstile,
    /// Held by the gatherer.
    gathering: Lock,
    /// The most slots of a batch.
    most: u32,
    /// The process the list was made in. Any other is a child, which lacks the threads that were at work.
    home: u32,
    /// The lanes, then the owners' shards.
    shards: Table<CachePadded<Shard>>,
    hyaline: Hyaline,
    barrier: Barrier,
    /// For lending shards: the first vacant one, plus one; how many were ever lent.
    lending: Lock,
    vacant: AtomicU32,
    lent: AtomicUsize,
}

/// Whether a shard is entered by its owner or by one of many guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum As {
    Owner,
    Guest,
}

impl<N: Nodes> Shards<N> {
    /// Creates a list of the slots of `nodes`, all of them fresh. `shards` are all new, and at least [`LANES`]. A batch
    /// has at most `most` slots: from 1 to [`MAX_BATCH`].
    pub fn new(nodes: N, shards: Table<CachePadded<Shard>>, hyaline: Hyaline, barrier: Barrier, most: u32) -> Self {
        debug_assert!((1..=MAX_BATCH).contains(&most));
        Self {
            nodes,
            control: CachePadded::new(Control {
                frozen: AtomicU32::new(0),
                sizes: AtomicU32::new(Control::sizes(most, most)),
                era: AtomicU64::new(FIRST_ERA),
            }),
            depot: CachePadded::new(Stack::new()),
            account: CachePadded::new(Account {
                depot: AtomicUsize::new(0),
                integral: AtomicU32::new(0),
                taken: AtomicU32::new(0),
                gatherings: AtomicU64::new(0),
            }),
            turnstile: Turnstile::new(),
            gathering: Lock::new(),
            most,
            home: process(),
            shards,
            hyaline,
            barrier,
            lending: Lock::new(),
            vacant: AtomicU32::new(0),
            lent: AtomicUsize::new(0),
        }
    }

    /// The slots' nodes.
    pub fn nodes(&self) -> &N {
        &self.nodes
    }

    // ---- sections

    #[inline(always)]
    fn enter<'s>(&self, shard: &'s Shard, who: As) -> Option<Section<'s>> {
        if who == As::Owner {
            // Relaxed: the fence below is what matters.
            shard.busy.store(1, Ordering::Relaxed);
        } else {
            // Acquire: what the previous thread left, which its `drop` released. Relaxed on failure: nothing is read.
            let entered = shard.busy.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
            entered.ok()?;
        }
        let section = Section::of(shard);
        self.barrier.light();
        // Acquire: what was gathered out of this shard; partner: the Release in `gather`. We cannot see a 0 from before
        // a gathering that took something: the gatherer loaded `busy` after its heavy fence and did not see our 1, so
        // its own word was there before our fence.
        let out = if who == As::Owner { ALL } else { ALL | GUESTS };
        (self.control.frozen.load(Ordering::Acquire) & out == 0).then_some(section)
    }

    /// Marks a free slot as allocated to the caller.
    #[inline(always)]
    fn hand_out(&self, node: &Node) {
        // Relaxed, throughout: the slot is ours alone, and handed on by whatever its user does.
        node.word
            .store(self.control.era.load(Ordering::Relaxed), Ordering::Relaxed);
        node.link.store(LIVE, Ordering::Relaxed);
    }

    /// Pops the first slot of the loaded batch. The caller is inside.
    #[inline(always)]
    fn pop(&self, shard: &Shard) -> Option<u32> {
        // Relaxed, throughout: inside the section, and handed on by its end.
        let (slot, count) = unpack(shard.loaded.load(Ordering::Relaxed));
        if slot == NIL {
            return None;
        }
        let node = self.nodes.node(slot);
        let next = node.link.load(Ordering::Relaxed);
        shard.loaded.store(pack(next, count - 1), Ordering::Relaxed);
        self.hand_out(node);
        Some(slot)
    }

    // ---- allocating

    /// The shard that was lent as `index`.
    #[inline(always)]
    pub fn shard(&self, index: usize) -> &Shard {
        self.shards.get(index)
    }

    /// Allocates a slot through `shard`, a shard of this list that is the caller's. A `None` is proved.
    #[inline(always)]
    pub fn allocate(&self, shard: &Shard, pocket: &Pocket<'_>) -> Option<Taken> {
        if let Some(section) = self.enter(shard, As::Owner) {
            let shard = section.shard;
            // Relaxed, twice: inside the section, and handed on by its end.
            if shard.full.load(Ordering::Relaxed) != 0
                && let Some(node) = pocket.node.get()
            {
                shard.full.store(0, Ordering::Relaxed);
                self.hand_out(node);
                return Some((pocket.slot.get(), pocket.memory.get()));
            }
            if let Some(slot) = self.pop(shard) {
                return Some((slot, core::ptr::null_mut()));
            }
        }
        let slot = self.allocate_slow(shard, As::Owner)?;
        Some((slot, core::ptr::null_mut()))
    }

    /// Allocates a slot through a lane near `hint`.
    pub fn allocate_as_guest(&self, hint: usize) -> Option<u32> {
        for lane in 0..LANES {
            let shard = self.shards.get((hint + lane) % LANES);
            // Relaxed: a look that may spare a failing exchange.
            if shard.busy.load(Ordering::Relaxed) == 0 {
                return self.allocate_slow(shard, As::Guest);
            }
        }
        self.allocate_past(None)
    }

    #[inline(never)]
    fn allocate_slow(&self, shard: &Shard, who: As) -> Option<u32> {
        if let Some(section) = self.enter(shard, who) {
            let shard = section.shard;
            if let Some(slot) = self.pop(shard).or_else(|| self.refill(shard)) {
                return Some(slot);
            }
        }
        self.allocate_past((who == As::Owner).then_some(shard))
    }

    /// Allocates a slot from the depot, or from wherever one is. `own` is the caller's shard, if it has one.
    #[cold]
    fn allocate_past(&self, own: Option<&Shard>) -> Option<u32> {
        self.detour(true).or_else(|| self.gather(own))
    }

    /// Refills a shard whose loaded batch is empty, and pops a slot. The caller is inside.
    fn refill(&self, shard: &Shard) -> Option<u32> {
        let way = shard.under_way();
        // Relaxed: inside the section.
        let previous = shard.previous.load(Ordering::Relaxed);
        let batch = if previous == 0 {
            self.take_batch(false)?
        } else {
            way.store(&shard.previous, 0);
            previous
        };
        way.store(&shard.loaded, batch);
        self.pop(shard)
    }

    /// Takes a batch from the depot, or of fresh slots; see [`Nodes::fresh`] for `again`.
    fn take_batch(&self, again: bool) -> Option<u64> {
        let exist = self.adjust();
        self.go_on(exist);
        if let Some(first) = self.depot.pop(&Batches(&self.nodes)) {
            // Relaxed, twice: the batch is ours; and a number by itself.
            let count = self.nodes.node(first).batch.load(Ordering::Relaxed);
            self.account.depot.fetch_sub(count as usize, Ordering::Relaxed);
            return Some(pack(first, count));
        }
        let (first, count) = self.nodes.fresh(self.control.limit(), again)?;
        for slot in first..first + count {
            let next = if slot + 1 < first + count { slot + 1 } else { NIL };
            // Relaxed: nobody else knows these slots.
            self.nodes.node(slot).link.store(next, Ordering::Relaxed);
        }
        Some(pack(first, count))
    }

    /// Takes one slot, bypassing all shards.
    fn detour(&self, again: bool) -> Option<u32> {
        // A gatherer sees us inside the turnstile and waits, since we carry a batch.
        let _pass = self.turnstile.enter(0);
        self.take_one(again)
    }

    /// Takes one slot of a [batch](Self::take_batch); the others go back. The caller is inside the turnstile, or
    /// gathers.
    fn take_one(&self, again: bool) -> Option<u32> {
        let (first, count) = unpack(self.take_batch(again)?);
        // Relaxed: the batch is ours.
        let rest = self.nodes.node(first).link.load(Ordering::Relaxed);
        if count > 1 {
            self.give(rest, count - 1);
        }
        self.hand_out(self.nodes.node(first));
        Some(first)
    }

    /// Pushes a batch to the depot: `count` slots, chained from `first` on.
    fn give(&self, first: u32, count: u32) {
        // Relaxed, twice: the batch is ours; and a number by itself.
        self.nodes.node(first).batch.store(count, Ordering::Relaxed);
        self.account.depot.fetch_add(count as usize, Ordering::Relaxed);
        self.depot.push(&Batches(&self.nodes), first, first);
    }

    /// Advances the era now and then. Eras advance with allocations, because they tell readers which slots are younger
    /// than they are. Every allocation loads the era, so it changes rarely: about 64 times while all slots that exist
    /// go round once. (Not those that could be: without a limit they are so many that a list of ten slots stays in one
    /// era for 4,096 allocations.)
    fn go_on(&self, exist: u64) {
        let period = (exist / u64::from(self.most) / 64).clamp(1, 64) as u32;
        // Relaxed, twice: a rough count; and eras mean something only behind a fence of their reader.
        if self
            .account
            .taken
            .fetch_add(1, Ordering::Relaxed)
            .is_multiple_of(period)
        {
            self.control.era.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Runs one step of the controller. Returns how many slots exist.
    fn adjust(&self) -> u64 {
        let Extent { fresh, exist, more } = self.nodes.extent();
        // Relaxed throughout: if two threads step at once they make one step, and what is stored is always in bounds.
        let free = fresh + more + self.account.depot.load(Ordering::Relaxed) as u64;
        let state = Controller::from_integral(self.account.integral.load(Ordering::Relaxed) as i32);
        let (state, wish) = state.step(free, exist + more);
        let limit = wish.min(self.most);
        self.account.integral.store(state.integral() as u32, Ordering::Relaxed);
        let sizes = Control::sizes(limit, self.patience(free, limit));
        if self.control.sizes.load(Ordering::Relaxed) != sizes {
            self.control.sizes.store(sizes, Ordering::Relaxed);
        }
        exist
    }

    // ---- freeing

    /// Frees the slot at `memory`, if it is the last one that was in the pocket of `shard`, which is the caller's.
    /// `None` if it is not, or if a thread gathers; nothing was done then.
    ///
    /// # Errors
    /// The slot is not allocated.
    #[inline(always)]
    pub fn free_again(&self, shard: &Shard, pocket: &Pocket<'_>, memory: *mut u8) -> Option<Result<(), FreeAlready>> {
        if pocket.memory.get() != memory {
            return None;
        }
        let node = pocket.node.get()?;
        // Relaxed, throughout: the caller says that the slot is its own; and inside the section.
        if node.link.load(Ordering::Relaxed) != LIVE {
            return Some(Err(FreeAlready));
        }
        let section = self.enter(shard, As::Owner)?;
        // It is allocated, so it is not in the pocket; and no other slot has been in the pocket since.
        debug_assert_eq!(section.shard.full.load(Ordering::Relaxed), 0);
        node.link.store(NIL, Ordering::Relaxed);
        section.shard.full.store(1, Ordering::Relaxed);
        Some(Ok(()))
    }

    /// Frees a slot through `shard`, a shard of this list that is the caller's. `node` is the slot's, and `memory` its
    /// memory, for the next allocation.
    ///
    /// # Errors
    /// The slot is not allocated.
    #[inline(always)]
    pub fn free<'n>(
        &self,
        shard: &Shard,
        pocket: &Pocket<'n>,
        (slot, memory): Taken,
        node: &'n Node,
    ) -> Result<(), FreeAlready> {
        // Relaxed, throughout: the caller says that the slot is its own; and inside the section.
        if node.link.load(Ordering::Relaxed) != LIVE {
            return Err(FreeAlready);
        }
        let Some(section) = self.enter(shard, As::Owner) else {
            self.free_past(slot, node);
            return Ok(());
        };
        let shard = section.shard;
        if shard.full.load(Ordering::Relaxed) != 0 {
            self.push(shard, slot, node);
            return Ok(());
        }
        pocket.slot.set(slot);
        pocket.node.set(Some(node));
        pocket.memory.set(memory);
        node.link.store(NIL, Ordering::Relaxed);
        shard.pocket.store(slot, Ordering::Relaxed);
        shard.full.store(1, Ordering::Relaxed);
        Ok(())
    }

    /// Frees a slot through a lane near `hint`.
    ///
    /// # Errors
    /// The slot is not allocated.
    pub fn free_as_guest(&self, hint: usize, slot: u32, node: &Node) -> Result<(), FreeAlready> {
        // Relaxed: as in `free`.
        if node.link.load(Ordering::Relaxed) != LIVE {
            return Err(FreeAlready);
        }
        match self.enter(self.shards.get(hint % LANES), As::Guest) {
            Some(section) => self.push(section.shard, slot, node),
            None => self.free_past(slot, node),
        }
        Ok(())
    }

    /// Pushes a slot to the loaded batch. The caller is inside.
    #[inline(always)]
    fn push(&self, shard: &Shard, slot: u32, node: &Node) {
        // Relaxed, throughout: the slot is the caller's; and inside the section.
        let (mut first, mut count) = unpack(shard.loaded.load(Ordering::Relaxed));
        if count >= self.control.limit() {
            self.turn_over(shard);
            (first, count) = (NIL, 0);
        }
        node.link.store(first, Ordering::Relaxed);
        shard.loaded.store(pack(slot, count + 1), Ordering::Relaxed);
    }

    /// Gives one slot to the depot, bypassing all shards.
    #[cold]
    fn free_past(&self, slot: u32, node: &Node) {
        // Relaxed: the slot is the caller's.
        node.link.store(NIL, Ordering::Relaxed);
        self.give(slot, 1);
    }

    /// Makes the loaded batch the previous one, and sends the previous one to the depot. The caller is inside.
    #[inline(never)]
    fn turn_over(&self, shard: &Shard) {
        let way = shard.under_way();
        // Relaxed, twice: inside the section.
        let (first, count) = unpack(shard.previous.load(Ordering::Relaxed));
        if first != NIL {
            self.give(first, count);
        }
        way.store(&shard.previous, shard.loaded.load(Ordering::Relaxed));
        way.store(&shard.loaded, 0);
        self.adjust();
    }
}
