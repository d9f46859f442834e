//! Where the lowest run is: first the hint's chunk by its bits, then the tree, then the bits of the chunk the tree
//! names.
//!
//! A search changes nothing but summaries that promise too much, and a hint it has outgrown. Whoever corrects a summary
//! carries the change up, although it only lowers, as it seems: by the time it is written it may hold a release's
//! raise, and the releaser, finding it there, leaves the rest of the way to its writer. (Not carrying it up saves a
//! tenth of the instructions in a torn heap, and loses pages: shuttle's models found it.)

#![forbid(unsafe_code)]

use crate::bitmap;
use crate::geometry::{Block, Shape, WORD_SHIFT};
use crate::hints::Band;
use crate::radix::{Cursor, Step};
use crate::summary::Summary;
use crate::sync::fence_after_rmw;

use super::{FreeSet, Request};

/// Runs of up to so many pages are mostly found in the word where the last one was.
const SHORT: usize = 8;

/// What came of looking at the bits of a chunk.
pub(super) enum Look {
    Found(usize),
    /// Nothing; this many free pages in a row end with the chunk.
    Carry(usize),
}

impl<G: Shape> FreeSet<G> {
    /// The first page of the lowest run at or after `from` that meets the request, as the summaries and then the bits
    /// have it.
    pub(super) fn search(&self, request: &Request, from: usize) -> Option<usize> {
        let mut from = request.align_page(from)?;
        loop {
            let start = self.first_run::<true>(request.pages, from, self.grown())?;
            let aligned = request.align_page(start)?;
            if aligned == start {
                return Some(start);
            }
            from = aligned;
        }
    }

    /// The lowest run of `count` pages at or after `from`, in a heap of `pages` pages. With `REPAIR`, promises found
    /// broken are corrected on the way.
    pub(super) fn first_run<const REPAIR: bool>(&self, count: usize, from: usize, pages: usize) -> Option<usize> {
        if from >= pages || count > pages - from {
            return None;
        }
        let chunk = from >> G::CHUNK_SHIFT;
        let mut cursor = Cursor::at::<G>(chunk);
        match self.look_from::<REPAIR>(chunk, count, from & (G::CHUNK_PAGES - 1)) {
            Look::Found(page) => return Some(page),
            Look::Carry(carry) => cursor.advance(carry),
        }
        loop {
            match self.tree.next(&mut cursor, count, pages) {
                Step::End => return None,
                Step::Run(start) => return Some(start),
                Step::Broken { level, index } if REPAIR => self.correct_node(level, index),
                Step::Broken { .. } => {}
                Step::Chunk { chunk, carry } => match self.look::<REPAIR>(chunk, count, 0, carry) {
                    Look::Found(page) => return Some(page),
                    Look::Carry(carry) => cursor.advance(carry),
                },
            }
        }
    }

    /// Looks into the chunk a search begins in, from its page `from` on: at the leaf, and if that promises enough at
    /// the bits.
    #[inline]
    fn look_from<const REPAIR: bool>(&self, chunk: usize, count: usize, from: usize) -> Look {
        let leaf = self.tree.leaf(chunk);
        if leaf.max() < count {
            return Look::Carry(leaf.end().min(G::CHUNK_PAGES - from));
        }
        self.look::<REPAIR>(chunk, count, from, 0)
    }

