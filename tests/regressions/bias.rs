//! The first thread that came to a heap which another was alone with waited for it by yielding. Under a real-time
//! policy, on the processor that the other one was to run on, it never left: of 150 such threads 31 waited until the
//! system took the processor from them, after a second. And a thread that was about to be alone passed the first heavy
//! fence of the process, which takes some 10 ms if there are other threads, with the lock held. And where the fence was
//! refused after it had been granted, each visit would have spun with the lock held.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pageheap::internals::BiasedLock;

use super::{child, filter};

const ONE: usize = 64;
const OTHER: usize = 128;

/// The processor time that the calling thread has used.
fn used() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a place for a time.
    let answer = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(answer, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// What it takes to sleep for so long, 100 µs at a time: an eighth of that; on an emulated machine, half.
fn sleeping(time: Duration) -> Duration {
    let (begin, before) = (Instant::now(), used());
    while begin.elapsed() < time {
        thread::sleep(Duration::from_micros(100));
    }
    used() - before
}

#[test]
fn who_waits_for_the_one_leaves_it_the_processor() {
    const AWAY: Duration = Duration::from_millis(400);
    let lock = BiasedLock::new();
    (0..100).for_each(|_| drop(lock.lock_often(ONE)));
    // Without a heavy fence nobody is the one.
    let Some(alone) = lock.enter(ONE) else { return };
    let used = thread::scope(|scope| {
        let other = scope.spawn(|| {
            let before = used();
            drop(lock.lock(OTHER));
            used() - before
        });
        // As if preempted.
        thread::sleep(AWAY);
        assert!(!other.is_finished());
        drop(alone);
        other.join().unwrap()
    });
    let sleeping = sleeping(AWAY);
    assert!(used < sleeping + AWAY / 4, "{used:?}, {sleeping:?}");
}

#[test]
fn nobody_waits_for_the_first_fence() {
    if !child::is_one() {
        // Any of them may be disturbed.
        let ends_well = || {
            let output = child::output(&mut child::command("bias::nobody_waits_for_the_first_fence"));
            output.status.success()
        };
        return assert!((0..20).any(|_| ends_well()));
    }
    let (lock, begun, over) = (BiasedLock::new(), AtomicBool::new(false), AtomicBool::new(false));
    let longest = thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !over.load(Ordering::Relaxed) {
                let begin = Instant::now();
                drop(lock.lock(OTHER));
                longest = longest.max(begin.elapsed());
                begun.store(true, Ordering::Relaxed);
            }
            longest
        });
        while !begun.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
        (0..100).for_each(|_| drop(lock.lock_often(ONE)));
        over.store(true, Ordering::Relaxed);
        other.join().unwrap()
    });
    assert!(longest < Duration::from_millis(5), "{longest:?}");
}

#[test]
fn where_the_fence_is_refused_nobody_is_alone_any_more() {
    if !child::is_one() {
        let name = "bias::where_the_fence_is_refused_nobody_is_alone_any_more";
        return assert!(child::output(&mut child::command(name)).status.success());
    }
    let lock = BiasedLock::new();
    (0..100).for_each(|_| drop(lock.lock_often(ONE)));
    if lock.enter(ONE).is_none() {
        return;
    }
    filter::refuse(&[filter::Refusal::new(libc::SYS_membarrier, libc::EPERM)]);
    drop(lock.visit(OTHER));
    (0..100_000).for_each(|_| drop(lock.lock_often(ONE)));
    assert!(lock.enter(ONE).is_none() && !lock.is_mine(ONE));
}
