//! Who uses which thread's structure: the register of a heap.
//!
//! ```text
//!   all    ──▶ thread ──▶ thread ──▶ thread        every one ever made, none is ever unmade
//!   vacant ──────────────▶ thread                  those nobody uses: the next thread gets the last left
//!                             laden                … with slots in it
//! ```
//!
//! One lock guards it all: the lists and every structure's [`Listing`]. A thread takes it when it begins and when it
//! ends. Who goes his [`Rounds`], to empty structures, takes it for some of them at a time, and the classes' locks
//! under it; a fork takes those first. So there is a right to rounds, a lock outside them all, which a fork takes
//! before.
//!
//! Who seizes visits every structure, whoever has it: so who takes one still [enters](crate::sync::Owner::enter) it, or
//! a magazine by its [`Stake`](crate::sync::Stake), before he touches what is in it.
//!
//! A thread that ends without a word (see `presence.rs`) leaves its structure as it is, and who needs one and finds
//! none vacant looks at some of the others for such: it takes it with all that is in it.
//!
//! Worked: ten thousand threads, four at a time. The first four find nothing and add a structure each; when one ends,
//! its structure is vacant, and laden with the few slots that are left in it; the fifth thread takes it as it is. The
//! cost is a lock and two stores, and two system calls for presence.

use core::cell::Cell;
use core::ptr::{self, NonNull};

use crate::sync::{AtomicU32, Guard, Lock, Ordering, Owned};

use super::presence::{Presence, Process};

/// A structure's place in the register. Only under the register's lock. All-zero bytes: in no list, not vacant.
#[derive(Debug)]
pub struct Listing<T> {
    next: Cell<*const T>,
    next_vacant: Cell<*const T>,
    /// Whether nobody uses it.
    vacant: Cell<bool>,
    /// Whether who used it last has left something in it. While somebody uses it, his.
    laden: Cell<bool>,
    /// The user's word that it is there.
    presence: Presence,
}

impl<T> Listing<T> {
    /// In no list.
    #[allow(
        dead_code,
        clippy::new_without_default,
        reason = "structures lie in zeroed memory, but in models"
    )]
    pub fn new() -> Self {
        Self {
            next: Cell::new(ptr::null()),
            next_vacant: Cell::new(ptr::null()),
            vacant: Cell::new(false),
            laden: Cell::new(false),
            presence: Presence::default(),
        }
    }

    /// Says that something is left in the structure. By its user.
    pub fn load(&self) {
        self.laden.set(true);
    }

    /// Whether it is vacant and has something in it; not any more. With the register held.
    pub fn unload(&self) -> bool {
        self.vacant.get() && self.laden.replace(false)
    }

    /// Whether nobody uses it. With the register held.
    pub fn is_vacant(&self) -> bool {
        self.vacant.get()
    }
}

/// What the register is of.
pub trait Listed: Owned {
    /// Its place there.
    fn listing(&self) -> &Listing<Self>
    where
        Self: Sized;
}

/// How many structures are looked at for one whose user has gone, before one is made: ~100 ns each.
const SUSPECTS: usize = 8;

/// All threads of a heap.
#[derive(Debug)]
pub struct Register<T> {
    pub(super) lock: Lock,
    /// The right to rounds: see there. Outside the classes' locks.
    pub(super) rounds: Lock,
    /// Rounds begun in which everything is emptied.
    begun: AtomicU32,
    /// Below: only under the lock.
    /// Where the next round by the piece goes on; null: at the first.
    next: Cell<*const T>,
    all: Cell<*const T>,
    /// Where to look next for one whose user has gone.
    suspect: Cell<*const T>,
    vacant: Cell<*const T>,
    made: Cell<usize>,
    used: Cell<usize>,
}

// SAFETY: the cells are used under the register's lock only; so are the listings inside the structures they lead to.
// What else is in a structure is touched by who has entered it as its owner (`T` is `Owned`: one at a time, each seeing
// what the last one did) or has seized it; what hangs on a `Stake` by who has been admitted to that, or by who has
// seized the structure and found it left. Everybody else reads atomics. Who takes a structure out of the register is
// the only one to be let in until he gives it back.
unsafe impl<T: Listed> Send for Register<T> {}
// SAFETY: as above.
unsafe impl<T: Listed> Sync for Register<T> {}

