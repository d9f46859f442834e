//! A small lock for slow paths: growth, the registry of caches, the central lists of the global allocator.
//!
//! ```text
//!   0 free ──lock──▶ 1 held ──a second thread waits──▶ 2 held, with sleepers ──unlock──▶ 0, wake one
//! ```
//!
//! Never `std::sync::Mutex` or a lock crate in an allocator: they may allocate. This one is a word; where there is a
//! futex waiters sleep on it, elsewhere they spin with back-off. It is not fair and knows no poisoning: nothing here
//! unwinds. The algorithm is the second of Ulrich Drepper, "Futexes are tricky".
//!
//! Uncontended, a lock and unlock are one compare-exchange and one swap (~18 ns) and no system call.

#![forbid(unsafe_code)]

use core::time::Duration;

use super::{AtomicU32, Ordering, relax, wait, wait_for, wake};

const FREE: u32 = 0;
const HELD: u32 = 1;
const AWAITED: u32 = 2;

/// Rounds of spinning before a waiter goes to sleep: about as long as a short critical section.
const SPINS: u32 = 6;

/// Rounds, most of them yields, in which one who was woken should be there: some 100 us.
const ROUNDS_TO_WAKE: u32 = 256;

/// A lock that guards no data of its own: what it protects says so.
#[derive(Debug)]
pub struct Lock {
    state: AtomicU32,
}

impl Default for Lock {
    fn default() -> Self {
        Self::new()
    }
}

impl Lock {
    /// A free lock.
    #[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
    #[must_use]
    pub const fn new() -> Self {
        Self {
            state: AtomicU32::new(FREE),
        }
    }

    /// A free lock. (A checker's atomics have no `const` constructor.)
    #[cfg(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))]
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: AtomicU32::new(FREE),
        }
    }

    /// Waits until the lock is free, and holds it as long as the guard lives.
    #[inline]
    pub fn lock(&self) -> Guard<'_> {
        if let Some(guard) = self.try_lock() {
            return guard;
        }
        self.lock_slow()
    }

    /// Holds the lock if it is free now.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_>> {
        // Acquire: sees what the last holder wrote, whose `drop` released it.
        let taken = self
            .state
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed);
        // Not `then_some`: a guard made for nothing would unlock when it is dropped.
        taken.is_ok().then(|| Guard { lock: self })
    }

    /// Waits until the lock is free, and holds it until [`let_go`](Self::let_go): for `fork`, which begins and ends in
    /// functions of their own.
    #[cfg_attr(
        not(feature = "std"),
        allow(dead_code, reason = "for fork, which needs an operating system")
    )]
    pub(crate) fn hold(&self) {
        core::mem::forget(self.lock());
    }

    /// Ends what [`hold`](Self::hold) began, in the process that did so or in its child.
    #[cfg_attr(
        not(feature = "std"),
        allow(dead_code, reason = "for fork, which needs an operating system")
    )]
    pub(crate) fn let_go(&self) {
        drop(Guard { lock: self });
    }

    /// Waits about as long as a short critical section, and never for a thread that does not run.
    #[inline]
    pub fn lock_soon(&self) -> Option<Guard<'_>> {
        self.try_lock().or_else(|| self.spin())
    }

    /// Waits as long as a short critical section, and then so many times a millisecond (or what the system's timer has
    /// for one): a wake that somebody else was quicker to use counts as one. For who may be waited for, in the end, by
    /// whoever holds the lock.
    #[cold]
    pub fn lock_within(&self, waits: u32) -> Option<Guard<'_>> {
        self.lock_soon().or_else(|| {
            (0..=waits).find_map(|round| {
                // Acquire: as in `try_lock`. Taken as awaited, for others may sleep. The last look is behind the last
                // wait: who gives up may have been the one that was woken, and leaves the word so that another will be.
                if self.state.swap(AWAITED, Ordering::Acquire) == FREE {
                    return Some(Guard { lock: self });
                }
                if round < waits {
                    wait_for(&self.state, AWAITED, Some(Duration::from_millis(1)));
                }
                None
            })
        })
    }

    #[cold]
    fn spin(&self) -> Option<Guard<'_>> {
        (0..SPINS).find_map(|round| {
            relax(round);
            self.try_lock()
        })
    }

    #[cold]
    fn lock_slow(&self) -> Guard<'_> {
        if let Some(guard) = self.spin() {
            return guard;
        }
        let mut round = SPINS;
        // Acquire: as in `try_lock`. Having slept, we cannot know whether others still do, so the lock is taken as
        // awaited.
        while self.state.swap(AWAITED, Ordering::Acquire) != FREE {
            wait(&self.state, AWAITED, round);
            round = round.saturating_add(1);
        }
        Guard { lock: self }
    }
}

/// The right to what a [`Lock`] protects; dropping it unlocks.
#[derive(Debug)]
pub struct Guard<'a> {
    lock: &'a Lock,
}

impl<'a> Guard<'a> {
    /// Lets go, and holds again: if others sleep for it, one of them goes first, unless he takes long to wake up. For
    /// who holds it long, and could be interrupted here.
    ///
    /// He does not sleep for it as they do: the wake of one who lets go is one sleeper's, and he would take it from
    /// them.
    pub fn after_others(self) -> Self {
        let lock = self.lock;
        // Relaxed, twice: looks. Who comes just now waits once more.
        let awaited = lock.state.load(Ordering::Relaxed) == AWAITED;
        drop(self);
        if awaited {
            for round in 0..ROUNDS_TO_WAKE {
                if lock.state.load(Ordering::Relaxed) != FREE {
                    break;
                }
                relax(round);
            }
        }
        lock.lock()
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: hands what we wrote to the next holder, whose exchange acquires it.
        if self.lock.state.swap(FREE, Ordering::Release) == AWAITED {
            wake(&self.lock.state);
        }
    }
}
