//! Whether the thread that uses a structure is still there.
//!
//! A thread says when it goes: a pthread key's destructor gives its structure back. But a thread whose first use of the
//! heap falls into the last round of destructors is not asked again, and would leave its structure behind for ever. So
//! each structure says whose it is, by the numbers the kernel has for process and thread:
//!
//! ```text
//!   arrive: my numbers ──▶ …lives… ──▶ leave: none        to the register, for the next thread
//!                              └─────▶ ends without a word
//!                                      is_gone: the kernel knows no such thread, and the structure is the finder's
//! ```
//!
//! The kernel's answer to `tgkill` with signal 0 is the proof that the thread runs no more. A number may be another
//! thread's by now: then the structure is found later, or never, and no harm is done. A `vfork` child shares the
//! parent's memory but is another process, and must not take its threads for gone: hence both numbers.
//!
//! One or two system calls where a thread gets a structure, as many as structures are looked at where none is vacant
//! (~100 ns each). A filter that refuses them makes everybody seem present. On other systems too nobody is ever found
//! gone: such a thread's structure, with a few KiB and a word of pages in it, is lost.
//!
//! Why not a robust mutex, which needs no system call: the C library strings those that a thread holds together, so the
//! memory would have to outlive the thread, also where the library that the heap is part of is unloaded.

use core::cell::Cell;

/// Which thread, of which process. All-zero bytes: none, and never found gone.
#[derive(Debug, Default)]
pub struct Presence {
    process: Cell<i32>,
    thread: Cell<i32>,
}

/// The calling thread's process, asked once for many [`Presence`]s.
#[derive(Clone, Copy, Debug)]
pub struct Process(i32);

impl Process {
    /// The one the caller runs in.
    pub fn current() -> Self {
        Self(kernel::process())
    }
}

impl Presence {
    /// The caller begins to use the structure.
    pub fn arrive(&self) {
        self.process.set(kernel::process());
        self.thread.set(kernel::thread());
    }

    /// Nobody uses it.
    pub fn leave(&self) {
        self.thread.set(0);
    }

    /// Whether whoever arrived has ended without leaving. If so, what it wrote is seen.
    pub fn is_gone(&self, here: Process) -> bool {
        let (process, thread) = (self.process.get(), self.thread.get());
        thread > 0 && process == here.0 && kernel::has_ended(process, thread)
    }
}

#[cfg(all(feature = "std", any(target_os = "linux", target_os = "android")))]
mod kernel {
    use core::sync::atomic::{Ordering, fence};

    use crate::source::KeepErrno;

    pub(super) fn process() -> i32 {
        // SAFETY: has no preconditions and cannot fail.
        unsafe { libc::getpid() }
    }

    /// 0 or less if it may not be asked.
    pub(super) fn thread() -> i32 {
        let _errno = KeepErrno::new();
        // SAFETY: has no preconditions.
        unsafe { libc::syscall(libc::SYS_gettid) as i32 }
    }

    pub(super) fn has_ended(process: i32, thread: i32) -> bool {
        let errno = KeepErrno::new();
        // SAFETY: signal 0 is none: only whether there is such a thread is looked at.
        let answer = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, 0) };
        let ended = answer != 0 && errno.now() == libc::ESRCH;
        if ended {
            // SeqCst: the thread wrote its last, then the kernel, with barriers of its own between, took it off its
            // list; we saw it missing there, and read what it wrote after this.
            fence(Ordering::SeqCst);
        }
        ended
    }
}

#[cfg(not(all(feature = "std", any(target_os = "linux", target_os = "android"))))]
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
