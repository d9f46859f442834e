//! The operating system as a source: anonymous private memory on Linux, macOS and the BSDs.
//!
//! | verb | system call | afterwards |
//! |---|---|---|
//! | `reserve` | `mmap(PROT_NONE)`, `munmap` of what alignment leaves over | addresses, no memory, no charge |
//! | `prepare` | `mprotect(READ \| WRITE)` | reads as zero, faults in on first touch |
//! | `commit` | none | - |
//! | `release`, `discard` | `madvise` | the memory is the kernel's again, the addresses are still ours |
//! | `release_lazily` | `madvise(MADV_FREE)` | the kernel takes the memory when it wants it; resident until then |
//! | `clear` | `openat`, `ioctl`, `close` | zero, if little memory was behind the range; Linux only (`pagemap.rs`) |
//! | `advise` | `madvise((NO)HUGEPAGE)` | the kernel has been told; Linux only |
//! | `unreserve` | `munmap` | nothing |
//! | `worked` | `clock_gettime` | - |
//!
//! Together with `getrlimit` (`prlimit64` on Linux) for [`budget`](Source::budget), that is the whole list. For a heap
//! to work, a seccomp filter must allow **mmap, munmap, mprotect, madvise, prlimit64**. If the clock of `worked` is
//! refused, the cost of giving memory back is not counted; if one of `clear`'s calls is refused, large blocks are
//! overwritten with zeros. The page size comes from `sysconf`, which reads the auxiliary vector and makes no system
//! call. A filter that refuses a call (`EPERM`, `ENOSYS`) is handled like any other error: not done, state as before.
//! `errno` is restored after every verb.
//!
//! **A reservation costs no memory.** It is private, `PROT_NONE` and `MAP_NORESERVE`, so it counts against neither the
//! overcommit limit nor the resident set, only against `RLIMIT_AS`: terabytes are as cheap as pages. Under
//! `vm.overcommit_memory=2`, `prepare` is charged, and may then be refused.
//!
//! **Aligned reservations** first map exactly the bytes requested. Only if the kernel's place is not aligned, they map
//! `align` more:
//!
//! ```text
//!        wide          base = next multiple of align
//!   ┄┄┄┄┄┼─── head ─────┼────────── bytes ───────────┼── tail ──┼┄┄┄┄┄
//!          unmapped                kept                unmapped
//! ```
//!
//! `munmap` itself can fail, if splitting a mapping would exceed the process's map count. If the head cannot be
//! unmapped, the whole attempt is given up. If the tail cannot, it becomes part of the reservation, which may be longer
//! than requested.
//!
//! **Zero, and the proof of it.** Reserved memory was never writable, so it was never written, and anonymous memory
//! that was never written reads as zero. Hence `prepare` returns [`Contents::Zero`]. After `release`, Linux promises
//! zero if `madvise(MADV_DONTNEED)` returned 0, and only then. User-mode emulators that ignore the advice (qemu-user
//! before 8.0) return 0 without keeping that promise. So the first `release` of a process writes to what it releases,
//! and believes what it reads there afterwards. macOS and the BSDs do not promise zero: their `MADV_FREE` lets the
//! kernel take the pages at any time, and until then the old bytes are still there, so the result is
//! [`Contents::Unknown`].
//!
//! **Only on request**: `MADV_FREE` on Linux, because the resident set does not fall, and whatever watches it kills the
//! process. The old bytes stay for an unknown time, so this too is [`Contents::Unknown`]. Also huge-page advice of
//! either kind, since the kernel's own setting is better in general.
//!
//! Not here: `mremap`, `MAP_FIXED`.

use core::mem::MaybeUninit;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use core::time::Duration;

use libc::{MAP_ANON, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, c_int, c_void};

use super::{Contents, HugePages, Memory, Purpose, Refused, Reservation, Source};

/// The granule if the system does not report its page size: 64 KiB, a multiple of every page size in use.
const COARSEST_PAGE: usize = 64 << 10;

/// The size of a huge page on most systems.
const HUGE_PAGE: usize = 2 << 20;

/// From this many huge pages on, 1 GiB, one more is negligible.
const NEGLIGIBLE: usize = 512;

/// The operating system: reserves address space, lets pages fault in, gives them back with `madvise`.
///
/// A `System` has no fields; all its values are the same source. Its verbs make the system calls mmap, munmap, mprotect
/// and madvise; `budget` calls getrlimit (prlimit64 on Linux), `worked` clock_gettime (for the thread's processor
/// time), `clear` on Linux openat, ioctl and close. There are no others. Any of them may be refused, by a seccomp
/// filter for instance, and then the verb is refused. A filter that kills the process instead must allow them, or
/// `clear` must not be called ([`Config::sparse_zeroing`](crate::Config::sparse_zeroing)). Reservations count against
/// `RLIMIT_AS`, after `mlockall` against `RLIMIT_MEMLOCK`, and nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct System;

