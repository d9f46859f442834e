//! Runs freed lately, put aside for the next block of exactly the same length, whichever thread needs it.
//!
//! ```text
//!                  runs × pages, first run
//!   aside         │ 1 × 300, 4096 │ 3 × 13, 700 │ ∅ │ ∅ │ ∅ │ ∅ │ ∅ │ ∅ │   of the whole heap, a cache line each
//!                   ▲                    └▶ 220 ─▶ 80                          linked through the table (`link.rs`)
//!                   └ here one thread begins to look, another elsewhere
//!
//!   free of 200 pages   ∅ := 1 × 200, its first page       no ∅: to the heap, as ever
//!   free of 13, at 900  3 × 13, 700 := 4 × 13, 900         900 leads to 700
//!   request for 300     takes that run                     a compare-exchange, and the bitmap is not touched
//!   request for 13      takes all four at once             one is the block, three go on the thread's shelf
//!   any other request   all of these go to the heap, then it is served from there; but a block that can grow as it
//!                       is just does
//! ```
//!
//! **Long runs.** A shelf keeps runs of up to 1 MiB for one thread, and no other request can use them meanwhile
//! (`shelf.rs`). For longer runs that would cost too much memory. So these lie aside only until somebody needs pages.
//! Whoever asks the heap for a page, or for anything but a block of one of these lengths, first gives all of them back.
//! So the heap is then as it would have been without this: it refuses nothing because of what lies here, and a block
//! that grows in place finds the same neighbours. (If two threads ask at the same moment, one may find the other with a
//! run in hand. Then the heap may grow, but no request is refused before that run has arrived. And whoever finds no
//! page looks here once more before it gives up: while it searched, a run may have been put here, and the page that was
//! free until then been taken. A request can be refused in vain all the same, if in that moment yet another thread has
//! taken that run out again, or if the search was that for a block's own run for want of a span (`room.rs`), which is
//! the very last.) The scavenger also gives them back first, each time it looks, and a heap over its soft limit puts
//! nothing aside.
//!
//! **Lots.** A run that a shelf does not take, because its thread asks for none of that length, lies aside on the same
//! terms, before others of its length: a lot, of up to 16. A thread that needs one takes the whole lot, or none. So a
//! buffer that one thread fills and another drops goes back to the first without a search for free pages, and most of
//! the time without a locked instruction on its way out. Whoever has taken a lot keeps its runs as its own
//! (`shelf.rs`).
//!
//! **Where a thread begins.** With a long run, each thread looks through the places from one of its own, chosen by a
//! hash of what identifies it, so that threads which allocate and free long blocks at the same time write to different
//! cache lines: when they wrote to the same one, a pair took 76 ns instead of 13 on processors that are far from each
//! other. With a lot, which goes from thread to thread anyway, all begin at the first place, so that lots of one length
//! meet. In which order a thread looks matters for nothing else.
//!
//! What all that saves is the way through the set of free pages, in which a run of 2 MiB is 256 bits, cleared and set
//! again one word after the other, with the summaries above.
//!
//! I21: a run that lies here is entered in the table as shelved, and in no other place. A place is changed by one
//! compare-exchange or swap, so a lot has one taker; whoever has taken it owns its runs, and the links between them. A
//! word says the length of its runs and which one is first. So if a place holds the same word again, a run that was
//! about to lead to that first one still may; and who takes the lot takes one of that length, and so many.
//!
//! Worked: a program renders frames of 8 MiB. The free of each puts 1024 pages aside; the next frame is the same run.
//! If it then needs one page for a span of small blocks, the 1024 go to the heap, and the page is the lowest free one.
//!
//! **Up to 64 MiB, or 16 runs.** Giving a run back takes 0.25 ns for each page, and 100 more, and whoever needs a page
//! next waits for that: for 16 µs at most. With longer blocks the saving is nothing beside the page faults of those who
//! use them.
//!
//! Cost: 10 to 20 ns for a block allocated and freed, of whatever length; through the heap it is what giving it back
//! takes, twice. Eight loads, of as many cache lines, for each run of pages that the object layer takes from the heap.

