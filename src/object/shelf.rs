//! A thread's shelf: runs of pages freed lately, kept for the next large block of the same length.
//!
//! ```text
//!   length    5   6   7 … 16 │ 18  20 … 32 │ 36 … 64 │ 72 … 128      pages; a step of one, two, four, eight
//!   hand      ∅  300  ∅    ∅ │  ∅  96    ∅ │  ∅    ∅ │  ∅    ∅       one run, by its first page
//!   list      ∅  412  ∅    ∅ │  ∅   ∅    ∅ │  ∅    ∅ │  ∅    ∅       those freed while there was one in the hand
//!                 └▶ 9000 ─▶ ∅                                       linked through the table
//! ```
//!
//! Blocks longer than 128 pages are never shelved (see `aside.rs`). One that is aligned to more than a page gets
//! exactly the pages it needs (`length.rs`). If that is a length, its run is shelved like any other when it is freed;
//! and such a block is the run in the hand, or the first one on the list, if that happens to be aligned. So runs of one
//! to four pages, too, come here.
//!
//! **The hand** holds one run of each length. A program that alternately allocates and frees one large block finds it
//! there, and no link is written or followed: a free takes two stores, an allocation two. All hands together hold up
//! to 1,536 pages, and all lists together up to 2,560, so a shelf holds 32 MiB at most.
//!
//! **Its share.** A thread's lists hold at most an eighth of the heap's limit, halved each time the number of threads
//! doubles that have a share. A thread has one from the first run on that goes on a list, until its shelf is emptied:
//! when it ends, or rests, or others need the pages. So the lists of all shelves together hold 40 MiB at most, once
//! their threads have looked how many they are, and used up what lies there too much. A thread looks when it finds no
//! run. Until then its lists keep what they took when there were fewer: if all filled theirs one after the other, 20
//! MiB, and as much again for each doubling. (Once all threads counted, whatever they used: beside 250 that slept, the
//! lists of one had room for a single block of 100 kB.)
//!
//! **Wanted.** A list accepts as many runs as have been asked of it, one by one or a lot (`transfer.rs`). Each
//! allocation that finds the hand of its length empty counts as one request; with 255 the list accepts what there is
//! room for. Runs that other threads allocated, or that were shortened since, lie aside or go to the heap instead,
//! where they serve all threads while still warm. (Without this, a thread that dropped blocks made by another kept 17
//! MiB; and a thread whose buffers grow to 1 MiB, are cut to fit and freed, began each on fresh pages:
//! `docs/measurements.md`.)
//!
//! **Surplus.** A block that finds no run of its length is cut from a longer run, if there are many of those, and the
//! rest goes to the heap. So runs that a program asked for once and needs no longer do not stay. And the part cut off
//! is free, so that the block can grow in place.
//!
//! Worked: three blocks of 64 KiB are freed. The first lies in the hand of 8 pages; the third is the head of that
//! length's list, and links to the second. The next such blocks are the first, the third, the second.
//!
//! A shelf belongs to its thread, as the magazines do: the scavenger takes its runs while the thread sleeps (see
//! `thread.rs`). Hands and links are kept here and in the table of spans (`span.rs`), so the pages are not touched.
//!
//! Cost: 2 ns to shelve a run and take it back; ~50 ns without a shelf, and 1 µs for each page whose memory the
//! scavenger had taken meanwhile.

#![forbid(unsafe_code)]

use core::hint::cold_path;

use crate::sync::{AtomicU8, AtomicU32, Ordering};
use crate::units::{PageCount, PageIndex, PageRun};

use super::aside::Lot;
use super::length::{LENGTHS, Length, length_at};
use super::link::{Link, Nth};
use super::span::Span;
use super::spans::Spans;

/// The most pages on a shelf: 32 MiB.
const SHELF_PAGES: u32 = 4096;

/// How many of those the lists may hold when there is one thread: each hand holds one run of its length.
const LISTED_PAGES: u32 = {
    let (mut pages, mut index) = (SHELF_PAGES, 0);
    while index < LENGTHS {
        pages -= length_at(index) as u32;
        index += 1;
    }
    pages
};

