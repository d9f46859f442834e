//! Values, slices, strings and iterators in memory that is only cut off: the same methods for every arena of bytes.
//!
//! ```text
//!   alloc          [ T ]
//!   alloc_slice_…  [ T T T T ]
//!   alloc_iter     [ T T T T · · · · ]   doubled as it fills; in place while nothing lies behind; the rest goes back
//! ```
//!
//! An arena says how it cuts ([`Raw`]); the macro `typed_methods` gives it the methods. Nothing here drops what it has
//! put into an arena, but for elements of a slice whose making failed or panicked half way; its room goes back then, if
//! nothing lies behind.
//!
//! Worked: an iterator of ten `u32` that does not say its length. Four are made room for (16 bytes), then eight, then
//! sixteen, each time by moving the end; the last two doublings of an arena that nobody else uses copy nothing, and 24
//! bytes go back.

use core::alloc::Layout;
use core::fmt;
use core::ptr::{self, NonNull};

use super::cursor::grains;
use super::error::ArenaError;

/// What the typed methods need of an arena.
///
/// # Safety
///
/// Memory from `raw` is the caller's alone until the arena is reset, rewound or dropped, which cannot happen while what
/// the typed methods return is alive.
pub(super) unsafe trait Raw {
    /// Memory for `layout`, which is not of zero bytes.
    fn raw(&self, layout: Layout) -> Result<NonNull<u8>, ArenaError>;

    /// Moves the end of what was taken last, if that began at `start` and ends at `end`. See `Cursor::move_end`.
    fn move_end(&self, start: NonNull<u8>, end: *const u8, new_end: *const u8) -> bool;
}

/// Memory for `layout`; a dangling address if that is of no bytes.
#[inline(always)]
pub(super) fn bytes<R: Raw + ?Sized>(arena: &R, layout: Layout) -> Result<NonNull<u8>, ArenaError> {
    if layout.size() == 0 {
        return Ok(layout.dangling_ptr());
    }
    arena.raw(layout)
}

/// Room for `len` values.
#[inline(always)]
pub(super) fn room<T, R: Raw + ?Sized>(arena: &R, len: usize) -> Result<NonNull<T>, ArenaError> {
    let layout = Layout::array::<T>(len).map_err(|_| ArenaError::too_large::<T>(len))?;
    bytes(arena, layout).map(NonNull::cast)
}

/// The end of `bytes` bytes from `start`, in whole grains.
fn end(start: NonNull<u8>, bytes: usize) -> *const u8 {
    start.as_ptr().wrapping_add(grains(bytes))
}

/// Makes memory longer or shorter in place. Whether it could: what was not taken last stays as it is.
#[inline]
pub(super) fn resize<R: Raw + ?Sized>(arena: &R, start: NonNull<u8>, from: usize, to: usize) -> bool {
    let (old, new) = (end(start, from), end(start, to));
    from != 0 && (old == new || arena.move_end(start, old, new))
}

/// Memory as long and aligned as `new` with the contents of memory that was for `old`: in place if it can be.
///
/// # Safety
///
/// `start` was allocated here for `old` and is given up.
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2-04"))]
pub(super) unsafe fn reallocate<R: Raw + ?Sized>(
    arena: &R,
    start: NonNull<u8>,
    old: Layout,
    new: Layout,
) -> Result<NonNull<[u8]>, ArenaError> {
    let is_aligned = start.addr().get() & (new.align() - 1) == 0;
    let stays = is_aligned && (resize(arena, start, old.size(), new.size()) || old.size() >= new.size());
    if stays && new.size() != 0 {
        return Ok(NonNull::slice_from_raw_parts(start, new.size()));
    }
    let memory = bytes(arena, new)?;
    // SAFETY: the caller's promise: so many bytes are there; the new memory is nobody else's.
    unsafe { memory.copy_from_nonoverlapping(start, old.size().min(new.size())) };
    Ok(NonNull::slice_from_raw_parts(memory, new.size()))
}

/// A slice under way: if it is dropped its elements are, and its room goes back if it can.
pub(super) struct Growing<'r, T, R: Raw + ?Sized> {
    arena: &'r R,
    start: NonNull<T>,
    len: usize,
    room: usize,
}

impl<'r, T, R: Raw + ?Sized> Growing<'r, T, R> {
    /// An empty slice with room for `room` elements.
    pub(super) fn new(arena: &'r R, room: usize) -> Result<Self, ArenaError> {
        Ok(Self {
            arena,
            start: self::room(arena, room)?,
            len: 0,
            room: if size_of::<T>() == 0 { usize::MAX } else { room },
        })
    }

    /// Adds an element. If there is no memory, it is dropped.
    #[inline]
    pub(super) fn push(&mut self, element: T) -> Result<(), ArenaError> {
        if self.len == self.room {
            self.widen(1)?;
        }
        // SAFETY: there is room behind the last element.
        unsafe { self.start.add(self.len).write(element) };
        self.len += 1;
        Ok(())
    }

