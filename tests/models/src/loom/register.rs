//! Does a thread's structure have one user at a time, from thread to thread, while the scavenger empties those of
//! sleeping threads and vacant ones?
//!
//! `object/register.rs` and `sync/owner.rs` as they ship, used as the object layer uses them: `enlist` and `leave`
//! (`object/threads.rs`), `seize_threads`, `empty_vacant` and `empty_vacant_by_one` (`object/keeper.rs`). In place of
//! the magazines there is a loom cell, which detects two users at a time, and one that does not see what the last one
//! did.

use std::ptr::NonNull;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use pageheap::internals::{Owned, Owner, seize};
use pageheap::object::{Caller, Listed, Listing, Register};

use super::{explore, spawn};

const KEY: usize = 64;

/// A thread's structure: its owner, its place, and what lies in it.
struct Desk {
    owner: Owner,
    listing: Listing<Desk>,
    papers: UnsafeCell<usize>,
}

impl Owned for Desk {
    fn owner(&self) -> &Owner {
        &self.owner
    }

    fn key(&self) -> usize {
        KEY
    }
}

impl Listed for Desk {
    fn listing(&self) -> &Listing<Self> {
        &self.listing
    }
}

impl Desk {
    /// Adds one paper.
    fn work(&self) {
        // SAFETY: loom checks that no other thread does so at this time.
        self.papers.with_mut(|papers| unsafe { *papers += 1 });
    }

    /// Takes all papers.
    fn empty(&self) -> usize {
        // SAFETY: as above.
        self.papers.with_mut(|papers| unsafe { core::mem::take(&mut *papers) })
    }
}

/// A register, and the structures made for it, which live until all threads have ended.
struct Office {
    register: Register<Desk>,
    made: loom::sync::Mutex<Vec<NonNull<Desk>>>,
}

// SAFETY: the structures' cells are loom's: loom reports it if a thread accesses one at a wrong time.
unsafe impl Sync for Office {}
// SAFETY: as above.
unsafe impl Send for Office {}

impl Office {
    /// An office with `count` vacant structures, one paper in each.
    fn with_vacant(count: usize) -> Arc<Self> {
        let office = Arc::new(Self {
            register: Register::new(),
            made: loom::sync::Mutex::new(Vec::new()),
        });
        let desks: Vec<_> = (0..count).map(|_| office.begin()).collect();
        for desk in desks {
            office.work(desk);
            office.end(desk);
        }
        office
    }

    /// Like `enlist`.
    fn begin(&self) -> NonNull<Desk> {
        let caller = Caller::current();
        self.register.take(caller).map(|taken| taken.0).unwrap_or_else(|| {
            let desk = NonNull::from(Box::leak(Box::new(Desk {
                owner: Owner::new(KEY),
                listing: Listing::new(),
                papers: UnsafeCell::new(0),
            })));
            self.made.lock().unwrap().push(desk);
            self.register.add(desk, caller);
            desk
        })
    }

    /// Like a call of the user. Returns whether it could be done here.
    fn work(&self, desk: NonNull<Desk>) -> usize {
        // SAFETY: structures stay while the office does.
        let desk = unsafe { desk.as_ref() };
        let entered = desk.owner.enter(KEY);
        if entered {
            desk.work();
            desk.owner.leave();
        }
        entered.into()
    }

    /// Like `leave`: something stays for the next thread.
    fn end(&self, desk: NonNull<Desk>) {
        // SAFETY: as above.
        let own = unsafe { desk.as_ref() };
        while !own.owner.enter(KEY) {
            loom::thread::yield_now();
        }
        own.listing.load();
        own.owner.leave();
        self.register.give(desk);
    }

    /// A thread's life. Returns how many papers it adds.
    fn live(&self) -> usize {
        let desk = self.begin();
        let papers = self.work(desk);
        self.end(desk);
        papers
    }

    /// Like `seize_threads` and `empty_vacant`. Returns how many papers were taken.
    fn trim(&self) -> usize {
        let rounds = self.register.rounds();
        let mut papers = 0;
        rounds.go(1, |part| {
            seize(
                |visit| part.for_each_holding(visit),
                |desk: &Desk| papers += desk.empty(),
                |_| (),
            )
        });
        rounds.go(1, |part| {
            part.for_each_holding(|desk| {
                if desk.listing.unload() {
                    papers += desk.empty();
                }
            });
            true
        });
        papers
    }

