//! The scavenger's driver: it looks at the heap four times a second, and works in between, a millisecond at a time.
//!
//! ```text
//!   tick ─▶ time for a look? ── yes ─▶ count every chunk ─▶ how much is to be kept? ─▶ caches that sleep are emptied
//!                 │ no                                                                        │
//!                 ▼                                                                           ▼
//!           is there a campaign? ── yes ─▶ a quantum: whole huge pages first, then runs, from the top ─▶ pause
//!                 └── no ─▶ pause until the next look
//! ```
//!
//! A tick is one step of a state machine that has neither a clock nor a thread of its own. The background thread of a
//! [`GlobalHeap`](crate::GlobalHeap) calls it, or a program's own loop, or a kernel's idle task. Only one thread runs
//! it at a time; a thread that finds another at work returns at once.
//!
//! A **campaign** is one walk over the heap from its end to its beginning, in two passes: first for whole huge pages,
//! then for runs of any length. It ends when it has released as much as there was too much. A new one begins when a
//! look finds something to release again.
//!
//! A look costs 2 to 4 ns for each 64 pages, twice that if caches are emptied. It is paid from the same account as the
//! releasing, so a large heap that is in use is looked at less often (1 TiB: every second or two; from some 300 GiB).

#![forbid(unsafe_code)]

use core::cell::Cell;
use core::ptr::NonNull;
use core::time::Duration;

use crate::geometry::Shape;
use crate::metadata::offset;
use crate::scavenge::index::Chunk;
use crate::scavenge::pacer::{Pacer, QUANTUM};
use crate::scavenge::retention::{Advice, PERIOD, Retention};
use crate::source::Source;
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Guard, Lock, Ordering, Pass, Table, relax};
use crate::units::PageCount;

use super::PageHeap;
use super::above::{Above, Beside, Nothing};
use super::limit::Ceiling;
use super::look::mix;
use super::scan::Released;

/// A source of time for [`PageHeap::tick`].
///
/// A closure that returns a [`Duration`] is one. The clock may be coarse, stand still or jump: that only makes memory
/// go back sooner or later. It may allocate and free, also from the heap that calls it. If it unwinds, so does `tick`,
/// and forgets what the step was to tell the next ones; the heap stays consistent. It must not fork, nor wait for a
/// thread that does, as an allocation from a heap of another copy of this crate may. A clock that scavenges other heaps
/// (`tick`, `release`) delays forks meanwhile; several such clocks that scavenge each other's heaps delay them for as
/// long as they continue.
pub trait Clock {
    /// Elapsed time since an arbitrary moment; it also advances while no thread works.
    fn now(&self) -> Duration;

    /// Time this thread has worked, since an arbitrary moment. Elapsed time will do.
    fn work(&self) -> Duration {
        self.now()
    }
}

impl<F: Fn() -> Duration> Clock for F {
    fn now(&self) -> Duration {
        self()
    }
}

/// The clock is read once per this many chunks in which there is nothing to do.
const PASSED_OVER: u32 = 256;

/// Sleeping caches are emptied at every fourth look, once a second, even if the program is not silent.
const LOOKS_TO_TRIM: u32 = 4;

/// How long to wait for the turn, in milliseconds: hundreds of times as long as a tick holds it.
const TURN_WAITS: u32 = 250;

/// How often a thread that lets others go first checks whether they have: about as long.
const PASS_ROUNDS: u32 = 1 << 18;

/// State that one tick leaves for the next.
#[derive(Clone, Copy, Debug)]
struct State {
    retention: Retention,
    pacer: Pacer,
    campaign: Option<Campaign>,
    /// Silent, and nothing left to do.
    resting: bool,
    /// The layer above has given up everything since the driving thread announced that it is about to sleep.
    settled: bool,
    silent: bool,
    /// Nothing has happened for a second, and caches have been emptied to see whether they are missed.
    asked: bool,
    /// Below this page the layer above may still have parts of pages to give back, when nothing else is left.
    unpunched: usize,
    /// Pages with memory behind them, after the last look and the work since.
    backed: usize,
    /// Pages that have gained memory since a look first found something to release, or since the last look; from the
    /// beginning once all that was there has been taken for needed, as that holds for ten seconds.
    regained: usize,
    /// How much of [`FreeSet::passes`](crate::free_set::FreeSet::passes) is the driver's own work. (What others
    /// release, as when the system is short of memory, counts as the program's.)
    passes: u32,
    looks: u32,
    /// The last look found the heap above its soft limit.
    over: bool,
}

