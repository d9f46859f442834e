//! [`FreeList`]: slots of one size, for any thread, freed one by one.
//!
//! ```text
//!   FreeList ──── FreeSlots     which slots are free: a pocket for one, a stack of numbers, and those never used
//!            └─── Slots         where they are: slabs that double, four bytes beside each slot
//! ```
//!
//! These two do all the work. A slot is plain memory: the list neither clears nor touches it, so its contents survive a
//! free.
//!
//! Worked: vectors of 1536 floats are slots of 6144 bytes. The first slab of 256 KiB has 32 numbers for them (the
//! largest power of two below 42). The list then doubles to 64, 128 and so on, until the limit, where it grows by
//! whatever is left.
//!
//! Cost: one compare-exchange each way. 5 ns to allocate and free a slot through the pocket; 7 through the stack, when
//! several are held; 2 and 5 with exclusive access (`&mut`); 7 a slot in batches of 64. For many threads at once, use
//! the [sharded list](super::ShardedFreeList).

use core::alloc::Layout;
use core::fmt;
use core::panic::{RefUnwindSafe, UnwindSafe};
use core::ptr::NonNull;

use super::backing::Backing;
use super::config::ArenaConfig;
use super::error::ArenaError;
use super::free_slots::{FreeSlots, Taken};
use super::process::ProcessHeap;
use super::slot_box::{SlotBox, SlotList, sealed};
use super::slot_error::SlotError;
use super::slots::{Found, Slots};
use super::stack::NIL;
use super::stats::ArenaStats;
use crate::sync::AtomicU32;

/// Slots of one size, for any thread, freed one by one.
///
/// A slot is plain memory: the list neither clears nor touches it, so its contents survive a free. The bookkeeping lies
/// outside the slots, four bytes each: a stack of slot numbers, with a tag against ABA, and a pocket for one slot. A
/// list takes slabs from its backing, each as large as all before it, and keeps them until it is dropped. It has at
/// most 4,026,531,839 slots.
///
/// *Short slabs.* If the backing has no such slab, the list takes a shorter one, down to a single slot. It does so at
/// least 31 times. From then on it waits until the backing has a slab about as large as all before it; meanwhile
/// `allocate` fails, though the backing may have room for a slot. This happens on a heap that is fragmented, or whose
/// limit rises by a page at a time.
///
/// 5 ns to allocate and free in turn, 7 when several are held; 2 and 5 with exclusive access; 7 in batches.
///
/// ```
/// use core::alloc::Layout;
/// use pageheap::arena::{ArenaConfig, FreeList, Reason};
///
/// let list = FreeList::with_config(Layout::array::<f32>(1536)?, ArenaConfig::new().limit(1 << 20))?;
/// let first = list.allocate()?;
/// let second = list.allocate()?;
/// // SAFETY: both are ours, and nothing uses them.
/// unsafe {
///     list.deallocate(first.cast());
///     list.deallocate(second.cast());
///     assert!(list.try_deallocate(second.cast()).is_err(), "freed twice");
/// }
/// let all: Vec<_> = std::iter::from_fn(|| list.allocate().ok()).collect();
/// assert!(all.len() > 160);
/// assert_eq!(list.allocate().unwrap_err().reason(), Reason::NoSlots);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// With boxes, using a slot after the list is gone does not compile:
///
/// ```compile_fail,E0505
/// use pageheap::arena::FreeList;
///
/// let list = FreeList::for_type::<u64>();
/// let number = list.boxed(7_u64).unwrap();
/// drop(list); // error: `list` is borrowed by `number`
/// assert_eq!(*number, 7);
/// ```
pub struct FreeList<B: Backing = ProcessHeap> {
    list: FreeSlots<Slots<B, AtomicU32>>,
}

// The list is consistent after a caught panic, because nothing in it unwinds half way. Backings must not unwind
// (`Backing`). If a constructor passed to `boxed_with` panics, its slot is already taken, and is freed.
impl<B: Backing + UnwindSafe> UnwindSafe for FreeList<B> {}
impl<B: Backing + RefUnwindSafe> RefUnwindSafe for FreeList<B> {}

