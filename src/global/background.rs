//! The thread that gives memory back while the program does something else, or nothing.
//!
//! ```text
//!   a free, the slow way ─▶ 1 MiB to find and nobody about? ─▶ after all constructors? ─▶ a thread, once
//!
//!   thread   tick ─▶ pause ─▶ tick ─▶ … nothing left: sleep until there is 1 MiB more to find
//! ```
//!
//! **Its birth.** It is started when there is a MiB that has been freed, or could be without anybody's seeing it
//! (`object/keeper.rs`): by whoever frees the slow way, at the end of the call, with nothing held; by a thread that
//! begins to use the heap; and by an allocation in a process that has one thread, but not by the first. For an
//! allocation may be made in a callback of `dl_iterate_phdr`, with a lock of the loader's, and to make a thread takes
//! another: it would wait for who loads a library at the moment, who waits for the first. (A free in such a callback,
//! be it the one in a `realloc` that moves, may still do so, if it is the one that makes the MiB full.) Never before
//! the constructors of the program have run. It is made from the C library's own parts on a stack of our own mapping,
//! so nothing here asks this allocator for memory. A system that refuses (a limit on threads, a filter) is asked again
//! after the next MiB, sixteen times in all, for all heaps; they work without.
//!
//! **Its life.** All signals are blocked in it: handlers run where they always did. Its name is `pageheap`. It reads
//! two clocks, once a second the limits of the process's group, and sleeps; with nothing left to do it waits on a futex
//! for ever and costs nothing. (Where there is none it looks once a second.) It never allocates, and runs no code of
//! the program's but what that has given it for pressure (`GlobalHeap::on_pressure`), and the verbs of a source of its
//! own (`GlobalHeap::with_source`).
//!
//! **Its end.** Before a fork, scavengers are held until they have finished the millisecond they are at, with all other
//! locks. The child has no such thread, and starts one when it wants one. A library that is unloaded waits for the
//! thread to end. At the end of the process it simply stops with it.
//!
//! Cost: a stack of 40 KiB, 16 of them for itself; what the program's thread-locals need, which the C library puts
//! there too; 256 KiB where code of the program's runs on it; and what the C library's least is, where that is more. 8
//! to 12 KiB of it are ever touched by us.

use core::any::TypeId;
use core::cell::Cell;
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use crate::heap::Clock;
use crate::object::{ABSENT, ASLEEP, AWAKE, Keeper, OFF, Objects};
use crate::scavenge::pressure::Patience;
use crate::source::{KeepErrno, Source, System};
use crate::sync::{fence_heavy, wait_for};
use crate::units::PageCount;

use super::pressure::{Turn, Watch};

// Not in the libc crate for every Unix.
unsafe extern "C" {
    fn pthread_attr_setstack(attributes: *mut libc::pthread_attr_t, stack: *mut c_void, bytes: usize) -> c_int;
}

/// What the thread itself needs of its stack: 8 to 12 KiB, more where nothing is optimised.
const OWN_BYTES: usize = if cfg!(debug_assertions) { 64 << 10 } else { 16 << 10 };

/// What it has where it runs code of the program's, a hook or a source's verbs, and how much below may not be touched.
const GUEST_BYTES: usize = 256 << 10;
const GUEST_GUARD_BYTES: usize = 16 << 10;

/// What the C library puts there: what it knows of the thread, gaps before thread-locals, and room for those of
/// libraries to come (as much as it is told to keep spare: half a KiB, where nobody says otherwise).
const LIBRARY_BYTES: usize = 24 << 10;

/// Bytes of the program's own thread-locals, which are on each thread's stack; a guess, where nobody says.
static THREAD_LOCAL_BYTES: AtomicUsize = AtomicUsize::new(if cfg!(any(target_os = "linux", target_os = "android")) {
    0
} else {
    64 << 10
});

/// Before it goes to sleep it waits for as long as this, and looks once more: more than the time between two looks.
const ANOTHER_LOOK: Duration = Duration::from_millis(300);

/// How often the system is asked how things stand.
const BETWEEN_WATCHES: Duration = Duration::from_secs(1);

/// How often a start is tried, for all heaps together.
const TRIES: u32 = 16;

/// Whether a thread has been started, or is just about to be.
static STARTED: AtomicBool = AtomicBool::new(false);

/// Whether none is to be: the process ends.
static FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// From here on none is started. Whether one was, or may be.
#[cfg(target_os = "linux")]
pub(super) fn forbid() -> bool {
    // SeqCst, here and in `start`, a store and then a load in each: either we see that it starts one, or it sees that
    // it must not.
    FORBIDDEN.store(true, Ordering::SeqCst);
    STARTED.load(Ordering::SeqCst)
}

