//! The object layer's part in scavenging: it counts what there is to find, empties its stores, and wakes the keeper.
//!
//! ```text
//!              1 MiB to find, a thread starts one          nothing left to do
//!   ABSENT ──────────────────────────────────▶ AWAKE ◀──────────────────────▶ ASLEEP
//!      ▲            it could not                 │         1 MiB to find: a bell
//!      ├─────────────────────────────────────────┤
//!      └────────── fork: not in the child ───────┘         OFF: nobody is wanted
//! ```
//!
//! The **keeper** is the thread that calls [`Objects::tick`] again and again: the background thread of a global heap.
//! While it is absent or asleep, the bytes that it might find are counted; at the first MiB a keeper must be started
//! or woken. Each count first loads one shared word, to which nobody writes meanwhile. While the keeper is awake
//! nothing is counted: it looks for itself.
//!
//! **What is counted**: runs of pages that are given back, and room in magazines, all of it as soon as it exists.
//! Nobody counts a block that is freed into a magazine, because that is the fast path. But it needs room there, and
//! only a free creates room, on the slow path (`magazine.rs`, shut racks); after that the thread starts a keeper if one
//! is wanted. (So a rack that a thread leaves open to the next has been counted, or the keeper was awake.) A keeper
//! that goes to sleep empties all magazines, and shuts their racks, *after* it has announced that it sleeps. So less
//! than a MiB, in magazines and in other free memory together, is ever left behind. (And one block for each thread that
//! was interrupted on the fast path of a free, or of an allocation that was then refused, and has not gone on since.)
//! If a thread is at work on its magazines just when they are to be emptied, the keeper stays awake for the time being.
//!
//! **While the program works** the keeper counts once a second what each thread keeps, and empties those of which that
//! has been the same eight times: they sleep, or happen to work in balance.
//!
//! Worked: 64 threads each take a hundred blocks of 3,000 bytes, free them, and sleep. The first free of each thread
//! opens a rack with room for 126 such blocks, and the others take the fast path: 387 KB are counted for each thread,
//! so the third thread starts the keeper, if there is none.
//!
//! **Why no allocation starts the keeper** where there are other threads: the program may be in a callback of
//! `dl_iterate_phdr`, for instance to symbolise a backtrace. It then holds a lock that thread creation waits for as
//! long as another thread is loading a library. A free in such a callback may still start the keeper; something has
//! to.

#![forbid(unsafe_code)]

use core::ptr::NonNull;
use core::time::Duration;

use crate::heap::{Above, Clock};
use crate::scavenge::pressure::Notices;
use crate::source::Source;
use crate::sync::{AtomicU32, AtomicUsize, Ordering, is_forking, seize, wake};
use crate::units::PageCount;

use super::register::{Listed, Registered, Rounds};
use super::resting::Parts;
use super::size_class::{PAGE_BYTES, SizeClass};
use super::store::Walk;
use super::{Objects, Thread};

/// No keeper is wanted.
pub const OFF: u32 = 0;
/// At work, or about to look.
pub const AWAKE: u32 = 1;
/// There is no keeper yet.
pub const ABSENT: u32 = 2;
/// Sleeps until it is woken.
pub const ASLEEP: u32 = 3;

/// The bytes to find for which a keeper is wanted: 1 MiB.
const BYTES_TO_RING: usize = 1 << 20;

/// How often that number doubles at most, each time that no keeper could be started: up to 1 GiB.
const MOST_DOUBLINGS: u32 = 10;

/// How often an allocation checks whether it may start a keeper: one system call each.
const MOST_LOOKS: u32 = 64;

/// While holes are punched, the clock is read once for this many pages looked at, or for an eighth of as many grains
/// released or calls refused.
const BETWEEN_LOOKS: usize = 256;
const GRAIN_PAGES: usize = 8;

/// The most that one allocation counts for growth: a program's first allocation must not start a thread.
const MOST_GROWN: usize = BYTES_TO_RING / 2;

