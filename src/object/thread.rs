//! A thread's own structure: a magazine for every class, a shelf, a cache of pages.
//!
//! ```text
//!   Thread   owner │ key │ cache 3 │ magazine 0 │ magazine 1 │ … │ magazine 79 │ plot │ shelf     3 KiB, a slot
//! ```
//!
//! **Sizes.** Nearly all blocks are small. For each small size a table holds the offset of its magazine in the
//! structure, so it takes one load to get from a size to a magazine. The key of all marks is in the structure too.
//!
//! **Seizing.** A sleeping thread cannot be asked for its magazines, so other threads must be able to empty them. As
//! with caches of pages (`cache.rs`), a thread announces by a plain store that it is at work on its structure, and
//! then checks whether it is barred. A seizer bars all threads, passes a heavy fence, and empties those structures
//! that nobody is at work on (`sync/owner.rs`). The key that the thread checks is the address of the heap's
//! [`Objects`](super::Objects); it is compared and never followed. The fast paths announce nothing: they check the key,
//! and the magazine's top shows what they are about to do. So what they write to stays theirs: the structure, and the
//! racks that its magazines have loaded, in the thread's plot (`plot.rs`). A barred thread uses the shared structure
//! meanwhile.
//!
//! **A thread that ends** gives back what is large - its cache, its shelf, full magazines - and leaves its structure,
//! with the few slots still in it, to the next thread. Racks stay open, so that the next one's first frees are quick;
//! but those of small slots are shut, because it matters whose slot a thread frees first (`slots.rs`). Ten thousand
//! threads that run one after the other use one structure, and find it warm. Once a second the scavenger empties the
//! structures that nobody uses. The register knows which thread has which structure (`register.rs`).

use core::cell::Cell;
use core::mem::{ManuallyDrop, offset_of};
use core::ptr::{self, NonNull};

use crate::sync::{AtomicUsize, Owned, Owner, rest};
use crate::unindexed::unindexed;
use crate::units::PageRun;

use super::batches::batch_bytes;
use super::hoard::{Demand, FREE_BYTES, Hoard};
use super::length::Length;
use super::magazine::Magazine;
use super::mark;
use super::plot::Plot;
use super::rack::{Entry, Pile, Rack, Stock};
use super::register::{Listed, Listing};
use super::resting::Prints;
use super::shelf::{Hand, Shelf};
use super::size_class::{CLASSES, FlaggedSize, MarkedSize, SizeClass};
use super::spans::Spans;

/// A thread's own structure, entered: its user is at work on it until this is dropped.
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
    /// For work that calls foreign code: the source, or the clock, may re-enter here for another heap.
    #[inline]
    pub fn stay(self) -> Staying<'a> {
        let thread = ManuallyDrop::new(self).thread;
        thread.owner.stay();
        Staying { thread }
    }
}

/// Like [`Working`], across calls of foreign code.
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

/// The offset of a magazine in a structure.
#[derive(Clone, Copy, Debug)]
pub struct Seat(usize);

impl Seat {
    /// The offset.
    #[inline(always)]
    pub fn bytes(self) -> usize {
        self.0
    }

    /// The seat of the magazine for this size. The table is a constant: where the compiler knows the size it leaves no
    /// lookup, and elsewhere it need not look up where the table is.
    #[inline(always)]
    pub fn of(size: FlaggedSize) -> Self {
        const DISTANCES: &[u16; FlaggedSize::COUNT] = &distances::<_, { FlaggedSize::STEP_BYTES }>();
        // SAFETY: a size's index is less than COUNT.
        Self(usize::from(unsafe { *DISTANCES.get_unchecked(size.index()) }))
    }

