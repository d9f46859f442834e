//! The promises of [`PageHeap`], one test each.

mod allocate;
mod caches;
#[path = "../common/child.rs"]
mod child;
#[path = "../common/mod.rs"]
mod common;
mod free;
mod gaps;
mod scavenge;
mod sources;
mod traits;

use pageheap::source::Simulated;
use pageheap::{Allocation, Config, PageCount, PageHeap, PageIndex, PageRun};

use common::{BASE, by_width};

/// A page of the default geometry.
const PAGE: usize = 8192;

/// A heap of at most this many pages over a source that checks its user.
fn heap(pages: usize) -> PageHeap<Simulated> {
    over(Simulated::new(4096), Config::new(pages * PAGE))
}

fn over<const COMMITS: bool>(source: Simulated<COMMITS>, config: Config) -> PageHeap<Simulated<COMMITS>> {
    PageHeap::new(source, config).expect("a heap")
}

fn run(start: usize, pages: usize) -> PageRun {
    PageRun::new(PageIndex(start), PageCount(pages)).expect("a run")
}

/// What `allocate` returns, as numbers.
fn take<const COMMITS: bool>(heap: &PageHeap<Simulated<COMMITS>>, pages: usize) -> Option<(usize, usize)> {
    heap.allocate(PageCount(pages)).map(numbers)
}

fn numbers(run: PageRun) -> (usize, usize) {
    (run.start().0, run.pages().0)
}

fn taken(allocation: Option<Allocation>) -> Option<(usize, usize)> {
    allocation.map(|allocation| numbers(allocation.run))
}

/// Frees pages that are in use.
#[track_caller]
fn give<const COMMITS: bool>(heap: &PageHeap<Simulated<COMMITS>>, start: usize, pages: usize) {
    // SAFETY: pages of a simulated source are numbers.
    let freed = unsafe { heap.try_free(run(start, pages)) };
    assert_eq!(freed, Ok(()), "{start}, {pages} pages");
}

/// The heap is consistent, with these numbers of pages grown and free.
#[track_caller]
fn check<const COMMITS: bool>(heap: &PageHeap<Simulated<COMMITS>>, grown: usize, free: usize) {
    if let Err(fault) = heap.check() {
        panic!("{fault}");
    }
    let stats = heap.stats();
    assert_eq!((stats.grown.0, stats.free.0), (grown, free), "\n{stats}");
    assert_eq!(
        stats.in_use.0 + stats.cached.0 + stats.free.0,
        stats.grown.0,
        "\n{stats}"
    );
}
