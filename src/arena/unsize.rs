//! Boxes of trait objects and slices: a box's type changes as a pointer's does, by the compiler's own coercion.
//!
//! ```text
//!   SlotBox<T, P> ─ split ─▶ *mut T ─ coerced by the compiler ─▶ *mut dyn Trait ─ join ─▶ SlotBox<dyn Trait, P>
//!                    └────────────── the rest: handle, slot ────────────────────────┘
//! ```
//!
//! `Box` can do that by itself, with traits that are not stable. Here it takes a macro, as in `allocator-api2`, because
//! only where it is expanded does the compiler know both types. The context says what box `join` returns, and so what
//! raw pointer it takes, and the argument is coerced to that. So it compiles exactly for those types that the compiler
//! coerces to, and the address stays.
//!
//! Worked: `unsize_box!(boxed)` where a `SlotBox<dyn Display, _>` is wanted and `boxed` is a `SlotBox<u64, &FreeList>`
//! makes a box of one word more: slot and list are the same, and the pointer has gained a vtable.
//!
//! Cost: none.

use core::marker::PhantomData;

use super::boxed::ArenaBox;
use super::slot_box::{ListHandle, SlotBox};

mod sealed {
    /// Only boxes of this crate: the macro relies on what they are split into.
    pub trait Sealed {}
}

/// A box that the macro can take apart.
pub trait Split: sealed::Sealed {
    /// What is in the box.
    type Value: ?Sized;
    /// All but the pointer; has the method `join`.
    type Rest;

    /// Takes the box apart without dropping anything.
    fn split(self) -> (*mut Self::Value, Self::Rest);
}

/// A `SlotBox` without its pointer.
#[derive(Debug)]
pub struct SlotRest<P> {
    list: P,
    slot: u32,
}

impl<T: ?Sized, P: ListHandle> sealed::Sealed for SlotBox<T, P> {}

impl<T: ?Sized, P: ListHandle> Split for SlotBox<T, P> {
    type Value = T;
    type Rest = SlotRest<P>;

    #[inline]
    fn split(self) -> (*mut T, SlotRest<P>) {
        let (list, value, slot) = Self::into_parts(self);
        (value.as_ptr(), SlotRest { list, slot })
    }
}

impl<P: ListHandle> SlotRest<P> {
    /// # Safety
    ///
    /// The pointer came from the same [`split`](Split::split) as this, and has been coerced at the most.
    #[inline]
    #[must_use]
    pub unsafe fn join<T: ?Sized>(self, value: *mut T) -> SlotBox<T, P> {
        // SAFETY: the parts of one box, which is gone.
        unsafe { SlotBox::from_parts(self.list, value, self.slot) }
    }
}

/// An `ArenaBox` without its pointer.
#[derive(Debug)]
pub struct ArenaRest<'a>(PhantomData<&'a mut ()>);

impl<T: ?Sized> sealed::Sealed for ArenaBox<'_, T> {}

impl<'a, T: ?Sized> Split for ArenaBox<'a, T> {
    type Value = T;
    type Rest = ArenaRest<'a>;

    #[inline]
    fn split(self) -> (*mut T, ArenaRest<'a>) {
        (Self::leak(self), ArenaRest(PhantomData))
    }
}

impl<'a> ArenaRest<'a> {
    /// # Safety
    ///
    /// As for [`SlotRest::join`].
    #[inline]
    #[must_use]
    pub unsafe fn join<T: ?Sized + 'a>(self, value: *mut T) -> ArenaBox<'a, T> {
        // SAFETY: the contents of a box that is gone without having dropped them; and it had them for `'a`.
        unsafe { ArenaBox::from_mut(&mut *value) }
    }
}

/// Makes a box of a trait object or a slice of a [`SlotBox`](crate::arena::SlotBox) or an
/// [`ArenaBox`](crate::arena::ArenaBox), as `Box` does by itself. The context says of what: the type of the variable,
/// the parameter or the result. A closure has to say what it returns: `|boxed| -> SlotBox<dyn Display, _> { … }`.
///
/// ```
/// # #![forbid(unsafe_code)]
/// use std::pin::Pin;
/// use std::sync::Arc;
///
/// use pageheap::arena::{Arena, ArenaBox, FreeList, SlotBox};
/// use pageheap::unsize_box;
///
/// type Task = SlotBox<dyn Future<Output = u8> + Send, Arc<FreeList>>;
///
/// let list = Arc::new(FreeList::for_type::<[u64; 16]>());
/// let task: Task = unsize_box!(SlotBox::try_new_in(async { 7 }, list)?);
/// let tasks: Vec<Pin<Task>> = vec![task.into()];
///
/// let arena = Arena::new();
/// let numbers: ArenaBox<[u8]> = unsize_box!(arena.boxed([1, 2, 3])?);
/// assert_eq!((tasks.len(), numbers.len()), (1, 3));
/// # Ok::<(), pageheap::arena::ArenaError>(())
/// ```
#[macro_export]
macro_rules! unsize_box {
    ($boxed:expr $(,)?) => {
        // A `match`, so that temporaries live as long as without the macro.
        match $crate::arena::unsize::Split::split($boxed) {
            // Coerced here, not cast: the context says what `join` returns, and so what it takes.
            // SAFETY: the two parts of one box, of which one was coerced at the most.
            (value, rest) => unsafe { rest.join(value) },
        }
    };
}
