//! Those who have a part in a sharded list: owners of a shard, and readers inside.
//!
//! ```text
//!   list ── owner() ──▶ Owner ── enter() ──▶ Guard ── protect() ──▶ what stays until the guard is dropped
//! ```
//!
//! An owner counts his guards: the first of them enters, the last leaves, those between cost an increment.
//!
//! Worked: `enter`, `enter`, and the first guard is dropped: the owner is inside, and what either has protected stays.

use core::alloc::Layout;
use core::cell::Cell;
use core::ptr::NonNull;

use super::backing::Backing;
use super::error::ArenaError;
use super::process::ProcessHeap;
use super::sharded::ShardedFreeList;
use super::shards::{Pocket, Shard};
use super::slot_box::{SlotBox, SlotList, sealed};
use super::slot_error::SlotError;

impl<B: Backing> ShardedFreeList<B> {
    /// A shard of the caller's own, until he drops it.
    ///
    /// ~15 ns. Whoever gets none uses the list itself.
    ///
    /// # Errors
    /// [`Reason::NoShards`](super::Reason::NoShards) if as many as the list was made for have owners.
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

/// One who has a shard of a [`ShardedFreeList`] for himself.
///
/// It may move to another thread, not be used by two. Slots may be given back by whomever, here or there. What the
/// shard keeps goes back when the owner is dropped, and can be had by others before, if they have no other; so it may
/// also be forgotten.
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
#[derive(Debug)]
pub struct Owner<'l, B: Backing = ProcessHeap> {
    list: &'l ShardedFreeList<B>,
    shard: &'l Shard,
    /// Which shard that is.
    index: usize,
    pocket: Pocket<'l>,
    /// Guards alive. Also what makes an owner not `Sync`.
    depth: Cell<usize>,
}

// SAFETY: the shard is the owner's, whichever thread has him. The address in the pocket is that of a free slot, to be
// handed out by who has the owner; or it is only compared.
unsafe impl<B: Backing + Sync> Send for Owner<'_, B> {}

impl<'l, B: Backing> Owner<'l, B> {
    /// As [`ShardedFreeList::allocate`], from the shard if it has a slot: no locked instruction then.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn allocate(&self) -> Result<NonNull<[u8]>, ArenaError> {
        match self.list.shards.allocate(self.shard, &self.pocket) {
            Some(taken) => Ok(self.list.whole(taken)),
            None => Err(self.list.slots().exhausted()),
        }
    }

    /// Fills `batch` from the front, over what is there. How many there are: fewer than asked only if there are no
    /// more, and why, the next call says. The places behind them are as they were.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate), if there is not one for a batch that has a place. Nothing is written then.
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

    /// As [`ShardedFreeList::deallocate`], into the shard: no locked instruction, but where a batch is full.
    ///
    /// # Safety
    ///
    /// As there.
    #[inline(always)]
    pub unsafe fn deallocate(&self, slot: NonNull<u8>) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_deallocate(slot) } {
            self.list.misuse(error);
        }
    }

    /// As [`deallocate`](Self::deallocate), but misuse is an error.
    ///
    /// # Errors
    /// As for [`ShardedFreeList::try_deallocate`].
    ///
    /// # Safety
    ///
    /// As there.
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

    /// Puts slots back, and leaves `None` in their places.
    ///
    /// # Errors
    /// [`SlotError`] for the first that is foreign or not allocated. It and those behind it are left as they were.
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

    /// As [`ShardedFreeList::retire`].
    ///
    /// # Safety
    ///
    /// As there.
    #[inline]
    pub unsafe fn retire(&self, slot: NonNull<u8>) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.try_retire(slot) } {
            self.list.misuse(error);
        }
    }

    /// As [`retire`](Self::retire), but misuse is an error.
    ///
    /// # Errors
    /// As for [`ShardedFreeList::try_retire`].
    ///
    /// # Safety
    ///
    /// As there.
    #[inline]
    pub unsafe fn try_retire(&self, slot: NonNull<u8>) -> Result<(), SlotError> {
        let found = self.list.find(slot)?;
        let retired = self.list.shards.retire(self.shard, found.slot, found.node);
        retired.map_err(|_| SlotError::not_allocated(slot.as_ptr()))
    }

    /// Gives what the shard keeps to all: free slots, and retired ones as soon as nobody reads them.
    pub fn flush(&self) {
        self.list.shards.flush(self.index);
    }

    /// Enters: what [`protect`](Guard::protect) gives from now on is not free before the owner's last guard is dropped,
    /// whoever retires it. 2.4 ns both ways; guards within guards cost nothing.
    ///
    /// Who sleeps inside holds back what was allocated before, and the others go on. Who never leaves and goes on
    /// looking holds back all that he could have seen: leave between one thing and the next.
    #[inline]
    #[must_use]
    pub fn enter(&self) -> Guard<'_, B> {
        match self.depth.get() {
            0 => self.list.shards.enter_reader(self.index),
            usize::MAX => crate::fatal::abort(
                "more guards than can be counted; their number, the shard",
                usize::MAX,
                self.index,
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

    /// As [`ShardedFreeList::boxed`]: the slot comes from the shard, and goes back there.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn boxed<T>(&self, value: T) -> Result<SlotBox<'_, T, Self>, ArenaError> {
        SlotBox::new(self, || value)
    }

    /// What a slot has room for.
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
        // A guard that was forgotten stays inside, and the shard with it.
        if self.depth.get() == 0 {
            self.list.shards.take_back(self.index);
        } else {
            self.flush();
        }
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
                // The address that goes into the pocket leads to all of the slot; the box's, perhaps to its value only.
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

/// One who is inside: what [`protect`](Self::protect) gave stays as it is. Dropping the owner's last one is leaving.
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
/// // SAFETY: the old slot is out of reach; who found it before, found it inside, and by `protect`.
/// unsafe { writer.retire(core::ptr::NonNull::new(old).unwrap().cast()) };
///
/// // SAFETY: protected, and still inside.
/// assert_eq!(unsafe { *seen }, 1);
/// drop(guard);
/// # Ok::<(), pageheap::arena::ArenaError>(())
/// ```
#[derive(Debug)]
pub struct Guard<'l, B: Backing = ProcessHeap> {
    list: &'l ShardedFreeList<B>,
    shard: usize,
    depth: &'l Cell<usize>,
}

impl<'l, B: Backing> Guard<'l, B> {
    /// What `load` gives: an address out of shared memory. A slot it leads to stays as it is until the owner's last
    /// guard is dropped. 1 ns more than the load itself.
    ///
    /// `load` is to read a *place*: a word that leads to a slot no more when that is retired. It reads it anew each
    /// time it is called, which may be several times (what the last call gave counts), by `Acquire` or `SeqCst`, and
    /// follows nothing that is not protected yet.
    ///
    /// A link in a slot that was itself taken out is no place: nobody changes it any more, so it may lead to a slot
    /// that was retired and freed since, and looks as good as ever. Who walks along links marks those of a slot before
    /// he takes it out, and looks for the mark behind `protect` (Michael's list does; Harris's walks on, and cannot be
    /// read under eras).
    #[inline]
    pub fn protect<P>(&self, load: impl FnMut() -> P) -> P {
        self.list.shards.protect(self.shard, load)
    }

    /// The list whose slots are protected.
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
