//! What one thread keeps to itself: a magazine for every class, a shelf, a cache of pages. And the register of all
//! threads.
//!
//! ```text
//!   Thread   owner │ cache 3 │ magazine 0 │ magazine 1 │ … │ magazine 79 │ shelf     2.2 KiB, a slot like any other
//!
//!   register   all    ──▶ thread ──▶ thread ──▶ thread        every one ever made, none is ever unmade
//!              vacant ──────────────▶ thread                  those nobody uses: the next thread gets the last left
//! ```
//!
//! **Seizing.** A thread that sleeps cannot be asked for its magazines. As with caches of pages (`cache.rs`), it says
//! by two plain stores when it is at work on them, and looks in between whether it is barred; who seizes bars all,
//! passes a heavy fence, and empties those that nobody is at work on (`sync/owner.rs`; the key is the address of the
//! heap's [`Objects`](super::Objects), which is compared and never followed). A thread that is barred uses the shared
//! structure meanwhile.
//!
//! A thread that ends gives back what is much - its cache, its shelf, full magazines - and leaves its structure to the
//! next, with the few slots that are still in it. Ten thousand threads one after the other use one structure, and find
//! it warm. Once a second the scavenger empties those that nobody uses. One that ends without a word (see
//! `presence.rs`) leaves it as it is, and who needs a structure and finds none vacant looks at some of the others for
//! such: it takes it with all that is in it.

use core::cell::Cell;
use core::ptr::{self, NonNull};

use crate::sync::{Guard, Lock, Owned, Owner, relax};
use crate::units::PageRun;

use super::magazine::Magazine;
use super::presence::{Presence, Process};
use super::shelf::Shelf;
use super::size_class::{CLASSES, SizeClass};
use super::spans::Spans;

/// A thread's own structure, with its user at work on it; dropped when he is done.
#[derive(Debug)]
pub struct Working<'a> {
    thread: &'a Thread,
}

impl core::ops::Deref for Working<'_> {
    type Target = Thread;

    #[inline(always)]
    fn deref(&self) -> &Thread {
        self.thread
    }
}

impl Drop for Working<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.thread.owner.leave();
    }
}

/// What to do when a thread ends that uses the structure.
///
/// # Safety of a call
///
/// The structure is one of a heap whose function this is; the caller is the one that uses it, and does not use it
/// again.
pub(super) type Leave = unsafe fn(NonNull<Thread>);

/// One thread's own. All-zero bytes: nobody's, and empty.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Thread {
    /// First: a pointer to a thread is a pointer to its owner.
    owner: Owner,
    /// The owner again, to be followed; and what to do when the thread ends.
    pub(super) home: Cell<*const ()>,
    leave: Cell<Option<Leave>>,
    /// The slot of the thread's cache of pages, plus one. 0: it has none, and goes to the heap.
    cache: Cell<u32>,
    /// The last call for a flush that was heeded.
    pub(super) calls: Cell<u32>,
    /// The register's links.
    next: Cell<*const Thread>,
    next_vacant: Cell<*const Thread>,
    /// Whether nobody uses it. Only under the register's lock.
    vacant: Cell<bool>,
    /// Whether who used it last has left slots in it.
    pub(super) laden: Cell<bool>,
    /// The user's word that it is there.
    presence: Presence,
    magazines: [Magazine; CLASSES],
    shelf: Shelf,
}

impl Owned for Thread {
    fn owner(&self) -> &Owner {
        &self.owner
    }

    fn key(&self) -> usize {
        self.home.get().addr()
    }
}

