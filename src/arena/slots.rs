//! Slots in memory: slabs of them, each as large as all before it, with a node for each slot behind them.
//!
//! ```text
//!   slab 0        slab 1        slab 2                      slab 3
//!   ┌────────┐    ┌────────┐    ┌────────┬────────┐         ┌────────┬────────┬────────┬─ ─ ─     slots
//!   │ 1 … P  │    │ … 2P   │    │ …               4P        │ …                                8P
//!   └┬┬┬┬┬┬┬┬┘    └┬┬┬┬┬┬┬┬┘    └┬┬┬┬┬┬┬┬┬┬┬┬┬┬┬┬─          └┬┬┬┬┬┬┬┬┬┬─ ─                      nodes, behind them
//! ```
//!
//! A slot is known by its number, from 1. Because slabs double, the highest bit of a number gives its slab. Finding the
//! slot at an address takes two looks on average, since half of all slots lie in the last slab, if none was cut short.
//!
//! **Short slabs.** If the limit or the backing has no room for a whole slab, the slab is as long as possible, and the
//! next one begins with the number behind its end. The slab of a number is then the one that its highest bit gives, or
//! one of those behind it. The directory has 64 entries, of which slabs that double need 33 at the most. So that the
//! others do not use them up, the entries left are always enough to double to the most slots there can be: if a slab
//! would be too short for that, the list waits until the backing has a longer one. (What the list's own limit leaves is
//! always taken, as there will be no more.)
//!
//! Nodes lie in the slab, behind the slots, so the limit covers both. Slots themselves are never touched.
//!
//! From address to number without a division: let the slot's size be odd × 2ᵗ, and i the inverse of the odd part modulo
//! 2⁶⁴ (which exists, as it is odd). An offset multiplied by i and rotated right by t is the quotient if it is a
//! multiple of the size. If it is not, the result is larger than any quotient (Granlund and Montgomery, 1994). So one
//! comparison with the number of slots decides both whether the address is in the slab and whether a slot begins there.
//!
//! Worked: slots of 6144 bytes, 3 × 2¹¹; 3⁻¹ = 0xAAAA…AAAB. Offset 18,432 is 9 × 2¹¹; multiplied by 3⁻¹ it is 3 × 2¹¹,
//! and rotated it is 3, the place. Offset 2048 is 2¹¹ and yields 3⁻¹ without its highest bits; offset 18,433 has a one
//! that the rotation moves to the top. Both results are larger than any place.
//!
//! Worked: these slots on a heap whose limit rises by a page at a time. The list takes 37 slabs of one slot, and 27
//! entries are left. One slot more and 26 entries would be too few, 38 · 2²⁶; 23 more are enough. It waits for these,
//! 18 pages.

use core::alloc::Layout;
use core::cell::UnsafeCell;
use core::hint::cold_path;
use core::ptr::NonNull;

use super::account::{Account, HUGE_BYTES};
use super::backing::{Backing, Block};
use super::config::ArenaConfig;
use super::error::{ArenaError, Reason};
use super::hyaline::{MAX_SLOTS, Record};
use super::node::{Extent, Node, Nodes};
use super::numbers::{inverse, pack, unpack};
use super::shards::Shard;
use super::stats::ArenaStats;
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Lock, Ordering, Zeroed};

/// The maximum number of slabs. Of these the first, and one for each bit of a number, may be as long as all before.
const MAX_SLABS: usize = 64;

/// The size of the first slab, unless the configuration sets another.
const FIRST_BYTES: usize = 1 << 18;

// SAFETY: atomic integers, of which zero is a value, and `new` sets all to zero. No drop.
unsafe impl Zeroed for Node {
    fn zeroed() -> Self {
        Self::new()
    }
}

// SAFETY: as above.
unsafe impl Zeroed for crossbeam_utils::CachePadded<Shard> {
    fn zeroed() -> Self {
        Self::new(Shard::new())
    }
}

// SAFETY: as above.
unsafe impl Zeroed for crossbeam_utils::CachePadded<Record> {
    fn zeroed() -> Self {
        Self::new(Record::new())
    }
}

/// One slab. An entry without a slab has no slots.
#[derive(Clone, Copy, Debug)]
struct Slab {
    memory: NonNull<[u8]>,
    /// Behind the slots, in `memory`.
    nodes: NonNull<u8>,
    /// The first slot's number, less one; and the number of slots.
    start: u32,
    count: u32,
}

