//! A lock that a thread need not take while it is alone with what the lock protects.
//!
//! ```text
//!   the one    at work := 1 ── light fence ── key mine? ── uses it ── at work := 0             no: takes the lock
//!                                    ╳
//!   another    lock ── key := SEIZED ─ heavy fence ── waits until at work = 0 ── uses it ── unlock
//! ```
//!
//! A thread that has taken the lock [`IN_A_ROW`] times, with no other in between, becomes *the one*. From then on it
//! may [enter](BiasedLock::enter) without the lock, for short work that calls no other code: two plain stores and two
//! comparisons (`owner.rs` has the argument for them). Everything else it does under the lock, like all others; while
//! it holds the lock it is not let in by the short way, so foreign code that comes back here waits for itself, as with
//! any lock, and breaks nothing.
//!
//! The first other thread that takes the lock ends this for good: it bars the one, passes a heavy fence, and waits
//! until the one has left. From then on it is a lock. A second thread could become the one later only with a place of
//! its own for "at work": the first may have been stopped on its way in, and would overwrite what the second one says
//! there. And threads that take turns would pay a heavy fence for each.
//!
//! Worked: a `Heap` serves one request on one thread: 16 locks, and then none. When a second thread comes, it pays a
//! few microseconds, once.
//!
//! The idea is K. Kawachiya's, A. Koseki's and T. Onodera's ("Lock reservation", OOPSLA 2002), there for Java's
//! monitors. The models explore this file as it ships (`tests/models/src/loom/bias.rs`).

#![forbid(unsafe_code)]

use core::time::Duration;

use super::owner::SEIZED;
use super::{AtomicU32, AtomicUsize, Guard, Lock, Ordering, Owner, fence_heavy, relax, thread, wait_for};

/// How often in a row a thread takes the lock before it is thought to be alone. Then it pays a heavy fence, to find out
/// whether there is one.
const IN_A_ROW: u32 = 16;

/// [`BiasedLock::one`]: nobody yet, or nobody any more.
const NOBODY: usize = 0;
const NOBODY_EVER: usize = SEIZED;

/// The identity of a thread where threads cannot be told apart. It is never the one.
pub const UNKNOWN: usize = 1;

/// Pauses of 64 spins each that stand in for a fence which the system refuses now, though it granted it before: 0.1 ms
/// at least. Not yields: among threads that are busy each may take milliseconds.
const PAUSES_WITHOUT_FENCE: u32 = 1 << 8;

/// Rounds of waiting for the one before the waiter sleeps. A yield does not help the one if its thread has a lower
/// priority than the waiter and is to run on the same processor.
const ROUNDS_AWAKE: u32 = 1 << 6;

/// For how long it sleeps at a time, and for how many rounds that counts (as they do where a process is ending and the
/// one with it: `windows.rs`).
const SLEEP: Duration = Duration::from_micros(100);
const ROUNDS_ASLEEP: u32 = 1 << 10;