/// One walk over the heap.
#[derive(Clone, Copy, Debug)]
struct Campaign {
    /// Pages still to be released.
    pages: usize,
    /// The chunk after the next one.
    end: usize,
    huge: bool,
    forced: bool,
    /// Not lazily: required by the soft limit.
    at_once: bool,
}

/// The scavenger of one heap.
#[derive(Debug)]
pub(crate) struct Driver {
    /// 1 while caches are being seized; see `src/cache.rs`.
    pub(super) seizing: AtomicU32,
    /// Held by the thread that seizes.
    pub(super) seizer: Lock,
    /// Held by the thread whose turn it is. The outermost lock of all: nothing is held when it is taken.
    pub(super) turn: Lock,
    /// How many threads that are about to fork wait for the turn: a long-time holder lets them go first.
    pub(super) awaited: AtomicU32,
    /// Accessed only under `turn`.
    state: Cell<State>,
    /// What is known about each chunk: [`Chunk`], packed. Written under `turn`.
    pub(super) chunks: Table<AtomicU64>,
    pub(super) ceiling: Ceiling,
    /// Tables of a layer above, if there is one. Set before the heap is shared.
    beside: Cell<Option<[Beside; 2]>>,
    /// How many pages those tables cover.
    beside_pages: AtomicUsize,
}

impl Driver {
    pub(super) fn new(chunks: Table<AtomicU64>, soft_limit: usize) -> Self {
        Self {
            seizing: AtomicU32::new(0),
            seizer: Lock::new(),
            turn: Lock::new(),
            state: Cell::new(State {
                retention: Retention::new(),
                pacer: Pacer::new(),
                campaign: None,
                resting: false,
                settled: false,
                silent: false,
                asked: false,
                unpunched: usize::MAX,
                backed: 0,
                regained: 0,
                passes: 0,
                looks: 0,
                over: false,
            }),
            awaited: AtomicU32::new(0),
            chunks,
            ceiling: Ceiling::new(soft_limit),
            beside: Cell::new(None),
            beside_pages: AtomicUsize::new(0),
        }
    }

    /// Registers two tables beside the pages, if there are any. Called by the creator of the heap, before it shares it.
    pub(crate) fn set_beside(&self, beside: Option<[Beside; 2]>) {
        self.beside.set(beside);
    }

    /// The tables beside the pages are about to be given up.
    pub(crate) fn forget_beside(&self) {
        self.beside.set(None);
    }

    /// The tables beside the pages now cover `pages` pages.
    pub(crate) fn beside_reaches(&self, pages: usize) {
        // Relaxed: entries not known to exist are left alone.
        self.beside_pages.fetch_max(pages, Ordering::Relaxed);
    }

    /// The parts of those tables that belong to these pages alone, in whole granules: address and size in bytes.
    pub(super) fn beside(
        &self,
        start: usize,
        pages: usize,
        granule: usize,
    ) -> impl Iterator<Item = (NonNull<u8>, usize)> {
        // Relaxed: as above.
        let end = (start + pages).min(self.beside_pages.load(Ordering::Relaxed));
        let tables = self.beside.get().into_iter().flatten();
        tables.filter_map(move |Beside { base, entry }| {
            let first = (start * entry).next_multiple_of(granule);
            let bytes = (end * entry / granule * granule).checked_sub(first)?;
            (bytes > 0).then(|| (offset(base, first), bytes))
        })
    }

