//! All heaps of this copy of the crate, and what happens to them when the process forks.
//!
//! ```text
//!   before     opening ─▶ each heap's scavenger ─▶ each heap's other locks         no thread is inside any of them
//!   parent     each heap's other locks ─▶ scavengers ─▶ opening                    as if nothing had happened
//!   child      recover each heap ─▶ its locks ─▶ scavengers ─▶ opening             the other threads do not exist
//! ```
//!
//! **The scavengers of all heaps come first, with retries.** A thread that holds a scavenger's turn may be in a clock
//! of the program, which may allocate. It may allocate from another heap, so no other lock may be held yet. It may
//! allocate from a heap that is not open, so if a turn is not available, `opening` is released and everything starts
//! over. All other locks are held only for this crate's own work and for a source's; a source may allocate from heaps
//! that were opened before its own, which are held after it.
//!
//! POSIX guarantees little to the forked child of a multi-threaded program. What a lock guards is consistent if its
//! holder was waited for, which is done here (`pthread_atfork`). What is done without locks is repaired in the child.
//! So the child can allocate, free what it inherited, start threads and fork again, whatever the parent's threads were
//! doing.
//!
//! The handlers are registered before the first heap opens, so early that other libraries' handlers come later: those
//! run before ours in the future parent, and after ours in both processes, and may allocate. Only handlers registered
//! even earlier, by a constructor that has not allocated anything yet, run between `before` and its partner. They must
//! not ask for memory: as soon as that takes a lock, the thread waits for itself.
//!
//! A file that a thread has open for a moment is held by no heap, but would stay open in the child forever
//! (`source/pagemap.rs`, `pressure.rs`). So that thread is waited for before the heaps' other locks are taken, for 0.1
//! s at most.
//!
//! `posix_spawn` and `vfork`, which `std::process::Command` prefers, run none of this and need none of it.

use core::cell::Cell;
use core::ffi::c_int;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::time::Duration;

use crate::object::{Forks, Objects};
use crate::source::{self, KeepErrno, Source};
use crate::sync::{Guard, Lock, sleep};

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

/// The heap opened last, which links to the others.
static HEAPS: Heaps = Heaps(Cell::new(None));

struct Heaps(Cell<Option<NonNull<dyn Forks>>>);

// SAFETY: used only by a thread that holds `OPENING`. A `Heap` is `Sync` only if its source is; of a source that is
// not, a fork uses `gap` alone, for what lay aside, in the child. No other thread is there, and `Source::gap` says that
// it is called so. When the library is unloaded, nobody else uses the heap.
unsafe impl Sync for Heaps {}

/// The right to open and to close heaps.
pub(crate) struct Opening {
    _guard: Guard<'static>,
}

impl Opening {
    /// Waits until no other thread opens or closes a heap, or forks.
    #[cold]
    pub(crate) fn begin() -> Self {
        register();
        Self { _guard: OPENING.lock() }
    }

    /// Registers a heap that has been opened.
    pub(crate) fn enter<S: Source + 'static>(&self, objects: &'static Objects<S>) {
        let this: NonNull<dyn Forks> = NonNull::from_ref(objects);
        if let Some(first) = heaps().next() {
            first.kin().last.set(Some(this));
        }
        objects.kin().next.set(HEAPS.0.replace(Some(this)));
    }

    /// Removes a heap that is about to be closed.
    pub(crate) fn leave<S: Source + 'static>(&self, objects: &Objects<S>) {
        let [behind, before] = [&objects.kin().next, &objects.kin().last].map(Cell::take);
        // SAFETY: neighbours on the list: open, because a heap is taken off the list before it is closed, with this
        // right (`self`).
        let [behind_it, before_it] = [behind, before].map(|heap| heap.map(|heap| unsafe { heap.as_ref() }.kin()));
        before_it.map_or(&HEAPS.0, |kin| &kin.next).set(behind);
        if let Some(kin) = behind_it {
            kin.last.set(before);
        }
    }
}

