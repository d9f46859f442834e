//! [`ShardedFreeList`]: slots of one size for many threads, each with slots of its own at hand; and slots that are read
//! by others while they are given back.
//!
//! ```text
//!   ShardedFreeList ── allocate, deallocate, retire                 any thread, by a lane: a compare-exchange
//!         │
//!         └─ owner() ──▶ Owner ── the same, in a shard of its own   one thread at a time: no locked instruction
//!                          │
//!                          └─ enter() ──▶ Guard ── protect()        what was found stays readable, retired or not
//! ```
//!
//! How slots move is told in [`shards`](super::shards), how readers are waited for in [`hyaline`](super::hyaline),
//! where slots lie in [`slots`](super::slots). Here is what of it is promised to a program.
//!
//! **`deallocate` or `retire`.** A slot that nobody else can reach is *deallocated*: it is free at once. One that
//! others may have found and may still be reading is first taken out of every *place* where they look, then *retired*:
//! it is free when all have left who were inside then and had looked so far. It is memory all the while: nothing of a
//! list is unmapped before the list is dropped, so a slot that is read too late is stale, not gone.
//!
//! **A reader who falls asleep** inside holds back what was allocated before and is retired after, and the others go
//! on: a share of the list is lost to them, not all of it. Exactly: slots are retired in batches, so it is those
//! batches that have such a slot, of 64 slots at the most, or of twice as many as there are readers; and slots
//! allocated in the same era as those before, which is a 64th of the list or one batch, and what shards had in store,
//! two batches each.
//!
//! **"No".** `allocate` fails only if at some moment no slot was free, in whatever shard, of however idle an owner; and
//! neither the limit nor the backing had room for more. (Retired slots are not free as long as somebody may read them.)
//! For that it waits, if need be, for an owner who is in the middle of something, however long, as for one who holds a
//! lock; so who interrupts an owner (a signal handler) must not allocate. Two exceptions: see the type.
//!
//! Worked: 64 threads own a shard each of a list of 10,000 slots, and one of them frees all it has: 128 stay with it,
//! the others are everybody's at once. It goes to sleep; the 10,000th allocation of the others takes the last of its
//! 128.
//!
//! Cost: 3 ns to allocate and deallocate by an owner, 7 where batches come and go; 8 without; see
//! [`hyaline`](super::hyaline) for readers. An asymmetric barrier of the kernel's (Linux, with `std`) makes that so;
//! elsewhere each operation has a fence, ~6 ns. To say "no" costs some microseconds and makes all owners pause: a list
//! that is full for long is a bad list to ask.
//!
//! **After a fork** the child must not use a list that other threads were using: one of them may have been gathering,
//! growing the list or taking a shard, and holds that lock for ever.

use core::alloc::Layout;
use core::fmt;
use core::panic::{RefUnwindSafe, UnwindSafe};
use core::ptr::NonNull;

use crossbeam_utils::CachePadded;

use super::backing::{Backing, Block};
use super::config::ArenaConfig;
use super::error::ArenaError;
use super::hyaline::{Hyaline, Record};
use super::node::{Node, Nodes};
use super::process::ProcessHeap;
use super::shards::{LANES, Shard, Shards, Taken};
use super::slot_box::{SlotBox, SlotList, sealed};
use super::slot_error::SlotError;
use super::slots::{Found, Slots};
use super::stats::ArenaStats;
use crate::sync::{Barrier, Table};

/// Spare nodes for each reader there can be: so many batches too small for the readers can be waiting at a time.
const SPARES_PER_READER: usize = 2;

/// The most owners a list can have.
const MOST_OWNERS: usize = 1 << 16;

