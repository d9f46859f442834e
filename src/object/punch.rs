//! Punching holes: memory between the live blocks of a span goes back to the source (`holes.rs`).
//!
//! ```text
//!   home ──claim──▶ out, nobody's ──release──▶ not backed ──note the holes──▶ home
//! ```
//!
//! The slots that reach into the memory to be released are taken out of the span, as by an allocating thread, and put
//! back home afterwards. Meanwhile they count as out: that sentence is the safety proof, as it is for runs of free
//! pages (`heap/scan.rs`). The holes that they reach into are held with them.
//!
//! No lock that an allocation waits for is held over the system call, and one span is in hand at a time. In a heap
//! that cannot grow this is never the only span of its class with room, so that an allocation finds another. (Of two
//! concurrent allocations one may fail, as where pages are in hand: `heap/grow.rs`.) A check of the heap waits for the
//! scavenger's turn, and so finds no slots in hand (`check.rs`), except those of threads that punch without the turn:
//! `scavenge`, which waits for nobody, assists, and a `release` that could not get the turn in time, until it is free.
//!
//! **When**: after all free pages have gone, if more was to go: on request ([`release`](Objects::release)), when the
//! program is silent, and when the heap is over its soft limit. From the top of the heap downwards, a part at a time,
//! so that every span gets its turn.
//!
//! The heap of pages counts holes as not backed. New ones are counted under the class lock, so before anybody can end
//! them. A thread that ends holes tells the heap before anybody gets the slots, or the pages. It does so after it has
//! released the lock, because it may then have to assist.
//!
//! Worked: one thread, 40 MiB live under a soft limit of 64, in blocks of 1.5 to 30 KiB whose lengths change, freed at
//! random. It had up to 90 MiB resident, and has 65.
//!
//! Cost: 2 ns for each page looked at, 6 for a chunk of free pages, and a system call for each row of grains; when
//! slots are taken out of a span that has holes, some nanoseconds for each slot that is out.

#![forbid(unsafe_code)]

use crate::source::Source;
use crate::sync::Ordering;
use crate::units::{PageCount, PageIndex};

use super::Objects;
use super::holes::{GRAIN_SHIFT, MAX_SPAN_GRAINS, PAGE_GRAINS, between, bytes_of, rows};
use super::size_class::SizeClass;

/// What has been done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Punched {
    /// Grains released that were not holes before.
    pub gone: usize,
    /// Pages looked at. A free chunk that is passed over counts as one.
    pub looked: usize,
    /// System calls, and those that were refused.
    pub calls: usize,
    pub refusals: usize,
}

impl Punched {
    fn add(&mut self, more: Self) {
        self.gone += more.gone;
        self.looked += more.looked;
        self.calls += more.calls;
        self.refusals += more.refusals;
    }
}

