//! Is `None` proved if the turnstile is never calm?

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pageheap::source::Simulated;
use pageheap::{Config, PageCount, PageHeap, PageIndex, PageRun};

use super::common::by_width;

/// Pages of a large heap.
const PAGES: usize = by_width(1 << 20, 1 << 17);

/// K threads, each with at most one page, and K free pages: at every moment a thread that asks could have one. The free
/// pages lie at both ends of an otherwise full heap, so scanning the bits takes a while; other threads keep the
/// turnstile busy with pages of their own.
fn never_refused(askers: usize, noisy: usize, pages: usize) {
    let heap = PageHeap::new(Simulated::new(4096), Config::new(pages << 13)).expect("a heap");
    let all = heap.allocate(PageCount(pages)).expect("room");
    assert_eq!(all.start(), PageIndex(0));
    let page = |index| PageRun::new(PageIndex(index), PageCount(1)).expect("a run");
    for index in 0..askers {
        let at = if index % 2 == 0 {
            700 * index
        } else {
            pages - 1 - 700 * index
        };
        // SAFETY: allocated here.
        unsafe { heap.free(page(at)) };
    }
    let (stop, lies, done) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..askers {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    match heap.allocate(PageCount(1)) {
                        // SAFETY: allocated here.
                        Some(run) => unsafe {
                            done.fetch_add(1, Ordering::Relaxed);
                            heap.free(run);
                        },
                        None => {
                            lies.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        for _ in 0..noisy {
            // Asks for what is never there: these threads are provers too, and do not change what is free.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert!(heap.allocate(PageCount(2)).is_none());
                }
            });
        }
        let until = Instant::now() + super::how_long(8);
        while Instant::now() < until && lies.load(Ordering::Relaxed) == 0 {
            thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(
        lies.load(Ordering::Relaxed),
        0,
        "refused, after {} were served",
        done.into_inner()
    );
}

/// Every second page is free, none is aligned to two, and one comes and goes all the time: each search is long, and
/// none is undisturbed. The answer must come nevertheless (it used to come only when the other threads stopped).
#[test]
fn an_alignment_is_refused_while_others_free() {
    let pages = 1 << 15;
    let heap = PageHeap::new(Simulated::new(4096), Config::new(pages << 13)).expect("a heap");
    heap.allocate(PageCount(pages)).expect("room");
    let page = |index| PageRun::new(PageIndex(index), PageCount(1)).expect("a run");
    assert!(heap.address(PageIndex(0)).addr().get().is_multiple_of(2 << 13));
    for index in (1..pages).step_by(2) {
        // SAFETY: allocated here.
        unsafe { heap.free(page(index)) };
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let run = heap.allocate_at(page(1)).expect("nobody else wants it");
                // SAFETY: allocated here.
                unsafe { heap.free(run.run) };
            }
        });
        for _ in 0..3 {
            assert!(heap.allocate_aligned(PageCount(1), 2 << 13).is_none());
        }
        stop.store(true, Ordering::Relaxed);
    });
    heap.check().expect("an invariant");
}

#[test]
fn few_in_a_large_heap() {
    never_refused(3, 0, PAGES);
}

#[test]
fn eight_in_a_large_heap() {
    never_refused(8, 0, PAGES);
}

#[test]
fn eight_in_a_large_heap_and_noise() {
    never_refused(8, 4, PAGES);
}
