//! Does a run that was put aside have one taker, and is nobody refused for what lies there, or is on its way to the
//! heap?
//!
//! The layer above is copied here: a free puts a run aside, an allocation takes one of its length or else empties
//! the place before it asks the heap, and looks there again before it gives up. The pages are cells that detect two
//! owners. Variants with one thing changed must fail.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering};
use pageheap::object::Aside;
use pageheap::{PageCount, PageRun};

use super::paper::{Heap, finish, heap_of_no_shards_with, run, take};
use super::world::One;
use super::{explore, spawn};

/// Where runs are put aside: as it ships, or a copy with one place, of which something is changed.
enum Place {
    Shipped(Aside),
    Copied(AtomicU64, How),
}

/// What the copy changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Nothing: so the copy is right.
    Whole,
    /// A run is put without a release.
    Relaxed,
    /// A taker does not look again whether the run is still there.
    Unchecked,
    /// Who empties the place announces it once the run is in hand.
    Late,
    /// Who empties the place announces it, but who finds the place empty need not see that.
    Unseen,
    /// Who finds no page does not look once more for a run that was put aside.
    Once,
}

/// A heap, and what was put aside.
struct World {
    heap: Arc<Heap<One>>,
    place: Place,
}

impl World {
    /// A heap in which no page is free, but these lie aside.
    fn new(place: Place, aside: &[(usize, usize)]) -> Arc<Self> {
        Self::with(place, &[], aside)
    }

    /// A heap in which only the pages of `free` are free, and these lie aside.
    fn with(place: Place, free: &[(usize, usize)], aside: &[(usize, usize)]) -> Arc<Self> {
        let heap = heap_of_no_shards_with::<One>(1, free);
        let world = Arc::new(Self { heap, place });
        aside.iter().for_each(|&(start, pages)| world.free(run(start, pages)));
        world
    }

    fn shipped(aside: &[(usize, usize)]) -> Arc<Self> {
        Self::new(Place::Shipped(Aside::new()), aside)
    }

    /// As `Objects::free_large`.
    fn free(&self, run: PageRun) {
        self.heap.source().write_last(run);
        let is_aside = match &self.place {
            // Runs are put at the second place first, and sought from the first one on.
            Place::Shipped(aside) => aside.put(run, 1),
            Place::Copied(place, how) => {
                let order = if *how == How::Relaxed {
                    Ordering::Relaxed
                } else {
                    Ordering::Release
                };
                let word = (run.pages().0 as u64) << 32 | run.start().0 as u64;
                place.compare_exchange(0, word, order, Ordering::Relaxed).is_ok()
            }
        };
        if !is_aside {
            // SAFETY: the caller's, if this model is right.
            unsafe { self.heap.free(run) };
        }
    }

    /// As `Objects::allocate_run`, with two of the last attempts.
    fn allocate(&self, pages: usize) -> Option<PageRun> {
        let start = match &self.place {
            Place::Shipped(aside) => aside.take(PageCount(pages), 2).map(|start| start.0),
            Place::Copied(place, how) => {
                let word = place.load(Ordering::Relaxed);
                let taken = (word >> 32) as usize == pages && {
                    if *how == How::Unchecked {
                        place.store(0, Ordering::Relaxed);
                        true
                    } else {
                        place
                            .compare_exchange(word, 0, Ordering::Acquire, Ordering::Relaxed)
                            .is_ok()
                    }
                };
                taken.then_some(word as u32 as usize)
            }
        };
        if let Some(start) = start {
            self.heap.source().write_last(run(start, pages));
            return Some(run(start, pages));
        }
        self.clear();
        take(&self.heap, pages).or_else(|| {
            self.has_any().then(|| self.clear())?;
            take(&self.heap, pages)
        })
    }

    /// As `Aside::has_any`.
    fn has_any(&self) -> bool {
        match &self.place {
            Place::Shipped(aside) => aside.has_any(),
            Place::Copied(place, how) => *how != How::Once && place.load(Ordering::Acquire) != 0,
        }
    }

    /// As `Objects::clear_aside`.
    fn clear(&self) {
        // SAFETY: who freed it gave it up, if this model is right.
        let give = |run| unsafe { self.heap.free(run) };
        match &self.place {
            Place::Shipped(aside) => {
                if aside.has_any() {
                    aside.empty(
                        || self.heap.pass_as_a_layer(),
                        |lot| give(run(lot.first().0, lot.length().0)),
                    );
                }
            }
            Place::Copied(place, how) => {
                let [seen, taken] = if *how == How::Unseen {
                    [Ordering::Relaxed, Ordering::Acquire]
                } else {
                    [Ordering::Acquire, Ordering::AcqRel]
                };
                if place.load(seen) != 0 {
                    let early = (*how != How::Late).then(|| self.heap.pass_as_a_layer());
                    let word = place.swap(0, taken);
                    let _pass = early.unwrap_or_else(|| self.heap.pass_as_a_layer());
                    if word != 0 {
                        give(run(word as u32 as usize, (word >> 32) as usize));
                    }
                }
            }
        }
    }

