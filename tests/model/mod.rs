//! A heap side by side with a naive one: for property tests and fuzz targets, which include `mod model` by path.
//!
//! [`Runner::run`] applies each step to both, compares the results, every page and every count, and has the heap check
//! itself. A difference panics with a drawing of both.

#![allow(dead_code, reason = "no program uses all of it")]

pub mod naive;
pub mod ops;

use std::fmt::Write;
use std::ptr::NonNull;

use naive::{Model, Setup, State, Taken, Wish};
pub use ops::{Op, decode};
use pageheap::internals::{Shape, Summary};
use pageheap::source::{Simulated, Source};
use pageheap::{Allocation, Cache, PageCount, PageHeap, PageIndex, PageRun};

/// A source that can check whether memory may be used.
pub trait Watched: Source {
    /// Panics unless these bytes may be used.
    fn watch(&self, start: NonNull<u8>, bytes: usize);
}

impl<const COMMITS: bool> Watched for Simulated<COMMITS> {
    fn watch(&self, start: NonNull<u8>, bytes: usize) {
        self.assert_ready(start, bytes);
    }
}

impl<S: Watched> Watched for &S {
    fn watch(&self, start: NonNull<u8>, bytes: usize) {
        (**self).watch(start, bytes);
    }
}

/// How a heap was set up, as far as it cannot say itself.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether the source promises that prepared and released pages read as zero.
    pub zero: bool,
    /// `Config::shards`.
    pub shards: usize,
    /// `Config::caches`.
    pub caches: usize,
}

/// A heap and its model.
#[derive(Debug)]
pub struct Runner<'h, S: Watched, G: Shape> {
    heap: &'h PageHeap<S, G>,
    model: Model,
    options: Options,
    /// Runs in use.
    live: Vec<(usize, usize)>,
    /// The handles lent, with their slots.
    caches: Vec<(Cache<'h, S, G>, usize)>,
    /// Slots given back.
    vacant: Vec<usize>,
    done: Vec<Op>,
}

fn run_of(start: usize, pages: usize) -> Option<PageRun> {
    PageRun::new(PageIndex(start), PageCount(pages))
}

/// First page, pages, scavenged pages.
fn parts(taken: Allocation) -> (usize, usize, usize) {
    (taken.run.start().0, taken.run.pages().0, taken.scavenged.0)
}

impl<'h, S: Watched, G: Shape> Runner<'h, S, G> {
    /// A runner over a new heap.
    pub fn new(heap: &'h PageHeap<S, G>, options: Options) -> Self {
        let setup = Setup {
            page_shift: G::PAGE_SHIFT,
            chunk_pages: G::CHUNK_PAGES,
            capacity: heap.capacity().0,
            base: heap.address(PageIndex(0)).addr().get(),
            granule: (heap.source().granule() >> G::PAGE_SHIFT).max(1),
            zero: options.zero,
            commits: S::COMMITS,
            shards: options.shards,
        };
        Self {
            heap,
            model: Model::new(setup, heap.limit().0),
            options,
            live: Vec::new(),
            caches: Vec::new(),
            vacant: Vec::new(),
            done: Vec::new(),
        }
    }

    /// Applies the steps, comparing after each.
    pub fn run(&mut self, ops: &[Op]) {
        for &op in ops {
            self.step(op);
        }
    }

    /// Applies one step, and compares.
    pub fn step(&mut self, op: Op) {
        self.done.push(op);
        self.apply(op);
        self.compare();
    }

