//! The register of a heap: which thread uses which structure.
//!
//! ```text
//!   all    ──▶ thread ──▶ thread ──▶ thread        every one ever made, none is ever destroyed
//!   vacant ──────────────▶ thread                  those nobody uses: the next thread gets the last left
//!                             laden                … with slots in it
//! ```
//!
//! One lock guards all of it: the lists and every structure's [`Listing`]. A thread takes it when it begins and when
//! it ends. A thread that empties structures makes [`Rounds`]: it takes the lock for some structures at a time, and
//! class locks under it. A fork takes class locks first. So that the two cannot deadlock, both first take the rounds
//! lock, which is outside all of these.
//!
//! A seizer visits every structure, in use or not, but for those that are vacant and have been emptied. So a thread
//! that takes a structure must still [enter](crate::sync::Owner::enter) it, or a magazine by its
//! [`Stake`](crate::sync::Stake), before it touches what is inside.
//!
//! A structure that is being emptied is not vacant meanwhile, but keeps its place in that list, which `take` passes
//! over.
//!
//! A thread that ends without notice (see `presence.rs`) leaves its structure as it is. A thread that finds no vacant
//! structure checks some of the others for such a dead user, and takes over the structure with everything in it.
//!
//! Worked: ten thousand threads, four at a time. The first four find nothing and add a structure each. When one of
//! them ends, its structure is vacant, and laden with the few slots left in it; the fifth thread takes it as it is.
//! The cost is one lock and two stores, and two system calls for presence.

use core::cell::Cell;
use core::ptr::{self, NonNull};

use crate::sync::{AtomicU32, Guard, Lock, Ordering, Owned};

use super::presence::{Caller, Presence};
use super::resting::Resting;

/// Whether a structure is vacant, and in the list of those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Place {
    /// A thread uses it, or empties it, and it is not in the list; and all-zero bytes.
    Used = 0,
    /// Nobody uses it. It is in the list.
    Vacant,
    /// It is being emptied, and is in the list.
    InHand,
}

/// A structure's place in the register. Used only under the register's lock. All-zero bytes: in no list, not vacant.
#[derive(Debug)]
pub struct Listing<T> {
    next: Cell<*const T>,
    next_vacant: Cell<*const T>,
    place: Cell<Place>,
    /// Whether the last user left something in it. While it is in use, only its user accesses this.
    laden: Cell<bool>,
    /// What was seen of what its user keeps.
    resting: Resting,
    /// Identifies the user.
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
            place: Cell::new(Place::Used),
            laden: Cell::new(false),
            resting: Resting::default(),
            presence: Presence::default(),
        }
    }

    /// Notes that something is left in the structure. Called by its user.
    pub fn load(&self) {
        self.laden.set(true);
    }

    /// Whether it is vacant and laden; clears the latter. With the register's lock held.
    pub fn unload(&self) -> bool {
        self.is_vacant() && self.laden.replace(false)
    }

    /// Which parts of what its user keeps have been the same lately. With the register's lock held.
    pub fn resting(&self) -> &Resting {
        &self.resting
    }

    /// Whether nobody uses it, nor has left anything in it. With the register's lock held.
    fn is_spent(&self) -> bool {
        self.is_vacant() && !self.laden.get()
    }

    /// Whether nobody uses it. With the register's lock held.
    pub fn is_vacant(&self) -> bool {
        self.place.get() == Place::Vacant
    }
}

/// What a register lists.
pub trait Listed: Owned {
    /// Its place in the register.
    fn listing(&self) -> &Listing<Self>
    where
        Self: Sized;
}

/// How many structures are looked at for one that is laden before threads that begin or end get the lock.
const LOOKS: u32 = 64;

/// How many structures are checked for a dead user before a new one is made: ~100 ns each.
const SUSPECTS: usize = 8;

