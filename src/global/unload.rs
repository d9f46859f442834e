//! The end of this copy of the crate: with the process, or earlier, when the library that contains it is unloaded.
//!
//! A library opened by `dlopen` takes its code with it when it is closed, but threads that used it live on. Two things
//! must not be left behind: the pthread key, whose destructor would be called where there is no code any more; and the
//! heap's address space, terabytes each time the library is loaded.
//!
//! ```text
//!   at exit        atexit handlers: `ending` ─▶ …          ─▶ fini_array: `begin` ─▶ … ─▶ `end`      nothing is freed
//!   at dlclose     fini_array: `begin` ─▶ atexit handlers of the library: `ending` ─▶ … ─▶ `end`     all is freed
//! ```
//!
//! At the end of a process other threads may still run and allocate, so only the key is deleted. A program may close
//! its libraries in an exit handler of its own; the code of the background thread must not disappear then, so if there
//! is such a thread, `ending` pins the library ([`stay`]). The order of the calls distinguishes the two cases: an
//! `atexit` handler of a library runs before every `fini_array` at exit, but in the middle of its own library's at
//! `dlclose`. `end` is in the section that the linker sorts to run last, after all destructors of the library, which
//! may still use the heap.
//!
//! **No thread without an end.** A heap that opens before our constructor has run is not registered then, because the
//! library may be one the program is linked with: see [`register`]. A heap first used after `begin` is not registered
//! either; and the C library may have no memory for it. Such a heap is left as it is, and a background thread would
//! lose its code. So a thread that is about to start one registers first, if that is still to be done, and does not
//! start it if registration fails.
//!
//! **Registered too early.** Suppose a library that the program is linked with is asked for memory by a constructor of
//! another library, after its own. Its heap opens before the C library has registered that library's own end, so at
//! exit, too, `ending` runs after `begin`. Therefore it is registered again when threads use the heap for the first
//! time: at exit that call comes before every `fini_array` and reveals the exit; at dlclose both come in the middle.
//! Two cases remain: eight or more threads that all started before `main` and run until the end; and, if none started
//! later, code that uses the heap after the end of such a library.
//!
//! Three cases are not handled:
//!
//! - A library is closed while a thread is entering or leaving the key's destructor, or a handler of a fork, a few
//!   instructions before or after the counted part (`pthread.rs`, `fork.rs`). A program that has joined its threads
//!   cannot meet this. (It was seen once in some thousand runs of a test that had waited only for their work.)
//! - One thread closes the library while another ends the process: the latter may wait for the loader's lock in
//!   [`stay`] until the code it would return to is gone.
//! - A heap is opened by constructors, and then no thread begins to use it before a fork, during which another thread
//!   is in `atexit`, `exit` or `dlclose`. In the child their lock is held for ever, and who registers there waits for
//!   it. (If the parent has registered, the child does not: see [`register_again`].)
//!
//! **What is given back**: tables, free pages, and the address space after the last page in use. A block that is still
//! allocated stays in place: its owner may read it forever. Nobody may *free* it, of course. The process's own heap of
//! pages stays with all its addresses (`process.rs`).
//!
//! Linux only (with a C library whose `dlclose` does not unload, such as musl, it is never called). On macOS libraries
//! with thread-locals are never unloaded. On other systems a library with a heap in it must stay loaded.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::source::KeepErrno;

use super::{background, fork, pthread};

// Relaxed throughout: one thread runs the ends of a library, one after the other; and registering twice does no harm.

/// `begin` has run.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// The library is being unloaded, and the process goes on.
static UNLOADED: AtomicBool = AtomicBool::new(false);

/// `ending` has run before `begin`: the process ends.
static EXITING: AtomicBool = AtomicBool::new(false);

/// `ending` is registered.
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// How often it is registered again.
const AGAIN: u32 = 8;

#[used]
// SAFETY: the section holds pointers to functions, which are called without arguments once.
#[unsafe(link_section = ".fini_array")]
static BEGIN: unsafe extern "C" fn() = begin;

#[used]
// SAFETY: as above. The array is run from its end, and sorted by the number.
#[unsafe(link_section = ".fini_array.00000")]
static END: unsafe extern "C" fn() = end;

/// Arranges for `ending` to be called at the end, once however many heaps there are. Returns whether it will be. Called
/// before the first heap opens, and before a thread is started.
#[cold]
pub(super) fn register() -> bool {
    static AT_IT: AtomicBool = AtomicBool::new(false);
    if REGISTERED.load(Ordering::Relaxed) {
        return true;
    }
    // A library that the program is linked with runs its constructors before the C library has registered the library's
    // own end. Its `ending` would come after `begin` at exit too, and everything would be freed under threads that
    // still run. Such a library is never unloaded. An opened library that allocates before our constructor has run
    // keeps everything, unless it is registered later. The flag comes last: the C library's own allocation may lead
    // back here; and while one thread registers, others try again later.
    if BEGUN.load(Ordering::Relaxed) || !background::constructors_have_run() || AT_IT.swap(true, Ordering::Relaxed) {
        return false;
    }
    let _errno = KeepErrno::new();
    // SAFETY: the function exists as long as this copy of the crate: the C library calls it before it is unloaded.
    let is_done = unsafe { libc::atexit(ending) } == 0;
    AT_IT.store(false, Ordering::Relaxed);
    // Without memory for it, the next caller tries again.
    if is_done {
        REGISTERED.store(true, Ordering::Relaxed);
    }
    is_done
}

