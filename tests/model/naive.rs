//! A heap stated as plainly as possible: one flag per page, linear searches, counting.
//!
//! Shares nothing with the crate except the constants of its geometry, and the policies that its documentation states:
//! how far a heap grows, and when a cache is refilled and flushed.

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Free,
    Used,
    /// In a cache, or in its buffer.
    Cached,
}

/// Free pages at the start, in the longest run, at the end.
pub type Triple = (usize, usize, usize);

/// A summary by counting.
pub fn summarize(free: impl Iterator<Item = bool>) -> Triple {
    let (mut start, mut max, mut run, mut all) = (0, 0, 0, true);
    for free in free {
        run = if free { run + 1 } else { 0 };
        all &= free;
        start += usize::from(all);
        max = max.max(run);
    }
    (start, max, run)
}

/// Flags as the bits of a word, the first one lowest.
fn mask(flags: impl Iterator<Item = bool>) -> u64 {
    flags
        .enumerate()
        .fold(0, |mask, (bit, flag)| mask | u64::from(flag) << bit)
}

/// Clears flags. Returns how many were set.
fn take_flags(flags: &mut [bool]) -> usize {
    let count = flags.iter().filter(|&&flag| flag).count();
    flags.fill(false);
    count
}

/// One cache: 64 pages of one word, and a buffer of 64 freed pages.
#[derive(Clone, Debug)]
pub struct Slot {
    pub word: usize,
    pub free: [bool; 64],
    pub scavenged: [bool; 64],
    pub buffer_word: usize,
    pub buffer: [bool; 64],
    /// Calls for a flush that it has answered.
    pub heeded: usize,
}

impl Slot {
    pub fn new() -> Self {
        Self {
            word: 0,
            free: [false; 64],
            scavenged: [false; 64],
            buffer_word: 0,
            buffer: [false; 64],
            heeded: 0,
        }
    }

    /// The lowest run of `pages` pages in the word.
    pub fn find(&self, pages: usize) -> Option<usize> {
        (0..=64 - pages.min(64)).find(|&bit| pages <= 64 && self.free[bit..bit + pages].iter().all(|&free| free))
    }

    pub fn is_empty(&self) -> bool {
        !self.free.contains(&true)
    }
}

/// What the model must know of a heap's shape and setup.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Bytes in a page, as a power of two.
    pub page_shift: u32,
    pub chunk_pages: usize,
    /// Pages in the reservation.
    pub capacity: usize,
    /// The address of page 0.
    pub base: usize,
    /// Pages in a granule of the source, at least one.
    pub granule: usize,
    /// Whether new pages and released pages read as zero.
    pub zero: bool,
    /// Whether the source commits: then such pages are marked, whatever they read as.
    pub commits: bool,
    /// Shards, which are the first slots.
    pub shards: usize,
}

/// The heap.
#[derive(Clone, Debug)]
pub struct Model {
    pub setup: Setup,
    pub limit: usize,
    /// One for each page grown.
    pub pages: Vec<State>,
    /// One for each page grown: free, not backed by memory, reads as zero.
    pub scavenged: Vec<bool>,
    pub slots: Vec<Slot>,
    prepared: usize,
    flush_calls: usize,
}

/// What is wanted.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    pub pages: usize,
    /// In pages.
    pub align: usize,
}

/// The first page, and how many of the pages were scavenged.
pub type Taken = (usize, usize);

/// The most bytes that a heap grows ahead of need.
const AHEAD_BYTES: usize = 64 << 20;

impl Model {
    pub fn new(setup: Setup, limit: usize) -> Self {
        Self {
            setup,
            limit: limit.min(setup.capacity),
            pages: Vec::new(),
            scavenged: Vec::new(),
            slots: vec![Slot::new(); setup.shards],
            prepared: 0,
            flush_calls: 0,
        }
    }

    pub fn grown(&self) -> usize {
        self.pages.len()
    }

    pub fn is_free(&self, page: usize) -> bool {
        self.pages.get(page) == Some(&State::Free)
    }

    /// The pages, 64 in a word: those that are free, those that are scavenged.
    pub fn words(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let free = |pages: &[State]| mask(pages.iter().map(|&state| state == State::Free));
        let words = self.pages.chunks(64).zip(self.scavenged.chunks(64));
        words.map(move |(pages, scavenged)| (free(pages), mask(scavenged.iter().copied())))
    }