/// Gives back everything the heaps of this copy of the crate hold, except pages in use.
///
/// # Safety
///
/// Nothing of this copy of the crate runs any more, on any thread, or ever will.
#[cfg(target_os = "linux")]
pub(super) unsafe fn abandon_all() {
    loop {
        OPENING.hold();
        let Some(heap) = heaps().find(|heap| background::is_started(heap.keeper())) else {
            break;
        };
        // In the hook that is notified of pressure, the thread may be about to open or to close a heap.
        OPENING.let_go();
        // SAFETY: only these threads use the heaps (the caller's promise). A heap with such a thread is in a `static`,
        // and is not closed meanwhile.
        unsafe { background::end(heap.keeper()) };
    }
    let mut next = HEAPS.0.take();
    while let Some(heap) = next {
        // SAFETY: open until now, and nobody uses it (the caller's promise). The next one is read first, because the
        // heap is gone afterwards.
        unsafe {
            next = heap.as_ref().kin().next.get();
            let abandon = heap.as_ref().abandon();
            abandon(heap.cast());
        }
    }
    // `OPENING` stays held: any thread that arrives after all stops here.
}

/// Every open heap. The caller holds `OPENING` until it has finished with the last one.
fn heaps() -> impl Iterator<Item = &'static dyn Forks> {
    // SAFETY: a heap stays in place as long as it is on the list.
    let heap = |heap: NonNull<dyn Forks>| unsafe { heap.as_ref() };
    core::iter::successors(HEAPS.0.get().map(heap), move |last| last.kin().next.get().map(heap))
}

/// Registers the handlers below with the C library, before the first heap opens.
///
/// Threads that race to register may do so more than once, so each can be sure that it has been done: `before` and its
/// partners count. If the C library's own allocation leads back here, it continues without registering.
fn register() {
    static DONE: AtomicBool = AtomicBool::new(false);
    static AT_IT: AtomicUsize = AtomicUsize::new(0);
    // Relaxed, throughout: a thread that finds it not done does it, once too often at worst.
    if DONE.load(Ordering::Relaxed) || AT_IT.swap(pthread::here(), Ordering::Relaxed) == pthread::here() {
        return;
    }
    let _errno = KeepErrno::new();
    // SAFETY: the functions exist as long as this copy of the crate: the C library forgets them when the crate is
    // unloaded.
    let answer = unsafe { pthread_atfork(Some(before), Some(parent), Some(child)) };
    AT_IT.store(0, Ordering::Relaxed);
    // If there was no memory for it, continue; the next heap that opens tries again.
    DONE.store(answer == 0, Ordering::Relaxed);
}

/// The thread between `before` and `parent` or `child`, identified by an address of its own. 0: none.
static FORKING: AtomicUsize = AtomicUsize::new(0);

/// How often that thread has entered `before` again.
static AGAIN: AtomicUsize = AtomicUsize::new(0);

/// Whether the calling thread is forking. Relaxed: it alone writes, and reads, its own address there.
fn is_forking() -> bool {
    FORKING.load(Ordering::Relaxed) == pthread::here()
}

unsafe extern "C" fn before() {
    if is_forking() {
        // Relaxed, here and below: only the forking thread.
        AGAIN.fetch_add(1, Ordering::Relaxed);
        return;
    }
    loop {
        OPENING.hold();
        if hold_drivers() {
            break;
        }
        OPENING.let_go();
        // A thread that waits for `OPENING` should get it before we do again.
        sleep(Duration::from_millis(1));
    }
    FORKING.store(pthread::here(), Ordering::Relaxed);
    #[cfg(any(target_os = "linux", target_os = "android"))]
    source::hold_questions();
    heaps().for_each(Forks::hold);
}

/// Keeps the scavengers of all heaps away, or those of none. Returns whether it could. The caller holds `OPENING`.
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

/// Whether this is the partner of the first `before`, and not of a repeated one or of none.
fn is_last() -> bool {
    // Relaxed: only the forking thread.
    is_forking() && {
        let again = AGAIN.load(Ordering::Relaxed);
        AGAIN.store(again.saturating_sub(1), Ordering::Relaxed);
        again == 0
    }
}

fn let_go() {
    heaps().for_each(Forks::let_go);
    heaps().for_each(Forks::let_go_driver);
    // Relaxed: only the forking thread.
    FORKING.store(0, Ordering::Relaxed);
    OPENING.let_go();
}
