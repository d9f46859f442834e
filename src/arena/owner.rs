//! Participants of a sharded list: owners of a shard, and readers inside.
//!
//! ```text
//!   list ── owner() ──▶ Owner ── enter() ──▶ Guard ── protect() ──▶ what stays until the guard is dropped
//! ```
//!
//! An owner counts its guards: the first enters, the last leaves, the others only increment a counter.
//!
//! Worked: `enter`, `enter`, and the first guard is dropped. The owner is still inside, and what either guard protected
//! stays.

use core::alloc::Layout;
use core::cell::Cell;
use core::fmt;
use core::ptr::NonNull;

use crate::fatal::{self, Number};

use super::backing::Backing;
use super::error::ArenaError;
use super::process::ProcessHeap;
use super::sharded::ShardedFreeList;
use super::shards::{Pocket, Shard};
use super::slot_box::{ListHandle, SlotBox, SlotList, sealed};
use super::slot_error::SlotError;

impl<B: Backing> ShardedFreeList<B> {
    /// Lends the caller a shard of its own, until the owner is dropped.
    ///
    /// ~15 ns. A thread that gets none uses the list itself.
    ///
    /// # Errors
    /// [`Reason::NoShards`](super::Reason::NoShards) if the list already has as many owners as it was made for,
    /// or was made for none.
    pub fn owner(&self) -> Result<Owner<'_, B>, ArenaError> {
        let index = self.shards.lend().ok_or(ArenaError::no_shards(1, 0))?;
        Ok(Owner {
            list: self,
            shard: self.shards.shard(index),
            index,
            pocket: Pocket::new(),
            depth: Cell::new(0),
        })
    }
}

/// The exclusive user of a shard of a [`ShardedFreeList`].
///
/// It may move to another thread, but two threads cannot use it at once. Any thread may free a slot, through its owner
/// or the list. The shard's slots go back to the list when the owner is dropped, as by [`flush`](Self::flush). Before
/// that, other threads that find no other slot may take them, so leaking an owner does no harm.
///
/// ```compile_fail,E0277
/// use core::alloc::Layout;
/// use pageheap::arena::ShardedFreeList;
///
/// let list = ShardedFreeList::new(Layout::new::<u64>(), 4).unwrap();
/// let owner = list.owner().unwrap();
/// std::thread::scope(|scope| {
///     scope.spawn(|| assert!(owner.allocate().is_ok())); // error: `Owner` cannot be shared
/// });
/// ```
pub struct Owner<'l, B: Backing = ProcessHeap> {
    list: &'l ShardedFreeList<B>,
    shard: &'l Shard,
    /// The number of the shard.
    index: usize,
    pocket: Pocket<'l>,
    /// Guards alive. The `Cell` also makes an owner not `Sync`.
    depth: Cell<usize>,
}

// SAFETY: the shard is the owner's, whichever thread has the owner. The address in the pocket is either that of a free
// slot, to be handed out by the thread that has the owner, or is only compared.
unsafe impl<B: Backing + Sync> Send for Owner<'_, B> {}

impl<'l, B: Backing> Owner<'l, B> {
    /// Like [`ShardedFreeList::allocate`], but from the shard if that has a slot: then without a locked instruction.
    ///
    /// # Errors
    /// As for [`ShardedFreeList::allocate`].
    #[inline(always)]
    pub fn allocate(&self) -> Result<NonNull<[u8]>, ArenaError> {
        match self.list.shards.allocate(self.shard, &self.pocket) {
            Some(taken) => Ok(self.list.whole(taken)),
            None => Err(self.list.slots().exhausted()),
        }
    }

    /// Allocates slots into `batch`, from the front, overwriting what is there. Returns how many it wrote; fewer than
    /// `batch` has places only if no more can be had. The next call then reports why. The places behind them are
    /// unchanged.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate), if `batch` is not empty and not one slot can be had. Nothing is then
    /// written.
    pub fn allocate_batch(&self, batch: &mut [Option<NonNull<u8>>]) -> Result<usize, ArenaError> {
        for (taken, place) in batch.iter_mut().enumerate() {
            match self.list.shards.allocate(self.shard, &self.pocket) {
                Some(slot) => *place = Some(self.list.memory(slot)),
                None if taken == 0 => return Err(self.list.slots().exhausted()),
                None => return Ok(taken),
            }
        }
        Ok(batch.len())
    }

