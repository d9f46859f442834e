//! The thread that gives memory back while the program does something else, or nothing.
//!
//! ```text
//!   a free, the slow path ─▶ 1 MiB to find and no keeper? ─▶ after all constructors? ─▶ a thread, once
//!
//!   thread   tick ─▶ pause ─▶ tick ─▶ … nothing left: sleep until there is 1 MiB more to find
//! ```
//!
//! **Start.** The thread is started when a MiB has been freed, or could be freed without being noticed
//! (`object/keeper.rs`), but never before the constructors of the program have run. It is started by:
//!
//! - a thread that frees on the slow path, at the end of the call, with nothing held;
//! - a thread that begins to use the heap;
//! - an allocation in a process that has one thread, but not the first allocation.
//!
//! If there are other threads, no allocation but a thread's first starts it, because of a possible deadlock: the
//! allocation may be made in a callback of `dl_iterate_phdr`, under a lock of the loader, and creating a thread takes
//! another. The allocation would then wait for a thread that is loading a library, which waits for the callback. (A
//! free in such a callback, including the one in a `realloc` that moves, may still deadlock if it is the one that
//! completes the MiB.)
//!
//! The thread runs on a stack that we map ourselves and is created with the C library's functions, so nothing here asks
//! this allocator for memory. If the system refuses (a limit on threads, a filter), the next attempt follows after
//! twice as many MiB, up to 1 GiB; the heap works without the thread meanwhile.
//!
//! **Life.** All signals are blocked in it, so handlers run where they always did. Its name is `pageheap`. It reads two
//! clocks, reads the limits of the process's group once a second, and sleeps. With nothing left to do it waits on a
//! futex indefinitely and costs nothing. (Without a futex it looks once a second.) It never allocates. It runs no code
//! of the program except the hooks for pressure (`GlobalHeap::on_pressure`) and the methods of the program's own source
//! (`GlobalHeap::with_source`).
//!
//! (On Windows there are no signals to block, the stack is the system's, and the loader calls the program's libraries
//! when the thread begins: `windows.rs`.)
//!
//! **End.** Before a fork, scavengers are held after the chunk or the look they are at, together with all other locks.
//! The child has no such thread, and starts one when it wants one. Unloading a library waits for the thread to end. At
//! the end of the process the thread just stops.
//!
//! Cost: a stack of 40 KiB, 16 of them for the thread itself, plus what the program's thread-locals need, which the C
//! library puts there too; 256 KiB if code of the program runs on it; the C library's minimum if that is more. This
//! crate touches only 8 to 12 KiB of it.

use core::any::TypeId;
use core::cell::Cell;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;

use crate::heap::Clock;
use crate::object::{ABSENT, ASLEEP, AWAKE, Keeper, OFF, Objects};
use crate::scavenge::pressure::Patience;
use crate::source::{KeepErrno, Source, System};
use crate::sync::{fence_heavy, wait_for};
use crate::units::PageCount;

#[cfg(unix)]
use super::pressure::{Turn, Watch};
#[cfg(windows)]
use super::status::{Turn, Watch};

#[cfg(unix)]
#[path = "unix.rs"]
mod host;
#[cfg(windows)]
#[path = "windows.rs"]
mod host;

#[cfg(target_os = "linux")]
pub(super) use host::{constructors_have_run, end, is_started};

/// How long it waits before it goes to sleep, to look once more: longer than the time between two looks. (Where looks
/// take long, and come seconds apart, it wakes and waits again until one is due.)
const ANOTHER_LOOK: Duration = Duration::from_millis(300);

/// How often the system's state is read.
const BETWEEN_WATCHES: Duration = Duration::from_secs(1);

/// Whether a thread has been started, or is just about to be.
static STARTED: AtomicBool = AtomicBool::new(false);

/// Whether no thread may be started any more: the process ends.
static FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// Prevents further starts. Returns whether a thread was started, or may be.
#[cfg(any(target_os = "linux", windows))]
pub(super) fn forbid() -> bool {
    // SeqCst, here and in `start`, a store and then a load in each: either we see that it starts one, or it sees that
    // it must not.
    FORBIDDEN.store(true, Ordering::SeqCst);
    STARTED.load(Ordering::SeqCst)
}