/// How many threads' structures are emptied at a time. A thread that begins meanwhile waits for these: up to 9 us for
/// each full magazine, 130 us for a structure in which all 80 are full, and so 8 ms if all 64 are like that.
pub(super) const PART: usize = 64;

/// The result of emptying threads' structures.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seized {
    /// It was done: the system has the fence that it needs.
    pub(super) fenced: bool,
    /// No thread was at work on its structure.
    all: bool,
    /// One that was at work keeps slots, runs or pages for racks, or who is at work is not known.
    pub(super) missed: bool,
    /// Pages that it freed.
    pub(super) pages: usize,
}

impl Seized {
    /// There was no structure to empty.
    const NOTHING: Self = Self {
        fenced: true,
        all: true,
        missed: false,
        pages: 0,
    };
}

/// Whether the heap has a keeper, and how much it might have found since it was last seen.
#[derive(Debug)]
pub struct Keeper {
    state: AtomicU32,
    /// Bytes to find, while it is away.
    to_find: AtomicUsize,
    /// How often no keeper could be started.
    failures: AtomicU32,
    /// How often an allocation has checked whether it may start one.
    looks: AtomicU32,
    /// The functions to notify of memory pressure.
    pub notices: Notices,
    /// Where the system's files are: the root directory, except in tests.
    pub root: &'static str,
    /// What its creator knows it by, 0 if there is none: its thread, and the memory that outlives it.
    pub marks: [AtomicUsize; 3],
}

impl Keeper {
    /// A heap without a keeper yet; `wanted` says whether it is to have one.
    pub fn new(wanted: bool, notices: Notices, root: &'static str) -> Self {
        Self {
            state: AtomicU32::new(if wanted { ABSENT } else { OFF }),
            to_find: AtomicUsize::new(0),
            failures: AtomicU32::new(0),
            looks: AtomicU32::new(0),
            notices,
            root,
            marks: [const { AtomicUsize::new(0) }; 3],
        }
    }

    /// The word it sleeps on.
    pub fn state(&self) -> &AtomicU32 {
        &self.state
    }

    /// Whether bytes that it might find must be counted.
    #[inline(always)]
    pub fn is_away(&self) -> bool {
        // Relaxed: a keeper that goes to sleep looks once more behind a heavy fence, and after a while.
        self.state.load(Ordering::Relaxed) > AWAKE
    }

    /// Counts `bytes` bytes that it might find, while it is away. Wakes it if it sleeps and they are enough.
    #[cold]
    pub(super) fn count(&self, bytes: usize) {
        // Acquire: pairs with the release of `change`. The caller has seen it away; this load sees the count as it
        // left it.
        self.state.load(Ordering::Acquire);
        // Relaxed, here and below: a count, and a state that publishes nothing else.
        let to_find = self.to_find.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if to_find >= BYTES_TO_RING && self.change(ASLEEP, AWAKE) {
            wake(&self.state);
        }
    }

    /// Counts pages that the heap has given out, if there is no keeper but someone wants notice of memory pressure. A
    /// program that only grows has nothing to scavenge, and yet needs that notice first.
    #[inline]
    pub(super) fn count_grown(&self, pages: usize) {
        if self.is(ABSENT) && self.notices.are_any() {
            self.count(pages.saturating_mul(PAGE_BYTES).min(MOST_GROWN));
        }
    }

    /// Whether it is in this state.
    pub fn is(&self, state: u32) -> bool {
        // Relaxed: as in `count`; the system tells a thread that would sleep on the word whether it has changed.
        self.state.load(Ordering::Relaxed) == state
    }

    /// Whether there is a keeper; one that is just being created, which may fail, does not count.
    pub fn is_there(&self) -> bool {
        // Relaxed: a number by itself.
        self.marks[0].load(Ordering::Relaxed) != 0 && (self.is(AWAKE) || self.is(ASLEEP))
    }

