//! The set of free pages, shared without a lock: bitmap, tree and hints made one.
//!
//! ```text
//!   claim    hint ─▶ search (tree, then bits) ─▶ take the bits ─▶ take the scavenged bits      [leaf left as it is]
//!   release  scavenged bits ─▶ give the bits ─▶ fence ─▶ leaf still right? ─ no ─▶ refresh leaf, parents ─▶ hints
//!                                                       └──── yes ────────────────────────────────────────▲
//! ```
//!
//! **Where an operation takes place.** One read-modify-write on one word of the bitmap decides every operation on up to 64 pages.
//! A longer run is taken word by word, upwards; if a page turns out to be taken, what was taken goes back and the search goes on
//! behind that page. Upwards and never waiting: the claimer that stands highest always finishes, so somebody does.
//!
//! **Claims are lazy.** A claim does not touch the tree: the leaf goes on promising what is gone, and the next search that believes
//! it finds out, corrects it, and goes on. That costs nothing where the next search begins behind the claim anyway (it does:
//! hints), and it is why a claim of one page is three loads and a compare-exchange. Only a claim of a chunk or more corrects its
//! leaves at once. A release is never lazy, but it can see that it has nothing to say: where the run it made is no longer than the
//! leaf's `max` (and than `start` or `end`, where it touches an end of the chunk), no field of the leaf can grow.
//!
//! **Saying no.** Searches believe summaries, and a summary may for a moment promise too little. So `None` is proved: with a flag
//! up that makes every release pass the [`Turnstile`], search from page 0 between two equal calms. Nobody was on the way up, nobody
//! held part of a run to give back, nobody released anything: what the search did not find was not there. See `claim_or_prove`.
//!
//! | operation | cost, about |
//! |---|---|
//! | claim of 1 page next to the last | 15 ns |
//! | claim of a word for a cache | 50 ns |
//! | release of a page that changes no leaf | 20 ns |
//! | release that goes up five levels | 150 ns |
//! | proof that there is nothing, heap of 1 TiB | 250 ns |

#![forbid(unsafe_code)]

use crossbeam_utils::CachePadded;

use crate::bitmap::{self, Bitmap, Pieces};
use crate::geometry::{PROOF_ROUNDS, Shape, WORD_PAGES, WORD_SHIFT};
use crate::hints::{Band, Hints};
use crate::radix::{Cursor, Step, Tree};
use crate::summary::Summary;
use crate::sync::{AtomicUsize, Ordering, Pass, Turnstile, fence_after_rmw, relax};

/// The free pages of a heap.
#[derive(Debug)]
pub struct FreeSet<G: Shape> {
    pub(crate) free: Bitmap,
    /// 1 = not backed by memory and reads as zero. I1: set only where the page is free and in nobody's hands.
    pub(crate) scavenged: Bitmap,
    pub(crate) tree: Tree<G>,
    pub(crate) hints: CachePadded<Hints>,
    turnstile: Turnstile,
    /// Read by everybody, written seldom.
    seldom: CachePadded<Seldom>,
}

#[derive(Debug)]
struct Seldom {
    /// Pages grown so far: the tables are prepared up to here. Only ever raised, under the heap's lock.
    grown: AtomicUsize,
    /// How many are proving that there is no room.
    provers: AtomicUsize,
}

/// What is wanted: `pages` in a row, from a page p with (p + phase) divisible by `align`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// How many pages; at least one.
    pub pages: usize,
    /// A power of two.
    pub align: usize,
    /// Pages from the aligned address below the heap's base to the base; less than `align`.
    pub phase: usize,
}

impl Request {
    /// `pages` pages anywhere.
    #[must_use]
    pub const fn of(pages: usize) -> Self {
        Self {
            pages,
            align: 1,
            phase: 0,
        }
    }

    /// The first page at or after `page` at which the request may begin; `None` past the end of numbers.
    #[inline(always)]
    pub fn align_page(&self, page: usize) -> Option<usize> {
        let past = (page.wrapping_add(self.phase)) & (self.align - 1);
        if past == 0 {
            Some(page)
        } else {
            page.checked_add(self.align - past)
        }
    }
}

/// Pages taken out of the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The first page.
    pub start: usize,
    /// How many of the pages were scavenged.
    pub scavenged: usize,
}

