//! Taking pages out of the set, and the proof that there are none to take.
//!
//! ```text
//!   claim ── in the hint's word? ──▶ take          no search at all: the common case
//!     └───── search from the hint ─▶ take          the bits said yes, or it goes on behind the page that was gone
//!              └──────────────────── prove ─▶ None
//! ```

#![forbid(unsafe_code)]

use crate::bitmap::{self, Pieces};
use crate::geometry::{PROOF_ROUNDS, PROOF_SEARCHES, Shape, WORD_PAGES, WORD_SHIFT};
use crate::hints::{Band, Mark};
use crate::sync::{Ordering, Pass, fence_after_rmw, relax};

use super::search::Trail;
use super::{Claim, FreeSet, Request, Word, lowest_page};

impl<G: Shape> FreeSet<G> {
    /// Takes the lowest run that meets the request, and its scavenged bits. `None` is proved: there was a moment at
    /// which no such run was free. Or others would not let it be: [`Request::searches`].
    ///
    /// Cost: three loads and a compare-exchange next to the last claim of this length; a search otherwise.
    #[inline]
    pub fn claim(&self, request: &Request) -> Option<Claim> {
        let start = self.hold_lowest(request)?;
        Some(Claim {
            start,
            scavenged: self.take_scavenged(start, request.pages),
        })
    }

    /// Takes exactly these pages, which lie below `grown`, and their scavenged bits.
    ///
    /// # Errors
    /// A page that is not free, the first one met. Nothing is taken.
    pub fn claim_at(&self, start: usize, pages: usize) -> Result<Claim, usize> {
        self.hold(start, pages)?;
        Ok(Claim {
            start,
            scavenged: self.take_scavenged(start, pages),
        })
    }

    /// As [`claim`](Self::claim), but leaves the scavenged bits where they are: for who may have to give the pages back
    /// as they were.
    #[inline]
    pub fn hold_lowest(&self, request: &Request) -> Option<usize> {
        self.hold_lowest_within(request, u32::MAX)
    }

    /// As [`hold_lowest`](Self::hold_lowest), in so many searches of all the heap at the most.
    #[inline]
    pub fn hold_lowest_within(&self, request: &Request, searches: u32) -> Option<usize> {
        self.hold_from_hint(request)
            .or_else(|| self.hold_or_prove_within(request, searches))
    }

    /// As [`hold_lowest`](Self::hold_lowest), but `None` proves nothing.
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

    /// As [`hold_from`](Self::hold_from), from the hint of `band`, whose length is wanted; raises it to the end of what
    /// was found.
    #[inline]
    fn hold_and_raise(&self, request: &Request, band: Band, hint: Mark) -> Option<usize> {
        let mut survey = self.begin(band, hint);
        let start = self.hold_from(request, survey.from(), &mut survey.trail)?;
        self.raise_hint(&survey, start + request.pages);
        Some(start)
    }

    /// The second half of [`hold_lowest`](Self::hold_lowest): all of the heap, and the proof.
    #[cold]
    pub fn hold_or_prove(&self, request: &Request) -> Option<usize> {
        self.hold_or_prove_within(request, u32::MAX)
    }

    /// As [`hold_or_prove`](Self::hold_or_prove), in so many searches at the most: for who grows then, which is no
    /// harm, and must not wait for others to free nothing for a while.
    #[cold]
    pub fn hold_or_prove_within(&self, request: &Request, searches: u32) -> Option<usize> {
        self.claim_or_prove(
            searches.min(request.searches()),
            || self.hold_from(request, 0, &mut Trail::default()),
            || self.hold_by_bits(request),
        )
    }

    /// Fast: a run inside the word at `from`, the lowest there is if there is one.
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

