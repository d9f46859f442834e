//! Values, slices, strings and iterators in bump memory: the same methods for every arena of bytes.
//!
//! ```text
//!   alloc          [ T ]
//!   alloc_slice_…  [ T T T T ]
//!   alloc_iter     [ T T T T · · · · ]   doubled as it fills; in place while it has room behind; the rest goes back
//! ```
//!
//! An arena says how it cuts memory ([`Raw`]); the macro `typed_methods` adds the methods. Nothing here drops what it
//! has put into an arena, with one exception: if building a slice fails or panics half way, the elements built so far
//! are dropped, and their memory is returned if nothing was allocated behind it, and it is no block or piece of its
//! own, nor was cut from what a [`Local`](super::Local) had left.
//!
//! Worked: an iterator of ten `u32` that does not report its length. Room is made for four (16 bytes), then eight, then
//! sixteen, each time by moving the end. In an arena that no other thread uses, the last two doublings copy nothing,
//! and in the end 24 bytes are returned.

use core::alloc::Layout;
use core::fmt;
use core::ptr::{self, NonNull};

use super::cursor::grains;
use super::error::ArenaError;

/// What the typed methods require of an arena.
///
/// # Safety
///
/// Memory from `raw` and `raw_to_grow` belongs to the caller alone until the arena is reset, rewound or dropped, which
/// cannot happen while anything the typed methods return is alive.
pub(super) unsafe trait Raw {
    /// Allocates memory for `layout`, whose size is not zero.
    fn raw(&self, layout: Layout) -> Result<NonNull<u8>, ArenaError>;

    /// Allocates memory, as `raw` does, for a block that moves to grow: but not where a block can neither grow in place
    /// nor be returned. One that doubles would be copied from such a place to the next, and use up all of them.
    #[inline(always)]
    fn raw_to_grow(&self, layout: Layout) -> Result<NonNull<u8>, ArenaError> {
        self.raw(layout)
    }

    /// Moves the end of the latest allocation, if that starts at `start` and ends at `end`. See `Cursor::move_end`.
    fn move_end(&self, start: NonNull<u8>, end: *const u8, new_end: *const u8) -> bool;
}

/// Allocates memory for `layout`; returns a dangling address if its size is zero.
#[inline(always)]
pub(super) fn bytes<R: Raw + ?Sized>(arena: &R, layout: Layout) -> Result<NonNull<u8>, ArenaError> {
    if layout.size() == 0 {
        return Ok(layout.dangling_ptr());
    }
    arena.raw(layout)
}

/// Allocates room for `len` values.
#[inline(always)]
pub(super) fn room<T, R: Raw + ?Sized>(arena: &R, len: usize) -> Result<NonNull<T>, ArenaError> {
    bytes(arena, array::<T>(len)?).map(NonNull::cast)
}

/// The layout of `len` values.
#[inline(always)]
fn array<T>(len: usize) -> Result<Layout, ArenaError> {
    Layout::array::<T>(len).map_err(|_| ArenaError::too_large::<T>(len))
}

/// The end of `bytes` bytes from `start`, rounded up to whole grains.
fn end(start: NonNull<u8>, bytes: usize) -> *const u8 {
    start.as_ptr().wrapping_add(grains(bytes))
}

/// Grows or shrinks memory in place. Returns whether it could; only the latest allocation can be resized.
#[inline]
pub(super) fn resize<R: Raw + ?Sized>(arena: &R, start: NonNull<u8>, from: usize, to: usize) -> bool {
    let (old, new) = (end(start, from), end(start, to));
    from != 0 && (old == new || arena.move_end(start, old, new))
}

/// Reallocates memory of layout `old` as layout `new` and keeps its contents: in place if possible.
///
/// # Safety
///
/// `start` was allocated here for `old`, and the caller gives it up.
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
    let memory = if new.size() > old.size() {
        arena.raw_to_grow(new)?
    } else {
        bytes(arena, new)?
    };
    // SAFETY: the caller promises that that many bytes are there; nobody else has the new memory.
    unsafe { memory.copy_from_nonoverlapping(start, old.size().min(new.size())) };
    Ok(NonNull::slice_from_raw_parts(memory, new.size()))
}

/// A slice under construction. Dropping it drops its elements and returns its room if possible.
pub(super) struct Growing<'r, T, R: Raw + ?Sized> {
    arena: &'r R,
    start: NonNull<T>,
    len: usize,
    room: usize,
}