/// Slots of one size for many threads, each with slots of its own at hand; and slots that others read while they are
/// given back.
///
/// *Owners.* [`owner`](Self::owner) lends a shard: 3 ns to allocate and deallocate, without a locked instruction. Who
/// has none uses the list itself, by a few lanes: 8 ns. Slots may be given back by whomever, here or there.
///
/// *"No".* `allocate` fails only if at some moment no slot was free, in whatever shard, of however idle an owner; and
/// neither the limit nor the backing had room for more. To say so costs some microseconds and makes all owners pause;
/// and an owner who was preempted in the middle of something is waited for. There are two exceptions:
///
/// - the kernel granted the barrier that makes owners fast when the list was made, and refuses it later, as under a
///   filter of system calls that was put over the process since. Then slots that the shards of *other owners* keep (two
///   batches and one at the most, and what they retired) are not found until these use them, `flush`, or are dropped;
///   and what is retired from then on is never free;
/// - in the child of a fork an owner in the middle of something, who may not exist there, is waited for some seconds.
///
/// *`deallocate` or `retire`.* A slot that nobody else can reach is deallocated: it is free at once. One that others
/// may have found is first taken out of every place where they look, then retired: it is free when all have left who
/// were inside then (a [`Guard`](super::Guard), of an [`Owner`](super::Owner)) and had looked so far. Slots are memory
/// as long as the list lives: nothing is unmapped under a reader. (Hyaline-1S: Nikolaev and Ravindran, PLDI 2021.)
///
/// *A reader who falls asleep* inside holds back what was allocated before, and what is retired in the same batches as
/// that, 64 slots for each at the most, or twice as many as there are readers; the others go on.
///
/// *After a fork* the child must not use a list that other threads were using: one may hold its lock for ever.
///
/// ```
/// use core::alloc::Layout;
/// use pageheap::arena::{ArenaConfig, ShardedFreeList};
///
/// let config = ArenaConfig::new().limit(64 << 20);
/// let list = ShardedFreeList::with_config(Layout::array::<f32>(1536)?, 8, config)?;
/// std::thread::scope(|scope| {
///     for _ in 0..8 {
///         scope.spawn(|| {
///             let owner = list.owner().expect("a shard for each of eight");
///             for _ in 0..1000 {
///                 let vector = owner.boxed([0.5_f32; 1536]).expect("64 MiB are enough");
///                 assert_eq!(vector[1535], 0.5);
///             }
///         });
///     }
/// });
/// assert_eq!(list.stats().allocated, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ShardedFreeList<B: Backing = ProcessHeap> {
    pub(super) shards: Shards<Slots<B, Node>>,
    /// Where the shards, the records and the spares are.
    tables: NonNull<[u8]>,
}

// SAFETY: the tables are reached through the shards, which are shared by atomics; their address is only a number here.
unsafe impl<B: Backing + Send> Send for ShardedFreeList<B> {}
// SAFETY: as above.
unsafe impl<B: Backing + Sync> Sync for ShardedFreeList<B> {}

// Who has caught a panic finds a list that is right: nothing in it unwinds half way. Backings may not (`Backing`); what
// `Guard::protect` is told to load may, and what was protected stays so.
impl<B: Backing + UnwindSafe> UnwindSafe for ShardedFreeList<B> {}
impl<B: Backing + RefUnwindSafe> RefUnwindSafe for ShardedFreeList<B> {}

/// Where the tables are in their block.
struct Plan {
    layout: Layout,
    records: usize,
    spares: usize,
}

impl Plan {
    fn new(owners: usize) -> Option<Self> {
        let shards = Layout::array::<CachePadded<Shard>>(LANES + owners).ok()?;
        let records = Layout::array::<CachePadded<Record>>(owners).ok()?;
        let spares = Layout::array::<Node>(Self::spare_nodes(owners)).ok()?;
        let (layout, records) = shards.extend(records).ok()?;
        let (layout, spares) = layout.extend(spares).ok()?;
        Some(Self {
            layout,
            records,
            spares,
        })
    }

    fn spare_nodes(owners: usize) -> usize {
        SPARES_PER_READER * owners
    }
}

impl<B: Backing> ShardedFreeList<B> {
    /// A list of slots for `layout` on `backing`, with up to `owners` owners at a time, without a limit of its own.
    ///
    /// # Errors
    /// If the layout is too large for any list, there are to be more than 65,536 owners, or the tables cannot be had:
    /// about 300 bytes for each owner.
    pub fn new_in(layout: Layout, owners: usize, backing: B) -> Result<Self, ArenaError> {
        Self::with_config_in(layout, owners, ArenaConfig::new(), backing)
    }

    /// A list of slots for `layout` on `backing`, with up to `owners` owners at a time, set up by `config`. The limit
    /// is on slots, what is kept beside them (16 bytes each), and the tables; `slab` is the size of the first slab.
    ///
    /// # Errors
    /// If the layout is too large for any list, there are to be more than 65,536 owners, or the tables or what is to be
    /// taken at once cannot be had. Nothing is kept then.
    pub fn with_config_in(layout: Layout, owners: usize, config: ArenaConfig, backing: B) -> Result<Self, ArenaError> {
        let too_many = ArenaError::no_shards(owners, MOST_OWNERS);
        // First, for a plan counts more shards than there are owners.
        let plan = (owners <= MOST_OWNERS).then(|| Plan::new(owners)).flatten();
        let plan = plan.ok_or(too_many)?;
        let slots = Slots::new(backing, layout, &config)?;
        slots.account().may_reserve(config.prealloc)?;
        let block = slots.account().take(plan.layout)?;
        if let Err(error) = slots.prealloc(&config) {
            // SAFETY: taken above, and nothing refers to it.
            unsafe { slots.account().give(block.memory) };
            return Err(error);
        }
        // SAFETY: of this plan, just taken, and given back when the list is dropped.
        Ok(unsafe { Self::assemble(slots, owners, &plan, block) })
    }

