//! What idle threads keep.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::Barrier;
use std::thread;

use pageheap::GlobalHeap;
use pageheap::internals::has_fence;

/// Each thread's first page brought a word of 64 pages into its cache. 32 sleeping threads held all of 16 MiB, and
/// nothing could reclaim it.
#[test]
fn idle_threads_do_not_keep_a_small_heap() {
    if !has_fence() {
        // What they keep is out of reach.
        return;
    }
    const THREADS: usize = 48;
    static HEAP: GlobalHeap = GlobalHeap::new().limit(16 << 20);
    let layout = Layout::from_size_align(8, 8).expect("a layout");
    let large = Layout::from_size_align(8 << 20, 8).expect("a layout");
    let barrier = Barrier::new(THREADS + 1);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let pages = Layout::from_size_align(40_000, 8).expect("a layout");
                // SAFETY: no layout here has size zero; each block is freed with the layout it was allocated with.
                unsafe {
                    let (block, run) = (HEAP.alloc(layout), HEAP.alloc(pages));
                    if !run.is_null() {
                        HEAP.dealloc(run, pages);
                    }
                    barrier.wait();
                    barrier.wait();
                    if !block.is_null() {
                        HEAP.dealloc(block, layout);
                    }
                }
            });
        }
        barrier.wait();
        // SAFETY: as above.
        let memory = unsafe { HEAP.alloc(large) };
        let stats = HEAP.stats();
        barrier.wait();
        assert!(!memory.is_null(), "{stats}");
        // SAFETY: as above.
        unsafe { HEAP.dealloc(memory, large) };
    });
}