#![forbid(unsafe_code)]

use crate::sync::{ASIDE, AtomicU64, Ordering};
use crate::units::{PageCount, PageIndex, PageRun};

use super::link::Link;

/// In a word the first page is below, then the length of each run, then their number. A heap has fewer than 2³² pages.
const LENGTH_SHIFT: u32 = 32;
const LENGTH_BITS: u32 = 14;
const RUNS_SHIFT: u32 = LENGTH_SHIFT + LENGTH_BITS;

/// The longest run that may lie here, in pages.
pub const MOST_ASIDE: usize = (1 << LENGTH_BITS) - 1;

/// The most runs in a lot: so many are given back in 2 µs, as is a long run.
pub const MOST_RUNS: usize = 16;

/// Runs of one length, linked through the table. The first one is known, and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lot(u64);

impl Lot {
    /// One run.
    const fn of(run: PageRun) -> Self {
        Self(1 << RUNS_SHIFT | (run.pages().0 as u64) << LENGTH_SHIFT | run.start().0 as u64)
    }

    /// What a place holds.
    const fn in_place(word: u64) -> Option<Self> {
        if word == 0 { None } else { Some(Self(word)) }
    }

    /// The first page of the first run.
    #[inline]
    #[must_use]
    pub const fn first(self) -> PageIndex {
        PageIndex(self.0 as u32 as usize)
    }

    /// How many runs there are.
    #[inline]
    #[must_use]
    pub const fn runs(self) -> usize {
        (self.0 >> RUNS_SHIFT) as usize
    }

    /// How long each of them is.
    #[inline]
    #[must_use]
    pub const fn length(self) -> PageCount {
        PageCount((self.0 >> LENGTH_SHIFT) as usize & MOST_ASIDE)
    }

    /// The pages of all of them.
    #[inline]
    #[must_use]
    pub const fn pages(self) -> PageCount {
        PageCount(self.runs() * self.length().0)
    }

    /// The lot with a run of its length before the others.
    #[inline]
    const fn behind(self, run: PageRun) -> Self {
        Self(Self::of(run).0 + ((self.runs() as u64) << RUNS_SHIFT))
    }
}

/// What a taker has entered while it has runs in hand: what a requester waits for, and what it compares. It leaves the
/// latter first: who need not wait any longer must see that it was left.
#[derive(Debug)]
pub struct Passes<C, W> {
    // In the order in which they are dropped.
    _compared: C,
    _waited_for: W,
}

impl<C, W> Passes<C, W> {
    /// Enters both.
    #[inline]
    pub fn enter(wait_for: impl FnOnce() -> W, compare: impl FnOnce() -> C) -> Self {
        let _waited_for = wait_for();
        let _compared = compare();
        Self { _compared, _waited_for }
    }
}

/// A lot, or 0. In a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct Place(AtomicU64);

impl Place {
    /// Puts a run here, if nothing is. Returns whether it did.
    #[inline]
    fn put(&self, run: PageRun) -> bool {
        // Relaxed: a guess, which the exchange checks; and nothing is read if it fails. Release: hands over the run's
        // pages and its entry; partners: `take`, `empty`.
        self.0.load(Ordering::Relaxed) == 0
            && self
                .0
                .compare_exchange(0, Lot::of(run).0, Ordering::Release, Ordering::Relaxed)
                .is_ok()
    }

