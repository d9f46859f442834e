//! How racks are made, and kept while they are blank.
//!
//! ```text
//!   a magazine's       the thread's plot ─▶ a longer plot
//!   one that travels   the thread's stock ─▶ those of all threads ─▶ slots out of spans ─▶ a new span
//! ```
//!
//! **A call can do without a rack**: its slots then move one by one. So no lock of a class is waited for, and no other
//! thread is asked for what it keeps. In a full heap that would make all threads flush, and with that give up their
//! plots. The thread itself gives back its cache of pages and its shelf before the answer is no, since what it lacks
//! may lie there. A no, and a yes for which the shelf was cleared, stand for the next 1,024 requests of all threads for
//! racks of that kind, or for plots (`rack.rs`).
//!
//! Worked: a heap is full, and a thread has a run of 8 pages on its shelf. It frees a block of a class of which it has
//! no rack yet, and its plot has no more room. The shelf is cleared, and the plot gets one of the 8 pages.
//!
//! Cost: for a blank rack that is there, what it takes to pop one from a stack; for up to four new ones, and for a
//! longer plot, what slots and pages cost.

use core::ptr::NonNull;

use crate::heap::Allocation;
use crate::source::Source;
use crate::units::PageCount;

use super::rack::{Blanks, Few, Making, Rack};
use super::{Objects, Thread};