    /// After all threads have ended: so many pages are free.
    fn finish(&self, free: usize) {
        self.clear();
        finish(&self.heap, free, 0, None);
    }
}

/// Two threads want the one run.
fn one_taker(place: Place) {
    let world = World::new(place, &[(5, 3)]);
    let other = Arc::clone(&world);
    let thread = spawn(move || other.allocate(3).is_some());
    let taken = world.allocate(3).is_some();
    assert!(taken != thread.join().unwrap(), "the run was taken twice, or by nobody");
    world.finish(0);
}

/// Two threads need one page each, and two lie aside.
fn nobody_is_refused(place: Place) {
    let world = World::new(place, &[(5, 2)]);
    let other = Arc::clone(&world);
    let thread = spawn(move || other.allocate(1).is_some());
    assert!(world.allocate(1).is_some(), "refused for what was on its way");
    assert!(thread.join().unwrap(), "refused for what was on its way");
    world.finish(0);
}

/// One page is free, until two others have been put aside; somebody needs one.
fn always_a_page(place: Place) {
    let world = World::with(place, &[(3, 1)], &[]);
    let other = Arc::clone(&world);
    let thread = spawn(move || {
        other.free(run(5, 2));
        // As a thread that looked for runs put aside before that.
        usize::from(take(&other.heap, 1).is_some())
    });
    assert!(world.allocate(1).is_some(), "refused though there was always a page");
    let taken = 1 + thread.join().unwrap();
    world.finish(3 - taken);
}

/// What one thread puts aside another takes, and writes to.
fn handed_over(place: Place) {
    let world = World::new(place, &[]);
    let other = Arc::clone(&world);
    let thread = spawn(move || usize::from(other.allocate(3).is_some()));
    world.free(run(5, 3));
    world.finish(3 * (1 - thread.join().unwrap()));
}

#[test]
fn a_run_put_aside_has_one_taker() {
    explore(3, || one_taker(Place::Shipped(Aside::new())));
}

#[test]
fn nobody_is_refused_for_what_lies_aside_or_is_on_its_way() {
    explore(2, || nobody_is_refused(Place::Shipped(Aside::new())));
}

#[test]
fn nobody_is_refused_because_the_last_page_was_taken_when_another_was_put_aside() {
    explore(3, || always_a_page(Place::Shipped(Aside::new())));
}

#[test]
fn who_takes_a_run_sees_that_its_last_owner_is_done() {
    explore(3, || handed_over(Place::Shipped(Aside::new())));
}

#[test]
fn a_run_is_taken_or_goes_to_the_heap() {
    explore(3, || {
        let world = World::shipped(&[(5, 3)]);
        let other = Arc::clone(&world);
        let thread = spawn(move || other.clear());
        assert!(world.allocate(3).is_some(), "it is here or there");
        thread.join().unwrap();
        world.finish(0);
    });
}

#[test]
fn two_runs_of_one_length_are_put_and_taken() {
    explore(2, || {
        let world = World::shipped(&[(5, 3)]);
        let other = Arc::clone(&world);
        let thread = spawn(move || {
            let taken = other.allocate(3);
            other.free(run(70, 3));
            taken.is_some()
        });
        let first = world.allocate(3);
        let both = usize::from(thread.join().unwrap()) + usize::from(first.is_some());
        assert!(both > 0);
        world.finish(6 - 3 * both);
    });
}

fn copied(how: How) -> Place {
    Place::Copied(AtomicU64::new(0), how)
}

#[test]
fn the_copy_is_right_if_nothing_is_changed() {
    explore(3, || one_taker(copied(How::Whole)));
    explore(3, || nobody_is_refused(copied(How::Whole)));
    explore(3, || handed_over(copied(How::Whole)));
    explore(3, || always_a_page(copied(How::Whole)));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_run_put_without_a_release_is_not_handed_over() {
    explore(3, || handed_over(copied(How::Relaxed)));
}

#[test]
#[should_panic]
fn a_taker_that_does_not_look_again_takes_what_another_has() {
    explore(3, || one_taker(copied(How::Unchecked)));
}

#[test]
#[should_panic(expected = "refused for what was on its way")]
fn a_pass_that_is_entered_late_is_missed() {
    explore(3, || nobody_is_refused(copied(How::Late)));
}

#[test]
#[should_panic(expected = "refused for what was on its way")]
fn a_pass_that_need_not_be_seen_is_missed() {
    explore(3, || nobody_is_refused(copied(How::Unseen)));
}

#[test]
#[should_panic(expected = "refused though there was always a page")]
fn who_does_not_look_once_more_is_refused_though_there_was_always_a_page() {
    explore(3, || always_a_page(copied(How::Once)));
}