    /// Takes the lowest run at or after page `from`, as the summaries and then the bits have it. `None` proves nothing.
    /// Leaves its `trail`.
    fn hold_from(&self, request: &Request, from: usize, trail: &mut Trail) -> Option<usize> {
        let mut from = from;
        loop {
            let start = self.search(request, from, trail)?;
            // A run over several words passes the turnstile.
            trail.passes += u32::from(start % WORD_PAGES + request.pages > WORD_PAGES);
            // The leaves of a run of a chunk or more are corrected by who takes it.
            let correction = trail.correction.take().filter(|_| request.pages < G::CHUNK_PAGES);
            let Err(taken) = self.hold(start, request.pages) else {
                if let Some(correction) = correction {
                    trail.passes += 1;
                    self.correct_leaf(&correction);
                }
                return Some(start);
            };
            // Every run that begins between `start` and the taken page has that page in it. Some summary said it was
            // free.
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

    /// A run over several words: upwards, and back on conflict.
    fn hold_long(&self, start: usize, pages: usize) -> Result<(), usize> {
        let (first, last) = (start >> G::CHUNK_SHIFT, (start + pages - 1) >> G::CHUNK_SHIFT);
        // Inside until every page is ours or given back: till then others must not conclude anything from missing them.
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
            // As many searches as chunks would stumble over these leaves, one by one.
            for chunk in first..=last {
                self.tree.settle(chunk, || self.free.chunk::<G>(chunk));
            }
            self.tree.propagate(G::LEAF, first, last);
        }
        Ok(())
    }

    /// Puts back what a claim took before it met a page that was not free.
    #[cold]
    fn give_back(&self, start: usize, pages: usize, _inside: &Pass<'_>) {
        for piece in Pieces::new(start, pages) {
            // Taken a moment ago and in nobody else's hands. A thread that frees it now frees what it does not own; its
            // own
            // `give` or the rightful owner's reports that.
            let _ = self.free.give(piece.word, piece.mask);
        }
        self.publish(start >> G::CHUNK_SHIFT, (start + pages - 1) >> G::CHUNK_SHIFT);
        fence_after_rmw();
        self.hints.lower(start, usize::MAX);
    }

    /// Takes the word that holds the lowest free page: all its free pages. `None` is proved, as for
    /// [`claim`](Self::claim).
    ///
    /// Cost: a swap, and once in eight words a walk up the tree.
    #[inline]
    pub fn claim_word(&self) -> Option<Word> {
        self.claim_word_within(PROOF_SEARCHES)
    }

    /// As [`claim_word`](Self::claim_word), in so many searches of all the heap at the most.
    #[inline]
    pub fn claim_word_within(&self, searches: u32) -> Option<Word> {
        let band = Band::of(1);
        let mut survey = self.begin(band, self.hints.load(band));
        if let Some(word) = self.claim_word_from(survey.from(), &mut survey.trail) {
            self.raise_hint(&survey, (word.index + 1) * WORD_PAGES);
            return Some(word);
        }
        self.claim_or_prove(
            searches,
            || self.claim_word_from(0, &mut Trail::default()),
            || self.claim_word_by_bits(),
        )
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
            from = (index + 1) * WORD_PAGES;
        }
    }