impl<S: Source + 'static> Objects<S> {
    /// A blank rack for a magazine of the thread. `None` if there is no memory for one.
    pub(super) fn own_blank(&self, thread: &Thread, room: u32) -> Option<Rack> {
        let blank = || thread.plot().blank(room);
        blank().or_else(|| {
            self.extend_plot(thread)?;
            blank()
        })
    }

    /// Makes the thread's plot longer, by a page at least.
    #[cold]
    fn extend_plot(&self, thread: &Thread) -> Option<()> {
        if !self.blanks.may_make(Making::Plot) {
            return None;
        }
        let (plot, cache) = (thread.plot(), thread.cache());
        let several = Some(plot.wanted()).filter(|pages| pages.0 > 1);
        let run = several
            .and_then(|pages| self.pages_to_spare(cache, pages))
            .or_else(|| self.own_pages(thread, PageCount(1), Making::Plot))
            .map(|allocation| allocation.run)
            .filter(|&run| self.covers(cache, run).is_some());
        let Some(run) = run else {
            self.blanks.refused(Making::Plot);
            return None;
        };
        // SAFETY: just taken, for the plot.
        unsafe { plot.extend(self.heap.address(run.start()), run) };
        Some(())
    }

    /// Pages for what the thread can do without. If there are none, also of those that it keeps itself: of its cache,
    /// then of its shelf.
    #[cold]
    fn own_pages(&self, thread: &Thread, pages: PageCount, what: Making) -> Option<Allocation> {
        let cache = thread.cache();
        let take = || {
            self.flush_cache(thread);
            self.pages_to_spare(cache, pages)
        };
        self.pages_to_spare(cache, pages).or_else(take).or_else(|| {
            if self.clear_shelf_alone(thread, cache) == 0 {
                return None;
            }
            // Whether the answer is yes or no: a large block that is freed and allocated in turns finds its run broken
            // up, and must empty magazines to have it whole again.
            self.blanks.refused(what);
            take()
        })
    }

    /// Gives up the plot of a thread none of whose magazines has a rack. Returns how many pages that freed.
    pub(super) fn give_plot(&self, thread: &Thread, cache: Option<usize>) -> usize {
        let pages = thread.plot().pages().0;
        thread.plot().clear(|run| self.free_run(cache, run));
        pages
    }

    /// A blank rack. `None` if there is no memory for one.
    pub(super) fn blank(&self, thread: &Thread, room: u32) -> Option<Rack> {
        let own = thread.stock().pop(room);
        own.or_else(|| self.blanks.take(&self.spans, room, thread.hint()))
            .or_else(|| self.make_racks(thread, room))
    }

    /// Makes a rack, and some more for the thread's stock.
    #[cold]
    fn make_racks(&self, thread: &Thread, room: u32) -> Option<Rack> {
        if !self.blanks.may_make(Making::Rack(room)) {
            return None;
        }
        let mut few = Few::default();
        // SAFETY: used here only.
        let mut slots = unsafe { few.rack() };
        // Never waits for the lock of the class: the caller can do without a rack.
        let (class, cache) = (Rack::class(room)?, thread.cache());
        let central = self.central(class);
        let wanted = Rack::at_once(room);
        let filled = central.take(&self.spans, class, wanted, &mut slots);
        self.tell_filled(filled.unwrap_or(0));
        if slots.is_empty()
            && let Some(Allocation { run, .. }) = self.own_pages(thread, PageCount(class.pages()), Making::Rack(room))
            && self.covers(cache, run).is_some()
        {
            central.take_fresh(&self.spans, class, run, wanted, &mut slots);
        }
        let mut racks = core::iter::from_fn(|| slots.pop())
            .filter_map(NonNull::new)
            .map(|slot| {
                self.blanks.count_made(room);
                // SAFETY: a slot of the class for it, which nobody else has.
                unsafe { Rack::new(slot, room) }
            });
        let first = racks.next();
        racks.for_each(|rack| self.recycle(thread, Some(rack)));
        if first.is_none() {
            self.blanks.refused(Making::Rack(room));
        }
        first
    }

    /// Keeps a blank rack that is no longer needed.
    pub(super) fn recycle(&self, thread: &Thread, blank: Option<Rack>) {
        if let Some(Err(blank)) = blank.map(|blank| thread.stock().push(blank)) {
            self.keep(thread.cache(), blank, thread.hint());
        }
    }

    /// The same, past the thread's stock. Returns how many pages that freed.
    pub(super) fn keep(&self, cache: Option<usize>, blank: Rack, hint: usize) -> usize {
        debug_assert!(blank.is_empty());
        self.blanks
            .put(&self.spans, blank, hint)
            .map_or_else(|blank| self.unmake_rack(cache, blank, hint), |()| 0)
    }

    /// Sends a rack home to its span; if the lock is held for long, keeps the rack after all.
    #[cold]
    fn unmake_rack(&self, cache: Option<usize>, blank: Rack, hint: usize) -> usize {
        let room = blank.room();
        let Some(class) = Rack::class(room) else { return 0 };
        let (mut few, memory) = (Few::default(), blank.into_memory());
        // SAFETY: used here only; a slot of this class (`make_racks`).
        let mut slots = unsafe { few.of(memory) };
        match self.central(class).give_soon(&self.spans, class, &mut slots) {
            Some(leaving) => {
                self.blanks.count_unmade(room);
                self.give_spans(cache, class, leaving)
            }
            None => {
                // SAFETY: it is what it was before.
                let blank = unsafe { Rack::new(memory, room) };
                self.blanks.put_anyway(&self.spans, blank, hint);
                0
            }
        }
    }

    /// Gives up a thread's blank racks. Returns how many pages that freed.
    pub(super) fn give_stock(&self, thread: &Thread, cache: Option<usize>) -> usize {
        let mut pages = 0;
        for room in Blanks::rooms() {
            while let Some(blank) = thread.stock().pop(room) {
                pages += self.keep(cache, blank, 0);
            }
        }
        pages
    }

    /// Sends home the blank racks kept for all threads. May wait for the lock of their class. Returns how many pages
    /// that freed.
    pub(super) fn give_blanks(&self, cache: Option<usize>) -> usize {
        let mut pages = 0;
        for room in Blanks::rooms() {
            // Bounded, as in `empty_stores`: as many as there are.
            for _ in 0..self.blanks.made(room) {
                let (Some(blank), Some(class)) = (self.blanks.take(&self.spans, room, 0), Rack::class(room)) else {
                    break;
                };
                // SAFETY: a slot of this class, no longer used as a rack.
                pages += unsafe { self.give_slot(cache, class, blank.into_memory()) };
                self.blanks.count_unmade(room);
            }
        }
        pages
    }
}
