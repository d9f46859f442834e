//! [`ShardedFreeList`]: slots of one size for many threads, each with a private supply; and slots that other threads
//! may still be reading when they are freed.
//!
//! ```text
//!   ShardedFreeList ── allocate, deallocate, retire                 any thread, by a lane: a compare-exchange
//!         │
//!         └─ owner() ──▶ Owner ── the same, in a shard of its own   one thread at a time: no locked instruction
//!                          │
//!                          └─ enter() ──▶ Guard ── protect()        what was found stays readable, retired or not
//! ```
//!
//! [`shards`](super::shards) explains how slots move, [`hyaline`](super::hyaline) how readers are waited for,
//! [`slots`](super::slots) where slots lie. This module states what programs can rely on.
//!
//! **`deallocate` or `retire`.** A slot that no other thread can reach is *deallocated*: it is free at once. A slot
//! that others may have found and may still be reading is first removed from every *place* where they look, then
//! *retired*: it becomes free once every reader that was inside at that time, and may have found it, has left. It
//! remains memory throughout: a list unmaps nothing before it is dropped, so a slot that is read too late is stale, not
//! gone. Slots are retired in batches, so "at that time" is when the batch is passed on: when it is full, at a `flush`,
//! or when an allocation finds no other slot. A reader that enters before that counts, too.
//!
//! **A sleeping reader** that is inside holds back slots that were allocated before it fell asleep and retired
//! afterwards. The other threads carry on: they lose a part of the list, not all of it. Precisely, because slots are
//! retired in batches and allocated in eras, it holds back
//!
//! - every batch that contains such a slot: 64 slots each at most (if slots are longer than 8 KiB, 512 KiB of them, but
//!   at least one), or twice the number of readers if that is more;
//! - every batch that was not yet passed on when it entered: one for each shard and lane;
//! - slots allocated in the same era: a 64th of those that exist, or one batch;
//! - slots that shards had in stock: two batches each.
//!
//! **"No".** `allocate` fails only if at some moment no slot was free in any shard, however idle its owner, and the
//! limit or the backing had no room for more. (Retired slots are not free while a thread may still read them.) To prove
//! this it may have to wait for an owner that is in the middle of an operation, for however long, as for a lock holder.
//! So code that interrupts an owner (a signal handler) must not allocate. For four exceptions see the type.
//!
//! Worked: each of 64 threads owns a shard of a list of 10,000 slots, and one of them frees all it has. 128 slots stay
//! in its shard; the others are available to all threads at once. The owner goes to sleep. The 10,000th allocation of
//! the other threads takes the last of its 128.
//!
//! Cost: 3 ns for an owner to allocate and deallocate, 7 if batches move; 8 without an owner;
//! [`hyaline`](super::hyaline) has the cost of readers. The owner's speed relies on an asymmetric barrier of the kernel
//! (Linux and Windows, with `std`, but not Wine); elsewhere each operation has a fence, ~6 ns. A "no" costs some
//! microseconds and makes all owners pause: do not keep asking a list that stays full.
//!
//! **After a fork** the child must not use a list that other threads were using. One of them may have been gathering,
//! growing the list or taking a shard; in the child the lock it held is never released.

use core::alloc::Layout;
use core::fmt;
use core::panic::{RefUnwindSafe, UnwindSafe};
use core::ptr::NonNull;

use crossbeam_utils::CachePadded;

use super::backing::{Backing, Block};
use super::config::ArenaConfig;
use super::controller::MAX_BATCH;
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

/// Spare nodes per possible reader: this many batches too small for the readers can be pending per reader at a time.
const SPARES_PER_READER: usize = 2;

/// The most bytes of a batch, unless that is a single slot. What a shard has in stock is memory that its owner does not
/// use, and of long slots a fence or an exchange for each costs little beside what is written to them.
const BATCH_BYTES: usize = 512 << 10;

/// The maximum number of owners of a list.
const MOST_OWNERS: usize = 1 << 16;

