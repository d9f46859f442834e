//! A thread's shelf: runs of pages freed lately, for the next large block of the same length.
//!
//! ```text
//!   length    5   6   7 … 16 │ 18  20 … 32 │ 36 … 64 │ 72 … 128      pages; a step of one, two, four, eight
//!   hand      ∅  300  ∅    ∅ │  ∅  96    ∅ │  ∅    ∅ │  ∅    ∅       one run, by its first page
//!   list      ∅  412  ∅    ∅ │  ∅   ∅    ∅ │  ∅    ∅ │  ∅    ∅       those freed while there was one in the hand
//!                 └▶ 9000 ─▶ ∅                                       linked through the table
//! ```
//!
//! A block longer than 128 pages, or aligned to more than a page, never lies here (see `length.rs`).
//!
//! **The hand.** A program that allocates and frees one large block by turns finds it there, and no link is written or
//! followed: two stores to free it, two to allocate it. There is room for one run of each length, 1,536 pages if all of
//! them are there; the lists hold 2,560 pages at the most, all together. So a shelf is 32 MiB at the most.
//!
//! **Its share.** Lists hold no more than an eighth of the heap's limit, and half as much for each time that there are
//! twice as many threads: those of all shelves together 40 MiB at the most.
//!
//! **Wanted.** A list takes as many runs as were asked of it: each time the hand is empty when a block of its length is
//! allocated counts for one. What others allocated, or was made shorter since, goes to the heap, where it is of use to
//! all, and warm. (A thread that drops what another made kept 17 MiB; one whose buffers grow to 1 MiB, are cut to what
//! they hold and freed, began each on fresh pages: `docs/measurements.md`.)
//!
//! **Surplus.** A block that finds none of its length is cut from a longer one of which there are many, and the rest
//! goes to the heap: what a program asked for once and does no more does not stay. And what is cut off is free, so that
//! the block grows where it is.
//!
//! Worked: three blocks of 64 KiB are freed. The first lies in the hand of 8 pages, the third is the head of that
//! list, and leads to the second. The next such blocks are the first, the third, the second.
//!
//! A shelf is its thread's, as its magazines are: who scavenges takes what lies there while the thread sleeps (see
//! `thread.rs`). Hands and links stand here and in the table of spans (`span.rs`), so the pages are not touched.
//!
//! Cost: 2 ns to put and take; ~50 ns without, and 1 µs for each page whose memory the scavenger had taken meanwhile.

#![forbid(unsafe_code)]

use core::hint::cold_path;

use crate::sync::{AtomicU8, AtomicU32, Ordering};
use crate::units::{PageCount, PageIndex, PageRun};

use super::length::{LENGTHS, Length, length_at};
use super::span::{Link, Nth, Span};
use super::spans::Spans;

/// Pages on a shelf at the most: 32 MiB.
const SHELF_PAGES: u32 = 4096;

/// Of those, what the lists may hold where there is one thread: one run of each length lies in its hand.
const LISTED_PAGES: u32 = {
    let (mut pages, mut index) = (SHELF_PAGES, 0);
    while index < LENGTHS {
        pages -= length_at(index) as u32;
        index += 1;
    }
    pages
};

/// The lists of all shelves may hold one part in so many of what the heap may have, or two.
const LIMIT_PART: usize = 8;

/// So many runs on one list are more than the program goes on to ask for, if it asks for other lengths.
const MANY: usize = 8;

/// Room for one run.
#[derive(Debug)]
pub struct Hand(Link);

impl Hand {
    /// The first page of the run there, if there is one.
    #[inline(always)]
    pub fn get(&self) -> Option<Nth> {
        self.0.nth()
    }

    /// Fast: the run there, of this length and with this entry, is the caller's.
    #[inline(always)]
    pub fn take(&self, length: Length, entry: &Span) {
        self.0.set(None);
        entry.unshelve(length);
    }

    /// Fast: puts a large block of this length there, if nothing is there: the caller's, of the shelf's heap, with its
    /// entry in the table. Whether it did.
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

/// The shelf of one thread. All-zero bytes: empty.
#[derive(Debug)]
pub struct Shelf {
    /// For each length one run. I17: what a hand or a list leads to is in the table of the shelf's heap as on a shelf,
    /// but between two stores of who puts or takes it: only the child of a fork, and who finds a thread gone, see that,
    /// and `clear` looks. Who puts and takes keeps it: length, page and entry belong together.
    pub(super) hands: [Hand; LENGTHS],
    /// For each length the run that was put on its list last; the others are linked behind it.
    lists: [Link; LENGTHS],
    /// For each length how many runs more its list may take; as many as can be said, where there are more.
    wanted: [AtomicU8; LENGTHS],
    /// Pages of the runs on lists.
    listed: AtomicU32,
    /// As many there may be. 0 at first: the thread's first large block comes by the slow way.
    most: AtomicU32,
}

impl Shelf {
    // Relaxed throughout: one owner, or one who has seized it.

    /// The heap may have so many pages, and there are so many threads now: what the lists may hold is said anew, by who
    /// asked in vain for a run. More may lie there for a while.
    #[inline]
    pub fn share(&self, limit: PageCount, threads: usize) {
        let all = (limit.0 / LIMIT_PART).min(LISTED_PAGES as usize);
        let most = all.checked_shr((threads | 1).ilog2()).unwrap_or(0);
        // Relaxed: see above.
        self.most.store(most as u32, Ordering::Relaxed);
    }

