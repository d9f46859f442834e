//! Where the lowest run is: first the hint's chunk, then the tree, then the bits of the chunk that the tree names.
//!
//! A chunk is examined in one pass over its runs. The pass continues behind the run it finds, to see whether there is
//! another one for the next search. If not, it has seen everything in the chunk, and the leaf is corrected as soon as
//! the run is taken, instead of by a later search that would have to read the bits again ([`Correction`]). A run found
//! inside the hint's word needs no search and corrects no leaf.
//!
//! A search for an alignment tries all aligned pages of a chunk at once. (It went from run to run: 20 ns for each gap
//! that a block shorter than its alignment had left.) If none will do, it moves on, and corrects nothing: the leaf had
//! promised a run, and there is one.
//!
//! A search changes nothing but summaries that promise too much, and a hint it has outgrown. A correction that only
//! lowers a summary need not be carried up: the nodes above promise enough, and a search that believes them in vain
//! corrects them. But a correction may itself need correcting: by the time it is written, another thread may have
//! released pages and seen them promised by the old summary. The second look finds these pages and raises the summary
//! again. Since that thread relied on it, this raise has to be carried up. (Never carrying up loses pages: shuttle's
//! models found that. Always doing so took a seventh of all instructions in a torn heap.)

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
    /// The hint, watched, as it was before anything else was read.
    seen: Mark,
    /// The turnstile, read after the hint.
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
    /// What to correct once exactly the run that was found is taken.
    pub(super) correction: Option<Correction>,
    /// What was found was promised by an inner node; no bits were seen.
    pub(super) is_promise: bool,
    /// Another thread took a word whose bits had been seen.
    pub(super) lost: bool,
    /// Runs that a search for an alignment has considered, one after another.
    tries: usize,
}

/// A leaf that promises too much.
pub(super) struct Correction {
    chunk: usize,
    /// What the leaf said before the bits were read.
    says: Summary,
    bits: Block,
    /// The summary of the bits.
    truth: Summary,
}

/// The outcome of examining the bits of a chunk.
pub(super) enum Look {
    Found(usize),
    /// No run; this many free pages in a row end with the chunk.
    Carry(usize),
}

impl<G: Shape> FreeSet<G> {
    /// The first page of the lowest run at or after `from` that meets the request, according to the summaries and then
    /// the bits. Leaves its `trail`.
    pub(super) fn search(&self, request: &Request, from: usize, trail: &mut Trail) -> Option<usize> {
        if request.align == 1 {
            self.first_run(request.pages, from, trail)
        } else {
            self.search_aligned(request, from, trail)
        }
    }

    #[inline(never)]
    fn search_aligned(&self, request: &Request, from: usize, trail: &mut Trail) -> Option<usize> {
        let mut from = request.align_page(from)?;
        loop {
            let start = self.first_likely(request, from, trail)?;
            trail.tries += 1;
            let aligned = request.align_page(start)?;
            if aligned == start {
                return Some(start);
            }
            // This is not the run that will be taken.
            trail.correction = None;
            from = aligned;
        }
    }

