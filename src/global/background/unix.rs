//! The background thread on Unix: a stack of our own, a pthread with all signals blocked, its clocks.

use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use core::time::Duration;

#[cfg(target_os = "linux")]
use crate::object::Keeper;
use crate::object::Objects;
use crate::source::{Source, System};

// Not in the libc crate for every Unix.
unsafe extern "C" {
    fn pthread_attr_setstack(attributes: *mut libc::pthread_attr_t, stack: *mut c_void, bytes: usize) -> c_int;
    #[cfg(target_os = "linux")]
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
#[cfg(target_os = "linux")]
const CANCEL_DISABLE: c_int = 1;

/// What the thread itself needs of its stack: 8 to 12 KiB, more without optimisation.
const OWN_BYTES: usize = if cfg!(debug_assertions) { 64 << 10 } else { 16 << 10 };

/// Its stack if it runs code of the program, a hook or a source's methods; and the size of the guard below.
const GUEST_BYTES: usize = 256 << 10;
const GUEST_GUARD_BYTES: usize = 16 << 10;

/// What the C library puts there: its own thread data, gaps before thread-locals, and room for thread-locals of
/// libraries loaded later (half a KiB, unless it is configured to keep more spare).
const LIBRARY_BYTES: usize = 24 << 10;

/// That, and the program's own thread-locals, which are on each thread's stack; a guess if these are unknown.
static FOREIGN_BYTES: AtomicUsize = AtomicUsize::new(if cfg!(any(target_os = "linux", target_os = "android")) {
    LIBRARY_BYTES
} else {
    LIBRARY_BYTES + (64 << 10)
});

/// Starts the thread. Returns whether it did. With a guest, code of the program runs on it.
pub(super) fn launch<S: Source + Send + Sync + 'static>(objects: &'static Objects<S>, has_guest: bool) -> bool {
    // Relaxed: written by the starting thread, one at a time; read when it is done.
    let [thread, stack, bytes] = &objects.keeper().marks;
    let argument = ptr::from_ref(objects).cast_mut().cast();
    let old = Stack {
        base: stack.load(Ordering::Relaxed),
        bytes: bytes.load(Ordering::Relaxed),
    };
    if let Some((number, made)) = spawn(enter::<S>, argument, old, has_guest) {
        thread.store(number, Ordering::Relaxed);
        bytes.store(made.bytes, Ordering::Relaxed);
        // Release: after its length, because a fork may come in between; partner: the child, which has all that was
        // seen.
        stack.store(made.base, Ordering::Release);
        return true;
    }
    false
}

/// Where a stack begins, with its guard, and how long both are. All zero: none.
#[derive(Clone, Copy)]
struct Stack {
    base: usize,
    bytes: usize,
}

impl Stack {
    /// Maps a new one, for the thread alone or also for the program's code, with an inaccessible guard below it.
    fn map(has_guest: bool) -> Option<Self> {
        let page = System.granule();
        let (own, guard) = if has_guest {
            (GUEST_BYTES, GUEST_GUARD_BYTES.next_multiple_of(page))
        } else {
            (OWN_BYTES, page)
        };
        // Relaxed: written by a constructor.
        let foreign = FOREIGN_BYTES.load(Ordering::Relaxed);
        // SAFETY: it reads a limit of the system, and nothing of ours; an unknown value is -1.
        let least = usize::try_from(unsafe { libc::sysconf(libc::_SC_THREAD_STACK_MIN) }).unwrap_or(0);
        let bytes = (own + foreign).max(least).next_multiple_of(page) + guard;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
        // SAFETY: a new mapping replaces nothing; its lowest part becomes the guard.
        unsafe {
            let base = libc::mmap(ptr::null_mut(), bytes, access, flags, -1, 0);
            if base == libc::MAP_FAILED {
                return None;
            }
            libc::mprotect(base, guard, libc::PROT_NONE);
            Some(Self {
                base: base.expose_provenance(),
                bytes,
            })
        }
    }

