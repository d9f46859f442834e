//! Slots in memory: slabs of them, each as large as all before it, and what is known of each slot beside them.
//!
//! ```text
//!   slab 0        slab 1        slab 2                      slab 3
//!   ┌────────┐    ┌────────┐    ┌────────┬────────┐         ┌────────┬────────┬────────┬─ ─ ─     slots
//!   │ 1 … P  │    │ … 2P   │    │ …               4P        │ …                                8P
//!   └┬┬┬┬┬┬┬┬┘    └┬┬┬┬┬┬┬┬┘    └┬┬┬┬┬┬┬┬┬┬┬┬┬┬┬┬─          └┬┬┬┬┬┬┬┬┬┬─ ─                      nodes, behind them
//! ```
//!
//! A slot is known by its number, from 1. As slabs double, the slab of a number is the position of its highest bit, the
//! directory is an array of 33 entries whatever the limit, and from an address the slot is found in two comparisons on
//! average: half of all slots lie in the last slab. If the limit or the backing has room for less than a whole slab,
//! the slab is as long as it can be, and the numbers behind its end are nobody's.
//!
//! Nodes lie in the slab, behind the slots, so the limit holds for both. Slots themselves are never touched.
//!
//! From address to number without a division: let the slot's size be odd × 2ᵗ, and i the odd part's inverse modulo 2⁶⁴
//! (it has one, being odd). An offset that is a multiple of the size, shifted right by t and multiplied by i, is the
//! quotient. One that is not gives a number that is too large, or whose product with the size is not the offset.
//!
//! Worked: slots of 6144 bytes, 3 × 2¹¹; 3⁻¹ = 0xAAAA…AAAB. Offset 18,432 is 9 × 2¹¹, and 9 × 3⁻¹ = 3. Offset 2048 is
//! 1 × 2¹¹ and gives 3⁻¹ itself, of which there is no slot; offset 18,433 gives 3, but 3 × 6144 is not 18,433.

use core::alloc::Layout;
use core::cell::UnsafeCell;
use core::ptr::NonNull;

use super::account::Account;
use super::backing::{Backing, Block};
use super::config::ArenaConfig;
use super::error::{ArenaError, Reason};
use super::hyaline::{MAX_SLOTS, Record};
use super::node::{Node, Nodes};
use super::shards::Shard;
use super::stats::ArenaStats;
use crate::sync::{AtomicU64, AtomicUsize, Lock, Ordering, Zeroed};

/// Slabs there can be: the first, and one for each bit of a number.
const MAX_SLABS: usize = 33;

/// Bytes of the first slab, unless the configuration says otherwise.
const FIRST_BYTES: usize = 1 << 18;

// SAFETY: atomic integers, of which zero is a value; and `new` has them all zero. No drop.
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

/// One slab.
#[derive(Clone, Copy, Debug)]
struct Slab {
    memory: NonNull<[u8]>,
    /// Behind the slots, in `memory`.
    nodes: NonNull<u8>,
    /// The first slot's number, less one; and how many there are.
    start: u32,
    count: u32,
    /// Bytes of the slots.
    bytes: usize,
}

/// Slots of one size on blocks of a backing, with a `T` for each.
#[derive(Debug)]
pub(super) struct Slots<B: Backing, T> {
    account: Account<B>,
    layout: Layout,
    /// Bytes of a slot: its size, rounded up to its alignment, not zero; and how to divide by it.
    bytes: usize,
    shift: u32,
    inverse: usize,
    /// The first slab has room for `1 << first` numbers.
    first: u32,
    /// Entries below `slabs` are written, once.
    directory: UnsafeCell<[Option<Slab>; MAX_SLABS]>,
    slabs: AtomicUsize,
    /// Slots never used, of the slab `current`: the number before the first (low), and that of the last (high).
    fresh: AtomicU64,
    /// For growth, and under it: the slab that `fresh` is of.
    growing: Lock,
    current: AtomicUsize,
    node: core::marker::PhantomData<T>,
}

