//! Whether the thread that uses a structure still exists.
//!
//! A thread announces its end: a pthread key's destructor gives its structure back. But a thread that first uses the
//! heap in the last round of destructors gets no further call, and would leave its structure behind forever. So each
//! structure records its user, by the kernel's numbers for process and thread:
//!
//! ```text
//!   arrive: my numbers ──▶ …lives… ──▶ leave: none        to the register, for the next thread
//!                              └─────▶ ends without a word
//!                                      is_gone: the kernel knows no such thread, and the structure is the finder's
//! ```
//!
//! The kernel's answer to `tgkill` with signal 0 proves that the thread no longer runs. The number may have passed to
//! another thread: then the structure is found later, or never, and no harm is done. A `vfork` child shares the
//! parent's memory but is another process, and must not take the parent's threads for dead: hence both numbers.
//!
//! Cost: two system calls when a thread gets a structure, plus one for each structure checked when none is vacant (~100
//! ns each). If a filter refuses these calls, every thread seems present. On other systems, too, no thread is ever
//! found dead: the structure of such a thread, with a few KiB, its plot and a word of pages, is lost.
//!
//! Why not a robust mutex, which needs no system call: the C library links the robust mutexes that a thread holds, so
//! the memory would have to outlive the thread, even when the library that contains the heap is unloaded.

use core::cell::Cell;

/// Which thread, of which process. All-zero bytes: none, and never found gone.
#[derive(Debug, Default)]
pub struct Presence {
    process: Cell<i32>,
    thread: Cell<i32>,
}

/// The calling thread, by the kernel's numbers. Queried before the register's lock is taken, where others would wait
/// for these two system calls.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    process: i32,
    thread: i32,
}

impl Caller {
    /// The calling thread.
    pub fn current() -> Self {
        Self {
            process: kernel::process(),
            thread: kernel::thread(),
        }
    }
}

impl Presence {
    /// The calling thread begins to use the structure.
    pub fn arrive(&self, caller: Caller) {
        self.process.set(caller.process);
        self.thread.set(caller.thread);
    }

    /// Nobody uses it any more.
    pub fn leave(&self) {
        self.thread.set(0);
    }

    /// Whether the thread that arrived has ended without leaving. If so, the caller sees what it wrote.
    pub fn is_gone(&self, caller: Caller) -> bool {
        let (process, thread) = (self.process.get(), self.thread.get());
        thread > 0 && process == caller.process && kernel::has_ended(process, thread)
    }
}

#[cfg(all(feature = "std", any(target_os = "linux", target_os = "android"), not(miri)))]
mod kernel {
    use core::sync::atomic::{Ordering, fence};

    use crate::source::KeepErrno;

    pub(super) fn process() -> i32 {
        // SAFETY: has no preconditions and cannot fail.
        unsafe { libc::getpid() }
    }

    /// 0 or less if the call is refused.
    pub(super) fn thread() -> i32 {
        let _errno = KeepErrno::new();
        // SAFETY: has no preconditions.
        unsafe { libc::syscall(libc::SYS_gettid) as i32 }
    }

    pub(super) fn has_ended(process: i32, thread: i32) -> bool {
        let errno = KeepErrno::new();
        // SAFETY: signal 0 is not sent: the kernel only looks whether there is such a thread.
        let answer = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, 0) };
        let ended = answer != 0 && errno.now() == libc::ESRCH;
        if ended {
            // SeqCst: the thread made its last writes, then the kernel, with barriers of its own, took it off its
            // list; we saw it missing there, and read what it wrote after this fence.
            fence(Ordering::SeqCst);
        }
        ended
    }
}

#[cfg(not(all(feature = "std", any(target_os = "linux", target_os = "android"), not(miri))))]
mod kernel {
    pub(super) fn process() -> i32 {
        0
    }

    pub(super) fn thread() -> i32 {
        0
    }

    pub(super) fn has_ended(_process: i32, _thread: i32) -> bool {
        false
    }
}

#[cfg(all(test, feature = "std", any(target_os = "linux", target_os = "android"), not(miri)))]
mod tests {
    extern crate std;

    use core::alloc::Layout;
    use core::num::NonZeroUsize;
    use core::ptr::NonNull;
    use std::sync::Barrier;

    use super::*;
    use crate::object::{Objects, SizeClass, Thread};

    /// The structure of a thread that begins, and ends without notice after `meanwhile`.
    fn left_behind(enlist: impl Fn() -> NonZeroUsize + Sync, meanwhile: impl FnOnce()) -> NonZeroUsize {
        let door = Barrier::new(2);
        let (left, presence) = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let presence = Presence::default();
                presence.arrive(Caller::current());
                let own = enlist();
                door.wait();
                door.wait();
                (own, presence)
            });
            door.wait();
            meanwhile();
            door.wait();
            thread.join().unwrap()
        });
        // The kernel may know the thread for a moment longer than `join` does.
        while !presence.is_gone(Caller::current()) {
            std::thread::yield_now();
        }
        left
    }

    /// A few are looked at each time.
    #[test]
    fn a_dead_threads_structure_is_found_among_those_of_others() {
        let objects = Objects::for_test(1 << 20, 1, false);
        let enlist = || objects.enlist().unwrap().addr();
        enlist();
        let left = left_behind(enlist, || (0..30).for_each(|_| _ = enlist()));
        assert!((0..8).any(|_| enlist() == left));
    }

    /// A thread ended without notice in the middle of a pop from an empty magazine.
    #[test]
    fn what_a_dead_thread_has_left_is_settled_for_the_next() {
        let objects = Objects::for_test(1 << 20, 1, false);
        let layout = Layout::new::<[u8; 64]>();
        // SAFETY: never destroyed.
        let enlist = || unsafe { objects.enlist().unwrap().as_ref() };
        let magazine = |own: &'static Thread| own.magazine(SizeClass::of(layout.size(), layout.align()).unwrap());
        let left = left_behind(
            || {
                let own = enlist();
                let entered = own.work(objects).unwrap();
                let block = objects.allocate(&entered, layout).unwrap();
                // SAFETY: allocated above, with this layout.
                unsafe { objects.free(&entered, block, layout) };
                while magazine(own).pop().is_some() {}
                magazine(own).end_in_the_middle();
                NonNull::from(own).addr()
            },
            || (),
        );
        let block = objects.allocate(&objects.shared(), layout).unwrap();
        let own = enlist();
        assert_eq!(NonNull::from(own).addr(), left);
        let entered = own.work(objects).unwrap();
        // SAFETY: allocated above, with this layout.
        unsafe { objects.free(&entered, block, layout) };
        assert_eq!(magazine(own).pop(), Some(block));
    }

    /// The structure of a thread that ended without notice is found, and then has one user again, not several.
    #[test]
    fn of_those_who_look_for_a_dead_threads_structure_one_gets_it() {
        let objects = Objects::for_test(1 << 20, 1, false);
        let enlist = || objects.enlist().unwrap().addr();
        let left = left_behind(enlist, || ());
        let (one, other) = (enlist(), enlist());
        assert_eq!(one, left);
        assert_ne!(other, one);
    }
}
