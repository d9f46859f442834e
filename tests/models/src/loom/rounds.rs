//! Is a request refused though somebody has just put a run on its shelf that would do?
//!
//! Shipped: `Aside`, `Passes`, `Turnstile`, `Owner` and `seize`. Copied: the rounds of `object/reclaim.rs`, `at_last`
//! of `heap/grow.rs`, and what a taker and an ending thread do (`object/transfer.rs`, `object/threads.rs`). The heap is
//! a number of free runs. A run on a shelf is in a loom cell, with a count beside it that anybody may read.
//!
//! ```text
//!   taker      enters both ── takes the lot ── shelf ── leaves one ───────────────── leaves the other
//!   requester            seen ── round: nothing ───────────────── attempt: no ── seen again?
//! ```
//!
//! A look at a turnstile that has somebody inside equals the next one as long as they stay. So a taker that has let
//! the requester pass, but has not yet left what the requester compares, is not noticed.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicUsize;
use loom::thread::yield_now;
use pageheap::internals::{Owned, Owner, Turnstile, seize};
use pageheap::object::{Aside, Link, Passes};
use pageheap::{PageCount, PageIndex, PageRun};

use super::{explore, spawn};

const KEY: usize = 64;
const LENGTH: PageCount = PageCount(5);
const ROUNDS: usize = 16;

/// What is done otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Nothing: a taker leaves first what a requester compares, and then what it waits for. A requester looks for runs
    /// put aside, then whether anybody has come or gone. Who empties its own shelf announces that.
    Right,
    /// A taker first leaves what a requester waits for.
    MoverFirst,
    /// A taker does not enter what a requester compares.
    NoSecondPass,
    /// A requester asks whether anybody has come or gone, and then looks for runs put aside.
    CalmFirst,
    /// A refusal stands though somebody has come or gone.
    NoCalm,
    /// Who empties its own shelf does not announce that.
    Unannounced,
    /// Who has tried often enough does not wait until nobody is inside.
    Hasty,
}

/// A thread's structure: its shelf.
struct Desk {
    owner: Owner,
    runs: UnsafeCell<usize>,
    kept: AtomicUsize,
}

impl Owned for Desk {
    fn owner(&self) -> &Owner {
        &self.owner
    }

    fn key(&self) -> usize {
        KEY
    }
}

impl Desk {
    fn put(&self, more: usize) {
        // SAFETY: loom checks that nobody else is there.
        let runs = self.runs.with_mut(|runs| unsafe {
            *runs += more;
            *runs
        });
        self.kept.store(runs, Ordering::Relaxed);
    }

    fn take(&self) -> usize {
        self.kept.store(0, Ordering::Relaxed);
        // SAFETY: as above.
        self.runs.with_mut(|runs| unsafe { core::mem::take(&mut *runs) })
    }
}

struct World {
    how: How,
    movers: Turnstile,
    scavengers: Turnstile,
    aside: Aside,
    links: [Link; 2],
    /// Runs free in the heap.
    free: AtomicUsize,
    /// What a free writes before that: the entry of its run.
    entry: AtomicUsize,
    desk: Desk,
}

