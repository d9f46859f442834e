//! Where an arena's blocks come from: a heap of pages, lent, owned or shared.
//!
//! ```text
//!   Arena<&'h PageHeap<S>>     lent: many arenas on one heap, whose pages wander between them
//!   Arena<PageHeap<S>>         owned: gone with the arena
//!   Arena<Arc<PageHeap<S>>>    shared, and gone with the last
//!   Arena<&GlobalHeap>         the program's heap: its limits, its background thread, its statistics
//!   Arena<&Heap<S>>            a heap of objects; owned or shared, as above
//!   Arena                      the process's own heap, made at the first use
//! ```
//!
//! A backing is a trait with few methods instead of a reference to a heap. So an arena has one type parameter rather
//! than the heap's two, a test can put an arena on anything, and a program can insert a counter or a policy. The
//! methods are on slow paths only: a warm arena never calls them.
//!
//! Worked: `take(20_000, 1)` on pages of 8 KiB returns a run of three pages, 24,576 bytes.

use core::ptr::NonNull;

use super::process::ProcessHeap;
use crate::fatal::{self, Number};
use crate::geometry::{Geometry, Shape};
use crate::heap::PageHeap;
use crate::source::Memory;
use crate::units::{PageCount, PageIndex, PageRun};

/// Memory taken from a [`Backing`]: consecutive whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// The bytes. Their length is a multiple of the backing's page size, and never zero.
    pub memory: NonNull<[u8]>,
    /// Whether every byte is known to read as zero.
    pub zeroed: bool,
}

/// Supplies an arena with blocks: a [`PageHeap`] over [`Memory`], a [`GlobalHeap`](crate::GlobalHeap), a
/// [`Heap`](crate::Heap), or anything that leads to one of these.
///
/// Heaps of objects lend pages as they are: an arena on one gets exactly as many as it asks for. They count as large
/// blocks do, towards the heap's limits and in its statistics; and before a request is refused, all that the heap only
/// keeps is given up. A hook set by [`on_exhausted`](crate::GlobalHeap::on_exhausted) is not called, since it might use
/// the arena that asks. With the feature `checks` they have no seal.
///
/// ```
/// use pageheap::GlobalHeap;
/// use pageheap::arena::{Arena, ArenaError};
///
/// #[global_allocator]
/// static HEAP: GlobalHeap = GlobalHeap::new().limit(1 << 30);
///
/// let arena = Arena::new_in(&HEAP);
/// let words = arena.alloc_iter("within the limit of the program".split(' '))?;
/// assert!(HEAP.contains(words.as_ptr().cast()));
/// # Ok::<(), ArenaError>(())
/// ```
///
/// # Safety
///
/// An implementation guarantees:
/// * A block is exactly as long as requested, rounded up to whole pages, and at least as aligned. Until it is given
///   back, its taker may read and write it and nobody else may, even if the backing is moved (but not if it is
///   dropped).
/// * `zeroed` is set only if all bytes read as zero.
/// * No method unwinds, or uses an arena that stands on this backing: arenas call the methods while holding a lock.
pub unsafe trait Backing {
    /// The page size in bytes: a power of two from 8 to 2³⁰, the same at every call. Blocks are counted in pages.
    fn page_bytes(&self) -> usize;

    /// The most bytes that all blocks together can have at present: a request beyond that is refused, whatever is given
    /// back. It must not be an underestimate. Return `usize::MAX`, the default, if it is not known.
    ///
    /// An arena that is refused a block gives back what it keeps for later and asks again, but not for more than this.
    fn most_bytes(&self) -> usize {
        usize::MAX
    }

    /// Takes a block of `bytes` bytes, rounded up to whole pages, whose address is a multiple of `align`, a power of
    /// two. Returns `None` if there is none, or if `bytes` is zero.
    ///
    /// Where a block is granted, so is a shorter one that is aligned to no more: an arena that was refused asks for the
    /// shortest that will do, and for longer ones only if it gets that.
    fn take(&self, bytes: usize, align: usize) -> Option<Block>;

    /// Gives a block back.
    ///
    /// # Safety
    ///
    /// The block was taken from this backing, is given back whole, and nothing uses it any more.
    unsafe fn give(&self, memory: NonNull<[u8]>);
}

// SAFETY: a heap's runs do not overlap and do not move; its source says that they are memory. Pages count as zero only
// where the source said so, and the heap never unwinds.
unsafe impl<S: Memory, G: Shape> Backing for PageHeap<S, G> {
    fn page_bytes(&self) -> usize {
        G::PAGE_BYTES
    }

    fn most_bytes(&self) -> usize {
        self.most_pages().bytes(G::PAGE_SHIFT)
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
            // SAFETY: the caller's promise. The heap itself detects what is not a run of its own.
            Some(run) => unsafe { self.free(run) },
            None => fatal::abort(
                "a block given back that is not this heap's; its address and bytes",
                Number::Address(memory.addr().get()),
                Number::Count(memory.len()),
            ),
        }
    }
}

/// Implements `Backing` for pointers by passing each call on.
macro_rules! pass_on {
    ($($(#[$condition:meta])* $pointer:ty),*) => {$(
        $(#[$condition])*
        // SAFETY: every call goes to the other backing, whose promises hold for it, and which does not move.
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

// SAFETY: calls go to a heap that is never dropped.
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
