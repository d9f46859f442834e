//! The work of one thread: a bit of everything.

use std::time::Instant;

use pageheap::internals::Shape;
use pageheap::source::Source;
use pageheap::{Cache, PageCount, PageHeap, PageIndex, PageRun};

use super::Owners;
use super::random::Random;

/// Checks pages when they are taken and before they are freed: for heaps of real memory.
pub trait Stamp: Sync {
    /// From now on the pages are the owner's; `zeroed` says whether they should be zero.
    fn taken(&self, run: PageRun, zeroed: bool, owner: u32);
    /// The pages were the owner's alone until now.
    fn freed(&self, run: PageRun, owner: u32);
}

/// Pages without memory.
#[derive(Debug)]
pub struct NoStamp;

impl Stamp for NoStamp {
    fn taken(&self, _: PageRun, _: bool, _: u32) {}
    fn freed(&self, _: PageRun, _: u32) {}
}

/// What the threads share.
#[derive(Debug)]
pub struct Shared<'h, S: Source, G: Shape, T> {
    pub heap: &'h PageHeap<S, G>,
    pub owners: &'h Owners,
    pub stamp: &'h T,
    pub deadline: Instant,
    /// The most pages that a thread holds.
    pub most: usize,
}

/// A thread's state.
struct Worker<'h, S: Source, G: Shape, T> {
    shared: &'h Shared<'h, S, G, T>,
    cache: Option<Cache<'h, S, G>>,
    me: u32,
    random: Random,
    live: Vec<PageRun>,
    held: usize,
}

/// Works until the deadline, then frees everything. Returns the number of steps.
pub fn work<S: Source, G: Shape, T: Stamp>(shared: &Shared<'_, S, G, T>, me: u32) -> usize {
    let mut worker = Worker {
        shared,
        cache: None,
        me,
        random: Random(u64::from(me)),
        live: Vec::new(),
        held: 0,
    };
    let mut steps = 0;
    while steps < 256 || steps % 64 != 0 || Instant::now() < shared.deadline {
        worker.step();
        steps += 1;
    }
    while !worker.live.is_empty() {
        worker.free();
    }
    steps
}

impl<S: Source, G: Shape, T: Stamp> Worker<'_, S, G, T> {
    fn step(&mut self) {
        if self.held > self.shared.most {
            return self.free();
        }
        match self.random.below(32) {
            0..=13 => self.allocate(),
            14..=25 => self.free(),
            26 => self.extend(),
            27 => self.shrink(),
            28 => self.cache = self.shared.heap.cache(),
            29 => drop(self.shared.heap.stats()),
            30 if self.random.below(4) == 0 => {
                self.shared.heap.scavenge(PageCount(self.random.below(128)));
            }
            _ => self.shared.heap.flush_shards(),
        }
    }

    fn pages(&mut self) -> usize {
        match self.random.below(16) {
            0..=8 => 1 + self.random.below(4),
            9..=12 => 1 + self.random.below(70),
            13 => 64,
            14 => 1 + self.random.below(3 * G::CHUNK_PAGES),
            _ => G::CHUNK_PAGES,
        }
    }

    fn allocate(&mut self) {
        let heap = self.shared.heap;
        let pages = PageCount(self.pages());
        let allocation = match self.random.below(12) {
            0..=3 => heap.allocate_tracked(pages),
            4..=7 => match &self.cache {
                Some(cache) => cache.allocate_tracked(pages),
                None => heap.allocate_tracked(pages),
            },
            8..=9 => {
                let run = heap.allocate_on(self.random.below(8), pages);
                return run.into_iter().for_each(|run| self.keep(run, false));
            }
            10 => heap.allocate_aligned(pages, G::PAGE_BYTES << self.random.below(8)),
            _ => {
                let start = PageIndex(self.random.below(heap.capacity().0));
                PageRun::new(start, pages).and_then(|run| heap.allocate_at(run))
            }
        };
        if let Some(allocation) = allocation {
            self.keep(allocation.run, allocation.is_zeroed());
        }
    }

    fn keep(&mut self, run: PageRun, zeroed: bool) {
        self.take(run, zeroed);
        self.live.push(run);
    }

    fn take(&mut self, run: PageRun, zeroed: bool) {
        self.shared.owners.take(run, self.me);
        self.shared.stamp.taken(run, zeroed, self.me);
        self.held += run.pages().0;
    }

    fn give(&mut self, run: PageRun) {
        self.shared.stamp.freed(run, self.me);
        self.shared.owners.give(run, self.me);
        self.held -= run.pages().0;
    }

    fn pick(&mut self) -> Option<PageRun> {
        if self.live.is_empty() {
            return None;
        }
        let index = self.random.below(self.live.len());
        Some(self.live.swap_remove(index))
    }

    fn free(&mut self) {
        let heap = self.shared.heap;
        let Some(run) = self.pick() else { return };
        let kind = self.random.below(12);
        if kind == 0 {
            let mut batch = vec![run];
            batch.extend((0..self.random.below(12)).filter_map(|_| self.pick()));
            batch.iter().for_each(|&run| self.give(run));
            // SAFETY: our own runs, and not in use.
            return unsafe { heap.free_batch(&mut batch) };
        }
        self.give(run);
        // SAFETY: our own run, and not in use, whichever way it is freed.
        unsafe {
            match (kind, &self.cache) {
                (1..=4, _) | (5..=8, None) => heap.free(run),
                (5..=8, Some(cache)) => cache.free(run),
                _ => heap.free_on(self.random.below(8), run),
            }
        }
    }

    fn extend(&mut self) {
        let Some(run) = self.pick() else { return };
        let to = PageCount(run.pages().0 + self.pages());
        let longer = self.shared.heap.grow_in_place(run, to);
        if let Some((_, more)) = longer {
            self.take(more.run, more.is_zeroed());
        }
        self.live.push(longer.map_or(run, |(longer, _)| longer));
    }

    fn shrink(&mut self) {
        let Some(run) = self.pick() else { return };
        let to = PageCount(1 + self.random.below(run.pages().0));
        if let Some((_, tail)) = run.split_at(to) {
            self.give(tail);
        }
        // SAFETY: our own run, whose end is not in use.
        self.live.push(unsafe { self.shared.heap.shrink(run, to) });
    }
}
