//! What the object layer does for the scavenger: it tells what happens, empties its stores, and rings for a keeper.
//!
//! ```text
//!              1 MiB freed, a thread starts one            nothing left to do
//!   ABSENT ──────────────────────────────────▶ AWAKE ◀──────────────────────▶ ASLEEP
//!      ▲            it could not                 │         1 MiB freed: a bell
//!      ├─────────────────────────────────────────┤
//!      └────────── fork: not in the child ───────┘         OFF: nobody is wanted
//! ```
//!
//! A **keeper** is whoever calls [`Objects::tick`] again and again: the background thread of a global heap. While it is
//! absent or asleep, runs of pages that are given back are counted; with the first MiB of them somebody has to be
//! there. That is one load of a shared word for each run freed, which nobody writes meanwhile; blocks that go into a
//! magazine know nothing of it. While the keeper is awake nothing is counted: it looks for itself.

#![forbid(unsafe_code)]

use core::ptr::NonNull;
use core::time::Duration;

use crate::heap::Clock;
use crate::scavenge::pressure::Notices;
use crate::source::Source;
use crate::sync::{AtomicU32, AtomicUsize, Ordering, seize, wake};
use crate::units::PageCount;

use super::register::{Listed, Rounds};
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

/// Pages freed that a keeper is wanted for: 1 MiB.
const PAGES_TO_RING: usize = (1 << 20) / PAGE_BYTES;

/// Threads whose structures are emptied at a time. Who begins meanwhile waits for these: 7 us each, if they are full.
const PART: usize = 64;

/// Whether somebody keeps the heap, and what has been freed since he was last seen.
#[derive(Debug)]
pub struct Keeper {
    state: AtomicU32,
    freed: AtomicUsize,
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
            freed: AtomicUsize::new(0),
            notices,
            root,
            marks: [const { AtomicUsize::new(0) }; 3],
        }
    }

    /// The word that he sleeps on.
    pub fn state(&self) -> &AtomicU32 {
        &self.state
    }

    /// Whether runs are to be counted.
    #[inline(always)]
    pub fn is_away(&self) -> bool {
        // Relaxed: who goes to sleep looks once more behind a heavy fence, and after a while.
        self.state.load(Ordering::Relaxed) > AWAKE
    }

    /// Pages were freed while he was away. Wakes him if he sleeps.
    #[cold]
    pub(super) fn count(&self, pages: usize) {
        // Relaxed, here and below: a count, and a state that hands nothing over.
        let freed = self.freed.fetch_add(pages, Ordering::Relaxed).saturating_add(pages);
        if freed >= PAGES_TO_RING && self.change(ASLEEP, AWAKE) {
            wake(&self.state);
        }
    }

    /// What he is at.
    pub fn is(&self, state: u32) -> bool {
        // Relaxed: as in `count`; whoever sleeps on it is told by the system if it has changed.
        self.state.load(Ordering::Relaxed) == state
    }

    /// Whether one should be started: by somebody who holds nothing.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        // Relaxed: as in `count`.
        self.state.load(Ordering::Relaxed) == ABSENT && self.freed.load(Ordering::Relaxed) >= PAGES_TO_RING
    }

    /// From one state to another, for one thread only.
    pub fn change(&self, from: u32, to: u32) -> bool {
        // Relaxed: as in `count`.
        let changed = self
            .state
            .compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok();
        if changed && to != AWAKE {
            self.freed.store(0, Ordering::Relaxed);
        }
        changed
    }

    /// He is to go: nobody is wanted any more.
    pub fn dismiss(&self) {
        // Relaxed: as in `count`.
        self.state.store(OFF, Ordering::Relaxed);
        wake(&self.state);
    }

    /// There is none, and none for what was freed so far: in the child of a fork, which may end soon. By the one thread
    /// that the child has.
    pub fn has_gone(&self) {
        // Relaxed: the child has one thread.
        if self.state.load(Ordering::Relaxed) != OFF {
            self.state.store(ABSENT, Ordering::Relaxed);
            self.freed.store(0, Ordering::Relaxed);
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
        self.heap
            .tick_with(clock, || self.activity(), |silent| self.trim(silent))
    }

    /// Gives back up to `pages` free pages at once: those in store here and in caches of threads that sleep too. Waits
    /// for who scavenges at the moment, and for a fork, which need not wait for all of this; but not for ever, for both
    /// may wait for the caller; and for who empties threads' structures, who waits for nobody.
    pub fn release(&self, pages: PageCount) -> PageCount {
        self.heap.release_in_turns(pages, || self.trim(true))
    }

    /// As [`PageHeap::scavenge`](crate::PageHeap::scavenge), what lies in store here included.
    pub fn scavenge(&self, pages: PageCount) -> PageCount {
        self.empty_unshared();
        self.heap.scavenge(pages)
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

    /// A number that changes whenever slots go between threads and classes.
    fn activity(&self) -> u64 {
        let states = SizeClass::all().map(|class| self.central(class).state(&self.spans, class));
        let visits = states.map(|state| state.refills.wrapping_add(state.flushes));
        visits.fold(0, u64::wrapping_add)
    }

    /// Empties the magazines and shelves of all threads that are not at work on them. Nothing where the system has no
    /// fence for it.
    ///
    /// A round: a thread that begins or ends waits for it, for [`PART`] of the others at the most, and a fork for all
    /// of it.
    pub(super) fn seize_threads(&self, rounds: &Rounds<'_, Thread>) {
        // Once, before anybody is barred: the first of a process may take long.
        if !self.heap.barrier() {
            return;
        }
        // Until the slots are back: whoever is about to say that there is no room waits for them.
        let _pass = self.heap.pass();
        rounds.begin();
        rounds.go(PART, |part| {
            self.heap.count_barriers(1);
            seize(|visit| part.for_each(visit), |thread: &Thread| self.empty(thread, None))
        });
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

    /// Gives what lies in store back to the heap: what threads that have ended left, spare spans, batches that nobody
    /// has needed since this was last done, and what the shared thread keeps; of a program that is silent, or where all
    /// is to go, all batches and what sleeping threads keep too.
    fn trim(&self, all: bool) {
        if let Some(shared) = self.try_shared() {
            self.flush(&shared);
        }
        let rounds = self.register.rounds();
        self.empty_vacant(&rounds);
        if all {
            self.seize_threads(&rounds);
        }
        drop(rounds);
        if all {
            self.empty_stores(None);
            return;
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
    }
}
