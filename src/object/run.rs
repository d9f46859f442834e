//! Large blocks: more than 32 KiB, or aligned to more than a page. Each is a run of pages of its own.
//!
//! ```text
//!   up to 1 MiB   ─▶ this thread's shelf ─▶ lots ─▶ cache of pages, or heap  a run freed lately, as it is
//!     and aligned ─▶ the same ──────────────────────▶ heap                   the same, if it is aligned
//!   up to 64 MiB  ─▶ aside ─────────────────────────▶ heap                   the same, if it has just this length
//!   more, aligned ──────────────────────────────────▶ heap
//! ```
//!
//! A block's layout determines its number of pages ([`pages_for`]): slightly more than it asked for, so that it can
//! grow in place and that few different lengths circulate. A block grows in place if the pages behind it are free, and
//! shrinks in place as long as it stays large. To become a slot it moves, or is cut where it is if there is no memory
//! (`shorten.rs`).
//!
//! **Arenas** take pages too. They give them back by address and length alone, whatever alignment they asked for, and
//! from those two nobody could tell which slot or which length of run it was. So what they get is exactly as many pages
//! as they ask for, of which the table knows nothing, as of a block aligned to more than 16 MiB. Such a run is found
//! not to be a block when it is freed as one of more than a slot, and a block not to be such a run, unless the block is
//! aligned like that.

use core::alloc::Layout;
use core::ptr::NonNull;

use crate::arena::Block;
use crate::fatal::{self, Number};
use crate::free_set::Request;
use crate::heap::Allocation;
use crate::source::Source;
use crate::units::{PageCount, PageRun};

use super::length::{Length, pages_for};
use super::size_class::{PAGE_BYTES, PAGE_SHIFT};
use super::span::Span;
use super::spans::Room;
use super::{Objects, Thread};

/// Blocks aligned to more than this may lie isolated at high addresses, which the table need not cover.
const MOST_ENTERED_ALIGN: usize = 16 << 20;

/// Whether a large block of this layout is in the table.
#[inline]
pub(super) const fn is_entered(layout: Layout) -> bool {
    layout.align() <= MOST_ENTERED_ALIGN
}

/// A run with memory behind it, and arbitrary contents.
const fn used(run: PageRun) -> Allocation {
    Allocation {
        run,
        scavenged: PageCount::ZERO,
        last: PageCount::ZERO,
    }
}

/// The outcome of putting a block in a shelf's hand.
#[derive(Debug)]
pub enum Hold<'a> {
    /// The block lies there.
    Taken,
    /// Another block lies there. With this block's entry.
    Full(&'a Span),
    /// There is no such block.
    Refused,
}