impl Slab {
    const NONE: Self = Self {
        memory: NonNull::slice_from_raw_parts(NonNull::dangling(), 0),
        nodes: NonNull::dangling(),
        start: 0,
        count: 0,
    };
}

/// A slot found by its address or by its number.
#[derive(Debug)]
pub(super) struct Found<'s, T> {
    pub(super) slot: u32,
    pub(super) node: &'s T,
    /// The address. It gives access to the whole slot, whatever part of it the requested address came from.
    pub(super) memory: NonNull<u8>,
}

/// Slots of one size on blocks of a backing, with a `T` for each.
#[derive(Debug)]
pub(super) struct Slots<B: Backing, T> {
    account: Account<B>,
    layout: Layout,
    /// Bytes of a slot: its size, rounded up to its alignment, not zero; and how to divide by that.
    bytes: usize,
    shift: u32,
    inverse: usize,
    /// The first slab has at most `1 << first` slots, and the others need not be shorter.
    first: u32,
    /// An entry without slots, then the slabs. Entries up to `slabs` are written, once each.
    directory: UnsafeCell<[Slab; MAX_SLABS + 1]>,
    slabs: AtomicUsize,
    /// Fresh slots of slab `current`: the number before the first (low), and that of the last (high).
    fresh: AtomicU64,
    /// Held for growth. Under it: the slab that `fresh` refers to, from 1, or 0.
    growing: Lock,
    current: AtomicUsize,
    /// Whether the last attempt to grow failed, whatever the limit leaves.
    refused: AtomicU32,
    /// The most slots used at any reset.
    most_used: usize,
    node: core::marker::PhantomData<T>,
}

// SAFETY: a directory entry is written once, under the lock and before `slabs` and `fresh` publish it, and read only by
// threads that learnt of it from them, directly or by way of a slot's number. The pointers in it lead to memory of this
// value, which hands out shared references to `T`s, and addresses.
unsafe impl<B: Backing + Send, T: Send + Sync> Send for Slots<B, T> {}
// SAFETY: as above.
unsafe impl<B: Backing + Sync, T: Send + Sync> Sync for Slots<B, T> {}

impl<B: Backing, T: Zeroed> Slots<B, T> {
    /// Creates a list without slots, each to be for `layout`. For a preallocation, [`prealloc`](Self::prealloc)
    /// follows.
    pub(super) fn new(backing: B, layout: Layout, config: &ArenaConfig) -> Result<Self, ArenaError> {
        let too_large = ArenaError::new(Reason::TooLarge, layout, isize::MAX as usize);
        let bytes = layout.pad_to_align().size().max(layout.align());
        let one = bytes.checked_add(size_of::<T>()).ok_or(too_large)?;
        // A slab of a configured size is filled, not exceeded. A preallocated slab is usable as a whole. And a slab
        // smaller than a huge page could never be one.
        let huge = config.slab.is_none() && config.whole_huge_pages;
        let least = config.prealloc.max(if huge { HUGE_BYTES } else { 0 });
        let slab = config.slab.unwrap_or(FIRST_BYTES.max(backing.page_bytes()));
        let first = match least.div_ceil(one) {
            0 => (slab / one).max(1).ilog2(),
            // Rounded up.
            slots => usize::BITS - (slots - 1).leading_zeros(),
        };
        Ok(Self {
            account: Account::new(backing, config),
            layout,
            bytes,
            shift: bytes.trailing_zeros(),
            inverse: inverse(bytes >> bytes.trailing_zeros()),
            first: first.min(u32::BITS),
            directory: UnsafeCell::new([Slab::NONE; MAX_SLABS + 1]),
            slabs: AtomicUsize::new(0),
            fresh: AtomicU64::new(0),
            growing: Lock::new(),
            current: AtomicUsize::new(0),
            refused: AtomicU32::new(0),
            most_used: 0,
            node: core::marker::PhantomData,
        })
    }

