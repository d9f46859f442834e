//! A lock that a thread need not take while it is alone with what the lock protects.
//!
//! ```text
//!   the one    at work := 1 ── light fence ── key mine? ── uses it ── at work := 0             no: takes the lock
//!                                    ╳
//!   another    lock ── key := SEIZED ─ heavy fence ── waits until at work = 0 ── uses it ── unlock
//! ```
//!
//! A thread that has taken the lock 16 times, with no other in between that does the same, becomes *the one*.
//! From then on it may [enter](BiasedLock::enter) without the lock, for short work that calls no other code: two plain
//! stores and a few comparisons (`owner.rs` has the argument for them). Everything else it does under the lock, like
//! all others; while it holds the lock it is not let in by the short way, so foreign code that comes back here waits
//! for itself, as with any lock, and breaks nothing.
//!
//! The first other thread that takes the lock ends this: it bars the one, passes a heavy fence, and waits until the one
//! has left. Then another may become the one, [`TURNS`] in all, each with an owner of its own to announce itself to.
//! (At the same one, a thread that was stopped on its way in would later overwrite what the next one says there.) Each
//! has to take the lock twice as often as the one before. After that it is a lock. So what is handed over now and then
//! stays quick, who stays gets its turn, and threads that come and go pay two dozen heavy fences, not two each.
//!
//! **Visits.** A thread that only looks after what is here, as a scavenger or a fork does, [visits](BiasedLock::visit):
//! it bars the one in the same way, but the turn goes on. The one stays barred until it takes the lock itself, which it
//! mostly would anyway: a scavenger leaves nothing here to use. So nobody ever lets another thread in, and of several
//! visits to a thread that sleeps only the first needs a fence.
//!
//! Worked: a `Heap` is filled by one thread, 16 times with the lock and then without, and handed to another. That one's
//! first call takes some microseconds, once; 32 calls later it does without the lock too. With the lock, an allocation
//! and its free take 49 ns instead of 11 (Emerald Rapids).
//!
//! The idea is K. Kawachiya's, A. Koseki's and T. Onodera's ("Lock reservation", OOPSLA 2002), there for Java's
//! monitors. The models explore this file as it ships (`tests/models/src/loom/bias.rs`).

#![forbid(unsafe_code)]

use core::mem::forget;

use super::owner::SEIZED;
use super::{AtomicU32, AtomicUsize, Guard, Lock, Ordering, Owner, fence_heavy, relax, rest};

/// How often in a row a thread takes the lock before it is thought to be alone, the first time, and twice as often each
/// further time. Then it passes a heavy fence, without the lock, to find out whether there is one.
const IN_A_ROW: u32 = 16;

/// How many threads can become the one at most, one after another.
const TURNS: usize = 12;

/// After how many rounds in a row that it has missed the one is thought to be gone.
const ROUNDS: u32 = 2;

/// [`BiasedLock::one`]: nobody, at the moment or any more.
const NOBODY: usize = 0;

/// The identity of a thread where threads cannot be told apart. It is never the one.
pub const UNKNOWN: usize = 1;

/// Pauses of 64 spins each that stand in for a fence which the system refuses now, though it granted it before: 0.1 ms
/// at least. Not yields: among threads that are busy each may take milliseconds.
const PAUSES_WITHOUT_FENCE: u32 = 1 << 8;

/// A lock with a short way for one thread. What it protects names it.
#[derive(Debug)]
pub struct BiasedLock {
    lock: Lock,
    /// One for each turn. The key of the present one is the one's identity from when that unlocks until somebody locks;
    /// all others are [`SEIZED`]. So keys are written under the lock, and none but the one lets itself in.
    owners: [Owner; TURNS],
    /// How many turns are over; all of them where there is no fence. Written under the lock, and only ever raised.
    turn: AtomicUsize,
    /// Below: written only under the lock. The one, or [`NOBODY`].
    one: AtomicUsize,
    /// How many rounds in a row the one has missed.
    missed: AtomicU32,
    /// Who was the one in each turn that is over, if anybody.
    losers: [AtomicUsize; TURNS],
    /// Who took the lock last by `lock_often`, and how often in a row.
    last: AtomicUsize,
    times: AtomicU32,
}