/// The lists of all shelves may hold this fraction of the heap's limit, or twice that.
const LIMIT_PART: usize = 8;

/// More runs are wanted than can be counted. The list takes what there is room for, such as 512 runs of 40 KiB, and
/// when there is none its count begins anew. (For as many runs of 88 KiB or more there never is.)
const UNCOUNTED: u8 = u8::MAX;

/// A list with this many runs has a surplus, if the program now asks for other lengths.
const MANY: usize = 8;

/// Room for one run.
#[derive(Debug)]
pub struct Hand(Link);

impl Hand {
    /// The first page of the run in it, if there is one.
    #[inline(always)]
    pub fn get(&self) -> Option<Nth> {
        self.0.nth()
    }

    /// Fast path: takes out the run, which has this length and this entry; the caller owns it.
    #[inline(always)]
    pub fn take(&self, length: Length, entry: &Span) {
        self.0.set(None);
        entry.unshelve(length);
    }

    /// Fast path: puts in a large block of this length, if the hand is empty. The caller owned the block, it is of the
    /// shelf's heap and has its entry in the table. Returns whether it did.
    #[inline(always)]
    #[must_use]
    pub fn put(&self, length: Length, start: Nth, entry: &Span) -> bool {
        let is_empty = self.get().is_none();
        if is_empty {
            entry.shelve(length);
            self.0.set_nth(start);
        }
        is_empty
    }
}

/// One thread's shelf. All-zero bytes: empty.
#[derive(Debug)]
pub struct Shelf {
    /// One run for each length. I17: what a hand or a list leads to is entered as shelved in the table of the shelf's
    /// heap, except between the two stores of a put or a take. Only the child of a fork, and a thread that inherits a
    /// dead thread's structure, can see that state, so `clear` checks. Callers of put and take keep the rest: length,
    /// page and entry belong together.
    pub(super) hands: [Hand; LENGTHS],
    /// For each length, the run put on its list last; the others are linked behind it.
    lists: [Link; LENGTHS],
    /// For each length, how many more runs its list may take, or [`UNCOUNTED`].
    wanted: [AtomicU8; LENGTHS],
    /// Pages of the runs on lists.
    listed: AtomicU32,
    /// The limit on those pages. 0: it has no share, and the lists are empty.
    most: AtomicU32,
}

impl Shelf {
    // Relaxed throughout: one owner, or one seizer.

    /// How much the lists of one shelf may hold, given the pages the heap may have and how many shelves have a share.
    #[inline]
    pub fn share_of(limit: PageCount, shelves: usize) -> PageCount {
        let all = (limit.0 / LIMIT_PART).min(LISTED_PAGES as usize);
        PageCount(all.checked_shr((shelves | 1).ilog2()).unwrap_or(0))
    }

    /// Sets anew how much the lists may hold. A thread calls it after it has found no run on its shelf. The lists may
    /// hold more for a while.
    #[inline]
    pub fn share(&self, most: PageCount) {
        // At least a page: 0 would say that it has no share, and it counts.
        // Relaxed: see above. At most `LISTED_PAGES`.
        self.most.store(most.0.max(1) as u32, Ordering::Relaxed);
    }

    /// Whether it has a share, and so counts.
    #[inline]
    pub fn has_share(&self) -> bool {
        // Relaxed: see above; to another thread a hint.
        self.most.load(Ordering::Relaxed) > 0
    }

    /// A number that changes with what lies here; 0 if nothing does, and it has no share. A snapshot.
    pub fn print(&self) -> usize {
        self.pages().0 + usize::from(self.has_share())
    }

    /// What its lists may hold: at least a page if it has a share.
    pub fn most(&self) -> PageCount {
        // Relaxed: see above.
        PageCount(self.most.load(Ordering::Relaxed) as usize)
    }