/// Slots of one size for many threads, each with a private supply; and slots that other threads may still be reading
/// when they are freed.
///
/// *Owners.* [`owner`](Self::owner) lends a shard: 3 ns to allocate and deallocate, without a locked instruction. A
/// thread without a shard uses the list itself, through a few shared lanes: 8 ns. Any thread may free a slot, through
/// its owner or the list, whichever allocated it. A list has at most 4,026,531,839 slots.
///
/// *"No".* `allocate` fails only if at some moment no slot was free in any shard, however idle its owner, and the limit
/// or the backing had no room for more. To prove this takes some microseconds and makes all owners pause. If an owner
/// was preempted in the middle of an operation, the proof waits for it. There are four exceptions:
///
/// - The kernel granted the barrier that makes owners fast when the list was made, but refuses it later, for example
///   because the process has since installed a system call filter. Slots in the shards of *other owners* (at most two
///   batches and one slot each, and what they retired) are then not found until those owners use them, call `flush` or
///   are dropped. Slots retired from then on never become free.
/// - In the child of a fork, an owner in the middle of an operation may not exist. The proof waits for it for some
///   seconds only.
/// - A thread has retired slots that readers held back, and is preempted before it has put them where such slots wait.
///   If those readers leave meanwhile, the proof does not see the slots (a batch at most) that the thread has in hand.
/// - The backing had no slab as large as all before it, at least 31 times, and the list took shorter ones. From then on
///   it waits for one about that large, though the backing may have room for a slot. See [`FreeList`](super::FreeList).
///
/// *`deallocate` or `retire`.* A slot that no other thread can reach is deallocated: it is free at once. A slot that
/// others may have found is first removed from every place where they look, then retired: it becomes free once every
/// reader that was inside at that time (held a [`Guard`](super::Guard) of an [`Owner`](super::Owner)), and may have
/// found it, has left. Slots wait in their shard for a batch to be full, or for a `flush` (the owner's; for the lanes
/// [the list's](Self::flush)), or until an allocation finds no other slot; a reader that enters meanwhile is waited for
/// as well. Slots remain memory as long as the list lives: nothing is unmapped under a reader. (Hyaline-1S: Nikolaev
/// and Ravindran, PLDI 2021.)
///
/// *A sleeping reader* that is inside holds back slots allocated before it fell asleep, and slots retired in the same
/// batches with them: at most 64 for each, or twice the number of readers. The other threads carry on.
///
/// *After a fork* the child must not use a list that other threads were using: its lock may be held forever.
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
    /// The block that holds the shards, the records and the spares.
    tables: NonNull<[u8]>,
}

// SAFETY: the tables are accessed through the shards, which are shared by atomics; the address itself is only a number.
unsafe impl<B: Backing + Send> Send for ShardedFreeList<B> {}
// SAFETY: as above.
unsafe impl<B: Backing + Sync> Sync for ShardedFreeList<B> {}

// The list is consistent after a caught panic, because nothing in it unwinds half way. Backings must not unwind
// (`Backing`). A `load` passed to `Guard::protect` may; what was protected before stays protected.
impl<B: Backing + UnwindSafe> UnwindSafe for ShardedFreeList<B> {}
impl<B: Backing + RefUnwindSafe> RefUnwindSafe for ShardedFreeList<B> {}