    /// Run by run, from the lowest.
    fn first_fit(&self, wish: Wish) -> Option<usize> {
        let phase = self.setup.base >> self.setup.page_shift;
        let mut from = 0;
        while let Some(before) = self.pages[from..].iter().position(|&state| state == State::Free) {
            let first = from + before;
            let free = self.pages[first..]
                .iter()
                .take_while(|&&state| state == State::Free)
                .count();
            let start = (first + phase).next_multiple_of(wish.align) - phase;
            if start + wish.pages <= first + free {
                return Some(start);
            }
            from = first + free;
        }
        None
    }

    /// Takes pages that are free.
    fn take(&mut self, start: usize, pages: usize, state: State) -> Taken {
        let range = start..start + pages;
        self.pages[range.clone()].fill(state);
        (start, take_flags(&mut self.scavenged[range]))
    }

    // ---- growth -----------------------------------------------------------------------------------------------------

    /// Grows far enough for the wish, and ahead. Not past the limit.
    fn grow_for(&mut self, wish: Wish) -> Option<()> {
        let grown = self.grown();
        let tail = self
            .pages
            .iter()
            .rev()
            .take_while(|&&state| state == State::Free)
            .count();
        let phase = self.setup.base >> self.setup.page_shift;
        let begin = (grown - tail..).find(|page| (page + phase).is_multiple_of(wish.align))?;
        let end = (begin + wish.pages).max(grown + 1);
        if end > self.limit {
            return None;
        }
        let ahead = grown + (grown / 8).min(AHEAD_BYTES >> self.setup.page_shift);
        let whole = ahead.max(end).next_multiple_of(self.setup.chunk_pages);
        self.grow(whole.min(self.limit));
        Some(())
    }

    /// Grows to `end`, in whole chunks, if it has not grown that far.
    fn grow_to(&mut self, end: usize) -> Option<()> {
        if end > self.grown() {
            if end > self.limit {
                return None;
            }
            self.grow(end.next_multiple_of(self.setup.chunk_pages).min(self.limit));
        }
        Some(())
    }

    fn grow(&mut self, end: usize) {
        self.pages.resize(end, State::Free);
        // The rest of a granule prepared earlier is not known to be zero.
        let rest = self.prepared.min(end).max(self.scavenged.len());
        self.scavenged.resize(rest, self.setup.commits);
        self.scavenged.resize(end, self.setup.commits || self.setup.zero);
        if end > self.prepared {
            self.prepared = end.next_multiple_of(self.setup.granule).min(self.setup.capacity);
        }
    }

    // ---- the heap's own verbs ---------------------------------------------------------------------------------------

    /// First fit, growth, flushes; then first fit and growth again. `own` is the shard that asks, which cannot be
    /// flushed meanwhile.
    pub fn allocate(&mut self, wish: Wish, own: Option<usize>) -> Option<Taken> {
        if wish.pages == 0 || wish.pages > self.setup.capacity {
            return None;
        }
        if self.first_fit(wish).is_none() && self.grow_for(wish).is_none() {
            (0..self.setup.shards)
                .filter(|&shard| own != Some(shard))
                .for_each(|shard| self.flush(shard));
            self.flush_calls += 1;
            if self.first_fit(wish).is_none() {
                self.grow_for(wish)?;
            }
        }
        let start = self.first_fit(wish)?;
        Some(self.take(start, wish.pages, State::Used))
    }

    pub fn allocate_at(&mut self, start: usize, pages: usize) -> Option<Taken> {
        // The heap does not grow for a run that it cannot have.
        let is_free = |model: &Self, end: usize| (start..end).all(|page| model.is_free(page));
        if !is_free(self, self.pages.len().min(start + pages)) {
            return None;
        }
        self.grow_to(start + pages)?;
        is_free(self, start + pages).then(|| self.take(start, pages, State::Used))
    }

    /// Frees pages, or returns the first page that is free already.
    pub fn free(&mut self, start: usize, pages: usize) -> Result<(), usize> {
        // Counted first: that takes several pages at a time, and hardly ever finds one.
        let run = &self.pages[start..start + pages];
        if run.iter().filter(|&&state| state == State::Free).count() > 0 {
            let before = run.iter().take_while(|&&state| state != State::Free).count();
            return Err(start + before);
        }
        self.pages[start..start + pages].fill(State::Free);
        Ok(())
    }

    // ---- caches -----------------------------------------------------------------------------------------------------

    /// Lends a slot: as it was left, except that it has answered all calls for a flush.
    pub fn lend(&mut self, slot: usize) {
        if slot == self.slots.len() {
            self.slots.push(Slot::new());
        }
        self.slots[slot].heeded = self.flush_calls;
    }