    /// The lowest run of `count` pages at or after `from`. Promises found broken are corrected on the way.
    fn first_run(&self, count: usize, from: usize, trail: &mut Trail) -> Option<usize> {
        trail.is_promise = false;
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
                Step::Run(start) => {
                    trail.is_promise = true;
                    return Some(start);
                }
                Step::Broken { level, index } => self.correct_node(level, index, trail),
                Step::Chunk { chunk, carry } => match self.look(chunk, count, 0, carry, trail) {
                    Look::Found(page) => return Some(page),
                    Look::Carry(carry) => cursor.advance(carry),
                },
            }
        }
    }

    /// For tests: what a search of the whole heap does until it finds a run that meets the request, which is aligned.
    /// How many runs it considers, and how many summaries it takes for broken promises.
    pub fn effort(&self, request: &Request) -> (usize, u32) {
        let mut trail = Trail::default();
        let _found = self.search(request, 0, &mut trail);
        (trail.tries, trail.passes)
    }

    /// A run at or after `from` that is long enough; none that meets the request lies before it. It may begin at a page
    /// that will not do only if an inner node promised it, or if the alignment is more than a chunk.
    fn first_likely(&self, request: &Request, from: usize, trail: &mut Trail) -> Option<usize> {
        if request.align > G::CHUNK_PAGES {
            // Most chunks have no aligned page: the search goes from one such page to the next.
            return self.first_run(request.pages, from, trail);
        }
        trail.is_promise = false;
        let (count, pages) = (request.pages, self.grown());
        if from >= pages || count > pages - from {
            return None;
        }
        let (mut chunk, mut from, mut carry) = (from >> G::CHUNK_SHIFT, from & (G::CHUNK_PAGES - 1), 0);
        let mut cursor = Cursor::at::<G>(chunk);
        loop {
            if let Some(start) = self.look_aligned(chunk, request, from, carry, &mut cursor, trail) {
                return Some(start);
            }
            from = 0;
            (chunk, carry) = loop {
                match self.tree.next(&mut cursor, count, pages) {
                    Step::End => return None,
                    Step::Run(start) => {
                        trail.is_promise = true;
                        return Some(start);
                    }
                    Step::Broken { level, index } => self.correct_node(level, index, trail),
                    Step::Chunk { chunk, carry } => break (chunk, carry),
                }
            };
        }
    }

    /// As [`look`](Self::look), for a run that begins at an aligned page, of which all in the chunk are tried at once.
    /// If there is no such run, the cursor moves past the chunk.
    ///
    /// The leaf is corrected if no run is long enough, wherever it begins. Otherwise it told the truth, and so did the
    /// nodes above it.
    fn look_aligned(
        &self,
        chunk: usize,
        request: &Request,
        from: usize,
        carry: usize,
        cursor: &mut Cursor,
        trail: &mut Trail,
    ) -> Option<usize> {
        // Read before the bits, as in `look`.
        let (leaf, count) = (self.tree.leaf(chunk), request.pages);
        let (first, behind) = (chunk << G::CHUNK_SHIFT, (chunk + 1) << G::CHUNK_SHIFT);
        if carry == 0 && leaf.max() < count {
            cursor.advance(request.usable(behind, leaf.end().min(G::CHUNK_PAGES - from)));
            return None;
        }
        let bits = self.free.chunk::<G>(chunk);
        let words = &bits[..G::CHUNK_WORDS];
        let (before, start) = (request.usable(first, carry), bitmap::free_behind(words, 0));
        if before > 0 && before + start >= count {
            return Some(first - before);
        }
        let lowest = request.offset(first);
        if from == 0 && lowest + count <= start {
            return Some(first + lowest);
        }
        let starts = bitmap::starts(&bits, count);
        if let Some(page) = bitmap::lowest_aligned(&starts, from, request.align, lowest) {
            return Some(first + page);
        }
        let end = bitmap::free_before(words, G::CHUNK_PAGES).min(G::CHUNK_PAGES - from);
        let end = request.usable(behind, if end == G::CHUNK_PAGES { before + end } else { end });
        if carry + start >= count || starts.iter().any(|&word| word != 0) {
            cursor.pass(end);
            return None;
        }
        let truth = bitmap::summarize(words);
        if truth != leaf && (leaf.max() >= count || carry + leaf.start() >= count) {
            trail.passes += 1;
            self.correct_leaf(&Correction {
                chunk,
                says: leaf,
                bits,
                truth,
            });
        }
        cursor.advance(end);
        None
    }

    /// Examines the chunk a search begins in, from its page `from` on: the leaf, and if that promises enough, the bits.
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
    pub(super) fn look(&self, chunk: usize, count: usize, from: usize, carry: usize, trail: &mut Trail) -> Look {
        // Read before the bits: this is the first round of protocol R, if a correction is needed.
        let leaf = self.tree.leaf(chunk);
        let bits = self.free.chunk::<G>(chunk);
        let words = &bits[..G::CHUNK_WORDS];
        let first = chunk << G::CHUNK_SHIFT;
        if carry > 0 && carry + bitmap::free_behind(words, 0) >= count {
            return Look::Found(first - carry);
        }
        let truth = match bitmap::scan(words, count, from) {
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

    /// Makes a leaf say what the bits say.
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

    /// Makes the leaf of a chunk and all nodes above it say what is there, after a run that seemed to reach into the
    /// chunk did not exist. Which of them promised it is not known.
    #[cold]
    pub(super) fn correct_all(&self, chunk: usize) {
        let _pass = self.turnstile.enter(chunk);
        self.tree.settle(chunk, || self.free.chunk::<G>(chunk));
        for level in (0..G::LEAF).rev() {
            self.tree
                .settle_node(level, chunk >> (G::span_shift(level) - G::CHUNK_SHIFT));
        }
    }

    /// Makes an inner node that was found to promise too much say what its children do.
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
        // SeqCst fence: between reading the hint and reading turnstile, tree and bits. Partner: the fence of a release,
        // between changing those and reading the hint: if the release read the hint as it was before our read, we see
        // all it did.
        fence_after_load();
        Survey {
            band,
            seen,
            calm: self.turnstile.calm(),
            trail: Trail::default(),
        }
    }

    /// Raises the hint that the search began at to `page`: below that, the search has left no run of its length.
    /// Returns whether another search had raised it beyond where this one began, if that was looked at.
    ///
    /// The search may not conclude anything from what it did not see; see [`hints`](crate::hints) for why nothing is
    /// missed.
    #[inline(always)]
    pub(super) fn raise_hint(&self, survey: &Survey, page: usize) -> Option<bool> {
        let calm = survey.calm?;
        (self.turnstile.calm() == Some(calm.after(survey.trail.passes)))
            .then(|| self.hints.raise(survey.band, survey.seen, page))
    }
}
