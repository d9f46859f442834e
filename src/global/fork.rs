//! All heaps of this copy of the crate, and what becomes of them when the process forks.
//!
//! ```text
//!   before     opening ─▶ each heap's scavenger ─▶ each heap's other locks         nobody is inside any of them
//!   parent     each heap's other locks ─▶ scavengers ─▶ opening                    as if nothing had happened
//!   child      recover each heap ─▶ its locks ─▶ scavengers ─▶ opening             the other threads do not exist
//! ```
//!
//! **Scavengers first, of all heaps, and again.** Whoever has a scavenger's turn may be in a clock of the program's,
//! which allocates: from another heap, so none may be held yet; from one that is not open, so `opening` is let go where
//! a turn is not to be had, and all begins anew. All other locks are held for our own work only, and for a source's:
//! that may allocate from heaps that were opened before its own, which are held after it.
//!
//! POSIX leaves a forked child of a program with threads little: what a lock guards is whole if whoever held it was
//! waited for, and that is done here (`pthread_atfork`). What is done without locks is made right in the child. So the
//! child allocates, frees what it inherited, starts threads and forks again, whatever the parent's threads were doing.
//!
//! The functions are registered before the first heap opens, so early that other libraries' come later: theirs run
//! before ours in the parent-to-be, and after ours in both processes, and may allocate. Only what a library registered
//! earlier still must not ask for memory between the two.
//!
//! What no heap holds, but the child would have for ever, is a file that somebody has open for a moment
//! (`source/pagemap.rs`, `pressure.rs`): he is waited for before the heaps' other locks are taken, for 0.1 s at the
//! most.
//!
//! `posix_spawn` and `vfork`, which `std::process::Command` prefers, run none of this and need none of it.

use core::cell::Cell;
use core::ffi::c_int;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use crate::object::{Forks, Objects};
use crate::source::{self, KeepErrno, Source};
use crate::sync::{Guard, Lock, wait_for};

use super::{background, pthread};

// Not in the libc crate for every Unix.
unsafe extern "C" {
    fn pthread_atfork(
        before: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> c_int;
}

/// Held while a heap opens or closes, and across a fork. Guards `HEAPS`.
static OPENING: Lock = Lock::new();

/// The heap opened last, which leads to the others.
static HEAPS: Heaps = Heaps(Cell::new(None));

struct Heaps(Cell<Option<NonNull<dyn Forks>>>);

// SAFETY: used by who holds `OPENING` only; heaps are `Sync`.
unsafe impl Sync for Heaps {}

/// The right to open and to close heaps.
pub(crate) struct Opening {
    _guard: Guard<'static>,
}

impl Opening {
    /// Waits until nobody else opens or closes a heap, nor forks.
    #[cold]
    pub(crate) fn begin() -> Self {
        register();
        Self { _guard: OPENING.lock() }
    }

    /// A heap has been opened.
    pub(crate) fn enter<S: Source + 'static>(&self, objects: &'static Objects<S>) {
        let this: NonNull<dyn Forks> = NonNull::from_ref(objects);
        if let Some(first) = heaps().next() {
            first.kin().last.set(Some(this));
        }
        objects.kin().next.set(HEAPS.0.replace(Some(this)));
    }

    /// A heap is about to be closed.
    pub(crate) fn leave<S: Source + 'static>(&self, objects: &Objects<S>) {
        let [behind, before] = [&objects.kin().next, &objects.kin().last].map(Cell::take);
        // SAFETY: neighbours on the list: open, as who closes one takes it off before, with this right (`self`).
        let [behind_it, before_it] = [behind, before].map(|heap| heap.map(|heap| unsafe { heap.as_ref() }.kin()));
        before_it.map_or(&HEAPS.0, |kin| &kin.next).set(behind);
        if let Some(kin) = behind_it {
            kin.last.set(before);
        }
    }
}

