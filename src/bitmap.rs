//! The truth: one bit for each page, 1 = free, in 64-bit atomic words.
//!
//! ```text
//!   bit      0 1 2 3 …                63 │ 0 1 2 …                      63 │
//!            1 1 0 1 1 0 0 0 … 0 0 1 1 1 │ 1 1 0 0 …                       │ …
//!                               └────────┴───┘ a run may cross words, and chunks
//!            ◀──────── word w ──────────▶ ◀────────── word w + 1 ─────────▶
//!            page = 64 · w + bit; eight words are a chunk, one cache line, one leaf of the tree
//! ```
//!
//! 1 is free; 0 is "not available": allocated, held by a cache, or never grown. So a table of zeroed memory is a heap
//! with no pages, and nothing past the grown part needs a mark of its own. One read-modify-write on a word is the
//! linearization point of every operation on its pages; everything else in this crate is advice about these words.
//!
//! Example: in the word `…0110_1110` the lowest run of 2 starts at bit 1, the lowest run of 3 also does, and there is
//! no run of 4. [`find_in_word`] needs log₂ n steps for any n: and-ing a word with itself shifted by s leaves a bit
//! wherever s + 1 ones begin.
//!
//! Costs: one compare-exchange (~11 ns) or one swap (~8 ns) claims one page or many of a word. Summarising a chunk
//! takes 5 ns if it is empty or full, ~40 ns if it is torn. The algorithms are those of Go's `mpallocbits.go`,
//! rewritten for "1 = free".

#![forbid(unsafe_code)]

use crate::geometry::{Block, MAX_CHUNK_WORDS, Shape, WORD_PAGES, WORD_SHIFT};
use crate::summary::Summary;
use crate::sync::{AtomicU64, Ordering, Table};

/// The mask of `count` bits from `bit`: 1 ≤ count, bit + count ≤ 64.
#[inline(always)]
#[must_use]
pub const fn mask(bit: usize, count: usize) -> u64 {
    debug_assert!(count >= 1 && bit + count <= WORD_PAGES);
    (u64::MAX >> (WORD_PAGES - count)) << bit
}

/// The lowest bit of `word` at which `count` ones begin, 1 ≤ count ≤ 64; `None` if there is no such run. O(log count).
#[inline(always)]
#[must_use]
pub const fn find_in_word(word: u64, count: usize) -> Option<usize> {
    let mut starts = word;
    let mut proven = 1;
    while proven < count {
        if starts == 0 {
            return None;
        }
        // Each set bit stands for `proven` ones; both halves of a longer run must be set.
        let step = if proven < count - proven {
            proven
        } else {
            count - proven
        };
        starts &= starts >> step;
        proven += step;
    }
    if starts == 0 {
        None
    } else {
        Some(starts.trailing_zeros() as usize)
    }
}

/// The lowest run of `count` free pages that starts at page `from` of the region `words`, or later. Runs cross words.
///
/// Pages are counted from the region's first. Returns the run's first page.
#[inline]
#[must_use]
pub fn find(words: &[u64], count: usize, from: usize) -> Option<usize> {
    let first = from >> WORD_SHIFT;
    let mut carry = 0;
    for (index, &word) in words.iter().enumerate().skip(first) {
        let word = if index == first {
            word & (u64::MAX << (from % WORD_PAGES))
        } else {
            word
        };
        if word == 0 {
            carry = 0;
            continue;
        }
        if carry + word.trailing_ones() as usize >= count {
            return Some(index * WORD_PAGES - carry);
        }
        if word == u64::MAX {
            carry += WORD_PAGES;
            continue;
        }
        if count <= WORD_PAGES
            && let Some(bit) = find_in_word(word, count)
        {
            return Some(index * WORD_PAGES + bit);
        }
        carry = word.leading_ones() as usize;
    }
    None
}

/// A bit for each page of the chunk `words` at which `count` free pages begin, 1 ≤ count. Runs cross words.
///
/// As [`find_in_word`] does it, with the chunk as one long word: log₂ n rounds, without a branch on any word.
#[inline]
#[must_use]
pub fn starts(words: &Block, count: usize) -> Block {
    let (mut starts, mut proven) = (*words, 1);
    // Zeros follow, as many as there are words, and one.
    let mut padded = [0; 2 * MAX_CHUNK_WORDS + 1];
    while proven < count {
        let step = proven.min(count - proven);
        let (skip, shift) = ((step >> WORD_SHIFT).min(MAX_CHUNK_WORDS), step % WORD_PAGES);
        padded[..MAX_CHUNK_WORDS].copy_from_slice(&starts);
        let ahead = &padded[skip..=skip + MAX_CHUNK_WORDS];
        for (word, pair) in starts.iter_mut().zip(ahead.array_windows()) {
            let [low, high] = pair;
            // Two shifts, since one by 64 is not defined: `shift` may be 0.
            *word &= low >> shift | high << 1 << (WORD_PAGES - 1 - shift);
        }
        proven += step;
    }
    starts
}