    /// How many pages of runs of this length may go on its list all at once, given what all lists may hold: none if
    /// there are any.
    pub fn room_for(&self, length: Length, most: PageCount) -> PageCount {
        let Some(wanted) = self.wanted.get(length.index()).filter(|_| !self.is_listed(length)) else {
            return PageCount::ZERO;
        };
        // Relaxed, twice: see above.
        let wanted = usize::from(wanted.load(Ordering::Relaxed)) * length.pages();
        let listed = self.listed.load(Ordering::Relaxed) as usize;
        PageCount(wanted.min(most.0.saturating_sub(listed)))
    }

    /// Takes over runs of this length that lay aside, for which there is room. The first one is the caller's, the
    /// others are its list.
    pub fn take_lot(&self, spans: &Spans, length: Length, lot: Lot) -> PageIndex {
        let (start, others) = (lot.first(), lot.runs() - 1);
        let (entry, index) = (spans.entry(start), length.index());
        if others > 0
            && let (Some(list), Some(wanted)) = (self.lists.get(index), self.wanted.get(index))
        {
            list.copy(&entry.behind);
            // Relaxed, four times: see above.
            let listed = self.listed.load(Ordering::Relaxed) + (others * length.pages()) as u32;
            self.listed.store(listed, Ordering::Relaxed);
            let before = wanted.load(Ordering::Relaxed);
            if before != UNCOUNTED {
                wanted.store(before.saturating_sub(others as u8), Ordering::Relaxed);
            }
        }
        entry.unshelve(length);
        start
    }

    /// How many pages lie on the shelf. Any thread may call this: a snapshot.
    pub fn pages(&self) -> PageCount {
        let held = self.hands.iter().enumerate().filter(|(_, hand)| hand.get().is_some());
        let held: usize = held.map(|(index, _)| length_at(index)).sum();
        // Relaxed: a statistic to all but the owner.
        PageCount(held + self.listed.load(Ordering::Relaxed) as usize)
    }

    /// Whether its list would take a run of this length, had it room.
    pub fn is_wanted(&self, length: Length) -> bool {
        // Relaxed: see above.
        self.wanted
            .get(length.index())
            .is_some_and(|wanted| wanted.load(Ordering::Relaxed) > 0)
    }

    /// Whether there is a run of this length on its list.
    pub fn is_listed(&self, length: Length) -> bool {
        self.lists.get(length.index()).is_some_and(|list| list.get().is_some())
    }

    /// The first pages of the runs of this length that leave next: that in the hand, and that on its list.
    pub fn next_of(&self, length: Length) -> [Option<PageIndex>; 2] {
        let index = length.index();
        [
            self.hands.get(index).and_then(|hand| hand.0.get()),
            self.lists.get(index).and_then(Link::get),
        ]
    }

    /// Takes the latest run of this length off its list, if there is one, and returns its first page. Counts as a
    /// request.
    #[inline(always)]
    pub fn take_listed(&self, spans: &Spans, length: Length) -> Option<PageIndex> {
        let (list, wanted) = (self.lists.get(length.index())?, self.wanted.get(length.index())?);
        // Relaxed, twice: see above. (Without the branch this takes one more register, which must be saved.)
        let before = wanted.load(Ordering::Relaxed);
        if before != UNCOUNTED {
            wanted.store(before + 1, Ordering::Relaxed);
        }
        let start = list.get()?;
        let entry = spans.entry_if(start)?;
        list.copy(&entry.behind);
        entry.unshelve(length);
        // Relaxed: see above.
        let listed = self.listed.load(Ordering::Relaxed);
        self.listed
            .store(listed.wrapping_sub(length.pages() as u32), Ordering::Relaxed);
        Some(start)
    }