// SAFETY: a directory entry is written once, under the lock and before `slabs` and `fresh` tell of it, and read only by
// whoever heard of it from them, directly or by way of a slot's number. The pointers in it are to memory that is this
// value's, which hands out shared references to `T`s, and addresses.
unsafe impl<B: Backing + Send, T: Send + Sync> Send for Slots<B, T> {}
// SAFETY: as above.
unsafe impl<B: Backing + Sync, T: Send + Sync> Sync for Slots<B, T> {}

impl<B: Backing, T: Zeroed> Slots<B, T> {
    /// No slots yet, each for `layout`. If the configuration wants some at once, [`prealloc`](Self::prealloc) follows.
    pub(super) fn new(backing: B, layout: Layout, config: &ArenaConfig) -> Result<Self, ArenaError> {
        let too_large = ArenaError::new(Reason::TooLarge, layout, isize::MAX as usize);
        let bytes = layout.pad_to_align().size().max(layout.align());
        let one = bytes.checked_add(size_of::<T>()).ok_or(too_large)?;
        // A slab of a given size is filled, not exceeded; one taken at once is all there.
        let first = match config.prealloc.div_ceil(one) {
            0 => 1 << (config.slab.unwrap_or(FIRST_BYTES) / one).max(1).ilog2(),
            slots => slots.checked_next_power_of_two().ok_or(too_large)?,
        };
        Ok(Self {
            account: Account::new(backing, config),
            layout,
            bytes,
            shift: bytes.trailing_zeros(),
            inverse: inverse(bytes >> bytes.trailing_zeros()),
            first: first.min(MAX_SLOTS as usize / 2 + 1).ilog2(),
            directory: UnsafeCell::new([None; MAX_SLABS]),
            slabs: AtomicUsize::new(0),
            fresh: AtomicU64::new(0),
            growing: Lock::new(),
            current: AtomicUsize::new(0),
            node: core::marker::PhantomData,
        })
    }

    /// Takes what the configuration wants at once, less what has been taken, before anybody else is here.
    pub(super) fn prealloc(&self, config: &ArenaConfig) -> Result<(), ArenaError> {
        let bytes = config.prealloc.saturating_sub(self.account.reserved());
        if bytes == 0 {
            return Ok(());
        }
        let room = 1_u32 << self.first;
        let wanted = (bytes / (self.bytes + size_of::<T>())).clamp(1, room as usize) as u32;
        let slab = self.take_slab(0, wanted, wanted)?;
        self.publish(slab);
        Ok(())
    }

    /// An entry of the directory. (Never by a reference to all of them, one of which may just be written.)
    #[inline(always)]
    fn entry(&self, index: usize) -> *mut Option<Slab> {
        self.directory.get().cast::<Option<Slab>>().wrapping_add(index)
    }

    /// The slab and the place in it of a slot's number.
    #[inline(always)]
    fn place(&self, slot: u32) -> (&Slab, usize) {
        let index = slot.wrapping_sub(1);
        // A guess, that it is in the last slab, as half of all are: a processor that predicts it need not wait for the
        // number. Acquire: pairs with the Release of `publish`.
        let last = self.slabs.load(Ordering::Acquire).wrapping_sub(1);
        // SAFETY: entries below `slabs` are written, and not written again; there are some, as there is the slot.
        if let Some(slab) = unsafe { &*self.entry(last) }
            && index.wrapping_sub(slab.start) < slab.count
        {
            return (slab, (index - slab.start) as usize);
        }
        self.place_by_bit(index)
    }