/// Where the tables lie in their block.
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
    /// Creates a list of slots for `layout` on `backing`, with up to `owners` owners at a time and no limit of its own.
    /// With 0 it has none, and so no readers: all threads use the list itself, and what is retired waits for nobody.
    ///
    /// # Errors
    /// Fails if `owners` exceeds 65,536, or if there is no memory for the tables: about 300 bytes per owner. Whether
    /// the backing has room for a slot of any layout shows when one is allocated.
    pub fn new_in(layout: Layout, owners: usize, backing: B) -> Result<Self, ArenaError> {
        Self::with_config_in(layout, owners, ArenaConfig::new(), backing)
    }

    /// Creates a list of slots for `layout` on `backing`, with up to `owners` owners at a time, configured by `config`.
    /// The limit covers the slots, their bookkeeping (16 bytes each) and the tables; `slab` is the size of the first
    /// slab, unless `prealloc` is.
    ///
    /// # Errors
    /// Fails if `owners` exceeds 65,536, or if there is no memory for the tables or the preallocation. Nothing is then
    /// kept.
    pub fn with_config_in(layout: Layout, owners: usize, config: ArenaConfig, backing: B) -> Result<Self, ArenaError> {
        let too_many = ArenaError::no_shards(owners, MOST_OWNERS);
        // Checked first: a plan counts more shards than there are owners.
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
    /// `block` is as large as `plan` says for `owners`, is used for nothing else, and outlives the list.
    unsafe fn assemble(slots: Slots<B, Node>, owners: usize, plan: &Plan, block: Block) -> Self {
        let base = block.memory.cast::<u8>();
        if !block.zeroed {
            // SAFETY: the block is ours alone, and is that long.
            unsafe { base.write_bytes(0, plan.layout.size()) };
        }
        // SAFETY: in the block, at these offsets, aligned by `Layout::extend`, zeroed above, and used for nothing else.
        let (shards, records, spares) = unsafe {
            (
                Table::new(base, LANES + owners),
                Table::new(base.add(plan.records), owners),
                Table::new(base.add(plan.spares), Plan::spare_nodes(owners)),
            )
        };
        let barrier = Barrier::new();
        let hyaline = Hyaline::new(&slots, records, spares, barrier);
        let most = (BATCH_BYTES / slots.slot_bytes()).clamp(1, MAX_BATCH as usize) as u32;
        Self {
            shards: Shards::new(slots, shards, hyaline, barrier, most),
            tables: block.memory,
        }
    }

    #[inline(always)]
    pub(super) fn slots(&self) -> &Slots<B, Node> {
        self.shards.nodes()
    }

    /// The address of a slot.
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

    /// Allocates a slot: uninitialised memory for the list's layout. It is the caller's until it is deallocated or
    /// retired.
    ///
    /// # Errors
    /// Fails if no slot is free in any shard, and the limit or the backing has no room for more. (See the type.)
    pub fn allocate(&self) -> Result<NonNull<[u8]>, ArenaError> {
        match self.shards.allocate_as_guest(hint()) {
            Some(slot) => Ok(self.whole((slot, core::ptr::null_mut()))),
            None => Err(self.slots().exhausted()),
        }
    }

    /// Frees a slot at once.
    ///
    /// Aborts the process, with a message that names the address, if no slot of the list begins there or the slot is
    /// not allocated. (If two threads free the same slot within nanoseconds of each other, both can pass.)
    ///
    /// # Safety
    ///
    /// The slot was allocated from this list, by any thread or owner, and nothing uses it any more.
    pub unsafe fn deallocate(&self, slot: NonNull<u8>) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_deallocate(slot) } {
            self.misuse(error);
        }
    }

    /// Like [`deallocate`](Self::deallocate), but returns an error on misuse.
    ///
    /// # Errors
    /// [`SlotError`] if no slot of the list begins there, or the slot is not allocated.
    ///
    /// # Safety
    ///
    /// If the slot is allocated, it belongs to the caller, and nothing uses it any more. If not, no other thread
    /// allocates or frees it meanwhile.
    pub unsafe fn try_deallocate(&self, slot: NonNull<u8>) -> Result<(), SlotError> {
        let found = self.find(slot)?;
        let freed = self.shards.free_as_guest(hint(), found.slot, found.node);
        freed.map_err(|_| SlotError::not_allocated(slot.as_ptr()))
    }

    /// Frees a slot once every reader that is inside now, or enters before its batch is passed on, and may have found
    /// it, has left. (See the type.) Its contents are never dropped: retire only values that need no drop.
    ///
    /// If a batch is full and Hyaline has no room for it (it has fewer slots than there are readers), this may wait
    /// while another thread gathers. A `deallocate` never waits.
    ///
    /// Aborts like [`deallocate`](Self::deallocate).
    ///
    /// # Safety
    ///
    /// The slot was allocated from this list and belongs to the caller. No place in which any thread, inside or not,
    /// may look leads to it any more. A thread that found it before, by [`protect`](super::Guard::protect) of a guard
    /// of this list, may read it until it drops that guard.
    pub unsafe fn retire(&self, slot: NonNull<u8>) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_retire(slot) } {
            self.misuse(error);
        }
    }

    /// Like [`retire`](Self::retire), but returns an error on misuse.
    ///
    /// # Errors
    /// [`SlotError`] if no slot of the list begins there, or the slot is not allocated.
    ///
    /// # Safety
    ///
    /// If the slot is allocated, as for [`retire`](Self::retire). If not, no other thread allocates or frees it
    /// meanwhile.
    pub unsafe fn try_retire(&self, slot: NonNull<u8>) -> Result<(), SlotError> {
        let found = self.find(slot)?;
        let retired = self.shards.retire_as_guest(hint(), found.slot, found.node);
        retired.map_err(|_| SlotError::not_allocated(slot.as_ptr()))
    }

    /// Makes the slots in the lanes, which threads without an owner use, available to all threads: free slots at once,
    /// retired ones as soon as nobody reads them. [`Owner::flush`](super::Owner::flush) does so for an owner's shard.
    ///
    /// If another thread is gathering slots at this moment, because it found no free one, or is at work in a lane, some
    /// may stay: the next thread that gathers finds them, or whoever uses or flushes that lane next. So may retired
    /// slots, where they are no more than the readers inside and many such small batches wait for readers already:
    /// until a later flush, until enough are retired there, or until an allocation finds no other slot.
    ///
    /// Costs a compare-exchange for each of the eight lanes and each batch in them, and a heavy fence, up to some
    /// microseconds, for each lane that has retired slots.
    pub fn flush(&self) {
        self.shards.flush_lanes();
    }

    /// Allocates a value in a slot of its own. Dropping the box frees the slot. [`SlotBox::try_new_in`] makes boxes
    /// that keep the list alive.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate), and if a `T` does not fit a slot. The value is then dropped.
    #[inline]
    pub fn boxed<T>(&self, value: T) -> Result<SlotBox<T, &Self>, ArenaError> {
        SlotBox::new(self, || value)
    }

    /// Like [`boxed`](Self::boxed), but calls `make` only once a slot has been found. If `make` panics, the slot is
    /// freed.
    ///
    /// # Errors
    /// As for [`boxed`](Self::boxed), except that there is no value to drop.
    #[inline]
    pub fn boxed_with<T>(&self, make: impl FnOnce() -> T) -> Result<SlotBox<T, &Self>, ArenaError> {
        SlotBox::new(self, make)
    }

    /// Whether a slot of the list begins at `address`.
    #[must_use]
    pub fn owns(&self, address: *const u8) -> bool {
        self.slots().find(address).is_some()
    }

    /// The size and alignment of a slot.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.slots().layout()
    }

    /// Frees every slot, as if none had ever been allocated. Pages are kept; contents are not dropped. Shards of leaked
    /// owners can be lent again, and the controller starts afresh.
    ///
    /// No owner, guard or box of the list can exist meanwhile: that does not compile.
    ///
    /// O(owners, and slots used since the last reset): clears 16 bytes for each of these slots.
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

    /// Returns statistics, in bytes. Takes 1.5 ns for each slot ever used. `committed` and `peak` both count all slots
    /// that shards, or the depot between them, have ever had at one time: allocated, retired or waiting there. Some of
    /// these may never have been handed out.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        self.slots().stats(self.shards.count_live())
    }

    /// How many more bytes may be reserved: `usize::MAX` without a limit. Free slots are not included.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.slots().account().left()
    }

    /// The backing.
    #[must_use]
    pub fn backing(&self) -> &B {
        self.slots().account().backing()
    }

    /// How many slots a batch of a shard may hold at present: set by the controller, from the share of slots that are
    /// free. At most 64, and at most 512 KiB of slots, but at least one.
    #[must_use]
    pub fn batch_limit(&self) -> usize {
        self.shards.batch() as usize
    }

    /// How often a slot could be had only by gathering the shards' slots, or not at all.
    #[must_use]
    pub fn gatherings(&self) -> u64 {
        self.shards.gatherings()
    }

    /// Visits every slot that is free or waits for readers, once each, and counts slots by where they are. For tests,
    /// while no thread uses the list.
    #[doc(hidden)]
    #[cfg(feature = "internals")]
    pub fn census(&self, visit: impl FnMut(NonNull<u8>)) -> super::internals::Census {
        let mut visit = visit;
        self.shards.census(|slot| visit(self.slots().address(slot)))
    }
}

impl<B: Backing> Drop for ShardedFreeList<B> {
    fn drop(&mut self) {
        // SAFETY: taken from this account, whole. Nobody uses the list. Tables have no drop, and that of the slots,
        // which runs after this, does not look at them.
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

/// A number that mostly differs between threads, because their stacks do.
pub(super) fn hint() -> usize {
    let here = 0_u8;
    let stack = (&raw const here).addr() >> 16;
    // Fibonacci hashing: spreads neighbours.
    (stack as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) as usize >> (usize::BITS - 16)
}
