//! The structures that several threads share: one at first, and more where threads meet, or are told apart.
//!
//! ```text
//!   a `Heap`   threads that hardly meet    ──▶ first                     who is alone with it does without its lock
//!              threads that meet           ──▶ first │ 1 │ 2 │ …         each has a seat, which says where it goes
//!   a kernel   processors 0, 1, 2, …       ──▶ first │ 1 │ 2 │ … │ 63
//! ```
//!
//! Each has a lock of its own ([`BiasedLock`]), so who uses which is a question of time only: any thread may use any.
//! A slot that was allocated from one may be freed into another. The first lies in the heap's tables, the others in
//! its [annex](super::annex), made when somebody comes who would use them, and never destroyed.
//!
//! **Meeting.** Threads that find the first one's lock held count that. The thread that does so for the [`MEETINGS`]th
//! time makes a second structure, and goes there from then on: its *seat*, found by its identity, says so. After that,
//! a thread whose structure is locked, or which another is alone with, looks for one where neither is the case, makes
//! one if there is none, and goes there. (To find another thread alone with the first one that was so before, and has
//! come back, counts as sixteen times, where the others would not lie among the heap's pages.) So each thread gets its
//! own, and may soon be alone with it. One that its thread has not come back to between two rounds of a scavenger
//! counts as free. Beyond sixteen, or where there is no room, a thread comes to one that another has had, which may
//! have ended, or sleep. A heap that is told the number of the [processor](crate::Config::processors) uses that
//! instead.
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
//! Cost: one load and one comparison for each call; 3.3 KiB for each structure, a 32nd of the heap's limit at the most,
//! for ever; and what lies in their magazines and on their shelves, until it is needed elsewhere.

use core::ptr::{self, NonNull};

use crate::heap::Processors;
use crate::source::Source;
use crate::sync::{AtomicPtr, AtomicU32, BiasedLock, Held, Lock, Ordering, UNKNOWN, is_forking, thread};
use crate::units::{PageCount, PageRun};

use super::annex::{Annex, Common, OTHERS, Plan, seat_of};
use super::size_class::SizeClass;
use super::{Objects, Thread};

/// How many there are for threads at the most, without the first. (For processors, [`OTHERS`].)
pub(super) const OTHERS_BY_SEAT: usize = 15;

/// After one could not be made for want of memory: how often nobody tries.
const REST: u32 = 256;

/// How often threads meet at the first one before there is another.
pub(super) const MEETINGS: u32 = 64;

/// As how many meetings it counts if a thread comes to the first one while another is alone with it that has come back
/// after it lost a turn to be: it costs a heavy fence, and there are few turns (`sync/bias.rs`). Threads that use the
/// heap one after another, each for good, count nothing.
pub(super) const INTRUSION: u32 = MEETINGS / 4;

