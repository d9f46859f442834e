//! The structures that several threads share: one at first, and more where threads meet, or are told apart.
//!
//! ```text
//!   a `Heap`   threads that hardly meet    ──▶ first                     who is alone with it does without its lock
//!              threads that meet           ──▶ first │ 1 │ 2 │ …         each has a seat, which says where it goes
//!   a kernel   processors 0, 1, 2, …       ──▶ first │ 1 │ 2 │ … │ 63
//! ```
//!
//! Each has a lock of its own ([`BiasedLock`]), so who uses which is a question of time only: any thread may use any.
//! A slot that was allocated from one may be freed into another. The first lies in the heap's tables, the others are
//! slots, made when somebody comes who would use them, and never destroyed.
//!
//! **Meeting.** Threads that find the first one's lock held count that. The thread that does so for the [`MEETINGS`]th
//! time makes a second structure, and goes there from then on: its *seat*, found by its identity, says so. After that,
//! a thread whose structure is locked, or which another is alone with, looks for one where neither is the case, makes
//! one if there is none, and goes there. So each thread gets its own, and may soon be alone with it; and those beyond
//! the 64th share. A heap that is told the number of the [processor](crate::Config::processors) uses that instead.
//!
//! **All of them.** What lies in a structure whose lock another thread holds cannot be reached. So before a request is
//! refused, its thread takes the locks of all, in the order of their numbers, empties them, and tries once more
//! ([`with_all`](Objects::with_all)). A fork takes them in the same order. Both first take the lock under which
//! structures are made, so that whoever holds all holds those too that come.
//!
//! Worked: four threads use one `Heap`, on two processors. They share one lock until the 64th time that it was held.
//! Then one of them makes a structure for itself, and so do the next two that meet. A pair of `allocate` and `free`
//! takes each of them 12 ns again, as it takes a thread that has the heap to itself, instead of 350.
//!
//! Cost: one load and one comparison for each call; 4 KiB of the heap for each structure, a 32nd of its limit at the
//! most; and what lies in their magazines, until it is needed elsewhere.

use core::ptr::{self, NonNull};

use crate::heap::Processors;
use crate::source::Source;
use crate::sync::{AtomicPtr, AtomicU8, AtomicU32, BiasedLock, Held, Lock, Ordering, UNKNOWN, is_forking, thread};

use super::size_class::{PAGE_BYTES, SizeClass};
use super::{Objects, Thread};

/// How many there are at the most, without the first.
pub(super) const OTHERS: usize = 63;

/// How many seats threads have, by their identities: a power of two. Two with the same one go to the same structure.
pub(super) const SEATS: usize = 256;

/// How often threads meet at the first one before there is another.
pub(super) const MEETINGS: u32 = 64;

/// All structures but the first take at most this part of the heap's limit: a 32nd.
const PART: usize = 32;

/// A structure that several threads share, and the lock under which they use it.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Common {
    pub(super) lock: BiasedLock,
    pub(super) thread: Thread,
}

impl Common {
    /// Makes one. It has no cache of pages.
    ///
    /// # Safety
    ///
    /// There is room for one, aligned, which the caller owns for as long as the heap lives.
    pub(super) unsafe fn make<'a>(place: NonNull<Self>) -> &'a Self {
        // SAFETY: the caller's promise. All-zero bytes are a valid thread's structure, to be made empty by `forget`.
        let common: &Self = unsafe {
            place.write_bytes(0, 1);
            (&raw mut (*place.as_ptr()).lock).write(BiasedLock::new());
            place.as_ref()
        };
        common.thread.forget();
        common
    }
}

/// All but the first, and who goes where. In a slot of its own, made when there is to be a second.
#[derive(Debug)]
pub(super) struct Plan {
    /// Null: not made yet. Written under [`Commons::making`].
    others: [AtomicPtr<Common>; OTHERS],
    /// The numbers of the structures that threads go to, by their seats; 0 is the first.
    seats: [AtomicU8; SEATS],
}