impl<T: Listed> Register<T> {
    /// No threads.
    #[allow(clippy::new_without_default, reason = "public in models only")]
    pub fn new() -> Self {
        Self {
            lock: Lock::new(),
            rounds: Lock::new(),
            begun: AtomicU32::new(0),
            next: Cell::new(ptr::null()),
            all: Cell::new(ptr::null()),
            suspect: Cell::new(ptr::null()),
            vacant: Cell::new(ptr::null()),
            made: Cell::new(0),
            used: Cell::new(0),
        }
    }

    /// A structure that nobody uses, for the caller to use: a vacant one, or one whose user has ended without a word;
    /// with what is still in it.
    pub fn take(&self) -> Option<NonNull<T>> {
        let _guard = self.lock.lock();
        let Some(thread) = NonNull::new(self.vacant.get().cast_mut()) else {
            return self.find_gone();
        };
        // SAFETY: structures are never unmade.
        let own = unsafe { thread.as_ref() }.listing();
        self.vacant.set(own.next_vacant.get());
        self.used.set(self.used.get() + 1);
        own.vacant.set(false);
        own.presence.arrive();
        Some(thread)
    }

    /// Looks at some structures, beginning where the last was found: the next to end without a word may well be the one
    /// that has it now. Else at other ones each time, so that none is looked at often. Under the lock.
    fn find_gone(&self) -> Option<NonNull<T>> {
        let here = Process::current();
        for _ in 0..SUSPECTS {
            let next = self.suspect.get();
            let next = if next.is_null() { self.all.get() } else { next };
            let thread = NonNull::new(next.cast_mut())?;
            self.suspect.set(next);
            // SAFETY: structures are never unmade; the links are written under the lock.
            let own = unsafe { thread.as_ref() }.listing();
            if own.presence.is_gone(here) {
                own.presence.arrive();
                return Some(thread);
            }
            self.suspect.set(own.next.get());
        }
        None
    }

    /// Enters a new structure, which the caller uses.
    pub fn add(&self, thread: NonNull<T>) {
        let _guard = self.lock.lock();
        // SAFETY: it will never be unmade.
        let own = unsafe { thread.as_ref() }.listing();
        own.next.set(self.all.get());
        own.presence.arrive();
        self.all.set(thread.as_ptr());
        self.made.set(self.made.get() + 1);
        self.used.set(self.used.get() + 1);
    }

    /// Takes a structure back that the caller uses no more.
    pub fn give(&self, thread: NonNull<T>) {
        let _guard = self.lock.lock();
        // SAFETY: structures are never unmade.
        self.make_vacant(unsafe { thread.as_ref() });
        self.used.set(self.used.get() - 1);
    }

    /// Takes a vacant structure that has something in it, to be emptied and [given](Self::give) back.
    pub fn take_laden(&self) -> Option<&T> {
        let _guard = self.lock.lock();
        let mut link = &self.vacant;
        // SAFETY: structures are never unmade; the links are used under the lock.
        while let Some(thread) = unsafe { link.get().as_ref() } {
            let own = thread.listing();
            if own.laden.replace(false) {
                link.set(own.next_vacant.get());
                own.vacant.set(false);
                self.used.set(self.used.get() + 1);
                return Some(thread);
            }
            link = &own.next_vacant;
        }
        None
    }

    /// Under the lock.
    fn make_vacant(&self, thread: &T) {
        let own = thread.listing();
        own.presence.leave();
        own.vacant.set(true);
        own.next_vacant.set(self.vacant.get());
        self.vacant.set(thread);
    }

