//! Is a thread's structure used by its thread or emptied by another, and never both at once?
//!
//! `sync/owner.rs` as it ships. In place of the magazines there is a loom cell, which detects two users at a time, and
//! one that does not see what the last one did.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, fence};
use pageheap::internals::{Barrier, Owned, Owner, seize};

use super::{explore, spawn};

const KEY: usize = 64;
const OTHER: usize = 128;

/// A structure: its owner, and what lies in it.
struct Desk {
    owner: Owner,
    papers: UnsafeCell<usize>,
}

// SAFETY: the cell is loom's: loom reports it if a thread accesses it at a wrong time.
unsafe impl Sync for Desk {}
// SAFETY: as above.
unsafe impl Send for Desk {}

impl Owned for Desk {
    fn owner(&self) -> &Owner {
        &self.owner
    }

    fn key(&self) -> usize {
        KEY
    }
}

impl Desk {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            owner: Owner::new(KEY),
            papers: UnsafeCell::new(0),
        })
    }

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

    /// Works, if admitted.
    fn try_work(&self) -> bool {
        let entered = self.owner.enter(KEY);
        if entered {
            self.work();
            self.owner.leave();
        }
        entered
    }
}

/// Empties those desks that are not in use. Returns how many papers there were.
fn seize_all(desks: &[Arc<Desk>]) -> usize {
    let mut found = 0;
    let all = |visit: &mut dyn FnMut(&Desk)| desks.iter().for_each(|desk| visit(desk));
    assert!(seize(all, |desk| found += desk.empty(), |_| ()));
    found
}

#[test]
fn a_structure_is_used_or_emptied_but_not_both() {
    explore(4, || {
        let desk = Desk::new();
        let other = desk.clone();
        let thread = spawn(move || usize::from(other.try_work()) + usize::from(other.try_work()));
        let found = seize_all(std::slice::from_ref(&desk));
        let left = thread.join().unwrap();
        assert_eq!(found + desk.empty(), left, "papers were lost or made");
        // Afterwards its user may come back.
        assert!(desk.try_work());
    });
}

#[test]
fn who_is_at_work_and_comes_again_by_another_key_is_still_at_work() {
    explore(4, || {
        let desk = Desk::new();
        let other = desk.clone();
        let thread = spawn(move || {
            let entered = other.owner.enter(KEY);
            if entered {
                other.work();
                // The user's clock allocates, from another heap.
                other.owner.stay();
                assert!(!other.owner.enter(OTHER));
                other.work();
                other.owner.go();
            }
            2 * usize::from(entered)
        });
        let found = seize_all(std::slice::from_ref(&desk));
        assert!(found == 0 || found == 2, "emptied in the middle");
        let left = thread.join().unwrap();
        assert_eq!(found + desk.empty(), left);
    });
}

/// As a thread that has two heaps: the structure of one is asked for by the key of the other. The user is refused
/// whatever it sees, so its fence there is for nobody, and elsewhere none. A seizer that finds it away from that desk,
/// because it has turned back, still finds what it did there before.
#[test]
fn who_turned_back_without_a_fence_shows_what_he_did_before() {
    explore(4, || {
        let desk = Desk::new();
        let other = desk.clone();
        let thread = spawn(move || {
            let entered = other.try_work();
            Barrier::without_light(|| assert!(!other.owner.enter(OTHER)));
            usize::from(entered)
        });
        let found = seize_all(std::slice::from_ref(&desk));
        let left = thread.join().unwrap();
        assert_eq!(found + desk.empty(), left, "papers were lost or made");
    });
}

#[test]
fn one_who_waits_for_a_seizure_finds_what_it_left() {
    explore(3, || {
        let desk = Desk::new();
        desk.work();
        let other = desk.clone();
        let thread = spawn(move || seize_all(std::slice::from_ref(&other)));
        while !desk.owner.enter(KEY) {
            loom::thread::yield_now();
        }
        let mine = desk.empty();
        desk.owner.leave();
        assert_eq!(mine + thread.join().unwrap(), 1);
    });
}