impl<B: Backing> FreeList<B> {
    /// Creates a list of slots for `layout` on `backing`, without a limit of its own. It takes no memory until the
    /// first allocation.
    ///
    /// # Errors
    /// None today: whether the backing has room for a slot of any layout shows when one is allocated.
    pub fn new_in(layout: Layout, backing: B) -> Result<Self, ArenaError> {
        Self::with_config_in(layout, ArenaConfig::new(), backing)
    }

    /// Creates a list of slots for `layout` on `backing`, configured by `config`. The limit covers the slots and their
    /// bookkeeping, four bytes each; `slab` is the size of the first slab, unless `prealloc` is.
    ///
    /// # Errors
    /// Fails if the preallocation cannot be made. Nothing is then kept.
    pub fn with_config_in(layout: Layout, config: ArenaConfig, backing: B) -> Result<Self, ArenaError> {
        let slots = Slots::new(backing, layout, &config)?;
        slots.prealloc(&config)?;
        Ok(Self {
            list: FreeSlots::new(slots),
        })
    }

    #[inline(always)]
    fn slots(&self) -> &Slots<B, AtomicU32> {
        self.list.nodes()
    }

    #[inline(always)]
    fn memory(&self, taken: Taken) -> NonNull<u8> {
        match taken {
            Taken::Number(slot) => self.slots().address(slot),
            Taken::Memory(memory) => memory,
        }
    }