/// As [`register`], in case that was too early: called by a thread that uses the heap for the first time.
pub(super) fn register_again() {
    static TIMES: AtomicU32 = AtomicU32::new(0);
    if BEGUN.load(Ordering::Relaxed) || TIMES.load(Ordering::Relaxed) >= AGAIN {
        return;
    }
    // In the child of a fork what its parent has registered must do. A thread that is not there may have held the C
    // library's lock for this, and then it is held for ever.
    if REGISTERED.load(Ordering::Relaxed) && fork::is_child() {
        return;
    }
    // Counted before it is done: the C library's own allocation may lead back here.
    if TIMES.fetch_add(1, Ordering::Relaxed) < AGAIN && background::constructors_have_run() {
        let _errno = KeepErrno::new();
        // SAFETY: as in `register`. Without memory for it, it is as if this thread had not called.
        if unsafe { libc::atexit(ending) } == 0 {
            REGISTERED.store(true, Ordering::Relaxed);
        }
    }
}

unsafe extern "C" fn begin() {
    BEGUN.store(true, Ordering::Relaxed);
    pthread::forbid();
}

extern "C" fn ending() {
    if !BEGUN.load(Ordering::Relaxed) {
        if !EXITING.swap(true, Ordering::Relaxed) && background::forbid() {
            stay();
        }
    } else if !EXITING.load(Ordering::Relaxed) {
        UNLOADED.store(true, Ordering::Relaxed);
        fork::end();
    }
}

/// Pins the library that contains this copy of the crate until the process has ended, whoever closes it. The program
/// itself, the file whose headers the kernel names, needs no pinning.
#[cfg(not(target_feature = "crt-static"))]
fn stay() {
    use core::ffi::c_void;
    use core::mem::MaybeUninit;

    /// A program's headers begin within this many bytes of its start: they follow the file header, of 64 bytes.
    const MOST_BEFORE_HEADERS: usize = 4096;
    let _errno = KeepErrno::new();
    let mut place = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: the loader writes what it knows of the address, if it knows it; the file name it returns lives as long as
    // the file is loaded. Opening what is already open runs none of its code.
    unsafe {
        if libc::dladdr(ending as *const c_void, place.as_mut_ptr()) == 0 {
            return;
        }
        let place = place.assume_init();
        let headers = (libc::getauxval(libc::AT_PHDR) as usize).wrapping_sub(place.dli_fbase.addr());
        if headers >= MOST_BEFORE_HEADERS {
            libc::dlopen(
                place.dli_fname,
                libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE,
            );
        }
    }
}

/// A statically linked program is not a loaded library, and linkers warn of `dlopen` in it.
#[cfg(target_feature = "crt-static")]
fn stay() {}

unsafe extern "C" fn end() {
    if UNLOADED.load(Ordering::Relaxed) {
        // SAFETY: the library is closed, so no thread is in its code or returns to it; and this is the last of its
        // functions to run.
        unsafe { fork::abandon_all() };
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::alloc::Layout;
    use core::ptr::NonNull;
    use core::sync::atomic::AtomicUsize;
    use std::vec::Vec;

    use super::*;
    use crate::heap::Config;
    use crate::object::{Keeper, Objects};
    use crate::scavenge::pressure::Notices;
    use crate::source::{OverSystem, Purpose, Reservation, Source, System, Verbs};

    /// The system, counting the reservations of tables.
    #[derive(Debug, Default)]
    struct Watched {
        tables: AtomicUsize,
        discards: AtomicUsize,
        late: AtomicUsize,
    }

    // SAFETY: the verbs are the system's.
    unsafe impl Verbs for Watched {
        fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
            let reservation = System.reserve(purpose, bytes, align)?;
            self.tables
                .fetch_add(usize::from(purpose == Purpose::Metadata), Ordering::Relaxed);
            Some(reservation)
        }

        /// Does nothing: memory that is discarded too late may belong to anyone.
        unsafe fn discard(&self, _start: NonNull<u8>, _bytes: usize) {
            let is_late = self.tables.load(Ordering::Relaxed) < 2;
            self.late.fetch_add(usize::from(is_late), Ordering::Relaxed);
            self.discards.fetch_add(1, Ordering::Relaxed);
        }

        unsafe fn unreserve(&self, purpose: Purpose, reservation: Reservation) {
            self.tables
                .fetch_sub(usize::from(purpose == Purpose::Metadata), Ordering::Relaxed);
            // SAFETY: the caller's promise.
            unsafe { System.unreserve(purpose, reservation) }
        }
    }

    /// The pages of an unloaded heap are released after its tables have gone: with nothing beside them.
    #[test]
    fn entries_of_tables_that_are_gone_are_not_discarded() {
        let source: &'static OverSystem<Watched> = std::boxed::Box::leak(std::boxed::Box::default());
        let objects = Objects::open(
            source,
            Config::new(1 << 30).caches(1),
            Keeper::new(false, Notices::NONE, ""),
        )
        .unwrap();
        let layout = Layout::new::<[u8; 8000]>();
        let fill = || {
            (0..20_000)
                .map(|_| objects.allocate(&objects.shared(), layout).unwrap())
                .collect::<Vec<_>>()
        };
        // SAFETY: freed with the layout of their allocation, once each.
        let free = |block: NonNull<u8>| unsafe { objects.free(&objects.shared(), block, layout) };
        fill().into_iter().for_each(free);
        objects.release(crate::units::PageCount(usize::MAX));
        let before = source.discards.load(Ordering::Relaxed);
        assert!(before > 0, "the heap is too small for this test");
        fill().into_iter().for_each(free);
        // SAFETY: nobody uses the heap from here on.
        unsafe { Objects::<&OverSystem<Watched>>::abandon(NonNull::from_ref(objects).cast()) };
        assert_eq!(source.late.load(Ordering::Relaxed), 0);
    }
}
