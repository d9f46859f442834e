//! Taking pages out of the set, and the proof that there are none to take.
//!
//! ```text
//!   claim ── in the hint's word? ──▶ take          no search at all: the common case
//!     └───── search from the hint ─▶ take          the bits said yes, or it continues behind the page that was gone
//!              └──────────────────── prove ─▶ None
//! ```

#![forbid(unsafe_code)]

use crate::bitmap::{self, Pieces};
use crate::geometry::{PROOF_ROUNDS, PROOF_ROUNDS_FORKING, PROOF_SEARCHES, Shape, WORD_PAGES, WORD_SHIFT};
use crate::hints::{Band, Mark};
use crate::sync::{Ordering, Pass, fence_after_rmw, is_forking, relax};

use super::search::Trail;
use super::{Claim, FreeSet, Marks, Request, Word, lowest_page};

impl<G: Shape> FreeSet<G> {
    /// Takes the lowest run that meets the request, and its scavenged bits. `None` is proved: there was a moment at
    /// which no such run was free. The exception is a search that others disturbed each time: [`Request::searches`].
    ///
    /// Cost: three loads and a compare-exchange next to the last claim of this length; a search otherwise.
    #[inline]
    pub fn claim(&self, request: &Request) -> Option<Claim> {
        let start = self.hold_lowest_within(request, u32::MAX)?;
        Some(Claim {
            start,
            scavenged: self.take_scavenged(start, request.pages).count,
        })
    }

    /// Takes exactly these pages, which lie below `grown`, and their scavenged bits.
    ///
    /// # Errors
    /// The first page found not free. Nothing is taken.
    pub fn claim_at(&self, start: usize, pages: usize) -> Result<Claim, usize> {
        self.hold(start, pages)?;
        Ok(Claim {
            start,
            scavenged: self.take_scavenged(start, pages).count,
        })
    }

    /// As [`claim`](Self::claim), with at most `searches` searches of the whole heap; leaves the scavenged bits where
    /// they are, for callers that may have to give the pages back unchanged.
    #[inline]
    pub fn hold_lowest_within(&self, request: &Request, searches: u32) -> Option<usize> {
        self.hold_from_hint(request)
            .or_else(|| self.hold_or_prove_within(request, searches))
    }

    /// As [`hold_lowest_within`](Self::hold_lowest_within), but `None` proves nothing.
    #[inline]
    pub fn hold_from_hint(&self, request: &Request) -> Option<usize> {
        let band = Band::of(request.pages);
        let hint = self.hints.load(band);
        let from = hint.page().saturating_sub(band.pages() - 1);
        if let Some(start) = self.hold_in_word(request, from) {
            return Some(start);
        }
        if band.pages() == request.pages && request.align == 1 {
            return self.hold_and_raise(request, band, hint);
        }
        self.hold_from(request, from, &mut Trail::default())
    }

    /// As [`hold_from`](Self::hold_from), from the hint of `band`, whose length is the requested one. Raises the hint
    /// to the end of the run found.
    #[inline]
    fn hold_and_raise(&self, request: &Request, band: Band, hint: Mark) -> Option<usize> {
        let mut survey = self.begin(band, hint);
        let start = self.hold_from(request, survey.from(), &mut survey.trail)?;
        self.raise_hint(&survey, start + request.pages);
        Some(start)
    }

    /// The second half of [`hold_lowest_within`](Self::hold_lowest_within): the whole heap, and the proof. With few
    /// `searches` for a caller that grows the heap next: that does no harm, and the caller must not wait for a time in
    /// which others free nothing.
    #[cold]
    pub fn hold_or_prove_within(&self, request: &Request, searches: u32) -> Option<usize> {
        self.claim_or_prove(
            searches.min(request.searches()),
            || self.hold_from(request, 0, &mut Trail::default()),
            || self.hold_by_bits(request),
        )
    }

    /// Fast path: the lowest run inside the word at `from`, if there is one.
    #[inline(always)]
    fn hold_in_word(&self, request: &Request, from: usize) -> Option<usize> {
        if request.pages > WORD_PAGES || request.align != 1 || from >= self.grown() {
            return None;
        }
        let (word, bit) = (from >> WORD_SHIFT, from % WORD_PAGES);
        let bits = self.free.load(word) & (u64::MAX << bit);
        let start = bitmap::find_in_word(bits, request.pages)?;
        self.free.take(word, bitmap::mask(start, request.pages)).ok()?;
        Some(word * WORD_PAGES + start)
    }

