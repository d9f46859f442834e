//! A small lock for slow paths: growth, the registry of caches, the central lists of the global allocator.
//!
//! ```text
//!   0 free ──lock──▶ 1 held ──a second thread waits──▶ 2 held, with sleepers ──unlock──▶ 0, wake one
//! ```
//!
//! An allocator must not use `std::sync::Mutex` or a lock crate: they may allocate. This lock is one word. Waiters
//! sleep on it where there is a futex, and spin with back-off elsewhere. It is not fair and has no poisoning: nothing
//! here unwinds. The algorithm is the second of Ulrich Drepper, "Futexes are tricky".
//!
//! Uncontended, lock and unlock cost one compare-exchange and one swap (~18 ns) and no system call.

#![forbid(unsafe_code)]

use core::time::Duration;

use super::{AtomicU32, Ordering, relax, wait, wait_for, wake};

const FREE: u32 = 0;
const HELD: u32 = 1;
const AWAITED: u32 = 2;

/// Rounds of spinning before a waiter sleeps: about as long as a short critical section.
const SPINS: u32 = 6;

/// Rounds, most of them yields, within which a woken thread should arrive: some 100 us.
const ROUNDS_TO_WAKE: u32 = 256;

/// A lock that guards no data of its own: what it protects names it.
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

    /// Waits until the lock is free, then holds it for as long as the guard lives.
    #[inline]
    pub fn lock(&self) -> Guard<'_> {
        if let Some(guard) = self.try_lock() {
            return guard;
        }
        self.lock_slow()
    }

    /// Acquires the lock if it is free now.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_>> {
        // Acquire: sees what the last holder wrote; pairs with the release in its `drop`.
        let taken = self
            .state
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed);
        // Not `then_some`: that would make a guard even on failure, and dropping it would unlock.
        taken.is_ok().then(|| Guard { lock: self })
    }

    /// Waits until the lock is free, then holds it until [`let_go`](Self::let_go): for `fork`, which begins and ends in
    /// different functions.
    pub(crate) fn hold(&self) {
        core::mem::forget(self.lock());
    }

    /// Releases what [`hold`](Self::hold) acquired, in the same process or in its child; or the lock of a guard that
    /// was forgotten.
    #[inline]
    pub(crate) fn let_go(&self) {
        drop(Guard { lock: self });
    }

    /// Waits about as long as a short critical section, and never for a thread that is not running.
    #[inline]
    pub fn lock_soon(&self) -> Option<Guard<'_>> {
        self.try_lock().or_else(|| self.spin())
    }

    /// Waits as long as a short critical section, and then up to `waits` times a millisecond (or the closest that the
    /// system's timer has). A wake that another thread was quicker to use counts as one wait. For callers that the
    /// lock's holder may itself be waiting for in the end.
    #[cold]
    pub fn lock_within(&self, waits: u32) -> Option<Guard<'_>> {
        self.lock_soon().or_else(|| {
            (0..=waits).find_map(|round| {
                // Acquire: as in `try_lock`. Taken as awaited, since others may sleep. The last attempt follows the
                // last wait: a thread that gives up may be the one that was woken, and leaves the word such that
                // another will be.
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
        // Acquire: as in `try_lock`. After sleeping we cannot know whether others still do, so the lock is taken as
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
    /// Releases the lock and acquires it again. If others sleep on it, one of them goes first, unless it takes long to
    /// wake up. For a thread that holds the lock for long, and can be interrupted here.
    ///
    /// That thread does not sleep on the lock as they do: an unlock wakes one sleeper, and it would take that wake from
    /// them.
    pub fn after_others(self) -> Self {
        let lock = self.lock;
        // Relaxed, twice: hints only, no partner. A thread that begins to sleep just now waits once more.
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
        // Release: publishes what we wrote to the next holder, whose exchange acquires it.
        if self.lock.state.swap(FREE, Ordering::Release) == AWAITED {
            wake(&self.lock.state);
        }
    }
}