    /// Takes the preallocation of the configuration, less what has been taken, before anybody else is here.
    pub(super) fn prealloc(&self, config: &ArenaConfig) -> Result<(), ArenaError> {
        let bytes = config.prealloc.saturating_sub(self.account.reserved());
        if bytes == 0 {
            return Ok(());
        }
        // As many bytes as requested, however many slots fit: whole huge pages, if those were requested.
        let too_large = ArenaError::too_large::<u8>(bytes);
        let (_, one) = self.shape(1).ok_or(too_large)?;
        let layout = Layout::from_size_align(bytes.max(one.size()), one.align()).map_err(|_| too_large)?;
        // All slots that a list can have.
        let most = (self.bytes + size_of::<T>()).saturating_mul(MAX_SLOTS as usize);
        if layout.size() > most {
            return Err(ArenaError::new(Reason::TooLarge, layout, most));
        }
        let block = self.account.take(layout)?;
        let slab = self.divide(block, 0, 1, self.room(0));
        self.publish(slab);
        Ok(())
    }

    /// The entry of the `index`th slab, from 1. (Not by a reference to the whole array: an entry may be being written.)
    #[inline(always)]
    fn entry(&self, index: usize) -> *mut Slab {
        self.directory.get().cast::<Slab>().wrapping_add(index)
    }

    /// The last slab, which as a rule has half of all slots; an entry without slots if there is no slab.
    #[inline(always)]
    fn last(&self) -> &Slab {
        // Acquire: pairs with the Release of `publish`.
        let last = self.slabs.load(Ordering::Acquire);
        // SAFETY: entries up to `slabs` are written, and not written again.
        unsafe { &*self.entry(last) }
    }

    /// The slab of a slot's number, and its place in the slab.
    #[inline(always)]
    fn place(&self, slot: u32) -> (&Slab, usize) {
        let index = slot.wrapping_sub(1);
        // A guess: a processor that predicts it need not wait for the number.
        let slab = self.last();
        if index.wrapping_sub(slab.start) < slab.count {
            return (slab, (index - slab.start) as usize);
        }
        self.place_by_bit(index)
    }

    #[inline(always)]
    fn place_by_bit(&self, index: u32) -> (&Slab, usize) {
        let mut at = (u64::BITS - (u64::from(index) >> self.first).leading_zeros()) as usize + 1;
        loop {
            debug_assert!(at <= MAX_SLABS);
            // SAFETY: there are none before, or those have at most `1 << (first + at - 2)` slots, as each at most
            // doubles their number, and the index is no less. So it is in this slab or in one behind it. A slot's
            // number became known after its slab was written, as were all before that; entries are written once.
            let slab = unsafe { &*self.entry(at) };
            if index.wrapping_sub(slab.start) < slab.count {
                return (slab, (index - slab.start) as usize);
            }
            // A slab before was cut short.
            cold_path();
            at += 1;
        }
    }

    /// The address of a slot.
    #[inline(always)]
    pub(super) fn address(&self, slot: u32) -> NonNull<u8> {
        let (slab, place) = self.place(slot);
        self.memory_at(slab, place)
    }