    /// Like [`ShardedFreeList::deallocate`], but into the shard: without a locked instruction, unless a batch is full.
    ///
    /// # Safety
    ///
    /// As for [`ShardedFreeList::deallocate`].
    #[inline(always)]
    pub unsafe fn deallocate(&self, slot: NonNull<u8>) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_deallocate(slot) } {
            self.list.misuse(error);
        }
    }

    /// Like [`deallocate`](Self::deallocate), but returns an error on misuse.
    ///
    /// # Errors
    /// As for [`ShardedFreeList::try_deallocate`].
    ///
    /// # Safety
    ///
    /// As for [`ShardedFreeList::try_deallocate`].
    #[inline(always)]
    pub unsafe fn try_deallocate(&self, slot: NonNull<u8>) -> Result<(), SlotError> {
        let freed = match self.list.shards.free_again(self.shard, &self.pocket, slot.as_ptr()) {
            Some(freed) => freed,
            None => {
                let found = self.list.find(slot)?;
                let taken = (found.slot, found.memory.as_ptr());
                self.list.shards.free(self.shard, &self.pocket, taken, found.node)
            }
        };
        freed.map_err(|_| SlotError::not_allocated(slot.as_ptr()))
    }

    /// Frees slots, and leaves `None` in their places.
    ///
    /// # Errors
    /// [`SlotError`] for the first slot that is foreign or not allocated. That slot and those behind it stay as they
    /// were.
    ///
    /// # Safety
    ///
    /// As for [`try_deallocate`](Self::try_deallocate), for each of them.
    pub unsafe fn deallocate_batch(&self, batch: &mut [Option<NonNull<u8>>]) -> Result<(), SlotError> {
        for place in batch {
            if let Some(slot) = *place {
                // SAFETY: the caller's promise.
                unsafe { self.try_deallocate(slot)? };
                *place = None;
            }
        }
        Ok(())
    }

    /// Like [`ShardedFreeList::retire`], but into the shard.
    ///
    /// # Safety
    ///
    /// As for [`ShardedFreeList::retire`].
    #[inline]
    pub unsafe fn retire(&self, slot: NonNull<u8>) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_retire(slot) } {
            self.list.misuse(error);
        }
    }

    /// Like [`retire`](Self::retire), but returns an error on misuse.
    ///
    /// # Errors
    /// As for [`ShardedFreeList::try_retire`].
    ///
    /// # Safety
    ///
    /// As for [`ShardedFreeList::try_retire`].
    #[inline]
    pub unsafe fn try_retire(&self, slot: NonNull<u8>) -> Result<(), SlotError> {
        let found = self.list.find(slot)?;
        let retired = self.list.shards.retire(self.shard, found.slot, found.node);
        retired.map_err(|_| SlotError::not_allocated(slot.as_ptr()))
    }

    /// Makes the shard's slots available to all threads: free slots at once, retired ones as soon as nobody reads them.
    ///
    /// If another thread is gathering slots at this moment, because it found no free one, some may stay in the shard:
    /// the next thread that gathers finds them, or the owner itself, or the next owner of the shard. Retired slots may
    /// stay as in [`ShardedFreeList::flush`].
    pub fn flush(&self) {
        self.list.shards.flush(self.index);
    }

    /// Enters: a slot that [`protect`](Guard::protect) finds from now on is not freed before the owner's last guard is
    /// dropped, whichever thread retires it. 2.4 ns to enter and leave; nested guards cost nothing.
    ///
    /// A reader that sleeps inside holds back slots allocated before; the other threads carry on. A reader that never
    /// leaves but keeps looking holds back everything it could have seen, so drop the guard between one piece of work
    /// and the next.
    #[inline]
    #[must_use]
    pub fn enter(&self) -> Guard<'_, B> {
        match self.depth.get() {
            0 => self.list.shards.enter_reader(self.index),
            usize::MAX => fatal::abort(
                "more guards than can be counted; their number, the shard",
                Number::Count(usize::MAX),
                Number::Count(self.index),
            ),
            _ => {}
        }
        self.depth.set(self.depth.get() + 1);
        Guard {
            list: self.list,
            shard: self.index,
            depth: &self.depth,
        }
    }

    /// Like [`ShardedFreeList::boxed`]: the slot comes from the shard and goes back to it. The box stays in this
    /// thread, and borrows the owner. For another thread, or to outlive the owner, make it a box of the list:
    /// [`SlotBox::into_list_box`].
    ///
    /// # Errors
    /// As for [`ShardedFreeList::boxed`].
    #[inline]
    pub fn boxed<T>(&self, value: T) -> Result<SlotBox<T, &Self>, ArenaError> {
        SlotBox::new(self, || value)
    }

    /// Like [`ShardedFreeList::boxed_with`]: the slot comes from the shard and goes back to it.
    ///
    /// # Errors
    /// As for [`ShardedFreeList::boxed_with`].
    #[inline]
    pub fn boxed_with<T>(&self, make: impl FnOnce() -> T) -> Result<SlotBox<T, &Self>, ArenaError> {
        SlotBox::new(self, make)
    }

    /// The size and alignment of a slot.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.list.layout()
    }

    /// The list.
    #[must_use]
    pub fn list(&self) -> &'l ShardedFreeList<B> {
        self.list
    }
}

