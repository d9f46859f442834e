//! The end of this copy of the crate: with the process, or before it, when the library it is part of is unloaded.
//!
//! A library that was opened by `dlopen` and is closed again takes its code with it; threads that used it live on. Two
//! things must not be left behind: the pthread key, whose destructor would be called where no code is any more; and the
//! heap's address space, terabytes for each time that the library is loaded.
//!
//! ```text
//!   at exit        atexit handlers: `ending` ─▶ …          ─▶ fini_array: `begin` ─▶ … ─▶ `end`      nothing goes
//!   at dlclose     fini_array: `begin` ─▶ atexit handlers of the library: `ending` ─▶ … ─▶ `end`     all goes
//! ```
//!
//! At the end of a process other threads may still run and allocate, so nothing must go but the key. The order of the
//! calls tells the two ends apart: an `atexit` handler of a library runs before everybody's `fini_array` at exit, but
//! in the middle of its own library's at `dlclose`. `end` stands in the section that the linker sorts to be the last to
//! run, behind all destructors of the library, which may still use the heap.
//!
//! **What goes.** Tables, free pages, and the address space behind the last page in use. A block that is still
//! allocated stays where it is: whoever was given it may read it for ever. Nobody may *free* it, of course.
//!
//! Linux only (where the C library has no `dlclose` that unloads, as musl, it is never called); on macOS libraries with
//! thread-locals are not unloaded at all. Elsewhere a library with a heap in it must stay.

use core::sync::atomic::{AtomicBool, Ordering};

use super::{fork, pthread};

// Relaxed throughout: one thread runs the ends of a library, one after the other.

/// `begin` has run.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// The library is being unloaded, and the process goes on.
static UNLOADED: AtomicBool = AtomicBool::new(false);

#[used]
// SAFETY: the section holds pointers to functions, which are called without arguments once.
#[unsafe(link_section = ".fini_array")]
static BEGIN: unsafe extern "C" fn() = begin;

#[used]
// SAFETY: as above. The array is run from its end, and sorted by the number.
#[unsafe(link_section = ".fini_array.00000")]
static END: unsafe extern "C" fn() = end;

/// Has `ending` called at the end. Before the first heap opens.
pub(super) fn register() {
    if !BEGUN.load(Ordering::Relaxed) {
        // SAFETY: a function that stays as long as this copy of the crate: the C library calls it before it goes.
        unsafe { libc::atexit(ending) };
    }
}

unsafe extern "C" fn begin() {
    BEGUN.store(true, Ordering::Relaxed);
    pthread::forbid();
}

extern "C" fn ending() {
    if BEGUN.load(Ordering::Relaxed) {
        UNLOADED.store(true, Ordering::Relaxed);
    }
}

unsafe extern "C" fn end() {
    if UNLOADED.load(Ordering::Relaxed) {
        // SAFETY: the library is closed, so no thread is in its code or comes back to it; and this is the last of its
        // functions to run.
        unsafe { fork::abandon_all() };
    }
}