/// The free pages of one word, taken out of the set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word {
    /// Index of the word.
    pub index: usize,
    /// The pages taken; 1 = taken.
    pub free: u64,
    /// Those of them that were scavenged.
    pub scavenged: u64,
}

/// A run of free pages of one chunk.
struct Run {
    /// Its length, or more.
    pages: usize,
    /// It may begin with the chunk.
    at_start: bool,
    /// It may end with the chunk.
    at_end: bool,
}

impl Run {
    /// Whether a chunk's leaf that says `leaf` has nothing to learn of this run.
    #[inline(always)]
    fn is_told_by(&self, leaf: Summary) -> bool {
        self.pages <= leaf.max()
            && (!self.at_start || self.pages <= leaf.start())
            && (!self.at_end || self.pages <= leaf.end())
    }
}

/// What came of looking at the bits of a chunk.
enum Look {
    Found(usize),
    /// Nothing; this many free pages in a row end with the chunk.
    Carry(usize),
}

impl<G: Shape> FreeSet<G> {
    /// An empty set over zeroed tables.
    #[must_use]
    pub fn new(free: Bitmap, scavenged: Bitmap, tree: Tree<G>) -> Self {
        Self {
            free,
            scavenged,
            tree,
            hints: CachePadded::new(Hints::new()),
            turnstile: Turnstile::new(),
            seldom: CachePadded::new(Seldom {
                grown: AtomicUsize::new(0),
                provers: AtomicUsize::new(0),
            }),
        }
    }

    /// Pages grown so far; every page of the heap is below this.
    #[inline(always)]
    pub fn grown(&self) -> usize {
        // Acquire: pairs with the release in `extend`; the tables below are prepared.
        self.seldom.grown.load(Ordering::Acquire)
    }

    // ---- claiming -----------------------------------------------------------------------------------------------------------

    /// Takes the lowest run that meets the request. `None` is proved: there was a moment at which no such run was free.
    ///
    /// Cost: three loads and a compare-exchange next to the last claim of this length; a search otherwise.
    #[inline]
    pub fn claim(&self, request: &Request) -> Option<Claim> {
        let band = Band::of(request.pages);
        let hint = self.hints.load(band);
        let from = hint.saturating_sub(band.pages() - 1);
        if let Some(claim) = self
            .claim_in_word(request, from)
            .or_else(|| self.claim_from(request, from))
        {
            let end = claim.start + request.pages;
            // Once a word is often enough.
            if end >> WORD_SHIFT > hint >> WORD_SHIFT && band.pages() == request.pages && request.align == 1 {
                self.raise_hint(band, hint, end);
            }
            return Some(claim);
        }
        self.claim_or_prove(|| self.claim_from(request, 0), || self.claim_by_bits(request))
    }

    /// Fast: a run inside the word at `from`, the lowest there is if there is one.
    #[inline(always)]
    fn claim_in_word(&self, request: &Request, from: usize) -> Option<Claim> {
        if request.pages > WORD_PAGES || request.align != 1 || from >= self.grown() {
            return None;
        }
        let (word, bit) = (from >> WORD_SHIFT, from % WORD_PAGES);
        let bits = self.free.load(word) & (u64::MAX << bit);
        let start = bitmap::find_in_word(bits, request.pages)?;
        let mask = bitmap::mask(start, request.pages);
        self.free.take(word, mask).ok()?;
        Some(Claim {
            start: word * WORD_PAGES + start,
            scavenged: self.take_scavenged(word, mask),
        })
    }

    /// Takes the lowest run at or after page `from`, as the summaries and then the bits have it. `None` proves nothing.
    fn claim_from(&self, request: &Request, from: usize) -> Option<Claim> {
        let mut from = from;
        loop {
            let start = self.search(request, from)?;
            match self.claim_at(start, request.pages) {
                Ok(claim) => return Some(claim),
                Err(taken) => {
                    // Every run that begins between `start` and the taken page has that page in it. The leaf said it was free.
                    self.correct(taken >> G::CHUNK_SHIFT);
                    from = taken + 1;
                }
            }
        }
    }

