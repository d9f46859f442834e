//! The set of free pages, shared without a lock: bitmap, tree and hints as one.
//!
//! ```text
//!   claim    hint ─▶ search (tree, then bits) ─▶ take the bits ─▶ take the scavenged bits      [leaf left as it is]
//!   release  scavenged bits ─▶ give the bits ─▶ fence ─▶ leaf still right? ─ no ─▶ raise leaf, parents ───▶ hints
//!                                                       └──── yes ────────────────────────────────────────▲
//! ```
//!
//! **Where an operation takes place.** One read-modify-write on one word of the bitmap decides every operation on up to
//! 64 pages. A longer run is taken word by word, upwards. If a page turns out to be taken, the words taken so far are
//! given back, and the search continues behind that page. Since claims go upwards and never wait, the claim that stands
//! highest always finishes, so some thread makes progress.
//!
//! **Claims are lazy.** A claim in the hint's word does not touch the tree: the leaf keeps promising what is gone. The
//! next search that believes it finds out, corrects it, and continues. That costs nothing if the next search begins
//! behind the claim, and thanks to the hints it does. This is why a claim of one page is three loads and a
//! compare-exchange. A claim that needed a search has seen the bits of its chunk, so it corrects the leaf if no run as
//! long is left. A claim of a chunk or more corrects its leaves at once. Nodes above are left to searches that believe
//! them in vain. A release is never lazy, but it can tell when it has nothing to publish: if the run it created is no
//! longer than the leaf's `max` (and than `start` or `end`, where it touches an end of the chunk), no field of the leaf
//! can grow.
//!
//! **Saying no.** Searches believe summaries, and a summary may for a moment promise too little. So `None` is proved:
//! with a flag raised that makes every release pass the [`Turnstile`], the heap is searched from page 0 between two
//! equal calms. In that time no thread was carrying a change up, held part of a run to give back, or released anything,
//! so what the search did not find was not there. See `claim_or_prove`. If other threads release something during each
//! search, it ends after [`Request::searches`] of them, and nothing is proved: that many searches found nothing.
//!
//! | operation | cost, about |
//! |---|---|
//! | claim of 1 page next to the last | 15 ns |
//! | claim of a word for a cache | 50 ns, if no other cache is refilled meanwhile |
//! | release of a page that changes no leaf | 20 ns |
//! | release that goes up five levels | 150 ns |
//! | proof that there is nothing, heap of 1 TiB | 250 ns |

#![forbid(unsafe_code)]

mod search;
mod claim;
mod apart;
mod release;

use crossbeam_utils::CachePadded;

use crate::bitmap::{Bitmap, Pieces};
use crate::geometry::{PROOF_SEARCHES, Shape, WORD_PAGES, WORD_SHIFT};
use crate::hints::Hints;
use crate::radix::Tree;
use crate::sync::{AtomicUsize, Ordering, Turnstile, fence_after_rmw};

use apart::Berths;

/// The free pages of a heap.
#[derive(Debug)]
pub struct FreeSet<G: Shape> {
    pub(crate) free: Bitmap,
    /// 1 = not backed by memory and reads as zero. I1: set only where the page is free and in no thread's hands.
    pub(crate) scavenged: Bitmap,
    pub(crate) tree: Tree<G>,
    pub(crate) hints: CachePadded<Hints>,
    turnstile: Turnstile,
    berths: CachePadded<Berths>,
    /// Read by all threads, seldom written.
    seldom: CachePadded<Seldom>,
}

#[derive(Debug)]
struct Seldom {
    /// Pages grown so far: the tables are prepared up to here. Only ever raised, under the heap's lock.
    grown: AtomicUsize,
    /// How many threads are proving that there is no room.
    provers: AtomicUsize,
}

/// A request for `pages` pages in a row, from a page p with (p + phase) divisible by `align`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// How many pages; at least one.
    pub pages: usize,
    /// A power of two.
    pub align: usize,
    /// Pages from the aligned address below the heap's base to the base; less than `align`.
    pub phase: usize,
}