impl<S: Source + 'static> Objects<S> {
    /// Fast path: takes a large block from the hand of the thread's shelf, if one of this length lies there.
    ///
    /// # Safety
    ///
    /// The structure belongs to this heap and the caller has entered it; or it is the shared one, whose lock the
    /// caller holds.
    #[inline(always)]
    pub unsafe fn take_from_hand(&self, thread: &Thread, length: Length) -> Option<NonNull<u8>> {
        let hand = thread.hand(length);
        let start = hand.get()?;
        // SAFETY: it is in the table of the structure's heap (I17), so covered.
        let (memory, entry) = unsafe { self.spans.known(start) };
        hand.take(length, entry);
        Some(memory)
    }

    /// Takes a large block from the list of this length, if one is there.
    ///
    /// # Safety
    ///
    /// As for [`take_from_hand`](Self::take_from_hand).
    #[inline(always)]
    pub unsafe fn take_from_list(&self, thread: &Thread, length: Length) -> Option<NonNull<u8>> {
        let start = thread.shelf().take_listed(&self.spans, length)?;
        Some(self.spans.address(start))
    }

    /// Fast path: puts a large block in the hand of the thread's shelf, if that is empty. If it did, the caller must
    /// [tell](Self::tell) the keeper.
    ///
    /// # Safety
    ///
    /// As for [`take_from_hand`](Self::take_from_hand); the caller gives the block up, if there is such a block.
    #[inline(always)]
    pub unsafe fn put_in_hand(&self, thread: &Thread, memory: NonNull<u8>, length: Length) -> Hold<'_> {
        match self.spans.large_of(memory, length) {
            None => Hold::Refused,
            Some((start, entry)) if thread.hand(length).put(length, start, entry) => Hold::Taken,
            Some((_, entry)) => Hold::Full(entry),
        }
    }

    /// The same, onto the list of that length, if that may take more. `entry` is from `put_in_hand`. Returns whether
    /// it did.
    ///
    /// # Safety
    ///
    /// As for [`put_in_hand`](Self::put_in_hand), which said that the hand is full, and gave this entry.
    #[inline(always)]
    pub unsafe fn put_on_list(&self, thread: &Thread, memory: NonNull<u8>, length: Length, entry: &Span) -> bool {
        let start = self.spans.page_of(memory);
        thread.shelf().put_listed(length, start, entry) || self.put_with_share(thread, length, start, entry)
    }

    /// Tells the keeper, if it is away, that `bytes` bytes have been freed, or may be from here on, to where it would
    /// find them: freed pages, and loaded racks. Called after the fact: a thread whose bytes the keeper has missed
    /// then sees that it sleeps.
    #[inline(always)]
    pub fn tell(&self, bytes: usize) {
        if self.keeper.is_away() {
            self.keeper.count(bytes);
        }
    }

    /// A large block from the thread's shelf, with arbitrary contents.
    pub(super) fn shelved_run(&self, thread: &Thread, layout: Layout) -> Option<Allocation> {
        let length = Length::of(layout)?;
        let start = self.spans.page_of(self.run_from_shelf(thread, length)?);
        Some(used(PageRun::known(start.0, length.pages())))
    }

    /// Allocates a large block that no shelf had, or one aligned to more than a page, which is sought there now.
    pub(super) fn allocate_run(&self, thread: &Thread, layout: Layout) -> Option<Allocation> {
        if layout.align() > PAGE_BYTES
            && let Some(run) = self.aligned_from_shelf(thread, layout)
        {
            return Some(used(run));
        }
        let pages = pages_for(layout);
        if let Some(memory) = self.take_from_aside(layout) {
            return Some(used(PageRun::known(self.spans.page_of(memory).0, pages.0)));
        }
        if !self.fits(layout) {
            return None;
        }
        let run = Length::of(layout).and_then(|length| {
            self.share_shelves(thread);
            self.take_lot(thread, length)
                .map(|start| PageRun::known(start.0, length.pages()))
                .or_else(|| self.cut_from_shelf(thread, layout, length))
        });
        if let Some(run) = run {
            return Some(used(run));
        }
        let attempt = |cache| {
            let allocation = self.aligned_pages(cache, pages, layout.align())?;
            if is_entered(layout) {
                self.covers(cache, allocation.run)?;
                self.enter(allocation.run, layout);
            }
            Some(allocation)
        };
        let allocation = attempt(thread.cache()).or_else(|| self.try_at_last(thread, attempt))?;
        self.keep_below(thread);
        Some(allocation)
    }

    /// A large block of up to 1 MiB with as much free memory behind it, if that is easily had.
    pub(super) fn allocate_apart(&self, thread: &Thread, layout: Layout) -> Option<NonNull<u8>> {
        let pages = PageCount(Length::of(layout)?.pages());
        if !self.fits(layout) {
            return None;
        }
        self.clear_aside();
        let allocation = self.heap.try_apart(pages, pages)?;
        self.count_taken(pages);
        let memory = self.enter_run(thread, allocation.run)?;
        self.keep_below(thread);
        Some(memory)
    }

    /// Enters a run that was just taken as a large block in the table, or gives it back.
    pub(super) fn enter_run(&self, thread: &Thread, run: PageRun) -> Option<NonNull<u8>> {
        self.covers(thread.cache(), run)?;
        let pages = run.pages().0;
        self.spans.entry(run.start()).enter_large(pages, Length::exactly(pages));
        Some(self.spans.address(run.start()))
    }

    /// Enters a run below what is covered as a block of this layout.
    fn enter(&self, run: PageRun, layout: Layout) {
        let entry = self.spans.entry(run.start());
        entry.enter_large(run.pages().0, Length::of(layout));
    }

    /// A large block cut from a longer run of which the shelf has many.
    fn cut_from_shelf(&self, thread: &Thread, layout: Layout, length: Length) -> Option<PageRun> {
        let (head, tail) = thread
            .shelf()
            .take_surplus(&self.spans, length)?
            .split_at(PageCount(length.pages()))?;
        self.enter(head, layout);
        self.free_run(thread.cache(), tail);
        Some(head)
    }

    /// Whether a large block of this layout could be allocated if everything else were free.
    pub fn fits(&self, layout: Layout) -> bool {
        self.heap.fits(pages_for(layout), layout.align())
    }

    /// The run of pages of the block at `memory` with this layout. Aborts if there is no such block.
    pub(super) fn run_of(&self, memory: NonNull<u8>, layout: Layout) -> PageRun {
        let pages = pages_for(layout);
        let start = if is_entered(layout) {
            self.spans.large_at(memory, pages.0, Length::of(layout))
        } else {
            self.run_without_entry(memory, pages.0.saturating_mul(PAGE_BYTES))
                .filter(|_| memory.addr().get().is_multiple_of(layout.align()))
                .map(PageRun::start)
        };
        match start {
            Some(start) => PageRun::known(start.0, pages.0),
            None => self.refuse_large(memory, layout),
        }
    }

    /// The run of pages of so many bytes at `memory`, if no block that the table knows begins there.
    fn run_without_entry(&self, memory: NonNull<u8>, bytes: usize) -> Option<PageRun> {
        let run = self.heap.run_of(memory.as_ptr(), bytes)?;
        let is_vacant = run.start().0 >= self.spans.covered() || self.spans.entry(run.start()).is_vacant();
        is_vacant.then_some(run)
    }

    /// Reports what is wrong with a large block that does not exist.
    #[cold]
    fn refuse_large(&self, memory: NonNull<u8>, layout: Layout) -> ! {
        let message = match self.heap.page_of(memory.as_ptr()) {
            None => "a large block was freed that is not of this heap; its address, its size",
            Some(page) if page.0 >= self.spans.covered() => {
                "a large block was freed that is not allocated; its address, its size"
            }
            Some(page) if self.spans.entry(page).is_shelved() || self.heap.is_free(page) => {
                "a large block was freed twice; its address, its size"
            }
            Some(_) => "a block was freed twice, or as a large one, with the wrong layout; its address, its size",
        };
        fatal::abort(
            message,
            Number::Address(memory.addr().get()),
            Number::Count(layout.size()),
        )
    }

    /// Frees a large block. If it has a length, it bypasses the shelf.
    ///
    /// # Safety
    ///
    /// The caller gives the block up.
    pub(super) unsafe fn free_large(&self, thread: &Thread, memory: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        if unsafe { self.put_aside(memory, layout) } {
            self.tell(pages_for(layout).0 * PAGE_BYTES);
            return;
        }
        if layout.align() <= PAGE_BYTES
            && let Some(Room::Run(run)) = self.take_room(memory, layout.size())
        {
            self.free_to_shelf(thread, run);
            return;
        }
        let run = self.run_of(memory, layout);
        if is_entered(layout) {
            let entry = self.spans.entry(run.start());
            if !entry.leave_large(Length::of(layout)) {
                // Another thread has freed it since.
                self.refuse_large(memory, layout);
            }
            // On a shelf one that is aligned is a run like any other. (Without a length it stays out of the table: a
            // second thread that frees it must find that it is gone.)
            if layout.align() > PAGE_BYTES
                && let Some(length) = Length::exactly(run.pages().0)
            {
                entry.enter_large(run.pages().0, Some(length));
                self.free_to_shelf(thread, run);
                return;
            }
        }
        self.free_run(thread.cache(), run);
    }

    /// A run of this length from the thread's shelf.
    pub(super) fn run_from_shelf(&self, thread: &Thread, length: Length) -> Option<NonNull<u8>> {
        // SAFETY: the structure is as `Objects::free` asks.
        unsafe {
            self.take_from_hand(thread, length)
                .or_else(|| self.take_from_list(thread, length))
        }
    }

    /// A run of this length for a block that shall have room: from the shelf, or where the hint leads.
    pub(super) fn run_at_hand(&self, thread: &Thread, length: Length) -> Option<NonNull<u8>> {
        self.run_from_shelf(thread, length).or_else(|| {
            self.share_shelves(thread);
            // At the heap's limit, other requests may need it more.
            if self.heap.grown() >= self.heap.limit() {
                return None;
            }
            let pages = PageCount(length.pages());
            self.clear_aside();
            let allocation = self.heap.try_apart(pages, PageCount::ZERO)?;
            self.count_taken(pages);
            self.enter_run(thread, allocation.run)
        })
    }

    /// Frees a run that held a block which the caller of [`free`](Self::free) could not shelve: a roomy one, or one
    /// aligned to more than a page. It is entered as a large block of the run's length. (Also onto the shelf of the
    /// shared structure, from which threads of a `GlobalHeap` take little: whoever needs the pages empties it.)
    pub(super) fn free_to_shelf(&self, thread: &Thread, run: PageRun) {
        if !self.shelve(thread, self.spans.address(run.start()), Length::exactly(run.pages().0)) {
            self.spans.entry(run.start()).leave();
            self.free_run(thread.cache(), run);
        }
    }

    /// Puts a large block that the caller gives up on the thread's shelf, if it has a length, if there is such a block,
    /// and if there is room. Returns whether it did.
    pub(super) fn shelve(&self, thread: &Thread, memory: NonNull<u8>, length: Option<Length>) -> bool {
        let Some(length) = length else {
            return false;
        };
        // SAFETY: the structure is as `Objects::free` asks; the caller gives the block up.
        let taken = unsafe {
            match self.put_in_hand(thread, memory, length) {
                Hold::Taken => true,
                Hold::Full(entry) => self.put_on_list(thread, memory, length, entry),
                Hold::Refused => false,
            }
        };
        if taken {
            self.tell(length.pages() * PAGE_BYTES);
        }
        taken
    }

    /// Resizes a large block in place, if possible.
    pub(super) fn resize_large(&self, thread: &Thread, memory: NonNull<u8>, old: Layout, new: Layout) -> bool {
        self.resize_run(thread, self.run_of(memory, old), new)
    }

    /// Resizes a block in place, given its run.
    pub(super) fn resize_run(&self, thread: &Thread, run: PageRun, new: Layout) -> bool {
        let to = pages_for(new);
        if to > run.pages() {
            if to > self.heap.limit() {
                return false;
            }
            // Before the first attempt: another thread may give it back meanwhile.
            let lay_aside = self.aside.has_any();
            let grown = self.grow_run(thread, run, to)
                || lay_aside && self.is_aside_behind(run) && {
                    self.clear_aside();
                    self.grow_run(thread, run, to)
                };
            if grown {
                if is_entered(new) {
                    self.enter(PageRun::known(run.start().0, to.0), new);
                }
                self.count_taken(PageCount(to.0 - run.pages().0));
                self.keep_below(thread);
            }
            return grown;
        }
        if let Some((head, tail)) = run.split_at(to) {
            if is_entered(new) {
                self.enter(head, new);
            }
            self.free_run(thread.cache(), tail);
        }
        true
    }

    /// Whether some of the pages behind a run may lie aside: the first is free, or lies there or on a shelf.
    fn is_aside_behind(&self, run: PageRun) -> bool {
        let behind = run.end();
        behind.0 < self.spans.covered() && (self.heap.is_free(behind) || self.spans.entry(behind).is_shelved())
    }

    /// Extends a run in place. The pages behind it may be in the thread's own cache.
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

    /// Allocates a run of pages, through a cache if there is one.
    #[inline]
    pub(super) fn pages(&self, cache: Option<usize>, pages: PageCount) -> Option<Allocation> {
        self.count_pages(pages, || match cache {
            Some(cache) => self.heap.cache_at(cache).try_tracked(pages),
            None => self.heap.try_with(&Request::of(pages.0)),
        })
    }

    /// The same, at an address that is a multiple of `align`.
    fn aligned_pages(&self, cache: Option<usize>, pages: PageCount, align: usize) -> Option<Allocation> {
        if align <= PAGE_BYTES {
            self.pages(cache, pages)
        } else {
            self.count_pages(pages, || self.heap.try_aligned(pages, align))
        }
    }

    /// The same for what the caller can do without: no other thread is asked for what it keeps.
    pub(super) fn pages_to_spare(&self, cache: Option<usize>, pages: PageCount) -> Option<Allocation> {
        self.count_pages(pages, || {
            cache
                .and_then(|cache| self.heap.cache_at(cache).try_at_hand(pages))
                .or_else(|| self.heap.try_lightly(pages))
        })
    }

    #[inline]
    fn count_pages(&self, pages: PageCount, take: impl FnOnce() -> Option<Allocation>) -> Option<Allocation> {
        self.clear_aside();
        let allocation = take();
        self.count_taken(pages);
        allocation
    }

    /// After an attempt to take pages: does what the soft limit asks for, and counts them for the keeper.
    #[inline]
    fn count_taken(&self, pages: PageCount) {
        if self.heap.shortfall() != 0 {
            self.relieve();
        }
        self.keeper.count_grown(pages.0);
    }

    /// Counts an allocation that failed after all attempts; the layers below do not count it.
    #[cold]
    pub fn refuse<T>(&self) -> Option<T> {
        self.heap.refuse(1)
    }

    /// Gives pages back to the heap, through the thread's cache if it has one.
    pub(super) fn free_run(&self, cache: Option<usize>, run: PageRun) {
        // SAFETY: a run that a caller of this layer has given up (the promise of `free`, or of `take_back`), perhaps
        // when it was put aside (I21), or that was just taken or dissolved.
        unsafe {
            match cache {
                Some(cache) => self.heap.cache_at(cache).free(run),
                None => self.heap.free(run),
            }
        }
        self.tell(run.pages().0 * PAGE_BYTES);
    }

    // ---- for arenas
    // -------------------------------------------------------------------------------------------------------------

    /// The most bytes that arenas could have at present, all together, if there were nothing else. (One request gets as
    /// much as the limit at most, which may be less, if it was lowered.)
    pub fn most_lent(&self) -> usize {
        self.heap.most_pages().bytes(PAGE_SHIFT)
    }

    /// Takes pages for an arena, as a [`Backing`](crate::arena::Backing) does, with all that is done before a large
    /// block is refused. The structure: as for [`free`](Self::free).
    pub fn lend_pages(&self, thread: &Thread, bytes: usize, align: usize) -> Option<Block> {
        let pages = self.pages_to_lend(bytes, align)?;
        let attempt = |cache| self.aligned_pages(cache, pages, align);
        let allocation = attempt(thread.cache()).or_else(|| self.try_at_last(thread, attempt))?;
        self.keep_below(thread);
        let memory = self.heap.pointer(allocation.run);
        debug_assert!(
            self.run_without_entry(memory.cast(), memory.len()).is_some(),
            "free pages are in no span, and no block begins there"
        );
        Some(Block {
            memory,
            zeroed: allocation.is_zeroed(),
        })
    }

    /// The same with a shared structure, for a thread that has none of its own.
    pub fn lend_pages_shared(&self, bytes: usize, align: usize) -> Option<Block> {
        self.pages_to_lend(bytes, align)?;
        let lent = self.lend_pages(&self.shared(), bytes, align);
        lent.or_else(|| self.with_all(|thread| self.lend_pages(thread, bytes, align)))
    }

    /// How many pages hold so many bytes; none if there are no bytes, or the heap could not provide them if everything
    /// else were free.
    fn pages_to_lend(&self, bytes: usize, align: usize) -> Option<PageCount> {
        let pages = PageCount::holding(bytes, PAGE_SHIFT);
        (pages.0 > 0 && self.heap.fits(pages, align)).then_some(pages)
    }

    /// Takes back what was lent. Aborts if a block of the program begins there, or if the pages are free or not of this
    /// heap.
    ///
    /// # Safety
    ///
    /// It was lent by this heap, is given back whole, and nothing uses it any more. The structure: as for
    /// [`free`](Self::free).
    pub unsafe fn take_back(&self, thread: &Thread, memory: NonNull<[u8]>) {
        match self.run_without_entry(memory.cast(), memory.len()) {
            Some(run) => self.free_run(thread.cache(), run),
            None => fatal::abort(
                "an arena gave back what this heap had not given it; its address and bytes",
                Number::Address(memory.addr().get()),
                Number::Count(memory.len()),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * PAGE_BYTES, 8).unwrap()
    }

    /// A lowered limit holds for a block that grows, in place or by moving, though the heap has the pages.
    #[test]
    fn a_block_does_not_grow_beyond_a_lowered_limit() {
        let objects = Objects::for_test(16 << 20, 1, false);
        // SAFETY: never destroyed.
        let entered = unsafe { objects.enlist().unwrap().as_ref() }.enter(objects).unwrap();
        let thread: &Thread = &entered;
        let all = objects.allocate(thread, layout(1000)).unwrap();
        // SAFETY: freed with its layout.
        unsafe { objects.free(thread, all, layout(1000)) };
        let block = objects.allocate(thread, layout(40)).unwrap();
        let behind = |pages| objects.allocate(thread, layout(pages));
        objects.heap.set_limit(PageCount(60));
        // SAFETY: a live block of this layout; what is refused changes nothing.
        let mut resize = |pages: usize| unsafe { objects.resize(thread, block, layout(40), pages * PAGE_BYTES) };
        assert!([80, 500].map(&mut resize).iter().all(Option::is_none), "in place");
        let _neighbour = behind(1).unwrap();
        assert!([80, 500].map(&mut resize).iter().all(Option::is_none), "by moving");
        assert!(objects.allocate_apart(thread, layout(80)).is_none());
    }
}