/// Whoever may is to call this when [`Keeper::is_wanted`]: starts the thread, unless it is too early or
/// cannot be done.
#[cold]
pub(super) fn start<S: Source + Send + Sync + 'static>(objects: &'static Objects<S>) {
    static FAILED: AtomicU32 = AtomicU32::new(0);
    if !constructors_have_run() || !objects.keeper().change(ABSENT, AWAKE) {
        return;
    }
    // SeqCst, twice: as in `forbid`.
    STARTED.store(true, Ordering::SeqCst);
    if FORBIDDEN.load(Ordering::SeqCst) {
        objects.keeper().change(AWAKE, OFF);
        return;
    }
    let _errno = KeepErrno::new();
    // Relaxed: written by who starts, who is one at a time; read when he has gone.
    let [thread, stack, bytes] = &objects.keeper().marks;
    let argument = ptr::from_ref(objects).cast_mut().cast();
    let old = Stack {
        base: stack.load(Ordering::Relaxed),
        bytes: bytes.load(Ordering::Relaxed),
    };
    let has_guest = objects.keeper().notices.are_any() || TypeId::of::<S>() != TypeId::of::<System>();
    if let Some((number, made)) = spawn(run::<S>, argument, old, has_guest) {
        thread.store(number, Ordering::Relaxed);
        bytes.store(made.bytes, Ordering::Relaxed);
        // Release: behind its length, as a fork may come in between; partner: the child, which has all that was seen.
        stack.store(made.base, Ordering::Release);
    } else {
        // Relaxed: a count.
        let often = FAILED.fetch_add(1, Ordering::Relaxed) + 1 >= TRIES;
        objects.keeper().change(AWAKE, if often { OFF } else { ABSENT });
    }
}

/// Where a stack begins, its guard, and how long both are. All zero: none.
#[derive(Clone, Copy)]
struct Stack {
    base: usize,
    bytes: usize,
}

impl Stack {
    /// A new one, for the thread alone or for a guest's code too, with something that may not be touched below it.
    fn map(has_guest: bool) -> Option<Self> {
        let page = System.granule();
        let (own, guard) = if has_guest {
            (GUEST_BYTES, GUEST_GUARD_BYTES.next_multiple_of(page))
        } else {
            (OWN_BYTES, page)
        };
        // Relaxed: written by a constructor.
        let locals = THREAD_LOCAL_BYTES.load(Ordering::Relaxed);
        // SAFETY: it reads a limit of the system's, and nothing of ours; what it does not know is -1.
        let least = usize::try_from(unsafe { libc::sysconf(libc::_SC_THREAD_STACK_MIN) }).unwrap_or(0);
        let bytes = (own + LIBRARY_BYTES + locals).max(least).next_multiple_of(page) + guard;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
        // SAFETY: a new mapping replaces nothing; its lowest part is made the guard.
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

    /// Gives it back.
    ///
    /// # Safety
    ///
    /// No thread is on it.
    unsafe fn unmap(self) {
        // SAFETY: `map` made it, and nobody uses it.
        unsafe { libc::munmap(self.base(), self.bytes) };
    }
}

/// Bytes of the thread-locals that every thread has from its beginning: those of all that is loaded, which is more,
/// each with what its alignment may cost. By a constructor: whoever frees may hold what others wait for with the
/// loader's lock.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn thread_local_bytes() -> usize {
    unsafe extern "C" fn add(object: *mut libc::dl_phdr_info, _: usize, sum: *mut c_void) -> c_int {
        // SAFETY: the loader's description of what is loaded, for the time of this call, and the number below.
        unsafe {
            let (object, sum) = (&*object, &mut *sum.cast::<usize>());
            for number in 0..object.dlpi_phnum {
                let segment = &*object.dlpi_phdr.add(number.into());
                if segment.p_type == libc::PT_TLS {
                    *sum = sum.saturating_add(segment.p_memsz as usize + 3 * segment.p_align as usize);
                }
            }
        }
        0
    }
    let mut sum = 0_usize;
    // SAFETY: `add` has such a signature, and the number lasts as long as the call.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut sum).cast()) };
    sum
}