    #[inline(always)]
    fn whole(&self, taken: Taken) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.memory(taken), self.slots().layout().size())
    }

    /// Allocates a slot: uninitialised memory for the list's layout. It is the caller's until it is deallocated.
    ///
    /// # Errors
    /// Fails if all slots are taken, and the limit or the backing has no room for more. (See the type.)
    #[inline(always)]
    pub fn allocate(&self) -> Result<NonNull<[u8]>, ArenaError> {
        match self.list.allocate() {
            Some(taken) => Ok(self.whole(taken)),
            None => Err(self.slots().exhausted()),
        }
    }

    /// Allocates slots into `batch`, from the front, overwriting what is there: one exchange for all slots that were
    /// free, one for those never used. Returns how many it wrote; fewer than `batch` has places only if no more can be
    /// had. The next call then reports why. The places behind them are unchanged.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate), if `batch` is not empty and not one slot can be had. Nothing is then
    /// written.
    pub fn allocate_batch(&self, batch: &mut [Option<NonNull<u8>>]) -> Result<usize, ArenaError> {
        let asked = batch.len();
        let mut places = batch.iter_mut();
        let taken = self.list.allocate_many(asked, |taken| {
            if let Some(place) = places.next() {
                *place = Some(self.memory(taken));
            }
        });
        if taken == 0 && asked > 0 {
            return Err(self.slots().exhausted());
        }
        Ok(taken)
    }

    /// Frees a slot.
    ///
    /// Aborts the process, with a message that names the address, if no slot of the list begins there or the slot is
    /// not allocated. (If two threads free the same slot within nanoseconds of each other, both can pass. The slot may
    /// then be handed out twice, and other free slots may be lost until a [`reset`](Self::reset).)
    ///
    /// # Safety
    ///
    /// The slot was allocated from this list, and nothing uses it any more.
    #[inline]
    pub unsafe fn deallocate(&self, slot: NonNull<u8>) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_deallocate(slot) } {
            error.abort(self.slots().slot_bytes());
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
    #[inline]
    pub unsafe fn try_deallocate(&self, slot: NonNull<u8>) -> Result<(), SlotError> {
        let found = self.find(slot)?;
        let freed = self.list.free(found.slot, found.memory, found.node);
        freed.map_err(|_| SlotError::not_allocated(slot.as_ptr()))
    }

    /// Frees slots, by one exchange for all, and leaves `None` in their places.
    ///
    /// # Errors
    /// [`SlotError`] for the first slot that is foreign or not allocated. That slot and those behind it stay as they
    /// were.
    ///
    /// # Safety
    ///
    /// As for [`try_deallocate`](Self::try_deallocate), for each of them.
    pub unsafe fn deallocate_batch(&self, batch: &mut [Option<NonNull<u8>>]) -> Result<(), SlotError> {
        let mut foreign = false;
        let found = batch.iter().flatten().map_while(|&slot| {
            let found = self.find(slot);
            foreign = found.is_err();
            found.ok().map(|found| (found.slot, found.memory, found.node))
        });
        let freed = self.list.free_many(found);
        let (count, error) = match freed {
            Ok(count) if !foreign => {
                debug_assert_eq!(count, batch.iter().flatten().count());
                batch.fill(None);
                return Ok(());
            }
            Ok(count) => (count, SlotError::foreign as fn(*const u8) -> SlotError),
            Err(count) => (count, SlotError::not_allocated as fn(*const u8) -> SlotError),
        };
        // The first slot that was not freed: it comes after `count` that were.
        for place in batch.iter_mut().filter(|place| place.is_some()).take(count) {
            *place = None;
        }
        let slot = batch.iter().flatten().next();
        slot.map_or(Ok(()), |slot| Err(error(slot.as_ptr())))
    }

    /// Like [`allocate`](Self::allocate), with exclusive access and so without a locked instruction.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate).
    #[inline]
    pub fn allocate_mut(&mut self) -> Result<NonNull<[u8]>, ArenaError> {
        match self.list.allocate_mut() {
            Some(taken) => Ok(self.whole(taken)),
            None => Err(self.slots().exhausted()),
        }
    }

    /// Like [`deallocate`](Self::deallocate), with exclusive access and so without a locked instruction.
    ///
    /// # Safety
    ///
    /// As for [`deallocate`](Self::deallocate).
    #[inline]
    pub unsafe fn deallocate_mut(&mut self, slot: NonNull<u8>) {
        let found = self.find(slot).map(|found| (found.slot, found.memory));
        let freed = found.and_then(|(number, memory)| {
            let freed = self.list.free_mut(number, memory);
            freed.map_err(|_| SlotError::not_allocated(slot.as_ptr()))
        });
        if let Err(error) = freed {
            error.abort(self.slots().slot_bytes());
        }
    }

    #[inline(always)]
    fn find(&self, slot: NonNull<u8>) -> Result<Found<'_, AtomicU32>, SlotError> {
        let address = slot.as_ptr();
        self.slots().find(address).ok_or(SlotError::foreign(address))
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

    /// Frees every slot, as if none had ever been allocated. Pages are kept; contents are not dropped. O(slots used
    /// since the last reset): clears 4 bytes for each.
    pub fn reset(&mut self) {
        self.list.reset(Slots::reset);
    }

    /// Returns statistics, in bytes. Takes 1.5 ns for each slot ever used. `peak` is exact, because a fresh slot is
    /// allocated only if no used one is free.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        self.slots().stats(self.list.count_live())
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
}

impl<B: Backing> fmt::Debug for FreeList<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = self.slots().account().shown(f, "FreeList");
        shown.field("layout", &self.layout()).finish_non_exhaustive()
    }
}

impl<B: Backing> sealed::Sealed for FreeList<B> {}

impl<B: Backing> SlotList for FreeList<B> {
    fn slot_layout(&self) -> Layout {
        self.slots().layout()
    }

    #[inline]
    fn take(&self) -> Result<(u32, NonNull<u8>), ArenaError> {
        match self.list.allocate() {
            // The number is not always known, and `put` does not need it.
            Some(taken) => Ok((NIL, self.memory(taken))),
            None => Err(self.slots().exhausted()),
        }
    }

    fn number(&self, memory: NonNull<u8>) -> u32 {
        match self.find(memory) {
            Ok(found) => found.slot,
            Err(error) => error.abort(self.slots().slot_bytes()),
        }
    }

    #[inline]
    unsafe fn put(&self, _: u32, memory: NonNull<u8>) {
        // SAFETY: the caller's promise.
        unsafe { self.deallocate(memory) };
    }
}