/// Gives back what the heaps of this copy of the crate hold, but for pages in use.
///
/// # Safety
///
/// Nothing of this copy of the crate runs any more, on any thread, or will.
#[cfg(target_os = "linux")]
pub(super) unsafe fn abandon_all() {
    loop {
        OPENING.hold();
        let Some(heap) = heaps().find(|heap| background::is_started(heap.keeper())) else {
            break;
        };
        // In the hook that hears of pressure it may be about to open a heap, or to close one.
        OPENING.let_go();
        // SAFETY: nobody uses the heaps but these threads (the caller's promise). One that has such a thread is a
        // `static`'s, which is not closed meanwhile.
        unsafe { background::end(heap.keeper()) };
    }
    let mut next = HEAPS.0.take();
    while let Some(heap) = next {
        // SAFETY: open till now, and nobody uses it (the caller's promise). The next is looked at before, as the heap
        // is gone then.
        unsafe {
            next = heap.as_ref().kin().next.get();
            let abandon = heap.as_ref().abandon();
            abandon(heap.cast());
        }
    }
    // `OPENING` stays held: whoever should come after all stops here.
}

/// Every open heap. The caller holds `OPENING`, and does so until the last has been looked at.
fn heaps() -> impl Iterator<Item = &'static dyn Forks> {
    // SAFETY: a heap stays as long as it is on the list.
    let heap = |heap: NonNull<dyn Forks>| unsafe { heap.as_ref() };
    core::iter::successors(HEAPS.0.get().map(heap), move |last| last.kin().next.get().map(heap))
}

/// Registers what is below with the C library, before the first heap opens.
///
/// Threads that race for it may register more than once, and so each can be sure that it has been done: `before` and
/// its partners count. Should the C library's own allocation lead back here, it goes on without.
fn register() {
    static DONE: AtomicBool = AtomicBool::new(false);
    static AT_IT: AtomicUsize = AtomicUsize::new(0);
    // Relaxed, throughout: who finds it not done does it, once too often at worst.
    if DONE.load(Ordering::Relaxed) || AT_IT.swap(pthread::here(), Ordering::Relaxed) == pthread::here() {
        return;
    }
    let _errno = KeepErrno::new();
    // SAFETY: functions that stay as long as this copy of the crate: the C library forgets them when it is unloaded.
    let answer = unsafe { pthread_atfork(Some(before), Some(parent), Some(child)) };
    AT_IT.store(0, Ordering::Relaxed);
    // Without memory for it we go on; the next heap that opens tries again.
    DONE.store(answer == 0, Ordering::Relaxed);
}

/// Which thread is between `before` and `parent` or `child`, by an address of its own. 0: none.
static FORKING: AtomicUsize = AtomicUsize::new(0);

/// How often it has come to `before` again.
static AGAIN: AtomicUsize = AtomicUsize::new(0);

/// Whether the calling thread forks. Relaxed: it alone writes, and reads, its own address there.
fn is_forking() -> bool {
    FORKING.load(Ordering::Relaxed) == pthread::here()
}

unsafe extern "C" fn before() {
    if is_forking() {
        // Relaxed, here and below: only the thread that forks.
        AGAIN.fetch_add(1, Ordering::Relaxed);
        return;
    }
    loop {
        OPENING.hold();
        if hold_drivers() {
            break;
        }
        OPENING.let_go();
        // Whoever waits for it is to have it before we do again.
        wait_for(&AtomicU32::new(0), 0, Some(Duration::from_millis(1)));
    }
    FORKING.store(pthread::here(), Ordering::Relaxed);
    #[cfg(any(target_os = "linux", target_os = "android"))]
    source::hold_questions();
    heaps().for_each(Forks::hold);
}

/// Keeps the scavengers of all heaps away, or those of none: whether it could. The caller holds `OPENING`.
fn hold_drivers() -> bool {
    let Some(held) = heaps().position(|heap| !heap.try_hold_driver()) else {
        return true;
    };
    heaps().take(held).for_each(Forks::let_go_driver);
    false
}

unsafe extern "C" fn parent() {
    if is_last() {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        source::let_go_questions();
        let_go();
    }
}

unsafe extern "C" fn child() {
    if is_last() {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        source::recover_questions();
        let own = pthread::own();
        pthread::forget_leaving();
        heaps().for_each(|heap| heap.recover(own));
        let_go();
    }
}

/// Whether this is the partner of the first `before`, and not of a repeated one, or of none.
fn is_last() -> bool {
    // Relaxed: only the thread that forks.
    is_forking() && {
        let again = AGAIN.load(Ordering::Relaxed);
        AGAIN.store(again.saturating_sub(1), Ordering::Relaxed);
        again == 0
    }
}

fn let_go() {
    heaps().for_each(Forks::let_go);
    heaps().for_each(Forks::let_go_driver);
    // Relaxed: only the thread that forks.
    FORKING.store(0, Ordering::Relaxed);
    OPENING.let_go();
}