    /// The same for a size whose slot bears its own mark.
    #[inline(always)]
    pub fn of_marked(size: MarkedSize) -> Self {
        const DISTANCES: &[u16; MarkedSize::COUNT] = &distances::<_, { MarkedSize::STEP_BYTES }>();
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

/// For each of the first `COUNT` multiples of `STEP` bytes, the offset in a structure of the magazine of its class.
const fn distances<const COUNT: usize, const STEP: usize>() -> [u16; COUNT] {
    let mut distances = [0; COUNT];
    let mut size = 0;
    while size < distances.len() {
        if let Some(class) = SizeClass::of(STEP * size, 1) {
            distances[size] = (offset_of!(Thread, magazines) + class.index() * size_of::<Magazine>()) as u16;
        }
        size += 1;
    }
    distances
}

/// The function to call when the thread that uses the structure ends.
///
/// # Safety of a call
///
/// The structure belongs to a heap whose function this is; the caller is the thread that uses it, and does not use it
/// again.
pub(super) type Leave = unsafe fn(NonNull<Thread>);

/// One thread's structure. All-zero bytes: unowned, to be made empty by [`forget`](Self::forget).
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Thread {
    /// First, as in [`Nobody`].
    owner: Owner,
    /// The key of all marks.
    key: Cell<mark::Key>,
    /// The owner again, as a pointer that may be followed; and the function to call when the thread ends.
    pub(super) home: Cell<*const ()>,
    leave: Cell<Option<Leave>>,
    /// The slot of the thread's cache of pages, plus one. 0: none, so the thread asks the heap.
    cache: Cell<u32>,
    /// The last call for a flush that the thread has answered.
    pub(super) calls: Cell<u32>,
    /// Its place in the register.
    listing: Listing<Thread>,
    magazines: [Magazine; CLASSES],
    stock: Stock,
    plot: Plot,
    shelf: Shelf,
    demand: Demand,
}

/// Stands in for the structure of threads that have none. No heap has its key, so nothing of it is used but the tops
/// of its magazines, and notes in its owner, by all such threads at once.
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
    /// A stand-in with this key.
    pub const fn new(key: usize) -> Self {
        Self {
            owner: Owner::new(key),
            rest: [const { AtomicUsize::new(0) }; (size_of::<Thread>() - size_of::<Owner>()) / size_of::<usize>()],
        }
    }

    /// Its address, as that of a structure.
    pub const fn as_thread(&'static self) -> NonNull<Thread> {
        NonNull::from_ref(self).cast()
    }

    /// This, as a reference to a structure. Use it only on the fast paths, which no heap admits.
    #[allow(dead_code, reason = "where threads have no place of their own for it")]
    pub const fn stand_in(&'static self) -> &'static Thread {
        // SAFETY: size and alignment are the same, and all-zero bytes are a valid structure. The caller is not
        // admitted, so only the key and the tops are used, which are atomics.
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

/// What a push in assembler must know (`global/inline.rs`).
impl Thread {
    /// Where the owner's key is in a structure.
    pub const OWNER_KEY: usize = offset_of!(Self, owner) + Owner::KEY;
    /// Where the seat is noted, in two bytes, at which a push was refused.
    pub const REFUSED: usize = offset_of!(Self, owner) + Owner::REFUSED;
    /// Where the key of all marks is.
    pub const MARK_KEY: usize = offset_of!(Self, key);
    /// Where the limit is in a magazine, whose first word is the top.
    pub const LIMIT: usize = Magazine::LIMIT;
    /// The distance of a rack's entries.
    pub const ENTRY_BYTES: usize = size_of::<Entry>();
    /// Where in a slot the two bytes of its mark are that a free looks at first.
    pub const MARK_UPPER_AT: usize = mark::UPPER_AT;
    /// What they are in every mark, with 64-bit pointers.
    pub const MARK_UPPER: i16 = mark::UPPER;
}

impl Thread {
    /// The magazine at a seat.
    #[inline(always)]
    fn magazine_in(&self, seat: Seat) -> &Magazine {
        // SAFETY: a seat is the offset of a magazine in a structure, and this is one.
        unindexed(unsafe { &*ptr::from_ref(self).byte_add(seat.0).cast() })
    }

    /// Fast path: pops a slot of up to 1 KiB from one of the thread's magazines, with its first word zero. Succeeds if
    /// the structure is the calling thread's own and belongs to the heap at `objects`, nobody is emptying it, and
    /// there is a slot.
    #[inline(always)]
    pub fn pop<T>(&self, objects: *const T, seat: Seat) -> Option<NonNull<u8>> {
        let slot = self.magazine_in(seat).pop_quick(|| self.owner.admits(objects.addr()))?;
        // SAFETY: the magazine owned it; a word long at least, and aligned for one.
        unsafe { mark::wipe(slot.as_ptr()) };
        Some(slot)
    }

    /// Fast path: pushes a slot of up to 1 KiB into one of the thread's magazines. Succeeds if the structure is as for
    /// [`pop`](Self::pop), there is room, and the slot does not look free. Returns whether it did.
    ///
    /// # Safety
    ///
    /// The caller owns the slot, of the magazine's class and of this heap; if pushed, the magazine owns it.
    #[inline(always)]
    #[must_use]
    #[allow(dead_code, reason = "unused where `global/inline.rs` has a statement for it")]
    pub unsafe fn push<T>(&self, objects: *const T, seat: Seat, slot: NonNull<u8>) -> bool {
        // SAFETY: the caller's promise; a word long at least, and aligned for one.
        if unsafe { mark::seems_free(slot.as_ptr()) } {
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

    /// Fast path: like [`pop`](Self::pop), for slots of more than 1 KiB.
    ///
    /// # Safety
    ///
    /// `spans` returns the spans of the heap at `objects`.
    #[inline(always)]
    pub unsafe fn pop_flagged<'a, T>(
        &self,
        objects: *const T,
        spans: impl FnOnce() -> &'a Spans,
        seat: Seat,
    ) -> Option<NonNull<u8>> {
        let slot = self.magazine_in(seat).pop_quick(|| self.owner.admits(objects.addr()))?;
        // SAFETY: the magazine owned it, of the heap whose spans these are.
        unsafe { spans().hand_out(slot) };
        Some(slot)
    }

    /// Fast path: like [`push`](Self::push), for slots of more than 1 KiB.
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

    /// Whether this is the seat at which the inlined fast path refused a push last.
    pub fn has_refused_at(&self, seat: Seat) -> bool {
        usize::from(self.owner.refused()) == seat.0
    }

    /// Like [`Owner::enter`], by the address of the heap.
    #[inline(always)]
    pub fn work<T>(&self, objects: *const T) -> Option<Working<'_>> {
        // Not `then_some`: a `Working` made in vain would be dropped.
        self.owner.enter(objects.addr()).then(|| Working { thread: self })
    }

    /// Like [`work`](Self::work), for work that calls foreign code.
    pub(super) fn enter<T>(&self, objects: *const T) -> Option<Staying<'_>> {
        self.work(objects).map(Working::stay)
    }

    /// Like [`enter`](Self::enter), after waiting for a seizure that is under way.
    pub(super) fn enter_at_last<T>(&self, objects: *const T) -> Staying<'_> {
        let mut round = 0;
        loop {
            if let Some(working) = self.enter(objects) {
                return working;
            }
            round = rest(round);
        }
    }

    /// Repairs the magazines of a user that has ended, perhaps in the middle of a call.
    pub(super) fn settle(&self) {
        self.magazines.iter().for_each(Magazine::settle);
    }

    /// Forgets its slots and racks.
    pub(super) fn forget(&self) {
        self.magazines.iter().for_each(Magazine::forget);
        self.stock.forget();
        self.demand.forget();
    }

    /// Takes the spare of a class set aside last.
    #[inline]
    pub(super) fn take_spare(&self, class: SizeClass) -> Option<Rack> {
        let magazine = self.magazine(class);
        if magazine.spares() == 0 {
            return None;
        }
        self.take_a_spare(magazine, class)
    }

    /// The same, if there is one; a call of its own, as mostly there is none.
    fn take_a_spare(&self, magazine: &Magazine, class: SizeClass) -> Option<Rack> {
        let spare = magazine.take_spare(class)?;
        if !may_keep_a_spare(magazine, class) {
            self.demand.drop_spare(batch_bytes(class));
        }
        Some(spare)
    }

    /// What it has needed, and keeps.
    pub(super) fn demand(&self) -> &Demand {
        &self.demand
    }

    /// Sets a full batch aside as a spare. Returns another spare of the class in its place, or the batch if there is
    /// none, if that is more than it may have in any case, and either the spares would have more bytes than had to come
    /// from elsewhere, or the hoard, without which the thread may not hoard, has no more.
    #[must_use]
    pub(super) fn set_spare(&self, class: SizeClass, batch: Rack, hoard: Option<&Hoard>) -> Option<Rack> {
        let (magazine, bytes) = (self.magazine(class), batch_bytes(class));
        let spares = magazine.spares();
        let keeps = |hoard| spares < Pile::MOST && self.demand.keep_spare(bytes, spares == 0, hoard);
        let other = if may_keep_a_spare(magazine, class) || hoard.is_some_and(keeps) {
            None
        } else if spares == 0 {
            return Some(batch);
        } else {
            magazine.take_spare(class)
        };
        magazine.set_spare(batch);
        other
    }

    /// Shuts all magazines, so that slots freed into them from here on are counted.
    pub(super) fn shut(&self) {
        self.magazines.iter().for_each(Magazine::shut);
    }

    /// Whether no magazine has a slot, or accepts one: so no block is freed into one before a slow path is taken. (But
    /// for one that its user was just freeing, or popping in vain, when it was interrupted.)
    pub(super) fn is_bare(&self) -> bool {
        self.magazines.iter().all(Magazine::is_bare)
    }

    /// Whether it keeps slots, runs, or pages for racks. A snapshot, if its user is at work.
    pub(super) fn keeps_any(&self) -> bool {
        let any_slot = self.magazines.iter().any(Magazine::has_any_slot);
        any_slot || self.shelf.pages().0 > 0 || self.plot.pages().0 > 0
    }

    /// The prints of what it keeps in magazines and on its shelf, whose share of what all may keep is something too: a
    /// shelf may be empty for good, as its thread goes on using a block that it allocated once. A snapshot.
    pub(super) fn prints(&self) -> Prints {
        let slots = SizeClass::all().map(|class| (class, self.magazine(class).count(class)));
        Prints::of(self.shelf.print(), slots)
    }

    /// The magazine of a class.
    #[inline(always)]
    pub fn magazine(&self, class: SizeClass) -> &Magazine {
        // SAFETY: a class's index is less than CLASSES (I9).
        unsafe { self.magazines.get_unchecked(class.index()) }
    }

    /// A number that other threads rarely share: structures are slots of a class of their own.
    #[inline]
    pub fn hint(&self) -> usize {
        ptr::from_ref(self).addr() / size_of::<Self>()
    }

    /// The thread's blank racks.
    pub fn stock(&self) -> &Stock {
        &self.stock
    }

    /// The memory of its magazines' racks.
    pub(super) fn plot(&self) -> &Plot {
        &self.plot
    }

    /// The thread's shelf.
    #[inline(always)]
    pub fn shelf(&self) -> &Shelf {
        &self.shelf
    }

    /// The shelf's hand for a length.
    #[inline(always)]
    pub(super) fn hand(&self, length: Length) -> &Hand {
        // SAFETY: a length's index is less than LENGTHS (I16).
        unsafe { self.shelf.hands.get_unchecked(length.index()) }
    }

    /// The slot of the thread's cache of pages.
    #[inline(always)]
    pub fn cache(&self) -> Option<usize> {
        (self.cache.get() as usize).checked_sub(1)
    }

    /// Whether it belongs to one thread: it is not the shared one.
    pub fn has_user(&self) -> bool {
        !self.home.get().is_null()
    }

    /// Sets or clears the thread's cache.
    pub fn set_cache(&self, cache: Option<usize>) {
        self.cache.set(cache.map_or(0, |cache| cache as u32 + 1));
    }

    /// In the child of a fork, which does not have the structure's user: empties it. The slots in its magazines are
    /// lost, because a magazine may be half changed; but those of a vacant structure are intact, and it keeps them,
    /// shut. `forget` gets its cache of pages, and `free` the runs on its shelf.
    pub(super) fn bereave(&self, spans: &Spans, forget: impl FnOnce(usize), mut free: impl FnMut(PageRun)) {
        if self.listing.is_vacant() {
            self.shut();
        } else {
            self.forget();
            self.plot.clear(&mut free);
        }
        self.shelf.clear(spans, free);
        if let Some(cache) = self.cache() {
            self.set_cache(None);
            forget(cache);
        }
        self.owner.clear();
    }

    /// Gives the structure to `objects`, whose `leave` is called when the thread ends.
    pub fn set_owner<T>(&self, objects: &T, leave: Leave) {
        let home = ptr::from_ref(objects);
        self.owner.set(home.addr());
        self.home.set(home.cast());
        self.leave.set(Some(leave));
        self.key.set(mark::key());
    }

    /// Ends the thread: returns everything, the structure included.
    ///
    /// # Safety
    ///
    /// The caller is the thread that uses the structure, and does not use it again.
    pub unsafe fn end(thread: NonNull<Self>) {
        // SAFETY: structures are never destroyed.
        if let Some(leave) = unsafe { thread.as_ref() }.leave.get() {
            // SAFETY: the caller's promise; `leave` was set with the owner.
            unsafe { leave(thread) };
        }
    }
}

/// Whether a magazine may have a spare, or one more than it has, in any case; then it does not count.
fn may_keep_a_spare(magazine: &Magazine, class: SizeClass) -> bool {
    magazine.spares() == 0 && batch_bytes(class) <= FREE_BYTES
}

#[cfg(test)]
mod tests {
    use core::alloc::Layout;

    use super::*;

    #[test]
    fn a_size_has_the_seat_of_its_class() {
        for size in 0..=FlaggedSize::MOST_BYTES {
            let marked = MarkedSize::of(size).map(Seat::of_marked);
            let seat = marked.or_else(|| FlaggedSize::of(size).map(Seat::of)).unwrap();
            let class = SizeClass::of(size, 1).unwrap();
            assert_eq!(seat.bytes(), Seat::from(class).bytes(), "{size}");
            assert_eq!(
                (seat.class(), marked.is_some()),
                (Some(class), !class.is_flagged()),
                "{size}"
            );
        }
    }

    #[test]
    fn an_aligned_size_has_the_seat_of_its_class() {
        for align in (0..isize::BITS).map(|log| 1 << log) {
            let longest = isize::MAX as usize + 1 - align;
            for size in (0..=2 * MarkedSize::MOST_BYTES).chain([longest / 2, longest]) {
                let Ok(layout) = Layout::from_size_align(size, align) else {
                    continue;
                };
                let class = SizeClass::of(size, align).filter(|class| !class.is_flagged());
                let seat = MarkedSize::of_layout(layout).map(Seat::of_marked);
                assert_eq!(seat.and_then(Seat::class), class, "{layout:?}");
            }
        }
    }
}
