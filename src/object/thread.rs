//! What one thread keeps to itself: a magazine for every class, a shelf, a cache of pages.
//!
//! ```text
//!   Thread   owner │ key │ cache 3 │ magazine 0 │ magazine 1 │ … │ magazine 79 │ shelf     3 KiB, a slot
//! ```
//!
//! **Sizes.** Nearly all blocks are of a small size, and a table says for each how far from the structure's beginning
//! the magazine for it lies: one load from a size to a magazine. The key of all marks is in the structure, too.
//!
//! **Seizing.** A thread that sleeps cannot be asked for its magazines. As with caches of pages (`cache.rs`), it says
//! by a plain store when it is at work on them, and looks then whether it is barred; who seizes bars all, passes a
//! heavy fence, and empties those that nobody is at work on (`sync/owner.rs`; the key is the address of the heap's
//! [`Objects`](super::Objects), which is compared and never followed). The quick way into a magazine is by its top, the
//! way to all else by the structure's owner. A thread that is barred uses the shared structure meanwhile.
//!
//! A thread that ends gives back what is much - its cache, its shelf, full magazines - and leaves its structure to the
//! next, with the few slots that are still in it. Ten thousand threads one after the other use one structure, and find
//! it warm. Once a second the scavenger empties those that nobody uses. Who has which is in the register
//! (`register.rs`).

use core::cell::Cell;
use core::mem::{ManuallyDrop, offset_of};
use core::ptr::{self, NonNull};

use crate::sync::{AtomicUsize, Owned, Owner, relax};
use crate::units::PageRun;

use super::length::Length;
use super::magazine::Magazine;
use super::mark;
use super::rack::Stock;
use super::register::{Listed, Listing};
use super::shelf::{Hand, Shelf};
use super::size_class::{CLASSES, MarkedSize, SizeClass, SmallSize};
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

impl<'a> Working<'a> {
    /// For work that calls others: his source, or his clock, may come here again for another heap.
    #[inline]
    pub fn stay(self) -> Staying<'a> {
        let thread = ManuallyDrop::new(self).thread;
        thread.owner.stay();
        Staying { thread }
    }
}

/// As [`Working`], with calls of others in between.
#[derive(Debug)]
pub struct Staying<'a> {
    thread: &'a Thread,
}

impl core::ops::Deref for Staying<'_> {
    type Target = Thread;

    #[inline]
    fn deref(&self) -> &Thread {
        self.thread
    }
}

impl Drop for Staying<'_> {
    #[inline]
    fn drop(&mut self) {
        self.thread.owner.go();
    }
}

/// Where in a structure a magazine lies.
#[derive(Clone, Copy, Debug)]
pub struct Seat(usize);

impl Seat {
    /// That of the magazine for this size.
    #[inline(always)]
    pub fn of(size: SmallSize) -> Self {
        // SAFETY: a size's number is less than COUNT.
        Self(usize::from(unsafe { *DISTANCES.get_unchecked(size.index()) }))
    }

    /// The same, of a size whose slot bears its own mark: by a constant, so that nothing is left to be looked up where
    /// the compiler knows the size.
    #[inline(always)]
    pub fn of_marked(size: MarkedSize) -> Self {
        const DISTANCES: &[u16; MarkedSize::COUNT] = &distances();
        // SAFETY: as above.
        Self(usize::from(unsafe { *DISTANCES.get_unchecked(size.index()) }))
    }

    /// The class of its magazine.
    #[cold]
    pub fn class(self) -> Option<SizeClass> {
        let number = (self.0 - offset_of!(Thread, magazines)) / size_of::<Magazine>();
        SizeClass::all().nth(number)
    }
}

impl From<SizeClass> for Seat {
    #[inline(always)]
    fn from(class: SizeClass) -> Self {
        Self(offset_of!(Thread, magazines) + class.index() * size_of::<Magazine>())
    }
}

/// For each small size how far from the beginning of a structure the magazine of its class lies.
static DISTANCES: [u16; SmallSize::COUNT] = distances();

/// The same, for the first sizes.
const fn distances<const COUNT: usize>() -> [u16; COUNT] {
    let mut distances = [0; COUNT];
    let mut size = 0;
    while size < distances.len() {
        if let Some(class) = SizeClass::of(8 * size, 1) {
            distances[size] = (offset_of!(Thread, magazines) + class.index() * size_of::<Magazine>()) as u16;
        }
        size += 1;
    }
    distances
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
    /// First, as in [`Nobody`].
    owner: Owner,
    /// That of all marks.
    key: Cell<mark::Key>,
    /// The owner again, to be followed; and what to do when the thread ends.
    pub(super) home: Cell<*const ()>,
    leave: Cell<Option<Leave>>,
    /// The slot of the thread's cache of pages, plus one. 0: it has none, and goes to the heap.
    cache: Cell<u32>,
    /// The last call for a flush that was heeded.
    pub(super) calls: Cell<u32>,
    /// Its place in the register.
    listing: Listing<Thread>,
    magazines: [Magazine; CLASSES],
    stock: Stock,
    shelf: Shelf,
}