    /// Makes room for `more` elements at least.
    #[cold]
    fn widen(&mut self, more: usize) -> Result<(), ArenaError> {
        let least = self
            .len
            .checked_add(more)
            .ok_or(ArenaError::too_large::<T>(usize::MAX))?;
        let wish = least.max(self.room.saturating_mul(2)).max(4);
        self.widen_to(wish).or_else(|_| self.widen_to(least))
    }

    fn widen_to(&mut self, room: usize) -> Result<(), ArenaError> {
        let layout = Layout::array::<T>(room).map_err(|_| ArenaError::too_large::<T>(room))?;
        if !resize(self.arena, self.start.cast(), self.room * size_of::<T>(), layout.size()) {
            let start = bytes(self.arena, layout)?.cast::<T>();
            // SAFETY: so many elements are there, and the new memory has room for more and is nobody else's.
            unsafe { start.copy_from_nonoverlapping(self.start, self.len) };
            self.start = start;
        }
        self.room = room;
        Ok(())
    }

    /// Adds copies of elements.
    pub(super) fn extend(&mut self, more: &[T]) -> Result<(), ArenaError>
    where
        T: Copy,
    {
        if more.len() > self.room - self.len {
            self.widen(more.len())?;
        }
        // SAFETY: there is room for them behind the last element; they are copied to memory that is ours alone.
        unsafe {
            let source = NonNull::from(more).cast::<T>();
            self.start.add(self.len).copy_from_nonoverlapping(source, more.len());
        }
        self.len += more.len();
        Ok(())
    }

    /// The slice; room that is left goes back if it can.
    pub(super) fn finish(self) -> NonNull<[T]> {
        let this = core::mem::ManuallyDrop::new(self);
        let size = size_of::<T>();
        if size != 0 {
            resize(this.arena, this.start.cast(), this.room * size, this.len * size);
        }
        NonNull::slice_from_raw_parts(this.start, this.len)
    }
}

impl<T, R: Raw + ?Sized> Drop for Growing<'_, T, R> {
    fn drop(&mut self) {
        let made = NonNull::slice_from_raw_parts(self.start, self.len);
        // SAFETY: so many elements have been written, and nobody else has them.
        unsafe { ptr::drop_in_place(made.as_ptr()) };
        // The arena is as it was, or who hits its limit would have filled it up for all others, too.
        if size_of::<T>() != 0 {
            resize(self.arena, self.start.cast(), self.room * size_of::<T>(), 0);
        }
    }
}

/// Text under way. What it could not write is told by `failed`.
pub(super) struct Text<'r, R: Raw + ?Sized> {
    pub(super) bytes: Growing<'r, u8, R>,
    pub(super) failed: Option<ArenaError>,
}

impl<R: Raw + ?Sized> fmt::Write for Text<'_, R> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.bytes.extend(text.as_bytes()).map_err(|error| {
            self.failed = Some(error);
            fmt::Error
        })
    }
}

/// Formats into an arena.
pub(super) fn text<R: Raw + ?Sized>(arena: &R, arguments: fmt::Arguments<'_>) -> Result<NonNull<[u8]>, ArenaError> {
    let bytes = Growing::new(arena, arguments.as_str().map_or(0, str::len))?;
    let mut text = Text { bytes, failed: None };
    // An error that is not ours is a `Display` that failed: the text ends there, as it would in `print!`.
    let _ = fmt::write(&mut text, arguments);
    match text.failed {
        Some(error) => Err(error),
        None => Ok(text.bytes.finish()),
    }
}

/// A slice of what an iterator gives.
pub(super) fn iter<T, R: Raw + ?Sized>(
    arena: &R,
    elements: impl IntoIterator<Item = T>,
) -> Result<NonNull<[T]>, ArenaError> {
    let elements = elements.into_iter();
    let mut slice = Growing::new(arena, elements.size_hint().0)?;
    for element in elements {
        slice.push(element)?;
    }
    Ok(slice.finish())
}

