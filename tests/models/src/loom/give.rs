//! While a lot goes to the heap, run by run: does anybody lose a block that already lies there again?
//!
//! Shipped: `Aside`, `Link`, `Span` and the heap. Copied: `give_lot`, `take_lot`, `put_in_lot` and `free_large`
//! (`object/transfer.rs`, `object/run.rs`). The runs of the lot are neighbours, so in the heap they join, and whoever
//! is given the pages of one or of both enters a block where an entry of the lot was.
//!
//! And is a run that comes back to where it was, with as many behind it, in one place at a time? A word of `Aside` has
//! no tag that changes each time, so a thread that has been away cannot tell.

use std::sync::Arc;

use pageheap::object::{Aside, Length, Link, Span};
use pageheap::{PageCount, PageRun};

use super::paper::{Heap, finish, heap_of_no_shards_with, run, take};
use super::world::One;
use super::{explore, spawn};

/// The first of the pages.
const FIRST: usize = 5;
const PAGES: usize = 3;

/// What is done otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Nothing.
    Right,
    /// Who gives a lot to the heap follows a link after the run has gone there.
    FollowedLate,
    /// Who gives a lot to the heap clears an entry after the run has gone there.
    ClearedLate,
    /// Who puts a run in a lot says so in its entry when it lies there.
    EnteredLate,
    /// Who puts a run in a lot sets its link before it owns the entry; another thread has freed the same block.
    Unowned,
}

struct World {
    how: How,
    heap: Arc<Heap<One>>,
    aside: Aside,
    entries: [Span; PAGES],
    links: [Link; PAGES],
}

fn length(pages: usize) -> Option<Length> {
    Length::exactly(pages)
}

impl World {
    /// So many pages in a row are blocks of one page, which lie aside; the last one comes first.
    fn new(how: How, aside: usize) -> Arc<Self> {
        let world = Self {
            how,
            heap: heap_of_no_shards_with::<One>(1, &[]),
            aside: Aside::new(),
            entries: core::array::from_fn(|_| Span::vacant()),
            links: core::array::from_fn(|_| Link::none()),
        };
        for page in FIRST..FIRST + PAGES {
            world.entry(page).enter_large(1, length(1));
        }
        (FIRST..FIRST + aside).for_each(|page| assert!(world.put(page)));
        Arc::new(world)
    }

    fn entry(&self, page: usize) -> &Span {
        &self.entries[page - FIRST]
    }

    fn link(&self, page: usize) -> &Link {
        &self.links[page - FIRST]
    }

    /// As `Objects::put_in_lot`, of a block that the caller has.
    fn put(&self, page: usize) -> bool {
        self.heap.source().write_last(run(page, 1));
        let late = self.how == How::EnteredLate;
        assert!(late || self.entry(page).put_aside(length(1)), "freed twice");
        let taken = self.aside.join(run(page, 1), PageCount(PAGES), self.link(page));
        if late && taken {
            let _ = self.entry(page).put_aside(length(1));
        } else if !taken {
            self.entry(page).unshelve(length(1).unwrap());
        }
        taken
    }

    /// As `Objects::give_lot`. A page that has been given may be another's at once.
    fn clear(&self) {
        if !self.aside.has_any() {
            return;
        }
        let give = |page| {
            // SAFETY: who freed it gave it up, if this model is right.
            unsafe { self.heap.free(run(page, 1)) };
        };
        let give_lot = |lot: pageheap::object::Lot| {
            let mut next = Some(lot.first());
            for _ in 0..lot.runs() {
                let page = next.expect("the links lead nowhere").0;
                let entry = self.entry(page);
                assert!(entry.is_shelved(), "the links lead to a block in use");
                if self.how != How::FollowedLate {
                    next = self.link(page).get();
                }
                if self.how != How::ClearedLate {
                    entry.leave();
                }
                give(page);
                if self.how == How::FollowedLate {
                    next = self.link(page).get();
                }
                if self.how == How::ClearedLate {
                    entry.leave();
                }
            }
        };
        self.aside.empty(|| self.heap.pass_as_a_layer(), give_lot);
    }

    /// As `Objects::take_lot`: the first run is a block, the others are on the thread's shelf. Returns all.
    fn take_lot(&self) -> Vec<usize> {
        let enter = || self.heap.pass_as_a_layer();
        let Some((lot, _pass)) = self.aside.take_lot(PageCount(1), PageCount(PAGES), enter) else {
            return Vec::new();
        };
        let mut next = Some(lot.first());
        let follow = |_| {
            let page = next.expect("the links lead nowhere").0;
            assert!(self.entry(page).is_shelved(), "in a lot, and in use");
            next = self.link(page).get();
            self.entry(page).unshelve(length(1).unwrap());
            self.heap.source().write_last(run(page, 1));
            page
        };
        (0..lot.runs()).map(follow).collect()
    }

    /// Takes a lot and puts it back, so that it is as it was.
    fn take_and_put_back(&self) {
        let taken = self.take_lot();
        taken.iter().rev().for_each(|&page| assert!(self.put(page), "no place"));
    }

    /// Takes pages from the heap, as a block.
    fn allocate(&self, pages: usize) -> Option<PageRun> {
        let run = take(&self.heap, pages)?;
        self.entry(run.start().0).enter_large(pages, length(pages));
        Some(run)
    }

