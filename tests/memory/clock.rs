//! A clock that is refused, as a filter may that has the C library ask the kernel for it: this program's own answers
//! in place of the C library's, and refuses when it is told to.

#![cfg(all(target_env = "gnu", target_pointer_width = "64"))]

use std::alloc::GlobalAlloc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

static IS_REFUSED: AtomicBool = AtomicBool::new(false);

#[unsafe(no_mangle)]
extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    // SAFETY: errno is the thread's; the call is the C library's own, with what that was given.
    unsafe {
        if IS_REFUSED.load(Ordering::Relaxed) {
            *libc::__errno_location() = libc::EPERM;
            return -1;
        }
        libc::syscall(libc::SYS_clock_gettime, clock, time) as libc::c_int
    }
}

/// What `work` says while there is no clock. It must not want one: std panics there.
fn without<T>(work: impl FnOnce() -> T) -> T {
    IS_REFUSED.store(true, Ordering::Relaxed);
    let result = work();
    IS_REFUSED.store(false, Ordering::Relaxed);
    result
}

/// Who forks looked at the clock, whether there was anybody to wait for or not.
#[test]
fn without_a_clock_a_process_may_fork() {
    if !is_child() {
        return assert!(run("clock::without_a_clock_a_process_may_fork"));
    }
    let status = without(|| {
        let mut status = -1;
        // SAFETY: the child ends at once, and is waited for.
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

/// The thread waited for a time that did not come.
#[test]
fn without_a_clock_memory_goes_back_all_the_same() {
    if !is_child() {
        return assert!(run("clock::without_a_clock_memory_goes_back_all_the_same"));
    }
    static OWN: GlobalHeap = GlobalHeap::new();
    let backed = || OWN.stats().pages.backed.0 * 8192;
    let well = without(|| {
        // SAFETY: the layout is not empty; writes are inside the block; it is freed with its layout.
        unsafe {
            let blocks: Vec<_> = (0..64).map(|_| OWN.alloc(layout(1 << 20))).collect();
            for block in blocks {
                block.write_bytes(1, 1 << 20);
                OWN.dealloc(block, layout(1 << 20));
            }
        }
        backed() >= 48 << 20 && soon(|| backed() < 8 << 20)
    });
    assert!(well, "{}", OWN.stats());
}