/// Stands for a structure where a thread has none: of a key that no heap has, so nothing of it is used but the tops of
/// its magazines, by all such threads at once.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Nobody {
    owner: Owner,
    rest: [AtomicUsize; (size_of::<Thread>() - size_of::<Owner>()) / size_of::<usize>()],
}

// One can stand in for the other.
const _: () = assert!(size_of::<Nobody>() == size_of::<Thread>() && align_of::<Nobody>() == align_of::<Thread>());
const _: () = assert!(offset_of!(Nobody, owner) == offset_of!(Thread, owner));

impl Nobody {
    /// One of this key.
    pub const fn new(key: usize) -> Self {
        Self {
            owner: Owner::new(key),
            rest: [const { AtomicUsize::new(0) }; (size_of::<Thread>() - size_of::<Owner>()) / size_of::<usize>()],
        }
    }

    /// As if it were one.
    #[allow(dead_code, reason = "where threads have a place of their own for it")]
    pub const fn as_thread(&'static self) -> NonNull<Thread> {
        NonNull::from_ref(self).cast()
    }

    /// The same, by reference. Nothing is to be asked of it but by the quick ways, which no heap admits.
    #[allow(dead_code, reason = "where they have not")]
    pub const fn stand_in(&'static self) -> &'static Thread {
        // SAFETY: as large and as aligned, and all-zero bytes are a structure. Who asks is not admitted, so no more of
        // it is used than its key and its tops, which are atomics.
        unsafe { NonNull::from_ref(self).cast().as_ref() }
    }
}

impl Owned for Thread {
    fn owner(&self) -> &Owner {
        &self.owner
    }

    fn key(&self) -> usize {
        self.home.get().addr()
    }
}

impl Listed for Thread {
    fn listing(&self) -> &Listing<Self> {
        &self.listing
    }
}

impl Thread {
    /// The magazine in a seat.
    #[inline(always)]
    fn magazine_in(&self, seat: Seat) -> &Magazine {
        // SAFETY: a seat is that of a magazine in a structure, as this is one.
        unsafe { &*ptr::from_ref(self).byte_add(seat.0).cast() }
    }

    /// Fast: a slot of one of the thread's magazines, if the structure is the calling thread's own, of the heap at
    /// `objects`, nobody is emptying it, and there is one; its first word is zero. Of slots of up to 1 KiB.
    #[inline(always)]
    pub fn pop<T>(&self, objects: *const T, seat: Seat) -> Option<NonNull<u8>> {
        let slot = self.magazine_in(seat).pop_quick(|| self.owner.admits(objects.addr()))?;
        // SAFETY: it was the magazine's; a word long at least, and aligned for one.
        unsafe { mark::wipe(slot.as_ptr()) };
        Some(slot)
    }

    /// Fast: one of the thread's magazines takes a slot in, of up to 1 KiB, if the structure is as for
    /// [`pop`](Self::pop), there is room and it does not seem free. Whether it did.
    ///
    /// # Safety
    ///
    /// The slot is the caller's, of the magazine's class and of this heap; if taken, it is the magazine's.
    #[inline(always)]
    #[must_use]
    pub unsafe fn push<T>(&self, objects: *const T, seat: Seat, slot: NonNull<u8>) -> bool {
        // SAFETY: the caller's promise; a word long at least, and aligned for one.
        if unsafe { mark::seems_free(slot.as_ptr()) }.is_some() {
            return false;
        }
        let mark = || {
            // SAFETY: as above.
            unsafe { mark::write(self.key.get(), slot.as_ptr()) };
            true
        };
        // SAFETY: the caller's promise.
        unsafe {
            self.magazine_in(seat)
                .push_quick(slot, || self.owner.admits(objects.addr()), mark)
        }
    }

    /// Fast: as [`pop`](Self::pop), of slots of more than 1 KiB.
    ///
    /// # Safety
    ///
    /// `spans` gives those of the heap at `objects`.
    #[inline(always)]
    pub unsafe fn pop_flagged<'a, T>(
        &self,
        objects: *const T,
        spans: impl FnOnce() -> &'a Spans,
        seat: Seat,
    ) -> Option<NonNull<u8>> {
        let slot = self.magazine_in(seat).pop_quick(|| self.owner.admits(objects.addr()))?;
        // SAFETY: it was the magazine's, of the heap whose spans these are.
        unsafe { spans().hand_out(slot) };
        Some(slot)
    }