    /// The program has the block, and frees it past the shelf.
    fn free(&self, run: PageRun) {
        let (entry, pages) = (self.entry(run.start().0), run.pages().0);
        assert!(entry.is_large(pages, length(pages)), "the block is not in the table");
        self.heap.source().write_last(run);
        assert!(entry.leave_large(length(pages)), "the block is not in the table");
        // SAFETY: allocated above, if this model is right.
        unsafe { self.heap.free(run) };
    }

    /// After all threads have ended.
    fn finish(&self, blocks: usize) {
        self.clear();
        finish(&self.heap, PAGES - blocks, 0, None);
        let vacant = self.entries.iter().filter(|entry| entry.is_vacant());
        assert_eq!(vacant.count(), PAGES - blocks, "an entry was left");
    }
}

/// While two runs go to the heap, a block is made of one of them, dropped, and put in a lot by itself.
fn one_comes_back(how: How) {
    explore(3, move || {
        let world = World::new(how, 2);
        let other = Arc::clone(&world);
        let thread = spawn(move || other.clear());
        if let Some(block) = world.allocate(1) {
            let page = block.start().0;
            assert!(
                world.entry(page).is_large(1, length(1)),
                "the block is not in the table"
            );
            assert!(world.put(page), "there are two places");
        }
        thread.join().unwrap();
        world.finish(1);
    });
}

/// While two runs go to the heap, a block is made of both.
fn both_are_joined(how: How) {
    explore(2, move || {
        let world = World::new(how, 2);
        let other = Arc::clone(&world);
        let thread = spawn(move || other.clear());
        let block = world.allocate(2).or_else(|| {
            world.clear();
            world.allocate(2)
        });
        thread.join().unwrap();
        world.free(block.expect("refused for what was on its way"));
        world.finish(1);
    });
}

/// A run is put before two others, which meanwhile are taken and put back as they were.
fn back_as_they_were(how: How) {
    explore(3, move || {
        let world = World::new(how, 2);
        let other = Arc::clone(&world);
        let thread = spawn(move || other.take_and_put_back());
        assert!(world.put(FIRST + 2), "no place");
        thread.join().unwrap();
        let mut all: Vec<usize> = core::iter::repeat_with(|| world.take_lot())
            .take_while(|lot| !lot.is_empty())
            .flatten()
            .collect();
        all.sort_unstable();
        assert_eq!(all, [FIRST, FIRST + 1, FIRST + 2], "a run twice, or not at all");
        all.into_iter().for_each(|page| world.free(run(page, 1)));
        world.finish(0);
    });
}

/// The same, where one thread takes the lot and the other empties the place.
fn taken_or_given(how: How) {
    explore(3, move || {
        let world = World::new(how, 2);
        let other = Arc::clone(&world);
        let thread = spawn(move || other.take_and_put_back());
        world.clear();
        thread.join().unwrap();
        world.finish(1);
    });
}

/// Two threads free the same block. Whoever loses has changed nothing.
fn freed_twice(how: How) {
    explore(3, move || {
        let world = World::new(how, 2);
        let other = Arc::clone(&world);
        let put = move |world: &World| {
            let (page, entry) = (FIRST + 2, world.entry(FIRST + 2));
            if how == How::Unowned {
                world.link(page).set(None);
            }
            let owns = entry.put_aside(length(1));
            assert!(!owns || world.aside.join(run(page, 1), PageCount(PAGES), world.link(page)));
            usize::from(owns)
        };
        let thread = spawn(move || put(&other));
        assert_eq!(put(&world) + thread.join().unwrap(), 1, "freed twice");
        world.finish(0);
    });
}

#[test]
fn a_block_made_of_a_run_that_was_given_stays_in_the_table() {
    one_comes_back(How::Right);
}

#[test]
fn a_block_made_of_neighbours_that_were_given_stays_in_the_table() {
    both_are_joined(How::Right);
}

#[test]
fn a_run_is_put_before_others_that_have_come_back_as_they_were() {
    back_as_they_were(How::Right);
}

#[test]
fn a_lot_that_comes_back_is_taken_or_given() {
    taken_or_given(How::Right);
}

#[test]
fn of_two_who_free_a_block_one_puts_it_in_a_lot() {
    freed_twice(How::Right);
}

#[test]
#[should_panic(expected = "the links lead nowhere")]
fn a_link_that_is_followed_late_leads_where_the_next_owner_says() {
    one_comes_back(How::FollowedLate);
}

#[test]
#[should_panic(expected = "the block is not in the table")]
fn an_entry_that_is_cleared_late_is_the_next_owners() {
    one_comes_back(How::ClearedLate);
}

#[test]
#[should_panic(expected = "the block is not in the table")]
fn an_entry_of_two_neighbours_that_is_cleared_late_is_the_next_owners() {
    both_are_joined(How::ClearedLate);
}

#[test]
#[should_panic(expected = "in a lot, and in use")]
fn a_run_that_is_entered_when_it_lies_there_may_be_a_block_again() {
    back_as_they_were(How::EnteredLate);
}

#[test]
#[should_panic(expected = "the links lead nowhere")]
fn a_link_set_by_who_does_not_own_the_run_loses_those_behind_it() {
    freed_twice(How::Unowned);
}
