//! The same names outside a model: `core`'s atomics, tables in memory that a source prepared.

use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::Ordering;
pub use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize};

#[cfg(all(
    feature = "std",
    any(target_os = "android", target_os = "netbsd", target_os = "openbsd")
))]
use libc::__errno as errno;
#[cfg(all(feature = "std", any(target_os = "linux", target_os = "dragonfly")))]
use libc::__errno_location as errno;
#[cfg(all(feature = "std", any(target_vendor = "apple", target_os = "freebsd")))]
use libc::__error as errno;

use crate::fatal::{self, Number};

#[cfg(all(windows, feature = "std"))]
pub(crate) use super::windows::{fence_heavy, wait, wait_for, wake};

/// Stripes of a [`Turnstile`](super::Turnstile): enough that passes for different chunks seldom contend, few enough to
/// read them all.
pub(crate) const STRIPES: usize = 8;

/// Places shared by the threads that own none: lanes of a sharded list.
pub(crate) const SHARED: usize = 8;

/// Places for runs that are put aside: a power of 2.
pub(crate) const ASIDE: usize = 8;

/// How long a thread waits for a lock before it is to be the next: a millisecond, in nanoseconds. (As in Go.)
const PATIENCE: u64 = 1_000_000;

/// A sequentially consistent (SeqCst) fence.
#[inline(always)]
pub(crate) fn fence() {
    core::sync::atomic::fence(Ordering::SeqCst);
}

/// A sequentially consistent (SeqCst) fence, for a caller whose last write to shared memory was an atomic
/// read-modify-write.
///
/// On x86 that write was a locked instruction, which is a full barrier: no later load can be executed before it. Only
/// the compiler needs a fence. (An additional `mfence` would cost 6 ns in every free.) Elsewhere the fence is real.
#[inline(always)]
pub(crate) fn fence_after_rmw() {
    if cfg!(all(any(target_arch = "x86", target_arch = "x86_64"), not(miri))) {
        core::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        fence();
    }
}

/// A sequentially consistent (SeqCst) fence between two loads of its caller, which may have written nothing.
///
/// Its guarantee: if another thread made a change by a read-modify-write, passed a fence, and then read an older value
/// than our first load did, our second load sees the change. x86 keeps loads in order, and a read-modify-write is
/// visible to all before its thread's next load executes, so only the compiler needs a fence.
#[inline(always)]
pub(crate) fn fence_after_load() {
    fence_after_rmw();
}

/// The light half of an asymmetric fence: free, for the frequent side. It orders nothing except against [`fence_heavy`]
/// of another thread; against that it is a sequentially consistent (SeqCst) fence.
#[inline(always)]
pub(crate) fn fence_light() {
    // A compiler fence only. Where the system has no heavy half, that half says so and nothing is concluded.
    // Miri knows no such pair, nor does loom: there both halves are real.
    if cfg!(miri) {
        fence();
    } else {
        core::sync::atomic::compiler_fence(Ordering::SeqCst);
    }
}

/// The heavy half: when it returns true, every thread of the process has passed a full fence since the call, between
/// two of its instructions. Costs some microseconds; the first in a process may take milliseconds. Returns false where
/// the system cannot do that, or refuses to.
#[cold]
#[cfg(all(feature = "std", any(target_os = "linux", target_os = "android")))]
pub(crate) fn fence_heavy() -> bool {
    const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;
    let ask = |command: libc::c_int| {
        // Under Miri the fence below is this half.
        // SAFETY: membarrier reads and writes no memory of ours; it may be refused.
        cfg!(miri) || unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    };
    // The first call in a process, and perhaps in a forked child, has to register.
    let done = keeping_errno(|| ask(PRIVATE_EXPEDITED) || ask(REGISTER_PRIVATE_EXPEDITED) && ask(PRIVATE_EXPEDITED));
    // The compiler must not move accesses across the call; the kernel orders this thread's with the others'.
    fence();
    done
}

/// Returns what `call` does; the thread's errno is left as it was.
#[cfg(all(unix, feature = "std"))]
fn keeping_errno<R>(call: impl FnOnce() -> R) -> R {
    // SAFETY: errno is the calling thread's own, and stays where it is as long as the thread does.
    unsafe {
        let errno = errno();
        let saved = *errno;
        let result = call();
        *errno = saved;
        result
    }
}