    /// Takes the lowest run at or after page `from`, according to the summaries and then the bits. `None` proves
    /// nothing. Leaves its `trail`.
    fn hold_from(&self, request: &Request, from: usize, trail: &mut Trail) -> Option<usize> {
        let mut from = from;
        loop {
            let start = self.search(request, from, trail)?;
            // A run across several words passes the turnstile.
            trail.passes += u32::from(start % WORD_PAGES + request.pages > WORD_PAGES);
            // For a run of a chunk or more, `hold` corrects the leaves.
            let correction = trail.correction.take().filter(|_| request.pages < G::CHUNK_PAGES);
            let Err(taken) = self.hold(start, request.pages) else {
                if let Some(correction) = correction {
                    trail.passes += 1;
                    self.correct_leaf(&correction);
                }
                return Some(start);
            };
            // Every run that begins between `start` and the taken page includes that page. Some summary promised it.
            self.correct_all(taken >> G::CHUNK_SHIFT);
            trail.passes += 1;
            from = taken + 1;
        }
    }

    /// As [`claim_at`](Self::claim_at), but leaves the scavenged bits where they are.
    ///
    /// # Errors
    /// As for [`claim_at`](Self::claim_at).
    pub fn hold(&self, start: usize, pages: usize) -> Result<(), usize> {
        if start % WORD_PAGES + pages <= WORD_PAGES {
            let (word, mask) = (start >> WORD_SHIFT, bitmap::mask(start % WORD_PAGES, pages));
            return self.free.take(word, mask).map_err(|missing| lowest_page(word, missing));
        }
        self.hold_long(start, pages)
    }

    /// A run across several words: taken upwards, given back on conflict.
    fn hold_long(&self, start: usize, pages: usize) -> Result<(), usize> {
        let (first, last) = (start >> G::CHUNK_SHIFT, (start + pages - 1) >> G::CHUNK_SHIFT);
        // Inside until every page is ours or given back: until then, others must not conclude anything from not seeing
        // them.
        let pass = self.turnstile.enter(first);
        for piece in Pieces::new(start, pages) {
            if let Err(missing) = self.free.take(piece.word, piece.mask) {
                let begun = piece.word * WORD_PAGES;
                if begun > start {
                    self.give_back(start, begun - start, &pass);
                }
                return Err(lowest_page(piece.word, missing));
            }
        }
        if pages >= G::CHUNK_PAGES {
            // Otherwise as many searches as there are chunks would trip over these leaves, one by one.
            for chunk in first..=last {
                self.tree.settle(chunk, || self.free.chunk::<G>(chunk));
            }
            self.tree.propagate(G::LEAF, first, last);
        }
        Ok(())
    }

    /// Gives back what a claim took before it met a page that was not free.
    #[cold]
    fn give_back(&self, start: usize, pages: usize, _inside: &Pass<'_>) {
        for piece in Pieces::new(start, pages) {
            // Taken a moment ago, and in no other thread's hands. A thread that frees it now frees what it does not
            // own; its own `give` or the rightful owner's reports that.
            let _ = self.free.give(piece.word, piece.mask);
        }
        self.publish(start >> G::CHUNK_SHIFT, (start + pages - 1) >> G::CHUNK_SHIFT);
        fence_after_rmw();
        self.hints.lower(start, usize::MAX);
    }

    /// Takes all free pages of the word that has the lowest free page. `None` is proved, as for [`claim`](Self::claim).
    ///
    /// Cost: a swap, and with a chunk's last word, one in eight, a walk up the tree and a correction of a leaf (15 to
    /// 60 ns).
    #[inline]
    pub fn claim_word(&self) -> Option<Word> {
        self.claim_word_within(PROOF_SEARCHES).map(|(word, _)| word)
    }

