//! Where an arena's blocks come from: a heap of pages, lent, owned or shared.
//!
//! ```text
//!   Arena<&'h PageHeap<S>>     lent: many arenas on one heap, whose pages wander between them
//!   Arena<PageHeap<S>>         owned: gone with the arena
//!   Arena<Arc<PageHeap<S>>>    shared, and gone with the last
//!   Arena                      the process's own heap, made at the first use
//! ```
//!
//! A trait of few verbs instead of a reference to a heap, so that an arena has one type parameter and not the heap's
//! two, a test can stand an arena on anything, and a user can put a count or a policy between the two. The verbs are on
//! slow paths only: an arena that is warm never calls them.
//!
//! Worked: `take(20_000, 1)` on pages of 8 KiB is a run of three pages, 24,576 bytes.

use core::ptr::NonNull;

use super::process::ProcessHeap;
use crate::geometry::{Geometry, Shape};
use crate::heap::PageHeap;
use crate::source::Memory;
use crate::units::{PageCount, PageIndex, PageRun};

/// Memory taken from a [`Backing`]: whole pages in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The bytes. Their length is a multiple of the backing's page, and never zero.
    pub memory: NonNull<[u8]>,
    /// Whether every byte is known to read as zero.
    pub zeroed: bool,
}

/// What gives an arena its blocks: a [`PageHeap`] over [`Memory`], or anything that leads to one.
///
/// # Safety
///
/// An implementation promises that
/// * a block taken is exactly as long as was asked, rounded up to whole pages, and at least as aligned, and may be read
///   and written by whoever took it, and by nobody else, until it is given back, also while the backing is moved (not:
///   dropped);
/// * `zeroed` is said only of bytes that read as zero;
/// * no verb unwinds, or uses an arena that stands on the backing: arenas call the verbs under a lock of theirs.
pub unsafe trait Backing {
    /// Bytes in a page: a power of two of at least 8, the same at every call. The unit in which blocks are counted.
    fn page_bytes(&self) -> usize;

    /// The most bytes that all blocks together could have, as things stand: more is refused, whatever is given back. No
    /// less; `usize::MAX`, as it is if nothing is said, where that is not known.
    ///
    /// An arena that is refused a block gives back what it keeps for later, and asks again; but not for what could
    /// never be had.
    fn most_bytes(&self) -> usize {
        usize::MAX
    }

    /// A block of `bytes` bytes, rounded up to whole pages, whose address is a multiple of `align`, a power of two.
    /// `None` if it cannot be had, or for zero bytes.
    fn take(&self, bytes: usize, align: usize) -> Option<Block>;

    /// Takes a block back.
    ///
    /// # Safety
    ///
    /// It was taken from this backing, whole, and nothing uses it any more.
    unsafe fn give(&self, memory: NonNull<[u8]>);
}

// SAFETY: a heap's runs do not overlap and stay where they are; its source says that they are memory. Pages count as
// zero only where the source said so, and the heap never unwinds.
unsafe impl<S: Memory, G: Shape> Backing for PageHeap<S, G> {
    fn page_bytes(&self) -> usize {
        G::PAGE_BYTES
    }

    fn most_bytes(&self) -> usize {
        // What has grown stays, also above a limit that was lowered since.
        self.limit().max(self.grown()).0 << G::PAGE_SHIFT
    }

    fn take(&self, bytes: usize, align: usize) -> Option<Block> {
        let pages = PageCount::holding(bytes, G::PAGE_SHIFT);
        let allocation = if align <= G::PAGE_BYTES {
            self.allocate_tracked(pages)
        } else {
            self.allocate_aligned(pages, align)
        }?;
        Some(Block {
            memory: self.pointer(allocation.run),
            zeroed: allocation.is_zeroed(),
        })
    }

    unsafe fn give(&self, memory: NonNull<[u8]>) {
        let page = self
            .page_of(memory.cast::<u8>().as_ptr())
            .unwrap_or(PageIndex(usize::MAX));
        let pages = PageCount::holding(memory.len(), G::PAGE_SHIFT);
        match PageRun::new(page, pages) {
            // SAFETY: the caller's promise. What is not a run of the heap's, the heap finds out.
            Some(run) => unsafe { self.free(run) },
            None => crate::fatal::abort(
                "a block given back that is not this heap's; its address and bytes",
                memory.addr().get(),
                memory.len(),
            ),
        }
    }
}

/// Backings that are others', passed on.
macro_rules! pass_on {
    ($($(#[$condition:meta])* $pointer:ty),*) => {$(
        $(#[$condition])*
        // SAFETY: every verb is the other's, whose promises hold for it, and which stays where it is.
        unsafe impl<B: Backing + ?Sized> Backing for $pointer {
            fn page_bytes(&self) -> usize {
                (**self).page_bytes()
            }

            fn most_bytes(&self) -> usize {
                (**self).most_bytes()
            }

            fn take(&self, bytes: usize, align: usize) -> Option<Block> {
                (**self).take(bytes, align)
            }

            unsafe fn give(&self, memory: NonNull<[u8]>) {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).give(memory) }
            }
        }
    )*};
}

pass_on! {
    &B,
    #[cfg(feature = "std")] std::boxed::Box<B>,
    #[cfg(feature = "std")] std::rc::Rc<B>,
    #[cfg(feature = "std")] std::sync::Arc<B>
}

// SAFETY: a heap's verbs, of a heap that is never unmade.
unsafe impl Backing for ProcessHeap {
    fn page_bytes(&self) -> usize {
        <Geometry as Shape>::PAGE_BYTES
    }

    fn most_bytes(&self) -> usize {
        Self::get().map_or(0, Backing::most_bytes)
    }

    fn take(&self, bytes: usize, align: usize) -> Option<Block> {
        Self::get()?.take(bytes, align)
    }

    unsafe fn give(&self, memory: NonNull<[u8]>) {
        if let Some(heap) = Self::get() {
            // SAFETY: the caller's promise, passed on.
            unsafe { heap.give(memory) }
        }
    }
}
