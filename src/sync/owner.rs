//! Whose something is that one thread uses all the time, and another must be able to empty while it is not used.
//!
//! ```text
//!   user     at work := 1 ── light fence ── key mine? ── uses it ── at work := 0         no: at work as it was
//!                                  ╳
//!   seizer   key := SEIZED ─ heavy fence ── at work? ─── no: empties it ── key := mine   yes: leaves it alone
//! ```
//!
//! Either the user sees that it is barred, or who seizes sees him at work: Dekker's way, in which the side that comes
//! by all the time pays two plain stores and a comparison, and the other a system call. The key is whatever the user
//! knows it by; with several heaps in a process it is the heap's address, so that one comparison answers both "is it of
//! this heap?" and "is it barred?".
//!
//! **Quick.** For work that changes one pointer and calls nobody there is a way with one store less: what he says is in
//! the pointer itself ([`Stake`]), in its lowest bit, and its new value takes it back.
//!
//! ```text
//!   user     old := pointer ── pointer := old, busy ── light fence ── key mine? ── pointer := new       no: := old
//!   seizer   key := SEIZED ─ heavy fence ── busy? ─── no: empties it, makes it stale ── key := mine
//! ```
//!
//! He read the old value before he said so: it may be one of before a seizure that has come and gone. So who empties
//! does not write the pointer - or he would write it back - but something beside it, by which a value of before is seen
//! to be stale; the user looks at that behind his entry.
//!
//! **Nested.** A user at work may come again, by another key: his clock, or the source below, allocates from another
//! heap. That fails, and must leave him at work. It happens only where he calls others, so there he says before that he
//! [stays](Owner::stay), and who comes in vain looks for that. Short work, which calls nobody, need not say it, and
//! need not remember what stood there: a load less for each.
//!
//! The models explore this file as it ships (`tests/models/src/loom/`: `owner.rs`; `stake.rs`, where a pile of numbers
//! stands for the magazine, by the rules of `object/magazine.rs`).

#![forbid(unsafe_code)]

use core::ptr;

use super::{AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence_heavy, fence_light};

/// In place of the key while somebody empties it.
const SEIZED: usize = 3;

/// Whose it is, and whether he is at work on it. All-zero bytes: nobody's.
#[derive(Debug)]
pub struct Owner {
    /// What the user knows it by, or [`SEIZED`].
    key: AtomicUsize,
    /// 1 while its user is at work on it.
    at_work: AtomicU32,
    /// 1 while he calls others from there.
    stays: AtomicU32,
}

/// What is added to a [`Stake`]'s pointer while that is about to change: nothing aligned is there.
const BUSY: usize = 1;

/// A pointer of the user's, which he changes by the quick way.
#[derive(Debug)]
pub struct Stake<T>(AtomicPtr<T>);

impl<T> Stake<T> {
    /// Null.
    #[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
    #[must_use]
    #[allow(clippy::new_without_default, reason = "public in models only")]
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// The same. (A checker's atomics have no `const` constructor.)
    #[cfg(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))]
    #[must_use]
    #[allow(clippy::new_without_default, reason = "public in models only")]
    pub fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// The user, who is going to change it, says so: what it was. He [asks](Owner::admits) behind this whether he may,
    /// then looks whether that is stale; and must [end](Self::end), in any case.
    #[inline(always)]
    pub fn begin(&self) -> *mut T {
        // Relaxed, twice: one writer, or many of whom none is admitted; the fence keeps the store before the load in
        // `admits`, as in `Owner::enter`.
        let value = self.0.load(Ordering::Relaxed);
        self.0.store(value.wrapping_byte_add(BUSY), Ordering::Relaxed);
        fence_light();
        value
    }

    /// Sets it, and says that he is done: to what it was if he was not admitted.
    #[inline(always)]
    pub fn end(&self, value: *mut T) {
        // Release: what he did is seen by who seizes; partner: `get`.
        self.0.store(value, Ordering::Release);
    }

    /// Its value; `None` while its user is about to change it, or to be turned away. To the user it always has one. To
    /// who has seized it that is what it stays until he lets go: to be asked for once, for the user may come in vain.
    pub fn get(&self) -> Option<*mut T> {
        // Acquire: pairs with the release of `end`.
        let value = self.0.load(Ordering::Acquire);
        (value.addr() & BUSY == 0).then_some(value)
    }

    /// Its value, or what it was before its user came who is there at the moment.
    pub fn last(&self) -> *mut T {
        // Relaxed: a moment's, that is not followed.
        self.0.load(Ordering::Relaxed).map_addr(|address| address & !BUSY)
    }

