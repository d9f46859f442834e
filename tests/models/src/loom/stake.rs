//! Is what a pointer guards changed by its user or taken by a seizer, never by both, and never twice?
//!
//! `Stake`, `Owner` and `seize` as they ship. In place of a magazine there is a pile of numbers in a loom cell, used
//! as `object/magazine.rs` uses its own: by its top, and by a floor and a limit that show whether the top is stale.

use core::ptr;
use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, fence};
use pageheap::internals::{Owned, Owner, Stake, seize};

use super::{explore, spawn};

const KEY: usize = 64;
const OTHER: usize = 128;
const NOWHERE: usize = usize::MAX;

/// The distance between tops, as of pointers to words.
const STEP: usize = 8;

/// What lies beside the top.
struct Pile {
    floor: usize,
    limit: usize,
    entries: [usize; 4],
}

impl Pile {
    /// Holds 1 and 2, with room for one more.
    const LADEN: Self = Self {
        floor: 0,
        limit: 3 * STEP,
        entries: [0, 1, 2, 0],
    };

    fn slot_at(&self, top: usize) -> Option<usize> {
        (top > self.floor).then(|| self.entries[top / STEP])
    }

    fn push_at(&mut self, top: usize, slot: usize) -> Option<usize> {
        let next = top + STEP;
        (next <= self.limit).then(|| {
            self.entries[next / STEP] = slot;
            next
        })
    }

    /// Takes everything below `top`, which is stale from here on.
    fn take(&mut self, top: usize) -> Vec<usize> {
        let slots = (1..4).filter(|entry| (self.floor..top).contains(&((entry - 1) * STEP)));
        let slots = slots.map(|entry| self.entries[entry]).collect();
        (self.floor, self.limit) = (NOWHERE, 0);
        slots
    }
}

struct Magazine {
    owner: Owner,
    top: Stake<u64>,
    pile: UnsafeCell<Pile>,
}

// SAFETY: the cell is loom's: loom reports it if a thread accesses it at a wrong time.
unsafe impl Sync for Magazine {}
// SAFETY: as above.
unsafe impl Send for Magazine {}

impl Owned for Magazine {
    fn owner(&self) -> &Owner {
        &self.owner
    }

    fn key(&self) -> usize {
        KEY
    }
}

impl Magazine {
    fn laden() -> Arc<Self> {
        let this = Self {
            owner: Owner::new(KEY),
            top: Stake::new(),
            pile: UnsafeCell::new(Pile::LADEN),
        };
        this.top.end(ptr::without_provenance_mut(2 * STEP));
        Arc::new(this)
    }

    fn with<R>(&self, work: impl FnOnce(&mut Pile) -> R) -> R {
        // SAFETY: loom checks that no other thread does so at this time.
        self.pile.with_mut(|pile| work(unsafe { &mut *pile }))
    }

    /// Changes the pile on the fast path.
    fn change<R>(&self, key: usize, work: impl FnOnce(&mut Pile, usize) -> Option<(R, usize)>) -> Option<R> {
        let top = self.top.begin();
        let changed = if self.owner.admits(key) {
            self.with(|pile| work(pile, top.addr()))
        } else {
            None
        };
        let (result, now) = changed.map_or((None, top), |(result, now)| {
            (Some(result), ptr::without_provenance_mut(now))
        });
        self.top.end(now);
        result
    }

    fn pop(&self) -> Option<usize> {
        self.change(KEY, |pile, top| pile.slot_at(top).map(|slot| (slot, top - STEP)))
    }

    fn push(&self, slot: usize) -> bool {
        self.change(KEY, |pile, top| pile.push_at(top, slot).map(|top| ((), top)))
            .is_some()
    }

    /// On the slow path: replaces the pile, if admitted. Returns what was in it.
    fn load(&self, slot: usize) -> Option<Vec<usize>> {
        self.owner.enter(KEY).then(|| {
            let before = self.with(|pile| {
                let slots = self.top.get().map_or_else(Vec::new, |top| pile.take(top.addr()));
                (pile.floor, pile.limit, pile.entries[1]) = (0, 3 * STEP, slot);
                slots
            });
            self.top.end(ptr::without_provenance_mut(STEP));
            self.owner.leave();
            before
        })
    }

    fn empty(&self) -> Vec<usize> {
        self.top
            .get()
            .map_or_else(Vec::new, |top| self.with(|pile| pile.take(top.addr())))
    }
}

/// Empties the magazine if it is not in use.
fn seize_it(magazine: &Magazine) -> Vec<usize> {
    let mut found = Vec::new();
    assert!(seize(
        |visit: &mut dyn FnMut(&Magazine)| visit(magazine),
        |one| found.extend(one.empty())
    ));
    found
}

