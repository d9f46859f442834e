//! The thread's pointer to its structure, or to a placeholder for none, on Windows.
//!
//! ```text
//!   gs:[0x1480 + 8 n]    slot n of the 64 in the thread's own block    mov slot, [rip + …]; mov thread, gs:[slot]
//! ```
//!
//! Not `thread_local!`: with the GNU tools it is a call of `TlsGetValue`, which changes the thread's error code; the
//! memory behind it comes from the process heap; and when the thread ends it is destroyed and, if used once more, made
//! anew. So the heap takes a slot of its own, when the first thread gets a structure. An empty slot is null, which
//! stands for FRESH.
//!
//! The slots have been at this place in the thread's block in every 64-bit Windows; mimalloc relies on it too. Slots
//! from the 64th on are elsewhere, and so are all of them on other processors: there `TlsGetValue` is called, and the
//! error code restored. Cost: two loads, a test for null and one for a slot; elsewhere three calls.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use windows_sys::Win32::System::Threading::{TLS_OUT_OF_INDEXES, TlsAlloc, TlsFree, TlsGetValue, TlsSetValue};

use crate::object::Thread;
use crate::source::KeepErrno;

use super::FRESH;

/// The slot plus one. 0: none yet.
static SLOT: AtomicU32 = AtomicU32::new(0);

/// The pointer.
#[inline(always)]
pub fn get() -> NonNull<Thread> {
    NonNull::new(imp::get()).unwrap_or(FRESH.as_thread())
}

/// Changes it. Returns whether it did: always, once there is a slot.
pub fn set(thread: NonNull<Thread>) -> bool {
    // Relaxed: a number that stands for itself.
    let slot = SLOT.load(Ordering::Relaxed);
    // SAFETY: a slot of ours. The value is not followed by anybody else.
    slot != 0 && unsafe { TlsSetValue(slot - 1, thread.as_ptr().cast_const().cast()) != 0 }
}

/// Takes a slot, unless there is one already. No lock: of two taken concurrently, one is given back.
pub fn is_there() -> bool {
    // Relaxed, here and below: as in `set`.
    if SLOT.load(Ordering::Relaxed) != 0 {
        return true;
    }
    // SAFETY: no preconditions.
    let slot = unsafe { TlsAlloc() };
    if slot == TLS_OUT_OF_INDEXES {
        return false;
    }
    match SLOT.compare_exchange(0, slot + 1, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => imp::taken(slot),
        // SAFETY: taken above, and no thread has set it.
        Err(_) => unsafe {
            TlsFree(slot);
        },
    }
    true
}

/// The pointer, or null, by a call.
#[cfg_attr(target_arch = "x86_64", cold)]
fn call() -> *mut Thread {
    // Relaxed: as in `set`.
    let Some(slot) = SLOT.load(Ordering::Relaxed).checked_sub(1) else {
        return core::ptr::null_mut();
    };
    let _error = KeepErrno::new();
    // SAFETY: a slot of ours.
    unsafe { TlsGetValue(slot).cast() }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod imp {
    use core::arch::asm;
    use core::sync::atomic::{AtomicUsize, Ordering};

    use crate::object::Thread;

    /// Where the slots begin in the thread's block, and how many are there (`TEB::TlsSlots`).
    const SLOTS: usize = 0x1480;
    const COUNT: u32 = 64;

    /// The place of our slot in the thread's block. 0: none, or not there.
    static PLACE: AtomicUsize = AtomicUsize::new(0);

    #[inline(always)]
    pub(super) fn get() -> *mut Thread {
        // Relaxed: a number that stands for itself.
        let place = PLACE.load(Ordering::Relaxed);
        if place == 0 {
            return super::call();
        }
        let thread: *mut Thread;
        // SAFETY: reads a word of the thread's own block, which nobody else changes: our slot.
        unsafe {
            asm!(
                "mov {thread}, qword ptr gs:[{place}]",
                place = in(reg) place,
                thread = lateout(reg) thread,
                options(nostack, preserves_flags, readonly)
            );
        }
        thread
    }

    /// `slot` is ours.
    pub(super) fn taken(slot: u32) {
        if slot < COUNT {
            // Relaxed: as above.
            PLACE.store(SLOTS + 8 * slot as usize, Ordering::Relaxed);
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod imp {
    use crate::object::Thread;

    #[inline(always)]
    pub(super) fn get() -> *mut Thread {
        super::call()
    }

    /// `slot` is ours.
    pub(super) fn taken(_slot: u32) {}
}