impl<B: Backing> Drop for Owner<'_, B> {
    fn drop(&mut self) {
        // A leaked guard stays inside, so its shard is not lent again.
        if self.depth.get() == 0 {
            self.list.shards.take_back(self.index);
        } else {
            self.flush();
        }
    }
}

/// Its list and the number of its shard, not what is in the shard.
impl<B: Backing> fmt::Debug for Owner<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner")
            .field("list", &self.list)
            .field("shard", &self.index)
            .field("guards", &self.depth.get())
            .finish_non_exhaustive()
    }
}

impl<B: Backing> sealed::Sealed for Owner<'_, B> {}

impl<B: Backing> SlotList for Owner<'_, B> {
    fn slot_layout(&self) -> Layout {
        self.list.slots().layout()
    }

    #[inline]
    fn take(&self) -> Result<(u32, NonNull<u8>), ArenaError> {
        match self.list.shards.allocate(self.shard, &self.pocket) {
            Some(taken) => Ok((taken.0, self.list.memory(taken))),
            None => Err(self.list.slots().exhausted()),
        }
    }

    fn number(&self, memory: NonNull<u8>) -> u32 {
        self.list.number(memory)
    }

    #[inline]
    unsafe fn put(&self, slot: u32, memory: NonNull<u8>) {
        let freed = match self.list.shards.free_again(self.shard, &self.pocket, memory.as_ptr()) {
            Some(freed) => freed,
            None => {
                // The address for the pocket must give access to the whole slot; the box's may give access to its value
                // only.
                let found = self.list.slots().found(slot);
                let taken = (slot, found.memory.as_ptr());
                self.list.shards.free(self.shard, &self.pocket, taken, found.node)
            }
        };
        if freed.is_err() {
            self.list.misuse(SlotError::not_allocated(memory.as_ptr()));
        }
    }
}