    #[inline(always)]
    fn place_by_bit(&self, index: u32) -> (&Slab, usize) {
        let slab = (u32::BITS - (index >> self.first).leading_zeros()) as usize;
        debug_assert!(slab < MAX_SLABS);
        // SAFETY: at less than 33, as a number has 32 bits. A slot's number was heard of after its slab was written,
        // and entries are written once.
        let entry = unsafe { (*self.entry(slab)).as_ref() };
        debug_assert!(entry.is_some_and(|entry| index - entry.start < entry.count));
        // SAFETY: as above: the slab of a slot that exists is there.
        let entry = unsafe { entry.unwrap_unchecked() };
        (entry, (index - entry.start) as usize)
    }

    /// The memory of a slot, by its number.
    #[inline(always)]
    pub(super) fn address(&self, slot: u32) -> NonNull<u8> {
        let (slab, place) = self.place(slot);
        // SAFETY: the slab has room for so many slots, all in one block.
        unsafe { slab.memory.cast::<u8>().add(self.offset(place)) }
    }

    /// `place * bytes`, mod 2⁶⁴. A branch that is always predicted, for one step instead of three where it can be.
    #[inline(always)]
    fn offset(&self, place: usize) -> usize {
        if self.inverse == 1 {
            place << self.shift
        } else {
            place.wrapping_mul(self.bytes)
        }
    }

    /// The number and the node of the slot at an address. `None` if none begins there.
    #[inline(always)]
    pub(super) fn find(&self, address: *const u8) -> Option<(u32, &T)> {
        // Acquire: pairs with the Release of `publish`.
        let slabs = self.slabs.load(Ordering::Acquire);
        for index in (0..slabs).rev() {
            // SAFETY: entries below `slabs` are written, and not written again.
            let Some(slab) = (unsafe { &*self.entry(index) }) else {
                continue;
            };
            let offset = address.addr().wrapping_sub(slab.memory.addr().get());
            if offset < slab.bytes {
                let shifted = offset >> self.shift;
                let place = if self.inverse == 1 {
                    shifted
                } else {
                    shifted.wrapping_mul(self.inverse)
                };
                // Below `count` the product does not wrap, so equality means what it says.
                let exact = place < slab.count as usize && self.offset(place) == offset;
                return exact.then(|| (slab.start + place as u32 + 1, Self::node_at(slab, place)));
            }
        }
        None
    }

    /// The node at a place of a slab, which has it.
    #[inline(always)]
    fn node_at(slab: &Slab, place: usize) -> &T {
        // SAFETY: the slab has so many nodes, zeroed before it was published, and only shared references are made.
        unsafe { slab.nodes.cast::<T>().add(place).as_ref() }
    }

    /// What a slot is for.
    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    /// Bytes from one slot to the next.
    pub(super) fn slot_bytes(&self) -> usize {
        self.bytes
    }

    /// Where blocks come from.
    pub(super) fn account(&self) -> &Account<B> {
        &self.account
    }

    /// That there are no slots, and why.
    #[cold]
    pub(super) fn exhausted(&self) -> ArenaError {
        let left = self.account.left();
        let least = self.bytes + size_of::<T>();
        let full = left < least.next_multiple_of(self.account.page_bytes());
        let reason = if full { Reason::NoSlots } else { Reason::NoPages };
        ArenaError::new(reason, self.layout, left)
    }

    /// Numbers, with `live` of the slots allocated.
    pub(super) fn stats(&self, live: u64) -> ArenaStats {
        let (mut used, mut allocated) = (0_usize, live as usize);
        self.each_slab(|slab, end| used += (end - slab.start) as usize);
        allocated = allocated.min(used);
        ArenaStats {
            limit: self.account.limit(),
            reserved: self.account.reserved(),
            committed: used * self.bytes,
            allocated: allocated * self.bytes,
            peak: used * self.bytes,
            slabs: self.account.blocks(),
        }
    }

