//! Putting pages back: first the bits, then the summaries, provers and hints that depend on them.
//!
//! ```text
//!   give the bits ─▶ fence ─▶ does the leaf promise the run they made?
//!                               ├── yes ─▶ is a thread proving? then pass the turnstile
//!                               └── no ──▶ inside the turnstile: leaf, parents ─▶ fence
//!                             then, either way, the hints above the pages are lowered
//! ```

#![forbid(unsafe_code)]

use crate::bitmap::{self, Pieces};
use crate::geometry::{Shape, WORD_PAGES, WORD_SHIFT};
use crate::radix::{Change, Run};
use crate::sync::{Ordering, fence_after_rmw};

use super::{FreeSet, Word, lowest_page};

impl<G: Shape> FreeSet<G> {
    /// Puts pages back. They were claimed, and no thread uses them any longer.
    ///
    /// # Errors
    /// A page that is free already. Nothing is put back, unless two threads free overlapping runs at the same moment:
    /// then the one that loses may have put back part of its run.
    #[inline]
    pub fn release(&self, start: usize, pages: usize) -> Result<(), usize> {
        if start % WORD_PAGES + pages <= WORD_PAGES {
            let (word, mask) = (start >> WORD_SHIFT, bitmap::mask(start % WORD_PAGES, pages));
            return self.release_bits(word, mask);
        }
        self.release_long(start, pages)
    }

    /// Puts back the pages of one word, those of `scavenged` as scavenged: the flush of a cache.
    ///
    /// # Errors
    /// A page that is free already; the others are put back.
    #[inline]
    pub fn release_word(&self, word: Word) -> Result<(), usize> {
        if word.free == 0 {
            return Ok(());
        }
        if word.scavenged != 0 {
            // Before the pages are free: a thread that takes them must see it (I1).
            self.scavenged.mark(word.index, word.scavenged);
        }
        self.release_bits(word.index, word.free).or_else(|page| {
            let twice = self.free.load(word.index) & word.free;
            if twice != word.free {
                self.release_bits(word.index, word.free & !twice)?;
            }
            Err(page)
        })
    }

    #[inline]
    fn release_bits(&self, word: usize, mask: u64) -> Result<(), usize> {
        let after = self.free.give(word, mask).map_err(|free| lowest_page(word, free))?;
        self.given(word, mask, after);
        Ok(())
    }

    /// The work that remains once the bits of `mask` have been set in a word, whose new value is `after`.
    #[inline(always)]
    fn given(&self, word: usize, mask: u64, after: u64) {
        // SeqCst fence: between setting the bits and reading neighbours, leaf, flag and hints. Partners: the fences in
        // `refresh`, `claim_or_prove` and `begin`, between a change of those and a read of the bits; and this same
        // fence in a neighbour's release.
        fence_after_rmw();
        let page = lowest_page(word, mask);
        if has_gaps(mask) {
            return self.given_torn(word, page, after);
        }
        let run = self.run_around(word, mask, after);
        self.tell(page, run);
        self.hints.lower(page, run.longest());
    }

    /// As `given`, if there are gaps between the bits. Several runs may have been created; three matter: the longest,
    /// the one that reaches the word's start, and the one that reaches its end.
    #[inline(never)]
    fn given_torn(&self, word: usize, page: usize, after: u64) {
        let (first, inner) = (word * WORD_PAGES, bitmap::summarize(&[after]));
        let mut longest = inner.max();
        self.tell(
            page,
            Run {
                pages: longest,
                at_start: false,
                at_end: false,
            },
        );
        for (start, pages) in [(first, inner.start()), (first + WORD_PAGES - inner.end(), inner.end())] {
            if pages > 0 {
                let run = self.follow(start, pages);
                longest = longest.max(run.longest());
                self.tell(page, run);
            }
        }
        self.hints.lower(page, longest);
    }

    /// Makes the tree promise a run that was created in the chunk of `page`, and makes threads that are proving there
    /// is none start over.
    ///
    /// Ends with a SeqCst fence between leaf and parents and the read of the hints that follows; partner: the one in
    /// `begin`.
    #[inline(always)]
    fn tell(&self, page: usize, run: Run) {
        let chunk = page >> G::CHUNK_SHIFT;
        if run.is_told_by(self.tree.leaf(chunk)) {
            // Relaxed: ordered by the fence after the giving of the bits; partner: the fence in `claim_or_prove`.
            if self.seldom.provers.load(Ordering::Relaxed) != 0 {
                drop(self.turnstile.enter(chunk));
            }
        } else {
            let _pass = self.turnstile.enter(chunk);
            self.tree.raise(chunk, run);
        }
        // The last write was that of the bits or that of leaving the turnstile, both read-modify-writes.
        fence_after_rmw();
    }

    /// The run that the bits of `mask`, which has no gaps, are part of in the word `after`, followed into the chunk's
    /// other words if it reaches them.
    #[inline(always)]
    fn run_around(&self, word: usize, mask: u64, after: u64) -> Run {
        let (low, high) = (mask.trailing_zeros(), u64::BITS - mask.leading_zeros());
        // The ones right below and right above.
        let below = (after << (u64::BITS - 1 - low) << 1).leading_ones();
        let above = (after >> (high - 1) >> 1).trailing_ones();
        if low == below || high + above == u64::BITS {
            return self.follow(word * WORD_PAGES + low as usize, (high - low) as usize);
        }
        Run {
            pages: (high + above + below - low) as usize,
            at_start: false,
            at_end: false,
        }
    }