    fn base(self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.base)
    }

    /// Unmaps it.
    ///
    /// # Safety
    ///
    /// No thread is on it.
    unsafe fn unmap(self) {
        // SAFETY: `map` made it, and nobody uses it.
        unsafe { libc::munmap(self.base(), self.bytes) };
    }
}

/// Bytes of the thread-locals that every thread has from its beginning: an upper bound, those of everything loaded,
/// each with what its alignment may cost. Called from a constructor, because a freeing thread may hold something that
/// others wait for under the loader's lock.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn thread_local_bytes() -> usize {
    unsafe extern "C" fn add(object: *mut libc::dl_phdr_info, _: usize, sum: *mut c_void) -> c_int {
        // SAFETY: the loader's description of a loaded object, for the duration of this call, and the number below.
        // Older loaders describe less than the structure has: no reference is made to all of it.
        unsafe {
            let sum = &mut *sum.cast::<usize>();
            for number in 0..(*object).dlpi_phnum {
                let segment = &*(*object).dlpi_phdr.add(number.into());
                if segment.p_type == libc::PT_TLS {
                    *sum = sum.saturating_add(segment.p_memsz as usize + 3 * segment.p_align as usize);
                }
            }
        }
        0
    }
    let mut sum = 0_usize;
    // Miri calls constructors, but does not know what is loaded.
    if cfg!(miri) {
        return sum;
    }
    // SAFETY: `add` has the right signature, and the number outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut sum).cast()) };
    sum
}

/// What glibc says of the same: with all that it is told to keep spare for thread-locals
/// (`glibc.rtld.optional_static_tls`), which `sysconf` does not count. 0 where it does not say. The standard library
/// asks in the same way.
#[cfg(all(target_os = "linux", target_env = "gnu", not(target_feature = "crt-static")))]
fn least_by_glibc() -> usize {
    if cfg!(miri) {
        return 0;
    }
    type Function = unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize;
    let mut attributes = MaybeUninit::uninit();
    // SAFETY: a zero-terminated name; null, or glibc's function, which has this signature. Attributes that are
    // initialised, used and destroyed.
    unsafe {
        let function = libc::dlsym(libc::RTLD_DEFAULT, c"__pthread_get_minstack".as_ptr());
        let function = core::mem::transmute::<*mut c_void, Option<Function>>(function);
        if libc::pthread_attr_init(attributes.as_mut_ptr()) != 0 {
            return 0;
        }
        let bytes = function.map_or(0, |function| function(attributes.as_ptr()));
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        bytes
    }
}

/// Others do not say. (In a statically linked program nothing can be looked up by its name: there the thread may have
/// too little stack if more than 8 KiB are kept spare.)
#[cfg(all(
    any(target_os = "linux", target_os = "android"),
    not(all(target_os = "linux", target_env = "gnu", not(target_feature = "crt-static")))
))]
const fn least_by_glibc() -> usize {
    0
}

/// Starts a thread on pages of our own, with all signals blocked. Returns its number and its stack. `old` is the stack
/// of the thread that the parent of this process has, or none.
fn spawn(
    entry: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
    old: Stack,
    has_guest: bool,
) -> Option<(usize, Stack)> {
    let stack = if old.base == 0 { Stack::map(has_guest)? } else { old };
    // SAFETY: the attributes are initialised before they are used, and destroyed once. The signal mask is this thread's
    // own and is restored. The stack belongs to the new thread until it has ended, unless there is none: then nobody
    // knows of it. An old stack belongs to a thread that does not exist in this process.
    unsafe {
        let mut attributes = MaybeUninit::uninit();
        let mut started = None;
        if libc::pthread_attr_init(attributes.as_mut_ptr()) == 0 {
            let attributes = attributes.as_mut_ptr();
            let (mut every, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
            libc::sigfillset(every.as_mut_ptr());
            let usable = pthread_attr_setstack(attributes, stack.base(), stack.bytes) == 0;
            if usable && libc::pthread_sigmask(libc::SIG_SETMASK, every.as_ptr(), before.as_mut_ptr()) == 0 {
                let mut thread = MaybeUninit::uninit();
                if libc::pthread_create(thread.as_mut_ptr(), attributes, entry, argument) == 0 {
                    #[allow(
                        clippy::unnecessary_cast,
                        reason = "the libc crate has a pointer here for some systems"
                    )]
                    let thread = thread.assume_init() as usize;
                    started = Some((thread, stack));
                }
                libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
            }
            libc::pthread_attr_destroy(attributes);
        }
        if started.is_none() && old.base == 0 {
            stack.unmap();
        }
        started
    }
}