// SAFETY: the cells are loom's: loom reports it if a thread accesses one at a wrong time.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    /// So many runs are free in the heap, and so many on the shelf.
    fn new(how: How, free: usize, shelved: usize) -> Arc<Self> {
        let world = Self {
            how,
            movers: Turnstile::new(),
            scavengers: Turnstile::new(),
            aside: Aside::new(),
            links: core::array::from_fn(|_| Link::none()),
            free: AtomicUsize::new(free),
            entry: AtomicUsize::new(0),
            desk: Desk {
                owner: Owner::new(KEY),
                runs: UnsafeCell::new(0),
                kept: AtomicUsize::new(0),
            },
        };
        world.desk.put(shelved);
        Arc::new(world)
    }

    /// Two runs go in a lot.
    fn put_lot(&self) {
        for (number, link) in self.links.iter().enumerate() {
            let run = PageRun::new(PageIndex(number * LENGTH.0), LENGTH).unwrap();
            assert!(self.aside.join(run, PageCount(2 * LENGTH.0), link));
        }
    }

    fn give(&self, runs: usize) {
        self.entry.store(0, Ordering::Relaxed);
        self.free.fetch_add(runs, Ordering::AcqRel);
    }

    fn take(&self) -> bool {
        // A read-modify-write, which sees the latest: stands for a proof.
        let mut free = self.free.fetch_add(0, Ordering::AcqRel);
        while let Some(left) = free.checked_sub(1) {
            match self
                .free
                .compare_exchange(free, left, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return true,
                Err(now) => free = now,
            }
        }
        false
    }

    /// As `Objects::clear_aside`.
    fn clear(&self) {
        if self.aside.has_any() {
            self.aside.empty(|| self.movers.enter(0), |lot| self.give(lot.runs()));
        }
    }

    /// As `Objects::take_lot`, in a call of the thread's. Returns how many runs the program has got.
    fn take_lot(&self) -> usize {
        while !self.desk.owner.enter(KEY) {
            yield_now();
        }
        let (first, second) = (|| self.movers.enter(0), || self.scavengers.enter(0));
        let lot = match self.how {
            How::MoverFirst => self.shelve(|| (first(), second())),
            How::NoSecondPass => self.shelve(first),
            _ => self.shelve(|| Passes::enter(first, second)),
        };
        self.desk.owner.leave();
        usize::from(lot)
    }

    /// Takes a lot, and puts all of it but one run on the shelf. Returns whether there was one.
    fn shelve<P>(&self, enter: impl Fn() -> P) -> bool {
        let taken = self.aside.take_lot(LENGTH, LENGTH, enter);
        taken.is_some_and(|(lot, _passes)| {
            self.desk.put(lot.runs() - 1);
            true
        })
    }

    /// As `Objects::flush` of a thread's own structure, or `part`.
    fn flush(&self) {
        while !self.desk.owner.enter(KEY) {
            yield_now();
        }
        let pass = (self.how != How::Unannounced).then(|| self.movers.enter(0));
        let runs = self.desk.take();
        self.give(runs);
        drop(pass);
        self.desk.owner.leave();
    }

    /// As `Objects::reclaim`: whether all was reached, and whether anything was found.
    fn reclaim(&self) -> (bool, bool) {
        self.clear();
        let (mut missed, mut found) = (false, 0);
        let _pass = self.movers.enter(0);
        assert!(seize(
            |visit: &mut dyn FnMut(&Desk)| visit(&self.desk),
            |desk| found += desk.take(),
            |desk| missed |= desk.kept.load(Ordering::Relaxed) > 0,
        ));
        if found > 0 {
            self.give(found);
        }
        (!missed, found > 0)
    }

    /// As `PageHeap::at_last`.
    fn at_last(&self, tries: usize) -> bool {
        for _ in 0..tries {
            let seen = [self.movers.look(), self.scavengers.look()];
            self.clear();
            if self.take() {
                return true;
            }
            while [self.movers.look(), self.scavengers.look()] == seen {
                if seen[0].1 == 0 {
                    return false;
                }
                yield_now();
            }
        }
        while self.how != How::Hasty && self.movers.look().1 > 0 {
            yield_now();
        }
        self.take()
    }

    /// As `Objects::try_at_last`. `was_reached`: an earlier round has reached everything, when all runs were in use.
    fn request(&self, mut was_reached: bool) -> bool {
        for _ in 0..ROUNDS {
            let seen = self.scavengers.look();
            let (reached, found) = self.reclaim();
            if self.at_last(ROUNDS) {
                return true;
            }
            let stands = was_reached && reached && !found;
            let nobody = || self.scavengers.look() == seen || self.how == How::NoCalm;
            let is_calm = if self.how == How::CalmFirst {
                nobody() && !self.aside.has_any()
            } else {
                self.aside.is_bare_and(nobody)
            };
            if stands && is_calm {
                return false;
            }
            was_reached = reached;
            if !reached {
                yield_now();
            }
        }
        panic!("a request without end");
    }

    /// After all threads have ended: so many runs are left.
    fn finish(&self, left: usize) {
        self.clear();
        let all = self.free.load(Ordering::Relaxed) + self.desk.take();
        assert_eq!(all, left, "runs were lost or made");
    }
}

