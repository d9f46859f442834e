//! Ownership of something that one thread uses all the time, and that another can empty while it is not in use.
//!
//! ```text
//!   user     at work := 1 ── light fence ── key mine? ── uses it ── at work := 0         no: at work as it was
//!                                  ╳
//!   seizer   key := SEIZED ─ heavy fence ── at work? ─── no: empties it ── key := mine   yes: leaves it alone
//! ```
//!
//! Either the user sees that it is barred, or the seizer sees the user at work. This is Dekker's algorithm made
//! asymmetric: the frequent side pays two plain stores and a comparison, the rare side a system call. The key is
//! whatever identifies the structure to its user. With several heaps in a process it is the heap's address, so one
//! comparison answers both "does it belong to this heap?" and "is it barred?".
//!
//! **Quick.** For work that changes one pointer and calls no other code, one store can be saved. The user announces
//! itself in the lowest bit of the pointer ([`Stake`]), and writing the new value withdraws the announcement.
//!
//! ```text
//!   user     old := pointer ── pointer := old, busy ── light fence ── key mine? ── pointer := new       no: := old
//!   seizer   key := SEIZED ─ heavy fence ── busy? ─── no: empties it, makes it stale ── key := mine
//! ```
//!
//! The user reads the old value before it announces itself, so that value may predate a seizure that has come and gone.
//! A seizer therefore does not write the pointer, since the user could write the old value back. It writes something
//! beside the pointer that reveals an older value as stale, and the user checks that after its entry.
//!
//! **Nested.** A user at work may try to enter again, with another key: its clock, or the source below, allocates from
//! another heap. That entry fails, and must leave the user at work. It can happen only where the user calls other code,
//! so before such calls the user declares that it [stays](Owner::stay), and a failed entry restores the state from that
//! declaration. Short work, which calls no other code, need not declare anything, and an entry need not remember the
//! previous state: one load less each time.
//!
//! A lock that one thread need not take while it is alone uses owners in the same way (`bias.rs`).
//!
//! The models explore this file as it ships (`tests/models/src/loom/`: `owner.rs`; `stake.rs`, in which a pile of
//! numbers replaces the magazine, by the rules of `object/magazine.rs`).

#![forbid(unsafe_code)]

use core::mem::offset_of;
use core::ptr;

use super::{AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence_heavy, fence_light};

/// Replaces the key while another thread empties the structure.
pub(super) const SEIZED: usize = 3;

/// Which user it belongs to, and whether that user is at work on it. All-zero bytes: no user.
#[derive(Debug)]
pub struct Owner {
    /// What the user knows it by, or [`SEIZED`].
    key: AtomicUsize,
    /// 1 while its user is at work on it.
    at_work: AtomicU32,
    /// 1 while the user, at work, calls other code.
    stays: AtomicU32,
}

/// Added to a [`Stake`]'s pointer while that is about to change: no aligned pointer has this bit.
pub const BUSY: usize = 1;

/// A pointer that its user changes by the quick way.
#[derive(Debug)]
#[repr(transparent)]
pub struct Stake<T>(AtomicPtr<T>);

impl<T> Stake<T> {
    /// Null.
    #[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
    #[must_use]
    #[allow(clippy::new_without_default, reason = "public in models only")]
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Null. (A checker's atomics have no `const` constructor.)
    #[cfg(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))]
    #[must_use]
    #[allow(clippy::new_without_default, reason = "public in models only")]
    pub fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// The user announces that it is going to change the pointer; returns the current value. After this the user
    /// [asks](Owner::admits) whether it may, then checks whether the value is stale. In any case it must
    /// [end](Self::end).
    #[inline(always)]
    pub fn begin(&self) -> *mut T {
        // Relaxed, twice: there is one writer, or many of which none is admitted. The fence keeps the store before the
        // load in `admits`, as in `Owner::enter`; partner: `fence_heavy` in `seize`.
        let value = self.0.load(Ordering::Relaxed);
        self.0.store(value.wrapping_byte_add(BUSY), Ordering::Relaxed);
        fence_light();
        value
    }

    /// Sets the pointer and withdraws the announcement. A user that was not admitted sets the old value.
    #[inline(always)]
    pub fn end(&self, value: *mut T) {
        // Release: the seizer sees what the user did; partner: `get`.
        self.0.store(value, Ordering::Release);
    }

    /// Its value; `None` while its user is about to change it, or to be turned away. The user itself always finds a
    /// value. For a seizer the value stays the same until it lets go; it should call this once, because the user may
    /// meanwhile try to enter in vain.
    pub fn get(&self) -> Option<*mut T> {
        // Acquire: pairs with the release of `end`.
        let value = self.0.load(Ordering::Acquire);
        (value.addr() & BUSY == 0).then_some(value)
    }

    /// Its value, or the old value if its user is just changing it.
    pub fn last(&self) -> *mut T {
        // Relaxed: a snapshot, which is not followed.
        self.0.load(Ordering::Relaxed).map_addr(|address| address & !BUSY)
    }

    /// Restores the old value if its user has ended while about to change it. Only for a thread with exclusive access.
    pub fn settle(&self) {
        // Relaxed: no other thread has access.
        self.0.store(self.last(), Ordering::Relaxed);
    }
}

/// Something with an owner.
pub trait Owned {
    /// The owner.
    fn owner(&self) -> &Owner;

