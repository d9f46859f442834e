//! Is what a pointer guards changed by its user or taken by a seizer, never by both, and never twice?
//!
//! `Stake`, `Owner` and `seize` as they ship. In place of a magazine there is a stack of numbers in loom cells, one for
//! each entry, used as `object/magazine.rs` uses its own: by its top, its floor and its limit. So loom also reports a
//! seizer that touches an entry which a call of the user may still need.

use core::ptr;
use core::sync::atomic::Ordering;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, fence};
use pageheap::internals::{Owned, Owner, Stake, seize};

use super::{explore, spawn};

const KEY: usize = 64;
const OTHER: usize = 128;

/// The distance between tops, as of pointers to words.
const STEP: usize = 8;

/// The word below the entries.
const FLOOR: usize = STEP;

/// The highest entry.
const LIMIT: usize = FLOOR + 3 * STEP;

/// What lies beside the top. The first of the entries is not used, so that below the lowest floor there is something.
struct Stack {
    floor: AtomicUsize,
    limit: AtomicUsize,
    entries: [UnsafeCell<usize>; 5],
}

impl Stack {
    /// Holds 1 and 2, with room for one more.
    fn laden() -> Self {
        Self {
            floor: AtomicUsize::new(FLOOR),
            limit: AtomicUsize::new(LIMIT),
            entries: [0, 0, 1, 2, 0].map(UnsafeCell::new),
        }
    }

    fn floor(&self) -> usize {
        self.floor.load(Ordering::Relaxed)
    }

    fn set(&self, floor: usize, limit: usize) {
        self.floor.store(floor, Ordering::Relaxed);
        self.limit.store(limit, Ordering::Relaxed);
    }

    fn at(&self, entry: usize) -> usize {
        // SAFETY: loom checks that no other thread writes it at this time.
        self.entries[entry / STEP].with(|slot| unsafe { *slot })
    }

    fn put(&self, entry: usize, slot: usize) {
        // SAFETY: loom checks that no other thread accesses it at this time.
        self.entries[entry / STEP].with_mut(|place| unsafe { *place = slot });
    }

    fn slot_at(&self, top: usize) -> Option<usize> {
        (top > self.floor()).then(|| self.at(top))
    }

    fn push_at(&self, top: usize, slot: usize) -> Option<usize> {
        (top < self.limit.load(Ordering::Relaxed)).then(|| {
            self.put(top + STEP, slot);
            top + STEP
        })
    }

    /// Takes everything up to `seen`, and raises the floor to there.
    fn take(&self, seen: usize) -> Vec<usize> {
        let floor = self.floor();
        let seen = seen.max(floor);
        let slots = (floor + STEP..=seen)
            .step_by(STEP)
            .map(|entry| self.at(entry))
            .collect();
        // The word that says how far.
        self.put(seen, 0);
        self.set(seen, seen - STEP);
        slots
    }
}

struct Magazine {
    owner: Owner,
    top: Stake<u64>,
    stack: Stack,
}

// SAFETY: the cells are loom's: loom reports it if a thread accesses one at a wrong time.
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
            stack: Stack::laden(),
        };
        this.set_top(FLOOR + 2 * STEP);
        Arc::new(this)
    }

    fn set_top(&self, top: usize) {
        self.top.set(ptr::without_provenance_mut(top));
    }

    fn pop_as(&self, owner: &Owner, key: usize) -> Option<usize> {
        let top = self.top.lower();
        let slot = if owner.admits(key) {
            self.stack.slot_at(top.addr())
        } else {
            None
        };
        if slot.is_none() {
            self.top.set(top);
        }
        slot
    }

    fn pop(&self) -> Option<usize> {
        self.pop_as(&self.owner, KEY)
    }

    fn push_as(&self, key: usize, slot: usize) -> bool {
        let next = if self.owner.admits(key) {
            self.stack.push_at(self.top.get().addr(), slot)
        } else {
            None
        };
        next.map(|top| self.set_top(top)).is_some()
    }

    fn push(&self, slot: usize) -> bool {
        self.push_as(KEY, slot)
    }

    /// On the slow path: replaces what is there, if admitted. Returns that.
    fn load(&self, slot: usize) -> Option<Vec<usize>> {
        self.owner.enter(KEY).then(|| {
            let before = self.stack.take(self.top.get().addr());
            self.stack.set(FLOOR, LIMIT);
            self.stack.put(FLOOR + STEP, slot);
            self.set_top(FLOOR + STEP);
            self.owner.leave();
            before
        })
    }

    fn empty(&self) -> Vec<usize> {
        self.stack.take(self.top.seen().addr())
    }
}