/// Elsewhere there is no heavy half.
#[cold]
#[cfg(not(all(feature = "std", any(windows, target_os = "linux", target_os = "android"))))]
pub(crate) fn fence_heavy() -> bool {
    false
}

/// Identifies this process; the child of a fork is another. 0 where there are no forks.
#[cold]
pub(crate) fn process() -> u32 {
    #[cfg(all(unix, feature = "std"))]
    // SAFETY: getpid has no preconditions, and does not fail.
    let process = unsafe { libc::getpid() } as u32;
    #[cfg(not(all(unix, feature = "std")))]
    let process = 0;
    process
}

/// Identifies the calling thread among those that live; [`UNKNOWN`](super::bias::UNKNOWN) without an operating system.
#[inline(always)]
pub(crate) fn thread() -> usize {
    // Inverted: an address or a small number, and so neither 0, 1 nor 3 when inverted.
    #[cfg(all(unix, feature = "std"))]
    let thread = !thread_pointer();
    #[cfg(all(windows, feature = "std"))]
    let thread = !super::windows::thread();
    #[cfg(not(all(any(unix, windows), feature = "std")))]
    let thread = super::bias::UNKNOWN;
    thread
}

/// A number that `pthread_self` would do for. A call takes two nanoseconds, of the six of an allocation from a `Heap`.
/// So where the ABI requires every thread to have a word with its own address, where `fs` points, that is read.
#[inline(always)]
#[cfg(all(unix, feature = "std"))]
fn thread_pointer() -> usize {
    #[cfg(all(target_os = "linux", target_arch = "x86_64", target_pointer_width = "64", not(miri)))]
    // SAFETY: reads a word that every thread has (System V ABI, AMD64 supplement, "Thread-Local Storage", variant II).
    unsafe {
        let pointer;
        core::arch::asm!("mov {}, fs:[0]", out(reg) pointer, options(pure, readonly, nostack, preserves_flags));
        pointer
    }
    #[cfg(not(all(target_os = "linux", target_arch = "x86_64", target_pointer_width = "64", not(miri))))]
    // SAFETY: pthread_self has no preconditions, and does not fail.
    unsafe {
        libc::pthread_self() as usize
    }
}

/// Lets another thread run first, in a loop that waits for one: a pause, and later (where there is an operating system)
/// a yield.
#[cold]
pub(crate) fn relax(round: u32) {
    if round < 7 {
        (0..1_u32 << round).for_each(|_| core::hint::spin_loop());
        return;
    }
    // SAFETY: sched_yield has no preconditions; failure means it did not yield. On Linux only a filter makes it fail.
    #[cfg(all(unix, feature = "std"))]
    keeping_errno(|| unsafe { libc::sched_yield() });
    #[cfg(all(windows, feature = "std"))]
    super::windows::pause(round);
    // There is no known thread to yield to: a pause about as long as a yield takes that finds no other thread.
    #[cfg(not(all(any(unix, windows), feature = "std")))]
    (0..1 << 4).for_each(|_| core::hint::spin_loop());
}

/// How often one who is about to sleep on a word spins before, of `most`. (In a model, it may sleep at once.)
#[inline(always)]
pub(crate) const fn spins(_word: &AtomicU32, most: u32) -> u32 {
    most
}

/// Sleeps while `word` is `expected`. May return at once or spuriously: the caller checks again.
#[cfg(all(feature = "std", any(target_os = "linux", target_os = "android")))]
pub(crate) fn wait(word: &AtomicU32, expected: u32, _round: u32) {
    wait_for(word, expected, None);
}

/// Half of a time, as the futex call takes it: a word of the kernel's. The C library's `timespec` consists of those on
/// 64 bits only. On 32 bits it may count seconds in 64 bits; the kernel would read their upper half as the nanoseconds,
/// and not wait at all.
#[cfg(all(
    feature = "std",
    any(target_os = "linux", target_os = "android"),
    target_arch = "x86_64"
))]
type KernelWord = i64;
#[cfg(all(
    feature = "std",
    any(target_os = "linux", target_os = "android"),
    not(target_arch = "x86_64")
))]
type KernelWord = libc::c_long;

