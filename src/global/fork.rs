//! All heaps of this copy of the crate, the process's own heap of pages included (`process.rs`), and what happens to
//! them when the process forks.
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
//! **Of other copies of the crate** in the process none of that is known. Each has its own handlers, which hold its
//! heaps all at once, those of one copy after those of another, by the order of the constructors below and not that in
//! which heaps opened. So a source or a clock must not allocate from another copy's heap: the fork may hold that
//! already while it waits here for the source. (Copies in libraries could register when their first heap opens, which
//! is the order of use. But then the handlers of `main` would be earlier than theirs, with all that is said of such
//! below.)
//!
//! POSIX guarantees little to the forked child of a multi-threaded program. What a lock guards is consistent if its
//! holder was waited for, which is done here (`pthread_atfork`). What is done without locks is repaired in the child.
//! So the child can allocate, free what it inherited, start threads and fork again, whatever the parent's threads were
//! doing.
//!
//! The handlers are registered before the first heap opens, and by a constructor if none has opened by then, so early
//! that those of `main`, and of most libraries, come later: these run before ours in the future parent, and after ours
//! in both processes. (A program that takes a lock in such a handler, and holds it where it allocates, would otherwise
//! wait for itself: a thread with its lock waits for the fork, and the handler for the lock. And some C libraries
//! cannot register anything while handlers run.)
//!
//! **Handlers registered even earlier**, by the constructor of another library, or by a program that loads the library
//! which contains this copy of the crate later, run between `before` and
//! its partner, and may use heaps as well. All locks are held then, but by the very thread that runs the handler, and
//! nothing is under way beneath them. So to that thread, and to no other, a lock held for a fork is free
//! (`sync/lock.rs`): whatever it calls here finds things as any call does, and leaves them so. In the child this comes
//! before `recover`: there the other threads are like threads that have been preempted, for ever. No call waits for
//! such a thread without bound unless it holds a lock, and none of them does. What differs for these handlers:
//!
//! - A heap that one of them opens is held at once, and let go with the others.
//! - They start no background thread: the child would take it for its parent's, which has gone.
//! - A refusal hardly waits for other threads (`heap/grow.rs`, `object/reclaim.rs`, `free_set/claim.rs`): many of them
//!   wait for what this thread holds.
//! - They must not wait for another thread that uses a heap: it waits for them. Nor must the child of a fork that one
//!   of them makes, before it has returned from there.
//! - In the child they must start no thread that uses a heap of pages or an arena before the fork has returned. That
//!   thread needs no lock, so it would not wait for `recover`, which takes whoever is inside a turnstile for one of the
//!   parent's, and counts it out. It would count itself out again, and no refusal there would be proved any more.
//!
//! (To register ours first of all, from a constructor with a number, would not do: the constructors of libraries come
//! before any of the program's. The one section that comes before those is not for libraries. On macOS, and some other
//! systems, there is no such constructor here: handlers registered before the first heap opens are early ones there.)
//!
//! A file that a thread has open for a moment is held by no heap, but would stay open in the child forever
//! (`source/pagemap.rs`, `pressure.rs`). So that thread is waited for before the heaps' other locks are taken, for 0.1
//! s at most.
//!
//! `posix_spawn` and `vfork`, which `std::process::Command` prefers, run none of this and need none of it.
//!
//! **A library that is closed during a fork.** glibc (since 2.36) lets that be, and forgets the library's handlers, so
//! that `parent` or `child` does not come any more. So whoever closes it first waits for a fork that another thread is
//! at, or ends the one that it is at itself, in one of its other handlers; and forks that come later pass by ([`end`]).
//! (A fork that looks a handler up as the C library forgets it calls it where there is no code any more. Nothing can be
//! done here about that. Where two threads only fork, and a third only loads and closes a library with three empty
//! handlers, that ends the process after some hundred forks; with a heap in the library, which waits, not in 50,000.)

use core::cell::Cell;
use core::ffi::c_int;
use core::ptr::NonNull;
#[cfg(target_os = "linux")]
use core::sync::atomic::AtomicU32;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::time::Duration;

use crate::object::Forks;
use crate::source::{self, KeepErrno};
use crate::sync::{Guard, Lock, is_forking, set_forking, sleep};
#[cfg(target_os = "linux")]
use crate::sync::{process, rest};

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

    /// Registers a heap that has been opened, and that nobody uses yet. If a handler of a fork has opened it, it is
    /// held like all others.
    pub(crate) fn enter(&self, heap: &'static impl Forks) {
        if is_forking() {
            let held = heap.try_hold_driver();
            debug_assert!(held, "nobody else has it");
            heap.hold();
        }
        let this: NonNull<dyn Forks> = NonNull::from_ref(heap);
        if let Some(first) = heaps().next() {
            first.kin().last.set(Some(this));
        }
        heap.kin().next.set(HEAPS.0.replace(Some(this)));
    }

    /// Removes a heap that is about to be closed.
    pub(crate) fn leave(&self, heap: &impl Forks) {
        let [behind, before] = [&heap.kin().next, &heap.kin().last].map(Cell::take);
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
    // Those that came after `end`, and pass by.
    wait_for_forks(u32::MAX);
    loop {
        OPENING.hold();
        let mut keepers = heaps().filter_map(Forks::keeper);
        let Some(keeper) = keepers.find(|keeper| background::is_started(keeper)) else {
            break;
        };
        // In the hook that is notified of pressure, the thread may be about to open or to close a heap.
        OPENING.let_go();
        // SAFETY: only these threads use the heaps (the caller's promise). A heap with such a thread is in a `static`,
        // and is not closed meanwhile.
        unsafe { background::end(keeper) };
    }
    let mut next = HEAPS.0.take();
    while let Some(heap) = next {
        // SAFETY: open until now, and nobody uses it (the caller's promise). The next one is read first, because the
        // heap is gone afterwards.
        unsafe {
            next = heap.as_ref().kin().next.get();
            if let Some(abandon) = heap.as_ref().abandon() {
                abandon(heap.cast());
            }
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

/// Registers them before `main` even if no heap has opened by then: so handlers of the program come later.
#[cfg(all(
    any(
        target_os = "linux",
        target_os = "android",
        target_os = "freebsd",
        target_os = "netbsd"
    ),
    not(miri)
))]
#[used]
// SAFETY: the section is a list of functions of this type, which the loader calls one by one.
#[unsafe(link_section = ".init_array")]
static EARLY: extern "C" fn() = {
    extern "C" fn early() {
        register();
    }
    early
};