    /// Takes the turn, or gives up after a time that is long for a holder. The holder may be further down this thread's
    /// own stack, in a clock that allocates, or it may be waiting for the caller through another heap.
    pub(crate) fn turn_within(&self) -> Option<Guard<'_>> {
        self.turn.lock_within(TURN_WAITS)
    }

    /// Called between two steps of a thread that holds the turn for long: lets threads go first that are about to fork.
    /// Afterwards the caller may no longer hold it; one that could not get it before has it now, if it was free.
    pub(crate) fn pass_on<'a>(&'a self, turn: &mut Option<Guard<'a>>) {
        if !self.is_awaited() {
            if turn.is_none() {
                *turn = self.turn.try_lock();
            }
            return;
        }
        if turn.take().is_none() {
            return;
        }
        // Bounded: the forking thread may be waiting for another heap's turn, which we hold.
        (0..PASS_ROUNDS).take_while(|_| self.is_awaited()).for_each(relax);
        *turn = self.turn_within();
    }

    /// Whether a thread that is about to fork waits for the turn. Then a step ends, too: a clock may stand still.
    fn is_awaited(&self) -> bool {
        // Relaxed: a wish, heeded sooner or later; the lock hands over what there is.
        self.awaited.load(Ordering::Relaxed) > 0
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    pub(crate) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// For a layer above that empties stores which other threads may be about to miss: no allocation is refused
    /// meanwhile. Nothing is released to the source inside.
    pub(crate) fn pass(&self) -> Pass<'_> {
        self.movers.enter(0)
    }

    /// One step of the scavenger, for programs with a loop of their own. Returns how long to wait before the next step;
    /// calling earlier or later does no harm. [`Duration::ZERO`] means more to do, and that the step took no time.
    /// [`Duration::MAX`] means that everything has been given back, and nothing needs to be done until pages are
    /// allocated and freed again. Nothing reports that: so a loop must look again after a second, say.
    ///
    /// What goes back, and when:
    ///
    /// * While pages are allocated or freed, the heap keeps the peak of the last ten seconds plus a tenth. (What is
    ///   taken without a cache, in runs of up to 64 pages, and given back before each look, is noticed only once it has
    ///   gone and is taken again.)
    /// * After a second without any, caches are emptied. If they are not missed in the quarter of a second that
    ///   follows, all free memory goes back.
    ///
    /// The work takes 1 % of elapsed time and may run 250 ms ahead of that at most. This includes emptying caches, of
    /// which 25 ms count at a time (full ones usually take 7). A step takes about one millisecond; four times a second
    /// there is a look at the whole heap (2 to 4 ns for each 64 pages). Where it takes more than 1.25 ms, and pages are
    /// allocated or freed, looks are less frequent, so that they take half of the work at most.
    ///
    /// ```
    /// use std::time::{Duration, Instant};
    /// use pageheap::source::System;
    /// use pageheap::{Config, PageCount, PageHeap};
    ///
    /// let heap = PageHeap::new(System, Config::new(1 << 30)).unwrap();
    /// let begin = Instant::now();
    /// let pause = heap.tick(&|| begin.elapsed());
    /// assert!(pause <= Duration::from_secs(10) || pause == Duration::MAX);
    /// ```
    pub fn tick<C: Clock + ?Sized>(&self, clock: &C) -> Duration {
        self.tick_with(clock, &Nothing)
    }

    /// As [`tick`](Self::tick), for a layer above. If that settles, returns [`Duration::MAX`] only after it has given
    /// up everything since settling was first requested.
    pub(crate) fn tick_with<C: Clock + ?Sized>(&self, clock: &C, above: &impl Above) -> Duration {
        let driver = &self.driver;
        // Who ticks again at once would take the turn from one that waits to fork, again and again.
        let Some(_turn) = (!driver.is_awaited()).then(|| driver.turn.try_lock()).flatten() else {
            return Duration::from_nanos(PERIOD);
        };
        let mut state = driver.state.get();
        let (begin, now) = (nanoseconds(clock.work()), nanoseconds(clock.now()));
        // Read under the turn: settling that was done before the driving thread was about to sleep does not count.
        let settle = above.settles();
        state.settled &= settle;
        if state.retention.is_due(now, state.between_looks()) {
            self.look_timed(&mut state, (begin, now), settle, above, clock);
        }
        let looked = nanoseconds(clock.work());
        let mut granules = 0;
        let go_on = || !driver.is_awaited() && nanoseconds(clock.work()).saturating_sub(looked) < QUANTUM;
        if let Some(campaign) = &mut state.campaign {
            let lazily = self.lazily && !campaign.at_once;
            let before = self.set.passes();
            let released = self.work(campaign, lazily, go_on);
            // Those of other threads, too: if they are at work they pass at other times as well.
            state.passes = state.passes.wrapping_add(self.set.passes().wrapping_sub(before));
            granules = released.pages.div_ceil(self.granule_pages());
            state.backed = (state.backed + released.forgotten).saturating_sub(released.marked);
            if campaign.is_over() {
                state.campaign = None;
            }
        } else if state.silent && state.unpunched > 0 {
            state.unpunched = above.punch(state.unpunched, &go_on);
        }
        let end = nanoseconds(clock.work());
        self.counters.scavenging.add(end.saturating_sub(begin));
        // A look is paid for already.
        let released = end.saturating_sub(looked);
        let pause = state
            .pacer
            .pause(nanoseconds(clock.now()), released, granules, state.silent);
        driver.state.set(state);
        match state.campaign {
            Some(_) => Duration::from_nanos(pause),
            None if state.silent && state.unpunched > 0 => Duration::from_nanos(pause),
            None if state.resting && state.settled == settle => Duration::MAX,
            None => Duration::from_nanos(pause.max(state.between_looks())),
        }
    }

    /// A look, paid for: neither it nor the emptying of stores, which is done in one go, determines how long to pause.
    /// It began at `begin` by the time worked, and it is `now`.
    fn look_timed<C: Clock + ?Sized>(
        &self,
        state: &mut State,
        (begin, now): (u64, u64),
        settle: bool,
        above: &impl Above,
        clock: &C,
    ) {
        let mut trimmed = 0;
        self.look(state, now, settle, above, |all| {
            let begin = nanoseconds(clock.work());
            let has_all = above.trim(all);
            trimmed = nanoseconds(clock.work()).saturating_sub(begin);
            has_all
        });
        let worked = nanoseconds(clock.work()).saturating_sub(begin);
        state.pacer.charge(trimmed);
        state.pacer.looked(worked.saturating_sub(trimmed), PERIOD);
    }

    /// Gives back up to `pages` free pages at once, or a few more rather than split a huge page. This includes pages in
    /// sleeping caches, and it is not lazy even in a heap that [releases lazily](crate::Config::release_lazily).
    /// Returns how many pages. Does not wait for pages that another thread is releasing at the moment.
    ///
    /// Cost: that of [`scavenge`](Self::scavenge), and a system call or two.
    pub fn release(&self, pages: PageCount) -> PageCount {
        self.timed(|| self.release_with(pages, || ()))
    }

    /// As [`release`](Self::release); calls `between` after each chunk in which there was work, at most 256 system
    /// calls.
    pub(crate) fn release_with(&self, pages: PageCount, between: impl FnMut()) -> PageCount {
        self.flush_shards();
        self.seize_caches();
        self.scavenge_with(pages, false, between)
    }

    pub(super) fn granule_pages(&self) -> usize {
        (self.source.granule() >> G::PAGE_SHIFT).max(1)
    }

    /// Counts the pages, and plans the work.
    fn look(&self, state: &mut State, now: u64, settle: bool, above: &impl Above, trim: impl FnOnce(bool) -> bool) {
        above.gather();
        let own = state.passes;
        // Mixed one by one: both are small numbers, which might cancel each other.
        let activity = || mix(mix(0, above.activity()), u64::from(self.set.passes().wrapping_sub(own)));
        let mut look = self.see(activity(), state.retention.turns(now), false);
        let backed = look.live + look.idle;
        // A program that grows takes a little more. If much comes again while the excess goes, all of it was needed.
        // (Not if nothing comes: what is idle becomes less by the releasing, too.)
        let more = backed.saturating_sub(state.backed);
        state.regained = state.regained.saturating_add(more);
        let all = more > 0 && state.regained > look.idle / 10;
        let needed = if all { backed } else { look.live + more };
        let Advice { keep, silent: quiet } = state.retention.look(now, look.live, needed, look.print);
        state.looks = state.looks.wrapping_add(1);
        // A thread that finds everything it needs in its caches looks silent. So caches are emptied first; if they are
        // not missed until the next look, no thread is active.
        let (asks, silent) = (quiet && !state.asked, quiet && state.asked);
        state.asked = quiet;
        // Also once a second: some of the program's threads may sleep.
        let fell_silent = silent && !state.silent;
        // The goal, corrected for live pages whose parts have no memory.
        let goal = self.driver.ceiling.goal().saturating_add(self.holes().0);
        let over = look.live + look.idle > goal;
        let settles = settle && silent && !state.settled;
        if asks || fell_silent || settles || state.looks.is_multiple_of(LOOKS_TO_TRIM) {
            state.settled = trim(quiet || over) && settle || state.settled;
            self.flush_shards();
            self.seize_caches();
            look = self.see(activity(), false, fell_silent);
            state.retention.overlook(look.print);
        }
        if asks {
            (state.silent, state.resting, state.backed) = (false, false, look.live + look.idle);
            return;
        }
        let over = look.live + look.idle > goal;
        if over && !state.over && self.lazily {
            // What has been released lazily must go now.
            look = self.see(activity(), false, true);
            state.retention.overlook(look.print);
        }
        state.over = over;
        let keep = if silent {
            look.live
        } else {
            keep.min(goal).max(look.live)
        };
        let pages = (look.live + look.idle - look.settled).saturating_sub(keep);
        if !silent || fell_silent {
            state.unpunched = usize::MAX;
        }
        (state.silent, state.backed) = (silent, look.live + look.idle);
        if pages == 0 || all {
            state.regained = 0;
        }
        // What cannot be released is not requested again.
        state.resting = silent && (pages == 0 || self.is_done());
        let end = self.set.grown().div_ceil(G::CHUNK_PAGES);
        let (end, huge) = state.campaign.map_or((end, true), |now| (now.end, now.huge));
        state.campaign = (pages > 0 && !state.resting).then_some(Campaign {
            pages,
            end,
            huge,
            forced: silent || over,
            at_once: over,
        });
    }

    /// Works on a campaign while `go_on`. With lazy release nothing shows afterwards which pages of a chunk have gone.
    /// So all of them go, first from chunks that are entirely free, and then the chunk is done.
    fn work(&self, campaign: &mut Campaign, lazily: bool, go_on: impl Fn() -> bool) -> Released {
        let granule = self.granule_pages();
        let fits = granule <= G::CHUNK_PAGES;
        let mut all = Released::default();
        // Not asked before the first: where that takes as long as a step may, each ends with something done.
        let mut passed_over = 1;
        while !campaign.is_over() && (passed_over % PASSED_OVER != 0 || go_on()) {
            let Some(chunk) = campaign.end.checked_sub(1) else {
                break;
            };
            passed_over += 1;
            // Relaxed: as in `see`.
            let entry = self.driver.chunks.get(chunk);
            let known = Chunk::unpack(entry.load(Ordering::Relaxed));
            if fits && known.is_ready(G::CHUNK_PAGES, campaign.forced) {
                passed_over = 0;
                let huge = self.huge_pages();
                let least = if campaign.huge { huge.max(granule) } else { granule };
                let (idle, wanted) = (self.idle_in(chunk), campaign.pages);
                let released = match (lazily, campaign.huge) {
                    (false, _) => self.scavenge_chunk(chunk, least, wanted, lazily),
                    (true, true) if idle < G::CHUNK_PAGES => Released::default(),
                    (true, _) => self.scavenge_chunk(chunk, granule, G::CHUNK_PAGES, lazily),
                };
                campaign.pages = wanted.saturating_sub(released.gained);
                all.add(released);
                // Done if everything has gone, or unless the campaign had enough before reaching the chunk's end.
                let done = released.gained >= idle || !campaign.huge && (lazily || campaign.pages > 0);
                let changed = released.marked + released.forgotten > 0;
                entry.store(known.examined(done, changed).pack(), Ordering::Relaxed);
            }
            campaign.end = chunk;
            if chunk == 0 && campaign.huge {
                campaign.huge = false;
                campaign.end = self.set.grown().div_ceil(G::CHUNK_PAGES);
            }
        }
        all
    }

    /// Whether no chunk is worth looking through, forced or not: none at all if a granule is longer than a chunk.
    fn is_done(&self) -> bool {
        if self.granule_pages() > G::CHUNK_PAGES {
            return true;
        }
        let chunks = self.set.grown().div_ceil(G::CHUNK_PAGES);
        // Relaxed: as in `see`.
        let ready = |chunk| Chunk::unpack(self.driver.chunks.get(chunk).load(Ordering::Relaxed));
        !(0..chunks).any(|chunk| ready(chunk).is_ready(G::CHUNK_PAGES, true))
    }
}