/// Starts the thread, unless it is too early or it cannot be done. To be called when [`Keeper::is_wanted`], by a thread
/// that may.
#[cold]
pub(super) fn start<S: Source + Send + Sync + 'static>(objects: &'static Objects<S>) {
    if !host::constructors_have_run() || !objects.keeper().change(ABSENT, AWAKE) {
        return;
    }
    // SeqCst, twice: as in `forbid`.
    STARTED.store(true, Ordering::SeqCst);
    if FORBIDDEN.load(Ordering::SeqCst) {
        objects.keeper().change(AWAKE, OFF);
        return;
    }
    let _errno = KeepErrno::new();
    let has_guest = objects.keeper().notices.are_any() || TypeId::of::<S>() != TypeId::of::<System>();
    if !host::launch(objects, has_guest) {
        objects.keeper().has_failed();
    }
}

/// The thread's main loop, which normally never ends.
fn run<S: Source + Send + Sync + 'static>(objects: &'static Objects<S>) {
    let keeper = objects.keeper();
    let (mut watch, clock) = (Watched::default(), ThreadClock::default());
    // Hooks for pressure are notified even if there is nothing else to do.
    let most = keeper.notices.are_any().then_some(BETWEEN_WATCHES);
    while !keeper.is(OFF) {
        watch.look(objects, clock.now());
        let pause = objects.tick(&clock);
        if pause != Duration::MAX {
            watch.wait(objects, &clock, pause);
            continue;
        }
        // From here on what there is to find is counted; what came before is found by the next look, after the fence.
        keeper.change(AWAKE, ASLEEP);
        fence_heavy();
        let awake = clock.now() + ANOTHER_LOOK;
        while keeper.is(ASLEEP)
            && let Some(left) = awake.checked_sub(clock.now())
            && left > Duration::ZERO
        {
            // It may return early.
            clock.wait(keeper, ASLEEP, Some(left));
        }
        while keeper.is(ASLEEP) && objects.tick(&clock) == Duration::MAX {
            clock.wait(keeper, ASLEEP, most);
            watch.look(objects, clock.now());
        }
        keeper.change(ASLEEP, AWAKE);
    }
}

/// Watches the system's state, once a second.
#[derive(Default)]
struct Watched {
    /// Set by the first look.
    watch: Option<Watch>,
    patience: Patience,
    last: Duration,
}

impl Watched {
    /// Waits as long as the scavenger pauses, and looks meanwhile.
    fn wait<S: Source + 'static>(&mut self, objects: &Objects<S>, clock: &ThreadClock, pause: Duration) {
        let (begin, keeper) = (clock.now(), objects.keeper());
        while keeper.is(AWAKE) {
            let left = pause.saturating_sub(clock.now().saturating_sub(begin));
            if left.is_zero() {
                break;
            }
            clock.wait(keeper, AWAKE, Some(left.min(BETWEEN_WATCHES)));
            self.look(objects, clock.now());
        }
    }

    fn look<S: Source + 'static>(&mut self, objects: &Objects<S>, now: Duration) {
        if now.saturating_sub(self.last) < BETWEEN_WATCHES {
            return;
        }
        let seen = {
            // None while the process forks: the next wait tries again.
            let Some(_turn) = Turn::begin() else { return };
            let watch = self.watch.get_or_insert_with(|| Watch::new(objects.keeper().root));
            watch.look()
        };
        self.last = now;
        // A look that failed counts for nothing, as if it were not time for one.
        let Some(pressure) = seen else { return };
        if self.patience.is_time(pressure.is_high()) {
            objects.release(PageCount(usize::MAX));
        }
        objects.keeper().notices.give(pressure);
    }
}

/// A clock that never goes back, and the time this thread has worked.
#[derive(Default)]
struct ThreadClock {
    /// What the system's clock said last.
    last: Cell<Duration>,
    /// How far this one is ahead: by the time it has waited while the system's stood still, for instance because it is
    /// refused, and by what that has gone back, for instance because the process was restored on another machine.
    /// Otherwise a wait would not end, or as much later.
    ahead: Cell<Duration>,
}

impl ThreadClock {
    /// Waits while the keeper is in `state`, for `time` at most, if given. It may return early.
    fn wait(&self, keeper: &Keeper, state: u32, time: Option<Duration>) {
        let before = self.now();
        wait_for(keeper.state(), state, time);
        if self.now() == before {
            self.ahead.set(self.ahead.get() + time.unwrap_or_default());
        }
    }
}

impl Clock for ThreadClock {
    fn now(&self) -> Duration {
        let now = host::now();
        let back = self.last.replace(now).saturating_sub(now);
        self.ahead.set(self.ahead.get() + back);
        now + self.ahead.get()
    }

    /// Where that is not counted, elapsed time has to do. (Windows counts it in steps of 15 ms, which is longer than
    /// the thread works at a time.)
    fn work(&self) -> Duration {
        System.worked().unwrap_or_else(|| self.now())
    }
}
