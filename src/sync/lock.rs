//! A small lock for slow paths: growth, the registry of caches, the central lists of the global allocator.
//!
//! ```text
//!   0 free ──lock──▶ 1 held ──a second thread waits──▶ 2 held, with sleepers ──unlock──▶ 0, wake one
//!                                                            │ one has waited for a millisecond
//!                                                            ▼
//!                                                      3 held, one starves ──unlock──▶ 4 reserved, wake one
//! ```
//!
//! An allocator must not use `std::sync::Mutex` or a lock crate: they may allocate. This lock is one word. Waiters
//! sleep on it where there is a futex, and spin with back-off elsewhere. It has no poisoning: nothing here unwinds. The
//! algorithm is the second of Ulrich Drepper, "Futexes are tricky", with one addition.
//!
//! **It is fair in the end.** A thread that needs the lock again and again finds it free sooner than a sleeper wakes
//! up, so that sleeper may wait for as long as the other goes on: a fork beside a thread that was refused in a loop
//! took two seconds on a machine with ten runnable threads per processor. (To hand the lock over each time would let
//! it lie idle while each sleeper wakes up.) So a thread that has waited for a millisecond, and is woken in vain, says
//! so, and then the lock is released as *reserved*: a thread that comes and would wait for the lock sleeps first, for
//! 10 ms at most, in case the other has a low priority and does not come. A thread that only tries the lock takes it
//! even so: to it a reserved lock is free. (Where waking does not say whether anyone slept, nothing is ever reserved:
//! `clock` stands still there.) The idea is Go's (`sync.Mutex`, its starvation mode).
//!
//! Worked: a thread holds the lock for 100 µs at a time, with nothing in between. Another comes, sleeps, and is woken
//! some ten times, always too late. After a millisecond the lock is reserved, and it is the next to have it.
//!
//! **A lock that is held for a fork is free to the thread that forks.** It is held while nothing is done under it, so
//! what it protects is whole. A handler of that fork may come back here (`global/fork.rs`), and its thread must not
//! wait for itself. So such a lock is marked as *kept*. The thread takes it as if it were free, as often as it likes,
//! and puts it back; all others see a lock that is held throughout.
//!
//! ```text
//!   held ──keep──▶ held, kept ──the thread that forks locks──▶ held, lent ──it unlocks──▶ held, kept ──let go──▶ held
//! ```
//!
//! Uncontended, lock and unlock cost one compare-exchange each (~18 ns) and no system call.

#![forbid(unsafe_code)]

use core::time::Duration;

use super::{AtomicU32, Ordering, clock, is_forking, is_long_since, relax, spins, wait, wait_for, wake};

const FREE: u32 = 0;
const HELD: u32 = 1;
const AWAITED: u32 = 2;
const STARVED: u32 = 3;
/// Free, but those who would wait wait. Only while a thread that has slept is on its way here.
const RESERVED: u32 = 4;
/// Added to one of the three held states: held for a fork, and at rest.
const KEPT: u32 = 8;
/// In its place while the thread that forks is at work under the lock.
const LENT: u32 = 16;