/// The lowest page at or after `from` whose bit is set in `bits`, of pages `first`, `first + align`, and so on. `align`
/// is a power of two, and `first` is less.
#[inline]
#[must_use]
pub fn lowest_aligned(bits: &Block, from: usize, align: usize, first: usize) -> Option<usize> {
    // In a word that has any of these pages, they lie as in every other such word.
    let aligned = EVERY[(align.trailing_zeros() as usize).min(EVERY.len() - 1)] << (first % WORD_PAGES);
    let (mut index, stride) = (first >> WORD_SHIFT, (align >> WORD_SHIFT).max(1));
    while let Some(word) = bits.get(index) {
        let page = index * WORD_PAGES;
        let behind = match from.saturating_sub(page) {
            skip @ ..WORD_PAGES => u64::MAX << skip,
            _ => 0,
        };
        let found = word & aligned & behind;
        if found != 0 {
            return Some(page + found.trailing_zeros() as usize);
        }
        index += stride;
    }
    None
}

/// By its logarithm, a number that divides 64: the word with every so many-th bit set, from bit 0.
const EVERY: [u64; WORD_SHIFT as usize + 1] = {
    let (mut every, mut shift) = ([0; WORD_SHIFT as usize + 1], 0);
    while shift < every.len() {
        every[shift] = u64::MAX / mask(0, 1 << shift);
        shift += 1;
    }
    every
};

/// The number of free pages in a row right before page `page` of the region.
#[inline]
#[must_use]
pub fn free_before(words: &[u64], page: usize) -> usize {
    let mut first = page;
    while first > 0 {
        let last = first - 1;
        // The word's bits up to the page before `first`, shifted to the top.
        let ones = (words[last >> WORD_SHIFT] << (WORD_PAGES - 1 - last % WORD_PAGES)).leading_ones() as usize;
        first -= ones;
        if ones <= last % WORD_PAGES {
            break;
        }
    }
    page - first
}

/// The number of free pages in a row from page `page` of the region on.
#[inline]
#[must_use]
pub fn free_behind(words: &[u64], page: usize) -> usize {
    let (mut end, pages) = (page, words.len() * WORD_PAGES);
    while end < pages {
        let bit = end % WORD_PAGES;
        let ones = (words[end >> WORD_SHIFT] >> bit).trailing_ones() as usize;
        end += ones;
        if ones < WORD_PAGES - bit {
            break;
        }
    }
    end - page
}

/// The summary of the region `words`, at most [`MAX_CHUNK_WORDS`] of them.
///
/// One pass finds the runs that touch a word's end. Only if an inner run (at most 62 pages) could still be the longest
/// does a second pass look for one, and only for runs longer than the best so far.
#[inline]
#[must_use]
pub fn summarize(words: &[u64]) -> Summary {
    let (mut start, mut max, mut carry) = (None, 0, 0);
    for &word in words {
        if word == u64::MAX {
            carry += WORD_PAGES;
            continue;
        }
        let run = carry + word.trailing_ones() as usize;
        start = start.or(Some(run));
        max = if run > max { run } else { max };
        carry = word.leading_ones() as usize;
    }
    let Some(start) = start else {
        return Summary::free(carry);
    };
    max = max.max(carry);
    if max < WORD_PAGES - 2 {
        max = longest_beyond(words, max);
    }
    Summary::new(start, max, carry)
}

/// The longest run of ones inside a word of `words` if that is longer than `best`, else `best`. `best` is below 62.
///
/// It handles all words at once without a branch on any of them, so the compiler emits vector instructions.
#[inline(always)]
fn longest_beyond(words: &[u64], best: usize) -> usize {
    let mut starts = [0; MAX_CHUNK_WORDS];
    starts[..words.len()].copy_from_slice(words);
    let any = |starts: &[u64; MAX_CHUNK_WORDS]| starts.iter().fold(0, |all, word| all | word) != 0;
    // Erode: after this, a bit is left for each start of a run of `best + 1` ones.
    let mut proven = 1;
    while proven <= best {
        let step = proven.min(best + 1 - proven);
        starts.iter_mut().for_each(|word| *word &= *word >> step);
        proven += step;
    }
    let mut best = best;
    while any(&starts) {
        best += 1;
        starts.iter_mut().for_each(|word| *word &= *word >> 1);
    }
    best
}