/// Two runs lie aside. One thread needs one, and keeps the other; who needs one too gets that. Perhaps a third `stays`
/// where a requester looks.
fn shelved(how: How, stays: bool) {
    explore(3, move || {
        let world = World::new(how, 0, 0);
        world.put_lot();
        let _third = stays.then(|| world.scavengers.enter(0));
        let other = Arc::clone(&world);
        let thread = spawn(move || other.request(true));
        let got = world.take_lot();
        assert!(thread.join().unwrap(), "refused for what was on a shelf");
        world.finish(2 - 1 - got);
    });
}

/// One run is free until two others lie aside, of which one thread takes one and keeps the other.
fn always_one(how: How) {
    explore(2, move || {
        let world = World::new(how, 1, 0);
        let [second, third] = [(); 2].map(|()| Arc::clone(&world));
        let second = spawn(move || {
            second.put_lot();
            usize::from(second.take())
        });
        let third = spawn(move || third.take_lot());
        assert!(world.request(true), "refused though there was always one");
        let taken = 1 + second.join().unwrap() + third.join().unwrap();
        world.finish(3 - taken);
    });
}

/// The only run is on the shelf of a thread that empties it.
fn emptied(how: How) {
    explore(2, move || {
        let world = World::new(how, 0, 1);
        let other = Arc::clone(&world);
        let thread = spawn(move || other.request(false));
        world.flush();
        assert!(thread.join().unwrap(), "refused for what was in hand");
        world.finish(0);
    });
}

/// A thread has the only run in hand, announced, while another comes and goes, which uses up the requester's one try.
fn crowded(how: How) {
    explore(3, move || {
        let world = World::new(how, 0, 0);
        let [second, third] = [(); 2].map(|()| Arc::clone(&world));
        let pass = world.movers.enter(0);
        let second = spawn(move || drop(second.movers.enter(0)));
        let third = spawn(move || third.at_last(1));
        world.give(1);
        drop(pass);
        second.join().unwrap();
        assert!(third.join().unwrap(), "refused for what was in hand");
        world.finish(0);
    });
}

#[test]
fn nobody_is_refused_for_what_is_in_hand_because_others_come_and_go() {
    crowded(How::Right);
}

#[test]
fn nobody_is_refused_for_what_a_taker_has_just_shelved() {
    shelved(How::Right, false);
}

#[test]
fn who_stays_where_a_requester_looks_does_not_hide_a_taker_that_leaves() {
    shelved(How::Right, true);
}

#[test]
fn nobody_is_refused_because_the_last_run_was_taken_when_a_lot_was_put_aside_and_taken() {
    always_one(How::Right);
}

#[test]
fn nobody_is_refused_for_what_a_thread_has_in_hand_that_empties_its_shelf() {
    emptied(How::Right);
}

/// As it once shipped: the passes were a pair, and the first one was dropped first.
#[test]
#[should_panic(expected = "refused for what was on a shelf")]
fn a_taker_that_first_leaves_what_is_waited_for_is_missed() {
    shelved(How::MoverFirst, false);
}

#[test]
#[should_panic(expected = "refused for what was on a shelf")]
fn a_taker_that_does_not_enter_twice_is_missed() {
    shelved(How::NoSecondPass, false);
}

#[test]
#[should_panic(expected = "refused for what was on a shelf")]
fn who_does_not_ask_whether_anybody_has_come_or_gone_is_refused() {
    shelved(How::NoCalm, false);
}

/// As it once shipped.
#[test]
#[should_panic(expected = "refused though there was always one")]
fn who_asks_for_calm_before_it_looks_aside_is_refused() {
    always_one(How::CalmFirst);
}

#[test]
#[should_panic(expected = "refused though there was always one")]
fn who_does_not_ask_is_refused_though_there_was_always_one() {
    always_one(How::NoCalm);
}

/// As it once shipped.
#[test]
#[should_panic(expected = "refused for what was in hand")]
fn who_empties_its_own_shelf_unannounced_is_missed() {
    emptied(How::Unannounced);
}

/// As it once shipped.
#[test]
#[should_panic(expected = "refused for what was in hand")]
fn who_tries_a_few_times_and_does_not_wait_is_refused_because_others_come_and_go() {
    crowded(How::Hasty);
}