// SAFETY:
// * `reserve` returns a part of a mapping that the kernel has just placed where nothing else was, and the part starts
//   at an aligned address of that mapping;
// * `prepare` makes that mapping readable and writable; it is zero by the argument at the top of the file;
// * `Contents::Zero` comes only from `prepare`, and from an advice that is known to discard and returned 0;
// * the kernel changes nothing outside the range it is given, which starts and ends on page borders. A call that fails
//   half way leaves protections that the next attempt sets again, and memory that is still unwritten.
unsafe impl Source for System {
    const COMMITS: bool = false;

    fn granule(&self) -> usize {
        page_size()
    }

    /// Three quarters of what `RLIMIT_AS` (`RLIMIT_DATA` on OpenBSD) leaves besides all reservations that this crate
    /// has made: the rest is for code, stacks and libraries.
    fn budget(&self) -> usize {
        let _errno = KeepErrno::new();
        let mut limit = libc::rlimit {
            rlim_cur: libc::RLIM_INFINITY,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: `limit` is a valid place to write an rlimit to.
        let answer = unsafe { libc::getrlimit(os::ADDRESS_SPACE, &mut limit) };
        if answer != 0 || limit.rlim_cur == libc::RLIM_INFINITY {
            return usize::MAX;
        }
        // Relaxed: a number by itself.
        let reserved = RESERVED.load(Ordering::Relaxed);
        let left = |bytes: usize| bytes.saturating_sub(reserved) / 4 * 3;
        usize::try_from(limit.rlim_cur).map_or(usize::MAX, left)
    }

    /// If 2 MiB more are negligible, pages begin on a huge-page border where possible: then what the scavenger takes
    /// for a huge page is one to the system.
    fn reserve(&self, purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        let _errno = KeepErrno::new();
        let page = page_size();
        if bytes == 0 || bytes & (page - 1) != 0 || !align.is_power_of_two() {
            return None;
        }
        let huge = purpose == Purpose::Pages && bytes >= NEGLIGIBLE * HUGE_PAGE && align < HUGE_PAGE;
        let found = if huge { find(bytes, HUGE_PAGE, page) } else { None };
        let found = found.or_else(|| find(bytes, align, page))?;
        // Relaxed: a number by itself.
        RESERVED.fetch_add(found.bytes, Ordering::Relaxed);
        Some(found)
    }

    unsafe fn prepare(&self, _purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let _errno = KeepErrno::new();
        // SAFETY: the caller promises a Reserved range of ours. Nobody may touch it yet, so making it accessible
        // invalidates nothing.
        match unsafe { libc::mprotect(start.as_ptr().cast(), bytes, PROT_READ | PROT_WRITE) } {
            // Never writable before, so never written (see the top of the file).
            0 => Ok(Contents::Zero),
            _ => Err(Refused),
        }
    }

    /// Does nothing: Prepared memory faults in on first touch.
    unsafe fn commit(&self, _start: NonNull<u8>, _bytes: usize) -> Result<(), Refused> {
        Ok(())
    }

    /// Refused for locked memory (`mlock`, `mlockall`), by filters, and if the advice is known to be ignored.
    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let _errno = KeepErrno::new();
        // Relaxed: see there.
        match EFFECT.load(Ordering::Relaxed) {
            NOTHING => return Err(Refused),
            // SAFETY: the caller's promise.
            UNTRIED if os::PROMISES_ZERO => return unsafe { release_and_look(start, bytes) },
            _ => {}
        }
        // SAFETY: the caller promises a range of ours that nobody else uses and whose contents may be lost.
        if !unsafe { advise(start, bytes) } {
            return Err(Refused);
        }
        Ok(if os::PROMISES_ZERO {
            Contents::Zero
        } else {
            Contents::Unknown
        })
    }

    /// With `MADV_FREE`. Falls back to [`release`](Source::release) if the system has no such advice, or refuses it
    /// (for locked memory, say).
    unsafe fn release_lazily(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let errno = KeepErrno::new();
        if let Some(advice) = os::LAZY_ADVICE {
            // SAFETY: the caller promises a range of ours that nobody else uses and whose contents may be lost.
            if unsafe { libc::madvise(start.as_ptr().cast(), bytes, advice) } == 0 {
                return Ok(Contents::Unknown);
            }
        }
        drop(errno);
        // SAFETY: the caller's promise.
        unsafe { self.release(start, bytes) }
    }

