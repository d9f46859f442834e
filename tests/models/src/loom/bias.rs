//! Is what a biased lock protects used by one thread at a time, whichever way it comes?
//!
//! `sync/bias.rs` as it ships. What it protects is a loom cell, which detects two users at a time, and one that does
//! not see what the last one did.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, fence};
use pageheap::internals::{BiasedLock, Lock};

use super::{explore, spawn};

const ONE: usize = 64;
const OTHER: usize = 128;
const THIRD: usize = 192;

/// How often a thread takes the lock to become the one, in the first turn; in the second, twice as often.
const OFTEN: usize = 16;

struct Desk {
    lock: BiasedLock,
    papers: UnsafeCell<usize>,
}

// SAFETY: the cell is loom's: loom reports it if a thread accesses it at a wrong time.
unsafe impl Sync for Desk {}
// SAFETY: as above.
unsafe impl Send for Desk {}

impl Desk {
    /// A desk whose lock `ONE` has taken so often, and no paper.
    fn taken(times: usize) -> Arc<Self> {
        let (lock, papers) = (BiasedLock::new(), UnsafeCell::new(0));
        let desk = Arc::new(Self { lock, papers });
        desk.take(ONE, times);
        desk
    }

    /// Takes the lock so often.
    fn take(&self, me: usize, times: usize) {
        (0..times).for_each(|_| drop(self.lock.lock_often(me)));
    }

    /// Adds a paper.
    fn add(&self) {
        // SAFETY: loom checks that no other thread does so at this time.
        self.papers.with_mut(|papers| unsafe { *papers += 1 });
    }

    /// Adds one by the short way, if `me` is let in.
    fn try_add(&self, me: usize) -> bool {
        let alone = self.lock.enter(me);
        if alone.is_some() {
            self.add();
        }
        alone.is_some()
    }

    /// Adds one, by the short way or with the lock.
    fn add_somehow(&self, me: usize) {
        if !self.try_add(me) {
            let _held = self.lock.lock_often(me);
            self.add();
        }
    }

    fn add_with_lock(&self, me: usize) {
        let _held = self.lock.lock(me);
        self.add();
    }

    fn add_in_passing(&self, me: usize) {
        let _held = self.lock.visit(me);
        self.add();
    }

    /// All papers, when no other thread is left.
    fn count(&self) -> usize {
        // SAFETY: as in `add`.
        self.papers.with(|papers| unsafe { *papers })
    }
}

#[test]
fn the_one_is_at_work_or_another_is_but_never_both() {
    explore(4, || {
        let desk = Desk::taken(OFTEN);
        let other = desk.clone();
        let thread = spawn(move || other.add_somehow(OTHER));
        desk.add_somehow(ONE);
        desk.add_somehow(ONE);
        thread.join().unwrap();
        assert_eq!(desk.count(), 3);
        assert!(!desk.try_add(ONE), "another has come");
    });
}

#[test]
fn the_one_that_holds_the_lock_keeps_others_out_and_is_let_in_again() {
    explore(4, || {
        let desk = Desk::taken(OFTEN);
        let other = desk.clone();
        let thread = spawn(move || other.lock.try_visit(OTHER).map(|_held| other.add()).is_some());
        desk.add_with_lock(ONE);
        let alone = desk.try_add(ONE);
        let came = thread.join().unwrap();
        assert_eq!(desk.count(), 1 + usize::from(alone) + usize::from(came));
        assert!(alone || came, "nobody has come, and it is not let in");
    });
}

#[test]
fn two_others_come_at_once() {
    explore(2, || {
        let desk = Desk::taken(OFTEN);
        let threads = [OTHER, THIRD].map(|me| {
            let desk = desk.clone();
            spawn(move || desk.add_somehow(me))
        });
        desk.add_somehow(ONE);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(desk.count(), 3);
    });
}