/// Where the thread begins.
extern "C" fn enter<S: Source + Send + Sync + 'static>(objects: *mut c_void) -> *mut c_void {
    name();
    // SAFETY: `launch` passed a heap of this type, which is never destroyed.
    super::run(unsafe { &*objects.cast_const().cast::<Objects<S>>() });
    ptr::null_mut()
}

/// The time since some moment.
pub(super) fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place to write to. A clock that is refused stands still.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn name() {
    // SAFETY: names the calling thread, with a zero-terminated string.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"pageheap".as_ptr()) };
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn name() {}

// ---- constructors
// -----------------------------------------------------------------------------------------------------------------

/// Whether the program's constructors have run, as far as can be told: those of its libraries have, and so has ours,
/// which is placed after those of the program's own objects. (Under Miri never: it has neither a place for a thread's
/// stack nor ends of libraries.)
#[cfg(any(
    target_os = "linux",
    target_os = "android",
    target_os = "freebsd",
    target_os = "netbsd"
))]
pub(in crate::global) fn constructors_have_run() -> bool {
    static RUN: AtomicU8 = AtomicU8::new(0);
    extern "C" fn constructor() {
        // Relaxed, both: independent numbers.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        {
            let bytes = LIBRARY_BYTES + thread_local_bytes();
            FOREIGN_BYTES.store(bytes.max(least_by_glibc()), Ordering::Relaxed);
        }
        RUN.store(1, Ordering::Relaxed);
    }
    // SAFETY: the section is a list of functions of this type, which the loader calls one by one.
    #[used]
    #[unsafe(link_section = ".init_array")]
    static CONSTRUCTOR: extern "C" fn() = constructor;
    // Relaxed: as above.
    !cfg!(miri) && RUN.load(Ordering::Relaxed) != 0
}

#[cfg(not(any(
    target_os = "linux",
    target_os = "android",
    target_os = "freebsd",
    target_os = "netbsd"
)))]
pub(in crate::global) fn constructors_have_run() -> bool {
    !cfg!(miri)
}

// ---- the end
// ----------------------------------------------------------------------------------------------------------------

/// Whether it has a thread that has not been joined.
#[cfg(target_os = "linux")]
pub(in crate::global) fn is_started(keeper: &Keeper) -> bool {
    // Relaxed: no other thread is running here.
    keeper.marks[0].load(Ordering::Relaxed) != 0
}

/// Ends the thread, if there is one, and waits until it has ended: its code is about to be unloaded. Not a point of
/// cancellation: a thread that is being cancelled would end here, with the loader's lock.
///
/// # Safety
///
/// Nobody else uses the heap any more.
#[cfg(target_os = "linux")]
pub(in crate::global) unsafe fn end(keeper: &Keeper) {
    keeper.dismiss();
    // Relaxed: no other thread is running here.
    let [thread, base, bytes] = keeper.marks.each_ref().map(|mark| mark.swap(0, Ordering::Relaxed));
    let mut state = 0;
    // SAFETY: a thread that `start` created, not joined yet, which ends by itself within a quantum; its stack, which it
    // no longer uses then. 0: there is none. A place for this thread's state, which is restored.
    unsafe {
        pthread_setcancelstate(CANCEL_DISABLE, &mut state);
        if thread != 0 && libc::pthread_join(thread as libc::pthread_t, ptr::null_mut()) == 0 {
            Stack { base, bytes }.unmap();
        }
        pthread_setcancelstate(state, &mut state);
    }
}