impl<'r, T, R: Raw + ?Sized> Growing<'r, T, R> {
    /// Creates an empty slice with room for `room` elements.
    pub(super) fn new(arena: &'r R, room: usize) -> Result<Self, ArenaError> {
        Ok(Self {
            arena,
            start: self::room(arena, room)?,
            len: 0,
            room: if size_of::<T>() == 0 { usize::MAX } else { room },
        })
    }

    /// Appends an element. If there is no memory, the element is dropped.
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

    /// Makes room for at least `more` further elements.
    #[cold]
    fn widen(&mut self, more: usize) -> Result<(), ArenaError> {
        let least = self
            .len
            .checked_add(more)
            .ok_or(ArenaError::too_large::<T>(usize::MAX))?;
        let wish = least.max(self.room.saturating_mul(2)).max(4);
        // In place as far as it goes: a slice that fits the slab stays there, though twice its length does not fit.
        let mut extra = wish - self.len;
        loop {
            if self.widen_in_place(self.len + extra) {
                return Ok(());
            }
            if self.len + extra == least {
                break;
            }
            extra = (extra / 2).max(least - self.len);
        }
        self.move_to(wish).or_else(|_| self.move_to(least))
    }

    fn widen_in_place(&mut self, room: usize) -> bool {
        let is_wider = Layout::array::<T>(room)
            .is_ok_and(|layout| resize(self.arena, self.start.cast(), self.room * size_of::<T>(), layout.size()));
        if is_wider {
            self.room = room;
        }
        is_wider
    }

    /// Moves the elements to memory with room for `room` of them.
    fn move_to(&mut self, room: usize) -> Result<(), ArenaError> {
        let start = self.arena.raw_to_grow(array::<T>(room)?)?.cast::<T>();
        // SAFETY: that many elements are there; the new memory has room for more and belongs to nobody else.
        unsafe { start.copy_from_nonoverlapping(self.start, self.len) };
        self.start = start;
        self.room = room;
        Ok(())
    }

    /// Appends copies of elements.
    pub(super) fn extend(&mut self, more: &[T]) -> Result<(), ArenaError>
    where
        T: Copy,
    {
        if more.len() > self.room - self.len {
            self.widen(more.len())?;
        }
        // SAFETY: there is room for them behind the last element; the destination is ours alone.
        unsafe {
            let source = NonNull::from(more).cast::<T>();
            self.start.add(self.len).copy_from_nonoverlapping(source, more.len());
        }
        self.len += more.len();
        Ok(())
    }

    /// Returns the slice, and returns unused room to the arena if possible.
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
        // SAFETY: that many elements have been written, and nobody else has them.
        unsafe { ptr::drop_in_place(made.as_ptr()) };
        // Return the room too. Otherwise a slice that hits the limit would leave the arena full for everyone else. (It
        // is lost if it was cut from what a local had left. Only the room made at first can be: see `raw_to_grow`.)
        if size_of::<T>() != 0 {
            resize(self.arena, self.start.cast(), self.room * size_of::<T>(), 0);
        }
    }
}

/// Text under construction. `failed` holds the error if it could not be written completely.
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

/// Collects what `write` writes into text, which begins with room for `room` bytes.
pub(super) fn text<R: Raw + ?Sized>(
    arena: &R,
    room: usize,
    write: impl FnOnce(&mut dyn fmt::Write) -> fmt::Result,
) -> Result<NonNull<str>, ArenaError> {
    let bytes = Growing::new(arena, room)?;
    let mut text = Text { bytes, failed: None };
    let written = write(&mut text);
    if let Some(error) = text.failed {
        return Err(error);
    }
    // As in `format!`.
    written.expect("what writes text returns an error only if the text could not be written");
    let bytes = text.bytes.finish().as_ptr();
    // SAFETY: not null. (And UTF-8: whole strings were written, one after another.)
    Ok(unsafe { NonNull::new_unchecked(bytes as *mut str) })
}