/// All of them.
#[derive(Debug)]
pub struct Commons {
    /// If there is none yet, all use the first. Made under `making`.
    annex: Annex,
    first: AtomicPtr<Common>,
    processors: Option<Processors>,
    /// Held while one is made, and by who holds the locks of all.
    pub(super) making: Lock,
    /// How often threads have met at the first one.
    met: AtomicU32,
    /// 1 if they are to be emptied by whoever ends a call next.
    calls: AtomicU32,
    /// How often nobody tries to make one.
    rest: AtomicU32,
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
            annex: Annex::new(),
            first: AtomicPtr::new(first),
            processors: processors.filter(|processors| processors.count > 1),
            making: Lock::new(),
            met: AtomicU32::new(0),
            calls: AtomicU32::new(0),
            rest: AtomicU32::new(0),
            is_whole: AtomicU32::new(0),
        }
    }

    /// The first.
    #[inline(always)]
    fn first(&self) -> &Common {
        // Relaxed: never written after `new`. (Atomic because that is `Sync`.)
        let first = self.first.load(Ordering::Relaxed);
        // SAFETY: made by `new`, in the heap's tables, which stay as long as the heap.
        unsafe { &*first }
    }

    #[inline(always)]
    fn plan(&self) -> Option<&Plan> {
        self.annex.plan()
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
            (Some(plan), None) => plan.number_of(me),
            (Some(_), Some(processors)) => processors.own() % processors.count.min(OTHERS + 1),
        }
    }

    /// The structure of this number, from 1, if it has been made.
    #[inline(always)]
    pub(super) fn other(&self, number: usize) -> Option<&Common> {
        self.plan()?.other(number)
    }

    /// All, in the order of their numbers; and all but the first.
    fn all(&self) -> impl Iterator<Item = &Common> {
        core::iter::once(self.first()).chain(self.others())
    }

    fn others(&self) -> impl Iterator<Item = &Common> {
        self.plan().into_iter().flat_map(Plan::others)
    }

    /// Whoever ends a call next is to empty them: the heap is over its soft limit.
    pub(super) fn call_round(&self) {
        // Relaxed, here and below: whether it is this time or the next does not matter.
        self.calls.store(u32::from(self.is_spread()), Ordering::Relaxed);
    }

    /// Whether that was said, and nobody has heeded it yet.
    #[inline]
    pub(super) fn is_called(&self) -> bool {
        // Relaxed: as in `call_round`.
        self.calls.load(Ordering::Relaxed) != 0
    }

    /// The same; the caller heeds it.
    pub(super) fn heeds_call(&self) -> bool {
        // Relaxed: as in `call_round`.
        self.is_called() && self.calls.swap(0, Ordering::Relaxed) != 0
    }

    /// Bytes of all but the first beside the heap's tables, and pages of the heap's.
    pub(super) fn annex_size(&self) -> (usize, PageCount) {
        self.annex.size()
    }

    /// At the end of a heap: gives up all but the first, with what is in them. Returns pages of the heap's, if they lie
    /// there.
    ///
    /// # Safety
    ///
    /// Nobody uses them any more.
    pub(super) unsafe fn give_others<S: Source>(&self, source: &S) -> Option<PageRun> {
        // SAFETY: the caller's promise.
        unsafe { self.annex.give(source) }
    }

    /// The thread `me` goes to this structure from now on.
    fn go_to(&self, me: usize, number: usize) {
        if let Some(plan) = self.plan() {
            plan.seat(me, number);
        }
    }

    /// Whether threads have met often enough, counting so many for this time, for another structure.
    fn have_met(&self, times: u32) -> bool {
        // Relaxed, twice: a count that decides nothing but when. It is not raised further, so it does not overflow.
        let has_met = || self.met.load(Ordering::Relaxed) + times >= MEETINGS;
        self.is_spread() || times > 0 && has_met() || {
            self.met.fetch_add(times, Ordering::Relaxed);
            false
        }
    }
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
        let lock = &common.lock;
        // Who is alone with it waits for who visits it. Elsewhere it might end another thread's turn.
        if lock.is_mine(me) {
            return common;
        }
        // A thread that its processor has brought to where another was alone stays: that one has gone elsewhere.
        let may_go = || self.commons.processors.is_none();
        let is_anothers = || lock.is_anothers(me) && !(self.commons.is_spread() && lock.is_deserted());
        if lock.is_held() || may_go() && is_anothers() {
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
    /// or that its thread seems to have deserted. It goes there from now on, unless it is told by its processor.
    #[cold]
    fn another_common<'a>(&'a self, own: &'a Common, me: usize) -> &'a Common {
        // To a handler of a fork all locks look held, and none of them is to it.
        if is_forking() {
            return own;
        }
        let (commons, first) = (&self.commons, self.first());
        let is_told = commons.processors.is_some() || me == UNKNOWN;
        let count = if is_told { OTHERS } else { OTHERS_BY_SEAT };
        // From a place of its own: else all that meet would come to the same one.
        let mut round = (0..count).map(|step| 1 + (seat_of(me).0 + step) % count);
        let any = |is_free: &dyn Fn(&BiasedLock) -> bool| {
            let is_free = |common: &Common| !common.lock.is_held() && is_free(&common.lock);
            round.clone().find(|&number| commons.other(number).is_some_and(is_free))
        };
        // Where it may soon be alone, then where it may be after a while, then where it cannot be.
        let free = any(&BiasedLock::is_vacant)
            .or_else(|| any(&BiasedLock::is_deserted))
            .or_else(|| any(&|lock| !lock.is_anothers(me)));
        if is_told {
            return free.and_then(|number| commons.other(number)).unwrap_or(own);
        }
        let times = match (own.lock.is_held(), own.lock.is_back()) {
            (true, _) => 1,
            (false, is_back) => u32::from(is_back && self.others_lie_apart()) * INTRUSION,
        };
        let next = || (1..=count).find(|&number| commons.other(number).is_none());
        let next = || next().filter(|&number| commons.have_met(times) && number <= self.room_for_others());
        let chosen = free.or_else(next).map(|number| (number, self.common_made(number)));
        let chosen = chosen.filter(|&(_, common)| !ptr::eq(common, first)).or_else(|| {
            // There is none, and no room for another. Whoever is alone with the next may have ended, or sleep.
            let is_lost = ptr::eq(own, first) && commons.is_spread();
            round.find_map(|number| Some((number, commons.other(number).filter(|_| is_lost)?)))
        });
        let Some((number, common)) = chosen else { return own };
        commons.go_to(me, number);
        common
    }

    /// Makes the structure of this number, or returns the first.
    #[cold]
    fn make_common(&self, number: usize) -> &Common {
        // Relaxed, twice: how often does not matter.
        let rest = self.commons.rest.load(Ordering::Relaxed);
        if rest > 0 {
            self.commons.rest.store(rest - 1, Ordering::Relaxed);
            return self.first();
        }
        // A handler of a fork makes none: its locks would not be held, but let go.
        if number > self.room_for_others() || is_forking() {
            return self.first();
        }
        // What is owed for its pages is paid later: others may wait for this lock.
        self.heap.assist_at_once(false);
        let making = self.commons.making.lock();
        let common = self
            .commons
            .other(number)
            .or_else(|| self.make_plan()?.make_other(number));
        drop(making);
        if common.is_none() {
            self.commons.rest.store(REST, Ordering::Relaxed);
        }
        common.unwrap_or_else(|| self.first())
    }

    /// The plan, made if there is none. With the lock under which structures are made.
    pub(super) fn make_plan(&self) -> Option<&Plan> {
        let (annex, room) = (&self.commons.annex, self.room_for_others());
        let make = || {
            if room == 0 {
                return None;
            }
            // As many as there may be when the limit is raised. That takes addresses; pages are taken as the limit is.
            let (capacity, most) = (self.heap.capacity(), self.most_others());
            let apart = annex.make_apart(self.heap.source(), Annex::room(capacity).min(most), capacity);
            apart.or_else(|| annex.make_of(self.pages_for_others(room)?))
        };
        annex.plan().or_else(make)
    }

    /// A run of pages for so many structures, or for as many as there is a run for; and where it begins.
    fn pages_for_others(&self, room: usize) -> Option<(PageRun, NonNull<u8>)> {
        let mut rooms = core::iter::successors(Some(room), |room| (room > &1).then_some(room / 2));
        let run = rooms.find_map(|room| {
            let pages = PageCount::holding(Annex::bytes(room), SizeClass::PAGE_SHIFT);
            Some(self.pages_to_spare(None, pages)?.run)
        })?;
        Some((run, self.heap.address(run.start())))
    }

    /// In a heap that was just opened: it knows its processors from the beginning.
    pub(super) fn begin_commons(&self) {
        if self.commons.processors.is_some() {
            let _making = self.commons.making.lock();
            self.make_plan();
        }
    }

    /// Whether the others lie beside the heap's tables, or would.
    fn others_lie_apart(&self) -> bool {
        match self.commons.plan() {
            Some(_) => self.commons.annex_size().0 > 0,
            None => self.heap.source().budget() >= Annex::bytes(self.room_for_others()),
        }
    }

    /// How many structures there may be in a heap that is large enough, besides the first.
    fn most_others(&self) -> usize {
        let processors = self.commons.processors;
        processors.map_or(OTHERS_BY_SEAT, |processors| (processors.count - 1).min(OTHERS))
    }

    /// How many structures this heap is large enough for, besides the first; or has room for, once it has a plan.
    fn room_for_others(&self) -> usize {
        let room = Annex::room(self.heap.limit()).min(self.most_others());
        self.commons.plan().map_or(room, |plan| plan.room().min(room))
    }

    /// All shared structures, in the order of their numbers.
    pub(super) fn commons(&self) -> impl Iterator<Item = &Common> {
        self.commons.all()
    }

    /// All but the first.
    pub(super) fn other_commons(&self) -> impl Iterator<Item = &Common> {
        self.commons.others()
    }

    /// Passes each shared structure that nobody uses at the moment to `visit`, under its lock, but not `own`: the
    /// caller may hold that lock. Waits for threads that are alone with one. Returns whether none was out of reach.
    pub(super) fn try_commons(&self, own: Option<&Thread>, mut visit: impl FnMut(&Thread)) -> bool {
        self.try_held_commons(own, |thread, _| visit(thread))
    }

    /// The same without an own one, in a round of the scavenger.
    pub(super) fn flush_commons(&self) -> bool {
        self.try_held_commons(None, |thread, held| {
            self.flush(thread);
            held.count_round();
        })
    }

    fn try_held_commons(&self, own: Option<&Thread>, mut visit: impl FnMut(&Thread, &Held<'_>)) -> bool {
        let (mut all, me) = (true, thread());
        for common in self.commons() {
            if own.is_some_and(|own| ptr::eq(own, &raw const common.thread)) {
                continue;
            }
            match common.lock.try_visit(me) {
                Some(held) => visit(&common.thread, &held),
                // Relaxed: 1 only if the caller has written it, which holds the lock of its own structure: the first.
                None => all &= own.is_some() && self.commons.is_whole.load(Ordering::Relaxed) == 1,
            }
        }
        all
    }

    /// Before a request is refused that was made with a shared structure: once more, with the first one, while nobody
    /// else uses any, and the others are empty. `None`, at once, if there are no others. The caller holds none.
    #[cold]
    pub(super) fn with_all<R>(&self, work: impl FnOnce(&Thread) -> Option<R>) -> Option<R> {
        if !self.commons.is_spread() {
            return None;
        }
        let (making, me, first) = (self.commons.making.lock(), thread(), self.first());
        let held = first.lock.visit(me);
        let mut others = [const { None }; OTHERS];
        for (held, common) in others.iter_mut().zip(self.other_commons()) {
            *held = Some(common.lock.visit(me));
        }
        // Relaxed: under all locks.
        self.commons.is_whole.store(1, Ordering::Relaxed);
        let whole = Whole {
            commons: &self.commons,
            _others: others,
        };
        for common in self.other_commons() {
            self.flush(&common.thread);
        }
        let done = work(&first.thread);
        // As where one is released (`shared.rs`): taken before that, and paid after it.
        let debt = self.heap.take_debt();
        drop((whole, held, making));
        self.settle_debt(debt);
        done
    }
}
