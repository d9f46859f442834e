//! Which structure belongs to this thread, on Windows: a slot of thread-local storage, and one of fiber-local storage
//! whose callback signals the thread's end. The same states as in `pthread.rs`:
//!
//! ```text
//!             first use: a structure, the callback set            callback: all goes back
//!   fresh ───────────────────────────────────────▶ live ─────────────────────────────────────────▶ gone
//!     └────────── no slot to be had ──────────────────────────────────────────────────────────────▲
//! ```
//!
//! **Gone is final**: the callback runs before libraries are told that the thread ends, so destructors of Rust's
//! thread-locals still free and allocate after it. They use the shared structure.
//!
//! **Fibers.** The structure belongs to the thread, whichever fiber runs on it. The callback belongs to the fiber that
//! first used the heap, and runs when that fiber is deleted, possibly on another thread, or by a thread that goes on.
//! So it only acts on the structure of the thread it runs on, and that thread then shares. If another thread deletes
//! the fiber, the structure stays with its thread, and is lost when that ends: a few KiB, and what its magazines hold.
//!
//! **The end of the process.** The callback also runs when `ExitProcess` has stopped all other threads, which may hold
//! locks. Nothing needs to go back then.
//!
//! **Libraries.** The callback, and the background thread, run this code for as long as the process lives. So a library
//! with a heap in it stays loaded: the first thread that gets a structure pins it. If it cannot be pinned, all share.
//!
//! Nothing here allocates from Rust.

use core::cell::Cell;
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use windows_sys::Win32::System::LibraryLoader::{
    GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS, GET_MODULE_HANDLE_EX_FLAG_PIN, GetModuleHandleExW,
};
use windows_sys::Win32::System::Threading::{FLS_OUT_OF_INDEXES, FlsAlloc, FlsFree, FlsSetValue};

use crate::fatal;
use crate::object::{Nobody, Objects, Thread, Working};
use crate::source::{KeepErrno, Source};

// Numbers that are neither the address of an `Objects` nor null, which a heap that is not open has.
static FRESH: Nobody = Nobody::new(1);
static GONE: Nobody = Nobody::new(2);

mod current;

/// The slot shared by all heaps of this copy of the crate, plus one. 0: none yet.
static SLOT: AtomicU32 = AtomicU32::new(0);

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

pub(super) use super::status::is_alone;
pub(crate) use super::status::resident;

std::thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A thread inside the hook for exhausted memory: at most once a thread.
pub(super) struct Inside(());

impl Inside {
    /// Enters, if this thread is not already inside.
    pub(super) fn enter() -> Option<Self> {
        // Not `then_some`: a value made in vain would, when dropped, clear the flag. A thread that has destroyed its
        // thread-locals counts as inside.
        let was_inside = INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true);
        (!was_inside).then(|| Self(()))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(false));
    }
}

/// Makes a structure for this thread, if it has not had one. `None` also if there is no memory for it: the thread may
/// try again.
#[cold]
pub(super) fn enlist<S: Source + 'static>(objects: &'static Objects<S>) -> Option<&'static Thread> {
    if current::get() != FRESH.as_thread() {
        return None;
    }
    let _error = KeepErrno::new();
    // Without a place for the pointer there is none to say that the thread is gone either: it tries again.
    if !current::is_there() {
        return None;
    }
    let Some(slot) = slot() else {
        current::set(GONE.as_thread());
        return None;
    };
    let thread = objects.enlist()?;
    // SAFETY: `slot` made the slot; the value is for `ended`.
    if !current::set(thread) || unsafe { FlsSetValue(slot, thread.as_ptr().cast_const().cast()) } == 0 {
        current::set(GONE.as_thread());
        // SAFETY: ours, and not used again.
        unsafe { Thread::end(thread) };
        return None;
    }
    // SAFETY: a structure is never destroyed.
    Some(unsafe { thread.as_ref() })
}

/// The slot's callback.
unsafe extern "system" fn ended(thread: *const c_void) {
    let Some(thread) = NonNull::new(thread.cast_mut().cast::<Thread>()) else {
        return;
    };
    if fatal::is_shutting_down() || current::get() != thread {
        return;
    }
    let _error = KeepErrno::new();
    // First: whatever happens from here on finds the thread gone.
    current::set(GONE.as_thread());
    // SAFETY: the structure of the thread that runs this. Nobody uses it from here on.
    unsafe { Thread::end(thread) };
}

/// The slot, made at the first call. No lock: of two made concurrently, one is given back.
fn slot() -> Option<u32> {
    // Relaxed, here and below: a number that stands for itself.
    if let Some(known) = SLOT.load(Ordering::Relaxed).checked_sub(1) {
        return Some(known);
    }
    if !pin() {
        return None;
    }
    // SAFETY: the callback lives as long as the process (`pin`).
    let slot = unsafe { FlsAlloc(Some(ended)) };
    if slot == FLS_OUT_OF_INDEXES {
        return None;
    }
    match SLOT.compare_exchange(0, slot + 1, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => Some(slot),
        Err(known) => {
            // SAFETY: made above, and no thread has set it.
            unsafe { FlsFree(slot) };
            Some(known - 1)
        }
    }
}

/// Keeps the library that contains this code loaded. Returns whether it will be.
pub(super) fn pin() -> bool {
    let flags = GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS;
    let mut module = core::ptr::null_mut();
    // SAFETY: an address in that library, which stands for its name, and a place to write to.
    unsafe { GetModuleHandleExW(flags, (&raw const SLOT).cast(), &mut module) != 0 }
}