impl Request {
    /// `pages` pages anywhere.
    #[must_use]
    pub const fn of(pages: usize) -> Self {
        Self {
            pages,
            align: 1,
            phase: 0,
        }
    }

    /// How often the whole heap is searched for it, at most, before the answer is no. A search is disturbed if another
    /// thread frees pages meanwhile; the first undisturbed one is the last.
    ///
    /// A search for an alignment looks at the bits of each chunk with a run that is long enough (some 100 ns each), or,
    /// for more than a chunk, at each aligned page. So there are fewer such searches for small alignments, for which
    /// most chunks have gaps: for 8 GiB of single free pages 3 ms if they are aligned to two, 0.2 s to 128 and more.
    #[must_use]
    pub const fn searches(&self) -> u32 {
        let steps_apart = self.align.saturating_mul(8);
        if self.align == 1 || steps_apart > PROOF_SEARCHES as usize {
            PROOF_SEARCHES
        } else {
            steps_apart as u32
        }
    }

    /// The first page at or after `page` at which the request may begin; `None` if that overflows.
    #[inline(always)]
    pub fn align_page(&self, page: usize) -> Option<usize> {
        let past = (page.wrapping_add(self.phase)) & (self.align - 1);
        if past == 0 {
            Some(page)
        } else {
            page.checked_add(self.align - past)
        }
    }

    /// How many pages behind `page` the first one is at which the request may begin.
    #[inline(always)]
    const fn offset(&self, page: usize) -> usize {
        page.wrapping_add(self.phase).wrapping_neg() & (self.align - 1)
    }

    /// How many of `free` pages, the last of which is right before page `end`, lie at or behind the first one at which
    /// the request may begin.
    #[inline(always)]
    const fn usable(&self, end: usize, free: usize) -> usize {
        free.saturating_sub(self.offset(end - free))
    }
}

/// Pages taken out of the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The first page.
    pub start: usize,
    /// How many of the pages were scavenged.
    pub scavenged: usize,
}

/// The scavenged bits of a run, taken with its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// How many of the pages were scavenged.
    pub count: usize,
    /// How many of these are the run's last pages, in a row.
    pub last: usize,
}

/// The free pages of one word, taken out of the set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word {
    /// Index of the word.
    pub index: usize,
    /// The pages taken; 1 = taken.
    pub free: u64,
    /// Those of them that were scavenged.
    pub scavenged: u64,
}

impl<G: Shape> FreeSet<G> {
    /// An empty set over zeroed tables. Inlined, so that its 2 KiB are on the stack once.
    #[inline(always)]
    #[must_use]
    pub fn new(free: Bitmap, scavenged: Bitmap, tree: Tree<G>) -> Self {
        Self {
            free,
            scavenged,
            tree,
            hints: CachePadded::new(Hints::new()),
            turnstile: Turnstile::new(),
            berths: CachePadded::new(Berths::new()),
            seldom: CachePadded::new(Seldom {
                grown: AtomicUsize::new(0),
                provers: AtomicUsize::new(0),
            }),
        }
    }

    /// Pages grown so far; every page of the heap is below this.
    #[inline(always)]
    pub fn grown(&self) -> usize {
        // Acquire: pairs with the release in `extend`; the tables below are prepared.
        self.seldom.grown.load(Ordering::Acquire)
    }

    /// Adds `pages` free pages at the end; as scavenged if they are not backed by memory and read as zero.
    ///
    /// Only under the heap's lock, and after the tables up to the new end have been prepared. 40 ns a chunk.
    pub fn extend(&self, pages: usize, scavenged: bool) {
        let start = self.grown();
        let _pass = self.turnstile.enter(start >> G::CHUNK_SHIFT);
        // Release: pairs with the acquire in `grown`; the tables are prepared.
        self.seldom.grown.store(start + pages, Ordering::Release);
        for piece in Pieces::new(start, pages) {
            if scavenged {
                self.scavenged.mark(piece.word, piece.mask);
            }
            let new = self.free.give(piece.word, piece.mask);
            debug_assert!(new.is_ok(), "a page was free before it was grown");
        }
        self.publish(start >> G::CHUNK_SHIFT, (start + pages - 1) >> G::CHUNK_SHIFT);
        fence_after_rmw();
        self.hints.lower(start, usize::MAX);
    }