/// Checks that every number occurs once.
fn agree(parts: impl IntoIterator<Item = usize>, all: &[usize]) {
    let mut parts: Vec<usize> = parts.into_iter().collect();
    parts.sort_unstable();
    assert_eq!(parts, all, "a slot twice, or not at all");
}

#[test]
fn a_slot_is_the_users_or_the_seizers() {
    explore(4, || {
        let magazine = Magazine::laden();
        let other = magazine.clone();
        let thread = spawn(move || {
            let mut own: Vec<usize> = other.pop().into_iter().collect();
            own.retain(|&slot| !other.push(slot));
            own.extend(other.pop());
            own
        });
        let found = seize_it(&magazine);
        let own = thread.join().unwrap();
        agree(found.into_iter().chain(own).chain(magazine.empty()), &[1, 2]);
    });
}

#[test]
fn of_two_seizures_each_takes_what_is_there() {
    explore(3, || {
        let magazine = Magazine::laden();
        let other = magazine.clone();
        let thread = spawn(move || other.pop());
        let found = [seize_it(&magazine), seize_it(&magazine)].concat();
        let own = thread.join().unwrap();
        agree(found.into_iter().chain(own).chain(magazine.empty()), &[1, 2]);
    });
}

#[test]
fn what_is_loaded_after_a_seizure_is_used_like_what_was_there_before() {
    explore(3, || {
        let magazine = Magazine::laden();
        let other = magazine.clone();
        let thread = spawn(move || {
            let first: Vec<usize> = other.pop().into_iter().collect();
            let mine = other.load(3);
            let kept = usize::from(mine.is_none()) * 3;
            let rest = mine
                .into_iter()
                .flatten()
                .chain(other.pop())
                .chain((kept > 0).then_some(kept));
            [first, rest.collect()].concat()
        });
        let found = seize_it(&magazine);
        let own = thread.join().unwrap();
        agree(found.into_iter().chain(own).chain(magazine.empty()), &[1, 2, 3]);
    });
}

#[test]
fn who_comes_by_another_key_changes_nothing() {
    explore(3, || {
        let magazine = Magazine::laden();
        let other = magazine.clone();
        let thread = spawn(move || {
            let entered = other.owner.enter(KEY);
            if entered {
                other.owner.stay();
                // In the middle of slow work, which holds the pile.
                other.with(|_| ());
                let none = other.change(OTHER, |_, top| Some(((), top + STEP)));
                assert!(none.is_none() && other.top.get().is_some_and(|top| top.addr() == 2 * STEP));
                other.with(|_| ());
                other.owner.go();
            }
        });
        let found = seize_it(&magazine);
        thread.join().unwrap();
        agree(found.into_iter().chain(magazine.empty()), &[1, 2]);
    });
}

/// The user is at work on one magazine while a seizer takes the other, and what lies beside both.
#[test]
fn of_two_magazines_each_is_taken_or_used() {
    struct Two {
        owner: Owner,
        magazines: [Arc<Magazine>; 2],
        spare: UnsafeCell<usize>,
    }
    // SAFETY: as of `Magazine`.
    unsafe impl Sync for Two {}
    // SAFETY: as above.
    unsafe impl Send for Two {}
    impl Owned for Two {
        fn owner(&self) -> &Owner {
            &self.owner
        }

        fn key(&self) -> usize {
            KEY
        }
    }
    impl Two {
        fn take_spare(&self) -> usize {
            // SAFETY: as of `Magazine`.
            self.spare.with_mut(|spare| unsafe { core::mem::take(&mut *spare) })
        }
    }
    explore(3, || {
        let two = Arc::new(Two {
            owner: Owner::new(KEY),
            magazines: [Magazine::laden(), Magazine::laden()],
            spare: UnsafeCell::new(9),
        });
        let other = two.clone();
        let thread = spawn(move || {
            let admitted = |magazine: &Magazine| {
                let top = magazine.top.begin();
                let slot = other
                    .owner
                    .admits(KEY)
                    .then(|| magazine.with(|pile| pile.slot_at(top.addr())));
                let slot = slot.flatten();
                let now = top.addr() - if slot.is_some() { STEP } else { 0 };
                magazine.top.end(ptr::without_provenance_mut(now));
                slot
            };
            let popped: Vec<usize> = other
                .magazines
                .iter()
                .filter_map(|magazine| admitted(magazine))
                .collect();
            let entered = other.owner.enter(KEY);
            let spare = if entered { other.take_spare() } else { 0 };
            if entered {
                other.owner.leave();
            }
            (popped, spare)
        });
        let (mut found, mut spare) = (Vec::new(), 0);
        assert!(seize(
            |visit: &mut dyn FnMut(&Two)| visit(&two),
            |one| {
                spare = one.take_spare();
                one.magazines.iter().for_each(|magazine| found.extend(magazine.empty()));
            }
        ));
        let (popped, theirs) = thread.join().unwrap();
        let left = two.magazines.iter().flat_map(|magazine| magazine.empty());
        agree(found.into_iter().chain(popped).chain(left), &[1, 1, 2, 2]);
        assert_eq!(spare + theirs + two.take_spare(), 9);
    });
}

