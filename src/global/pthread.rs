//! Which structure belongs to this thread: one pointer in thread-local storage, and a pthread key that signals its end.
//!
//! ```text
//!             first use: a structure, the key set                 key's destructor: all goes back
//!   fresh ───────────────────────────────────────▶ live ─────────────────────────────────────────▶ gone
//!     └────────── no key to be had ───────────────────────────────────────────────────────────────▲
//! ```
//!
//! In every state the pointer (`current.rs`) points to a structure: the thread's own, or one of two placeholders that
//! belong to no heap. So the fast path is a load and a comparison, without a test for null.
//!
//! **Gone is final.** Destructors of other keys may run after ours and allocate, up to the fourth and last round. A
//! thread that is gone uses the shared structure, however often it calls, so nothing can be left behind. A structure
//! made anew in the last round would never be given back, because no destructor follows. Destructors of Rust's
//! thread-locals run before those of keys and still find the thread live.
//!
//! A thread whose first use falls into the last round, after our key's turn, is not notified of its end and cannot give
//! its structure back: another thread finds it later (`object/presence.rs`).
//!
//! A thread has a structure in only one heap, the first it uses. In a second heap it shares.
//!
//! Nothing here allocates from Rust: the thread-local has no destructor and a constant initial value.
//! `pthread_setspecific` may call the C library's `calloc`; in case that is us, the pointer is set first.

use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::object::{Nobody, Objects, Thread, Working};
use crate::source::{KeepErrno, Source};
use crate::sync::relax;

// Numbers that are neither the address of an `Objects` nor null, which a heap that is not open has.
pub(super) static FRESH: Nobody = Nobody::new(1);
static GONE: Nobody = Nobody::new(2);

mod current;

/// The key shared by all heaps of this copy of the crate, plus one; or one of the two below.
static KEY: AtomicUsize = AtomicUsize::new(NONE_YET);
const NONE_YET: usize = 0;
/// There will be none any more.
const FORBIDDEN: usize = usize::MAX;

/// How often the end of a library yields to threads that are leaving: most of a second.
const LEAVING_ROUNDS: u32 = 1 << 18;

/// The number of threads in the key's destructor.
static LEAVING: AtomicUsize = AtomicUsize::new(0);

/// Whether threads have structures of their own.
pub(super) const HAS_STRUCTURES: bool = true;

/// This thread's structure, if it is one of the heap at `objects` and no other thread is emptying it.
#[inline(always)]
pub(super) fn enter<T>(objects: *const T) -> Option<Working<'static>> {
    current().work(objects)
}

/// This thread's structure, of whichever heap, or a placeholder.
#[inline(always)]
pub(super) fn current() -> &'static Thread {
    // SAFETY: FRESH or GONE, which are as large, or a structure, which is never destroyed.
    unsafe { &*current::get() }
}

/// An address that is unique to this thread, as long as it lives. Never 0.
pub(super) fn here() -> usize {
    current::place().addr()
}

pub(super) use super::inside::Inside;
pub(super) use super::pressure::is_alone;
pub(crate) use super::pressure::resident;

/// This thread's structure, of whichever heap.
pub(super) fn own() -> Option<NonNull<Thread>> {
    let thread = NonNull::new(current::get())?;
    let is_none = [&FRESH, &GONE].iter().any(|none| none.as_thread() == thread);
    (!is_none).then_some(thread)
}

/// Makes this the thread's structure, for tests; returns the other.
#[cfg(test)]
pub(super) fn replace(thread: &'static Thread) -> &'static Thread {
    let before = current();
    current::set(NonNull::from_ref(thread));
    before
}

/// Makes a structure for this thread, if it has not had one. `None` also if there is no memory for it: the thread may
/// try again.
#[cold]
pub(super) fn enlist<S: Source + 'static>(objects: &'static Objects<S>) -> Option<&'static Thread> {
    if current::get() != FRESH.as_thread().as_ptr() {
        return None;
    }
    let _errno = KeepErrno::new();
    let Some(key) = key() else {
        current::set(GONE.as_thread());
        return None;
    };
    let thread = objects.enlist()?;
    if current::get() != FRESH.as_thread().as_ptr() {
        // The heap's source has used another heap meanwhile, which has made one.
        // SAFETY: ours, and not used again.
        unsafe { Thread::end(thread) };
        return None;
    }
    current::set(thread);
    // SAFETY: a key that `key` made; the value is for `ended`.
    if unsafe { libc::pthread_setspecific(key, thread.as_ptr().cast()) } != 0 {
        // SAFETY: ours, and not used again.
        unsafe { ended(thread.as_ptr().cast()) };
        return None;
    }
    // SAFETY: as above.
    Some(unsafe { thread.as_ref() })
}