    /// Whether one should be started, by a thread that holds nothing.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        // Relaxed, throughout: as in `count`.
        self.state.load(Ordering::Relaxed) == ABSENT
            && self.to_find.load(Ordering::Relaxed) >= BYTES_TO_RING << self.failures.load(Ordering::Relaxed)
            // In the child of a fork a handler would start one before the child knows that there is none.
            && !is_forking()
    }

    /// As [`is_wanted`](Self::is_wanted), for a caller that must check whether it may start one: yes only so often.
    #[inline]
    pub fn is_wanted_by_anybody(&self) -> bool {
        // Relaxed: as in `count`.
        let may_look = || {
            // More of them the more there is to find, as a program may have one thread only later.
            let more = self.to_find.load(Ordering::Relaxed).checked_ilog2().unwrap_or(0);
            let may_look = self.looks.load(Ordering::Relaxed) < MOST_LOOKS + more;
            may_look && self.looks.fetch_add(1, Ordering::Relaxed) < MOST_LOOKS + more
        };
        self.is_wanted() && may_look()
    }

    /// The one that was being started could not be: the system refuses threads. The next attempt comes after twice as
    /// many bytes. So one that is refused for a while costs little, and is started in the end.
    #[cold]
    pub fn has_failed(&self) {
        // Relaxed: a count, by one thread at a time.
        let failures = self.failures.load(Ordering::Relaxed);
        self.failures
            .store((failures + 1).min(MOST_DOUBLINGS), Ordering::Relaxed);
        self.change(AWAKE, ABSENT);
    }

    /// Changes the state from `from` to `to`; succeeds for one thread only.
    pub fn change(&self, from: u32, to: u32) -> bool {
        // Relaxed: as in `count`. Before the keeper goes: while it is awake nobody counts.
        if from == AWAKE {
            self.to_find.store(0, Ordering::Relaxed);
        }
        // Release: bytes counted after it has gone are added to that zero; partner: the acquire of `count`.
        self.state
            .compare_exchange(from, to, Ordering::Release, Ordering::Relaxed)
            .is_ok()
    }

    /// Dismisses the keeper: none is wanted any more.
    pub fn dismiss(&self) {
        // Relaxed: as in `count`.
        self.state.store(OFF, Ordering::Relaxed);
        wake(&self.state);
    }

    /// In the child of a fork, which may end soon: there is no keeper, and none is wanted for what there was to find
    /// so far. The child's magazines are then shut, so that what is freed into them from here on is counted.
    pub fn has_gone(&self) {
        // Relaxed: the child has one thread.
        if self.state.load(Ordering::Relaxed) != OFF {
            self.state.store(ABSENT, Ordering::Relaxed);
            self.to_find.store(0, Ordering::Relaxed);
            self.looks.store(0, Ordering::Relaxed);
            self.failures.store(0, Ordering::Relaxed);
            let [thread, stack, bytes] = &self.marks;
            thread.store(0, Ordering::Relaxed);
            // The keeper itself forked, in a hook. So it lives on, on this stack, which must not be used for another
            // keeper.
            let here = (&raw const thread).addr();
            if here.wrapping_sub(stack.load(Ordering::Relaxed)) < bytes.load(Ordering::Relaxed) {
                stack.store(0, Ordering::Relaxed);
            }
        }
    }
}