    /// Visits every slab with the end of its used part.
    fn each_slab(&self, mut visit: impl FnMut(&Slab, u32)) {
        // Acquire: as in `find`; and the Release of `fresh`.
        let (next, _) = unpack(self.fresh.load(Ordering::Acquire));
        for index in 0..self.slabs.load(Ordering::Acquire) {
            // SAFETY: as in `find`.
            let Some(slab) = (unsafe { &*self.entry(index) }) else {
                continue;
            };
            let end = next.clamp(slab.start, slab.start + slab.count);
            visit(slab, end);
        }
    }

    // ---- growth

    /// More slots that were never used: the next slab's. Whether there are any.
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
        let next = self.current.load(Ordering::Relaxed) + usize::from(slabs > 0);
        if next < slabs {
            // A slab from before a reset.
            self.open(next);
            return true;
        }
        let start = if slabs == 0 {
            0
        } else {
            1_u64 << (self.first as usize + slabs - 1)
        };
        let room = if slabs == 0 { 1 << self.first } else { start };
        let room = room.min(u64::from(MAX_SLOTS).saturating_sub(start)) as u32;
        if slabs == MAX_SLABS || room == 0 {
            return false;
        }
        match self.take_slab(start as u32, room, 1) {
            Ok(slab) => {
                self.publish(slab);
                true
            }
            Err(_) => false,
        }
    }

    /// Bytes of a slab of `count` slots: where its nodes begin, and its layout.
    fn shape(&self, count: u32) -> Option<(usize, Layout)> {
        let slots = self.bytes.checked_mul(count as usize)?;
        let nodes = slots.checked_next_multiple_of(align_of::<T>())?;
        let bytes = size_of::<T>().checked_mul(count as usize)?.checked_add(nodes)?;
        let align = self.layout.align().max(align_of::<T>());
        Some((nodes, Layout::from_size_align(bytes, align).ok()?))
    }

    /// A slab of up to `room` slots, at least `least`: as many as can be had.
    fn take_slab(&self, start: u32, room: u32, least: u32) -> Result<Slab, ArenaError> {
        let mut count = room;
        let block = loop {
            let Some((_, layout)) = self.shape(count) else {
                return Err(ArenaError::new(Reason::TooLarge, self.layout, isize::MAX as usize));
            };
            let error = match self.account.take(layout) {
                Ok(block) => break block,
                Err(error) => error,
            };
            let fewer = match error.reason() {
                Reason::Limit => {
                    let pages = error.left() & !(self.account.page_bytes() - 1);
                    (pages / (self.bytes + size_of::<T>())).min(count as usize - 1) as u32
                }
                _ => count / 2,
            };
            if fewer < least {
                return Err(error);
            }
            count = fewer;
        };
        Ok(self.divide(block, start, count, room))
    }

    /// A block as a slab of `count` slots, or as many as the pages have room for.
    fn divide(&self, block: Block, start: u32, mut count: u32, room: u32) -> Slab {
        let bytes = block.memory.len();
        let fits = |count: u32| self.shape(count).is_some_and(|(_, layout)| layout.size() <= bytes);
        // As many as fit for certain, whatever lies between slots and nodes; then the last one or two.
        let certain = bytes.saturating_sub(align_of::<T>()) / (self.bytes + size_of::<T>());
        count = count.max(certain.min(room as usize) as u32);
        while count < room && fits(count + 1) {
            count += 1;
        }
        let offset = self.shape(count).map_or(0, |(nodes, _)| nodes);
        // SAFETY: in the block, whose layout was this one's for as many slots, or fits it.
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
            bytes: count as usize * self.bytes,
        }
    }

    /// Enters a slab into the directory, and lets its slots be used. Under the lock, or before anybody else is here.
    fn publish(&self, slab: Slab) {
        // Relaxed: under the lock.
        let index = self.slabs.load(Ordering::Relaxed);
        // SAFETY: nobody reads the entry before the stores below, nobody else writes one: the lock.
        unsafe { self.entry(index).write(Some(slab)) };
        // Release: the entry, for `find`.
        self.slabs.store(index + 1, Ordering::Release);
        self.open(index);
    }

    /// Lets the slots of slab `index` be used. Under the lock, and all before it are.
    fn open(&self, index: usize) {
        // Relaxed: under the lock.
        self.current.store(index, Ordering::Relaxed);
        // SAFETY: written, by `publish` if not before.
        if let Some(slab) = unsafe { &*self.entry(index) } {
            // Release: the entry, for `fresh`. Nobody changes it meanwhile: it has no slots to give.
            let range = pack(slab.start, slab.start + slab.count);
            self.fresh.store(range, Ordering::Release);
        }
    }

    /// Every slot was never used. Nobody is to have one any more.
    pub(super) fn reset(&mut self) {
        // Relaxed, throughout: nobody else is here.
        for index in 0..self.slabs.load(Ordering::Relaxed) {
            if let Some(slab) = self.directory.get_mut()[index] {
                // SAFETY: the nodes' part of a slab that is ours alone, and all-zero nodes are nodes (`Zeroed`).
                unsafe { slab.nodes.write_bytes(0, slab.count as usize * size_of::<T>()) };
            }
        }
        if self.slabs.load(Ordering::Relaxed) > 0 {
            self.open(0);
        }
    }
}

