//! A value in a slot of its own, which goes back when the box is dropped.
//!
//! ```text
//!   SlotBox<T, L>   ┌ list ┬ slot's number ┬ address ┐──▶ T        dropped: the value, then the slot goes back
//! ```
//!
//! The list is a [`FreeList`](super::FreeList), a [`ShardedFreeList`](super::ShardedFreeList) or an
//! [`Owner`](super::Owner) of one of its shards; the box knows which, and its slot goes back there. A safe program
//! cannot free a slot twice, or into another list, by boxes.
//!
//! Cost: the slot's, and the value's own destructor.

use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;

use super::error::{ArenaError, Reason};

/// What gives slots to boxes, and takes them back.
pub trait SlotList: sealed::Sealed {
    /// The size and alignment that slots have room for.
    #[doc(hidden)]
    fn slot_layout(&self) -> Layout;

    /// A slot: its number and its memory, aligned and as large as `slot_layout` says, the caller's alone.
    #[doc(hidden)]
    fn take(&self) -> Result<(u32, NonNull<u8>), ArenaError>;

    /// Takes a slot back.
    ///
    /// # Safety
    ///
    /// Both came from `take` of this list, once, and nothing uses them any more.
    #[doc(hidden)]
    unsafe fn put(&self, slot: u32, memory: NonNull<u8>);
}

pub(super) mod sealed {
    //! Lists are ours.

    /// Only lists of this crate hold boxes.
    pub trait Sealed {}
}

/// Whether a slot has room for a layout.
#[inline(always)]
pub(super) const fn fits(layout: Layout, slot: Layout) -> bool {
    layout.size() <= slot.size() && layout.align() <= slot.align()
}

/// A value in a slot of list `L`. Dropping the box drops the value, and the slot is free.
///
/// ```
/// use pageheap::arena::FreeList;
///
/// let list = FreeList::for_type::<String>();
/// let name = list.boxed("slot".to_owned())?;
/// assert_eq!(name.len(), 4);
/// drop(name);
/// assert_eq!(list.stats().allocated, 0);
/// # Ok::<(), pageheap::arena::ArenaError>(())
/// ```
pub struct SlotBox<'l, T, L: SlotList> {
    list: &'l L,
    value: NonNull<T>,
    slot: u32,
    owned: PhantomData<T>,
}

// SAFETY: the box owns its value like a `Box`, and refers to the list.
unsafe impl<T: Send, L: SlotList + Sync> Send for SlotBox<'_, T, L> {}
// SAFETY: as above: a shared box gives out the value, shared, and nothing of the list.
unsafe impl<T: Sync, L: SlotList + Sync> Sync for SlotBox<'_, T, L> {}

impl<'l, T, L: SlotList> SlotBox<'l, T, L> {
    /// Puts `make()` into a slot of the list.
    #[inline(always)]
    pub(super) fn new(list: &'l L, make: impl FnOnce() -> T) -> Result<Self, ArenaError> {
        let (layout, slot) = (Layout::new::<T>(), list.slot_layout());
        if !fits(layout, slot) {
            return Err(ArenaError::new(Reason::SlotTooSmall, layout, slot.size()));
        }
        // Made first: if that panics, no slot is missing.
        let value = make();
        let (slot, memory) = list.take()?;
        let memory = memory.cast::<T>();
        // SAFETY: a slot of our own, with room for a `T`.
        unsafe { memory.write(value) };
        Ok(Self {
            list,
            value: memory,
            slot,
            owned: PhantomData,
        })
    }

    /// The value, moved out. The slot is free.
    #[must_use]
    pub fn into_inner(boxed: Self) -> T {
        let boxed = ManuallyDrop::new(boxed);
        // SAFETY: the value is the box's, which is gone without dropping it; the slot came from this list, and is not
        // used again.
        unsafe {
            let value = boxed.value.read();
            boxed.list.put(boxed.slot, boxed.value.cast());
            value
        }
    }

    /// The address of the value, which is the caller's now, as is the slot: it is to be given back to the list by
    /// address.
    #[must_use]
    pub fn into_raw(boxed: Self) -> NonNull<T> {
        ManuallyDrop::new(boxed).value
    }
}

impl<T, L: SlotList> Drop for SlotBox<'_, T, L> {
    #[inline]
    fn drop(&mut self) {
        /// Puts the slot back, also if the value's destructor panics.
        struct Put<'l, L: SlotList>(&'l L, u32, NonNull<u8>);
        impl<L: SlotList> Drop for Put<'_, L> {
            #[inline(always)]
            fn drop(&mut self) {
                // SAFETY: taken by the box that is being dropped, whose value is gone.
                unsafe { self.0.put(self.1, self.2) };
            }
        }
        let _put = Put(self.list, self.slot, self.value.cast());
        // SAFETY: the box's own value, dropped once.
        unsafe { self.value.drop_in_place() };
    }
}

impl<T, L: SlotList> Deref for SlotBox<'_, T, L> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: written by `new`, and the box's until it is dropped.
        unsafe { self.value.as_ref() }
    }
}

impl<T, L: SlotList> DerefMut for SlotBox<'_, T, L> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and borrowed mutably.
        unsafe { self.value.as_mut() }
    }
}

impl<T: fmt::Debug, L: SlotList> fmt::Debug for SlotBox<'_, T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T: fmt::Display, L: SlotList> fmt::Display for SlotBox<'_, T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
