//! The thread that gives memory back while the program does something else, or nothing.
//!
//! ```text
//!   a block is freed, the slow way ─▶ 1 MiB free and nobody about? ─▶ after all constructors? ─▶ a thread, once
//!
//!   thread   tick ─▶ pause ─▶ tick ─▶ … nothing left: sleep until 1 MiB more has been freed
//! ```
//!
//! **Its birth.** It is started by whoever frees, at the end of the call, with nothing held; never by an allocation, so
//! never by the first one; never before the constructors of the program have run. It is made from the C library's own
//! parts on a stack of our own mapping, so nothing here asks this allocator for memory. A system that refuses (a limit
//! on threads, a filter) is asked again after the next MiB, sixteen times in all; the heap works without.
//!
//! **Its life.** All signals are blocked in it: handlers run where they always did. Its name is `pageheap`. It reads
//! two clocks and sleeps; with nothing left to do it waits on a futex for ever and costs nothing. (Where there is none
//! it looks once a second.) It never allocates and never runs code of the program's.
//!
//! **fork.** Before, scavengers are held until they have finished the millisecond they are at, so the child finds no
//! lock taken and no page on its way. The child has no such thread, and starts one when it wants one.
//!
//! Cost: a stack of 256 KiB of addresses, of which 8 to 12 KiB are ever touched.

use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use crate::heap::{Clock, Driver};
use crate::object::{ABSENT, ASLEEP, AWAKE, Keeper, OFF, Objects};
use crate::source::{KeepErrno, Source};

/// Address space for the stack. The C library puts the thread's static thread-locals there too.
const STACK_BYTES: usize = 256 << 10;

/// How often a start is tried.
const TRIES: u32 = 16;

/// Whoever frees calls this when [`Keeper::is_wanted`]: starts the thread, unless it is too early or cannot be done.
#[cold]
pub(super) fn start<S: Source + Send + Sync + 'static>(objects: &'static Objects<S>) {
    static FAILED: AtomicU32 = AtomicU32::new(0);
    if !constructors_have_run() || !objects.keeper().change(ABSENT, AWAKE) {
        return;
    }
    let _errno = KeepErrno::new();
    let argument = ptr::from_ref(objects).cast_mut().cast();
    if !enter(objects.keeper(), objects.driver()) || !spawn(run::<S>, argument) {
        // Relaxed: a count.
        let often = FAILED.fetch_add(1, Ordering::Relaxed) >= TRIES;
        objects.keeper().change(AWAKE, if often { OFF } else { ABSENT });
    }
}

/// A detached thread on pages of our own, with all signals blocked. Whether it runs.
fn spawn(entry: extern "C" fn(*mut c_void) -> *mut c_void, argument: *mut c_void) -> bool {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
    // SAFETY: a new mapping replaces nothing; its lowest page is made the guard. The attributes are initialised before
    // they are used and destroyed once. The signal mask is this thread's own and is put back. The stack is the new
    // thread's for ever, unless there is none: then nobody knows of it.
    unsafe {
        let stack = libc::mmap(ptr::null_mut(), STACK_BYTES, access, flags, -1, 0);
        if stack == libc::MAP_FAILED {
            return false;
        }
        libc::mprotect(stack, STACK_BYTES / 16, libc::PROT_NONE);
        let mut attributes = MaybeUninit::uninit();
        let mut started = false;
        if libc::pthread_attr_init(attributes.as_mut_ptr()) == 0 {
            let attributes = attributes.as_mut_ptr();
            let (mut every, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
            libc::sigfillset(every.as_mut_ptr());
            let usable = libc::pthread_attr_setstack(attributes, stack, STACK_BYTES) == 0
                && libc::pthread_attr_setdetachstate(attributes, libc::PTHREAD_CREATE_DETACHED) == 0;
            if usable && libc::pthread_sigmask(libc::SIG_SETMASK, every.as_ptr(), before.as_mut_ptr()) == 0 {
                let mut thread = MaybeUninit::uninit();
                started = libc::pthread_create(thread.as_mut_ptr(), attributes, entry, argument) == 0;
                libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
            }
            libc::pthread_attr_destroy(attributes);
        }
        if !started {
            libc::munmap(stack, STACK_BYTES);
        }
        started
    }
}

/// What the thread does, for ever.
extern "C" fn run<S: Source + Send + Sync + 'static>(objects: *mut c_void) -> *mut c_void {
    pin();
    name();
    // SAFETY: `start` passed a heap of this type, which is never unmade.
    let objects: &'static Objects<S> = unsafe { &*objects.cast_const().cast() };
    loop {
        let wait = objects.tick(&ThreadClock);
        if wait != Duration::MAX {
            sleep(wait);
            continue;
        }
        // Frees are counted from here on; what came before is seen by the next look, behind the fence.
        let keeper = objects.keeper();
        keeper.change(AWAKE, ASLEEP);
        crate::sync::fence_heavy();
        sleep(Duration::from_millis(300));
        while objects.tick(&ThreadClock) == Duration::MAX && keeper.is_asleep() {
            sleep_on(keeper);
        }
        keeper.change(ASLEEP, AWAKE);
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn sleep_on(keeper: &Keeper) {
    crate::sync::wait(keeper.state(), ASLEEP, 0);
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn sleep_on(_keeper: &Keeper) {
    sleep(Duration::from_secs(1));
}

fn sleep(time: Duration) {
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
        // Less than a billion, which every type of this field holds.
        tv_nsec: time.subsec_nanos() as _,
    };
    // SAFETY: `time` is a valid place to read from. Woken early is no harm.
    unsafe { libc::nanosleep(&time, ptr::null_mut()) };
}

/// The time of day that never goes back, and what this thread has worked.
struct ThreadClock;

impl Clock for ThreadClock {
    fn now(&self) -> Duration {
        read(libc::CLOCK_MONOTONIC)
    }

    fn work(&self) -> Duration {
        read(libc::CLOCK_THREAD_CPUTIME_ID)
    }
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place to write to. A clock that is refused stands still.
    unsafe { libc::clock_gettime(clock, &mut time) };
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn name() {
    // SAFETY: names the calling thread, by a string that ends with zero.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"pageheap".as_ptr()) };
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn name() {}

/// Keeps the code of this thread where it is: a library with a destructor of a thread-local that is still to run is not
/// unloaded (`dlclose` leaves it), where the C library knows of such.
fn pin() {
    struct Pin;
    impl Drop for Pin {
        fn drop(&mut self) {}
    }
    std::thread_local! {
        static PIN: Pin = const { Pin };
    }
    PIN.with(|_| ());
}

// ---- constructors
// -----------------------------------------------------------------------------------------------------------------

/// Whether the program's constructors have run, as far as can be told: those of its libraries have, and ours, which
/// stands behind those of the program's own objects.
#[cfg(any(
    target_os = "linux",
    target_os = "android",
    target_os = "freebsd",
    target_os = "netbsd"
))]
fn constructors_have_run() -> bool {
    static RUN: AtomicU8 = AtomicU8::new(0);
    extern "C" fn constructor() {
        // Relaxed: a number by itself.
        RUN.store(1, Ordering::Relaxed);
    }
    // SAFETY: the section is a list of functions of this type, which the loader calls one by one.
    #[used]
    #[unsafe(link_section = ".init_array")]
    static CONSTRUCTOR: extern "C" fn() = constructor;
    // Relaxed: as above.
    RUN.load(Ordering::Relaxed) != 0
}

#[cfg(not(any(
    target_os = "linux",
    target_os = "android",
    target_os = "freebsd",
    target_os = "netbsd"
)))]
fn constructors_have_run() -> bool {
    true
}

