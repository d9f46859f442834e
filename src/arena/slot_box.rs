//! A value in a slot of its own. Dropping the box frees the slot.
//!
//! ```text
//!   SlotBox<T, &L>       ┌ list ┬ slot's number ┬ address ┐──▶ T     dropped: the value, then the slot goes back
//!   SlotBox<T, Arc<L>>   └───┬──┴───────────────┴─────────┘          last of all its hold on the list
//!                            └──▶ count, L
//! ```
//!
//! The list `L` is a [`FreeList`](super::FreeList), a [`ShardedFreeList`](super::ShardedFreeList) or an
//! [`Owner`](super::Owner) of one of its shards. The box records which, and its slot goes back there. With boxes, safe
//! code cannot free a slot twice, or into another list. As with `Box<T, A>`, the box has a handle to its list: a
//! reference, or an `Arc` or `Rc`, with which it can go where no reference can, such as to a thread that is not scoped.
//!
//! Cost: that of the slot, and of the value's own destructor; an `Arc` that is cloned for each box costs two
//! read-modify-writes more, a reference nothing.

use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::mem::{self, ManuallyDrop};
use core::ops::{Deref, DerefMut};
use core::panic::UnwindSafe;
use core::pin::Pin;
use core::ptr::{self, NonNull};

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
    /// Both came from one `take` of this list, or of one of its owners, and nothing uses them any more. (The number
    /// may come from `number` instead.)
    #[doc(hidden)]
    unsafe fn put(&self, slot: u32, memory: NonNull<u8>);
}

pub(super) mod sealed {
    //! Seals [`SlotList`](super::SlotList) and [`ListHandle`](super::ListHandle).

    /// Only lists of this crate can hold boxes.
    pub trait Sealed {}

    /// Only handles that always lead to the same list, as a box relies on.
    pub trait Handle {}
}

/// How a box reaches its list: by reference, or, with `std`, by an `Arc` or `Rc`.
pub trait ListHandle: sealed::Handle {
    /// The list.
    type List: SlotList;

    /// The same list each time, also after the handle has moved. It lives as long as the handle.
    #[doc(hidden)]
    fn list(&self) -> &Self::List;
}

/// Implements `ListHandle` for pointers, whose pointee does not move.
macro_rules! lead_to_a_list {
    ($($(#[$condition:meta])* $pointer:ty),*) => {$(
        $(#[$condition])*
        impl<L: SlotList> sealed::Handle for $pointer {}

        $(#[$condition])*
        impl<L: SlotList> ListHandle for $pointer {
            type List = L;

            #[inline(always)]
            fn list(&self) -> &L {
                self
            }
        }
    )*};
}

lead_to_a_list! {
    &L,
    #[cfg(feature = "std")] std::rc::Rc<L>,
    #[cfg(feature = "std")] std::sync::Arc<L>
}

/// Whether a layout fits a slot.
#[inline(always)]
pub(super) const fn fits(layout: Layout, slot: Layout) -> bool {
    layout.size() <= slot.size() && layout.align() <= slot.align()
}

/// A value in a slot of the list that the handle `P` leads to, as in `Box<T, A>`. Dropping the box drops the value and
/// frees the slot.
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
///
/// A box that keeps its list alive, for threads and tasks that outlive the function they were started by:
///
/// ```
/// use std::sync::Arc;
///
/// use pageheap::arena::{FreeList, SlotBox};
///
/// let list = Arc::new(FreeList::for_type::<String>());
/// let name = SlotBox::try_new_in("slot".to_owned(), Arc::clone(&list))?;
/// let length = std::thread::spawn(move || name.len());
/// assert_eq!((length.join().unwrap(), list.stats().allocated), (4, 0));
/// # Ok::<(), pageheap::arena::ArenaError>(())
/// ```
pub struct SlotBox<T: ?Sized, P: ListHandle> {
    list: P,
    value: NonNull<T>,
    slot: u32,
    owned: PhantomData<T>,
}

// SAFETY: the box owns its value like a `Box`, and its handle to the list.
unsafe impl<T: ?Sized + Send, P: ListHandle + Send> Send for SlotBox<T, P> {}
// SAFETY: as above: a shared box gives shared access to the value, and none to the handle.
unsafe impl<T: ?Sized + Sync, P: ListHandle + Sync> Sync for SlotBox<T, P> {}

/// Frees a slot, even if the value's constructor or destructor panics.
struct Put<'l, L: SlotList>(&'l L, u32, NonNull<u8>);

impl<L: SlotList> Drop for Put<'_, L> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: taken from this list by the box that is being made or dropped, which has no value.
        unsafe { self.0.put(self.1, self.2) };
    }
}

impl<T, P: ListHandle> SlotBox<T, P> {
    /// Allocates a value in a slot of the list that `list` leads to: as `boxed` of that list, if it is a reference.
    ///
    /// # Errors
    /// As for `boxed` of the list. Value and handle are then dropped.
    #[inline]
    pub fn try_new_in(value: T, list: P) -> Result<Self, ArenaError> {
        Self::new(list, || value)
    }

    /// Puts `make()` into a slot of the list.
    #[inline(always)]
    pub(super) fn new(list: P, make: impl FnOnce() -> T) -> Result<Self, ArenaError> {
        let (layout, slot) = (Layout::new::<T>(), list.list().slot_layout());
        if !fits(layout, slot) {
            return Err(ArenaError::new(Reason::SlotTooSmall, layout, slot.size()));
        }
        let (slot, memory) = list.list().take()?;
        let (put, value) = (Put(list.list(), slot, memory), memory.cast::<T>());
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
        let (list, value, slot) = Self::into_parts(boxed);
        // SAFETY: the value was the box's, which is gone without dropping it; the slot came from this list, and is not
        // used again.
        unsafe {
            let inner = value.read();
            list.list().put(slot, value.cast());
            inner
        }
    }
}

