//! [`FreeList`]: slots of one size, for any thread, freed one by one.
//!
//! ```text
//!   FreeList ──── FreeSlots     which slots are free: a pocket for one, a stack of numbers, and those never used
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
//! Cost: each way a compare-exchange. 5 ns to allocate a slot and free it, through the pocket; 7 where several are
//! held, through the stack; 2 and 5 where the list is not shared (`&mut`); 7 a slot in batches of 64. Many threads at
//! once are the business of the [sharded list](super::ShardedFreeList).

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
/// A slot is memory: not cleared, not touched by the list, and the same as when it was freed. Which slots are free is
/// kept outside of them, four bytes each: a stack of numbers, with a tag against ABA, and a pocket for one slot. A list
/// takes slabs from its backing, each as large as all before it, and keeps them until it is dropped.
///
/// 5 ns to allocate and free in turns, 7 where several are held; 2 and 5 with the list to oneself; 7 in batches.
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

// Who has caught a panic finds a list that is right: nothing in it unwinds half way. Backings may not (`Backing`); what
// makes a value has a slot that is taken, and given back if it panics.
impl<B: Backing + UnwindSafe> UnwindSafe for FreeList<B> {}
impl<B: Backing + RefUnwindSafe> RefUnwindSafe for FreeList<B> {}

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

    /// A slot: memory with room for the list's layout, not cleared, the caller's until he gives it back.
    ///
    /// # Errors
    /// If all slots are taken, and neither the limit nor the backing has room for more.
    #[inline(always)]
    pub fn allocate(&self) -> Result<NonNull<[u8]>, ArenaError> {
        match self.list.allocate() {
            Some(taken) => Ok(self.whole(taken)),
            None => Err(self.slots().exhausted()),
        }
    }

    /// Fills `batch` from the front, over what is there, by one exchange for all that were free, and one for those
    /// never used. How many there are: fewer than asked only if there are no more, and why, the next call says. The
    /// places behind them are as they were.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate), if there is not one for a batch that has a place. Nothing is written then.
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

    /// Puts a slot back.
    ///
    /// Aborts the process, with a message that names the address, if no slot of the list begins there or it is not
    /// allocated. (Two threads that free one slot within the same nanoseconds can both pass: it may be handed out twice
    /// then, and other free slots may be lost until a [`reset`](Self::reset).)
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
        let found = self.find(slot)?;
        let freed = self.list.free(found.slot, found.memory, found.node);
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
        // The first that was not freed: behind `count` that were.
        for place in batch.iter_mut().filter(|place| place.is_some()).take(count) {
            *place = None;
        }
        let slot = batch.iter().flatten().next();
        slot.map_or(Ok(()), |slot| Err(error(slot.as_ptr())))
    }

    /// As [`allocate`](Self::allocate), with the list to oneself: without a locked instruction.
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

    /// As [`deallocate`](Self::deallocate), with the list to oneself: without a locked instruction.
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

    /// A value in a slot of its own, which is free again when the box is dropped.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate), and if a slot has no room for a `T`. The value is dropped then.
    #[inline]
    pub fn boxed<T>(&self, value: T) -> Result<SlotBox<'_, T, Self>, ArenaError> {
        SlotBox::new(self, || value)
    }

    /// As [`boxed`](Self::boxed), with a value that is made only once there is a slot for it: where there is none,
    /// nothing is made. If `make` panics the slot is free again.
    ///
    /// # Errors
    /// As for [`boxed`](Self::boxed); but there is no value to be dropped.
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
            // The number is not always known, and `put` does without.
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
