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
//! At the end of a process other threads may still run and allocate, so nothing must go but the key. Nor must a program
//! that closes its libraries when it ends, in a handler of its own, take the code of the thread that gives memory back
//! from below it: so where there is one `ending` has the library stay ([`stay`]). The order of the calls tells the two
//! ends apart: an `atexit` handler of a library runs before everybody's `fini_array` at exit, but
//! in the middle of its own library's at `dlclose`. `end` stands in the section that the linker sorts to be the last to
//! run, behind all destructors of the library, which may still use the heap.
//!
//! **No thread that nobody ends.** A heap that opens before our constructor has run is not registered then, for the
//! library may be one of the program's own: see [`register`]. Nor is one that is used for the first time behind
//! `begin`; and the C library may have no memory for it. Such a heap is left as it is, and a thread that gives memory
//! back would lose its code. So who is about to start one registers before, if that is to be done yet, and starts none
//! where it cannot be.
//!
//! **Registered too early.** A library that the program is linked with, and that is asked for memory by a constructor
//! of another one, behind its own, opens its heap before the C library has registered its own end. `ending` then comes
//! behind `begin` at exit too. So it is registered again when threads use the heap for the first time: at exit that
//! call comes before all `fini_array`, and says so; at dlclose both come in the middle. What remains: eight threads and
//! more that all came before `main`, and run until the end; and, if none came later, who uses the heap behind the end
//! of such a library.
//!
//! What is not met: a library that is closed while a thread is on its way into the key's destructor, or out of it, a
//! few instructions before and behind what is counted (`pthread.rs`). Who has joined his threads cannot meet that.
//! (Seen once in some thousand runs of a test that had waited for their work only.) And a library that one thread
//! closes while another ends the process: the latter may wait for the loader's lock in [`stay`] until the code it would
//! come back to has gone.
//!
//! **What goes.** Tables, free pages, and the address space behind the last page in use. A block that is still
//! allocated stays where it is: whoever was given it may read it for ever. Nobody may *free* it, of course.
//!
//! Linux only (where the C library has no `dlclose` that unloads, as musl, it is never called); on macOS libraries with
//! thread-locals are not unloaded at all. Elsewhere a library with a heap in it must stay.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::source::KeepErrno;

use super::{background, fork, pthread};

// Relaxed throughout: one thread runs the ends of a library, one after the other; and who registers twice does no harm.

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

/// Has `ending` called at the end, once however many heaps there are: whether it will be. Before the first heap opens,
/// and before a thread is started.
#[cold]
pub(super) fn register() -> bool {
    static AT_IT: AtomicBool = AtomicBool::new(false);
    if REGISTERED.load(Ordering::Relaxed) {
        return true;
    }
    // Of a library that the program is linked with, whose constructors run before the C library has registered its own
    // end, `ending` would come behind `begin` at exit too, and all would go below threads that still run. Such a
    // library is never unloaded; and of one that is opened, and allocates before our constructor has run, all stays,
    // unless it is registered later. Last: the C library's own allocation may lead back here; and where another
    // thread is at it, who comes meanwhile tries again later.
    if BEGUN.load(Ordering::Relaxed) || !background::constructors_have_run() || AT_IT.swap(true, Ordering::Relaxed) {
        return false;
    }
    let _errno = KeepErrno::new();
    // SAFETY: a function that stays as long as this copy of the crate: the C library calls it before it goes.
    let is_done = unsafe { libc::atexit(ending) } == 0;
    AT_IT.store(false, Ordering::Relaxed);
    // Without memory for it, whoever comes next tries again.
    if is_done {
        REGISTERED.store(true, Ordering::Relaxed);
    }
    is_done
}

/// As [`register`], where it may have been too early: by a thread that uses the heap for the first time.
pub(super) fn register_again() {
    static TIMES: AtomicU32 = AtomicU32::new(0);
    if BEGUN.load(Ordering::Relaxed) || TIMES.load(Ordering::Relaxed) >= AGAIN {
        return;
    }
    // Before it is done: the C library's own allocation may lead back here.
    if TIMES.fetch_add(1, Ordering::Relaxed) < AGAIN && background::constructors_have_run() {
        let _errno = KeepErrno::new();
        // SAFETY: as in `register`. Without memory for it, it is as if this thread had not come.
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
    }
}

/// Has the library that this copy of the crate is in stay until the process has ended, whoever closes it. Of the
/// program itself nothing is to be done: it is the file whose headers the kernel names.
#[cfg(not(target_feature = "crt-static"))]
fn stay() {
    use core::ffi::c_void;
    use core::mem::MaybeUninit;

    /// A program's headers begin within so many bytes from its beginning: they stand behind the file's own, of 64.
    const MOST_BEFORE_HEADERS: usize = 4096;
    let _errno = KeepErrno::new();
    let mut place = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: the loader writes what it knows of the address, if it knows it; its name of the file lasts as long as the
    // file is loaded. To open what is open anyway runs no code of its.
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

/// A program with the C library in it is none that is loaded, and linkers warn of `dlopen` in it.
#[cfg(target_feature = "crt-static")]
fn stay() {}

unsafe extern "C" fn end() {
    if UNLOADED.load(Ordering::Relaxed) {
        // SAFETY: the library is closed, so no thread is in its code or comes back to it; and this is the last of its
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

    /// The system, which knows how many reservations of tables there are.
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

        /// Does nothing: what is discarded too late may be anybody's.
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

    /// The pages of a heap that is unloaded are released when its tables have gone: with nothing beside them.
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