    /// Uses what the kernel knows about each page (`pagemap.rs`); Linux from 6.7 on.
    unsafe fn clear(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        // SAFETY: the caller promises a range of ours that nobody else uses and whose contents may be lost.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if unsafe { super::pagemap::clear(start, bytes, page_size()) } {
            return Ok(());
        }
        let _ = (start, bytes);
        Err(Refused)
    }

    /// `madvise`; only on Linux with transparent huge pages.
    unsafe fn advise(&self, start: NonNull<u8>, bytes: usize, huge: HugePages) -> Result<(), Refused> {
        let _errno = KeepErrno::new();
        let advice = match huge {
            HugePages::System => return Ok(()),
            HugePages::Advise => os::HUGE_ADVICE.map(|[advise, _]| advise),
            HugePages::Avoid => os::HUGE_ADVICE.map(|[_, avoid]| avoid),
        };
        let advice = advice.ok_or(Refused)?;
        // SAFETY: the caller promises a range of ours; the advice changes no contents.
        match unsafe { libc::madvise(start.as_ptr().cast(), bytes, advice) } {
            0 => Ok(()),
            _ => Err(Refused),
        }
    }

    unsafe fn discard(&self, start: NonNull<u8>, bytes: usize) {
        let _errno = KeepErrno::new();
        // SAFETY: the caller promises a range of ours whose contents may be lost; if the advice is refused, nothing
        // changes.
        unsafe { advise(start, bytes) };
    }

    /// If the kernel refuses (map count), the addresses stay taken until the process ends, without notice.
    unsafe fn unreserve(&self, _purpose: Purpose, reservation: Reservation) {
        let _errno = KeepErrno::new();
        // Relaxed: a number by itself.
        RESERVED.fetch_sub(reservation.bytes, Ordering::Relaxed);
        // SAFETY: the caller gives up a whole reservation, which is a part of a mapping of ours.
        unsafe { unmap(reservation.base, reservation.bytes) };
    }

    unsafe fn trim(&self, _purpose: Purpose, start: NonNull<u8>, bytes: usize) {
        let _errno = KeepErrno::new();
        // Relaxed: a number by itself.
        RESERVED.fetch_sub(bytes, Ordering::Relaxed);
        // SAFETY: the caller gives up a part of a mapping of ours.
        unsafe { unmap(start, bytes) };
    }

    fn worked(&self) -> Option<Duration> {
        let _errno = KeepErrno::new();
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a valid place to write to.
        let read = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
        let (seconds, rest) = (u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?);
        (read == 0).then(|| Duration::new(seconds, rest))
    }
}

// SAFETY: anonymous mappings are memory.
unsafe impl Memory for System {}

/// Bytes of all reservations: what counts against the limit of the address space already.
static RESERVED: AtomicUsize = AtomicUsize::new(0);

/// Maps addresses, aligned.
fn find(bytes: usize, align: usize, page: usize) -> Option<Reservation> {
    let exact = map(bytes)?;
    if exact.addr().get() & (align - 1) == 0 {
        return Some(Reservation { base: exact, bytes });
    }
    // The kernel aligns to pages, so `align` is more than a page here. If unmapping fails, only addresses are lost.
    // SAFETY: mapped just above, and nobody else knows of it.
    unsafe { unmap(exact, bytes) };
    reserve_with_surplus(bytes, align, align.checked_sub(page)?)
}

/// Reserves `surplus` bytes more than requested and cuts out an aligned part.
fn reserve_with_surplus(bytes: usize, align: usize, surplus: usize) -> Option<Reservation> {
    let whole = bytes.checked_add(surplus)?;
    let wide = map(whole)?;
    // `wide` lies on a page border, so the next multiple of `align` is at most `align` less one page away, which is
    // `surplus`.
    let head = wide.addr().get().wrapping_neg() & (align - 1);
    let tail = surplus - head;
    // SAFETY: head, bytes and tail are disjoint parts of the mapping just made, which nobody else knows of; their
    // lengths sum to `whole`, which `map` bounds by isize::MAX.
    unsafe {
        if head != 0 && !unmap(wide, head) {
            unmap(wide, whole);
            return None;
        }
        let base = wide.add(head);
        let kept = if tail != 0 && !unmap(base.add(bytes), tail) {
            bytes + tail
        } else {
            bytes
        };
        Some(Reservation { base, bytes: kept })
    }
}