/// The typed methods of an arena that is [`Raw`]. The lifetime is that of what is allocated: `'_` is that of
/// `&self`.
macro_rules! typed_methods {
    ($life:lifetime) => {
        /// Puts a value into the arena. It is not dropped; see [`boxed`](Self::boxed).
        ///
        /// # Errors
        /// If there is no memory. The value is dropped then.
        #[inline(always)]
        pub fn alloc<T>(&self, value: T) -> Result<&$life mut T, ArenaError> {
            self.alloc_with(|| value)
        }

        /// Puts a value into the arena that is made when its place is there.
        ///
        /// # Errors
        /// If there is no memory. Nothing is made then.
        #[inline(always)]
        pub fn alloc_with<T>(&self, make: impl FnOnce() -> T) -> Result<&$life mut T, ArenaError> {
            Ok(self.alloc_uninit()?.write(make()))
        }

        /// Puts a value into the arena that is dropped with its box.
        ///
        /// # Errors
        /// If there is no memory. The value is dropped then.
        #[inline(always)]
        pub fn boxed<T>(&self, value: T) -> Result<ArenaBox<$life, T>, ArenaError> {
            let value = self.alloc(value)?;
            // SAFETY: nobody else knows of the value.
            Ok(unsafe { ArenaBox::new(value) })
        }

        /// Room for a value.
        ///
        /// # Errors
        /// If there is no memory.
        #[inline(always)]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_uninit<T>(&self) -> Result<&$life mut MaybeUninit<T>, ArenaError> {
            let mut memory = typed::bytes(self, Layout::new::<T>())?.cast::<MaybeUninit<T>>();
            // SAFETY: as large and aligned as a `T`, and ours alone for as long as the reference lives (`Raw`).
            Ok(unsafe { memory.as_mut() })
        }

        /// Room for `len` values.
        ///
        /// # Errors
        /// If there is no memory, or no slice of such a length.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_uninit_slice<T>(&self, len: usize) -> Result<&$life mut [MaybeUninit<T>], ArenaError> {
            let start = typed::room::<MaybeUninit<T>, _>(self, len)?;
            // SAFETY: room for so many, ours alone for as long as the reference lives (`Raw`).
            Ok(unsafe { NonNull::slice_from_raw_parts(start, len).as_mut() })
        }

        /// A copy of a slice.
        ///
        /// # Errors
        /// If there is no memory.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_slice_copy<T: Copy>(&self, slice: &[T]) -> Result<&$life mut [T], ArenaError> {
            let copy = typed::room::<T, _>(self, slice.len())?;
            // SAFETY: room for so many, which is ours alone (`Raw`) and initialised by the copy.
            Ok(unsafe {
                copy.copy_from_nonoverlapping(NonNull::from(slice).cast(), slice.len());
                NonNull::slice_from_raw_parts(copy, slice.len()).as_mut()
            })
        }

        /// A slice of clones. If a clone panics, those before it are dropped.
        ///
        /// # Errors
        /// If there is no memory.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_slice_clone<T: Clone>(&self, slice: &[T]) -> Result<&$life mut [T], ArenaError> {
            self.alloc_slice_with(slice.len(), |index| slice[index].clone())
        }

        /// A slice of `len` values, each made from its index. If one panics, those before it are dropped.
        ///
        /// # Errors
        /// If there is no memory, or no slice of such a length. Nothing is made then.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_slice_with<T>(
            &self,
            len: usize,
            mut make: impl FnMut(usize) -> T,
        ) -> Result<&$life mut [T], ArenaError> {
            let mut slice = typed::Growing::new(self, len)?;
            for index in 0..len {
                slice.push(make(index))?;
            }
            // SAFETY: finished: all elements are there, and ours alone for as long as the reference lives (`Raw`).
            Ok(unsafe { slice.finish().as_mut() })
        }

        /// A slice of what an iterator gives. It may allocate from the same arena; if it does not, nothing is copied
        /// and nothing wasted, whatever it says of its length, as long as the slice fits the slab. One that outgrows
        /// it, or 64 KiB, is copied each time it doubles, and what it leaves stays until the reset.
        ///
        /// # Errors
        /// If there is no memory. What the iterator gave is dropped then.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_iter<T>(
            &self,
            elements: impl IntoIterator<Item = T>,
        ) -> Result<&$life mut [T], ArenaError> {
            // SAFETY: finished: all elements are there, and ours alone for as long as the reference lives (`Raw`).
            Ok(unsafe { typed::iter(self, elements)?.as_mut() })
        }

        /// A copy of a string.
        ///
        /// # Errors
        /// If there is no memory.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_str(&self, text: &str) -> Result<&$life mut str, ArenaError> {
            let copy = self.alloc_slice_copy(text.as_bytes())?;
            // SAFETY: a copy of UTF-8.
            Ok(unsafe { core::str::from_utf8_unchecked_mut(copy) })
        }

        /// Formatted text: `arena.alloc_fmt(format_args!("{x} and {y}"))`.
        ///
        /// # Errors
        /// If there is no memory.
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_fmt(&self, arguments: fmt::Arguments<'_>) -> Result<&$life mut str, ArenaError> {
            // SAFETY: strings were written, one after another; ours alone for as long as the reference lives (`Raw`).
            Ok(unsafe { core::str::from_utf8_unchecked_mut(typed::text(self, arguments)?.as_mut()) })
        }

        /// Memory for `layout`, with anything in it; a dangling address if that is of no bytes.
        ///
        /// # Errors
        /// If there is no memory.
        #[inline(always)]
        pub fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, ArenaError> {
            let start = typed::bytes(self, layout)?;
            Ok(NonNull::slice_from_raw_parts(start, layout.size()))
        }

        /// Makes memory longer or shorter in place. Whether it could: only what was allocated last can become longer;
        /// what is not last stays as long as it was when it becomes shorter.
        ///
        /// # Safety
        ///
        /// `memory` was allocated by this handle, not by one outside of its scope, and is as long as the last such call
        /// left it, nothing uses what is given up, and `new_size` is not more than a `Layout` may have.
        #[inline]
        #[must_use]
        pub unsafe fn resize_in_place(&self, memory: NonNull<[u8]>, new_size: usize) -> bool {
            typed::resize(self, memory.cast(), memory.len(), new_size)
        }
    };
}

pub(super) use typed_methods;
