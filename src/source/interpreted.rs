//! The system as a source for a program that Miri interprets: memory of the C library's, all of it at once.
//!
//! Miri knows none of the calls by which addresses are reserved and memory is given back. Here a reservation is a block
//! of `posix_memalign`, and so has memory from the beginning; what is released is overwritten with zeros. A heap's
//! budget is therefore small, and heaps that stay for ever, as those of a `static`, are leaks to Miri
//! (`-Zmiri-ignore-leaks`).
//!
//! Worked: a heap that would reserve 4 TiB asks for its budget, [`BUDGET`], and has 32 MiB.
//!
//! Cost: reserving, releasing and preparing are linear in the length.

use core::ptr::{self, NonNull};

use super::{Contents, Memory, Purpose, Refused, Reservation, Source};

/// As most systems have it.
const PAGE_SIZE: usize = 4096;

/// The most that a heap may reserve.
const BUDGET: usize = 32 << 20;

/// The operating system, or what Miri has of it. See the source for Unix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct System;

// SAFETY: a reservation is a block of the C library's, aligned as requested, and all of it is memory that may be read
// and written until it is freed. `Contents::Zero` comes from functions that have just written zeros.
unsafe impl Source for System {
    const COMMITS: bool = false;

    fn granule(&self) -> usize {
        PAGE_SIZE
    }

    fn budget(&self) -> usize {
        BUDGET
    }

    fn reserve(&self, _purpose: Purpose, bytes: usize, align: usize) -> Option<Reservation> {
        if bytes == 0 || bytes > BUDGET || !bytes.is_multiple_of(PAGE_SIZE) || !align.is_power_of_two() {
            return None;
        }
        let mut base = ptr::null_mut();
        // SAFETY: a valid place for the answer; the alignment is a power of two, and not less than a pointer's.
        let answer = unsafe { libc::posix_memalign(&mut base, align.max(PAGE_SIZE), bytes) };
        let base = NonNull::new(base.cast()).filter(|_| answer == 0)?;
        Some(Reservation { base, bytes })
    }

    unsafe fn prepare(&self, _purpose: Purpose, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller promises a range of ours that nobody uses yet.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Contents::Zero)
    }

    unsafe fn commit(&self, _start: NonNull<u8>, _bytes: usize) -> Result<(), Refused> {
        Ok(())
    }

    unsafe fn release(&self, start: NonNull<u8>, bytes: usize) -> Result<Contents, Refused> {
        // SAFETY: the caller promises a range of ours that nobody else uses and whose contents may be lost.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Contents::Zero)
    }

    unsafe fn unreserve(&self, _purpose: Purpose, reservation: Reservation) {
        // SAFETY: what `reserve` returned, given up once.
        unsafe { libc::free(reservation.base.as_ptr().cast()) };
    }
}

// SAFETY: blocks of the C library's are memory.
unsafe impl Memory for System {}

/// None of these calls changes `errno`, and nothing here is to be found out by it.
pub(crate) struct KeepErrno;

impl KeepErrno {
    pub(crate) fn new() -> KeepErrno {
        KeepErrno
    }

    /// No error that anybody looks for.
    pub(crate) fn now(&self) -> libc::c_int {
        0
    }
}