/// Maps `bytes` anywhere, inaccessible. `None` also beyond isize::MAX, the limit of pointer arithmetic.
fn map(bytes: usize) -> Option<NonNull<u8>> {
    isize::try_from(bytes).ok()?;
    let flags = MAP_PRIVATE | MAP_ANON | os::NO_RESERVE;
    // SAFETY: a new anonymous mapping at a place of the kernel's choice replaces nothing.
    let base = unsafe { libc::mmap(ptr::null_mut(), bytes, os::INACCESSIBLE, flags, -1, 0) };
    if base == MAP_FAILED {
        None
    } else {
        NonNull::new(base.cast())
    }
}

/// Unmaps the range. Returns whether that succeeded.
///
/// # Safety
/// The range is page-aligned, ours, and never used again if this succeeds.
unsafe fn unmap(start: NonNull<u8>, bytes: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { libc::munmap(start.as_ptr().cast(), bytes) == 0 }
}

/// Tries the system's advices for memory that is not needed, best first. Returns whether one was accepted.
///
/// # Safety
/// The range is page-aligned, ours, used by nobody else, and its contents may be lost.
unsafe fn advise(start: NonNull<u8>, bytes: usize) -> bool {
    let place: *mut c_void = start.as_ptr().cast();
    // SAFETY: the caller's promise.
    os::ADVICE
        .iter()
        .any(|&advice| unsafe { libc::madvise(place, bytes, advice) == 0 })
}

/// The page size of the system, queried once.
fn page_size() -> usize {
    /// 0 until it is known.
    static PAGE_SIZE: AtomicUsize = AtomicUsize::new(0);
    // Relaxed, here and below: the value stands alone, without a partner; a thread that finds 0 queries again and gets
    // the same.
    match PAGE_SIZE.load(Ordering::Relaxed) {
        0 => {}
        known => return known,
    }
    let _errno = KeepErrno::new();
    // SAFETY: sysconf with a constant name reads a number.
    let answer = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let size = usize::try_from(answer)
        .ok()
        .filter(|size| size.is_power_of_two())
        .unwrap_or(COARSEST_PAGE);
    PAGE_SIZE.store(size, Ordering::Relaxed);
    size
}

/// What is known of the advice's effect on this system. Relaxed, wherever it is used: no partner is needed, since every
/// thread that tries finds the same.
static EFFECT: AtomicU8 = AtomicU8::new(UNTRIED);
const UNTRIED: u8 = 0;
const DISCARDS: u8 = 1;
const NOTHING: u8 = 2;

/// Gives the advice, and finds out whether it discards.
///
/// # Safety
///
/// As for [`release`](Source::release).
unsafe fn release_and_look(start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
    let place = start.cast::<MaybeUninit<u8>>();
    // SAFETY: the caller promises a range of ours that is Ready, and so may be read and written, that nobody else uses,
    // and whose contents may be lost.
    unsafe {
        let before = place.read_volatile();
        start.write_volatile(1);
        let is_accepted = advise(start, bytes);
        let discards = start.read_volatile() == 0;
        if is_accepted {
            // Relaxed: see there. A refusal says nothing about the advice elsewhere: this range may be locked
            // (mlockall).
            EFFECT.store(if discards { DISCARDS } else { NOTHING }, Ordering::Relaxed);
            if discards {
                return Ok(Contents::Zero);
            }
        }
        place.write_volatile(before);
        Err(Refused)
    }
}

/// On drop, restores `errno` to what it was on creation: an allocator that succeeds must not change it.
pub(crate) struct KeepErrno {
    value: c_int,
}

impl KeepErrno {
    pub(crate) fn new() -> KeepErrno {
        // SAFETY: the C library keeps a valid place for every thread's errno.
        let value = unsafe { *os::errno() };
        KeepErrno { value }
    }

    /// The current `errno`.
    pub(crate) fn now(&self) -> c_int {
        // SAFETY: as in `new`.
        unsafe { *os::errno() }
    }
}

impl Drop for KeepErrno {
    fn drop(&mut self) {
        // SAFETY: as in `new`.
        unsafe { *os::errno() = self.value };
    }
}

