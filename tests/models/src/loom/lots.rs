//! Does a lot of runs that lies aside come out whole: each run once, by links that all lead to the next? And is nobody
//! refused for runs that somebody has just taken from there?
//!
//! Runs are cells that detect two owners, and their links are the shipped ones. A thread writes to a run, puts it in a
//! lot, and never touches it again; whoever takes the lot follows the links and writes to each. For the second question
//! there is a heap, and what the taker does not need goes there, as if its shelf had been emptied at once: that says
//! that a taker is waited for, not what others then find on its shelf. Variants with one thing changed must fail.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use pageheap::object::{Aside, Link};
use pageheap::{PageCount, PageIndex, PageRun};

use super::paper::{Heap, finish, heap_of_no_shards_with, run, take};
use super::world::One;
use super::{explore, spawn};

const LENGTH: usize = 5;
const RUNS: usize = 4;

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
    /// A run's link is set once it has been put.
    Late,
    /// A taker takes only the first run.
    One,
    /// A taker announces itself once it has the lot.
    Unannounced,
    /// A taker announces itself, but who finds the place empty need not see that.
    Unseen,
}

/// Runs, by their numbers; run `n` begins at page `n`.
struct World {
    place: Place,
    runs: [UnsafeCell<usize>; RUNS],
    links: [Link; RUNS],
}

// SAFETY: the cells are loom's: loom reports it if a thread accesses one at a wrong time.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    /// These runs lie aside, the last one first.
    fn new(place: Place, aside: &[usize]) -> Arc<Self> {
        let world = Self {
            place,
            runs: core::array::from_fn(|_| UnsafeCell::new(0)),
            links: core::array::from_fn(|_| Link::none()),
        };
        aside.iter().for_each(|&number| world.put(number));
        Arc::new(world)
    }

    fn shipped(aside: &[usize]) -> Arc<Self> {
        Self::new(Place::Shipped(Aside::new()), aside)
    }

    fn copied(how: How, aside: &[usize]) -> Arc<Self> {
        Self::new(Place::Copied(AtomicU64::new(0), how), aside)
    }

    fn touch(&self, number: usize) {
        // SAFETY: loom checks that nobody else is there.
        self.runs[number].with_mut(|contents| unsafe { *contents += 1 });
    }

    /// As `Objects::put_in_lot`, again and again until there is a place.
    fn put(&self, number: usize) {
        self.touch(number);
        let link = &self.links[number];
        match &self.place {
            Place::Shipped(aside) => {
                let run = PageRun::new(PageIndex(number), PageCount(LENGTH)).unwrap();
                while !aside.join(run, PageCount(LENGTH * RUNS), link) {
                    loom::thread::yield_now();
                }
            }
            Place::Copied(place, how) => {
                // How many there are is above, the first one plus one below.
                let order = if *how == How::Relaxed {
                    Ordering::Relaxed
                } else {
                    Ordering::Release
                };
                loop {
                    let word = place.load(Ordering::Relaxed);
                    let next = (word as u32 as usize).checked_sub(1).map(PageIndex);
                    if *how != How::Late {
                        link.set(next);
                    }
                    let joined = ((word >> 32) + 1) << 32 | (number + 1) as u64;
                    if place.compare_exchange(word, joined, order, Ordering::Relaxed).is_ok() {
                        if *how == How::Late {
                            link.set(next);
                        }
                        return;
                    }
                }
            }
        }
    }

    /// As `Objects::take_lot` and what its caller then does: writes to each run. Returns which ones there were.
    fn take(&self) -> Vec<usize> {
        let taken = match &self.place {
            Place::Shipped(aside) => aside
                .take_lot(PageCount(LENGTH), PageCount(LENGTH * RUNS), || ())
                .map(|(lot, ())| (lot.first().0, lot.runs())),
            Place::Copied(place, how) => self.take_copied(place, *how),
        };
        let Some((first, runs)) = taken else {
            return Vec::new();
        };
        let mut next = Some(PageIndex(first));
        let follow = (0..runs).map(|_| {
            let number = next.expect("the links lead nowhere").0;
            self.touch(number);
            next = self.links[number].get();
            number
        });
        follow.collect()
    }

    fn take_copied(&self, place: &AtomicU64, how: How) -> Option<(usize, usize)> {
        let word = place.load(Ordering::Relaxed);
        let first = (word as u32 as usize).checked_sub(1)?;
        let (left, runs) = if how == How::One {
            let next = self.links[first].get().map_or(0, |page| page.0 as u64 + 1);
            (((word >> 32) - 1) << 32 | next, 1)
        } else {
            (0, (word >> 32) as usize)
        };
        place
            .compare_exchange(word, left, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        Some((first, runs))
    }

    /// After all threads have ended: these runs, and those that lie aside, are all there are.
    fn finish(&self, taken: impl IntoIterator<Item = usize>, all: &[usize]) {
        let left = std::iter::from_fn(|| Some(self.take()).filter(|taken| !taken.is_empty()));
        let mut found: Vec<usize> = taken.into_iter().chain(left.flatten()).collect();
        found.sort_unstable();
        assert_eq!(found, all, "a run was taken twice, or by nobody");
    }
}