    /// As [`claim_word`](Self::claim_word), with at most `searches` searches of the whole heap. Also returns whether
    /// the caller met another thread that claims where it does; `None` if that is not known.
    #[inline]
    pub fn claim_word_within(&self, searches: u32) -> Option<(Word, Option<bool>)> {
        let band = Band::of(1);
        let mut survey = self.begin(band, self.hints.load(band));
        if let Some(word) = self.claim_word_from(survey.from(), &mut survey.trail) {
            // The hint is about to pass the chunk, so the next search would not find out that it is empty.
            if (word.index + 1).is_multiple_of(G::CHUNK_WORDS) {
                self.find_empty(word.index / G::CHUNK_WORDS, &mut survey.trail);
            }
            let overtaken = self.raise_hint(&survey, (word.index + 1) * WORD_PAGES);
            let met = if survey.trail.lost { Some(true) } else { overtaken };
            return Some((word, met));
        }
        let word = self.claim_or_prove(
            searches,
            || self.claim_word_from(0, &mut Trail::default()),
            || self.claim_word_by_bits(),
        )?;
        Some((word, None))
    }

    #[inline]
    fn claim_word_from(&self, from: usize, trail: &mut Trail) -> Option<Word> {
        let one = Request::of(1);
        let mut from = from;
        loop {
            let index = self.search(&one, from, trail)? >> WORD_SHIFT;
            if let Some(word) = self.take_word(index) {
                return Some(word);
            }
            if trail.is_promise {
                // Or every search that comes by would believe the same nodes again.
                self.correct_all(index / G::CHUNK_WORDS);
                trail.passes += 1;
            } else {
                trail.lost = true;
            }
            from = (index + 1) * WORD_PAGES;
        }
    }

    #[inline]
    pub(super) fn take_word(&self, index: usize) -> Option<Word> {
        let free = self.free.take_word(index);
        if free == 0 {
            return None;
        }
        let scavenged = if self.scavenged.load(index) & free == 0 {
            0
        } else {
            self.scavenged.take_any(index, free)
        };
        Some(Word { index, free, scavenged })
    }

    /// Takes the scavenged bits of pages just taken; returns how many there were, and how many of them up to the end.
    ///
    /// Taking the pages acquired what their releasing thread wrote. So every scavenged bit set before is seen, and no
    /// other thread sets or clears one while the pages are ours (I1).
    #[inline(always)]
    pub fn take_scavenged(&self, start: usize, pages: usize) -> Marks {
        Pieces::new(start, pages).fold(Marks::default(), |before, piece| {
            let taken = match self.scavenged.load(piece.word) & piece.mask {
                0 => 0,
                _ => self.scavenged.take_any(piece.word, piece.mask),
            };
            // The piece's last page, moved to the top.
            let last = (taken << piece.mask.leading_zeros()).leading_ones() as usize;
            Marks {
                count: before.count + taken.count_ones() as usize,
                last: if taken == piece.mask { before.last + last } else { last },
            }
        })
    }

    /// How many of these pages, which the caller holds, are scavenged.
    pub fn scavenged_in(&self, start: usize, pages: usize) -> usize {
        Pieces::new(start, pages)
            .map(|piece| (self.scavenged.load(piece.word) & piece.mask).count_ones() as usize)
            .sum()
    }