    pub fn allocate_cached(&mut self, slot: usize, pages: usize) -> Option<Taken> {
        if pages == 0 {
            return None;
        }
        if !(1..=16).contains(&pages) {
            self.heed(slot);
            return self.allocate_uncached(slot, pages);
        }
        if let Some(taken) = self.take_cached(slot, pages) {
            return Some(taken);
        }
        self.heed(slot);
        if self.slots[slot].is_empty() {
            self.flush(slot);
            if self.refill(slot).is_some()
                && let Some(taken) = self.take_cached(slot, pages)
            {
                return Some(taken);
            }
        }
        self.allocate_uncached(slot, pages)
    }

    fn allocate_uncached(&mut self, slot: usize, pages: usize) -> Option<Taken> {
        let own = Some(slot).filter(|&slot| slot < self.setup.shards);
        let wish = Wish { pages, align: 1 };
        if pages == 0 || self.first_fit(wish).is_none() {
            // The cache's own pages may be what is missing, before the heap grows or refuses.
            self.flush(slot);
        }
        self.allocate(wish, own)
    }

    fn heed(&mut self, slot: usize) {
        if self.slots[slot].heeded != self.flush_calls {
            self.slots[slot].heeded = self.flush_calls;
            self.flush(slot);
        }
    }

    fn take_cached(&mut self, slot: usize, pages: usize) -> Option<Taken> {
        let slot = &mut self.slots[slot];
        let bit = slot.find(pages)?;
        let start = slot.word * 64 + bit;
        slot.free[bit..bit + pages].fill(false);
        let scavenged = take_flags(&mut slot.scavenged[bit..bit + pages]);
        self.pages[start..start + pages].fill(State::Used);
        Some((start, scavenged))
    }

    /// Takes the word of the lowest free page.
    fn refill(&mut self, slot: usize) -> Option<()> {
        if !self.pages.contains(&State::Free) {
            self.grow_for(Wish { pages: 1, align: 1 })?;
        }
        let word = self.pages.iter().position(|&state| state == State::Free)? / 64;
        for bit in 0..64 {
            let page = word * 64 + bit;
            let free = self.is_free(page);
            self.slots[slot].free[bit] = free;
            self.slots[slot].scavenged[bit] = free && std::mem::take(&mut self.scavenged[page]);
            if free {
                self.pages[page] = State::Cached;
            }
        }
        self.slots[slot].word = word;
        Some(())
    }

    pub fn free_cached(&mut self, slot: usize, start: usize, pages: usize) {
        let (word, bit) = (start / 64, start % 64);
        if bit + pages > 64 {
            self.free(start, pages).expect("pages in use");
            return;
        }
        self.pages[start..start + pages].fill(State::Cached);
        if word == self.slots[slot].word {
            self.slots[slot].free[bit..bit + pages].fill(true);
            return;
        }
        if word != self.slots[slot].buffer_word {
            self.flush_buffer(slot);
            self.slots[slot].buffer_word = word;
        }
        self.slots[slot].buffer[bit..bit + pages].fill(true);
    }

    fn flush_buffer(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        for bit in 0..64 {
            if std::mem::take(&mut slot.buffer[bit]) {
                self.pages[slot.buffer_word * 64 + bit] = State::Free;
            }
        }
    }

    pub fn flush(&mut self, slot: usize) {
        self.flush_buffer(slot);
        let slot = &mut self.slots[slot];
        for bit in 0..64 {
            if std::mem::take(&mut slot.free[bit]) {
                self.pages[slot.word * 64 + bit] = State::Free;
                self.scavenged[slot.word * 64 + bit] = std::mem::take(&mut slot.scavenged[bit]);
            }
        }
    }

    // ---- scavenging -------------------------------------------------------------------------------------------------

    /// Whether all pages of the granule that `page` lies in are free, and some are backed by memory.
    pub fn is_idle(&self, page: usize) -> bool {
        let first = page & !(self.setup.granule - 1);
        let mut granule = first..first + self.setup.granule;
        granule.clone().all(|page| self.is_free(page)) && granule.any(|page| !self.scavenged[page])
    }

    /// Pages in caches; scavenged ones, free or cached.
    pub fn counts(&self) -> (usize, usize) {
        let cached = self.pages.iter().filter(|&&state| state == State::Cached).count();
        let in_slots = self.slots.iter().flat_map(|slot| slot.scavenged);
        let scavenged = self.scavenged.iter().copied().chain(in_slots).filter(|&flag| flag);
        (cached, scavenged.count())
    }
}