impl Default for BiasedLock {
    fn default() -> Self {
        Self::new()
    }
}

impl BiasedLock {
    /// A free lock, and nobody alone with it.
    #[must_use]
    pub fn new() -> Self {
        Self {
            lock: Lock::new(),
            owners: core::array::from_fn(|_| Owner::new(SEIZED)),
            turn: AtomicUsize::new(0),
            one: AtomicUsize::new(NOBODY),
            missed: AtomicU32::new(0),
            losers: core::array::from_fn(|_| AtomicUsize::new(NOBODY)),
            last: AtomicUsize::new(NOBODY),
            times: AtomicU32::new(0),
        }
    }

    /// The short way, for the thread `me`, if it is the one and does not hold the lock. In between it must not call
    /// code that may come back here.
    ///
    /// An identity belongs to one thread at a time; it is neither 0, 1 nor 3. When a thread has ended, another may have
    /// it.
    #[inline(always)]
    pub fn enter(&self, me: usize) -> Option<Alone<'_>> {
        // Relaxed: an earlier turn leads to an owner that is barred for good, by a store before a heavy fence. If that
        // is not seen here either, the entry finds out, as in any turn.
        let owner = self.owners.get(self.turn.load(Ordering::Relaxed))?;
        // A look first: only one thread may ever announce itself to an owner.
        (owner.is_for(me) && owner.enter(me)).then(|| Alone { owner })
    }

    /// Whether a thread that came now would find the lock held.
    #[inline]
    pub fn is_held(&self) -> bool {
        self.lock.is_held()
    }

    /// Whether another thread than `me` is alone with it at the moment, as far as is known.
    #[inline]
    pub fn is_anothers(&self, me: usize) -> bool {
        // Relaxed: only a look.
        let one = self.one.load(Ordering::Relaxed);
        one != NOBODY && one != me
    }

    /// Whether the thread `me`, which calls this, is the one.
    #[inline]
    pub fn is_mine(&self, me: usize) -> bool {
        // Relaxed: only a look. `me` is never `NOBODY`.
        self.one.load(Ordering::Relaxed) == me
    }

    /// Whether the one, if there is one, has not been back between two [rounds](Held::count_round): it may have ended.
    #[inline]
    pub fn is_deserted(&self) -> bool {
        // Relaxed: only a look.
        self.missed.load(Ordering::Relaxed) >= ROUNDS
    }

    /// Whether the one has lost a turn before, and has come back: a thread that is here now and then, as it is.
    pub fn is_back(&self) -> bool {
        // Relaxed, twice: only a look.
        let one = self.one.load(Ordering::Relaxed);
        let is_one = |loser: &AtomicUsize| loser.load(Ordering::Relaxed) == one;
        one != NOBODY && self.losers.iter().any(is_one)
    }

    /// Whether a thread can become the one now, as far as is known.
    #[inline]
    pub fn is_vacant(&self) -> bool {
        // Relaxed, twice: under the lock, or only a look.
        self.one.load(Ordering::Relaxed) == NOBODY && self.turn.load(Ordering::Relaxed) < TURNS
    }

    /// Waits until the lock is free and the one is not at work. Another one than the caller is the one no longer.
    #[inline]
    pub fn lock(&self, me: usize) -> Held<'_> {
        let held = self.visit(me);
        // Relaxed: under the lock.
        let one = self.one.load(Ordering::Relaxed);
        if one != NOBODY && one != me {
            self.end_turn();
        }
        held
    }

    /// The same for a visit: who is the one remains it.
    #[inline]
    pub fn visit(&self, me: usize) -> Held<'_> {
        self.held(me, self.lock.lock())
    }

    /// The same, if the lock is free now.
    #[inline]
    pub fn try_visit(&self, me: usize) -> Option<Held<'_>> {
        Some(self.held(me, self.lock.try_lock()?))
    }

    /// As [`lock`](Self::lock), and makes the caller the one if it has done only this for a while, and nobody else.
    #[inline]
    pub fn lock_often(&self, me: usize) -> Held<'_> {
        let held = self.lock(me);
        if self.is_vacant() && me != UNKNOWN {
            return self.count(me, held);
        }
        held
    }

    #[cold]
    fn count<'a>(&'a self, me: usize, held: Held<'a>) -> Held<'a> {
        // Relaxed, throughout: under the lock.
        let times = if self.last.swap(me, Ordering::Relaxed) == me {
            self.times.load(Ordering::Relaxed) + 1
        } else {
            1
        };
        self.times.store(times, Ordering::Relaxed);
        let turn = self.turn.load(Ordering::Relaxed);
        if times < IN_A_ROW << turn {
            return held;
        }
        // Not under the lock: the first fence of a process may take 10 ms, for which others would wait.
        drop(held);
        let has_fence = fence_heavy();
        let held = self.lock(me);
        if !has_fence {
            // Without one there is no way to bar the one.
            self.turn.store(TURNS, Ordering::Relaxed);
        } else if self.turn.load(Ordering::Relaxed) == turn {
            // Nobody has become the one since. Who has not been alone for so long is not the one either; but this was
            // its turn, or it would pass a fence each time it thought it were alone.
            if self.last.load(Ordering::Relaxed) == me {
                self.one.store(me, Ordering::Relaxed);
            } else {
                self.end_turn();
            }
        }
        held
    }

    /// The owner of this turn.
    #[inline]
    fn owner(&self) -> Option<&Owner> {
        // Relaxed: under the lock, or only to have a look.
        self.owners.get(self.turn.load(Ordering::Relaxed))
    }

    /// With the lock held: bars the one. If that is another thread, waits until it has left.
    #[inline]
    fn held<'a>(&'a self, me: usize, guard: Guard<'a>) -> Held<'a> {
        // Relaxed: under the lock.
        let one = self.one.load(Ordering::Relaxed);
        if one != NOBODY
            && let Some(owner) = self.owner()
        {
            if one == me {
                owner.bar();
            } else if owner.is_for(one) {
                self.shut_out(owner);
            }
            // Else it is barred by an earlier visitor, who has waited for it, under this lock.
        }
        // Dropping the `Held` unlocks.
        forget(guard);
        Held { lock: self, me }
    }

    /// Bars the one and waits until it has left.
    #[cold]
    fn shut_out(&self, owner: &Owner) {
        owner.bar();
        let has_fence = fence_heavy();
        if !has_fence {
            // It could be granted when the one was made. What the fence would have made visible is a store that the one
            // made before it read its key: no processor keeps a store to itself for as long as this takes.
            (0..PAUSES_WITHOUT_FENCE).for_each(|_| relax(6));
        }
        let mut round = 0;
        while !owner.is_left() {
            round = rest(round);
        }
        if !has_fence {
            // Not again: it is a lock from now on.
            self.end_turn();
            // Relaxed: under the lock.
            self.turn.store(TURNS, Ordering::Relaxed);
        }
    }

    /// Nobody is the one, and the next to become it has the next owner. With the lock held, and the one barred.
    #[cold]
    fn end_turn(&self) {
        // Relaxed, throughout: under the lock. See `enter` for who reads the turn without it.
        let turn = self.turn.load(Ordering::Relaxed);
        let one = self.one.swap(NOBODY, Ordering::Relaxed);
        if let Some(loser) = self.losers.get(turn) {
            loser.store(one, Ordering::Relaxed);
        }
        self.turn.store(turn + 1, Ordering::Relaxed);
        self.times.store(0, Ordering::Relaxed);
        self.missed.store(0, Ordering::Relaxed);
    }

    /// The thread `me`, before it releases the lock: if it is the one, it may enter again.
    #[inline]
    fn unbar(&self, me: usize) {
        if self.is_mine(me)
            && let Some(owner) = self.owner()
        {
            // Relaxed: under the lock.
            self.missed.store(0, Ordering::Relaxed);
            // By this thread, and nobody else is let in by this key.
            owner.set(me);
        }
    }

    /// Waits as [`visit`](Self::visit) does, then holds the lock until [`let_go`](Self::let_go): for `fork`.
    pub(crate) fn hold(&self, me: usize) {
        forget(self.visit(me));
        self.lock.keep();
    }

    /// Releases what [`hold`](Self::hold) acquired for the same thread, in the same process or in its child.
    pub(crate) fn let_go(&self, me: usize) {
        self.unbar(me);
        self.lock.let_go();
    }

    /// As if the one were about to see that it is barred, which it is.
    #[cfg(test)]
    pub(crate) fn announce(&self) {
        // Relaxed: one thread.
        assert!(self.owners[self.turn.load(Ordering::Relaxed)].enter(SEIZED));
    }

    /// In the child of a fork, with the lock held by its thread, `me`. If that is not the one, the one is not here; it
    /// may have been about to see that it is barred, and a new thread may get its identity.
    pub(crate) fn recover(&self, me: usize) {
        if let Some(owner) = self.owner() {
            owner.clear();
        }
        // Relaxed: under the lock.
        if self.is_anothers(me) {
            self.missed.store(ROUNDS, Ordering::Relaxed);
        }
    }
}