impl Thread {
    /// The structure, which its user has entered.
    #[inline(always)]
    pub fn working(&self) -> Working<'_> {
        Working { thread: self }
    }

    /// As [`Owner::enter`], by the address of its heap, after a seizure if one is under way.
    pub(super) fn enter_at_last<T>(&self, objects: *const T) -> Working<'_> {
        let mut round = 0;
        while !self.owner.enter(objects.addr()) {
            relax(round);
            round = round.saturating_add(1);
        }
        self.working()
    }

    /// Whether it is vacant and has something in it; not any more. To be asked with the register held.
    pub(super) fn unload(&self) -> bool {
        self.vacant.get() && self.laden.replace(false)
    }

    /// The magazine of a class.
    #[inline(always)]
    pub fn magazine(&self, class: SizeClass) -> &Magazine {
        // SAFETY: a class's number is less than CLASSES (I9).
        unsafe { self.magazines.get_unchecked(class.index()) }
    }

    /// A number that other threads seldom have: structures are slots of a class of their own.
    #[inline]
    pub fn hint(&self) -> usize {
        ptr::from_ref(self).addr() / size_of::<Self>()
    }

    /// The thread's shelf.
    #[inline(always)]
    pub fn shelf(&self) -> &Shelf {
        &self.shelf
    }

    /// The slot of the thread's cache of pages.
    #[inline(always)]
    pub fn cache(&self) -> Option<usize> {
        (self.cache.get() as usize).checked_sub(1)
    }

    /// Gives the thread a cache, or takes it.
    pub fn set_cache(&self, cache: Option<usize>) {
        self.cache.set(cache.map_or(0, |cache| cache as u32 + 1));
    }

    /// Makes the structure `objects`', which is told by `leave` when the thread ends.
    pub(super) fn set_owner<T>(&self, objects: &T, leave: Leave) {
        let home = ptr::from_ref(objects);
        self.owner.set(home.addr());
        self.home.set(home.cast());
        self.leave.set(Some(leave));
    }

    /// The thread ends: everything goes back, the structure too.
    ///
    /// # Safety
    ///
    /// The caller is the one that uses the structure, and does not use it again.
    pub unsafe fn end(thread: NonNull<Self>) {
        // SAFETY: structures are never unmade.
        if let Some(leave) = unsafe { thread.as_ref() }.leave.get() {
            // SAFETY: the caller's promise; `leave` was set with the owner.
            unsafe { leave(thread) };
        }
    }
}

/// How many structures are looked at for one whose user has gone, before one is made: ~100 ns each.
const SUSPECTS: usize = 8;

/// All threads of a heap.
#[derive(Debug)]
pub struct Register {
    pub(super) lock: Lock,
    /// Below: only under the lock.
    all: Cell<*const Thread>,
    /// Where to look next for one whose user has gone.
    suspect: Cell<*const Thread>,
    vacant: Cell<*const Thread>,
    made: Cell<usize>,
    used: Cell<usize>,
}

// SAFETY: the cells are used under the register's lock only; so are the links inside the structures they lead to. Of a
// structure somebody uses, the register hands out shared references for reading atomics alone (`for_each`).
unsafe impl Send for Register {}
// SAFETY: as above.
unsafe impl Sync for Register {}

impl Register {
    /// No threads.
    pub const fn new() -> Self {
        Self {
            lock: Lock::new(),
            all: Cell::new(ptr::null()),
            suspect: Cell::new(ptr::null()),
            vacant: Cell::new(ptr::null()),
            made: Cell::new(0),
            used: Cell::new(0),
        }
    }

    /// A structure that nobody uses, for the caller to use: a vacant one, or one whose user has ended without a word;
    /// with the slots that are still in it.
    pub fn take(&self) -> Option<NonNull<Thread>> {
        let _guard = self.lock.lock();
        let Some(thread) = NonNull::new(self.vacant.get().cast_mut()) else {
            return self.find_gone();
        };
        // SAFETY: structures are never unmade.
        let own = unsafe { thread.as_ref() };
        self.vacant.set(own.next_vacant.get());
        self.used.set(self.used.get() + 1);
        own.vacant.set(false);
        own.presence.arrive();
        Some(thread)
    }

    /// Looks at some structures, beginning where the last was found: the next to end without a word may well be the one
    /// that has it now. Else at other ones each time, so that none is looked at often. Under the lock.
    fn find_gone(&self) -> Option<NonNull<Thread>> {
        let here = Process::current();
        for _ in 0..SUSPECTS {
            let next = self.suspect.get();
            let next = if next.is_null() { self.all.get() } else { next };
            let thread = NonNull::new(next.cast_mut())?;
            self.suspect.set(next);
            // SAFETY: structures are never unmade; the links are written under the lock.
            let own = unsafe { thread.as_ref() };
            if own.presence.is_gone(here) {
                own.presence.arrive();
                return Some(thread);
            }
            self.suspect.set(own.next.get());
        }
        None
    }