    /// The node and the memory of a slot, by its number.
    #[inline(always)]
    pub(super) fn found(&self, slot: u32) -> Found<'_, T> {
        let (slab, place) = self.place(slot);
        Found {
            slot,
            node: Self::node_at(slab, place),
            memory: self.memory_at(slab, place),
        }
    }

    /// The memory at a place of a slab, which has it. The branch is always predicted, and saves two of three steps if
    /// it can.
    #[inline(always)]
    fn memory_at(&self, slab: &Slab, place: usize) -> NonNull<u8> {
        let offset = if self.inverse == 1 {
            place << self.shift
        } else {
            place.wrapping_mul(self.bytes)
        };
        // SAFETY: the slab has room for that many slots, all in one block.
        unsafe { slab.memory.cast::<u8>().add(offset) }
    }

    /// Finds the slot at an address. `None` if none begins there.
    #[inline(always)]
    pub(super) fn find(&self, address: *const u8) -> Option<Found<'_, T>> {
        self.find_in(self.last(), address)
            .or_else(|| self.find_elsewhere(address))
    }

    /// Finds the slot at an address in one slab.
    #[inline(always)]
    fn find_in<'s>(&self, slab: &'s Slab, address: *const u8) -> Option<Found<'s, T>> {
        let offset = address.addr().wrapping_sub(slab.memory.addr().get());
        let odd = if self.inverse == 1 {
            offset
        } else {
            offset.wrapping_mul(self.inverse)
        };
        let place = odd.rotate_right(self.shift);
        // The offset is `place * bytes`, mod 2⁶⁴; below `count` that does not wrap.
        if place >= slab.count as usize {
            return None;
        }
        Some(Found {
            slot: slab.start + place as u32 + 1,
            node: Self::node_at(slab, place),
            // SAFETY: inside the slab, as its slots are.
            memory: unsafe { slab.memory.cast::<u8>().add(offset) },
        })
    }

    /// Like `find`, in the slabs before the last.
    #[inline(never)]
    fn find_elsewhere(&self, address: *const u8) -> Option<Found<'_, T>> {
        // Acquire: pairs with the Release of `publish`.
        let slabs = self.slabs.load(Ordering::Acquire);
        // SAFETY: entries up to `slabs` are written, and not written again.
        let mut slabs = (1..slabs).rev().map(|index| unsafe { &*self.entry(index) });
        slabs.find_map(|slab| self.find_in(slab, address))
    }

    /// The node at a place of a slab, which has it.
    #[inline(always)]
    fn node_at(slab: &Slab, place: usize) -> &T {
        // SAFETY: the slab has that many nodes, zeroed before it was published, and only shared references are made.
        unsafe { slab.nodes.cast::<T>().add(place).as_ref() }
    }

    /// The layout that a slot is for.
    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    /// Bytes from one slot to the next.
    pub(super) fn slot_bytes(&self) -> usize {
        self.bytes
    }

    /// The account of the backing.
    pub(super) fn account(&self) -> &Account<B> {
        &self.account
    }

    /// The error for an exhausted list, with its reason.
    #[cold]
    pub(super) fn exhausted(&self) -> ArenaError {
        let left = self.account.left();
        let least = self.bytes + size_of::<T>();
        let last = self.last();
        let full = left < least.next_multiple_of(self.account.page_bytes()) || self.room(last.start + last.count) == 0;
        let reason = if full { Reason::NoSlots } else { Reason::NoPages };
        ArenaError::new(reason, self.layout, left)
    }

    /// Statistics, given that `live` of the slots are allocated.
    pub(super) fn stats(&self, live: u64) -> ArenaStats {
        let used = self.used();
        // Slots are used from the first on, even after a reset: so as many as were ever used were so at once.
        let most_used = used.max(self.most_used) * self.bytes;
        ArenaStats {
            limit: self.account.limit(),
            reserved: self.account.reserved(),
            committed: most_used,
            allocated: used.min(live as usize) * self.bytes,
            peak: most_used,
            slabs: self.account.blocks(),
        }
    }

    /// Slots used since the last reset.
    fn used(&self) -> usize {
        let mut used = 0;
        self.each_slab(|slab, end| used += (end - slab.start) as usize);
        used
    }

    /// Visits every slab with the end of its used part.
    fn each_slab(&self, mut visit: impl FnMut(&Slab, u32)) {
        // Acquire: pairs with the Release of `publish`; and that of `fresh`.
        let (next, _) = unpack(self.fresh.load(Ordering::Acquire));
        for index in 1..=self.slabs.load(Ordering::Acquire) {
            // SAFETY: entries up to `slabs` are written, and not written again.
            let slab = unsafe { &*self.entry(index) };
            let end = next.clamp(slab.start, slab.start + slab.count);
            visit(slab, end);
        }
    }

    // ---- growth

    /// Provides fresh slots: those of the next slab. Returns whether there are any.
    #[cold]
    fn grow(&self) -> bool {
        let _guard = self.growing.lock();
        // Acquire: as below.
        let (next, end) = unpack(self.fresh.load(Ordering::Acquire));
        if next < end {
            return true;
        }
        // Relaxed, twice: under the lock.
        let slabs = self.slabs.load(Ordering::Relaxed);
        let next = self.current.load(Ordering::Relaxed) + 1;
        if next <= slabs {
            // A slab from before a reset.
            self.open(next);
            return true;
        }
        let slab = self.next_slab(slabs);
        // Relaxed: for an estimate.
        self.refused.store(u32::from(slab.is_none()), Ordering::Relaxed);
        slab.map(|slab| self.publish(slab)).is_some()
    }

    /// Takes a slab behind the others, as long as all of them or as long as possible.
    fn next_slab(&self, slabs: usize) -> Option<Slab> {
        let last = self.last();
        let start = last.start + last.count;
        let left = MAX_SLABS.checked_sub(slabs + 1)?;
        // So many slots, doubled in each entry left, are the most there can be. Rounded up: then twice as many are
        // enough for one entry less.
        let least = u64::from(MAX_SLOTS).div_ceil(1 << left) as u32;
        self.take_slab(start, self.room(start), least.saturating_sub(start).max(1))
    }

    /// How many slots a slab may have, behind so many others.
    fn room(&self, start: u32) -> u32 {
        let room = u64::from(start).max(1 << self.first);
        room.min(u64::from(MAX_SLOTS - start)) as u32
    }

    /// The shape of a slab of `count` slots: where its nodes begin, and its layout.
    fn shape(&self, count: u32) -> Option<(usize, Layout)> {
        let slots = self.bytes.checked_mul(count as usize)?;
        let nodes = slots.checked_next_multiple_of(align_of::<T>())?;
        let bytes = size_of::<T>().checked_mul(count as usize)?.checked_add(nodes)?;
        let align = self.layout.align().max(align_of::<T>());
        Some((nodes, Layout::from_size_align(bytes, align).ok()?))
    }

    /// Takes a slab of up to `room` slots: as many as possible, and at least `least`, unless the limit leaves fewer.
    fn take_slab(&self, start: u32, room: u32, mut least: u32) -> Option<Slab> {
        let (mut count, mut padded, mut tries) = (room, 0, 0..0);
        let shortest = self.account.rounded(self.shape(least)?.1).ok()?;
        if let Some((_, layout)) = self.shape(room) {
            // Each request may be a system call: so a backing that is still full is asked for the least only.
            tries = self.account.tries(layout.size(), shortest)?;
            // Fewer, but in whole huge pages, if the last one would have fewer slots for each byte.
            let (size, whole) = (layout.size(), self.account.whole(layout.size()));
            let (fits, longer) = (self.fitting(whole), whole.saturating_add(self.account.unit(size)));
            if whole < size && u128::from(fits) * longer as u128 > u128::from(room) * whole as u128 {
                (count, padded) = (fits.max(least), whole);
            }
        }
        while count >= least {
            let Some((_, layout)) = self.shape(count) else {
                count = (count / 2).max(least);
                continue;
            };
            let size = layout.size().max(core::mem::take(&mut padded));
            let layout = Layout::from_size_align(size, layout.align()).unwrap_or(layout);
            // By what is requested, which is rounded up.
            let is_shortest = self.account.rounded(layout).is_ok_and(|block| block <= shortest);
            count = match self.account.take(layout) {
                Ok(block) => return Some(self.divide(block, start, count, room)),
                Err(error) if error.reason() == Reason::Limit => {
                    let left = error.left() & !(self.account.unit(error.left()) - 1);
                    let is_huge = self.account.unit(left) > self.account.page_bytes();
                    padded = if is_huge { left } else { 0 };
                    let count = self.fitting(left).min(count - 1);
                    least = least.min(count).max(1);
                    count
                }
                Err(_) if is_shortest && tries.next().is_none() => 0,
                Err(_) => (count / 2).max(least),
            };
        }
        None
    }

    /// As many slots as fit into so many bytes for certain, whatever lies between slots and nodes.
    fn fitting(&self, bytes: usize) -> u32 {
        let count = bytes.saturating_sub(align_of::<T>()) / (self.bytes + size_of::<T>());
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// Makes a block a slab of `count` slots, or of as many as its pages have room for.
    fn divide(&self, block: Block, start: u32, mut count: u32, room: u32) -> Slab {
        let bytes = block.memory.len();
        let fits = |count: u32| self.shape(count).is_some_and(|(_, layout)| layout.size() <= bytes);
        // As many as fit for certain; then the last one or two.
        count = count.max(self.fitting(bytes).min(room));
        while count < room && fits(count + 1) {
            count += 1;
        }
        let offset = self.shape(count).map_or(0, |(nodes, _)| nodes);
        // SAFETY: in the block, whose layout was made for that many slots, or has room for this one.
        let nodes = unsafe { block.memory.cast::<u8>().add(offset) };
        if !block.zeroed {
            // SAFETY: the nodes' part of a block that is ours alone.
            unsafe { nodes.write_bytes(0, count as usize * size_of::<T>()) };
        }
        Slab {
            memory: block.memory,
            nodes,
            start,
            count,
        }
    }

    /// Enters a slab into the directory, and opens it. Under the lock, or before anybody else is here.
    fn publish(&self, slab: Slab) {
        // Relaxed: under the lock.
        let index = self.slabs.load(Ordering::Relaxed) + 1;
        // SAFETY: nobody reads the entry before the stores below; nobody else writes one: the lock.
        unsafe { self.entry(index).write(slab) };
        // Release: the entry, for `last` and for searches through all slabs.
        self.slabs.store(index, Ordering::Release);
        self.open(index);
    }

    /// Makes the slots of the `index`th slab available. Under the lock, when all slots before it are used.
    fn open(&self, index: usize) {
        // Relaxed: under the lock.
        self.current.store(index, Ordering::Relaxed);
        // SAFETY: written, by `publish` if not before.
        let slab = unsafe { &*self.entry(index) };
        // Release: the entry, for `fresh`. Nobody changes it meanwhile: it has no slots to supply.
        let range = pack(slab.start, slab.start + slab.count);
        self.fresh.store(range, Ordering::Release);
    }

    /// Makes every slot fresh again. Nobody may still have one.
    pub(super) fn reset(&mut self) {
        self.most_used = self.most_used.max(self.used());
        self.each_slab(|slab, end| {
            // SAFETY: the used part of the nodes of a slab that is ours alone; all-zero nodes are nodes (`Zeroed`).
            unsafe { slab.nodes.write_bytes(0, (end - slab.start) as usize * size_of::<T>()) };
        });
        // Relaxed, twice: nobody else is here.
        self.refused.store(0, Ordering::Relaxed);
        if self.slabs.load(Ordering::Relaxed) > 0 {
            self.open(1);
        }
    }
}

