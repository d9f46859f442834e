//! Clocks that are refused, as under a seccomp filter where the C library asks the kernel for the time, and one that
//! goes back: this program's own function replaces the C library's, and does so on demand.

#![cfg(all(target_env = "gnu", target_pointer_width = "64"))]

use std::alloc::GlobalAlloc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use super::*;

static IS_REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether only the time that a thread has worked is refused.
static IS_WORK_REFUSED: AtomicBool = AtomicBool::new(false);

/// By how many seconds the monotonic clock has gone back.
static BACK: AtomicI64 = AtomicI64::new(0);

#[unsafe(no_mangle)]
extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    let is_of_work = clock == libc::CLOCK_THREAD_CPUTIME_ID;
    // SAFETY: errno is this thread's; the system call is the C library's own, with the same arguments, and the time is
    // written by it.
    unsafe {
        if IS_REFUSED.load(Ordering::Relaxed) || is_of_work && IS_WORK_REFUSED.load(Ordering::Relaxed) {
            *libc::__errno_location() = libc::EPERM;
            return -1;
        }
        let answer = libc::syscall(libc::SYS_clock_gettime, clock, time) as libc::c_int;
        if clock == libc::CLOCK_MONOTONIC {
            (*time).tv_sec -= BACK.load(Ordering::Relaxed);
        }
        answer
    }
}

/// The result of `work` while there is no clock. `work` itself must not need one: std would panic.
fn without<T>(work: impl FnOnce() -> T) -> T {
    IS_REFUSED.store(true, Ordering::Relaxed);
    let result = work();
    IS_REFUSED.store(false, Ordering::Relaxed);
    result
}

/// A fork used to read the clock even if there was nothing to wait for.
#[test]
fn without_a_clock_a_process_may_fork() {
    if !is_child() {
        return assert!(run("clock::without_a_clock_a_process_may_fork"));
    }
    let status = without(|| {
        let mut status = -1;
        // SAFETY: the child exits at once, and is waited for.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(0);
            }
            libc::waitpid(child, &mut status, 0);
        }
        status
    });
    assert_eq!(status, 0);
}

/// The thread used to wait for a time that never came.
#[test]
fn without_a_clock_memory_goes_back_all_the_same() {
    if !is_child() {
        return assert!(run("clock::without_a_clock_memory_goes_back_all_the_same"));
    }
    let well = without(|| {
        touch(64);
        backed() >= 48 << 20 && soon(|| backed() < 8 << 20)
    });
    assert!(well, "{}", OWN.stats());
}

static OWN: GlobalHeap = GlobalHeap::new();

/// Allocates so many blocks of 1 MiB, writes to them, and frees them.
fn touch(blocks: usize) {
    // SAFETY: the layout is not empty; writes are inside the block; it is freed with its layout.
    unsafe {
        let blocks: Vec<_> = (0..blocks).map(|_| OWN.alloc(layout(1 << 20))).collect();
        for block in blocks {
            block.write_bytes(1, 1 << 20);
            OWN.dealloc(block, layout(1 << 20));
        }
    }
}

fn backed() -> usize {
    OWN.stats().pages.backed.0 * 8192
}

/// The work seemed to take no time, so all of it was done at once, and no fork came in between.
#[test]
fn where_work_is_not_counted_elapsed_time_is() {
    if !is_child() {
        return assert!(run("clock::where_work_is_not_counted_elapsed_time_is"));
    }
    IS_WORK_REFUSED.store(true, Ordering::Relaxed);
    touch(64);
    assert!(soon(|| backed() < 8 << 20), "{}", OWN.stats());
    assert!(OWN.stats().pages.scavenge_nanoseconds > 0);
}

/// As when a process is restored on another machine. The thread used to wait until the clock was where it had been.
#[test]
fn memory_goes_back_after_the_clock_has() {
    if !is_child() {
        return assert!(run("clock::memory_goes_back_after_the_clock_has"));
    }
    // The thread is at work, and pauses, as long as the program is.
    for _ in 0..40 {
        touch(2);
        std::thread::sleep(Duration::from_millis(25));
    }
    assert!(OWN.has_background_thread());
    BACK.store(3600, Ordering::Relaxed);
    touch(64);
    assert!(backed() >= 48 << 20 && soon(|| backed() < 8 << 20), "{}", OWN.stats());
}
