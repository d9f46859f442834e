//! Putting pages back: the bits first, then whoever has to know.
//!
//! ```text
//!   give the bits ─▶ fence ─▶ does the leaf promise the run they made? ── yes ─▶ is anybody proving? then pass the turnstile
//!                                       └── no ─▶ inside the turnstile: leaf, parents ─▶ fence
//!                                                                       then, either way, the hints above the pages come down
//! ```

#![forbid(unsafe_code)]

use crate::bitmap::{self, Pieces};
use crate::geometry::{Shape, WORD_PAGES, WORD_SHIFT};
use crate::radix::Run;
use crate::sync::{Ordering, fence_after_rmw};

use super::{FreeSet, Word, lowest_page};

impl<G: Shape> FreeSet<G> {
    /// Puts pages back. They were claimed, and are nobody's now.
    ///
    /// # Errors
    /// A page that is free already. Nothing is put back, unless two threads free overlapping runs at the same moment: then the
    /// one that loses may have put back part of its run.
    #[inline]
    pub fn release(&self, start: usize, pages: usize) -> Result<(), usize> {
        if start % WORD_PAGES + pages <= WORD_PAGES {
            let (word, mask) = (start >> WORD_SHIFT, bitmap::mask(start % WORD_PAGES, pages));
            return self.release_bits(word, mask);
        }
        self.release_long(start, pages)
    }

    /// Puts back the pages of one word, `scavenged` of them as such: the flush of a cache.
    ///
    /// # Errors
    /// As for [`release`](Self::release).
    #[inline]
    pub fn release_word(&self, word: Word) -> Result<(), usize> {
        if word.free == 0 {
            return Ok(());
        }
        if word.scavenged != 0 {
            // Before the pages are free: whoever takes them must see it (I1).
            self.scavenged.mark(word.index, word.scavenged);
        }
        self.release_bits(word.index, word.free)
    }

    #[inline]
    fn release_bits(&self, word: usize, mask: u64) -> Result<(), usize> {
        let after = self.free.give(word, mask).map_err(|free| lowest_page(word, free))?;
        self.given(word, mask, after);
        Ok(())
    }

    /// What there is to do once the bits of `mask` have been set in a word, which that left as `after`.
    #[inline(always)]
    fn given(&self, word: usize, mask: u64, after: u64) {
        // SeqCst fence: between the bits and the look at leaf, flag and hints. Partners: the fences in `refresh`, in `calm` and in
        // `raise_hint`, between a change of those and a look at the bits.
        fence_after_rmw();
        let chunk = word / G::CHUNK_WORDS;
        let run = self.run_around(word, mask, after);
        let longest = if run.at_start || run.at_end {
            usize::MAX
        } else {
            run.pages
        };
        if run.is_told_by(self.tree.leaf(chunk)) {
            // Relaxed: ordered by the fence.
            if self.seldom.provers.load(Ordering::Relaxed) != 0 {
                drop(self.turnstile.enter(chunk));
            }
        } else {
            let _pass = self.turnstile.enter(chunk);
            self.tree.raise(chunk, run);
        }
        // SeqCst fence: between leaf and parents and the look at the hints; partner: the one in `raise_hint`. The pass, if there was
        // one, was left by a read-modify-write.
        fence_after_rmw();
        self.hints.lower(lowest_page(word, mask), longest);
    }

    /// The run that the bits of `mask` are part of in the word `after`, followed into the chunk's other words where it reaches them.
    ///
    /// Of two releases that meet at a word's border, the fences let one at least see the other's bits.
    #[inline(always)]
    fn run_around(&self, word: usize, mask: u64, after: u64) -> Run {
        let (low, high) = (mask.trailing_zeros(), u64::BITS - mask.leading_zeros());
        // Ones right below and right above; the bits between may have gaps, which only makes this an upper bound.
        let below = (after << (u64::BITS - 1 - low) << 1).leading_ones();
        let above = (after >> (high - 1) >> 1).trailing_ones();
        let mut run = Run {
            pages: (high + above + below - low) as usize,
            at_start: false,
            at_end: false,
        };
        if low == below || high + above == u64::BITS {
            self.follow(word, low == below, high + above == u64::BITS, &mut run);
        }
        run
    }

    #[inline(never)]
    fn follow(&self, word: usize, down: bool, up: bool, run: &mut Run) {
        let offset = word % G::CHUNK_WORDS;
        let first = word - offset;
        run.at_start = down;
        for index in (first..word).rev().take_while(|_| down) {
            let ones = self.free.load(index).leading_ones() as usize;
            run.pages += ones;
            if ones < WORD_PAGES {
                run.at_start = false;
                break;
            }
        }
        run.at_end = up;
        for index in (word + 1..first + G::CHUNK_WORDS).take_while(|_| up) {
            let ones = self.free.load(index).trailing_ones() as usize;
            run.pages += ones;
            if ones < WORD_PAGES {
                run.at_end = false;
                break;
            }
        }
    }

    /// Makes the leaves of these chunks, and what is above them, promise what there is. The caller is inside the turnstile.
    #[inline]
    pub(super) fn publish(&self, first: usize, last: usize) {
        let mut changed = false;
        for chunk in first..=last {
            changed |= self.tree.cover(chunk, || self.summarize(chunk));
        }
        if changed {
            self.tree.propagate(G::LEAF, first, last);
        }
    }

    fn release_long(&self, start: usize, pages: usize) -> Result<(), usize> {
        self.refuse_free(start, pages)?;
        let (first, last) = (start >> G::CHUNK_SHIFT, (start + pages - 1) >> G::CHUNK_SHIFT);
        let pass = self.turnstile.enter(first);
        let given = self.give_pieces(Pieces::new(start, pages));
        self.publish(first, last);
        drop(pass);
        fence_after_rmw();
        self.hints.lower(start, usize::MAX);
        given
    }

    /// Sets bits, up to the first that is set already.
    fn give_pieces(&self, mut pieces: Pieces) -> Result<(), usize> {
        pieces.try_for_each(|piece| match self.free.give(piece.word, piece.mask) {
            Ok(_) => Ok(()),
            Err(free) => Err(lowest_page(piece.word, free)),
        })
    }

    /// Puts back many runs, which are sorted and do not overlap: one look at the leaf of each chunk, one walk for each block of
    /// siblings.
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

    /// Ends a batch's work on a chunk: its leaf now, its parents when the batch leaves the block of siblings. Returns the first
    /// chunk of that block whose leaf has changed and not been carried up.
    fn close(&self, chunk: usize, dirty: Option<usize>, next: Option<usize>) -> Option<usize> {
        let changed = self.tree.cover(chunk, || self.summarize(chunk));
        let dirty = dirty.or(changed.then_some(chunk));
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
