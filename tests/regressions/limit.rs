//! Growth to a limit, and beside others: `grow_to` read the limit twice; what the last growth adds is on its way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use pageheap::source::{Numbers, Split, System};
use pageheap::{Config, PageCount, PageHeap, PageIndex, PageRun};

use super::common::{BASE, by_width};
use super::how_long;

/// In a debug build the subtraction in `grow_locked` overflowed; in a release build `grown` fell below pages in use.
#[test]
fn a_heap_never_shrinks() {
    const BYTES: usize = by_width(1 << 38, 1 << 28);
    let until = Instant::now() + how_long(20);
    while Instant::now() < until {
        let source = Split::new(Numbers::new(BASE, 4 * BYTES), System);
        let heap: PageHeap<Split<Numbers, System>> = PageHeap::with_shape(source, Config::new(BYTES)).expect("a heap");
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    heap.set_limit(PageCount(0));
                    heap.set_limit(PageCount(usize::MAX));
                }
            });
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let mut next = 0;
                let mut most = 0;
                while next < heap.capacity().0 {
                    let run = PageRun::new(PageIndex(next), PageCount(1)).expect("a run");
                    if heap.allocate_at(run).is_some() {
                        next += 512;
                    }
                    let grown = heap.stats_grown();
                    assert!(grown >= most, "the heap shrank from {most} to {grown} pages");
                    most = grown;
                }
            }));
            done.store(true, Ordering::Relaxed);
            if let Err(panic) = outcome {
                std::panic::resume_unwind(panic);
            }
        });
    }
}

/// A heap says how far it has grown before all pages up to there are free. Who found nothing between took a heap that
/// was being extended to its limit for a full one.
#[test]
fn nobody_is_refused_for_what_the_last_growth_adds() {
    const BYTES: usize = by_width(1 << 40, 1 << 28);
    let source = Split::new(Numbers::new(BASE, 4 * BYTES), System);
    let heap: PageHeap<Split<Numbers, System>> = PageHeap::with_shape(source, Config::new(BYTES)).expect("a heap");
    let page = |index| PageRun::new(PageIndex(index), PageCount(1)).expect("a run");
    let first = heap.allocate(PageCount(512)).expect("room");
    let over = AtomicBool::new(false);
    let half = thread::scope(|scope| {
        // Somebody frees something all the time: who searches is disturbed each time.
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                // SAFETY: allocated here.
                unsafe { heap.free(page(0)) };
                heap.allocate_at(page(0)).expect("nobody else wants it");
            }
        });
        let growing = scope.spawn(|| heap.allocate_at(page(heap.limit().0 - 1)).expect("room"));
        while heap.stats_grown() <= first.pages().0 && !growing.is_finished() {
            std::hint::spin_loop();
        }
        let half = heap.allocate(PageCount(heap.limit().0 / 2));
        over.store(true, Ordering::Relaxed);
        half
    });
    assert!(half.is_some(), "{}", heap.stats());
}

trait Grown {
    fn stats_grown(&self) -> usize;
}

impl Grown for PageHeap<Split<Numbers, System>> {
    fn stats_grown(&self) -> usize {
        self.free_set().grown()
    }
}
