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
//! **Quick.** Work on a stack that calls no other code needs no announcement: the stack's top ([`Stake`]) shows all of
//! it that a seizer must know.
//!
//! ```text
//!   user pops    old := top ── top := old − 1 ── light fence ── key mine? ── old > floor? ── takes the entry at old
//!   user pushes  key mine? ── below the limit? ── writes the entry above top ── top := that entry
//!   seizer       key := SEIZED ── heavy fence ── seen := top ── takes the entries up to seen
//!                └─ floor := seen, limit below ── key := mine
//! ```
//!
//! When the heavy fence passes through the user, one of its calls may be past its look at the key. If that is a pop,
//! its top is already lowered, so the entry that it takes is above `seen`. If it is a push, the entry that it writes is
//! above `seen` too. It may finish whenever it likes, even after the seizer has gone: all that it still needs is the
//! stack's memory above `seen`, which the seizer therefore leaves in place. Every later call is refused, until the key
//! is back; from then on it finds the floor raised. A pop that is refused puts the top back. A seizer that looks in
//! between misses one entry, which stays where it is.
//!
//! A pop compares with the floor after it has asked for the key, because what it read before may predate a seizure that
//! has come and gone. And only the user writes the top, since it could write an old value back.
//!
//! (Once both announced themselves by a bit in the top: a store and two instructions more for each. A pair of 64 B took
//! 1.1 of the time; `docs/measurements.md`.)
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

use super::{AtomicPtr, AtomicU16, AtomicU32, AtomicUsize, Ordering, fence_heavy, fence_light};

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
    stays: AtomicU16,
    /// A note of the user's for itself: where it was refused last (`global/inline.rs`).
    refused: AtomicU16,
}

/// The top of a stack that its user changes by the quick way.
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

    /// The top, for its user.
    #[inline(always)]
    pub fn get(&self) -> *mut T {
        // Relaxed: what the caller wrote itself, or, if it is not the user, a snapshot that it does not follow.
        self.0.load(Ordering::Relaxed)
    }

    /// The user begins to pop: lowers the top by one entry; returns what it was. After this the user
    /// [asks](Owner::admits) whether it may, then whether there is an entry; if either is refused, it must
    /// [set](Self::set) the top back.
    #[inline(always)]
    pub fn lower(&self) -> *mut T {
        // Relaxed: there is one writer, or many of which none is admitted. Release: the seizer sees the entries up to
        // there; partner: `seen`. The fence keeps the store before the load in `admits`, as in `Owner::enter`; partner:
        // `fence_heavy` in `seize`.
        let old = self.0.load(Ordering::Relaxed);
        self.0.store(old.wrapping_sub(1), Ordering::Release);
        fence_light();
        old
    }

    /// The user sets the top: to an entry that it has pushed, or back.
    #[inline(always)]
    pub fn set(&self, top: *mut T) {
        // Release: the seizer sees the entries up to there; partner: `seen`.
        self.0.store(top, Ordering::Release);
    }

    /// The top, for a seizer, which should ask once: the user may meanwhile pop in vain. The entries up to there stay
    /// as they are until the seizer lets go.
    pub fn seen(&self) -> *mut T {
        // Acquire: pairs with the release of `set` and `lower`.
        self.0.load(Ordering::Acquire)
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

    /// Where the note of a refusal is, of two bytes.
    pub const REFUSED: usize = offset_of!(Self, refused);

    /// That note.
    pub fn refused(&self) -> u16 {
        // Relaxed: what the caller wrote itself.
        self.refused.load(Ordering::Relaxed)
    }

    /// Takes it back.
    #[cfg(test)]
    pub fn forget_refusal(&self) {
        // Relaxed: as above.
        self.refused.store(0, Ordering::Relaxed);
    }

    /// An owner with the key `key`, and no user at work. 3 is not a valid key.
    #[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
    #[must_use]
    pub const fn new(key: usize) -> Self {
        Self {
            key: AtomicUsize::new(key),
            at_work: AtomicU32::new(0),
            stays: AtomicU16::new(0),
            refused: AtomicU16::new(0),
        }
    }

    /// An owner with the key `key`. (A checker's atomics have no `const` constructor.)
    #[cfg(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))]
    #[must_use]
    pub fn new(key: usize) -> Self {
        Self {
            key: AtomicUsize::new(key),
            at_work: AtomicU32::new(0),
            stays: AtomicU16::new(0),
            refused: AtomicU16::new(0),
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

    /// Whether the key is this one and no thread is emptying the structure: asked before a push, and after
    /// [`Stake::lower`].
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
            .store(self.stays.load(Ordering::Relaxed).into(), Ordering::Release);
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

    /// Sets the key. Only for a thread with exclusive access, or for one that nobody else gives this key, while it is
    /// nobody's (`bias.rs`).
    pub fn set(&self, key: usize) {
        // Relaxed: no other thread has access yet; or those that have it only compare the key with theirs.
        self.key.store(key, Ordering::Relaxed);
    }

    /// Marks no user as at work: for the child of a fork, which does not have that thread.
    pub fn clear(&self) {
        // Relaxed, twice: the child has one thread.
        self.at_work.store(0, Ordering::Relaxed);
        self.stays.store(0, Ordering::Relaxed);
    }
}

/// Calls `empty` for everything that `all` visits and whose user is not at work, while that user is barred, and `miss`
/// for the others, which their users may be changing. `all` must visit the same things all three times. Returns whether
/// this was done: on a system without the heavy fence it was not, and nothing has happened.
///
/// Of a stack with a [`Stake`], `empty` takes the entries up to where it has [seen](Stake::seen) the top, raises the
/// floor to there, and lowers the limit. The words of these entries are its own then; it does not write the top, or the
/// entry above. For other threads' calls that may be going on meanwhile, floor and limit are atomic.
///
/// One seizure at a time. Two system calls, some microseconds.
pub fn seize<T: Owned>(all: impl Fn(&mut dyn FnMut(&T)), mut empty: impl FnMut(&T), mut miss: impl FnMut(&T)) -> bool {
    all(&mut |one| one.owner().bar());
    let fenced = fence_heavy();
    if fenced {
        all(&mut |one| {
            if one.owner().is_left() {
                empty(one);
            } else {
                miss(one);
            }
        });
    }
    all(&mut |one| one.owner().unbar(one.key()));
    fenced
}
