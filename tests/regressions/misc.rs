//! Contracts.

use pageheap::source::Simulated;
use pageheap::{Config, PageCount, PageHeap, PageIndex};

/// "The run of pages that `bytes` bytes from `address` are, if it begins on a page and lies in the heap."
#[test]
fn run_of_is_as_documented() {
    let heap: PageHeap<Simulated> = PageHeap::new(Simulated::new(4096), Config::new(1 << 24)).expect("a heap");
    let run = heap.allocate(PageCount(2)).expect("room");
    let inside = heap.address(run.start()).as_ptr().wrapping_add(100);
    assert_eq!(heap.run_of(inside, 8192), None, "does not begin on a page");
    assert_eq!(
        heap.run_of(heap.address(PageIndex(1)).as_ptr(), 1 << (usize::BITS - 2)),
        None,
        "does not lie in the heap"
    );
}

/// Tables are placed on granules, and a slot is a cache line.
#[test]
fn a_granule_below_a_cache_line_is_refused() {
    for granule in [1, 4, 8, 32] {
        let heap = PageHeap::<Simulated>::new(Simulated::new(granule), Config::new(1 << 24));
        assert_eq!(heap.err(), Some(pageheap::NewHeapError::Granule));
    }
}

#[test]
fn refusals_count_refusals() {
    let heap: PageHeap<Simulated> = PageHeap::new(Simulated::new(4096), Config::new(64 << 13)).expect("a heap");
    let cache = heap.cache().expect("a cache");
    let run = cache.allocate(PageCount(1)).expect("room");
    // SAFETY: ours.
    unsafe { cache.free(run) };
    // All 64 pages are in this cache: served, after its own flush.
    assert!(cache.allocate(PageCount(64)).is_some());
    assert_eq!(heap.stats().refusals, 0, "nobody was told no");
}