    /// Frees everything, and compares summaries too.
    pub fn finish(&mut self) {
        while !self.caches.is_empty() {
            self.step(Op::CacheDrop { cache: 0 });
        }
        self.step(Op::FlushShards);
        while !self.live.is_empty() {
            self.step(Op::FreeBatch { run: 0, runs: 15 });
        }
        self.step(Op::Settle);
        let stats = self.heap.stats();
        self.expect(stats.free, stats.grown, "free pages at the end", 0);
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Allocate { pages } => {
                let real = self.heap.allocate_tracked(PageCount(pages));
                let naive = self.model.allocate(Wish { pages, align: 1 }, None);
                self.took(real.map(parts), naive, pages);
            }
            Op::Aligned { pages, shift } => {
                let align = 1_usize << shift;
                let real = self.heap.allocate_aligned(PageCount(pages), align);
                let align = (align >> G::PAGE_SHIFT).max(1);
                let naive = self.model.allocate(Wish { pages, align }, None);
                self.took(real.map(parts), naive, pages);
            }
            Op::At { page, pages } => {
                let Some(run) = run_of(page, pages) else { return };
                let real = self.heap.allocate_at(run);
                let naive = self.model.allocate_at(page, pages);
                self.took(real.map(parts), naive, pages);
            }
            Op::Free { run, from, pages } => self.free(run, from, pages),
            Op::FreeBatch { run, runs } => self.free_batch(run, runs),
            Op::Extend { run, by } => self.extend(run, by),
            Op::Shrink { run, to } => self.shrink(run, to),
            Op::Misuse { page, pages } => self.misuse(page, pages),
            Op::Twice { run } => self.twice(run),
            Op::Limit { pages } => {
                self.heap.set_limit(PageCount(pages));
                self.model.limit = pages.min(self.model.setup.capacity);
                self.expect(self.heap.limit(), PageCount(self.model.limit), "limit", 0);
            }
            Op::Scavenge { pages } => self.scavenge(pages),
            Op::Settle => self.settle(),
            _ => self.apply_cached(op),
        }
    }

    fn apply_cached(&mut self, op: Op) {
        let (caches, shards) = (self.caches.len(), self.options.shards);
        match op {
            Op::Lend => self.lend(),
            Op::CacheAllocate { cache, pages } if caches > 0 => {
                let (handle, slot) = &self.caches[cache % caches];
                let real = handle.allocate_tracked(PageCount(pages));
                let naive = self.model.allocate_cached(*slot, pages);
                self.took(real.map(parts), naive, pages);
            }
            Op::CacheFree { cache, run } if caches > 0 && !self.live.is_empty() => {
                let (start, pages) = self.live.swap_remove(run % self.live.len());
                let (handle, slot) = &self.caches[cache % caches];
                // SAFETY: the run is ours, and its pages are numbers.
                let freed = unsafe { handle.try_free(run_of(start, pages).expect("a run")) };
                self.model.free_cached(*slot, start, pages);
                self.expect(freed, Ok(()), "free through a cache", start);
            }
            Op::CacheFlush { cache } if caches > 0 => {
                let (handle, slot) = &self.caches[cache % caches];
                handle.flush();
                self.model.flush(*slot);
            }
            Op::CacheDrop { cache } if caches > 0 => {
                let (handle, slot) = self.caches.swap_remove(cache % caches);
                drop(handle);
                self.model.flush(slot);
                self.vacant.push(slot);
            }
            Op::ShardAllocate { shard, pages } => {
                let real = self.heap.allocate_on(shard, PageCount(pages));
                let naive = if shards == 0 {
                    self.model.allocate(Wish { pages, align: 1 }, None)
                } else {
                    self.model.allocate_cached(shard % shards, pages)
                };
                // A shard's allocation does not report it.
                let scavenged = naive.map_or(0, |(_, scavenged)| self.claimed(scavenged));
                let real = real.map(|run| (run.start().0, run.pages().0, scavenged));
                self.took(real, naive, pages);
            }
            Op::ShardFree { shard, run } if !self.live.is_empty() => {
                let (start, pages) = self.live.swap_remove(run % self.live.len());
                // SAFETY: the run is ours, and its pages are numbers.
                unsafe { self.heap.free_on(shard, run_of(start, pages).expect("a run")) };
                if shards == 0 {
                    self.model.free(start, pages).expect("pages in use");
                } else {
                    self.model.free_cached(shard % shards, start, pages);
                }
            }
            Op::FlushShards => {
                self.heap.flush_shards();
                (0..shards).for_each(|shard| self.model.flush(shard));
            }
            // There is nothing to apply it to.
            _ => {}
        }
    }

    fn lend(&mut self) {
        let handle = self.heap.cache();
        let used = self.model.slots.len();
        let slot = self
            .vacant
            .pop()
            .or((used < self.options.shards + self.options.caches).then_some(used));
        self.expect(handle.is_some(), slot.is_some(), "a cache lent", 0);
        if let (Some(handle), Some(slot)) = (handle, slot) {
            self.model.lend(slot);
            self.caches.push((handle, slot));
        }
    }

    /// Of `scavenged` marked pages, those that the heap may call zero.
    fn claimed(&self, scavenged: usize) -> usize {
        if self.model.setup.zero { scavenged } else { 0 }
    }

    /// Compares what both took.
    fn took(&mut self, real: Option<(usize, usize, usize)>, naive: Option<Taken>, pages: usize) {
        let expected = naive.map(|(start, scavenged)| (start, pages, self.claimed(scavenged)));
        let page = expected.or(real).map_or(0, |(start, ..)| start);
        self.expect(
            real,
            expected,
            "first page, pages, scavenged pages of what was taken",
            page,
        );
        if let Some((start, pages, _)) = real {
            let bytes = self.heap.pointer(run_of(start, pages).expect("a run"));
            self.heap.source().watch(bytes.cast(), bytes.len());
            self.live.push((start, pages));
        }
    }

    fn free(&mut self, run: usize, from: usize, pages: usize) {
        if self.live.is_empty() {
            return;
        }
        let index = run % self.live.len();
        let (start, length) = self.live.swap_remove(index);
        let from = if pages == 0 { 0 } else { from % length };
        let pages = if pages == 0 { length } else { pages.min(length - from) };
        if from > 0 {
            self.live.push((start, from));
        }
        if from + pages < length {
            self.live.push((start + from + pages, length - from - pages));
        }
        let part = run_of(start + from, pages).expect("a run");
        // SAFETY: the run is ours, and its pages are numbers.
        let freed = unsafe { self.heap.try_free(part) };
        self.model.free(start + from, pages).expect("pages in use");
        self.expect(freed, Ok(()), "free", start + from);
    }

    fn free_batch(&mut self, run: usize, runs: usize) {
        let mut batch = Vec::new();
        for step in 0..runs.min(self.live.len()) {
            let (start, pages) = self.live.swap_remove((run + step * 7) % self.live.len());
            self.model.free(start, pages).expect("pages in use");
            batch.push(run_of(start, pages).expect("a run"));
        }
        // SAFETY: the runs are ours, and their pages are numbers.
        let freed = unsafe { self.heap.try_free_batch(&mut batch) };
        let page = batch.first().map_or(0, |run| run.start().0);
        self.expect(freed, Ok(()), "free_batch", page);
    }

    fn extend(&mut self, run: usize, by: usize) {
        if self.live.is_empty() {
            return;
        }
        let index = run % self.live.len();
        let (start, pages) = self.live[index];
        let longer = self
            .heap
            .grow_in_place(run_of(start, pages).expect("a run"), PageCount(pages + by));
        let naive = if by == 0 {
            None
        } else {
            self.model.allocate_at(start + pages, by)
        };
        let expected = naive.map(|(at, scavenged)| (start, pages + by, at, by, self.claimed(scavenged)));
        let real = longer.map(|(all, more)| {
            let (at, by, scavenged) = parts(more);
            (all.start().0, all.pages().0, at, by, scavenged)
        });
        self.expect(real, expected, "extend", start + pages);
        if naive.is_some() {
            self.live[index].1 += by;
        }
    }

    fn shrink(&mut self, run: usize, to: usize) {
        if self.live.is_empty() {
            return;
        }
        let index = run % self.live.len();
        let (start, pages) = self.live[index];
        let run = run_of(start, pages).expect("a run");
        // SAFETY: the run is ours, and its pages are numbers.
        let shorter = unsafe { self.heap.shrink(run, PageCount(to)) };
        let left = if to == 0 { pages } else { to.min(pages) };
        self.expect(Some(shorter), run_of(start, left), "shrink", start);
        if left < pages {
            self.model.free(start + left, pages - left).expect("pages in use");
            self.live[index].1 = left;
        }
    }

    /// Only where the heap must notice it: a page of the run is free (not: cached), or outside the heap.
    fn misuse(&mut self, page: usize, pages: usize) {
        let Some(run) = run_of(page, pages) else { return };
        let outside = page + pages > self.model.grown();
        let free = (page..page + pages).find(|&page| self.model.is_free(page));
        if !outside && free.is_none() {
            return;
        }
        // SAFETY: it is refused.
        let error = unsafe { self.heap.try_free(run) };
        let first_outside = page.max(self.model.grown());
        let at = if outside { first_outside } else { free.unwrap_or(page) };
        let expected = (!outside, self.heap.address(PageIndex(at)).addr().get());
        let real = error.map_err(|error| (error.is_free_already(), error.address()));
        self.expect(real, Err(expected), "try_free of what is not in use", at);
    }

    fn twice(&mut self, run: usize) {
        if self.live.is_empty() {
            return;
        }
        let (start, pages) = self.live[run % self.live.len()];
        let one = run_of(start, pages).expect("a run");
        // SAFETY: it is refused.
        let error = unsafe { self.heap.try_free_batch(&mut [one, one]) };
        let real = error.map_err(|error| (error.is_free_already(), error.address()));
        let address = self.heap.address(PageIndex(start)).addr().get();
        self.expect(real, Err((true, address)), "a run twice in a batch", start);
    }

    fn scavenge(&mut self, wanted: usize) {
        let released = self.heap.scavenge(PageCount(wanted)).0;
        let grown = self.model.grown();
        let new: Vec<_> = (0..grown)
            .filter(|&page| self.bits(page).1 && !self.model.scavenged[page])
            .collect();
        if self.model.setup.granule > G::CHUNK_PAGES {
            return self.expect(released, 0, "pages released", 0);
        }
        // Some pages of a released granule may have been marked before: these are not counted.
        let idle: Vec<_> = (0..grown)
            .filter(|&page| self.model.is_idle(page) && !self.model.scavenged[page])
            .collect();
        let lowest = new.first().copied().unwrap_or(grown);
        let above: Vec<_> = idle.iter().copied().filter(|&page| page >= lowest).collect();
        self.expect(&new, &above, "pages released: the highest idle ones", lowest);
        self.expect(released, above.len(), "pages released", lowest);
        let slack = self.model.setup.granule + (2 << 20 >> G::PAGE_SHIFT);
        let enough = released >= wanted.min(idle.len()) && released < wanted + slack;
        self.expect(enough, true, "enough and not much more released", lowest);
        new.into_iter().for_each(|page| self.model.scavenged[page] = true);
    }

    /// After claims are settled, every summary is exact.
    fn settle(&self) {
        self.heap.free_set().settle();
        let grown = self.model.grown();
        for level in 0..G::LEVELS {
            let span = 1 << G::span_shift(level);
            for entry in 0..G::entries(level, grown) {
                // None beyond the end is free. An upper entry has millions of them: one says as much as all.
                let pages = entry * span..((entry + 1) * span).min(grown + 1);
                let (start, max, end) = naive::summarize(pages.map(|page| self.model.is_free(page)));
                let says = self.heap.free_set().summary(level, entry);
                let what = format!("summary {entry} of level {level}");
                self.expect(says, Summary::new(start, max, end), &what, entry * span);
            }
        }
    }

    // ---- comparisons ------------------------------------------------------------------------------------------------

    /// Free, scavenged.
    fn bits(&self, page: usize) -> (bool, bool) {
        let (free, scavenged) = self.heap.free_set().words(page / 64);
        (free >> (page % 64) & 1 == 1, scavenged >> (page % 64) & 1 == 1)
    }

    /// Compares everything observable.
    fn compare(&self) {
        if let Err(fault) = self.heap.check() {
            self.fail(&format!("{fault}"), 0);
        }
        let grown = self.heap.free_set().grown();
        self.expect(grown, self.model.grown(), "pages grown", grown);
        for (word, (pages, scavenged)) in self.model.words().enumerate() {
            if self.heap.free_set().words(word) != (pages, scavenged) {
                (word * 64..grown).for_each(|page| self.compare_page(page));
            }
        }
        let stats = self.heap.stats();
        let (cached, scavenged) = self.model.counts();
        let used: usize = self.live.iter().map(|&(_, pages)| pages).sum();
        let real = (stats.in_use.0, stats.cached.0, stats.scavenged.0);
        self.expect(real, (used, cached, scavenged), "stats: in use, cached, scavenged", 0);
        let sum = stats.in_use.0 + stats.cached.0 + stats.free.0;
        self.expect(sum, stats.grown.0, "stats: the sum", 0);
    }

    fn compare_page(&self, page: usize) {
        let naive = (self.model.is_free(page), self.model.scavenged[page]);
        self.expect(self.bits(page), naive, "free, scavenged", page);
    }

    fn expect<T: PartialEq + std::fmt::Debug>(&self, real: T, expected: T, what: &str, page: usize) {
        if real != expected {
            self.fail(&format!("{what}: {real:?}, in the model {expected:?}"), page);
        }
    }

    fn fail(&self, what: &str, page: usize) -> ! {
        let mut picture = String::new();
        let grown = self.heap.free_set().grown().max(self.model.grown());
        let near = page / 64;
        for word in near.saturating_sub(6)..(near + 8).min(grown.div_ceil(64)) {
            let _ = write!(picture, "  word {word:>5}  ");
            for page in word * 64..word * 64 + 64 {
                picture.push(match self.bits(page) {
                    _ if page >= self.heap.free_set().grown() => ' ',
                    (true, false) => '.',
                    (true, true) => '_',
                    (false, false) => '#',
                    (false, true) => '!',
                });
            }
            picture.push_str("  |  ");
            for page in word * 64..word * 64 + 64 {
                let scavenged = self.model.scavenged.get(page) == Some(&true);
                picture.push(match self.model.pages.get(page) {
                    None => ' ',
                    Some(State::Free) if scavenged => '_',
                    Some(State::Free) => '.',
                    Some(State::Cached) => 'c',
                    Some(State::Used) => '#',
                });
            }
            picture.push('\n');
        }
        let step = self.done.len();
        let header = "  heap (. free, _ scavenged, # in use), model (also c cached)";
        panic!("step {step}: {what}\n{header}\n{picture}steps so far: {:?}", self.done);
    }
}