    /// Claims, or proves that there was nothing to claim. `attempt` searches the whole heap and believes summaries;
    /// `by_bits` does not believe them.
    ///
    /// The proof: the flag is raised before the turnstile is first read, with a fence in between. Consider what the
    /// search can have missed:
    ///
    /// - A release whose bits it missed comes after the flag in every order of fences, so that release passes the
    ///   turnstile. If it has not passed by the second reading, it has not returned, and takes place after us.
    /// - A summary that promised too little implies a thread inside.
    /// - A run held for a moment, by a claim that gave it back, implies a thread inside.
    ///
    /// With no thread inside and none passing, the search saw all there was.
    ///
    /// If a thread passed, it got something done, and we start over, at most `searches` times, since others may pass
    /// for ever. The answer is then not proved: that many searches found nothing, each of them disturbed.
    ///
    /// If no thread passes but one stays inside (it was preempted there), there is nothing new to search for. We only
    /// read the turnstile, at most [`PROOF_ROUNDS`] times over all searches (16 in a handler of a fork). Then the bits
    /// decide, provided that no thread passes while they are read. That answer can be wrong in one way only: by pages
    /// of a long run that the thread inside holds and will give back.
    #[cold]
    fn claim_or_prove<T>(
        &self,
        searches: u32,
        attempt: impl Fn() -> Option<T>,
        by_bits: impl Fn() -> Option<T>,
    ) -> Option<T> {
        // AcqRel, and a fence after it: partner is the fence in `given`, between bits and flag.
        self.seldom.provers.fetch_add(1, Ordering::AcqRel);
        fence_after_rmw();
        // In a handler of a fork, who is inside may wait for the caller or, in the child, not exist.
        let most = if is_forking() {
            PROOF_ROUNDS_FORKING
        } else {
            PROOF_ROUNDS
        };
        let (mut searched, mut stuck, mut undisturbed) = (0, 0, None);
        let result = loop {
            let (before, inside) = self.turnstile.look();
            if inside > 0 && undisturbed == Some(before) && stuck < most {
                stuck += 1;
                relax(stuck);
                continue;
            }
            let last = stuck >= most;
            if let Some(found) = if last { by_bits() } else { attempt() } {
                break Some(found);
            }
            searched += 1;
            let (after, still_inside) = self.turnstile.look();
            undisturbed = (before == after).then_some(before);
            let proved = undisturbed.is_some() && (last || inside == 0 && still_inside == 0);
            if proved || searched >= searches {
                break None;
            }
        };
        // Release: all reads of this proof come before it; partner: the load in `tell`, by a release that need not
        // pass.
        self.seldom.provers.fetch_sub(1, Ordering::Release);
        result
    }

    /// As `hold_from(.., 0)`, without reading the tree: 0.4 ns a word.
    ///
    /// It sees every page whose release the proof has to count, though it has no fence of its own. A releasing thread
    /// has a fence between setting its bits and reading the flag; the prover has one between raising the flag and
    /// everything read here. If the releasing thread's fence is the later one, it sees the flag and passes the
    /// turnstile, and the prover's second reading shows that. If it is the earlier one, no load after our fence returns
    /// a word older than the release left it. This includes relaxed loads, and so the guess in
    /// [`Bitmap::take`](bitmap::Bitmap::take), which moreover reads no older a word than was read here before. If
    /// `take` finds a page gone, the page was gone after the flag was raised; a thread that brings it back later sees
    /// the flag.
    pub fn hold_by_bits(&self, request: &Request) -> Option<usize> {
        let mut from = 0;
        loop {
            let start = self.first_run_by_bits(request, from)?;
            let Err(taken) = self.hold(start, request.pages) else {
                return Some(start);
            };
            from = taken + 1;
        }
    }

    fn claim_word_by_bits(&self) -> Option<Word> {
        (0..self.grown().div_ceil(WORD_PAGES)).find_map(|index| self.take_word(index))
    }

    /// The lowest run at or after `from` that meets the request. Of the free pages before a chunk only those count that
    /// lie behind an aligned one.
    fn first_run_by_bits(&self, request: &Request, from: usize) -> Option<usize> {
        let (count, first, mut carry) = (request.pages, from >> G::CHUNK_SHIFT, 0);
        for chunk in first..self.grown().div_ceil(G::CHUNK_PAGES) {
            let from = if chunk == first { from & (G::CHUNK_PAGES - 1) } else { 0 };
            let bits = self.free.chunk::<G>(chunk);
            let (words, begin) = (&bits[..G::CHUNK_WORDS], chunk << G::CHUNK_SHIFT);
            if carry > 0 && carry + bitmap::free_behind(words, 0) >= count {
                return Some(begin - carry);
            }
            let found = if request.align == 1 {
                bitmap::find(words, count, from)
            } else {
                bitmap::lowest_aligned(
                    &bitmap::starts(&bits, count),
                    from,
                    request.align,
                    request.offset(begin),
                )
            };
            if let Some(page) = found {
                return Some(begin + page);
            }
            let end = bitmap::free_before(words, G::CHUNK_PAGES).min(G::CHUNK_PAGES - from);
            let end = if end == G::CHUNK_PAGES { carry + end } else { end };
            carry = request.usable(begin + G::CHUNK_PAGES, end);
        }
        None
    }
}
