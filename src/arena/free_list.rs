//! [`FreeList`]: slots of one size, for any thread, freed one by one.
//!
//! ```text
//!   FreeList ──── FreeSlots     which slots are free: one stack of numbers, and those never used
//!            └─── Slots         where they are: slabs that double, four bytes beside each slot
//! ```
//!
//! All of it is in those two. A slot is memory: not cleared, not touched by the list, and the same as when it was
//! freed.
//!
//! Worked: vectors of 1536 floats are slots of 6144 bytes. The first slab of 256 KiB has 32 numbers for them (the
//! powers of two below 42); the list grows to 64, 128 and so on, by as much as it has, until the limit: then by what is
//! left.
//!
//! Cost: 10 ns to allocate and free, each a compare-exchange; 5 where the list is not shared (`&mut`); 9 a slot in
//! batches of 64. Many threads at once are the business of the [sharded list](super::ShardedFreeList).

use core::alloc::Layout;
use core::ptr::NonNull;

use super::backing::Backing;
use super::config::ArenaConfig;
use super::error::ArenaError;
use super::free_slots::FreeSlots;
use super::process::ProcessHeap;
use super::slot_box::{SlotBox, SlotList, sealed};
use super::slot_error::SlotError;
use super::slots::Slots;
use super::stats::ArenaStats;
use crate::sync::AtomicU32;

/// Slots of one size, for any thread, freed one by one.
///
/// A slot is memory: not cleared, not touched by the list, and the same as when it was freed. Which slots are free is
/// kept outside of them, four bytes each: a stack of numbers, with a tag against ABA. A list takes slabs from its
/// backing, each as large as all before it, and keeps them until it is dropped.
///
/// 10 ns to allocate and free, 5 with the list to oneself, 9 in batches.
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
/// What is freed while it is used does not compile, as long as it is in boxes:
///
/// ```compile_fail
/// use pageheap::arena::FreeList;
///
/// let list = FreeList::for_type::<u64>();
/// let number = list.boxed(7_u64).unwrap();
/// drop(list);
/// assert_eq!(*number, 7);
/// ```
#[derive(Debug)]
pub struct FreeList<B: Backing = ProcessHeap> {
    list: FreeSlots<Slots<B, AtomicU32>>,
}

impl<B: Backing> FreeList<B> {
    /// A list of slots for `layout` on `backing`, without a limit of its own. Takes nothing until something is
    /// allocated.
    ///
    /// # Errors
    /// If the layout is too large for any list.
    pub fn new_in(layout: Layout, backing: B) -> Result<Self, ArenaError> {
        Self::with_config_in(layout, ArenaConfig::new(), backing)
    }