    /// Puts a large block of this length on its list, if that may take more. The caller owned the block, and it has
    /// its entry in the table. Returns whether it did.
    #[inline(always)]
    #[must_use]
    pub fn put_listed(&self, length: Length, start: PageIndex, entry: &Span) -> bool {
        let index = length.index();
        let (Some(list), Some(wanted)) = (self.lists.get(index), self.wanted.get(index)) else {
            return false;
        };
        // Relaxed, four times: see above.
        let listed = self.listed.load(Ordering::Relaxed) + length.pages() as u32;
        let before = wanted.load(Ordering::Relaxed);
        let Some(left) = before.checked_sub(1) else {
            cold_path();
            return false;
        };
        if listed > self.most.load(Ordering::Relaxed) {
            cold_path();
            if before == UNCOUNTED && self.has_share() {
                wanted.store(0, Ordering::Relaxed);
            }
            return false;
        }
        wanted.store(left + u8::from(before == UNCOUNTED), Ordering::Relaxed);
        entry.behind.copy(list);
        entry.shelve(length);
        list.set(Some(start));
        // Relaxed: see above.
        self.listed.store(listed, Ordering::Relaxed);
        true
    }

    /// Takes the latest run of the shortest longer length that has many; also takes it out of the table. For a thread
    /// that finds no run of its length and would go to the heap while its shelf fills with others. O(runs looked at):
    /// a few for each length.
    pub fn take_surplus(&self, spans: &Spans, length: Length) -> Option<PageRun> {
        // Relaxed: see above. All lists together may be too short for one with many longer runs.
        if self.listed.load(Ordering::Relaxed) as usize <= MANY * length.pages() {
            return None;
        }
        let longer = length.index() + 1..LENGTHS;
        let is_many = |list: &Link| {
            let next = |start: &PageIndex| spans.entry(*start).behind.get();
            core::iter::successors(list.get(), next).nth(MANY - 1).is_some()
        };
        let (index, list) = longer
            .zip(self.lists.get(length.index() + 1..)?)
            .find(|(_, list)| is_many(list))?;
        let start = list.get()?;
        let entry = spans.entry(start);
        list.copy(&entry.behind);
        entry.leave();
        // Relaxed: see above.
        let listed = self.listed.load(Ordering::Relaxed);
        self.listed
            .store(listed.wrapping_sub(length_at(index) as u32), Ordering::Relaxed);
        Some(PageRun::known(start.0, length_at(index)))
    }

