//! Punching holes: memory between the live blocks of a span goes back to the source (`holes.rs`).
//!
//! ```text
//!   home ──claim──▶ out, nobody's ──release──▶ not backed ──note the holes──▶ home
//! ```
//!
//! The slots that reach into what is to go are taken out of the span, as by a thread that allocates, and taken home
//! again when it has gone. They count as out meanwhile: that sentence is the safety proof, as it is for runs of free
//! pages (`heap/scan.rs`). No lock is held over the system call, and one span is in hand at a time.
//!
//! **When**: where all that is free has gone, and more was to go: when somebody asks for it
//! ([`release`](Objects::release)), when the program is silent, and when the heap is over its soft limit. From the top
//! of the heap down, a part of it at a time, so that all come by turns.
//!
//! The heap of pages counts holes as not backed. New ones are counted under the lock of the class, so before anybody
//! can end them; whoever ends some tells the heap before anybody gets the slots, or the pages, and when he has let go
//! of the lock, for that may have him assist.
//!
//! Worked: one thread, 40 MiB live under a soft limit of 64, in blocks of 1.5 to 30 KiB whose lengths change, freed at
//! random. It had 90 MiB resident at the most, and has 65.
//!
//! Cost: 2 ns for each page that is looked at, and a system call for each row of grains; where slots are taken out of a
//! span that has holes, some nanoseconds for each slot that is out.

#![forbid(unsafe_code)]

use crate::source::Source;
use crate::sync::Ordering;
use crate::units::{PageCount, PageIndex};

use super::Objects;
use super::holes::{GRAIN_SHIFT, MAX_SPAN_GRAINS, PAGE_GRAINS, between, bytes_of, rows};
use super::size_class::SizeClass;

impl<S: Source + 'static> Objects<S> {
    /// Tells the heap of holes that came to an end where slots were taken. That may have the caller assist, as where
    /// pages are: with no lock of a class held.
    #[inline]
    pub(super) fn tell_filled(&self, grains: u32) {
        if grains > 0 {
            self.heap.count_holes(0, bytes_of(grains));
            self.heap.assist_above_aim(1);
        }
    }

    /// The same of a span that is none any more, before its pages are free.
    #[inline]
    pub(super) fn tell_left(&self, class: SizeClass, span: PageIndex) {
        let bytes = self.spans.holes_of(class, span);
        if bytes > 0 {
            self.heap.count_holes(0, bytes);
        }
    }

    /// For who wanted so many pages to go back, and could release so many: how many have gone, holes and all.
    pub(super) fn punch_for(&self, wanted: PageCount, released: PageCount) -> PageCount {
        let more = wanted.0.saturating_sub(released.0);
        PageCount(released.0 + self.punch_some(more, usize::MAX))
    }

    /// Punches holes until there are `wanted` pages of them, from the top of the heap down and from where it stopped
    /// the last time; looks at `most` pages. How many pages have gone.
    pub(super) fn punch_some(&self, wanted: usize, most: usize) -> usize {
        if wanted == 0 {
            return 0;
        }
        let (wanted, mut gone, mut looked) = (wanted.saturating_mul(PAGE_GRAINS), 0, 0);
        let mut go_on = |grains, pages| {
            (gone, looked) = (gone + grains, looked + pages);
            gone < wanted && looked < most
        };
        self.heap.timed(|| {
            // Relaxed, twice: where two are at it, pages are looked at twice, or the next time.
            let mut end = self.spans.punched.load(Ordering::Relaxed);
            end = self.punch_below(end, &mut go_on);
            if end == 0 {
                end = self.punch_below(usize::MAX, go_on);
            }
            self.spans.punched.store(end, Ordering::Relaxed);
        });
        gone / PAGE_GRAINS
    }

    /// Punches holes below page `end`; `go_on` is told of grains that have gone, and pages that were looked at. Below
    /// which page is left.
    pub(super) fn punch_below(&self, end: usize, mut go_on: impl FnMut(usize, usize) -> bool) -> usize {
        let granule = self.heap.source().granule().div_ceil(1 << GRAIN_SHIFT);
        if S::COMMITS || granule > MAX_SPAN_GRAINS {
            return 0;
        }
        let mut end = end.min(self.spans.covered()).min(self.heap.grown().0);
        let mut goes_on = true;
        while end > 0 && goes_on {
            let tag = self.spans.entry(PageIndex(end - 1)).tag();
            let pages = tag.map_or(1, |(_, back)| end.min(1 + back));
            end -= pages;
            let class = tag.map(|(class, _)| class).filter(|class| class.is_flagged());
            let gone = class.map_or(0, |class| self.punch_span(class, PageIndex(end), granule));
            goes_on = go_on(gone, pages);
        }
        end
    }

    /// Punches what holes may be in a span, if one of the class begins there. How many grains have gone.
    fn punch_span(&self, class: SizeClass, span: PageIndex, granule: usize) -> usize {
        let central = self.central(class);
        // Until the slots are home: whoever is about to say that there is no room looks again when they are.
        let _pass = self.heap.scavenges(span);
        let Some(claim) = central.claim(&self.spans, class, span, granule) else {
            return 0;
        };
        let punch = |&(first, count): &_| self.heap.punch(span, first << GRAIN_SHIFT, count << GRAIN_SHIFT);
        let gone = rows(claim.grains).filter(punch);
        let gone = gone.fold(0, |gone, (first, count)| gone | between(first, first + count));
        let mut more = 0;
        let leaving = central.end_claim(&self.spans, (class, span), claim, gone, |grains| {
            more = grains as usize;
            self.heap.count_holes(bytes_of(grains), 0);
        });
        self.give_spans(None, class, leaving);
        more
    }
}
