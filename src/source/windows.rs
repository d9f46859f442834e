//! The operating system as a source: private memory on Windows.
//!
//! | verb | call | afterwards |
//! |---|---|---|
//! | `reserve` | `VirtualAlloc(MEM_RESERVE)` | addresses, no memory, no charge |
//! | `prepare` | none for pages; `MEM_COMMIT` for tables | - ; reads as zero |
//! | `commit` | `VirtualAlloc(MEM_COMMIT)` | charged; reads as zero, faults in on first touch |
//! | `release` | `VirtualFree(MEM_DECOMMIT)` | neither memory nor charge; the addresses are still ours |
//! | `unreserve` | `VirtualFree(MEM_RELEASE)` | nothing |
//! | `trim` | `VirtualFree(MEM_DECOMMIT)` | no memory; the addresses stay taken |
//!
//! `granule` and `budget` ask for the page size and for the physical memory (`GetSystemInfo`, `GlobalMemoryStatusEx`).
//! The error code of the thread (`GetLastError`) is restored after every verb.
//!
//! **The charge.** Windows does not overcommit: committed memory counts against RAM and page file together, touched or
//! not. So pages are committed when they are handed out, not when the heap grows, and a run whose memory has gone back
//! is committed again: [`Source::COMMITS`]. The Go runtime does the same (`mem_windows.go`). One call commits a whole
//! run or span.
//!
//! **Aligned reservations.** Windows places reservations on 64 KiB. If that is not enough, more is reserved, given
//! back, and the aligned part reserved where it was, since a part of a reservation cannot be given up:
//!
//! ```text
//!        wide          base = next multiple of align
//!   ┄┄┄┄┄┼─────────────┼────────── bytes ───────────┼──────────┼┄┄┄┄┄
//!                       reserved once more, if no other thread was faster: then all over again
//! ```
//!
//! Worked: a heap of 96 GiB of addresses that has handed out one page is charged for that page, 8 KiB, and for the part
//! of its tables that it has prepared.
//!
//! Cost: one call for each verb, and what the system takes to zero a page at its first touch. Not measured on Windows.

use core::mem::MaybeUninit;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicUsize, Ordering};

use windows_sys::Win32::Foundation::{GetLastError, SetLastError};
use windows_sys::Win32::System::Memory::{
    MEM_COMMIT, MEM_DECOMMIT, MEM_RELEASE, MEM_RESERVE, PAGE_NOACCESS, PAGE_READWRITE, VirtualAlloc, VirtualFree,
};
use windows_sys::Win32::System::SystemInformation::{GetSystemInfo, GlobalMemoryStatusEx, MEMORYSTATUSEX};

use super::{Contents, HugePages, Memory, Purpose, Refused, Reservation, Source};

/// How often an aligned reservation is attempted: each time another thread may take the place.
const ATTEMPTS: usize = 16;

/// A page file that the system manages grows to three times the RAM: so all that can be committed is four times as
/// much.
const MOST_COMMITTED: usize = 4;

/// The budget at least: RAM may be added to a virtual machine.
const LEAST_BUDGET: usize = match 1_usize.checked_shl(36) {
    Some(bytes) => bytes,
    None => 1 << 30,
};

/// The operating system: reserves address space, commits pages when they are used, decommits them to give them back.
///
/// A `System` has no fields; all its values are the same source. Reservations count against nothing; committed pages
/// count against the system's commit limit, and against that of the process's job, if it has one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct System;

// SAFETY:
// * `reserve` returns a reservation that the system has just placed where nothing else was, from its beginning;
// * `prepare` of tables, and `commit`, make pages readable and writable. Fresh ones are zero, by the system's promise;
//   committed ones stay as they are;
// * `Contents::Zero` comes from `prepare`, before which nothing was committed, and from a decommitment that succeeded,
//   after which only `commit` makes the pages accessible again, with fresh ones;
// * the system changes nothing outside the range it is given, which starts and ends on page borders.
unsafe impl Source for System {
    const COMMITS: bool = true;

    fn granule(&self) -> usize {
        page_size()
    }

    /// As much as can ever be committed, presumably: the largest of four times the RAM, what can be committed now, and
    /// 64 GiB.
    fn budget(&self) -> usize {
        let _error = KeepErrno::new();
        let mut status = MEMORYSTATUSEX {
            dwLength: size_of::<MEMORYSTATUSEX>() as u32,
            ..Default::default()
        };
        // SAFETY: a place to write to, which says how long it is. If the call fails, it stays zero.
        unsafe { GlobalMemoryStatusEx(&mut status) };
        let [memory, committed] =
            [status.ullTotalPhys, status.ullTotalPageFile].map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        memory.saturating_mul(MOST_COMMITTED).max(committed).max(LEAST_BUDGET)
    }