/// All of them.
#[derive(Debug)]
pub struct Commons {
    /// Null: all use the first. Written under `making`, once.
    plan: AtomicPtr<Plan>,
    first: AtomicPtr<Common>,
    processors: Option<Processors>,
    /// Held while one is made, and by who holds the locks of all.
    pub(super) making: Lock,
    /// How often threads have met at the first one.
    met: AtomicU32,
    /// 1 while one thread holds the locks of all. Written under all of them.
    is_whole: AtomicU32,
}

impl Commons {
    /// The first one.
    ///
    /// # Safety
    ///
    /// As for [`Common::make`]; and the caller moves this nowhere where it outlives the heap.
    pub unsafe fn new(first: NonNull<Common>, processors: Option<Processors>) -> Self {
        // SAFETY: the caller's promise.
        let first = ptr::from_ref(unsafe { Common::make(first) }).cast_mut();
        Self {
            plan: AtomicPtr::new(ptr::null_mut()),
            first: AtomicPtr::new(first),
            processors: processors.filter(|processors| processors.count > 1),
            making: Lock::new(),
            met: AtomicU32::new(0),
            is_whole: AtomicU32::new(0),
        }
    }

    /// The first.
    #[inline(always)]
    fn first(&self) -> &Common {
        // Relaxed: never written after `new`. (Atomic because that is `Sync`.)
        let first = self.first.load(Ordering::Relaxed);
        // SAFETY: made by `new`, and never destroyed.
        unsafe { &*first }
    }

    #[inline(always)]
    fn plan(&self) -> Option<&Plan> {
        // Acquire: pairs with the release in `make_plan`; it is complete.
        let plan = self.plan.load(Ordering::Acquire);
        // SAFETY: null, or never destroyed.
        unsafe { plan.as_ref() }
    }

    /// Whether there may be others than the first.
    #[inline]
    pub fn is_spread(&self) -> bool {
        self.plan().is_some()
    }

    /// The number of the structure that the thread `me`, which calls this, should use.
    #[inline(always)]
    pub(super) fn number(&self, me: usize) -> usize {
        match (self.plan(), self.processors) {
            (None, _) => 0,
            // Relaxed: any answer will do.
            (Some(plan), None) => plan.seats[seat_of(me)].load(Ordering::Relaxed).into(),
            (Some(_), Some(processors)) => (processors.current)() % processors.count.min(OTHERS + 1),
        }
    }

    /// The structure of this number, from 1, if it has been made.
    #[inline(always)]
    pub(super) fn other(&self, number: usize) -> Option<&Common> {
        // Acquire: pairs with the release in `make_common`; it is complete.
        let common = self.plan()?.others.get(number - 1)?.load(Ordering::Acquire);
        // SAFETY: null, or never destroyed.
        unsafe { common.as_ref() }
    }

    /// The thread `me` goes to this structure from now on.
    fn go_to(&self, me: usize, number: usize) {
        if let Some(plan) = self.plan() {
            // Relaxed: any answer will do. One that is not made yet is made by whoever comes.
            plan.seats[seat_of(me)].store(number as u8, Ordering::Relaxed);
        }
    }

    /// Whether threads have met often enough, counting this time, for another structure.
    fn have_met(&self) -> bool {
        // Relaxed: a count that decides nothing but when.
        self.is_spread() || self.met.fetch_add(1, Ordering::Relaxed) + 1 >= MEETINGS
    }
}

/// The seat of the thread `me`: the upper bits of a product with an odd number, in which those of an address are mixed.
#[inline(always)]
pub(super) fn seat_of(me: usize) -> usize {
    (me as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) as usize >> (usize::BITS - SEATS.ilog2())
}

/// The locks of all shared structures.
struct Whole<'a> {
    commons: &'a Commons,
    _others: [Option<Held<'a>>; OTHERS],
}

impl Drop for Whole<'_> {
    fn drop(&mut self) {
        // Relaxed: under all locks, which are released after this.
        self.commons.is_whole.store(0, Ordering::Relaxed);
    }
}

