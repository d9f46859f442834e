//! What the operating system does for [`native`](super::native) on Windows.
//!
//! | name | call |
//! |---|---|
//! | `fence_heavy` | `FlushProcessWriteBuffers`: interrupts every processor that runs a thread of this process |
//! | `wait`, `wait_for`, `wake` | `WaitOnAddress`, `WakeByAddressSingle` |
//! | `pause` | `SwitchToThread` |
//! | `thread` | `GetCurrentThreadId` |
//!
//! **Wine** has long had a `FlushProcessWriteBuffers` that does nothing, and a call does not tell. So there is no fence
//! under Wine, of whatever version. The loader is asked whether this is Wine before `main`, or when the library is
//! loaded ([`ask`]): later the call could wait for the loader's lock, held by a thread that waits for what the caller
//! holds. Before that there is no fence either, and never in a program whose entry point skips the C library's start;
//! a sharded list that is made without one does without for good.
//!
//! **The end of the process.** `ExitProcess` stops all other threads, wherever they are, and then lets libraries run
//! their last code on the thread that called it. What a stopped thread held is never released. So a thread that would
//! sleep for it ends the process, as the system's own locks do (critical sections, the process heap). Where a wait ends
//! by itself, it goes on to its end, without leaving the processor to nobody.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering, fence};
use core::time::Duration;

use windows_sys::Win32::Foundation::{GetLastError, SetLastError};
use windows_sys::Win32::System::LibraryLoader::{GetModuleHandleA, GetProcAddress};
use windows_sys::Win32::System::Threading::{
    FlushProcessWriteBuffers, GetCurrentProcess, GetCurrentThreadId, INFINITE, SwitchToThread, TerminateProcess,
    WaitOnAddress, WakeByAddressSingle,
};

use crate::fatal;

/// What is known of the system's fence: nothing yet, that it is one, or that it is none.
static FENCE: AtomicU8 = AtomicU8::new(NOT_ASKED);

const NOT_ASKED: u8 = 0;
const IS_ONE: u8 = 1;
const IS_NONE: u8 = 2;

/// An entry in the C library's table of what is to run first.
#[used]
// SAFETY: the section is a list of functions of this type, which the C library calls one by one.
#[unsafe(link_section = ".CRT$XCT")]
static ENTRY: unsafe extern "C" fn() = ask;

/// Functions that Wine's libraries have, and no other's. The first is meant for the purpose, and therefore hidden if
/// the user wants it so (`HideWineExports`).
const WINES: [(&CStr, &CStr); 3] = [
    (c"ntdll.dll", c"wine_get_version"),
    (c"ntdll.dll", c"wine_server_call"),
    (c"kernel32.dll", c"wine_get_unix_file_name"),
];

/// Asks the loader whether this is Wine.
unsafe extern "C" fn ask() {
    let is_one = WINES.iter().all(|(library, function)| {
        // SAFETY: two names that end in a zero; both libraries stay where they are as long as the process lives.
        unsafe {
            let library = GetModuleHandleA(library.as_ptr().cast());
            !library.is_null() && GetProcAddress(library, function.as_ptr().cast()).is_none()
        }
    });
    // Relaxed: a number by itself.
    FENCE.store(if is_one { IS_ONE } else { IS_NONE }, Ordering::Relaxed);
}

/// See [`native`](super::native): every thread of the process has passed a full fence since the call.
#[cold]
#[inline(never)]
pub(crate) fn fence_heavy() -> bool {
    // SAFETY: it is there, and constant; being read here, in this crate's own library if it has one, it is linked.
    unsafe { (&raw const ENTRY).read_volatile() };
    // Relaxed: a number by itself.
    if FENCE.load(Ordering::Relaxed) != IS_ONE {
        return false;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_was_asked_before_main_and_wine_has_no_fence() {
        // Wine tells the program who its user is.
        let is_wine = std::env::var_os("WINEUSERNAME").is_some();
        // Relaxed: written before there were threads.
        let known = FENCE.load(Ordering::Relaxed);
        assert_eq!(known, if is_wine { IS_NONE } else { IS_ONE });
        assert_eq!(fence_heavy(), !is_wine);
    }
}