/// How long a thread waits at most for another that a free lock is reserved for.
const RESERVATION: Duration = Duration::from_millis(10);

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

    /// A free lock on which those who wait sleep until they are woken.
    #[cfg(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))]
    #[must_use]
    pub fn with_sleepers() -> Self {
        Self {
            state: AtomicU32::with_sleepers(FREE),
        }
    }

    /// Waits until the lock is free, then holds it for as long as the guard lives.
    #[inline]
    pub fn lock(&self) -> Guard<'_> {
        if let Some(guard) = self.take(FREE, HELD) {
            return guard;
        }
        self.lock_slow()
    }

    /// Whether a thread that came now would find it held, or reserved for another.
    pub fn is_held(&self) -> bool {
        // Relaxed: only a look.
        self.state.load(Ordering::Relaxed) != FREE
    }

    /// Acquires the lock if it is free now.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_>> {
        self.take(FREE, HELD).or_else(|| self.take_otherwise())
    }

    /// The same in spite of a reservation, or by the thread that forks.
    #[cold]
    fn take_otherwise(&self) -> Option<Guard<'_>> {
        // Relaxed: a look before the exchange.
        if self.state.load(Ordering::Relaxed) == RESERVED {
            return self.take(RESERVED, AWAITED);
        }
        self.take_kept()
    }

    /// A lock that is held for a fork, if the caller is the thread that forks.
    #[cold]
    fn take_kept(&self) -> Option<Guard<'_>> {
        // Relaxed, twice: none but the thread that forks writes these two bits between the fork's hold and its end, and
        // it alone goes on here. It acquired what the lock protects when it took the lock for the fork.
        if self.state.load(Ordering::Relaxed) & KEPT == 0 || !is_forking() {
            return None;
        }
        self.state.fetch_xor(KEPT | LENT, Ordering::Relaxed);
        Some(Guard { lock: self })
    }

    #[inline]
    fn take(&self, free: u32, held: u32) -> Option<Guard<'_>> {
        // Acquire: sees what the last holder wrote; pairs with the release in its `drop`.
        let taken = self
            .state
            .compare_exchange(free, held, Ordering::Acquire, Ordering::Relaxed);
        // Not `then_some`: that would make a guard even on failure, and dropping it would unlock.
        taken.is_ok().then(|| Guard { lock: self })
    }

    /// Waits until the lock is free, then holds it until [`let_go`](Self::let_go): for `fork`, which begins and ends in
    /// different functions.
    pub(crate) fn hold(&self) {
        core::mem::forget(self.lock());
        self.keep();
    }

    /// The guard of this lock was forgotten: holds it until [`let_go`](Self::let_go). The caller is about to fork, and
    /// leaves what the lock protects as others may find it.
    pub(crate) fn keep(&self) {
        // Relaxed: only for this thread, in `take_kept`.
        let before = self.state.fetch_or(KEPT, Ordering::Relaxed);
        debug_assert!(before & (KEPT | LENT) == 0);
    }

    /// Releases what [`hold`](Self::hold) acquired, in the same process or in its child.
    pub(crate) fn let_go(&self) {
        // Relaxed: as in `keep`; what follows releases the lock.
        let before = self.state.fetch_and(!KEPT, Ordering::Relaxed);
        debug_assert!(before & (KEPT | LENT) == KEPT);
        self.unlock();
    }

    /// Releases the lock of a guard that was forgotten.
    #[inline]
    pub(super) fn unlock(&self) {
        drop(Guard { lock: self });
    }

    /// Waits about as long as a short critical section, and never for a thread that is not running.
    #[inline]
    pub fn lock_soon(&self) -> Option<Guard<'_>> {
        self.try_lock().or_else(|| self.spin(Self::try_lock))
    }

    /// Waits as long as a short critical section, and then up to `waits` times a millisecond (or the closest that the
    /// system's timer has). A wake that another thread was quicker to use counts as one wait. For callers that the
    /// lock's holder may itself be waiting for in the end.
    #[cold]
    pub fn lock_within(&self, waits: u32) -> Option<Guard<'_>> {
        self.lock_soon().or_else(|| {
            (0..=waits).find_map(|round| {
                // The last attempt follows the last wait: a thread that gives up may be the one that was woken, and
                // leaves the word such that another will be.
                let seen = match self.attempt(round > 0, AWAITED) {
                    Ok(guard) => return Some(guard),
                    Err(seen) => seen,
                };
                if round < waits {
                    wait_for(&self.state, seen, Some(Duration::from_millis(1)));
                }
                None
            })
        })
    }

    #[cold]
    fn spin<'a>(&'a self, attempt: impl Fn(&'a Self) -> Option<Guard<'a>>) -> Option<Guard<'a>> {
        (0..spins(&self.state, SPINS)).find_map(|round| {
            relax(round);
            attempt(self)
        })
    }

    #[cold]
    fn lock_slow(&self) -> Guard<'_> {
        let kept = self.take_kept();
        if let Some(guard) = kept.or_else(|| self.spin(|lock| lock.take(FREE, HELD))) {
            return guard;
        }
        let (begin, mut mark, mut has_slept) = (clock(), AWAITED, false);
        let mut round = SPINS;
        loop {
            match self.attempt(has_slept, mark) {
                Ok(guard) => return guard,
                // Not for long: the thread it is reserved for may not get a processor for a while.
                Err(RESERVED) => wait_for(&self.state, RESERVED, Some(RESERVATION)),
                Err(seen) => wait(&self.state, seen, round),
            }
            round = round.saturating_add(1);
            has_slept = true;
            if is_long_since(begin) {
                mark = STARVED;
            }
        }
    }

    /// One attempt of a thread that will sleep if it fails. Then the word says at least what `mark` does, unless it is
    /// reserved for others; returns what it says.
    fn attempt(&self, has_slept: bool, mark: u32) -> Result<Guard<'_>, u32> {
        // Relaxed: the exchange compares.
        let mut seen = self.state.load(Ordering::Relaxed);
        loop {
            let is_free = match seen {
                FREE => true,
                RESERVED if has_slept => true,
                RESERVED => return Err(seen),
                _ => false,
            };
            // Taken as awaited: after sleeping we cannot know whether others still do. What is held for a fork stays
            // marked as that.
            let next = if is_free {
                AWAITED
            } else {
                seen.max(mark | seen & (KEPT | LENT))
            };
            // Acquire: as in `take`.
            match self
                .state
                .compare_exchange(seen, next, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) if is_free => return Ok(Guard { lock: self }),
                Ok(_) => return Err(next),
                Err(now) => seen = now,
            }
        }
    }

    /// Releases a lock that others wait for, or puts one back that is held for a fork. Whoever takes it next must not
    /// free the lock's own memory before this returns; no user of this lock does.
    #[cold]
    fn pass_on(&self) {
        // Relaxed, twice: a thread that begins to starve just now is served the next time; and as in `take_kept`.
        let seen = self.state.load(Ordering::Relaxed);
        if seen & LENT != 0 {
            self.state.fetch_xor(KEPT | LENT, Ordering::Relaxed);
            return;
        }
        let next = if seen == STARVED { RESERVED } else { FREE };
        // Release: as in `drop`.
        self.state.swap(next, Ordering::Release);
        if wake(&self.state) || next == FREE {
            return;
        }
        // Nobody slept: those who wait are awake, or this is the child of a fork and they do not exist. Relaxed: an
        // exchange, so it passes the release above on.
        let given_up = self
            .state
            .compare_exchange(RESERVED, FREE, Ordering::Relaxed, Ordering::Relaxed);
        if given_up.is_ok() {
            // A thread may have gone to sleep in between, as the lock was reserved.
            wake(&self.state);
        }
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
        let awaited = lock.state.load(Ordering::Relaxed) >= AWAITED;
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
        let released = self
            .lock
            .state
            .compare_exchange(HELD, FREE, Ordering::Release, Ordering::Relaxed);
        if released.is_err() {
            self.lock.pass_on();
        }
    }
}