    /// # Safety
    ///
    /// `block` holds what `plan` says for `owners`, is used for nothing else, and outlives the list.
    unsafe fn assemble(slots: Slots<B, Node>, owners: usize, plan: &Plan, block: Block) -> Self {
        let base = block.memory.cast::<u8>();
        if !block.zeroed {
            // SAFETY: the block is ours alone, and as long as that.
            unsafe { base.write_bytes(0, plan.layout.size()) };
        }
        // SAFETY: in the block, at these places, aligned by `Layout::extend`, zeroed above, and used for nothing else.
        let (shards, records, spares) = unsafe {
            (
                Table::new(base, LANES + owners),
                Table::new(base.add(plan.records), owners),
                Table::new(base.add(plan.spares), Plan::spare_nodes(owners)),
            )
        };
        let barrier = Barrier::new();
        let hyaline = Hyaline::new(&slots, records, spares, barrier);
        Self {
            shards: Shards::new(slots, shards, hyaline, barrier),
            tables: block.memory,
        }
    }

    #[inline(always)]
    pub(super) fn slots(&self) -> &Slots<B, Node> {
        self.shards.nodes()
    }

    /// Where a slot is.
    #[inline(always)]
    pub(super) fn memory(&self, (slot, memory): Taken) -> NonNull<u8> {
        NonNull::new(memory).unwrap_or_else(|| self.slots().address(slot))
    }

    #[inline(always)]
    pub(super) fn whole(&self, taken: Taken) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.memory(taken), self.slots().layout().size())
    }

    #[inline(always)]
    pub(super) fn find(&self, slot: NonNull<u8>) -> Result<Found<'_, Node>, SlotError> {
        let address = slot.as_ptr();
        self.slots().find(address).ok_or(SlotError::foreign(address))
    }

    #[cold]
    pub(super) fn misuse(&self, error: SlotError) -> ! {
        error.abort(self.slots().slot_bytes())
    }

    /// A slot: memory with room for the list's layout, not cleared, the caller's until he gives it back.
    ///
    /// # Errors
    /// If no slot is free in any shard, and neither the limit nor the backing has room for more. (See the type.)
    pub fn allocate(&self) -> Result<NonNull<[u8]>, ArenaError> {
        match self.shards.allocate_as_guest(hint()) {
            Some(slot) => Ok(self.whole((slot, core::ptr::null_mut()))),
            None => Err(self.slots().exhausted()),
        }
    }

    /// Puts a slot back, which is free at once.
    ///
    /// Aborts the process, with a message that names the address, if no slot of the list begins there or it is not
    /// allocated. (Two threads that free one slot within the same nanoseconds can both pass.)
    ///
    /// # Safety
    ///
    /// The slot was allocated from this list, by whomever, and nothing uses it any more.
    pub unsafe fn deallocate(&self, slot: NonNull<u8>) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_deallocate(slot) } {
            self.misuse(error);
        }
    }

    /// As [`deallocate`](Self::deallocate), but misuse is an error.
    ///
    /// # Errors
    /// [`SlotError`] if no slot of the list begins there, or it is not allocated.
    ///
    /// # Safety
    ///
    /// If the slot is allocated, it belongs to the caller, and nothing uses it any more.
    pub unsafe fn try_deallocate(&self, slot: NonNull<u8>) -> Result<(), SlotError> {
        let found = self.find(slot)?;
        let freed = self.shards.free_as_guest(hint(), found.slot, found.node);
        freed.map_err(|_| SlotError::not_allocated(slot.as_ptr()))
    }

    /// Puts a slot back, which is free when all who are inside now, and may have found it, have left.
    ///
    /// Where a batch is full and Hyaline has no room for it (fewer slots than readers), this may wait while somebody
    /// gathers. A free never does.
    ///
    /// Aborts like [`deallocate`](Self::deallocate).
    ///
    /// # Safety
    ///
    /// The slot was allocated from this list, and belongs to the caller. No place leads to it any more in which
    /// somebody, inside or not, may look. Who has found it before by [`protect`](super::Guard::protect), of a guard of
    /// this list, may read it until he drops that.
    pub unsafe fn retire(&self, slot: NonNull<u8>) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_retire(slot) } {
            self.misuse(error);
        }
    }

    /// As [`retire`](Self::retire), but misuse is an error.
    ///
    /// # Errors
    /// [`SlotError`] if no slot of the list begins there, or it is not allocated.
    ///
    /// # Safety
    ///
    /// If the slot is allocated, as for [`retire`](Self::retire).
    pub unsafe fn try_retire(&self, slot: NonNull<u8>) -> Result<(), SlotError> {
        let found = self.find(slot)?;
        let retired = self.shards.retire_as_guest(hint(), found.slot, found.node);
        retired.map_err(|_| SlotError::not_allocated(slot.as_ptr()))
    }

    /// A value in a slot of its own, which is free again when the box is dropped.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate), and if a slot has no room for a `T`. The value is dropped then.
    #[inline]
    pub fn boxed<T>(&self, value: T) -> Result<SlotBox<'_, T, Self>, ArenaError> {
        SlotBox::new(self, || value)
    }

    /// Whether a slot of the list begins at an address.
    #[must_use]
    pub fn owns(&self, address: *const u8) -> bool {
        self.slots().find(address).is_some()
    }

    /// What a slot has room for.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.slots().layout()
    }

    /// Every slot is free, as if none had ever been allocated; pages are kept, contents are not dropped. Shards of
    /// owners that were forgotten can be had again, and the controller begins anew.
    ///
    /// Nobody can have an owner, a guard or a box of the list meanwhile: that does not compile.
    ///
    /// O(owners, and slots used since the last reset): 16 bytes are cleared for each of these.
    ///
    /// ```compile_fail,E0502
    /// use pageheap::arena::ShardedFreeList;
    ///
    /// let mut list = ShardedFreeList::new(core::alloc::Layout::new::<u64>(), 2).unwrap();
    /// let owner = list.owner().unwrap();
    /// list.reset(); // error: `list` is borrowed by `owner`
    /// owner.allocate().unwrap();
    /// ```
    pub fn reset(&mut self) {
        self.shards.reset(Slots::reset);
    }

    /// Counts, in bytes: 1.5 ns for each slot ever used. `peak` is the most that was allocated, retired, or kept by
    /// shards at a time.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        self.slots().stats(self.shards.count_live())
    }

    /// How many slots a shard may keep in a batch just now: the controller's answer to how many are free.
    #[must_use]
    pub fn batch_limit(&self) -> usize {
        self.shards.batch() as usize
    }

    /// How often a slot could be had only by gathering what shards keep, or not at all.
    #[must_use]
    pub fn gatherings(&self) -> u64 {
        self.shards.gatherings()
    }

    /// Every slot is where it should be, and once: for tests, of a list nobody uses meanwhile. Slots that are free, and
    /// those that wait for readers.
    #[doc(hidden)]
    #[cfg(feature = "internals")]
    pub fn census(&self, visit: impl FnMut(NonNull<u8>)) -> super::internals::Census {
        let mut visit = visit;
        self.shards.census(|slot| visit(self.slots().address(slot)))
    }
}