/// As [`wait`], but for at most `time`, if there is one.
#[cfg(all(feature = "std", any(target_os = "linux", target_os = "android")))]
pub(crate) fn wait_for(word: &AtomicU32, expected: u32, time: Option<core::time::Duration>) {
    // Seconds, then nanoseconds: less than a billion, which fits the word.
    let time = time.map(|time| -> [KernelWord; 2] {
        [
            KernelWord::try_from(time.as_secs()).unwrap_or(KernelWord::MAX),
            time.subsec_nanos() as KernelWord,
        ]
    });
    // SAFETY: the futex call reads the word and the time, which outlive it. Every failure (EAGAIN, EINTR, ENOSYS under
    // a filter) is a spurious return.
    keeping_errno(|| unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            expected,
            time.as_ref().map_or(core::ptr::null(), core::ptr::from_ref),
        )
    });
}

/// Wakes one thread that sleeps in [`wait`] on `word`. Returns whether there was one.
#[cfg(all(feature = "std", any(target_os = "linux", target_os = "android")))]
pub(crate) fn wake(word: &AtomicU32) -> bool {
    // SAFETY: as in `wait`; waking touches no memory.
    let woken = keeping_errno(|| unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            1,
        )
    });
    woken > 0
}

/// Nanoseconds of a clock that only goes forward.
#[cold]
#[cfg(all(feature = "std", any(target_os = "linux", target_os = "android")))]
pub(crate) fn clock() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writes. If it fails, which only a filter makes it do, the clock stands still.
    keeping_errno(|| unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) });
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Elsewhere it stands still: [`wake`] does not say whether it has woken a thread, so no lock may be reserved for one.
#[cfg(not(all(feature = "std", any(target_os = "linux", target_os = "android"))))]
pub(crate) fn clock() -> u64 {
    0
}

/// Whether a thread that has waited since then is to wait no longer.
pub(crate) fn is_long_since(begin: u64) -> bool {
    clock().wrapping_sub(begin) >= PATIENCE
}

/// Without a futex, waiting is spinning with back-off.
#[cfg(not(all(feature = "std", any(windows, target_os = "linux", target_os = "android"))))]
pub(crate) fn wait(word: &AtomicU32, expected: u32, round: u32) {
    // Relaxed: the caller looks again.
    if word.load(Ordering::Relaxed) == expected {
        relax(round);
    }
}

// Not in the libc crate for these systems.
#[cfg(all(unix, feature = "std", not(any(target_os = "linux", target_os = "android"))))]
unsafe extern "C" {
    fn pthread_setcancelstate(state: core::ffi::c_int, before: *mut core::ffi::c_int) -> core::ffi::c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
#[cfg(all(unix, feature = "std", not(any(target_os = "linux", target_os = "android"))))]
const CANCEL_DISABLE: core::ffi::c_int = if cfg!(target_vendor = "apple") { 0 } else { 1 };

/// Without a futex, sleeps for the whole time. Not a point of cancellation, as no other call here is one: a thread that
/// is being cancelled would end here, with whatever it holds.
#[cfg(all(unix, feature = "std", not(any(target_os = "linux", target_os = "android"))))]
pub(crate) fn wait_for(_word: &AtomicU32, _expected: u32, time: Option<core::time::Duration>) {
    let time = time.unwrap_or(core::time::Duration::from_secs(1));
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: time.subsec_nanos() as _,
    };
    let mut state = 0;
    // SAFETY: `time` is valid for reads, `state` for writes. The thread's state is restored. An early wake is harmless.
    keeping_errno(|| unsafe {
        pthread_setcancelstate(CANCEL_DISABLE, &mut state);
        libc::nanosleep(&time, core::ptr::null_mut());
        pthread_setcancelstate(state, &mut state);
    });
}

/// Without an operating system there is no clock either: each microsecond of the time is 64 spins, which take about
/// that.
#[cfg(not(all(any(unix, windows), feature = "std")))]
pub(crate) fn wait_for(word: &AtomicU32, expected: u32, time: Option<core::time::Duration>) {
    let pauses = time.map_or(1, |time| time.as_micros());
    // Relaxed: the caller looks again.
    (0..pauses)
        .take_while(|_| word.load(Ordering::Relaxed) == expected)
        .for_each(|_| relax(6));
}

/// Without a futex no thread sleeps.
#[cfg(not(all(feature = "std", any(windows, target_os = "linux", target_os = "android"))))]
pub(crate) fn wake(_word: &AtomicU32) -> bool {
    false
}

