//! Lots that come back as they were, so that a word of `Aside` recurs while others are about to exchange it.
//!
//! loom tries few of these: a thread that loads a word before it exchanges it hides another's earlier load.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pageheap::object::{Aside, Length, Link, Span};
use pageheap::{PageCount, PageIndex, PageRun};
use shuttle::thread::{spawn, yield_now};

use super::explore;

const RUNS: usize = 4;

/// Runs of one page each, their entries and links, and who has each: 0 while it lies aside.
struct World {
    aside: Aside,
    entries: [Span; RUNS],
    links: [Link; RUNS],
    owners: [AtomicUsize; RUNS],
}

impl World {
    /// All runs are the first thread's.
    fn new() -> Arc<Self> {
        let world = Self {
            aside: Aside::new(),
            entries: core::array::from_fn(|_| Span::vacant()),
            links: core::array::from_fn(|_| Link::none()),
            owners: core::array::from_fn(|_| AtomicUsize::new(1)),
        };
        world
            .entries
            .iter()
            .for_each(|entry| entry.enter_large(1, Length::exactly(1)));
        Arc::new(world)
    }

    /// As `Objects::put_in_lot`, again and again until there is a place.
    fn put(&self, who: usize, page: usize) {
        let entry = &self.entries[page];
        let run = PageRun::new(PageIndex(page), PageCount(1)).unwrap();
        loop {
            assert!(entry.put_aside(Length::exactly(1)), "in use, and not");
            assert_eq!(self.owners[page].swap(0, Ordering::SeqCst), who, "another's");
            if self.aside.join(run, PageCount(RUNS), &self.links[page]) {
                return;
            }
            assert_eq!(self.owners[page].swap(who, Ordering::SeqCst), 0, "put and not put");
            entry.unshelve(Length::exactly(1).unwrap());
            yield_now();
        }
    }

    /// As `Objects::take_lot`, and then off the shelf: the runs, the last one put first.
    fn take(&self, who: usize) -> Vec<usize> {
        let Some((lot, ())) = self.aside.take_lot(PageCount(1), PageCount(RUNS), || ()) else {
            return Vec::new();
        };
        let mut next = Some(lot.first());
        let mut follow = |_| {
            let page = next.expect("the links lead nowhere").0;
            assert!(self.entries[page].is_shelved(), "in a lot, and in use");
            next = self.links[page].get();
            assert_eq!(self.owners[page].swap(who, Ordering::SeqCst), 0, "another's");
            self.entries[page].unshelve(Length::exactly(1).unwrap());
            page
        };
        (0..lot.runs()).map(&mut follow).collect()
    }

    /// Takes a lot and puts it back, so that it is as it was.
    fn take_and_put_back(&self, who: usize) {
        let taken = self.take(who);
        taken.iter().rev().for_each(|&page| self.put(who, page));
    }
}

#[test]
fn a_lot_that_comes_back_as_it_was_is_taken_once() {
    explore(20_000, || {
        let world = World::new();
        [0, 1].into_iter().for_each(|page| world.put(1, page));
        let threads = [2, 3].map(|who| {
            let world = Arc::clone(&world);
            spawn(move || [(); 2].iter().for_each(|()| world.take_and_put_back(who)))
        });
        world.put(1, 2);
        world.take_and_put_back(1);
        world.put(1, 3);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let lots = core::iter::repeat_with(|| world.take(1)).take_while(|lot| !lot.is_empty());
        let mut all: Vec<usize> = lots.flatten().collect();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3], "a run twice, or not at all");
    });
}
