//! Where the lowest run is: first the hint's chunk, then the tree, then the bits of the chunk the tree names.
//!
//! A chunk is looked at in one pass over its runs. It goes on behind the run that is found: is there another for the
//! next search? If not, the pass has seen all there is, and the leaf is corrected as soon as the run is taken, not by a
//! later search that would have to look again ([`Correction`]). Where runs are found inside the hint's word no search
//! is made and no leaf corrected.
//!
//! A search changes nothing but summaries that promise too much, and a hint it has outgrown. Who corrects a summary
//! need not carry the change up if it only lowers: what is above promises enough, and a search that believes it too
//! long corrects it. But the correction may have to be corrected: by the time it is written somebody may have released
//! pages, and seen that the old summary had them. The second look finds them and raises the summary again, and as that
//! one relied on it, this has to be carried up. (Never to carry up loses pages: shuttle's models found it. Always to do
//! so was a seventh of all instructions in a torn heap.)

#![forbid(unsafe_code)]

use crate::bitmap::{self, Scan};
use crate::geometry::{Block, Shape};
use crate::hints::{Band, Mark};
use crate::radix::{Change, Cursor, Step};
use crate::summary::Summary;
use crate::sync::{Calm, fence_after_load};

use super::{FreeSet, Request};

/// A search that may raise the hint it begins at.
pub(super) struct Survey {
    band: Band,
    /// The hint, watched, as it was before anything was looked at.
    seen: Mark,
    /// The turnstile, after that.
    calm: Option<Calm>,
    pub(super) trail: Trail,
}

impl Survey {
    /// The page to begin at: the lowest at which a run may begin.
    #[inline(always)]
    pub(super) fn from(&self) -> usize {
        self.seen.page().saturating_sub(self.band.pages() - 1)
    }
}

/// What a search leaves behind.
#[derive(Default)]
pub(super) struct Trail {
    /// Its own passes through the turnstile.
    pub(super) passes: u32,
    /// What there is to correct when exactly the run that was found is taken.
    pub(super) correction: Option<Correction>,
    /// It goes from run to run within a chunk, and most are not the one: nothing is summed on the way.
    steps: bool,
}

/// A leaf that promises too much.
pub(super) struct Correction {
    chunk: usize,
    /// What it said, before the bits were read.
    says: Summary,
    bits: Block,
    /// What the bits add up to.
    truth: Summary,
}

/// What came of looking at the bits of a chunk.
pub(super) enum Look {
    Found(usize),
    /// Nothing; this many free pages in a row end with the chunk.
    Carry(usize),
}

impl<G: Shape> FreeSet<G> {
    /// The first page of the lowest run at or after `from` that meets the request, as the summaries and then the bits
    /// have it. Leaves its `trail`.
    pub(super) fn search(&self, request: &Request, from: usize, trail: &mut Trail) -> Option<usize> {
        let mut from = request.align_page(from)?;
        trail.steps = request.align > 1;
        loop {
            let start = self.first_run(request.pages, from, trail)?;
            let aligned = request.align_page(start)?;
            if aligned == start {
                return Some(start);
            }
            // Not the run that will be taken.
            trail.correction = None;
            from = aligned;
        }
    }

    /// The lowest run of `count` pages at or after `from`. Promises found broken are corrected on the way.
    fn first_run(&self, count: usize, from: usize, trail: &mut Trail) -> Option<usize> {
        let pages = self.grown();
        if from >= pages || count > pages - from {
            return None;
        }
        let chunk = from >> G::CHUNK_SHIFT;
        let mut cursor = Cursor::at::<G>(chunk);
        match self.look_from(chunk, count, from & (G::CHUNK_PAGES - 1), trail) {
            Look::Found(page) => return Some(page),
            Look::Carry(carry) => cursor.advance(carry),
        }
        loop {
            match self.tree.next(&mut cursor, count, pages) {
                Step::End => return None,
                Step::Run(start) => return Some(start),
                Step::Broken { level, index } => self.correct_node(level, index, trail),
                Step::Chunk { chunk, carry } => match self.look(chunk, count, 0, carry, trail) {
                    Look::Found(page) => return Some(page),
                    Look::Carry(carry) => cursor.advance(carry),
                },
            }
        }
    }