/// All threads of a heap.
#[derive(Debug)]
pub struct Register<T> {
    pub(super) lock: Lock,
    /// The rounds lock, outside the class locks: see above.
    pub(super) rounds: Lock,
    /// How many rounds that empty everything have begun.
    begun: AtomicU32,
    /// Below: only under the lock. The structure at which the next partial round goes on; null: the first.
    next: Cell<*const T>,
    all: Cell<*const T>,
    /// The structure to check next for a dead user.
    suspect: Cell<*const T>,
    vacant: Cell<*const T>,
    made: Cell<usize>,
    used: Cell<usize>,
}

// SAFETY: the cells are used only under the register's lock; so are the listings inside the structures they lead to.
// The rest of a structure is touched only by a thread that has entered it as its owner (`T` is `Owned`: one at a time,
// each seeing what the last one did) or has seized it; the entries of a stack with a `Stake` by a thread that has been
// admitted to it, and, up to the top that it has seen, by one that has seized the structure. All other threads read
// atomics only. A thread that takes a structure out of the register is the only one admitted until it gives the
// structure back.
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

    /// Takes a structure that nobody uses, for the caller: a vacant one, or one whose user has ended without notice.
    /// With everything still in it. Returns also whether it is the latter.
    pub fn take(&self, caller: Caller) -> Option<(NonNull<T>, bool)> {
        let _guard = self.lock.lock();
        let Some(thread) = self.take_vacant() else {
            return Some((self.find_gone(caller)?, true));
        };
        self.used.set(self.used.get() + 1);
        thread.listing().presence.arrive(caller);
        Some((NonNull::from(thread), false))
    }

    /// Takes the first vacant structure off the list, and with it those before it that are being emptied: they come
    /// back when they are given. Under the lock.
    fn take_vacant(&self) -> Option<&T> {
        // SAFETY: structures are never destroyed; the links are written under the lock.
        while let Some(thread) = unsafe { self.vacant.get().as_ref() } {
            let own = thread.listing();
            self.vacant.set(own.next_vacant.get());
            if own.place.replace(Place::Used) == Place::Vacant {
                return Some(thread);
            }
        }
        None
    }

    /// Checks some structures for a dead user, starting where the last one was found: the next thread to end without
    /// notice may well be the one that took that structure. Otherwise continues with others each time, so that none is
    /// checked often. Under the lock.
    fn find_gone(&self, caller: Caller) -> Option<NonNull<T>> {
        for _ in 0..SUSPECTS {
            let next = self.suspect.get();
            let next = if next.is_null() { self.all.get() } else { next };
            let thread = NonNull::new(next.cast_mut())?;
            self.suspect.set(next);
            // SAFETY: structures are never destroyed; the links are written under the lock.
            let own = unsafe { thread.as_ref() }.listing();
            if own.presence.is_gone(caller) {
                own.presence.arrive(caller);
                return Some(thread);
            }
            self.suspect.set(own.next.get());
        }
        None
    }

    /// Adds a new structure, which the caller uses.
    pub fn add(&self, thread: NonNull<T>, caller: Caller) {
        let _guard = self.lock.lock();
        // SAFETY: it will never be destroyed.
        let own = unsafe { thread.as_ref() }.listing();
        own.next.set(self.all.get());
        own.presence.arrive(caller);
        self.all.set(thread.as_ptr());
        self.made.set(self.made.get() + 1);
        self.used.set(self.used.get() + 1);
    }

    /// Takes back a structure that the caller no longer uses.
    pub fn give(&self, thread: NonNull<T>) {
        let _guard = self.lock.lock();
        // SAFETY: structures are never destroyed.
        self.make_vacant(unsafe { thread.as_ref() });
        self.used.set(self.used.get() - 1);
    }

    /// Takes a vacant structure that is laden, to be emptied and [given](Self::give) back: the next one behind `last`,
    /// which was taken before, or of all. So whoever takes one after the other looks at each structure once, and comes
    /// to an end while others go on leaving something.
    pub fn take_laden(&self, last: Option<&T>) -> Option<&T> {
        let mut guard = self.lock.lock();
        let (mut next, mut looks) = (last.map_or(self.all.get(), |last| last.listing().next.get()), 0);
        // SAFETY: structures are never destroyed; the links are written under the lock.
        while let Some(thread) = unsafe { next.as_ref() } {
            let own = thread.listing();
            looks += 1;
            if looks % LOOKS == 0 {
                guard = guard.after_others();
            }
            if own.unload() {
                // It keeps its place in the list of vacant ones: to take it out, all before it would be looked at.
                own.place.set(Place::InHand);
                self.used.set(self.used.get() + 1);
                return Some(thread);
            }
            next = own.next.get();
        }
        None
    }

    /// Makes a structure vacant. Under the lock.
    fn make_vacant(&self, thread: &T) {
        let own = thread.listing();
        own.presence.leave();
        // The next user keeps something else.
        own.resting.forget();
        if own.place.replace(Place::Vacant) == Place::Used {
            own.next_vacant.set(self.vacant.get());
            self.vacant.set(thread);
        }
    }

    /// In the child of a fork, with the lock held: passes every structure but the caller's own to `bereave` and makes
    /// it vacant. Their users, who alone might touch them, do not exist in the child. Returns the caller's own, if it
    /// is listed.
    pub fn bereave(&self, is_own: impl Fn(&T) -> bool, mut bereave: impl FnMut(&T)) -> Option<&T> {
        let mut own = None;
        self.vacant.set(ptr::null());
        self.used.set(0);
        self.visit(|thread| {
            let listing = thread.listing();
            if is_own(thread) {
                listing.place.set(Place::Used);
                listing.presence.arrive(Caller::current());
                self.used.set(1);
                own = Some(thread);
            } else {
                bereave(thread);
                // The list begins anew.
                listing.place.set(Place::Used);
                self.make_vacant(thread);
            }
        });
        own
    }

    /// How many structures are in use, and how many there are.
    pub fn counts(&self) -> (usize, usize) {
        let _guard = self.lock.lock();
        (self.used.get(), self.made.get())
    }

    /// Visits every structure, used or not. Only the counts of its magazines may be read.
    pub fn for_each(&self, visit: impl FnMut(&T)) {
        self.hold_all().for_each(visit);
    }

    /// Holds all structures, for several visits between which none is added, taken or given.
    pub fn hold_all(&self) -> Registered<'_, T> {
        let guard = self.lock.lock();
        Registered {
            first: self.all.get(),
            behind: ptr::null(),
            guard,
        }
    }

    /// How many rounds that empty everything have begun. If a thread later holds the rounds lock and finds that the
    /// number has grown, a round has covered everything it knew of at this call, and it need not make one itself.
    pub fn begun(&self) -> u32 {
        // Release, and so not a mere load: pairs with the acquire of `Rounds::begin`. A round counted after this sees
        // what the caller knows of.
        self.begun.fetch_add(0, Ordering::Release)
    }

    /// Takes the rounds lock, waiting for its holder.
    pub fn rounds(&self) -> Rounds<'_, T> {
        self.with_right(self.rounds.lock())
    }

    /// Takes the rounds lock, if nobody holds it.
    pub fn try_rounds(&self) -> Option<Rounds<'_, T>> {
        Some(self.with_right(self.rounds.try_lock()?))
    }

    /// Takes the rounds lock, if it can be had within `milliseconds`.
    pub fn rounds_within(&self, milliseconds: u32) -> Option<Rounds<'_, T>> {
        Some(self.with_right(self.rounds.lock_within(milliseconds)?))
    }

    fn with_right<'a>(&'a self, right: Guard<'a>) -> Rounds<'a, T> {
        Rounds {
            register: self,
            _right: right,
        }
    }

    /// Visits every structure. Under the lock.
    fn visit<'a>(&'a self, visit: impl FnMut(&'a T)) {
        // SAFETY: under the lock, from the first.
        unsafe { visit_between(self.all.get(), ptr::null(), visit) };
    }
}