    /// Makes it what it was, if its user has ended while he was about to change it. By who has it to himself.
    pub fn settle(&self) {
        // Relaxed: nobody else has it.
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
    /// Of the key `key`, and nobody at work. 3 is none.
    #[cfg(not(any(all(loom, feature = "internals"), all(shuttle, feature = "internals"))))]
    #[must_use]
    pub const fn new(key: usize) -> Self {
        Self {
            key: AtomicUsize::new(key),
            at_work: AtomicU32::new(0),
            stays: AtomicU32::new(0),
        }
    }

    /// The same. (A checker's atomics have no `const` constructor.)
    #[cfg(any(all(loom, feature = "internals"), all(shuttle, feature = "internals")))]
    #[must_use]
    pub fn new(key: usize) -> Self {
        Self {
            key: AtomicUsize::new(key),
            at_work: AtomicU32::new(0),
            stays: AtomicU32::new(0),
        }
    }

    /// The user's way in, for one call: whether it is of this key, and nobody is emptying it. Then it is his until he
    /// [leaves](Self::leave); otherwise nothing has happened. No read-modify-write.
    ///
    /// To be asked by one thread only, or of a key that nobody has.
    #[inline(always)]
    pub fn enter(&self, key: usize) -> bool {
        // Relaxed: the fence behind it keeps it before the load, to one who passes `fence_heavy` between his own store
        // and load (`seize`): he sees us at work, or we see him.
        self.at_work.store(1, Ordering::Relaxed);
        fence_light();
        let ours = self.admits(key);
        if !ours {
            self.turn_back();
        }
        ours
    }

    /// Whether it is of this key, and nobody is emptying it: to be asked behind [`Stake::begin`].
    #[inline(always)]
    pub fn admits(&self, key: usize) -> bool {
        // Acquire: pairs with the release of `unbar`; what is owned is as who seized it left it.
        self.key.load(Ordering::Acquire) == key
    }

    /// As it was before he came in vain.
    #[inline(always)]
    fn turn_back(&self) {
        // Relaxed: one writer, who asks. Release: as in `leave`.
        self.at_work
            .store(self.stays.load(Ordering::Relaxed), Ordering::Release);
    }

    /// The user, who has entered, is going to call others, who may come here again by another key.
    pub fn stay(&self) {
        // Relaxed: as in `turn_back`.
        self.stays.store(1, Ordering::Relaxed);
    }

    /// He has called his last and goes, who had said that he [stays](Self::stay).
    pub fn go(&self) {
        // Relaxed: as in `turn_back`.
        self.stays.store(0, Ordering::Relaxed);
        self.leave();
    }

    /// The user has done.
    #[inline(always)]
    pub fn leave(&self) {
        // Release: what he did is seen by who seizes; partner: `is_left`.
        self.at_work.store(0, Ordering::Release);
    }

    /// Its user is to stay away from it: he sees so before he next begins, once a heavy fence has been passed.
    fn bar(&self) {
        // Relaxed: the fence makes it seen; partner: `enter`.
        self.key.store(SEIZED, Ordering::Relaxed);
    }

    /// Behind that fence: whether he stays away, and was not at work on it.
    fn is_left(&self) -> bool {
        // Acquire: pairs with the release of `leave`; what is owned is as he left it.
        self.at_work.load(Ordering::Acquire) == 0
    }

    /// He may come back.
    fn unbar(&self, key: usize) {
        // Release: pairs with the acquire of `enter`.
        self.key.store(key, Ordering::Release);
    }

    /// Gives it a key. By who has it to himself.
    pub fn set(&self, key: usize) {
        // Relaxed: nobody else has it yet.
        self.key.store(key, Ordering::Relaxed);
    }

    /// Nobody is at work on it: in the child of a fork, which does not have its user.
    pub fn clear(&self) {
        // Relaxed, twice: the child has one thread.
        self.at_work.store(0, Ordering::Relaxed);
        self.stays.store(0, Ordering::Relaxed);
    }
}

/// Has `empty` called for each of what `all` visits that nobody is at work on, while its user is kept out. `all` visits
/// the same three times. Whether it was done: a system without the fence for it says no, and nothing has happened.
///
/// `empty` leaves alone what hangs on a [`Stake`] that has no value; of others it takes the value once, writes none,
/// and leaves it so that its user sees that it is stale.
///
/// One at a time. Two system calls, some microseconds.
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
