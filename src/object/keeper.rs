//! What the object layer does for the scavenger: it tells what happens, empties its stores, and rings for a keeper.
//!
//! ```text
//!              1 MiB to find, a thread starts one          nothing left to do
//!   ABSENT ──────────────────────────────────▶ AWAKE ◀──────────────────────▶ ASLEEP
//!      ▲            it could not                 │         1 MiB to find: a bell
//!      ├─────────────────────────────────────────┤
//!      └────────── fork: not in the child ───────┘         OFF: nobody is wanted
//! ```
//!
//! A **keeper** is whoever calls [`Objects::tick`] again and again: the background thread of a global heap. While it is
//! absent or asleep what it might find is counted, in bytes; with the first MiB somebody has to be there. That is one
//! load of a shared word for each count, which nobody writes meanwhile. While the keeper is awake nothing is counted:
//! it looks for itself.
//!
//! **What is counted**: runs of pages that are given back, and room in magazines, all of it when it comes into being. A
//! block that is freed into a magazine is counted by nobody, for that is the quick way; but it goes where there is
//! room, which only a free makes, by the slow way (`magazine.rs`, shut racks), and behind that it starts the keeper if
//! one is wanted. Who sleeps has emptied all magazines, racks and all, *after* he said that he sleeps. So less than a
//! MiB, of what lies in magazines and of what else is free, is ever left lying. Should a thread be at work on its
//! magazines just when they are to be emptied, he does not sleep yet.
//!
//! Worked: 64 threads take a hundred blocks of 3,000 bytes each, free them, and sleep. The first block that each frees
//! opens a rack that has room for 126 such, the others go the quick way: 378 KB are counted for each thread, so the
//! third starts the keeper, if there is none.
//!
//! **Why no allocation starts him** where there are other threads: the program may be in a callback of
//! `dl_iterate_phdr`, as who symbolises a backtrace is, which holds what the making of a thread waits for as long as
//! another thread loads a library. A free in such a callback may be the one that starts him; there must be one.

#![forbid(unsafe_code)]

use core::ptr::NonNull;
use core::time::Duration;

use crate::heap::{Above, Clock};
use crate::scavenge::pressure::Notices;
use crate::source::Source;
use crate::sync::{AtomicU32, AtomicUsize, Ordering, seize, wake};
use crate::units::PageCount;

use super::register::{Listed, Registered, Rounds};
use super::size_class::{PAGE_BYTES, SizeClass};
use super::{Objects, Thread};

/// Nobody is wanted.
pub const OFF: u32 = 0;
/// At work, or about to look.
pub const AWAKE: u32 = 1;
/// There is none yet.
pub const ABSENT: u32 = 2;
/// Sleeps until it is woken.
pub const ASLEEP: u32 = 3;

/// Bytes he might find that a keeper is wanted for: 1 MiB.
const BYTES_TO_RING: usize = 1 << 20;

/// How often an allocation looks whether it may start one: a system call each.
const MOST_LOOKS: u32 = 64;

/// While holes are punched the clock is read once for so many pages that are looked at, or an eighth of as many grains
/// that go, or calls that are refused.
const BETWEEN_LOOKS: usize = 256;
const GRAIN_PAGES: usize = 8;

/// What one allocation may count for growth: by the first of a program no thread is started.
const MOST_GROWN: usize = BYTES_TO_RING / 2;

/// Threads whose structures are emptied at a time. Who begins meanwhile waits for these: 7 us each, if they are full.
pub(super) const PART: usize = 64;

/// What came of it when threads' structures were emptied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seized {
    /// It was done: the system has the fence for it.
    fenced: bool,
    /// Nobody was at work on his.
    all: bool,
    /// Pages that it freed.
    pub(super) pages: usize,
}

/// Whether somebody keeps the heap, and what he might have found since he was last seen.
#[derive(Debug)]
pub struct Keeper {
    state: AtomicU32,
    /// Bytes, while he is away.
    to_find: AtomicUsize,
    /// How often it was looked whether an allocation may start one.
    looks: AtomicU32,
    /// Whom he tells of pressure.
    pub notices: Notices,
    /// Below what he looks for the system's files: the root of all, but in tests.
    pub root: &'static str,
    /// What he is known by to who made him, 0 where there is none: himself, and what stays when he is gone.
    pub marks: [AtomicUsize; 3],
}

impl Keeper {
    /// None yet; `wanted` or not.
    pub fn new(wanted: bool, notices: Notices, root: &'static str) -> Self {
        Self {
            state: AtomicU32::new(if wanted { ABSENT } else { OFF }),
            to_find: AtomicUsize::new(0),
            looks: AtomicU32::new(0),
            notices,
            root,
            marks: [const { AtomicUsize::new(0) }; 3],
        }
    }

    /// The word that he sleeps on.
    pub fn state(&self) -> &AtomicU32 {
        &self.state
    }