#[inline(always)]
fn pack(next: u32, end: u32) -> u64 {
    u64::from(end) << 32 | u64::from(next)
}

#[inline(always)]
fn unpack(range: u64) -> (u32, u32) {
    (range as u32, (range >> 32) as u32)
}

/// The inverse of an odd number modulo a power of two, by Newton's iteration: each round doubles the bits that are
/// right, of which the number itself has three.
const fn inverse(odd: usize) -> usize {
    let mut inverse = odd;
    let mut bits = 3;
    while bits < usize::BITS {
        inverse = inverse.wrapping_mul(2_usize.wrapping_sub(odd.wrapping_mul(inverse)));
        bits *= 2;
    }
    inverse
}

impl<B: Backing, T: Zeroed> Nodes<T> for Slots<B, T> {
    #[inline(always)]
    fn node(&self, slot: u32) -> &T {
        let (slab, place) = self.place(slot);
        Self::node_at(slab, place)
    }

    fn fresh(&self, most: u32) -> Option<(u32, u32)> {
        loop {
            // Acquire: pairs with the Release of `open`, so the slab is there; and with that of others below.
            let mut range = self.fresh.load(Ordering::Acquire);
            loop {
                let (next, end) = unpack(range);
                let count = most.min(end - next);
                if count == 0 {
                    break;
                }
                // Release, of AcqRel: what the caller announced before is seen by who finds these slots used.
                let taken = pack(next + count, end);
                match self
                    .fresh
                    .compare_exchange_weak(range, taken, Ordering::AcqRel, Ordering::Acquire)
                {
                    Ok(_) => return Some((next + 1, count)),
                    Err(now) => range = now,
                }
            }
            if most == 0 || !self.grow() {
                return None;
            }
        }
    }

    fn extent(&self) -> (u64, u64) {
        // Relaxed: an estimate. Acquire is not needed, as no entry is read.
        let (next, end) = unpack(self.fresh.load(Ordering::Relaxed));
        let left = match self.account.left() {
            usize::MAX => u64::from(MAX_SLOTS - end),
            left => (left / (self.bytes + size_of::<T>())) as u64,
        };
        (u64::from(end - next) + left, u64::from(end) + left)
    }

    fn each_used(&self, mut visit: impl FnMut(u32)) {
        self.each_slab(|slab, end| (slab.start + 1..=end).for_each(&mut visit));
    }
}

impl<B: Backing, T> Drop for Slots<B, T> {
    fn drop(&mut self) {
        for slab in self.directory.get_mut().iter().flatten() {
            // SAFETY: taken from this account, whole; nobody can have a slot or a node any more.
            unsafe { self.account.give(slab.memory) };
        }
    }
}
