//! The lock and the turnstile by themselves. Those who wait for the lock sleep until they are woken.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use pageheap::internals::{AtomicU64, Lock, Turnstile};

use super::{explore, spawn};

struct Guarded {
    lock: Lock,
    count: UnsafeCell<usize>,
    pause: AtomicU64,
}

// SAFETY: the cell is accessed only under the lock, and loom checks that this is enough.
unsafe impl Sync for Guarded {}
// SAFETY: as above.
unsafe impl Send for Guarded {}

impl Guarded {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            lock: Lock::with_sleepers(),
            count: UnsafeCell::new(0),
            pause: AtomicU64::new(0),
        })
    }

    fn add(&self) {
        let _guard = self.lock.lock();
        self.add_locked();
    }

    fn try_add(&self) -> bool {
        let guard = self.lock.try_lock();
        if guard.is_some() {
            self.add_locked();
        }
        guard.is_some()
    }

    fn add_locked(&self) {
        // SAFETY: under the lock.
        self.count.with_mut(|count| unsafe { *count += 1 });
        // An operation of loom's, at which the holder can be preempted.
        self.pause.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        self.count.with_mut(|count| unsafe { *count += 1 });
    }

    fn count(&self) -> usize {
        // SAFETY: all others have been joined.
        self.count.with(|count| unsafe { *count })
    }
}

#[test]
fn a_lock_has_one_holder_who_sees_what_the_last_one_wrote() {
    explore(2, || {
        let guarded = Guarded::new();
        let other = guarded.clone();
        let thread = spawn(move || {
            other.add();
            other.add();
        });
        guarded.add();
        thread.join().unwrap();
        assert_eq!(guarded.count(), 6);
    });
}

#[test]
fn who_lets_others_go_first_has_the_lock_again_and_sees_what_they_wrote() {
    explore(2, || {
        let guarded = Guarded::new();
        let other = guarded.clone();
        let thread = spawn(move || other.add());
        let guard = guarded.lock.lock();
        guarded.add_locked();
        let guard = guard.after_others();
        guarded.add_locked();
        drop(guard);
        thread.join().unwrap();
        assert_eq!(guarded.count(), 6);
    });
}

#[test]
fn who_tries_a_lock_in_vain_leaves_it_to_who_holds_it_and_who_waits() {
    explore(2, || {
        let guarded = Guarded::new();
        let (second, third) = (guarded.clone(), guarded.clone());
        let second = spawn(move || second.add());
        let third = spawn(move || usize::from(third.try_add()));
        guarded.add();
        second.join().unwrap();
        let third = third.join().unwrap();
        assert_eq!(guarded.count(), 2 * (2 + third));
    });
}

/// In a model all that have waited starve, so the lock is reserved for one that sleeps; or, if none does, given up.
#[test]
fn a_lock_reserved_for_one_who_waits_is_had_by_one_whoever_else_comes_and_whoever_gives_up() {
    explore(2, || {
        let guarded = Guarded::new();
        let (second, third) = (guarded.clone(), guarded.clone());
        let second = spawn(move || second.add());
        let third = spawn(move || {
            let guard = third.lock.lock_within(1);
            if guard.is_some() {
                third.add_locked();
            }
            usize::from(guard.is_some())
        });
        guarded.add();
        guarded.add();
        second.join().unwrap();
        let third = third.join().unwrap();
        assert_eq!(guarded.count(), 2 * (3 + third));
        assert!(guarded.lock.try_lock().is_some(), "left held");
    });
}

#[test]
fn who_tries_a_lock_gets_it_or_not_but_never_shares_it() {
    explore(4, || {
        let guarded = Guarded::new();
        let other = guarded.clone();
        // Twice: failing to get a lock must leave it to its holder.
        let thread = spawn(move || usize::from(other.try_add()) + usize::from(other.try_add()));
        let mine = usize::from(guarded.try_add());
        let theirs = thread.join().unwrap();
        assert!(mine + theirs >= 1);
        assert_eq!(guarded.count(), 2 * (mine + theirs));
        assert!(guarded.lock.try_lock().is_some(), "left unlocked");
    });
}

#[test]
fn between_two_equal_calms_all_is_seen_or_nothing() {
    explore(4, || {
        let shared = Arc::new((<Turnstile>::new(), AtomicU64::new(0), AtomicU64::new(0)));
        let other = shared.clone();
        let thread = spawn(move || {
            let (turnstile, first, second) = &*other;
            let _pass = turnstile.enter(0);
            first.store(1, Ordering::Release);
            second.store(1, Ordering::Release);
        });
        let (turnstile, first, second) = &*shared;
        let before = turnstile.calm();
        let seen = first.load(Ordering::Acquire) + second.load(Ordering::Acquire);
        if before.is_some() && before == turnstile.calm() {
            assert!(seen == 0 || seen == 2, "a calm showed half of what was done inside");
        }
        thread.join().unwrap();
        assert!(turnstile.calm().is_some());
    });
}

#[test]
fn a_pass_in_one_stripe_and_one_in_another_are_both_counted() {
    explore(3, || {
        // (Under a model there is one stripe: this is about two threads inside at once.)
        let shared = Arc::new((<Turnstile>::new(), AtomicU64::new(0)));
        let pass = |shared: &(Turnstile, AtomicU64)| {
            let _pass = shared.0.enter(0);
            shared.1.fetch_add(1, Ordering::AcqRel);
        };
        let (second, third) = (shared.clone(), shared.clone());
        let second = spawn(move || pass(&second));
        let third = spawn(move || pass(&third));
        let before = shared.0.calm();
        let seen = shared.1.load(Ordering::Acquire);
        second.join().unwrap();
        third.join().unwrap();
        assert_eq!(shared.1.load(Ordering::Acquire), 2);
        assert!(
            shared
                .0
                .calm()
                .is_some_and(|calm| Some(calm) != before || before.is_none() || seen == 2)
        );
    });
}