    /// Whether it is to be counted what he might find.
    #[inline(always)]
    pub fn is_away(&self) -> bool {
        // Relaxed: who goes to sleep looks once more behind a heavy fence, and after a while.
        self.state.load(Ordering::Relaxed) > AWAKE
    }

    /// While he is away so many bytes more came where he might find them. Wakes him if he sleeps.
    #[cold]
    pub(super) fn count(&self, bytes: usize) {
        // Acquire: pairs with the release of `change`. The caller has seen him away; this sees the count as he left it.
        self.state.load(Ordering::Acquire);
        // Relaxed, here and below: a count, and a state that hands nothing else over.
        let to_find = self.to_find.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if to_find >= BYTES_TO_RING && self.change(ASLEEP, AWAKE) {
            wake(&self.state);
        }
    }

    /// The heap has given pages out. Where there is no keeper and somebody wants to be told of pressure, that counts
    /// too: who only grows has nothing to give back, and is the first who should know.
    #[inline]
    pub(super) fn count_grown(&self, pages: usize) {
        if self.is(ABSENT) && self.notices.are_any() {
            self.count(pages.saturating_mul(PAGE_BYTES).min(MOST_GROWN));
        }
    }

    /// What he is at.
    pub fn is(&self, state: u32) -> bool {
        // Relaxed: as in `count`; whoever sleeps on it is told by the system if it has changed.
        self.state.load(Ordering::Relaxed) == state
    }

    /// Whether there is one; not one that is just being made, which may fail.
    pub fn is_there(&self) -> bool {
        // Relaxed: a number by itself.
        self.marks[0].load(Ordering::Relaxed) != 0 && (self.is(AWAKE) || self.is(ASLEEP))
    }

    /// Whether one should be started: by somebody who holds nothing.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        // Relaxed: as in `count`.
        self.state.load(Ordering::Relaxed) == ABSENT && self.to_find.load(Ordering::Relaxed) >= BYTES_TO_RING
    }

    /// The same, and whether it is worth a look if the caller may: not for ever.
    #[inline]
    pub fn is_wanted_by_anybody(&self) -> bool {
        // Relaxed: as in `count`.
        self.is_wanted() && self.looks.fetch_add(1, Ordering::Relaxed) < MOST_LOOKS
    }

    /// From one state to another, for one thread only.
    pub fn change(&self, from: u32, to: u32) -> bool {
        // Relaxed: as in `count`. Before he goes: while he is awake nobody counts.
        if from == AWAKE {
            self.to_find.store(0, Ordering::Relaxed);
        }
        // Release: what is counted when he has gone is added to that zero; partner: the acquire of `count`.
        self.state
            .compare_exchange(from, to, Ordering::Release, Ordering::Relaxed)
            .is_ok()
    }

    /// He is to go: nobody is wanted any more.
    pub fn dismiss(&self) {
        // Relaxed: as in `count`.
        self.state.store(OFF, Ordering::Relaxed);
        wake(&self.state);
    }

    /// There is none, and none for what there was to find so far: in the child of a fork, which may end soon. Its
    /// magazines are shut then, so that what is freed into them from here on is counted.
    pub fn has_gone(&self) {
        // Relaxed: the child has one thread.
        if self.state.load(Ordering::Relaxed) != OFF {
            self.state.store(ABSENT, Ordering::Relaxed);
            self.to_find.store(0, Ordering::Relaxed);
            let [thread, stack, bytes] = &self.marks;
            thread.store(0, Ordering::Relaxed);
            // He forked himself, in a hook: so he goes on, on a stack that is not to be used for another.
            let here = (&raw const thread).addr();
            if here.wrapping_sub(stack.load(Ordering::Relaxed)) < bytes.load(Ordering::Relaxed) {
                stack.store(0, Ordering::Relaxed);
            }
        }
    }
}