/// A thread on pages of our own, with all signals blocked: its number, and its stack. `old` is the stack of one that
/// the parent of this process has, or none.
fn spawn(
    entry: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
    old: Stack,
    has_guest: bool,
) -> Option<(usize, Stack)> {
    let stack = if old.base == 0 { Stack::map(has_guest)? } else { old };
    // SAFETY: the attributes are initialised before they are used and destroyed once. The signal mask is this thread's
    // own and is put back. The stack is the new thread's until it has ended, unless there is none: then nobody knows of
    // it. An old one is that of a thread that this process does not have.
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

/// What the thread does, for ever.
extern "C" fn run<S: Source + Send + Sync + 'static>(objects: *mut c_void) -> *mut c_void {
    name();
    // SAFETY: `start` passed a heap of this type, which is never unmade.
    let objects: &'static Objects<S> = unsafe { &*objects.cast_const().cast() };
    let keeper = objects.keeper();
    let (mut watch, clock) = (Watched::default(), ThreadClock::default());
    // Who wants to hear of pressure hears of it though there is nothing to do.
    let most = keeper.notices.are_any().then_some(BETWEEN_WATCHES);
    while !keeper.is(OFF) {
        watch.look(objects, clock.now());
        let pause = objects.tick(&clock);
        if pause != Duration::MAX {
            watch.wait(objects, &clock, pause);
            continue;
        }
        // From here on it is counted what there is to find; what came before is found by the next look, behind the
        // fence.
        keeper.change(AWAKE, ASLEEP);
        fence_heavy();
        let awake = clock.now() + ANOTHER_LOOK;
        while keeper.is(ASLEEP)
            && let Some(left) = awake.checked_sub(clock.now())
            && left > Duration::ZERO
        {
            // It may return early.
            clock.wait(keeper, ASLEEP, Some(left));
        }
        while keeper.is(ASLEEP) && objects.tick(&clock) == Duration::MAX {
            clock.wait(keeper, ASLEEP, most);
            watch.look(objects, clock.now());
        }
        keeper.change(ASLEEP, AWAKE);
    }
    ptr::null_mut()
}

/// Keeps an eye on the system, once a second.
#[derive(Default)]
struct Watched {
    /// From the first look on.
    watch: Option<Watch>,
    patience: Patience,
    last: Duration,
}

impl Watched {
    /// Waits for as long as the scavenger pauses, and looks meanwhile.
    fn wait<S: Source + 'static>(&mut self, objects: &Objects<S>, clock: &ThreadClock, pause: Duration) {
        let (begin, keeper) = (clock.now(), objects.keeper());
        while keeper.is(AWAKE) {
            let left = pause.saturating_sub(clock.now().saturating_sub(begin));
            if left.is_zero() {
                break;
            }
            clock.wait(keeper, AWAKE, Some(left.min(BETWEEN_WATCHES)));
            self.look(objects, clock.now());
        }
    }

    fn look<S: Source + 'static>(&mut self, objects: &Objects<S>, now: Duration) {
        if now.saturating_sub(self.last) < BETWEEN_WATCHES {
            return;
        }
        let pressure = {
            // While the process forks there is none: it is tried again at the next wait.
            let Some(_turn) = Turn::begin() else { return };
            let watch = self.watch.get_or_insert_with(|| Watch::new(objects.keeper().root));
            watch.look()
        };
        self.last = now;
        if self.patience.is_time(pressure.is_high()) {
            objects.release(PageCount(usize::MAX));
        }
        objects.keeper().notices.give(pressure);
    }
}

/// The time of day that never goes back, and what this thread has worked.
#[derive(Default)]
struct ThreadClock {
    /// What it has waited while that stood still, as where it is refused: or a wait would have no end.
    waited: Cell<Duration>,
}

impl ThreadClock {
    /// Waits while the keeper is at that, for `time` at the most, if there is one. It may return early.
    fn wait(&self, keeper: &Keeper, state: u32, time: Option<Duration>) {
        let before = self.now();
        wait_for(keeper.state(), state, time);
        if self.now() == before {
            self.waited.set(self.waited.get() + time.unwrap_or_default());
        }
    }
}

impl Clock for ThreadClock {
    fn now(&self) -> Duration {
        read(libc::CLOCK_MONOTONIC) + self.waited.get()
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
pub(super) fn constructors_have_run() -> bool {
    static RUN: AtomicU8 = AtomicU8::new(0);
    extern "C" fn constructor() {
        // Relaxed, both: numbers by themselves.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        THREAD_LOCAL_BYTES.store(thread_local_bytes(), Ordering::Relaxed);
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
pub(super) fn constructors_have_run() -> bool {
    true
}

// ---- the end
// ----------------------------------------------------------------------------------------------------------------

/// Whether it has a thread, which has not been waited for.
#[cfg(target_os = "linux")]
pub(super) fn is_started(keeper: &Keeper) -> bool {
    // Relaxed: by whoever is alone.
    keeper.marks[0].load(Ordering::Relaxed) != 0
}

/// Ends the thread, if there is one, and waits until it has ended: its code is about to go.
///
/// # Safety
///
/// Nobody else uses the heap any more.
#[cfg(target_os = "linux")]
pub(super) unsafe fn end(keeper: &Keeper) {
    keeper.dismiss();
    // Relaxed: by whoever is alone.
    let [thread, base, bytes] = keeper.marks.each_ref().map(|mark| mark.swap(0, Ordering::Relaxed));
    // SAFETY: a thread that `start` made, not joined yet, which ends by itself within a quantum; its stack, which it
    // does not use then. 0: there is none.
    unsafe {
        if thread != 0 && libc::pthread_join(thread as libc::pthread_t, ptr::null_mut()) == 0 {
            Stack { base, bytes }.unmap();
        }
    }
}
