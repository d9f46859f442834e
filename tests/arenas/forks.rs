//! New arenas in the child of a fork, while the parent's threads grow the heaps that they stand on.

use std::panic;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pageheap::GlobalHeap;
use pageheap::arena::{Arena, Backing, ProcessHeap};

use super::child::{is_one, runs};

static HEAP: GlobalHeap = GlobalHeap::new().background(false);

/// Grows the heap that a new arena stands on, for an arena that stays.
fn grow<B: Backing>(backing: B) -> bool {
    let mut arena = Arena::new_in(backing);
    let grown = arena.reserve(64 << 10).is_ok() && arena.alloc(7).is_ok();
    std::mem::forget(arena);
    grown
}

fn grow_both() -> bool {
    grow(ProcessHeap) && grow(&HEAP)
}

/// Forks in the middle of everything.
fn fork(child: impl FnOnce() -> bool) -> libc::pid_t {
    // SAFETY: the child ends without unwinding into the parent's frames, and runs no handlers and no destructors.
    match unsafe { libc::fork() } {
        0 => {
            let done = panic::catch_unwind(panic::AssertUnwindSafe(child)).unwrap_or(false);
            // SAFETY: as above.
            unsafe { libc::_exit(if done { 0 } else { 1 }) }
        }
        id => {
            assert!(id > 0, "no child");
            id
        }
    }
}

/// Whether the child did what it was to do, within a time that one that hangs exceeds.
fn ended_well(id: libc::pid_t) -> bool {
    let (begin, mut status) = (Instant::now(), 0);
    // SAFETY: our child, and a place for its status.
    while unsafe { libc::waitpid(id, &raw mut status, libc::WNOHANG) } != id {
        if begin.elapsed() > Duration::from_secs(30) {
            // SAFETY: our child.
            unsafe { libc::kill(id, libc::SIGKILL) };
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

/// What a child does.
fn use_both() -> bool {
    let sound = || ProcessHeap::get().is_some_and(|heap| heap.check().is_ok()) && HEAP.check().is_ok();
    let grown = (0..10).all(|_| grow_both());
    grown && sound() && thread::spawn(grow_both).join().expect("no panic")
}

/// How often threads grow a heap for each fork: 320 MiB in all, which there are with 32-bit pointers, too. And no more,
/// as what a child does takes longer in a longer heap.
const TIMES: usize = 20;

/// Forks often, while threads grow both heaps.
fn fork_beside_growth() {
    let (left, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    // A thread that begins holds a lock of Rust's library for a moment. A child that was made meanwhile would wait for
    // it for ever, as it starts a thread.
    let begun = Barrier::new(4);
    // Not both in one thread: that would wait for the fork at the one, and hold no lock of the other.
    let ways: [fn() -> bool; 3] = [|| grow(&HEAP), || grow(ProcessHeap), || grow(ProcessHeap)];
    thread::scope(|scope| {
        for way in ways {
            let (left, over, begun) = (&left, &over, &begun);
            scope.spawn(move || {
                begun.wait();
                while !over.load(Ordering::Relaxed) {
                    let take_one = |left: usize| left.checked_sub(1);
                    if left
                        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take_one)
                        .is_ok()
                    {
                        way();
                    } else {
                        thread::sleep(Duration::from_micros(100));
                    }
                }
            });
        }
        begun.wait();
        let done = (0..250).all(|_| {
            left.store(TIMES, Ordering::Relaxed);
            while left.load(Ordering::Relaxed) == TIMES {
                thread::yield_now();
            }
            ended_well(fork(use_both))
        });
        over.store(true, Ordering::Relaxed);
        assert!(done, "a child came to nothing");
    });
}

#[test]
fn new_arenas_work_in_the_child_of_a_process_whose_threads_use_others() {
    if !is_one() {
        return runs("forks::new_arenas_work_in_the_child_of_a_process_whose_threads_use_others");
    }
    assert!(grow_both());
    fork_beside_growth();
}

/// A lock of the program.
struct Held(std::cell::UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: a lock of the C library.
unsafe impl Sync for Held {}

static LOCK: Held = Held(std::cell::UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

extern "C" fn lock() {
    // SAFETY: a lock of the C library, initialised.
    assert_eq!(unsafe { libc::pthread_mutex_lock(LOCK.0.get()) }, 0);
}

extern "C" fn unlock() {
    // SAFETY: locked by this thread, or by the one whose copy it is.
    assert_eq!(unsafe { libc::pthread_mutex_unlock(LOCK.0.get()) }, 0);
}

/// A handler takes a lock, as POSIX recommends, that other threads hold where they make arenas. It was registered
/// before the first of those: so it ran while the heap was held, and waited for a thread that waited for the fork.
#[test]
#[cfg(any(
    target_os = "linux",
    target_os = "android",
    target_os = "freebsd",
    target_os = "netbsd"
))]
fn handlers_of_a_fork_may_take_a_lock_that_is_held_where_arenas_are_made() {
    if !is_one() {
        return runs("forks::handlers_of_a_fork_may_take_a_lock_that_is_held_where_arenas_are_made");
    }
    // SAFETY: functions that stay; the last one ends a process that hangs.
    unsafe {
        assert_eq!(libc::pthread_atfork(Some(lock), Some(unlock), Some(unlock)), 0);
        libc::alarm(100);
    }
    const FORKS: usize = 50;
    let (begun, forked) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=FORKS {
                lock();
                begun.store(round, Ordering::Relaxed);
                // As much as the heap grows by more than once.
                assert!((0..128).all(|_| grow(ProcessHeap)));
                unlock();
                while forked.load(Ordering::Relaxed) < round {
                    thread::yield_now();
                }
            }
        });
        for round in 1..=FORKS {
            while begun.load(Ordering::Relaxed) < round {
                thread::yield_now();
            }
            let done = ended_well(fork(|| grow(ProcessHeap)));
            forked.store(round, Ordering::Relaxed);
            assert!(done, "a child came to nothing");
        }
    });
}

extern "C" fn handler() {
    assert!(grow_both());
}

/// What a program registers in `main` runs before the heaps are held and after they are let go, in the child, too.
/// (Those that run in between: `tests/global_process/early_handlers.rs`.)
#[test]
fn handlers_of_a_fork_may_make_arenas() {
    if !is_one() {
        return runs("forks::handlers_of_a_fork_may_make_arenas");
    }
    let handlers = Some(handler as unsafe extern "C" fn());
    // SAFETY: a function that stays; it ends a process that hangs. (An emulated machine takes more than 100 s.)
    unsafe {
        libc::alarm(400);
        assert_eq!(libc::pthread_atfork(handlers, handlers, handlers), 0);
    }
    assert!(grow_both());
    fork_beside_growth();
}