impl<S: Source + 'static> Objects<S> {
    /// Like [`PageHeap::tick`](crate::PageHeap::tick), for both layers.
    pub fn tick<C: Clock + ?Sized>(&self, clock: &C) -> Duration {
        self.heap.tick_with(clock, self)
    }

    /// Gives back up to `pages` free pages at once, including those in stores here and in caches of sleeping threads.
    /// Waits for the scavenger's turn, which a thread holds to tick, release or check. That wait is bounded, because
    /// the holder may be waiting for the caller. A fork need not wait until all of this is done. Also waits for a
    /// thread that empties threads' structures, which itself waits for nobody.
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

    /// Like [`PageHeap::scavenge`](crate::PageHeap::scavenge), including what lies in stores here.
    pub fn scavenge(&self, pages: PageCount) -> PageCount {
        self.empty_unshared();
        let released = self.heap.scavenge(pages);
        if self.heap.is_lazy() {
            return released;
        }
        self.punch_for(pages, released, || ())
    }

    /// Empties what any thread may empty at any time: what lies aside, shared structures, vacant ones, stores.
    fn empty_unshared(&self) {
        self.clear_aside();
        self.flush_commons();
        self.empty_vacant_by_one();
        self.empty_stores(None);
    }

    /// The heap's keeper.
    pub fn keeper(&self) -> &Keeper {
        &self.keeper
    }

    /// Whether the system has the fence that emptying other threads' magazines takes: asks it for one, and counts it.
    pub fn reaches_threads(&self) -> bool {
        self.heap.barrier()
    }

    /// Empties the magazines and shelves of all threads that are not at work on them. Does nothing, as if none were, if
    /// the system lacks the fence that it needs.
    ///
    /// One round: a thread that begins or ends waits for it, but for at most [`PART`] of the others; a fork waits for
    /// all.
    pub(super) fn seize_threads(&self, rounds: &Rounds<'_, Thread>) -> Seized {
        let mut sum = Seized::NOTHING;
        // Once, before any thread is barred: the first barrier of a process may take long.
        if !self.reaches_threads() {
            sum.fenced = false;
            return sum;
        }
        // Until the slots are back: a thread that is about to report failure waits for them.
        let _pass = self.heap.pass();
        rounds.begin();
        rounds.go(PART, |part| {
            let seized = self.seize_part(part);
            sum.all &= seized.all;
            sum.missed |= seized.missed;
            sum.pages += seized.pages;
            sum.fenced &= seized.fenced;
            seized.fenced
        });
        sum
    }

    /// The same for a part of the structures; the caller holds the rounds lock.
    pub(super) fn seize_part(&self, part: &Registered<'_, Thread>) -> Seized {
        self.seize_among(part, |_| Parts::ALL)
    }

    /// The same for what `which` says of each structure, the same each time it is asked. Without a fence if that is
    /// nothing.
    fn seize_among(&self, part: &Registered<'_, Thread>, which: impl Fn(&Thread) -> Parts) -> Seized {
        let all = |visit: &mut dyn FnMut(&Thread)| {
            part.for_each_holding(|thread| {
                if which(thread).any() {
                    visit(thread);
                }
            });
        };
        let mut any = false;
        all(&mut |_| any = true);
        if !any {
            return Seized::NOTHING;
        }
        self.heap.count_barrier();
        let (mut bare, mut at_work, mut missed, mut pages) = (true, false, false, 0);
        let fenced = seize(
            all,
            |thread: &Thread| {
                pages += self.empty_seized(thread, which(thread));
                bare &= thread.is_bare();
            },
            |thread| {
                at_work = true;
                missed |= thread.keeps_any();
            },
        );
        Seized {
            fenced,
            all: fenced && bare && !at_work,
            missed: missed || !fenced,
            pages,
        }
    }

    /// Empties the magazines and shelves that have been the same for eight calls: of a program that is never silent,
    /// most threads may sleep, after each has used much once; see [`Resting`](super::resting::Resting). One round, as
    /// above; without a fence if nothing rests.
    fn seize_resting(&self, rounds: &Rounds<'_, Thread>) {
        let mut any = false;
        rounds.go(PART, |part| {
            part.for_each_holding(|thread| any |= thread.listing().resting().note(thread.prints()).any());
            true
        });
        // Once, before any thread is barred, as above.
        if !any || !self.reaches_threads() {
            return;
        }
        let _pass = self.heap.pass();
        rounds.go(PART, |part| {
            self.seize_among(part, |thread| thread.listing().resting().parts())
                .fenced
        });
    }

    /// Empties the structures that no thread uses. One round, as above.
    fn empty_vacant(&self, rounds: &Rounds<'_, Thread>) {
        let _pass = self.heap.pass();
        rounds.go(PART, |part| {
            part.for_each_holding(|thread| {
                if thread.listing().unload() {
                    self.empty(thread, None);
                    self.give_plot(thread, None);
                }
            });
            true
        });
    }

    /// The same, without the rounds lock: takes and enters one structure after the other, as a thread that begins
    /// does. Waits for a barred one, as for the register anyway: a seizer may have found the caller about to enter,
    /// and skipped it. Each is emptied once at most: what threads leave meanwhile is for the next call. Returns how
    /// many pages that freed.
    pub(super) fn empty_vacant_by_one(&self) -> usize {
        let _pass = self.heap.pass();
        let (mut pages, mut last) = (0, None);
        while let Some(thread) = self.register.take_laden(last) {
            let entered = thread.enter_at_last(self);
            pages += self.empty(&entered, None);
            pages += self.give_plot(&entered, None);
            drop(entered);
            self.register.give(NonNull::from(thread));
            last = Some(thread);
        }
        pages
    }
}