    /// How many pages lie there, read from anywhere: a moment's picture.
    pub fn pages(&self) -> PageCount {
        let held = self.hands.iter().enumerate().filter(|(_, hand)| hand.get().is_some());
        let held: usize = held.map(|(index, _)| length_at(index)).sum();
        // Relaxed: a statistic for all but the owner.
        PageCount(held + self.listed.load(Ordering::Relaxed) as usize)
    }

    /// Takes the last run of this length on its list, if there is one: its first page. That it was asked counts.
    #[inline(always)]
    pub fn take_listed(&self, spans: &Spans, length: Length) -> Option<PageIndex> {
        let (list, wanted) = (self.lists.get(length.index())?, self.wanted.get(length.index())?);
        // Relaxed, twice: see above. (Without a branch it takes a register more, which has to be saved.)
        let before = wanted.load(Ordering::Relaxed);
        if before != u8::MAX {
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

    /// Puts a large block of this length on its list, if that may take more: the caller's, with its entry in the table.
    /// Whether it did.
    #[inline(always)]
    #[must_use]
    pub fn put_listed(&self, length: Length, start: PageIndex, entry: &Span) -> bool {
        let index = length.index();
        let (Some(list), Some(wanted)) = (self.lists.get(index), self.wanted.get(index)) else {
            return false;
        };
        // Relaxed, four times: see above.
        let listed = self.listed.load(Ordering::Relaxed) + length.pages() as u32;
        let Some(left) = wanted.load(Ordering::Relaxed).checked_sub(1) else {
            cold_path();
            return false;
        };
        if listed > self.most.load(Ordering::Relaxed) {
            cold_path();
            return false;
        }
        wanted.store(left, Ordering::Relaxed);
        entry.behind.copy(list);
        entry.shelve(length);
        list.set(Some(start));
        // Relaxed: see above.
        self.listed.store(listed, Ordering::Relaxed);
        true
    }

    /// Takes the last run of the shortest length, longer than this, of which there are many; out of the table too. For
    /// who finds none of his length, and would go to the heap while the shelf fills with others. O(runs looked at): a
    /// few for each length.
    pub fn take_surplus(&self, spans: &Spans, length: Length) -> Option<PageRun> {
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

    /// Takes everything out; the runs are in the table no more. Also in the child of a fork, where the owner is not and
    /// may have been anywhere in `put` or `take`: then what he had in hand is lost, perhaps with what lay below it, and
    /// no run comes out that is not on the shelf.
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
        // Relaxed: see above.
        self.listed.store(0, Ordering::Relaxed);
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

    /// Puts a block of so many pages that begins at `start`.
    fn put(shelf: &Shelf, spans: &Spans, start: usize, pages: usize) -> bool {
        let length = Length::of(layout(pages)).unwrap();
        let entry = spans.entry(PageIndex(start));
        entry.enter_large(length.pages(), Some(length));
        let hand = &shelf.hands[length.index()];
        hand.put(length, Nth::new(start + 1), entry) || shelf.put_listed(length, PageIndex(start), entry)
    }

    /// Takes one: that in the hand first.
    fn take(shelf: &Shelf, spans: &Spans, length: Length) -> Option<PageIndex> {
        let hand = &shelf.hands[length.index()];
        let start = hand.0.get().inspect(|start| hand.take(length, spans.entry(*start)));
        start.or_else(|| shelf.take_listed(spans, length))
    }

    /// What lies in the hand comes first, then the last; and the table says where each is.
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

    /// As many as were asked of it, and one in the hand.
    #[test]
    fn a_list_takes_what_was_asked_of_it() {
        let (shelf, spans) = (empty(), Spans::for_test(1000));
        let seven = Length::of(layout(7)).unwrap();
        shelf
            .wanted
            .iter()
            .for_each(|wanted| wanted.store(0, Ordering::Relaxed));
        assert!(put(&shelf, &spans, 0, 7) && !put(&shelf, &spans, 10, 7));
        // The first from the hand, two in vain.
        let taken = [0; 3].map(|_| take(&shelf, &spans, seven).is_some());
        assert_eq!(taken, [true, false, false]);
        let put = [0, 10, 20, 30].map(|start| put(&shelf, &spans, start, 7));
        assert_eq!(put, [true, true, true, false]);
        // What comes out of the list may come back.
        let taken = [0; 3].map(|_| take(&shelf, &spans, seven));
        assert_eq!(taken, [0, 20, 10].map(|start| Some(PageIndex(start))));
    }

    /// No more than its pages, however many runs there are; and all of them come out.
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

    /// Of many threads each has its part, and what lies there when others begin may be taken.
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
        shelf.share(PageCount(usize::MAX), 40);
        assert_eq!(fill(100), 0, "more lies there than its part");
        while take(&shelf, &spans, seven).is_some() {}
        assert_eq!(fill(0), 1 + LISTED_PAGES as usize / 32 / 7);
        // And of a small heap little.
        while take(&shelf, &spans, seven).is_some() {}
        shelf.share(PageCount(64 * LIMIT_PART), 1);
        assert_eq!(fill(0), 1 + 64 / 7);
    }

    /// The shortest that is longer and of which there are many.
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
        // One of each lies in the hand, so of 9 pages there are MANY on the list, of 8 and of 128 one less.
        assert_eq!((surplus(9), surplus(5)), (None, Some(PageRun::known(190, 9))));
        assert!(spans.entry(PageIndex(190)).is_vacant() && !spans.entry(PageIndex(100)).is_vacant());
        assert_eq!((surplus(5), shelf.pages().0 + 9), (None, before.0));
    }

    /// A run whose entry does not say that it lies there was being put or taken by a thread that is no more: it stays
    /// out, with what its list has behind it.
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
