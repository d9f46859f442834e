//! Who drives the scavenger: a look at the heap four times a second, and work in between, a millisecond at a time.
//!
//! ```text
//!   tick ─▶ time for a look? ── yes ─▶ count every chunk ─▶ how much is to be kept? ─▶ caches that sleep are emptied
//!                 │ no                                                                        │
//!                 ▼                                                                           ▼
//!           is there a campaign? ── yes ─▶ a quantum: whole huge pages first, then runs, from the top ─▶ pause
//!                 └── no ─▶ pause until the next look
//! ```
//!
//! A tick is a step of a machine without a clock or a thread of its own: the background thread of a
//! [`GlobalHeap`](crate::GlobalHeap) calls it, or a program's own loop, or a kernel's idle task. It is one thread's at
//! a time; who comes while another is at it goes away again.
//!
//! A **campaign** is one walk over the heap, from its end to its beginning, twice: first for whole huge pages, then for
//! runs of any length. It ends when as much has gone as there was too much, and a new one begins when a look finds
//! something again.
//!
//! Cost of a look: 1 ns for each 64 pages, twice that where caches are emptied. It is paid from the same account as the
//! releasing, so that the larger a heap is the more seldom it is looked at (1 TiB: every half second).

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
use super::above::{Above, Nothing};
use super::limit::Ceiling;
use super::scan::Released;

/// Time, as [`PageHeap::tick`] wants to be told it.
///
/// A closure that returns a [`Duration`] is one. The clock may be coarse, stand still or jump: that makes memory go
/// back sooner or later, and nothing else. It may allocate and free, also from the heap that asks it; it must not fork,
/// nor wait for a thread that does. One that has other heaps scavenge (`tick`, `release`) holds up forks meanwhile, and
/// several such, on each other's heaps, for as long as they go on.
pub trait Clock {
    /// Time that passes also while nobody works, since any moment.
    fn now(&self) -> Duration;

    /// Time this thread has worked, since any moment. Passing time will do.
    fn work(&self) -> Duration {
        self.now()
    }
}

impl<F: Fn() -> Duration> Clock for F {
    fn now(&self) -> Duration {
        self()
    }
}

/// The clock is read once for so many chunks in which there is nothing to do.
const PASSED_OVER: u32 = 256;

/// Every so many looks, a second, sleeping caches are emptied though the program is not silent.
const LOOKS_TO_TRIM: u32 = 4;

/// How long the turn is waited for, in milliseconds: hundreds of times what a tick has it.
const TURN_WAITS: u32 = 250;

/// How long who forks waits for one, in milliseconds, before he lets go all he has and begins anew.
const FORK_WAITS: u32 = 20;

/// How often who lets others go first looks whether they have: about as long.
const PASS_ROUNDS: u32 = 1 << 18;

/// What a tick leaves for the next.
#[derive(Clone, Copy, Debug)]
struct State {
    retention: Retention,
    pacer: Pacer,
    campaign: Option<Campaign>,
    /// Silent, and nothing left to do.
    resting: bool,
    /// Since who drives this is about to sleep, the layer above has given up all it has.
    settled: bool,
    silent: bool,
    /// Nothing has happened for a second, and caches have been emptied to see whether anybody misses them.
    asked: bool,
    /// Below which page the layer above may yet have parts of pages to give back, when nothing else is left.
    unpunched: usize,
    /// Pages with memory behind them, as the last look and the work since have left them.
    backed: usize,
    looks: u32,
    /// The last look found the heap over its soft limit.
    over: bool,
}

/// One walk over the heap.
#[derive(Clone, Copy, Debug)]
struct Campaign {
    /// Pages still to go.
    pages: usize,
    /// The chunk behind the next.
    end: usize,
    huge: bool,
    forced: bool,
    /// Not lazily: the soft limit wants it.
    at_once: bool,
}