    /// Takes exactly these pages, which lie below `grown`.
    ///
    /// # Errors
    /// A page that is not free, the first one met. Nothing is taken.
    pub fn claim_at(&self, start: usize, pages: usize) -> Result<Claim, usize> {
        self.hold(start, pages)?;
        let scavenged = Pieces::new(start, pages)
            .map(|piece| self.take_scavenged(piece.word, piece.mask))
            .sum();
        Ok(Claim { start, scavenged })
    }

    /// Takes exactly these pages and leaves their scavenged bits where they are: for the scavenger, which sets them.
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
                self.tree.settle(chunk, || self.summarize(chunk));
            }
            self.tree.propagate(first, last);
        }
        Ok(())
    }

    /// Puts back what a claim took before it met a page that was not free.
    #[cold]
    fn give_back(&self, start: usize, pages: usize, _inside: &Pass<'_>) {
        for piece in Pieces::new(start, pages) {
            // Taken a moment ago and in nobody else's hands. A thread that frees it now frees what it does not own; its own
            // `give` or the rightful owner's reports that.
            let _ = self.free.give(piece.word, piece.mask);
        }
        self.publish(start >> G::CHUNK_SHIFT, (start + pages - 1) >> G::CHUNK_SHIFT);
        fence_after_rmw();
        self.hints.lower(start, usize::MAX);
    }

    /// Takes the word that holds the lowest free page: all its free pages. `None` is proved.
    ///
    /// Cost: a swap, and once in eight words a walk up the tree.
    #[inline]
    pub fn claim_word(&self) -> Option<Word> {
        let band = Band::of(1);
        let hint = self.hints.load(band);
        if let Some(word) = self.claim_word_from(hint) {
            let end = (word.index + 1) * WORD_PAGES;
            if end > hint {
                self.raise_hint(band, hint, end);
            }
            return Some(word);
        }
        self.claim_or_prove(|| self.claim_word_from(0), || self.claim_word_by_bits())
    }

    #[inline]
    fn claim_word_from(&self, from: usize) -> Option<Word> {
        let one = Request::of(1);
        let mut from = from;
        loop {
            let index = self.search(&one, from)? >> WORD_SHIFT;
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
    #[inline(always)]
    fn take_scavenged(&self, word: usize, mask: u64) -> usize {
        // Taking the pages acquired what their releaser wrote: the load sees every scavenged bit set before it, and nobody else
        // sets or clears one while the pages are ours (I1).
        if self.scavenged.load(word) & mask == 0 {
            return 0;
        }
        self.scavenged.take_any(word, mask).count_ones() as usize
    }

    // ---- searching ----------------------------------------------------------------------------------------------------------

    /// The first page of the lowest run at or after `from` that meets the request, as the summaries and then the bits have it.
    fn search(&self, request: &Request, from: usize) -> Option<usize> {
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

    /// The lowest run of `count` pages at or after `from`, in a heap of `pages` pages. With `REPAIR`, leaves found to promise too
    /// much are corrected on the way.
    fn first_run<const REPAIR: bool>(&self, count: usize, from: usize, pages: usize) -> Option<usize> {
        if from >= pages || count > pages - from {
            return None;
        }
        let chunk = from >> G::CHUNK_SHIFT;
        let mut cursor = match self.look::<REPAIR>(chunk, count, from & (G::CHUNK_PAGES - 1), 0) {
            Look::Found(page) => return Some(page),
            Look::Carry(carry) => Cursor::after::<G>(chunk, carry),
        };
        loop {
            match self.tree.next(&mut cursor, count, pages) {
                Step::End => return None,
                Step::Run(start) => return Some(start),
                Step::Chunk { chunk, carry } => match self.look::<REPAIR>(chunk, count, 0, carry) {
                    Look::Found(page) => return Some(page),
                    Look::Carry(carry) => cursor.advance::<G>(carry),
                },
            }
        }
    }

    /// Looks for a run of `count` pages in the bits of a chunk, from its page `from` on, with `carry` free pages before it.
    #[inline]
    fn look<const REPAIR: bool>(&self, chunk: usize, count: usize, from: usize, carry: usize) -> Look {
        let words = self.free.chunk::<G>(chunk);
        let words = words.words::<G>();
        let first = chunk << G::CHUNK_SHIFT;
        if carry > 0 && carry + free_at_start(words) >= count {
            return Look::Found(first - carry);
        }
        if let Some(page) = bitmap::find(words, count, from) {
            return Look::Found(first + page);
        }
        if REPAIR {
            let leaf = self.tree.leaf(chunk);
            let promised = leaf.max() >= count || carry + leaf.start() >= count;
            if promised && bitmap::summarize(words) != leaf {
                self.correct(chunk);
            }
        }
        let end = bitmap::free_at_end(words, from);
        Look::Carry(if end == G::CHUNK_PAGES { carry + end } else { end })
    }

    /// Makes the leaf of a chunk, found to promise too much, say what there is.
    #[cold]
    fn correct(&self, chunk: usize) {
        let _pass = self.turnstile.enter(chunk);
        if self.tree.settle(chunk, || self.summarize(chunk)) {
            self.tree.propagate(chunk, chunk);
        }
    }

    /// What the bits of a chunk add up to now.
    #[inline]
    pub(crate) fn summarize(&self, chunk: usize) -> Summary {
        bitmap::summarize(self.free.chunk::<G>(chunk).words::<G>())
    }

    /// Raises the hint of `band` from `seen` to `page`, if no run of the band's length lies below `page`.
    ///
    /// A releaser goes: bits, fence, (tree,) fence, look at the hint. We go: hint, fence, look at tree and bits. Whichever fence is
    /// first, one of us sees the other; the calm says that nobody was between bits and tree meanwhile. If we see a run, or no calm,
    /// the hint goes back.
    fn raise_hint(&self, band: Band, seen: usize, page: usize) {
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

    // ---- saying no ----------------------------------------------------------------------------------------------------------

    /// Claims, or proves that there was nothing to claim. `attempt` searches all the heap, believing summaries; `by_bits` does not
    /// believe them.
    ///
    /// The proof: the flag is up before the first calm, with a fence between. A release whose bits the search missed comes after
    /// the flag in every order of fences, so it passes the turnstile; if it has not passed by the second calm it has not returned,
    /// and takes place after us. A summary that promised too little had somebody inside. A run held for a moment by a claim that
    /// gave it back had somebody inside. With nobody inside and nobody passing, the search saw all there was.
    ///
    /// Without calm for many rounds - somebody was preempted inside - we do not wait for ever: the last word is the bits'. It can be
    /// wrong in one way only: by pages that a preempted claimer of a long run holds and will give back.
    #[cold]
    fn claim_or_prove<T>(&self, attempt: impl Fn() -> Option<T>, by_bits: impl Fn() -> Option<T>) -> Option<T> {
        // AcqRel, and a fence behind it: partner is the fence between bits and flag in `given`.
        self.seldom.provers.fetch_add(1, Ordering::AcqRel);
        fence_after_rmw();
        let mut round = 0;
        let result = loop {
            let calm = self.turnstile.calm();
            if let Some(found) = attempt() {
                break Some(found);
            }
            if calm.is_some() && self.turnstile.calm() == calm {
                break None;
            }
            round += 1;
            if round > PROOF_ROUNDS {
                break by_bits();
            }
            if calm.is_none() {
                relax(round);
            }
        };
        self.seldom.provers.fetch_sub(1, Ordering::Release);
        result
    }

    /// As `claim_from(.., 0)`, without a look at the tree: 0.4 ns a word.
    fn claim_by_bits(&self, request: &Request) -> Option<Claim> {
        let mut from = 0;
        loop {
            let start = request.align_page(self.first_run_by_bits(request.pages, from)?)?;
            match self.claim_at_below(start, request.pages) {
                Some(Ok(claim)) => return Some(claim),
                Some(Err(taken)) => from = taken + 1,
                None => return None,
            }
        }
    }

    fn claim_at_below(&self, start: usize, pages: usize) -> Option<Result<Claim, usize>> {
        (start.checked_add(pages)? <= self.grown()).then(|| self.claim_at(start, pages))
    }

    fn claim_word_by_bits(&self) -> Option<Word> {
        (0..self.grown().div_ceil(WORD_PAGES)).find_map(|index| self.take_word(index))
    }

    fn first_run_by_bits(&self, count: usize, from: usize) -> Option<usize> {
        let (first, mut carry) = (from >> G::CHUNK_SHIFT, 0);
        for chunk in first..self.grown().div_ceil(G::CHUNK_PAGES) {
            let from = if chunk == first { from & (G::CHUNK_PAGES - 1) } else { 0 };
            match self.look::<false>(chunk, count, from, carry) {
                Look::Found(page) => return Some(page),
                Look::Carry(next) => carry = next,
            }
        }
        None
    }

    // ---- releasing ----------------------------------------------------------------------------------------------------------

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
        let mut longest = if run.at_start || run.at_end {
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
            self.publish(chunk, chunk);
            fence_after_rmw();
            longest = usize::MAX;
        }
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
    fn publish(&self, first: usize, last: usize) {
        let mut changed = false;
        for chunk in first..=last {
            changed |= self.tree.raise(chunk, || self.summarize(chunk));
        }
        if changed {
            self.tree.propagate(first, last);
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
        let changed = self.tree.raise(chunk, || self.summarize(chunk));
        let dirty = dirty.or(changed.then_some(chunk));
        if next.is_some_and(|next| next >> G::FANOUT_SHIFT == chunk >> G::FANOUT_SHIFT) {
            return dirty;
        }
        if let Some(dirty) = dirty {
            self.tree.propagate(dirty, chunk);
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

    // ---- growing and tidying ------------------------------------------------------------------------------------------------

    /// Adds `pages` pages at the end, free; scavenged if they are backed by nothing and read as zero.
    ///
    /// Only under the heap's lock, and after the tables up to the new end were prepared. 40 ns a chunk.
    pub fn extend(&self, pages: usize, scavenged: bool) {
        let start = self.grown();
        let _pass = self.turnstile.enter(start >> G::CHUNK_SHIFT);
        // Release: the tables are prepared, to `grown`.
        self.seldom.grown.store(start + pages, Ordering::Release);
        for piece in Pieces::new(start, pages) {
            if scavenged {
                self.scavenged.mark(piece.word, piece.mask);
            }
            let new = self.free.give(piece.word, piece.mask);
            debug_assert!(new.is_ok(), "a page was free before it was grown");
        }
        self.publish(start >> G::CHUNK_SHIFT, (start + pages - 1) >> G::CHUNK_SHIFT);
        fence_after_rmw();
        self.hints.lower(start, usize::MAX);
    }

    /// Puts a held run back, marked as scavenged if it is.
    ///
    /// # Errors
    /// As for [`release`](Self::release).
    pub fn release_held(&self, start: usize, pages: usize, scavenged: bool) -> Result<(), usize> {
        if scavenged {
            // Before the pages are free (I1).
            Pieces::new(start, pages).for_each(|piece| self.scavenged.mark(piece.word, piece.mask));
        }
        self.release(start, pages)
    }

    /// Free pages in a row up to the end of the grown part, counted to `most` at least.
    pub fn free_at_end(&self, most: usize) -> usize {
        let (end, mut free) = (self.grown(), 0);
        while free < most && free < end {
            let last = end - free - 1;
            // The word's bits up to `last`, moved to the top.
            let ones =
                (self.free.load(last >> WORD_SHIFT) << (WORD_PAGES - 1 - last % WORD_PAGES)).leading_ones() as usize;
            free += ones;
            if ones <= last % WORD_PAGES {
                break;
            }
        }
        free.min(end)
    }

    /// Pages grown, free, and free and scavenged. O(heap).
    pub fn count(&self) -> (usize, usize, usize) {
        let grown = self.grown();
        let ones = |map: &Bitmap, word| map.load(word).count_ones() as usize;
        (0..grown.div_ceil(WORD_PAGES)).fold((grown, 0, 0), |(grown, free, scavenged), word| {
            (
                grown,
                free + ones(&self.free, word),
                scavenged + ones(&self.scavenged, word),
            )
        })
    }

    /// Corrects every leaf that promises too much, so that the whole tree says exactly what the bits say. O(heap).
    pub fn settle(&self) {
        (0..self.grown().div_ceil(G::CHUNK_PAGES)).for_each(|chunk| self.correct(chunk));
    }
}

#[inline(always)]
fn lowest_page(word: usize, bits: u64) -> usize {
    word * WORD_PAGES + bits.trailing_zeros() as usize
}

#[inline(always)]
fn free_at_start(words: &[u64]) -> usize {
    let mut run = 0;
    for &word in words {
        run += word.trailing_ones() as usize;
        if word != u64::MAX {
            break;
        }
    }
    run
}