    fn reserve(&self, _purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        let _error = KeepErrno::new();
        if bytes == 0 || !bytes.is_multiple_of(page_size()) || !align.is_power_of_two() {
            return None;
        }
        // The limit of pointer arithmetic.
        isize::try_from(bytes).ok()?;
        let exact = reserve_at(ptr::null(), bytes)?;
        if exact.addr().get() & (align - 1) == 0 {
            return Some(Reservation { base: exact, bytes });
        }
        // SAFETY: reserved just above, and nobody else knows of it.
        unsafe { free(exact) };
        let base = (0..ATTEMPTS).find_map(|_| reserve_aligned(bytes, align))?;
        Some(Reservation { base, bytes })
    }

    /// For pages it does nothing: they are committed when they are handed out.
    unsafe fn prepare(&self, purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        if purpose == Purpose::Metadata {
            // SAFETY: the caller promises a Reserved range of ours. It is not used yet.
            unsafe { self.commit(start, bytes) }?;
        }
        Ok(Contents::Zero)
    }

    unsafe fn commit(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Refused> {
        let _error = KeepErrno::new();
        // SAFETY: the caller promises a range of ours. Pages that were committed keep their contents.
        let committed = unsafe { VirtualAlloc(start.as_ptr().cast(), bytes, MEM_COMMIT, PAGE_READWRITE) };
        if committed.is_null() { Err(Refused) } else { Ok(()) }
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        let _error = KeepErrno::new();
        // SAFETY: the caller promises a range of ours that nobody else uses and whose contents may be lost.
        match unsafe { VirtualFree(start.as_ptr().cast(), bytes, MEM_DECOMMIT) } {
            0 => Err(Refused),
            _ => Ok(Contents::Zero),
        }
    }

    /// Large pages need a right that programs seldom have, and cannot be given back.
    unsafe fn advise(&self, _start: NonNull<u8>, _bytes: usize, huge: HugePages) -> Result<(), Refused> {
        match huge {
            HugePages::Advise => Err(Refused),
            HugePages::System | HugePages::Avoid => Ok(()),
        }
    }

    unsafe fn unreserve(&self, _purpose: Purpose, reservation: Reservation) {
        let _error = KeepErrno::new();
        // SAFETY: the caller gives up a whole reservation.
        unsafe { free(reservation.base) };
    }

    unsafe fn trim(&self, _purpose: Purpose, start: NonNull<u8>, bytes: usize) {
        let _error = KeepErrno::new();
        // None at all would mean the whole reservation.
        if bytes > 0 {
            // SAFETY: the caller gives up a part of a reservation of ours.
            unsafe { VirtualFree(start.as_ptr().cast(), bytes, MEM_DECOMMIT) };
        }
    }
}

// SAFETY: committed private pages are memory.
unsafe impl Memory for System {}

/// Reserves `bytes` bytes at `place`, or anywhere if that is null.
fn reserve_at(place: *const u8, bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: a new reservation replaces nothing: the call fails if any part of the place is taken.
    NonNull::new(unsafe { VirtualAlloc(place.cast(), bytes, MEM_RESERVE, PAGE_NOACCESS) }.cast())
}

/// Reserves `bytes` bytes at a multiple of `align`. Another thread may prevent that.
fn reserve_aligned(bytes: usize, align: usize) -> Option<NonNull<u8>> {
    let wide = reserve_at(ptr::null(), bytes.checked_add(align)?)?;
    let base = wide.as_ptr().map_addr(|address| address.next_multiple_of(align));
    // SAFETY: reserved just above, and nobody else knows of it.
    unsafe { free(wide) };
    reserve_at(base, bytes)
}

/// Gives up the reservation that begins at `base`.
///
/// # Safety
/// It is ours, and never used again.
unsafe fn free(base: NonNull<u8>) {
    // SAFETY: the caller's promise.
    unsafe { VirtualFree(base.as_ptr().cast(), 0, MEM_RELEASE) };
}

/// The page size of the system, queried once.
fn page_size() -> usize {
    /// 0 until it is known.
    static PAGE_SIZE: AtomicUsize = AtomicUsize::new(0);
    // Relaxed, here and below: the value stands alone, without a partner; a thread that finds 0 queries again and gets
    // the same.
    let known = PAGE_SIZE.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let mut info = MaybeUninit::uninit();
    // SAFETY: the call has no preconditions and fills in everything.
    let size = unsafe {
        GetSystemInfo(info.as_mut_ptr());
        info.assume_init().dwPageSize as usize
    };
    PAGE_SIZE.store(size, Ordering::Relaxed);
    size
}

/// On drop, restores the thread's error code to what it was on creation: an allocator that succeeds must not change it.
pub(crate) struct KeepErrno {
    code: u32,
}

impl KeepErrno {
    pub(crate) fn new() -> KeepErrno {
        // SAFETY: reads a number of the calling thread.
        let code = unsafe { GetLastError() };
        KeepErrno { code }
    }
}

impl Drop for KeepErrno {
    fn drop(&mut self) {
        // SAFETY: writes a number of the calling thread.
        unsafe { SetLastError(self.code) };
    }
}
