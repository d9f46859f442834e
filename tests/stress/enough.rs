//! Where there is room for everybody, nobody is refused.
//!
//! Each of K threads takes a run of n pages, aligned to n, and puts it back; the heap has room for exactly K of them.
//! There is never a moment at which one is not free for whoever asks, so `None` would be a lie.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use pageheap::source::Simulated;
use pageheap::{Config, PageCount, PageHeap, PageRun};

use super::{Owners, all_is_free, deadline};

/// Threads, pages of a run, and how one is taken.
fn never_refused(threads: usize, pages: usize, take: fn(&PageHeap<Simulated>, usize) -> Option<PageRun>) {
    let deadline = deadline();
    let mut rounds = 0;
    // Heaps begin small, so each has its growth to go through.
    while rounds == 0 || Instant::now() < deadline {
        let size = threads * pages;
        let config = Config::new(size << 13).align(pages << 13);
        let heap: PageHeap<Simulated> = PageHeap::new(Simulated::new(4096), config).expect("a heap");
        let owners = Owners::new(size);
        let (lies, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for me in 1..=threads as u32 {
                let (heap, owners, lies, done) = (&heap, &owners, &lies, &done);
                scope.spawn(move || {
                    for _ in 0..2000 / threads.min(32) {
                        let Some(run) = take(heap, pages) else {
                            lies.fetch_add(1, Ordering::Relaxed);
                            continue;
                        };
                        done.fetch_add(1, Ordering::Relaxed);
                        owners.take(run, me);
                        owners.give(run, me);
                        // SAFETY: the run is ours, and nothing uses it.
                        unsafe { heap.free(run) };
                    }
                });
            }
        });
        let (lies, done) = (lies.into_inner(), done.into_inner());
        assert_eq!(lies, 0, "refused {lies} times, served {done} times, in round {rounds}");
        all_is_free(&heap, &owners);
        rounds += 1;
    }
    println!("{rounds} rounds");
}

fn anywhere(heap: &PageHeap<Simulated>, pages: usize) -> Option<PageRun> {
    heap.allocate(PageCount(pages))
}

fn aligned(heap: &PageHeap<Simulated>, pages: usize) -> Option<PageRun> {
    let allocation = heap.allocate_aligned(PageCount(pages), pages << 13)?;
    Some(allocation.run)
}

#[test]
fn single_pages() {
    never_refused(8, 1, anywhere);
}

#[test]
fn single_pages_of_many() {
    never_refused(64, 1, anywhere);
}

#[test]
fn parts_of_a_word() {
    never_refused(8, 16, aligned);
}

#[test]
fn words() {
    never_refused(8, 64, aligned);
}

#[test]
fn words_of_many() {
    never_refused(64, 64, aligned);
}

#[test]
fn two_words() {
    never_refused(8, 128, aligned);
}

#[test]
fn chunks() {
    never_refused(8, 512, aligned);
}

#[test]
fn chunks_of_many() {
    never_refused(64, 512, aligned);
}

#[test]
fn runs_of_chunks() {
    never_refused(4, 2048, aligned);
}