/// Two threads put a run each while a third takes.
fn two_put(world: &Arc<World>) {
    let [taker, other] = [(); 2].map(|()| Arc::clone(world));
    let taker = spawn(move || taker.take());
    let other = spawn(move || other.put(1));
    world.put(2);
    other.join().unwrap();
    world.finish(taker.join().unwrap(), &[0, 1, 2]);
}

/// One thread takes both runs and puts one of them back, so that it is first again and there are two again. Meanwhile
/// another puts run 3, or takes.
fn back_again(world: &Arc<World>, puts: bool) {
    let other = Arc::clone(world);
    let thread = spawn(move || {
        if puts {
            other.put(3);
            return Vec::new();
        }
        other.take()
    });
    let mut taken = world.take();
    if taken == [1] {
        taken.extend(world.take());
    }
    let mut all = vec![0, 1];
    if taken == [1, 0] {
        world.put(2);
        world.put(1);
        taken.remove(0);
        all.push(2);
    }
    all.extend(puts.then_some(3));
    taken.extend(thread.join().unwrap());
    world.finish(taken, &all);
}

/// The first pages of two runs of one page each.
const TWO: [usize; 2] = [5, 7];

/// A heap in which no page is free, but two runs lie aside, as a lot.
struct Full {
    heap: Arc<Heap<One>>,
    place: Place,
    links: [Link; 2],
}

impl Full {
    fn new(place: Place) -> Arc<Self> {
        let full = Self {
            heap: heap_of_no_shards_with::<One>(1, &[]),
            place,
            links: core::array::from_fn(|_| Link::none()),
        };
        full.links[1].set(Some(PageIndex(TWO[0])));
        match &full.place {
            Place::Shipped(aside) => {
                let put = TWO.iter().zip(&full.links);
                assert!({ put }.all(|(&page, link)| aside.join(run(page, 1), PageCount(2), link)));
            }
            Place::Copied(place, _) => place.store(2 << 32 | TWO[1] as u64, Ordering::Relaxed),
        }
        TWO.iter().for_each(|&page| full.heap.source().write_last(run(page, 1)));
        Arc::new(full)
    }

    fn give(&self, page: usize) {
        // SAFETY: the caller has taken it from the place, so it is the caller's if this model is right.
        unsafe { self.heap.free(run(page, 1)) };
    }

    /// As `Objects::clear_aside`.
    fn clear(&self) {
        let give_both = |first: usize| {
            let second = self.links[usize::from(first == TWO[1])].get();
            self.give(first);
            self.give(second.expect("there are two").0);
        };
        match &self.place {
            Place::Shipped(aside) => {
                if aside.has_any() {
                    aside.empty(|| self.heap.pass_as_a_layer(), |lot| give_both(lot.first().0));
                }
            }
            Place::Copied(place, how) => {
                let seen = if *how == How::Unseen {
                    Ordering::Relaxed
                } else {
                    Ordering::Acquire
                };
                if place.load(seen) != 0 {
                    let _pass = self.heap.pass_as_a_layer();
                    let word = place.swap(0, Ordering::AcqRel);
                    if word != 0 {
                        give_both(word as u32 as usize);
                    }
                }
            }
        }
    }

