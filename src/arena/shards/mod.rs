//! Slots of one size, in shards: each owner's at hand without a locked instruction, anybody's when there are no others.
//!
//! ```text
//!   shard of A        shard of B        lanes, for who owns none         one cache line each, and one between
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
//! *Shards.* Two batches to each, so that whoever takes and gives at the border of one does not go to the depot each
//! time (Bonwick's magazines). How large a batch may get is the [controller](super::controller)'s. And an owner's
//! [pocket](Pocket) for one slot.
//!
//! *Sections.* An owner is alone in his shard, but for one who gathers. So he says that he is inside, looks whether
//! somebody gathers, and goes on; that is a store, a load, and a store at the end, with a barrier between that costs
//! nothing where the kernel has an asymmetric one ([`Barrier`]). Who gathers says so, makes the heavy barrier,
//! and then looks who is inside: either he sees the owner, or the owner sees him and keeps out. Those who own no shard
//! share a few lanes, which are the same but entered by a compare-exchange.
//!
//! *A "no" is proved.* No slot can be had only if at some moment there was none: not in the depot, not in any shard,
//! however idle its owner. Who gathers takes the slots of every shard that is still. A shard in the middle of something
//! is left alone, unless it has slots and nobody else has: then he waits for that one to end, however long, as one
//! waits for a lock. That and the gatherer's lock are the only waits there are. While all are kept out each can end
//! what it was at, and no more: so a shard that had no slot at two looks had none between them; and the depot that was
//! empty and the same at two looks was so between them, too. One moment lies within all of these. Who carries slots
//! from one place to another says so first (`moving`, or the turnstile), and is waited for like one who has slots.
//!
//! *Two exceptions.* The kernel may refuse the barrier that it granted when the list was made: a filter of system calls
//! put over the process since. Then nobody can tell whether an owner is inside: they go on. What their shards keep, and
//! what is retired from then on, is out of reach until they use it themselves, or give it to all. The asker's own
//! shard, the lanes, the depot, the slots never used: all that is still searched. And in the child of a fork, who was
//! inside may be no more: there the wait ends after some seconds.
//!
//! *Frees never wait*: kept out of its shard, a free is a batch of one in the depot. Who retires may: a batch that
//! Hyaline has no room for goes into a shard, and that is closed while somebody gathers.
//!
//! Worked: an owner frees and allocates in turns: the slot goes to the pocket and comes back, 3 ns for both. He frees
//! 200 slots: one is in the pocket, 64 fill `loaded`, the next makes them `previous`, and from the 130th on every 64th
//! sends 64 to the depot by one compare-exchange.

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
use super::node::{Batches, LIVE, Node, Nodes};
use super::stack::{NIL, Stack};
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Barrier, Lock, Ordering, SHARED, Table, Turnstile, process};
use shard::{Section, pack, unpack};

/// Shards for those who own none.
pub const LANES: usize = SHARED;

/// Everybody is to keep out of the shards.
const ALL: u32 = 1;

/// Those who own none are; owners go on, as nobody but they can come to their shards.
const GUESTS: u32 = 2;

/// A slot freed that is not allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeAlready;

/// What every operation reads and few write.
#[derive(Debug)]
struct Control {
    /// Who is to keep out while somebody gathers: [`ALL`], or [`GUESTS`]; or 0.
    frozen: AtomicU32,
    /// How many slots a batch may have.
    limit: AtomicU32,
    /// The present era; see [`Hyaline`].
    era: AtomicU64,
}

/// What is written where batches move.
#[derive(Debug)]
struct Account {
    /// Slots in the depot.
    depot: AtomicUsize,
    /// The controller's integral.
    integral: AtomicU32,
    /// Batches taken.
    taken: AtomicU32,
    /// Times that shards were gathered.
    gatherings: AtomicU64,
}

/// A list of free slots in shards: numbers only, whatever they stand for.
#[derive(Debug)]
pub struct Shards<N> {
    nodes: N,
    control: CachePadded<Control>,
    depot: CachePadded<Stack>,
    account: CachePadded<Account>,
    turnstile: Turnstile,
    /// For who gathers.
    gathering: Lock,
    /// The process the list was made in: another is a child, which does not have the threads that were at work.
    home: u32,
    /// The lanes, then the owners' shards.
    shards: Table<CachePadded<Shard>>,
    hyaline: Hyaline,
    barrier: Barrier,
    /// For the lending of shards: the first vacant one, plus one; how many were ever lent.
    lending: Lock,
    vacant: AtomicU32,
    lent: AtomicUsize,
}

