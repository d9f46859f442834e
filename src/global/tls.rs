//! Which structure belongs to this thread, on Windows: a slot of thread-local storage, and a callback that signals the
//! thread's end. The same states as in `pthread.rs`:
//!
//! ```text
//!             first use: a structure                              callback: all goes back
//!   fresh ───────────────────────────────────────▶ live ─────────────────────────────────────────▶ gone
//! ```
//!
//! **The callback** is an entry in a table of the program or library that contains this code (the section `.CRT$XL?`).
//! The loader calls it when a thread ends, whichever thread it is, under its lock. Rust's own entry stands before ours
//! (`XLB`, `XLC`), so destructors of Rust's thread-locals still find the thread live, unless Rust's library is a
//! library of its own.
//!
//! **Gone is final**: other libraries are told later that the thread ends, and may free and allocate then. A thread
//! that is gone uses the shared structure, and so does one that had none until then.
//!
//! **Fibers** run on a thread, and use its structure.
//!
//! **The end of the process.** When `ExitProcess` has stopped all other threads, nothing needs to go back.
//!
//! **Libraries.** A library may be unloaded, with its callback, while threads have structures of its heap: what they
//! hold stays where it is, with all that the heap has, addresses and slot included. But if the heap has its background
//! thread, the library with its code stays loaded ([`pin`]). (With the feature `rust-dylib`, the callback is in this
//! crate's library, and calls code of the library that has the heap's. So that stays loaded in any case, though it need
//! not be the one with the `static`.)
//!
//! Nothing here allocates from Rust.

use core::ffi::c_void;
use core::ptr::{self, NonNull};

use windows_sys::Win32::System::LibraryLoader::{
    GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS, GET_MODULE_HANDLE_EX_FLAG_PIN, GetModuleHandleExW, GetModuleHandleW,
};
use windows_sys::Win32::System::Memory::{MEMORY_BASIC_INFORMATION, VirtualQuery};

use crate::object::{Nobody, Objects, Thread, Working};
use crate::source::{KeepErrno, Source};

// Numbers that are neither the address of an `Objects` nor null, which a heap that is not open has.
static FRESH: Nobody = Nobody::new(1);
static GONE: Nobody = Nobody::new(2);

mod current;

/// The reason for which the loader calls: this thread ends.
const THREAD_DETACH: u32 = 3;

/// What the loader calls: with the library, and the reason.
pub(super) type Callback = unsafe extern "system" fn(*mut c_void, u32, *mut c_void);

/// An entry in the table of callbacks.
#[used]
// SAFETY: the section is a list of functions of this type, which the loader calls one by one.
#[unsafe(link_section = ".CRT$XLC")]
static CALLBACK: Callback = called;

/// Whether threads have structures of their own.
pub(super) const HAS_STRUCTURES: bool = true;

/// This thread's structure, if it is one of the heap at `objects` and no other thread is emptying it.
#[inline(always)]
pub(super) fn enter<T>(objects: *const T) -> Option<Working<'static>> {
    current().work(objects)
}

/// This thread's structure, of whichever heap, or a placeholder.
#[inline(always)]
pub(super) fn current() -> &'static Thread {
    // SAFETY: FRESH or GONE, which are as large, or a structure, which is never destroyed.
    unsafe { current::get().as_ref() }
}

pub(super) use super::inside::Inside;
pub(super) use super::status::is_alone;
pub(crate) use super::status::resident;

/// Makes a structure for this thread, if it has not had one. `None` also if there is no memory for it: the thread may
/// try again.
#[cold]
pub(super) fn enlist<S: Source + 'static>(objects: &'static Objects<S>) -> Option<&'static Thread> {
    if current::get() != FRESH.as_thread() {
        return None;
    }
    let _error = KeepErrno::new();
    keep_callback();
    // Without a place for the pointer there is none to say that the thread is gone either: it tries again.
    if !current::is_there() || cfg!(feature = "rust-dylib") && !pin(enlist::<S> as *const ()) {
        return None;
    }
    let thread = objects.enlist()?;
    // In the first case the heap's source has used another heap meanwhile, which has made one.
    if current::get() != FRESH.as_thread() || !current::set(thread) {
        // SAFETY: ours, and not used again.
        unsafe { Thread::end(thread) };
        return None;
    }
    // SAFETY: a structure is never destroyed.
    Some(unsafe { thread.as_ref() })
}

/// Has the linker keep the table of callbacks, and our entry in it, by reading both. In this crate's own library, if it
/// has one: not inlined.
#[inline(never)]
fn keep_callback() {
    unsafe extern "C" {
        /// The C library's description of the table.
        #[link_name = "_tls_used"]
        static TABLE: u8;
    }
    // SAFETY: both are there, and constant.
    unsafe {
        (&raw const TABLE).read_volatile();
        (&raw const CALLBACK).read_volatile();
    }
}

/// What the loader calls.
unsafe extern "system" fn called(_library: *mut c_void, reason: u32, _: *mut c_void) {
    let thread = current::get();
    if reason != THREAD_DETACH || thread == GONE.as_thread() {
        return;
    }
    let _error = KeepErrno::new();
    // First: whatever happens from here on finds the thread gone.
    current::set(GONE.as_thread());
    if thread == FRESH.as_thread() {
        return;
    }
    // SAFETY: the structure of the thread that runs this. Nobody uses it from here on.
    unsafe { Thread::end(thread) };
}

/// Keeps the library loaded that contains this code. Returns whether it will be. Waits for the loader's lock, unless
/// the code is the program's own.
#[cold]
pub(super) fn pin(code: *const ()) -> bool {
    let flags = GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS;
    let (mut around, mut library) = (MEMORY_BASIC_INFORMATION::default(), ptr::null_mut());
    // SAFETY: an address, which stands for a library's name in the last call, and places to write to. A library begins
    // where its handle says.
    unsafe {
        VirtualQuery(code.cast(), &mut around, size_of_val(&around));
        let is_programs = !around.AllocationBase.is_null() && around.AllocationBase == GetModuleHandleW(ptr::null());
        is_programs || GetModuleHandleExW(flags, code.cast(), &mut library) != 0
    }
}