    /// Like `empty_vacant_by_one`.
    fn reclaim(&self) -> usize {
        let (mut papers, mut last) = (0, None);
        while let Some(desk) = self.register.take_laden(last) {
            while !desk.owner.enter(KEY) {
                loom::thread::yield_now();
            }
            papers += desk.empty();
            desk.owner.leave();
            self.register.give(NonNull::from(desk));
            last = Some(desk);
        }
        papers
    }

    /// After all threads have ended: how many papers are left, and how many structures there are.
    fn close(&self) -> (usize, usize) {
        let (used, made) = self.register.counts();
        assert_eq!(used, 0, "somebody's, though all have gone");
        let desks = self.made.lock().unwrap();
        assert_eq!(desks.len(), made);
        // Each structure is still available.
        let vacant: Vec<_> = core::iter::from_fn(|| Some(self.register.take(Caller::current())?.0)).collect();
        assert_eq!(vacant.len(), made, "a structure was lost");
        // SAFETY: as in `work`.
        let papers = desks.iter().map(|desk| unsafe { desk.as_ref() }.empty()).sum();
        (papers, made)
    }
}

impl Drop for Office {
    fn drop(&mut self) {
        for desk in self.made.get_mut().unwrap().drain(..) {
            // SAFETY: leaked by `begin`, and no thread is left that could reach it.
            drop(unsafe { Box::from_raw(desk.as_ptr()) });
        }
    }
}

#[test]
fn a_structure_goes_from_one_thread_to_the_next() {
    explore(2, || {
        let office = Office::with_vacant(1);
        let other = office.clone();
        let thread = spawn(move || other.live());
        let mine = office.live();
        let (left, made) = {
            let theirs = thread.join().unwrap();
            let (left, made) = office.close();
            (left - theirs, made)
        };
        assert_eq!(left, 1 + mine, "papers were lost or made");
        assert!(made <= 2);
    });
}

/// A thread begins and ends while `empty` works on `vacant` vacant structures, one of which is always left for it.
fn one_lives_while(vacant: usize, empty: fn(&Office) -> usize) {
    explore(2, move || {
        let office = Office::with_vacant(vacant);
        let other = office.clone();
        let thread = spawn(move || other.live());
        let taken = empty(&office);
        let put = vacant + thread.join().unwrap();
        let (left, made) = office.close();
        assert_eq!(taken + left, put, "papers were lost or made");
        assert_eq!(made, vacant, "one was made though there was one");
    });
}

/// The holder of the register's lock delays other threads, but denies them no structure.
#[test]
fn a_thread_begins_and_ends_while_structures_are_trimmed() {
    one_lives_while(1, Office::trim);
}

/// Structures are taken one at a time.
#[test]
fn a_thread_begins_and_ends_while_another_runs_out_of_memory() {
    one_lives_while(2, Office::reclaim);
}

/// What one thread cannot empty, the other does, or the next attempt finds it.
#[test]
fn what_is_left_while_one_trims_and_one_reclaims_is_found_again() {
    explore(2, || {
        let office = Office::with_vacant(1);
        let other = office.clone();
        let thread = spawn(move || other.trim());
        let taken = office.reclaim();
        let taken = taken + thread.join().unwrap() + office.reclaim();
        let (left, _) = office.close();
        assert_eq!((taken, left), (1, 0), "papers were forgotten");
    });
}

#[test]
fn one_trims_and_one_reclaims_and_a_thread_lives() {
    explore(1, || {
        let office = Office::with_vacant(1);
        let [one, two] = [office.clone(), office.clone()];
        let one = spawn(move || one.trim());
        let two = spawn(move || two.live());
        let mut taken = office.reclaim();
        taken += one.join().unwrap();
        let put = 1 + two.join().unwrap();
        let (left, _) = office.close();
        assert_eq!(taken + left, put, "papers were lost or made");
    });
}