impl<S: Source + 'static> Objects<S> {
    /// The first shared structure.
    #[inline(always)]
    pub(super) fn first(&self) -> &Common {
        self.commons.first()
    }

    /// The shared structure of the thread `me`, which calls this, or the first if that has not been made: to look at
    /// without the lock.
    #[inline(always)]
    pub(super) fn common(&self, me: usize) -> &Common {
        let number = self.commons.number(me);
        if number == 0 {
            return self.first();
        }
        self.commons.other(number).unwrap_or_else(|| self.first())
    }

    /// The same, made if necessary and possible: to be locked.
    #[inline]
    pub(super) fn common_to_lock(&self, me: usize) -> &Common {
        let common = self.common_made(self.commons.number(me));
        if common.lock.is_held() || self.commons.is_spread() && common.lock.is_anothers(me) {
            return self.another_common(common, me);
        }
        common
    }

    #[inline]
    pub(super) fn common_made(&self, number: usize) -> &Common {
        if number == 0 {
            return self.first();
        }
        self.commons.other(number).unwrap_or_else(|| self.make_common(number))
    }

    /// For a caller whose own structure is locked, or another thread is alone with it: one where neither is the case,
    /// where it goes from now on, unless it is told by its processor.
    #[cold]
    fn another_common<'a>(&'a self, own: &'a Common, me: usize) -> &'a Common {
        let commons = &self.commons;
        let is_free = |common: &Common| !common.lock.is_held() && !common.lock.is_anothers(me);
        let free = (1..=OTHERS).find(|&number| commons.other(number).is_some_and(is_free));
        if commons.processors.is_some() || me == UNKNOWN {
            return free.and_then(|number| commons.other(number)).unwrap_or(own);
        }
        let next = || (1..=OTHERS).find(|&number| commons.other(number).is_none());
        let Some(number) = free.or_else(|| next().filter(|_| commons.have_met())) else {
            return own;
        };
        let common = self.common_made(number);
        // Where there is no room for another, nobody waits for one.
        if ptr::eq(common, self.first()) {
            return own;
        }
        commons.go_to(me, number);
        common
    }

    /// Makes the structure of this number, or returns the first.
    #[cold]
    fn make_common(&self, number: usize) -> &Common {
        // A handler of a fork makes none: its locks would not be held, but let go.
        if !self.affords(number) || is_forking() {
            return self.first();
        }
        let _making = self.commons.making.lock();
        if let Some(common) = self.commons.other(number) {
            return common;
        }
        let (Some(plan), Some(slot)) = (self.make_plan(), self.slot_for::<Common>()) else {
            return self.first();
        };
        // SAFETY: a slot of its size and alignment, ours for ever.
        let common = unsafe { Common::make(slot) };
        // Release: pairs with the acquire in `other`.
        plan.others[number - 1].store(ptr::from_ref(common).cast_mut(), Ordering::Release);
        common
    }

    /// The plan, made if there is none. With the lock under which structures are made.
    pub(super) fn make_plan(&self) -> Option<&Plan> {
        if let Some(plan) = self.commons.plan() {
            return Some(plan);
        }
        let place = self.slot_for::<Plan>()?;
        // SAFETY: a slot of its size and alignment, ours for ever.
        let plan: &Plan = unsafe {
            place.write(Plan {
                others: [const { AtomicPtr::new(ptr::null_mut()) }; OTHERS],
                seats: [const { AtomicU8::new(0) }; SEATS],
            });
            place.as_ref()
        };
        // Release: pairs with the acquire in `plan`.
        self.commons
            .plan
            .store(ptr::from_ref(plan).cast_mut(), Ordering::Release);
        Some(plan)
    }

    /// In a heap that was just opened: it knows its processors from the beginning.
    pub(super) fn begin_commons(&self) {
        if self.commons.processors.is_some() && self.affords(1) {
            let _making = self.commons.making.lock();
            self.make_plan();
        }
    }

    fn slot_for<T>(&self) -> Option<NonNull<T>> {
        let class = SizeClass::of(size_of::<T>(), align_of::<T>())?;
        Some(self.take_slot(None, class)?.cast())
    }

    /// How many slots of a class are structures that threads share, or the plan.
    pub(super) fn commons_in(&self, class: SizeClass) -> usize {
        let is_of = |bytes, align| SizeClass::of(bytes, align) == Some(class);
        let mut slots = usize::from(self.commons.is_spread() && is_of(size_of::<Plan>(), align_of::<Plan>()));
        if is_of(size_of::<Common>(), align_of::<Common>()) {
            slots += self.other_commons().count();
        }
        slots
    }

    /// At the end of a heap that nobody uses any more: gives back what is in a slot, the others and the plan, without
    /// what they keep.
    pub(super) fn give_commons(&self, cache: Option<usize>) {
        let give = |slot: NonNull<u8>, bytes, align| {
            if let Some(class) = SizeClass::of(bytes, align) {
                // SAFETY: a slot of this class that nobody uses any more; the caller's promise.
                unsafe { self.give_slot(cache, class, slot) };
            }
        };
        for common in self.other_commons() {
            give(NonNull::from(common).cast(), size_of::<Common>(), align_of::<Common>());
        }
        // Acquire: as in `plan`.
        let plan = NonNull::new(self.commons.plan.swap(ptr::null_mut(), Ordering::Acquire));
        plan.into_iter()
            .for_each(|plan| give(plan.cast(), size_of::<Plan>(), align_of::<Plan>()));
    }

    /// Whether the heap is large enough for so many structures besides the first.
    fn affords(&self, count: usize) -> bool {
        let most = self.heap.limit().0.saturating_mul(PAGE_BYTES) / PART;
        size_of::<Common>().saturating_mul(count) <= most
    }

    /// All shared structures, in the order of their numbers.
    pub(super) fn commons(&self) -> impl Iterator<Item = &Common> {
        core::iter::once(self.first()).chain(self.other_commons())
    }

    /// All but the first.
    pub(super) fn other_commons(&self) -> impl Iterator<Item = &Common> {
        (1..=OTHERS).filter_map(|number| self.commons.other(number))
    }

    /// Passes each shared structure that nobody uses at the moment to `visit`, under its lock, but not `own`: the
    /// caller may hold that lock. Waits for threads that are alone with one. Returns whether none was out of reach.
    pub(super) fn try_commons(&self, own: Option<&Thread>, mut visit: impl FnMut(&Thread)) -> bool {
        let (mut all, me) = (true, thread());
        for common in self.commons() {
            if own.is_some_and(|own| ptr::eq(own, &raw const common.thread)) {
                continue;
            }
            match common.lock.try_lock(me) {
                Some(_held) => visit(&common.thread),
                // Relaxed: 1 only if the caller has written it, which holds the lock of its own structure: the first.
                None => all &= own.is_some() && self.commons.is_whole.load(Ordering::Relaxed) == 1,
            }
        }
        all
    }

    /// Before a request is refused that was made with a shared structure: once more, with the first one, while nobody
    /// else uses any, and the others are empty. `None`, at once, if there are no others. The caller holds none.
    #[cold]
    pub fn with_all<R>(&self, work: impl FnOnce(&Thread) -> Option<R>) -> Option<R> {
        if !self.commons.is_spread() {
            return None;
        }
        let _making = self.commons.making.lock();
        let (shared, me) = (self.shared_first(), thread());
        let mut others = [const { None }; OTHERS];
        for (held, common) in others.iter_mut().zip(self.other_commons()) {
            *held = Some(common.lock.lock(me));
        }
        // Relaxed: under all locks.
        self.commons.is_whole.store(1, Ordering::Relaxed);
        let _whole = Whole {
            commons: &self.commons,
            _others: others,
        };
        for common in self.other_commons() {
            self.flush(&common.thread);
        }
        work(&shared)
    }
}
