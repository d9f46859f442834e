//! Real threads on one heap; each page carries its owner's stamp.
//!
//! Each test runs for one second by default, or for `PAGEHEAP_STRESS_SECONDS` seconds.

mod enough;
mod mixed;
#[path = "../common/random.rs"]
mod random;
mod worker;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pageheap::internals::{Shape, bitmap};
use pageheap::source::Source;
use pageheap::{PageCount, PageHeap, PageRun};

/// When a test ends.
fn deadline() -> Instant {
    let seconds = std::env::var("PAGEHEAP_STRESS_SECONDS").ok();
    let seconds = seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or(1.0);
    Instant::now() + Duration::from_secs_f64(seconds)
}

/// The owner of each page; 0 for none.
#[derive(Debug)]
struct Owners(Vec<AtomicU32>);

impl Owners {
    fn new(pages: usize) -> Self {
        Self((0..pages).map(|_| AtomicU32::new(0)).collect())
    }

    /// Marks the pages, which must be free, as `owner`'s.
    #[track_caller]
    fn take(&self, run: PageRun, owner: u32) {
        self.change(run, 0, owner);
    }

    /// Marks the pages, which must be `owner`'s, as free.
    #[track_caller]
    fn give(&self, run: PageRun, owner: u32) {
        self.change(run, owner, 0);
    }

    #[track_caller]
    fn change(&self, run: PageRun, from: u32, to: u32) {
        for page in run.start().0..run.end().0 {
            let was = self.0[page].swap(to, Ordering::AcqRel);
            assert_eq!(
                was, from,
                "page {page} of {run} goes from {from} to {to}, and was {was}'s"
            );
        }
    }
}

/// No thread is at work and everything was freed: all pages are free, every summary is exact once claims are settled,
/// and the whole heap can be allocated as one run.
#[track_caller]
fn all_is_free<S: Source, G: Shape>(heap: &PageHeap<S, G>, owners: &Owners) {
    heap.flush_shards();
    let sound = |when: &str| {
        if let Err(fault) = heap.check() {
            panic!("{when}: {fault}");
        }
    };
    sound("at the end");
    let set = heap.free_set();
    set.settle();
    sound("settled");
    for chunk in 0..set.grown().div_ceil(G::CHUNK_PAGES) {
        let words: Vec<_> = (chunk * G::CHUNK_WORDS..(chunk + 1) * G::CHUNK_WORDS)
            .map(|word| set.words(word).0)
            .collect();
        assert_eq!(set.summary(G::LEAF, chunk), bitmap::summarize(&words), "chunk {chunk}");
    }
    let stats = heap.stats();
    assert_eq!((stats.free, stats.cached), (stats.grown, PageCount::ZERO), "\n{stats}");
    assert!(owners.0.iter().all(|owner| owner.load(Ordering::Relaxed) == 0));
    if stats.grown.0 > 0 {
        let all = heap.allocate(stats.grown).expect("all of it in one run");
        assert_eq!(all.start().0, 0);
        // SAFETY: the run was just taken, and nothing uses it.
        unsafe { heap.free(all) };
    }
}
