//! What the operating system does for [`native`](super::native) on Windows.
//!
//! | name | call |
//! |---|---|
//! | `fence_heavy` | `FlushProcessWriteBuffers`: interrupts every processor that runs a thread of this process |
//! | `wait`, `wait_for`, `wake` | `WaitOnAddress`, `WakeByAddressSingle` |
//! | `pause` | `SwitchToThread` |
//! | `thread` | `GetCurrentThreadId` |
//!
//! **The end of the process.** `ExitProcess` stops all other threads, wherever they are, and then lets libraries run
//! their last code on the thread that called it. What a stopped thread held is never released. So a thread that would
//! sleep for it ends the process, as the system's own locks do (critical sections, the process heap). Where a wait ends
//! by itself, it goes on to its end, without leaving the processor to nobody.

use core::sync::atomic::{AtomicU32, Ordering, fence};
use core::time::Duration;

use windows_sys::Win32::Foundation::{GetLastError, SetLastError};
use windows_sys::Win32::System::Threading::{
    FlushProcessWriteBuffers, GetCurrentProcess, GetCurrentThreadId, INFINITE, SwitchToThread, TerminateProcess,
    WaitOnAddress, WakeByAddressSingle,
};

use crate::fatal;

/// See [`native`](super::native): every thread of the process has passed a full fence since the call.
#[cold]
pub(crate) fn fence_heavy() -> bool {
    // SAFETY: no preconditions; it cannot fail.
    keeping_error(|| unsafe { FlushProcessWriteBuffers() });
    // SeqCst: the compiler must not move accesses across the call; the system orders this thread's with the others'.
    fence(Ordering::SeqCst);
    true
}

/// The calling thread's number.
#[inline(always)]
pub(crate) fn thread() -> usize {
    // SAFETY: no preconditions; it does not fail.
    unsafe { GetCurrentThreadId() as usize }
}

/// More rounds than any wait has that ends by itself.
const ENDLESS: u32 = 1 << 21;

/// The exit code with which the system's own locks end a process that is ending. The kernel treats it specially: a
/// process that has a code already, that of `ExitProcess`, keeps it.
const THREAD_IS_TERMINATING: u32 = 0xC000_004B;

/// Lets another thread run.
pub(super) fn pause(round: u32) {
    if fatal::is_shutting_down() {
        if round >= ENDLESS {
            leave();
        }
        core::hint::spin_loop();
        return;
    }
    // SAFETY: no preconditions; failure means that no other thread was ready.
    keeping_error(|| unsafe { SwitchToThread() });
}

/// Sleeps while `word` is `expected`. May return at once or spuriously: the caller checks again.
pub(crate) fn wait(word: &AtomicU32, expected: u32, _round: u32) {
    if fatal::is_shutting_down() {
        leave();
    }
    wait_for(word, expected, None);
}

/// As [`wait`], but for at most `time`, if there is one.
pub(crate) fn wait_for(word: &AtomicU32, expected: u32, time: Option<Duration>) {
    // Rounded up: a wait for less than a millisecond would be none. The longest is 49 days.
    let milliseconds = time.map_or(INFINITE, |time| {
        u32::try_from(time.as_nanos().div_ceil(1_000_000)).map_or(INFINITE - 1, |time| time.min(INFINITE - 1))
    });
    // SAFETY: the call reads four bytes at either place; both outlive it. Failure is a spurious return.
    keeping_error(|| unsafe {
        WaitOnAddress(
            word.as_ptr().cast_const().cast(),
            (&raw const expected).cast(),
            size_of::<u32>(),
            milliseconds,
        )
    });
}

/// Wakes one thread that sleeps in [`wait`] on `word`, if there is one. The system does not say whether there was.
pub(crate) fn wake(word: &AtomicU32) -> bool {
    // The system finds sleepers by what lies on their stacks.
    if !fatal::is_shutting_down() {
        // SAFETY: the address is only compared.
        keeping_error(|| unsafe { WakeByAddressSingle(word.as_ptr().cast_const().cast()) });
    }
    false
}

/// Returns what `call` does; the thread's error code is left as it was.
fn keeping_error<R>(call: impl FnOnce() -> R) -> R {
    // SAFETY: reads and writes a number of the calling thread.
    unsafe {
        let code = GetLastError();
        let result = call();
        SetLastError(code);
        result
    }
}

/// Ends the process, which is ending anyway, because the caller would wait for a thread that no longer runs.
#[cold]
fn leave() {
    // SAFETY: no preconditions.
    unsafe { TerminateProcess(GetCurrentProcess(), THREAD_IS_TERMINATING) };
}