    /// Enters a new structure, which the caller uses.
    pub fn add(&self, thread: NonNull<Thread>) {
        let _guard = self.lock.lock();
        // SAFETY: it will never be unmade.
        let own = unsafe { thread.as_ref() };
        own.next.set(self.all.get());
        own.presence.arrive();
        self.all.set(thread.as_ptr());
        self.made.set(self.made.get() + 1);
        self.used.set(self.used.get() + 1);
    }

    /// Takes a structure back that the caller uses no more.
    pub fn give(&self, thread: NonNull<Thread>) {
        let _guard = self.lock.lock();
        // SAFETY: structures are never unmade.
        let own = unsafe { thread.as_ref() };
        self.make_vacant(own);
        self.used.set(self.used.get() - 1);
    }

    /// Takes a vacant structure that has something in it, to be emptied and [given](Self::give) back.
    pub fn take_laden(&self) -> Option<&Thread> {
        let _guard = self.lock.lock();
        let mut link = &self.vacant;
        // SAFETY: structures are never unmade; the links are used under the lock.
        while let Some(thread) = unsafe { link.get().as_ref() } {
            if thread.laden.replace(false) {
                link.set(thread.next_vacant.get());
                thread.vacant.set(false);
                self.used.set(self.used.get() + 1);
                return Some(thread);
            }
            link = &thread.next_vacant;
        }
        None
    }

    /// Under the lock.
    fn make_vacant(&self, thread: &Thread) {
        thread.presence.leave();
        thread.vacant.set(true);
        thread.next_vacant.set(self.vacant.get());
        self.vacant.set(thread);
    }

    /// In the child of a fork, with the lock held: every structure but the caller's own is emptied and vacant. Says how
    /// many caches of pages are still in use, 0 or 1; `forget` takes the others, and `free` the runs on shelves.
    #[cfg_attr(
        not(feature = "std"),
        allow(dead_code, reason = "for fork, which needs an operating system")
    )]
    pub fn bereave(
        &self,
        spans: &Spans,
        is_own: impl Fn(&Thread) -> bool,
        mut forget: impl FnMut(usize),
        mut free: impl FnMut(PageRun),
    ) -> usize {
        let (mut next, mut cached) = (self.all.get(), 0);
        self.vacant.set(ptr::null());
        self.used.set(0);
        // SAFETY: structures are never unmade; `next` is written under the lock. Their users, who alone might touch
        // them, do not exist here.
        while let Some(thread) = unsafe { next.as_ref() } {
            next = thread.next.get();
            if is_own(thread) {
                thread.presence.arrive();
                self.used.set(1);
                cached += usize::from(thread.cache().is_some());
                continue;
            }
            if !thread.vacant.get() {
                for magazine in &thread.magazines {
                    // Not looked at: it may be half changed.
                    let _lost = (magazine.take_spare(), magazine.empty());
                }
            }
            thread.shelf.clear(spans, &mut free);
            if let Some(cache) = thread.cache() {
                thread.set_cache(None);
                forget(cache);
            }
            thread.owner.clear();
            self.make_vacant(thread);
        }
        cached
    }

    /// Threads that use a structure, and structures.
    pub fn counts(&self) -> (usize, usize) {
        let _guard = self.lock.lock();
        (self.used.get(), self.made.get())
    }

    /// Every structure, used or not. Only the counts of its magazines may be read.
    pub fn for_each(&self, visit: impl FnMut(&Thread)) {
        self.hold_all().for_each(visit);
    }

    /// The same, for several rounds in which none is added, taken or given.
    pub fn hold_all(&self) -> Registered<'_> {
        Registered {
            register: self,
            _guard: self.lock.lock(),
        }
    }
}

/// All structures, while nobody else may add, take or give one.
#[derive(Debug)]
pub struct Registered<'a> {
    register: &'a Register,
    _guard: Guard<'a>,
}

impl Registered<'_> {
    /// Every structure, used or not. Only the counts of its magazines may be read, but by who has barred it.
    pub fn for_each(&self, mut visit: impl FnMut(&Thread)) {
        let mut next = self.register.all.get();
        // SAFETY: structures are never unmade; `next` is written under the lock.
        while let Some(thread) = unsafe { next.as_ref() } {
            visit(thread);
            next = thread.next.get();
        }
    }
}