    /// The run that these free pages of one chunk are part of, within the chunk.
    ///
    /// If two releases meet, the fences ensure that at least one sees the other's bits.
    #[inline(never)]
    fn follow(&self, start: usize, pages: usize) -> Run {
        let bits = self.free.chunk::<G>(start >> G::CHUNK_SHIFT);
        let (words, first) = (&bits[..G::CHUNK_WORDS], start & (G::CHUNK_PAGES - 1));
        let below = bitmap::free_before(words, first);
        let above = bitmap::free_behind(words, first + pages);
        Run {
            pages: below + pages + above,
            at_start: below == first,
            at_end: first + pages + above == G::CHUNK_PAGES,
        }
    }

    /// Makes the leaves of these chunks, and the nodes above them, promise what is there. The caller is inside the
    /// turnstile.
    #[inline]
    pub(super) fn publish(&self, first: usize, last: usize) {
        let mut change = Change::None;
        for chunk in first..=last {
            change = self.tree.cover(chunk, || self.free.chunk::<G>(chunk)).max(change);
        }
        if change != Change::None {
            self.tree.propagate(G::LEAF, first, last);
        }
    }

    fn release_long(&self, start: usize, pages: usize) -> Result<(), usize> {
        self.refuse_free(start, pages)?;
        let (first, last) = (start >> G::CHUNK_SHIFT, (start + pages - 1) >> G::CHUNK_SHIFT);
        if first != last {
            return self.release_chunks(start, pages, first, last);
        }
        let given = self.give_pieces(Pieces::new(start, pages));
        // SeqCst fence, as in `given`. If not all could be given, too much is promised, which does no harm.
        fence_after_rmw();
        let run = self.follow(start, pages);
        self.tell(start, run);
        self.hints.lower(start, run.longest());
        given
    }

    /// A run across several chunks, whose leaves are computed anew.
    fn release_chunks(&self, start: usize, pages: usize, first: usize, last: usize) -> Result<(), usize> {
        let pass = self.turnstile.enter(first);
        let given = self.give_pieces(Pieces::new(start, pages));
        self.publish(first, last);
        drop(pass);
        fence_after_rmw();
        self.hints.lower(start, usize::MAX);
        given
    }

    /// Sets bits, up to the first that is already set.
    fn give_pieces(&self, mut pieces: Pieces) -> Result<(), usize> {
        pieces.try_for_each(|piece| match self.free.give(piece.word, piece.mask) {
            Ok(_) => Ok(()),
            Err(free) => Err(lowest_page(piece.word, free)),
        })
    }

    /// Puts back many runs, which are sorted and do not overlap: one look at the leaf of each chunk, one walk up for
    /// each block of siblings.
    ///
    /// # Errors
    /// As for [`release`](Self::release): a page that is free already; nothing is put back.
    pub fn release_sorted(&self, runs: impl Iterator<Item = (usize, usize)> + Clone) -> Result<(), usize> {
        for (start, pages) in runs.clone() {
            self.refuse_free(start, pages)?;
        }
        let Some((lowest, _)) = runs.clone().next() else {
            return Ok(());
        };
        let pass = self.turnstile.enter(lowest >> G::CHUNK_SHIFT);
        let (mut open, mut dirty, mut given) = (lowest >> G::CHUNK_SHIFT, None, Ok(()));
        for piece in runs.flat_map(|(start, pages)| Pieces::new(start, pages)) {
            let chunk = piece.word / G::CHUNK_WORDS;
            if chunk != open {
                dirty = self.close(open, dirty, Some(chunk));
                open = chunk;
            }
            if let Err(free) = self.free.give(piece.word, piece.mask) {
                given = Err(lowest_page(piece.word, free));
                break;
            }
        }
        self.close(open, dirty, None);
        drop(pass);
        fence_after_rmw();
        self.hints.lower(lowest, usize::MAX);
        given
    }

    /// Ends a batch's work on a chunk: its leaf now, its parents when the batch leaves the block of siblings. Returns
    /// the first chunk of that block whose leaf has changed and not yet been carried up.
    fn close(&self, chunk: usize, dirty: Option<usize>, next: Option<usize>) -> Option<usize> {
        let change = self.tree.cover(chunk, || self.free.chunk::<G>(chunk));
        let dirty = dirty.or((change != Change::None).then_some(chunk));
        if next.is_some_and(|next| next >> G::FANOUT_SHIFT == chunk >> G::FANOUT_SHIFT) {
            return dirty;
        }
        if let Some(dirty) = dirty {
            self.tree.propagate(G::LEAF, dirty, chunk);
        }
        None
    }

    /// # Errors
    /// The first of these pages that is free.
    pub fn refuse_free(&self, start: usize, pages: usize) -> Result<(), usize> {
        let free = Pieces::new(start, pages).find(|piece| self.free.load(piece.word) & piece.mask != 0);
        free.map_or(Ok(()), |piece| {
            Err(lowest_page(piece.word, self.free.load(piece.word) & piece.mask))
        })
    }
}

/// Whether a zero lies between two ones of `mask`, which is not zero.
#[inline(always)]
const fn has_gaps(mask: u64) -> bool {
    let low = mask >> mask.trailing_zeros();
    low & low.wrapping_add(1) != 0
}