    /// Looks for a run of `count` pages in the bits of a chunk, from its page `from` on, with `carry` free pages before
    /// it.
    #[inline]
    pub(super) fn look<const REPAIR: bool>(&self, chunk: usize, count: usize, from: usize, carry: usize) -> Look {
        // Before the bits: the first round of protocol R, if it comes to that.
        let leaf = if REPAIR { self.tree.leaf(chunk) } else { Summary::NONE };
        let bits = self.free.chunk::<G>(chunk);
        let words = &bits[..G::CHUNK_WORDS];
        let first = chunk << G::CHUNK_SHIFT;
        if carry > 0 && carry + bitmap::free_behind(words, 0) >= count {
            return Look::Found(first - carry);
        }
        if let Some(page) = bitmap::find(words, count, from) {
            return Look::Found(first + page);
        }
        if leaf.max() >= count || carry + leaf.start() >= count {
            let truth = bitmap::summarize(words);
            if truth != leaf {
                self.correct_leaf(chunk, leaf, bits, truth);
            }
        }
        let end = bitmap::free_before(words, G::CHUNK_PAGES).min(G::CHUNK_PAGES - from);
        Look::Carry(if end == G::CHUNK_PAGES { carry + end } else { end })
    }

    /// Makes a leaf that said `says`, and then was found promising more than the `truth` of `bits`, say what there is.
    #[cold]
    fn correct_leaf(&self, chunk: usize, says: Summary, bits: Block, truth: Summary) {
        let _pass = self.turnstile.enter(chunk);
        if self
            .tree
            .settle_from(chunk, says, bits, truth, || self.free.chunk::<G>(chunk))
        {
            self.tree.propagate(G::LEAF, chunk, chunk);
        }
    }

    /// Makes the leaf of a chunk and all that is above it say what there is, after a run that seemed to reach into the
    /// chunk was not there: which of them promised it is not known.
    #[cold]
    pub(super) fn correct_all(&self, chunk: usize) {
        let _pass = self.turnstile.enter(chunk);
        self.tree.settle(chunk, || self.free.chunk::<G>(chunk));
        for level in (0..G::LEAF).rev() {
            self.tree
                .settle_node(level, chunk >> (G::span_shift(level) - G::CHUNK_SHIFT));
        }
    }

    /// Makes an inner node, found to promise too much, say what its children do.
    #[cold]
    pub(super) fn correct_node(&self, level: usize, index: usize) {
        let _pass = self.turnstile.enter(index);
        if self.tree.settle_node(level, index) {
            self.tree.propagate(level, index, index);
        }
    }

    /// After a claim at `start`, by a search that began at the hint `seen`: raises the hint if that is worth the second
    /// look. For short runs where the word has another: the next is then found without a search. Else once in a block
    /// of chunks: the searches between begin a few entries too early, which costs less than a second look each.
    #[inline(always)]
    pub(super) fn outgrow_hint(&self, band: Band, seen: usize, start: usize) {
        let (end, block) = (start + band.pages(), G::CHUNK_SHIFT + G::FANOUT_SHIFT);
        if band.pages() <= SHORT && end >> WORD_SHIFT > seen >> WORD_SHIFT {
            let rest = self.free.load(start >> WORD_SHIFT);
            if end >> block > seen >> block || bitmap::find_in_word(rest, band.pages()).is_some() {
                self.raise_hint(band, seen, end);
            }
        } else if start >> block > seen >> block {
            self.raise_hint(band, seen, start >> G::CHUNK_SHIFT << G::CHUNK_SHIFT);
        }
    }

    /// Raises the hint of `band` from `seen` to `page`, if no run of the band's length lies below `page`.
    ///
    /// A releaser goes: bits, fence, (tree,) fence, look at the hint. We go: hint, fence, look at tree and bits.
    /// Whichever fence is first, one of us sees the other; the calm says that nobody was between bits and tree
    /// meanwhile. If we see a run, or no calm, the hint goes back.
    pub(super) fn raise_hint(&self, band: Band, seen: usize, page: usize) {
        let Some(calm) = self.turnstile.calm() else { return };
        if !self.hints.try_raise(band, seen, page) {
            return;
        }
        fence_after_rmw();
        let from = seen.saturating_sub(band.pages() - 1);
        let lowest = self.first_run::<false>(band.pages(), from, page);
        let missed = lowest.is_some_and(|start| start + band.pages() <= page);
        if missed || self.turnstile.calm() != Some(calm) {
            self.hints.lower_band(band, seen);
        }
    }
}
