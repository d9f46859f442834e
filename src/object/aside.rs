//! Long runs freed lately, put aside for the next block of exactly the same length.
//!
//! ```text
//!                       pages, first page
//!   aside              │ 300, 4096 │ 1024, 8192 │ ∅ │ ∅ │ ∅ │ ∅ │ ∅ │ ∅ │      of the whole heap: one cache line
//!
//!   free of 200 pages   ∅ := 200, its first page           no ∅: to the heap, as ever
//!   request for 300     takes that run                     a compare-exchange, and the bitmap is not touched
//!   any other request   all of these go to the heap, then it is served from there
//! ```
//!
//! A shelf keeps runs of up to 1 MiB for one thread, and no other request can use them meanwhile (`shelf.rs`). For
//! longer runs that would cost too much memory. So these lie aside only until somebody needs pages. Whoever asks the
//! heap for a page, or for anything but a block of one of these lengths, first gives all of them back. So the heap is
//! then as it would have been without this: it refuses nothing because of what lies here, and a block that grows in
//! place finds the same neighbours. (If two threads ask at the same moment, one may find the other with a run in hand.
//! Then the heap may grow, but no request is refused before that run has arrived. And whoever finds no page looks here
//! once more before it gives up: while it searched, a run may have been put here, and the page that was free until then
//! been taken. A request can be refused in vain all the same, if in that moment yet another thread has taken that run
//! out again, or if the search was that for a block's own run for want of a span (`room.rs`), which is the very last.)
//! The scavenger also gives them back first, each time it looks, and a heap over its soft limit puts nothing aside.
//!
//! What that saves is the way through the set of free pages, in which a run of 2 MiB is 256 bits, cleared and set
//! again one word after the other, with the summaries above.
//!
//! I21: a run that lies here is entered in the table as shelved, and in no other place. A place is changed by one
//! compare-exchange or swap, so a run has one taker; whoever has taken it owns it. A run says its length here, so a
//! place that holds the same word again holds a run of that length again.
//!
//! Worked: a program renders frames of 8 MiB. The free of each puts 1024 pages aside; the next frame is the same run.
//! If it then needs one page for a span of small blocks, the 1024 go to the heap, and the page is the lowest free one.
//!
//! **Up to 64 MiB.** Giving a run back takes 0.25 ns for each page, and whoever needs a page next waits for that: for
//! 16 µs at most. With longer blocks the saving is nothing beside the page faults of those who use them.
//!
//! Cost: 10 to 20 ns for a block allocated and freed, of whatever length; through the heap it is 0.25 ns for each page,
//! and 100 more. Eight loads for each run of pages that the object layer takes from the heap.

#![forbid(unsafe_code)]

use crate::sync::{ASIDE, AtomicU64, Ordering};
use crate::units::{PageCount, PageIndex, PageRun};

/// In a word the first page is below, the number of pages above. A heap has fewer than 2³² pages.
const PAGES_SHIFT: u32 = 32;

/// The runs put aside.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Aside {
    /// A run, or 0.
    places: [AtomicU64; ASIDE],
}

impl Aside {
    /// None.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "public in models only")]
    pub fn new() -> Self {
        Self {
            places: core::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Puts a run aside that the caller owns, if there is a place. Returns whether it did.
    #[inline]
    #[must_use]
    pub fn put(&self, run: PageRun) -> bool {
        let word = (run.pages().0 as u64) << PAGES_SHIFT | run.start().0 as u64;
        self.places.iter().any(|place| {
            // Relaxed: a guess, which the exchange checks; and nothing is read if it fails. Release: hands over the
            // run's pages and its entry; partners: `take`, `empty`.
            place.load(Ordering::Relaxed) == 0
                && place
                    .compare_exchange(0, word, Ordering::Release, Ordering::Relaxed)
                    .is_ok()
        })
    }

    /// Takes a run of exactly so many pages, if there is one; returns its first page.
    #[inline]
    #[must_use]
    pub fn take(&self, pages: PageCount) -> Option<PageIndex> {
        let is_such = |word: u64| word >> PAGES_SHIFT == pages.0 as u64 && word != 0;
        let taken = self.places.iter().find_map(|place| {
            // Relaxed: a guess, which the exchange checks; and nothing is read if it fails. Acquire: pairs with the
            // release of `put`.
            let word = place.load(Ordering::Relaxed);
            let taken = is_such(word)
                && place
                    .compare_exchange(word, 0, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok();
            taken.then_some(word)
        })?;
        Some(run_of(taken).start())
    }

    /// Whether there is any.
    #[inline]
    #[must_use]
    pub fn has_any(&self) -> bool {
        // Acquire: who finds a place empty sees that the thread which emptied it is on its way; partner: `empty`. (If
        // another run was put there since and taken, that was by read-modify-writes, which go on with that release.)
        self.places.iter().any(|place| place.load(Ordering::Acquire) != 0)
    }

    /// Takes all runs and passes them to `give`, one by one. `enter` is called first: as long as what it returns lives,
    /// no request is refused, because one of these runs may be in hand.
    pub fn empty<P>(&self, enter: impl FnOnce() -> P, mut give: impl FnMut(PageRun)) {
        let _pass = enter();
        for place in &self.places {
            // Acquire: pairs with the release of `put`. Release: after the pass was entered; partner: `has_any`.
            let word = place.swap(0, Ordering::AcqRel);
            if word != 0 {
                give(run_of(word));
            }
        }
    }

    /// How many pages lie here. Any thread may call this: a snapshot.
    #[must_use]
    pub fn pages(&self) -> PageCount {
        // Relaxed: a statistic.
        let words = self.places.iter().map(|place| place.load(Ordering::Relaxed));
        PageCount(words.map(|word| (word >> PAGES_SHIFT) as usize).sum())
    }
}

/// The run that a word says, which is not 0.
const fn run_of(word: u64) -> PageRun {
    PageRun::known(word as u32 as usize, (word >> PAGES_SHIFT) as usize)
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn a_run_is_taken_once_by_its_length() {
        let aside = Aside::new();
        assert!(!aside.has_any() && aside.take(PageCount(0)).is_none());
        let runs = core::array::from_fn::<_, ASIDE, _>(|at| PageRun::known(at << 10, 129 + at / 2));
        assert!(runs.iter().all(|&run| aside.put(run)));
        assert!(!aside.put(PageRun::known(1 << 20, 500)), "there is no place left");
        assert_eq!(aside.pages(), PageCount(2 * (129 + 130 + 131 + 132)));
        let taken = [131, 131, 131, 500].map(|pages| aside.take(PageCount(pages)));
        assert_eq!(taken, [Some(PageIndex(4 << 10)), Some(PageIndex(5 << 10)), None, None]);
        let last = PageRun::known(u32::MAX as usize - 200, 200);
        assert!(aside.put(last));
        let mut left = std::vec::Vec::new();
        aside.empty(|| (), |run| left.push(run));
        left.sort_by_key(|run| run.start().0);
        let expected = [0, 1, 2, 3, 6, 7].map(|at| runs[at]).into_iter().chain([last]);
        assert!(left.into_iter().eq(expected));
        assert!(!aside.has_any() && aside.pages() == PageCount::ZERO);
    }
}
