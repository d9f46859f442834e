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
//! **Nested.** A user at work may come again, by another key: his clock, or the source below, allocates from another
//! heap. That fails, and must leave him at work. It happens only where he calls others, so there he says before that he
//! [stays](Owner::stay), and who comes in vain looks for that. Short work, which calls nobody, need not say it, and
//! need not remember what stood there: a load less for each.
//!
//! What ships is what the models explore (`tests/models/src/loom/owner.rs`): all of the protocol is here.

#![forbid(unsafe_code)]

use super::{AtomicU32, AtomicUsize, Ordering, fence_heavy, fence_light};

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
        // Acquire: pairs with the release of `unbar`; what is owned is as who seized it left it.
        let ours = self.key.load(Ordering::Acquire) == key;
        if !ours {
            self.turn_back();
        }
        ours
    }

    /// As it was before he came, in vain.
    #[inline(always)]
    pub fn turn_back(&self) {
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