    /// Fast: as [`push`](Self::push), of such slots.
    ///
    /// # Safety
    ///
    /// As for [`push`](Self::push) and [`pop_flagged`](Self::pop_flagged).
    #[inline(always)]
    #[must_use]
    pub unsafe fn push_flagged<'a, T>(
        &self,
        objects: *const T,
        spans: impl FnOnce() -> &'a Spans,
        seat: Seat,
        slot: NonNull<u8>,
    ) -> bool {
        let raise = || {
            let flag = spans().flag_of(slot);
            if let Some(flag) = flag {
                flag.raise();
            }
            flag.is_some()
        };
        // SAFETY: the caller's promise.
        unsafe {
            self.magazine_in(seat)
                .push_quick(slot, || self.owner.admits(objects.addr()), raise)
        }
    }

    /// As [`Owner::enter`], by the address of its heap.
    #[inline(always)]
    pub fn work<T>(&self, objects: *const T) -> Option<Working<'_>> {
        // Not `then_some`: one made in vain would be dropped.
        self.owner.enter(objects.addr()).then(|| Working { thread: self })
    }

    /// The same, to stay.
    pub(super) fn enter<T>(&self, objects: *const T) -> Option<Staying<'_>> {
        self.work(objects).map(Working::stay)
    }

    /// The same, after a seizure if one is under way.
    pub(super) fn enter_at_last<T>(&self, objects: *const T) -> Staying<'_> {
        let mut round = 0;
        loop {
            if let Some(working) = self.enter(objects) {
                return working;
            }
            relax(round);
            round = round.saturating_add(1);
        }
    }

    /// Its user has ended, perhaps in the middle of a call.
    pub(super) fn settle(&self) {
        self.magazines.iter().for_each(Magazine::settle);
    }

    /// Forgets its slots and racks.
    pub(super) fn forget(&self) {
        self.magazines.iter().for_each(Magazine::forget);
        self.stock.open();
    }

    /// Shuts all magazines: what comes back to them is counted from here on.
    #[cfg_attr(
        not(feature = "std"),
        allow(dead_code, reason = "for fork, which needs an operating system")
    )]
    pub(super) fn shut(&self) {
        self.magazines.iter().for_each(Magazine::shut);
    }

    /// Whether no magazine has a rack loaded: then no block is freed into one before another is.
    pub(super) fn is_bare(&self) -> bool {
        self.magazines.iter().all(|magazine| magazine.room() == 0)
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

    /// The thread's blank racks.
    pub fn stock(&self) -> &Stock {
        &self.stock
    }

    /// The thread's shelf.
    #[inline(always)]
    pub fn shelf(&self) -> &Shelf {
        &self.shelf
    }

    /// The shelf's hand for a length.
    #[inline(always)]
    pub(super) fn hand(&self, length: Length) -> &Hand {
        // SAFETY: a length's number is less than LENGTHS (I16).
        unsafe { self.shelf.hands.get_unchecked(length.index()) }
    }

    /// The slot of the thread's cache of pages.
    #[inline(always)]
    pub fn cache(&self) -> Option<usize> {
        (self.cache.get() as usize).checked_sub(1)
    }

    /// Whether it is one thread's, not the shared one.
    pub fn has_user(&self) -> bool {
        !self.home.get().is_null()
    }

    /// Gives the thread a cache, or takes it.
    pub fn set_cache(&self, cache: Option<usize>) {
        self.cache.set(cache.map_or(0, |cache| cache as u32 + 1));
    }

    /// In the child of a fork, which does not have its user: empties it. What was in its magazines, which may be half
    /// changed, is lost; but one that is vacant had none half changed, and keeps them, shut. `forget` gets its cache of
    /// pages, and `free` the runs on its shelf.
    #[cfg_attr(
        not(feature = "std"),
        allow(dead_code, reason = "for fork, which needs an operating system")
    )]
    pub(super) fn bereave(&self, spans: &Spans, forget: impl FnOnce(usize), free: impl FnMut(PageRun)) {
        if self.listing.is_vacant() {
            self.shut();
        } else {
            self.forget();
        }
        self.shelf.clear(spans, free);
        if let Some(cache) = self.cache() {
            self.set_cache(None);
            forget(cache);
        }
        self.owner.clear();
    }

    /// Makes the structure `objects`', which is told by `leave` when the thread ends.
    pub(super) fn set_owner<T>(&self, objects: &T, leave: Leave) {
        let home = ptr::from_ref(objects);
        self.owner.set(home.addr());
        self.home.set(home.cast());
        self.leave.set(Some(leave));
        self.key.set(mark::key());
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