/// The one at work, without the lock.
#[derive(Debug)]
pub struct Alone<'a> {
    owner: &'a Owner,
}

impl Drop for Alone<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.owner.leave();
    }
}

/// The right to what a [`BiasedLock`] protects; dropping it unlocks.
#[derive(Debug)]
pub struct Held<'a> {
    lock: &'a BiasedLock,
    me: usize,
}

impl Held<'_> {
    /// A round of a scavenger, which comes to all locks, and seldom. The one misses it unless it has been here since
    /// the last.
    pub fn count_round(&self) {
        let missed = &self.lock.missed;
        if self.lock.is_anothers(self.me) {
            // Relaxed, twice: under the lock. Since each visit bars the one, it has taken the lock if it was here.
            missed.store((missed.load(Ordering::Relaxed) + 1).min(ROUNDS), Ordering::Relaxed);
        }
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        self.lock.unbar(self.me);
        self.lock.lock.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: usize = 8;
    const B: usize = 12;

    /// Takes the lock often enough.
    fn become_the_one(lock: &BiasedLock, me: usize) {
        (0..IN_A_ROW).for_each(|_| drop(lock.lock_often(me)));
    }

    #[test]
    fn who_comes_often_and_alone_is_let_in() {
        let lock = BiasedLock::new();
        (1..IN_A_ROW).for_each(|_| drop(lock.lock_often(A)));
        assert!(lock.enter(A).is_none());
        drop(lock.lock_often(A));
        // Where there is no heavy fence, nobody is.
        assert_eq!(lock.enter(A).is_some(), fence_heavy());
        assert!(lock.enter(B).is_none() && lock.enter(UNKNOWN).is_none());
    }

    #[test]
    fn turns_do_not_count() {
        let lock = BiasedLock::new();
        for _ in 0..4 * IN_A_ROW {
            drop(lock.lock_often(A));
            drop(lock.lock_often(B));
        }
        assert!(lock.enter(A).is_none() && lock.enter(B).is_none());
        become_the_one(&lock, UNKNOWN);
        assert!(lock.enter(UNKNOWN).is_none());
    }

    #[test]
    fn the_one_is_not_let_in_while_it_holds_the_lock() {
        let lock = BiasedLock::new();
        become_the_one(&lock, A);
        let held = lock.lock(A);
        assert!(lock.enter(A).is_none());
        drop(held);
        assert_eq!(lock.enter(A).is_some(), fence_heavy());
        lock.hold(A);
        assert!(lock.enter(A).is_none() && lock.try_visit(B).is_none());
        lock.let_go(A);
        assert_eq!(lock.enter(A).is_some(), fence_heavy());
    }

    /// However often.
    #[test]
    fn who_is_visited_is_let_in_again_when_it_has_taken_the_lock() {
        let lock = BiasedLock::new();
        become_the_one(&lock, A);
        for visits in 0..3 * TURNS {
            if lock.enter(A).is_none() {
                return assert!(!fence_heavy() && !lock.is_anothers(B));
            }
            // The second one finds it barred.
            for _ in 0..visits % 3 {
                drop(lock.visit(B));
                drop(lock.try_visit(UNKNOWN));
                assert!(lock.enter(A).is_none() && lock.is_anothers(B) && lock.is_mine(A));
            }
            drop(lock.lock_often(A));
        }
        drop(lock.visit(B));
        drop(lock.lock(B));
        drop(lock.lock_often(A));
        assert!(lock.enter(A).is_none() && !lock.is_mine(A), "its turn has ended");
        assert!(!lock.is_back());
        for (me, is_back) in [(B, false), (A, true), (B, true)] {
            (0..IN_A_ROW << 4).for_each(|_| drop(lock.lock_often(me)));
            assert_eq!((lock.is_mine(me), lock.is_back()), (true, is_back));
        }
    }

    #[test]
    fn who_misses_two_rounds_is_thought_to_be_gone() {
        let lock = BiasedLock::new();
        lock.visit(B).count_round();
        lock.visit(B).count_round();
        assert!(lock.is_vacant() && !lock.is_deserted(), "there was nobody");
        become_the_one(&lock, A);
        if lock.enter(A).is_none() {
            return;
        }
        for _ in 0..3 {
            lock.visit(B).count_round();
            drop(lock.visit(B));
            assert!(!lock.is_deserted(), "one round");
            lock.lock(A).count_round();
        }
        lock.visit(B).count_round();
        lock.visit(B).count_round();
        assert!(lock.is_deserted() && !lock.is_vacant());
        drop(lock.lock_often(A));
        assert!(!lock.is_deserted() && lock.enter(A).is_some());
        lock.visit(B).count_round();
        lock.visit(B).count_round();
        drop(lock.lock(B));
        assert!(!lock.is_deserted() && lock.is_vacant(), "the next turn");
    }

    /// A new thread, with the identity of one that only the parent has.
    #[test]
    fn in_a_child_nobody_waits_for_a_thread_that_is_not_there() {
        let lock = BiasedLock::new();
        become_the_one(&lock, A);
        if lock.enter(A).is_none() {
            // No heavy fence.
            return;
        }
        lock.hold(B);
        lock.announce();
        lock.recover(B);
        assert!(lock.owner().unwrap().is_left() && lock.is_deserted());
        lock.let_go(B);
        assert!(lock.enter(A).is_none());
        drop(lock.lock_often(A));
        drop(lock.visit(B));
    }

    /// For so long that the waiter sleeps (`rest.rs`).
    #[test]
    fn who_takes_the_lock_waits_for_the_one_that_is_preempted_at_work() {
        extern crate std;
        let (lock, taken) = (BiasedLock::new(), AtomicU32::new(0));
        become_the_one(&lock, A);
        let Some(alone) = lock.enter(A) else {
            // No heavy fence.
            return;
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let _held = lock.lock(B);
                // Relaxed, here and below: a flag by itself.
                taken.store(1, Ordering::Relaxed);
            });
            std::thread::sleep(core::time::Duration::from_millis(20));
            assert!(taken.load(Ordering::Relaxed) == 0 && !other.is_finished());
            drop(alone);
        });
        assert_eq!(taken.load(Ordering::Relaxed), 1);
        assert!(lock.enter(A).is_none(), "its turn has ended");
    }

    /// Each turn has to be earned by twice as many.
    #[test]
    fn another_ends_it_and_after_some_turns_it_is_a_lock() {
        let lock = BiasedLock::new();
        for turn in 0..TURNS {
            let (me, other) = if turn % 2 == 0 { (A, B) } else { (B, A) };
            // Relaxed: one thread.
            assert_eq!(lock.turn.load(Ordering::Relaxed), turn);
            (1..IN_A_ROW << turn).for_each(|_| drop(lock.lock_often(me)));
            assert!(lock.enter(me).is_none(), "not yet");
            drop(lock.lock_often(me));
            if !fence_heavy() {
                // There nobody ever is.
                return assert!(lock.enter(me).is_none());
            }
            assert!(lock.enter(me).is_some() && lock.enter(other).is_none());
            assert!(lock.is_anothers(other) && !lock.is_anothers(me));
            drop(lock.lock(other));
            assert!(lock.enter(me).is_none() && !lock.is_anothers(other));
        }
        (0..IN_A_ROW << TURNS).for_each(|_| drop(lock.lock_often(A)));
        assert!(lock.enter(A).is_none() && lock.enter(UNKNOWN).is_none());
    }
}