/// How often the thread between `before` and `parent` or `child` has entered `before` again.
static AGAIN: AtomicUsize = AtomicUsize::new(0);

/// The process in which the first `before` has run.
#[cfg(target_os = "linux")]
static FORKER: AtomicU32 = AtomicU32::new(0);

/// Whether forks pass by.
#[cfg(target_os = "linux")]
static ENDED: AtomicBool = AtomicBool::new(false);

/// The number of forks between the beginning of the first `before` and the end of its partner.
#[cfg(target_os = "linux")]
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// Whether this process is the child of a fork.
#[cfg(target_os = "linux")]
static CHILD: AtomicBool = AtomicBool::new(false);

/// Whether this process is the child of a fork, or the caller is in a handler of one.
#[cfg(target_os = "linux")]
pub(super) fn is_child() -> bool {
    // Relaxed: written while the child has one thread.
    CHILD.load(Ordering::Relaxed) || is_forking()
}

unsafe extern "C" fn before() {
    if is_forking() {
        // Relaxed, here and below: only the forking thread.
        AGAIN.fetch_add(1, Ordering::Relaxed);
        return;
    }
    #[cfg(target_os = "linux")]
    {
        // SeqCst, twice, a store and then a load as in `end`: either it sees this fork, or we see that forks pass by.
        FORKS.fetch_add(1, Ordering::SeqCst);
        if ENDED.load(Ordering::SeqCst) {
            // Release: this code is not needed any more, from here on; partner: `wait_for_forks`.
            FORKS.fetch_sub(1, Ordering::Release);
            return;
        }
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
    #[cfg(target_os = "linux")]
    FORKER.store(process(), Ordering::Relaxed);
    set_forking(true);
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
        // Release: as in `before`.
        #[cfg(target_os = "linux")]
        FORKS.fetch_sub(1, Ordering::Release);
    }
}

unsafe extern "C" fn child() {
    // Also in a child that a handler of a fork makes: it has one thread like any other, but is still in the middle of
    // the fork that it was made in, which may have the locks held. What has been recovered is so a second time.
    if is_forking() {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        source::recover_questions();
        let own = pthread::own();
        pthread::forget_leaving();
        // This one: other threads that were about to fork do not exist. Relaxed, here and below: for the same reason.
        #[cfg(target_os = "linux")]
        {
            FORKS.store(1, Ordering::Relaxed);
            CHILD.store(true, Ordering::Relaxed);
        }
        heaps().for_each(|heap| heap.recover(own));
    }
    if is_last() {
        let_go();
        #[cfg(target_os = "linux")]
        FORKS.fetch_sub(1, Ordering::Relaxed);
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

/// The library that contains this copy of the crate is being unloaded, and the C library is about to forget the
/// handlers: from here on forks pass by, and no thread is in here.
#[cfg(target_os = "linux")]
pub(super) fn end() {
    if is_forking() {
        // The caller is in a handler of its fork: for it nothing comes after this, whatever was before. Relaxed, twice:
        // this thread's own.
        AGAIN.store(0, Ordering::Relaxed);
        // SAFETY: what would have come in this process.
        unsafe {
            if FORKER.load(Ordering::Relaxed) == process() {
                parent();
            } else {
                child();
            }
        }
    }
    // First a moment in which nobody forks: a fork that passes by, and ends as the handlers are forgotten, may still
    // look for them.
    wait_for_forks(QUIET_ROUNDS);
    // SeqCst: as in `before`.
    ENDED.store(true, Ordering::SeqCst);
    wait_for_forks(u32::MAX);
}

/// How many rounds of 0.1 ms to wait for such a moment.
#[cfg(target_os = "linux")]
const QUIET_ROUNDS: u32 = 1 << 13;

/// Waits until no thread is between the handlers, or in one of them; but for so many rounds at most.
#[cfg(target_os = "linux")]
fn wait_for_forks(rounds: u32) {
    let mut round = 0;
    // SeqCst: as in `before`; and acquires what those did that have left. They wake nobody: who wakes another thread is
    // still in that call, whose code must stay.
    for _ in 0..rounds {
        if FORKS.load(Ordering::SeqCst) == 0 {
            return;
        }
        round = rest(round);
    }
}

fn let_go() {
    heaps().for_each(Forks::let_go);
    heaps().for_each(Forks::let_go_driver);
    set_forking(false);
    OPENING.let_go();
}