/// What differs between the systems, under the same names:
/// * `errno`: the place of this thread's error number;
/// * `INACCESSIBLE`: the protection of a reservation that may be made accessible later;
/// * `NO_RESERVE`: the flag against a commit charge;
/// * `ADDRESS_SPACE`: the limit that counts mappings;
/// * `ADVICE`: how to say that memory is not needed, best first;
/// * `LAZY_ADVICE`: how to say that memory may go when it is needed elsewhere, if that is a different advice;
/// * `HUGE_ADVICE`: how to ask for huge pages, and for none;
/// * `PROMISES_ZERO`: whether memory reads as zero after that advice.
#[cfg(any(target_os = "linux", target_os = "android"))]
mod os {
    #[cfg(target_os = "android")]
    pub(super) use libc::__errno as errno;
    #[cfg(target_os = "linux")]
    pub(super) use libc::__errno_location as errno;
    pub(super) use libc::{MAP_NORESERVE as NO_RESERVE, PROT_NONE as INACCESSIBLE, RLIMIT_AS as ADDRESS_SPACE};

    pub(super) const ADVICE: &[libc::c_int] = &[libc::MADV_DONTNEED];
    pub(super) const LAZY_ADVICE: Option<libc::c_int> = Some(libc::MADV_FREE);
    pub(super) const HUGE_ADVICE: Option<[libc::c_int; 2]> = Some([libc::MADV_HUGEPAGE, libc::MADV_NOHUGEPAGE]);
    pub(super) const PROMISES_ZERO: bool = true;
}

/// Reusable memory leaves the process's footprint at once; plain `MADV_FREE` only under pressure.
#[cfg(target_vendor = "apple")]
mod os {
    pub(super) use libc::{
        __error as errno, MAP_NORESERVE as NO_RESERVE, PROT_NONE as INACCESSIBLE, RLIMIT_AS as ADDRESS_SPACE,
    };

    pub(super) const ADVICE: &[libc::c_int] = &[libc::MADV_FREE_REUSABLE, libc::MADV_FREE];
    pub(super) const LAZY_ADVICE: Option<libc::c_int> = None;
    pub(super) const HUGE_ADVICE: Option<[libc::c_int; 2]> = None;
    pub(super) const PROMISES_ZERO: bool = false;
}

/// Untouched anonymous memory carries no charge that a flag could waive.
#[cfg(any(target_os = "freebsd", target_os = "dragonfly"))]
mod os {
    #[cfg(target_os = "dragonfly")]
    pub(super) use libc::__errno_location as errno;
    #[cfg(target_os = "freebsd")]
    pub(super) use libc::__error as errno;
    pub(super) use libc::{PROT_NONE as INACCESSIBLE, RLIMIT_AS as ADDRESS_SPACE};

    pub(super) const NO_RESERVE: libc::c_int = 0;
    pub(super) const ADVICE: &[libc::c_int] = &[libc::MADV_FREE];
    pub(super) const LAZY_ADVICE: Option<libc::c_int> = None;
    pub(super) const HUGE_ADVICE: Option<[libc::c_int; 2]> = None;
    pub(super) const PROMISES_ZERO: bool = false;
}

/// Under PaX a mapping gets no rights later that it does not name when it is created: `PROT_MPROTECT(x)`, `x << 3`.
#[cfg(target_os = "netbsd")]
mod os {
    pub(super) use libc::{__errno as errno, MAP_NORESERVE as NO_RESERVE, RLIMIT_AS as ADDRESS_SPACE};

    pub(super) const INACCESSIBLE: libc::c_int = libc::PROT_NONE | (libc::PROT_READ | libc::PROT_WRITE) << 3;
    pub(super) const ADVICE: &[libc::c_int] = &[libc::MADV_FREE];
    pub(super) const LAZY_ADVICE: Option<libc::c_int> = None;
    pub(super) const HUGE_ADVICE: Option<[libc::c_int; 2]> = None;
    pub(super) const PROMISES_ZERO: bool = false;
}

/// There is no limit on addresses; anonymous memory counts as data.
#[cfg(target_os = "openbsd")]
mod os {
    pub(super) use libc::{
        __errno as errno, MAP_NORESERVE as NO_RESERVE, PROT_NONE as INACCESSIBLE, RLIMIT_DATA as ADDRESS_SPACE,
    };

    pub(super) const ADVICE: &[libc::c_int] = &[libc::MADV_FREE];
    pub(super) const LAZY_ADVICE: Option<libc::c_int> = None;
    pub(super) const HUGE_ADVICE: Option<[libc::c_int; 2]> = None;
    pub(super) const PROMISES_ZERO: bool = false;
}

#[cfg(not(any(
    target_os = "linux",
    target_os = "android",
    target_vendor = "apple",
    target_os = "freebsd",
    target_os = "dragonfly",
    target_os = "netbsd",
    target_os = "openbsd",
)))]
compile_error!("no System for this operating system: build without the feature `std` and bring a Source of your own");
