//! The object layer in the two processes that `fork` makes of one; see `heap/fork.rs` for the pages below.
//!
//! All locks are held across the fork, outermost first: the scavenger's, the shared thread's, that of rounds, the
//! classes', the register's, the tables', then the heap's. So in the child every list is whole. Threads that the child
//! does not have may have been anywhere outside the locks:
//!
//! * a slot or a span in their hands stays out: it is lost to the child, as is what somebody has in hand who gives
//!   memory back between blocks, and the holes it has count as memory;
//! * a magazine may be half changed, and is not read: its slots are lost, its structure serves the next thread;
//! * so with a cache of pages.
//!
//! What is lost is what the threads had in their caches: at most two batches of each class and 128 pages each, and what
//! one was about to take or to put: all batches of a lane in store, or the runs of one length on its shelf (16 MiB at
//! the most of the one, 20 of the other). Blocks that are the program's are the child's to use and to free like all
//! others.
//!
//! Cost: ~90 locks, 2 µs; in the child O(heap), and a few nanoseconds for each structure.

#![cfg_attr(
    not(feature = "std"),
    allow(dead_code, reason = "without an operating system nobody forks")
)]

use core::cell::Cell;
use core::fmt;
use core::ptr::{self, NonNull};

use crate::source::Source;
use crate::sync::Ordering;

use super::size_class::SizeClass;
use super::{Keeper, Objects, Thread};

/// A heap's place in the list of all heaps of the process, which `global/fork.rs` keeps.
#[derive(Default)]
pub struct Kin {
    /// The heap opened before it; only under the lock of the list, as all here.
    pub next: Cell<Option<NonNull<dyn Forks>>>,
    /// The heap opened after it.
    pub last: Cell<Option<NonNull<dyn Forks>>>,
}

// SAFETY: used under the lock of the list only; what it leads to is `Sync`, being a heap.
unsafe impl Sync for Kin {}
// SAFETY: as above.
unsafe impl Send for Kin {}

impl fmt::Debug for Kin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kin").finish_non_exhaustive()
    }
}

/// What takes part in a fork.
pub trait Forks {
    /// The place in the list.
    fn kin(&self) -> &Kin;

    /// Whoever scavenges, by a thread of his own.
    fn keeper(&self) -> &Keeper;

    /// Before the fork, and before any heap is held: keeps scavengers away. Whether it could, within a while.
    fn try_hold_driver(&self) -> bool;

    /// Scavengers may go on.
    fn let_go_driver(&self);

    /// Before the fork, with the scavengers of all heaps away: waits for whoever is inside a lock, and keeps everybody
    /// out.
    fn hold(&self);

    /// After the fork, in either process.
    fn let_go(&self);

    /// In the child, before it lets go: forgets the threads that it does not have. `own` is the one thread's structure,
    /// of this heap or another.
    fn recover(&self, own: Option<NonNull<Thread>>);

    /// What ends the heap when its library is unloaded, by the heap's address: see [`Objects::abandon`].
    fn abandon(&self) -> unsafe fn(NonNull<()>);
}

impl<S: Source + 'static> Forks for Objects<S> {
    fn kin(&self) -> &Kin {
        &self.kin
    }

    fn keeper(&self) -> &Keeper {
        &self.keeper
    }

    fn try_hold_driver(&self) -> bool {
        self.heap.driver().try_hold()
    }

    fn let_go_driver(&self) {
        self.heap.driver().let_go();
    }

    fn hold(&self) {
        self.shared.hold();
        self.register.rounds.hold();
        SizeClass::all().for_each(|class| self.central(class).lock.hold());
        self.register.lock.hold();
        self.tables.lock.hold();
        self.heap.hold();
    }

    fn let_go(&self) {
        self.heap.let_go();
        self.tables.lock.let_go();
        self.register.lock.let_go();
        SizeClass::all().for_each(|class| self.central(class).lock.let_go());
        self.register.rounds.let_go();
        self.shared.let_go();
    }

    fn recover(&self, own: Option<NonNull<Thread>>) {
        self.keeper.has_gone();
        self.heap.recover();
        self.heap.recount_holes(self.spans.hole_bytes(self.heap.grown().0));
        let is_own = |thread: &Thread| own.is_some_and(|own| ptr::eq(own.as_ptr(), thread));
        let own = self.register.bereave(is_own, |thread| {
            let forget = |cache| self.heap.forget_cache(cache);
            thread.bereave(&self.spans, forget, |run| self.give_pages(None, run));
        });
        // Nobody counts what he that is gone had been told of.
        own.into_iter().for_each(Thread::shut);
        // SAFETY: in the tables, as `shared` says; its lock is held.
        unsafe { self.tables.shared_thread().as_ref() }.shut();
        let cached = own.is_some_and(|own| own.cache().is_some());
        // Relaxed, twice: numbers by themselves. Batches that a thread had in hand are in no store.
        self.cached.store(cached.into(), Ordering::Relaxed);
        let stored = SizeClass::all().map(|class| self.central(class).stored_bytes(class));
        self.spans.stored.store(stored.sum(), Ordering::Relaxed);
    }

    fn abandon(&self) -> unsafe fn(NonNull<()>) {
        Self::abandon
    }
}