    /// A list of slots for `layout` on `backing`, set up by `config`. The limit is on slots and what is kept beside
    /// them, four bytes each; `slab` is the size of the first slab.
    ///
    /// # Errors
    /// If the layout is too large for any list, or what is to be taken at once cannot be had. Nothing is kept then.
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
    fn memory(&self, slot: u32) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.slots().address(slot), self.slots().layout().size())
    }

    /// A slot: memory with room for the list's layout, not cleared, the caller's until he gives it back.
    ///
    /// # Errors
    /// If all slots are taken, and neither the limit nor the backing has room for more.
    #[inline]
    pub fn allocate(&self) -> Result<NonNull<[u8]>, ArenaError> {
        match self.list.allocate() {
            Some(slot) => Ok(self.memory(slot)),
            None => Err(self.slots().exhausted()),
        }
    }

    /// Fills `batch` from the front, by one exchange for all that were free, and one for those never used. How many
    /// there are: fewer than asked only if there are no more.
    pub fn allocate_batch(&self, batch: &mut [Option<NonNull<u8>>]) -> usize {
        let mut places = batch.iter_mut();
        self.list.allocate_many(places.len(), |slot| {
            if let Some(place) = places.next() {
                *place = Some(self.slots().address(slot));
            }
        })
    }

    /// Puts a slot back.
    ///
    /// Aborts the process, with a message that names the address, if no slot of the list begins there or it is not
    /// allocated. (Two threads that free one slot within the same nanoseconds can both pass.)
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

    /// As [`deallocate`](Self::deallocate), but misuse is an error.
    ///
    /// # Errors
    /// [`SlotError`] if no slot of the list begins there, or it is not allocated.
    ///
    /// # Safety
    ///
    /// If the slot is allocated, it belongs to the caller, and nothing uses it any more.
    #[inline]
    pub unsafe fn try_deallocate(&self, slot: NonNull<u8>) -> Result<(), SlotError> {
        let number = self.number(slot)?;
        let freed = self.list.free(number);
        freed.map_err(|_| SlotError::not_allocated(slot.as_ptr()))
    }

    /// Puts slots back, by one exchange for all, and leaves `None` in their places.
    ///
    /// # Errors
    /// [`SlotError`] for the first that is foreign or not allocated. It and those behind it are left as they were.
    ///
    /// # Safety
    ///
    /// As for [`try_deallocate`](Self::try_deallocate), for each of them.
    pub unsafe fn deallocate_batch(&self, batch: &mut [Option<NonNull<u8>>]) -> Result<(), SlotError> {
        let foreign = |slot: &NonNull<u8>| self.number(*slot).is_err();
        let good = batch.iter().position(|place| place.as_ref().is_some_and(foreign));
        let good = good.unwrap_or(batch.len());
        let addresses = batch[..good].iter().flatten();
        let freed = self
            .list
            .free_many(addresses.filter_map(|&slot| self.number(slot).ok()));
        // The place among all of them of the one that was not allocated.
        let mut some = (0..good).filter(|&place| batch[place].is_some());
        let end = freed.err().and_then(|place| some.nth(place));
        let stop = end.unwrap_or(good);
        let error = batch.get(stop).copied().flatten().map(|slot| {
            if end.is_some() {
                SlotError::not_allocated(slot.as_ptr())
            } else {
                SlotError::foreign(slot.as_ptr())
            }
        });
        batch[..stop].fill(None);
        error.map_or(Ok(()), Err)
    }

    /// As [`allocate`](Self::allocate), with the list to oneself: without a locked instruction.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate).
    #[inline]
    pub fn allocate_mut(&mut self) -> Result<NonNull<[u8]>, ArenaError> {
        match self.list.allocate_mut() {
            Some(slot) => Ok(self.memory(slot)),
            None => Err(self.slots().exhausted()),
        }
    }

    /// As [`deallocate`](Self::deallocate), with the list to oneself: without a locked instruction.
    ///
    /// # Safety
    ///
    /// As for [`deallocate`](Self::deallocate).
    #[inline]
    pub unsafe fn deallocate_mut(&mut self, slot: NonNull<u8>) {
        let freed = self.number(slot).and_then(|number| {
            let freed = self.list.free_mut(number);
            freed.map_err(|_| SlotError::not_allocated(slot.as_ptr()))
        });
        if let Err(error) = freed {
            error.abort(self.slots().slot_bytes());
        }
    }

    #[inline(always)]
    fn number(&self, slot: NonNull<u8>) -> Result<u32, SlotError> {
        let address = slot.as_ptr();
        let found = self.slots().find(address);
        found.map(|found| found.slot).ok_or(SlotError::foreign(address))
    }

    /// A value in a slot of its own, which is free again when the box is dropped.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate), and if a slot has no room for a `T`. The value is dropped then.
    #[inline]
    pub fn boxed<T>(&self, value: T) -> Result<SlotBox<'_, T, Self>, ArenaError> {
        SlotBox::new(self, || value)
    }

    /// As [`boxed`](Self::boxed), with a value that is made only if slots have room for one.
    ///
    /// # Errors
    /// As for [`boxed`](Self::boxed).
    #[inline]
    pub fn boxed_with<T>(&self, make: impl FnOnce() -> T) -> Result<SlotBox<'_, T, Self>, ArenaError> {
        SlotBox::new(self, make)
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

    /// Every slot is free, as if none had ever been allocated; pages are kept, contents are not dropped. O(slots used
    /// since the last reset): 4 bytes are cleared for each.
    pub fn reset(&mut self) {
        self.list.reset(Slots::reset);
    }

    /// Counts, in bytes: 1.5 ns for each slot ever used. `peak` is exact: a slot that was never used is allocated only
    /// if no other is free.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        self.slots().stats(self.list.count_live())
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
            Some(slot) => Ok((slot, self.slots().address(slot))),
            None => Err(self.slots().exhausted()),
        }
    }

    #[inline]
    unsafe fn put(&self, slot: u32, memory: NonNull<u8>) {
        if self.list.free(slot).is_err() {
            SlotError::not_allocated(memory.as_ptr()).abort(self.slots().slot_bytes());
        }
    }
}