    /// Takes everything off, and its share; the runs leave the table too. Also used in the child of a fork, where the
    /// owner is absent and may have been anywhere in a put or take. Then the run it had in hand is lost, perhaps with
    /// those linked behind it, but no run comes out that is not on the shelf.
    pub fn clear(&self, spans: &Spans, mut gone: impl FnMut(PageRun)) {
        for (index, (hand, list)) in self.hands.iter().zip(&self.lists).enumerate() {
            let mut leave = |start: PageIndex| {
                let entry = spans.entry(start);
                let shelved = entry.is_shelved();
                if shelved {
                    entry.leave();
                    gone(PageRun::known(start.0, length_at(index)));
                }
                shelved
            };
            if let Some(start) = hand.0.get() {
                hand.0.set(None);
                leave(start);
            }
            while let Some(start) = list.get() {
                list.set(spans.entry(start).behind.get());
                if !leave(start) {
                    list.set(None);
                }
            }
        }
        // Relaxed, twice: see above.
        self.listed.store(0, Ordering::Relaxed);
        self.most.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use core::alloc::Layout;

    use super::super::length::MOST_PAGES;
    use super::super::size_class::PAGE_BYTES;
    use super::*;

    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * PAGE_BYTES, 8).unwrap()
    }

    fn empty() -> Shelf {
        Shelf {
            hands: core::array::from_fn(|_| Hand(Link::none())),
            lists: core::array::from_fn(|_| Link::none()),
            wanted: core::array::from_fn(|_| AtomicU8::new(u8::MAX)),
            listed: AtomicU32::new(0),
            most: AtomicU32::new(LISTED_PAGES),
        }
    }

    /// Puts a block of `pages` pages that begins at `start`.
    fn put(shelf: &Shelf, spans: &Spans, start: usize, pages: usize) -> bool {
        let length = Length::of(layout(pages)).unwrap();
        let entry = spans.entry(PageIndex(start));
        entry.enter_large(length.pages(), Some(length));
        let hand = &shelf.hands[length.index()];
        hand.put(length, Nth::new(start + 1), entry) || shelf.put_listed(length, PageIndex(start), entry)
    }

    /// Takes one, from the hand first.
    fn take(shelf: &Shelf, spans: &Spans, length: Length) -> Option<PageIndex> {
        let hand = &shelf.hands[length.index()];
        let start = hand.0.get().inspect(|start| hand.take(length, spans.entry(*start)));
        start.or_else(|| shelf.take_listed(spans, length))
    }

    /// The run in the hand comes out first, then the latest; the table says where each one is.
    #[test]
    fn what_is_put_is_taken_once() {
        let (shelf, spans) = (empty(), Spans::for_test(1000));
        let (seven, many) = (Length::of(layout(7)).unwrap(), Length::of(layout(128)).unwrap());
        assert!(put(&shelf, &spans, 0, 7) && put(&shelf, &spans, 700, 128) && put(&shelf, &spans, 20, 7));
        assert!(spans.entry(PageIndex(0)).is_shelved() && !spans.entry(PageIndex(0)).is_large(7, Length::exactly(7)));
        assert_eq!(shelf.pages(), PageCount(142));
        let taken = [0; 3].map(|_| take(&shelf, &spans, seven));
        assert_eq!(taken, [Some(PageIndex(0)), Some(PageIndex(20)), None]);
        assert!(spans.entry(PageIndex(0)).is_large(7, Length::exactly(7)));
        let mut gone = None;
        shelf.clear(&spans, |run| assert_eq!(gone.replace(run), None));
        assert_eq!(gone, Some(PageRun::known(700, 128)));
        assert!(
            !spans.entry(PageIndex(700)).is_shelved()
                && !spans.entry(PageIndex(700)).is_large(128, Length::exactly(128))
        );
        assert_eq!((take(&shelf, &spans, many), shelf.pages()), (None, PageCount::ZERO));
    }

    /// A list takes as many runs as were asked of it; the hand takes one more.
    #[test]
    fn a_list_takes_what_was_asked_of_it() {
        let (shelf, spans) = (empty(), Spans::for_test(1000));
        let seven = Length::of(layout(7)).unwrap();
        shelf
            .wanted
            .iter()
            .for_each(|wanted| wanted.store(0, Ordering::Relaxed));
        assert!(put(&shelf, &spans, 0, 7) && !put(&shelf, &spans, 10, 7));
        // The first comes from the hand; two requests fail.
        let taken = [0; 3].map(|_| take(&shelf, &spans, seven).is_some());
        assert_eq!(taken, [true, false, false]);
        let put = [0, 10, 20, 30].map(|start| put(&shelf, &spans, start, 7));
        assert_eq!(put, [true, true, true, false]);
        // A run that comes off the list may come back.
        let taken = [0; 3].map(|_| take(&shelf, &spans, seven));
        assert_eq!(taken, [0, 20, 10].map(|start| Some(PageIndex(start))));
    }

    /// As 500 blocks of 40 KiB that are freed together. When there is no room for more, what comes counts again.
    #[test]
    fn a_list_takes_more_than_can_be_counted() {
        let (shelf, spans) = (empty(), Spans::for_test(10_000));
        let five = Length::of(layout(5)).unwrap();
        let fill = |count: usize| (0..count).filter(|run| put(&shelf, &spans, run * 8, 5)).count();
        let ask = |count: usize| {
            let taken = (0..count).filter(|_| take(&shelf, &spans, five).is_some());
            taken.count()
        };
        shelf
            .wanted
            .iter()
            .for_each(|wanted| wanted.store(0, Ordering::Relaxed));
        assert_eq!((ask(500), fill(500), ask(500), fill(500)), (0, 500, 500, 500));
        shelf.clear(&spans, |_| ());
        shelf.share(PageCount(5 * 400));
        assert_eq!(fill(500), 1 + 400);
        shelf.clear(&spans, |_| ());
        shelf.share(PageCount(5 * 400));
        assert_eq!(fill(500), 1, "it has had all that could be wanted");
        // What can be counted is.
        assert_eq!((ask(1 + 254), fill(500)), (1, 1 + 254));
    }

    /// A shelf never exceeds its pages, however many runs there are; and all of them come out.
    #[test]
    fn a_shelf_is_short() {
        let (shelf, spans) = (empty(), Spans::for_test(200 * MOST_PAGES));
        let put = (0..200).filter(|run| put(&shelf, &spans, run * MOST_PAGES, 1 + run % MOST_PAGES));
        let (most, listed) = (put.count(), shelf.listed.load(Ordering::Relaxed));
        assert!(listed <= LISTED_PAGES && listed > LISTED_PAGES - MOST_PAGES as u32);
        assert_eq!(shelf.pages().0, (SHELF_PAGES - LISTED_PAGES + listed) as usize);
        let (pages, mut out, mut sum) = (shelf.pages().0, 0, 0);
        shelf.clear(&spans, |run| (out, sum) = (out + 1, sum + run.pages().0));
        assert_eq!((out, sum), (most, pages));
    }

    /// With many threads each has its share, and runs shelved before the others began can still be taken.
    #[test]
    fn lists_are_shared_among_threads() {
        let (shelf, spans) = (empty(), Spans::for_test(2000));
        let seven = Length::of(layout(7)).unwrap();
        let fill = |from: usize| {
            (from..from + 100)
                .filter(|run| put(&shelf, &spans, run * 10, 7))
                .count()
        };
        assert_eq!(fill(0), 100);
        shelf.share(Shelf::share_of(PageCount(usize::MAX), 40));
        assert_eq!(fill(100), 0, "more lies there than its part");
        while take(&shelf, &spans, seven).is_some() {}
        assert_eq!(fill(0), 1 + LISTED_PAGES as usize / 32 / 7);
        // A small heap has a small share.
        while take(&shelf, &spans, seven).is_some() {}
        shelf.share(Shelf::share_of(PageCount(64 * LIMIT_PART), 1));
        assert_eq!(fill(0), 1 + 64 / 7);
    }

    /// It takes from the shortest longer length that has many.
    #[test]
    fn a_surplus_is_cut() {
        let (shelf, spans) = (empty(), Spans::for_test(3000));
        let runs = (0..MANY).flat_map(|run| [(run * 10, 8), (100 + run * 10, 9), (200 + run * 128, 128)]);
        assert!(
            runs.chain([(190, 9)])
                .all(|(start, pages)| put(&shelf, &spans, start, pages))
        );
        let before = shelf.pages();
        let surplus = |pages| shelf.take_surplus(&spans, Length::of(layout(pages)).unwrap());
        // One run of each length lies in the hand, so the list of 9 pages has MANY, those of 8 and 128 one less.
        assert_eq!((surplus(9), surplus(5)), (None, Some(PageRun::known(190, 9))));
        assert!(spans.entry(PageIndex(190)).is_vacant() && !spans.entry(PageIndex(100)).is_vacant());
        assert_eq!((surplus(5), shelf.pages().0 + 9), (None, before.0));
    }

    /// A run whose entry does not say that it is shelved was being put or taken by a thread that no longer exists: it
    /// stays out, with all runs behind it on its list.
    #[test]
    fn what_is_half_put_does_not_come_out() {
        let (shelf, spans) = (empty(), Spans::for_test(100));
        let three = Length::of(layout(3)).unwrap();
        assert!([30, 10, 20].iter().all(|&start| put(&shelf, &spans, start, 3)));
        assert!(put(&shelf, &spans, 40, 4));
        spans.entry(PageIndex(20)).enter_large(3, Length::exactly(3));
        spans.entry(PageIndex(40)).enter_large(4, Length::exactly(4));
        let mut gone = None;
        shelf.clear(&spans, |run| assert_eq!(gone.replace(run), None));
        assert_eq!((gone, take(&shelf, &spans, three)), (Some(PageRun::known(30, 3)), None));
        assert_eq!(shelf.pages(), PageCount::ZERO);
    }
}