    /// Takes a long run of this length, if one is here. Returns its first page.
    #[inline]
    fn take(&self, length: PageCount) -> Option<PageIndex> {
        let sought = Lot::of(PageRun::known(0, length.0)).0;
        // Relaxed: a guess, which the exchange checks; and nothing is read if it fails.
        let word = self.0.load(Ordering::Relaxed);
        let taken = word >> LENGTH_SHIFT == sought >> LENGTH_SHIFT
            && self
                .0
                // Acquire: pairs with the release of `put`. Relaxed: as above.
                .compare_exchange(word, 0, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        taken.then(|| Lot(word).first())
    }
}

/// At which place a thread begins: a multiplicative hash of what identifies it, an address in its stack or near it.
/// Such addresses are a stack's length apart, mostly with a page more, so the factor (that of SplitMix64) is one of
/// those that take threads so far apart to different places; the golden ratio's leads glibc's to every third.
#[inline]
const fn first_for(thread: usize) -> usize {
    const FACTOR: usize = (0x94D0_49BB_1331_11EB_u64 >> (u64::BITS - usize::BITS)) as usize;
    thread.wrapping_mul(FACTOR) >> (usize::BITS - ASIDE.ilog2())
}

// So each thread sees all places.
const _: () = assert!(ASIDE.is_power_of_two() && ASIDE > 1);

/// The runs put aside.
#[derive(Debug)]
pub struct Aside {
    places: [Place; ASIDE],
}

impl Aside {
    /// None.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "public in models only")]
    pub fn new() -> Self {
        Self {
            places: core::array::from_fn(|_| Place(AtomicU64::new(0))),
        }
    }

    /// All places, from that on at which this thread begins.
    #[inline]
    fn seen_by(&self, thread: usize) -> impl Iterator<Item = &Place> {
        let first = first_for(thread);
        (0..ASIDE).map(move |step| &self.places[(first ^ step) % ASIDE])
    }

    /// Puts a run of up to [`MOST_ASIDE`] pages aside that the caller owns, if a place is empty. `thread` identifies
    /// the caller (`sync::thread`). Returns whether it did.
    #[inline]
    #[must_use]
    pub fn put(&self, run: PageRun, thread: usize) -> bool {
        self.seen_by(thread).any(|place| place.put(run))
    }

    /// Puts such a run before others of its length, if all of them are not more than `most` pages and [`MOST_RUNS`], or
    /// where a place is empty. `link` is the run's. Returns whether it did.
    #[inline]
    #[must_use]
    pub fn join(&self, run: PageRun, most: PageCount, link: &Link) -> bool {
        self.places.iter().any(|Place(place)| {
            // Relaxed: a guess, as in `put`. Which of the runs are behind the first one is not looked at.
            let word = place.load(Ordering::Relaxed);
            let has_room = |lot: &Lot| {
                lot.length() == run.pages() && lot.runs() < MOST_RUNS && lot.pages().0 + run.pages().0 <= most.0
            };
            let joined = match Lot::in_place(word) {
                None => Lot::of(run),
                Some(lot) if has_room(&lot) => lot.behind(run),
                Some(_) => return false,
            };
            link.set(Lot::in_place(word).map(Lot::first));
            // Release: hands over the run's pages, its entry and its link, beside what others have handed over with
            // theirs, since this exchange goes on with their release; partners: `take_lot`, `empty`. Relaxed: as above.
            place
                .compare_exchange(word, joined.0, Ordering::Release, Ordering::Relaxed)
                .is_ok()
        })
    }

    /// Takes a long run of exactly so many pages, if there is one; returns its first page. It is used at once, so
    /// nobody needs to see who has it. `thread` as for [`put`](Self::put).
    #[inline]
    #[must_use]
    pub fn take(&self, length: PageCount, thread: usize) -> Option<PageIndex> {
        self.seen_by(thread).find_map(|place| place.take(length))
    }

    /// Takes runs of exactly so many pages, if there are any, and at most `others` pages of them beside one. `enter` is
    /// called first, as in [`empty`](Self::empty), and the pass returned.
    #[inline]
    #[must_use]
    pub fn take_lot<P>(&self, length: PageCount, others: PageCount, enter: impl Fn() -> P) -> Option<(Lot, P)> {
        let is_such = |lot: &Lot| lot.length() == length && lot.pages().0 - length.0 <= others.0;
        self.places.iter().find_map(|Place(place)| {
            // Relaxed: a guess, which the exchange checks; and nothing is read if it fails.
            let lot = Lot::in_place(place.load(Ordering::Relaxed)).filter(is_such)?;
            let pass = enter();
            // Acquire: pairs with the releases of `put` and `join`. Release: as in `empty`. Relaxed: as above.
            place
                .compare_exchange(lot.0, 0, Ordering::AcqRel, Ordering::Relaxed)
                .ok()?;
            Some((lot, pass))
        })
    }