/// The key's destructor.
unsafe extern "C" fn ended(thread: *mut c_void) {
    // Acquire, and release below: pairs with `forbid`, which waits for us before the library is unloaded.
    LEAVING.fetch_add(1, Ordering::Acquire);
    // First: whatever happens from here on finds the thread gone.
    current::set(GONE.as_thread());
    if let Some(thread) = NonNull::new(thread) {
        // SAFETY: the value `enlist` set, of the thread that runs this, once for each time it was set.
        unsafe { Thread::end(thread.cast()) };
    }
    // Release: everything above is done; pairs with `forbid`.
    LEAVING.fetch_sub(1, Ordering::Release);
}

/// From here on no thread is notified of its end, so none will call back here. New threads share.
pub(super) fn forbid() {
    // Acquire: as in `key`.
    if let Some(key) = key_of(KEY.swap(FORBIDDEN, Ordering::Acquire)) {
        // SAFETY: made by `key`, and deleted once.
        unsafe { libc::pthread_key_delete(key) };
    }
    // Threads notified before: waiting for a thread's work, as a scope does, is not waiting for its end. The wait is
    // bounded: at the end of a process such a thread may have been stopped.
    for round in 0..LEAVING_ROUNDS {
        // Acquire: pairs with the release in `ended`.
        if LEAVING.load(Ordering::Acquire) == 0 {
            return;
        }
        relax(round);
    }
}

/// In the child of a fork: no thread is leaving.
pub(super) fn forget_leaving() {
    // Relaxed: the child has one thread.
    LEAVING.store(0, Ordering::Relaxed);
}

/// The key, made at the first call. No lock: of two made concurrently, one is discarded.
fn key() -> Option<libc::pthread_key_t> {
    // Acquire, here and below: pairs with the release below. A key that another thread has made need not be known to
    // this one by its number alone: glibc reads its own entry for it without an acquire.
    let known = KEY.load(Ordering::Acquire);
    if known != NONE_YET {
        return key_of(known);
    }
    let mut key = 0;
    // SAFETY: a place for a key, and a destructor that lives as long as the program.
    if unsafe { libc::pthread_key_create(&mut key, Some(ended)) } != 0 {
        return None;
    }
    // Release: what the C library has written of the key.
    match KEY.compare_exchange(NONE_YET, key as usize + 1, Ordering::Release, Ordering::Acquire) {
        Ok(_) => Some(key),
        Err(known) => {
            // SAFETY: made above, and no thread has set it.
            unsafe { libc::pthread_key_delete(key) };
            key_of(known)
        }
    }
}

/// The key that this word of `KEY` tells, if any. What is forbidden would be one by its number, where a key is as wide
/// as a pointer; and musl does not check keys. Where keys are signed (on Android they are all negative) a word that is
/// too large for one has a sign, too.
fn key_of<K: TryFrom<usize> + TryFrom<isize>>(word: usize) -> Option<K> {
    match word {
        NONE_YET | FORBIDDEN => None,
        word => K::try_from(word - 1)
            .ok()
            .or_else(|| K::try_from((word - 1).cast_signed()).ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_forbidden_is_no_key() {
        assert_eq!([FORBIDDEN, NONE_YET].map(key_of::<libc::pthread_key_t>), [None; 2]);
        assert_eq!(key_of(1), Some(0_u32));
    }

    /// Android sets the highest bit of a key. Every thread but the one that made it took the key for none.
    #[test]
    fn a_key_is_the_same_to_every_thread_whatever_its_type() {
        for key in [0, 5, i32::MAX, i32::MIN, i32::MIN + 5] {
            assert_eq!(key_of(key as usize + 1), Some(key));
        }
        for key in [0, 5, u32::MAX - 2] {
            assert_eq!(key_of(key as usize + 1), Some(key));
        }
        assert_eq!(key_of(usize::MAX - 1), Some(usize::MAX - 2));
    }
}
