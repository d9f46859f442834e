//! The background thread on Windows: one with a small stack. The libraries that contain its code stay loaded, so nobody
//! has to end it.
//!
//! It may be started while the loader runs code of a library, and begins when the loader has finished. The loader calls
//! all libraries on it, as on any thread, when it begins. It has no name: not every Windows that Rust supports has the
//! call for it.
//!
//! To pin a library, the loader's lock is waited for, by the thread that starts this one (and, with the feature
//! `rust-dylib`, by each thread that begins to use the heap). A library whose initialisation waits for such a thread
//! waits forever. A program's own heap needs no pin. When a library is being unloaded it is too late for one, so no
//! thread is started from then on.

use core::ffi::c_void;
use core::ptr;
use core::sync::atomic::Ordering;
use core::time::Duration;

use windows_sys::Win32::Foundation::CloseHandle;
use windows_sys::Win32::System::Performance::{QueryPerformanceCounter, QueryPerformanceFrequency};
use windows_sys::Win32::System::Threading::{CreateThread, STACK_SIZE_PARAM_IS_A_RESERVATION};

use crate::object::Objects;
use crate::source::Source;

use super::super::tls::{Callback, pin};

/// The addresses of its stack. It uses 8 to 12 KiB, the system's calls some more, the program's hooks what they need.
const STACK_BYTES: usize = 256 << 10;

/// The time in which the counter advances by one is at least this part of a second.
const FINEST: u64 = 1_000_000_000;

/// The reason for which the loader calls: the library is unloaded, or the process ends.
const PROCESS_DETACH: u32 = 0;

/// An entry in the table of callbacks (`tls.rs`), before that of Rust's library.
#[used]
// SAFETY: the section is a list of functions of this type, which the loader calls one by one.
#[unsafe(link_section = ".CRT$XLAB")]
static CALLBACK: Callback = called;

unsafe extern "system" fn called(_library: *mut c_void, reason: u32, _: *mut c_void) {
    if reason == PROCESS_DETACH {
        super::forbid();
    }
}

/// Has the linker keep the entry, by reading it.
#[inline(never)]
fn keep_callback() {
    // SAFETY: it is there, and constant.
    unsafe { (&raw const CALLBACK).read_volatile() };
}

/// Starts the thread. Returns whether it did.
pub(super) fn launch<S: Source + Send + Sync + 'static>(objects: &'static Objects<S>, _has_guest: bool) -> bool {
    keep_callback();
    // With the feature `rust-dylib`, the loop may be in another library than the beginning.
    if !pin(enter::<S> as *const ()) || !pin(super::run::<S> as *const ()) {
        return false;
    }
    let (argument, mut number) = (ptr::from_ref(objects).cast(), 0);
    // SAFETY: the function has the right signature and stays loaded; the argument is never destroyed.
    let thread = unsafe {
        CreateThread(
            ptr::null(),
            STACK_BYTES,
            Some(enter::<S>),
            argument,
            STACK_SIZE_PARAM_IS_A_RESERVATION,
            &mut number,
        )
    };
    if thread.is_null() {
        return false;
    }
    // SAFETY: the handle is ours, and closed once, which does not affect the thread.
    unsafe { CloseHandle(thread) };
    // Relaxed: says only that there is one.
    objects.keeper().marks[0].store(number as usize, Ordering::Relaxed);
    true
}

/// Where the thread begins.
unsafe extern "system" fn enter<S: Source + Send + Sync + 'static>(objects: *mut c_void) -> u32 {
    // SAFETY: `launch` passed a heap of this type, which is never destroyed.
    super::run(unsafe { &*objects.cast_const().cast::<Objects<S>>() });
    0
}

/// The time since some moment.
pub(super) fn now() -> Duration {
    let (mut count, mut frequency) = (0, 0);
    // SAFETY: two places to write to. These calls do not fail.
    unsafe {
        QueryPerformanceCounter(&mut count);
        QueryPerformanceFrequency(&mut frequency);
    }
    let (count, frequency) = (count.unsigned_abs(), frequency.unsigned_abs().clamp(1, FINEST));
    Duration::new(
        count / frequency,
        (count % frequency * 1_000_000_000 / frequency) as u32,
    )
}

/// The loader starts no thread before it has finished.
pub(super) fn constructors_have_run() -> bool {
    true
}