    /// In the child of a fork, with the lock held: every structure but the caller's own goes to `bereave`, and is
    /// vacant. Their users, who alone might touch them, do not exist there. The caller's own, if it is in here.
    #[cfg_attr(
        not(feature = "std"),
        allow(dead_code, reason = "for fork, which needs an operating system")
    )]
    pub fn bereave(&self, is_own: impl Fn(&T) -> bool, mut bereave: impl FnMut(&T)) -> Option<&T> {
        let mut own = None;
        self.vacant.set(ptr::null());
        self.used.set(0);
        self.visit(|thread| {
            if is_own(thread) {
                thread.listing().presence.arrive();
                self.used.set(1);
                own = Some(thread);
            } else {
                bereave(thread);
                self.make_vacant(thread);
            }
        });
        own
    }

    /// Threads that use a structure, and structures.
    pub fn counts(&self) -> (usize, usize) {
        let _guard = self.lock.lock();
        (self.used.get(), self.made.get())
    }

    /// Every structure, used or not. Only the counts of its magazines may be read.
    pub fn for_each(&self, visit: impl FnMut(&T)) {
        self.hold_all().for_each(visit);
    }

    /// The same, for several rounds in which none is added, taken or given.
    pub fn hold_all(&self) -> Registered<'_, T> {
        let guard = self.lock.lock();
        Registered {
            first: self.all.get(),
            behind: ptr::null(),
            guard,
        }
    }

    /// How many rounds have been begun in which everything is emptied. Who finds more of them later, when he has the
    /// right to rounds, need not make one for what he knew of now.
    pub fn begun(&self) -> u32 {
        // Release, and no mere load: pairs with the acquire of `Rounds::begin`. A round that is counted behind this
        // sees what we know of.
        self.begun.fetch_add(0, Ordering::Release)
    }

    /// The right to go round the structures, as soon as nobody else does.
    pub fn rounds(&self) -> Rounds<'_, T> {
        self.with_right(self.rounds.lock())
    }

    /// The same, if nobody does.
    pub fn try_rounds(&self) -> Option<Rounds<'_, T>> {
        Some(self.with_right(self.rounds.try_lock()?))
    }

    /// The same, if it can be had within so many milliseconds.
    pub fn rounds_within(&self, milliseconds: u32) -> Option<Rounds<'_, T>> {
        Some(self.with_right(self.rounds.lock_within(milliseconds)?))
    }

    fn with_right<'a>(&'a self, right: Guard<'a>) -> Rounds<'a, T> {
        Rounds {
            register: self,
            _right: right,
        }
    }

    /// Under the lock.
    fn visit<'a>(&'a self, visit: impl FnMut(&'a T)) {
        // SAFETY: under the lock, from the first.
        unsafe { visit_between(self.all.get(), ptr::null(), visit) };
    }
}

/// Those from `first` until `behind`, or the last.
///
/// # Safety
///
/// `first` is null or in the register, whose lock the caller has.
unsafe fn visit_between<'a, T: Listed + 'a>(first: *const T, behind: *const T, mut visit: impl FnMut(&'a T)) {
    let mut next = first;
    while next != behind {
        // SAFETY: structures are never unmade; `next` is written under the lock.
        let Some(thread) = (unsafe { next.as_ref() }) else {
            return;
        };
        next = thread.listing().next.get();
        visit(thread);
    }
}

/// The right to go round all structures, taking the classes' locks on the way.
#[derive(Debug)]
pub struct Rounds<'a, T> {
    register: &'a Register<T>,
    _right: Guard<'a>,
}

impl<T: Listed> Rounds<'_, T> {
    /// Counts a round in which everything is emptied.
    pub fn begin(&self) {
        // Acquire: pairs with the release of `Register::begun`.
        self.register.begun.fetch_add(1, Ordering::Acquire);
    }

    /// All structures, `most` at a time, until `visit` says that it is enough. Who begins or ends goes in between, so
    /// that it waits for a part of them at the most. Those that are added meanwhile are not among them.
    pub fn go(&self, most: usize, mut visit: impl FnMut(&Registered<'_, T>) -> bool) {
        let mut part = self.register.hold_all();
        while !part.first.is_null() {
            part.end_after(most);
            if !visit(&part) {
                return;
            }
            (part.first, part.guard) = (part.behind, part.guard.after_others());
        }
    }

    /// Structures in a row, `most` at the most: those behind the ones that were visited so last, or the first.
    pub fn go_on(&self, most: usize, visit: impl FnOnce(&Registered<'_, T>)) {
        let mut part = self.register.hold_all();
        let next = &self.register.next;
        if !next.get().is_null() {
            part.first = next.get();
        }
        part.end_after(most);
        next.set(part.behind);
        visit(&part);
    }
}

/// All structures, or some in a row, while nobody else may add, take or give one.
#[derive(Debug)]
pub struct Registered<'a, T> {
    first: *const T,
    behind: *const T,
    guard: Guard<'a>,
}

impl<T: Listed> Registered<'_, T> {
    /// Makes it the first `most`.
    fn end_after(&mut self, most: usize) {
        self.behind = self.first;
        for _ in 0..most {
            // SAFETY: structures are never unmade; `next` is written under the lock.
            let Some(thread) = (unsafe { self.behind.as_ref() }) else {
                break;
            };
            self.behind = thread.listing().next.get();
        }
    }

    /// Each of them, used or not. Only the counts of its magazines may be read, but by who has barred it.
    pub fn for_each(&self, visit: impl FnMut(&T)) {
        // SAFETY: ours is the lock, and they are of this register.
        unsafe { visit_between(self.first, self.behind, visit) };
    }
}
