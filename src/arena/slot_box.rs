//! A value in a slot of its own. Dropping the box frees the slot.
//!
//! ```text
//!   SlotBox<T, L>   ┌ list ┬ slot's number ┬ address ┐──▶ T        dropped: the value, then the slot goes back
//! ```
//!
//! The list is a [`FreeList`](super::FreeList), a [`ShardedFreeList`](super::ShardedFreeList) or an
//! [`Owner`](super::Owner) of one of its shards. The box records which, and its slot goes back there. With boxes, safe
//! code cannot free a slot twice, or into another list.
//!
//! Cost: that of the slot, and of the value's own destructor.

use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::mem::{self, ManuallyDrop};
use core::ops::{Deref, DerefMut};
use core::panic::{RefUnwindSafe, UnwindSafe};
use core::ptr::NonNull;

use super::contents::like_a_box;
use super::error::{ArenaError, Reason};

/// A list that supplies slots to boxes and takes them back.
pub trait SlotList: sealed::Sealed {
    /// The size and alignment of a slot.
    #[doc(hidden)]
    fn slot_layout(&self) -> Layout;

    /// Allocates a slot: its number and its memory, which has the size and alignment of `slot_layout` and is the
    /// caller's alone.
    #[doc(hidden)]
    fn take(&self) -> Result<(u32, NonNull<u8>), ArenaError>;

    /// The number of the slot at `memory`. Aborts the process if no slot of the list begins there.
    #[doc(hidden)]
    fn number(&self, memory: NonNull<u8>) -> u32;

    /// Frees a slot.
    ///
    /// # Safety
    ///
    /// Both came from one `take` of this list, and nothing uses them any more. (The number may come from `number`
    /// instead.)
    #[doc(hidden)]
    unsafe fn put(&self, slot: u32, memory: NonNull<u8>);
}

pub(super) mod sealed {
    //! Seals [`SlotList`](super::SlotList).

    /// Only lists of this crate can hold boxes.
    pub trait Sealed {}
}

/// Whether a layout fits a slot.
#[inline(always)]
pub(super) const fn fits(layout: Layout, slot: Layout) -> bool {
    layout.size() <= slot.size() && layout.align() <= slot.align()
}

/// A value in a slot of list `L`. Dropping the box drops the value and frees the slot.
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
pub struct SlotBox<'l, T: ?Sized, L: SlotList> {
    list: &'l L,
    value: NonNull<T>,
    slot: u32,
    owned: PhantomData<T>,
}

// SAFETY: the box owns its value like a `Box`, and refers to the list.
unsafe impl<T: ?Sized + Send, L: SlotList + Sync> Send for SlotBox<'_, T, L> {}
// SAFETY: as above: a shared box gives shared access to the value, and none to the list.
unsafe impl<T: ?Sized + Sync, L: SlotList + Sync> Sync for SlotBox<'_, T, L> {}

/// Frees a slot, even if the value's constructor or destructor panics.
struct Put<'l, L: SlotList>(&'l L, u32, NonNull<u8>);

impl<L: SlotList> Drop for Put<'_, L> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: taken from this list by the box that is being made or dropped, which has no value.
        unsafe { self.0.put(self.1, self.2) };
    }
}

impl<'l, T, L: SlotList> SlotBox<'l, T, L> {
    /// Puts `make()` into a slot of the list.
    #[inline(always)]
    pub(super) fn new(list: &'l L, make: impl FnOnce() -> T) -> Result<Self, ArenaError> {
        let (layout, slot) = (Layout::new::<T>(), list.slot_layout());
        if !fits(layout, slot) {
            return Err(ArenaError::new(Reason::SlotTooSmall, layout, slot.size()));
        }
        let (slot, memory) = list.take()?;
        let (put, value) = (Put(list, slot, memory), memory.cast::<T>());
        // SAFETY: the slot is ours, with room for a `T`.
        unsafe { value.write(make()) };
        mem::forget(put);
        Ok(Self {
            list,
            value,
            slot,
            owned: PhantomData,
        })
    }

    /// Moves the value out and frees the slot.
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
}

impl<'l, T: ?Sized, L: SlotList> SlotBox<'l, T, L> {
    /// Returns the address of the value. Value and slot are then the caller's. Free the slot by its address, or by the
    /// box that [`from_raw`](Self::from_raw) makes of it.
    #[must_use]
    pub fn into_raw(boxed: Self) -> NonNull<T> {
        ManuallyDrop::new(boxed).value
    }

    /// Makes a box of a value that is already in a slot of the list: the inverse of [`into_raw`](Self::into_raw). The
    /// slot is looked up by its address.
    ///
    /// The pointer may have been cast to another type in between, so this is how to make a box of a trait object or a
    /// slice. Aborts the process, with a message that names the address, if no slot of the list begins there.
    ///
    /// ```
    /// use std::fmt::Display;
    /// use std::ptr::NonNull;
    ///
    /// use pageheap::arena::{FreeList, SlotBox};
    ///
    /// let list = FreeList::for_type::<String>();
    /// let name = SlotBox::into_raw(list.boxed("slot".to_owned())?);
    /// // SAFETY: of this list, and nobody else has it.
    /// let name = unsafe { SlotBox::from_raw(&list, name) };
    /// assert_eq!(*name, "slot");
    ///
    /// let shown = SlotBox::into_raw(name) as NonNull<dyn Display>;
    /// // SAFETY: as above.
    /// let shown: SlotBox<dyn Display, _> = unsafe { SlotBox::from_raw(&list, shown) };
    /// assert_eq!(shown.to_string(), "slot");
    /// drop(shown);
    /// assert_eq!(list.stats().allocated, 0);
    /// # Ok::<(), pageheap::arena::ArenaError>(())
    /// ```
    ///
    /// # Safety
    ///
    /// The address came from `into_raw` of a box of this list, or from `allocate` of this list or of any of its owners,
    /// and a `T` is there. Both slot and value are the caller's, which passes them to the box.
    #[must_use]
    pub unsafe fn from_raw(list: &'l L, value: NonNull<T>) -> Self {
        Self {
            list,
            value,
            slot: list.number(value.cast()),
            owned: PhantomData,
        }
    }
}

impl<T: ?Sized, L: SlotList> Drop for SlotBox<'_, T, L> {
    #[inline]
    fn drop(&mut self) {
        let _put = Put(self.list, self.slot, self.value.cast());
        // SAFETY: the box's own value, dropped once.
        unsafe { self.value.drop_in_place() };
    }
}

impl<T: ?Sized, L: SlotList> Deref for SlotBox<'_, T, L> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: written by `new`, or already there (`from_raw`), and the box's until it is dropped.
        unsafe { self.value.as_ref() }
    }
}

impl<T: ?Sized, L: SlotList> DerefMut for SlotBox<'_, T, L> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and borrowed mutably.
        unsafe { self.value.as_mut() }
    }
}

// After a caught panic a box is as safe to use as its contents, like a `Box`; to the list it has only a reference.
impl<T: ?Sized + UnwindSafe, L: SlotList + RefUnwindSafe> UnwindSafe for SlotBox<'_, T, L> {}

like_a_box!([L: SlotList] SlotBox<'_, T, L>);