/// A type of which all-zero bytes are a valid value, [`zeroed`](Self::zeroed): the initial value in tables in fresh
/// memory.
///
/// # Safety
///
/// The all-zero bit pattern is a valid value of the type, the same as `zeroed()` returns, and the type needs no drop.
pub unsafe trait Zeroed {
    /// The value whose bytes are all zero.
    fn zeroed() -> Self;
}

// SAFETY: an atomic integer has the layout of the integer, of which zero is a value.
unsafe impl Zeroed for AtomicU64 {
    fn zeroed() -> Self {
        Self::new(0)
    }
}

// SAFETY: as for `AtomicU64`.
unsafe impl Zeroed for AtomicU32 {
    fn zeroed() -> Self {
        Self::new(0)
    }
}

/// A row of shared values in memory that never moves: reserved once, zeroed where it has been prepared.
///
/// The table extends over its whole reservation. How far it may be *read* is up to the heap, which prepares the memory
/// under entry i before any thread can reach page i. An entry past the prepared part is inaccessible memory: touching
/// it ends the process; it never reads garbage.
pub struct Table<T> {
    base: NonNull<T>,
    len: usize,
}

// SAFETY: a table gives out shared references only, so sharing or sending it is sharing its values.
unsafe impl<T: Sync> Send for Table<T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Sync> Sync for Table<T> {}

impl<T: Zeroed> Table<T> {
    /// A table without entries.
    #[must_use]
    pub const fn empty() -> Self {
        Self {
            base: NonNull::dangling(),
            len: 0,
        }
    }

    /// The table of `len` entries at `base`.
    ///
    /// # Safety
    ///
    /// `base` is aligned for `T`; `len` entries from it lie in one reservation for metadata that outlives the table and
    /// is used for nothing else; entries are zero bytes until first written through the table; no entry is reached
    /// before the memory under it is prepared.
    #[must_use]
    pub const unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self { base: base.cast(), len }
    }

    /// Entry `index`.
    ///
    /// # Panics
    /// Past the end of the reservation: a broken invariant of the heap.
    #[inline(always)]
    #[must_use]
    pub fn get(&self, index: usize) -> &T {
        if index >= self.len {
            out_of_table(index, self.len);
        }
        // SAFETY: in the reservation (checked); prepared and zeroed or written since (`new`'s contract), and all-zero
        // bytes are a `T` (`Zeroed`). Only shared references are ever made.
        unsafe { self.base.add(index).as_ref() }
    }

    /// Entry `index`, unchecked.
    ///
    /// # Safety
    ///
    /// It lies in the reservation, and is prepared.
    #[inline(always)]
    #[must_use]
    pub unsafe fn at(&self, index: usize) -> &T {
        // SAFETY: as in `get`.
        unsafe { self.base.add(index).as_ref() }
    }

    /// The `count` entries from `first` on, with one check for all.
    ///
    /// # Panics
    /// As [`get`](Self::get).
    #[inline(always)]
    #[must_use]
    pub fn row(&self, first: usize, count: usize) -> &[T] {
        if first > self.len || count > self.len - first {
            out_of_table(first, self.len);
        }
        // SAFETY: as in `get`, for each of them; the caller goes on to read them all, so all are prepared.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr().add(first), count) }
    }

    /// The number of entries up to the end of the reservation.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the table has no entry.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cold]
#[inline(never)]
fn out_of_table(index: usize, len: usize) -> ! {
    fatal::abort(
        "a table's entry past its end was asked for",
        Number::Count(index),
        Number::Count(len),
    )
}

impl<T> fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Table({:p}, {} entries)", self.base, self.len)
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    extern crate std;

    use core::time::Duration;
    use std::time::Instant;

    use super::*;

    /// The kernel must get the time in its own word size: in another it may read no time at all, and a waiter spins
    /// instead.
    #[test]
    fn a_wait_with_a_time_takes_as_long() {
        let time = Duration::from_millis(50);
        // It may return early and spuriously, but not each time.
        let waits = || {
            let begin = Instant::now();
            wait_for(&AtomicU32::new(0), 0, Some(time));
            begin.elapsed() >= time / 2
        };
        assert!((0..10).any(|_| waits()));
    }
}