/// Empties the magazine if it is not in use.
fn seize_it(magazine: &Magazine) -> Vec<usize> {
    let mut found = Vec::new();
    assert!(seize(
        |visit: &mut dyn FnMut(&Magazine)| visit(magazine),
        |one| found.extend(one.empty()),
        |_| ()
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
fn a_slot_that_is_pushed_meanwhile_is_not_lost() {
    explore(4, || {
        let magazine = Magazine::laden();
        let other = magazine.clone();
        let thread = spawn(move || {
            let mut own: Vec<usize> = [3].into_iter().filter(|&slot| !other.push(slot)).collect();
            own.extend(other.pop());
            own
        });
        let found = [seize_it(&magazine), seize_it(&magazine)].concat();
        let own = thread.join().unwrap();
        agree(found.into_iter().chain(own).chain(magazine.empty()), &[1, 2, 3]);
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

/// A slot lies on one that was pushed back, so the top that covers it was lowered in between.
#[test]
fn what_lies_under_a_lowered_top_is_published_with_it() {
    explore(3, || {
        let magazine = Magazine::laden();
        let other = magazine.clone();
        let thread = spawn(move || {
            let mut own: Vec<usize> = other.pop().into_iter().collect();
            own.retain(|&slot| !other.push(slot));
            own.extend([3].into_iter().filter(|&slot| !other.push(slot)));
            own.extend(other.pop());
            own
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
                // In the middle of slow work, which holds the stack.
                other.stack.put(FLOOR + 2 * STEP, 2);
                assert!(other.pop_as(&other.owner, OTHER).is_none() && !other.push_as(OTHER, 4));
                assert_eq!(other.top.get().addr(), FLOOR + 2 * STEP);
                other.stack.put(FLOOR + 2 * STEP, 2);
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
            let pops = other
                .magazines
                .iter()
                .map(|magazine| magazine.pop_as(&other.owner, KEY));
            let popped: Vec<usize> = pops.flatten().collect();
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
            },
            |_| ()
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
    /// The user has no fence after it has lowered the top.
    Light,
    /// The lowered top does not publish what was pushed before.
    Before,
    /// The seizer has no fence.
    Heavy,
    /// The user asks whether it is admitted before it lowers the top.
    Asks,
    /// The user reads the floor before it asks.
    Floor,
    /// The seizer writes the top.
    Top,
    /// The seizer takes what it sees at a second look, and raises the floor to what it saw at the first.
    Twice,
    /// The seizer takes the memory, too.
    Memory,
}

/// A copy of the protocol, with one thing wrong.
struct Copied {
    key: AtomicUsize,
    top: AtomicUsize,
    stack: Stack,
    wrong: Wrong,
}

// SAFETY: as of `Magazine`.
unsafe impl Sync for Copied {}
// SAFETY: as above.
unsafe impl Send for Copied {}

impl Copied {
    fn is_admitted(&self) -> bool {
        self.key.load(Ordering::Acquire) == KEY
    }

    fn fence(&self, wrong: Wrong) {
        if self.wrong != wrong {
            fence(Ordering::SeqCst);
        }
    }

    fn push(&self, slot: usize) -> bool {
        let top = self.top.load(Ordering::Relaxed);
        let next = if self.is_admitted() {
            self.stack.push_at(top, slot)
        } else {
            None
        };
        next.map(|top| self.top.store(top, Ordering::Release)).is_some()
    }

    fn pop(&self) -> Option<usize> {
        let asked = self.wrong == Wrong::Asks && self.is_admitted();
        let top = self.top.load(Ordering::Relaxed);
        let publishes = if self.wrong == Wrong::Before {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        self.top.store(top - STEP, publishes);
        self.fence(Wrong::Light);
        let floor = self.stack.floor();
        let slot = match asked || self.is_admitted() {
            true if self.wrong == Wrong::Floor => (top > floor).then(|| self.stack.at(top)),
            true => self.stack.slot_at(top),
            false => None,
        };
        if slot.is_none() {
            self.top.store(top, Ordering::Release);
        }
        slot
    }

    fn seize(&self) -> Vec<usize> {
        self.key.store(3, Ordering::Relaxed);
        self.fence(Wrong::Heavy);
        let seen = self.top.load(Ordering::Acquire);
        let found = if self.wrong == Wrong::Twice {
            let found = self.stack.take(self.top.load(Ordering::Acquire));
            self.stack.set(seen, seen);
            found
        } else {
            self.stack.take(seen)
        };
        if self.wrong == Wrong::Top {
            self.top.store(0, Ordering::Relaxed);
            self.stack.set(FLOOR, LIMIT);
        }
        if self.wrong == Wrong::Memory && seen < LIMIT {
            self.stack.put(seen + STEP, 0);
        }
        self.key.store(KEY, Ordering::Release);
        found
    }
}

/// The user pops; before that, it may pop, push that back, and push 3.
fn one_works_and_one_seizes(pushes: bool, wrong: Wrong) {
    explore(3, move || {
        let magazine = Arc::new(Copied {
            key: AtomicUsize::new(KEY),
            top: AtomicUsize::new(FLOOR + 2 * STEP),
            stack: Stack::laden(),
            wrong,
        });
        let other = magazine.clone();
        let thread = spawn(move || {
            let mut own: Vec<usize> = Vec::new();
            if pushes {
                own.extend(other.pop());
                own.push(3);
                own.retain(|&slot| !other.push(slot));
            }
            own.extend(other.pop());
            own
        });
        let found = magazine.seize();
        let own = thread.join().unwrap();
        let left = magazine.stack.take(magazine.top.load(Ordering::Relaxed));
        let all: &[usize] = if pushes { &[1, 2, 3] } else { &[1, 2] };
        agree(found.into_iter().chain(own).chain(left), all);
    });
}

#[test]
fn the_copy_holds() {
    one_works_and_one_seizes(false, Wrong::Nothing);
    one_works_and_one_seizes(true, Wrong::Nothing);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_users_fence_it_fails() {
    one_works_and_one_seizes(false, Wrong::Light);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn with_a_lowered_top_that_publishes_nothing_it_fails() {
    one_works_and_one_seizes(true, Wrong::Before);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_seizers_fence_it_fails() {
    one_works_and_one_seizes(false, Wrong::Heavy);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn where_the_user_asks_first_it_fails() {
    one_works_and_one_seizes(false, Wrong::Asks);
}

/// ```text
///   user                      seizer
///   old := top, floor
///                             seizes, takes all, lets go
///   top := old - 1, admitted: takes the slot at `old`, which is the seizer's
/// ```
#[test]
#[should_panic(expected = "a slot twice, or not at all")]
fn where_the_user_reads_the_floor_first_it_fails() {
    one_works_and_one_seizes(false, Wrong::Floor);
}

#[test]
#[should_panic(expected = "a slot twice, or not at all")]
fn where_who_seizes_writes_the_top_it_fails() {
    one_works_and_one_seizes(false, Wrong::Top);
}

/// The user, on its way to be refused, has lowered the top at one of the two looks.
#[test]
#[should_panic(expected = "a slot twice, or not at all")]
fn where_who_seizes_looks_at_the_top_twice_it_fails() {
    one_works_and_one_seizes(false, Wrong::Twice);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn where_who_seizes_takes_the_memory_it_fails() {
    one_works_and_one_seizes(true, Wrong::Memory);
}