/// A lock with a short way for one thread. What it protects names it.
#[derive(Debug)]
pub struct BiasedLock {
    lock: Lock,
    /// Its key is the one's identity while the lock is free, and [`SEIZED`] otherwise. So it is written under the lock.
    owner: Owner,
    /// Below: only under the lock. The one, [`NOBODY`] or [`NOBODY_EVER`].
    one: AtomicUsize,
    /// Who took the lock last, and how often in a row.
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
            owner: Owner::new(SEIZED),
            one: AtomicUsize::new(NOBODY),
            last: AtomicUsize::new(NOBODY),
            times: AtomicU32::new(0),
        }
    }

    /// What the calling thread has to say here that it is. To ask the system takes some time, and when there can be no
    /// one any more, all threads are alike.
    #[inline(always)]
    pub fn me(&self) -> usize {
        // Relaxed: when it has this value, it keeps it, and who takes the lock after this sees it.
        if self.one.load(Ordering::Relaxed) == NOBODY_EVER {
            UNKNOWN
        } else {
            thread()
        }
    }

    /// The short way, for the thread `me`, if it is the one and does not hold the lock. In between it must not call
    /// code that may come back here.
    ///
    /// An identity belongs to one thread at a time; it is neither 0, 1 nor 3. When a thread has ended, another may have
    /// it.
    #[inline(always)]
    pub fn enter(&self, me: usize) -> Option<Alone<'_>> {
        // A look first: only one thread may ever announce itself to an owner.
        (self.owner.is_for(me) && self.owner.enter(me)).then(|| Alone { owner: &self.owner })
    }

    /// Waits until the lock is free and the one is not at work.
    #[inline]
    pub fn lock(&self, me: usize) -> Held<'_> {
        self.held(me, self.lock.lock())
    }

    /// The same, if the lock is free now.
    #[inline]
    pub fn try_lock(&self, me: usize) -> Option<Held<'_>> {
        Some(self.held(me, self.lock.try_lock()?))
    }

    /// As [`lock`](Self::lock), and makes the caller the one if it has done only this for a while, and nobody else.
    #[inline]
    pub fn lock_often(&self, me: usize) -> Held<'_> {
        let held = self.lock(me);
        // Relaxed: under the lock.
        if self.one.load(Ordering::Relaxed) == NOBODY && me != UNKNOWN {
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
        if times < IN_A_ROW {
            return held;
        }
        // Not under the lock: the first fence of a process may take 10 ms, for which others would wait.
        drop(held);
        let has_fence = fence_heavy();
        let held = self.lock(me);
        if self.one.load(Ordering::Relaxed) == NOBODY {
            // Without a heavy fence there is no way to bar the one. And who has not been alone for so long is not the
            // one: it would pass a fence each time it thought so.
            let is_alone = self.last.load(Ordering::Relaxed) == me;
            let one = if has_fence && is_alone { me } else { NOBODY_EVER };
            self.one.store(one, Ordering::Relaxed);
        }
        held
    }

    /// With the lock held: bars the one. If that is another thread, it is the one no longer.
    #[inline]
    fn held<'a>(&'a self, me: usize, guard: Guard<'a>) -> Held<'a> {
        // Relaxed: under the lock.
        let one = self.one.load(Ordering::Relaxed);
        if one == me {
            self.owner.bar();
        } else if one != NOBODY && one != NOBODY_EVER {
            self.revoke();
        }
        Held {
            lock: self,
            _guard: guard,
        }
    }

    #[cold]
    fn revoke(&self) {
        self.owner.bar();
        if !fence_heavy() {
            // It could be granted when the one was made. What the fence would have made visible is a store that the one
            // made before it read its key: no processor keeps a store to itself for as long as this takes.
            (0..PAUSES_WITHOUT_FENCE).for_each(|_| relax(6));
        }
        let mut round: u32 = 0;
        while !self.owner.is_left() {
            relax(round);
            round = round.saturating_add(if round < ROUNDS_AWAKE {
                1
            } else {
                wait_for(&AtomicU32::new(0), 0, Some(SLEEP));
                ROUNDS_ASLEEP
            });
        }
        // Relaxed: under the lock.
        self.one.store(NOBODY_EVER, Ordering::Relaxed);
    }

    /// Lets the one in again, if there is one: before the lock is released.
    #[inline]
    fn unbar(&self) {
        // Relaxed: under the lock.
        let one = self.one.load(Ordering::Relaxed);
        if one != NOBODY && one != NOBODY_EVER {
            // The lock's holder is the one, or has just made it: nobody else is let in by this key.
            self.owner.set(one);
        }
    }

    /// Waits as [`lock`](Self::lock) does, then holds the lock until [`let_go`](Self::let_go): for `fork`.
    #[cfg_attr(
        not(feature = "std"),
        allow(dead_code, reason = "for fork, which needs an operating system")
    )]
    pub(crate) fn hold(&self, me: usize) {
        core::mem::forget(self.lock(me));
    }

    /// Releases what [`hold`](Self::hold) acquired, in the same process or in its child.
    #[cfg_attr(
        not(feature = "std"),
        allow(dead_code, reason = "for fork, which needs an operating system")
    )]
    pub(crate) fn let_go(&self) {
        self.unbar();
        self.lock.let_go();
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
    _guard: Guard<'a>,
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        // Before the guard: fields are dropped after this.
        self.lock.unbar();
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
        assert!(lock.enter(A).is_none() && lock.try_lock(B).is_none());
        lock.let_go();
        assert_eq!(lock.enter(A).is_some(), fence_heavy());
    }

    #[test]
    fn another_ends_it_for_good() {
        let lock = BiasedLock::new();
        become_the_one(&lock, A);
        drop(lock.try_lock(B));
        assert!(lock.enter(A).is_none());
        become_the_one(&lock, A);
        become_the_one(&lock, B);
        assert!(lock.enter(A).is_none() && lock.enter(B).is_none());
        if fence_heavy() {
            assert_eq!(lock.me(), UNKNOWN);
        }
    }
}