/// The scavenger of one heap.
#[derive(Debug)]
pub(crate) struct Driver {
    /// 1 while caches are being seized; see `src/cache.rs`.
    pub(super) seizing: AtomicU32,
    /// Held by who seizes.
    pub(super) seizer: Lock,
    /// Held by whose turn it is. The outermost lock of all: nothing is held when it is taken.
    turn: Lock,
    /// How many wait for the turn who are about to fork: who has it for long lets them go first.
    awaited: AtomicU32,
    /// Only under `turn`.
    state: Cell<State>,
    /// What is known of each chunk: [`Chunk`], packed. Written under `turn`.
    pub(super) chunks: Table<AtomicU64>,
    pub(super) ceiling: Ceiling,
    /// A table of a layer above, if there is one. Set before the heap is shared.
    beside: Cell<Option<Beside>>,
    /// Pages that table reaches.
    beside_pages: AtomicUsize,
}

/// A table with an entry for each page, that means nothing as long as the page is free.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beside {
    /// The entry of page 0, on a border of granules.
    pub(crate) base: NonNull<u8>,
    /// Bytes in an entry.
    pub(crate) entry: usize,
}

/// A heap at one look.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    live: usize,
    /// Pages free, or in caches, with memory behind them.
    idle: usize,
    /// Of those free, the ones of chunks that are done: released, and not marked, or refused.
    settled: usize,
    /// Pages in caches.
    cached: usize,
    print: u64,
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

    /// Tells of a table beside the pages. By who makes the heap, before he shares it.
    pub(crate) fn set_beside(&self, beside: Beside) {
        self.beside.set(Some(beside));
    }

    /// The table beside the pages is about to go.
    pub(crate) fn forget_beside(&self) {
        self.beside.set(None);
    }

    /// The table beside the pages reaches so far.
    pub(crate) fn beside_reaches(&self, pages: usize) {
        // Relaxed: what is not known to be there stays as it is.
        self.beside_pages.fetch_max(pages, Ordering::Relaxed);
    }

    /// The bytes of the table beside that are of these pages alone, in whole granules: where, and how many.
    pub(super) fn beside(&self, start: usize, pages: usize, granule: usize) -> Option<(NonNull<u8>, usize)> {
        let Beside { base, entry } = self.beside.get()?;
        // Relaxed: as above.
        let end = (start + pages).min(self.beside_pages.load(Ordering::Relaxed));
        let first = (start * entry).next_multiple_of(granule);
        let bytes = (end * entry / granule * granule)
            .checked_sub(first)
            .filter(|&bytes| bytes > 0)?;
        Some((offset(base, first), bytes))
    }

    /// The turn, if it can be had within a time that is long for who has it: he may be somebody below, whose clock
    /// allocates, or wait for the caller by way of another heap.
    pub(crate) fn turn_within(&self) -> Option<Guard<'_>> {
        self.turn.lock_within(TURN_WAITS)
    }

    /// Between two steps of who has the turn for long: lets those go first who are about to fork. Afterwards it may be
    /// gone; who could not have it takes it here when it is free.
    pub(crate) fn pass_on<'a>(&'a self, turn: &mut Option<Guard<'a>>) {
        // Relaxed, here and below: a wish, heeded sooner or later; the lock hands over what there is.
        if self.awaited.load(Ordering::Relaxed) == 0 {
            if turn.is_none() {
                *turn = self.turn.try_lock();
            }
            return;
        }
        if turn.take().is_none() {
            return;
        }
        // Not for ever: who forks may wait for another heap's turn, and we have it.
        for round in 0..PASS_ROUNDS {
            if self.awaited.load(Ordering::Relaxed) == 0 {
                break;
            }
            relax(round);
        }
        *turn = self.turn_within();
    }

    /// Keeps scavengers away, after what they are doing now (a millisecond, or one chunk), until
    /// [`let_go`](Self::let_go): before the process forks. Whether it could, within a while: who has the turn may be
    /// waiting for the caller, if that holds anything.
    pub(crate) fn try_hold(&self) -> bool {
        // Relaxed, twice: as in `pass_on`.
        self.awaited.fetch_add(1, Ordering::Relaxed);
        let turn = self.turn.lock_within(FORK_WAITS);
        self.awaited.fetch_sub(1, Ordering::Relaxed);
        let held = turn.is_some();
        core::mem::forget(turn);
        if held {
            self.seizer.hold();
        }
        held
    }

    /// Whoever has held may go on, or his copy in a child.
    pub(crate) fn let_go(&self) {
        self.seizer.let_go();
        self.turn.let_go();
    }
}