/// The outcome of a pass over the runs of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scan {
    /// The lowest run that is long enough begins at this page. There is another behind it.
    First(usize),
    /// The lowest run that is long enough begins at this page, and there is no other. The summary is what is left once
    /// it is taken.
    Last(usize, Summary),
    /// No run is long enough. The summary is what there is.
    Nothing(Summary),
    /// More than [`SCAN_RUNS`] runs: other methods are faster.
    Torn,
}

/// The most runs that [`scan`] looks at.
pub const SCAN_RUNS: usize = 24;

/// Looks for the lowest run of `count` pages at or after page `from` of the region `words`, and continues to see what
/// will be left. Runs cross words. 1 ns a word and 1 ns a run.
#[inline]
#[must_use]
pub fn scan(words: &[u64], count: usize, from: usize) -> Scan {
    let (mut first, mut max, mut runs) = (None, 0, 0);
    // A run has ended. Returns the outcome if this run decides it.
    let mut close = |begin: usize, end: usize| {
        let mut longest = end - begin;
        if longest >= count && end - count >= from {
            let fit = if begin > from { begin } else { from };
            let behind = end - fit - count;
            if first.is_some() || behind >= count {
                return Some(Scan::First(first.unwrap_or(fit)));
            }
            first = Some(fit);
            longest = behind.max(fit - begin);
        }
        max = longest.max(max);
        None
    };
    let (mut begin, mut open) = (0, 0);
    for (index, &word) in words.iter().enumerate() {
        if word | open == 0 {
            continue;
        }
        let (page, before) = (index * WORD_PAGES, word << 1 | open);
        // A bit for each page that is the first of a run; a bit for each page that is the first after one.
        let (mut begins, mut ends) = (word & !before, before & !word);
        if open == 0 {
            (begin, begins) = next(page, begins);
        }
        open = word >> (WORD_PAGES - 1);
        while ends != 0 {
            let end;
            (end, ends) = next(page, ends);
            if let Some(scan) = close(begin, end) {
                return scan;
            }
            runs += 1;
            // If there is none, there is no other end in this word either, and no run is open at its end.
            (begin, begins) = next(page, begins);
        }
        if runs > SCAN_RUNS {
            return first.map_or(Scan::Torn, Scan::First);
        }
    }
    let pages = words.len() * WORD_PAGES;
    if open != 0
        && let Some(scan) = close(begin, pages)
    {
        return scan;
    }
    let (start, end) = (free_behind(words, 0), if open == 0 { 0 } else { pages - begin });
    let Some(first) = first else {
        return Scan::Nothing(Summary::new(start, max, end));
    };
    let start = if first < start { first } else { start };
    let end = if first >= pages - end {
        pages - first - count
    } else {
        end
    };
    Scan::Last(first, Summary::new(start, max, end))
}

/// The lowest page of `bits`, whose bit 0 is `page`, and the remaining bits.
#[inline(always)]
const fn next(page: usize, bits: u64) -> (usize, u64) {
    (page + bits.trailing_zeros() as usize, bits & bits.wrapping_sub(1))
}

/// The numbers of the bits that are set, from the lowest.
pub(crate) fn ones(mut bits: usize) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let lowest = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(lowest)
    })
}

/// The number of free pages among `count` pages from page `from` of the region `words`.
#[must_use]
pub fn count(words: &[u64], from: usize, count: usize) -> usize {
    Pieces::new(from, count)
        .map(|piece| (words[piece.word] & piece.mask).count_ones() as usize)
        .sum()
}

/// Sets the bits of `count` pages from page `from` of the region `words`.
pub fn set(words: &mut [u64], from: usize, count: usize) {
    Pieces::new(from, count).for_each(|piece| words[piece.word] |= piece.mask);
}

/// Clears the bits of `count` pages from page `from` of the region `words`.
pub fn clear(words: &mut [u64], from: usize, count: usize) {
    Pieces::new(from, count).for_each(|piece| words[piece.word] &= !piece.mask);
}

/// The part of a run that lies in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the word.
    pub word: usize,
    /// The run's bits in that word.
    pub mask: u64,
}

/// A run, cut at word boundaries, lowest piece first.
#[derive(Clone, Debug)]
pub struct Pieces {
    page: usize,
    end: usize,
}

impl Pieces {
    /// The pieces of `pages` pages from `start`.
    #[inline(always)]
    #[must_use]
    pub const fn new(start: usize, pages: usize) -> Self {
        Self {
            page: start,
            end: start + pages,
        }
    }
}