    /// Looks into the chunk a search begins in, from its page `from` on: at the leaf, and if that promises enough at
    /// the bits.
    #[inline]
    fn look_from(&self, chunk: usize, count: usize, from: usize, trail: &mut Trail) -> Look {
        let leaf = self.tree.leaf(chunk);
        if leaf.max() < count {
            return Look::Carry(leaf.end().min(G::CHUNK_PAGES - from));
        }
        self.look(chunk, count, from, 0, trail)
    }

    /// Looks for a run of `count` pages in the bits of a chunk, from its page `from` on, with `carry` free pages before
    /// it.
    #[inline]
    fn look(&self, chunk: usize, count: usize, from: usize, carry: usize, trail: &mut Trail) -> Look {
        // Before the bits: the first round of protocol R, if it comes to that.
        let leaf = self.tree.leaf(chunk);
        let bits = self.free.chunk::<G>(chunk);
        let words = &bits[..G::CHUNK_WORDS];
        let first = chunk << G::CHUNK_SHIFT;
        if carry > 0 && carry + bitmap::free_behind(words, 0) >= count {
            return Look::Found(first - carry);
        }
        let scan = if trail.steps && from > 0 {
            Scan::Torn
        } else {
            bitmap::scan(words, count, from)
        };
        let truth = match scan {
            Scan::First(page) => return Look::Found(first + page),
            Scan::Last(page, left) => {
                let mut bits = bits;
                bitmap::clear(&mut bits, page, count);
                trail.correction = Some(Correction {
                    chunk,
                    says: leaf,
                    bits,
                    truth: left,
                });
                return Look::Found(first + page);
            }
            Scan::Nothing(truth) => truth,
            Scan::Torn => match bitmap::find(words, count, from) {
                Some(page) => return Look::Found(first + page),
                None => bitmap::summarize(words),
            },
        };
        if truth != leaf && (leaf.max() >= count || carry + leaf.start() >= count) {
            trail.passes += 1;
            self.correct_leaf(&Correction {
                chunk,
                says: leaf,
                bits,
                truth,
            });
        }
        let end = truth.end().min(G::CHUNK_PAGES - from);
        Look::Carry(if end == G::CHUNK_PAGES { carry + end } else { end })
    }

    /// Makes a leaf say what there is.
    #[cold]
    pub(super) fn correct_leaf(&self, correction: &Correction) {
        let Correction {
            chunk,
            says,
            ref bits,
            truth,
        } = *correction;
        let _pass = self.turnstile.enter(chunk);
        let now = || self.free.chunk::<G>(chunk);
        if self.tree.settle_from(chunk, says, bits, truth, now) == Change::Raised {
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
    pub(super) fn correct_node(&self, level: usize, index: usize, trail: &mut Trail) {
        trail.passes += 1;
        let _pass = self.turnstile.enter(index);
        if self.tree.settle_node(level, index) == Change::Raised {
            self.tree.propagate(level, index, index);
        }
    }

    /// Begins a search for runs of the length of `band`, from its hint.
    #[inline(always)]
    pub(super) fn begin(&self, band: Band, hint: Mark) -> Survey {
        let seen = self.hints.watch(band, hint);
        // SeqCst fence: between the hint and the look at turnstile, tree and bits. Partner: the fence of a release
        // between those and the hint: if it found the hint as it was before ours, we see all it did.
        fence_after_load();
        Survey {
            band,
            seen,
            calm: self.turnstile.calm(),
            trail: Trail::default(),
        }
    }

    /// Raises the hint that the search began at to `page`, below which it has left no run of its length.
    ///
    /// What the search did not see it may not conclude from; see [`hints`](crate::hints) for why nothing is missed.
    #[inline(always)]
    pub(super) fn raise_hint(&self, survey: &Survey, page: usize) {
        let Some(calm) = survey.calm else { return };
        if self.turnstile.calm() == Some(calm.after(survey.trail.passes)) {
            self.hints.raise(survey.band, survey.seen, page);
        }
    }
}