impl<B: Backing> Drop for ShardedFreeList<B> {
    fn drop(&mut self) {
        // SAFETY: taken from this account, whole. Nobody uses the list; tables have no drop, and the slots', which
        // comes after this, does not look at them.
        unsafe { self.slots().account().give(self.tables) };
    }
}

impl<B: Backing> fmt::Debug for ShardedFreeList<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = self.slots().account().shown(f, "ShardedFreeList");
        shown.field("layout", &self.layout()).finish_non_exhaustive()
    }
}

impl<B: Backing> sealed::Sealed for ShardedFreeList<B> {}

impl<B: Backing> SlotList for ShardedFreeList<B> {
    fn slot_layout(&self) -> Layout {
        self.slots().layout()
    }

    fn take(&self) -> Result<(u32, NonNull<u8>), ArenaError> {
        match self.shards.allocate_as_guest(hint()) {
            Some(slot) => Ok((slot, self.slots().address(slot))),
            None => Err(self.slots().exhausted()),
        }
    }

    fn number(&self, memory: NonNull<u8>) -> u32 {
        match self.find(memory) {
            Ok(found) => found.slot,
            Err(error) => self.misuse(error),
        }
    }

    unsafe fn put(&self, slot: u32, memory: NonNull<u8>) {
        let node = self.slots().node(slot);
        if self.shards.free_as_guest(hint(), slot, node).is_err() {
            self.misuse(SlotError::not_allocated(memory.as_ptr()));
        }
    }
}

/// A number that differs between threads, mostly: their stacks do.
pub(super) fn hint() -> usize {
    let here = 0_u8;
    let stack = (&raw const here).addr() >> 16;
    // Fibonacci hashing: neighbours far apart.
    (stack as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) as usize >> (usize::BITS - 16)
}