impl<B: Backing, T: Zeroed> Nodes<T> for Slots<B, T> {
    #[inline(always)]
    fn node(&self, slot: u32) -> &T {
        let (slab, place) = self.place(slot);
        Self::node_at(slab, place)
    }

    fn fresh(&self, most: u32, again: bool) -> Option<(u32, u32)> {
        loop {
            // Acquire: pairs with the Release of `open`, so the slab is there; and with that of the exchanges below.
            let mut range = self.fresh.load(Ordering::Acquire);
            loop {
                let (next, end) = unpack(range);
                let count = most.min(end - next);
                if count == 0 {
                    break;
                }
                // Release, of AcqRel: what the caller announced before is seen by a thread that finds these slots used.
                let taken = pack(next + count, end);
                match self
                    .fresh
                    .compare_exchange_weak(range, taken, Ordering::AcqRel, Ordering::Acquire)
                {
                    Ok(_) => return Some((next + 1, count)),
                    Err(now) => range = now,
                }
            }
            // Relaxed: whoever misses a slot because of it will ask again.
            let asks = again || self.refused.load(Ordering::Relaxed) == 0;
            if most == 0 || !asks || !self.grow() {
                return None;
            }
        }
    }

    fn extent(&self) -> Extent {
        // Relaxed, twice: an estimate.
        let (next, end) = unpack(self.fresh.load(Ordering::Relaxed));
        // After a reset, the slabs behind the current one still exist.
        let last = self.last();
        let end = end.max(last.start + last.count);
        let more = match self.account.left() {
            _ if self.refused.load(Ordering::Relaxed) != 0 => 0,
            usize::MAX => u64::from(MAX_SLOTS - end),
            left => (left / (self.bytes + size_of::<T>())) as u64,
        };
        let (fresh, exist) = (u64::from(end - next), u64::from(end));
        Extent { fresh, exist, more }
    }

    fn each_used(&self, mut visit: impl FnMut(u32)) {
        self.each_slab(|slab, end| (slab.start + 1..=end).for_each(&mut visit));
    }
}

impl<B: Backing, T> Drop for Slots<B, T> {
    fn drop(&mut self) {
        // Relaxed: nobody else is here.
        let slabs = self.slabs.load(Ordering::Relaxed);
        for slab in &self.directory.get_mut()[1..=slabs] {
            // SAFETY: taken from this account, whole; nobody can have a slot or a node any more.
            unsafe { self.account.give(slab.memory) };
        }
    }
}