// ---- what must fail

/// What the copy does wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// The user has no fence.
    Light,
    /// The seizer has no fence.
    Heavy,
    /// The seizer writes the top, and nothing beside it.
    Top,
    /// The user checks for admission before it announces that it is at work.
    Asks,
    /// The seizer reads the top twice.
    Twice,
}

/// A copy of the protocol, with one thing wrong.
struct Copied {
    key: AtomicUsize,
    top: AtomicUsize,
    pile: UnsafeCell<Pile>,
    wrong: Wrong,
}

// SAFETY: as of `Magazine`.
unsafe impl Sync for Copied {}
// SAFETY: as above.
unsafe impl Send for Copied {}

impl Copied {
    fn with<R>(&self, work: impl FnOnce(&mut Pile) -> R) -> R {
        // SAFETY: as of `Magazine`.
        self.pile.with_mut(|pile| work(unsafe { &mut *pile }))
    }

    fn pop(&self) -> Option<usize> {
        let asked = self.wrong == Wrong::Asks && self.key.load(Ordering::Acquire) == KEY;
        let top = self.top.load(Ordering::Relaxed);
        self.top.store(top | 1, Ordering::Relaxed);
        if self.wrong != Wrong::Light {
            fence(Ordering::SeqCst);
        }
        let admitted = asked || self.key.load(Ordering::Acquire) == KEY;
        let slot = if admitted {
            self.with(|pile| pile.slot_at(top))
        } else {
            None
        };
        self.top
            .store(if slot.is_some() { top - STEP } else { top }, Ordering::Release);
        slot
    }

    fn seize(&self) -> Vec<usize> {
        self.key.store(3, Ordering::Relaxed);
        if self.wrong != Wrong::Heavy {
            fence(Ordering::SeqCst);
        }
        let top = self.top.load(Ordering::Acquire);
        let mut found = Vec::new();
        if top & 1 == 0 {
            let top = if self.wrong == Wrong::Twice {
                self.top.load(Ordering::Acquire)
            } else {
                top
            };
            found = self.with(|pile| {
                let found = pile.take(top);
                if self.wrong == Wrong::Top {
                    (pile.floor, pile.limit) = (0, 3 * STEP);
                }
                found
            });
            if self.wrong == Wrong::Top {
                self.top.store(0, Ordering::Relaxed);
            }
        }
        self.key.store(KEY, Ordering::Release);
        found
    }
}

fn one_pops_and_one_seizes(wrong: Wrong) {
    explore(3, move || {
        let magazine = Arc::new(Copied {
            key: AtomicUsize::new(KEY),
            top: AtomicUsize::new(2 * STEP),
            pile: UnsafeCell::new(Pile::LADEN),
            wrong,
        });
        let other = magazine.clone();
        let thread = spawn(move || other.pop());
        let found = magazine.seize();
        let own = thread.join().unwrap();
        let left = magazine.with(|pile| pile.take(magazine.top.load(Ordering::Relaxed)));
        agree(found.into_iter().chain(own).chain(left), &[1, 2]);
    });
}

#[test]
fn the_copy_holds() {
    one_pops_and_one_seizes(Wrong::Nothing);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_users_fence_it_fails() {
    one_pops_and_one_seizes(Wrong::Light);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_seizers_fence_it_fails() {
    one_pops_and_one_seizes(Wrong::Heavy);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn where_the_user_asks_first_it_fails() {
    one_pops_and_one_seizes(Wrong::Asks);
}

/// ```text
///   user                      seizer
///   old := top
///                             seizes, takes all, top := 0, lets go
///   top := BUSY, admitted: takes the slot at `old`, which is the seizer's
/// ```
#[test]
#[should_panic(expected = "a slot twice, or not at all")]
fn where_who_seizes_writes_the_top_it_fails() {
    one_pops_and_one_seizes(Wrong::Top);
}

/// The user, on its way to be turned away, announces BUSY between the two reads.
#[test]
#[should_panic(expected = "a slot twice, or not at all")]
fn where_who_seizes_looks_at_the_top_twice_it_fails() {
    one_pops_and_one_seizes(Wrong::Twice);
}