impl<T: ?Sized, P: ListHandle> SlotBox<T, P> {
    /// The handle, the value and the number of its slot.
    #[inline(always)]
    pub(super) fn into_parts(boxed: Self) -> (P, NonNull<T>, u32) {
        let boxed = ManuallyDrop::new(boxed);
        // SAFETY: the handle is the box's, which is gone without dropping it.
        let list = unsafe { ptr::read(&raw const boxed.list) };
        (list, boxed.value, boxed.slot)
    }

    /// # Safety
    ///
    /// The parts of one box ([`into_parts`](Self::into_parts)), whose value may have been coerced to another type, and
    /// whose owner may have been replaced by its list.
    #[inline(always)]
    pub(super) unsafe fn from_parts(list: P, value: *mut T, slot: u32) -> Self {
        Self {
            list,
            // SAFETY: it was a box's.
            value: unsafe { NonNull::new_unchecked(value) },
            slot,
            owned: PhantomData,
        }
    }

    /// Returns the address of the value. Value and slot are then the caller's. Free the slot by its address, or by the
    /// box that [`from_raw`](Self::from_raw) makes of it.
    ///
    /// The box's handle is dropped. If that was an `Arc` or `Rc`, the memory is there as long as others hold the list.
    #[must_use]
    pub fn into_raw(boxed: Self) -> NonNull<T> {
        Self::into_parts(boxed).1
    }

    /// Makes a box of a value that is already in a slot of the list: the inverse of [`into_raw`](Self::into_raw). The
    /// slot is looked up by its address.
    ///
    /// The pointer may have been cast to another type in between. (For a box of a trait object or a slice there is
    /// [`unsize_box`](crate::unsize_box).) Aborts the process, with a message that names the address, if no slot of the
    /// list begins there.
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
    /// The address came from `into_raw` of a box of this list or of one of its owners, or from `allocate` of any of
    /// these, and a `T` is there. Both slot and value are the caller's, which passes them to the box. The list has been
    /// there since, and was not reset.
    #[must_use]
    pub unsafe fn from_raw(list: P, value: NonNull<T>) -> Self {
        let slot = list.list().number(value.cast());
        Self {
            list,
            value,
            slot,
            owned: PhantomData,
        }
    }
}

impl<T: ?Sized, P: ListHandle + 'static> SlotBox<T, P> {
    /// Pins the value: it stays where it is until it has been dropped. For futures in slots of a list that all tasks
    /// have an `Arc` of, or that lives for ever.
    ///
    /// Only with a handle that is `'static`, as for `Box<T, A>`: a box may be forgotten, and its slot must then stay.
    /// An `Arc` or `Rc` that is forgotten with it keeps the list. A list that is only borrowed could be dropped, or
    /// reset, with the value pinned in it.
    ///
    /// ```
    /// use std::alloc::Layout;
    /// use std::sync::Arc;
    /// use std::task::{Context, Poll, Waker};
    ///
    /// use pageheap::arena::{FreeList, SlotBox};
    ///
    /// let list = Arc::new(FreeList::new(Layout::new::<[u64; 16]>())?);
    /// let mut task = SlotBox::into_pin(SlotBox::try_new_in(async { 7 }, Arc::clone(&list))?);
    /// let done = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    /// assert_eq!(done, Poll::Ready(7));
    /// # Ok::<(), pageheap::arena::ArenaError>(())
    /// ```
    #[must_use]
    pub fn into_pin(boxed: Self) -> Pin<Self> {
        // SAFETY: nothing but the value's destructor moves or ends it. The box does not give access that could: `Deref`
        // and `DerefMut` are its own, and `into_inner` and `into_raw` want it unpinned. Dropping it drops the value in
        // place before the slot is free. If it is forgotten, so is its handle. An `Arc` or `Rc` that is never dropped
        // keeps the list where it is, and nobody gets exclusive access to it, which `reset` needs; nor does anybody to
        // a list that is borrowed for ever. No list frees a slot that is allocated.
        unsafe { Pin::new_unchecked(boxed) }
    }
}

impl<T: ?Sized, P: ListHandle + 'static> From<SlotBox<T, P>> for Pin<SlotBox<T, P>> {
    fn from(boxed: SlotBox<T, P>) -> Self {
        SlotBox::into_pin(boxed)
    }
}

// Moving a box does not move its value, as with `Box`; and a handle is never pinned.
impl<T: ?Sized, P: ListHandle> Unpin for SlotBox<T, P> {}

impl<T: ?Sized, P: ListHandle> Drop for SlotBox<T, P> {
    #[inline]
    fn drop(&mut self) {
        // (The handle is dropped after this.)
        let _put = Put(self.list.list(), self.slot, self.value.cast());
        // SAFETY: the box's own value, dropped once.
        unsafe { self.value.drop_in_place() };
    }
}

impl<T: ?Sized, P: ListHandle> Deref for SlotBox<T, P> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: written by `new`, or already there (`from_raw`), and the box's until it is dropped.
        unsafe { self.value.as_ref() }
    }
}

impl<T: ?Sized, P: ListHandle> DerefMut for SlotBox<T, P> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and borrowed mutably.
        unsafe { self.value.as_mut() }
    }
}

// After a caught panic a box is as safe to use as its contents, like a `Box`, and as its handle.
impl<T: ?Sized + UnwindSafe, P: ListHandle + UnwindSafe> UnwindSafe for SlotBox<T, P> {}

like_a_box!([P: ListHandle] SlotBox<T, P>);