/// Makes a slice of `len` elements, each from its index.
#[inline]
pub(super) fn slice_with<T, R: Raw + ?Sized>(
    arena: &R,
    len: usize,
    mut make: impl FnMut(usize) -> T,
) -> Result<NonNull<[T]>, ArenaError> {
    let mut slice = Growing::new(arena, len)?;
    // Not `push`: without a look at the room, and with nothing to count, the compiler can fill several places at once.
    let start = slice.start;
    for index in 0..len {
        // SAFETY: there is room for `len`.
        unsafe { start.add(index).write(make(index)) };
        // What `make` leaves behind if it panics.
        if core::mem::needs_drop::<T>() {
            slice.len = index + 1;
        }
    }
    slice.len = len;
    Ok(slice.finish())
}

/// Collects an iterator into a slice.
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

/// The typed methods of an arena that is [`Raw`]. `$life` is the lifetime of what is allocated; `'_` is that of
/// `&self`.
macro_rules! typed_methods {
    ($life:lifetime) => {
        /// Allocates a value. It is not dropped; see [`boxed`](Self::boxed).
        ///
        /// # Errors
        /// Fails if there is no memory. The value is then dropped.
        #[inline(always)]
        pub fn alloc<T>(&self, value: T) -> Result<&$life mut T, ArenaError> {
            self.alloc_with(|| value)
        }

        /// Allocates room for a value, then makes the value in it.
        ///
        /// # Errors
        /// Fails if there is no memory. `make` is then not called.
        #[inline(always)]
        pub fn alloc_with<T>(&self, make: impl FnOnce() -> T) -> Result<&$life mut T, ArenaError> {
            Ok(self.alloc_uninit()?.write(make()))
        }

        /// Allocates a value that is dropped with its box.
        ///
        /// # Errors
        /// Fails if there is no memory. The value is then dropped.
        #[inline(always)]
        pub fn boxed<T>(&self, value: T) -> Result<ArenaBox<$life, T>, ArenaError> {
            let value = self.alloc(value)?;
            // SAFETY: nobody else has the value.
            Ok(unsafe { ArenaBox::from_mut(value) })
        }

        /// Allocates room for a value.
        ///
        /// # Errors
        /// Fails if there is no memory.
        #[inline(always)]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_uninit<T>(&self) -> Result<&$life mut MaybeUninit<T>, ArenaError> {
            let mut memory = typed::bytes(self, Layout::new::<T>())?.cast::<MaybeUninit<T>>();
            // SAFETY: as large and as aligned as a `T`, and ours alone for as long as the reference lives (`Raw`).
            Ok(unsafe { memory.as_mut() })
        }

        /// Allocates room for `len` values.
        ///
        /// # Errors
        /// Fails if there is no memory, or if a slice of this length cannot exist.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_uninit_slice<T>(&self, len: usize) -> Result<&$life mut [MaybeUninit<T>], ArenaError> {
            let start = typed::room::<MaybeUninit<T>, _>(self, len)?;
            // SAFETY: room for `len` values, ours alone for as long as the reference lives (`Raw`).
            Ok(unsafe { NonNull::slice_from_raw_parts(start, len).as_mut() })
        }

        /// Copies a slice into the arena.
        ///
        /// # Errors
        /// Fails if there is no memory.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_slice_copy<T: Copy>(&self, slice: &[T]) -> Result<&$life mut [T], ArenaError> {
            let copy = typed::room::<T, _>(self, slice.len())?;
            // SAFETY: room for `slice.len()` values, ours alone (`Raw`), and initialised by the copy.
            Ok(unsafe {
                copy.copy_from_nonoverlapping(NonNull::from(slice).cast(), slice.len());
                NonNull::slice_from_raw_parts(copy, slice.len()).as_mut()
            })
        }

        /// Clones a slice into the arena. If a clone panics, those made before it are dropped.
        ///
        /// # Errors
        /// Fails if there is no memory.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_slice_clone<T: Clone>(&self, slice: &[T]) -> Result<&$life mut [T], ArenaError> {
            self.alloc_slice_with(slice.len(), |index| slice[index].clone())
        }

        /// Allocates a slice of `len` values, each made from its index. If `make` panics, the values made before are
        /// dropped.
        ///
        /// # Errors
        /// Fails if there is no memory, or if a slice of this length cannot exist. Nothing is then made.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_slice_with<T>(
            &self,
            len: usize,
            make: impl FnMut(usize) -> T,
        ) -> Result<&$life mut [T], ArenaError> {
            // SAFETY: all elements are there, and ours alone for as long as the reference lives (`Raw`).
            Ok(unsafe { typed::slice_with(self, len, make)?.as_mut() })
        }

        /// Collects an iterator into a slice. The iterator may itself allocate from this arena. If it does not, nothing
        /// is copied and nothing wasted, whatever its size hint, as long as the slice fits the slab. A slice that
        /// outgrows the slab, or 64 KiB, is copied each time it doubles, and the memory it leaves behind stays
        /// allocated until the reset.
        ///
        /// # Errors
        /// Fails if there is no memory. The elements collected so far are then dropped.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_iter<T>(
            &self,
            elements: impl IntoIterator<Item = T>,
        ) -> Result<&$life mut [T], ArenaError> {
            // SAFETY: finished: all elements are there, and ours alone for as long as the reference lives (`Raw`).
            Ok(unsafe { typed::iter(self, elements)?.as_mut() })
        }

        /// Copies a string into the arena.
        ///
        /// # Errors
        /// Fails if there is no memory.
        #[inline]
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_str(&self, text: &str) -> Result<&$life mut str, ArenaError> {
            let copy = self.alloc_slice_copy(text.as_bytes())?;
            // SAFETY: a copy of UTF-8.
            Ok(unsafe { core::str::from_utf8_unchecked_mut(copy) })
        }

        /// Formats text into the arena: `arena.alloc_fmt(format_args!("{x} and {y}"))`. For text in several steps there
        /// is [`alloc_str_with`](Self::alloc_str_with).
        ///
        /// # Errors
        /// Fails if there is no memory.
        ///
        /// # Panics
        /// Like `format!`: if a `Display` or its like returns an error of its own.
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_fmt(&self, arguments: fmt::Arguments<'_>) -> Result<&$life mut str, ArenaError> {
            let room = arguments.as_str().map_or(0, str::len);
            let mut text = typed::text(self, room, |out| fmt::write(out, arguments))?;
            // SAFETY: finished, and ours alone for as long as the reference lives (`Raw`).
            Ok(unsafe { text.as_mut() })
        }

        /// Makes text in the arena from what `write` writes, in any number of steps:
        ///
        /// ```
        /// use pageheap::arena::Arena;
        ///
        /// let arena = Arena::new();
        /// let mut words = "any number of words".split(' ');
        /// let text = arena.alloc_str_with(|out| {
        ///     out.write_str(words.next().unwrap_or("none"))?;
        ///     words.try_for_each(|word| write!(out, ", {word}"))
        /// })?;
        /// assert_eq!(text, "any, number, of, words");
        /// # Ok::<(), pageheap::arena::ArenaError>(())
        /// ```
        ///
        /// The text grows as a slice of [`alloc_iter`](Self::alloc_iter) does, and `write` may itself allocate from
        /// this arena.
        ///
        /// # Errors
        /// Fails if there is no memory, whatever `write` returns.
        ///
        /// # Panics
        /// Like [`alloc_fmt`](Self::alloc_fmt): if `write` returns an error of its own.
        #[allow(clippy::mut_from_ref, reason = "each call returns memory of its own")]
        pub fn alloc_str_with(
            &self,
            write: impl FnOnce(&mut dyn fmt::Write) -> fmt::Result,
        ) -> Result<&$life mut str, ArenaError> {
            let mut text = typed::text(self, 0, write)?;
            // SAFETY: as in `alloc_fmt`.
            Ok(unsafe { text.as_mut() })
        }

        /// Allocates uninitialised memory for `layout`; returns a dangling address if its size is zero.
        ///
        /// # Errors
        /// Fails if there is no memory.
        #[inline(always)]
        pub fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, ArenaError> {
            let start = typed::bytes(self, layout)?;
            Ok(NonNull::slice_from_raw_parts(start, layout.size()))
        }

        /// Grows or shrinks an allocation in place, and returns whether it could. Sizes are rounded up to 8 bytes;
        /// beyond that, only the latest allocation can be resized. For an earlier one this returns `false`, and its
        /// length stays as it was.
        ///
        /// # Safety
        ///
        /// `memory` was allocated by this handle, not by one outside its scope, and is as long as the last such call
        /// left it. Nothing uses the part that is given up. `new_size` is at most what a `Layout` allows.
        #[inline]
        #[must_use]
        pub unsafe fn resize_in_place(&self, memory: NonNull<[u8]>, new_size: usize) -> bool {
            typed::resize(self, memory.cast(), memory.len(), new_size)
        }
    };
}

pub(super) use typed_methods;