impl Iterator for Pieces {
    type Item = Piece;

    #[inline(always)]
    fn next(&mut self) -> Option<Piece> {
        if self.page >= self.end {
            return None;
        }
        let (word, bit) = (self.page >> WORD_SHIFT, self.page % WORD_PAGES);
        let pages = (self.end - self.page).min(WORD_PAGES - bit);
        self.page += pages;
        Some(Piece {
            word,
            mask: mask(bit, pages),
        })
    }
}

/// The bits of a whole heap: atomic words over a table, indexed from the heap's first page.
#[derive(Debug)]
pub struct Bitmap {
    words: Table<AtomicU64>,
}

impl Bitmap {
    /// The bitmap in `words`, which are all zero.
    #[must_use]
    pub const fn new(words: Table<AtomicU64>) -> Self {
        Self { words }
    }

    /// The current value of one word.
    ///
    /// Acquire: pairs with the release by the thread that set the bits seen, so that what preceded it (the scavenged
    /// bits, the pages' last contents) is seen too.
    #[inline(always)]
    pub fn load(&self, word: usize) -> u64 {
        self.words.get(word).load(Ordering::Acquire)
    }

    /// The words of a chunk, read one after another: they need not all have had these values at one instant. The block
    /// is padded with zeros.
    #[inline(always)]
    pub fn chunk<G: Shape>(&self, chunk: usize) -> Block {
        let mut words = [0; MAX_CHUNK_WORDS];
        let cells = self.words.row(chunk * G::CHUNK_WORDS, G::CHUNK_WORDS);
        for (word, cell) in words.iter_mut().zip(cells) {
            // Acquire, as in `load`.
            *word = cell.load(Ordering::Acquire);
        }
        words
    }

    /// Clears exactly the bits of `mask` if all of them are set.
    ///
    /// # Errors
    /// The bits of `mask` that were not set; nothing was changed.
    #[inline(always)]
    pub fn take(&self, word: usize, mask: u64) -> Result<(), u64> {
        let cell = self.words.get(word);
        // Relaxed: a guess, which the exchange checks.
        let mut now = cell.load(Ordering::Relaxed);
        loop {
            if now & mask != mask {
                return Err(mask & !now);
            }
            // Acquire: sees the last contents and scavenged bits of the pages, released by `give`. (So does a thread
            // that claims the other bits later: read-modify-writes continue a release sequence.) Release: who finds the
            // bits gone, by `load` or `chunk`, sees what the taker announced before: its entry into a turnstile, or
            // that it is at work on a cache. A proof relies on that (`Turnstile::calm`, `PageHeap::look_at_caches`).
            match cell.compare_exchange_weak(now, now & !mask, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(seen) => now = seen,
            }
        }
    }

    /// Takes every set bit of the word; returns zero if there was none.
    #[inline(always)]
    pub fn take_word(&self, word: usize) -> u64 {
        // AcqRel, as in `take`.
        self.words.get(word).swap(0, Ordering::AcqRel)
    }

    /// Takes those bits of `mask` that are set, and returns them.
    #[inline(always)]
    pub fn take_any(&self, word: usize, mask: u64) -> u64 {
        // AcqRel, as in `take`.
        self.words.get(word).fetch_and(!mask, Ordering::AcqRel) & mask
    }

    /// Sets the bits of `mask`, none of which may be set, and returns the new value of the word.
    ///
    /// # Errors
    /// The bits of `mask` that were already set; nothing was changed.
    #[inline(always)]
    pub fn give(&self, word: usize, mask: u64) -> Result<u64, u64> {
        let cell = self.words.get(word);
        // Relaxed: a guess, which the exchange checks.
        let mut now = cell.load(Ordering::Relaxed);
        loop {
            if now & mask != 0 {
                return Err(now & mask);
            }
            // Release: publishes the pages' contents and scavenged bits to `take`. Acquire: the caller goes on to
            // compare with the leaf, which a thread that gave neighbouring bits earlier may have published.
            match cell.compare_exchange_weak(now, now | mask, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(now | mask),
                Err(seen) => now = seen,
            }
        }
    }

    /// Sets the bits of `mask`, whatever they were.
    #[inline(always)]
    pub fn mark(&self, word: usize, mask: u64) {
        // Relaxed: the pages are the caller's, which passes them on by `give` on the bitmap of free pages; that
        // releases this.
        self.words.get(word).fetch_or(mask, Ordering::Relaxed);
    }

    /// The number of words the table can hold.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Whether the table can hold no word.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