#[cfg(all(test, feature = "std", any(target_os = "linux", target_os = "android")))]
mod tests {
    extern crate std;

    use super::*;
    use crate::sync::set_forking;

    fn lock(state: u32) -> Lock {
        Lock {
            state: AtomicU32::new(state),
        }
    }

    /// A thread that only tries takes it; one that would wait does so, but not for ever.
    #[test]
    fn a_reserved_lock_is_free_to_who_tries_it_and_in_the_end_to_all() {
        let ways: [fn(&Lock) -> Option<Guard<'_>>; 4] = [
            Lock::try_lock,
            Lock::lock_soon,
            |lock| lock.lock_within(0),
            |lock| Some(lock.lock()),
        ];
        for way in ways {
            let lock = lock(RESERVED);
            let guard = way(&lock).expect("nobody holds it");
            // Relaxed, twice: one thread.
            assert_eq!(lock.state.load(Ordering::Relaxed), AWAITED);
            drop(guard);
            assert_eq!(lock.state.load(Ordering::Relaxed), FREE);
        }
    }

    /// It takes the lock as if that were free, once at a time. Who waits meanwhile gets it when all is over.
    #[test]
    fn a_lock_held_for_a_fork_is_free_to_the_thread_that_forks_alone() {
        let ways: [fn(&Lock) -> Option<Guard<'_>>; 4] = [
            Lock::try_lock,
            Lock::lock_soon,
            |lock| lock.lock_within(0),
            |lock| Some(lock.lock()),
        ];
        let tries = &ways[..3];
        let lock = lock(FREE);
        lock.hold();
        assert!(tries.iter().all(|way| way(&lock).is_none()));
        lock.let_go();
        lock.hold();
        set_forking(true);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| drop(lock.lock()));
            // Relaxed, here and below: a look. Until it sleeps, or is about to.
            while lock.state.load(Ordering::Relaxed) == HELD | KEPT {
                std::thread::yield_now();
            }
            for way in ways {
                let guard = way(&lock).expect("this thread holds it").after_others();
                assert!(tries.iter().all(|way| way(&lock).is_none()), "it is at work there");
                drop(guard);
                assert_eq!(lock.state.load(Ordering::Relaxed) & (KEPT | LENT), KEPT);
            }
            assert!(!other.is_finished());
            lock.let_go();
        });
        set_forking(false);
        assert_eq!(lock.state.load(Ordering::Relaxed), FREE);
    }

    /// As in the child of a fork, where those that waited do not exist.
    #[test]
    fn a_lock_is_not_left_reserved_for_nobody() {
        for state in [HELD, AWAITED, STARVED] {
            let lock = lock(state | KEPT);
            lock.let_go();
            // Relaxed: one thread.
            assert_eq!(lock.state.load(Ordering::Relaxed), FREE);
        }
    }
}