/// Visits the structures from `first` until before `behind`, or to the last.
///
/// # Safety
///
/// `first` is null or in the register, whose lock the caller holds.
unsafe fn visit_between<'a, T: Listed + 'a>(first: *const T, behind: *const T, mut visit: impl FnMut(&'a T)) {
    let mut next = first;
    while next != behind {
        // SAFETY: structures are never destroyed; `next` is written under the lock.
        let Some(thread) = (unsafe { next.as_ref() }) else {
            return;
        };
        next = thread.listing().next.get();
        visit(thread);
    }
}

/// The right to visit all structures and take class locks meanwhile.
#[derive(Debug)]
pub struct Rounds<'a, T> {
    register: &'a Register<T>,
    _right: Guard<'a>,
}

impl<T: Listed> Rounds<'_, T> {
    /// Counts a round that empties everything.
    pub fn begin(&self) {
        // Acquire: pairs with the release of `Register::begun`.
        self.register.begun.fetch_add(1, Ordering::Acquire);
    }

    /// Visits all structures, `most` at a time, until `visit` returns `false`. Threads that begin or end get the lock
    /// in between, so that they wait for one part at most. Structures added meanwhile are not visited.
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

    /// Visits up to `most` structures in a row: those behind the ones visited last by this call, or the first ones.
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