#[test]
fn a_thread_becomes_the_one_while_another_comes() {
    explore(3, || {
        let desk = Desk::taken(OFTEN - 1);
        let other = desk.clone();
        let thread = spawn(move || other.add_somehow(OTHER));
        desk.add_somehow(ONE);
        desk.add_somehow(ONE);
        thread.join().unwrap();
        assert_eq!(desk.count(), 3);
    });
}

#[test]
fn a_second_one_comes_while_the_first_may_still_be_on_its_way_in() {
    explore(4, || {
        let desk = Desk::taken(OFTEN);
        let other = desk.clone();
        let thread = spawn(move || {
            other.take(OTHER, 2 * OFTEN);
            other.add_somehow(OTHER);
        });
        desk.add_somehow(ONE);
        thread.join().unwrap();
        desk.add_with_lock(THIRD);
        assert_eq!(desk.count(), 3);
    });
}

/// Both have come often enough, and are about to become the one.
#[test]
fn two_are_about_to_become_the_one() {
    explore(3, || {
        let desk = Desk::taken(OFTEN - 1);
        let other = desk.clone();
        let thread = spawn(move || {
            other.take(OTHER, 2 * OFTEN);
            other.add_somehow(OTHER);
            other.add_somehow(OTHER);
        });
        desk.add_somehow(ONE);
        desk.add_somehow(ONE);
        thread.join().unwrap();
        assert_eq!(desk.count(), 4);
    });
}

#[test]
fn the_same_thread_becomes_the_one_again() {
    explore(3, || {
        let desk = Desk::taken(OFTEN);
        let other = desk.clone();
        let thread = spawn(move || {
            other.add_with_lock(OTHER);
            other.add_with_lock(OTHER);
        });
        desk.add_somehow(ONE);
        desk.take(ONE, 2 * OFTEN);
        desk.add_somehow(ONE);
        desk.add_somehow(ONE);
        thread.join().unwrap();
        assert_eq!(desk.count(), 5);
    });
}

/// It stays barred until it has taken the lock, which it may do while the visitor comes again.
#[test]
fn the_one_is_at_work_or_a_visitor_is_and_it_remains_the_one() {
    explore(4, || {
        let desk = Desk::taken(OFTEN);
        let other = desk.clone();
        let thread = spawn(move || {
            other.add_in_passing(OTHER);
            other.add_in_passing(OTHER);
        });
        desk.add_somehow(ONE);
        desk.add_somehow(ONE);
        desk.add_somehow(ONE);
        thread.join().unwrap();
        desk.add_with_lock(ONE);
        assert!(desk.try_add(ONE), "its turn has ended");
        assert_eq!(desk.count(), 7);
    });
}

/// The second one finds it barred, and does not wait for it.
#[test]
fn two_visitors_come_at_once() {
    explore(2, || {
        let desk = Desk::taken(OFTEN);
        let threads = [OTHER, THIRD].map(|me| {
            let desk = desk.clone();
            spawn(move || desk.add_in_passing(me))
        });
        desk.add_somehow(ONE);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(desk.count(), 3);
    });
}

/// The latter finds it barred, or let in again.
#[test]
fn a_visitor_comes_and_then_one_who_ends_the_turn() {
    explore(3, || {
        let desk = Desk::taken(OFTEN);
        let other = desk.clone();
        let thread = spawn(move || {
            other.add_in_passing(OTHER);
            other.add_with_lock(THIRD);
        });
        desk.add_somehow(ONE);
        desk.add_somehow(ONE);
        thread.join().unwrap();
        assert!(!desk.try_add(ONE), "another has come");
        assert_eq!(desk.count(), 4);
    });
}