impl<S: Source + 'static> Above for Objects<S> {
    /// What was freed into magazines before counting began must be found before the keeper sleeps.
    fn settles(&self) -> bool {
        self.keeper.is(ASLEEP)
    }

    fn gather(&self) {
        self.clear_aside();
    }

    /// Changes whenever slots move between threads and classes.
    fn activity(&self) -> u64 {
        let states = SizeClass::all().map(|class| self.central(class).state(&self.spans, class));
        let visits = states.map(|state| state.refills.wrapping_add(state.flushes));
        visits.fold(0, u64::wrapping_add)
    }

    /// Returns what lies here to the heap: what was put aside, what ended threads have left, spare spans, batches that
    /// nobody has needed since the last call, what shared structures keep, and what threads have long kept unchanged.
    /// If `all` (the program is silent, or everything must go), also all batches and what other threads keep that are
    /// not at work. Returns whether no magazine is left into which a block can be freed unseen.
    fn trim(&self, all: bool) -> bool {
        self.clear_aside();
        self.forget_asked();
        let mut bare = self.flush_commons();
        let rounds = self.register.rounds();
        self.empty_vacant(&rounds);
        if all {
            bare &= self.seize_threads(&rounds).all;
        } else {
            self.seize_resting(&rounds);
        }
        drop(rounds);
        if all {
            self.empty_stores(None);
            return bare;
        }
        // As in `empty_stores`.
        let _pass = self.heap.pass();
        for class in SizeClass::all() {
            let mut walk = Walk::default();
            while let Some(batch) = self.spans.take_unneeded(class, &mut walk) {
                self.give_rack(None, class, Some(batch));
            }
            self.give_spare(None, class);
        }
        false
    }

    fn punch(&self, end: usize, go_on: &dyn Fn() -> bool) -> usize {
        // A lazy release cannot be used for part of a span: nothing would tell which part has gone.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What was found before an attempt to start one does not count for the next attempt.
    #[test]
    fn one_that_cannot_be_started_is_wanted_after_twice_as_much_each_time() {
        let keeper = Keeper::new(true, Notices::NONE, "");
        for failures in 0..=MOST_DOUBLINGS + 1 {
            for _ in 0..1 << failures.min(MOST_DOUBLINGS) {
                assert!(!keeper.is_wanted(), "after {failures} failures");
                keeper.count(BYTES_TO_RING);
            }
            assert!(keeper.is_wanted() && keeper.change(ABSENT, AWAKE));
            assert!(!keeper.is_wanted());
            keeper.has_failed();
        }
    }
    /// The program may have one only later; and the child of a fork has one.
    #[test]
    fn whether_there_is_one_thread_is_looked_at_again_when_there_is_more_to_find() {
        let keeper = Keeper::new(true, Notices::NONE, "");
        let looks = || (0..).take_while(|_| keeper.is_wanted_by_anybody()).count() as u32;
        assert_eq!(looks(), 0);
        keeper.count(BYTES_TO_RING);
        assert_eq!(looks(), MOST_LOOKS + BYTES_TO_RING.ilog2());
        keeper.count(BYTES_TO_RING);
        assert_eq!((looks(), looks()), (1, 0));
        keeper.has_gone();
        keeper.count(BYTES_TO_RING);
        assert!(looks() >= MOST_LOOKS);
    }
}
