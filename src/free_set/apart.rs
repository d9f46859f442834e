//! Refilling many caches at once, each from a chunk of its own.
//!
//! ```text
//!   alone     cache ─▶ hint ─▶ the lowest word with a free page                     first fit, as for every request
//!   crowded   cache 0 ─▶ chunk 12 │ cache 1 ─▶ chunk 13 │ cache 2 ─▶ chunk 15 │ …   as long as the chunk has pages
//!
//!   berths    0: –   1: –   …   12: chunk 12, cache 0   13: chunk 13, cache 1   …   a chunk's berth: its number mod 64
//! ```
//!
//! When two caches are refilled at the same moment, both find the same lowest word, and one of them has searched in
//! vain; both then write to the same hint, and the words they go on with share cache lines. So a cache that meets
//! others twice within some eight refills (the word it had found was gone, or the hint had been raised past it) goes
//! on *apart*: it takes the lowest chunk that no other cache has a berth at, and stays there until the chunk has no
//! free page. A chunk is one cache line of the bitmap (in the default geometry), so refills write to a line of their
//! own; once in a chunk, to those of its leaf and its berth. After some 230 refills the cache looks whether it still
//! meets others. Threads that only free, or release memory, do not count: beside them, first fit stays.
//!
//! Berths are advice. One that is overwritten (two caches whose chunks are 64 apart do that to each other), or left
//! behind, costs a search, a refill from a chunk that another cache uses too, or a chunk passed over. A claim apart
//! takes pages that are free, like any claim at a given place, and leaves hints as they are: they promise enough
//! afterwards. It gives up rather than prove anything; then the ordinary path does.
//!
//! Worked: 16 threads refill. Together they use 16 chunks, 8,192 pages, of which up to 7,168 are free but not the
//! lowest: that is what first fit loses. Measured on 16 processors: `docs/measurements.md`, "Threads".

#![forbid(unsafe_code)]

use crate::geometry::{BERTHS, Shape, WORD_SHIFT};
use crate::hints::Band;
use crate::radix::{Cursor, Step};
use crate::sync::{AtomicU64, Ordering};

use super::search::Trail;
use super::{FreeSet, Word};

/// Which chunks caches use by themselves.
#[derive(Debug)]
pub(super) struct Berths {
    /// A chunk's number, and the number of the cache that uses it; 0: none.
    berths: [AtomicU64; BERTHS],
}

const CACHE_BITS: u32 = 32;

impl Berths {
    pub(super) fn new() -> Self {
        Self {
            berths: core::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    // Relaxed throughout: advice.

    fn berth(&self, chunk: usize) -> &AtomicU64 {
        &self.berths[chunk % BERTHS]
    }

    fn is_of(&self, chunk: usize, cache: u32) -> bool {
        self.berth(chunk).load(Ordering::Relaxed) == entry(chunk, cache)
    }

    /// Whether a cache other than this one uses the chunk.
    fn is_taken(&self, chunk: usize, cache: u32) -> bool {
        let berth = self.berth(chunk).load(Ordering::Relaxed);
        berth != 0 && berth >> CACHE_BITS == chunk as u64 && berth as u32 != cache
    }

    fn take(&self, chunk: usize, cache: u32) {
        self.berth(chunk).store(entry(chunk, cache), Ordering::Relaxed);
    }

    /// No cache has a berth: for the child of a fork.
    pub(super) fn leave_all(&self) {
        let berths = self.berths.iter();
        berths.for_each(|berth| berth.store(0, Ordering::Relaxed));
    }

    fn leave(&self, chunk: usize, cache: u32) {
        if self.is_of(chunk, cache) {
            self.berth(chunk).store(0, Ordering::Relaxed);
        }
    }
}

fn entry(chunk: usize, cache: u32) -> u64 {
    (chunk as u64) << CACHE_BITS | u64::from(cache)
}

impl<G: Shape> FreeSet<G> {
    /// Takes all free pages of a word, apart from other caches: of the chunk that `cache`, a number other than 0, uses,
    /// in which its last word was, or else of the lowest chunk that no cache uses. `None` proves nothing.
    ///
    /// Cost: a few loads and a swap; once in a chunk a search.
    pub fn claim_word_apart(&self, cache: u32, last: usize) -> Option<Word> {
        let chunk = last / G::CHUNK_WORDS;
        if self.berths.is_of(chunk, cache) {
            if let Some(word) = self.take_word_in(chunk) {
                return Some(word);
            }
            self.find_empty(chunk, &mut Trail::default());
            self.berths.leave(chunk, cache);
        }
        let first = self.hints.load(Band::of(1)).page() >> G::CHUNK_SHIFT;
        let (mut cursor, mut trail) = (Cursor::at::<G>(first), Trail::default());
        for _ in 0..BERTHS {
            let step = self.tree.next(&mut cursor, 1, self.grown());
            let chunk = match step {
                Step::End => return None,
                Step::Broken { level, index } => {
                    self.correct_node(level, index, &mut trail);
                    continue;
                }
                Step::Run(page) => page >> G::CHUNK_SHIFT,
                Step::Chunk { chunk, .. } => chunk,
            };
            cursor = Cursor::at::<G>(chunk + 1);
            // A chunk in use is passed over without a look at its bits, which would take the line from its user.
            if self.berths.is_taken(chunk, cache) {
                continue;
            }
            if let Some(word) = self.take_word_in(chunk) {
                self.berths.take(chunk, cache);
                return Some(word);
            }
            match step {
                // An inner node promised it.
                Step::Run(_) => self.correct_all(chunk),
                _ => self.find_empty(chunk, &mut trail),
            }
        }
        None
    }

    /// Corrects the leaf of a chunk that turned out to have no free page, so that others pass it over. Leaves its
    /// `trail`.
    #[inline(never)]
    pub(super) fn find_empty(&self, chunk: usize, trail: &mut Trail) {
        let _look = self.look(chunk, 1, 0, 0, trail);
    }

    /// The cache, whose last word is given, goes back to the lowest word.
    pub fn leave_apart(&self, cache: u32, last: usize) {
        self.berths.leave(last / G::CHUNK_WORDS, cache);
    }

    /// The lowest word of the chunk with a free page.
    fn take_word_in(&self, chunk: usize) -> Option<Word> {
        let first = chunk << (G::CHUNK_SHIFT - WORD_SHIFT);
        (first..first + G::CHUNK_WORDS).find_map(|word| {
            // A look first: a swap would take the line of a word that has none.
            (self.free.load(word) != 0).then(|| self.take_word(word)).flatten()
        })
    }
}