/// Whether a shard is entered as its owner, or as one of many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum As {
    Owner,
    Guest,
}

impl<N: Nodes> Shards<N> {
    /// A list of the slots of `nodes`, all of them never used. `shards` are all new, and at least [`LANES`].
    pub fn new(nodes: N, shards: Table<CachePadded<Shard>>, hyaline: Hyaline, barrier: Barrier) -> Self {
        Self {
            nodes,
            control: CachePadded::new(Control {
                frozen: AtomicU32::new(0),
                limit: AtomicU32::new(MAX_BATCH),
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
            // Acquire: what the last one left; his `drop` released it. Relaxed in vain.
            let entered = shard.busy.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
            entered.ok()?;
        }
        let section = Section::of(shard);
        self.barrier.light();
        // Acquire: what was gathered out of this shard; partner: the Release in `gather`. We cannot see a 0 from before
        // a gathering that took something: it looked at `busy` behind its heavy fence and did not see our 1, so its
        // own word was there before our fence.
        let out = if who == As::Owner { ALL } else { ALL | GUESTS };
        (self.control.frozen.load(Ordering::Acquire) & out == 0).then_some(section)
    }

    /// Makes a slot that was free the caller's.
    #[inline(always)]
    fn hand_out(&self, node: &Node) {
        // Relaxed, throughout: the slot is ours alone, and handed on by whatever its user does.
        node.word
            .store(self.control.era.load(Ordering::Relaxed), Ordering::Relaxed);
        node.link.store(LIVE, Ordering::Relaxed);
    }

    /// The first slot of the batch that is loaded. The caller is inside.
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

    /// Takes a slot, by a shard of this list that is the caller's. `None` is proved.
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

    /// Takes a slot, by a lane near `hint`.
    pub fn allocate_as_guest(&self, hint: usize) -> Option<u32> {
        for lane in 0..LANES {
            let shard = self.shards.get((hint + lane) % LANES);
            // Relaxed: a look, to spare an exchange in vain.
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

    /// Takes a slot from the depot, or wherever there is one. `own` is the caller's shard, if he has one.
    #[cold]
    fn allocate_past(&self, own: Option<&Shard>) -> Option<u32> {
        self.detour().or_else(|| self.gather(own))
    }

    /// Takes a slot into a shard that has none loaded, and as many more as a batch has. The caller is inside.
    fn refill(&self, shard: &Shard) -> Option<u32> {
        let way = shard.under_way();
        // Relaxed: inside the section.
        let previous = shard.previous.load(Ordering::Relaxed);
        let batch = if previous == 0 {
            self.take_batch()?
        } else {
            way.store(&shard.previous, 0);
            previous
        };
        way.store(&shard.loaded, batch);
        self.pop(shard)
    }

    /// A batch from the depot, or of slots never used.
    fn take_batch(&self) -> Option<u64> {
        let all = self.adjust();
        self.go_on(all);
        if let Some(first) = self.depot.pop(&Batches(&self.nodes)) {
            // Relaxed, twice: the batch is ours; and a number by itself.
            let count = self.nodes.node(first).batch.load(Ordering::Relaxed);
            self.account.depot.fetch_sub(count as usize, Ordering::Relaxed);
            return Some(pack(first, count));
        }
        let (first, count) = self.nodes.fresh(self.control.limit.load(Ordering::Relaxed))?;
        for slot in first..first + count {
            let next = if slot + 1 < first + count { slot + 1 } else { NIL };
            // Relaxed: nobody else knows of these.
            self.nodes.node(slot).link.store(next, Ordering::Relaxed);
        }
        Some(pack(first, count))
    }

    /// One slot, past all shards.
    fn detour(&self) -> Option<u32> {
        // Whoever gathers sees us inside and waits, for we carry a batch.
        let _pass = self.turnstile.enter(0);
        self.take_one()
    }

    /// One slot of a batch; the others go back. For who is inside the turnstile, or gathers.
    fn take_one(&self) -> Option<u32> {
        let (first, count) = unpack(self.take_batch()?);
        // Relaxed: the batch is ours.
        let rest = self.nodes.node(first).link.load(Ordering::Relaxed);
        if count > 1 {
            self.give(rest, count - 1);
        }
        self.hand_out(self.nodes.node(first));
        Some(first)
    }

    /// Puts a batch into the depot: `count` slots, chained from `first` on.
    fn give(&self, first: u32, count: u32) {
        // Relaxed, twice: the batch is ours; and a number by itself.
        self.nodes.node(first).batch.store(count, Ordering::Relaxed);
        self.account.depot.fetch_add(count as usize, Ordering::Relaxed);
        self.depot.push(&Batches(&self.nodes), first, first);
    }

    /// Eras go on with what is allocated, as readers are told by them what is younger than they. They are read with
    /// each allocation, so they change seldom: about 64 times while all slots go round.
    fn go_on(&self, all: u64) {
        let period = (all / u64::from(MAX_BATCH) / 64).clamp(1, 64) as u32;
        // Relaxed, twice: a rough count; and eras mean something only behind a fence of their reader's.
        if self
            .account
            .taken
            .fetch_add(1, Ordering::Relaxed)
            .is_multiple_of(period)
        {
            self.control.era.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// One step of the controller. How many slots there can be.
    fn adjust(&self) -> u64 {
        let (fresh, all) = self.nodes.extent();
        // Relaxed throughout: two who step at once make one step, and what is stored is always in bounds.
        let free = fresh + self.account.depot.load(Ordering::Relaxed) as u64;
        let state = Controller::from_integral(self.account.integral.load(Ordering::Relaxed) as i32);
        let (state, limit) = state.step(free, all);
        self.account.integral.store(state.integral() as u32, Ordering::Relaxed);
        if self.control.limit.load(Ordering::Relaxed) != limit {
            self.control.limit.store(limit, Ordering::Relaxed);
        }
        all
    }

    // ---- freeing

    /// Puts the slot at `memory` back, if it is the one that was last in the pocket of a shard that is the caller's.
    /// `None` if it is not, or somebody gathers; then nothing was done.
    ///
    /// # Errors
    /// The slot is not allocated.
    #[inline(always)]
    pub fn free_again(&self, shard: &Shard, pocket: &Pocket<'_>, memory: *mut u8) -> Option<Result<(), FreeAlready>> {
        if pocket.memory.get() != memory {
            return None;
        }
        let node = pocket.node.get()?;
        // Relaxed, throughout: a slot that is the caller's, as he says; and inside the section.
        if node.link.load(Ordering::Relaxed) != LIVE {
            return Some(Err(FreeAlready));
        }
        let section = self.enter(shard, As::Owner)?;
        // It is allocated, so it is not in the pocket; and nothing else has been since.
        debug_assert_eq!(section.shard.full.load(Ordering::Relaxed), 0);
        node.link.store(NIL, Ordering::Relaxed);
        section.shard.full.store(1, Ordering::Relaxed);
        Some(Ok(()))
    }

    /// Puts a slot back, by a shard of this list that is the caller's. `node` is the slot's; `memory` where its memory
    /// is, for who allocates it next.
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
        // Relaxed, throughout: a slot that is the caller's, as he says; and inside the section.
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

    /// The same by a lane near `hint`.
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

    /// Adds a slot to the batch that is loaded. The caller is inside.
    #[inline(always)]
    fn push(&self, shard: &Shard, slot: u32, node: &Node) {
        // Relaxed, throughout: the slot is the caller's; and inside the section.
        let (mut first, mut count) = unpack(shard.loaded.load(Ordering::Relaxed));
        if count >= self.control.limit.load(Ordering::Relaxed) {
            self.turn_over(shard);
            (first, count) = (NIL, 0);
        }
        node.link.store(first, Ordering::Relaxed);
        shard.loaded.store(pack(slot, count + 1), Ordering::Relaxed);
    }

    /// Gives one slot to the depot, past all shards.
    #[cold]
    fn free_past(&self, slot: u32, node: &Node) {
        // Relaxed: the slot is the caller's.
        node.link.store(NIL, Ordering::Relaxed);
        self.give(slot, 1);
    }

    /// What is loaded becomes the previous batch, and the previous one goes to the depot. The caller is inside.
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
