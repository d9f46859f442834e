//! Marks that come back: a word that the program never wrote, copied to the very slot whose mark it once was.
//!
//! ```text
//!   slot at B, free        its mark, made for B               │ mark of B │
//!   a large block at B     the program writes elsewhere       │ mark of B │ …
//!   it grows, moves to A   the word goes along, no mark here  │ mark of B │ …
//!   it becomes short       the slot that is free is at B      │ mark of B │      as if it were free
//! ```
//!
//! What a program has not written is copied with the rest when a block moves. A mark in such a word is none in another
//! place, as it was made of its slot's address (`mark.rs`). But low addresses are used again first, and after two moves
//! the block may lie where it began. When it is freed it would be taken for free, found nowhere, and left where it is
//! (`twice.rs`): lost, and with it a page. So who has copied a block to a slot of up to 1 KiB looks at the word, and
//! copies the block to another slot if it is a mark.
//!
//! The word itself is not changed: the program may have written some of its bytes, and those of the mark may be the
//! same.
//!
//! Worked: 20,000 blocks of 64 B are freed, and their pages go back. A `Vec` with room for 40,000 bytes, without
//! elements, grows to 80,000 and is shortened to 100. It did so for 120 lengths from 72 B to 1 KiB, and lost 31 blocks.
//! (If there is no memory for another slot, it is lost all the same; and so is one that moves back to another alignment
//! by `Allocator::grow` or `shrink`, or whose word the program itself copies, which it never wrote.)
//!
//! Cost: a comparison of two bytes for each such copy.

use core::alloc::Layout;
use core::ptr::{self, NonNull};

use crate::source::Source;

use super::mark;
use super::size_class::SizeClass;
use super::{Objects, Thread};

/// Whether a block of the class, to which the contents of another were just copied, would be taken for free.
///
/// # Safety
///
/// The caller owns the block, of the class.
#[inline]
pub unsafe fn bears_mark(block: NonNull<u8>, class: SizeClass) -> bool {
    // SAFETY: the caller's promise: a word long at least, and aligned for one.
    !class.is_flagged() && unsafe { mark::is_on(block.as_ptr()) }
}

impl<S: Source + 'static> Objects<S> {
    /// Copies a block that [bears a mark](bears_mark) to another slot, and frees the slot that it was in. Returns where
    /// it is now: where it was, if there is no other slot.
    ///
    /// # Safety
    ///
    /// The block was allocated from this heap with this layout and belongs to the caller; if it moves, it no longer
    /// does. The structure: as for [`free`](Self::free).
    #[cold]
    pub unsafe fn leave_mark(&self, thread: &Thread, block: NonNull<u8>, layout: Layout) -> NonNull<u8> {
        let Some(other) = self.allocate(thread, layout) else {
            return block;
        };
        // SAFETY: two blocks of this layout, a word long at least; the first is given up, without a mark.
        unsafe {
            ptr::copy_nonoverlapping(block.as_ptr(), other.as_ptr(), layout.size());
            mark::wipe(block.as_ptr());
            self.free(thread, block, layout);
        }
        other
    }

    /// Looks at a block to which contents were just copied, and [leaves](Self::leave_mark) a slot whose mark it bears.
    ///
    /// # Safety
    ///
    /// As there.
    #[inline]
    pub(super) unsafe fn settle_moved(&self, thread: &Thread, block: NonNull<u8>, layout: Layout) -> NonNull<u8> {
        // SAFETY: the caller's promise.
        unsafe {
            match SizeClass::of(layout.size(), layout.align()) {
                Some(class) if bears_mark(block, class) => self.leave_mark(thread, block, layout),
                _ => block,
            }
        }
    }
}