impl State {
    /// How long to wait between two looks.
    fn between_looks(&self) -> u64 {
        self.pacer.between_looks(PERIOD, self.retention.is_quiet())
    }
}

impl Campaign {
    fn is_over(&self) -> bool {
        self.pages == 0 || self.end == 0 && !self.huge
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;
    use core::time::Duration;

    use crate::heap::{Above, Config, PageHeap};
    use crate::source::Simulated;

    struct Slow<'a>(&'a Cell<Duration>, &'a Cell<Duration>);

    impl Above for Slow<'_> {
        fn activity(&self) -> u64 {
            self.0.get().as_nanos() as u64
        }

        fn trim(&self, _all: bool) -> bool {
            [self.0, self.1]
                .into_iter()
                .for_each(|time| time.set(time.get() + Duration::from_millis(20)));
            true
        }
    }

    /// A layer above whose stores take 20 ms to empty, once a second, in a program that is never silent.
    #[test]
    fn what_emptying_stores_takes_is_paid_for() {
        let heap = PageHeap::new(Simulated::new(4096), Config::new(64 << 20)).unwrap();
        let (now, worked) = (Cell::new(Duration::from_secs(1)), Cell::new(Duration::ZERO));
        let pass = |time| now.set(now.get() + time);
        while now.get() < Duration::from_secs(101) {
            let pause = heap.tick_with(&|| now.get(), &Slow(&now, &worked));
            pass(pause.min(Duration::from_secs(20)));
        }
        // A hundredth, plus 250 ms, plus the last one.
        let worked = worked.get().as_millis();
        assert!((500..=1000 + 250 + 20).contains(&worked), "{worked} ms in 100 s");
    }
}