// ---- fork
// -------------------------------------------------------------------------------------------------------------------

/// Heaps of one copy of this crate that may have such a thread: any more do without.
const MOST_HEAPS: usize = 64;

/// Heaps that have had one, in order of entry: entries are never taken out.
static HEAPS: [Heap; MOST_HEAPS] = [const { Heap::none() }; MOST_HEAPS];

struct Heap {
    driver: AtomicPtr<Driver>,
    keeper: AtomicPtr<Keeper>,
}

impl Heap {
    const fn none() -> Self {
        Self {
            driver: AtomicPtr::new(ptr::null_mut()),
            keeper: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn driver(&self) -> Option<&'static Driver> {
        // Acquire: pairs with the exchange in `enter`. SAFETY: of a heap, which is never unmade.
        unsafe { self.driver.load(Ordering::Acquire).as_ref() }
    }
}

/// Has the heap's scavengers held over every fork from here on. Whether there was room.
fn enter(keeper: &'static Keeper, driver: NonNull<Driver>) -> bool {
    static REGISTERED: AtomicU8 = AtomicU8::new(0);
    // Relaxed: the first registers.
    if REGISTERED.swap(1, Ordering::Relaxed) == 0 {
        // SAFETY: functions that live as long as their library; pinned by the thread.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
    }
    HEAPS.iter().any(|heap| {
        let none = ptr::null_mut();
        // Release: the heap is made, to `driver`. Acquire: of another's.
        let found = heap
            .driver
            .compare_exchange(none, driver.as_ptr(), Ordering::AcqRel, Ordering::Acquire);
        // Its own, of an earlier start: in a parent, or one that failed.
        let entered = found.is_ok() || found == Err(driver.as_ptr());
        if entered {
            // Relaxed: read by the child's only thread, forked from one that saw the driver or not; both is well.
            heap.keeper.store(ptr::from_ref(keeper).cast_mut(), Ordering::Relaxed);
        }
        entered
    })
}

/// How many heaps are held. Written and read with the first of them held.
static HELD: AtomicUsize = AtomicUsize::new(0);

extern "C" fn before_fork() {
    let mut held = 0;
    for driver in HEAPS.iter().map_while(Heap::driver) {
        driver.hold();
        held += 1;
    }
    // Relaxed: for this thread, and for the child, which is its copy.
    HELD.store(held, Ordering::Relaxed);
}

extern "C" fn after_fork() {
    // Relaxed: as above. Read before the first is let go: another thread may fork then.
    let held = HELD.load(Ordering::Relaxed);
    HEAPS.iter().map_while(Heap::driver).take(held).for_each(Driver::let_go);
}

extern "C" fn in_child() {
    for heap in &HEAPS {
        // SAFETY: of a heap, which is never unmade. Relaxed: see `enter`.
        if let Some(keeper) = unsafe { heap.keeper.load(Ordering::Relaxed).as_ref() } {
            keeper.has_gone();
        }
    }
    after_fork();
}
