//! What the benches share: heaps without memory, a small random number generator, and a loop that times one phase out
//! of several.

#![allow(dead_code, reason = "each bench uses a part")]

use std::time::{Duration, Instant};

use pageheap::source::{Numbers, Split, System};
use pageheap::{Config, PageCount, PageHeap, PageIndex, PageRun};

/// Pages without memory behind them, and tables in memory: benches measure the heap, not page faults of its user.
pub type Bare = Split<Numbers, System>;

/// Bytes in a page of the default geometry.
pub const PAGE: usize = 8192;

/// A heap of `bytes` bytes of pages without memory, all grown and free.
pub fn heap(bytes: usize) -> PageHeap<Bare> {
    let source = Split::new(Numbers::new(1 << 45, bytes + (64 << 20)), System);
    let heap = PageHeap::new(source, Config::new(bytes).caches(128)).expect("reserve the tables");
    assert_eq!(heap.capacity(), PageCount(bytes / PAGE));
    let all = heap.allocate(heap.capacity()).expect("an empty heap has room");
    free(&heap, all);
    heap
}

/// The run of `pages` pages from `start`.
pub fn run(start: usize, pages: usize) -> PageRun {
    PageRun::new(PageIndex(start), PageCount(pages)).expect("a run has pages")
}

/// Frees a run that the bench allocated.
#[inline(always)]
pub fn free(heap: &PageHeap<Bare>, run: PageRun) {
    // SAFETY: benches free what they allocated, once; the pages are numbers, so nothing can be using them.
    unsafe { heap.free(run) }
}

/// xorshift64: fast, and the same numbers every time.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The generator that every bench starts with.
    pub fn new() -> Self {
        Self(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `bound`.
    #[inline]
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * bound as u128) >> 64) as usize
    }

    /// Shuffles `items`.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// The time of `rounds` units of work. One call of `round` does `units` of them and returns how long they took.
pub fn timed(rounds: u64, units: usize, mut round: impl FnMut() -> Duration) -> Duration {
    let (mut done, mut spent) = (0_u64, Duration::ZERO);
    while done < rounds {
        spent += round();
        done += units as u64;
    }
    spent.mul_f64(rounds as f64 / done as f64)
}

/// How long `work` takes.
pub fn clock(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// Takes every page of the heap.
pub fn take_all(heap: &PageHeap<Bare>) {
    while heap.allocate(PageCount(1)).is_some() {}
}

/// Makes the whole heap free, whatever its state: takes everything, frees everything.
pub fn empty(heap: &PageHeap<Bare>) {
    while heap.free_set().claim_word().is_some() {}
    free(heap, run(0, heap.capacity().0));
}

/// Frees `share` of the heap's pages, in clusters of 1..=64 pages at random places; the rest is in use.
pub fn fragment(heap: &PageHeap<Bare>, share: f64) {
    let mut random = Random::new();
    while heap.free_set().claim_word().is_some() {}
    let pages = heap.capacity().0;
    let mut free_pages = vec![false; pages];
    let mut left = (pages as f64 * share) as usize;
    while left > 0 {
        let start = random.below(pages - 64);
        let length = 1 + random.below(64);
        for page in &mut free_pages[start..start + length] {
            if left > 0 && !*page {
                *page = true;
                left -= 1;
            }
        }
    }
    for (page, _) in free_pages.iter().enumerate().filter(|(_, free)| **free) {
        free(heap, run(page, 1));
    }
    heap.free_set().settle();
}