    /// Needs a page, and has no use for a lot.
    fn ask(&self) -> bool {
        self.clear();
        take(&self.heap, 1).is_some() || {
            self.clear();
            take(&self.heap, 1).is_some()
        }
    }

    /// As `Objects::take_lot`: one run is used, the other goes where it can be found.
    fn ask_for_lot(&self) -> bool {
        let enter = || self.heap.pass_as_a_layer();
        let taken = match &self.place {
            Place::Shipped(aside) => aside
                .take_lot(PageCount(1), PageCount(1), enter)
                .map(|(lot, pass)| (lot.first().0, pass)),
            Place::Copied(place, how) => {
                let order = if *how == How::Unseen {
                    Ordering::Acquire
                } else {
                    Ordering::AcqRel
                };
                let word = place.load(Ordering::Relaxed);
                let early = (*how != How::Unannounced && word != 0).then(enter);
                let is_taken = word != 0 && place.compare_exchange(word, 0, order, Ordering::Relaxed).is_ok();
                is_taken.then(|| (word as u32 as usize, early.unwrap_or_else(enter)))
            }
        };
        let Some((first, _pass)) = taken else {
            return self.ask();
        };
        let second = self.links[usize::from(first == TWO[1])].get().expect("there are two");
        self.heap.source().write_last(run(first, 1));
        self.give(second.0);
        true
    }
}

/// Two threads need a page each: one takes the lot, if it is still there.
fn nobody_is_refused(place: Place) {
    let full = Full::new(place);
    let other = Arc::clone(&full);
    let thread = spawn(move || other.ask());
    assert!(full.ask_for_lot(), "refused for what was on its way");
    assert!(thread.join().unwrap(), "refused for what was on its way");
    finish(&full.heap, 0, 0, None);
}

#[test]
fn two_threads_put_and_a_third_takes() {
    explore(2, || two_put(&World::shipped(&[0])));
}

#[test]
fn a_run_joins_others_behind_the_one_that_it_has_seen() {
    explore(3, || back_again(&World::shipped(&[0, 1]), true));
}

#[test]
fn a_lot_has_one_taker() {
    explore(3, || back_again(&World::shipped(&[0, 1]), false));
}

#[test]
fn the_copy_is_right_if_nothing_is_changed() {
    explore(2, || two_put(&World::copied(How::Whole, &[0])));
    explore(3, || back_again(&World::copied(How::Whole, &[0, 1]), true));
    explore(3, || back_again(&World::copied(How::Whole, &[0, 1]), false));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_run_put_without_a_release_is_not_handed_over() {
    explore(2, || two_put(&World::copied(How::Relaxed, &[0])));
}

#[test]
#[should_panic(expected = "the links lead nowhere")]
fn a_link_that_is_set_late_is_missed() {
    explore(2, || two_put(&World::copied(How::Late, &[0])));
}

#[test]
#[should_panic]
fn who_takes_one_run_of_several_takes_what_another_has() {
    explore(3, || back_again(&World::copied(How::One, &[0, 1]), false));
}

#[test]
fn nobody_is_refused_for_a_lot_that_was_just_taken() {
    explore(2, || nobody_is_refused(Place::Shipped(Aside::new())));
    explore(2, || nobody_is_refused(Place::Copied(AtomicU64::new(0), How::Whole)));
}

#[test]
#[should_panic(expected = "refused for what was on its way")]
fn a_taker_that_announces_itself_late_is_missed() {
    explore(2, || {
        nobody_is_refused(Place::Copied(AtomicU64::new(0), How::Unannounced))
    });
}

#[test]
#[should_panic(expected = "refused for what was on its way")]
fn a_taker_that_need_not_be_seen_is_missed() {
    explore(2, || nobody_is_refused(Place::Copied(AtomicU64::new(0), How::Unseen)));
}
