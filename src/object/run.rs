//! Large blocks: more than 32 KiB, or aligned to more than a page. Each is a run of pages of its own.
//!
//! ```text
//!   up to 1 MiB   ─▶ this thread's shelf ─▶ cache of pages, or heap          a run freed lately, as it is
//!   more, aligned ─────────────────────────▶ heap
//! ```
//!
//! A block has as many pages as [`pages_for`] says, for whoever knows its layout: a few more than it asked for, so that
//! it can grow where it is and that few lengths go round. It grows in place where the pages behind it are free, and
//! shrinks in place always.

use core::alloc::Layout;
use core::ptr::NonNull;

use crate::fatal;
use crate::heap::Allocation;
use crate::source::Source;
use crate::units::{PageCount, PageIndex, PageRun};

use super::magazine::wipe;
use super::shelf::{Length, pages_for};
use super::size_class::PAGE_BYTES;
use super::{Objects, Thread};

impl<S: Source + 'static> Objects<S> {
    /// A large block from the thread's shelf, if one of its length lies there.
    #[inline]
    pub fn take_from_shelf(&self, thread: &Thread, layout: Layout) -> Option<NonNull<u8>> {
        let start = thread.shelf().take(Length::of(layout)?)?;
        Some(self.heap.address(start))
    }

    /// Puts a large block on the thread's shelf, if there is room. Whether it did.
    #[inline]
    pub fn put_on_shelf(&self, thread: &Thread, memory: NonNull<u8>, layout: Layout) -> bool {
        let Some(length) = Length::of(layout) else { return false };
        let Some(start) = self.start_of(memory, length) else {
            return false;
        };
        let done = thread.shelf().put(length, start);
        if !done && thread.shelf().has(length, start) {
            fatal::abort(
                "large block freed twice; its address, its size",
                memory.addr().get(),
                layout.size(),
            );
        }
        if done {
            self.tell(length.pages());
        }
        done
    }

    /// Tells the keeper, if he is away, that so many pages were freed: to the heap, or to where he may find them.
    #[inline]
    pub(super) fn tell(&self, pages: usize) {
        if self.keeper.is_away() {
            self.keeper.count(pages);
        }
    }

    /// The page that a large block of this length begins with. `None` if none can: then `run_of` says why.
    #[inline]
    fn start_of(&self, memory: NonNull<u8>, length: Length) -> Option<PageIndex> {
        let start = self.heap.page_of(memory.as_ptr())?;
        let last = PageIndex(start.0 + length.pages() - 1);
        let possible = memory.addr().get().is_multiple_of(PAGE_BYTES) && last.0 < self.heap.grown().0;
        let taken = possible && !self.in_span(start) && !self.in_span(last) && !self.heap.is_free(start);
        taken.then_some(start)
    }

    #[inline]
    fn in_span(&self, page: PageIndex) -> bool {
        page.0 < self.spans.covered() && self.span_at(page).is_some()
    }

    /// A run of pages for a layout that no shelf had.
    pub(super) fn allocate_run(&self, thread: &Thread, layout: Layout) -> Option<Allocation> {
        let pages = pages_for(layout);
        if !self.fits(layout) {
            return None;
        }
        let attempt = || {
            if layout.align() <= PAGE_BYTES {
                self.pages(thread.cache(), pages)
            } else {
                self.heap.allocate_aligned(pages, layout.align())
            }
        };
        let allocation = attempt().or_else(|| {
            self.reclaim(thread);
            attempt()
        })?;
        if !allocation.is_zeroed() {
            // SAFETY: a run just allocated, and of pages that are memory.
            unsafe { wipe(self.heap.address(allocation.run.start()).as_ptr()) };
        }
        Some(allocation)
    }

    /// Whether a large block like this could be had if all else were free.
    pub fn fits(&self, layout: Layout) -> bool {
        self.heap.fits(pages_for(layout), layout.align())
    }

    /// The run of pages that a block of this layout at `memory` is. Aborts if no run begins there, or if its first or
    /// last page is a span's.
    pub(super) fn run_of(&self, memory: NonNull<u8>, layout: Layout) -> PageRun {
        let (address, size) = (memory.addr().get(), layout.size());
        let bytes = pages_for(layout).0.saturating_mul(PAGE_BYTES);
        let Some(run) = self.heap.run_of(memory.as_ptr(), bytes) else {
            fatal::abort(
                "a large block was freed that is not of this heap; its address, its size",
                address,
                size,
            );
        };
        if self.in_span(run.start()) || self.in_span(PageIndex(run.end().0 - 1)) {
            fatal::abort(
                "a block was freed as a large one, with the wrong layout; its address, its size",
                address,
                size,
            );
        }
        run
    }

    /// Makes a run shorter or longer where it is, if it can be.
    pub(super) fn resize_run(&self, thread: &Thread, memory: NonNull<u8>, old: Layout, new: Layout) -> bool {
        let (run, to) = (self.run_of(memory, old), pages_for(new));
        if to > run.pages() {
            // The heap does not grow for a run that something stands behind.
            let reach = run.start().0.saturating_add(to.0);
            let room =
                reach <= self.heap.grown().0 || reach <= self.heap.limit().0 && self.heap.is_free_from(run.end());
            return room && self.grow_run(thread, run, to);
        }
        if let Some((_, tail)) = run.split_at(to) {
            self.free_run(thread.cache(), tail);
        }
        true
    }

    /// Makes a run longer where it is. The pages behind it may be in the thread's own cache.
    fn grow_run(&self, thread: &Thread, run: PageRun, to: PageCount) -> bool {
        let grow = || self.heap.grow_in_place(run, to).is_some();
        grow()
            || thread.cache().is_some_and(|cache| {
                let cache = self.heap.cache_at(cache);
                let held = cache.holds(run.end());
                if held {
                    cache.flush();
                }
                held && grow()
            })
    }

    /// A run of pages: through a cache if there is one.
    #[inline]
    pub(super) fn pages(&self, cache: Option<usize>, pages: PageCount) -> Option<Allocation> {
        match cache {
            Some(cache) => self.heap.cache_at(cache).allocate_tracked(pages),
            None => self.heap.allocate_tracked(pages),
        }
    }

    pub(super) fn free_run(&self, cache: Option<usize>, run: PageRun) {
        self.give_pages(cache, run);
    }

    #[inline]
    pub(super) fn give_pages(&self, cache: Option<usize>, run: PageRun) {
        // SAFETY: a run that a caller of this layer has given up (the promise of `free`), or that was just taken or
        // unmade.
        unsafe {
            match cache {
                Some(cache) => self.heap.cache_at(cache).free(run),
                None => self.heap.free(run),
            }
        }
        self.tell(run.pages().0);
    }
}
