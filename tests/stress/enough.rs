//! If there is room for every thread, no thread is refused.
//!
//! Each of K threads takes a run of n pages, aligned to n, and frees it; the heap has room for exactly K of them. At
//! every moment a run is free for a thread that asks, so `None` would be a lie.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use pageheap::internals::Request;
use pageheap::source::Simulated;
use pageheap::{Config, PageCount, PageHeap, PageIndex, PageRun};

use super::random::Random;
use super::{Owners, all_is_free, deadline};

/// Number of threads, pages of a run, and how to take one.
fn never_refused(threads: usize, pages: usize, take: fn(&PageHeap<Simulated>, usize) -> Option<PageRun>) {
    let deadline = deadline();
    let mut rounds = 0;
    // Heaps begin small, so each round also tests growth.
    while rounds == 0 || Instant::now() < deadline {
        let size = threads * pages;
        let config = Config::new(size << 13).align(pages << 13);
        let heap = PageHeap::new(Simulated::new(4096), config).expect("a heap");
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

/// As many free pages as threads, far apart in an otherwise full heap: a search takes so long that pages behind it are
/// freed, and pages before it taken.
fn far_apart(threads: usize, distance: usize) {
    let size = threads * distance;
    let heap = PageHeap::new(Simulated::new(4096), Config::new(size << 13)).expect("a heap");
    heap.allocate(PageCount(size)).expect("all of it");
    for step in 0..threads {
        let hole = PageRun::new(PageIndex(step * distance + distance / 2), PageCount(1)).expect("a run");
        // SAFETY: part of our own run, and not in use.
        unsafe { heap.free(hole) };
    }
    let (heap, owners, deadline) = (&heap, &Owners::new(size), deadline());
    let served: usize = thread::scope(|scope| {
        let workers: Vec<_> = (1..=threads as u32)
            .map(|me| scope.spawn(move || take_and_give(heap, owners, deadline, me)))
            .collect();
        let served = workers.into_iter().map(|worker| worker.join().expect("never refused"));
        served.sum()
    });
    println!("served {served} times");
    heap.check().unwrap_or_else(|fault| panic!("{fault}"));
}

/// Takes a page, keeps it for a moment, frees it. Returns how often.
fn take_and_give(heap: &PageHeap<Simulated>, owners: &Owners, deadline: Instant, me: u32) -> usize {
    let (mut served, mut random) = (0, Random(u64::from(me)));
    while served % 64 != 0 || Instant::now() < deadline {
        // Asks the set itself, since the heap would ask twice.
        let Some(claim) = heap.free_set().claim(&Request::of(1)) else {
            panic!("refused after {served}\n{}", heap.stats());
        };
        let page = PageRun::new(PageIndex(claim.start), PageCount(1)).expect("a run");
        owners.take(page, me);
        (0..random.below(400)).for_each(|_| std::hint::spin_loop());
        if random.below(50) == 0 {
            thread::yield_now();
        }
        owners.give(page, me);
        // SAFETY: the page is ours, and nothing uses it.
        unsafe { heap.free(page) };
        served += 1;
    }
    served
}

#[test]
fn pages_far_apart() {
    far_apart(8, 1 << 15);
}

#[test]
fn pages_apart() {
    far_apart(3, 512);
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