/// All structures, or some in a row, while no other thread may add, take or give one.
#[derive(Debug)]
pub struct Registered<'a, T> {
    first: *const T,
    behind: *const T,
    guard: Guard<'a>,
}

impl<T: Listed> Registered<'_, T> {
    /// Limits it to its first `most` structures.
    fn end_after(&mut self, most: usize) {
        self.behind = self.first;
        for _ in 0..most {
            // SAFETY: structures are never destroyed; `next` is written under the lock.
            let Some(thread) = (unsafe { self.behind.as_ref() }) else {
                break;
            };
            self.behind = thread.listing().next.get();
        }
    }

    /// Visits each of them, used or not. Only the counts of its magazines may be read, unless the caller has barred
    /// it.
    pub fn for_each(&self, visit: impl FnMut(&T)) {
        // SAFETY: we hold the lock, and they are of this register.
        unsafe { visit_between(self.first, self.behind, visit) };
    }

    /// The same for those in which something may be: not those that nobody uses and that have been emptied. A program
    /// that had ten thousand threads once has so many of these for ever.
    pub fn for_each_holding(&self, mut visit: impl FnMut(&T)) {
        self.for_each(|thread| {
            if !thread.listing().is_spent() {
                visit(thread);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use crate::sync::Owner;

    use super::super::resting::Prints;
    use super::*;

    /// A structure that counts how often one of them is looked at.
    struct Desk<'a> {
        owner: Owner,
        listing: Listing<Self>,
        looks: &'a Cell<usize>,
    }

    impl Owned for Desk<'_> {
        fn owner(&self) -> &Owner {
            &self.owner
        }

        fn key(&self) -> usize {
            1
        }
    }

    impl Listed for Desk<'_> {
        fn listing(&self) -> &Listing<Self> {
            self.looks.set(self.looks.get() + 1);
            &self.listing
        }
    }

    fn desks(count: usize, looks: &Cell<usize>) -> Vec<Desk<'_>> {
        let desk = |_| Desk {
            owner: Owner::new(1),
            listing: Listing::new(),
            looks,
        };
        (0..count).map(desk).collect()
    }

    /// A thread ends, and leaves something.
    fn end<'a>(register: &Register<Desk<'a>>, desk: &Desk<'a>) {
        desk.listing().load();
        register.give(NonNull::from(desk));
    }

    fn with_laden<'a>(desks: &[Desk<'a>]) -> Register<Desk<'a>> {
        let register = Register::new();
        let caller = Caller::current();
        desks.iter().for_each(|desk| register.add(NonNull::from(desk), caller));
        desks.iter().for_each(|desk| end(&register, desk));
        register
    }

    /// As `empty_vacant_by_one`. Returns how many there were, of `most`.
    fn empty<'a>(register: &Register<Desk<'a>>, most: usize, mut meanwhile: impl FnMut()) -> usize {
        let (mut count, mut last) = (0, None);
        while count < most
            && let Some(desk) = register.take_laden(last)
        {
            meanwhile();
            register.give(NonNull::from(desk));
            (count, last) = (count + 1, Some(desk));
        }
        count
    }

    #[test]
    fn structures_that_hold_nothing_are_passed_over() {
        let looks = Cell::new(0);
        let desks = desks(5, &looks);
        let register = with_laden(&desks[..4]);
        register.add(NonNull::from(&desks[4]), Caller::current());
        let holding = || {
            let mut holding = Vec::new();
            let all = register.hold_all();
            all.for_each_holding(|desk| holding.extend(desks.iter().position(|other| ptr::eq(desk, other))));
            holding
        };
        assert_eq!(holding(), [4, 3, 2, 1, 0]);
        let in_hand = register.take_laden(None).unwrap();
        assert!(ptr::eq(in_hand, &desks[3]) && desks[0].listing.unload());
        assert_eq!(holding(), [4, 3, 2, 1]);
        register.give(NonNull::from(in_hand));
        assert_eq!(holding(), [4, 2, 1]);
    }

    #[test]
    fn what_rests_is_forgotten_with_its_user() {
        let looks = Cell::new(0);
        let desks = desks(1, &looks);
        let register = Register::new();
        register.add(NonNull::from(&desks[0]), Caller::current());
        let note = || desks[0].listing.resting().note(Prints::of(7, core::iter::empty()));
        while !note().any() {}
        end(&register, &desks[0]);
        assert!(register.take(Caller::current()).is_some());
        assert!(!desks[0].listing.resting().parts().any() && !note().any());
    }

    #[test]
    fn vacant_structures_are_emptied_with_a_few_looks_at_each() {
        for count in [10, 1000] {
            let looks = Cell::new(0);
            let desks = desks(count, &looks);
            let register = with_laden(&desks);
            looks.set(0);
            assert_eq!(empty(&register, usize::MAX, || ()), count);
            assert!(looks.get() <= 10 * count, "{} looks at {count}", looks.get());
            assert_eq!(register.counts(), (0, count));
        }
    }

    /// Those that had ended before are all reached.
    #[test]
    fn emptying_ends_though_threads_go_on_ending() {
        let looks = Cell::new(0);
        let desks = desks(10, &looks);
        let register = with_laden(&desks);
        let count = empty(&register, 100, || {
            let (desk, _) = register.take(Caller::current()).unwrap();
            // SAFETY: one of those above.
            end(&register, unsafe { desk.as_ref() });
        });
        assert_eq!(count, 10);
    }

    /// In the order in which they were left, whatever has been emptied.
    #[test]
    fn each_thread_gets_the_structure_left_last_and_none_that_is_being_emptied() {
        let looks = Cell::new(0);
        let desks = desks(4, &looks);
        let register = with_laden(&desks);
        let take = || register.take(Caller::current()).unwrap().0;
        let empty = register.take_laden(None).unwrap();
        let taken: Vec<_> = (0..3).map(|_| take()).collect();
        register.give(NonNull::from(empty));
        assert_eq!(take(), NonNull::from(empty));
        let rest = desks
            .iter()
            .rev()
            .map(NonNull::from)
            .filter(|&desk| desk != NonNull::from(empty));
        assert!(taken.into_iter().eq(rest));
        assert_eq!(register.counts(), (4, 4));
    }
}