impl<S: Source, G: Shape> PageHeap<S, G> {
    pub(crate) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// For a layer above that empties stores which others may be about to miss: an allocation is not refused meanwhile.
    /// Nothing is released inside.
    pub(crate) fn pass(&self) -> Pass<'_> {
        self.movers.enter(0)
    }

    /// One step of the scavenger, for programs with a loop of their own. Returns how long to wait before the next; who
    /// comes earlier or later does no harm. [`Duration::MAX`]: everything has gone back, and nothing need be done until
    /// pages are allocated and freed again.
    ///
    /// What goes back, and when: as long as pages are allocated or freed the heap keeps what was live at any time in
    /// the last ten seconds and a tenth of that. After a second in which none was, caches are emptied, and if nobody
    /// misses them in the quarter of a second that follows, all that is free goes. Work is 1 % of the time that passes,
    /// and 250 ms at most ahead of that, the emptying of caches included (of which 25 ms count at a time: full ones
    /// take 7, as a rule); a step is about one millisecond, and a look at the whole heap four times a second (1 ns for
    /// each 64 pages).
    ///
    /// ```
    /// use std::time::{Duration, Instant};
    /// use pageheap::source::System;
    /// use pageheap::{Config, PageCount, PageHeap};
    ///
    /// let heap: PageHeap<System> = PageHeap::new(System, Config::new(1 << 30)).unwrap();
    /// let begin = Instant::now();
    /// let pause = heap.tick(&|| begin.elapsed());
    /// assert!(pause <= Duration::from_secs(10) || pause == Duration::MAX);
    /// ```
    pub fn tick<C: Clock + ?Sized>(&self, clock: &C) -> Duration {
        self.tick_with(clock, &Nothing)
    }

    /// As [`tick`](Self::tick), for a layer above. If it settles, [`Duration::MAX`] is said only when it has given up
    /// all since that was first asked for.
    pub(crate) fn tick_with<C: Clock + ?Sized>(&self, clock: &C, above: &impl Above) -> Duration {
        let driver = &self.driver;
        let Some(_turn) = driver.turn.try_lock() else {
            return Duration::from_nanos(PERIOD);
        };
        let mut state = driver.state.get();
        let (begin, now) = (nanoseconds(clock.work()), nanoseconds(clock.now()));
        // What lies in store is brought back at a stroke: paid for, but no measure of how long to pause.
        let mut trimmed = 0;
        // Asked for with the turn: who settled before he that drives was about to sleep has not settled for him.
        let settle = above.settles();
        state.settled &= settle;
        if state.retention.is_due(now) {
            self.look(&mut state, now, settle, above, |all| {
                let begin = nanoseconds(clock.work());
                let has_all = above.trim(all);
                trimmed = nanoseconds(clock.work()).saturating_sub(begin);
                has_all
            });
        }
        let looked = nanoseconds(clock.work()).saturating_sub(begin);
        let mut granules = 0;
        let go_on = || nanoseconds(clock.work()).saturating_sub(begin) < looked.saturating_add(QUANTUM);
        if let Some(campaign) = &mut state.campaign {
            let lazily = self.lazily && !campaign.at_once;
            let released = self.work(campaign, lazily, go_on);
            granules = released.pages.div_ceil(self.granule_pages());
            state.backed -= released.marked.min(state.backed);
            if campaign.is_over() {
                state.campaign = None;
            }
        } else if state.silent && state.unpunched > 0 {
            state.unpunched = above.punch(state.unpunched, &go_on);
        }
        let worked = nanoseconds(clock.work()).saturating_sub(begin);
        self.counters.scavenging.add(worked);
        state.pacer.charge(trimmed);
        let pause = state.pacer.pause(
            nanoseconds(clock.now()),
            worked.saturating_sub(trimmed),
            granules,
            state.silent,
        );
        driver.state.set(state);
        match state.campaign {
            Some(_) => Duration::from_nanos(pause),
            None if state.silent && state.unpunched > 0 => Duration::from_nanos(pause),
            None if state.resting && state.settled == settle => Duration::MAX,
            None => Duration::from_nanos(pause.max(PERIOD)),
        }
    }

    /// Gives back up to `pages` free pages, or a few more where a huge page would be cut, at once, also of a heap that
    /// [releases lazily](crate::Config::release_lazily): what sleeping caches hold too. Returns how many pages. What is
    /// being released by another thread at the moment is not waited for.
    ///
    /// Cost: that of [`scavenge`](Self::scavenge), and a system call or two.
    pub fn release(&self, pages: PageCount) -> PageCount {
        self.timed(|| self.release_with(pages, || ()))
    }

    /// As [`release`](Self::release); `between` is called after each chunk in which there was work, 256 system calls at
    /// the most.
    pub(crate) fn release_with(&self, pages: PageCount, between: impl FnMut()) -> PageCount {
        self.flush_shards();
        self.seize_caches();
        self.scavenge_with(pages, false, between)
    }

    pub(super) fn granule_pages(&self) -> usize {
        (self.source.granule() >> G::PAGE_SHIFT).max(1)
    }

    /// Counts, and plans.
    fn look(&self, state: &mut State, now: u64, settle: bool, above: &impl Above, trim: impl FnOnce(bool) -> bool) {
        let mut look = self.see(above.activity(), state.retention.turns(now), false);
        let backed = look.live + look.idle;
        let needed = if backed > state.backed { backed } else { look.live };
        let Advice { keep, silent: quiet } = state.retention.look(now, look.live, needed, look.print);
        state.looks = state.looks.wrapping_add(1);
        // Who has all he needs in his caches looks silent. So they are emptied first, and if nobody misses them until
        // the next look, nobody is there.
        let (asks, silent) = (quiet && !state.asked, quiet && state.asked);
        state.asked = quiet;
        // Once a second, too: some of the program's threads may sleep.
        let fell_silent = silent && !state.silent;
        // As much as there should be, where parts of what is live have no memory.
        let goal = self.driver.ceiling.goal().saturating_add(self.holes().0);
        let over = look.live + look.idle > goal;
        let settles = settle && silent && !state.settled;
        if asks || fell_silent || settles || state.looks.is_multiple_of(LOOKS_TO_TRIM) {
            state.settled = trim(quiet || over) && settle || state.settled;
            self.flush_shards();
            self.seize_caches();
            look = self.see(above.activity(), false, fell_silent);
            state.retention.overlook(look.print);
        }
        if asks {
            (state.silent, state.resting, state.backed) = (false, false, look.live + look.idle);
            return;
        }
        let over = look.live + look.idle > goal;
        if over && !state.over && self.lazily {
            // What has been released lazily is to go now.
            look = self.see(above.activity(), false, true);
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
        // What cannot be released is not asked for again.
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

    /// Counts every chunk and every cache, and writes down what is seen of the chunks. `anew`: none is done with.
    fn see(&self, activity: u64, turned: bool, anew: bool) -> Look {
        let mut look = Look {
            print: activity,
            ..Look::default()
        };
        let grown = self.set.grown();
        let mut free = 0;
        for chunk in 0..grown.div_ceil(G::CHUNK_PAGES) {
            let (bits, scavenged) = (self.set.free.chunk::<G>(chunk), self.set.scavenged.chunk::<G>(chunk));
            let (mut here, mut here_idle, mut here_free, mut print) = (0, 0, 0, 0);
            for (&bits, &scavenged) in bits[..G::CHUNK_WORDS].iter().zip(&scavenged[..G::CHUNK_WORDS]) {
                here += bits.count_ones() as usize;
                here_idle += (bits & !scavenged).count_ones() as usize;
                print = mix(mix(print, bits), scavenged);
                here_free = mix(here_free, bits);
            }
            free += here;
            look.idle += here_idle;
            look.print = mix(look.print, here_free);
            // Relaxed: one writer, whose turn it is.
            let entry = self.driver.chunks.get(chunk);
            let seen = Chunk::unpack(entry.load(Ordering::Relaxed)).seen(G::CHUNK_PAGES - here, print, turned);
            let done = seen.done && !anew;
            look.settled += if done { here_idle } else { 0 };
            entry.store(Chunk { done, ..seen }.pack(), Ordering::Relaxed);
        }
        self.for_each_slot(|slot| {
            let state = slot.state();
            look.cached += state.pages;
            look.idle += state.pages - state.scavenged.min(state.pages);
            for (word, pages) in slot.words() {
                look.print = mix(look.print, pages ^ word as u64);
            }
            look.print = mix(look.print, state.refills);
        });
        look.live = grown.saturating_sub(free).saturating_sub(look.cached);
        look
    }

    /// Works on a campaign while `go_on`. Lazily: nothing tells afterwards which pages of a chunk have gone, so all of
    /// them go, first of chunks that are free altogether, and then it is done with.
    fn work(&self, campaign: &mut Campaign, lazily: bool, go_on: impl Fn() -> bool) -> Released {
        let granule = self.granule_pages();
        let mut all = Released::default();
        let mut passed_over = 0;
        while !campaign.is_over() && (passed_over % PASSED_OVER != 0 || go_on()) {
            let Some(chunk) = campaign.end.checked_sub(1) else {
                break;
            };
            passed_over += 1;
            // Relaxed: as in `see`.
            let entry = self.driver.chunks.get(chunk);
            let known = Chunk::unpack(entry.load(Ordering::Relaxed));
            let huge = self.huge_pages();
            let fits = granule <= G::CHUNK_PAGES;
            if fits && known.is_ready(G::CHUNK_PAGES, campaign.forced) {
                passed_over = 0;
                let least = if campaign.huge { huge.max(granule) } else { granule };
                let (idle, wanted) = (self.idle_in(chunk), campaign.pages);
                let released = match (lazily, campaign.huge) {
                    (false, _) => self.scavenge_chunk(chunk, least, wanted, lazily),
                    (true, true) if idle < G::CHUNK_PAGES => Released::default(),
                    (true, _) => self.scavenge_chunk(chunk, granule, G::CHUNK_PAGES, lazily),
                };
                campaign.pages = wanted.saturating_sub(released.pages);
                all.add(released);
                // Done with when all has gone; else unless enough had before its end was reached.
                let done = released.pages >= idle || !campaign.huge && (lazily || campaign.pages > 0);
                entry.store(Chunk { done, ..known }.pack(), Ordering::Relaxed);
            }
            campaign.end = chunk;
            if chunk == 0 && campaign.huge {
                campaign.huge = false;
                campaign.end = self.set.grown().div_ceil(G::CHUNK_PAGES);
            }
        }
        all
    }

    /// Pages of a chunk that are free, and not marked as scavenged.
    fn idle_in(&self, chunk: usize) -> usize {
        let (free, scavenged) = (self.set.free.chunk::<G>(chunk), self.set.scavenged.chunk::<G>(chunk));
        let words = free[..G::CHUNK_WORDS].iter().zip(&scavenged[..G::CHUNK_WORDS]);
        words
            .map(|(free, scavenged)| (free & !scavenged).count_ones() as usize)
            .sum()
    }

    /// Whether no chunk is worth looking through, by force or not.
    fn is_done(&self) -> bool {
        let chunks = self.set.grown().div_ceil(G::CHUNK_PAGES);
        // Relaxed: as in `see`.
        let ready = |chunk| Chunk::unpack(self.driver.chunks.get(chunk).load(Ordering::Relaxed));
        !(0..chunks).any(|chunk| ready(chunk).is_ready(G::CHUNK_PAGES, true))
    }
}

impl Campaign {
    fn is_over(&self) -> bool {
        self.pages == 0 || self.end == 0 && !self.huge
    }
}

/// Stirs a number into a print.
fn mix(print: u64, number: u64) -> u64 {
    (print ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
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

    /// A layer above whose stores take 20 ms to empty, once a second, of a program that is never silent.
    #[test]
    fn what_emptying_stores_takes_is_paid_for() {
        let heap: PageHeap<Simulated> = PageHeap::new(Simulated::new(4096), Config::new(64 << 20)).unwrap();
        let (now, worked) = (Cell::new(Duration::from_secs(1)), Cell::new(Duration::ZERO));
        let pass = |time| now.set(now.get() + time);
        while now.get() < Duration::from_secs(101) {
            let pause = heap.tick_with(&|| now.get(), &Slow(&now, &worked));
            pass(pause.min(Duration::from_secs(20)));
        }
        // A hundredth, 250 ms, and the last one.
        let worked = worked.get().as_millis();
        assert!((500..=1000 + 250 + 20).contains(&worked), "{worked} ms in 100 s");
    }
}