    #[inline]
    fn take_word(&self, index: usize) -> Option<Word> {
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

    /// Takes the scavenged bits of pages just taken; how many there were.
    ///
    /// Taking the pages acquired what their releaser wrote: every scavenged bit set before it is seen, and nobody else
    /// sets or clears one while the pages are ours (I1).
    #[inline(always)]
    pub fn take_scavenged(&self, start: usize, pages: usize) -> usize {
        let taken = Pieces::new(start, pages).map(|piece| match self.scavenged.load(piece.word) & piece.mask {
            0 => 0,
            _ => self.scavenged.take_any(piece.word, piece.mask).count_ones() as usize,
        });
        taken.sum()
    }

    /// How many of these pages, which the caller holds, are scavenged.
    pub fn scavenged_in(&self, start: usize, pages: usize) -> usize {
        Pieces::new(start, pages)
            .map(|piece| (self.scavenged.load(piece.word) & piece.mask).count_ones() as usize)
            .sum()
    }

    /// Claims, or proves that there was nothing to claim. `attempt` searches all the heap, believing summaries;
    /// `by_bits` does not believe them.
    ///
    /// The proof: the flag is up before the first look at the turnstile, with a fence between. A release whose bits the
    /// search missed comes after the flag in every order of fences, so it passes the turnstile; if it has not passed by
    /// the second look it has not returned, and takes place after us. A summary that promised too little had somebody
    /// inside. A run held for a moment by a claim that gave it back had somebody inside. With nobody inside and nobody
    /// passing, the search saw all there was.
    ///
    /// If somebody passed, somebody got something done, and we start over, `searches` times at the most: others may
    /// pass for ever. What is said then is not proved: so many searches found nothing, each of them disturbed.
    ///
    /// If nobody passes but somebody stays inside - he was preempted there - there is nothing new to search for, and we
    /// only look, [`PROOF_ROUNDS`] times at the most, in all searches together. Then the last word is the bits', with
    /// nobody passing while they are read. It can be wrong in one way only: by pages of a long run that the one inside
    /// holds and will give back.
    #[cold]
    fn claim_or_prove<T>(
        &self,
        searches: u32,
        attempt: impl Fn() -> Option<T>,
        by_bits: impl Fn() -> Option<T>,
    ) -> Option<T> {
        // AcqRel, and a fence behind it: partner is the fence between bits and flag in `given`.
        self.seldom.provers.fetch_add(1, Ordering::AcqRel);
        fence_after_rmw();
        let (mut searched, mut stuck, mut undisturbed) = (0, 0, None);
        let result = loop {
            let (before, inside) = self.turnstile.look();
            if inside && undisturbed == Some(before) && stuck < PROOF_ROUNDS {
                stuck += 1;
                relax(stuck);
                continue;
            }
            let last = stuck >= PROOF_ROUNDS;
            if let Some(found) = if last { by_bits() } else { attempt() } {
                break Some(found);
            }
            searched += 1;
            let (after, still_inside) = self.turnstile.look();
            undisturbed = (before == after).then_some(before);
            let proved = undisturbed.is_some() && (last || !(inside || still_inside));
            if proved || searched >= searches {
                break None;
            }
        };
        // Release: all looks of this proof are before it; partner: the load in `tell`, by who need not pass.
        self.seldom.provers.fetch_sub(1, Ordering::Release);
        result
    }

    /// As `hold_from(.., 0)`, without a look at the tree: 0.4 ns a word.
    ///
    /// Sees every page whose release the proof has to count, though it has no fence of its own. A releaser has one
    /// between his bits and his look at the flag, the prover one between the flag and all that is read here. Either the
    /// releaser's is the later: then he finds the flag, passes the turnstile, and the second look at it tells. Or it is
    /// the earlier: then no load behind ours returns a word older than he left it. This goes for relaxed loads too, so
    /// for the guess in [`Bitmap::take`](bitmap::Bitmap::take), which besides reads no older a word than was read here
    /// before. Where that finds a page gone, it was gone after the flag: if it comes back later, he who brings it finds
    /// the flag.
    fn hold_by_bits(&self, request: &Request) -> Option<usize> {
        let mut from = 0;
        loop {
            let start = request.align_page(self.first_run_by_bits(request.pages, from)?)?;
            if start.checked_add(request.pages)? > self.grown() {
                return None;
            }
            let Err(taken) = self.hold(start, request.pages) else {
                return Some(start);
            };
            from = taken + 1;
        }
    }

    fn claim_word_by_bits(&self) -> Option<Word> {
        (0..self.grown().div_ceil(WORD_PAGES)).find_map(|index| self.take_word(index))
    }

    fn first_run_by_bits(&self, count: usize, from: usize) -> Option<usize> {
        let (first, mut carry) = (from >> G::CHUNK_SHIFT, 0);
        for chunk in first..self.grown().div_ceil(G::CHUNK_PAGES) {
            let from = if chunk == first { from & (G::CHUNK_PAGES - 1) } else { 0 };
            let bits = self.free.chunk::<G>(chunk);
            let (words, begin) = (&bits[..G::CHUNK_WORDS], chunk << G::CHUNK_SHIFT);
            if carry > 0 && carry + bitmap::free_behind(words, 0) >= count {
                return Some(begin - carry);
            }
            if let Some(page) = bitmap::find(words, count, from) {
                return Some(begin + page);
            }
            let end = bitmap::free_before(words, G::CHUNK_PAGES).min(G::CHUNK_PAGES - from);
            carry = if end == G::CHUNK_PAGES { carry + end } else { end };
        }
        None
    }
}