    /// Adds `pages` pages at the end that nobody will ever get: as new tables have them, they are not free. Only under
    /// the heap's lock, and after the tables up to the new end have been prepared.
    pub fn skip(&self, pages: usize) {
        // Release: pairs with the acquire in `grown`; the tables are prepared.
        self.seldom.grown.store(self.grown() + pages, Ordering::Release);
    }

    /// Puts a held run back, marked as scavenged if it is.
    ///
    /// # Errors
    /// As for [`release`](Self::release).
    pub fn release_held(&self, start: usize, pages: usize, scavenged: bool) -> Result<(), usize> {
        if scavenged {
            // Before the pages are free (I1).
            Pieces::new(start, pages).for_each(|piece| self.scavenged.mark(piece.word, piece.mask));
        }
        self.release(start, pages)
    }

    /// Free pages in a row up to the end of the grown part, counted to at least `most`.
    pub fn free_at_end(&self, most: usize) -> usize {
        let (end, mut free) = (self.grown(), 0);
        while free < most && free < end {
            let last = end - free - 1;
            // The word's bits up to `last`, moved to the top.
            let ones =
                (self.free.load(last >> WORD_SHIFT) << (WORD_PAGES - 1 - last % WORD_PAGES)).leading_ones() as usize;
            free += ones;
            if ones <= last % WORD_PAGES {
                break;
            }
        }
        free.min(end)
    }

    /// The numbers of pages that are grown, free, and both free and scavenged. O(heap).
    pub fn count(&self) -> (usize, usize, usize) {
        let grown = self.grown();
        let ones = |map: &Bitmap, word| map.load(word).count_ones() as usize;
        (0..grown.div_ceil(WORD_PAGES)).fold((grown, 0, 0), |(grown, free, scavenged), word| {
            (
                grown,
                free + ones(&self.free, word),
                scavenged + ones(&self.scavenged, word),
            )
        })
    }

    /// A count that changes whenever a run across several words is taken, and by some other claims and releases.
    pub fn passes(&self) -> u32 {
        self.turnstile.entries()
    }

    /// Repairs what other threads may have left half done: for the child of a fork, whose only thread is inside no
    /// operation. O(heap): a few hundred nanoseconds a chunk.
    ///
    /// Bits are never half done. Pages that a missing thread had taken out stay out. A release may have given its bits
    /// and published nothing, so every summary is computed anew, and the hints begin at the bottom.
    pub(crate) fn recover(&self) {
        self.turnstile.clear();
        // Relaxed: no other thread exists.
        self.seldom.provers.store(0, Ordering::Relaxed);
        // A thread that was between the two bitmaps has lost its pages; their marks go with them (I1).
        for word in 0..self.grown().div_ceil(WORD_PAGES) {
            let stale = self.scavenged.load(word) & !self.free.load(word);
            if stale != 0 {
                self.scavenged.take_any(word, stale);
            }
        }
        self.settle();
        self.hints.lower(0, usize::MAX);
        self.berths.leave_all();
    }

    /// Corrects everything that promises too much, so that the whole tree says exactly what the bits say. O(heap).
    pub fn settle(&self) {
        let pages = self.grown();
        (0..G::entries(G::LEAF, pages)).for_each(|chunk| self.correct_all(chunk));
    }
}

#[inline(always)]
fn lowest_page(word: usize, bits: u64) -> usize {
    word * WORD_PAGES + bits.trailing_zeros() as usize
}
