//! A value in an arena that is dropped with its box: the memory stays the arena's, the contents are destroyed.
//!
//! ```text
//!   arena.alloc(value)  ──▶ &mut T         never dropped: files stay open, vectors leak what they own
//!   arena.boxed(value)  ──▶ ArenaBox<T>    dropped with the box, which is one pointer
//! ```
//!
//! Cost: that of the value's own destructor.

use core::fmt;
use core::ops::{Deref, DerefMut};
use core::panic::UnwindSafe;
use core::pin::Pin;
use core::ptr;

use super::contents::like_a_box;

/// A value in an arena, dropped with the box. The memory is freed when the arena is reset.
///
/// ```
/// use pageheap::arena::Arena;
///
/// let arena = Arena::new();
/// let words = arena.boxed(vec!["dropped", "with", "the", "box"])?;
/// assert_eq!(words.len(), 4);
/// # Ok::<(), pageheap::arena::ArenaError>(())
/// ```
pub struct ArenaBox<'a, T: ?Sized>(&'a mut T);

impl<'a, T: ?Sized> ArenaBox<'a, T> {
    /// Makes a box of contents that are already in an arena: the inverse of [`leak`](Self::leak).
    ///
    /// The reference may have been cast to another type in between, so this is how to make a box of a slice that was
    /// in none. (For a trait object there is [`unsize_box`](crate::unsize_box).)
    ///
    /// ```
    /// use std::fmt::Display;
    ///
    /// use pageheap::arena::{Arena, ArenaBox};
    ///
    /// let arena = Arena::new();
    /// let names = arena.alloc_iter(["a", "b"].map(str::to_owned))?;
    /// // SAFETY: nobody else drops them.
    /// let names: ArenaBox<[String]> = unsafe { ArenaBox::from_mut(names) };
    /// assert_eq!(names.concat(), "ab");
    ///
    /// let shown = ArenaBox::leak(arena.boxed(17)?) as &mut dyn Display;
    /// // SAFETY: as above.
    /// let shown = unsafe { ArenaBox::from_mut(shown) };
    /// assert_eq!(shown.to_string(), "17");
    /// # Ok::<(), pageheap::arena::ArenaError>(())
    /// ```
    ///
    /// # Safety
    ///
    /// Nobody else drops the contents, and nobody uses them after the box has dropped them, not even once `'a` has
    /// ended.
    #[must_use]
    pub unsafe fn from_mut(contents: &'a mut T) -> Self {
        Self(contents)
    }

    /// Returns the contents, for as long as the arena is borrowed. They are not dropped.
    #[must_use]
    pub fn leak(boxed: Self) -> &'a mut T {
        let contents: *mut T = ptr::from_mut(&mut *core::mem::ManuallyDrop::new(boxed).0);
        // SAFETY: the box had the contents for `'a`, and is gone without dropping them.
        unsafe { &mut *contents }
    }
}

impl<T> ArenaBox<'_, T> {
    /// Moves the value out.
    #[must_use]
    pub fn into_inner(boxed: Self) -> T {
        // SAFETY: the contents are the box's, which is gone without dropping them; nobody reads them again.
        unsafe { ptr::read(ArenaBox::leak(boxed)) }
    }
}

impl<T: ?Sized> ArenaBox<'static, T> {
    /// Pins the contents: they stay where they are until they have been dropped.
    ///
    /// Only if the arena is borrowed for ever: a box may be forgotten, and an arena that is borrowed for less could
    /// then be reset or dropped with the contents pinned in it. To pin values without such an arena, use a
    /// [`SlotBox`](super::SlotBox) with an `Arc`.
    ///
    /// ```
    /// use pageheap::arena::{Arena, ArenaBox};
    ///
    /// let arena: &'static Arena = Box::leak(Box::new(Arena::new()));
    /// let number = ArenaBox::into_pin(arena.boxed(7)?);
    /// assert_eq!(*number, 7);
    /// # Ok::<(), pageheap::arena::ArenaError>(())
    /// ```
    #[must_use]
    pub fn into_pin(boxed: Self) -> Pin<Self> {
        // SAFETY: nothing but their destructor moves or ends the contents. The box does not give access that could:
        // `Deref` and `DerefMut` are its own, and `into_inner` and `leak` want it unpinned. If it is forgotten, the
        // memory stays as it is: nobody can reset or drop an arena that is borrowed for ever; a scope's boxes are
        // `'static` only if its guard is borrowed for ever, and so never ends it; the caller of `rewind` promises that
        // nothing there is pinned; and memory from elsewhere (`from_mut`) was borrowed for ever, alone.
        unsafe { Pin::new_unchecked(boxed) }
    }
}

impl<T: ?Sized> From<ArenaBox<'static, T>> for Pin<ArenaBox<'static, T>> {
    fn from(boxed: ArenaBox<'static, T>) -> Self {
        ArenaBox::into_pin(boxed)
    }
}

impl<T: ?Sized> Drop for ArenaBox<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the contents are the box's (the promise of `from_mut`), and it is dropped once.
        unsafe { ptr::drop_in_place(self.0) }
    }
}

impl<T: ?Sized> Deref for ArenaBox<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}

impl<T: ?Sized> DerefMut for ArenaBox<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0
    }
}

// After a caught panic a box is as safe to use as its contents, like a `Box`; it is not a reference to what others
// have.
impl<T: ?Sized + UnwindSafe> UnwindSafe for ArenaBox<'_, T> {}

like_a_box!([] ArenaBox<'_, T>);
