//! Is `None` proved when the turnstile is never calm?

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pageheap::source::Simulated;
use pageheap::{Config, PageCount, PageHeap, PageIndex, PageRun};

/// K threads, K free pages, each at most one: at every moment one is free for whoever asks. The free pages lie at both
/// ends of a heap that is otherwise full, so that a scan of the bits takes a while; others keep the turnstile busy with
/// pages of their own.
fn never_refused(askers: usize, noisy: usize, pages: usize) {
    let heap: PageHeap<Simulated> = PageHeap::new(Simulated::new(4096), Config::new(pages << 13)).expect("a heap");
    let all = heap.allocate(PageCount(pages)).expect("room");
    assert_eq!(all.start(), PageIndex(0));
    let page = |index| PageRun::new(PageIndex(index), PageCount(1)).expect("a run");
    for index in 0..askers {
        let at = if index % 2 == 0 {
            700 * index
        } else {
            pages - 1 - 700 * index
        };
        // SAFETY: ours.
        unsafe { heap.free(page(at)) };
    }
    let (stop, lies, done) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..askers {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    match heap.allocate(PageCount(1)) {
                        // SAFETY: ours.
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
            // Asks for what there never is: provers of its own, which do not change what is free.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert!(heap.allocate(PageCount(2)).is_none());
                }
            });
        }
        let until = Instant::now() + Duration::from_secs(8);
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

#[test]
fn few_in_a_large_heap() {
    never_refused(3, 0, 1 << 20);
}

#[test]
fn eight_in_a_large_heap() {
    never_refused(8, 0, 1 << 20);
}

#[test]
fn eight_in_a_large_heap_and_noise() {
    never_refused(8, 4, 1 << 20);
}