    /// Whether there is any.
    #[inline]
    #[must_use]
    pub fn has_any(&self) -> bool {
        // Acquire: who finds a place empty sees that the thread which emptied it is on its way; partners: `take_lot`,
        // `empty`. (If another run was put there since and taken, that was by read-modify-writes, which go on with that
        // release.)
        self.places.iter().any(|place| place.0.load(Ordering::Acquire) != 0)
    }

    /// Whether there is none, and `nobody` has come or gone meanwhile. In this order: if a lot was there and is gone,
    /// who took it had come first.
    #[must_use]
    pub fn is_bare_and(&self, nobody: impl FnOnce() -> bool) -> bool {
        !self.has_any() && nobody()
    }

    /// Takes all lots and passes them to `give`, one by one. `enter` is called first: as long as what it returns lives,
    /// no request is refused, because one of these runs may be in hand.
    pub fn empty<P>(&self, enter: impl FnOnce() -> P, mut give: impl FnMut(Lot)) {
        let _pass = enter();
        for Place(place) in &self.places {
            // Acquire, on the load: a place that is empty needs no exchange, but it may be empty because somebody is on
            // the way with what lay there, as in `has_any`, which need not have looked there. Acquire, on the exchange:
            // pairs with the releases of `put` and `join`. Release: after the pass was entered; partner: `has_any`.
            if place.load(Ordering::Acquire) != 0
                && let Some(lot) = Lot::in_place(place.swap(0, Ordering::AcqRel))
            {
                give(lot);
            }
        }
    }

    /// How many pages lie here. Any thread may call this: a snapshot.
    #[must_use]
    pub fn pages(&self) -> PageCount {
        // Relaxed: a statistic.
        let words = self.places.iter().map(|place| place.0.load(Ordering::Relaxed));
        PageCount(words.filter_map(Lot::in_place).map(|lot| lot.pages().0).sum())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::cell::RefCell;
    use std::string::String;

    use super::*;

    fn lot_of(aside: &Aside, length: usize, others: usize) -> Option<Lot> {
        let taken = aside.take_lot(PageCount(length), PageCount(others), || ());
        taken.map(|(lot, ())| lot)
    }

    #[test]
    fn a_run_is_taken_once_by_its_length() {
        let aside = Aside::new();
        assert!(!aside.has_any() && aside.take(PageCount(129), 7).is_none());
        let runs = core::array::from_fn::<_, ASIDE, _>(|at| PageRun::known(at << 10, 129 + at / 2));
        assert!(runs.iter().all(|&run| aside.put(run, 0)));
        assert!(!aside.put(PageRun::known(1 << 20, 500), 7), "there is no place left");
        assert_eq!(aside.pages(), PageCount(2 * (129 + 130 + 131 + 132)));
        let taken = [131, 131, 131, 500].map(|pages| aside.take(PageCount(pages), 0));
        assert_eq!(taken, [Some(PageIndex(4 << 10)), Some(PageIndex(5 << 10)), None, None]);
        let last = PageRun::known(u32::MAX as usize - MOST_ASIDE, MOST_ASIDE);
        assert!(aside.put(last, 7));
        let mut left = std::vec::Vec::new();
        aside.empty(
            || (),
            |lot| left.push((lot.runs(), PageRun::known(lot.first().0, lot.length().0))),
        );
        left.sort_by_key(|(_, run)| run.start().0);
        let expected = [0, 1, 2, 3, 6, 7].map(|at| runs[at]).into_iter().chain([last]);
        assert!(left.into_iter().eq(expected.map(|run| (1, run))));
        assert!(!aside.has_any() && aside.pages() == PageCount::ZERO);
    }

    /// Of equal runs each thread gets its own again, unless there is none.
    #[test]
    fn threads_begin_at_places_of_their_own() {
        let (aside, pages) = (Aside::new(), PageCount(512));
        // glibc's default stacks, with a page between them.
        let mut threads: std::vec::Vec<usize> = (1..=32).map(|at| !(at * 0x80_1000)).collect();
        let mut first: std::vec::Vec<_> = threads[..8].iter().map(|&thread| first_for(thread)).collect();
        first.sort_unstable();
        first.dedup();
        assert!(first.len() >= 6, "{first:?}");
        threads.sort_by_key(|&thread| first_for(thread));
        threads.dedup_by_key(|thread| first_for(*thread));
        assert_eq!(threads.len(), ASIDE, "some begin at each");
        let runs = core::array::from_fn::<_, ASIDE, _>(|at| PageRun::known(at << 10, pages.0));
        let both = || threads.iter().zip(runs);
        assert!(both().all(|(&thread, run)| aside.put(run, thread)));
        assert!(both().all(|(&thread, run)| aside.take(pages, thread) == Some(run.start())));
        assert!(aside.put(runs[1], threads[1]) && aside.take(pages, threads[0]) == Some(runs[1].start()));
    }

    #[test]
    fn a_taker_leaves_first_what_is_compared() {
        struct Told<'a>(char, &'a RefCell<String>);
        impl Drop for Told<'_> {
            fn drop(&mut self) {
                self.1.borrow_mut().push(self.0.to_ascii_uppercase());
            }
        }
        let told = RefCell::new(String::new());
        let enter = |name| {
            told.borrow_mut().push(name);
            Told(name, &told)
        };
        drop(Passes::enter(|| enter('w'), || enter('c')));
        assert_eq!(*told.borrow(), "wcCW");
    }