#[test]
fn two_users_and_one_who_seizes_both() {
    explore(2, || {
        let desks = [Desk::new(), Desk::new()];
        let [one, two] = [0, 1].map(|index: usize| {
            let desk = desks[index].clone();
            spawn(move || usize::from(desk.try_work()))
        });
        let found = seize_all(&desks);
        let left = one.join().unwrap() + two.join().unwrap();
        assert_eq!(found + desks[0].empty() + desks[1].empty(), left);
    });
}

#[test]
fn two_seizures_one_after_another_by_two_threads() {
    explore(3, || {
        let desk = Desk::new();
        // Stands for the scavenger's turn.
        let turn = Arc::new(pageheap::internals::Lock::new());
        let (other, guarded) = (desk.clone(), turn.clone());
        let thread = spawn(move || {
            let _guard = guarded.lock();
            seize_all(std::slice::from_ref(&other))
        });
        let entered = usize::from(desk.try_work());
        let mine = {
            let _guard = turn.lock();
            seize_all(std::slice::from_ref(&desk))
        };
        assert_eq!(mine + thread.join().unwrap() + desk.empty(), entered);
    });
}

// ---- what must fail

/// What the copy omits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Nothing,
    /// The user's fence.
    Light,
    /// The seizer's fence.
    Heavy,
    /// The user's `stay`, before a second entry that fails.
    Stays,
}

/// A copy of the protocol, with one thing omitted.
struct Copied {
    key: AtomicUsize,
    at_work: AtomicUsize,
    stays: AtomicUsize,
    papers: UnsafeCell<usize>,
    missing: Missing,
}

// SAFETY: as of `Desk`.
unsafe impl Sync for Copied {}
// SAFETY: as above.
unsafe impl Send for Copied {}

impl Copied {
    fn enter(&self, key: usize) -> bool {
        self.at_work.store(1, Ordering::Relaxed);
        if self.missing != Missing::Light {
            fence(Ordering::SeqCst);
        }
        let ours = self.key.load(Ordering::Acquire) == key;
        if !ours {
            self.at_work
                .store(self.stays.load(Ordering::Relaxed), Ordering::Release);
        }
        ours
    }

    fn work(&self) {
        // SAFETY: loom checks that nobody else does so at this time.
        self.papers.with_mut(|papers| unsafe { *papers += 1 });
    }

    fn seize(&self) {
        self.key.store(3, Ordering::Relaxed);
        if self.missing != Missing::Heavy {
            fence(Ordering::SeqCst);
        }
        if self.at_work.load(Ordering::Acquire) == 0 {
            self.work();
        }
        self.key.store(KEY, Ordering::Release);
    }
}

fn one_works_and_one_seizes(missing: Missing) {
    explore(3, move || {
        let desk = Arc::new(Copied {
            key: AtomicUsize::new(KEY),
            at_work: AtomicUsize::new(0),
            stays: AtomicUsize::new(0),
            papers: UnsafeCell::new(0),
            missing,
        });
        let other = desk.clone();
        let thread = spawn(move || {
            if other.enter(KEY) {
                other.work();
                let stays = usize::from(missing != Missing::Stays);
                other.stays.store(stays, Ordering::Relaxed);
                assert!(!other.enter(OTHER));
                other.work();
                other.stays.store(0, Ordering::Relaxed);
                other.at_work.store(0, Ordering::Release);
            }
        });
        desk.seize();
        thread.join().unwrap();
    });
}

#[test]
fn the_copy_holds() {
    one_works_and_one_seizes(Missing::Nothing);
}

/// ```text
///   user                            seizer
///   at work := 1 (not seen yet)
///                                   key := SEIZED (not seen yet)
///   key is mine: uses it            at work is 0: empties it
/// ```
#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_users_fence_it_fails() {
    one_works_and_one_seizes(Missing::Light);
}

/// The other way round: a `membarrier` that does nothing, like one that was refused.
#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_seizers_fence_it_fails() {
    one_works_and_one_seizes(Missing::Heavy);
}

/// A nested entry fails, but the user has not announced that one may come. When it turns back it says "nobody at
/// work", and admits a seizure between the two halves of a call.
#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_word_that_he_stays_it_fails() {
    one_works_and_one_seizes(Missing::Stays);
}