impl<S: Source + 'static> Objects<S> {
    /// As [`PageHeap::tick`](crate::PageHeap::tick), for both layers.
    pub fn tick<C: Clock + ?Sized>(&self, clock: &C) -> Duration {
        self.heap.tick_with(clock, self)
    }

    /// Gives back up to `pages` free pages at once: those in store here and in caches of threads that sleep too. Waits
    /// for the scavenger's turn, which who ticks, releases or checks has, and for a fork, which need not wait for all
    /// of this; but not for ever, for each may wait for the caller; and for who empties threads' structures, who waits
    /// for nobody.
    pub fn release(&self, pages: PageCount) -> PageCount {
        let driver = self.heap.driver();
        let mut turn = driver.turn_within();
        let mut between = || driver.pass_on(&mut turn);
        let released = self.heap.timed(|| {
            self.trim(true);
            self.heap.release_with(pages, &mut between)
        });
        self.punch_for(pages, released, between)
    }

    /// As [`PageHeap::scavenge`](crate::PageHeap::scavenge), what lies in store here included.
    pub fn scavenge(&self, pages: PageCount) -> PageCount {
        self.empty_unshared();
        let released = self.heap.scavenge(pages);
        if self.heap.is_lazy() {
            return released;
        }
        self.punch_for(pages, released, || ())
    }

    /// Empties what anybody may at any time: the shared thread's structure, vacant ones, stores.
    fn empty_unshared(&self) {
        if let Some(shared) = self.try_shared() {
            self.flush(&shared);
        }
        self.empty_vacant_by_one();
        self.empty_stores(None);
    }

    /// Whoever keeps the heap.
    pub fn keeper(&self) -> &Keeper {
        &self.keeper
    }

    /// Empties the magazines and shelves of all threads that are not at work on them: whether nobody was. Nothing where
    /// the system has no fence for it.
    ///
    /// A round: a thread that begins or ends waits for it, for [`PART`] of the others at the most, and a fork for all
    /// of it.
    pub(super) fn seize_threads(&self, rounds: &Rounds<'_, Thread>) -> bool {
        // Once, before anybody is barred: the first of a process may take long.
        if !self.heap.barrier() {
            return true;
        }
        // Until the slots are back: whoever is about to say that there is no room waits for them.
        let _pass = self.heap.pass();
        rounds.begin();
        let mut all = true;
        rounds.go(PART, |part| {
            let seized = self.seize_part(part);
            all &= seized.all;
            seized.fenced
        });
        all
    }

    /// The same for a part of them, by who has the right to rounds.
    pub(super) fn seize_part(&self, part: &Registered<'_, Thread>) -> Seized {
        self.heap.count_barriers(1);
        let (mut threads, mut emptied, mut pages) = (0, 0, 0);
        part.for_each(|_| threads += 1);
        let fenced = seize(
            |visit| part.for_each(visit),
            |thread: &Thread| {
                pages += self.empty(thread, None);
                emptied += u32::from(thread.is_bare());
            },
        );
        Seized {
            fenced,
            all: emptied == threads,
            pages,
        }
    }

    /// Empties the structures that no thread uses. A round, as above.
    fn empty_vacant(&self, rounds: &Rounds<'_, Thread>) {
        let _pass = self.heap.pass();
        rounds.go(PART, |part| {
            part.for_each(|thread| {
                if thread.listing().unload() {
                    self.empty(thread, None);
                }
            });
            true
        });
    }

    /// The same, by anybody: one after the other is taken, and entered, as a thread that begins does. One that is
    /// barred is waited for, as its register is anyway: who seizes all may have found us at the door, and left it.
    pub(super) fn empty_vacant_by_one(&self) {
        let _pass = self.heap.pass();
        while let Some(thread) = self.register.take_laden() {
            self.empty(&thread.enter_at_last(self), None);
            self.register.give(NonNull::from(thread));
        }
    }
}

impl<S: Source + 'static> Above for Objects<S> {
    /// What came into magazines before it was counted is to be found before he sleeps.
    fn settles(&self) -> bool {
        self.keeper.is(ASLEEP)
    }

    /// It changes whenever slots go between threads and classes.
    fn activity(&self) -> u64 {
        let states = SizeClass::all().map(|class| self.central(class).state(&self.spans, class));
        let visits = states.map(|state| state.refills.wrapping_add(state.flushes));
        visits.fold(0, u64::wrapping_add)
    }

    /// Gives what lies in store back to the heap: what threads that have ended left, spare spans, batches that nobody
    /// has needed since this was last done, and what the shared thread keeps; of a program that is silent, or where all
    /// is to go, all batches and what sleeping threads keep too.
    /// Whether nothing is left where a block can be freed to unseen.
    fn trim(&self, all: bool) -> bool {
        let shared = self.try_shared();
        let mut bare = shared.is_some();
        if let Some(shared) = shared {
            self.flush(&shared);
        }
        let rounds = self.register.rounds();
        self.empty_vacant(&rounds);
        if all {
            bare &= self.seize_threads(&rounds);
        }
        drop(rounds);
        if all {
            self.empty_stores(None);
            return bare;
        }
        for class in SizeClass::all() {
            for _ in 0..self.central(class).unneeded() {
                let Some(batch) = self.central(class).take_batch(&self.spans, class, 0) else {
                    break;
                };
                self.give_rack(None, class, Some(batch));
            }
            self.give_spare(None, class);
        }
        false
    }

    fn punch(&self, end: usize, go_on: &dyn Fn() -> bool) -> usize {
        // By and by is not what can be done with a part of a span: nothing would tell which has gone.
        if self.heap.is_lazy() {
            return 0;
        }
        let mut passed = 0;
        self.punch_below(end, |punched| {
            passed += punched.looked + GRAIN_PAGES * (punched.gone + punched.refusals);
            passed < BETWEEN_LOOKS || {
                passed = 0;
                go_on()
            }
        })
    }
}