/// A thread that was stopped on its way to become the one does not, if another has come often meanwhile.
#[test]
fn who_becomes_the_one_has_come_often_with_no_other_in_between() {
    explore(3, || {
        let desk = Desk::taken(OFTEN - 1);
        let other = desk.clone();
        // Who has taken the lock often last, and how often in a row.
        let last = Arc::new(loom::sync::Mutex::new((ONE, OFTEN - 1)));
        let note = move |me| {
            let mut last = last.lock().unwrap();
            *last = (me, if last.0 == me { last.1 + 1 } else { 1 });
            last.1
        };
        let noted = note.clone();
        let thread = spawn(move || {
            let mut times = 0;
            for _ in 0..=OFTEN {
                let _held = other.lock.lock_often(OTHER);
                times = noted(OTHER);
            }
            assert!(
                other.lock.enter(OTHER).is_none() || times >= OFTEN,
                "let in after {times}"
            );
        });
        {
            let _held = desk.lock.lock_often(ONE);
            note(ONE);
        }
        thread.join().unwrap();
    });
}

// ---- what must fail

/// What the copy omits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Nothing,
    /// The one's fence.
    Light,
    /// The other's fence.
    Heavy,
    /// To wait until the one has left.
    Wait,
    /// That there is only ever one: who ends it becomes the next.
    Only,
    /// That nobody but the one lets itself in: a visitor does, by a relaxed store.
    Itself,
}

/// A copy of the protocol, with one thing omitted.
struct Copied {
    lock: Lock,
    key: AtomicUsize,
    at_work: AtomicUsize,
    papers: UnsafeCell<usize>,
    missing: Missing,
}

// SAFETY: as of `Desk`.
unsafe impl Sync for Copied {}
// SAFETY: as above.
unsafe impl Send for Copied {}

impl Copied {
    fn add(&self) {
        // SAFETY: as of `Desk`.
        self.papers.with_mut(|papers| unsafe { *papers += 1 });
    }

    fn try_add(&self, me: usize) {
        if self.key.load(Ordering::Relaxed) != me {
            return;
        }
        self.at_work.store(1, Ordering::Relaxed);
        if self.missing != Missing::Light {
            fence(Ordering::SeqCst);
        }
        if self.key.load(Ordering::Acquire) == me {
            self.add();
        }
        self.at_work.store(0, Ordering::Release);
    }

    fn add_with_lock(&self, me: usize) {
        let _guard = self.lock.lock();
        self.key.store(3, Ordering::Relaxed);
        if self.missing != Missing::Heavy {
            fence(Ordering::SeqCst);
        }
        while self.missing != Missing::Wait && self.at_work.load(Ordering::Acquire) != 0 {
            loom::thread::yield_now();
        }
        self.add();
        if self.missing == Missing::Only {
            self.key.store(me, Ordering::Relaxed);
        }
        if self.missing == Missing::Itself {
            self.key.store(ONE, Ordering::Relaxed);
        }
    }
}

fn a_copy_without(missing: Missing) {
    explore(3, move || {
        let desk = Arc::new(Copied {
            lock: Lock::new(),
            key: AtomicUsize::new(ONE),
            at_work: AtomicUsize::new(0),
            papers: UnsafeCell::new(0),
            missing,
        });
        let other = desk.clone();
        let thread = spawn(move || {
            other.add_with_lock(OTHER);
            other.try_add(OTHER);
        });
        let third = (missing == Missing::Only).then(|| {
            let desk = desk.clone();
            spawn(move || desk.add_with_lock(THIRD))
        });
        desk.try_add(ONE);
        thread.join().unwrap();
        third.into_iter().for_each(|third| third.join().unwrap());
    });
}

#[test]
fn the_copy_holds() {
    a_copy_without(Missing::Nothing);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_ones_fence_it_fails() {
    a_copy_without(Missing::Light);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_others_fence_it_fails() {
    a_copy_without(Missing::Heavy);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_waiting_it_fails() {
    a_copy_without(Missing::Wait);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn with_a_second_one_it_fails() {
    a_copy_without(Missing::Only);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn if_a_visitor_lets_the_one_in_by_a_relaxed_store_it_fails() {
    a_copy_without(Missing::Itself);
}
