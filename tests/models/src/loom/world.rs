//! A free set with a few pages in it, and a cell for each page that detects two owners.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use pageheap::Geometry;
use pageheap::internals::bitmap::Bitmap;
use pageheap::internals::{Claim, FreeSet, MAX_LEVELS, Request, Shape, Tree, WORD_PAGES, Word};

use crate::hand::table;

/// The leaves are the root: two words to a chunk.
pub type One = Geometry<1, 13, 2, 2>;
/// A level above the leaves, two children to a node.
pub type Two = Geometry<2, 13, 2, 2>;
/// Two levels above the leaves.
pub type Three = Geometry<3, 13, 2, 2>;

/// Pages of a chunk in all of these.
pub const CHUNK: usize = 128;

/// A free set and the contents of its pages.
#[derive(Debug)]
pub struct World<G: Shape> {
    /// The set.
    pub set: FreeSet<G>,
    /// The pages that may be claimed, with their contents.
    contents: Vec<(usize, UnsafeCell<usize>)>,
    chunks: usize,
}

// SAFETY: the cells are loom's: loom reports it if a thread accesses one at a wrong time.
unsafe impl<G: Shape> Sync for World<G> {}
// SAFETY: as above.
unsafe impl<G: Shape> Send for World<G> {}

impl<G: Shape> World<G> {
    /// `chunks` chunks in which exactly the pages of `free` (first, count; ascending) are free, every summary is exact
    /// and every hint is 0; the pages of `held` can be claimed later, after a thread has released them.
    pub fn new(chunks: usize, free: &[(usize, usize)], held: &[(usize, usize)]) -> Arc<Self> {
        let pages = chunks * G::CHUNK_PAGES;
        let words = || Bitmap::new(table(pages / WORD_PAGES));
        let levels = core::array::from_fn(|level| {
            table(if level < G::LEVELS {
                Tree::<G>::entries(level, pages)
            } else {
                0
            })
        });
        const { assert!(MAX_LEVELS == 5) };
        let set = FreeSet::new(words(), words(), Tree::new(levels));
        set.extend(pages, false);
        let mut page = 0;
        for &(start, count) in free.iter().chain(&[(pages, 0)]) {
            if page < start {
                set.claim_at(page, start - page).unwrap();
            }
            page = start + count;
        }
        set.settle();
        let mut contents: Vec<_> = free
            .iter()
            .chain(held)
            .flat_map(|&(start, count)| start..start + count)
            .map(|page| (page, UnsafeCell::new(page)))
            .collect();
        contents.sort_unstable_by_key(|&(page, _)| page);
        Arc::new(Self { set, contents, chunks })
    }

    /// Writes to a page. loom fails if another thread's use of the page is not known to be over.
    pub fn touch(&self, page: usize) {
        let found = self.contents.binary_search_by_key(&page, |&(page, _)| page);
        let (_, cell) = &self.contents[found.unwrap_or_else(|_| panic!("page {page} was never to be had"))];
        // SAFETY: loom checks that no other thread does so at this time.
        cell.with_mut(|contents| unsafe { *contents += 1 });
    }

    fn touch_all(&self, start: usize, pages: usize) {
        (start..start + pages).for_each(|page| self.touch(page));
    }

    fn touch_word(&self, word: Word) {
        (0..WORD_PAGES)
            .filter(|bit| word.free >> bit & 1 == 1)
            .for_each(|bit| self.touch(word.index * WORD_PAGES + bit));
    }

    /// Claims `pages` pages and writes to them.
    pub fn claim(&self, pages: usize) -> Option<Claim> {
        let claim = self.set.claim(&Request::of(pages))?;
        self.touch_all(claim.start, pages);
        Some(claim)
    }

    /// Claims these pages, if they are free, and writes to them.
    pub fn claim_at(&self, start: usize, pages: usize) -> Option<Claim> {
        let claim = self.set.claim_at(start, pages).ok()?;
        self.touch_all(start, pages);
        Some(claim)
    }

    /// Claims the word of the lowest free page and writes to all of it.
    pub fn claim_word(&self) -> Option<Word> {
        let word = self.set.claim_word()?;
        self.touch_word(word);
        Some(word)
    }

    /// Claims a word apart from other caches and writes to all of it; `last` is the word that `cache` had before.
    pub fn claim_word_apart(&self, cache: u32, last: usize) -> Option<Word> {
        let word = self.set.claim_word_apart(cache, last)?;
        self.touch_word(word);
        Some(word)
    }

    /// Writes to pages that the caller owns and releases them.
    pub fn release(&self, start: usize, pages: usize) {
        self.touch_all(start, pages);
        self.set.release(start, pages).unwrap();
    }

    /// Writes to pages of a word that the caller owns and releases them.
    pub fn release_word(&self, word: Word) {
        self.touch_word(word);
        self.set.release_word(word).unwrap();
    }

    /// After all threads have ended: every invariant holds, `free` pages are free, and tidying changes neither.
    pub fn finish(&self, free: usize) {
        self.set.check().unwrap();
        let (grown, now, _) = self.set.count();
        assert_eq!(
            (grown, now),
            (self.chunks * G::CHUNK_PAGES, free),
            "pages were lost or made"
        );
        self.set.settle();
        self.set.check().unwrap();
    }
}

/// The pages of a word, as a mask.
pub fn pages_of(word: Option<Word>) -> usize {
    word.map_or(0, |word| word.free.count_ones() as usize)
}