    /// A run that is put aside in between was put there by somebody who was not missed.
    #[test]
    fn the_places_are_looked_at_before_it_is_asked_whether_anybody_has_come() {
        let aside = Aside::new();
        let put = |at: usize| aside.put(PageRun::known(at, 500), 0);
        assert!(aside.is_bare_and(|| put(0)));
        assert!(!aside.is_bare_and(|| unreachable!("there is one")));
        assert!(aside.take(PageCount(500), 0).is_some() && !aside.is_bare_and(|| false));
    }

    /// A lot comes out as a whole, if there is room for it, and leads from the run put there last to the first.
    #[test]
    fn a_lot_is_taken_whole() {
        let aside = Aside::new();
        let links: [Link; 4] = core::array::from_fn(|_| Link::none());
        links.iter().for_each(|link| link.set(Some(PageIndex(99))));
        let join = |at: usize, pages| {
            let most = PageCount(15);
            aside.join(PageRun::known(10 * at, pages), most, &links[at])
        };
        assert!(join(1, 5) && join(2, 5) && join(3, 5) && join(0, 6));
        let leads = links.each_ref().map(Link::get);
        assert_eq!(leads, [None, None, Some(PageIndex(10)), Some(PageIndex(20))]);
        assert_eq!(aside.pages(), PageCount(21));
        assert_eq!(lot_of(&aside, 5, 9), None, "no room for two others");
        let lot = lot_of(&aside, 5, 10).unwrap();
        assert_eq!((lot.first(), lot.runs()), (PageIndex(30), 3));
        assert_eq!((lot.length(), lot.pages()), (PageCount(5), PageCount(15)));
        assert_eq!(lot_of(&aside, 5, 10), None);
        assert_eq!(aside.take(PageCount(6), 0), Some(PageIndex(0)));
    }

    /// A lot that is full, and others of its length, are in several places, as long as there are any.
    #[test]
    fn full_lots_take_places() {
        let aside = Aside::new();
        let link = Link::none();
        let joined = (0..).take_while(|at| aside.join(PageRun::known(10 * at, 5), PageCount(14), &link));
        assert_eq!(joined.count(), 2 * ASIDE);
        let lots = core::iter::from_fn(|| lot_of(&aside, 5, 5));
        assert!(lots.map(Lot::runs).eq([2; ASIDE]));
    }
}
