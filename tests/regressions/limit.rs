//! `set_limit` against `allocate_at`: `grow_to` reads the limit twice.

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

trait Grown {
    fn stats_grown(&self) -> usize;
}

impl Grown for PageHeap<Split<Numbers, System>> {
    fn stats_grown(&self) -> usize {
        self.free_set().grown()
    }
}