impl<'l, T: ?Sized, B: Backing + 'l, P: ListHandle<List = Owner<'l, B>>> SlotBox<T, P> {
    /// Makes a box of an owner one of the owner's list, which does not borrow the owner, and may go to any thread that
    /// `T` may go to. O(1), without an atomic operation, but for what it takes to drop the box's handle, which may be
    /// the owner's last. The slot goes back to the list: by a lane, as if the list had made the box.
    ///
    /// So a thread can allocate from an owner that it keeps for as long as it runs, and return the box or send it away:
    ///
    /// ```
    /// use std::sync::LazyLock;
    ///
    /// use pageheap::arena::{Owner, ShardedFreeList, SlotBox};
    ///
    /// static LIST: LazyLock<ShardedFreeList> = LazyLock::new(|| ShardedFreeList::for_type::<String>(8).unwrap());
    /// thread_local! {
    ///     static OWNER: Owner<'static> = LIST.owner().unwrap();
    /// }
    ///
    /// let name = OWNER.with(|owner| owner.boxed("slot".to_owned()).map(SlotBox::into_list_box))?;
    /// let length = std::thread::spawn(move || name.len());
    /// assert_eq!((length.join().unwrap(), LIST.stats().allocated), (4, 0));
    /// # Ok::<(), pageheap::arena::ArenaError>(())
    /// ```
    #[must_use]
    pub fn into_list_box(boxed: Self) -> SlotBox<T, &'l ShardedFreeList<B>> {
        let (owner, value, slot) = Self::into_parts(boxed);
        // SAFETY: the parts of this box. Its slot has the same number in the list, whose slots are what owners lend.
        unsafe { SlotBox::from_parts(owner.list().list(), value.as_ptr(), slot) }
    }
}

/// A reader inside: what [`protect`](Self::protect) found stays as it is. Dropping the owner's last guard leaves.
///
/// ```
/// use core::alloc::Layout;
/// use core::sync::atomic::{AtomicPtr, Ordering};
/// use pageheap::arena::{ShardedFreeList, SlotBox};
///
/// let list = ShardedFreeList::new(Layout::new::<u64>(), 4)?;
/// let (reader, writer) = (list.owner()?, list.owner()?);
/// let current = AtomicPtr::new(SlotBox::into_raw(writer.boxed(1_u64)?).as_ptr());
///
/// let guard = reader.enter();
/// let seen = guard.protect(|| current.load(Ordering::Acquire));
///
/// let next = SlotBox::into_raw(writer.boxed(2_u64)?);
/// let old = current.swap(next.as_ptr(), Ordering::AcqRel);
/// // SAFETY: the old slot is out of reach; a reader that found it before did so inside a guard, by `protect`.
/// unsafe { writer.retire(core::ptr::NonNull::new(old).unwrap().cast()) };
///
/// // SAFETY: protected, and still inside.
/// assert_eq!(unsafe { *seen }, 1);
/// drop(guard);
/// # Ok::<(), pageheap::arena::ArenaError>(())
/// ```
pub struct Guard<'l, B: Backing = ProcessHeap> {
    list: &'l ShardedFreeList<B>,
    shard: usize,
    depth: &'l Cell<usize>,
}

impl<'l, B: Backing> Guard<'l, B> {
    /// Calls `load`, which reads an address from shared memory, and returns its result. The slot it leads to stays as
    /// it is until the owner's last guard is dropped. 1 ns more than the load itself.
    ///
    /// `load` must read a *place*: a word that no longer leads to a slot by the time the slot is retired. It may be
    /// called several times, and the last result counts. Each time it must read the place anew, with `Acquire` or
    /// `SeqCst`, and must follow no link that is not protected yet. It must not allocate from the list: in an exhausted
    /// list each attempt may begin a new era, and then `protect` does not return.
    ///
    /// A link in a slot that was itself taken out is not a place: nobody changes it any more, so it may lead to a slot
    /// that has since been retired and freed, and still look valid. An algorithm that follows links must mark those of
    /// a slot before taking the slot out, and check for the mark after `protect`. (Michael's list does so; Harris's
    /// list walks on, and cannot be used with eras.)
    #[inline]
    pub fn protect<P>(&self, load: impl FnMut() -> P) -> P {
        self.list.shards.protect(self.shard, load)
    }

    /// The list whose slots this guard protects.
    #[must_use]
    pub fn list(&self) -> &'l ShardedFreeList<B> {
        self.list
    }
}

impl<B: Backing> Drop for Guard<'_, B> {
    #[inline]
    fn drop(&mut self) {
        self.depth.set(self.depth.get() - 1);
        if self.depth.get() == 0 {
            self.list.shards.leave_reader(self.shard);
        }
    }
}

impl<B: Backing> fmt::Debug for Guard<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("list", &self.list)
            .field("shard", &self.shard)
            .finish_non_exhaustive()
    }
}