    /// What its user knows it by.
    fn key(&self) -> usize;
}

impl Owner {
    /// Where the key is in an owner.
    pub const KEY: usize = offset_of!(Self, key);

    /// An owner with the key `key`, and no user at work. 3 is not a valid key.
    #[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
    #[must_use]
    pub const fn new(key: usize) -> Self {
        Self {
            key: AtomicUsize::new(key),
            at_work: AtomicU32::new(0),
            stays: AtomicU32::new(0),
        }
    }

    /// An owner with the key `key`. (A checker's atomics have no `const` constructor.)
    #[cfg(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))]
    #[must_use]
    pub fn new(key: usize) -> Self {
        Self {
            key: AtomicUsize::new(key),
            at_work: AtomicU32::new(0),
            stays: AtomicU32::new(0),
        }
    }

    /// The user enters, for one call. Returns whether the key is this one and no thread is emptying the structure. If
    /// so, the structure is the user's until it [leaves](Self::leave); otherwise nothing has happened. No
    /// read-modify-write.
    ///
    /// Called by one thread only (or one after another, who know when the last has ended), or on an owner whose key no
    /// caller has.
    #[inline(always)]
    pub fn enter(&self, key: usize) -> bool {
        // Relaxed: the fence after it keeps it before the load in `admits`, for a thread that passes `fence_heavy`
        // between its own store and load (`seize`): either it sees us at work, or we see its store.
        self.at_work.store(1, Ordering::Relaxed);
        fence_light();
        let ours = self.admits(key);
        if !ours {
            self.turn_back();
        }
        ours
    }

    /// Whether the key is this one and no thread is emptying the structure: to be asked after [`Stake::begin`].
    #[inline(always)]
    pub fn admits(&self, key: usize) -> bool {
        // Acquire: pairs with the release of `unbar`; what is owned is as the seizer left it.
        self.key.load(Ordering::Acquire) == key
    }

    /// Restores the state before a failed entry.
    #[inline(always)]
    fn turn_back(&self) {
        // Relaxed: one writer, which is the reader. Release: as in `leave`.
        self.at_work
            .store(self.stays.load(Ordering::Relaxed), Ordering::Release);
    }

    /// Whether the key is this one now: a look, after which the user still has to [enter](Self::enter).
    #[inline(always)]
    pub(super) fn is_for(&self, key: usize) -> bool {
        // Relaxed: only a look.
        self.key.load(Ordering::Relaxed) == key
    }

    /// The user, which has entered, is going to call other code, which may try to enter here with another key.
    pub fn stay(&self) {
        // Relaxed: as in `turn_back`.
        self.stays.store(1, Ordering::Relaxed);
    }

    /// The user, which had declared that it [stays](Self::stay), makes no more such calls, and leaves.
    pub fn go(&self) {
        // Relaxed: as in `turn_back`.
        self.stays.store(0, Ordering::Relaxed);
        self.leave();
    }

    /// The user has finished.
    #[inline(always)]
    pub fn leave(&self) {
        // Release: the seizer sees what the user did; partner: `is_left`.
        self.at_work.store(0, Ordering::Release);
    }

    /// Bars the user: it sees so before it next begins, once a heavy fence has been passed.
    pub(super) fn bar(&self) {
        // Relaxed: the fence makes it seen; partner: `enter`.
        self.key.store(SEIZED, Ordering::Relaxed);
    }

    /// After that fence: whether the user stays away, and was not at work.
    pub(super) fn is_left(&self) -> bool {
        // Acquire: pairs with the release of `leave`; what is owned is as the user left it.
        self.at_work.load(Ordering::Acquire) == 0
    }

    /// Lets the user enter again.
    fn unbar(&self, key: usize) {
        // Release: pairs with the acquire of `enter`.
        self.key.store(key, Ordering::Release);
    }

    /// Sets the key. Only for a thread with exclusive access.
    pub fn set(&self, key: usize) {
        // Relaxed: no other thread has access yet.
        self.key.store(key, Ordering::Relaxed);
    }

    /// Marks no user as at work: for the child of a fork, which does not have that thread.
    pub fn clear(&self) {
        // Relaxed, twice: the child has one thread.
        self.at_work.store(0, Ordering::Relaxed);
        self.stays.store(0, Ordering::Relaxed);
    }
}

/// Calls `empty` for everything that `all` visits and whose user is not at work, while that user is barred. `all` must
/// visit the same things all three times. Returns whether this was done: on a system without the heavy fence it was
/// not, and nothing has happened.
///
/// `empty` leaves alone what depends on a [`Stake`] that has no value. Of other stakes it reads the value once, writes
/// none, and leaves what they guard in a state by which the user recognises its value as stale.
///
/// One seizure at a time. Two system calls, some microseconds.
pub fn seize<T: Owned>(all: impl Fn(&mut dyn FnMut(&T)), mut empty: impl FnMut(&T)) -> bool {
    all(&mut |one| one.owner().bar());
    let fenced = fence_heavy();
    if fenced {
        all(&mut |one| {
            if one.owner().is_left() {
                empty(one);
            }
        });
    }
    all(&mut |one| one.owner().unbar(one.key()));
    fenced
}
