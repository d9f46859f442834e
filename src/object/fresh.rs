//! New spans: where the slots come from that no magazine, store or span has.
//!
//! ```text
//!   wanted: 126 slots of 2 KiB      run ─▶ 8 slots   run ─▶ 8   run ─▶ 8   run ─▶ 8      64 KiB, 32 slots, in order
//!   wanted: 126 slots of 64 B       run ─▶ 126 slots, 2 left                             one span has enough
//! ```
//!
//! A span is as long as its slots need in order to waste little (`size_class.rs`): 8 slots of 2 KiB. Who needs a batch
//! of these gets them from several spans at once. Span by span, each 8 took the class's lock in vain, two walks over
//! the store's lanes and a refill: 22 ns a slot instead of 14 (`docs/measurements.md`, "several new spans at a time").
//!
//! Cost: the page heap's, some 50 ns for a span, and a few instructions for each slot.

#![forbid(unsafe_code)]

use crate::source::Source;
use crate::units::{PageCount, PageRun};

use super::Objects;
use super::rack::Rack;
use super::size_class::SizeClass;

/// The most new spans that slots are taken from at once, and their bytes: these count as backed, used or not.
const FRESH_SPANS: usize = 4;
const FRESH_BYTES: usize = 64 << 10;

impl<S: Source + 'static> Objects<S> {
    /// Takes up to `wanted` slots of a class from a new span into a blank rack, the lowest last. Spans of slots of more
    /// than 1 KiB have few, so who wants many, as a thread does that has come a few times, gets several spans and comes
    /// less often. (For smaller slots that saves instructions, and no time: pops wait for the slots.)
    #[inline]
    pub(super) fn take_fresh(&self, cache: Option<usize>, class: SizeClass, wanted: u32, rack: &mut Rack) {
        let Some(run) = self.new_span(cache, class) else { return };
        if class.is_flagged() {
            self.take_further(cache, class, wanted, rack);
        }
        let left = wanted - rack.len();
        self.central(class).take_fresh(&self.spans, class, run, left, rack);
    }

    /// Takes slots from further new spans, if memory is not scarce, and leaves a span's to be taken.
    fn take_further(&self, cache: Option<usize>, class: SizeClass, wanted: u32, rack: &mut Rack) {
        let several = wanted.min((FRESH_BYTES / class.bytes()) as u32) / class.slots();
        let is_scarce = || {
            let pages = PageCount((several as usize - 1) * class.pages());
            self.is_over() || self.heap.is_stuck(pages)
        };
        if several > 1 && !is_scarce() {
            let mut runs = [None; FRESH_SPANS - 1];
            let fresh = (1..several).map_while(|_| self.new_span(cache, class));
            runs.iter_mut().zip(fresh).for_each(|(place, run)| *place = Some(run));
            for run in runs.into_iter().flatten().rev() {
                let left = wanted - rack.len();
                self.central(class).take_fresh(&self.spans, class, run, left, rack);
            }
        }
    }

    /// A run for a span of a class, with its entries in the table. None if there is no memory.
    fn new_span(&self, cache: Option<usize>, class: SizeClass) -> Option<PageRun> {
        let run = self.pages(cache, PageCount(class.pages()))?.run;
        self.covers(cache, run)?;
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// But not of smaller slots, nor of longer spans, nor above the soft limit, nor at the limit.
    #[test]
    fn who_wants_a_batch_gets_slots_of_several_new_spans_in_order() {
        for (size, one, several) in [(896, 9, 9), (2048, 8, 32), (4096, 8, 16), (8192, 8, 8)] {
            let objects = Objects::for_test(16 << 20, 64, false);
            let (own, class) = (objects.shared(), SizeClass::of(size, 8).unwrap());
            let come = |wanted| {
                let mut rack = objects.blank(&own, class.batch()).unwrap();
                objects.take_fresh(None, class, wanted, &mut rack);
                assert!(rack.slots().is_sorted_by(|one, next| one > next), "{rack:?}");
                rack.len()
            };
            assert_eq!([4, class.batch(), one + 1].map(come), [4, several, one], "{size}");
            objects.heap.set_soft_limit(PageCount(0));
            assert_eq!(come(class.batch()), one, "{size}");
            objects.heap.set_soft_limit(PageCount(usize::MAX));
            assert_eq!(come(class.batch()), several, "{size}");
            objects.heap.set_limit(objects.heap.grown());
            assert_eq!(come(class.batch()), one, "{size}");
        }
    }
}