impl<S: Source + 'static> Objects<S> {
    /// Tells the heap of holes that ended because slots were taken. The caller may then have to assist, as where pages
    /// are taken, so it must hold no class lock.
    #[inline]
    pub(super) fn tell_filled(&self, grains: u32) {
        if grains > 0 {
            self.heap.count_holes(0, bytes_of(grains));
            self.heap.assist_above_aim(1);
        }
    }

    /// The same for a dissolved span, before its pages are freed.
    #[inline]
    pub(super) fn tell_left(&self, class: SizeClass, span: PageIndex) {
        let bytes = self.spans.holes_of(class, span);
        if bytes > 0 {
            self.heap.count_holes(0, bytes);
        }
    }

    /// Punches holes for a caller that wanted `wanted` pages released and could release only `released`. Returns how
    /// many have gone, holes included. Nothing is in hand while `between` runs, between two spans.
    pub(super) fn punch_for(&self, wanted: PageCount, released: PageCount, mut between: impl FnMut()) -> PageCount {
        let more = wanted.0.saturating_sub(released.0);
        let punched = self.punch_some(more, |_| {
            between();
            true
        });
        PageCount(released.0 + punched)
    }

    /// Punches holes of `wanted` pages in all, from where it last stopped towards the bottom of the heap, then from
    /// the top, as long as `is_little` accepts what has been done. Returns how many pages have gone.
    pub(super) fn punch_some(&self, wanted: usize, mut is_little: impl FnMut(&Punched) -> bool) -> usize {
        if wanted == 0 {
            return 0;
        }
        let (wanted, mut all) = (wanted.saturating_mul(PAGE_GRAINS), Punched::default());
        let mut go_on = |more: Punched| {
            all.add(more);
            all.gone < wanted && is_little(&all)
        };
        self.heap.timed(|| {
            // Relaxed, twice: of two concurrent callers, one may look at pages again, or leave them to the next call.
            let mut end = self.spans.punched.load(Ordering::Relaxed);
            end = self.punch_below(end, &mut go_on);
            if end == 0 && go_on(Punched::default()) {
                end = self.punch_below(usize::MAX, go_on);
            }
            self.spans.punched.store(end, Ordering::Relaxed);
        });
        all.gone / PAGE_GRAINS
    }

    /// Punches holes below page `end`, reporting each step to `go_on`. Returns the page below which it has not looked.
    pub(super) fn punch_below(&self, end: usize, mut go_on: impl FnMut(Punched) -> bool) -> usize {
        if S::COMMITS || self.spans.granule > MAX_SPAN_GRAINS {
            return 0;
        }
        let mut end = end.min(self.spans.covered()).min(self.heap.grown().0);
        let mut goes_on = true;
        while end > 0 && goes_on {
            // A heap that once had a very long block may have nothing but free pages for many GiB. (A span that another
            // thread is just making there may be passed over, until the next search.)
            if let Some(begin) = self.heap.free_chunk_before(end) {
                end = begin;
                goes_on = go_on(Punched {
                    looked: 1,
                    ..Punched::default()
                });
                continue;
            }
            let tag = self.spans.entry(PageIndex(end - 1)).tag();
            let pages = tag.map_or(1, |(_, back)| end.min(1 + back));
            end -= pages;
            let class = tag.map(|(class, _)| class).filter(|class| class.is_flagged());
            let mut punched = class.map_or_else(Punched::default, |class| self.punch_span(class, PageIndex(end)));
            punched.looked = pages;
            goes_on = go_on(punched);
        }
        end
    }

    /// Punches the holes a span may have, if one of the class begins there.
    fn punch_span(&self, class: SizeClass, span: PageIndex) -> Punched {
        let central = self.central(class);
        // Until the slots are home: a thread about to report failure looks again if we have come or gone meanwhile,
        // and waits for us if it waits for releases at all (`reclaim.rs`, `heap/grow.rs`).
        let _pass = self.heap.scavenges(span);
        // A thread that does not wait must find another span, if none can be made.
        let is_full = self.heap.is_stuck(PageCount(class.pages()));
        let Some(claim) = central.claim(&self.spans, class, span, is_full) else {
            return Punched::default();
        };
        let (mut gone, mut calls, mut refusals) = (0, 0, 0);
        for (first, count) in rows(claim.grains) {
            calls += 1;
            if self.heap.punch(span, first << GRAIN_SHIFT, count << GRAIN_SHIFT) {
                gone |= between(first, first + count);
            } else {
                // What was refused once is not requested again for each row.
                refusals += 1;
                break;
            }
        }
        let mut new = 0;
        let counted = |more| {
            new = more;
            self.heap.count_holes(bytes_of(more), 0);
        };
        let leaving = central.end_claim(&self.spans, class, span, (claim, gone), counted);
        self.give_spans(None, class, leaving);
        Punched {
            gone: new as usize,
            looked: 0,
            calls,
            refusals,
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::BTreeSet;

    use super::super::holes::Claim;
    use super::super::span::{Slots, Span};
    use super::*;

    /// A span, and the memory behind it.
    struct World {
        class: SizeClass,
        span: PageIndex,
        granule: usize,
        slots: Slots<'static>,
        out: BTreeSet<u32>,
        claims: [Option<Claim>; 2],
        absent: BTreeSet<usize>,
        /// Holes, as reported to the heap.
        counted: u32,
    }

    impl World {
        fn take(&mut self, wanted: u32) {
            let mut taken = std::vec::Vec::new();
            self.slots.draw(self.class, wanted, |slot| taken.push(slot));
            for slot in taken {
                assert!(self.out.insert(slot));
                let bytes = slot as usize * self.class.bytes()..(slot as usize + 1) * self.class.bytes();
                for grain in bytes.start >> GRAIN_SHIFT..=(bytes.end - 1) >> GRAIN_SHIFT {
                    let begin = self.span.0 * PAGE_GRAINS;
                    let first = ((begin + grain) / self.granule * self.granule).wrapping_sub(begin);
                    (0..self.granule).for_each(|next| {
                        self.absent.remove(&first.wrapping_add(next));
                    });
                }
            }
            self.counted -= self.slots.fill(self.class, self.span, self.granule);
        }

        fn put(&mut self, random: u32) {
            let slot = self.out.iter().nth(random as usize % self.out.len().max(1)).copied();
            if let Some(slot) = slot {
                self.out.remove(&slot);
                let entry = Span::vacant();
                entry.set_slots(self.slots);
                let mut word = entry.word_of(None, slot);
                word.take_home(self.class, 0, slot);
                word.close();
                entry.set_used(entry.used() - 1);
                self.slots = entry.slots(None);
            }
        }

        /// One of two punchers begins, or ends with `most` rows gone.
        fn punch(&mut self, who: usize, most: usize) {
            let Some(claim) = self.claims[who].take() else {
                self.claims[who] = self.slots.claim(self.class, self.span, self.granule);
                return;
            };
            let gone = rows(claim.grains).take(most);
            let gone = gone.fold(0, |all, (first, count)| all | between(first, first + count));
            self.absent.extend((0..32).filter(|grain| gone & 1 << grain != 0));
            self.counted += self.slots.end_claim(self.class, claim, gone);
        }
    }

    /// In every class, with every granule, with slots taken and freed while others are claimed.
    #[test]
    fn a_grain_is_a_hole_from_when_it_has_gone_until_a_slot_is_taken_that_reaches_it() {
        let (mut most, mut random) = (0, 0x9E37_79B9_u32);
        for class in SizeClass::all().filter(|class| class.is_flagged()) {
            let worlds = [(1, 0), (1, 5), (4, 0), (4, 3), (16, 0), (16, 5)];
            for (granule, span) in worlds.into_iter().cycle().take(60) {
                let mut world = World {
                    class,
                    span: PageIndex(span),
                    granule,
                    slots: Slots::default(),
                    out: BTreeSet::new(),
                    claims: [None; 2],
                    absent: BTreeSet::new(),
                    counted: 0,
                };
                for step in 0..60 {
                    random = random.wrapping_mul(0x915F_77F5).wrapping_add(12345);
                    let by = random >> 20;
                    match random >> 16 & 7 {
                        0..2 => world.take(1 + by % 3),
                        2..5 => world.put(by),
                        _ => world.punch(by as usize & 1, by as usize % 4),
                    }
                    let written = world.slots.holes(class);
                    let hidden = world.claims.iter().flatten().fold(0, |all, claim| all | claim.holes);
                    let absent = world.absent.iter().fold(0, |all, &grain| all | 1 << grain);
                    let drawn = std::format!(
                        "{class:?} by {granule} from {span}, step {step}: {absent:#b} are absent, {written:#b} written \
                         down and {hidden:#b} in {:?}; out are {:?}",
                        world.claims,
                        world.out
                    );
                    assert_eq!(written & !absent, 0, "{drawn}");
                    assert_eq!(absent & !(written | hidden), 0, "{drawn}");
                    assert_eq!((written | hidden).count_ones(), world.counted, "{drawn}");
                    assert_eq!(written & hidden, 0, "{drawn}");
                    most = most.max(world.counted);
                }
            }
        }
        assert!(most > 20, "{most}");
    }
}
